"""Records of growing text files, counted from where the last look stood: lines of JSONL and CSV, items of a JSON array.

A look reads a bounded number of bytes, so a file of any size is counted in several. What is kept between them is a few
numbers and the last text before the position: a file that has shrunk, or whose text there has changed, was written
anew and is counted from its top.
"""

import os
import re

MARK_BYTES = 64
"""Text before our position that tells whether the file is still the one that was counted."""
CHUNK_BYTES = 1 << 20
"""Worked on at once."""
MOST_BYTES = 8 * CHUNK_BYTES
"""Counted in one look, unless the caller has another bound."""
FIRST_LINE_BYTES = 4096
"""So much of the top of a CSV file tells what stands between its fields."""
COLLAPSES = 8
"""Levels of nesting within a JSON array that are taken away at once; deeper ones are gone through."""

FIRST_LINE_IS_HEADER = True
"""A CSV file's first record is taken for the names of its columns, and not counted.

Nothing in a file says so for certain, but what writes tables (csv.DictWriter, pandas, spreadsheets) writes their names
first. Whoever guesses from the values is wrong at the first table of words, and the count would jump by one.
"""
DELIMITERS = b",;\t|"
"""What may stand between the fields of CSV."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WHITE = b" \t\r\n"

OUTSIDE, INSIDE, CLOSING = range(3)
"""Of a quoted field: outside, inside, and behind a quote that closes it unless another one follows."""
ROOT, FIRST, ITEMS, DONE, OTHER = range(5)
"""Of a JSON text: before its root, behind its ``[``, in its items, behind its ``]``, and no array."""

_BLANK = re.compile(rb"\n[ \t\r]*(?=\n)")
_EMPTY = re.compile(rb"\n\r?(?=\n)")
_QUOTED = re.compile(rb'"[^"]*"?')
_TO_CLOSE = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
_FIELD = {
    bytes((code,)): re.compile(rb'(?<=[\n%b])"[^"]*+(?:""[^"]*+)*+("?)' % re.escape(bytes((code,))))
    for code in DELIMITERS
}
"""For each delimiter: a quoted field up to its closing quote, which is caught, or to the end of the text."""
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(code for code in range(256) if code not in b'"[]{},')
_INNERMOST = re.compile(rb"\[,*\]")
_RUNS = re.compile(rb"\[+|\]+|,+")


def delimiter(first_line: bytes) -> bytes:
    """What stands between fields: of ``, ; tab |`` what the first line has most of, a comma where it has none."""
    bare = _QUOTED.sub(b"", first_line)
    return max((bytes((code,)) for code in DELIMITERS), key=bare.count)


class _Growing:
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
            if not text:
                return False
            self.position += len(text)
            self._mark = (self._mark + text[-MARK_BYTES:])[-MARK_BYTES:]
            self._count(text)
        return end < size and not self._is_over()


class LineCount(_Growing):
    r"""Records of a JSONL or CSV file: lines that are finished and not blank, of CSV without the header.

    A record of CSV goes on over a ``\n`` in a quoted field, as for ``csv.reader``: a quote opens only where a field
    begins, and a doubled one does not close. Lines end with ``\n`` or ``\r\n``.
    """

    __slots__ = ("_before", "_csv", "_delimiter", "_lines", "_quote")

    def __init__(self, *, csv: bool = False) -> None:
        self._csv = csv
        super().__init__()

    def _restart(self) -> None:
        super()._restart()
        self._lines = 0
        self._before = b"\n"  # a short text that says of the line so far what matters for the rest of it
        self._quote = OUTSIDE
        self._delimiter = b","

    @property
    def records(self) -> int:
        """Finished records so far."""
        return max(0, self._lines - 1) if self._csv and FIRST_LINE_IS_HEADER else self._lines

    @property
    def unfinished(self) -> bool:
        """Whether text follows the last of them: a half-written record, or one that only lacks its newline."""
        return self._quote != OUTSIDE or self._before not in (b"\n", b"\n\r")

    def _top(self, fd: int, size: int) -> bool:
        if not super()._top(fd, size):
            return False
        if self._csv:
            top = os.pread(fd, min(FIRST_LINE_BYTES, size), 0)[self.position :]
            line, newline, _ = top.partition(b"\n")
            if not newline and self.position + len(top) < FIRST_LINE_BYTES:
                # it is not known yet what stands between the fields
                self._restart()
                self._before = b"x" if line else b"\n"
                return False
            self._before, self._delimiter = b"\n", delimiter(line)
        return True

    def _count(self, text: bytes) -> None:
        if not self._csv:
            self._lines_of(self._before + text, _BLANK)
        elif self._quote != OUTSIDE or b'"' in text:
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


class ArrayCount(_Growing):
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
