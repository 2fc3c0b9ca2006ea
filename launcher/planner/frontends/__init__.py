"""What stands before the workers of a serving job, one file for each kind. Pure."""

from launcher.planner.frontends.base import Frontend
from launcher.planner.frontends.custom import Custom
from launcher.planner.frontends.dynamo import Dynamo
from launcher.planner.frontends.sglang_router import SglangRouter
from launcher.planner.frontends.vllm import Vllm

FRONTENDS: dict[str, Frontend] = {frontend.name: frontend for frontend in (SglangRouter(), Dynamo(), Vllm(), Custom())}
