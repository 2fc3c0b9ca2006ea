"""Used shares of the budgets of users and of sweeps."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from exporter.contract.budget import Budget
from exporter.hub import costs
from exporter.hub.jobs import Job
from exporter.hub.runs.reports import Run, is_of_run
from exporter.hub.store import Sums, name_of
from exporter.slurm.prices import DEFAULT
from exporter.slurm.states import array_of


def user_budget_use(
    budgets: Mapping[str, Budget], sums: Iterable[Sums], jobs: Iterable[Job], now: float
) -> dict[tuple[str, str], float]:
    """The used share by user and kind, from the sums of ended jobs and from jobs that run."""
    use = dict[tuple[str, str], float]()
    active = [job for job in jobs if job.tracked.is_active]
    for user, (gpu_s, amount) in _user_totals(sums, active, now).items():
        budget = budgets.get(user, budgets.get(DEFAULT))
        if budget is not None:
            use |= {(user, kind): ratio for kind, ratio in budget.used(gpu_s, amount)}
    return use


def _user_totals(
    sums: Iterable[Sums], active: Iterable[Job], now: float
) -> dict[str, tuple[float | None, float | None]]:
    """GPU seconds and list price of each user, of ended jobs and of those that run. None where nothing is known."""
    found: dict[str, tuple[float | None, float | None]] = {}
    shares = [(each.name, each.gpu_s, each.cost) for each in sums]
    shares += [(job.user, costs.gpu_seconds(job, now), costs.cost(job, now)) for job in active]
    for user, gpu_s, amount in shares:
        before_s, before = found.get(user, (None, None))
        found[user] = costs.plus(before_s, gpu_s), costs.plus(before, amount)
    return found


def sweeps_with_budgets(
    runs: Iterable[Run], jobs: Mapping[str, Job], tasks_of: Callable[[Iterable[str], str], Iterable[Job]], now: float
) -> Iterator[tuple[Job, Mapping[str, float]]]:
    """Sweeps with a budget and tasks that have not ended, each as one job, and the used shares.

    ``tasks_of`` finds the tasks of a user's arrays in the index.
    """
    by_array: dict[str, list[Job]] = {}
    for job in jobs.values():
        by_array.setdefault(array_of(job.tracked.job_id), []).append(job)
    for run in runs:
        if run.budget is None or run.job_id in jobs or not run.job_id.isdecimal():
            continue
        own = (job for job_id in run.job_ids for job in by_array.get(job_id, ()))
        present = {name_of(job): job for job in own if is_of_run(job, run)}
        if all(job.tracked.is_over for job in present.values()):
            continue
        past = {name_of(job): job for job in tasks_of(run.job_ids, run.user) if is_of_run(job, run)}
        first = next(iter(present.values()))
        whole = first._replace(tracked=first.tracked.replace(job_id=run.job_id))
        yield whole, _sweep_budget_use(run.budget, (past | present).values(), now)


def _sweep_budget_use(budget: Budget, tasks: Iterable[Job], now: float) -> Mapping[str, float]:
    """The used share of each limit in the budget of a sweep, which all its tasks use together."""
    gpu_s: float | None = None
    amount: float | None = None
    for task in tasks:
        gpu_s, amount = costs.plus(gpu_s, costs.gpu_seconds(task, now)), costs.plus(amount, costs.cost(task, now))
    return dict(budget.used(gpu_s, amount))
