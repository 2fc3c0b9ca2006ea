"""What a front end answers about itself, and what front ends share. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.jobfile.serving import FrontendSpec
from launcher.planner.backends.base import DISAGGREGATED, PREFILL, BackendContext, BackendWorker


@dataclass(frozen=True)
class InfraService:
    """A service that front end and workers need before they start."""

    name: str
    ports: tuple[str, ...]


class Frontend:
    """How the processes of one kind of front end are run."""

    name: str
    readiness: str  # kind of the rule by which it tells which workers it knows
    backends: tuple[str, ...]  # backends whose workers it can stand before; `command` is whatever the user says
    ports: tuple[str, ...] = ()  # ports that a process needs beside that for its clients
    infra: tuple[InfraService, ...] = ()
    own_process = True  # whether it is a process of its own, and not the worker itself

    def problems(self, setting: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        """What of the job does not fit this front end, each with place, value and cure."""
        return []

    def words(self, setting: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        """The command of one process with placeholders; ``{http_port}`` is where it listens."""
        raise NotImplementedError

    def metrics(self) -> str | None:
        """Where it serves metrics of its own, as ``TaskPlan.metrics``."""
        return None


def workers_by_mode(
    workers: Sequence[BackendWorker],
) -> tuple[list[BackendWorker], list[BackendWorker], list[BackendWorker]]:
    """Workers for prefill, for decode, and those that do both."""
    prefill = [worker for worker in workers if worker.role.name == PREFILL]
    decode = [worker for worker in workers if worker.role.name in DISAGGREGATED and worker.role.name != PREFILL]
    return prefill, decode, [worker for worker in workers if worker.role.name not in DISAGGREGATED]


def frontend_of(setting: BackendContext) -> FrontendSpec:
    """The front end of a job that has one."""
    found = setting.spec.frontend
    if found is None:
        raise ValueError("the job has no front end")
    return found


def worker_url_variables(setting: BackendContext, workers: Sequence[BackendWorker]) -> dict[str, str]:
    """Variables that tell a program of the user where the workers listen; those of dynamo do not, they register."""
    if setting.dynamo:
        return {}
    names = ("GPUJOB_PREFILL_URLS", "GPUJOB_DECODE_URLS", "GPUJOB_WORKER_URLS")
    return {
        name: ",".join(worker.url() for worker in group)
        for name, group in zip(names, workers_by_mode(workers), strict=True)
        if group and all("http" in worker.ports for worker in group)
    }
