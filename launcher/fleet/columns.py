"""Tables of text whose columns fit the window."""

from collections.abc import Sequence

GAP = "  "
NO_VALUE = frozenset(("", "-"))


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
    columns = list(zip(head, *rows, strict=True))
    columns = [each for each in columns if each[0] not in optional or not NO_VALUE.issuperset(each[1:])]
    sized = [(column, max(map(len, column))) for column in columns]
    for name in left_out:
        if width is None or sum(size for _, size in sized) + len(GAP) * (len(sized) - 1) <= width:
            break
        sized = [each for each in sized if each[0][0] != name]
    padded = [[cell.ljust(size) for cell in column] for column, size in sized]
    return [GAP.join(line).rstrip() for line in zip(*padded, strict=True)]
