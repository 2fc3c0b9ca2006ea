"""A Slurm for tests of the hub: its queue and accounting are what the test says."""

from collections.abc import Callable, Mapping, Sequence

from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import ClusterFacts, SlurmReader, SlurmUnansweredError
from exporter.slurm.diagnostics import Diagnostics, RpcUse
from exporter.slurm.nodes import NodeRow
from exporter.slurm.queue import AttemptSnapshot, QueueRow

GPU_TRES = "cpu=4,mem=600M,node=1,gres/gpu=4"


def queue_row(job_id: str, state: str, submitted: float = 100.0, *, restarts: int = 0, **times: float) -> QueueRow:
    """A row of ada's job, whose times are ``started`` and ``ended``."""
    snapshot = AttemptSnapshot(state, submitted, times.get("started"), times.get("ended"), restarts, None, 300.0)
    return QueueRow(job_id, snapshot, "job", "/out/log", "gpu", GPU_TRES, "ada", "lab", "normal", 1, "n1")


def attempt(job_id: str, state: str, submitted: float, started: float | None, ended: float | None) -> Attempt:
    """An attempt of ada's job."""
    elapsed_s = (ended or 0.0) - (started or 0.0)
    return Attempt(job_id, "ada", "job", AttemptSnapshot(state, submitted, started, ended), "0:0", elapsed_s, 4, 600.0)


class MadeUpSlurm(SlurmReader):
    """Answers with what it is given. None is no answer."""

    def __init__(self) -> None:
        super().__init__(None, None, {})
        self.rows: Sequence[QueueRow] | None = ()
        self.has_accounting = True
        self.controller_time: Callable[[], float] = lambda: 0.0
        self.asked_for_load = 0
        self.missed: Sequence[QueueRow] = ()  # jobs that only accounting knows
        self.asked_for_missed: list[float] = []
        self.attempts: Sequence[Attempt] | None = ()
        self.asked: list[tuple[str, ...]] = []  # questions to accounting
        self.polls = 0
        self.facts: ClusterFacts | None = ClusterFacts("c1", False)
        self.facts_asked = 0
        self.node_rows: Sequence[NodeRow] = ()

    def cluster_facts(self) -> ClusterFacts:
        self.facts_asked += 1
        if self.facts is None:
            raise SlurmUnansweredError("scontrol", "exited with 1: Unable to contact slurm controller")
        return self.facts

    def queue(self) -> tuple[QueueRow, ...]:
        self.polls += 1
        if self.rows is None:
            raise SlurmUnansweredError("squeue", "exited with 1: Socket timed out")
        return tuple(self.rows)

    def ended_since(self, since: float) -> tuple[QueueRow, ...]:
        self.asked_for_missed.append(since)
        if not self.has_accounting:
            raise SlurmUnansweredError("sacct", "exited with 1: Slurm accounting storage is disabled")
        return tuple(self.missed)

    def diagnostics(self) -> Diagnostics:
        self.asked_for_load += 1
        return Diagnostics(self.controller_time(), 1, 0, 0, RpcUse(9, 0.1), RpcUse(1, 0.0))

    def nodes(self) -> tuple[NodeRow, ...]:
        return tuple(self.node_rows)

    def accounting(self, job_ids: Sequence[str], since: float) -> tuple[Attempt, ...]:
        self.asked.append(tuple(job_ids))
        if self.attempts is None:
            raise SlurmUnansweredError("sacct", "did not answer in 30 s")
        return tuple(self.attempts)


def states(changes: Sequence[Mapping[str, object]]) -> list[tuple[object, object, object]]:
    """Job, previous and new state of changes as the API tells them."""
    return [(change["job_id"], change["previous"], change["state"]) for change in changes]
