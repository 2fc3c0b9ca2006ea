"""Slurm's host lists: ``node[01-03,7],x-[1-2]-y`` (sinfo(1), scontrol show hostnames)."""

import re
from collections.abc import Iterator, Sequence

from launcher.errors import SlurmError

MOST_HOSTS = 100_000
MOST_DIGITS = 18
MOST_LETTERS = 253  # longest host name (hostname(7))
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")


def parse_hostlist(text: str) -> tuple[str, ...]:
    """Expand a host list in its order, keeping leading zeros in ranges.

    A newline separates as a comma does, as in host files and the output of ``scontrol show hostnames``.
    """
    hosts: list[str] = []
    for part in _split(text.replace("\n", ",")):
        hosts.extend(_expand(part, text))
    return tuple(hosts)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
        if depth not in (0, 1):
            raise SlurmError(f"host list {text!r}: brackets do not match at character {index + 1}")
    if depth:
        raise SlurmError(f"host list {text!r}: a bracket is not closed")
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _expand(part: str, text: str) -> list[str]:
    """Expand one part; the last bracket varies fastest."""
    hosts = [""]
    for index, piece in enumerate(re.split(r"[\[\]]", part)):
        if index % 2:
            choices = [choice for entry in piece.split(",") for choice in _expand_range(entry, text)]
        elif any(character.isspace() for character in piece):
            raise SlurmError(f"host list {text!r}: {piece!r} is not part of a host name; put commas between hosts")
        elif wrong := _INVALID_CHARACTER.search(piece):
            at = text.find(part) + part.find(piece) + wrong.start() + 1
            suggestion = "use letters, digits, ., _ and -"
            raise SlurmError(
                f"host list {text!r}: {wrong[0]!r} at character {at} is not allowed in a host name; {suggestion}"
            )
        else:
            choices = [piece]
        if len(hosts) * len(choices) > MOST_HOSTS:
            raise SlurmError(f"host list {text!r}: {part!r} is more than {MOST_HOSTS} hosts")
        hosts = [host + choice for host in hosts for choice in choices]
    if not hosts[0][0].isalnum():
        raise SlurmError(f"host list {text!r}: {hosts[0]!r} is not a host name; it must begin with a letter or a digit")
    if len(hosts[-1]) > MOST_LETTERS:
        raise SlurmError(
            f"host list {text!r}: a name of {len(hosts[-1])} characters is too long; use at most {MOST_LETTERS}"
        )
    return hosts


def _expand_range(entry: str, text: str) -> Iterator[str]:
    low, dash, high = entry.partition("-")
    digits = low + high if dash else low
    numbers = bool(low) and (bool(high) or not dash) and digits.isascii() and digits.isdigit()
    if not numbers or max(len(low), len(high)) > MOST_DIGITS or (dash and int(high) < int(low)):
        raise SlurmError(f"host list {text!r}: {entry!r} is neither a number nor an ascending range")
    if int(high if dash else low) - int(low) >= MOST_HOSTS:
        raise SlurmError(f"host list {text!r}: {entry!r} is more than {MOST_HOSTS} hosts")
    for number in range(int(low), int(high if dash else low) + 1):
        yield f"{number:0{len(low)}d}"


def fold_hostlist(names: Sequence[str]) -> str:
    """Fold names into a host list that keeps their order. Neighbours that differ in one number share brackets."""
    parts: list[str] = []
    start = 0
    while start < len(names):
        pieces = _pieces(names[start])
        end, varying = start + 1, None
        while end < len(names) and (where := _differing_piece(pieces, _pieces(names[end]))) is not None:
            if varying not in (None, where):
                break
            varying, end = where, end + 1
        if varying is None:
            parts.append(names[start])
        else:
            numbers = [_pieces(name)[varying] for name in names[start:end]]
            parts.append("".join([*pieces[:varying], f"[{','.join(_fold_ranges(numbers))}]", *pieces[varying + 1 :]]))
        start = end
    return ",".join(parts)


def _pieces(name: str) -> list[str]:
    """Split a name into alternating text and numbers, text first; too long numbers count as text."""
    return re.split(rf"(?<![0-9])([0-9]{{1,{MOST_DIGITS}}})(?![0-9])", name)


def _differing_piece(first_pieces: Sequence[str], second_pieces: Sequence[str]) -> int | None:
    """Index of the one number in which two names differ, else None."""
    if len(first_pieces) != len(second_pieces):
        return None
    places = [
        index for index, (first, second) in enumerate(zip(first_pieces, second_pieces, strict=True)) if first != second
    ]
    return places[0] if len(places) == 1 and places[0] % 2 else None


def _fold_ranges(numbers: Sequence[str]) -> Iterator[str]:
    """Fold rising neighbours of equal width into ``low-high``."""
    start = 0
    while start < len(numbers):
        low, end = numbers[start], start + 1
        while end < len(numbers) and numbers[end] == f"{int(low) + end - start:0{len(low)}d}":
            end += 1
        yield low if end == start + 1 else f"{low}-{numbers[end - 1]}"
        start = end
