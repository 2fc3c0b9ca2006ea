"""Evaluate candidate records: matches become positions, values, marks and error counts."""

from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from typing import Protocol, TypeAlias

from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.records import LogChunk
from exporter.logs.search.extraction import RegexMatch
from exporter.logs.search.findings import ActivityMark, LogFindings, LogPosition, LogValue
from exporter.logs.search.time_budget import READ_TIMEOUT_S, RECORD_TIMEOUT_S, TimeBudget
from exporter.logs.search.units import SearchUnit

FEW_RECORDS = 8  # records of a chunk with a value up to which it is still searched forwards
HEAD_BYTES = 80  # head of a record that contains its time

Key = tuple[str | None, int | None]
# A match of a position: pattern, (done, total, epoch, epochs), rank
_Position: TypeAlias = tuple[Pattern, tuple[int, int | None, int | None, int | None], int | None]


class SupportsTimestamps(Protocol):
    """Reads the time at the head of a record."""

    def read(self, head: bytes) -> float | None:
        """Return the time; None if there is none."""


class PatternSearcher(Protocol):
    """Part of the search engine that evaluation needs."""

    time_budget: TimeBudget
    timeouts: dict[str, int]

    def record_timeout(self, pattern: Pattern) -> None:
        """Note that a search timed out."""


class MatchResults:
    """Findings of one read of one file so far."""

    def __init__(self, engine: PatternSearcher, stamps: SupportsTimestamps | None = None) -> None:
        self._engine = engine
        self._stamps = stamps
        self.errors: dict[str, int] = {}
        # (offset, order, match, head of the record) of each position and mark
        self._positions_and_marks: list[tuple[int, int, Pattern | _Position, bytes]] = []
        # (offset, -order, number, head of the record), the greatest for each name and rank
        self._values: dict[tuple[str, int | None], tuple[int, int, float, bytes]] = {}
        self._spent_s: dict[str, float] = {}

    def find_last(
        self,
        unit: SearchUnit,
        chunk: LogChunk,
        records: Iterable[tuple[int, int]],
        most_tries: int | None,
        *,
        has_more_before: bool = False,
    ) -> bool | None:
        """Find a unit's last finding among records given last first. Return whether there is one.

        None after ``most_tries`` records in a row without one. A pattern that names ranks has a last finding per rank,
        and continues until no new rank appears. With ``has_more_before``, the chunk has earlier records, so None also
        means that findings may be incomplete.
        """
        tries = 0
        records = iter(records)
        if (last := next(records, None)) is None:
            return False  # without the expression, which takes a while to compile: most units have no record
        records = chain((last,), records)
        if unit.wanted_findings == 1 and not unit.extractor.has_ranks:
            for start, stop in records:
                if self.evaluate(unit, chunk, start, stop):
                    return True
                tries += 1
                if most_tries is not None and tries >= most_tries:
                    return None
            return False
        found: set[Key] = set()
        for start, stop in records:
            keys = self.evaluate(unit, chunk, start, stop)
            if keys - found:
                found |= keys
                tries = 0
                if len(found) >= unit.wanted_findings and not unit.extractor.has_ranks:
                    return True
            else:
                tries += 1
                if most_tries is not None and (
                    tries >= most_tries or (tries >= FEW_RECORDS and found == _WITHOUT_RANKS)
                ):
                    return True if found else None
        return None if has_more_before and found else bool(found)

    def evaluate(self, unit: SearchUnit, chunk: LogChunk, start: int, stop: int) -> set[Key]:
        """Search one record for a unit and note the findings. Return their names and ranks."""
        record = chunk.text[start:stop]
        if type(record) is not bytes:
            record = bytes(record)
        if unit.second_literals:
            for text in unit.second_literals:
                if text in record:
                    break
            else:
                return _NOTHING
        if stop - start > unit.safe_bytes:
            match = self._search_with_timeout(unit, record)
        elif unit.prefix_bytes:
            # a search from the head of the record would try each digit of its time as the number
            if len(unit.literals) == 1:
                first = max(0, record.find(unit.literals[0]))
            else:
                first = min([place for literal in unit.literals if (place := record.find(literal)) >= 0], default=0)
            match = unit.search(record, len(record[:first].rstrip(unit.prefix_bytes)))
        else:
            match = unit.search(record)
        if match is None:
            return _NOTHING
        if unit.is_error:
            self.errors[unit.name] = self.errors.get(unit.name, 0) + 1
            return _NOTHING
        where = chunk.offset + start if chunk.is_plain else chunk.file_offset(start)
        head, extractor = record[:HEAD_BYTES], unit.extractor
        if unit.is_mark:
            self._positions_and_marks.append((where, unit.order, unit.pattern, head))
            return _WITHOUT_RANKS
        rank = extractor.rank(match) if extractor.has_ranks else None
        if unit.is_value:
            keys: set[Key] = set()
            for name, number in extractor.values(match, record, unit.key):
                old = self._values.get((name, rank))
                if old is None or (where, -unit.order) > old[:2]:
                    self._values[name, rank] = (where, -unit.order, number, head)
                keys.add((name, rank))
            return keys
        counts = extractor.counts(match)
        if counts is None:
            return _NOTHING
        self._positions_and_marks.append((where, unit.order, (unit.pattern, counts, rank), head))
        return _WITHOUT_RANKS if rank is None else {(None, rank)}

    def _search_with_timeout(self, unit: SearchUnit, record: bytes) -> RegexMatch | None:
        """Search a record with a timeout; None also after a timeout."""
        engine, name = self._engine, unit.name
        spent, begun = self._spent_s.get(name, 0.0), engine.time_budget.now()
        if (
            spent < READ_TIMEOUT_S
            and engine.time_budget.has_time(begun)
            and (expression := engine.time_budget.compile_with_timeout(unit.pattern)) is not None
        ):
            begun = engine.time_budget.now()  # the first use compiles it, which takes long
            least = 0.0
            try:
                return expression.search(record, timeout=RECORD_TIMEOUT_S, concurrent=True)
            except TimeoutError:
                least = RECORD_TIMEOUT_S
                engine.record_timeout(unit.pattern)
            finally:
                now = engine.time_budget.now()
                taken = max(least, now - begun)
                self._spent_s[name] = spent + taken
                engine.time_budget.add(now, taken)
        engine.timeouts[name] = engine.timeouts.get(name, 0) + 1
        return None

    def findings(self) -> LogFindings:
        positions: list[LogPosition] = []
        marks: list[ActivityMark] = []
        values: dict[str, dict[int | None, LogValue]] = {}
        read = None if self._stamps is None else self._stamps.read
        self._positions_and_marks.sort(key=_OFFSET_AND_ORDER)
        before, stamp, resume = -1, None, PatternKind.RESUME
        for offset, _, what, head in self._positions_and_marks:
            if read is not None and offset != before:
                before, stamp = offset, read(head)
            if isinstance(what, Pattern):
                marks.append(ActivityMark(what.name, what.begins, offset, stamp))
            else:
                pattern, (done, total, epoch, epochs), rank = what
                resumed = pattern.kind is resume
                positions.append(
                    _new(
                        LogPosition,
                        (pattern.name, pattern.unit, offset, done, total, epoch, epochs, rank, resumed, stamp),
                    )
                )
        for (name, rank), (offset, _, number, head) in self._values.items():
            if read is not None and offset != before:
                before, stamp = offset, read(head)
            values.setdefault(name, {})[rank] = _new(LogValue, (number, offset, stamp))
        return LogFindings(positions, values, marks, self.errors)


_new = tuple.__new__  # takes half the time of LogPosition() and LogValue(), of which a busy log has many
_NOTHING: set[Key] = set()
_WITHOUT_RANKS: set[Key] = {(None, None)}
_OFFSET_AND_ORDER = itemgetter(0, 1)
