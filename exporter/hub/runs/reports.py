"""Jobs that gpujob launched among those of Slurm, and what their reports say."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from exporter.contract.budget import Budget
from exporter.contract.records import NOTHING
from exporter.hub.jobs import GPU, Job, Observation, Outcome, update_jobs
from exporter.slurm.queue import AttemptSnapshot, QueueRow, is_of_submission
from exporter.slurm.states import ENDS, array_of
from exporter.slurm.tracking import take_reported_ends

_REPORTED = {"COMPLETED": "COMPLETED", "FAILED": "FAILED", "INCOMPLETE": "FAILED"}  # Slurm's words for ends of a report


class Run(NamedTuple):
    """A job that gpujob launched, as its user has registered it."""

    job_id: str
    user: str  # owner of the entry
    run_dir: str
    submitted: float
    is_monitored: bool = False  # whether its sidecars are to be scraped
    outcome: Outcome | None = None
    name: str = ""
    budget: Budget | None = None
    notify: str = ""
    job_ids: Mapping[str, float] = NOTHING  # all ids and when each was submitted; a sweep has one for each array


def is_of_run(job: Job, run: Run) -> bool:
    """Whether the job with the id of the run is that run. A user is believed about own jobs only."""
    if job.user != run.user or job.first_submitted is None:
        return False
    submitted = run.job_ids.get(array_of(job.tracked.job_id), run.submitted)  # an array of `--resume` is later
    # of a job that the hub first met after a requeue, the first submission is unknown
    return is_of_submission(job.first_submitted, job.tracked.restarts, submitted)


def with_runs(jobs: Mapping[str, Job], runs: Iterable[Run]) -> dict[str, Job]:
    """The jobs with the run directories of those that gpujob launched."""
    found, of_arrays = dict(jobs), dict[str, Run]()
    for run in runs:
        job = found.get(run.job_id)
        if job is None and run.notify:
            of_arrays |= dict.fromkeys(run.job_ids or (run.job_id,), run)  # a sweep has the ids of its arrays
        if job is None or not is_of_run(job, run):
            continue
        if job.tracked.run_dir is None:
            job = job._replace(tracked=job.tracked.replace(run_dir=run.run_dir))
        of_attempt = (each for each in (run.outcome, job.outcome) if each and each.attempt == job.tracked.restarts)
        outcome = next(of_attempt, None)
        learned = (run.is_monitored, outcome, run.budget, run.notify)
        if (job.is_monitored, job.outcome, job.budget, job.notify) != learned:
            job = job._replace(is_monitored=run.is_monitored, outcome=outcome, budget=run.budget, notify=run.notify)
        found[run.job_id] = job
    for key, job in found.items() if of_arrays else ():
        array = of_arrays.get(array_of(key))
        if array is not None and job.notify != array.notify and is_of_run(job, array):
            found[key] = job._replace(notify=array.notify)
    return found


def take_reports(jobs: Mapping[str, Job], now: float, *, has_accounting: bool) -> Observation:
    """Learn the ends of jobs from their own reports.

    Slurm may name other ends otherwise than a report, so its word is awaited. A report decides about them only if
    Slurm has forgotten the job and there is no accounting. So is Slurm's time if that of the report cannot be: the
    clock of its node is off.
    """
    ends = dict[str, AttemptSnapshot]()
    for key, job in jobs.items():
        outcome, tracked = job.outcome, job.tracked
        if outcome is None or tracked.is_over or outcome.end is None:
            continue
        if not (tracked.started or tracked.submitted or 0.0) <= outcome.end <= now:
            continue
        if any(event.time == outcome.end and event.state in ENDS for event in tracked.history):
            continue  # Slurm has contradicted this report
        state = _REPORTED.get(outcome.state, outcome.state)
        is_lost = tracked.missing_since is not None and not has_accounting
        if state in _REPORTED.values() or (is_lost and state in ENDS):
            started = tracked.started if tracked.started is not None else _start(outcome, tracked.submitted)
            ends[key] = AttemptSnapshot(
                state, tracked.submitted, started, outcome.end, tracked.restarts, None, tracked.limit_s
            )
    found = dict(jobs)
    known = take_reported_ends({key: jobs[key].tracked for key in ends}, ends, now)
    update_jobs(found, known)
    return Observation(found, known.changes)


def _start(outcome: Outcome, submitted: float | None) -> float | None:
    """When a reported attempt began, not before its submission."""
    return None if outcome.start is None else max(outcome.start, submitted or 0.0)


def rows_of_runs(jobs: Mapping[str, Job], runs: Iterable[Run], since: float, now: float) -> list[QueueRow]:
    """Ended jobs that Slurm has never listed, as rows: they came and went between two polls."""
    found = []
    for run in runs:
        outcome, is_known = run.outcome, run.job_id in jobs or not run.job_id.isdecimal()
        if is_known or outcome is None or outcome.end is None or run.submitted < since or outcome.end > now:
            continue
        state, started = _REPORTED.get(outcome.state, outcome.state), _start(outcome, run.submitted)
        snapshot = AttemptSnapshot(state, run.submitted, started, outcome.end, outcome.attempt)
        resources = f"{GPU}={outcome.count}" if outcome.count else ""
        found.append(QueueRow(run.job_id, snapshot, run.name, None, "", resources, run.user))
    return found
