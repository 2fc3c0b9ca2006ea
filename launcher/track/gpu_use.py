"""Use of a job's GPUs: from its sidecars, or from ``gpu_metrics.csv`` beside its log."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.slurm.tracking import TrackedJob
from launcher.rundir.statuses import read_statuses
from launcher.track.run_log import GpuUse

CSV_FILE = "gpu_metrics.csv"
MOST_BYTES = 16 * 1024  # read from the end of the file; the last row of each of 64 GPUs takes less
_UNITS = {"gib": 2.0**30, "gb": 2.0**30, "mib": 2.0**20, "mb": 2.0**20, "kib": 2.0**10, "kb": 2.0**10, "bytes": 1.0}
_NUMBER = re.compile(r"\s*([\d.]+)\s*\[?([A-Za-z%]*)")


def read_gpu_use(job: TrackedJob) -> GpuUse | None:
    """The latest use of the job's GPUs; None if nothing is known of it."""
    if job.run_dir is not None:
        nodes = read_statuses(Path(job.run_dir), job.attempt - 1).values()
        devices = [device for status in nodes if status.gpus is not None for device in status.gpus.gpus]
        uses = [
            GpuUse(device.utilization_ratio, device.memory_used_bytes, device.memory_total_bytes)
            for device in devices
            if device.utilization_ratio is not None
            and device.memory_used_bytes is not None
            and device.memory_total_bytes is not None
        ]
        if uses:
            return _together(uses)
    if job.log is None:
        return None
    folder = Path(job.run_dir) if job.run_dir is not None else Path(job.log).parent
    try:
        with run_files.open_regular(folder / CSV_FILE) as source:
            header = source.readline(MOST_BYTES).decode("utf-8", "replace")
            source.seek(max(source.tell(), source.seek(0, 2) - MOST_BYTES))
            return parse_gpu_metrics(header, source.read(MOST_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None  # the job has just started


def parse_gpu_metrics(header: str, end: str) -> GpuUse | None:
    """The last row of each GPU, from the header and the last lines of the file.

    Columns are found by names such as ``utilization.gpu [%]``, ``memory.used [MiB]``, ``gpu_util`` and
    ``mem_total_gb``. None without them, or if the unit of the memory is unknown.
    """
    names = [name.strip().lower() for name in _cells(header)]
    gpu = next((name for name in names if name in ("index", "gpu", "gpu_id", "gpu_index", "uuid")), None)
    utilization = next((name for name in names if "util" in name and "mem" not in name), None)
    used = next((name for name in names if "mem" in name and "used" in name), None)
    total = next((name for name in names if "mem" in name and "total" in name), None)
    latest: dict[str, GpuUse] = {}
    if utilization is None or used is None or total is None:
        return None
    for line in end.split("\n"):
        cells = _cells(line)
        row = dict(zip(names, cells, strict=False))
        values = [_number(row, utilization, percent=True), _number(row, used), _number(row, total)]
        known = [value for value in values if value is not None]
        if len(cells) == len(names) and len(known) == len(values):
            latest[row[gpu] if gpu is not None else ""] = GpuUse(*known)
    return _together(list(latest.values())) if latest else None


def _cells(line: str) -> list[str]:
    """Cells of one row; none if it is no row, for example with a carriage return in its middle."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _number(row: Mapping[str, str], name: str, *, percent: bool = False) -> float | None:
    """A value in base units: its unit stands behind it, or in the name of its column."""
    found = _NUMBER.match(row.get(name, ""))
    if found is None:
        return None
    try:
        number = float(found[1])
    except ValueError:
        return None
    if percent:
        return number if "ratio" in name else number / 100
    unit = found[2].lower() or next((unit for unit in re.split(r"[^a-z]+", name) if unit in _UNITS), "")
    return number * _UNITS[unit] if unit in _UNITS else None


def _together(uses: Sequence[GpuUse]) -> GpuUse:
    return GpuUse(
        sum(use.utilization_ratio for use in uses) / len(uses),
        sum(use.memory_used_bytes for use in uses),
        sum(use.memory_total_bytes for use in uses),
    )
