"""Jobs of the queue, of this machine and of the accounting: the table and the JSON of `gpujob ps`."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from exporter.contract.records import JsonValue
from exporter.slurm.accounting import Attempt, Figures, gpu_counts, tres
from exporter.slurm.prices import Prices
from exporter.slurm.queue import QueueRow
from exporter.slurm.states import ENDS, array_of, task_ids
from launcher.fleet.columns import render_table
from launcher.fleet.own_runs import RunProgress
from launcher.fleet.pending import advice_lines
from launcher.registry.entries import LOCAL_PREFIX
from launcher.rundir.job_ids import task_ranges
from launcher.watch.text import printable_line
from launcher.words import duration_text

HEAD = ("NAME", "JOB", "BACKEND", "GPU", "STATUS", "PROGRESS", "ETA", "COST", "CPU%", "MEM%", "SUBMITTED")
MORE = (
    *("USER", "PARTITION", "ACCOUNT", "QOS", "NODES", "ELAPSED", "LIMIT", "DEPENDENCY", "RESOURCES", "RUN_DIR"),
)  # with -v
OPTIONAL = ("PROGRESS", "ETA", "COST", "CPU%", "MEM%")
OPTIONAL_MORE = ("USER", "ACCOUNT", "QOS", "NODES", "DEPENDENCY", "RUN_DIR")
LEFT_OUT = ("BACKEND", "MEM%", "CPU%", "SUBMITTED", "COST", "GPU", "PROGRESS", "ETA")  # in a narrow window
MIB = 1024**2
MOST_FORECAST_S = 90 * 86400.0  # of a start; Slurm forecasts a year behind a job without a time limit
ENDED = (*ENDS, "INCOMPLETE", "UNKNOWN")  # the last two of jobs without Slurm


class Job(NamedTuple):
    """One job, array task, or several tasks of an array."""

    row: QueueRow
    run: RunProgress | None = None  # of a running job that gpujob launched
    figures: Figures | None = None  # of an ended job, by accounting
    tasks: Mapping[str, int] = {}  # of an array in one line: how many are in each state

    @property
    def state(self) -> str:
        return self.row.sight.state

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def backend(self) -> str:
        return "local" if self.row.job_id.startswith(LOCAL_PREFIX) else "slurm"

    def elapsed_s(self, now: float) -> float | None:
        if self.figures is not None and self.figures.elapsed_s is not None:
            return self.figures.elapsed_s
        sight = self.row.sight
        return None if sight.started is None else max(0.0, (sight.ended or now) - sight.started)

    def cost(self, prices: Prices | None, now: float) -> float | None:
        """List price of its GPUs so far; None without a price or before its start."""
        elapsed_s = self.elapsed_s(now)
        if prices is None or elapsed_s is None or self.backend == "local":
            return None
        return prices.cost({name: count * elapsed_s for name, count in gpu_counts(self.row.resources).items()})


SORTS: Mapping[str, Callable[[Job], tuple[object, ...]]] = {
    "submitted": lambda job: (-(job.row.sight.submitted or 0.0),),
    "started": lambda job: (-(job.row.sight.started or 0.0),),
    "name": lambda job: (job.row.name,),
    "job": lambda job: tuple(int(part) for part in array_of(job.row.job_id).split("-")[-1:] if part.isdigit()),
    "state": lambda job: (job.state,),
    "gpus": lambda job: (-sum(gpu_counts(job.row.resources).values()),),
}  # the first one is the default


class Filters(NamedTuple):
    """Which jobs are wanted; empty is any."""

    partitions: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    since: float | None = None  # of ended jobs

    def fits(self, row: QueueRow) -> bool:
        return (
            (not self.partitions or not self.partitions.isdisjoint(row.partition.split(",")))
            and (not self.states or row.sight.state in self.states)
            and (self.since is None or row.sight.ended is None or row.sight.ended >= self.since)
        )


def ended_rows(attempts: Iterable[Attempt], queue: Iterable[QueueRow]) -> list[tuple[QueueRow, Figures]]:
    """Ended jobs of the accounting, with the figures of their last attempts.

    Those that the queue still has keep the queue's row, which knows more.
    """
    in_order = sorted(attempts, key=lambda attempt: attempt.sight.submitted or 0.0)
    last = {task: attempt for attempt in in_order for task in task_ids(attempt.job_id)}
    shown = {task: row for row in queue for task in task_ids(row.job_id)}
    found = []
    for task, attempt in last.items():
        row = shown.get(task)
        is_same = row is not None and row.sight.state in ENDS and row.sight.ended == attempt.sight.ended
        if attempt.sight.state in ENDS and (row is None or is_same):
            own = QueueRow(task, attempt.sight, attempt.name, None, resources=attempt.resources, user=attempt.user)
            found.append((row if row is not None and is_same else own, attempt.figures()))
    return found


def shown_rows(rows: Iterable[QueueRow], *, ended_too: bool) -> list[QueueRow]:
    """The jobs that have not ended, with the ended tasks of their arrays, else the last one that ended.

    The newest comes first.
    """
    newest = sorted(rows, key=lambda row: row.sight.submitted or 0.0, reverse=True)
    unfinished = {array_of(row.job_id) for row in newest if row.sight.state not in ENDED}
    wanted = [row for row in newest if array_of(row.job_id) in unfinished]
    last = sorted(newest, key=lambda row: row.sight.ended or 0.0)[-1:]
    return newest if ended_too else wanted or last


def fold_arrays(jobs: Iterable[Job]) -> list[Job]:
    """One line for the tasks of an array, with how many are in each state."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(array_of(job.row.job_id), []).append(job)
    return [group[0] if len(group) == 1 else _together(name, group) for name, group in groups.items()]


def _together(name: str, jobs: Sequence[Job]) -> Job:
    tasks = [(task, job) for job in jobs for task in task_ids(job.row.job_id)]
    counts = Counter(job.state for _, job in tasks)
    first = next((job for job in jobs if job.state == "PENDING"), jobs[0])  # it has the reason
    indexes = [int(index) for task, _ in tasks if (index := task.partition("_")[2]).isdecimal()]
    job_id = f"{name}_[{task_ranges(indexes)}]" if len(indexes) == len(tasks) else name
    return first._replace(row=first.row._replace(job_id=job_id), run=None, figures=None, tasks=dict(counts))


def render_jobs(
    jobs: Sequence[Job], now: float, *, verbose: bool, prices: Prices | None = None, width: int | None = None
) -> list[str]:
    """A line for each job below the head, and what their reasons mean.

    In a window of ``width`` characters some columns are left out, unless all are asked for.
    """
    head = (*HEAD, *(MORE if verbose else ()))
    rows = [_cells(job, now, prices, verbose) for job in jobs]
    optional = (*OPTIONAL, *(OPTIONAL_MORE if verbose else ()))
    lines = render_table(head, rows, optional=optional, width=None if verbose else width, left_out=LEFT_OUT)
    reasons = [job.row.sight.reason for job in jobs if job.row.sight.reason and "PENDING" in (job.state, *job.tasks)]
    notes = [printable_line(line) for line in advice_lines(reasons)]
    return [*lines, *([""] if notes else []), *notes]


def _cells(job: Job, now: float, prices: Prices | None, verbose: bool) -> tuple[str, ...]:
    row, sight, run = job.row, job.row.sight, job.run
    figures = job.figures or Figures()
    submitted = "-" if sight.submitted is None else f"{duration_text(max(0.0, now - sight.submitted))} ago"
    memory, asked = figures.memory_bytes, figures.memory_requested_bytes
    cells: tuple[str, ...] = (
        row.name,
        row.job_id,
        job.backend,
        _gpu_text(job),
        _state_text(job, now),
        _progress_text(run),
        "stalled" if run is not None and run.stalled else duration_text(run.eta.seconds if run and run.eta else None),
        "-" if prices is None else prices.text(job.cost(prices, now)),
        _percent(figures.cpu_ratio),
        _percent(memory / asked if memory is not None and asked else None),
        submitted,
    )
    if verbose:
        limit = "none" if sight.limit_s is None else duration_text(sight.limit_s)
        elapsed = "-" if job.tasks else duration_text(job.elapsed_s(now))
        cells += (row.user, row.partition or "-", row.account, row.qos, row.nodes, elapsed, limit)
        cells += (row.dependency, row.resources or "-", "" if run is None else run.run_dir)
    return tuple(printable_line(cell) or "-" for cell in cells)


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f}%"


def _state_text(job: Job, now: float) -> str:
    sight, start = job.row.sight, job.row.expected_start
    reason = f" ({sight.reason})" if sight.reason else ""
    if job.tasks:
        return ", ".join(
            f"{count} {state}{reason if state == 'PENDING' else ''}" for state, count in sorted(job.tasks.items())
        )
    if sight.state != "PENDING":
        return sight.state
    return (
        sight.state
        + reason
        + (f", start in {duration_text(start - now)}" if start and 0 < start - now < MOST_FORECAST_S else "")
    )


def _progress_text(run: RunProgress | None) -> str:
    if run is None or run.items is None:
        return "-"
    if run.ratio is None:
        return f"{run.items:,.0f} {run.unit}"
    return f"{100 * run.ratio:.1f}% {run.items:,.0f}/{run.items_expected:,.0f} {run.unit}"


def _gpu_text(job: Job) -> str:
    """GPUs of the job, or of each task of an array."""
    counts = gpu_counts(job.row.resources)
    text = " ".join(f"{name}:{count}" if name else str(count) for name, count in counts.items())
    return f"{text} x{sum(job.tasks.values())}" if text and job.tasks else text or "-"


def jobs_json(jobs: Iterable[Job], now: float, prices: Prices | None = None) -> dict[str, JsonValue]:
    """Runs with their jobs: an array is a run, and so is any other job."""
    runs: dict[str, list[Job]] = {}
    for job in jobs:
        runs.setdefault(array_of(job.row.job_id), []).append(job)
    return {"schema": 1, "runs": [_run_json(run, now, prices) for run in runs.values()]}


def _run_json(jobs: Sequence[Job], now: float, prices: Prices | None) -> JsonValue:
    states = [job.state for job in jobs]
    running = next((state for state in states if state not in (*ENDED, "PENDING")), None)
    state = running or next((state for state in states if state == "PENDING"), states[0])
    return {
        "run_name": jobs[0].row.name,
        "status": state.lower(),
        "submitted_at": _iso_text(jobs[0].row.sight.submitted),
        "jobs": [_job_json(job, now, prices) for job in jobs],
    }


def _job_json(job: Job, now: float, prices: Prices | None) -> JsonValue:
    row, sight, run = job.row, job.row.sight, job.run
    cpus, memory = tres(row.resources, "cpu"), tres(row.resources, "mem")
    gpus = gpu_counts(row.resources)
    cost = job.cost(prices, now)
    return {
        "job_name": row.name,
        "job_id": row.job_id,
        "status": sight.state.lower(),
        "reason": sight.reason,
        "backend": job.backend,
        "region": row.partition,
        "resources": {
            "gpus": [{"name": name or None, "memory_mib": None} for name, count in gpus.items() for _ in range(count)],
            "cpus": None if cpus is None else int(cpus),
            "memory_mib": None if memory is None else int(memory / MIB),
        },
        "user": row.user or None,
        "account": row.account or None,
        "qos": row.qos or None,
        "nodes": row.nodes or None,
        "dependency": row.dependency or None,
        "attempt": sight.restarts + 1,
        "limit_s": sight.limit_s,
        "expected_start": _iso_text(row.expected_start),
        "started_at": _iso_text(sight.started),
        "ended_at": _iso_text(sight.ended),
        "progress": None if run is None else _progress_json(run),
        "eta_s": None if run is None or run.eta is None else run.eta.seconds,
        "run_dir": None if run is None else run.run_dir,
        "figures": None if job.figures is None else job.figures.to_json(),
        "cost": None if cost is None or prices is None else {"amount": round(cost, 4), "currency": prices.currency},
    }


def _progress_json(run: RunProgress) -> JsonValue:
    return {"items": run.items, "items_expected": run.items_expected, "unit": run.unit, "stalled": run.stalled}


def _iso_text(moment: float | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
