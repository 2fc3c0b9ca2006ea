"""Bounded reads of one regular file, for looks at files of any size that may be damaged or hostile.

Whatever a length or an offset in a file says, no more than ``MOST_BYTES`` in ``MOST_READS`` pieces are read of it.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

MOST_BYTES = 1 << 20  # read of one file at most, in all
MOST_READS = 4096  # and in so many pieces: on a network file system each may take as long as many bytes
FIRST_BYTES = 4096  # read at once when the top of a file is asked for: every format looks there

KINDS = {
    stat.S_IFDIR: "is a directory",
    stat.S_IFIFO: "is a FIFO",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}


class FileDamaged(Exception):
    """The file is not what it says it is; the text says what is wrong, for people: "ends 12 bytes too early"."""


class CheckUndecided(Exception):
    """It cannot be told, within the bounds or by what is known of the format; the text says why."""


class NotRegularFile(Exception):
    """There is no regular file to read; the text says what there is: "is a FIFO", "Permission denied"."""


class ValidFile(NamedTuple):
    """What a format says of a file that it has found nothing wrong with."""

    format: str
    records: int | None = None  # rows or items, where a header, a footer or a small text tells
    reason: str | None = None  # what has not been looked at, or what is unfinished
    unfinished: bool = False  # whether the last record is half-written, as in a file that is being written to


class FileSource:
    """One open regular file, of the size that it had when it was opened."""

    __slots__ = ("_fd", "_head", "_tail", "name", "reads", "size", "spent")

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._head = b""
        self._tail = b""
        self.name = name
        self.size = os.fstat(fd).st_size
        self.spent = 0
        """Bytes read so far."""
        self.reads = 0
        """In so many pieces."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly this many bytes.

        Raises Damaged where the file ends before, Undecided when too much would have been read of it in all.
        """
        if offset < 0 or length < 0:
            raise FileDamaged("points to a place before its beginning")
        if offset + length > self.size:
            raise FileDamaged(f"ends {offset + length - self.size} bytes too early")
        known = self._head[offset : offset + length]
        return known + self._pread(offset + len(known), length - len(known)) if len(known) < length else known

    def head(self, length: int) -> bytes:
        """Up to this many bytes from the top, fewer of a shorter file; they are kept, and read only once."""
        length = min(length, self.size)
        if length > len(self._head):
            most = min(max(length, FIRST_BYTES), self.size)
            self._head += self._pread(len(self._head), most - len(self._head))
        return self._head[:length]

    def tail(self, length: int) -> bytes:
        """Up to this many of the last bytes; the longest that was asked for is kept."""
        length = min(length, self.size)
        if length > len(self._tail):
            self._tail = self.read(self.size - length, length - len(self._tail)) + self._tail
        return self._tail[len(self._tail) - length :]

    def _pread(self, offset: int, length: int) -> bytes:
        if self.spent + length > MOST_BYTES or self.reads >= MOST_READS:
            raise CheckUndecided(f"cannot be told from {MOST_BYTES >> 10} KiB of it")
        pieces = []
        while length:
            self.reads += 1
            piece = os.pread(self._fd, length, offset)
            if not piece:
                raise CheckUndecided("has become shorter while it was looked at")
            self.spent += len(piece)
            offset, length = offset + len(piece), length - len(piece)
            pieces.append(piece)
        return b"".join(pieces)


@contextmanager
def open_source(folder: str | os.PathLike[str], name: str) -> Iterator[FileSource]:
    """A regular file of this folder (or of one below it, with ``/`` in the name), open while the context lasts.

    Raises NoFile for what is no regular file, cannot be opened, or lies outside of the folder: a symbolic link
    counts by where it leads to. Never waits for the other end of a FIFO.
    """
    fd = _open(os.fspath(folder), name)
    try:
        yield FileSource(fd, name)
    finally:
        os.close(fd)


def _open(folder: str, name: str) -> int:
    try:
        top = os.path.realpath(folder)
        place = os.path.realpath(os.path.join(top, name))
        if not (place == top or place.startswith(os.path.join(top, ""))):
            raise NotRegularFile("leads out of its folder")
        _regular(os.stat(place, follow_symlinks=False))  # a device is not even opened
        fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise NotRegularFile(_words(error)) from error
    except ValueError as error:
        raise NotRegularFile("cannot be the name of a file") from error
    try:
        _regular(os.fstat(fd))
    except OSError as error:
        os.close(fd)
        raise NotRegularFile(_words(error)) from error
    except NotRegularFile:
        os.close(fd)
        raise
    return fd


def _regular(facts: os.stat_result) -> None:
    kind = stat.S_IFMT(facts.st_mode)
    if kind == stat.S_IFLNK:
        raise NotRegularFile("is a link in a circle")
    if kind != stat.S_IFREG:
        raise NotRegularFile(KINDS.get(kind, "is not a regular file"))


def _words(error: OSError) -> str:
    return error.strerror or errno.errorcode.get(error.errno or 0, "cannot be read")


def printable(text: str) -> str:
    """A text of any origin as one line that can be printed: other characters are written as escapes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )
