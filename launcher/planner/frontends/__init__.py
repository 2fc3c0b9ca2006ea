"""Front ends of a serving job, one module for each kind. Pure."""

from launcher.planner.frontends.base import Frontend
from launcher.planner.frontends.custom import CustomFrontend
from launcher.planner.frontends.dynamo import DynamoFrontend
from launcher.planner.frontends.sglang_router import SglangRouterFrontend
from launcher.planner.frontends.vllm import VllmFrontend

FRONTENDS: dict[str, Frontend] = {
    frontend.name: frontend for frontend in (SglangRouterFrontend(), DynamoFrontend(), VllmFrontend(), CustomFrontend())
}
