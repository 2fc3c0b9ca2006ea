"""Jobs of the queue, of this machine and of the accounting: the table and the JSON of `gpujob ps`."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from exporter.contract.records import JsonValue
from exporter.slurm.accounting import Attempt, Figures, gpu_counts, tres
from exporter.slurm.prices import Prices
from exporter.slurm.queue import QueueRow
from exporter.slurm.states import ENDS, array_of, is_part_of, task_ids, waits_with
from launcher.fleet.columns import render_table
from launcher.fleet.own_runs import Pipeline, RunProgress
from launcher.fleet.pending import advice_lines
from launcher.registry.entries import LOCAL_PREFIX
from launcher.rundir.job_ids import task_ranges
from launcher.watch.text import printable_line
from launcher.words import duration_text, percent_text

HEAD = (
    *("NAME", "JOB", "BACKEND", "GPU", "PRICE", "STATUS", "PROGRESS", "ETA", "MARGIN", "COST", "CPU%", "MEM%"),
    "SUBMITTED",
)
MORE = (
    *("USER", "PARTITION", "ACCOUNT", "QOS", "NODES", "ELAPSED", "LIMIT", "IDLE", "ENERGY"),
    *("ATTEMPT", "EXIT", "DEPENDENCY", "RESOURCES", "RUN_DIR"),
)  # with -v
OPTIONAL = ("PRICE", "PROGRESS", "ETA", "MARGIN", "COST", "CPU%", "MEM%")
OPTIONAL_MORE = ("USER", "ACCOUNT", "QOS", "NODES", "IDLE", "ENERGY", "EXIT", "DEPENDENCY", "RUN_DIR")
LEFT_OUT = (
    "BACKEND",
    "PRICE",
    "MEM%",
    "CPU%",
    "SUBMITTED",
    "COST",
    "GPU",
    "PROGRESS",
    "MARGIN",
    "ETA",
)  # in a narrow window
LEAST_WIDTHS = {"NAME": 24}  # to which a column shrinks before others are left out; the id names the job too
MIB = 1024**2
NOT_MEASURED = Figures()
MOST_FORECAST_S = 90 * 86400.0  # of a start; Slurm forecasts a year behind a job without a time limit
ENDED = frozenset((*ENDS, "INCOMPLETE", "UNKNOWN", "MISSING"))  # the last three of jobs and sweeps without Slurm

STATES = ENDED | {"PENDING", "RUNNING", "SUSPENDED", "REVOKED"}


class Job(NamedTuple):
    """One job, array task, several tasks of an array, or a pipeline in one line."""

    row: QueueRow
    run: RunProgress | None = None  # of a job that gpujob launched
    figures: Figures | None = None  # of an ended job, by accounting
    tasks: Mapping[str, int] = {}  # of an array or a pipeline in one line: how many are in each state
    pipeline: Pipeline | None = None
    parts: Sequence["Job"] = ()  # of an array or heterogeneous job in one line

    @property
    def run_id(self) -> str:
        """The pipeline, array or heterogeneous job to which it belongs; any other job is one of its own."""
        return self.pipeline.run_id if self.pipeline is not None else array_of(self.row.job_id)

    @property
    def state(self) -> str:
        return self.row.snapshot.state

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def backend(self) -> str:
        return "local" if self.row.job_id.startswith(LOCAL_PREFIX) else "slurm"

    def elapsed_s(self, now: float) -> float | None:
        if self.figures is not None and self.figures.elapsed_s is not None:
            return self.figures.elapsed_s
        snapshot = self.row.snapshot
        return None if snapshot.started is None else max(0.0, (snapshot.ended or now) - snapshot.started)

    @property
    def eta_s(self) -> float | None:
        """Forecast seconds to the end; None without one, and while the job is suspended."""
        eta = self.run.eta if self.run is not None and self.state != "SUSPENDED" else None
        return None if eta is None else eta.seconds

    def margin_s(self, now: float) -> float | None:
        """Time between the forecast end and the time limit; negative if the job will miss it."""
        snapshot, eta_s, run = self.row.snapshot, self.eta_s, self.run
        if snapshot.started is None or snapshot.ended is not None or snapshot.limit_s is None:
            return None
        limit_end = (run and run.limit_end) or snapshot.started + snapshot.limit_s  # Slurm moves it after a suspension
        return None if eta_s is None else limit_end - now - eta_s

    @property
    def gpu_idle_ratio(self) -> float | None:
        """Share of the GPU time in which a sidecar looked, and the GPUs were idle."""
        gpus = self.run.gpus if self.run is not None else None
        return gpus.idle_s / gpus.seen_s if gpus is not None and gpus.seen_s and gpus.idle_s is not None else None

    @property
    def energy_j(self) -> float | None:
        """Energy of its GPUs so far."""
        return self.run.gpus.energy_j if self.run is not None and self.run.gpus is not None else None

    def price_per_hour(self, prices: Prices | None) -> float | None:
        """List price of an hour of its GPUs; None without a price."""
        if self.parts:
            live = [job for job in self.parts if not job.has_ended] or self.parts
            prices_of_parts = [(job.price_per_hour(prices), len(task_ids(job.row.job_id))) for job in live]
            return _sum(None if price is None else price * tasks for price, tasks in prices_of_parts)
        return None if prices is None or self.backend == "local" else prices.of_gpus(gpu_counts(self.row.resources))

    def cost(self, prices: Prices | None, now: float) -> float | None:
        """List price of its GPUs so far; None without a price or before its start."""
        if self.parts:
            return _sum(job.cost(prices, now) for job in self.parts)
        elapsed_s = self.elapsed_s(now)
        if prices is None or elapsed_s is None or self.backend == "local":
            return None
        return prices.cost({name: count * elapsed_s for name, count in gpu_counts(self.row.resources).items()})


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _number(job_id: str) -> int:
    """The number that Slurm, or this machine, has counted; that of its array for a task."""
    last = array_of(job_id).rpartition("-")[2]
    return int(last) if last.isdecimal() else -1


SORTS: Mapping[str, Callable[[Job], tuple[object, ...]]] = {
    "submitted": lambda job: (-(job.row.snapshot.submitted or 0.0),),
    "started": lambda job: (-(job.row.snapshot.started or 0.0),),
    "name": lambda job: (job.row.name,),
    "job": lambda job: (_number(job.row.job_id),),
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
            and (not self.states or row.snapshot.state in self.states)
            and (self.since is None or row.snapshot.ended is None or row.snapshot.ended >= self.since)
        )


def ended_rows(
    attempts: Iterable[tuple[QueueRow, Attempt]], queue: Iterable[QueueRow]
) -> list[tuple[QueueRow, Figures]]:
    """Ended jobs of the accounting, with the figures of their last attempts.

    Those that the queue still has keep the queue's row, which knows more.
    """
    in_order = sorted(attempts, key=lambda pair: pair[1].snapshot.submitted or 0.0)
    last: dict[str, tuple[QueueRow, Attempt]] = {}
    restarts = Counter[str]()
    for pair in in_order:
        for task in task_ids(pair[1].job_id):
            restarts[task] += task in last
            last[task] = pair
    shown = {task: row for row in queue for task in task_ids(row.job_id)}
    found = []
    for task, (known, attempt) in last.items():
        row = shown.get(task)
        is_same = row is not None and row.snapshot.state in ENDS and row.snapshot.ended == attempt.snapshot.ended
        if attempt.snapshot.state in ENDS and (row is None or is_same):
            own = known._replace(job_id=task, snapshot=attempt.snapshot._replace(restarts=restarts[task]))
            found.append((row if row is not None and is_same else own, attempt.figures()))
    return found


def shown_jobs(jobs: Iterable[Job], *, ended_too: bool) -> list[Job]:
    """The jobs that have not ended, with the ended ones of their arrays and pipelines, else the last one that ended.

    The newest comes first.
    """
    newest = sorted(jobs, key=lambda job: job.row.snapshot.submitted or 0.0, reverse=True)
    if ended_too or not newest:
        return newest
    has_ended = [job.has_ended for job in newest]
    unfinished = {job.run_id for job, ended in zip(newest, has_ended, strict=True) if not ended}
    wanted = [job for job, ended in zip(newest, has_ended, strict=True) if not ended or job.run_id in unfinished]
    return wanted or [max(newest, key=lambda job: job.row.snapshot.ended or 0.0)]


def rows_of_run(rows: Iterable[QueueRow], names: Mapping[str, str]) -> list[QueueRow]:
    """Those of the jobs that are named by their ids, under these names."""
    found = []
    for row in rows:
        waiting = [job_id for job_id in names if waits_with(row.job_id, job_id)]
        if row.job_id in names:
            found.append(row._replace(name=names[row.job_id]))
        elif waiting or any(is_part_of(row.job_id, job_id) for job_id in names):
            found.append(row)
    return found


def fold_runs(jobs: Iterable[Job]) -> list[Job]:
    """One line for the tasks of an array or the jobs of a pipeline, with how many are in each state."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.run_id, []).append(job)
    return [
        _pipeline(group[0].pipeline, group)
        if group[0].pipeline is not None
        else group[0]
        if len(group) == 1
        else _together(name, group)
        for name, group in groups.items()
    ]


def _pipeline(pipeline: Pipeline, jobs: Sequence[Job]) -> Job:
    found = _together(pipeline.run_id, jobs)
    row = found.row._replace(job_id=pipeline.run_id, name=pipeline.name, resources="", dependency="")
    return found._replace(row=row, parts=())


def _together(name: str, jobs: Sequence[Job]) -> Job:
    tasks = [(task, job) for job in jobs for task in task_ids(job.row.job_id)]
    counts = Counter(job.state for _, job in tasks)
    first = next((job for job in jobs if job.state == "PENDING"), jobs[0])  # it has the reason
    indexes = [int(index) for task, _ in tasks if (index := task.partition("_")[2]).isdecimal()]
    job_id = f"{name}_[{task_ranges(indexes)}]" if len(indexes) == len(tasks) else name
    return first._replace(row=first.row._replace(job_id=job_id), run=None, figures=None, tasks=dict(counts), parts=jobs)


def render_jobs(
    jobs: Sequence[Job], now: float, *, verbose: bool, prices: Prices | None = None, width: int | None = None
) -> list[str]:
    """A line for each job below the head, and what their reasons mean.

    In a window of ``width`` characters some columns are left out, unless all are asked for.
    """
    head = (*HEAD, *(MORE if verbose else ()))
    rows = [_cells(job, now, prices, verbose) for job in jobs]
    optional = (*OPTIONAL, *(OPTIONAL_MORE if verbose else ()))
    lines = render_table(
        head, rows, optional=optional, width=None if verbose else width, left_out=LEFT_OUT, least_widths=LEAST_WIDTHS
    )
    reasons = [
        job.row.snapshot.reason for job in jobs if job.row.snapshot.reason and "PENDING" in (job.state, *job.tasks)
    ]
    notes = [printable_line(line) for line in advice_lines(reasons)]
    return [*lines, *([""] if notes else []), *notes]


def _cells(job: Job, now: float, prices: Prices | None, verbose: bool) -> tuple[str, ...]:
    row, snapshot, run = job.row, job.row.snapshot, job.run
    figures = job.figures or NOT_MEASURED
    submitted = "-" if snapshot.submitted is None else f"{duration_text(max(0.0, now - snapshot.submitted))} ago"
    memory, asked = figures.memory_bytes, figures.memory_requested_bytes
    cells: tuple[str, ...] = (
        row.name,
        row.job_id,
        job.backend,
        _gpu_text(job),
        "-" if prices is None else prices.text(job.price_per_hour(prices)),
        _state_text(job, now),
        _progress_text(run),
        "-" if run is None else "stalled" if run.stalled else duration_text(job.eta_s),
        "-" if run is None else margin_text(job.margin_s(now)),
        "-" if prices is None else prices.text(job.cost(prices, now)),
        _percent(figures.cpu_ratio),
        _percent(memory / asked if memory is not None and asked else None),
        submitted,
    )
    if verbose:
        from exporter.gpus.analysis.node_status import energy_text  # lazy: a tenth of the time without it

        limit = "none" if snapshot.limit_s is None else duration_text(snapshot.limit_s)
        elapsed = "-" if job.tasks else duration_text(job.elapsed_s(now))
        cells += (row.user, row.partition or "-", row.account, row.qos, row.nodes, elapsed, limit)
        cells += (_percent(job.gpu_idle_ratio), energy_text(job.energy_j))
        cells += (
            str(snapshot.restarts + 1),
            figures.exit_code or "-",
            row.dependency,
            row.resources or "-",
            "" if run is None else run.run_dir,
        )
    if all(cells) and "".join(cells).isprintable():
        return cells  # nearly always, and quicker
    return tuple(printable_line(cell) or "-" for cell in cells)


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f}%"


def margin_text(margin_s: float | None) -> str:
    """``+9m 34s`` before the time limit, or ``-5m 00s`` behind it."""
    return "-" if margin_s is None else f"{'-' if margin_s < 0 else '+'}{duration_text(abs(margin_s))}"


def _state_text(job: Job, now: float) -> str:
    snapshot, start = job.row.snapshot, job.row.expected_start
    reason = f" ({snapshot.reason})" if snapshot.reason else ""
    if job.tasks:
        return ", ".join(
            f"{count} {state}{reason if state == 'PENDING' else ''}" for state, count in sorted(job.tasks.items())
        )
    if snapshot.state != "PENDING":
        return snapshot.state
    return (
        snapshot.state
        + reason
        + (f", start in {duration_text(start - now)}" if start and 0 < start - now < MOST_FORECAST_S else "")
    )


def _progress_text(run: RunProgress | None) -> str:
    if run is None or run.items is None:
        return "-"
    if not run.items_expected:
        return f"{run.items:,.0f} {run.unit}"
    return f"{percent_text(run.items, run.items_expected)} {run.items:,.0f}/{run.items_expected:,.0f} {run.unit}"


def _gpu_text(job: Job) -> str:
    """GPUs of the job, of each task of an array, or of all parts of a job whose parts differ."""
    counts = gpu_counts(job.row.resources)
    of_parts = [(gpu_counts(part.row.resources), len(task_ids(part.row.job_id))) for part in job.parts]
    if any(each != counts for each, _ in of_parts):
        total = Counter[str]()
        for each, tasks in of_parts:
            total.update({name: count * tasks for name, count in each.items()})
        return " ".join(f"{name}:{count}" if name else str(count) for name, count in total.items()) or "-"
    text = " ".join(f"{name}:{count}" if name else str(count) for name, count in counts.items())
    return f"{text} x{sum(job.tasks.values())}" if text and job.tasks else text or "-"


def jobs_json(jobs: Iterable[Job], now: float, prices: Prices | None = None) -> dict[str, JsonValue]:
    """Runs with their jobs: a pipeline or an array is a run, and so is any other job."""
    runs: dict[str, list[Job]] = {}
    for job in jobs:
        runs.setdefault(job.run_id, []).append(job)
    return {"schema": 1, "runs": [_run_json(run, now, prices) for run in runs.values()]}


def _run_json(jobs: Sequence[Job], now: float, prices: Prices | None) -> JsonValue:
    states = [job.state for job in jobs]
    running = next((state for state in states if state not in ENDED and state != "PENDING"), None)
    state = running or next((state for state in states if state == "PENDING"), states[0])
    return {
        "run_name": jobs[0].row.name if jobs[0].pipeline is None else jobs[0].pipeline.name,
        "status": state.lower(),
        "submitted_at": _iso_text(jobs[0].row.snapshot.submitted),
        "jobs": [_job_json(job, now, prices) for job in jobs],
    }


def _job_json(job: Job, now: float, prices: Prices | None) -> JsonValue:
    row, snapshot, run = job.row, job.row.snapshot, job.run
    cpus, memory = tres(row.resources, "cpu"), tres(row.resources, "mem")
    gpus = gpu_counts(row.resources)
    cost, price = job.cost(prices, now), job.price_per_hour(prices)
    return {
        "job_name": row.name,
        "job_id": row.job_id,
        "status": snapshot.state.lower(),
        "reason": snapshot.reason,
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
        "attempt": snapshot.restarts + 1,
        "limit_s": snapshot.limit_s,
        "expected_start": _iso_text(row.expected_start),
        "started_at": _iso_text(snapshot.started),
        "ended_at": _iso_text(snapshot.ended),
        "progress": None if run is None else _progress_json(run),
        "eta_s": job.eta_s,
        "margin_s": job.margin_s(now),
        "gpu_idle_ratio": job.gpu_idle_ratio,
        "energy_j": job.energy_j,
        "run_dir": None if run is None else run.run_dir,
        "figures": None if job.figures is None else job.figures.to_json(),
        "price_per_hour": None if price is None or prices is None else {"amount": price, "currency": prices.currency},
        "cost": None if cost is None or prices is None else {"amount": round(cost, 4), "currency": prices.currency},
    }


def _progress_json(run: RunProgress) -> JsonValue:
    return {"items": run.items, "items_expected": run.items_expected, "unit": run.unit, "stalled": run.stalled}


def _iso_text(moment: float | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
