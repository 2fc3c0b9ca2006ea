"""CPU, memory and GPUs of one job: `gpujob metrics`."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from exporter.contract.records import JsonValue, to_json
from exporter.contract.report import Report
from exporter.contract.status import NodeStatus
from exporter.slurm.accounting import Attempt, gpu_counts, tres
from exporter.slurm.queue import QueueRow
from exporter.slurm.usage import RunningUse
from launcher.fleet.columns import render_table
from launcher.watch.text import printable_line
from launcher.words import duration_text

HEAD = ("NAME", "STATUS", "CPU", "MEMORY", "GPU")
SIDECARS, REPORT, SSTAT, SACCT = "sidecars", "report", "sstat", "accounting"  # sources


class GpuMetrics(NamedTuple):
    """One GPU. None is unknown."""

    gpu: str
    utilization_ratio: float | None = None
    memory_bytes: float | None = None
    memory_total_bytes: float | None = None


class Metrics(NamedTuple):
    """A job on one node, or the whole job."""

    name: str
    status: str
    cpu_cores: float | None = None  # mean CPU time per second
    memory_bytes: float | None = None
    memory_limit_bytes: float | None = None
    gpus: tuple[GpuMetrics, ...] = ()
    gpus_allocated: int | None = None  # where nothing is known about their use


class JobMetrics(NamedTuple):
    """All nodes of a job, and where that is from."""

    source: str
    time: float | None  # of the latest value
    rows: tuple[Metrics, ...]


def sidecar_metrics(name: str, state: str, statuses: Mapping[str, NodeStatus]) -> JobMetrics:
    """The last values of the sidecars; with several nodes one row each."""
    rows = []
    for node, status in sorted(statuses.items()):
        memory, gpus = status.memory, status.gpus
        shares = [
            worker.cpu_s / (end - start)
            for worker in status.workers
            # its CPU time is that of all its runs, and its start that of the latest one
            if (start := status.job.start if worker.restarts else worker.start) is not None
            and worker.cpu_s is not None
            and (end := (worker.exit.time if worker.exit is not None else None) or status.time) > start
        ]
        devices = () if gpus is None else gpus.gpus
        rows.append(
            Metrics(
                name if len(statuses) == 1 else f"{name}/{node}",
                state,
                sum(shares) if shares else None,
                None if memory is None else memory.used_bytes,
                None if memory is None else memory.limit_bytes,
                tuple(
                    GpuMetrics(each.gpu, each.utilization_ratio, each.memory_used_bytes, each.memory_total_bytes)
                    for each in devices
                ),
            )
        )
    return JobMetrics(SIDECARS, max(status.time for status in statuses.values()), tuple(rows))


def report_metrics(report: Report) -> JobMetrics:
    """Means of utilization and peaks of memory over the whole job."""
    cpu_s = [worker.cpu_s for worker in report.workers if worker.cpu_s is not None]
    memory = [worker.exit.max_rss_bytes for worker in report.workers if worker.exit and worker.exit.max_rss_bytes]
    gpus = [
        GpuMetrics(
            gpu.gpu if len(report.gpus.nodes) == 1 else f"{node.node}:{gpu.gpu}",
            gpu.utilization_mean_ratio,
            gpu.memory_peak_bytes,
            gpu.memory_total_bytes,
        )
        for node in (report.gpus.nodes if report.gpus is not None else ())
        for gpu in node.gpus
        if report.gpus is not None
    ]
    row = Metrics(
        report.job_name,
        report.state,
        sum(cpu_s) / report.duration_s if cpu_s and report.duration_s else None,
        sum(memory) if memory else None,
        gpus=tuple(gpus),
    )
    return JobMetrics(REPORT, report.end, (row,))


def running_metrics(row: QueueRow, use: RunningUse, now: float) -> JobMetrics:
    """A running job of Slurm; nothing is known of its GPUs but their number."""
    elapsed_s = None if row.snapshot.started is None else now - row.snapshot.started
    metrics = Metrics(
        row.name,
        row.snapshot.state,
        use.cpu_s / elapsed_s if use.cpu_s is not None and elapsed_s else None,
        use.memory_bytes,
        tres(row.resources, "mem"),
        gpus_allocated=sum(gpu_counts(row.resources).values()) or None,
    )
    return JobMetrics(SSTAT, now, (metrics,))


def ended_metrics(attempts: Sequence[Attempt]) -> JobMetrics:
    """The last attempt of each task of a job by the accounting: means of the CPU, peaks of the memory."""
    last = {attempt.job_id: attempt for attempt in sorted(attempts, key=lambda each: each.snapshot.submitted or 0.0)}
    rows = []
    for attempt in last.values():
        figures = attempt.figures()
        rows.append(
            Metrics(
                attempt.name if len(last) == 1 else attempt.job_id,
                attempt.snapshot.state,
                None if figures.cpu_ratio is None else figures.cpu_ratio * attempt.cpus,
                figures.memory_bytes,
                figures.memory_requested_bytes,
                gpus_allocated=sum(gpu_counts(attempt.resources).values()) or None,
            )
        )
    ends = [attempt.snapshot.ended for attempt in last.values() if attempt.snapshot.ended is not None]
    return JobMetrics(SACCT, max(ends, default=None), tuple(rows))


def render_metrics(metrics: JobMetrics, now: float) -> list[str]:
    """One line for each GPU, the job's own cells in the first one, and where the values are from."""
    rows: list[tuple[str, ...]] = []
    for row in metrics.rows:
        cpu = "-" if row.cpu_cores is None else f"{100 * row.cpu_cores:.0f}%"
        first = (printable_line(row.name), printable_line(row.status.lower()), cpu, _memory_text(row), _gpu_text(row))
        rows.append(first)
        rows += [("", "", "", "", _device_text(gpu)) for gpu in row.gpus[1:]]
    return [*render_table(HEAD, rows), "", _source_text(metrics, now)]


def _source_text(metrics: JobMetrics, now: float) -> str:
    age = "" if metrics.time is None else f", {duration_text(max(0.0, now - metrics.time))} ago"
    words = {
        SIDECARS: f"from the sidecars of the job{age}; CPU is the mean since the start, and 100% is one core",
        REPORT: f"from the report of the job, which ended{age.lstrip(',')}; means of CPU and GPU, peaks of memory",
        SSTAT: f"from sstat{age}; CPU is the mean since the start, and 100% is one core",
        SACCT: f"from accounting, the job ended{age.lstrip(',')}; means of the CPU, peaks of the memory",
    }
    return words[metrics.source]


def _memory_text(row: Metrics) -> str:
    if row.memory_bytes is None:
        return "-"
    return _size(row.memory_bytes) + (f"/{_size(row.memory_limit_bytes)}" if row.memory_limit_bytes else "")


def _gpu_text(row: Metrics) -> str:
    if row.gpus:
        return _device_text(row.gpus[0])
    return "-" if row.gpus_allocated is None else f"{row.gpus_allocated} allocated, use unknown"


def _device_text(gpu: GpuMetrics) -> str:
    """``gpu=0 mem=72.48GiB/80.00GiB util=93%``; what is unknown is left out."""
    total = f"/{_size(gpu.memory_total_bytes)}" if gpu.memory_total_bytes else ""
    memory = "" if gpu.memory_bytes is None else f" mem={_size(gpu.memory_bytes)}{total}"
    use = "" if gpu.utilization_ratio is None else f" util={100 * gpu.utilization_ratio:.0f}%"
    return f"gpu={printable_line(gpu.gpu)}{memory}{use}"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f}{unit}"
        count /= 1024
    return f"{count:.2f}GiB"


def metrics_json(metrics: JobMetrics) -> dict[str, JsonValue]:
    """The values as a JSON object."""
    shares = [gpu.utilization_ratio for gpu in _all_gpus(metrics.rows) if gpu.utilization_ratio is not None]
    return {
        "schema": 1,
        "source": metrics.source,
        "time": metrics.time,
        "gpu_utilization_ratio": fmean(shares) if shares else None,
        "jobs": to_json(metrics.rows),
    }


def _all_gpus(rows: Iterable[Metrics]) -> list[GpuMetrics]:
    return [gpu for row in rows for gpu in row.gpus]
