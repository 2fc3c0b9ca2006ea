"""Resources of a job: nodes, GPUs, and the workers on them."""

import re
import shlex
from functools import lru_cache
from typing import Literal

from pydantic import Field, field_validator, model_validator

from launcher.jobfile.value_types import FileModel, NotNegativeSeconds, Variables
from launcher.plan.plan import DECODE, PREFILL

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_MEMORY = re.compile(r"^\d+[KMGT]?$")


SERVING_ROLES = (PREFILL, DECODE, "agg")  # roles that `resources` may count, in order of placement


class ResourcesSpec(FileModel):
    """Nodes, and what the job requests on each of them."""

    nodes: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Nodes of the job, reserved ones included; by default as few as its workers need.",
    )
    gpus_per_node: int = Field(0, ge=0, le=64, description="GPUs asked for on each node.")
    cpus_per_node: int | None = Field(
        None,
        ge=1,
        description="CPUs asked for on each node; by default those of its workers and one more, or all CPUs of a node "
        "if the job takes all its GPUs and the cluster file has cpus_per_node.",
    )
    memory_per_node: str | None = Field(
        None, pattern=_MEMORY.pattern, description='Memory asked for on each node, for example "64G".'
    )

    prefill_workers: int | None = Field(None, ge=0, le=100_000)
    decode_workers: int | None = Field(None, ge=0, le=100_000)
    agg_workers: int | None = Field(None, ge=0, le=100_000, description="Workers that do both prefill and decode.")
    gpus_per_prefill: int | None = Field(None, ge=0, description="GPUs of one prefill worker.")
    gpus_per_decode: int | None = Field(None, ge=0)
    gpus_per_agg: int | None = Field(None, ge=0)
    prefill_nodes: int | None = Field(None, ge=0, le=100_000, description="Nodes that prefill workers fill.")
    decode_nodes: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="Nodes that decode workers fill; 0: they share those of prefill, and both have equal sizes.",
    )
    agg_nodes: int | None = Field(None, ge=0, le=100_000)
    spread_workers: bool = Field(False, description="Whether a worker that is smaller than a node gets its own node.")
    colocate_prefill_decode: bool = Field(
        False, description="Whether decode workers may start on a node that prefill left partly used."
    )
    process_granularity: Literal["node", "gpu"] | None = Field(
        None, description="One process for each node of a worker, or for each GPU; by default what the backend needs."
    )
    infra_node: bool = Field(False, description="Whether services such as etcd have their own node.")
    frontend_node: bool = Field(False, description="Whether front ends have their own node.")
    client_node: bool = Field(False, description="Whether the benchmark has its own node.")


class RestartSpec(FileModel):
    """Restarts of a worker that fails."""

    max: int = Field(0, ge=0, le=1000, description="How many times a worker is restarted.")
    backoff: NotNegativeSeconds = Field(10.0, description="Seconds before a restart, longer each time.")


class RoleSpec(FileModel):
    """One role: ``count`` workers that run the same command."""

    role: str = Field("worker", description="Name of the role; its workers are ROLE_w0, ROLE_w1, ...")
    count: int | None = Field(
        None, ge=0, le=100_000, description="Workers of the role; by default the count in `resources`, else 1."
    )
    gpus: int | None = Field(
        None,
        ge=0,
        description="GPUs of one worker; more than a node has means whole nodes; by default the size in `resources`.",
    )
    cpus: int | None = Field(
        None,
        ge=1,
        description="CPUs of one process; by default one for each of its GPUs, and one at least.",
    )
    command: str | list[str] | None = Field(
        None,
        description="Words as a list, or one text that is split into words like a shell does, without a shell; "
        "by default that of the backend.",
    )
    shell: bool = Field(False, description="Run the command, which must be one text, with `bash -c`.")
    env: Variables = Field({}, description="Environment of the worker, after that of the job.")
    critical: bool = Field(True, description="Whether the failure of one ends the job.")
    restart: RestartSpec = RestartSpec()
    container: bool = Field(True, description="Whether its workers run in the job's container, where there is one.")
    service: bool | None = Field(
        None, description="Whether a worker serves until the job ends, so that an earlier end is a failure."
    )

    @field_validator("role")
    @classmethod
    def _role(cls, role: str) -> str:
        if not _ROLE.fullmatch(role):
            raise ValueError(
                f"{role!r} is not a role name; use a letter and then letters, digits, - or _, at most 32 characters"
            )
        return role

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
