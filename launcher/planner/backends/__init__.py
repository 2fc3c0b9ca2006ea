"""Programs that workers run, one module for each backend. Pure."""

from launcher.planner.backends.accelerate import AccelerateBackend
from launcher.planner.backends.base import Backend
from launcher.planner.backends.command import CommandBackend
from launcher.planner.backends.deepspeed import DeepspeedBackend
from launcher.planner.backends.mpi import MpiBackend
from launcher.planner.backends.sglang import SglangBackend
from launcher.planner.backends.torchrun import TorchrunBackend
from launcher.planner.backends.trtllm import TrtllmBackend
from launcher.planner.backends.vllm import VllmBackend

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        CommandBackend(),
        TorchrunBackend(),
        AccelerateBackend(),
        DeepspeedBackend(),
        MpiBackend(),
        SglangBackend(),
        VllmBackend(),
        TrtllmBackend(),
    )
}
