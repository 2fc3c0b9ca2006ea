"""Search logs for all patterns at the cost of about one pass.

Every matching record contains one of the pattern's literals, so one automaton over all literals shows which patterns to
try in which records.

Every error counts, so errors are searched forwards. Of values only the last counts. One near the end of a chunk is
found backwards, and its literals, which are then frequent, stay out of the automaton. Literals of values that a log
does not contain are in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from exporter.logs.search.automata import AutomatonGroup, build_automata
from exporter.logs.records import Buffer, LogChunk, record_ends
from exporter.logs.search.pieces import take_sample
from exporter.logs.search.extraction import NumberExtractor
from exporter.logs.search.findings import LogFindings
from exporter.logs.search.matches import FEW, MatchResults, SupportsTimestamps
from exporter.logs.search.literals import safe_length
from exporter.logs.search.time_budget import MOST_GIVEN_UP, RECORD_TIMEOUT_S, TimeBudget
from exporter.logs.patterns import PatternKind, Pattern
from exporter.logs.search.units import SearchUnit

__all__ = ["RECORD_TIMEOUT_S", "SearchEngine", "FileSearch", "SupportsTimestamps", "record_ends"]

SMALL_BYTES = 256 * 1024  # up to here all positions of a read are kept; beyond, at least the last of each chunk
WINDOW_BYTES = 64 * 1024  # end of a chunk in which a pattern's last match is searched backwards
MOST_CHUNKS = 15  # chunks in a row that are skipped for a value that is in all of them
MOST_TRIES = 64  # records tried backwards without success before the pattern is postponed
MOST_AUTOMATA = 64
# Cost of a further pass over a chunk, of a useless hit, and of rebuilding the automata of a backlog
PASS_US, HIT_US, BUILD_US = 70.0, 0.3, 10_000.0


class SearchEngine:
    """Searches logs for patterns.

    ``clock`` gives monotonic seconds and bounds the time of all patterns together. A pattern whose searches time out
    too often is dropped.
    """

    def __init__(self, patterns: Sequence[Pattern], clock: Callable[[], float] | None = None) -> None:
        self.patience = TimeBudget(clock)
        self.timeouts: dict[str, int] = {}  # searches that timed out, by pattern
        self._notes = [note for pattern in patterns if pattern.own for note in _unbounded_notes(pattern)]
        self.forward: list[SearchUnit] = []  # units for which each match counts
        self.late: list[SearchUnit] = []  # units for which the last match counts
        self.in_chunks: list[SearchUnit] = []  # as `late`, but with one unit for each key of a pattern of pairs
        self._units: list[SearchUnit] = []
        for order, pattern in enumerate(patterns):
            extractor = NumberExtractor(pattern)
            unit = self._add(order, pattern, extractor)
            if pattern.kind in (PatternKind.ERROR, PatternKind.RESUME):
                self.forward.append(unit)
                continue
            self.late.append(unit)
            if pattern.kind is PatternKind.PAIRS:
                self.in_chunks += [self._add(order, pattern, extractor, key) for key in range(len(pattern.keys))]
            else:
                self.in_chunks.append(unit)
        shared = Counter(unit.literals for unit in self.forward)
        for unit in self.forward:
            # if patterns share a first word, like ERROR, the second literal distinguishes them
            if unit.also and shared[unit.literals] > 1:
                unit.literals, unit.also = unit.also, unit.literals
        self._groups: dict[int, tuple[AutomatonGroup, ...]] = {}
        self._joined: int | None = None  # mask of the last-match units whose literals are in the automata for backlogs
        # Microseconds that better automata for backlogs would have saved, and those that justify a rebuild
        self._wasted, self._enough = 0.0, BUILD_US
        self.of_masks: dict[int, tuple[SearchUnit, ...]] = {}
        self._sum_up()

    def _sum_up(self) -> None:
        self.bare = [unit for unit in (*self.forward, *self.late) if not unit.literals]
        # units of which only the last match is ever kept
        self.values = [unit for unit in self.late if unit.is_value and unit.literals]
        self.value_mask = sum(unit.bit for unit in self.values)
        self.forward_mask = sum(unit.bit for unit in self.forward)
        self.every_mask = self.forward_mask | sum(unit.bit for unit in self.late)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages to the user about the patterns; grows when one is dropped."""
        return tuple(self._notes)

    def _add(self, order: int, pattern: Pattern, extractor: NumberExtractor, key: int | None = None) -> SearchUnit:
        unit = SearchUnit(len(self._units), order, pattern, extractor, key)
        self._units.append(unit)
        return unit

    def scan(self, text: bytes, stamps: SupportsTimestamps | None = None) -> LogFindings:
        """Find everything in whole records; the last one may lack its end."""
        scan = FileSearch(self, stamps)
        scan.take_all(LogChunk(text, len(text), 0))
        return scan.finish(lambda offset, size: text[offset : offset + size])

    def begin(self, stamps: SupportsTimestamps | None = None) -> "FileSearch":
        """Start one read of one file."""
        return FileSearch(self, stamps)

    def groups(self, mask: int, chunk: LogChunk) -> tuple[AutomatonGroup, ...]:
        """Automata that find the literals of the units in ``mask``, tuned to texts like this chunk."""
        found = self._groups.get(mask)
        if found is None:
            if len(self._groups) >= MOST_AUTOMATA:
                self._groups.clear()
            found = self._groups[mask] = build_automata(self.units(mask), take_sample(chunk.text, chunk.end))
        return found

    def backlog_groups(self, mask: int, chunk: LogChunk) -> tuple[AutomatonGroup, ...]:
        """Automata for the units in ``mask`` and all units for which each match counts.

        They are built for the first chunk of a backlog and kept: unneeded hits are ignored, missing units get further
        automata.
        """
        if self._joined is None or self._wasted > self._enough:
            # the log has changed; each further rebuild must save more
            self._enough *= 1 if self._joined is None else 4
            self._joined, self._wasted = mask, 0.0
            self._groups.pop(self.forward_mask | mask, None)
        found = self.groups(self.forward_mask | self._joined, chunk)
        if more := mask & ~self._joined:
            further = self.groups(more, chunk)
            self.waste(PASS_US * len(further))
            found += further
        wanted = self.forward_mask | mask
        return tuple(group for group in found if group.mask & wanted)

    def waste(self, microseconds: float) -> None:
        """Add to the time that better automata for backlogs would have saved."""
        self._wasted += microseconds

    def units(self, mask: int) -> tuple[SearchUnit, ...]:
        """Units in a mask, in the order of their patterns."""
        found = self.of_masks.get(mask)
        if found is None:
            if len(self.of_masks) >= 4096:
                self.of_masks.clear()
            found = self.of_masks[mask] = tuple(unit for unit in self._units if unit.bit & mask)
        return found

    def careful(self, pattern: Pattern) -> Any:
        """Return the expression compiled for searches with a timeout; None if that fails."""
        return self.patience.careful(pattern)

    def give_up(self, pattern: Pattern) -> None:
        """Note that a search timed out; drop the pattern if that happens too often."""
        if not self.patience.is_lost(pattern):
            return
        self._notes.append(
            f'pattern "{pattern.name}" was given up {MOST_GIVEN_UP} times and is left out from now on: '
            f"each time a search took over {RECORD_TIMEOUT_S} s"
        )
        for unit in self._units:
            if unit.pattern == pattern:
                unit.leave_out()  # for scans under way
        self.forward, self.late, self.in_chunks = (
            [unit for unit in units if unit.pattern != pattern] for units in (self.forward, self.late, self.in_chunks)
        )
        self._sum_up()


def _unbounded_notes(pattern: Pattern) -> Iterator[str]:
    if not pattern.literals:
        yield f'pattern "{pattern.name}" contains no fixed text: every record is searched, which is slower'
    if not safe_length(pattern.regex):
        yield (
            f'pattern "{pattern.name}" repeats what can match in many ways: '
            f"a search that takes over {RECORD_TIMEOUT_S} s is given up"
        )


class FileSearch:
    """One read of one file: takes its chunks in order and returns the findings."""

    def __init__(self, engine: SearchEngine, stamps: SupportsTimestamps | None = None) -> None:
        self._engine = engine
        self._gathering = MatchResults(engine, stamps)
        self._evaluate, self._settle = self._gathering.evaluate, self._gathering.settle
        self._fed = 0
        # By unit: (offset, size) of the chunks since its last match that are postponed to the end
        self._unsearched: dict[int, list[tuple[int, int]]] = {}
        # Units with few candidates in the previous chunk: their literals are searched forwards
        self._rare: set[int] = set()
        self._often: dict[int, int] = {}  # chunks still to postpone, by unit

    def feed(self, buffer: Buffer, end: int, offset: int) -> None:
        """Take the whole records in ``buffer[:end]``, at ``offset`` of the file; keeps no reference."""
        if end <= 0:
            return
        self._fed += end
        chunk = LogChunk(buffer, end, offset)
        if self._fed <= SMALL_BYTES:
            self.take_all(chunk)
        else:
            self._take_last(chunk, end)

    def finish(self, reread: Callable[[int, int], bytes]) -> LogFindings:
        """Return the findings. ``reread(offset, size)`` reads a part of the file again, or less if it is gone."""
        if not self._unsearched:
            return self._gathering.findings()
        waiting: dict[tuple[int, int], list[SearchUnit]] = {}
        for unit in self._engine.in_chunks:
            for span in self._unsearched.get(unit.number, ()):
                waiting.setdefault(span, []).append(unit)
        settled: set[int] = set()
        for turn, (offset, size) in enumerate(sorted(waiting, reverse=True)):
            units = [unit for unit in waiting[offset, size] if unit.number not in settled]
            if units and not turn:
                units, size = self._settle_end(units, offset, size, reread, settled)
            if not units:
                continue
            text = reread(offset, size)
            chunk = LogChunk(text, len(text), offset)
            followed: dict[int, list[tuple[int, int]]] = {}
            if turn:  # what is not in the last chunk may be in none
                followed = {unit.number: [] for unit in units if unit.literals}
                mask = sum(unit.bit for unit in units if unit.literals)
                self._follow(chunk, self._engine.groups(mask, chunk), mask, mask, followed)
            for unit in units:
                places = followed.get(unit.number)
                if self._settle(unit, chunk, chunk.backwards(unit.literals, 0) if places is None else places, None):
                    settled.add(unit.number)
        self._unsearched.clear()
        return self._gathering.findings()

    def _settle_end(
        self, units: list[SearchUnit], offset: int, size: int, reread: Callable[[int, int], bytes], settled: set[int]
    ) -> tuple[list[SearchUnit], int]:
        """Search only the end of a chunk, where most values are, to avoid reading the rest.

        Return the units that need more, and the size left for them. ``settled`` receives the numbers of all units with
        a finding, since earlier chunks do not matter for them.
        """
        end = reread(offset + size - WINDOW_BYTES, WINDOW_BYTES) if size > WINDOW_BYTES else b""
        begin = min((place for mark in (b"\n", b"\r") if (place := end.find(mark)) >= 0), default=-1) + 1
        if len(end) < WINDOW_BYTES or not 0 < begin < len(end):
            return units, size
        before = size - WINDOW_BYTES + begin
        chunk = LogChunk(end[begin:], len(end) - begin, offset + before)
        left: list[SearchUnit] = []
        for unit in units:
            found = self._settle(unit, chunk, chunk.backwards(unit.literals, 0), None, goes_on=True)
            if found is not False:
                settled.add(unit.number)
            if not found:
                left.append(unit)
        return left, before

    # -- a few records: everything counts --------------------------------------------------------

    def take_all(self, chunk: LogChunk) -> None:
        """Search every record for everything."""
        engine = self._engine
        noted: dict[int, list[tuple[int, int]]] = {}
        groups = engine.groups(engine.every_mask, chunk)
        taken: dict[int, int] = {}
        for group in groups:
            if hits := group.find(chunk.view()):
                self._take_hits(chunk, group, hits, engine.every_mask, engine.value_mask, noted, taken)
        if noted:
            for unit in engine.values:
                if places := noted.get(unit.number):
                    if len(groups) > 1:
                        places.sort()
                    self._settle(unit, chunk, reversed(places), None)
        for unit in engine.bare:
            if unit.is_value:
                self._settle(unit, chunk, chunk.backwards((), 0), None)
                continue
            for start, stop in chunk.all():
                self._evaluate(unit, chunk, start, stop)

    # -- a chunk of a backlog ----------------------------------------------------------------------

    def _take_last(self, chunk: LogChunk, size: int) -> None:
        """Search all records for errors, and the end of the chunk for the rest."""
        engine = self._engine
        begin = max(0, chunk.end - WINDOW_BYTES)
        mask = 0
        followed: dict[int, list[tuple[int, int]]] = {}
        for unit in engine.in_chunks:
            number = unit.number
            if number in self._rare and begin:
                followed[number] = []
                mask |= unit.bit
                continue
            if self._often.get(number, 0) > 0:
                self._often[number] -= 1
                self._put_off(unit, chunk.offset, size)
                continue
            settled = self._settle(unit, chunk, chunk.backwards(unit.literals, begin), MOST_TRIES)
            if settled:
                self._unsearched.pop(number, None)
                if not unit.has_history:
                    self._often[number] = MOST_CHUNKS
            elif not unit.literals or (settled is None and not (unit.behind and begin)):
                self._put_off(unit, chunk.offset, size)
                self._often[number] = MOST_CHUNKS
            elif begin:
                followed[number] = []
                mask |= unit.bit
        self._follow(chunk, engine.backlog_groups(mask, chunk), engine.forward_mask | mask, mask, followed)
        self._rare = {number for number, places in followed.items() if len(places) <= MOST_TRIES}
        for unit in engine.in_chunks:
            if places := followed.get(unit.number):
                if unit.has_history and len(places) <= MOST_TRIES:
                    settled = sum(bool(self._evaluate(unit, chunk, *place)) for place in places) > 0
                else:
                    settled = self._settle(unit, chunk, places, MOST_TRIES)
                if settled:
                    self._unsearched.pop(unit.number, None)
                    if not unit.has_history and len(places) > FEW:
                        self._often[unit.number] = MOST_CHUNKS
                        self._rare.discard(unit.number)
                elif settled is None:
                    self._put_off(unit, chunk.offset, size)
        for unit in engine.forward:
            if not unit.literals:
                for start, stop in chunk.all():
                    self._evaluate(unit, chunk, start, stop)

    def _follow(
        self,
        chunk: LogChunk,
        groups: Sequence[AutomatonGroup],
        wanted: int,
        mask: int,
        followed: dict[int, list[tuple[int, int]]],
    ) -> None:
        """Search for ``wanted``; for units in ``mask`` only note the records in ``followed``, last first."""
        taken: dict[int, int] = {}
        for group in groups:
            if hits := group.find(chunk.view()):
                self._engine.waste(HIT_US * self._take_hits(chunk, group, hits, wanted, mask, followed, taken))
        for places in followed.values():
            if len(groups) > 1:
                places.sort()
            places.reverse()

    def _put_off(self, unit: SearchUnit, offset: int, size: int) -> None:
        """Postpone a chunk to the end of the read; it is needed only if no later chunk has a match."""
        self._unsearched.setdefault(unit.number, []).append((offset, size))

    def _take_hits(
        self,
        chunk: LogChunk,
        group: AutomatonGroup,
        hits: Iterable[tuple[int, int, int]],
        wanted: int,
        later: int,
        noted: dict[int, list[tuple[int, int]]],
        taken: dict[int, int],
    ) -> int:
        """Evaluate the hits of an automaton, each unit once per record. Return how many were useless.

        Units in ``later`` are not tried: ``noted`` receives their records by unit number. If several automata share a
        unit, ``taken`` holds the units already processed, by the end of their record.
        """
        text, end, has_returns = chunk.text, chunk.end, chunk.has_returns
        find, starts_with, units, errors = text.find, text.startswith, self._engine.units, self._gathering.errors
        of_masks = self._engine.of_masks
        sure, checks, tests, shared_units, rfind = group.sure, group.checks, group.tests, group.shared, text.rfind
        stop, begin, seen, in_vain = -1, -1, 0, 0
        for number, place, behind in hits:
            if (test := tests[number]) is not None and test(text, place, end) is None:
                continue
            mask = sure[number]
            for before, literals, others, after, follows in checks[number]:
                if (literals is None or (place + before >= 0 and starts_with(literals, place + before, end))) and (
                    follows is None or follows(text, place + after, end)
                ):
                    mask |= others
            mask &= wanted
            if not mask:
                in_vain += 1
                group.note_in_vain(number)
                continue
            if place >= stop:
                stop = find(b"\n", behind, end)
                if stop < 0:
                    stop = end
                if has_returns and (back := find(b"\r", behind, stop)) >= 0:
                    stop = back
                seen, begin = mask, -1
            else:
                mask &= ~seen
                if not mask:
                    continue
                seen |= mask
            if shared_units and (shared := mask & shared_units):
                before = taken.get(stop, 0)
                taken[stop] = before | shared
                mask &= ~before
            for unit in of_masks.get(mask) or units(mask):
                if unit.is_counted:
                    errors[unit.name] = errors.get(unit.name, 0) + 1
                    continue
                if begin < 0:
                    # LogChunk.start, inlined
                    begin = rfind(b"\n", 0, place) + 1
                    if has_returns:
                        begin = max(begin, rfind(b"\r", begin, place) + 1)
                if unit.is_error and stop - begin <= unit.safe:
                    # MatchResults.evaluate, inlined: logs of failing loops are full of these
                    record = text[begin:stop]
                    for literal in unit.also:
                        if literal in record:
                            break
                    else:
                        if unit.also:
                            continue
                    if unit.search(record) is not None:
                        errors[unit.name] = errors.get(unit.name, 0) + 1
                elif unit.bit & later:
                    noted.setdefault(unit.number, []).append((begin, stop))
                else:
                    self._evaluate(unit, chunk, begin, stop)
        return in_vain
