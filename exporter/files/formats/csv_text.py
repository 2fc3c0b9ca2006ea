"""CSV tables: every row has as many fields as the first. Small files are read whole, of large ones both ends.

CSV does not state its dialect, so we search for one in which all rows agree: delimiter, quotes, backslashes. Without
one, the file may hold several tables or kinds of rows. Only NUL bytes, left by a lost write, are certain damage.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from exporter.files.formats import record_count
from exporter.files.formats.json_text import read_ends
from exporter.files.formats.source import CheckUndecided, FileSource, ValidFile

NAME = "csv"
EXTENSIONS = (".csv", ".tsv")
NO_DELIMITER = "\x1f"  # for a table of one column: no text has this character
OFTEN_WITHOUT_QUOTES = ("\t", NO_DELIMITER)  # with these delimiters, a quote may be an ordinary character
END_SENTINEL = "\0"  # sentinel row after the text; an open quoted field swallows it
UNFINISHED_REASON = "its last row is half-written"
PARTIAL_REASON = "only its first and last rows were checked"


class CsvDialect(NamedTuple):
    """A possible dialect of a table."""

    delimiter: str
    quote: str | None = '"'
    backslash: bool = False


class RowWidths(NamedTuple):
    """Number of fields of each row that is not empty."""

    widths: list[int]
    is_open: bool  # whether the text ends within a quoted field, whose row is left out
    last: int | None = None  # width of a last row without newline, which is left out too


class DialectResult(NamedTuple):
    """Result of reading a table in one dialect."""

    is_unfinished: bool = False
    records: int = 0
    problem: Exception | None = None


def claims(source: FileSource) -> bool:
    """Whether it is a table: never by content, since only the name can say so."""
    return False


def inspect(source: FileSource) -> ValidFile:
    """Count the rows without the header, if all were read.

    A last row without a newline is half-written if it has fewer fields or an open quote.
    """
    head, tail = read_ends(source)
    whole = not tail
    layout = record_count.read_csv_layout(source.head(record_count.TOP_BYTES))
    begin, end = _text(head[layout.begin :]), _text(tail)
    try:
        found = (
            _best_result(begin, begin)
            if whole
            else _best_result(begin[: begin.rfind("\n") + 1], end[end.find("\n") + 1 :], end)
        )
    except csv.Error as error:
        raise CheckUndecided(f"cannot be read as a table: {error}") from error
    records = max(0, found.records - layout.has_header) if whole else None
    return ValidFile(
        NAME,
        records,
        UNFINISHED_REASON if found.is_unfinished else None if whole else PARTIAL_REASON,
        found.is_unfinished,
    )


def _text(data: bytes) -> str:
    return data.decode("latin-1")  # delimiters are the same in every superset of ASCII


def _best_result(head: str, tail: str, window: str = "") -> DialectResult:
    """Return the result of the first dialect that fits; else raise the problem of the first one."""
    if window and not (head and tail and window.count("\n") > 1):
        raise CheckUndecided("its rows are longer than the part that was checked")
    first_problem: Exception | None = None
    for way in _candidate_dialects(head, tail):
        result = _check_ends(head, tail, way) if window else _check_rows(_rows(head, way))
        if (
            first_problem is None
            and result.is_unfinished
            and tail.endswith("\n")
            and way.delimiter in OFTEN_WITHOUT_QUOTES
        ):
            plain = way._replace(quote=None)
            other = _check_ends(head, tail, plain) if window else _check_rows(_rows(head, plain))
            result = other if other.problem is None else result
        if result.problem is None:
            return result
        first_problem = first_problem or result.problem
    raise first_problem or CheckUndecided("contains no table")


def _candidate_dialects(head: str, tail: str) -> Iterator[CsvDialect]:
    """Yield dialects in which the first row has several fields, the likeliest first."""
    line = next((line for line in head.split("\n") if line.strip()), "")
    likeliest = record_count.guess_delimiter(line.encode("latin-1")).decode()
    delimiters = [likeliest, *record_count.DELIMITERS.decode().replace(likeliest, "")]
    for delimiter in [mark for mark in delimiters if mark in line] or [NO_DELIMITER]:
        yield CsvDialect(delimiter)
        if '\\"' in head or '\\"' in tail:
            yield CsvDialect(delimiter, backslash=True)
        if ('"' in head or '"' in tail) and tail.endswith("\n"):
            yield CsvDialect(delimiter, None)
        if "'" in head or "'" in tail:
            yield CsvDialect(delimiter, "'")


def _rows(text: str, dialect: CsvDialect) -> RowWidths:
    ended = text.endswith("\n") or not text
    reader = csv.reader(
        io.StringIO(text + ("" if ended else "\n") + END_SENTINEL, newline=""),
        delimiter=dialect.delimiter,
        quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
        quotechar=dialect.quote,
        escapechar="\\" if dialect.backslash else None,
    )
    row: list[str] = []
    widths = []
    for row in reader:  # a list of all rows would keep up to a million lists
        widths.append(len(row))
    widths.pop()
    is_open = row != [END_SENTINEL]
    last = widths.pop() if not ended and not is_open and widths else None
    return RowWidths([width for width in widths if width], is_open, last)


def _check_rows(rows: RowWidths, expected: int = 0, place: str = "row {}") -> DialectResult:
    """Compare rows with the first one, or with a known number of fields."""
    widths = rows.widths or [rows.last or 0]
    most, _ = Counter(widths).most_common(1)[0]  # the first of several
    if not expected and most != widths[0]:
        return DialectResult(
            problem=CheckUndecided(f"its first row has {_fields_text(widths[0])}, but most others have {most}")
        )
    expected = expected or most
    last = rows.last or 0
    for number, width in enumerate([*rows.widths, *([last] if last > expected else [])], 1):
        if width != expected:
            has = f"{place.format(number)} has {_fields_text(width)}, but the first row has {expected}"
            return DialectResult(problem=CheckUndecided(has))  # another table may follow, or rows of another kind
    half = rows.is_open or (rows.last is not None and rows.last < expected)
    return DialectResult(half, len(rows.widths) + (rows.last is not None and not half))


def _fields_text(number: int) -> str:
    return "1 field" if number == 1 else f"{number} fields"


def _check_ends(head: str, tail: str, dialect: CsvDialect) -> DialectResult:
    """Compare the rows of both ends; the second may begin within a quoted field."""
    begin = _rows(head, dialect)
    result = _check_rows(begin)
    if result.problem is not None or not begin.widths:
        return (
            result
            if begin.widths
            else DialectResult(problem=CheckUndecided("its rows are longer than the part that was checked"))
        )
    expected, place = begin.widths[0], "a row near its end"
    outside = _check_rows(_rows(tail, dialect), expected, place)
    if dialect.quote is None or (outside.problem is None and not outside.is_unfinished):
        return outside
    if dialect.quote in tail:
        within = _rows(dialect.quote + tail, dialect)
        inside = _check_rows(within._replace(widths=within.widths[1:]), expected, place)
        if inside.problem is None and (outside.problem is not None or not inside.is_unfinished):
            return inside
    elif outside.problem is not None and dialect.quote in head:
        return DialectResult(problem=CheckUndecided("its end may lie within one long field"))
    return outside
