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
from exporter.files.formats.json_text import WINDOW_BYTES, refuse_nul
from exporter.files.formats.source import CheckUndecided, FileSource, ValidFile

NAME = "csv"
EXTENSIONS = (".csv", ".tsv")
NO_DELIMITER = "\x1f"  # for a table of one column: no text has this character
OFTEN_WITHOUT_QUOTES = ("\t", NO_DELIMITER)  # with these delimiters, a quote may be an ordinary character
END = "\0"  # sentinel row after the text; an open quoted field swallows it
HALF = "its last row is half-written"
PART = "only its first and last rows were checked"


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

    half: bool = False
    records: int = 0
    complaint: Exception | None = None


def claims(source: FileSource) -> bool:
    """Whether it is a table: never by content, since only the name can say so."""
    return False


def inspect(source: FileSource) -> ValidFile:
    """Count the rows without the header, if all were read.

    A last row without a newline is half-written if it has fewer fields or an open quote.
    """
    whole = source.size <= 2 * WINDOW_BYTES
    head = source.head(source.size if whole else WINDOW_BYTES)
    tail = b"" if whole else source.tail(WINDOW_BYTES)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise CheckUndecided("is UTF-16 text")
    refuse_nul(head)
    refuse_nul(tail, " near its end")
    layout = record_count.read_csv_layout(source.head(record_count.TOP_BYTES))
    begin, end = _text(head[layout.begin :]), _text(tail)
    try:
        found = _best(begin, begin) if whole else _best(begin[: begin.rfind("\n") + 1], end[end.find("\n") + 1 :], end)
    except csv.Error as error:
        raise CheckUndecided(f"cannot be read as a table: {error}") from error
    records = max(0, found.records - layout.header) if whole else None
    return ValidFile(NAME, records, HALF if found.half else None if whole else PART, found.half)


def _text(data: bytes) -> str:
    return data.decode("latin-1")  # delimiters are the same in every superset of ASCII


def _best(head: str, tail: str, window: str = "") -> DialectResult:
    """Return the result of the first dialect that fits; else raise the complaint about the first one."""
    if window and not (head and tail and window.count("\n") > 1):
        raise CheckUndecided("its rows are longer than the part that was checked")
    complaint: Exception | None = None
    for way in _ways(head, tail):
        judgement = _judge_ends(head, tail, way) if window else _judge(_rows(head, way))
        if complaint is None and judgement.half and tail.endswith("\n") and way.delimiter in OFTEN_WITHOUT_QUOTES:
            plain = way._replace(quote=None)
            other = _judge_ends(head, tail, plain) if window else _judge(_rows(head, plain))
            judgement = other if other.complaint is None else judgement
        if judgement.complaint is None:
            return judgement
        complaint = complaint or judgement.complaint
    raise complaint or CheckUndecided("holds no table")


def _ways(head: str, tail: str) -> Iterator[CsvDialect]:
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


def _rows(text: str, way: CsvDialect) -> RowWidths:
    ended = text.endswith("\n") or not text
    reader = csv.reader(
        io.StringIO(text + ("" if ended else "\n") + END, newline=""),
        delimiter=way.delimiter,
        quoting=csv.QUOTE_MINIMAL if way.quote else csv.QUOTE_NONE,
        quotechar=way.quote,
        escapechar="\\" if way.backslash else None,
    )
    found = list(reader)
    is_open = found.pop() != [END]
    last = len(found.pop()) if not ended and not is_open and found else None
    return RowWidths([len(row) for row in found if row], is_open, last)


def _judge(rows: RowWidths, expected: int = 0, place: str = "row {}") -> DialectResult:
    """Compare rows with the first one, or with a known number of fields."""
    widths = rows.widths or [rows.last or 0]
    most, _ = Counter(widths).most_common(1)[0]  # the first of several
    if not expected and most != widths[0]:
        return DialectResult(
            complaint=CheckUndecided(f"its first row has {_fields(widths[0])} and most others have {most}")
        )
    expected = expected or most
    last = rows.last or 0
    for number, width in enumerate([*rows.widths, *([last] if last > expected else [])], 1):
        if width != expected:
            has = f"{place.format(number)} has {_fields(width)} and the first row {expected}"
            return DialectResult(complaint=CheckUndecided(has))  # another table may follow, or rows of another kind
    half = rows.is_open or (rows.last is not None and rows.last < expected)
    return DialectResult(half, len(rows.widths) + (rows.last is not None and not half))


def _fields(number: int) -> str:
    return "1 field" if number == 1 else f"{number} fields"


def _judge_ends(head: str, tail: str, way: CsvDialect) -> DialectResult:
    """Compare the rows of both ends; the second may begin within a quoted field."""
    begin = _rows(head, way)
    judgement = _judge(begin)
    if judgement.complaint is not None or not begin.widths:
        return (
            judgement
            if begin.widths
            else DialectResult(complaint=CheckUndecided("its rows are longer than the part that was checked"))
        )
    expected, place = begin.widths[0], "a row near its end"
    outside = _judge(_rows(tail, way), expected, place)
    if way.quote is None or (outside.complaint is None and not outside.half):
        return outside
    if way.quote in tail:
        within = _rows(way.quote + tail, way)
        inside = _judge(within._replace(widths=within.widths[1:]), expected, place)
        if inside.complaint is None and (outside.complaint is not None or not inside.half):
            return inside
    elif outside.complaint is not None and way.quote in head:
        return DialectResult(complaint=CheckUndecided("its end may lie within one long field"))
    return outside
