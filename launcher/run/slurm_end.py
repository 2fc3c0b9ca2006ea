"""What the place of a job says of its end: whether it ends all tasks by itself, why, and until when they have time."""

import time
from collections.abc import Callable

from launcher.run.job_state import JobState
from launcher.run.signals import OrchestratorSignals
from launcher.steps.steps import ExternalEnd, Steps

NOTICE_GRACE_S = 3.0  # an end by a signal from outside gets this long for the signal to reach this process too
ANNOUNCED_GRACE_S = 10.0  # the same, where the place may be ending the job and has not said why
ASK_AFTER_S, ASK_AGAIN_S = 0.5, 1.0
"""How long that signal may take before the place is asked for the reason, and asked once more."""
SIGNAL_LATE_S = 90.0  # after the end of a grace time: slurmctld looks every half minute


class SlurmEndQuery:
    """Asks, remembers the answer, and stops the job for what it tells."""

    def __init__(
        self, steps: Steps, course: JobState, signals: OrchestratorSignals, asked_since: Callable[[], float | None]
    ) -> None:
        """``asked_since`` tells when the first worker was asked to end whose end still waits for its reason."""
        self.ends_by_itself = False
        """Whether the place ends all tasks without us."""
        self.signal_by: float | None = None
        """Until when the end of this process has to wait for a signal that is announced."""
        self._steps = steps
        self._course = course
        self._signals = signals
        self._asked_since = asked_since
        self._answer = ExternalEnd()
        self._asked_at = 0.0
        self._again_at: float | None = None
        """When to ask once more whether the place ends all tasks, by the monotonic clock."""

    @property
    def is_being_ended(self) -> bool:
        """Whether the place has said that it ends the job."""
        return self._answer.by_itself

    @property
    def kills_soon(self) -> bool:
        """Whether KillWait is running, by what the place has said: there is no grace time before it."""
        return self.ends_by_itself and self.signal_by is None

    @property
    def grace_s(self) -> float:
        """How long the end of a worker by a signal from outside waits for its reason."""
        return ANNOUNCED_GRACE_S if self._answer.may_end_all else NOTICE_GRACE_S

    def has_asked_since(self, moment: float) -> bool:
        """Whether it has, by the monotonic clock."""
        return self._asked_at >= moment

    def ask(self) -> ExternalEnd:
        """What the place says now."""
        ending = self._steps.ending()
        self._asked_at = time.monotonic()
        return ending

    def ask_why(self) -> None:
        """A worker has ended and nothing here says why."""
        self._answer = self.ask()
        if self._answer.reason is not None or self._answer.failed_nodes:
            self.stop_for(self._answer, "")

    def ask_which_node(self) -> None:
        """The job is being stopped for a node that has failed: its name may come later than that word."""
        stop = self._course.stop or {}
        if stop.get("reason") != "node_failure" or stop.get("nodes"):
            return
        ending = self.ask()
        if ending.failed_nodes:
            self._course.name_nodes(*_of_nodes(ending), ending.failed_nodes)

    def ask_again(self) -> None:
        """The place did not say whether it ends the job: it may tell why, and where it does not, we tell the tasks."""
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
        """Whether the place ends all tasks: no answer is no reason to do so in its stead, but one to ask again."""
        self.ends_by_itself = ending.may_end_all
        self._again_at = time.monotonic() + ASK_AGAIN_S if ending.unanswered else None

    def stop_for(self, ending: ExternalEnd, how: str) -> None:
        """Stop the job for a reason that the place has given."""
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
    """Reason and cause of a stop: what runs beside a failed node ends with it."""
    nodes = ", ".join(ending.failed_nodes)
    reason = ending.reason or "node_failure"
    if reason == "node_failure" and nodes:
        reason = "terminated_peer"
    return reason, ending.cause or f"node {nodes} has failed"
