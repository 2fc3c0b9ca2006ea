"""Slurm end query: whether Slurm is ending the job, why, and when it kills the tasks."""

import time
from collections.abc import Callable

from launcher.run.job_state import JobState
from launcher.run.signals import OrchestratorSignals
from launcher.steps.steps import ExternalEnd, Steps

NOTICE_GRACE_S = 3.0  # after a signal to a worker, wait this long for the signal to this process
ANNOUNCED_GRACE_S = 10.0  # this wait if Slurm may be ending the job for an unknown reason
ASK_AFTER_S, ASK_AGAIN_S = 0.5, 1.0  # wait for the signal to this process before the first query, and between queries
SIGNAL_LATE_S = 90.0  # after the end of a grace time: slurmctld checks every 30 s


class SlurmEndQuery:
    """Asks Slurm, keeps the answer, and stops the job accordingly."""

    def __init__(
        self, steps: Steps, course: JobState, signals: OrchestratorSignals, asked_since: Callable[[], float | None]
    ) -> None:
        """``asked_since`` returns the earliest signal to a worker whose end lacks a confirmed reason."""
        self.ends_by_itself = False  # whether Slurm ends all tasks without us
        self.signal_by: float | None = None  # how long this process must wait for an announced signal, epoch seconds
        self._steps = steps
        self._course = course
        self._signals = signals
        self._asked_since = asked_since
        self._answer = ExternalEnd()
        self._asked_at = 0.0
        self._again_at: float | None = None  # next query whether Slurm ends all tasks, monotonic clock

    @property
    def is_being_ended(self) -> bool:
        """Whether Slurm has confirmed that it ends the job."""
        return self._answer.by_itself

    @property
    def kills_soon(self) -> bool:
        """Whether KillWait is running according to Slurm, without a grace time before it."""
        return self.ends_by_itself and self.signal_by is None

    @property
    def grace_s(self) -> float:
        """How long a worker ended by an outside signal waits for its reason."""
        return ANNOUNCED_GRACE_S if self._answer.may_end_all else NOTICE_GRACE_S

    def has_asked_since(self, moment: float) -> bool:
        """Whether Slurm was asked at or after this time of the monotonic clock."""
        return self._asked_at >= moment

    def ask(self) -> ExternalEnd:
        """Ask Slurm."""
        ending = self._steps.ending()
        self._asked_at = time.monotonic()
        return ending

    def ask_why(self) -> None:
        """Ask why a worker ended, and stop the job if Slurm gives a reason."""
        self._answer = self.ask()
        if self._answer.reason is not None or self._answer.failed_nodes:
            self.stop_for(self._answer, "")

    def ask_which_node(self) -> None:
        """Ask for the name of a failed node, which may arrive after the failure itself."""
        stop = self._course.stop or {}
        if stop.get("reason") != "node_failure" or stop.get("nodes"):
            return
        ending = self.ask()
        if ending.failed_nodes:
            self._course.name_nodes(*_of_nodes(ending), ending.failed_nodes)

    def ask_again(self) -> None:
        """Repeat a query that was not answered. If Slurm does not end the tasks, let the orchestrator do it."""
        if self._again_at is None or time.monotonic() < self._again_at or not self._course.has_time:
            return
        ending = self.ask()
        if ending.reason is not None:
            self.stop_for(ending, "")
            return
        self.note(ending)
        if not self.ends_by_itself:
            self._course.ask = not self._course.asked

    def note(self, ending: ExternalEnd) -> None:
        """Record whether Slurm ends all tasks. Without an answer, assume that it may, and ask again."""
        self.ends_by_itself = ending.may_end_all
        self._again_at = time.monotonic() + ASK_AGAIN_S if ending.unanswered else None

    def stop_for(self, ending: ExternalEnd, how: str) -> None:
        """Stop the job for the reason that Slurm gave."""
        announced = ending.ends_at is not None and self._signals.ending is None
        self.signal_by = (ending.ends_at or 0.0) + SIGNAL_LATE_S if announced else None
        self.note(ending)
        reason, cause = _of_nodes(ending)
        self._course.begin_stop(
            reason,
            cause + how,
            {"nodes": list(ending.failed_nodes)} if ending.failed_nodes else None,
            ask=not self.ends_by_itself,
            ended_in_s=max(0.0, (ending.ends_at or 0.0) - time.time()) if self.ends_by_itself else None,
            since=self._asked_since(),
        )


def _of_nodes(ending: ExternalEnd) -> tuple[str, str]:
    """Reason and cause of a stop: tasks on other nodes end because of the failed node."""
    nodes = ", ".join(ending.failed_nodes)
    reason = ending.reason or "node_failure"
    if reason == "node_failure" and nodes:
        reason = "terminated_peer"
    return reason, ending.cause or f"node {nodes} has failed"
