"""The registry of backends: what the job file knows of each kind of program that runs workers.

The class of each kind is in ``launcher.planner.backends.BACKENDS``.
"""

from typing import Literal

from exporter.contract.lazy_dataclass import dataclass


@dataclass(frozen=True)
class BackendKind:
    """Properties of a kind that are needed without its class."""

    granularity: Literal["node", "gpu"] = "node"  # default: one process per node of a worker, or per GPU
    is_engine: bool = False  # a serving engine, which supplies the command of its workers
    is_group: bool = False  # the processes of a worker are one distributed program


BACKEND_KINDS = {
    "command": BackendKind(),
    "torchrun": BackendKind(is_group=True),
    "accelerate": BackendKind(is_group=True),
    "deepspeed": BackendKind("gpu", is_group=True),
    "mpi": BackendKind("gpu", is_group=True),
    "sglang": BackendKind(is_engine=True),
    "vllm": BackendKind(is_engine=True),
    "trtllm": BackendKind("gpu", is_engine=True),
}
ENGINES = tuple(name for name, kind in BACKEND_KINDS.items() if kind.is_engine)
