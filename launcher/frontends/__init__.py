"""What stands before the workers of a serving job, one file for each kind. Pure."""

from launcher.frontends.base import Frontend
from launcher.frontends.custom import Custom
from launcher.frontends.dynamo import Dynamo
from launcher.frontends.sglang_router import SglangRouter
from launcher.frontends.vllm import Vllm

FRONTENDS: dict[str, Frontend] = {frontend.name: frontend for frontend in (SglangRouter(), Dynamo(), Vllm(), Custom())}
