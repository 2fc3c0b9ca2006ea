"""The progress file that a worker may write: one JSON object a line.

    {"done": 10, "total": 100, "loss": 0.3}

``done`` and ``total`` count ``unit``, or items without one. ``epoch`` and ``epochs`` count from 0. ``phase`` is the
current activity, and ``resumed`` means that the work continues at ``done``. ``rank`` is the writer if several share the
file. Any further number is a value under its name. ``null`` means unknown.
"""

import json
import math
import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import field

from exporter.contract.identity import safe_label
from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.lexicon import UNIT_BY_NAME
from exporter.logs.search.findings import MARKS, ActivityMark, LogFindings, LogPosition, LogValue

MOST_RECORD_BYTES = 64 * 1024
MOST_NAMES = 32  # value names of one worker, since each is a series
ALL_RECORDS_BYTES = 256 * 1024  # up to this size, every record counts
# Of a longer text, only this end and the last resume before it count, to limit the cost of a heavy writer.
END_BYTES = 64 * 1024

PATTERN = "progress_file"  # pattern name of its positions
WORKING = "working"

_MOST_COUNT = 10**18 - 1
_COUNTS = ("done", "total", "epoch", "epochs", "rank")
_COUNT_PAIRS = (("done", "total"), ("epoch", "epochs"))  # (part, total) pairs
_TEXT_KEYS = ("unit", "phase")
_KEYS = {*_COUNTS, *_TEXT_KEYS, "resumed"}
_RESUMED = re.compile(rb'"resumed"\s*:\s*true')


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    position: LogPosition | None = None
    values: dict[str, LogValue] = field(default_factory=dict)
    # Starts a phase of ``MARKS``; any other phase is the work itself and ends the current one.
    mark: ActivityMark | None = None
    rank: int | None = None  # rank of the values


@dataclass
class ProgressUpdates(LogFindings):
    records: int = 0  # non-blank records
    invalid: int = 0  # records that are not a valid update
    phase: str | None = None  # activity after the last record, None for the work itself


def parse_update(record: bytes, offset: int) -> ProgressUpdate | None:
    """Parse the record at ``offset``; None if it is invalid or empty.

    A count must be a number from 0 and at most its total; fractions are rounded down. A value may be NaN, infinite or
    negative, as a loss can be.
    """
    if len(record) > MOST_RECORD_BYTES:
        return None
    try:
        body = json.loads(record.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    counts: dict[str, int] = {}
    for key in _COUNTS:
        given = body.get(key)
        if given is not None:
            count = _count(given)
            if count is None:
                return None
            counts[key] = count
    if any(counts.get(done, 0) > counts.get(total, _MOST_COUNT) for done, total in _COUNT_PAIRS):
        return None
    texts = {key: body[key] for key in _TEXT_KEYS if body.get(key) is not None}
    resumed = body.get("resumed") or False
    if not all(isinstance(word, str) for word in texts.values()) or not isinstance(resumed, bool):
        return None
    update = ProgressUpdate(
        _position(counts, texts.get("unit", ""), resumed, offset),
        dict(_values(body, offset)),
        _mark(texts["phase"], offset) if "phase" in texts else None,
        counts.get("rank"),
    )
    return update if update.position is not None or update.values or update.mark is not None else None


def _count(value: object) -> int | None:
    """A whole number of at most 18 digits, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_COUNT:
        return None
    return int(value)


def _position(counts: dict[str, int], unit: str, resumed: bool, offset: int) -> LogPosition | None:
    epoch, epochs = counts.get("epoch"), counts.get("epochs")
    if "done" in counts:
        unit = UNIT_BY_NAME.get(unit.strip().lower(), "items")  # images, rows and samples are items
        done, total = counts["done"], counts.get("total")
    elif epoch is not None:
        unit, done, total, epoch, epochs = "epochs", epoch, epochs, None, None
    else:
        return None
    return LogPosition(PATTERN, unit, offset, done, total, epoch, epochs, counts.get("rank"), resumed)


def _mark(phase: str, offset: int) -> ActivityMark:
    name = phase.strip().lower()
    return ActivityMark(name, True, offset) if name in MARKS else ActivityMark(WORKING, False, offset)


def _values(body: dict[str, object], offset: int) -> Iterator[tuple[str, LogValue]]:
    """The first `MOST_NAMES` further numbers, by safe name."""
    names: set[str] = set()
    for key, given in body.items():
        if key in _KEYS or isinstance(given, bool) or not isinstance(given, int | float):
            continue
        name = safe_label(key)
        if name and (name in names or len(names) < MOST_NAMES):
            names.add(name)
            yield name, LogValue(_float(given), offset)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def parse_updates(
    text: bytes, offset: int, known_names: Collection[str] = (), phase: str | None = None
) -> ProgressUpdates:
    """Parse complete records, starting at ``offset``.

    ``known_names`` are this worker's value names so far; no new name is taken beyond ``MOST_NAMES``. ``phase`` is the
    previous activity from the last ``ProgressUpdates``: only a change is a mark.
    """
    found = ProgressUpdates(phase=phase)
    names = set(known_names)
    for start, record in _records(text):
        found.records += 1
        update = parse_update(record, offset + start)
        if update is None:
            found.invalid += 1
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
    """Records that count, with their offsets in ``text``, without blank ones."""
    if len(text) > ALL_RECORDS_BYTES:
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
    """The last record of a resume: it supersedes all earlier records."""
    for match in deque(_RESUMED.finditer(text), 1):
        start = max(text.rfind(b"\n", 0, match.start()), text.rfind(b"\r", 0, match.start())) + 1
        yield start, text[start : _next_record(text, match.end())].rstrip(b"\r\n")


def _next_record(text: bytes, offset: int) -> int:
    """Offset of the first record after the one at ``offset``."""
    ends = [found for found in (text.find(b"\n", offset), text.find(b"\r", offset)) if found >= 0]
    return min(ends, default=len(text) - 1) + 1
