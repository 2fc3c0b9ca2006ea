"""A table of the terminal view that fits its window."""

from collections.abc import Mapping, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

GAP = 2  # blanks between columns
LEAST_WORD = 3  # cells to which a column of words shrinks at last: a letter or two, and the ellipsis


class FittedTable:
    """Rows of cells by column. Columns that do not fit the window are dropped, since half a number misleads.

    Columns of ``drop_order`` are dropped in order until the rest fits. Before that, columns of ``least_widths`` shrink
    to the given width. If the last columns are still too wide, those of words shrink, the last one first.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Mapping[str, str | Text]],
        *,
        headings: Mapping[str, str],
        left_aligned: Sequence[str],
        drop_order: Sequence[str],
        least_widths: Mapping[str, int],
        overflow: Literal["crop", "ellipsis"],
    ) -> None:
        self._columns, self._rows, self._headings = columns, rows, headings
        self._left_aligned, self._drop_order, self._least_widths, self._overflow = (
            left_aligned,
            drop_order,
            least_widths,
            overflow,
        )

    def _width(self, column: str) -> int:
        cells = [row.get(column, "") for row in self._rows]
        widths = [cell_len(cell.plain if isinstance(cell, Text) else cell) for cell in cells]
        return max(cell_len(self._headings.get(column, column)), *widths, 0)

    def _widths(self, most: int) -> dict[str, int]:
        """Widths of the columns shown in a window of ``most`` characters."""
        whole = {column: self._width(column) for column in self._columns}
        widths = {column: min(width, self._least_widths.get(column, width)) for column, width in whole.items()}

        def spare() -> int:
            return most - sum(widths.values()) - GAP * (len(widths) - 1)

        for column in self._drop_order:
            if spare() >= 0:
                break
            widths.pop(column, None)
        for column in reversed(self._left_aligned):
            if column in widths and spare() < 0:
                widths[column] = min(widths[column], max(LEAST_WORD, widths[column] + spare()))
        for column in widths:
            widths[column] += min(whole[column] - widths[column], max(0, spare()))
        return widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for column, width in widths.items():
            table.add_column(
                escape(self._headings.get(column, column)),
                justify="left" if column in self._left_aligned else "right",
                no_wrap=True,
                overflow=self._overflow,
                width=width,
            )
        for row in self._rows:
            cells = (row.get(column, "") for column in widths)
            table.add_row(*(cell if isinstance(cell, Text) else escape(cell) for cell in cells))
        yield table
