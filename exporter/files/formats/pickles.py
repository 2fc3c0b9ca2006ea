"""Pickles, walked by their opcodes: which texts, numbers, tuples and lists they put together. Nothing that a pickle
names is looked up, and nothing is called; what it would make of anything else is None here.

A pickle is a program for a machine with a stack, a memory by number (memo), and marks from which on the stack is taken
as one. The standard library's pickletools knows for each opcode what it takes from the stack and what it leaves there.
"""

import io
import pickletools
from typing import NamedTuple

ERRORS = (ValueError, LookupError, TypeError, OverflowError, MemoryError, RecursionError)
"""What a walk raises at bytes that are no pickle, or end before it does."""

MARK = object()
TEXTS_AND_NUMBERS = frozenset({"int", "int_or_bool", "str", "bytes_or_str"})
GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
TUPLE = frozenset({"TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})


class PickleContents(NamedTuple):
    """What there was to see in one pickle."""

    value: object  # the object itself
    persistent: list[object]  # what stands for objects that are kept outside of it (BINPERSID)


def walk_pickle(stream: io.BytesIO) -> PickleContents:
    """One pickle; the stream is left behind it. Raises one of ERRORS where there is none."""
    stack: list[object] = []
    memo: dict[object, object] = {}
    persistent: list[object] = []
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in PUT:
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in GET:
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(MARK)
        else:
            below, taken = _take(stack, opcode)
            if name == "STOP":
                return PickleContents(below[0], persistent)
            if name == "BINPERSID":
                persistent.append(below[0])
            stack += _made(opcode, argument, below, taken)
    raise ValueError("has no end")  # genops raises it before


def _take(stack: list[object], opcode: pickletools.OpcodeInfo) -> tuple[list[object], list[object]]:
    """What an opcode takes from the stack: what lies below the last mark, and all that lies above it."""
    before = opcode.stack_before
    taken: list[object] = []
    count = len(before)
    if pickletools.stackslice in before:
        count = before.index(pickletools.markobject)
        while (top := stack.pop()) is not MARK:
            taken.append(top)
        taken.reverse()
    if count > len(stack):
        raise ValueError("takes more than there is")
    below = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return below, taken


def _made(
    opcode: pickletools.OpcodeInfo, argument: object, below: list[object], taken: list[object]
) -> list[object | None]:
    """What an opcode leaves on the stack."""
    name, after = opcode.name, opcode.stack_after
    if name in TUPLE:
        return [tuple(below + taken)]
    if name in ("EMPTY_LIST", "LIST"):
        return [taken]
    if name in ("APPEND", "APPENDS"):
        if isinstance(below[0], list):
            below[0] += below[1:] + taken
        return below[:1]
    if name == "DUP":
        return below * 2
    if name == "GLOBAL":
        return [argument]  # module and name with a space between
    if name == "STACK_GLOBAL":
        return [f"{below[0]} {below[1]}" if all(isinstance(word, str) for word in below) else None]
    if len(after) == 1 and after[0].name in TEXTS_AND_NUMBERS:
        return [argument]
    return [None] * len(after)
