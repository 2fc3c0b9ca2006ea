"""Slurm end query: whether Slurm is ending the job, why, and when it kills the tasks."""

import time
from collections.abc import Callable, Mapping, Sequence

from exporter.contract.status import WorkerEnd
from launcher.run.job_log import log_line
from launcher.run.job_state import JobRun, Stop
from launcher.steps.steps import ExternalEnd

NOTICE_GRACE_S = 3.0  # after a signal to a worker, wait this long for the signal to this process
ANNOUNCED_GRACE_S = 10.0  # this wait if Slurm may be ending the job for an unknown reason
QUERY_AFTER_S = 0.5  # wait for the signal to this process before the first query
QUERY_INTERVAL_S = 1.0
SIGNAL_LATE_S = 90.0  # after the end of a grace time: slurmctld checks every 30 s


class SlurmEndQuery:
    """Asks Slurm, keeps the answer, and stops the job accordingly."""

    def __init__(
        self, job: JobRun, first_signalled_at: Callable[[], float | None], ends: Mapping[int, WorkerEnd]
    ) -> None:
        """``first_signalled_at`` returns the earliest signal to a worker whose end lacks a confirmed reason.

        ``ends`` has the last end of each task so far, by rank.
        """
        self.failed_nodes: tuple[str, ...] = ()  # without which the job continues
        self.is_left_to_slurm = False  # whether Slurm ends all tasks without us
        # how long this process must wait for an announced signal, epoch seconds
        self.signal_deadline: float | None = None
        self._steps, self._job_state, self._signals = job.steps, job.state, job.signals
        self._plan, self._facts = job.plan, job.facts
        self._first_signalled_at, self._ends = first_signalled_at, ends
        self._answer = ExternalEnd()
        self._queried_at = 0.0
        self._next_query_at: float | None = None  # next query whether Slurm ends all tasks, monotonic clock

    @property
    def is_being_ended(self) -> bool:
        """Whether Slurm has confirmed that it ends the job."""
        return self._answer.ends_all

    @property
    def is_kill_wait_running(self) -> bool:
        """Whether KillWait is running according to Slurm, without a grace time before it."""
        return self.is_left_to_slurm and self.signal_deadline is None

    @property
    def grace_s(self) -> float:
        """How long a worker ended by an outside signal waits for its reason."""
        return ANNOUNCED_GRACE_S if self._answer.may_end_all else NOTICE_GRACE_S

    def has_queried_since(self, start: float) -> bool:
        """Whether Slurm was asked at or after this time of the monotonic clock."""
        return self._queried_at >= start

    def query(self) -> ExternalEnd:
        """Ask Slurm."""
        external_end = self._steps.query_end()
        self._queried_at = time.monotonic()
        return external_end

    def query_reason(self) -> None:
        """Ask why a worker ended, and stop the job if Slurm gives a reason, or if the job needs a node that failed.

        After the failure of a node Slurm ends the job, unless it was submitted with `no-kill`.
        """
        self._answer = self.query()
        nodes = tuple(node for node in self._answer.failed_nodes if node not in self.failed_nodes)
        if self._answer.reason is not None or (nodes and (self._answer.may_end_all or self._needs_any(nodes))):
            self.stop_job(self._answer, "")
        elif nodes:
            self.failed_nodes += nodes
            log_line(f"Node {', '.join(nodes)} has failed: the job continues without its workers there")
            self._job_state.events.write("nodes failed", nodes=list(nodes))

    def _needs_any(self, nodes: Sequence[str]) -> bool:
        """Whether a critical task that has not completed belongs on one of these nodes."""
        return any(
            planned.critical
            and self._facts.hosts[planned.task.node_index] in nodes
            and ((end := self._ends.get(planned.task.rank)) is None or end.reason != "completed")
            for planned in self._plan.tasks
        )

    def node_stop(self, host: str) -> Stop | None:
        """The stop of a task on a failed node without which the job continues; None on other nodes."""
        if host not in self.failed_nodes:
            return None
        return Stop("terminated_peer", f"node {host} has failed", time.time(), nodes=(host,))

    def query_failed_node(self) -> None:
        """Ask for the name of a failed node, which may arrive after the failure itself."""
        stop = self._job_state.stop
        if stop is None or stop.reason != "node_failure" or stop.nodes:
            return
        external_end = self.query()
        if external_end.failed_nodes:
            self._job_state.add_failed_nodes(*_stop_reason_and_cause(external_end), external_end.failed_nodes)

    def query_again(self) -> None:
        """Repeat a query that was not answered. If Slurm does not end the tasks, let the orchestrator do it."""
        if (
            self._next_query_at is None
            or time.monotonic() < self._next_query_at
            or not self._job_state.has_time_for_query
        ):
            return
        external_end = self.query()
        if external_end.reason is not None:
            self.stop_job(external_end, "")
            return
        self.record(external_end)
        if not self.is_left_to_slurm:
            self._job_state.is_sigterm_due = not self._job_state.is_sigterm_sent

    def record(self, external_end: ExternalEnd) -> None:
        """Record whether Slurm ends all tasks. Without an answer, assume that it may, and ask again."""
        self.is_left_to_slurm = external_end.may_end_all
        self._next_query_at = time.monotonic() + QUERY_INTERVAL_S if external_end.is_unanswered else None

    def stop_job(self, external_end: ExternalEnd, suffix: str) -> None:
        """Stop the job for the reason that Slurm gave."""
        announced = external_end.grace_ends_at is not None and self._signals.end_signal is None
        self.signal_deadline = (external_end.grace_ends_at or 0.0) + SIGNAL_LATE_S if announced else None
        self.record(external_end)
        reason, cause = _stop_reason_and_cause(external_end)
        self._job_state.begin_stop(
            reason,
            cause + suffix,
            {"nodes": external_end.failed_nodes},
            send_sigterm=not self.is_left_to_slurm,
            kill_wait_in_s=max(0.0, (external_end.grace_ends_at or 0.0) - time.time())
            if self.is_left_to_slurm
            else None,
            signalled_at=self._first_signalled_at(),
        )


def _stop_reason_and_cause(external_end: ExternalEnd) -> tuple[str, str]:
    """Reason and cause of a stop: tasks on other nodes end because of the failed node."""
    nodes = ", ".join(external_end.failed_nodes)
    reason = external_end.reason or "node_failure"
    if reason == "node_failure" and nodes:
        reason = "terminated_peer"
    return reason, external_end.cause or f"node {nodes} has failed"
