"""Tables of text whose columns fit the window."""

from collections.abc import Sequence

GAP = "  "
NO_VALUE = ("", "-")


def render_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    optional: Sequence[str] = (),
    width: int | None = None,
    left_out: Sequence[str] = (),
) -> list[str]:
    """A line for each row below the head.

    An ``optional`` column is there only if a row has a value. Columns of ``left_out`` go, the first one first, while
    the table is wider than ``width``, since half a number misleads.
    """
    lines = [tuple(head), *map(tuple, rows)]
    for name in optional:
        at = lines[0].index(name)
        if all(line[at] in NO_VALUE for line in lines[1:]):
            lines = [(*line[:at], *line[at + 1 :]) for line in lines]
    for name in left_out:
        if width is None or _total(lines) <= width:
            break
        if name in lines[0]:
            at = lines[0].index(name)
            lines = [(*line[:at], *line[at + 1 :]) for line in lines]
    widths = _widths(lines)
    return [GAP.join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)).rstrip() for line in lines]


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _total(lines: Sequence[Sequence[str]]) -> int:
    widths = _widths(lines)
    return sum(widths) + len(GAP) * (len(widths) - 1)
