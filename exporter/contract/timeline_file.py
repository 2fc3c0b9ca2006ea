"""The timeline of a node as a file: ``status/{node}.timeline.json.gz``, and the answer to ``/status?timeline=1``.

One JSON object in which each series has a line of its own, so that neither writer nor reader holds all of it.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

from exporter.contract import run_files
from exporter.contract.records import Record, RecordError, from_json

SUFFIX = ".timeline.json.gz"
LEVEL = 3  # of gzip: a third of the time of the default, and a tenth more bytes
MOST_LINE = 1 << 20  # bytes of one line
MOST_LINES = 10_000
MOST_BYTES = 64 << 20  # of all lines; those of a sidecar have a tenth of it
MOST_TIMES = 10_000
MOST_VALUE = 1e37  # larger ones do not fit into 4 bytes
EXACT = 2.0**24  # below, whole numbers fit into 4 bytes, as do eight digits of others
_FORMATS = ("%.8g", "%.13g")
_SERIES_BEGIN, _SERIES_END = ', "series": [\n', "\n]}\n"
_LABEL = r'[a-zA-Z_]\w*="[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'  # without a step back: a line may have a million bytes
_SERIES = re.compile(rf"[a-zA-Z_:][\w:]*\{{{_LABEL}(?:,{_LABEL})*\}}", re.ASCII)


class TimelineHead(Record):
    """What all series of a timeline share."""

    SCHEMA: ClassVar[int | None] = 1

    job_id: str
    attempt: int
    node: str
    instance: str  # where Prometheus would have scraped the node
    step_s: float  # between points; more are there where a phase began, or a worker ended or restarted
    times: tuple[float, ...]  # of the points, epoch seconds
    moments: tuple[float, ...] = ()  # times of those points


class TimelineSeries(NamedTuple):
    """One series, with the points at which its value changes."""

    series: str  # name and labels, as on the page
    points: Sequence[int]  # numbers of the points, from 0
    values: Sequence[float | None]  # from each of these on; None: absent


def pack_timeline(head: TimelineHead, series: Iterable[TimelineSeries]) -> bytes:
    """Render a timeline and compress it."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, 31)
    packed = bytearray(packer.compress((json.dumps(head.to_json())[:-1] + _SERIES_BEGIN).encode()))
    separator = ""
    for name, points, values in series:
        numbers = ", ".join("null" if value is None else _FORMATS[abs(value) >= EXACT] % value for value in values)
        line = f'{separator}{{"series": {json.dumps(name)}, "points": {list(points)}, "values": [{numbers}]}}'
        packed += packer.compress(line.encode())  # one block, which goes back to the system
        separator = ",\n"
    packed += packer.compress(_SERIES_END.encode()) + packer.flush()
    return bytes(packed)


@contextmanager
def open_timeline(path: Path) -> Iterator[tuple[TimelineHead, Iterator[TimelineSeries]]]:
    """Read a timeline; its series follow one by one. Raises OSError, and RecordError if it is damaged."""
    try:
        with run_files.open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as source:
            lines = _lines(source)
            head = TimelineHead.from_json(
                json.loads(next(lines, b"").removesuffix(_SERIES_BEGIN.rstrip().encode()) + b"}"), "timeline"
            )
            if not _rises(head.times) or len(head.times) > MOST_TIMES:
                raise RecordError("the times do not rise")
            yield head, (_series(line, len(head.times)) for line in lines)
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: {error}; it is damaged") from error


def _lines(source: gzip.GzipFile) -> Iterator[bytes]:
    """The lines without what joins them. The last one ends the object."""
    size = 0
    for _ in range(MOST_LINES):
        line = source.readline(MOST_LINE)
        size += len(line)
        if size > MOST_BYTES:
            raise ValueError("it is too large")
        if line == _SERIES_END.lstrip().encode() and not source.read(1):  # this also compares the checksum
            return
        if not line.endswith(b"\n"):
            break
        if line != b"\n":
            yield line.rstrip(b",\n")
    raise ValueError("it has no end")


def _series(line: bytes, times: int) -> TimelineSeries:
    found = from_json(TimelineSeries, json.loads(line), "series")
    is_whole = len(found.points) == len(found.values) and _rises(found.points)
    is_finite = all(value is None or abs(value) < MOST_VALUE for value in found.values)
    if not (is_whole and is_finite and _SERIES.fullmatch(found.series)):
        raise RecordError("a series is not whole")
    if found.points and not 0 <= found.points[0] <= found.points[-1] < times:
        raise RecordError("a series has points that do not exist")
    return found


def _rises(numbers: Sequence[float]) -> bool:
    return all(math.isfinite(number) for number in numbers) and all(one < two for one, two in pairwise(numbers))
