"""Counters of a hub by user and partition. They only rise, and go on after a restart."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from exporter.hub.jobs import Job
from exporter.slurm.states import ENDS
from exporter.slurm.tracking import UNKNOWN, Change

ENDED, STARTED, WAIT_S, GPU_S = "ended", "started", "wait_s", "gpu_s"
GPU_S_OF_RUNS = "gpu_s_of_runs"  # of runs that are over; with those that go on it makes GPU_S


class CounterKey(NamedTuple):
    """One counter."""

    name: str
    user: str
    partition: str
    state: str = ""


Counters = Mapping[CounterKey, float]


def count(
    counters: Counters,
    before: Mapping[str, Job],
    jobs: Mapping[str, Job],
    changes: Iterable[Change],
    since: float,
    now: float,
) -> dict[CounterKey, float]:
    """The counters after these changes, of which those up to ``since`` are not counted.

    ``before`` are the jobs as they were, ``jobs`` as they are now.
    """
    found = dict(counters)
    for place in {job.place for key, job in jobs.items() if job is not before.get(key)}:
        found.setdefault(CounterKey(STARTED, *place), 0.0)
    changes = tuple(changes)
    changed = [before[key] for key in {change.job.job_id for change in changes} if key in before]
    begun = {job.tracked.job_id: job.tracked.started for job in changed if job.tracked.state == "RUNNING"}
    for change in changes:
        key, state = change.job.job_id, change.job.state
        job = jobs.get(key) or before.get(key)
        if job is None:
            continue
        place = job.place
        begin = begun.pop(key, None) if change.previous == "RUNNING" else None
        if state == "RUNNING":
            begun[key] = change.time
        if change.time <= since:
            continue
        _add_run(found, job, begin, _end_of_run(change, before.get(key)))
        if state == "RUNNING":
            if change.previous == "PENDING":
                _add(found, CounterKey(STARTED, *place), 1.0)
                submitted = job.tracked.submitted
                if submitted is not None and change.time >= submitted:
                    _add(found, CounterKey(WAIT_S, *place), change.time - submitted)
        elif state in ENDS:
            _add(found, CounterKey(ENDED, *place, state), 1.0)
    return _with_present_runs(found, jobs, now)


def _add(counters: dict[CounterKey, float], key: CounterKey, amount: float) -> None:
    counters[key] = counters.get(key, 0.0) + amount


def _end_of_run(change: Change, before: Job | None) -> float:
    """When a run ended; of a job that is lost, when it was first missing."""
    is_lost = change.job.state == UNKNOWN and before is not None
    missing_since = before.tracked.missing_since if is_lost and before is not None else None
    return change.time if missing_since is None else missing_since


def _add_run(counters: dict[CounterKey, float], job: Job, begin: float | None, end: float) -> None:
    if begin is not None and job.gpus and end > begin:
        _add(counters, CounterKey(GPU_S_OF_RUNS, *job.place), (end - begin) * job.gpus)


def _with_present_runs(
    counters: dict[CounterKey, float], jobs: Mapping[str, Job], now: float
) -> dict[CounterKey, float]:
    """The GPU seconds up to now. They never fall, also if a run turns out to have ended before the previous answer."""
    total = {key._replace(name=GPU_S): value for key, value in counters.items() if key.name == GPU_S_OF_RUNS}
    for job in jobs.values():
        tracked = job.tracked
        if tracked.state == "RUNNING" and tracked.started is not None and job.gpus:
            key = CounterKey(GPU_S, *job.place)
            seconds = min(now, tracked.missing_since or now) - tracked.started
            total[key] = total.get(key, 0.0) + max(0.0, seconds) * job.gpus
    return counters | {key: max(value, counters.get(key, 0.0)) for key, value in total.items()}
