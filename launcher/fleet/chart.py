"""Use of the GPUs of a job in its last hour, as lines of bars, out of the CSV files of its sidecars."""

import calendar
import csv
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from exporter.contract.manifest import Manifest
from exporter.contract.records import JsonValue
from exporter.files.outputs.csv_reader import is_sidecar_csv
from launcher.errors import LauncherError
from launcher.fleet.columns import render_table
from launcher.fleet.own_runs import read_within
from launcher.watch.text import printable_line, size_text
from launcher.words import duration_text

HOUR_S = 3600.0
BARS = 60  # of one line: a minute each
MOST_BYTES = 8 << 20  # read from the end of a file: an hour of 16 GPUs with a line each second takes 4 MiB
MOST_VALUE = 1e9  # percent or GB; also NaN is none
GB = 1 << 30  # as the files mean it
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*%#"  # levels of a bar, from none to all
GROUP = "output"  # path group with the files


class Sample(NamedTuple):
    """One line of a file. None is unknown."""

    time: float
    node: str
    gpu: str
    utilization_ratio: float | None
    memory_bytes: float | None
    memory_total_bytes: float | None


def read_samples(manifest: Manifest) -> list[Sample]:
    """The samples of the last hour before the newest one. Raises LauncherError if there are no files."""
    group = next((group for group in manifest.groups if group.name == GROUP), None)
    folder = None if group is None else Path(os.path.abspath(manifest.directory(group)))
    if folder is None or not manifest.gpu_metrics:
        raise LauncherError(
            "the job keeps no history of its GPUs; set `monitoring: {gpu_metrics: true}` in its job file, "
            "or leave out --chart for the latest values"
        )
    texts = read_within(("files",), lambda _: [_read_end(path) for path in _files(folder)])
    samples = [sample for _, found in texts for text in found for sample in parse_samples(text)]
    if not samples:
        raise LauncherError(f"{folder}: no sidecar has written GPU readings there yet; try again in a minute")
    last = max(sample.time for sample in samples)
    return [sample for sample in samples if sample.time >= last - HOUR_S]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_sidecar_csv(path.name) and path.suffix == ".csv")


def _read_end(path: Path) -> str:
    with path.open("rb") as source:
        size = source.seek(0, os.SEEK_END)
        source.seek(max(0, size - MOST_BYTES))
        return source.read(MOST_BYTES).decode("utf-8", "replace")


def parse_samples(text: str) -> list[Sample]:
    """Parse lines of the CSV file of a sidecar; its header and incomplete lines are skipped."""
    found = []
    for cells in csv.reader(text.replace("\0", "").splitlines()):
        try:
            moment = calendar.timegm(time.strptime(cells[0], "%Y-%m-%dT%H:%M:%SZ"))
            percent, used, total = map(_number, cells[3:6])
        except (ValueError, IndexError):
            continue
        found.append(
            Sample(
                float(moment),
                cells[1],
                cells[2],
                None if percent is None else percent / 100,
                None if used is None else used * GB,
                None if total is None else total * GB,
            )
        )
    return found


def _number(text: str) -> float | None:
    """A value, None if it is empty. Raises ValueError."""
    value = float(text) if text else None
    if value is not None and not 0.0 <= value <= MOST_VALUE:
        raise ValueError(text)
    return value


class Line(NamedTuple):
    """One GPU: the mean of each span of time, None where nothing was measured."""

    gpu: str
    utilization: tuple[float | None, ...]
    memory_bytes: tuple[float | None, ...]
    memory_total_bytes: float | None


class Chart(NamedTuple):
    """All GPUs of a job over the same time."""

    since: float
    until: float
    lines: tuple[Line, ...]


def make_chart(samples: Sequence[Sample]) -> Chart:
    """The chart of some samples."""
    since, until = min(each.time for each in samples), max(each.time for each in samples)
    by_gpu: dict[tuple[str, str], list[Sample]] = {}
    for each in samples:
        by_gpu.setdefault((each.node, each.gpu), []).append(each)
    bars = min(BARS, max(map(len, by_gpu.values())))
    several = len({node for node, _ in by_gpu}) > 1
    lines = []
    for (node, gpu), own in by_gpu.items():
        spans: list[list[Sample]] = [[] for _ in range(bars)]
        for each in own:
            spans[min(bars - 1, int(bars * (each.time - since) / (until - since or 1.0)))].append(each)
        lines.append(
            Line(
                f"{node}:{gpu}" if several else gpu,
                tuple(_mean(each.utilization_ratio for each in span) for span in spans),
                tuple(_mean(each.memory_bytes for each in span) for span in spans),
                max((each.memory_total_bytes for each in own if each.memory_total_bytes is not None), default=None),
            )
        )
    return Chart(since, until, tuple(lines))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def bars(values: Iterable[float | None], most: float | None, levels: str = BLOCKS) -> str:
    """One character for each value, a space where it is unknown; ``most`` is the highest bar."""
    return "".join(
        " " if value is None or not most else levels[int(min(len(levels) - 1, len(levels) * max(0.0, value) / most))]
        for value in values
    )


def render_chart(chart: Chart, now: float, levels: str = BLOCKS) -> list[str]:
    """A line for each GPU, and the time that the bars cover."""
    rows = []
    for line in chart.lines:
        use = next((value for value in reversed(line.utilization) if value is not None), None)
        memory = next((value for value in reversed(line.memory_bytes) if value is not None), None)
        total = "" if line.memory_total_bytes is None else f"/{size_text(line.memory_total_bytes)}"
        rows.append(
            (
                printable_line(line.gpu),
                bars(line.utilization, 1.0, levels),
                "-" if use is None else f"{100 * use:.0f}%",
                bars(line.memory_bytes, line.memory_total_bytes, levels),
                "-" if memory is None else f"{size_text(memory)}{total}",
            )
        )
    span, age = duration_text(chart.until - chart.since), duration_text(max(0.0, now - chart.until))
    note = f"{span} up to {age} ago, from the sidecars; the numbers are those of the last bar"
    return [*render_table(("GPU", "USE", "", "MEMORY", ""), rows), "", note]


def chart_json(chart: Chart) -> dict[str, JsonValue]:
    """The chart as a JSON object; unknown values are null."""
    gpus: list[JsonValue] = [
        {
            "gpu": line.gpu,
            "utilization_ratio": list(line.utilization),
            "memory_bytes": list(line.memory_bytes),
            "memory_total_bytes": line.memory_total_bytes,
        }
        for line in chart.lines
    ]
    return {"schema": 1, "since": chart.since, "until": chart.until, "gpus": gpus}
