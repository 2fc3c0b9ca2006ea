"""The progress file that a worker may write: one JSON object a line, and what each says.

    {"done": 10, "total": 100, "loss": 0.3}

``done`` and ``total`` count ``unit`` (items without one), ``epoch`` and ``epochs`` count from 0
like the loop that prints them, ``phase`` is what the worker does now, ``resumed`` says that the
work goes on at ``done``, ``rank`` who writes where several share the file. Any further number is
a value under its name. ``null`` stands for what is not known.
"""

import json
import math
import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from exporter.logs.search.findings import MARKS, UNITS, ActivityMark, LogFindings, LogPosition, LogValue

MOST_RECORD_BYTES = 64 * 1024
MOST_NAMES = 32  # names of values of one worker: each is a series
WHOLE_TEXT_BYTES = 256 * 1024  # up to here every record of a text counts
END_BYTES = 64 * 1024
"""Of a longer one its last records count, and the last before them that tells of a resume: a worker that
writes without end must not cost its node more than others."""

PATTERN = "progress_file"  # name of the pattern of its positions
WORKING = "working"

_MOST_COUNT = 10**18 - 1
_COUNTS = ("done", "total", "epoch", "epochs", "rank")
_OF = (("done", "total"), ("epoch", "epochs"))  # of which each first one is a part of the second
_WORDS = ("unit", "phase")
_KEYS = {*_COUNTS, *_WORDS, "resumed"}
_UNIT_OF = {word: unit for unit in UNITS for word in (unit, unit.removesuffix("s"))} | {"batch": "batches"}
_UNSAFE = re.compile(r"[^\w.:@+-]")
_NAME_LENGTH = 128
_RESUMED = re.compile(rb'"resumed"\s*:\s*true')


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """What one record says."""

    position: LogPosition | None = None
    values: dict[str, LogValue] = field(default_factory=dict)
    mark: ActivityMark | None = None
    """Begins for the phases of ``parse_updates.MARKS``; any other phase is the work itself, and ends what has begun."""
    rank: int | None = None  # whose values these are


@dataclass
class ProgressUpdates(LogFindings):
    """What a piece of the file says."""

    records: int = 0  # records looked at, blank ones left out
    unusable: int = 0  # those of them that are no update
    phase: str | None = None  # what the worker is at after them, if not at its work


def parse_update(record: bytes, offset: int) -> ProgressUpdate | None:
    """The update in one record that begins at ``offset``; None when it is none, or says nothing.

    A count that is no whole number from 0 up, or more than all, makes the record unusable; a fraction is rounded down.
    A value may be NaN, infinite or negative: a loss can be.
    """
    if len(record) > MOST_RECORD_BYTES:
        return None
    try:
        told = json.loads(record.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    counts: dict[str, int] = {}
    for key in _COUNTS:
        given = told.get(key)
        if given is not None:
            count = _count(given)
            if count is None:
                return None
            counts[key] = count
    if any(counts.get(done, 0) > counts.get(total, _MOST_COUNT) for done, total in _OF):
        return None
    words = {key: told[key] for key in _WORDS if told.get(key) is not None}
    resumed = told.get("resumed") or False
    if not all(isinstance(word, str) for word in words.values()) or not isinstance(resumed, bool):
        return None
    update = ProgressUpdate(
        _position(counts, words.get("unit", ""), resumed, offset),
        dict(_values(told, offset)),
        _mark(words["phase"], offset) if "phase" in words else None,
        counts.get("rank"),
    )
    return update if update.position is not None or update.values or update.mark is not None else None


def _count(given: object) -> int | None:
    """A whole number of at most 18 digits, or None."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= _MOST_COUNT:
        return None
    return int(given)


def _position(counts: dict[str, int], unit: str, resumed: bool, offset: int) -> LogPosition | None:
    epoch, epochs = counts.get("epoch"), counts.get("epochs")
    if "done" in counts:
        unit = _UNIT_OF.get(unit.strip().lower(), "items")  # images, rows and samples are items
        done, total = counts["done"], counts.get("total")
    elif epoch is not None:
        unit, done, total, epoch, epochs = "epochs", epoch, epochs, None, None
    else:
        return None
    return LogPosition(PATTERN, unit, offset, done, total, epoch, epochs, counts.get("rank"), resumed)


def _mark(phase: str, offset: int) -> ActivityMark:
    name = phase.strip().lower()
    return ActivityMark(name, True, offset) if name in MARKS else ActivityMark(WORKING, False, offset)


def _values(told: dict[str, object], offset: int) -> Iterator[tuple[str, LogValue]]:
    """The first so many further numbers, by safe names."""
    names: set[str] = set()
    for key, given in told.items():
        if key in _KEYS or isinstance(given, bool) or not isinstance(given, int | float):
            continue
        name = _safe_name(key)
        if name and (name in names or len(names) < MOST_NAMES):
            names.add(name)
            yield name, LogValue(_float(given), offset)


def _float(given: float) -> float:
    try:
        return float(given)
    except OverflowError:
        return math.inf if given > 0 else -math.inf


def _safe_name(text: str) -> str:
    """The name as a label may carry it, like every other text that users choose."""
    return _UNSAFE.sub("_", text)[:_NAME_LENGTH]


def parse_updates(text: bytes, offset: int, known: Collection[str] = (), phase: str | None = None) -> ProgressUpdates:
    """What whole records say, of which the first begins at ``offset``.

    ``known`` are the names of this worker's values so far: beyond ``MOST_NAMES`` no new one is taken.
    ``phase`` is what the worker was at before, as the last ``ProgressUpdates`` have told: only a change is a mark.
    """
    found = ProgressUpdates(phase=phase)
    names = set(known)
    for start, record in _records(text):
        found.records += 1
        update = parse_update(record, offset + start)
        if update is None:
            found.unusable += 1
            continue
        if update.position is not None:
            found.positions.append(update.position)
        if update.mark is not None:
            _change_phase(found, update.mark)
        for name, value in update.values.items():
            if name in names or len(names) < MOST_NAMES:
                names.add(name)
                found.values.setdefault(name, {})[update.rank] = value
    return found


def _change_phase(found: ProgressUpdates, mark: ActivityMark) -> None:
    phase = mark.name if mark.begins else None
    if phase != found.phase:
        if found.phase is not None:
            found.marks.append(ActivityMark(found.phase, False, mark.offset))
        if phase is not None:
            found.marks.append(mark)
    found.phase = phase


def _records(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Records that count, with their places in ``text``; blank ones are none."""
    if len(text) > WHOLE_TEXT_BYTES:
        end = _next_record(text, len(text) - END_BYTES)
        yield from _last_resume(text[:end])
    else:
        end = 0
    place = end
    for record in text[end:].replace(b"\r", b"\n").split(b"\n"):
        if record and not record.isspace():
            yield place, record
        place += len(record) + 1


def _last_resume(text: bytes) -> Iterator[tuple[int, bytes]]:
    """The last record that tells of a resume: what comes before it is not gone on with."""
    for match in deque(_RESUMED.finditer(text), 1):
        start = max(text.rfind(b"\n", 0, match.start()), text.rfind(b"\r", 0, match.start())) + 1
        yield start, text[start : _next_record(text, match.end())].rstrip(b"\r\n")


def _next_record(text: bytes, place: int) -> int:
    """Where the first record after the one at ``place`` begins."""
    ends = [found for found in (text.find(b"\n", place), text.find(b"\r", place)) if found >= 0]
    return min(ends, default=len(text) - 1) + 1
