"""Resources of a job: nodes, GPUs, and the workers on them."""

import re
import shlex
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema, model_validator

from launcher.jobfile.value_types import FileModel, NotNegativeSeconds, Variables, check_entry
from launcher.plan.plan import DECODE, PREFILL

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_GPU_TYPE = re.compile(r"[\w.+-]+", re.ASCII)
_MEMORY = re.compile(r"^\d+[KMGT]?$", re.ASCII)


def _memory_problem(text: str) -> str | None:
    return None if _MEMORY.fullmatch(text) else f"{text!r} is not a size; write a whole number with K, M, G or T: 64G"


# the pattern is for editors
MemorySize = Annotated[
    str, check_entry(_memory_problem), WithJsonSchema({"type": "string", "pattern": _MEMORY.pattern})
]


def _gpu_type_problem(text: str) -> str | None:
    if _GPU_TYPE.fullmatch(text):
        return None
    return f"{text!r} is not a type of GPU; write it as in Gres of `scontrol show node`: h100, or 1g.10gb"


GpuType = Annotated[str, check_entry(_gpu_type_problem)]

SERVING_ROLES = (PREFILL, DECODE, "agg")  # roles that `resources` may count, in order of placement


class ResourcesSpec(FileModel):
    """Nodes, and what the job requests on each of them."""

    nodes: int | None = Field(None, ge=1, le=100_000)
    gpus_per_node: int = Field(0, ge=0, le=64)
    gpu_type: GpuType | None = None
    cpus_per_node: int | None = Field(None, ge=1)
    memory_per_node: MemorySize | None = None

    prefill_workers: int | None = Field(None, ge=0, le=100_000)
    decode_workers: int | None = Field(None, ge=0, le=100_000)
    agg_workers: int | None = Field(None, ge=0, le=100_000)
    gpus_per_prefill: int | None = Field(None, ge=0)
    gpus_per_decode: int | None = Field(None, ge=0)
    gpus_per_agg: int | None = Field(None, ge=0)
    prefill_nodes: int | None = Field(None, ge=0, le=100_000)
    decode_nodes: int | None = Field(None, ge=0, le=100_000)
    agg_nodes: int | None = Field(None, ge=0, le=100_000)
    spread_workers: bool = False
    colocate_prefill_decode: bool = False
    process_granularity: Literal["node", "gpu"] | None = None
    infra_node: bool = False
    frontend_node: bool = False
    client_node: bool = False


class RestartSpec(FileModel):
    """Restarts of a worker that fails."""

    max: int = Field(0, ge=0, le=1000)
    backoff: NotNegativeSeconds = 10.0


def _role_problem(role: str) -> str | None:
    if _ROLE.fullmatch(role):
        return None
    return f"{role!r} is not a role name; use a letter and then letters, digits, - or _, at most 32 characters"


class RoleSpec(FileModel):
    """One role: ``count`` workers that run the same command."""

    role: Annotated[str, check_entry(_role_problem)] = "worker"
    count: int | None = Field(None, ge=0, le=100_000)
    gpus: int | None = Field(None, ge=0)
    cpus: int | None = Field(None, ge=1)
    command: str | list[str] | None = None
    shell: bool = False
    env: Variables = {}
    critical: bool = True
    restart: RestartSpec = RestartSpec()
    container: bool = True
    service: bool | None = None

    @model_validator(mode="after")
    def _words(self) -> "RoleSpec":
        if self.command is None:
            return self
        if self.shell and not isinstance(self.command, str):
            raise ValueError("command: with `shell: true` the command must be one text, not a list")
        try:
            words = command_argv(self)
        except ValueError as error:
            raise ValueError(f'command: "{self.command}" cannot be split into words: {error}') from error
        if not words or not words[0] or not "".join(words[-1:] if self.shell else words).strip():
            raise ValueError("command: the command is empty")
        return self


def command_argv(workers: RoleSpec) -> list[str]:
    """The command as words, with placeholders."""
    if workers.command is None:
        return []
    if isinstance(workers.command, list):
        return list(workers.command)
    return ["bash", "-c", workers.command] if workers.shell else list(_split_argv(workers.command))


@lru_cache(maxsize=64)
def _split_argv(text: str) -> tuple[str, ...]:
    """Split a text as a shell does; cached, because all workers of a role share it."""
    return tuple(shlex.split(text))
