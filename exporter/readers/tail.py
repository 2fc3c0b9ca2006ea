"""New records of a growing log, by polling: inotify is blind on network file systems.

A record ends at a newline or at a carriage return, since progress bars redraw
their line with the latter. What follows the last record end stays for the next
look. The file is read in chunks into one kept buffer, so memory is bounded
whatever the size of the file or of a record.
"""

import os
from collections.abc import Iterator

CHUNK_BYTES = 1 << 20


class LogTail:
    """One log file, followed by path.

    Starts again from the top when the path leads to another inode or the file has shrunk
    (rotation, truncation). A file that is not there yet, or not readable, gives nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes_read = 0
        """Bytes read since the first look, over all generations of the file."""
        self.size = 0
        """Size of the file at the last look."""
        self._fd = -1
        self._inode: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""

    @property
    def lag_bytes(self) -> int:
        """Bytes of the file that have not been read yet."""
        return max(0, self.size - self._offset)

    def close(self) -> None:
        """Close the file; the next look opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def skip_older(self, moment: float | None) -> None:
        """Pass over what is in the file, if nothing has been written to it since ``moment``: another job's log."""
        try:
            found = os.stat(self.path)
        except OSError:
            return
        if moment is not None and found.st_mtime < moment and self._open():
            self._offset = found.st_size

    def read(self, most_bytes: int = 64 * CHUNK_BYTES) -> Iterator[bytes]:
        """Chunks of whole records that came since the last look, at most about ``most_bytes``."""
        left = most_bytes
        if self._fd >= 0 and self._is_replaced():
            # the last lines of the file that was rotated away, a line without an end included
            yield from self._chunks(left)
            if rest := self.rest():
                yield rest
        if self._open():
            yield from self._chunks(left)

    def _is_replaced(self) -> bool:
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) != self._inode

    def _chunks(self, left: int) -> Iterator[bytes]:
        while left > 0:
            try:
                chunk = os.pread(self._fd, min(CHUNK_BYTES, left), self._offset)
            except OSError:
                self._reset()
                return
            if not chunk:
                break
            self._offset += len(chunk)
            self.bytes_read += len(chunk)
            left -= len(chunk)
            end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            if end:
                whole, self._rest = self._rest + chunk[:end], chunk[end:]
                yield whole
            elif len(self._rest) + len(chunk) > CHUNK_BYTES:
                # a record longer than a chunk is passed on in pieces
                whole, self._rest = self._rest + chunk, b""
                yield whole
            else:
                self._rest += chunk

    def rest(self) -> bytes:
        """The record without an end, once: for the last look at a file whose writer has ended."""
        rest, self._rest = self._rest, b""
        return rest

    def _open(self) -> bool:
        try:
            found = os.stat(self.path)
        except OSError:
            if self._fd < 0:
                self._inode = None
                return False
            return True  # deleted or out of reach: what is still readable through the descriptor counts
        inode = (found.st_dev, found.st_ino)
        if inode != self._inode or found.st_size < self._offset:
            self._reset()
            try:
                # a FIFO at this path must not block the look
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError:
                return False
            self._inode = inode
        elif self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            except OSError:
                return False
        self.size = found.st_size
        return True

    def _reset(self) -> None:
        self.close()
        self._inode = None
        self._offset = 0
        self.size = 0
        self._rest = b""
