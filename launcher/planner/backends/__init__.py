"""What the workers run, one file for each kind. Pure."""

from launcher.planner.backends.accelerate import Accelerate
from launcher.planner.backends.base import Backend
from launcher.planner.backends.command import Command
from launcher.planner.backends.deepspeed import Deepspeed
from launcher.planner.backends.mpi import Mpi
from launcher.planner.backends.sglang import Sglang
from launcher.planner.backends.torchrun import Torchrun
from launcher.planner.backends.trtllm import Trtllm
from launcher.planner.backends.vllm import Vllm

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (Command(), Torchrun(), Accelerate(), Deepspeed(), Mpi(), Sglang(), Vllm(), Trtllm())
}
