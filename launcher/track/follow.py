"""Follow jobs of Slurm until all have ended: one query of the queue at each poll, whatever the number of jobs."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.records import RecordError
from exporter.slurm.accounting import Attempt
from exporter.slurm.commands_reader import SlurmUnansweredError
from exporter.slurm.queue import QueueRow
from exporter.slurm.sources.cached_answers_reader import QueueAnswer
from exporter.slurm.sources.hub_reader import HubJob
from exporter.slurm.sources.shared_accounting_reader import AccountingRequest, SharedAccounting
from exporter.slurm.states import array_of
from exporter.slurm.tracking import (
    ACCOUNTING_LAG_S,
    Known,
    TrackedJob,
    compare_accounting,
    compare_queue,
    is_same_job,
    take_figures,
)
from launcher.errors import LauncherError, os_errors
from launcher.rundir.job_records import read_report
from launcher.steps.slurm_steps import deferred_interrupt
from launcher.track import run_log
from launcher.track.gpu_use import read_gpu_use
from launcher.track.state import TrackState, count_states, exit_status_of

MOST_WAIT_S = 300.0  # between two polls while Slurm does not answer: each failure doubles the interval
HUB_INTERVAL_S = 60.0  # of a hub with its usual options
HUB_RETRY_S = 10.0  # to the second question about figures that a hub does not have yet; then twice as long each time
MOST_OF_HUB = 20  # jobs or arrays that it is asked about at once
HUB_FIGURES_S = 300.0  # after an end; without the hub's figures, accounting is asked then
ACCOUNTING_EACH = 2.5  # polls to one question to accounting, if jobs end all the time: 15 commands in ten minutes
RETRY_S = 1.0  # for an answer while another command asks
ALERT_AFTER = 3  # failures in a row
EARLIER_S = 60.0  # how long before the first submission accounting is searched, for clocks that differ


class Follower:
    """Follows the jobs of a state file."""

    def __init__(
        self,
        accounting: SharedAccounting,
        read_queue: Callable[[float], QueueAnswer],
        read_jobs: Callable[[str, Sequence[str]], Iterable[HubJob]],
        state: TrackState | None,
        start: Callable[[tuple[QueueRow, ...]], TrackState],
        add_new: Callable[[TrackState, tuple[QueueRow, ...]], TrackState] | None,
        state_file: Path,
        write: Callable[[str], None],
        *,
        noun: str,
        interval_s: float,
        gpu_every: int,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``read_queue(since)`` returns an answer not older than ``since``.

        ``read_jobs`` gives what the hub at an address knows of jobs and arrays. ``add_new`` adds the jobs that an
        earlier run, whose ``state`` this is, could not know; None if there can be none.
        """
        self._read_jobs = read_jobs
        self._accounting, self._read_queue, self._start, self._state_file = accounting, read_queue, start, state_file
        self._write, self._noun, self._add_new = write, noun, add_new
        self._interval_s, self._gpu_every = interval_s, gpu_every
        self._clock, self._sleep = clock, sleep
        self.state = state  # None before the first answer of Slurm
        self._failures = Counter[str]()
        # who polls more often than hubs do wants answers of its own
        self._most_age_s = interval_s / 2 if interval_s < HUB_INTERVAL_S else 2 * interval_s
        self._is_unsaved = False  # whether the last write of the state failed
        self._known_at: float | None = None
        self._as_of = 0.0 if state is None else state.updated  # an older answer would undo changes
        self._has_accounting = True
        self._hub: str | None = None  # its address
        self._hub_wait_s = HUB_RETRY_S
        self._wanted: dict[str, float] = {}  # since when accounting is to be asked about a job
        self._poll_at = self._accounting_at = self._hub_at = clock()

    def run(self) -> TrackState:
        """Follow the jobs to their ends.

        Raises LauncherError if Slurm does not know one of them, SlurmUnansweredError if there is no Slurm.
        """
        while True:
            if not self._is_over and self._clock() >= self._poll_at:
                self._poll(self._clock())
            if self.state is not None:
                self._ask_hub(self.state)
                self._ask_accounting(self.state)
                if self._is_over and not _unmeasured(self.state):
                    return self._finish(self.state)
            self._sleep(max(0.0, self._next_at() - self._clock()))

    @property
    def _is_over(self) -> bool:
        """Whether nothing more is to be read from the queue."""
        return self.state is not None and self.state.is_over and self._add_new is None

    def _next_at(self) -> float:
        state, now = self.state, self._clock()
        times = [] if self._is_over else [self._poll_at]
        unmeasured = [] if state is None else _unmeasured(state)
        if unmeasured or self._wanted:
            may_ask_at = self._may_ask_at(state)
            times += [max(self._due_at(job), may_ask_at) for job in unmeasured]
            times += [may_ask_at] if self._wanted else []
        if any(self._hub_until(job) > now for job in unmeasured):
            times.append(self._hub_at)
        return min(times)

    def _due_at(self, job: TrackedJob) -> float:
        """When accounting is asked for the figures of an ended job."""
        again_at = 0.0 if job.figures_asked is None else job.figures_asked + ACCOUNTING_LAG_S
        return max(again_at, self._hub_until(job))

    def _hub_until(self, job: TrackedJob) -> float:
        """Until when the figures of an ended job may come from a hub, which has none of one that never started."""
        if self._hub is None or job.started is None:
            return 0.0
        ended = job.ended if job.ended is not None else max((event.seen for event in job.history), default=0.0)
        return ended + HUB_FIGURES_S

    def _may_ask_at(self, state: TrackState | None) -> float:
        """When accounting may be asked. Sooner when all jobs have ended, since no further ids will join the query."""
        return max(self._accounting_at, self._accounting.next_at(is_last=state is not None and state.is_over))

    def _poll(self, now: float) -> None:
        self._poll_at = now + self._interval_s
        try:
            is_first = self.state is None or self._add_new is not None
            answer = self._read_queue(now if is_first else now - self._most_age_s)
            if answer.problem is not None:
                command, _, problem = answer.problem.partition(" ")
                raise SlurmUnansweredError(command, problem)
            rows, as_of = answer.rows, answer.as_of or now
            state = self.state or self._save(self._start(rows))  # before the first report, if it cannot be written
            if self._add_new is not None:
                state, self._add_new = self._save(self._add_new(state, rows)), None
        except SlurmUnansweredError as error:
            if self.state is None and error.is_local:
                raise
            self._poll_at = self._note_failure(error)
            return
        self._note_answer("squeue")
        self._hub = answer.source if answer.is_of_hub else None
        self._known_at, polls = now, state.polls + 1
        known = compare_queue(state.jobs, rows, now) if as_of >= self._as_of else Known(state.jobs)
        self._as_of = max(as_of, self._as_of)
        with deferred_interrupt():  # what has been written is also in the state file
            self._write(run_log.status_check(now, known.jobs.values()))
            self._take(state.replace(polls=polls), known, now)
        if polls % self._gpu_every == 0:
            for job in known.jobs.values():
                if job.state == "RUNNING" and (use := read_gpu_use(job)) is not None:
                    self._write(run_log.resource_status(now, job, use))

    def _take(self, state: TrackState, known: Known, now: float) -> None:
        """Report changes and save what is known."""
        for change in known.changes:
            self._write(run_log.state_change(change, read_cause(change.job)))
        self._save(state.replace(jobs=known.jobs, updated=now, summary=count_states(known.jobs.values())))

    def _save(self, state: TrackState) -> TrackState:
        is_first, self.state = self.state is None, state
        try:
            with os_errors(f"{self._state_file} cannot be written"):
                run_files.write_json(self._state_file, state.to_json())
        except LauncherError as error:
            if is_first:
                raise
            if not self._is_unsaved:  # the home may be full for a while: the states are in memory
                self._write(run_log.state_not_saved(self._clock(), error))
            self._is_unsaved = True
        else:
            self._is_unsaved = False
        return state

    def _ask_accounting(self, state: TrackState) -> None:
        """Ask once about jobs that have left the queue, and for the figures of ended ones."""
        now = self._clock()
        lost = [job for job in state.jobs.values() if job.missing_since is not None and not job.is_over]
        due = [job for job in _unmeasured(state) if now >= self._due_at(job)]
        self._wanted = {job.job_id: self._wanted.get(job.job_id, now) for job in (*lost, *due)}
        if not self._wanted or now < self._accounting_at:
            return
        answered = set(self._wanted)
        attempts: tuple[Attempt, ...] | None = None
        if self._has_accounting:
            try:
                told = self._accounting.read(self._questions((*lost, *due), now), is_last=state.is_over)
            except SlurmUnansweredError as error:
                retry_at = self._note_failure(error)
                self._has_accounting = not error.is_lasting
                if self._has_accounting:
                    self._accounting_at, attempts = retry_at, ()
                    if not state.is_over:
                        return  # a failure says nothing about a job
            else:
                attempts = told.attempts
                answered = {key for key, at in self._wanted.items() if told.answered.get(array_of(key), -1.0) >= at}
                self._accounting_at = now if answered else now + RETRY_S
                if not answered:
                    return
                self._note_answer("sacct")
        self._wanted = {job_id: at for job_id, at in self._wanted.items() if job_id not in answered}
        lost, due = ([job for job in jobs if job.job_id in answered] for jobs in (lost, due))
        found = compare_accounting({job.job_id: job for job in lost}, attempts, now)
        measured = {job.job_id: take_figures(job, attempts, now) for job in due}
        known = found._replace(jobs={**state.jobs, **found.jobs, **measured})
        self._measure(state, known, measured.values(), now)

    def _ask_hub(self, state: TrackState) -> None:
        """Take figures of ended jobs that a hub has: it asks accounting about them too."""
        now = self._clock()
        waiting = [job for job in _unmeasured(state) if self._hub_until(job) > now]
        if self._hub is None or not waiting or now < self._hub_at:
            return
        arrays = list(dict.fromkeys(array_of(job.job_id) for job in waiting))[:MOST_OF_HUB]
        known = {each.job_id: each for each in self._read_jobs(self._hub, arrays)}
        measured = {
            job.job_id: job.replace(figures=each.figures)
            for job in waiting
            if (each := known.get(job.job_id)) is not None
            and each.figures is not None
            and each.attempt == job.attempt
            and is_same_job(job, each.row().snapshot)
        }
        self._hub_wait_s = HUB_RETRY_S if measured else min(2 * self._hub_wait_s, self._interval_s)
        self._hub_at = now + self._hub_wait_s
        if measured:
            self._measure(state, Known({**state.jobs, **measured}), measured.values(), now)

    def _measure(self, state: TrackState, known: Known, measured: Iterable[TrackedJob], now: float) -> None:
        """Report changes and figures."""
        with deferred_interrupt():
            self._take(state, known, now)
            for job in measured:
                if job.figures is not None:
                    self._write(run_log.compute_metrics(now, job))

    def _questions(self, jobs: Iterable[TrackedJob], now: float) -> dict[str, AccountingRequest]:
        """What to ask: one question covers all tasks of an array."""
        found: dict[str, AccountingRequest] = {}
        for job in jobs:
            since = max(0.0, min(job.submitted or 0.0, now) - EARLIER_S)
            at, array = self._wanted[job.job_id], array_of(job.job_id)
            other = found.get(array, AccountingRequest(at, since))
            found[array] = AccountingRequest(max(at, other.at), min(since, other.since))
        return found

    def _note_failure(self, error: SlurmUnansweredError) -> float:
        """Report the failure; return when to try again."""
        now, failures = self._clock(), self._failures[error.command] + 1
        self._failures[error.command] = failures
        wait_s = max(self._interval_s, min(self._interval_s * 2.0 ** (failures - 1), MOST_WAIT_S))
        self._write(run_log.query_failed(now, error, wait_s))
        if failures == ALERT_AFTER:
            self._write(run_log.alert(now, error.command, failures, self._known_at))
        return now + wait_s

    def _note_answer(self, command: str) -> None:
        if failures := self._failures[command]:
            self._write(run_log.query_recovered(self._clock(), command, failures))
        self._failures[command] = 0

    def _finish(self, state: TrackState) -> TrackState:
        now = self._clock()
        jobs = list(state.jobs.values())
        state = state.replace(complete=True, updated=now, exit_status=exit_status_of(jobs))
        with deferred_interrupt():
            self._write(run_log.all_complete(now, state, self._noun))
            self._save(state)
        return state


def read_cause(job: TrackedJob) -> str | None:
    """Why a worker of a job that gpujob launched failed, from the report of this attempt; None if it is not known."""
    try:
        report = read_report(Path(job.run_dir)) if job.run_dir is not None and job.is_over else None
    except RecordError:
        return None  # damaged; `gpujob report` says so
    if report is None or report.cause is None or report.attempt != job.attempt - 1:
        return None
    return f"{report.cause.worker} {report.cause.reason}"


def _unmeasured(state: TrackState) -> list[TrackedJob]:
    """Ended jobs whose figures are wanted: those of cancelled jobs are not."""
    ended = (job for job in state.jobs.values() if job.is_over and not job.given_up and job.figures is None)
    return [job for job in ended if job.state != "CANCELLED"]
