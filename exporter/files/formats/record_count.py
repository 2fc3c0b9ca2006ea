"""Records of growing text files, counted from where the last look stood: lines of JSONL and CSV, items of a JSON array.

A look reads a bounded number of bytes, so a file of any size is counted in several. What is kept between them is a few
numbers and the last text before the position: a file that has shrunk, or whose text there has changed, was written
anew and is counted from its top.
"""

import csv
import io
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

MARK_BYTES = 64  # text before our position that tells whether the file is still the one that was counted
CHUNK_BYTES = 1 << 20  # worked on at once
MOST_BYTES = 8 * CHUNK_BYTES  # counted in one look, unless the caller has another bound
TOP_BYTES = 16 << 10
"""So much of the top of a CSV file tells what stands between its fields, and whether its first row is a header:"""
TOP_ROWS = 21  # from so many rows
COLLAPSES = 8  # levels of nesting within a JSON array that are taken away at once; deeper ones are gone through

DELIMITERS = b",;\t|"  # what may stand between the fields of CSV
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WHITE = b" \t\r\n"

OUTSIDE, INSIDE, CLOSING = range(3)
"""Of a quoted field: outside, inside, and behind a quote that closes it unless another one follows."""
ROOT, FIRST, ITEMS, DONE, OTHER = range(5)
"""Of a JSON text: before its root, behind its ``[``, in its items, behind its ``]``, and no array."""

COMMENT = b"#"
MOST_NAME_LETTERS = 80  # the name of a column is not longer
SAME_LENGTH = 8
"""Letters in each value of a column, and in its first field, from which on that is no chance: hashes, UUIDs."""
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "nil", "-", "?"))
NO_NAMES = MISSING | {"true", "false", "inf", "-inf"}

_NUMBER = re.compile(r"[-+]?[.$]?\d[\d.,:/_ +-]*(?:[eETZ][-+\d.:]*Z?)?%?|[-+]?inf(?:inity)?", re.IGNORECASE)
"""What is told by digits: a number, a date, a time."""
_DIGITS = re.compile(r"\d+")
_BLANK = re.compile(rb"\n[ \t\r]*(?=\n)")
_EMPTY = re.compile(rb"\n\r?(?=\n)")
_QUOTED = re.compile(rb'"[^"]*"?')
_TO_CLOSE = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
_FIELD = {
    bytes((code,)): re.compile(rb'(?<=[\n%b])"[^"]*+(?:""[^"]*+)*+("?)' % re.escape(bytes((code,))))
    for code in DELIMITERS
}  # for each delimiter: a quoted field up to its closing quote, which is caught, or to the end of the text
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(code for code in range(256) if code not in b'"[]{},')
_INNERMOST = re.compile(rb"\[,*\]")
_RUNS = re.compile(rb"\[+|\]+|,+")


def guess_delimiter(first_line: bytes) -> bytes:
    """What stands between fields: of ``, ; tab |`` what the first line has most of, a comma where it has none."""
    bare = _QUOTED.sub(b"", first_line)
    return max((bytes((code,)) for code in DELIMITERS), key=bare.count)


class CsvLayout(NamedTuple):
    """What the top of a CSV file tells of it."""

    begin: int  # where its first row begins: behind a byte order mark, blank lines and comments
    delimiter: bytes
    header: bool  # whether its first row holds the names of its columns
    sure: bool  # whether more text could not tell otherwise


def read_csv_layout(top: bytes) -> CsvLayout:
    """What the first ``TOP_BYTES`` of a CSV file tell, fewer of a shorter one.

    Comments are lines before the first row that begin with ``#``, without a quote before it. Where every line does, or
    several have as many fields as the first row, they are rows; of one alone that has, its fields are the header.
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
    rows = _first_rows(top[begin:], between.decode())
    sure = len(top) >= TOP_BYTES or len(rows) >= TOP_ROWS
    if not rows:
        return CsvLayout(begin, between, header=True, sure=sure)
    told = _tells_header(rows)
    header = not named and _could_be_names(rows[0]) if told is None else told
    return CsvLayout(begin, between, header, sure)


def _tells_header(rows: Sequence[Sequence[str]]) -> bool | None:
    """Whether the first row of a table is a header and no record; None where nothing tells.

    No file says so for certain. The strongest evidence comes first: it is a header when it counts its columns from 0,
    as pandas does, or has text above a column of numbers. It is a record when it has a number, or a value like those
    below it. A table of texts tells nothing: there a first row is a header whose fields could be names.
    """
    first = [field.strip() for field in rows[0]]
    columns = [[row[place].strip() for row in rows[1:] if place < len(row)] for place in range(len(first))]
    counted = first[not first[0] :] if first else []
    if len(first) > 1 and counted == [str(number) for number in range(len(counted))]:
        return True
    for field, column in zip(first, columns, strict=True):
        values = [value for value in column if value.lower() not in MISSING]
        is_text = field.lower() not in MISSING and not _NUMBER.fullmatch(field)
        if is_text and values and all(_NUMBER.fullmatch(value) for value in values):
            return True
    if any(_NUMBER.fullmatch(field) for field in first):
        return False
    return False if any(map(_is_alike, first, columns)) else None


def _is_alike(field: str, column: Sequence[str]) -> bool:
    """Whether a field is like those below it: comes again, differs in digits alone, or is as long as all of them."""
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
    """Whether they are short and all different, none of them empty, a path or a sentence."""
    names = [field.strip().lower() for field in fields]
    if len(names) > 1:
        names = names[not names[0] : len(names) - (not names[-1])]  # an index, or a delimiter behind the last one
    return len(set(names)) == len(names) and not any(
        name in NO_NAMES
        or len(name) > MOST_NAME_LETTERS
        or "\n" in name
        or "://" in name
        or name.startswith("/")
        or (" " in name and name.endswith((".", "!", "?")))
        for name in names
    )


def _first_rows(text: bytes, between: str) -> list[list[str]]:
    """The first rows that are whole; of a text of one line that one."""
    text = text[: text.rfind(b"\n") + 1] or text
    reader = csv.reader(
        io.StringIO(f"{text.decode('latin-1')}\0", newline=""),
        delimiter=between,
        quoting=csv.QUOTE_NONE if between == "\t" else csv.QUOTE_MINIMAL,
    )
    rows: list[list[str]] = []
    try:
        for row in filter(None, reader):
            if len(rows) == TOP_ROWS or row == ["\0"]:
                break
            if row[-1].endswith("\0"):  # it has no end, or a quote that is open
                return rows or [[*row[:-1], row[-1].removesuffix("\0")]]
            rows.append(row)
    except csv.Error:
        pass  # what stands before tells
    return rows


class _GrowingText:
    """A position in a file that grows, and the text before it."""

    __slots__ = ("_mark", "position")

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self.position = 0
        """Up to where has been counted."""
        self._mark = b""

    def _count(self, text: bytes) -> None:
        """Count the text that comes next."""
        raise NotImplementedError

    def _usable(self, text: bytes, place: int) -> bytes:
        """So much of the text from this place on as can be counted by now."""
        return text

    def _is_over(self) -> bool:
        """Whether nothing that may follow matters."""
        return False

    def _top(self, fd: int, size: int) -> bool:
        """Prepare for reading from the top; whether it can be begun."""
        top = os.pread(fd, min(len(BYTE_ORDER_MARK), size), 0)
        if top == BYTE_ORDER_MARK:
            self.position, self._mark = len(top), top
            return True
        return not BYTE_ORDER_MARK.startswith(top)

    def advance(self, fd: int, size: int, most_bytes: int = MOST_BYTES) -> bool:
        """Count on in the open file, up to ``size``, in at most so many bytes; whether there is more to count at once.

        Raises OSError when it cannot be read; the next look goes on where this one was.
        """
        back = self.position - len(self._mark)
        if os.pread(fd, len(self._mark), back) != self._mark:
            self.position = 0
        if not self.position:
            self._restart()
            if not self._top(fd, size):
                return False
        end = min(size, self.position + max(1, most_bytes))
        while self.position < end and not self._is_over():
            text = os.pread(fd, min(CHUNK_BYTES, end - self.position), self.position)
            usable = self._usable(text, self.position)
            if usable:
                self.position += len(usable)
                self._mark = (self._mark + usable[-MARK_BYTES:])[-MARK_BYTES:]
                self._count(usable)
            if not text or len(usable) < len(text):
                return False
        return end < size and not self._is_over()


class LineCounter(_GrowingText):
    r"""Records of a JSONL or CSV file: lines that are finished and not blank, of CSV without comments and header.

    A record of CSV goes on over a ``\n`` in a quoted field, as for ``csv.reader``: a quote opens only where a field
    begins, and a doubled one does not close. Where tabs separate the fields it is a letter: natural text in them is
    mostly written as it is. Lines end with ``\n`` or ``\r\n``.
    """

    __slots__ = (
        *("_before", "_csv", "_delimiter", "_header", "_lines", "_passes", "_quote", "_top_begin", "_top_known"),
        *("_waits", "hole"),
    )

    def __init__(self, *, csv: bool = False, waits: bool = False) -> None:
        """``waits``: whether NUL bytes are waited before, as the hole of a write that is still to come."""
        self._csv = csv
        self._waits = waits
        self._passes = 0  # NUL bytes before this place are text like any other
        super().__init__()

    def _restart(self) -> None:
        super()._restart()
        self._lines = 0
        self._before = b"\n"  # a short text that says of the line so far what matters for the rest of it
        self._quote = OUTSIDE
        self._delimiter = b","
        self._header = True
        self._top_known = 0  # bytes of the top that have told of header and delimiter
        self._top_begin = 0
        self.hole = False
        """Whether the last look has ended before a NUL byte."""

    @property
    def records(self) -> int:
        """Finished records so far."""
        return max(0, self._lines - 1) if self._csv and self._header else self._lines

    @property
    def unfinished(self) -> bool:
        """Whether text follows the last of them: a half-written record, or one that only lacks its newline."""
        return self._quote != OUTSIDE or self._before not in (b"\n", b"\n\r")

    def pass_hole(self, size: int) -> None:
        """Count on over all NUL bytes up to this size of the file: nobody seems to fill them."""
        self._passes = size

    def advance(self, fd: int, size: int, most_bytes: int = MOST_BYTES) -> bool:
        """See above; of a table the header is looked for again while its top grows."""
        self.hole = False
        if self._csv and self.position and self._top_known < min(size, TOP_BYTES):
            before = self._top_begin, self._delimiter
            self._look_at_top(fd, size)
            if (self._top_begin, self._delimiter) != before:
                self._restart()
        return super().advance(fd, size, most_bytes)

    def _look_at_top(self, fd: int, size: int) -> bytes:
        """Learn what the top tells; the text of it that there is."""
        top = self._usable(os.pread(fd, min(TOP_BYTES, size), 0), 0)
        layout = read_csv_layout(top)
        self._header, self._top_begin, self._delimiter = layout.header, layout.begin, layout.delimiter
        self._top_known = TOP_BYTES if layout.sure else len(top)
        return top

    def _top(self, fd: int, size: int) -> bool:
        if not super()._top(fd, size):
            return False
        if self._csv:
            top = self._look_at_top(fd, size)
            line, newline, _ = top[self._top_begin :].partition(b"\n")
            if not newline and len(top) < TOP_BYTES:
                # it is not known yet what stands between the fields
                hole = self.hole
                self._restart()
                self._before, self.hole = b"x" if line else b"\n", hole
                return False
            self.position, self._mark = self._top_begin, top[: self._top_begin][-MARK_BYTES:]
        return True

    def _usable(self, text: bytes, place: int) -> bytes:
        hole = text.find(b"\0", max(0, self._passes - place)) if self._waits else -1
        self.hole = hole >= 0
        return text[:hole] if self.hole else text

    def _count(self, text: bytes) -> None:
        if not self._csv:
            self._lines_of(self._before + text, _BLANK)
        elif self._quote != OUTSIDE or (b'"' in text and self._delimiter != b"\t"):
            self._rows_of(text)
        else:
            self._lines_of(self._before + text, _EMPTY)

    def _lines_of(self, text: bytes, blank: re.Pattern[bytes]) -> None:
        """Count lines in a text without quoted fields that begins with what is known of its line."""
        self._lines += text.count(b"\n", 1) - len(blank.findall(text))
        last = text[text.rfind(b"\n") + 1 :]
        if not self._csv:
            last = last.strip(WHITE)
        elif last == b"\r":
            self._before = b"\n\r"
            return
        self._before = b"x" + last[-1:] if last else b"\n"

    def _rows_of(self, text: bytes) -> None:
        """Count rows in a text with quotes: each quoted field is replaced by a letter."""
        if self._quote == CLOSING and text.startswith(b'"'):
            self._quote, text = INSIDE, text[1:]
        if self._quote == INSIDE:
            closed = _TO_CLOSE.match(text)
            if closed is None:
                return
            text = text[closed.end() :]
            if not text:
                self._quote = CLOSING
                return
        if self._quote != OUTSIDE:
            self._quote, self._before = OUTSIDE, b"x"
        parts = _FIELD[self._delimiter].split(self._before + text)
        self._lines_of(b"x".join(parts[::2]), _EMPTY)
        if len(parts) > 1 and not parts[-1]:
            self._quote = CLOSING if parts[-2] else INSIDE


class ArrayItemCounter(_GrowingText):
    """Items of the array that is the root of a JSON file.

    Only brackets, commas and quotes are looked at: a text that is no JSON has some number too.
    """

    __slots__ = ("_commas", "_depth", "_escaped", "_phase", "_string")

    def _restart(self) -> None:
        super()._restart()
        self._phase = ROOT
        self._commas = 0  # between items
        self._depth = 1  # of brackets that are open, the root's included
        self._string = False
        self._escaped = False

    @property
    def items(self) -> int | None:
        """Finished items so far; None while nothing is known of the root, and when it is no array."""
        if self._phase in (ROOT, OTHER):
            return None
        return self._commas + (self._phase == DONE and not self._depth)

    @property
    def complete(self) -> bool:
        """Whether the end of the array has come."""
        return self._phase == DONE

    def _is_over(self) -> bool:
        return self._phase == OTHER

    def _count(self, text: bytes) -> None:
        if self._phase == ROOT and (text := text.lstrip(WHITE)):
            self._phase, text = (FIRST if text[:1] == b"[" else OTHER), text[1:]
        if self._phase == FIRST and (text := text.lstrip(WHITE)):
            self._phase, text = (DONE, text[1:]) if text[:1] == b"]" else (ITEMS, text)
        if self._phase == DONE:
            if text.strip(WHITE):
                self._phase = OTHER
        elif self._phase == ITEMS:
            self._items_of(text)

    def _items_of(self, text: bytes) -> None:
        if self._escaped:
            text = text[1:]
        # an even number of backslashes means none, an odd one before a quote takes it away
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escaped = text.endswith(b"\\")
        # two quotes side by side change nothing for what follows
        parts = text.translate(_BRACKETS, _NO_STRUCTURE).replace(b'""', b"").split(b'"')
        structure = b"".join(parts[self._string :: 2])
        self._string ^= len(parts) % 2 == 0
        if self._depth + structure.count(b"[") > structure.count(b"]"):
            # the root is still open, and whatever is closed lies within it
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
            self._phase = DONE if text.rstrip(WHITE).endswith(b"]") else OTHER
