"""Analyze regular expressions: literals that every match contains, and the cost of a search.

Both walk the tree of the standard library's parser. Unknown nodes yield no literals and make a pattern costly.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import product
from operator import or_
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MOST_TEXTS = 64  # alternatives that are worth searching for
MOST_SECOND_TEXTS = 8
MOST_SPELLINGS = 16  # texts to which small classes and optional parts are expanded: `[Rr]esum(?:ed|ing)` gives four
MOST_CLASS = 4
MOST_LENGTH = 48
LEAST_BITS = 8.0  # a text with less information, like a single letter, is in every record
ENOUGH_BITS = 50.0

Texts = tuple[bytes, ...]


@dataclass(frozen=True)
class RequiredLiterals:
    """Texts of which every match contains at least one."""

    texts: Texts
    is_sufficient: bool  # whether containing one is sufficient for a match
    second_texts: Texts = ()  # a second set, of which every match contains one too


def required_literals(regex: re.Pattern[bytes]) -> Texts:
    """Texts of which every match contains at least one; () if none were found.

    A lookaround's text counts too: it is in the same record, though not in the match.
    """
    return find_literals(regex).texts


def is_literal_only(regex: re.Pattern[bytes]) -> bool:
    """Whether a record matches exactly if it contains a required literal."""
    return find_literals(regex).is_sufficient


@lru_cache(maxsize=2)
def _tree(regex: re.Pattern[bytes]) -> Any:
    return parser.parse(regex.pattern, regex.flags)


def needs_line_end(regex: re.Pattern[bytes]) -> bool:
    """Whether every match crosses a record end, so that no single record can match."""
    return not regex.flags & re.LOCALE and _requires_any(_tree(regex), regex.flags, _LINE_ENDS)


def _requires_any(nodes: Iterable[Any], flags: int, wanted: int) -> bool:
    """Whether each match of a sequence contains one of these characters, or requires one next to it."""
    for op, argument, own_flags in _flat(nodes, flags):
        if op in (sre.LITERAL, sre.IN) and not _characters(op, argument, own_flags) & ~wanted:
            return True
        if op is sre.ASSERT and _requires_any(argument[1], own_flags, wanted):
            return True
        if op is sre.BRANCH and all(_requires_any(branch, own_flags, wanted) for branch in argument[1]):
            return True
        is_repeat = op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
        if is_repeat and argument[0] > 0 and _requires_any(argument[2], own_flags, wanted):
            return True
    return False


@lru_cache(maxsize=1024)
def find_literals(regex: re.Pattern[bytes]) -> RequiredLiterals:
    """Find the literals of a pattern over bytes."""
    if regex.flags & re.LOCALE:
        return RequiredLiterals((), False)
    part = _sequence(_tree(regex), regex.flags)
    if part.exact is not None and part.pure and _bits(part.exact) > 0:
        texts = _shortest(part.exact)
        if not any(b"\n" in text or b"\r" in text for text in texts):
            return RequiredLiterals(texts, True) if _least_bits(texts) >= LEAST_BITS else RequiredLiterals((), False)
    best = _in_one_line(part.best()) or ()
    if _least_bits(best) < LEAST_BITS:
        return RequiredLiterals((), False)
    others = [texts for texts in map(_in_one_line, part.all_sets) if texts and not _overlap(texts, best)]
    second = max(others, key=_bits, default=())
    return RequiredLiterals(
        _shortest(best),
        False,
        second if len(second) <= MOST_SECOND_TEXTS and _least_bits(second) >= LEAST_BITS else (),
    )


@dataclass(frozen=True)
class _PatternPart:
    """Facts about all matches of one part of a pattern."""

    exact: Texts | None = None  # all that it can match
    needed: Texts | None = None  # each match, or its surroundings, contains one of these
    start: Texts | None = None  # each match begins with one of these and ends with one of these
    pure: bool = True  # whether each exact text matches in any context
    all_sets: tuple[Texts, ...] = ()  # every set of which each match contains a member

    def best(self) -> Texts | None:
        return _better(self.exact, self.needed)


_OPAQUE = _PatternPart(pure=False)


def _sequence(nodes: Iterable[Any], flags: int) -> _PatternPart:
    """Combine a sequence of parts; neighbours with exact texts form longer texts."""
    run: list[Texts] = []
    known: list[Texts | None] = []
    whole = pure = True
    for op, argument, own_flags in _flat(nodes, flags):
        if op is sre.AT:
            pure = False
            continue
        if op in (sre.ASSERT, sre.ASSERT_NOT):
            pure = False
            if op is sre.ASSERT:
                known.append(_sequence(argument[1], own_flags).best())
            continue
        part = _part(op, argument, own_flags)
        pure = pure and part.pure
        if part.exact is not None:
            run.append(part.exact)
            while not _is_small(run):
                known.append(_best_window(run[:-1]))
                run.pop(0)
                whole = False
        else:
            whole = False
            if part.start is not None and _is_small([*run, part.start]):
                run.append(part.start)
            known += [part.needed, _best_window(run)]
            run = [part.start] if part.start is not None else []
    texts = _expand(run) if whole else None
    sets = tuple(found for found in (*known, _best_window(run)) if found is not None)
    return _PatternPart(texts, reduce(_better, sets, None), pure=pure, all_sets=sets)


def _flat(nodes: Iterable[Any], flags: int) -> Iterator[tuple[Any, Any, int]]:
    """Yield the parts of a sequence with their flags, with groups expanded."""
    for op, argument in nodes:
        if op is sre.SUBPATTERN:
            _, added, removed, inner = argument
            yield from _flat(inner, (flags | added) & ~removed)
        elif op is sre.ATOMIC_GROUP:
            yield (sre.ASSERT_NOT, None, flags)  # no text of its own; but its content may match alone and not here
            yield from _flat(argument, flags)
        else:
            yield op, argument, flags


def _part(op: Any, argument: Any, flags: int) -> _PatternPart:
    if op is sre.LITERAL or op is sre.IN:
        return _one_of(_characters(op, argument, flags))
    if op is sre.BRANCH:
        return _alternatives([_sequence(branch, flags) for branch in argument[1]])
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, most, inner = argument
        part = _sequence(inner, flags)
        pure = part.pure and op is not sre.POSSESSIVE_REPEAT
        if (least, most) == (0, 1) and part.exact is not None:
            return _PatternPart((*part.exact, b""), pure=pure)
        if least == 0:
            return _PatternPart(pure=pure)
        if part.exact is None:
            return _PatternPart(needed=part.needed, pure=pure)
        # the first copies carry enough information
        copies = max(
            count for count in range(1, min(int(least), 8) + 1) if count == 1 or _is_small([part.exact] * count)
        )
        texts = _expand([part.exact] * copies)
        return (
            _PatternPart(texts, pure=pure)
            if least == most == copies
            else _PatternPart(needed=texts, start=texts, pure=pure)
        )
    if op is sre.GROUPREF_EXISTS:
        _, yes, no = argument
        both = _alternatives([_sequence(yes, flags), _sequence(no or (), flags)])
        return _PatternPart(both.exact, both.needed, pure=False)
    if op in (sre.ANY, sre.NOT_LITERAL):
        return _PatternPart()
    return _OPAQUE


@lru_cache(maxsize=512)
def _one_of(characters: int) -> _PatternPart:
    if characters.bit_count() > MOST_CLASS:
        return _PatternPart()
    return _PatternPart(tuple(bytes((code,)) for code in range(256) if characters >> code & 1))


def _alternatives(parts: Sequence[_PatternPart]) -> _PatternPart:
    pure = all(part.pure for part in parts)
    exact = _joined(part.exact for part in parts)
    needed = _joined(part.best() for part in parts) if exact is None else None
    return _PatternPart(exact, needed, pure=pure)


def _joined(sets: Iterable[Texts | None]) -> Texts | None:
    """Union of several sets; None if one is unknown or the result is too large."""
    found: dict[bytes, None] = {}
    for texts in sets:
        if texts is None:
            return None
        found |= dict.fromkeys(texts)
    return tuple(found) if len(found) <= MOST_TEXTS else None


def _is_small(run: Sequence[Texts]) -> bool:
    """Whether the texts of a run are few and short enough to expand."""
    if len(run) == 1:
        return True
    ways, choices, length = 1, 0, 0
    for texts in run:
        if len(texts) == 1:
            length += len(texts[0])
        else:
            ways *= len(texts)
            choices += 1
            length += max(map(len, texts), default=0)
    return length <= MOST_LENGTH and ways <= (MOST_TEXTS if choices <= 1 else MOST_SPELLINGS)


def _expand(run: Sequence[Texts]) -> Texts:
    return tuple(dict.fromkeys(b"".join(texts) for texts in product(*run)))


def _best_window(run: Sequence[Texts]) -> Texts | None:
    """Most informative set of texts from neighbours in a run."""
    merged: list[Texts] = []
    for texts in run:
        if merged and len(texts) == len(merged[-1]) == 1:
            merged[-1] = (merged[-1][0] + texts[0],)
        else:
            merged.append(texts)
    best: Texts | None = None
    for start in range(len(merged)):
        for end in range(start + 1, len(merged) + 1):
            if _is_small(merged[start:end]):
                best = _better(best, _expand(merged[start:end]))
    return best


def _better(one: Texts | None, other: Texts | None) -> Texts | None:
    """The more informative of two sets."""
    if one is None or other is None:
        return other if one is None else one
    return other if _bits(other) > _bits(one) else one


def _bits(texts: Texts) -> float:
    """Information of a set: that of its weakest text, less a cost per further text."""
    return min(_least_bits(texts), ENOUGH_BITS) - 3.5 * math.log2(len(texts)) if texts else 0.0


def _least_bits(texts: Texts | None) -> float:
    return min((sum(map(_BITS.__getitem__, text)) for text in texts), default=0.0) if texts else 0.0


def _byte_bits(code: int) -> float:
    character = chr(code)
    common = "etaoinsrldcumhgpfybvwkxqjz".find(character)
    if common >= 0:
        return 4 + common / 8
    if character == " ":
        return 3
    return 7 if character.isupper() else 4.5 if character.isdigit() else 5 if character in ".,:-_/=[]()\"'" else 8


_BITS = [_byte_bits(code) for code in range(256)]  # approximate rarity of each byte in a log


def _overlap(texts: Texts, others: Texts) -> bool:
    """Whether two sets may refer to the same part of a match."""
    return any(text in other or other in text for text in texts for other in others)


def _in_one_line(texts: Texts | None) -> Texts | None:
    """Replace each text by its most informative piece without line ends."""
    if texts is None:
        return None
    return tuple(max(re.split(rb"[\r\n]", text), key=lambda piece: _least_bits((piece,))) for text in texts)


def _shortest(texts: Texts) -> Texts:
    """Drop texts that contain another of them."""
    return tuple(text for text in dict.fromkeys(texts) if not any(other != text and other in text for other in texts))


# -- context of a literal ------------------------------------------------------------------------

MOST_FOLLOWING = 64  # most repetitions, and parts, in a pattern for the text after a literal
MOST_WAYS = 5000
MOST_BEFORE = 10  # bytes before a literal that are worth searching for: digits
MOST_KINDS_BEFORE = 40  # distinct bytes before a literal; enough for any number format


def bytes_after_match(following: re.Pattern[bytes]) -> bytes:
    """The few possible first bytes of a match of this pattern; empty if there are many."""
    begins = _first_characters(list(_flat(_tree(following), following.flags)), _ALL)
    return _bytes_of(begins) if begins.bit_count() <= MOST_CLASS else b""


def _bytes_of(characters: int) -> bytes:
    return bytes(code for code in range(256) if characters >> code & 1)


@lru_cache(maxsize=1024)
def patterns_after_literals(regex: re.Pattern[bytes]) -> Mapping[bytes, re.Pattern[bytes]]:
    """Map required literals to a pattern for the text right after them in a match, where known.

    It requires less than the full pattern, and nothing about the end of the record.
    """
    found = _window(regex)
    return {} if found is None else _patterns_after(required_literals(regex), found.spellings, found.after)


@lru_cache(maxsize=1024)
def bytes_before_literal(regex: re.Pattern[bytes]) -> bytes:
    """The few bytes, such as digits, of which one precedes the required literal in every match.

    Empty if there are many, or several literals.
    """
    found = _window(regex)
    if found is None or found.spellings != required_literals(regex) or len(found.spellings) > 1:
        return b""
    nodes = [node for node in found.before if node[0] not in _PLACES][-1:]
    if nodes and nodes[0][0] in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        _, (least, _, inner), flags = nodes[0]
        nodes = list(_flat(inner, flags)) if least > 0 else []
    if len(nodes) != 1 or nodes[0][0] not in (sre.LITERAL, sre.IN):
        return b""
    characters = _characters(*nodes[0]) & ~_LINE_ENDS  # it is in the same record
    return _bytes_of(characters) if characters.bit_count() <= MOST_BEFORE else b""


@lru_cache(maxsize=1024)
def prefix_byte_mask(regex: re.Pattern[bytes]) -> bytes:
    """All bytes, such as digits, that can occur in a match before its required literal.

    Empty if the match begins with the literal, or if they are many or unknown.
    """
    found = _window(regex)
    if found is None or not set(found.spellings) <= set(required_literals(regex)):
        return b""
    characters = reduce(or_, (_consumed(*node) for node in found.before), 0)
    return _bytes_of(characters) if characters.bit_count() <= MOST_KINDS_BEFORE else b""


_PLACES = (sre.AT, sre.ASSERT, sre.ASSERT_NOT)  # parts that consume no text


class _LiteralWindow(NamedTuple):
    """The parts of a pattern that spell out its required literals, and those before and after them."""

    before: Sequence[tuple[Any, Any, int]]
    spellings: Texts
    after: Sequence[tuple[Any, Any, int]]


@lru_cache(maxsize=2)
def _window(regex: re.Pattern[bytes]) -> _LiteralWindow | None:
    """Locate the required literals in a pattern; None unless they are exactly some consecutive parts."""
    texts = set(required_literals(regex))
    if not texts:
        return None
    nodes = list(_flat(_tree(regex), regex.flags))
    for first in range(len(nodes)):
        run: list[Texts] = []
        for last in range(first, len(nodes)):
            op, argument, flags = nodes[last]
            exact = (b"",) if op in _PLACES else _part(op, argument, flags).exact
            if exact is None or not _is_small([*run, exact]):
                break
            run.append(exact)
            if {*_shortest(_expand(run))} == texts:
                return _LiteralWindow(nodes[:first], _expand(run), nodes[last + 1 :])
    return None


def _patterns_after(
    texts: Iterable[bytes], spellings: Texts, nodes: Sequence[tuple[Any, Any, int]]
) -> dict[bytes, re.Pattern[bytes]]:
    found: dict[bytes, re.Pattern[bytes]] = {}
    tail, _ = _loose_pattern(nodes)
    for text in texts:
        rests = [spelling[len(text) :] for spelling in spellings if spelling.startswith(text)]
        if any(text in spelling[1:] for spelling in spellings):
            continue
        if rests != [b""]:
            found[text] = re.compile(b"(?:%s)%s" % (b"|".join(map(re.escape, rests)), tail))
        elif tail:
            found[text] = re.compile(tail)
    return found


def _loose_pattern(nodes: Sequence[tuple[Any, Any, int]]) -> tuple[bytes, bool]:
    """Build a pattern that matches wherever these parts do, but may end early. Return it, and whether it covers all of
    them.
    """
    written: list[tuple[bytes, bool]] = []
    ways = 1
    whole = True
    for op, argument, flags in nodes:
        least, most = 1, 1
        inner = [(op, argument, flags)]
        if op in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
            continue
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            least, most = int(argument[0]), int(argument[1])
            inner = list(_flat(argument[2], flags))
        text = _loose_part(inner)
        ways *= most - least + 1
        if text is None or most > MOST_FOLLOWING or ways > MOST_WAYS or len(written) >= MOST_FOLLOWING:
            if text is not None and 0 < least <= MOST_FOLLOWING:
                written.append((b"%s{%d}" % (text, least), True))
            whole = False
            break
        written.append((text if least == most == 1 else b"%s{%d,%d}" % (text, least, most), least > 0))
    while not whole and written and not written[-1][1]:
        written.pop()
    return b"".join(text for text, _ in written), whole


def _loose_part(nodes: Sequence[tuple[Any, Any, int]]) -> bytes | None:
    """Same for a repeated part; None if it would have to end early."""
    if len(nodes) == 1:
        op, argument, flags = nodes[0]
        if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            return _class(_characters(op, argument, flags))
        if op is sre.BRANCH:
            branches = [_loose_pattern(list(_flat(branch, flags))) for branch in argument[1]]
            return b"(?:%s)" % b"|".join(text for text, _ in branches) if all(whole for _, whole in branches) else None
        if op not in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            return None
    text, whole = _loose_pattern(nodes)
    return b"(?:%s)" % text if whole else None


@lru_cache(maxsize=256)
def _class(characters: int) -> bytes:
    """Character class of these bytes."""
    if characters == _ALL & ~(1 << 10):
        return b"."
    if not characters:
        return b"(?!)"
    if characters.bit_count() == 1:
        return re.escape(bytes((characters.bit_length() - 1,)))
    text, code = b"", 0
    while code < 256:
        first = code
        while characters >> code & 1:
            code += 1
        if code - first > 2:
            text += b"\\x%02x-\\x%02x" % (first, code - 1)
        else:
            text += b"".join(b"\\x%02x" % each for each in range(first, code))
        code += 1
    return b"[%s]" % text


# -- characters ----------------------------------------------------------------------------------

_ALL = (1 << 256) - 1
_IGNORECASE, _DOTALL = int(re.IGNORECASE), int(re.DOTALL)  # operations on the flags themselves are slow
_LINE_ENDS = 1 << 10 | 1 << 13


def _matching(regex: bytes) -> int:
    return sum(1 << code for code in range(256) if re.match(regex, bytes((code,))))


_CATEGORIES = {
    sre.CATEGORY_DIGIT: _matching(rb"\d"),
    sre.CATEGORY_NOT_DIGIT: _matching(rb"\D"),
    sre.CATEGORY_SPACE: _matching(rb"\s"),
    sre.CATEGORY_NOT_SPACE: _matching(rb"\S"),
    sre.CATEGORY_WORD: _matching(rb"\w"),
    sre.CATEGORY_NOT_WORD: _matching(rb"\W"),
}
_UPPER, _LOWER = _matching(rb"[A-Z]"), _matching(rb"[a-z]")


def _characters(op: Any, argument: Any, flags: int) -> int:
    """Bytes that a part can match, as a bit mask; all of them if unknown."""
    if op is sre.LITERAL:
        return _folded(1 << int(argument), flags)
    if op is sre.NOT_LITERAL:
        return _ALL & ~(1 << int(argument))
    if op is sre.ANY:
        return _ALL if flags & _DOTALL else _ALL & ~(1 << 10)
    if op is not sre.IN:
        return _ALL
    found, negated = 0, False
    for kind, value in argument:
        if kind is sre.NEGATE:
            negated = True
        elif kind is sre.LITERAL:
            found |= 1 << value
        elif kind is sre.RANGE:
            found |= (1 << value[1] + 1) - (1 << value[0])
        else:
            found |= _CATEGORIES.get(value, _ALL) if not negated else _CATEGORIES.get(value, 0)
    return _ALL & ~found if negated else _folded(found, flags)


def _folded(characters: int, flags: int) -> int:
    if flags & _IGNORECASE:
        characters |= (characters & _UPPER) << 32 | (characters & _LOWER) >> 32
    return characters


# -- cost ----------------------------------------------------------------------------------------

MOST_STEPS = 2e7  # steps of a search that take about 0.1 s
# record lengths that are distinguished, down to that of an ordinary line
LENGTHS = (1 << 20, 1 << 16, 1 << 14, 1 << 13, 1 << 12, 1 << 11, 1 << 10, 1 << 9, 1 << 8)
_FOREVER = 1e18


@lru_cache(maxsize=1024)
def safe_length(regex: re.Pattern[bytes]) -> int:
    """Longest record, in bytes, in which a search surely ends soon; 0 if none.

    It bounds the steps of a backtracking search: each repetition may end in as many places as it has lengths, unless
    the next part cannot begin with what it repeats.
    """
    return next((length for length in LENGTHS if _steps(regex, length) <= MOST_STEPS), 0)


def _steps(regex: re.Pattern[bytes], length: int) -> float:
    if regex.flags & re.LOCALE:
        return _FOREVER
    nodes = list(_flat(_tree(regex), regex.flags))
    if len(nodes) == 1 and nodes[0][0] is sre.BRANCH:
        flags = nodes[0][2]
        return sum(_search_steps(list(_flat(branch, flags)), length) for branch in nodes[0][1][1])
    return _search_steps(nodes, length)


def _search_steps(nodes: list[tuple[Any, Any, int]], length: int) -> float:
    """Steps of a search from every place of a record."""
    first: list[int] = []
    while nodes and nodes[0][0] in (sre.AT, sre.LITERAL, sre.IN):
        if nodes[0][0] is not sre.AT:
            first.append(_characters(*nodes[0]))
        nodes = nodes[1:]
    cost, _ = _walk(nodes, length, None)
    later = reduce(or_, (_consumed(*node) for node in nodes), 0)
    # if the rest cannot contain the beginning, attempts do not overlap and cover the record once
    attempts = 1.0 if any(not characters & later for characters in first) else length / max(1, len(first))
    return length * (1 + len(first)) + attempts * cost


def _walk(nodes: Sequence[tuple[Any, Any, int]], length: int, after: int | None) -> tuple[float, float]:
    """Steps, and ways to match, of a sequence; ``after`` holds the characters that may follow, None at the end of the
    pattern.
    """
    cost, ways = 0.0, 1.0
    following = [after]
    for op, argument, flags in reversed(nodes):
        following.append(_part_first_characters(op, argument, flags, following[-1]))
    following.reverse()
    for place, (op, argument, flags) in enumerate(nodes):
        steps, choices = _walk_part(op, argument, flags, length, following[place + 1])
        once = 0.0
        if following[place + 1] is None and op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            # nothing after it can fail, so repetitions beyond the least are part of the single final match
            most, least = max(1, min(int(argument[1]), length)), int(argument[0])
            once, steps = steps, steps * min(1.0, least / most)
        cost = min(_FOREVER, cost + ways * steps + once)
        ways = min(_FOREVER, ways * choices)
    return cost, ways


def _walk_part(op: Any, argument: Any, flags: int, length: int, after: int | None) -> tuple[float, float]:
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN, sre.AT):
        return 1, 1
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        cost = 0.0 if argument is None else _walk(list(_flat(argument[1], flags)), length, None)[0]
        return cost + 1, 1
    if op is sre.BRANCH:
        both = [_walk(list(_flat(branch, flags)), length, after) for branch in argument[1]]
        return sum(cost for cost, _ in both) + len(both), sum(ways for _, ways in both)
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, most, inner = argument
        most = min(int(most), length)
        nodes = list(_flat(inner, flags))
        begin = _first_characters(nodes, 0)
        cost, ways = _walk(nodes, length, _ALL if after is None else begin | after)
        lengths = max(1.0, most - int(least) + 1)
        if ways > 1:
            lengths = min(_FOREVER, lengths * min(ways, 1e6) ** min(most, 40))
            cost = min(_FOREVER, cost * lengths)
        decided = op is sre.POSSESSIVE_REPEAT or after is None or not begin & after
        return min(_FOREVER, max(1, most) * (cost + 1)), 1 if decided and ways <= 1 else lengths
    return _FOREVER, _FOREVER


def _part_first_characters(op: Any, argument: Any, flags: int, after: int | None) -> int | None:
    """Characters with which a part can begin; if it may be empty, those after it too."""
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
        return _characters(op, argument, flags)
    if op is sre.AT:
        return 1 << 10 if argument in (sre.AT_END, sre.AT_END_STRING) and after is None else _ALL
    if op is sre.BRANCH:
        return reduce(
            or_,
            (_first_characters(list(_flat(branch, flags)), _ALL if after is None else after) for branch in argument[1]),
        )
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, _, inner = argument
        nodes = list(_flat(inner, flags))
        if least > 0:
            return _first_characters(nodes, _ALL if after is None else after)
        return None if after is None else _first_characters(nodes, after) | after
    return _ALL


def _first_characters(nodes: Sequence[tuple[Any, Any, int]], after: int) -> int:
    found: int | None = after
    for op, argument, flags in reversed(nodes):
        found = _part_first_characters(op, argument, flags, found)
    return _ALL if found is None else found


def _consumed(op: Any, argument: Any, flags: int) -> int:
    """Characters that a part may consume."""
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        return reduce(or_, (_consumed(*node) for node in _flat(argument[2], flags)), 0)
    if op is sre.BRANCH:
        return reduce(or_, (_consumed(*node) for branch in argument[1] for node in _flat(branch, flags)), 0)
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        return reduce(or_, (_consumed(*node) for node in _flat(argument[1], flags)), 0) if argument is not None else 0
    return 0 if op is sre.AT else _characters(op, argument, flags)
