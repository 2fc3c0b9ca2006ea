"""Programs that workers run: how to run each kind. Pure."""

from launcher.planner.backends.base import Backend
from launcher.planner.backends.command import CommandBackend
from launcher.planner.backends.launched import AccelerateBackend, DeepspeedBackend, MpiBackend, TorchrunBackend
from launcher.planner.backends.sglang import SglangBackend
from launcher.planner.backends.trtllm import TrtllmBackend
from launcher.planner.backends.vllm import VllmBackend

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        *(CommandBackend(), TorchrunBackend(), AccelerateBackend(), DeepspeedBackend(), MpiBackend()),
        *(SglangBackend(), VllmBackend(), TrtllmBackend()),
    )
}
