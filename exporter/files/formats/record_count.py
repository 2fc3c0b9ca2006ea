"""Count records of growing text files: lines of JSONL and CSV, items of a JSON array.

Each poll reads a bounded number of bytes and continues where the last one stopped. It keeps a few numbers and the text
before the position. If the file shrank or that text changed, the file was rewritten and counting restarts.
"""

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

MARK_BYTES = 64  # text before the position, kept to notice a rewritten file
CHUNK_BYTES = 1 << 20  # processed at once
MOST_BYTES = 8 * CHUNK_BYTES  # counted in one poll, unless the caller sets a bound
TOP_BYTES = 16 << 10  # top of a CSV file that is read for the delimiter and the header
TOP_ROWS = 21  # rows compared to detect a header
COLLAPSES = 8  # nesting levels in a JSON array removed at once; deeper ones are walked

DELIMITERS = b",;\t|"  # possible delimiters of CSV
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}  # by byte order mark
FIRST_LINES_BYTES = 64 << 10  # top of a JSON file that is read to see whether it has one value per line
WHITE_SPACE = b" \t\r\n"

RecordKind = Literal["lines", "table", "array", "rows"]
EXTENSIONS: Mapping[RecordKind, tuple[str, ...]] = {
    "lines": (".jsonl", ".ndjson"),
    "table": (".csv", ".tsv"),
    "array": (".json",),
    # headers or footers of these formats hold the number of records
    "rows": (".parquet", ".arrow", ".feather", ".ipc", ".h5", ".hdf5", ".npy"),
}

# state in a quoted field: outside, inside, after a quote that closes it unless another follows
OUTSIDE, INSIDE, CLOSING = range(3)
# state in a JSON text: before its root, after `[`, in the items, after `]`, not an array
ROOT, FIRST, ITEMS, DONE, OTHER = range(5)

COMMENT = b"#"
MOST_NAME_LETTERS = 80  # longest name of a column
SAME_LENGTH = 8  # from this length, values as long as the first field are no coincidence: hashes, UUIDs
MISSING_VALUES = frozenset(("", "na", "n/a", "nan", "null", "none", "nil", "-", "?"))
NO_NAMES = MISSING_VALUES | {"true", "false", "inf", "-inf"}

# a number, a date or a time
_NUMBER = re.compile(r"[-+]?[.$]?\d[\d.,:/_ +-]*(?:[eETZ][-+\d.:]*Z?)?%?|[-+]?inf(?:inity)?", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_BLANK = re.compile(rb"\n[ \t\r]*(?=\n)")
_EMPTY = re.compile(rb"\n\r?(?=\n)")
_QUOTED = re.compile(rb'"[^"]*"?')
_UNTIL_CLOSING_QUOTE = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
_QUOTED_FIELD = {
    bytes((code,)): re.compile(rb'(?<=[\n%b])"[^"]*+(?:""[^"]*+)*+("?)' % re.escape(bytes((code,))))
    for code in DELIMITERS
}  # by delimiter: a quoted field up to its closing quote (captured) or the end of the text
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(code for code in range(256) if code not in b'"[]{},')
_INNERMOST = re.compile(rb"\[,*\]")
_RUNS = re.compile(rb"\[+|\]+|,+")


def record_kind(name: str) -> RecordKind | None:
    """How the records of a file are counted, by its name."""
    name = name.lower()
    for kind, extensions in EXTENSIONS.items():
        if name.endswith(extensions):
            return kind
    return None


def has_json_lines(fd: int) -> bool:
    """Whether a file begins with a JSON value in a line of its own, and the next one: JSON Lines, whatever its name."""
    first, newline, rest = os.pread(fd, FIRST_LINES_BYTES, 0).removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
    if not newline or not first.startswith((b"{", b"[")) or not rest.lstrip(WHITE_SPACE).startswith((b"{", b"[")):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def guess_delimiter(first_line: bytes) -> bytes:
    """Return the most frequent of ``, ; tab |`` in the first line; a comma if none occurs."""
    bare = _QUOTED.sub(b"", first_line)
    return max((bytes((code,)) for code in DELIMITERS), key=bare.count)


class CsvLayout(NamedTuple):
    """Layout of a CSV file, from its top."""

    begin: int  # start of its first row, after a byte order mark, blank lines and comments
    delimiter: bytes
    has_header: bool  # whether its first row names the columns
    has_quotes: bool  # whether a field in quotes may have line breaks
    is_final: bool  # whether more text cannot change the result


def read_csv_layout(top: bytes) -> CsvLayout:
    """Detect the layout from the first ``TOP_BYTES`` of a CSV file, or all of a shorter one.

    Comments are lines starting with ``#`` before the first row. They are rows if all lines are comments, or if several
    have as many fields as the first row. If exactly one has, it is the header.
    """
    mark = len(BYTE_ORDER_MARK) if top.startswith(BYTE_ORDER_MARK) else 0
    begin, comments, line = mark, [], b""
    while begin < len(top):
        end = top.find(b"\n", begin) + 1 or len(top)
        line = top[begin:end].rstrip(b"\r\n")
        if line.startswith(COMMENT):
            comments.append(line)
        elif line:
            break
        begin = end
    between = guess_delimiter(line)
    named = [comment for comment in comments if comment.count(between) == line.count(between) > 0]
    if begin >= len(top) or len(named) > 1:
        begin, named = mark, []
        between = guess_delimiter(top[mark:].lstrip(b"\r\n").partition(b"\n")[0])
    has_quotes = between != b"\t"
    rows = _first_rows(top[begin:], between.decode(), has_quotes=has_quotes)
    if not (has_quotes or _are_equally_wide(rows)):
        quoted = _first_rows(top[begin:], between.decode(), has_quotes=True)
        if len(quoted) > 1 and _are_equally_wide(quoted):
            rows, has_quotes = quoted, True
    if len(top) >= TOP_BYTES and b"\n" not in top[begin:]:
        rows = [rows[0][:-1]]  # a wide table: the last of these fields is cut
    sure = len(top) >= TOP_BYTES or len(rows) >= TOP_ROWS
    if not rows:
        return CsvLayout(begin, between, has_header=True, has_quotes=has_quotes, is_final=sure)
    has_header = _has_header(rows)
    header = not named and _could_be_names(rows[0]) if has_header is None else has_header
    return CsvLayout(begin, between, header, has_quotes, sure)


def _are_equally_wide(rows: Sequence[Sequence[str]]) -> bool:
    return len({len(row) for row in rows}) <= 1


def _has_header(rows: Sequence[Sequence[str]]) -> bool | None:
    """Whether the first row of a table is a header; None if undecided.

    No file says so for certain, so the strongest evidence comes first. A header counts its columns from 0, as pandas
    does, or has text above a column of numbers. A record has a number, or a value like those below it. A table of text
    gives no evidence; the caller then asks whether the fields could be names.
    """
    first = [field.strip() for field in rows[0]]
    columns = [[row[place].strip() for row in rows[1:] if place < len(row)] for place in range(len(first))]
    counted = first[not first[0] :] if first else []
    if len(first) > 1 and counted == [str(number) for number in range(len(counted))]:
        return True
    for field, column in zip(first, columns, strict=True):
        values = [value for value in column if value.lower() not in MISSING_VALUES]
        is_text = field.lower() not in MISSING_VALUES and not _NUMBER.fullmatch(field)
        if is_text and values and all(_NUMBER.fullmatch(value) for value in values):
            return True
    if any(_NUMBER.fullmatch(field) for field in first):
        return False
    return False if any(map(_resembles_column, first, columns)) else None


def _resembles_column(field: str, column: Sequence[str]) -> bool:
    """Whether a field is like those below it: repeated, different in digits alone, or of the same length."""
    values = [value for value in column if value]
    if not field or not values:
        return False
    shape = _DIGITS.sub("\0", field)
    return (
        field in values
        or (shape != field and any(_DIGITS.sub("\0", value) == shape for value in values))
        or (len(values) > 1 and len(field) >= SAME_LENGTH and {len(value) for value in values} == {len(field)})
    )


def _could_be_names(fields: Sequence[str]) -> bool:
    """Whether they are short and distinct, and none is empty, a path or a sentence."""
    names = [field.strip().lower() for field in fields]
    if len(names) > 1:
        names = names[not names[0] : len(names) - (not names[-1])]  # an index column, or a trailing delimiter
    return len(set(names)) == len(names) and not any(
        name in NO_NAMES
        or len(name) > MOST_NAME_LETTERS
        or "\n" in name
        or "://" in name
        or name.startswith("/")
        or (" " in name and name.endswith((".", "!", "?")))
        for name in names
    )


def _first_rows(text: bytes, delimiter: str, *, has_quotes: bool) -> list[list[str]]:
    """Return the first complete rows, or the only line."""
    text = text[: text.rfind(b"\n") + 1] or text
    reader = csv.reader(
        io.StringIO(f"{text.decode('latin-1')}\0", newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
    )
    rows: list[list[str]] = []
    try:
        for row in filter(None, reader):
            if len(rows) == TOP_ROWS or row == ["\0"]:
                break
            if row[-1].endswith("\0"):  # unfinished, or with an open quote
                return rows or [[*row[:-1], row[-1].removesuffix("\0")]]
            rows.append(row)
    except csv.Error:
        pass  # the rows before are enough
    return rows


class _GrowingText:
    """A position in a growing file, and the text before it. UTF-16 with a byte order mark is counted as UTF-8."""

    __slots__ = ("_encoding", "_previous_text", "position")

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self.position = 0  # counted up to here
        self._previous_text = b""
        self._encoding: str | None = None  # of UTF-16

    def _count(self, text: bytes) -> None:
        """Count the next text."""
        raise NotImplementedError

    def _usable(self, text: bytes, offset: int) -> bytes:
        """Return the part of the text at this place that can be counted now."""
        return text

    def _is_over(self) -> bool:
        """Whether the rest of the text does not matter."""
        return False

    def _read_top(self, fd: int, size: int) -> bool:
        """Prepare reading from the top; return whether it can start."""
        top = os.pread(fd, min(len(BYTE_ORDER_MARK), size), 0)
        self._encoding = UTF_16.get(top[:2])
        if top == BYTE_ORDER_MARK or self._encoding is not None:
            self._previous_text = top if self._encoding is None else top[:2]
            self.position = len(self._previous_text)
            return True
        return not BYTE_ORDER_MARK.startswith(top)

    def _as_utf_8(self, text: bytes) -> bytes:
        return text if self._encoding is None else text.decode(self._encoding, "replace").encode("utf-8", "replace")

    def advance(self, fd: int, size: int, most_bytes: int = MOST_BYTES) -> bool:
        """Count up to ``size`` in at most ``most_bytes``; return whether more can be counted at once.

        Raises OSError when the file cannot be read; the next call continues from the same position.
        """
        back = self.position - len(self._previous_text)
        if os.pread(fd, len(self._previous_text), back) != self._previous_text:
            self.position = 0
        if not self.position:
            self._restart()
            if not self._read_top(fd, size):
                return False
        end = min(size, self.position + max(1, most_bytes))
        while self.position < end and not self._is_over():
            text = os.pread(fd, min(CHUNK_BYTES, end - self.position), self.position)
            usable = self._usable(text, self.position) if self._encoding is None else text[: len(text) // 2 * 2]
            if usable:
                self.position += len(usable)
                self._previous_text = (self._previous_text + usable[-MARK_BYTES:])[-MARK_BYTES:]
                self._count(self._as_utf_8(usable))
            if not text or len(usable) < len(text):
                return False
        return end < size and not self._is_over()


class LineCounter(_GrowingText):
    r"""Count records of a JSONL or CSV file: finished lines that are not blank, without CSV comments and header.

    A CSV record continues over a ``\n`` in a quoted field, as for ``csv.reader``: a quote opens only at the start of a
    field, and a doubled one does not close it. In tab-separated files a quote is an ordinary character, since natural
    text is rarely escaped there, unless the first rows are equally wide only with quotes. Lines end with ``\n`` or
    ``\r\n``.
    """

    __slots__ = (
        *("_csv", "_delimiter", "_has_header", "_has_quotes", "_hole_end", "_line_summary", "_lines", "_quote"),
        *("_top_begin", "_top_known", "_waits_at_holes", "hole"),
    )

    def __init__(self, *, csv: bool = False, waits_at_holes: bool = False) -> None:
        """Count lines; with ``waits_at_holes``, stop before NUL bytes, which a pending write may still fill."""
        self._csv = csv
        self._waits_at_holes = waits_at_holes
        self._hole_end = 0  # NUL bytes before this position are ordinary text
        super().__init__()

    def _restart(self) -> None:
        super()._restart()
        self._lines = 0
        self._line_summary = b"\n"  # summary of the current line for the text that follows
        self._quote = OUTSIDE
        self._delimiter = b","
        self._has_header = self._has_quotes = True
        self._top_known = 0  # bytes of the top examined for header and delimiter
        self._top_begin = 0
        self.hole = False  # whether the last call stopped before a NUL byte

    @property
    def records(self) -> int:
        """Finished records so far."""
        return max(0, self._lines - 1) if self._csv and self._has_header else self._lines

    @property
    def unfinished(self) -> bool:
        """Whether text follows the last record: half a record, or one that only lacks its newline."""
        return self._quote != OUTSIDE or self._line_summary not in (b"\n", b"\n\r")

    def pass_hole(self, size: int) -> None:
        """Count over all NUL bytes before this size, since nothing seems to fill them."""
        self._hole_end = size

    def advance(self, fd: int, size: int, most_bytes: int = MOST_BYTES) -> bool:
        """Count as in the base class; detect the layout again while the top of a table grows."""
        self.hole = False
        if self._csv and self.position and self._top_known < min(size, TOP_BYTES):
            before = self._top_begin, self._delimiter, self._has_quotes
            self._read_layout(fd, size)
            if (self._top_begin, self._delimiter, self._has_quotes) != before:
                self._restart()
        return super().advance(fd, size, most_bytes)

    def _read_layout(self, fd: int, size: int) -> bytes:
        """Detect the layout from the top, and return the top."""
        top = os.pread(fd, min(TOP_BYTES, size), 0)
        if self._encoding is None:
            top = self._usable(top, 0)
            layout = read_csv_layout(top)
            self._top_begin = layout.begin
        else:
            text = self._as_utf_8(top[2:])
            layout = read_csv_layout(text.ljust(TOP_BYTES) if len(top) == TOP_BYTES else text)
            self._top_begin = 2 + len(text[: layout.begin].decode().encode(self._encoding))
        self._has_header, self._delimiter, self._has_quotes = layout.has_header, layout.delimiter, layout.has_quotes
        self._top_known = TOP_BYTES if layout.is_final else len(top)
        return top

    def _read_top(self, fd: int, size: int) -> bool:
        if not super()._read_top(fd, size):
            return False
        if self._csv:
            top = self._read_layout(fd, size)
            line, newline, _ = top[self._top_begin :].partition(b"\n")
            if not newline and len(top) < TOP_BYTES:
                # the delimiter is not known yet
                hole = self.hole
                self._restart()
                self._line_summary, self.hole = b"x" if line else b"\n", hole
                return False
            self.position, self._previous_text = self._top_begin, top[: self._top_begin][-MARK_BYTES:]
        return True

    def _usable(self, text: bytes, offset: int) -> bytes:
        hole = text.find(b"\0", max(0, self._hole_end - offset)) if self._waits_at_holes else -1
        self.hole = hole >= 0
        return text[:hole] if self.hole else text

    def _count(self, text: bytes) -> None:
        if not self._csv:
            self._count_lines(self._line_summary + text, _BLANK)
        elif self._quote != OUTSIDE or (b'"' in text and self._has_quotes):
            self._count_rows(text)
        else:
            self._count_lines(self._line_summary + text, _EMPTY)

    def _count_lines(self, text: bytes, blank: re.Pattern[bytes]) -> None:
        """Count lines in a text without quoted fields that starts with the summary of its line."""
        self._lines += text.count(b"\n", 1) - len(blank.findall(text))
        last = text[text.rfind(b"\n") + 1 :]
        if not self._csv:
            last = last.strip(WHITE_SPACE)
        elif last == b"\r":
            self._line_summary = b"\n\r"
            return
        self._line_summary = b"x" + last[-1:] if last else b"\n"

    def _count_rows(self, text: bytes) -> None:
        """Count rows in a text with quotes, by replacing each quoted field with a letter."""
        if self._quote == CLOSING and text.startswith(b'"'):
            self._quote, text = INSIDE, text[1:]
        if self._quote == INSIDE:
            closed = _UNTIL_CLOSING_QUOTE.match(text)
            if closed is None:
                return
            text = text[closed.end() :]
            if not text:
                self._quote = CLOSING
                return
        if self._quote != OUTSIDE:
            self._quote, self._line_summary = OUTSIDE, b"x"
        parts = _QUOTED_FIELD[self._delimiter].split(self._line_summary + text)
        self._count_lines(b"x".join(parts[::2]), _EMPTY)
        if len(parts) > 1 and not parts[-1]:
            self._quote = CLOSING if parts[-2] else INSIDE


class ArrayItemCounter(_GrowingText):
    """Count items of the array that is the root of a JSON file.

    Only brackets, commas and quotes are read, so an invalid text also gets some number.
    """

    __slots__ = ("_commas", "_depth", "_escaped", "_in_string", "_phase")

    def _restart(self) -> None:
        super()._restart()
        self._phase = ROOT
        self._commas = 0  # between items
        self._depth = 1  # open brackets, the root's included
        self._in_string = False
        self._escaped = False

    @property
    def items(self) -> int | None:
        """Finished items so far; None while the root is unknown, or if it is not an array."""
        if self._phase in (ROOT, OTHER):
            return None
        return self._commas + (self._phase == DONE and not self._depth)

    @property
    def complete(self) -> bool:
        """Whether the array is closed."""
        return self._phase == DONE

    def _is_over(self) -> bool:
        return self._phase == OTHER

    def _count(self, text: bytes) -> None:
        if self._phase == ROOT and (text := text.lstrip(WHITE_SPACE)):
            self._phase, text = (FIRST if text[:1] == b"[" else OTHER), text[1:]
        if self._phase == FIRST and (text := text.lstrip(WHITE_SPACE)):
            self._phase, text = (DONE, text[1:]) if text[:1] == b"]" else (ITEMS, text)
        if self._phase == DONE:
            if text.strip(WHITE_SPACE):
                self._phase = OTHER
        elif self._phase == ITEMS:
            self._count_items(text)

    def _count_items(self, text: bytes) -> None:
        if self._escaped:
            text = text[1:]
        # remove escaped backslashes, then escaped quotes
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escaped = text.endswith(b"\\")
        # adjacent quotes cancel out
        parts = text.translate(_BRACKETS, _NO_STRUCTURE).replace(b'""', b"").split(b'"')
        structure = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        if self._depth + structure.count(b"[") > structure.count(b"]"):
            # the root stays open, so all closed brackets lie within it
            for _ in range(COLLAPSES):
                before = len(structure)
                structure = _INNERMOST.sub(b"", structure)
                if len(structure) == before:
                    break
        for run in _RUNS.findall(structure):
            if not self._depth:
                self._phase = OTHER
                return
            if run[:1] == b"[":
                self._depth += len(run)
            elif run[:1] == b"]":
                self._depth -= len(run)
            elif self._depth == 1:
                self._commas += len(run)
            if self._depth < 0:
                self._phase = OTHER
                return
        if not self._depth:
            self._phase = DONE if text.rstrip(WHITE_SPACE).endswith(b"]") else OTHER
