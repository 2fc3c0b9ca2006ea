"""Counters of a hub by user and partition. They only rise, and go on after a restart."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from exporter.hub.costs import energies, idle_s
from exporter.hub.jobs import Job
from exporter.slurm.prices import HOUR_S, Price
from exporter.slurm.states import ENDS
from exporter.slurm.tracking import UNKNOWN, Change

ENDED, STARTED, WAIT_S, GPU_S, COST = "ended", "started", "wait_s", "gpu_s", "cost"
IDLE_S, ENERGY_J = "idle_s", "energy_j"
GPU_S_OF_RUNS, COST_OF_RUNS = "gpu_s_of_runs", "cost_of_runs"  # of runs that are over
_WHOLE = {GPU_S_OF_RUNS: GPU_S, COST_OF_RUNS: COST}  # public counter of each, which adds the running ones


class CounterKey(NamedTuple):
    """One counter."""

    name: str
    user: str
    partition: str
    state: str = ""  # or the currency of a cost, or the source of an energy


Counters = Mapping[CounterKey, float]


def count(
    counters: Counters,
    before: Mapping[str, Job],
    jobs: Mapping[str, Job],
    new: Collection[str],
    changes: Iterable[Change],
    since: float,
    now: float,
) -> dict[CounterKey, float]:
    """The counters after these changes; changes up to ``since`` do not count.

    ``before`` are the jobs as they were, ``jobs`` as they are now, and ``new`` the keys of those that differ.
    """
    found = dict(counters)
    for place in {jobs[key].place for key in new}:
        found.setdefault(CounterKey(STARTED, *place), 0.0)
    changes = tuple(changes)
    changed = [before[key] for key in {change.job.job_id for change in changes} if key in before]
    begun = {job.tracked.job_id: job.tracked.running_since for job in changed if job.tracked.state == "RUNNING"}
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
    for key in new:
        _add_figures(found, before.get(key), jobs[key])
    return _with_present_runs(found, jobs, now)


def _add_figures(counters: dict[CounterKey, float], before: Job | None, job: Job) -> None:
    """Add what has become known of an attempt that has ended."""
    idle, idle_before = idle_s(job), None if before is None else idle_s(before)
    if idle is not None and idle_before is None:
        _add(counters, CounterKey(IDLE_S, *job.place), idle)
    known = {} if before is None else energies(before)
    for source, energy in energies(job).items():
        if source not in known:
            _add(counters, CounterKey(ENERGY_J, *job.place, source), energy)


def _add(counters: dict[CounterKey, float], key: CounterKey, amount: float) -> None:
    counters[key] = counters.get(key, 0.0) + amount


def _end_of_run(change: Change, before: Job | None) -> float:
    """When a run ended; of a job that is lost, when it was first missing."""
    is_lost = change.job.state == UNKNOWN and before is not None
    missing_since = before.tracked.missing_since if is_lost and before is not None else None
    return change.time if missing_since is None else missing_since


def _add_run(counters: dict[CounterKey, float], job: Job, begin: float | None, end: float) -> None:
    if begin is not None and end > begin:
        for key, amount in _amounts(job, end - begin):
            _add(counters, key, amount)


def _amounts(job: Job, seconds: float) -> Iterator[tuple[CounterKey, float]]:
    """What a run of this time adds to the counters."""
    if job.gpus:
        yield CounterKey(GPU_S_OF_RUNS, *job.place), seconds * job.gpus
    if job.price is not None:
        yield CounterKey(COST_OF_RUNS, *job.place, job.price.currency), seconds * job.price.per_hour / HOUR_S


def _with_present_runs(
    counters: dict[CounterKey, float], jobs: Mapping[str, Job], now: float
) -> dict[CounterKey, float]:
    """The sums up to now. They never fall, also if a run turns out to have ended before the previous answer."""
    total = {key: value for key, value in counters.items() if key.name in _WHOLE}
    seconds = dict[tuple[str, str, str, Price | None], float]()  # jobs that take the same in each second are one sum
    example = dict[tuple[str, str, str, Price | None], Job]()
    for job in jobs.values():
        tracked = job.tracked
        begin = tracked.running_since if tracked.state == "RUNNING" else None
        if begin is not None:
            end, missing_since = now, tracked.missing_since
            if missing_since is not None:
                end = min(now, missing_since)
            alike = job.user, job.partition, job.resources, job.price
            so_far = seconds.get(alike)
            if so_far is None:
                so_far, example[alike] = 0.0, job
            if end > begin:
                so_far += end - begin
            seconds[alike] = so_far
    for alike, job in example.items():
        if job.gpus:
            for key, amount in _amounts(job, seconds[alike]):
                total[key] = total.get(key, 0.0) + amount
    total = {key._replace(name=_WHOLE[key.name]): value for key, value in total.items()}
    return counters | {key: max(value, counters.get(key, 0.0)) for key, value in total.items()}
