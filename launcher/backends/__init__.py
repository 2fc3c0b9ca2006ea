"""What the workers run, one file for each kind. Pure."""

from launcher.backends.accelerate import Accelerate
from launcher.backends.base import Backend
from launcher.backends.command import Command
from launcher.backends.deepspeed import Deepspeed
from launcher.backends.mpi import Mpi
from launcher.backends.sglang import Sglang
from launcher.backends.torchrun import Torchrun
from launcher.backends.trtllm import Trtllm
from launcher.backends.vllm import Vllm

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (Command(), Torchrun(), Accelerate(), Deepspeed(), Mpi(), Sglang(), Vllm(), Trtllm())
}
