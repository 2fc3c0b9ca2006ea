"""Automata that find all literals of all patterns in one pass or a few, and so the patterns to try."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import or_

import ahocorasick_rs

from exporter.logs.records import Buffer
from exporter.logs.search.literals import bytes_after_match
from exporter.logs.search.pieces import PIECE_BYTES, SLIM_PIECES, WIDTH, Pieces, plan_search
from exporter.logs.search.units import SearchUnit

# Texts up to this size are searched for one literal after the other, until that takes as long as building automata:
# bytes searched, and those that take as long as the rest of such a search
SHORT_BYTES, ENOUGH_BYTES, SEARCH_BYTES = 16 * 1024, 1024 * 1024, 4 * 1024
MANY_USELESS_HITS = 500  # useless hits of a piece that justify an expression of its own
# texts that justify lengthening a short one to join their pass; fewer are cheaper in a short pass each
LEAST_OTHERS = 3

_Following = tuple[
    int, re.Pattern[bytes] | None
]  # pattern that must match at this many bytes before the end of a literal
# Literals around a piece (None if the piece contains them): their begin relative to the piece, units, end, and the
# pattern required from there
_Check = tuple[int, tuple[bytes, ...] | None, int, int, Callable[[Buffer, int, int], object] | None]


class ShortTexts:
    """Decides which texts are searched without automata."""

    def __init__(self) -> None:
        self.left_bytes = ENOUGH_BYTES

    def take(self, size: int) -> bool:
        """Whether to search a text of this size without automata."""
        if size <= SHORT_BYTES and self.left_bytes > 0:
            self.left_bytes -= size + SEARCH_BYTES
            return True
        return False


class AutomatonGroup:
    """An automaton over pieces of literals; ``asking`` gives each literal's units, by what must follow it."""

    def __init__(
        self, order: list[bytes], pieces: Pieces, units_by_literal: Mapping[bytes, Mapping[_Following, int]]
    ) -> None:
        self.shared_units = 0  # units that have literals in other groups too
        self.mask = reduce(
            or_, (mask for of in pieces.values() for text, _ in of for mask in units_by_literal[text].values()), 0
        )
        automaton = ahocorasick_rs.BytesAhoCorasick(order, matchkind=ahocorasick_rs.MatchKind.LeftmostFirst)
        # (number of the piece, start, end) of each hit; hits do not overlap
        self.find: Callable[[Buffer], list[tuple[int, int, int]]] = automaton.find_matches_as_indexes
        self.certain_units: list[int] = []  # per piece: units with a literal inside it and no further condition
        self.checks: list[tuple[_Check, ...]] = []  # per piece: checks of its surroundings
        self.possible_units: list[int] = []  # per piece: units that it may be of
        # per piece: a quick test that rejects hits without a match, if built
        self.tests: list[Callable[[Buffer, int, int], object] | None] = [None] * len(order)
        self.tested_units = [0] * len(order)  # per piece: units that its test, if any, knows
        self._order = order
        # per piece: sources of the checks, and their units
        self._conditions: list[list[tuple[int, bytes, _Following, int]]] = []
        self._useless_hits = [0] * len(order)
        beginning: dict[int, list[tuple[bytes, list[tuple[bytes, int]]]]] = {}
        for other, members in pieces.items():
            beginning.setdefault(other[0], []).append((other, members))
        for piece in order:
            sure = 0
            checks: list[_Check] = []
            asked: list[tuple[int, bytes, _Following, int]] = []
            alike: dict[tuple[int, int, int, re.Pattern[bytes] | None], list[bytes]] = {}
            # a hit hides those that begin inside it
            for place, code in enumerate(piece):
                for other, members in beginning.get(code, ()):
                    if not _texts_agree(piece, other, place):
                        continue
                    for literal, within in members:
                        begin = place - within
                        if not _texts_agree(piece, literal, begin):
                            continue
                        is_within = 0 <= begin <= len(piece) - len(literal)
                        for (back, behind), mask in units_by_literal[literal].items():
                            if is_within and behind is None:
                                sure |= mask
                                continue
                            asked.append((begin, literal, (back, behind), mask))
                            if is_within:
                                checks.append((begin, None, mask, begin + len(literal) - back, _matcher(behind)))
                            else:
                                after = 0 if behind is None else begin + len(literal) - back
                                alike.setdefault((begin, mask, after, behind), []).append(literal)
            self.certain_units.append(sure)
            self._conditions.append(asked)
            checks += [
                (begin, tuple(texts), mask, after, _matcher(behind))
                for (begin, mask, after, behind), texts in alike.items()
            ]
            self.checks.append(tuple(check for check in checks if check[2] & ~sure))
            self.possible_units.append(reduce(or_, (check[2] for check in checks), sure))

    def units_at(self, text: bytes | bytearray, end: int, number: int, place: int) -> int:
        """Units with a literal at this hit of a piece."""
        mask = self.certain_units[number]
        for before, literals, others, after, follows in self.checks[number]:
            if (literals is None or (place + before >= 0 and text.startswith(literals, place + before, end))) and (
                follows is None or follows(text, place + after, end)
            ):
                mask |= others
        return mask

    def record_useless_hit(self, number: int, wanted: int = -1) -> None:
        """Count a useless hit of a piece; if these are frequent, build one expression that rejects them.

        It knows the units that were wanted at such times. It knows nothing of units that need no further condition, so
        none of those may be wanted.
        """
        possible = self.possible_units[number] & wanted
        if self.certain_units[number] & wanted or not possible & ~self.tested_units[number]:
            return
        self._useless_hits[number] += 1
        if self._useless_hits[number] >= MANY_USELESS_HITS:
            self._useless_hits[number] = 0
            self.tested_units[number] |= possible
            self.tests[number] = self._make_test(number, self.tested_units[number])

    def _make_test(self, number: int, units: int) -> Callable[[Buffer, int, int], object] | None:
        """Build the expression for these units; None if that is impossible."""
        piece = self._order[number]
        leads: dict[bytes, dict[bytes, None]] = {}
        for begin, literal, (back, behind), mask in self._conditions[number]:
            if not mask & units:
                continue
            if len(literal) - back < max(0, -begin):
                return None
            lead = b"(?<=%s)" % re.escape(literal[:-begin]) if begin < 0 else re.escape(piece[:begin])
            rest = re.escape(literal[max(0, -begin) : len(literal) - back])
            what = rest if behind is None else b"%s(?:%s)" % (rest, behind.pattern)
            leads.setdefault(what, {})[lead] = None
        texts = [b"(?:%s)%s" % (b"|".join(before), what) for what, before in leads.items()]
        return re.compile(b"|".join(texts)).match


class FloodAutomaton:
    """An automaton for whole literals, of which no hit hides another, and for record ends.

    It is several times slower than those for pieces, but its hits alone show which literals a record has. It returns
    them as the literals themselves, for which Python makes no object, and so searches text (of Latin-1, whose
    characters are the bytes). For the ``frequent`` units it also has the texts of their alternatives.
    """

    def __init__(self, units: Iterable[SearchUnit], frequent: Iterable[SearchUnit]) -> None:
        masks: dict[bytes, int] = {}
        for unit in units:
            for literal in unit.literals:
                masks[literal] = masks.get(literal, 0) | unit.bit
        self.frequent_units = {unit.number for unit in frequent}
        for unit in frequent:
            for alternative in unit.alternatives:
                masks |= {text: masks.get(text, 0) for text in (*alternative.texts, *alternative.second_texts)}
        # no record has a text with a record end
        self.literals = {
            text.decode("latin-1"): text for text in masks if text and not (b"\n" in text or b"\r" in text)
        }
        self.units = {name: masks[text] for name, text in self.literals.items()}  # per literal
        self._automaton = ahocorasick_rs.AhoCorasick(
            ["\n", *self.literals], implementation=ahocorasick_rs.Implementation.DFA, store_patterns=True
        )

    def find(self, text: bytes) -> list[str]:
        r"""Literals in each record, joined by returns; each record ends at a newline."""
        hits = self._automaton.find_matches_as_strings(text.decode("latin-1"), overlapping=True)
        return "\r".join(hits).split("\n")


def _matcher(following: re.Pattern[bytes] | None) -> Callable[[Buffer, int, int], object] | None:
    return None if following is None else following.match


def _texts_agree(piece: bytes, other: bytes, place: int) -> bool:
    """Whether another text can be at a place relative to a piece, with equal bytes where they overlap."""
    first, behind = max(0, place), min(len(piece), place + len(other))
    return piece[first:behind] == other[first - place : behind - place]


def build_automata(units: Iterable[SearchUnit], sample: bytes = b"") -> tuple[AutomatonGroup, ...]:
    """Build as few fast automata as possible for the literals of these units.

    ``sample`` is text like that to be searched.
    """
    units = tuple(units)
    masks = _texts(units)
    if 0 < sum(len(text) < WIDTH for text in masks) <= len(masks) - LEAST_OTHERS:
        longer = _texts(units, with_previous_bytes=True)
        if len(longer) <= SLIM_PIECES and min(map(len, longer)) >= WIDTH:
            masks = longer
    groups = tuple(AutomatonGroup(plan.order, plan.pieces, masks) for plan in plan_search(sorted(masks), sample))
    for group in groups:
        group.shared_units = group.mask & reduce(or_, (other.mask for other in groups if other is not group), 0)
    return groups


def _texts(units: Iterable[SearchUnit], *, with_previous_bytes: bool = False) -> dict[bytes, dict[_Following, int]]:
    """Texts to search for, and the units of each by what must follow it.

    A literal too short to join the others takes a separate pass. ``with_previous_bytes`` lengthens it by each byte that
    may precede it.
    """
    masks: dict[bytes, dict[_Following, int]] = {}
    for unit in units:
        for literal in unit.literals:
            behind = unit.after_literal.get(literal)
            # a further byte excludes words that contain the literal
            following = b"" if behind is None or len(literal) < PIECE_BYTES else bytes_after_match(behind)
            previous = unit.previous_bytes if with_previous_bytes and len(literal) < WIDTH else b""
            texts = [bytes((code,)) + literal for code in previous]
            for text in texts or [literal + bytes((code,)) for code in following] or [literal]:
                asking = masks.setdefault(text, {})
                place = 0 if texts else len(text) - len(literal), behind
                asking[place] = asking.get(place, 0) | unit.bit
    return masks
