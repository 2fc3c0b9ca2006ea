"""How far a job is, and why it is being ended, as ``state.json`` and ``events.jsonl`` tell it."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exporter.contract import run_files
from exporter.contract.events import EventLog
from launcher.plan.plan import RunFacts
from launcher.run.job_log import log_line
from launcher.run.signals import OrchestratorSignals

KILL_MARGIN_S = 3.0  # kept free of KillWait for the report,
MOST_KILL_MARGIN = 0.4  # and no more than this share of it
QUESTION_S = 3.0  # the longest wait for an answer about the end of the job, with some margin
OWN_TEARDOWN_S = 8.0  # between SIGTERM and SIGKILL when the job ends itself and no KillWait is running


def teardown_limit_s(kill_wait_s: float) -> float:
    """How long tasks may take to end after a signal to the job, before they are killed."""
    return max(1.0, kill_wait_s - min(KILL_MARGIN_S, MOST_KILL_MARGIN * kill_wait_s))


def attempt_optional(what: str, action: Callable[[], object]) -> None:
    """Do what the job can do without: neither a full disk nor a defect of ours there may end it."""
    try:
        action()
    except OSError as error:
        log_line(f"cannot {what}: {error.strerror}")
    except Exception:  # noqa: BLE001 - see above
        log_line(f"cannot {what}: {traceback.format_exc()}")


def lost_part_cause(
    part: str, host: str, cause: str, killed_by: str | None = "SIGKILL", code: int | None = None
) -> dict[str, Any]:
    """A part of ours that has ended, as the report's cause; ``killed_by`` is the name of a signal."""
    return {
        "worker": part,
        "rank": None,
        "node": host,
        "reason": "killed_unknown" if killed_by else "app_error",
        "code": code,
        "signal": killed_by,
        "evidence": [cause, *(["nothing tells who sent it"] if killed_by else [])],
    }


class JobState:
    """Phase of a job and, once it is being stopped, the reason and the deadline."""

    def __init__(self, facts: RunFacts, kill_wait_s: float, signals: OrchestratorSignals) -> None:
        self.events = EventLog(facts.run_dir / run_files.EVENTS_FILE, facts.job_id)
        self.phase = ""
        self.stop: dict[str, Any] | None = None
        """As ``state.json`` has it."""
        self.deadline: float | None = None
        """By the monotonic clock: what has not ended by then is killed."""
        self.ask = False
        """Whether the tasks have still to be asked to end,"""
        self.ask_at = 0.0
        """and when, by the monotonic clock."""
        self.asked = False
        """Whether they have been: a second SIGTERM is "hurry" to many programs."""
        self.workers_ended = False
        self._run_dir = str(facts.run_dir)
        self._kill_wait_s = kill_wait_s
        self._signals = signals

    def publish(self, phase: str) -> None:
        """Write down the phase, and all that has changed."""
        if phase != self.phase:
            self.phase = phase
            self.events.write("phase", phase=phase)
        self._write_state(phase)

    def _write_state(self, phase: str) -> None:
        attempt_optional(
            f"write {run_files.STATE_FILE}",
            lambda: run_files.write_job_state(self._run_dir, phase, self.stop, workers_ended=self.workers_ended),
        )

    @property
    def leaves_time(self) -> bool:
        """Whether the tasks of a job that is queued again still have time to save their work, or to be done."""
        return self.ask and self.stop is not None and bool(self.stop.get("requeue"))

    @property
    def has_time(self) -> bool:
        """Whether there is time for a question that may stay unanswered before what runs is killed."""
        return self.deadline is None or self.deadline - time.monotonic() > QUESTION_S

    def have_asked(self) -> None:
        """The tasks have been asked to end by now, however long that took; Slurm's KillWait is as long as it is."""
        self.ask, self.asked = False, True
        if self.deadline is not None and self._signals.ending is None:
            self.deadline = max(self.deadline, time.monotonic() + OWN_TEARDOWN_S)

    def begin_kill_wait(self, at: float) -> None:
        """The place kills what runs its KillWait after this moment of the monotonic clock."""
        self.deadline = at + teardown_limit_s(self._kill_wait_s)

    def name_nodes(self, reason: str, cause: str, nodes: Sequence[str]) -> None:
        """The nodes for whose failure the job is being stopped, which were not known at first."""
        self.stop = {**(self.stop or {}), "reason": reason, "cause": cause, "nodes": list(nodes)}
        self.events.write("nodes failed", nodes=list(nodes))
        self._write_state(self.phase)

    def take_back_stop(self) -> None:
        """The job ends by itself before anybody has been asked to end."""
        log_line("The job is not stopped: its work is done")
        self.events.write("job not stopped", cause=(self.stop or {}).get("cause"))
        self.stop, self.deadline, self.ask = None, None, False
        self.publish(self.phase)

    def ask_now(self) -> None:
        """Nothing is left to wait for until the moment at which the tasks would be asked to end."""
        self.ask_at = time.monotonic()
        self.deadline = self.ask_at + OWN_TEARDOWN_S

    def hurry(self) -> None:
        """What has been asked to end is killed now."""
        if self.deadline is not None and not self.ask:
            self.deadline = min(self.deadline, time.monotonic())

    def begin_stop(
        self,
        reason: str,
        cause: str,
        origin: Mapping[str, Any] | None = None,
        *,
        ask: bool = True,
        ask_after_s: float = 0.0,
        ended_in_s: float | None = None,
        since: float | None = None,
    ) -> None:
        """Publish why the job is ended; one deadline for all tasks.

        ``origin`` is the rank and the run whose end has led to this, or the nodes that have failed, or
        what has ``failed`` as the report tells it. Without ``ask`` the tasks are told by somebody else.
        The place ends the job in ``ended_in_s``, and tasks have its KillWait from then on. ``since`` is when that
        may have come to a task before it came here.
        """
        now = time.time()
        self.ask_at = time.monotonic() + ask_after_s
        if self._signals.ending is not None:
            self.begin_kill_wait(self._signals.ending_at)
        elif ended_in_s is not None:
            self.begin_kill_wait(time.monotonic() + ended_in_s)
        else:
            self.deadline = self.ask_at + OWN_TEARDOWN_S
        self.stop = {"reason": reason, "cause": cause, "time": min(now, since or now), **(origin or {})}
        self.ask = ask and not self.asked
        log_line(f"Stopping the job: {cause}")
        self._write_state("completing")  # first: it is what tells the reason when this process is killed
        self.events.write("job stopping", reason=reason, cause=cause)
        self.publish("completing")
