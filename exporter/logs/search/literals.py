"""Analyze regular expressions: literals that every match contains, and the cost of a search.

Unknown parts yield no literals and make a pattern costly.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import dropwhile, product
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.search.regex_tree import (
    ALL,
    LINE_ENDS,
    Branch,
    Look,
    Node,
    Nodes,
    Repeat,
    consumed_bytes,
    few_bytes,
    first_bytes,
    first_bytes_of_node,
    parse_regex,
)

MOST_TEXTS = 64  # alternatives that are worth searching for
MOST_SECOND_TEXTS = 8
MOST_SPELLINGS = 16  # texts to which small classes and optional parts are expanded: `[Rr]esum(?:ed|ing)` gives four
MOST_CLASS = 4
MOST_LENGTH = 48
LEAST_BITS = 8.0  # a text with less information, like a single letter, is in every record
ENOUGH_BITS = 50.0

Texts = tuple[bytes, ...]


class RequiredLiterals(NamedTuple):
    """Texts of which every match contains at least one.

    A lookaround's text counts too: it is in the same record, though not in the match.
    """

    texts: Texts  # () if none were found
    is_sufficient: bool  # whether containing one is sufficient for a match
    second_texts: Texts = ()  # a second set, of which every match contains one too


def needs_line_end(regex: re.Pattern[bytes]) -> bool:
    """Whether every match crosses a record end, so that no single record can match."""
    return _requires_line_end(parse_regex(regex))


def _requires_line_end(nodes: Nodes) -> bool:
    """Whether each match contains a line end, or requires one next to it."""
    for node in nodes:
        match node:
            case int(mask):
                found = not mask & ~LINE_ENDS
            case Look(inner, is_positive):
                found = is_positive and _requires_line_end(inner)
            case Branch(branches):
                found = all(map(_requires_line_end, branches))
            case Repeat(least, _, inner, _):
                found = least > 0 and _requires_line_end(inner)
            case _:
                found = False
        if found:
            return True
    return False


@lru_cache(maxsize=1024)
def find_literals(regex: re.Pattern[bytes]) -> RequiredLiterals:
    part = _sequence(parse_regex(regex))
    if part.exact is not None and part.pure and _bits(part.exact) > 0:
        texts = _shortest(part.exact)
        if not any(b"\n" in text or b"\r" in text for text in texts):
            return RequiredLiterals(texts, True) if _least_bits(texts) >= LEAST_BITS else RequiredLiterals((), False)
    best = _in_one_line(part.best()) or ()
    if _least_bits(best) < LEAST_BITS:
        return RequiredLiterals((), False)
    others = [texts for texts in map(_in_one_line, part.all_sets) if texts and not _overlap(texts, best)]
    second = _shortest(max(others, key=_bits, default=()))
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


def _sequence(nodes: Nodes) -> _PatternPart:
    """Combine a sequence of parts; neighbours with exact texts form longer texts."""
    run: list[Texts] = []
    known: list[Texts | None] = []
    whole = pure = True
    for node in nodes:
        if isinstance(node, Look):
            pure = False
            if node.is_positive:
                known.append(_sequence(node.inner).best())
            continue
        part = _part(node)
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


def _part(node: Node) -> _PatternPart:
    match node:
        case int(mask):
            return _one_of(mask)
        case Branch(branches):
            return _alternatives([_sequence(branch) for branch in branches])
        case Repeat(least, most, inner, is_possessive):
            return _repeated(_sequence(inner), least, most, is_possessive)
    return _OPAQUE


def _repeated(part: _PatternPart, least: int, most: int, is_possessive: bool) -> _PatternPart:
    pure = part.pure and not is_possessive
    if (least, most) == (0, 1) and part.exact is not None:
        return _PatternPart((*part.exact, b""), pure=pure)
    if least == 0:
        return _PatternPart(pure=pure)
    if part.exact is None:
        return _PatternPart(needed=part.needed, pure=pure)
    # the first copies carry enough information
    copies = max(count for count in range(1, min(least, 8) + 1) if count == 1 or _is_small([part.exact] * count))
    texts = _expand([part.exact] * copies)
    if least == most == copies:
        return _PatternPart(texts, pure=pure)
    return _PatternPart(needed=texts, start=texts, pure=pure)


@lru_cache(maxsize=512)
def _one_of(characters: int) -> _PatternPart:
    if characters.bit_count() > MOST_CLASS:
        return _PatternPart()
    return _PatternPart(tuple(bytes((code,)) for code in few_bytes(characters, MOST_CLASS)))


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
_WORD_BEGIN, _is_word = Look(is_boundary=True), re.compile(rb"\w").match
MOST_KINDS_BEFORE = 40  # distinct bytes before a literal; enough for any number format


@lru_cache(maxsize=1024)
def bytes_after_match(following: re.Pattern[bytes]) -> bytes:
    """The few possible first bytes of a match of this pattern; empty if there are many."""
    nodes = tuple(dropwhile(lambda node: isinstance(node, Look), parse_regex(following)))
    return few_bytes(first_bytes(nodes, ALL) or 0, MOST_CLASS)


class LiteralContext(NamedTuple):
    """The text around the required literals in every match, as far as known."""

    # Pattern for the text right after a literal, which may look behind for the begin of a word. It requires less than
    # the full pattern, and nothing about the ends of the record.
    after: Mapping[bytes, re.Pattern[bytes]]
    previous: bytes  # the few bytes, such as digits, of which one precedes the only literal; empty if many
    before: bytes  # all bytes, such as digits, that a match may have before its literal; empty if many, or none


@lru_cache(maxsize=1024)
def literal_context(regex: re.Pattern[bytes]) -> LiteralContext:
    texts = find_literals(regex).texts
    window = _window(parse_regex(regex), set(texts))
    if window is None:
        return LiteralContext({}, b"", b"")
    before, spellings, after = window
    previous = _previous_bytes(before) if spellings == texts and len(texts) == 1 else 0
    prefix = consumed_bytes(before) if set(spellings) <= set(texts) else 0
    return LiteralContext(
        _patterns_after(texts, spellings, after, is_word=before[-1:] == (_WORD_BEGIN,)),
        few_bytes(previous, MOST_BEFORE),
        few_bytes(prefix, MOST_KINDS_BEFORE),
    )


def _previous_bytes(before: Nodes) -> int:
    """Bytes of which one precedes a place in the same record; 0 if unknown."""
    nodes: Nodes = tuple(node for node in before if not isinstance(node, Look))[-1:]
    if nodes and isinstance(nodes[0], Repeat):
        nodes = nodes[0].inner if nodes[0].least > 0 else ()
    if len(nodes) != 1 or not isinstance(nodes[0], int):
        return 0
    return nodes[0] & ~LINE_ENDS


def _window(nodes: Nodes, texts: set[bytes]) -> tuple[Nodes, Texts, Nodes] | None:
    """Parts before, spellings of, and parts after consecutive parts that are exactly these texts; None without such."""
    if not texts:
        return None
    for first, node in enumerate(nodes):
        run: list[Texts] = []
        if isinstance(node, Look):
            continue
        for last in range(first, len(nodes)):
            exact = (b"",) if isinstance(nodes[last], Look) else _part(nodes[last]).exact
            if exact is None or not _is_small([*run, exact]):
                break
            run.append(exact)
            if {*_shortest(_expand(run))} == texts:
                return nodes[:first], _expand(run), nodes[last + 1 :]
    return None


def _patterns_after(
    texts: Iterable[bytes], spellings: Texts, nodes: Nodes, *, is_word: bool
) -> dict[bytes, re.Pattern[bytes]]:
    found: dict[bytes, re.Pattern[bytes]] = {}
    tail, _ = _loose_pattern(nodes)
    for text in texts:
        rests = [spelling[len(text) :] for spelling in spellings if spelling.startswith(text)]
        if any(text in spelling[1:] for spelling in spellings):
            continue
        behind = b"(?<!\\w%s)" % re.escape(text) if is_word and _is_word(text[:1]) else b""
        if rests != [b""]:
            found[text] = re.compile(b"%s(?:%s)%s" % (behind, b"|".join(map(re.escape, rests)), tail))
        elif behind or tail:
            found[text] = re.compile(behind + tail)
    return found


def _loose_pattern(nodes: Nodes) -> tuple[bytes, bool]:
    """Build a pattern that matches wherever these parts do, but may end early. Return it, and whether it covers all of
    them.
    """
    written: list[tuple[bytes, bool]] = []
    ways = 1
    whole = True
    for node in nodes:
        if isinstance(node, Look):
            continue
        least, most, inner, _ = node if isinstance(node, Repeat) else Repeat(1, 1, (node,))
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


def _loose_part(nodes: Nodes) -> bytes | None:
    """Same for a repeated part; None if it would have to end early."""
    if len(nodes) == 1 and not isinstance(nodes[0], Repeat):
        match nodes[0]:
            case int(mask):
                return _class(mask)
            case Branch(branches):
                parts = [_loose_pattern(branch) for branch in branches]
                return b"(?:%s)" % b"|".join(text for text, _ in parts) if all(whole for _, whole in parts) else None
        return None
    text, whole = _loose_pattern(nodes)
    return b"(?:%s)" % text if whole else None


@lru_cache(maxsize=256)
def _class(characters: int) -> bytes:
    """Character class of these bytes."""
    if characters == ALL & ~(1 << 10):
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
    return next((length for length in LENGTHS if _steps(parse_regex(regex), length) <= MOST_STEPS), 0)


def _steps(nodes: Nodes, length: int) -> float:
    if len(nodes) == 1 and isinstance(nodes[0], Branch):
        return sum(_search_steps(branch, length) for branch in nodes[0].branches)
    return _search_steps(nodes, length)


def _search_steps(nodes: Nodes, length: int) -> float:
    """Steps of a search from every place of a record."""
    first: list[int] = []
    begun = 0
    for node in nodes:
        if isinstance(node, int) and node.bit_count() < 255:  # not `.` or all but one
            first.append(node)
        elif not isinstance(node, Look) or node.inner:
            break
        begun += 1
    cost, _ = _walk(nodes[begun:], length, None)
    later = consumed_bytes(nodes[begun:])
    # if the rest cannot contain the beginning, attempts do not overlap and cover the record once
    attempts = 1.0 if any(not characters & later for characters in first) else length / max(1, len(first))
    return length * (1 + len(first)) + attempts * cost


def _walk(nodes: Nodes, length: int, after: int | None) -> tuple[float, float]:
    """Steps, and ways to match, of a sequence; ``after`` holds the bytes that may follow, None at the pattern's end."""
    cost, ways = 0.0, 1.0
    following = [after]
    for node in reversed(nodes):
        following.append(first_bytes_of_node(node, following[-1]))
    following.reverse()
    for node, then in zip(nodes, following[1:], strict=True):
        steps, choices = _walk_part(node, length, then)
        once = 0.0
        if then is None and isinstance(node, Repeat):
            # nothing after it can fail, so repetitions beyond the least are part of the single final match
            once, steps = steps, steps * min(1.0, node.least / max(1, min(node.most, length)))
        cost = min(_FOREVER, cost + ways * steps + once)
        ways = min(_FOREVER, ways * choices)
    return cost, ways


def _walk_part(node: Node, length: int, after: int | None) -> tuple[float, float]:
    match node:
        case int():
            return 1, 1
        case Look(inner):
            return _walk(inner, length, None)[0] + 1, 1
        case Branch(branches):
            both = [_walk(branch, length, after) for branch in branches]
            return sum(cost for cost, _ in both) + len(both), sum(ways for _, ways in both)
        case Repeat(least, most, inner, is_possessive):
            most = min(most, length)
            begin = first_bytes(inner, 0) or 0
            cost, ways = _walk(inner, length, ALL if after is None else begin | after)
            lengths = max(1.0, most - least + 1)
            if ways > 1:
                lengths = min(_FOREVER, lengths * min(ways, 1e6) ** min(most, 40))
                cost = min(_FOREVER, cost * lengths)
            decided = is_possessive or after is None or not begin & after
            return min(_FOREVER, max(1, most) * (cost + 1)), 1 if decided and ways <= 1 else lengths
    return _FOREVER, _FOREVER
