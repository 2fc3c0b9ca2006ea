"""The parse tree of a regular expression over bytes, in types of our own.

This is the only place that knows the tree of the standard library's parser.
"""

import re
from collections.abc import Iterator
from functools import lru_cache, reduce
from operator import or_
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple, TypeAlias

ALL = (1 << 256) - 1
LINE_ENDS = 1 << 10 | 1 << 13
_IGNORECASE, _DOTALL = int(re.IGNORECASE), int(re.DOTALL)  # operations on the flags themselves are slow


class Repeat(NamedTuple):
    least: int
    most: int
    inner: "Nodes"
    is_possessive: bool = False


class Branch(NamedTuple):
    branches: tuple["Nodes", ...]


class Look(NamedTuple):
    """A lookaround, a place such as a word boundary, or the begin of an atomic group: all consume no text."""

    inner: "Nodes" = ()
    is_positive: bool = False
    is_end: bool = False  # whether it is the end of the line or text
    is_boundary: bool = False  # whether it is the begin or end of a word


# The set of bytes that one character can be (a bit for each), or another part. None is anything else, such as the text
# of an earlier group. Groups are expanded.
Node: TypeAlias = int | Repeat | Branch | Look | None
Nodes: TypeAlias = tuple[Node, ...]


@lru_cache(maxsize=2)
def parse_regex(regex: re.Pattern[bytes]) -> Nodes:
    """The tree of a regular expression. One that depends on the locale is unknown."""
    if regex.flags & re.LOCALE:
        return (None,)
    return _nodes(parser.parse(regex.pattern, regex.flags), regex.flags)


_ALTERNATIVE_PART = re.compile(rb"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]|[^\\\[()|]+", re.DOTALL)

_REFERENCE = re.compile(rb"\\[1-9]|\(\?P=|\(\?\(")  # to a group, whose number would change


def alternatives(regex: re.Pattern[bytes]) -> tuple[re.Pattern[bytes], ...]:
    """Split a regular expression at its outermost ``|``; one that cannot be split safely is returned alone."""
    if _REFERENCE.search(regex.pattern):
        return (regex,)
    texts, depth = [b""], 0
    for part in _ALTERNATIVE_PART.findall(regex.pattern):
        depth += {b"(": 1, b")": -1}.get(part, 0)
        if part == b"|" and not depth:
            texts.append(b"")
        else:
            texts[-1] += part
    try:
        found = tuple(re.compile(text, regex.flags) for text in texts)
        trees = tuple(map(parse_regex, found))
    except (re.error, ValueError, OverflowError):
        return (regex,)
    # the trees show whether the text was understood as its author meant it
    return found if len(found) > 1 and parse_regex(regex) == (Branch(trees),) else (regex,)


def _nodes(tree: Any, flags: int) -> Nodes:
    return tuple(node for op, argument in tree for node in _expand(op, argument, flags))


def _expand(op: Any, argument: Any, flags: int) -> Iterator[Node]:
    if op in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
        yield _mask(op, argument, flags)
    elif op is sre.SUBPATTERN:
        _, added, removed, inner = argument
        yield from _nodes(inner, (flags | added) & ~removed)
    elif op is sre.ATOMIC_GROUP:
        yield Look()  # its content may match alone and not here
        yield from _nodes(argument, flags)
    elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, most, inner = argument
        yield Repeat(int(least), int(most), _nodes(inner, flags), op is sre.POSSESSIVE_REPEAT)
    elif op is sre.BRANCH:
        yield Branch(tuple(_nodes(branch, flags) for branch in argument[1]))
    elif op in (sre.ASSERT, sre.ASSERT_NOT):
        yield Look(_nodes(argument[1], flags), op is sre.ASSERT)
    elif op is sre.AT:
        is_end = argument in (sre.AT_END, sre.AT_END_STRING)
        yield Look(is_end=is_end, is_boundary=argument is sre.AT_BOUNDARY)
    else:
        yield None


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


def _mask(op: Any, argument: Any, flags: int) -> int:
    """Bytes that one character can be, or more if unknown."""
    if op is sre.LITERAL:
        return _folded(1 << argument, flags)
    if op is sre.NOT_LITERAL:
        return ALL & ~(1 << int(argument))
    if op is sre.ANY:
        return ALL if flags & _DOTALL else ALL & ~(1 << 10)
    found: int = 0
    negated = False
    for kind, value in argument:
        if kind is sre.NEGATE:
            negated = True
        elif kind is sre.LITERAL:
            found |= 1 << value
        elif kind is sre.RANGE:
            found |= (1 << value[1] + 1) - (1 << value[0])
        else:
            found |= _CATEGORIES.get(value, 0 if negated else ALL)
    return ALL & ~found if negated else _folded(found, flags)


def _folded(characters: int, flags: int) -> int:
    if flags & _IGNORECASE:
        characters |= (characters & _UPPER) << 32 | (characters & _LOWER) >> 32
    return characters


def few_bytes(mask: int, most: int) -> bytes:
    """The bytes of a set; empty if they are more than ``most``."""
    return bytes(code for code in range(256) if mask >> code & 1) if mask.bit_count() <= most else b""


def first_bytes(nodes: Nodes, after: int | None) -> int | None:
    """Bytes with which a match can begin; if it may be empty, also those of ``after``. None at the pattern's end."""
    for node in reversed(nodes):
        after = first_bytes_of_node(node, after)
    return after


def first_bytes_of_node(node: Node, after: int | None) -> int | None:
    """The same of one part."""
    match node:
        case int(mask):
            return mask
        case Look(is_end=True):
            return 1 << 10 if after is None else ALL
        case Branch(branches):
            begins = [first_bytes(branch, ALL if after is None else after) for branch in branches]
            return reduce(or_, (begin or 0 for begin in begins))
        case Repeat(least, _, inner, _):
            if least > 0:
                return first_bytes(inner, ALL if after is None else after)
            return None if after is None else (first_bytes(inner, after) or 0) | after
    return ALL


def consumed_bytes(nodes: Nodes) -> int:
    """Bytes that may be in a match, or next to it if a lookaround requires or forbids them there."""
    found = 0
    for node in nodes:
        match node:
            case int(mask):
                found |= mask
            case Repeat(inner=inner) | Look(inner=inner):
                found |= consumed_bytes(inner)
            case Branch(branches):
                for branch in branches:
                    found |= consumed_bytes(branch)
            case None:
                return ALL
    return found
