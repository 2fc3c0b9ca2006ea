"""CSV files of measurements that sidecars write into the job's output directory."""

import contextlib
import errno
import os
import re
import stat

NAME = "gpu_metrics"
MOST_BYTES = 64 << 20  # a file that would grow beyond this is moved to `.1`, and a new one starts
_MOST_NODE_LETTERS = 100
_UNSAFE_CHARACTER = re.compile(r"[^A-Za-z0-9_.-]")
_SIDECAR_CSV = re.compile(rf"{NAME}(?:_[A-Za-z0-9_.-]{{1,{_MOST_NODE_LETTERS + 16}}})?\.csv(?:\.1)?")
_OPEN_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


def csv_file_name(node: str, node_index: int) -> str:
    """Name of a node's file: appends of several machines to one network file can mix."""
    if node_index == 0:
        return f"{NAME}.csv"
    word = _UNSAFE_CHARACTER.sub("_", node)[:_MOST_NODE_LETTERS]
    if word != node or not word:
        word = f"{word}_{node_index}"  # another node may map to the same word
    return f"{NAME}_{word}.csv"


def is_sidecar_csv(name: str) -> bool:
    """Whether a sidecar writes a file of this name, or has moved one to it."""
    return _SIDECAR_CSV.fullmatch(name) is not None


class CsvFile:
    """Append lines to a file, as a watch of ``exporter.machine.file_host``: its file system may hang.

    A watch only receives the time, so the caller first stores the lines of each poll in another file.
    """

    def __init__(self, directory: str, name: str, header: str, source: str) -> None:
        """Append to file ``name`` with ``header`` as its first line.

        ``source`` is the file with the lines to append, each with its newline.
        """
        self._path = os.path.join(directory, name)
        self._header = header.encode() + b"\n"
        self._source = source

    def poll(self, _now: float) -> None:
        """Append the lines; raise OSError and leave none of them if not all can be written."""
        with open(self._source, "rb") as source:
            lines = source.read()
        if not self._append(lines):
            os.replace(self._path, f"{self._path}.1")
            self._append(lines)

    def _append(self, lines: bytes) -> bool:
        """Append the lines; return False if they do not fit."""
        fd = os.open(self._path, _OPEN_FLAGS, 0o644)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise OSError(errno.EINVAL, "Not a regular file", self._path)
            size = facts.st_size
            start = os.pread(fd, len(self._header), 0)
            if not self._header.startswith(start):
                raise OSError(errno.EEXIST, "Another file has this name", self._path)
            if size < len(self._header):
                if size:
                    os.ftruncate(fd, 0)  # partial header after a crash
                size, lines = 0, self._header + lines
            elif size + len(lines) > MOST_BYTES:
                return False
            elif os.pread(fd, 1, size - 1) != b"\n":
                lines = b"\n" + lines  # partial line after a crash
            if os.write(fd, lines) < len(lines):
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
            return True
        finally:
            os.close(fd)
