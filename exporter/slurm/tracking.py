"""Changes of tracked jobs: what Slurm reports now, compared with what is known.

Every job begins as PENDING. Changes that happened between two polls are found one by one, with Slurm's own times.
Only an answer that names an end ends a job: one that is missing in the queue is looked up in the accounting, and
without an answer there it is UNKNOWN, which is no end.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from exporter.contract.records import Record
from exporter.slurm.accounting import Attempt, Figures
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.states import ENDS, NEVER, RETURNING, task_ids

UNKNOWN = "UNKNOWN"
UNKNOWN_AFTER_S = 300.0  # missing in the queue, with accounting silent: it may lag by minutes
GIVEN_UP_AFTER_S = 3600.0
RETURNS_WITHIN_S = 15.0  # from NODE_FAIL, PREEMPTED or BOOT_FAIL to PENDING, if Slurm requeues the job
ACCOUNTING_LAG_S = 30.0  # between two questions for the figures of an ended job, of which there are two
CONFIRMED_WITHIN_S = 120.0  # from the end in a job's own report to that in Slurm, which ends the job's processes first
SAME_TIME_S = 1.0  # within which two submit times are one
MOST_EVENTS = 20  # of a job: a gang scheduler suspends it each minute, and each poll writes all of them


class Event(Record):
    """A state that a job reached."""

    state: str
    time: float | None = None  # by Slurm's clock; None if Slurm does not tell
    seen: float

    @property
    def moment(self) -> float:
        """When it was reached, as far as it is known."""
        return self.seen if self.time is None else self.time


class TrackedJob(Record):
    """What is known of a job."""

    job_id: str
    name: str
    state: str = "PENDING"
    reason: str | None = None  # Slurm's, why it waits or how it ended
    attempt: int = 1
    restarts: int = 0  # as Slurm counts
    submitted: float | None = None  # this attempt
    started: float | None = None
    ended: float | None = None
    limit_s: float | None = None
    log: str | None = None  # folder or file
    run_dir: str | None = None  # of a job that gpujob launched
    missing_since: float | None = None  # in the queue
    doubted_since: float | None = None  # it ended in a way after which Slurm may requeue it
    given_up: bool = False
    is_reported: bool = False  # its end is from its own report, and Slurm has not told it yet
    figures: Figures | None = None
    figures_asked: float | None = None  # when accounting answered without complete figures
    history: tuple[Event, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.state in ENDS or self.given_up

    @property
    def is_active(self) -> bool:
        """Whether it runs, or is suspended and has run."""
        return self.state in ("RUNNING", "SUSPENDED")

    @property
    def running_since(self) -> float | None:
        """When a running job last began to run: at the start of this attempt, or after a suspension."""
        is_first = len(self.history) < 2 or self.history[-2].state == "PENDING"
        return self.started if is_first else self.history[-1].moment

    @property
    def suspended_s(self) -> float:
        """How long this attempt was suspended, without a suspension that goes on."""
        total = 0.0
        for event, after in pairwise(self.history):
            if event.state == "SUSPENDED":
                total += after.moment - event.moment
            elif event.state == "PENDING":
                total = 0.0
        return total

    @property
    def can_never_start(self) -> bool:
        """Whether it waits for what can no longer happen."""
        return self.state == "PENDING" and self.reason == NEVER


class Change(NamedTuple):
    """One change of a job's state."""

    job: TrackedJob  # after it
    previous: str
    time: float  # by Slurm's clock, or when it was seen


class Known(NamedTuple):
    """All tracked jobs by id, and the changes that led there, in the order in which they happened."""

    jobs: Mapping[str, TrackedJob]
    changes: tuple[Change, ...] = ()


def compare_queue(jobs: Mapping[str, TrackedJob], rows: Iterable[QueueRow], now: float) -> Known:
    """Compare with a queue that has been read whole."""
    snapshots = {task: row.snapshot for row in rows for task in task_ids(row.job_id)}
    found, changes = dict(jobs), list[Change]()
    for job_id, job in jobs.items():
        snapshot = snapshots.get(job_id)
        if snapshot is not None and is_same_job(job, snapshot):
            is_ending = snapshot.state in ("PENDING", "RUNNING") and snapshot.restarts <= job.restarts
            if job.is_reported and is_ending and now - (job.ended or 0.0) < CONFIRMED_WITHIN_S:
                continue
            if job.is_reported:
                job = job.replace(is_reported=False, ended=snapshot.ended if snapshot.state == job.state else job.ended)
            found[job_id] = _observe(job.replace(missing_since=None, given_up=False), snapshot, now, changes)
        elif not job.is_over and job.missing_since is None:
            found[job_id] = job.replace(missing_since=now)
    return Known(found, _in_order(changes))


def take_reported_ends(jobs: Mapping[str, TrackedJob], ends: Mapping[str, AttemptSnapshot], now: float) -> Known:
    """Take the ends that jobs have reported themselves, which Slurm tells later."""
    found, changes = dict(jobs), list[Change]()
    for job_id, end in ends.items():
        job = jobs[job_id]
        if not job.is_over:
            found[job_id] = _observe(job, end, now, changes).replace(is_reported=True)
    return Known(found, _in_order(changes))


def compare_accounting(jobs: Mapping[str, TrackedJob], attempts: Iterable[Attempt] | None, now: float) -> Known:
    """Look up the ends of jobs that are missing in the queue.

    ``attempts`` are all that accounting knows of them; None if there is no accounting.
    """
    by_id: dict[str, list[Attempt]] = {}
    for attempt in attempts or ():
        for task in task_ids(attempt.job_id):
            by_id.setdefault(task, []).append(attempt)
    found, changes = dict(jobs), list[Change]()
    for job_id, job in jobs.items():
        if job.missing_since is None or job.is_over:
            continue
        own = own_attempts(job, by_id.get(job_id, ()))
        if own and own[-1].snapshot.state in ENDS:
            for index, attempt in enumerate(own):
                snapshot = attempt.snapshot._replace(restarts=job.restarts + index)
                if attempt is not own[-1]:  # it has ended by a requeue
                    snapshot = snapshot._replace(state="PENDING" if snapshot.started is None else "RUNNING", ended=None)
                found[job_id] = _observe(found[job_id], snapshot, now, changes)
        elif now - job.missing_since >= UNKNOWN_AFTER_S:
            if job.state != UNKNOWN:
                reason = "it has left Slurm's queue, and accounting does not know its end"
                found[job_id] = _change(job.replace(reason=reason), UNKNOWN, None, now, changes)
            elif now - job.missing_since >= GIVEN_UP_AFTER_S:
                found[job_id] = job.replace(given_up=True)
    return Known(found, _in_order(changes))


def is_same_job(job: TrackedJob, snapshot: AttemptSnapshot) -> bool:
    """Whether this is the tracked job, and not a later or earlier one with its id.

    A requeue changes the submit time, and raises the count of restarts.
    """
    if job.submitted is None or snapshot.submitted is None:
        return True
    difference = snapshot.submitted - job.submitted
    return abs(difference) <= SAME_TIME_S or (snapshot.restarts > job.restarts and difference > 0)


def own_attempts(job: TrackedJob, attempts: Iterable[Attempt]) -> list[Attempt]:
    """Attempts of the job from the present one on, oldest first; older jobs with its id are left out."""
    known = [(attempt.snapshot.submitted, attempt) for attempt in attempts]
    own = [(time, attempt) for time, attempt in known if time is not None]
    if job.submitted is not None:
        own = [(time, attempt) for time, attempt in own if time >= job.submitted - SAME_TIME_S]
    return [attempt for _, attempt in sorted(own, key=lambda entry: entry[0])]


def take_figures(job: TrackedJob, attempts: Iterable[Attempt] | None, now: float) -> TrackedJob:
    """Take the figures of an ended job; those that accounting lacks at the second time are not measured.

    ``attempts`` is None if there is no accounting.
    """
    known = [each for each in attempts or () if job.job_id in task_ids(each.job_id)]
    last = next(reversed(own_attempts(job, known)), None)
    is_last_time = job.figures_asked is not None
    if last is not None and (last.is_complete or (is_last_time and last.snapshot.state in ENDS)):
        return job.replace(figures=last.figures(), history=_with_ends(job.history, known))
    if not is_last_time and attempts is not None:
        return job.replace(figures_asked=now)
    elapsed_s = job.ended - job.started if job.ended is not None and job.started is not None else None
    return job.replace(figures=Figures(elapsed_s=elapsed_s, limit_s=job.limit_s))


def _with_ends(history: Sequence[Event], attempts: Iterable[Attempt]) -> tuple[Event, ...]:
    """The history, in which earlier attempts end when accounting says: Slurm may queue the job a second later."""
    snapshots = [each.snapshot for each in attempts]
    ends = {
        snapshot.started: snapshot.ended for snapshot in snapshots if None not in (snapshot.started, snapshot.ended)
    }
    return (
        *history[:1],
        *(
            event.replace(time=ends[before.time])
            if (before.state, event.state) == ("RUNNING", "PENDING") and before.time in ends
            else event
            for before, event in pairwise(history)
        ),
    )


def _observe(job: TrackedJob, snapshot: AttemptSnapshot, now: float, changes: list[Change]) -> TrackedJob:
    """Lead the job to what Slurm reports, over the states in between."""
    is_back = snapshot.state == "PENDING" and job.state not in ("PENDING", UNKNOWN)
    if snapshot.restarts >= job.attempt or is_back:  # `is_back`: some flags of a requeue come before its count
        moment = snapshot.submitted if snapshot.submitted != job.submitted else None
        if job.state == "PENDING":  # it ran and was requeued between two polls
            job = _change(job, "RUNNING", None, now, changes)
            if moment is not None:  # Slurm no longer tells when it began, but it was before the requeue
                changes[-1] = changes[-1]._replace(time=min(now, moment))
        attempt = max(job.attempt, snapshot.restarts) + 1 if is_back else snapshot.restarts + 1
        job = job.replace(attempt=attempt, started=None, ended=None, figures=None, figures_asked=None)
        job = _change(job, "PENDING", moment, now, changes)
    doubts = snapshot.state in RETURNING and job.state != snapshot.state
    doubted_since = (job.doubted_since or min(now, snapshot.ended or now)) if doubts else None
    job = job.replace(
        restarts=snapshot.restarts,
        submitted=snapshot.submitted or job.submitted,
        limit_s=snapshot.limit_s if snapshot.limit_s is not None else job.limit_s,
        reason=snapshot.reason,
        started=snapshot.started or job.started,
        doubted_since=doubted_since,
    )
    if job.state == "PENDING" and job.started is not None and snapshot.state not in ("PENDING", "RUNNING"):
        job = _change(job, "RUNNING", job.started, now, changes)
    if snapshot.state == job.state or (doubted_since is not None and now - doubted_since < RETURNS_WITHIN_S):
        return job
    if snapshot.state == "RUNNING":
        started = job.started if job.state == "PENDING" else None
        return _change(job.replace(ended=None), "RUNNING", started, now, changes)
    return _change(job.replace(ended=snapshot.ended), snapshot.state, snapshot.ended, now, changes)


def _change(job: TrackedJob, state: str, time: float | None, now: float, changes: list[Change]) -> TrackedJob:
    previous = job.state
    history = _shortened((*job.history, Event(state=state, time=time, seen=now)))
    job = job.replace(state=state, history=history)
    changes.append(Change(job, previous, now if time is None else time))
    return job


def _shortened(history: tuple[Event, ...]) -> tuple[Event, ...]:
    """The history; in a long one two old suspensions become one, and the times before and after it stay as long."""
    for index in range(len(history) - 2 if len(history) > MOST_EVENTS else 0):
        first, between, second = history[index : index + 3]
        if [first.state, between.state, second.state] == ["SUSPENDED", "RUNNING", "SUSPENDED"]:
            one = first.replace(time=None, seen=first.moment + second.moment - between.moment)
            return (*history[:index], one, *history[index + 3 :])
    return history


def _in_order(changes: Iterable[Change]) -> tuple[Change, ...]:
    """By time; those of one job stay in their order."""
    latest: dict[str, float] = {}
    keys = []
    for change in changes:
        latest[change.job.job_id] = max(change.time, latest.get(change.job.job_id, change.time))
        keys.append((latest[change.job.job_id], change))
    return tuple(change for _, change in sorted(keys, key=lambda entry: entry[0]))
