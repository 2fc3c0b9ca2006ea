"""Phase of a job and the reason for its stop, published in ``state.json`` and ``events.jsonl``."""

import contextlib
import functools
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypedDict

from exporter.contract import run_files
from exporter.contract.events import EventLog
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import WorkerEnd
from exporter.workers.exit_reason import JobStop
from launcher.guard import FINISHED
from launcher.plan.plan import Plan, RunFacts
from launcher.report.exit_reasons import ExitReasonFinder
from launcher.report.inputs import KnownEnds
from launcher.run.job_log import log_line
from launcher.run.signals import OrchestratorSignals
from launcher.rundir.job_records import JobStateRecord, LimitWarning, OrchestratorRecord
from launcher.steps.steps import Steps

KILL_MARGIN_S = 3.0  # kept free of KillWait for the report
MOST_KILL_MARGIN_SHARE = 0.4  # largest share of KillWait kept free, if KillWait is short
QUERY_MARGIN_S = 3.0  # longest wait for an answer from Slurm about the end of the job, with a margin
DISK_FULL = "the run directory is full"
OWN_TEARDOWN_S = 8.0  # between SIGTERM and SIGKILL when no KillWait is running; before a requeue at least this


def teardown_limit_s(kill_wait_s: float) -> float:
    """Seconds after a signal to the job until its tasks are killed."""
    return max(1.0, kill_wait_s - min(KILL_MARGIN_S, MOST_KILL_MARGIN_SHARE * kill_wait_s))


def write_problem(error: OSError) -> str:
    """Describe why a file of the run directory could not be written."""
    return DISK_FULL if run_files.is_full(error) else f"the run directory cannot be written: {error.strerror}"


def attempt_optional(what: str, action: Callable[[], object]) -> None:
    """Do something optional: log errors, so that neither a full disk nor a bug of ours ends the job."""
    try:
        action()
    except OSError as error:
        log_line(f"cannot {what}: {error.strerror}")
    except Exception:  # noqa: BLE001 - see above
        log_line(f"cannot {what}: {traceback.format_exc()}")


def lost_part_cause(
    part: str, host: str, cause: str, killed_by: str | None = "SIGKILL", code: int | None = None
) -> dict[str, object]:
    """Describe the loss of a gpujob process as a cause for the report; ``killed_by`` is a signal name."""
    return {
        "worker": part,
        "rank": None,
        "node": host,
        "reason": "killed_unknown" if killed_by else "app_error",
        "code": code,
        "signal": killed_by,
        "evidence": [cause, *(["sender unknown"] if killed_by else [])],
    }


class StopOrigin(TypedDict, total=False):
    """What made a stop necessary."""

    rank: int  # rank and run of the worker whose end did
    restart: int
    nodes: tuple[str, ...]  # failed nodes
    requeue: bool  # whether the job is to be requeued
    failed: Mapping[str, object]  # what failed, for the report, unless it is the worker above


@dataclass(frozen=True)
class Stop(JobStop):
    """Why the job is being stopped."""

    failed: Mapping[str, object] | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON object for ``state.json``, without what is not known."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        if not self.requeue:
            del known["requeue"]
        if not self.nodes:
            del known["nodes"]
        if self.rank is None:
            del known["restart"]
        return known


class JobState:
    """Phase of a job and, during a stop, its reason and deadline."""

    def __init__(
        self, facts: RunFacts, kill_wait_s: float, signals: OrchestratorSignals, progress_fd: int | None = None
    ) -> None:
        """``progress_fd`` is the eventfd of the guard."""
        self.events = EventLog(facts.run_dir / run_files.EVENTS_FILE, facts.job_id)
        self.phase = ""
        self.stop: Stop | None = None
        self.deadline: float | None = None  # when remaining tasks are killed, monotonic clock
        self.is_sigterm_due = False  # whether SIGTERM to the tasks is still due
        self.sigterm_at = 0.0  # when SIGTERM to the tasks is due, monotonic clock
        self.is_sigterm_sent = False  # whether the tasks got SIGTERM: many programs treat a second SIGTERM as "hurry"
        self.have_workers_ended = False
        self.changed_limit_end: float | None = None  # of a time limit that Slurm has changed since, epoch seconds
        self.warning: LimitWarning | None = None  # the signal before the time limit that workers got
        self._incomplete: str | None = None  # why records are missing for good
        self._unwritable: str | None = None  # why the last write of the state failed
        self._run_dir, self._attempt = str(facts.run_dir), facts.attempt
        self._unwritten: dict[str, Callable[[], object]] = {}  # failed writes, by the names of their files
        self._progress_fd = progress_fd
        self._kill_wait_s = kill_wait_s
        self._signals = signals

    def publish(self, phase: str) -> None:
        """Write the phase and the stop to ``state.json``, and a new phase to the events."""
        if phase != self.phase:
            self.phase = phase
            self.events.write("phase", phase=phase)
        self._write_state(phase)
        if phase == "finished" and self._progress_fd is not None:
            os.eventfd_write(self._progress_fd, FINISHED)

    def clear_silence(self) -> float | None:
        """Remove the guard's report of silence; return since when it applied, or None."""
        state = JobStateRecord.read_valid(Path(self._run_dir) / run_files.STATE_FILE)
        if state is None or state.orchestrator_silent_since is None:
            return None
        self._write_state(self.phase)
        return state.orchestrator_silent_since

    def write(self, name: str, action: Callable[[], object]) -> None:
        """Write a file that others read, and log an error. ``repeat_writes`` repeats a write that failed."""
        attempt_optional(f"write {name}", functools.partial(self._attempt_write, name, action))

    def repeat_writes(self) -> None:
        """Repeat writes that failed: a file server may fail for a moment, and these files may never change again."""
        for name, action in list(self._unwritten.items()):
            with contextlib.suppress(OSError):  # already logged
                self._attempt_write(name, action)

    def _attempt_write(self, name: str, action: Callable[[], object]) -> None:
        self._unwritten.pop(name, None)
        try:
            action()
        except OSError:
            self._unwritten[name] = action
            raise

    def _write_state(self, phase: str) -> None:
        self.write(run_files.STATE_FILE, functools.partial(self._try_write_state, phase))

    def _try_write_state(self, phase: str) -> None:
        stop, ended = self.published_stop, self.have_workers_ended
        try:
            had_room = run_files.write_job_state(
                self._run_dir,
                phase,
                stop,
                workers_ended=ended,
                attempt=self._attempt,
                time_limit_end=self.changed_limit_end,
                warning=self.published_warning,
            )
        except OSError as error:
            self._unwritable = write_problem(error)
            self._incomplete = DISK_FULL if run_files.is_full(error) else self._incomplete
            raise
        self._unwritable = None
        self._incomplete = self._incomplete if had_room else DISK_FULL

    @property
    def published_warning(self) -> Mapping[str, object] | None:
        """The signal before the time limit as others read it; None if no worker got one."""
        return None if self.warning is None else self.warning.to_json()

    @property
    def incomplete(self) -> str | None:
        """Why records, logs or output may be missing; None if nothing is known to be."""
        return self._incomplete or self._unwritable

    @property
    def published_stop(self) -> dict[str, object] | None:
        """The stop as others read it."""
        if self.stop is None:
            return None
        left = {} if self.deadline is None else {"kill_at": time.time() + self.deadline - time.monotonic()}
        return {**self.stop.to_json(), **left}

    def find_why_incomplete(self) -> str | None:
        """Why a file that should exist may be missing: no room at any time, or another error of a write now.

        The report then says so, even if the error was only for a moment.
        """
        self._write_state(self.phase)
        self._incomplete = self.incomplete
        return self._incomplete

    @property
    def may_finish_work(self) -> bool:
        """Whether tasks of a job that will be requeued still have time to save or finish their work."""
        return self.is_sigterm_due and self.stop is not None and self.stop.requeue

    @property
    def has_time_for_query(self) -> bool:
        """Whether there is time before the deadline for a question that may remain unanswered."""
        return self.deadline is None or self.deadline - time.monotonic() > QUERY_MARGIN_S

    def mark_signalled(self) -> None:
        """Note that the tasks got SIGTERM. Extend the deadline by the time that took, except during KillWait."""
        self.is_sigterm_due, self.is_sigterm_sent = False, True
        if self.deadline is not None and self._signals.end_signal is None:
            self.deadline = max(self.deadline, time.monotonic() + OWN_TEARDOWN_S)

    def begin_kill_wait(self, started_at: float) -> None:
        """Set the deadline for a KillWait that starts at this time of the monotonic clock."""
        self.deadline = started_at + teardown_limit_s(self._kill_wait_s)

    def add_failed_nodes(self, reason: str, cause: str, nodes: Sequence[str]) -> None:
        """Add the failed nodes to a stop that began without their names."""
        if self.stop is not None:
            self.stop = replace(self.stop, reason=reason, cause=cause, nodes=tuple(nodes))
        self.events.write("nodes failed", nodes=list(nodes))
        self._write_state(self.phase)

    def replace_requeue(self, reason: str, cause: str) -> None:
        """Give the stop for a requeue another reason, since the job ends first. Its tasks are already ending.

        ``requeue`` stays true: a task that ends with 0 has saved its state, and not completed its work.
        """
        if self.stop is not None:
            self.stop = replace(self.stop, reason=reason, cause=cause)
        log_line(f"Not requeueing the job: {cause}")
        self._write_state(self.phase)
        self.events.write("job stopping", reason=reason, cause=cause)

    def withdraw_stop(self) -> None:
        """Cancel a stop whose tasks completed before they were signalled."""
        log_line("Stop cancelled: the work is complete")
        self.events.write("job not stopped", cause=self.stop.cause if self.stop is not None else None)
        self.stop, self.deadline, self.is_sigterm_due = None, None, False
        self.publish(self.phase)

    def expedite_sigterm(self) -> None:
        """Send SIGTERM now instead of waiting for ``sigterm_at``."""
        self.sigterm_at = time.monotonic()
        self.deadline = self.sigterm_at + OWN_TEARDOWN_S

    def expire_deadline(self) -> None:
        """Kill now what has already got SIGTERM."""
        if self.deadline is not None and not self.is_sigterm_due:
            self.deadline = min(self.deadline, time.monotonic())

    def begin_stop(
        self,
        reason: str,
        cause: str,
        origin: StopOrigin | None = None,
        *,
        send_sigterm: bool = True,
        sigterm_after_s: float = 0.0,
        kill_after_s: float = OWN_TEARDOWN_S,
        kill_wait_in_s: float | None = None,
        signalled_at: float | None = None,
    ) -> None:
        """Publish a stop and set the one deadline for all tasks.

        SIGTERM is due in ``sigterm_after_s`` seconds, and SIGKILL ``kill_after_s`` later unless Slurm ends the job.
        Without ``send_sigterm``, Slurm signals the tasks. If Slurm ends the job in ``kill_wait_in_s`` seconds, KillWait
        starts then. ``signalled_at`` is when a task may have got that signal earlier than this process.
        """
        now = time.time()
        self.sigterm_at = time.monotonic() + sigterm_after_s
        if self._signals.end_signal is not None:
            self.begin_kill_wait(self._signals.end_signal_at)
        elif kill_wait_in_s is not None:
            self.begin_kill_wait(time.monotonic() + kill_wait_in_s)
        else:
            self.deadline = self.sigterm_at + kill_after_s
        self.stop = Stop(reason, cause, min(now, signalled_at or now), **(origin or {}))
        self.is_sigterm_due = send_sigterm and not self.is_sigterm_sent
        log_line(f"Stopping the job: {cause}")
        self._write_state("completing")  # first, since it holds the reason if this process is killed
        self.events.write("job stopping", reason=reason, cause=cause)
        self.publish("completing")


class JobRun(NamedTuple):
    """A running job, as all parts of the orchestrator know it."""

    plan: Plan
    facts: RunFacts
    steps: Steps
    state: JobState
    signals: OrchestratorSignals
    time_limit_end: float | None = None  # in epoch seconds; None without a limit
    record: OrchestratorRecord | None = None
    began: float = 0.0  # monotonic clock
    report_fd: int | None = None  # file in memory in which the command of a local run reads the report

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, also if the clock was set."""
        return time.monotonic() - self.began

    def exit_reason_finder(self) -> ExitReasonFinder:
        """A new finder, whose work gives signs of life."""
        return ExitReasonFinder(self.plan.manifest, self.facts.attempt, self.time_limit_end, self.signals.show_life)

    def know(self, ends: Mapping[int, WorkerEnd], finder: ExitReasonFinder | None = None) -> KnownEnds:
        """What a report needs of this process."""
        return KnownEnds(
            ends=ends,
            finder=finder or self.exit_reason_finder(),
            job_end=self.time_limit_end,
            orchestrator=self.record,
            job_state={"stop": self.state.published_stop, "warning": self.state.published_warning},
            elapsed_s=self.elapsed_s,
            incomplete=self.state.incomplete,
        )
