"""Interface of a front end, and helpers that front ends share. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.jobfile.serving import FrontendSpec
from launcher.planner.backends.base import DISAGGREGATED, PREFILL, BackendContext, BackendWorker


@dataclass(frozen=True)
class InfraService:
    """A service that the front end and the workers need before they start."""

    name: str
    ports: tuple[str, ...]


class Frontend:
    """How to run the processes of one kind of front end."""

    name: str
    readiness: str  # kind of readiness rule that asks it for its workers
    backends: tuple[str, ...]  # backends whose workers it can serve; `command` is any program of the user
    ports: tuple[str, ...] = ()  # in addition to the port for its clients
    infra: tuple[InfraService, ...] = ()
    has_own_process = True  # False: a worker serves clients itself

    def problems(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        """Parts of the job that do not suit this front end, each with place, value and fix."""
        return []

    def argv(self, context: BackendContext, workers: Sequence[BackendWorker]) -> list[str]:
        """Command of one process, with placeholders. It listens on ``{http_port}``."""
        raise NotImplementedError

    def metrics(self) -> str | None:
        """Location of its own metrics, as in ``TaskPlan.metrics``."""
        return None


def workers_by_mode(
    workers: Sequence[BackendWorker],
) -> tuple[list[BackendWorker], list[BackendWorker], list[BackendWorker]]:
    """Workers for prefill, workers for decode, and workers that do both."""
    prefill = [worker for worker in workers if worker.role.name == PREFILL]
    decode = [worker for worker in workers if worker.role.name in DISAGGREGATED and worker.role.name != PREFILL]
    return prefill, decode, [worker for worker in workers if worker.role.name not in DISAGGREGATED]


def job_frontend(context: BackendContext) -> FrontendSpec:
    """The front end of a job that is known to have one."""
    found = context.spec.frontend
    if found is None:
        raise ValueError("the job has no front end")
    return found


def worker_url_variables(context: BackendContext, workers: Sequence[BackendWorker]) -> dict[str, str]:
    """Variables with the URLs of the workers, for a user's program; empty with dynamo, where workers register."""
    if context.uses_dynamo:
        return {}
    names = ("GPUJOB_PREFILL_URLS", "GPUJOB_DECODE_URLS", "GPUJOB_WORKER_URLS")
    return {
        name: ",".join(worker.url() for worker in group)
        for name, group in zip(names, workers_by_mode(workers), strict=True)
        if group and all("http" in worker.ports for worker in group)
    }
