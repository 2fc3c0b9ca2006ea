"""Walk pickles by their opcodes to recover texts, numbers, tuples, lists, and dictionaries with such keys.

No name in a pickle is resolved and nothing is called; any other object becomes None, or its state if that is a
dictionary. A pickle is a program for a stack
machine with numbered memory (memo) and marks that delimit groups on the stack. The standard library's pickletools
states the stack effect of each opcode.
"""

import io
import pickletools
from typing import NamedTuple

# raised by a walk over truncated bytes or bytes that are no pickle
PICKLE_ERRORS = (ValueError, LookupError, TypeError, OverflowError, MemoryError, RecursionError)

MARK = object()
TEXTS_AND_NUMBERS = frozenset({"int", "int_or_bool", "str", "bytes_or_str"})
GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
TUPLE = frozenset({"TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})


class PickleContents(NamedTuple):
    """Recovered contents of one pickle."""

    value: object  # the object itself
    persistent: list[object]  # references to objects stored outside it (BINPERSID)
    states: list[dict[object, object]]  # attributes of the objects in it (BUILD)


def walk_pickle(stream: io.BytesIO) -> PickleContents:
    """Walk one pickle, and leave the stream after it. Raises one of ERRORS if there is none."""
    stack: list[object] = []
    memo: dict[object, object] = {}
    persistent: list[object] = []
    states: list[dict[object, object]] = []
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
            below, taken = _pop_arguments(stack, opcode)
            if name == "STOP":
                return PickleContents(below[0], persistent, states)
            if name == "BINPERSID":
                persistent.append(below[0])
            if name == "BUILD" and isinstance(below[1], dict):
                states.append(below[1])
            stack += _pushed_values(opcode, argument, below, taken)
    raise ValueError("has no end")  # genops raises before this


def _pop_arguments(stack: list[object], opcode: pickletools.OpcodeInfo) -> tuple[list[object], list[object]]:
    """Pop an opcode's arguments: those below the last mark, and all above it."""
    before = opcode.stack_before
    taken: list[object] = []
    count = len(before)
    if pickletools.stackslice in before:
        count = before.index(pickletools.markobject)
        while (top := stack.pop()) is not MARK:
            taken.append(top)
        taken.reverse()
    if count > len(stack):
        raise ValueError("takes more items than the stack has")
    below = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return below, taken


def _pushed_values(
    opcode: pickletools.OpcodeInfo, argument: object, below: list[object], taken: list[object]
) -> list[object | None]:
    """Return the values that an opcode pushes."""
    name, after = opcode.name, opcode.stack_after
    if name in TUPLE:
        return [tuple(below + taken)]
    if name in ("EMPTY_LIST", "LIST"):
        return [taken]
    if name in ("APPEND", "APPENDS"):
        if isinstance(below[0], list):
            below[0] += below[1:] + taken
        return below[:1]
    if name in ("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"):
        items = [*below[1:], *taken]
        found = below[0] if below else {}
        if isinstance(found, dict):
            pairs = zip(items[::2], items[1::2], strict=True)
            found.update((key, value) for key, value in pairs if isinstance(key, str | int))
        return [found]
    if name == "BUILD":
        return below[1:] if isinstance(below[1], dict) else [None]
    if name == "DUP":
        return below * 2
    if name == "GLOBAL":
        return [argument]  # module and name, separated by a space
    if name == "STACK_GLOBAL":
        return [f"{below[0]} {below[1]}" if all(isinstance(word, str) for word in below) else None]
    if len(after) == 1 and after[0].name in TEXTS_AND_NUMBERS:
        return [argument]
    return [None] * len(after)
