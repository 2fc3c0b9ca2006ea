r"""Read new records of a growing log by polling, since inotify misses writes on network file systems.

A record ends at ``\n``, ``\r`` or ``\r\n``, because progress bars redraw their line with a return. Text after the last
end waits for a later read. One reused buffer bounds memory for any file or record size.

Each record is returned once, whatever happens to the file. Polling cannot recover:

- text written and truncated between two reads;
- the rest of a record that was unfinished when the file was truncated: the record is dropped;
- files rotated and then deleted, compressed or moved to another directory between two reads;
- text written to a deleted file when it and its path have had nothing new for a minute;
- truncation of a file that grew again with the same 128 bytes before our position.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

CHUNK_BYTES = 1 << 20  # size of one read, and of the longest record returned in one piece
MARK_BYTES = 128  # text before our position that identifies the file
COPY_MARK_BYTES = 64  # least agreement for a file with another inode: short texts agree by chance
SETTLED_S = 2.0  # a file written this recently may change again without a new mtime
DELETED_S = 60.0  # a deleted file without a successor is closed after this time without writes
SPARE_BUFFERS = 4
STATE_BYTES = 4096  # longest state of a progress bar: they fit in a few lines of a terminal

RETURN = 13
NUMBER_BYTES = b"0123456789.,_"  # a record that ends in one of these may be cut within a number
ROTATED = re.compile(r"[._-]\d[\d._:T+-]*")  # number or date that rotation adds to a log's name
SEPARATED_NUMBER = re.compile(r"[._-](\d{1,5})")
DIGIT = re.compile(r"\d")
FILE_KINDS = {
    stat.S_IFDIR: "is a directory",
    stat.S_IFIFO: "is a FIFO",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
}

_spare: list[bytearray] = []  # buffers not in use: one per thread that reads logs


class TailedRecords(NamedTuple):
    r"""Whole records: the first ``end`` bytes of ``buffer``, which the next piece reuses.

    A record over 1 MiB comes in several pieces, each like a record. If a ``\r`` was returned before its ``\n`` was
    written, the ``\n`` begins the next piece and ends an empty record. Counting only ``\n``, or skipping empty records,
    stays exact.
    """

    buffer: bytearray
    end: int
    offset: int  # byte of the file at which the piece begins


class TailPosition(NamedTuple):
    """Where a tail is, as far as another one needs to know it to continue."""

    path: str  # resolved path of the file
    inode: int | None
    offset: int  # start of the unfinished record
    read: int  # end of the text read so far
    mark: str  # text before that, in hexadecimal digits
    generation: int
    bytes_read: int


class LogTail:
    """Tail of one log file, followed by path.

    A renamed file is read to its end through the open descriptor, including an unfinished last record. Then come files
    rotated after it, as far as their names show, then the file at the path. The old file is followed until the new one
    has text.

    A file that shrinks, or whose text before our position changes, is read again from its top. A copy that replaced the
    file (editor, rsync) is read on. A missing file returns nothing. Links are followed; only regular files are opened.

    A file whose whole text was skipped stays closed until it is written to. A deleted file is closed after a while, to
    free its blocks.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes_read = 0  # since the first read, over all generations of the file
        self.size = 0  # of the file, at the last read
        self.mtime: float | None = None  # at the last read
        self.generation = 0  # rises when the file is replaced or truncated, so offsets restart
        self.has_more = False  # whether the last read reached the end of a replaced file and the next one waits
        self.problem: str | None = None  # why the last read failed or could not continue; a missing file is no problem
        self._fd = -1
        self._next_fd = -1  # the next file, while the one at the path is empty and the old one is followed
        self._file: tuple[int, int] | None = None  # device and inode
        self._resolved_path = path  # resolved path of that file when it was opened
        self._waiting_bytes = 0  # size of the file at the path while another one is read
        self._inode: int | None = None  # of the file being followed, while it is closed
        self._parked: tuple[int, ...] | None = None  # stat of a skipped file that stays closed while unchanged
        self._deleted_since: tuple[float, tuple[int, int, int]] | None = None  # since when a deleted file is unchanged
        self._reset()

    def _reset(self) -> None:
        self._record_start = 0  # start of the unfinished record
        self._offset = 0  # end of the text read so far
        self._mark = b""  # text before that
        self._is_at_top = True  # only NUL has been seen yet
        self._settled_version: tuple[int, int, int] | None = None  # size and times that mean no write since

    # -- for callers -----------------------------------------------------------------------------

    def __del__(self) -> None:
        self.close()

    @property
    def lag_bytes(self) -> int:
        """Unread bytes, as of the last read."""
        return max(0, self.size - self._offset) + self._waiting_bytes

    @property
    def is_gone(self) -> bool:
        """Whether the file was deleted long enough ago to be followed no more."""
        return self.generation > 0 and self._file is None and self._inode is None

    def close(self) -> None:
        """Close the file; the next read reopens it and continues."""
        for fd in (self._fd, self._next_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._next_fd = -1
        if self._file is not None:
            self._inode, self._file = self._file[1], None

    def read_chunks(
        self, most_bytes: int = 64 * CHUNK_BYTES, should_stop: Callable[[], bool] | None = None
    ) -> Iterator[TailedRecords]:
        """Yield new whole records of one generation. If ``has_more`` is then set, read again immediately.

        Reads at most ``most_bytes``, and after the first chunk only until ``should_stop()`` is true.
        """
        self.has_more = False
        try:
            chosen = self._choose_file()
        except OSError as error:
            self._record_failure(error)
            return
        if chosen is None:
            return
        facts, leaving = chosen
        self.size = facts.st_size
        self.mtime = facts.st_mtime
        written = _write_version(facts)
        if not leaving and written == self._settled_version and self._offset >= facts.st_size:
            return  # most reads of most logs find nothing and end here
        self._settled_version = None
        buffer = _spare.pop() if _spare else bytearray(CHUNK_BYTES + 1)
        has_next = False
        try:
            before = self.bytes_read
            # a replaced file is read until nothing more comes; for others the size gives the end without a read
            at_end = yield from self._read(buffer, most_bytes, should_stop, None if leaving else facts.st_size)
            if at_end and leaving:
                rest = self.pop_unfinished_record()
                if rest:
                    # unfinished last record of the rotated file
                    buffer[: len(rest)] = rest
                    yield TailedRecords(buffer, len(rest), self._offset - len(rest))
                self._settled_version = written
                if rest or self.bytes_read > before:
                    self.has_more = True
                else:
                    has_next = True
            elif at_end and time.time() - facts.st_mtime > SETTLED_S:
                self._settled_version = written
                self._park()
        finally:
            if len(_spare) < SPARE_BUFFERS:
                _spare.append(buffer)
        if has_next:  # only now, so that it takes the same buffer
            yield from self.read_chunks(most_bytes, should_stop)

    def pop_unfinished_record(self) -> bytes:
        """Return the unfinished record, once: for the last read after the writer has ended."""
        closed = self._fd < 0
        if closed and self._offset > self._record_start:
            self._reopen(self._stat())
        rest = _pread(self._fd, self._offset - self._record_start, self._record_start)
        self._record_start += len(rest)
        if closed:
            self.close()
        return rest

    def read_bar_state(self) -> bytes:
        """The unfinished record if it is the newest state of a progress bar; else empty. It stays unfinished.

        Bars that write a return before each state, as tqdm does, end a state only with the next one. A state is written
        in one piece, unless its end shows that it may not be.
        """
        size = self._offset - self._record_start
        if not self._record_start or not 0 < size <= STATE_BYTES:
            return b""
        text = _pread(self._fd, size + 1, self._record_start - 1)
        return text[1:] if text[:1] == b"\r" and text[-1] not in NUMBER_BYTES else b""

    def reread(self, offset: int, size: int) -> bytes:
        """Read text of the current generation again; short or empty if the file no longer has it."""
        try:
            shrunk = os.fstat(self._fd).st_size < self._offset
        except OSError:
            return b""
        return b"" if shrunk else _pread(self._fd, size, offset)

    def skip_older(self, since: float | None) -> None:
        """Skip present text if nothing was written since ``since``: it is another job's log.

        For an unread tail. The next byte begins a record, because the earlier writer has ended.
        """
        found = self._stat()
        if since is None or found is None or found.st_mtime >= since:
            return
        try:
            if self._open(self.path):
                self.size = self._record_start = self._offset = os.fstat(self._fd).st_size
                start = max(0, self.size - MARK_BYTES)
                self._mark = _pread(self._fd, self.size - start, start)
                self._is_at_top = self.size == 0
                self._park()
        except OSError as error:
            self._record_failure(error)

    def position(self) -> TailPosition:
        """Return the position for ``restore``. An unfinished record will be read again."""
        inode = self._file[1] if self._file is not None else self._inode
        where = (0, 0, "") if self._is_at_top else (self._record_start, self._offset, self._mark.hex())
        return TailPosition(self._resolved_path, inode, *where, self.generation, self.bytes_read)

    @classmethod
    def restore(cls, path: str, position: TailPosition) -> "LogTail":
        """Continue where another tail was. Raises ValueError if that is impossible."""
        tail = cls(path)
        tail._resolved_path, tail._inode, tail._record_start, tail._offset, mark = position[:5]
        tail.generation, tail.bytes_read = position[5:]
        tail._mark, tail._is_at_top = bytes.fromhex(mark), tail._offset == 0
        begin, end = tail._record_start, tail._offset
        if not 0 <= begin <= end < begin + CHUNK_BYTES or len(tail._mark) > min(end, MARK_BYTES):
            raise ValueError(f"an impossible position in {path}: {position}")
        return tail

    # -- choice of file ------------------------------------------------------------------------------

    def _choose_file(self) -> tuple[os.stat_result, bool] | None:
        """Open the file to read now. Return its stat, and whether to leave it at its end."""
        self.problem = None
        self._waiting_bytes = 0
        found = self._stat()
        if self._parked is not None:
            if self.problem is not None:
                return None
            if found is not None and _file_identity(found) == self._parked:
                self.size, self.mtime = found.st_size, found.st_mtime
                return None
        if self._inode is not None:
            self._reopen(found)
            if self._inode is not None:
                return None  # out of reach for now
            if self._parked is not None:
                self.problem = None  # all text was skipped: nothing that was read is lost
        self._parked = None
        if self._file is None:
            if found is None or not self._open(self.path):
                return None
            return os.fstat(self._fd), False
        if found is not None and (found.st_dev, found.st_ino) == self._file:
            return found, False
        old = os.fstat(self._fd)
        if self._lacks_next_file(old, found):
            if not self._is_deleted(old, found):
                return old, False
            if self._has_unread(old):
                return old, True
            self._drop_file()
            self._restart_from_top()
            return None
        if found is None:  # the next file was moved away as well
            return (old, True) if self._has_unread(old) else self._switch_to_next(old, None)
        if not old.st_nlink and found.st_size >= old.st_size and self._switch_to_copy(found):
            return os.fstat(self._fd), False
        if self._has_unread(old):
            self._waiting_bytes = found.st_size
            return old, True
        return self._switch_to_next(old, found)

    def _is_deleted(self, old: os.stat_result, found: os.stat_result | None) -> bool:
        """Whether the file was deleted and has had neither writes nor a successor for ``DELETED_S``."""
        if old.st_nlink or found is not None or self.problem is not None:
            self._deleted_since = None
            return False
        now, written = time.monotonic(), _write_version(old)
        if self._deleted_since is None or self._deleted_since[1] != written:
            self._deleted_since = now, written
        return now - self._deleted_since[0] >= DELETED_S

    def _park(self) -> None:
        """Close a file whose whole text was skipped, unless it was written just now."""
        if self._file is None or self.bytes_read or not self._offset:
            return
        found = self._stat()
        if (
            found is not None
            and (found.st_dev, found.st_ino, found.st_size) == (*self._file, self._offset)
            and time.time() - found.st_mtime > SETTLED_S
        ):
            self.close()
            self._parked = _file_identity(found)

    def _has_unread(self, old: os.stat_result) -> bool:
        return (
            _write_version(old) != self._settled_version
            or old.st_size != self._offset
            or self._offset > self._record_start
        )

    def _lacks_next_file(self, old: os.stat_result, found: os.stat_result | None) -> bool:
        """Whether the next file is missing or empty: a writer may use the old one until it opens that."""
        if found is None or found.st_size:
            return found is None and self._next_fd < 0
        if self._next_fd < 0:
            self._next_fd = self._open_descriptor(self._successor(old, found) or self.path)
        return self._next_fd < 0 or os.path.samestat(os.fstat(self._next_fd), found)

    def _stat(self) -> os.stat_result | None:
        """Stat of the regular file at the path, or None."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self.problem = getattr(error, "strerror", None) or str(error)
            return None
        if not stat.S_ISREG(found.st_mode):
            self.problem = FILE_KINDS.get(stat.S_IFMT(found.st_mode), "is not a regular file")
            return None
        return found

    def _reopen(self, found: os.stat_result | None) -> None:
        """Reopen the file that was read before: by its inode at the path, or in its old directory."""
        place = self.path if found is not None and found.st_ino == self._inode else self._find_renamed()
        if self.problem is not None or (place is not None and not self._open(place)):
            return  # out of reach for now
        self._inode = None
        if place is not None and self._has_same_text(self._fd):
            return
        if place is None or not (place == self.path or self._split_rotated_name(os.path.basename(place))):
            self._drop_file()  # another file that reused the inode
            if found is not None and self._switch_to_copy(found):
                return
        if self._offset:
            self._restart_from_top()
            self.problem = "its earlier content is gone: it is read from the top"

    def _drop_file(self) -> None:
        self.close()
        self._file, self._inode, self.size = None, None, 0

    def _has_same_text(self, fd: int) -> bool:
        """Whether this file has the text read before our position."""
        return _pread(fd, len(self._mark), self._offset - len(self._mark)) == self._mark

    def _restart_from_top(self) -> None:
        self._reset()
        self.generation += 1

    def _open_descriptor(self, path: str) -> int:
        """Open a regular file for reading; -1 on failure."""
        try:
            # a FIFO that just appeared at this path must not block
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except FileNotFoundError:
            return -1
        except OSError as error:
            self.problem = error.strerror
            return -1
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
        except OSError as error:
            self.problem = error.strerror
        os.close(fd)
        return -1

    def _open(self, path: str) -> bool:
        """Make this the current file; the position stays."""
        fd = self._open_descriptor(path)
        if fd < 0:
            return False
        self._switch_to(fd, os.path.realpath(path))
        return True

    def _switch_to(self, fd: int, path: str) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        facts = os.fstat(fd)
        self._fd, self._file, self._resolved_path = fd, (facts.st_dev, facts.st_ino), path
        self._settled_version = self._deleted_since = None

    def _find_renamed(self) -> str | None:
        """Find the current file by its inode in its directory."""
        inode = self._inode if self._file is None else self._file[1]
        directory = os.path.dirname(self._resolved_path)
        try:
            with os.scandir(directory or ".") as entries:
                for entry in entries:
                    if entry.inode() == inode and entry.is_file(follow_symlinks=False):
                        return entry.path
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self.problem = error.strerror
        return None

    def _switch_to_copy(self, found: os.stat_result) -> bool:
        """Continue in the file at the path if it is a copy of the one that was read."""
        if len(self._mark) < COPY_MARK_BYTES or found.st_size < self._offset:
            return False
        fd = self._open_descriptor(self.path)
        if fd < 0:
            return False
        if not self._has_same_text(fd):
            os.close(fd)
            return False
        self._switch_to(fd, os.path.realpath(self.path))
        if self._next_fd >= 0:  # this file, while it was empty
            os.close(self._next_fd)
            self._next_fd = -1
        return True

    def _switch_to_next(self, old: os.stat_result, found: os.stat_result | None) -> tuple[os.stat_result, bool] | None:
        """Move from a file read to its end to the next one."""
        if self._next_fd >= 0:
            self._switch_to(self._next_fd, os.path.realpath(self.path))
            self._next_fd = -1
        else:
            following = self._successor(old, found) if found is not None else None
            if not (following is not None and self._open(following)) and not self._open(self.path):
                return None
        self._restart_from_top()
        now = os.fstat(self._fd)
        leaving = found is not None and not os.path.samestat(now, found)
        self._waiting_bytes = found.st_size if found is not None and leaving else 0
        return now, leaving

    def _successor(self, old: os.stat_result, found: os.stat_result) -> str | None:
        """Path of the file rotated away after this one, if several were since the last read.

        ``x.log.1`` follows ``x.log.2`` (or ``x.log.3`` does, if the times show that). Dates, at the end of the name or
        before its extension, follow their order.
        """
        place = self._find_renamed()
        if place is None:
            return None
        directory, name = os.path.split(place)
        rotation = self._split_rotated_name(name)
        if rotation is None:
            return None
        head, middle, tail = rotation
        number, shape = SEPARATED_NUMBER.fullmatch(middle), DIGIT.sub("0", middle)
        ranked: list[tuple[int, int, str, str]] = []
        try:
            with os.scandir(directory or ".") as entries:
                for entry in entries:
                    other = _rotation_part(entry.name, head, tail)
                    if other is None or other == middle:
                        continue
                    if number is None:
                        if DIGIT.sub("0", other) != shape or other < middle:
                            continue
                        rank = (0, 0, other)
                    else:
                        value = SEPARATED_NUMBER.fullmatch(other)
                        if value is None or other[0] != middle[0]:
                            continue
                        step = int(value[1]) - int(number[1])
                        rank = (int(step > 0), abs(step), "")
                    facts = entry.stat(follow_symlinks=False)
                    if (
                        stat.S_ISREG(facts.st_mode)
                        and facts.st_ino != found.st_ino
                        # a higher number must be clearly newer, or two files of the same time would alternate
                        and facts.st_mtime_ns >= old.st_mtime_ns + rank[0]
                    ):
                        ranked.append((*rank, entry.path))
        except OSError:
            return None
        return min(ranked)[-1] if ranked else None

    def _split_rotated_name(self, name: str) -> tuple[str, str, str] | None:
        """Split a name that rotation gave this log around the number or date; None for other names."""
        base = os.path.basename(os.path.realpath(self.path))
        for head, tail in ((base, ""), os.path.splitext(base)):
            if middle := _rotation_part(name, head, tail):
                return head, middle, tail
        return None

    # -- reading it ------------------------------------------------------------------------------

    def _record_failure(self, error: OSError) -> None:
        """Record a stale handle or a failing disk; the next read reopens the file and continues."""
        self.problem = error.strerror or str(error)
        self.close()
        self._settled_version = None

    def _read(
        self, buffer: bytearray, most_bytes: int, should_stop: Callable[[], bool] | None, end_offset: int | None
    ) -> Generator[TailedRecords, None, bool]:
        """Yield pieces of the open file, to its end or at least to ``end_offset``. Return whether that was reached."""
        view, held, left = memoryview(buffer), self._offset - self._record_start, most_bytes
        back = max(0, len(self._mark) - held)
        before = bytearray(back)
        try:
            # read the text before our position and the unfinished record again, with the new text
            most = min(CHUNK_BYTES, held + left)
            filled = os.preadv(self._fd, [before, view[:most]], self._record_start - back) - back
            mark = before if not held else before + view[max(0, held - len(self._mark)) : held]
            if filled < held or mark != self._mark:
                self._restart_from_top()
                held, filled = 0, os.preadv(self._fd, [view[: min(CHUNK_BYTES, left)]], 0)
            while filled > held:
                if buffer[filled - 1] == RETURN:
                    filled += os.preadv(self._fd, [view[filled : filled + 1]], self._record_start + filled)
                self.bytes_read += filled - held
                left -= filled - held
                mark = buffer[max(held, filled - MARK_BYTES) : filled]
                self._mark = bytes(mark if len(mark) == MARK_BYTES else self._mark + mark)[-MARK_BYTES:]
                self._offset = self._record_start + filled
                if self._is_at_top and (dropped := self._count_leading_nuls(buffer, filled)):
                    filled, held = filled - dropped, max(0, held - dropped)
                    view[:filled] = view[dropped : dropped + filled]
                    self._record_start += dropped
                    if self._is_at_top:
                        self._skip_hole()
                end = buffer.rfind(b"\n", held, filled) + 1
                end = max(end, buffer.rfind(b"\r", max(end, held), filled) + 1)
                if not end and filled >= CHUNK_BYTES:
                    end = filled
                held = filled - end
                if end:
                    self._record_start += end
                    yield TailedRecords(buffer, end, self._record_start - end)
                    if held:
                        view[:held] = view[end:filled]
                if end_offset is not None and self._offset >= end_offset:
                    return True  # at the end, in one read
                if left <= 0 or (should_stop is not None and should_stop()):
                    return False
                filled = held + os.preadv(self._fd, [view[held : min(CHUNK_BYTES, held + left)]], self._offset)
        except OSError as error:
            self._record_failure(error)
            return False
        return True

    def _count_leading_nuls(self, buffer: bytearray, filled: int) -> int:
        """Count NULs at the top of a file: a writer that keeps its position after truncation leaves a hole."""
        nuls = filled - len(buffer[:filled].lstrip(b"\0")) if buffer[0] == 0 else 0
        self._is_at_top = nuls == filled
        return nuls

    def _skip_hole(self) -> None:
        """Skip a hole in the file, if the file system reports it."""
        try:
            place = os.lseek(self._fd, self._offset, os.SEEK_DATA)
        except OSError:
            return  # no data up to the end, or not supported: NUL is read until there is more
        self._mark = (self._mark + bytes(min(MARK_BYTES, place - self._offset)))[-MARK_BYTES:]
        self._record_start = self._offset = place


def rotated_from(name: str) -> Iterator[str]:
    """Yield names of logs that rotation may have renamed to ``name``.

    ``rank_0_1.log`` yields none: a short number after ``_`` or ``-`` may belong to another log.
    """
    stem, extension = os.path.splitext(name)
    for head, tail in ((name, ""), (stem, extension)):
        for place in range(1, len(head)):
            if not ROTATED.fullmatch(head, place):
                continue
            number = SEPARATED_NUMBER.fullmatch(head, place)
            if number is None or head[place] == "." or os.path.splitext(head[:place])[1]:
                yield head[:place] + tail


def _rotation_part(name: str, head: str, tail: str) -> str | None:
    """The number or date that rotation inserted into a name, or None."""
    middle = name[len(head) : len(name) - len(tail)]
    known = name.startswith(head) and name.endswith(tail) and ROTATED.fullmatch(middle)
    return middle if known else None


def _write_version(facts: os.stat_result) -> tuple[int, int, int]:
    """Fields that change with a write."""
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _file_identity(facts: os.stat_result) -> tuple[int, ...]:
    """Identity of the file, and fields that change with a write."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _pread(fd: int, size: int, offset: int) -> bytes:
    """Read text at ``offset``; empty if that fails."""
    try:
        return os.pread(fd, size, offset)
    except OSError:
        return b""
