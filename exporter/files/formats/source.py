"""Bounded reads of one regular file, which may have any size and be damaged or hostile.

Whatever lengths and offsets the file contains, at most ``MOST_BYTES`` are read in ``MOST_READS`` pieces.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

MOST_BYTES = 1 << 20  # read of one file in all
MOST_READS = 4096  # pieces read in all: on a network file system each is slow, however small
OUTSIDE = "is a link to a place outside its folder"
NO_FOOTER = "has no footer: it was not completely written, or its end is lost"
FIRST_BYTES = 4096  # read at once from the top, which every format examines

# never waits for the other end of a FIFO, and never follows a link
OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY

KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}  # files that are not regular, by type


class FileDamaged(Exception):
    """The file is damaged; the text names the damage for people: "ends 12 bytes too early"."""


class CheckUndecided(Exception):
    """The check cannot decide within the bounds or for this format; the text says why."""


class NotRegularFile(Exception):
    """There is no regular file to read; the text says why: "is a FIFO", "Permission denied"."""

    @property
    def errno(self) -> int | None:
        """Error number of the system, if it has refused to open the file."""
        return self.__cause__.errno if isinstance(self.__cause__, OSError) else None

    @property
    def is_unreadable(self) -> bool:
        """Whether there is a file that cannot be read, rather than none or one of another kind."""
        return str(self) == OUTSIDE or self.errno not in (None, errno.ENOENT)


class ValidFile(NamedTuple):
    """Result of a format for a file without errors."""

    format: str
    records: int | None = None  # rows or items, if a header, a footer or a small text gives them
    reason: str | None = None  # which part was not read, or what is unfinished
    unfinished: bool = False  # whether the last record is half-written


class FileSource:
    """One open regular file, of its size when opened."""

    __slots__ = ("_fd", "_head", "_tail", "bytes_read", "name", "reads", "size")

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._head = b""
        self._tail = b""
        self.name = name
        self.size = os.fstat(fd).st_size
        self.bytes_read = 0  # bytes read so far
        self.reads = 0  # pieces read so far

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly this many bytes.

        Raises FileDamaged if the file ends before, CheckUndecided beyond the limits of the whole file.
        """
        if offset < 0 or length < 0:
            raise FileDamaged("refers to a position before its beginning")
        if offset + length > self.size:
            raise FileDamaged(f"ends {offset + length - self.size} bytes too early")
        known = self._head[offset : offset + length]
        return known + self._pread(offset + len(known), length - len(known)) if len(known) < length else known

    def require(self, end: int, what: str) -> None:
        """Raise FileDamaged if the file ends before this position, the end of ``what``."""
        if end > self.size:
            raise FileDamaged(f"ends {end - self.size} bytes before the end of {what}")

    def head(self, length: int) -> bytes:
        """Return up to this many first bytes, fewer if the file is shorter. They are read only once."""
        length = min(length, self.size)
        if length > len(self._head):
            most = min(max(length, FIRST_BYTES), self.size)
            self._head += self._pread(len(self._head), most - len(self._head))
        return self._head[:length]

    def tail(self, length: int) -> bytes:
        """Return up to this many last bytes; the longest result is cached."""
        length = min(length, self.size)
        if length > len(self._tail):
            self._tail = self.read(self.size - length, length - len(self._tail)) + self._tail
        return self._tail[len(self._tail) - length :]

    def _pread(self, offset: int, length: int) -> bytes:
        if self.bytes_read + length > MOST_BYTES or self.reads >= MOST_READS:
            raise CheckUndecided(f"cannot be checked by reading at most {MOST_BYTES >> 10} KiB")
        pieces = []
        while length:
            self.reads += 1
            piece = os.pread(self._fd, length, offset)
            if not piece:
                raise CheckUndecided("became shorter while it was checked")
            self.bytes_read += len(piece)
            offset, length = offset + len(piece), length - len(piece)
            pieces.append(piece)
        return b"".join(pieces)


@contextmanager
def open_source(folder: str | os.PathLike[str], name: str) -> Iterator[FileSource]:
    """Open a regular file in this folder or below it (``/`` in the name) as a context.

    Raises NotRegularFile if it cannot be opened, is of another kind, or resolves to a place outside the folder. Never
    waits for the other end of a FIFO.
    """
    fd = -1
    try:
        try:
            place = os.path.join(folder, name)
            facts = os.stat(place, follow_symlinks=False)
            if "/" in name or not stat.S_ISREG(facts.st_mode):
                top, place = os.path.realpath(folder), os.path.realpath(place)
                if not (place == top or place.startswith(os.path.join(top, ""))):
                    raise NotRegularFile(OUTSIDE)
                facts = os.stat(place, follow_symlinks=False)
            _require_regular(facts)  # never open a device
            fd = os.open(place, OPEN_FLAGS)
            _require_regular(os.fstat(fd))
        except OSError as error:
            text = error.strerror or errno.errorcode.get(error.errno or 0, "cannot be read")
            raise NotRegularFile(text) from error
        except ValueError as error:
            raise NotRegularFile("is not a valid file name") from error
        yield FileSource(fd, name)
    finally:
        if fd >= 0:
            os.close(fd)


def _require_regular(facts: os.stat_result) -> None:
    kind = stat.S_IFMT(facts.st_mode)
    if kind == stat.S_IFLNK:
        raise NotRegularFile("is a circular link")
    if kind != stat.S_IFREG:
        raise NotRegularFile(f"is a {KINDS[kind]}" if kind in KINDS else "is not a regular file")


def printable(text: str) -> str:
    """Return the text as one printable line, with other characters as escapes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )
