"""What a job used: time, GPU seconds, list price, energy and idle time, each only where it is known."""

from collections.abc import Iterable, Mapping

from exporter.contract.records import NOTHING
from exporter.hub.jobs import Job
from exporter.slurm.prices import HOUR_S
from exporter.slurm.tracking import UNKNOWN, TrackedJob

BOARDS = "gpu"  # energy by the counters of the GPUs alone
NODES = "slurm"  # energy of whole nodes in Slurm's accounting


def earlier_s(tracked: TrackedJob) -> float:
    """How long the earlier attempts ran."""
    total, span = 0.0, 0.0
    begin: float | None = None
    for event in tracked.history:
        if event.state == "RUNNING":
            begin = event.moment if begin is None else begin
        elif event.state != UNKNOWN and begin is not None:
            span, begin = span + event.moment - begin, None  # more than one run if it was suspended
        if event.state == "PENDING":
            total, span = total + max(0.0, span), 0.0
    return total


def ran_s(job: Job, now: float) -> float | None:
    """How long all attempts have run; None if that of the last one is not known."""
    tracked = job.tracked
    if tracked.figures is not None:
        last_s = tracked.figures.elapsed_s
    elif tracked.started is None:
        last_s = 0.0
    elif tracked.ended is None and not tracked.is_active:
        return None
    else:
        end = tracked.history[-1].moment if tracked.state == "SUSPENDED" else now
        end = end if tracked.ended is None else tracked.ended
        last_s = max(0.0, end - tracked.started - tracked.suspended_s)
    return None if last_s is None else earlier_s(tracked) + last_s


def gpu_seconds(job: Job, now: float) -> float | None:
    """GPUs times seconds of all attempts."""
    ran = ran_s(job, now)
    return None if ran is None or job.gpus is None else ran * job.gpus


def cost(job: Job, now: float) -> float | None:
    """List price of all attempts; None without a price."""
    ran = ran_s(job, now)
    return None if ran is None or job.price is None else ran * job.price.per_hour / HOUR_S


def budget_use(job: Job, now: float) -> Mapping[str, float]:
    """The used share of each limit in the job's budget."""
    return {} if job.budget is None else dict(job.budget.used(gpu_seconds(job, now), cost(job, now)))


def plus(amount: float | None, more: float | None) -> float | None:
    """The sum of what is known; None if nothing is."""
    return amount if more is None else more + (amount or 0.0)


def energies(job: Job) -> Mapping[str, float]:
    """Energy of the last attempt of an ended job, by its source.

    They measure different things, so they are never added.
    """
    figures, found = job.tracked.figures, dict[str, float]()
    if job.outcome is not None and job.outcome.energy_j is not None:
        found[BOARDS] = job.outcome.energy_j
    if figures is not None and figures.energy_j is not None and job.has_nodes_alone:
        found[NODES] = figures.energy_j
    return found


def idle_s(job: Job, of_running: Mapping[str, float] = NOTHING) -> float | None:
    """GPU seconds of the last attempt in which sidecars saw an idle GPU.

    ``of_running``: idle GPU seconds of running jobs, by run directory.
    """
    return of_running.get(job.tracked.run_dir or "") if job.outcome is None else job.outcome.idle_s


def attempts_of_active(jobs: Iterable[Job]) -> dict[str, int]:
    """The present attempt of each job that runs or is suspended, by run directory, if gpujob launched it."""
    own = (job.tracked for job in jobs if job.tracked.is_active and job.outcome is None)
    return {tracked.run_dir: tracked.restarts for tracked in own if tracked.run_dir is not None}


def seen_ratio(job: Job) -> float | None:
    """Share of the last attempt's GPU time in which sidecars knew the utilization."""
    figures, outcome = job.tracked.figures, job.outcome
    if outcome is None or outcome.seen_s is None or figures is None or not figures.elapsed_s or not job.gpus:
        return None
    return min(1.0, outcome.seen_s / (figures.elapsed_s * job.gpus))
