"""Search logs for all patterns at the cost of about one pass.

Every matching record contains one of the pattern's literals, so one automaton over all literals shows which patterns to
try in which records.

Every error counts, so errors are searched forwards. Of values only the last counts. One near the end of a chunk is
found backwards, and its literals, which are then frequent, stay out of the automaton. Literals of values that a log
does not contain are in it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, compress, count
from operator import add, or_

from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.records import Buffer, LogChunk
from exporter.logs.search.automata import (
    ENOUGH_BYTES,
    AutomatonGroup,
    FloodAutomaton,
    ShortTexts,
    build_automata,
)
from exporter.logs.search.findings import LogFindings
from exporter.logs.search.literals import safe_length
from exporter.logs.search.matches import FEW_RECORDS, MatchResults, SupportsTimestamps
from exporter.logs.search.pieces import take_sample
from exporter.logs.search.time_budget import MOST_TIMEOUTS, RECORD_TIMEOUT_S, TimeBudget
from exporter.logs.search.units import Search, SearchUnit

__all__ = ["RECORD_TIMEOUT_S", "FileSearch", "SearchEngine", "SupportsTimestamps"]

SMALL_BYTES = 256 * 1024  # up to here all positions of a read are kept; beyond, at least the last of each chunk
WINDOW_BYTES = 64 * 1024  # end of a chunk in which a pattern's last match is searched backwards
MOST_CHUNKS = 15  # chunks in a row that are skipped for a value that is in all of them
MOST_TRIES = 64  # records tried backwards without success before the pattern is postponed
MOST_AUTOMATA = 64
FLOOD_BYTES = 512  # a chunk with more errors than one in so many bytes is followed by one that is searched as a flood
# Cost of a further pass over a chunk, of a useless hit, and of rebuilding the automata of a backlog
PASS_US, HIT_US, BUILD_US = 70.0, 0.3, 10_000.0

FLOOD_PART_BYTES = 128 * 1024  # part of such a chunk that is searched at a time
MANY_RECORDS = 32  # alike in a part, for which the alternatives of a pattern are worth knowing


class SearchEngine:
    """Searches logs for patterns.

    ``clock`` gives monotonic seconds and bounds the time of all patterns together. A pattern whose searches time out
    too often is dropped.
    """

    def __init__(self, patterns: Sequence[Pattern], clock: Callable[[], float] | None = None) -> None:
        self.time_budget = TimeBudget(clock)
        self.timeouts: dict[str, int] = {}  # searches that timed out, by pattern
        self._notes = [note for pattern in patterns if pattern.is_user_defined for note in _unbounded_notes(pattern)]
        self.forward_units: list[SearchUnit] = []  # units for which each match counts
        self.last_match_units: list[SearchUnit] = []  # units for which the last match counts
        self.chunk_units: list[
            SearchUnit
        ] = []  # as `last_match_units`, but with one unit for each key of a pattern of pairs
        self._units: list[SearchUnit] = []
        for order, pattern in enumerate(patterns):
            unit = self._add_unit(order, pattern)
            if pattern.kind in (PatternKind.ERROR, PatternKind.RESUME):
                self.forward_units.append(unit)
                continue
            self.last_match_units.append(unit)
            if pattern.kind is PatternKind.PAIRS:
                self.chunk_units += [self._add_unit(order, pattern, key) for key in range(len(pattern.keys))]
            else:
                self.chunk_units.append(unit)
        shared = Counter(unit.literals for unit in self.forward_units)
        for unit in self.forward_units:
            # if patterns share a first word, like ERROR, the second literal distinguishes them
            if unit.second_literals and shared[unit.literals] > 1:
                unit.swap_literals()
        self.short_texts = ShortTexts()
        self._groups: dict[int, tuple[AutomatonGroup, ...]] = {}
        self._backlog_mask: int | None = (
            None  # mask of the last-match units whose literals are in the automata for backlogs
        )
        # Microseconds that better automata for backlogs would have saved, and those that justify a rebuild
        self._wasted_us, self._rebuild_us = 0.0, BUILD_US
        self._reuse_bytes = ENOUGH_BYTES  # left to search with the automata of a backlog before building those for all
        self._flood_automaton: FloodAutomaton | None = None
        self._frequent_units: list[SearchUnit] = []
        self.units_by_mask: dict[int, tuple[SearchUnit, ...]] = {}
        self._update_masks()

    def _update_masks(self) -> None:
        self.literal_free_units = [unit for unit in (*self.forward_units, *self.last_match_units) if not unit.literals]
        # units of which only the last match is ever kept
        self.value_units = [unit for unit in self.last_match_units if unit.is_value and unit.literals]
        self.value_mask = sum(unit.bit for unit in self.value_units)
        self.forward_mask = sum(unit.bit for unit in self.forward_units)
        self.every_mask = self.forward_mask | sum(unit.bit for unit in self.last_match_units)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages to the user about the patterns; grows when one is dropped."""
        return tuple(self._notes)

    def _add_unit(self, order: int, pattern: Pattern, key: int | None = None) -> SearchUnit:
        unit = SearchUnit(len(self._units), order, pattern, key)
        self._units.append(unit)
        return unit

    def scan(self, text: bytes, stamps: SupportsTimestamps | None = None, offset: int = 0) -> LogFindings:
        """Find everything in whole records at ``offset`` of a file; the last one may lack its end."""
        scan = FileSearch(self, stamps)
        scan.search_all(LogChunk(text, len(text), offset))
        return scan.finish(lambda start, size: text[start - offset : start - offset + size])

    def begin_file(self, stamps: SupportsTimestamps | None = None) -> "FileSearch":
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
        if self._backlog_mask is None or self._wasted_us > self._rebuild_us:
            # the log has changed; each further rebuild must save more
            self._rebuild_us *= 1 if self._backlog_mask is None else 4
            self._backlog_mask, self._wasted_us = mask, 0.0
            self._groups.pop(self.forward_mask | mask, None)
        found = self.groups(self.forward_mask | self._backlog_mask, chunk)
        if more := mask & ~self._backlog_mask:
            further = self.groups(more, chunk)
            self.add_waste(PASS_US * len(further))
            found += further
        wanted = self.forward_mask | mask
        return tuple(group for group in found if group.mask & wanted)

    @property
    def has_backlog_automata(self) -> bool:
        """Whether those of ``backlog_groups`` have been built for any chunk."""
        return self._backlog_mask is not None

    def groups_for_all(self, chunk: LogChunk) -> tuple[tuple[AutomatonGroup, ...], Sequence[SearchUnit]]:
        """Automata for as many units as possible, and the units without one.

        Those of a backlog, if built, leave out the few values that are frequent in it: cheaper than new automata.
        """
        backlog = None if self._backlog_mask is None else self._groups.get(self.forward_mask | self._backlog_mask)
        if backlog is None or self._reuse_bytes <= 0 or self.every_mask in self._groups:
            return self.groups(self.every_mask, chunk), self.literal_free_units
        self._reuse_bytes -= chunk.end
        found = reduce(or_, (group.mask for group in backlog), 0)
        return backlog, [unit for unit in (*self.forward_units, *self.last_match_units) if not unit.bit & found]

    def flood_automaton(self) -> FloodAutomaton:
        """Return the automaton for chunks in which most records are errors."""
        if self._flood_automaton is None:
            self._flood_automaton = FloodAutomaton(self._units, self._frequent_units)
        return self._flood_automaton

    def add_frequent_unit(self, unit: SearchUnit) -> None:
        """Search for the texts of the alternatives of a unit for errors, too, in chunks that are full of them."""
        if unit not in self._frequent_units:
            self._frequent_units.append(unit)
            self._flood_automaton = None

    def swap_literals(self, unit: SearchUnit) -> None:
        """Search for the second set of a unit's literals from now on."""
        unit.swap_literals()
        self._groups.clear()
        self._flood_automaton = None
        self._backlog_mask = None

    def add_waste(self, microseconds: float) -> None:
        """Add to the time that better automata for backlogs would have saved."""
        self._wasted_us += microseconds

    def units(self, mask: int) -> tuple[SearchUnit, ...]:
        """Units in a mask, in the order of their patterns."""
        found = self.units_by_mask.get(mask)
        if found is None:
            if len(self.units_by_mask) >= 4096:
                self.units_by_mask.clear()
            found = self.units_by_mask[mask] = tuple(unit for unit in self._units if unit.bit & mask)
        return found

    def record_timeout(self, pattern: Pattern) -> None:
        """Note that a search timed out; drop the pattern if that happens too often."""
        if not self.time_budget.record_timeout(pattern):
            return
        self._notes.append(
            f'pattern "{pattern.name}" is no longer searched: '
            f"{MOST_TIMEOUTS} of its searches took more than {RECORD_TIMEOUT_S} s each"
        )
        for unit in self._units:
            if unit.pattern == pattern:
                unit.disable()  # for scans under way
        self.forward_units, self.last_match_units, self.chunk_units = (
            [unit for unit in units if unit.pattern != pattern]
            for units in (self.forward_units, self.last_match_units, self.chunk_units)
        )
        self._update_masks()


def _unbounded_notes(pattern: Pattern) -> Iterator[str]:
    if not pattern.literals:
        yield f'pattern "{pattern.name}" contains no fixed text: every record is searched, which is slower'
    if not safe_length(pattern.regex):
        yield (
            f'pattern "{pattern.name}" has repetitions that can match in many ways: '
            f"a search is stopped after {RECORD_TIMEOUT_S} s"
        )


class FileSearch:
    """One read of one file: takes its chunks in order and returns the findings."""

    def __init__(self, engine: SearchEngine, stamps: SupportsTimestamps | None = None) -> None:
        self._engine = engine
        self._results = MatchResults(engine, stamps)
        self._evaluate, self._find_last = self._results.evaluate, self._results.find_last
        self._fed_bytes = 0
        # By unit: (offset, size) of the chunks since its last match that are postponed to the end
        self._unsearched: dict[int, list[tuple[int, int]]] = {}
        # Units with few candidates in the previous chunk: their literals are searched forwards
        self._rare_units: set[int] = set()
        self._chunks_to_skip: dict[int, int] = {}  # chunks still to postpone, by unit
        self._is_flood = False  # whether most records of the previous chunk were errors
        self._compared_units: set[int] = set()  # units whose sets of literals were counted in a chunk

    def feed(self, buffer: Buffer, end: int, offset: int) -> None:
        """Take the whole records in ``buffer[:end]``, at ``offset`` of the file; keeps no reference."""
        if end <= 0:
            return
        self._fed_bytes += end
        chunk = LogChunk(buffer, end, offset)
        if self._fed_bytes <= SMALL_BYTES:
            self.search_all(chunk)
        else:
            self._search_backlog_chunk(chunk, end)

    def finish(self, reread: Callable[[int, int], bytes]) -> LogFindings:
        """Return the findings. ``reread(offset, size)`` reads a part of the file again, or less if it is gone."""
        if not self._unsearched:
            return self._results.findings()
        waiting: dict[tuple[int, int], list[SearchUnit]] = {}
        for unit in self._engine.chunk_units:
            for span in self._unsearched.get(unit.number, ()):
                waiting.setdefault(span, []).append(unit)
        settled: set[int] = set()
        seen_bytes = 0  # at the end of the read: most values are there
        for turn, (offset, size) in enumerate(sorted(waiting, reverse=True)):
            units = [unit for unit in waiting[offset, size] if unit.number not in settled]
            if units and seen_bytes < WINDOW_BYTES:
                seen_bytes += size
                units, size = self._find_last_in_end(units, offset, size, reread, settled)
            if not units:
                continue
            text = reread(offset, size)
            chunk = LogChunk(text, len(text), offset)
            followed: dict[int, list[tuple[int, int]]] = {}
            if turn:  # what is not in the last chunk may be in none
                followed = {unit.number: [] for unit in units if unit.literals}
                mask = sum(unit.bit for unit in units if unit.literals)
                self._search_forward(chunk, self._engine.groups(mask, chunk), mask, mask, followed)
            for unit in units:
                places = followed.get(unit.number)
                if self._find_last(
                    unit, chunk, chunk.records_backwards(unit.literals, 0) if places is None else places, None
                ):
                    settled.add(unit.number)
        self._unsearched.clear()
        return self._results.findings()

    def _find_last_in_end(
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
            found = self._find_last(unit, chunk, chunk.records_backwards(unit.literals, 0), None, has_more_before=True)
            if found is not False:
                settled.add(unit.number)
            if not found:
                left.append(unit)
        return left, before

    # -- a few records: everything counts --------------------------------------------------------

    def search_all(self, chunk: LogChunk) -> None:
        """Search every record for everything."""
        engine = self._engine
        if engine.short_texts.take(chunk.end):
            self._search_each(chunk, (*engine.forward_units, *engine.last_match_units))
            return
        noted: dict[int, list[tuple[int, int]]] = {}
        groups, others = engine.groups_for_all(chunk)
        taken: dict[int, int] = {}
        for group in groups:
            if hits := group.find(chunk.view()):
                self._evaluate_hits(chunk, group, hits, engine.every_mask, engine.value_mask, noted, taken)
        if noted:
            for unit in engine.value_units:
                if places := noted.get(unit.number):
                    if len(groups) > 1:
                        places.sort()
                    self._find_last(unit, chunk, reversed(places), None)
        self._search_each(chunk, others)

    def _search_each(self, chunk: LogChunk, units: Iterable[SearchUnit]) -> None:
        """Search for one unit after the other."""
        for unit in units:
            records = chunk.records_backwards(unit.literals, 0)
            if unit.is_value:
                self._find_last(unit, chunk, records, None)
                continue
            for start, stop in reversed([*records]):
                self._evaluate(unit, chunk, start, stop)

    # -- a chunk of a backlog ----------------------------------------------------------------------

    def _search_backlog_chunk(self, chunk: LogChunk, size: int) -> None:
        """Search all records for errors, and the end of the chunk for the rest."""
        engine = self._engine
        begin = max(0, chunk.end - WINDOW_BYTES)
        mask = 0
        followed: dict[int, list[tuple[int, int]]] = {}
        for unit in engine.chunk_units:
            number = unit.number
            if number in self._rare_units and begin:
                followed[number] = []
                mask |= unit.bit
                continue
            if self._chunks_to_skip.get(number, 0) > 0:
                self._chunks_to_skip[number] -= 1
                self._postpone(unit, chunk.offset, size)
                continue
            settled = self._find_last(unit, chunk, chunk.records_backwards(unit.literals, begin), MOST_TRIES)
            if settled is None and self._prefer_rarer_literals(unit, chunk):
                settled = self._find_last(unit, chunk, chunk.records_backwards(unit.literals, begin), MOST_TRIES)
            if settled:
                self._unsearched.pop(number, None)
                if not unit.has_history:
                    self._chunks_to_skip[number] = MOST_CHUNKS
            elif not unit.literals or (settled is None and not (unit.after_literal and begin)):
                self._postpone(unit, chunk.offset, size)
                self._chunks_to_skip[number] = MOST_CHUNKS
            elif begin:
                followed[number] = []
                mask |= unit.bit
        errors_before = sum(self._results.errors.values())
        if self._is_flood:
            self._search_flood(chunk, engine.forward_mask | mask, mask, followed)
            for of_unit in followed.values():
                of_unit.reverse()
        else:
            if not engine.has_backlog_automata:  # a change of literals afterwards would waste them
                sample = take_sample(chunk.text, chunk.end)
                for unit in engine.units(mask):
                    if any(literal in sample for literal in unit.literals):
                        self._prefer_rarer_literals(unit, chunk)
            self._search_forward(chunk, engine.backlog_groups(mask, chunk), engine.forward_mask | mask, mask, followed)
        self._is_flood = (sum(self._results.errors.values()) - errors_before) * FLOOD_BYTES > chunk.end
        self._rare_units = {number for number, places in followed.items() if len(places) <= MOST_TRIES}
        for unit in engine.chunk_units:
            if places := followed.get(unit.number):
                if unit.has_history and len(places) <= MOST_TRIES:
                    settled = sum(bool(self._evaluate(unit, chunk, *place)) for place in places) > 0
                else:
                    settled = self._find_last(unit, chunk, places, MOST_TRIES)
                if settled:
                    self._unsearched.pop(unit.number, None)
                    if not unit.has_history and len(places) > FEW_RECORDS:
                        self._chunks_to_skip[unit.number] = MOST_CHUNKS
                        self._rare_units.discard(unit.number)
                elif settled is None:
                    self._postpone(unit, chunk.offset, size)
                    self._prefer_rarer_literals(unit, chunk)
        for unit in engine.forward_units:
            if not unit.literals:
                for start, stop in chunk.records():
                    self._evaluate(unit, chunk, start, stop)

    def _search_forward(
        self,
        chunk: LogChunk,
        groups: Sequence[AutomatonGroup],
        wanted_mask: int,
        mask: int,
        records_by_unit: dict[int, list[tuple[int, int]]],
    ) -> None:
        """Search for ``wanted_mask``; for units in ``mask`` only note records in ``records_by_unit``, last first."""
        taken: dict[int, int] = {}
        for group in groups:
            if hits := group.find(chunk.view()):
                self._engine.add_waste(
                    HIT_US * self._evaluate_hits(chunk, group, hits, wanted_mask, mask, records_by_unit, taken)
                )
        for places in records_by_unit.values():
            if len(groups) > 1:
                places.sort()
            places.reverse()

    def _search_flood(
        self, chunk: LogChunk, wanted_mask: int, mask: int, records_by_unit: dict[int, list[tuple[int, int]]]
    ) -> None:
        """Do the same as ``_search_forward`` for a chunk full of errors, mostly without a step for each record.

        In parts, whose many hits fit into the cache. ``records_by_unit`` receives records first to last.
        """
        start = 0
        while start < chunk.end:
            stop = chunk.text.rfind(b"\n", start, start + FLOOD_PART_BYTES) + 1 or chunk.end
            stop = min(stop, chunk.end)
            self._search_flooded_part(chunk, start, stop, wanted_mask, mask, records_by_unit)
            start = stop

    def _search_flooded_part(
        self,
        chunk: LogChunk,
        start: int,
        end: int,
        wanted_mask: int,
        mask: int,
        records_by_unit: dict[int, list[tuple[int, int]]],
    ) -> None:
        """Search a part of a chunk full of errors.

        The hits of each record show which have the same literals. Errors that need nothing but a literal are counted
        so, and only the records of others are searched.
        """
        engine, errors = self._engine, self._results.errors
        automaton, text = engine.flood_automaton(), bytes(memoryview(chunk.text)[start:end]).replace(b"\r", b"\n")
        records = automaton.find(text)
        searched: dict[str, list[tuple[SearchUnit, list[Search]]]] = {}
        for literals, number in Counter(records).items():
            names = set(filter(None, literals.split("\r")))
            present = {automaton.literals[name] for name in names}
            for unit in engine.units(reduce(or_, map(automaton.units.__getitem__, names), 0) & wanted_mask):
                searches = [unit.search]
                is_counted = unit.is_counted
                if unit.number in automaton.frequent_units:
                    possible = [found.search for found in unit.alternatives if found.may_match(present)]
                    searches = [search for search in possible if search is not None]
                    is_counted = len(searches) < len(possible)
                elif not is_counted and unit.is_error and number >= MANY_RECORDS:
                    engine.add_frequent_unit(unit)
                if is_counted:
                    errors[unit.name] = errors.get(unit.name, 0) + number
                elif searches:
                    searched.setdefault(literals, []).append((unit, searches))
        if not searched:
            return
        lines, begins = text.split(b"\n"), list[int]()
        places = zip(count(), records, lines, strict=False)
        for place, literals, record in compress(places, map(searched.__contains__, records)):
            for unit, searches in searched[literals]:
                if unit.is_error and len(record) <= unit.safe_bytes:
                    for search in searches:
                        if search(record) is not None:
                            errors[unit.name] = errors.get(unit.name, 0) + 1
                            break
                    continue
                begins = begins or [*map(add, accumulate(map(len, lines), initial=start), count())]
                begin = begins[place]
                if unit.bit & mask:
                    records_by_unit.setdefault(unit.number, []).append((begin, begin + len(record)))
                else:
                    self._evaluate(unit, chunk, begin, begin + len(record))

    def _prefer_rarer_literals(self, unit: SearchUnit, chunk: LogChunk) -> bool:
        """Search for the unit's second set of literals instead of the first if that is rarer here; whether it is."""
        if not unit.second_literals or unit.number in self._compared_units:
            return False
        self._compared_units.add(unit.number)
        first, second = (
            sum(chunk.text.count(literal, 0, chunk.end) for literal in literals)
            for literals in (unit.literals, unit.second_literals)
        )
        if 2 * second >= first:
            return False
        self._engine.swap_literals(unit)
        return True

    def _postpone(self, unit: SearchUnit, offset: int, size: int) -> None:
        """Postpone a chunk to the end of the read; it is needed only if no later chunk has a match."""
        self._unsearched.setdefault(unit.number, []).append((offset, size))

    def _evaluate_hits(
        self,
        chunk: LogChunk,
        group: AutomatonGroup,
        hits: Iterable[tuple[int, int, int]],
        wanted_mask: int,
        deferred_mask: int,
        records_by_unit: dict[int, list[tuple[int, int]]],
        processed_units: dict[int, int],
    ) -> int:
        """Evaluate the hits of an automaton, each unit once per record. Return how many were useless.

        Units in ``deferred_mask`` are not tried: ``records_by_unit`` receives their records by unit number. If several
        automata share a unit, ``processed_units`` holds the units processed so far, by the end of their record.
        """
        text, end, has_returns = chunk.text, chunk.end, chunk.has_returns
        find, starts_with, units, errors = text.find, text.startswith, self._engine.units, self._results.errors
        of_masks = self._engine.units_by_mask
        sure, checks, tests, shared_units, rfind = (
            group.certain_units,
            group.checks,
            group.tests,
            group.shared_units,
            text.rfind,
        )
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
            mask &= wanted_mask
            if not mask:
                in_vain += 1
                group.record_useless_hit(number)
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
                before = processed_units.get(stop, 0)
                processed_units[stop] = before | shared
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
                if unit.is_error and stop - begin <= unit.safe_bytes:
                    # MatchResults.evaluate, inlined: logs of failing loops are full of these
                    record = text[begin:stop]
                    for literal in unit.second_literals:
                        if literal in record:
                            break
                    else:
                        if unit.second_literals:
                            continue
                    if unit.search(record) is not None:
                        errors[unit.name] = errors.get(unit.name, 0) + 1
                elif unit.bit & deferred_mask:
                    records_by_unit.setdefault(unit.number, []).append((begin, stop))
                else:
                    self._evaluate(unit, chunk, begin, stop)
        return in_vain
