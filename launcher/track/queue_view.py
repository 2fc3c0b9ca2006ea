"""Jobs of a user in Slurm's queue: the table and the JSON of `gpujob ps`."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from exporter.contract.records import JsonValue
from exporter.slurm.accounting import tres
from exporter.slurm.queue import QueueRow
from exporter.slurm.states import ENDS, array_of
from launcher.watch.text import printable_line
from launcher.words import duration_text

HEAD = ("NAME", "JOB", "BACKEND", "GPU", "STATUS", "SUBMITTED")
MORE = ("PARTITION", "ELAPSED", "LIMIT", "RESOURCES")  # with -v
MIB = 1024**2
_GPU = "gres/gpu"


def shown_rows(rows: Iterable[QueueRow], *, ended_too: bool) -> list[QueueRow]:
    """The jobs that have not ended, else the last one that ended; newest first."""
    newest = sorted(rows, key=lambda row: row.sight.submitted or 0.0, reverse=True)
    unfinished = [row for row in newest if row.sight.state not in ENDS]
    last = sorted(newest, key=lambda row: row.sight.ended or 0.0)[-1:]
    return newest if ended_too else unfinished or last


def render_rows(rows: Sequence[QueueRow], now: float, *, verbose: bool) -> list[str]:
    """A line for each job below the head."""
    lines = [(*HEAD, *(MORE if verbose else ())), *(_cells(row, now, verbose) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cells(row: QueueRow, now: float, verbose: bool) -> tuple[str, ...]:
    sight = row.sight
    state = f"{sight.state} ({sight.reason})" if sight.reason and sight.state == "PENDING" else sight.state
    gpus = " ".join(f"{name}:{count}" if name else str(count) for name, count in _gpus(row))
    submitted = "-" if sight.submitted is None else f"{duration_text(max(0.0, now - sight.submitted))} ago"
    cells: tuple[str, ...] = (row.name, row.job_id, "slurm", gpus or "-", state, submitted)
    if verbose:
        elapsed = None if sight.started is None else max(0.0, (sight.ended or now) - sight.started)
        limit = "none" if sight.limit_s is None else duration_text(sight.limit_s)
        cells += (row.partition, duration_text(elapsed), limit, row.resources)
    return tuple(map(printable_line, cells))


def _gpus(row: QueueRow) -> list[tuple[str, int]]:
    """GPUs by type; a type that Slurm does not tell is empty."""
    names = [pair.partition("=")[0] for pair in row.resources.split(",") if pair.startswith(_GPU)]
    counts = {name.removeprefix(_GPU).lstrip(":"): int(tres(row.resources, name) or 0) for name in names}
    typed = [(name, count) for name, count in counts.items() if name]
    return typed or [(name, count) for name, count in counts.items() if count]  # all of them together come first


def rows_json(rows: Iterable[QueueRow]) -> dict[str, JsonValue]:
    """Runs with their jobs: an array is a run, and so is any other job."""
    runs: dict[str, list[QueueRow]] = {}
    for row in rows:
        runs.setdefault(array_of(row.job_id), []).append(row)
    return {"schema": 1, "runs": [_run_json(run) for run in runs.values()]}


def _run_json(rows: Sequence[QueueRow]) -> JsonValue:
    states = [row.sight.state for row in rows]
    running = next((state for state in states if state not in (*ENDS, "PENDING")), None)
    state = running or next((state for state in states if state == "PENDING"), states[0])
    return {
        "run_name": rows[0].name,
        "status": state.lower(),
        "submitted_at": _iso_text(rows[0].sight.submitted),
        "jobs": [_job_json(row) for row in rows],
    }


def _job_json(row: QueueRow) -> JsonValue:
    cpus, memory = tres(row.resources, "cpu"), tres(row.resources, "mem")
    return {
        "job_name": row.name,
        "job_id": row.job_id,
        "status": row.sight.state.lower(),
        "reason": row.sight.reason,
        "backend": "slurm",
        "region": row.partition,
        "resources": {
            "gpus": [{"name": name or None, "memory_mib": None} for name, count in _gpus(row) for _ in range(count)],
            "cpus": None if cpus is None else int(cpus),
            "memory_mib": None if memory is None else int(memory / MIB),
        },
        "started_at": _iso_text(row.sight.started),
        "ended_at": _iso_text(row.sight.ended),
    }


def _iso_text(moment: float | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
