"""All jobs that a hub knows, and what one answer of Slurm changes in them."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from exporter.contract.budget import Budget
from exporter.contract.identity import safe_label
from exporter.contract.records import NOTHING, Record
from exporter.hub.polling import is_last_question, shown_from, wants_figures
from exporter.slurm.accounting import Attempt, gpu_counts, tres
from exporter.slurm.prices import Price, Prices
from exporter.slurm.queue import SAME_SUBMISSION_S, QueueRow
from exporter.slurm.states import ENDS, array_of, task_ids, tells_all_tasks
from exporter.slurm.tracking import (
    Change,
    Known,
    TrackedJob,
    compare_accounting,
    compare_queue,
    is_same_job,
    take_figures,
)

SHOWN_AFTER_END_S = 1800.0  # series of an ended job; rules see its end at several scrapes
GPU = "gres/gpu"


class Outcome(Record):
    """What the report of a run says of an attempt."""

    attempt: int = 0  # from 0
    state: str
    exit_status: int
    start: float | None = None
    end: float | None = None
    seen_s: float | None = None  # GPU seconds with a known utilization
    idle_s: float | None = None  # of these: with a utilization under 1 %
    energy_j: float | None = None  # by the counters of the boards
    items_processed: float | None = None
    items_expected: float | None = None
    count: int | None = None  # of GPUs


class Job(NamedTuple):
    """A job, an array task, or the tasks of an array that still wait together."""

    tracked: TrackedJob
    first_submitted: float | None  # of the first attempt: with the id, it names a job for ever
    user: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    resources: str = ""  # trackable resources; of a waiting job what it asks for
    node_count: int = 0
    nodes: str = ""
    expected_start: float | None = None
    dependency: str = ""
    tasks: int = 1  # that wait together
    is_listed: bool = True  # in the queue of the latest answer
    is_monitored: bool = False  # whether its sidecars are to be scraped
    price: Price | None = None  # as it was when the job started
    has_nodes_alone: bool = False
    outcome: Outcome | None = None  # of the present attempt, if gpujob launched the job
    budget: Budget | None = None  # of the job file
    notify: str = ""  # of the job file: who is notified of its alerts

    @property
    def first_partition(self) -> str:
        """The partition; the first one while it waits for one of several."""
        return self.partition.partition(",")[0]

    @property
    def key(self) -> str:
        return waiting_key(self.tracked.job_id) if self.tracked.job_id.endswith("]") else self.tracked.job_id

    @property
    def place(self) -> tuple[str, str]:
        """User and partition, as labels."""
        return _place(self.user, self.first_partition)

    @property
    def gpus(self) -> float | None:
        return tres(self.resources, GPU)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will be learned of it."""
        return self.tracked.is_over and not wants_figures(self.tracked)


@lru_cache(maxsize=4096)
def _place(user: str, partition: str) -> tuple[str, str]:
    return safe_label(user), safe_label(partition)


class Observation(NamedTuple):
    """Jobs after an answer, and what it changed. Jobs that it did not change are the same objects."""

    jobs: dict[str, Job]
    changes: tuple[Change, ...] = ()
    replaced: tuple[Job, ...] = ()  # ended jobs whose ids are now those of others
    gone: tuple[Job, ...] = ()  # arrays of which no task waits any more
    rows: Mapping[str, QueueRow] = NOTHING  # of these jobs


def waiting_key(job_id: str) -> str:
    """The key of the tasks of an array that wait together."""
    return f"{array_of(job_id)}_[]"


def _waits_together(row: QueueRow) -> bool:
    return row.job_id.endswith("]") and row.snapshot.state not in ENDS


def split_rows(rows: Iterable[QueueRow]) -> dict[str, QueueRow]:
    """Rows by key: tasks that ended together become one row each."""
    found: dict[str, QueueRow] = {}
    for row in rows:
        if not row.job_id.endswith("]"):
            found[row.job_id] = row
        elif _waits_together(row):
            found[waiting_key(row.job_id)] = row
        else:
            found |= {task: row._replace(job_id=task) for task in task_ids(row.job_id)}
    return found


def take_queue(
    jobs: Mapping[str, Job], rows: Mapping[str, QueueRow], before: Mapping[str, QueueRow], now: float
) -> Observation:
    """Compare the jobs with the queue, read whole.

    ``before`` are the rows of the previous observation: most are the same, and so are their jobs. Jobs that are new
    begin as PENDING, so that the changes up to now are found.
    """
    found, touched = dict(jobs), set[str]()
    replaced, gone = list[Job](), list[Job]()
    changed = {key for key, row in rows.items() if (old_row := before.get(key)) is not row and old_row != row}
    for key, job in jobs.items():
        if key.endswith("_[]") and (key not in rows or key in changed):
            for task in _tasks_that_left(job, rows.get(key)):
                if task not in found and task not in rows:
                    found[task] = job._replace(tracked=_begin(task, job.tracked), tasks=1)
            if key not in rows:
                gone.append(found.pop(key))
    own = dict(rows)
    for key in [key for key in rows if key in changed or key not in found]:
        row, old = rows[key], found.get(key)
        if old is not None and not key.endswith("_[]") and not is_same_job(old.tracked, row.snapshot):
            if not old.tracked.is_over:
                del own[key]  # its end is looked up first
                continue
            replaced.append(old)
            old = None
        found[key] = _with_row(old, row)
        touched.add(key)
    compared = {
        key: job.tracked
        for key, job in found.items()
        if (key in touched or _may_change(job.tracked, key in own)) and not key.endswith("_[]")
    }
    known = compare_queue(compared, _rows_of(compared, own), now)
    update_jobs(found, known)
    for key, job in found.items():
        if job.is_listed != (key in own):
            found[key] = job._replace(is_listed=key in own)
    return Observation(found, known.changes, tuple(replaced), tuple(gone), own)


def take_accounting(
    jobs: Mapping[str, Job], asked: Iterable[TrackedJob], attempts: Iterable[Attempt] | None, now: float
) -> Observation:
    """Learn the ends and the figures of the jobs that accounting was asked about. None if there is no accounting."""
    present = {job.job_id: jobs[job.job_id] for job in asked if job.job_id in jobs}
    by_id: dict[str, list[Attempt]] = {}
    for attempt in attempts or ():
        for task in task_ids(attempt.job_id):
            if task in present and attempt.user == present[task].user:
                by_id.setdefault(task, []).append(attempt._replace(job_id=task))
    found = dict(jobs)
    own = [attempt for each in by_id.values() for attempt in each]
    lost = {key: job.tracked for key, job in present.items() if not job.tracked.is_over}
    known = compare_accounting(lost, own if attempts is not None else None, now)
    update_jobs(found, known)
    for key in present:
        tracked = found[key].tracked
        if wants_figures(tracked):
            tracked = _take_figures(tracked, by_id.get(key, []) if attempts is not None else None, now)
            found[key] = found[key]._replace(tracked=tracked)
    return Observation(found, known.changes)


def _take_figures(job: TrackedJob, attempts: list[Attempt] | None, now: float) -> TrackedJob:
    """Like ``take_figures``, but accounting may lag for minutes before figures count as not measured."""
    asked = now if attempts is None or is_last_question(job, now) else None
    return take_figures(job.replace(figures_asked=asked), attempts, now)


def with_prices(
    jobs: Mapping[str, Job], changed: Iterable[str], prices: Prices | None, node_cpus: Mapping[str, int]
) -> dict[str, Job]:
    """The jobs, with what is known at their start: the price of their GPUs, and whether they have their nodes alone.

    Only ``changed`` ones can have started. ``node_cpus`` is the number of CPUs of the largest node of each partition: a
    job with as many on each node is alone.
    """
    found = dict(jobs)
    for key in changed:
        job = jobs[key]
        if job.tracked.started is None:
            continue
        if job.price is None and prices is not None:
            per_hour = prices.of_gpus(gpu_counts(job.resources))
            job = job._replace(price=None if per_hour is None else Price(per_hour, prices.currency))
        cpus, most = tres(job.resources, "cpu"), node_cpus.get(job.first_partition)
        if not job.has_nodes_alone and cpus and most and job.node_count and cpus >= job.node_count * most:
            job = job._replace(has_nodes_alone=True)
        found[key] = job
    return found


def unknown_rows(rows: Iterable[QueueRow], known: Iterable[Job]) -> list[QueueRow]:
    """The rows of other jobs than the known ones; clocks of Slurm and of the login node may differ."""
    times = {job.key: (job.first_submitted or 0.0, job.tracked.submitted or 0.0) for job in known}
    return [
        row
        for row in rows
        if all(abs(time - (row.snapshot.submitted or 0.0)) > SAME_SUBMISSION_S for time in times.get(row.job_id, ()))
    ]


def take_missed(jobs: Mapping[str, Job], rows: Iterable[QueueRow], now: float) -> Observation:
    """Take jobs that have ended before the queue was read."""
    ended = {key: row for key, row in split_rows(rows).items() if row.snapshot.state in ENDS and key not in jobs}
    new = {key: _with_row(None, row)._replace(is_listed=False) for key, row in ended.items()}
    known = compare_queue({key: job.tracked for key, job in new.items()}, ended.values(), now)
    found = {**jobs, **new}
    update_jobs(found, known)
    return Observation(found, known.changes)


def forget(jobs: Mapping[str, Job], since: float, now: float) -> dict[str, Job]:
    """The jobs without those that ended a while ago, of which everything is known and which Slurm has forgotten.

    ``since`` is as for ``shown_from``.
    """
    return {
        key: job
        for key, job in jobs.items()
        if job.is_listed or not job.is_settled or now - shown_from(job.tracked, since) < SHOWN_AFTER_END_S
    }


def _begin(job_id: str, job: TrackedJob) -> TrackedJob:
    return TrackedJob(
        job_id=job_id,
        name=job.name,
        attempt=job.restarts + 1,
        restarts=job.restarts,
        submitted=job.submitted,
        limit_s=job.limit_s,
        log=job.log,
    )


def _with_row(job: Job | None, row: QueueRow) -> Job:
    """The job with what its row says of it, except its state, which is compared."""
    snapshot = row.snapshot
    if job is None or _waits_together(row):
        tracked = TrackedJob(
            job_id=row.job_id,
            name=row.name,
            attempt=snapshot.restarts + 1,
            restarts=snapshot.restarts,
            submitted=snapshot.submitted,
            limit_s=snapshot.limit_s,
            reason=snapshot.reason,
            log=row.output,
            run_dir=job.tracked.run_dir if job is not None else None,
        )
    else:
        tracked = job.tracked
    return Job(
        tracked,
        snapshot.submitted if job is None else job.first_submitted,
        user=intern(row.user),  # few texts, many jobs
        partition=intern(row.partition),
        account=intern(row.account),
        qos=intern(row.qos),
        resources=intern(row.resources),
        node_count=row.node_count,
        nodes=row.nodes,
        expected_start=row.expected_start,
        dependency=row.dependency,
        tasks=len(task_ids(row.job_id)),
        is_monitored=job is not None and job.is_monitored,
        price=None if job is None else job.price,
        has_nodes_alone=job is not None and job.has_nodes_alone,
        outcome=None if job is None else job.outcome,
        budget=None if job is None else job.budget,
        notify="" if job is None else job.notify,
    )


def _tasks_that_left(job: Job, row: QueueRow | None) -> list[str]:
    """Tasks of an array that no longer wait together."""
    before, waiting = task_ids(job.tracked.job_id), task_ids(row.job_id) if row is not None else ()
    still, last = set(waiting), float("inf")
    if row is not None and not tells_all_tasks(row.job_id):  # those after the last one may wait
        last = max(map(_index, waiting), default=-1)
    return [task for task in before if task not in still and _index(task) < last]


def _index(task: str) -> int:
    return int(task.rpartition("_")[2])


def _may_change(job: TrackedJob, is_listed: bool) -> bool:
    """Whether a job may change although its row is the same, or absent."""
    is_open, is_missing = job.doubted_since is not None or job.is_reported, job.missing_since is not None
    return is_open or (is_missing if is_listed else not is_missing and not job.is_over)


def _rows_of(compared: Mapping[str, TrackedJob], rows: Mapping[str, QueueRow]) -> list[QueueRow]:
    """Rows of these jobs; a task may be back among those of its array that wait together."""
    found, arrays = list[QueueRow](), dict[str, frozenset[str]]()
    for key in compared:
        together = rows.get(waiting_key(key)) if key not in rows and "_" in key else None
        if together is not None:
            waiting = arrays.setdefault(together.job_id, frozenset(task_ids(together.job_id)))
            found += [together._replace(job_id=key)] if key in waiting else []
        elif key in rows:
            found.append(rows[key])
    return found


def update_jobs(jobs: dict[str, Job], known: Known) -> None:
    """Take the tracked jobs that have changed."""
    for key, tracked in known.jobs.items():
        if tracked is not jobs[key].tracked:
            jobs[key] = jobs[key]._replace(tracked=tracked)
