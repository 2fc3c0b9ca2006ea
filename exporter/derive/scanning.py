"""Searching logs: what all patterns find in the records of a log, at the cost of about one pass over it.

A record ends at a newline or at a carriage return, and colours in it hide nothing. A record that a
pattern matches holds one of the pattern's literals, so one automaton over the literals of all
patterns tells which patterns are worth a try in which records.

What counts is not the same for all. Of errors each matching record does, so they are searched
forwards. Of values only the last one does: where it is near the end of a chunk it is found
backwards, and its literals, which stand in many records then, are left out of the automaton.
"""

import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import itemgetter, or_
from typing import Any, Protocol

import ahocorasick_rs

from exporter.derive.cover import PIECE, SLIM_PIECES, Pieces, choose
from exporter.derive.extraction import PAIR, Extractor, Match
from exporter.derive.findings import Findings, Mark, Position, Value
from exporter.derive.literals import (
    behind_literals,
    is_literal_only,
    literals_of,
    next_bytes,
    required_literals,
    safe_length,
)
from exporter.derive.patterns import Kind, Pattern

SMALL_BYTES = 256 * 1024
"""Up to here every position of a look is kept; of a longer one at least the last of each chunk."""
WINDOW_BYTES = 64 * 1024
"""End of a chunk in which the last match of a pattern is looked for backwards."""
MOST_CHUNKS = 15
"""Chunks in a row in which a value that is in all of them is not looked for before the end."""
MOST_TRIES = 64
"""Records in which a pattern is tried backwards without success before that is put off."""
FEW = 8
"""Records of a chunk in which a value may stand and still be followed forwards."""
HEAD_BYTES = 80
"""Of a record, in which its time stands."""
PART_BYTES = 64 * 1024
"""Copied at once to count record ends: what stays in the cache."""
RECORD_TIMEOUT_S = 0.1
LOOK_TIMEOUT_S = 0.5
"""Time that one pattern may take in one look by searches that are not bounded by their form."""
WINDOW_S, SLOT_S = 5.0, 0.1
"""In so long all of them together, in whatever logs, may take ``LOOK_TIMEOUT_S``; that is kept account of by slots."""
MOST_GIVEN_UP = 20
"""Searches of a pattern that are given up before it is left out."""
SHORTEST, MOST_ALONE = 2, 3
"""Literals so short, and so few of the next length, are found sooner one by one."""
MOST_AUTOMATA = 64
_PADDING = tuple(bytes((0xFF, code, 0xFE, 0xFD, code)) for code in range(1, 7))
"""What no log holds: of two or three literals the automaton would look for their first bytes alone."""

Buffer = bytes | bytearray | memoryview
Key = tuple[str | None, int | None]
_Behind = tuple[int, re.Pattern[bytes] | None]
"""What has to match so many bytes before the end of a literal."""
_Check = tuple[int, bytes | None, int, int, Callable[[Buffer, int, int], Any] | None]
"""A literal of which a piece is found, and that is None where it is within that: where it begins, seen from there,
its units, where it ends, and what has to match from there on."""
_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n\r]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[0-Z\\^_`-~])")


class StampReader(Protocol):
    """Reads the time at the head of a record."""

    def read(self, head: bytes) -> float | None:
        """The time, or None when there is none."""


def records(buffer: bytes | bytearray, end: int) -> int:
    """Record ends in the first ``end`` bytes; a return and a newline after it are one."""
    count = 0
    for start in range(0, end, PART_BYTES):
        part = buffer[start : min(end, start + PART_BYTES)]
        # leaving the ends out is several times faster than counting them
        count += len(part) - len(part.replace(b"\n", b""))
        if part.find(b"\r") >= 0:
            count += len(part) - len(part.replace(b"\r", b""))
    return count - buffer.count(b"\r\n", 0, end) if buffer.find(b"\r\n", 0, end) >= 0 else count


class _Unit:
    """One thing to look for: a pattern, or one key of a pattern of pairs."""

    def __init__(self, number: int, order: int, pattern: Pattern, extractor: Extractor, key: int | None = None) -> None:
        self.bit = 1 << number
        self.number = number
        self.order = order
        self.pattern = pattern
        self.extractor = extractor
        self.key = key
        self.literals = pattern.literals if key is None else (pattern.keys[key][0],)
        self.name = pattern.name
        self.kind = pattern.kind
        self.search: Callable[[bytes | bytearray], Match | None] = pattern.regex.search
        self.also = literals_of(pattern.regex).also
        """Of these, too, a match holds one; none where nothing more is known."""
        self.is_error = pattern.kind is Kind.ERROR
        self.behind: Mapping[bytes, re.Pattern[bytes]] = {}
        """Of a literal, what follows it in a match, as far as that is known."""
        if key is not None:
            self.behind = {pattern.keys[key][0]: PAIR}
        elif not self.is_error and set(pattern.literals) == set(required_literals(pattern.regex)):
            self.behind = behind_literals(pattern.regex)
        self.is_counted = (
            self.is_error
            and set(pattern.literals) == set(self.literals)
            and bool(self.literals)
            and is_literal_only(pattern.regex)
        )
        """Whether holding a literal is all that it takes, and the match says nothing else."""
        self.has_history = pattern.kind in (Kind.POSITION, Kind.MARK)
        self.wanted = 1 if key is not None or self.has_history else max(1, len(extractor.names))
        """Findings after which nothing earlier counts."""

    @cached_property
    def safe(self) -> int:
        """Bytes of a record up to which any search ends soon."""
        return safe_length(self.pattern.regex)

    def leave_out(self) -> None:
        """Match nothing from now on."""
        self.search = _match_nothing
        self.safe = sys.maxsize


def _match_nothing(_: bytes | bytearray) -> None:
    return None


class _Group:
    """An automaton over pieces of literals; ``asking`` are the units of each literal by what they ask to follow it."""

    def __init__(self, order: list[bytes], pieces: Pieces, asking: Mapping[bytes, Mapping[_Behind, int]]) -> None:
        self.shared = 0
        """Units that have literals in other groups too."""
        self.mask = reduce(or_, (mask for of in pieces.values() for text, _ in of for mask in asking[text].values()), 0)
        if 1 < len(order) < len(_PADDING):
            order = [*order, *_PADDING]
        automaton = ahocorasick_rs.BytesAhoCorasick(order, matchkind=ahocorasick_rs.MatchKind.LeftmostFirst)
        self.find: Callable[[Buffer], list[tuple[int, int, int]]] = automaton.find_matches_as_indexes
        """(number of the piece, start, end) of each hit; hits do not overlap."""
        self.sure: list[int] = []
        """Of each piece, the units that have a literal within it and ask for nothing else."""
        self.checks: list[tuple[_Check, ...]] = []
        """Of each piece, what may stand around it."""
        beginning: dict[int, list[tuple[bytes, list[tuple[bytes, int]]]]] = {}
        for other, members in pieces.items():
            beginning.setdefault(other[0], []).append((other, members))
        for piece in order:
            sure = 0
            checks: list[_Check] = []
            # a hit hides those that begin within it
            for place, code in enumerate(piece):
                for other, members in beginning.get(code, ()):
                    if not _agree(piece, other, place):
                        continue
                    for literal, within in members:
                        begin = place - within
                        if not _agree(piece, literal, begin):
                            continue
                        is_within = 0 <= begin <= len(piece) - len(literal)
                        for (back, behind), mask in asking[literal].items():
                            if is_within and behind is None:
                                sure |= mask
                            else:
                                match = None if behind is None else behind.match
                                text = None if is_within else literal
                                checks.append((begin, text, mask, begin + len(literal) - back, match))
            self.sure.append(sure)
            self.checks.append(tuple(check for check in checks if check[2] & ~sure))


def _agree(piece: bytes, other: bytes, place: int) -> bool:
    """Whether another text can stand at a place seen from a piece, the same bytes in both where they overlap."""
    first, behind = max(0, place), min(len(piece), place + len(other))
    return piece[first:behind] == other[first - place : behind - place]


class _Chunk:
    """Whole records, without their colours, and where they stand in the file."""

    def __init__(self, buffer: Buffer, end: int, offset: int) -> None:
        text = bytes(buffer[:end]) if isinstance(buffer, memoryview) else buffer
        self.offset = offset
        self._coloured: bytes | None = None
        if text.find(b"\x1b", 0, end) >= 0:
            self._coloured = bytes(memoryview(text)[:end]).replace(b"\r", b"\n")
            text = _ESCAPE.sub(b"", self._coloured)
            end = len(text)
            self._near = (0, 0)
        self.text = text
        self.end = end

    @cached_property
    def has_returns(self) -> bool:
        """Whether a record may end at a return."""
        return self.text.find(b"\r", 0, self.end) >= 0

    def start(self, place: int) -> int:
        """Where the record begins in which a place lies."""
        start = self.text.rfind(b"\n", 0, place) + 1
        return max(start, self.text.rfind(b"\r", start, place) + 1) if self.has_returns else start

    def stop(self, place: int) -> int:
        """Where it ends, without what ends it."""
        stop = self.text.find(b"\n", place, self.end)
        if stop < 0:
            stop = self.end
        if self.has_returns:
            back = self.text.find(b"\r", place, stop)
            return stop if back < 0 else back
        return stop

    def view(self) -> Buffer:
        return self.text if self.end == len(self.text) else memoryview(self.text)[: self.end]

    def record(self, start: int, stop: int) -> bytes:
        text = self.text[start:stop]
        return text if isinstance(text, bytes) else bytes(text)

    def where(self, start: int) -> int:
        """Byte of the file at which the record begins that begins here."""
        if self._coloured is None:
            return self.offset + start
        # colours hold no record ends: the same record has as many of them before it
        text, coloured = self.text, self._coloured
        plain, place = self._near
        if self.end - start < abs(start - plain):
            plain, place = self.end, len(coloured)
        elif start < abs(start - plain):
            plain, place = 0, 0
        if start >= plain:
            for _ in range(text.count(b"\n", plain, start)):
                place = coloured.find(b"\n", place) + 1
        else:
            for _ in range(text.count(b"\n", start, plain)):
                place = coloured.rfind(b"\n", 0, place)
            place = coloured.rfind(b"\n", 0, place) + 1
        self._near = (start, place)
        return self.offset + place

    def all(self) -> Iterator[tuple[int, int]]:
        """Start and end of each record, those left out in which nothing stands."""
        start = 0
        while start < self.end:
            stop = self.stop(start)
            if stop > start:
                yield start, stop
            start = stop + 1

    def backwards(self, literals: Sequence[bytes], begin: int) -> Iterator[tuple[int, int]]:
        """Records behind ``begin`` that hold one of the literals, or all of them without any, the last one first."""
        text, behind = self.text, self.end
        lasts = [behind] * len(literals)
        while behind > begin:
            if literals:
                # each literal is looked for again only where the last place of it is used up
                place = begin - 1
                for number, literal in enumerate(literals):
                    if lasts[number] + len(literal) > behind:
                        lasts[number] = text.rfind(literal, begin, behind)
                    place = max(place, lasts[number])
                if place < begin:
                    return
                start, stop = self.start(place), self.stop(place)
            else:
                stop = behind - (text[behind - 1] in b"\r\n")
                start = self.start(stop)
            if stop > start:
                yield start, stop
            behind = start


class Engine:
    """Searches logs for patterns.

    ``clock`` gives seconds that only rise, to bound the time that patterns may take together. A pattern whose searches
    are given up too often is left out from then on.
    """

    def __init__(self, patterns: Sequence[Pattern], clock: Callable[[], float] | None = None) -> None:
        self.clock = clock
        self.timeouts: dict[str, int] = {}
        """Records that a pattern was not searched in to the end, since that took too long."""
        self._notes = [note for pattern in patterns if pattern.own for note in _notes(pattern)]
        self._given_up: Counter[Pattern] = Counter()
        self._taken: deque[tuple[float, float]] = deque()
        """When searches that may be slow were made, and how long they took, by slots of time."""
        self.forward: list[_Unit] = []
        """Each match counts."""
        self.late: list[_Unit] = []
        """The last match counts."""
        self.in_chunks: list[_Unit] = []
        """The same, with each key of a pattern of pairs on its own."""
        self._units: list[_Unit] = []
        for order, pattern in enumerate(patterns):
            extractor = Extractor(pattern)
            unit = self._add(order, pattern, extractor)
            if pattern.kind in (Kind.ERROR, Kind.RESUME):
                self.forward.append(unit)
                continue
            self.late.append(unit)
            if pattern.kind is Kind.PAIRS:
                self.in_chunks += [self._add(order, pattern, extractor, key) for key in range(len(pattern.keys))]
            else:
                self.in_chunks.append(unit)
        shared = Counter(unit.literals for unit in self.forward)
        for unit in self.forward:
            # of patterns that begin with the same word, like ERROR, what follows tells which it can be
            if unit.also and shared[unit.literals] > 1:
                unit.literals, unit.also = unit.also, unit.literals
        self._groups: dict[int, tuple[_Group, ...]] = {}
        self._of_masks: dict[int, tuple[_Unit, ...]] = {}
        self._careful: dict[str, Any] = {}
        self._sum_up()

    def _sum_up(self) -> None:
        self.bare = [unit for unit in (*self.forward, *self.late) if not unit.literals]
        self.forward_mask = sum(unit.bit for unit in self.forward)
        self.every_mask = self.forward_mask | sum(unit.bit for unit in self.late)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should be told of the patterns; grows when one is left out."""
        return tuple(self._notes)

    def _add(self, order: int, pattern: Pattern, extractor: Extractor, key: int | None = None) -> _Unit:
        unit = _Unit(len(self._units), order, pattern, extractor, key)
        self._units.append(unit)
        return unit

    def scan(self, text: bytes, stamps: StampReader | None = None) -> Findings:
        """Everything that the patterns find in whole records; the last one need not have an end."""
        scan = Scan(self, stamps)
        scan.take_all(_Chunk(text, len(text), 0))
        return scan.finish(lambda offset, size: text[offset : offset + size])

    def begin(self, stamps: StampReader | None = None) -> "Scan":
        """One look at one file."""
        return Scan(self, stamps)

    def groups(self, mask: int) -> tuple[_Group, ...]:
        """Automata that find the literals of the units in a mask."""
        found = self._groups.get(mask)
        if found is None:
            if len(self._groups) >= MOST_AUTOMATA:
                self._groups.clear()
            found = self._groups[mask] = _groups(self.units(mask))
        return found

    def units(self, mask: int) -> tuple[_Unit, ...]:
        """The units in a mask, in the order of their patterns."""
        found = self._of_masks.get(mask)
        if found is None:
            if len(self._of_masks) >= 4096:
                self._of_masks.clear()
            found = self._of_masks[mask] = tuple(unit for unit in self._units if unit.bit & mask)
        return found

    def careful(self, pattern: Pattern) -> Any:
        """The same expression for a search that can be stopped, or None when there is no such."""
        key = f"{pattern.regex.flags} {pattern.regex.pattern!r}"
        if key not in self._careful:
            import regex  # type: ignore[import-untyped]  # costs memory, and few logs need it

            flags = pattern.regex.flags & (re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE)
            try:
                self._careful[key] = regex.compile(pattern.regex.pattern, int(flags) | regex.VERSION0)
            except regex.error:
                self._careful[key] = None
        return self._careful[key]

    def now(self) -> float:
        """Seconds by the clock; 0 without one."""
        return 0.0 if self.clock is None else self.clock()

    def has_time(self, now: float) -> bool:
        """Whether searches that may be slow have not used up their time yet; always without a clock."""
        while self._taken and self._taken[0][0] <= now - WINDOW_S:
            self._taken.popleft()
        return sum(taken for _, taken in self._taken) < LOOK_TIMEOUT_S

    def took(self, now: float, taken: float) -> None:
        """Note how long a search took that has just ended."""
        if self.clock is None:
            return
        if self._taken and now - self._taken[-1][0] < SLOT_S:
            begun, before = self._taken.pop()
            self._taken.append((begun, before + taken))
        else:
            self._taken.append((now, taken))

    def give_up(self, pattern: Pattern) -> None:
        """Note that a search was stopped, and leave the pattern out when that happens too often."""
        self._given_up[pattern] += 1
        if self._given_up[pattern] != MOST_GIVEN_UP:
            return
        self._notes.append(
            f'pattern "{pattern.name}" was given up {MOST_GIVEN_UP} times and is left out from now on: '
            f"each time a search took over {RECORD_TIMEOUT_S} s"
        )
        for unit in self._units:
            if unit.pattern == pattern:
                unit.leave_out()  # scans under way still have it
        self.forward, self.late, self.in_chunks = (
            [unit for unit in units if unit.pattern != pattern] for units in (self.forward, self.late, self.in_chunks)
        )
        self._sum_up()


def _groups(units: Iterable[_Unit]) -> tuple[_Group, ...]:
    """Automata that tell where the literals of all these units stand, as few of them as are fast."""
    masks: dict[bytes, dict[_Behind, int]] = {}
    for unit in units:
        for literal in unit.literals:
            behind = unit.behind.get(literal)
            # with a byte more there are fewer words of which it is a part
            following = b"" if behind is None or len(literal) < PIECE else next_bytes(behind)
            for text in [literal + bytes((code,)) for code in following] or [literal]:
                asking = masks.setdefault(text, {})
                place = len(text) - len(literal), behind
                asking[place] = asking.get(place, 0) | unit.bit
    parts: list[tuple[list[bytes], Pieces]] = []
    # by the shortest text all are told apart: the short ones would slow down the search for the others
    for length in range(PIECE):
        short = sorted(literal for literal in masks if len(literal) == length)
        each = SLIM_PIECES if length > SHORTEST and len(short) > MOST_ALONE else 1
        for start in range(0, len(short), each):
            some = short[start : start + each]
            parts.append((some, {literal: [(literal, 0)] for literal in some}))
    parts += choose(sorted(literal for literal in masks if len(literal) >= PIECE))
    groups = tuple(_Group(order, pieces, masks) for order, pieces in parts)
    for group in groups:
        group.shared = group.mask & reduce(or_, (other.mask for other in groups if other is not group), 0)
    return groups


def _notes(pattern: Pattern) -> Iterator[str]:
    if not pattern.literals:
        yield f'pattern "{pattern.name}" has no fixed text in it: every record is searched, which takes longer'
    if not safe_length(pattern.regex):
        yield (
            f'pattern "{pattern.name}" repeats what can match in many ways: '
            f"a search that takes over {RECORD_TIMEOUT_S} s is given up"
        )


class Scan:
    """One look at one file: takes its chunks in their order and gives what they say."""

    def __init__(self, engine: Engine, stamps: StampReader | None = None) -> None:
        self._engine = engine
        self._stamps = stamps
        self._fed = 0
        self._errors: dict[str, int] = {}
        self._places: list[tuple[int, int, Any, bytes]] = []
        """(offset, order, what is there, head of the record) of each position and mark."""
        self._values: dict[tuple[str, int | None], tuple[int, int, float, bytes]] = {}
        """(offset, -order, number, head of the record), the greatest of each name and rank."""
        self._unsearched: dict[int, list[tuple[int, int]]] = {}
        """By unit: (offset, size) of the chunks since its last match that are put off to the end."""
        self._rare: set[int] = set()
        """Units that had few candidates in the chunk before: their literals are followed forwards."""
        self._often: dict[int, int] = {}
        """Values that were in a chunk: so many of the next chunks are put off for them."""
        self._spent: dict[str, float] = {}

    def feed(self, buffer: Buffer, end: int, offset: int) -> None:
        """Take the whole records in ``buffer[:end]``, which stand at ``offset`` of the file; keeps none of it."""
        if end <= 0:
            return
        self._fed += end
        chunk = _Chunk(buffer, end, offset)
        if self._fed <= SMALL_BYTES:
            self.take_all(chunk)
        else:
            self._take_last(chunk, end)

    def finish(self, reread: Callable[[int, int], bytes]) -> Findings:
        """What was found. ``reread(offset, size)`` gives a part of the file again, less where it is gone."""
        waiting: dict[tuple[int, int], list[_Unit]] = {}
        for unit in self._engine.in_chunks:
            for span in self._unsearched.get(unit.number, ()):
                waiting.setdefault(span, []).append(unit)
        settled: set[int] = set()
        for turn, (offset, size) in enumerate(sorted(waiting, reverse=True)):
            units = [unit for unit in waiting[offset, size] if unit.number not in settled]
            if not units:
                continue
            text = reread(offset, size)
            chunk = _Chunk(text, len(text), offset)
            followed: dict[int, list[tuple[int, int]]] = {}
            if turn:  # what is not in the last chunk may well be in none
                followed = {unit.number: [] for unit in units if unit.literals}
                self._follow(chunk, sum(unit.bit for unit in units if unit.literals), followed)
            for unit in units:
                places = followed.get(unit.number)
                if self._settle(unit, chunk, chunk.backwards(unit.literals, 0) if places is None else places, None):
                    settled.add(unit.number)
        self._unsearched.clear()
        return self._findings()

    # -- a few records: everything counts --------------------------------------------------------

    def take_all(self, chunk: _Chunk) -> None:
        """Search every record for everything."""
        engine = self._engine
        masks: dict[int, int] = {}
        stops: dict[int, int] = {}
        text, end = chunk.text, chunk.end
        for group in engine.groups(engine.every_mask):
            hits = group.find(chunk.view())
            sure, checks, starts_with = group.sure, group.checks, text.startswith
            start = stop = -1
            for number, place, behind in hits:
                mask = sure[number]
                for before, literal, others, after, follows in checks[number]:
                    if (literal is None or (place + before >= 0 and starts_with(literal, place + before, end))) and (
                        follows is None or follows(text, place + after, end)
                    ):
                        mask |= others
                if not mask:
                    continue
                if place >= stop:
                    start, stop = chunk.start(place), chunk.stop(behind)
                    stops[start] = stop
                    masks.setdefault(start, 0)
                masks[start] |= mask
        if engine.bare:
            bare = sum(unit.bit for unit in engine.bare)
            for start, stop in chunk.all():
                stops[start] = stop
                masks[start] = masks.get(start, 0) | bare
        if not masks:
            return
        candidates: dict[int, list[tuple[int, int]]] = {}
        for start in sorted(masks):
            for unit in engine.units(masks[start]):
                if unit.is_counted:
                    self._errors[unit.name] = self._errors.get(unit.name, 0) + 1
                elif unit.kind is Kind.VALUE or unit.kind is Kind.PAIRS:
                    candidates.setdefault(unit.number, []).append((start, stops[start]))
                else:
                    self._evaluate(unit, chunk, start, stops[start])
        for unit in engine.late:
            if unit.number in candidates:
                self._settle(unit, chunk, reversed(candidates[unit.number]), None)

    # -- a chunk of a backlog ----------------------------------------------------------------------

    def _take_last(self, chunk: _Chunk, size: int) -> None:
        """Search all records for errors and the end of the chunk for the rest."""
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
        taken: dict[int, int] = {}
        for group in engine.groups(engine.forward_mask):
            if hits := group.find(chunk.view()):
                self._take_hits(chunk, group, hits, {}, taken)
        self._follow(chunk, mask, followed)
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

    def _follow(self, chunk: _Chunk, mask: int, followed: dict[int, list[tuple[int, int]]]) -> None:
        """Note the records in which units may match, by their numbers, the last one first."""
        groups = self._engine.groups(mask)
        taken: dict[int, int] = {}
        for group in groups:
            if hits := group.find(chunk.view()):
                self._take_hits(chunk, group, hits, followed, taken)
        for places in followed.values():
            if len(groups) > 1:
                places.sort()
            places.reverse()

    def _put_off(self, unit: _Unit, offset: int, size: int) -> None:
        """Leave a chunk to the end of the look, which needs it only if none after it has a match."""
        self._unsearched.setdefault(unit.number, []).append((offset, size))

    def _take_hits(
        self,
        chunk: _Chunk,
        group: _Group,
        hits: Iterable[tuple[int, int, int]],
        followed: dict[int, list[tuple[int, int]]],
        taken: dict[int, int],
    ) -> None:
        """Go through the hits of an automaton, each unit once in each record.

        ``taken`` are the units that have been dealt with, by the end of their record, where several automata have
        literals of them.
        """
        text, end, has_returns = chunk.text, chunk.end, chunk.has_returns
        find, starts_with, units, errors = text.find, text.startswith, self._engine.units, self._errors
        sure, checks, start_of, shared_units = group.sure, group.checks, chunk.start, group.shared
        stop, begin, seen = -1, -1, 0
        for number, place, behind in hits:
            mask = sure[number]
            for before, literal, others, after, follows in checks[number]:
                if (literal is None or (place + before >= 0 and starts_with(literal, place + before, end))) and (
                    follows is None or follows(text, place + after, end)
                ):
                    mask |= others
            if not mask:
                continue
            if place >= stop:
                stop = find(b"\n", behind, end)
                if stop < 0:
                    stop = end
                if has_returns and (back := find(b"\r", behind, stop)) >= 0:
                    stop = back
                seen, begin = 0, -1
            mask &= ~seen
            if not mask:
                continue
            seen |= mask
            if shared := mask & shared_units:
                before = taken.get(stop, 0)
                taken[stop] = before | shared
                mask &= ~before
            for unit in units(mask):
                if unit.is_counted:
                    errors[unit.name] = errors.get(unit.name, 0) + 1
                    continue
                if begin < 0:
                    begin = start_of(place)
                if unit.is_error and stop - begin <= unit.safe:
                    # the same as _evaluate, without the call: the log of a failing loop is full of these
                    record = text[begin:stop]
                    for literal in unit.also:
                        if literal in record:
                            break
                    else:
                        if unit.also:
                            continue
                    if unit.search(record) is not None:
                        errors[unit.name] = errors.get(unit.name, 0) + 1
                elif unit.number in followed:
                    followed[unit.number].append((begin, stop))
                else:
                    self._evaluate(unit, chunk, begin, stop)

    # -- one record --------------------------------------------------------------------------------

    def _settle(
        self, unit: _Unit, chunk: _Chunk, places: Iterable[tuple[int, int]], most_tries: int | None
    ) -> bool | None:
        """Whether the last finding of a unit is among records that come from the last one on.

        None when that many records in a row gave nothing; a pattern that names ranks has a last
        finding for each of them, and goes on until none is new.
        """
        found: set[Key] = set()
        tries = 0
        for start, stop in places:
            keys = self._evaluate(unit, chunk, start, stop)
            if keys - found:
                found |= keys
                tries = 0
                if len(found) >= unit.wanted and not unit.extractor.has_ranks:
                    return True
            else:
                tries += 1
                if most_tries is not None and (tries >= most_tries or (tries >= FEW and found == _WITHOUT_RANKS)):
                    return True if found else None
        return bool(found)

    def _evaluate(self, unit: _Unit, chunk: _Chunk, start: int, stop: int) -> set[Key]:
        """Search one record for a unit and note what it says; the names and ranks of that."""
        record = chunk.record(start, stop)
        if unit.also:
            for text in unit.also:
                if text in record:
                    break
            else:
                return _NOTHING
        match = unit.search(record) if stop - start <= unit.safe else self._search_carefully(unit, record)
        if match is None:
            return _NOTHING
        if unit.kind is Kind.ERROR:
            self._errors[unit.name] = self._errors.get(unit.name, 0) + 1
            return _NOTHING
        extractor = unit.extractor
        if unit.kind is Kind.MARK:
            self._places.append((chunk.where(start), unit.order, unit.pattern, record[:HEAD_BYTES]))
            return {(None, None)}
        rank = extractor.rank(match)
        if unit.kind is Kind.VALUE or unit.kind is Kind.PAIRS:
            keys: set[Key] = set()
            for name, number in extractor.values(match, record, unit.key):
                entry = (chunk.where(start), -unit.order, number, record[:HEAD_BYTES])
                old = self._values.get((name, rank))
                if old is None or entry[:2] > old[:2]:
                    self._values[name, rank] = entry
                keys.add((name, rank))
            return keys
        counts = extractor.counts(match)
        if counts is None:
            return _NOTHING
        what = (unit.pattern, counts, rank)
        self._places.append((chunk.where(start), unit.order, what, record[:HEAD_BYTES]))
        return {(None, rank)}

    def _search_carefully(self, unit: _Unit, record: bytes) -> Match | None:
        """Search a record in bounded time; None as well when that was not enough."""
        engine, name = self._engine, unit.name
        spent, begun = self._spent.get(name, 0.0), engine.now()
        if (
            spent < LOOK_TIMEOUT_S
            and engine.has_time(begun)
            and (expression := engine.careful(unit.pattern)) is not None
        ):
            begun = engine.now()  # compiling it takes long, once
            least = 0.0
            try:
                found: Match | None = expression.search(record, timeout=RECORD_TIMEOUT_S, concurrent=True)
                return found
            except TimeoutError:
                least = RECORD_TIMEOUT_S
                engine.give_up(unit.pattern)
            finally:
                now = engine.now()
                taken = max(least, now - begun)
                self._spent[name] = spent + taken
                engine.took(now, taken)
        engine.timeouts[name] = engine.timeouts.get(name, 0) + 1
        return None

    # -- the end -----------------------------------------------------------------------------------

    def _findings(self) -> Findings:
        findings = Findings(errors=self._errors)
        read = None if self._stamps is None else self._stamps.read
        self._places.sort(key=_OFFSET_AND_ORDER)
        before, stamp = -1, None
        for offset, _, what, head in self._places:
            if read is not None and offset != before:
                before, stamp = offset, read(head)
            if isinstance(what, Pattern):
                findings.marks.append(Mark(what.name, what.begins, offset, stamp))
            else:
                pattern, (done, total, epoch, epochs), rank = what
                resumed = pattern.kind is Kind.RESUME
                findings.positions.append(
                    Position(pattern.name, pattern.unit, offset, done, total, epoch, epochs, rank, resumed, stamp)
                )
        for (name, rank), (offset, _, number, head) in self._values.items():
            stamp = None if read is None else read(head)
            findings.values.setdefault(name, {})[rank] = Value(number, offset, stamp)
        return findings


_NOTHING: set[Key] = set()
_WITHOUT_RANKS: set[Key] = {(None, None)}
_OFFSET_AND_ORDER = itemgetter(0, 1)
