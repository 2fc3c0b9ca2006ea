"""Tables of text whose columns fit the window."""

from collections.abc import Mapping, Sequence

from launcher.words import cut_text, padded_text, text_width

GAP = "  "
NO_VALUE = frozenset(("", "-"))
NOTHING: Mapping[str, int] = {}


def render_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    optional: Sequence[str] = (),
    width: int | None = None,
    left_out: Sequence[str] = (),
    least_widths: Mapping[str, int] = NOTHING,
) -> list[str]:
    """A line for each row below the head.

    An ``optional`` column is there only if a row has a value. Columns of ``left_out`` go, the first one first, while
    the table is wider than ``width``, since half a number misleads. Before that, columns of ``least_widths`` shrink to
    the given width.
    """
    columns = list(zip(head, *rows, strict=True))
    columns = [each for each in columns if each[0] not in optional or not NO_VALUE.issuperset(each[1:])]
    sized = [(column, max(map(text_width, column))) for column in columns]

    def excess() -> int:
        return 0 if width is None else sum(size for _, size in sized) + len(GAP) * (len(sized) - 1) - width

    def least(column: Sequence[str], size: int) -> int:
        return min(size, least_widths.get(column[0], size))

    shrinkable = sum(size - least(column, size) for column, size in sized)
    for name in left_out:
        if excess() <= shrinkable:
            break
        sized = [each for each in sized if each[0][0] != name]
    for number, (column, size) in enumerate(sized):
        sized[number] = (column, max(least(column, size), size - max(0, excess())))
    padded = [[padded_text(cut_text(cell, size), size) for cell in column] for column, size in sized]
    return [GAP.join(line).rstrip() for line in zip(*padded, strict=True)]
