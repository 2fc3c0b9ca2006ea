"""Logs as files: whether one can be searched, and its records."""

import errno
import os
import stat
from collections.abc import Callable, Iterator

from exporter.logs.tail_reader import CHUNK_BYTES
from launcher.errors import LauncherError

PROBE_BYTES = 64 << 10
MOST_CONTROL_SHARE = 0.05  # share of control characters above which a file is not text

_CONTROLS = bytes(code for code in range(32) if code not in b"\b\t\n\v\f\r\x1b")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}
ReadRange = Callable[[int, int], bytes]  # offset, size -> bytes of a log; shorter at its end


class UnreadableLog(LauncherError):
    """A log that cannot be read; the message says why and what to do."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


def unreadable_reason(path: str) -> str | None:
    """Why a log cannot be read, and what to do; None if it can."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return "is a directory; name the logs in it"
        if not stat.S_ISREG(mode):
            return "is not a regular file; save its output to a file, and name that"
        with open(path, "rb"):
            return None
    except OSError as error:
        return os_error_text(error)
    except ValueError as error:
        return f"is not a file name ({error})"


def os_error_text(error: OSError) -> str:
    """The meaning of an OSError for users, and what to do."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "does not exist; check the name, which is relative to the working directory"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "is not readable for you; ask its owner, or run `chmod +r`"
    return f"cannot be read ({error.strerror}); is its file system mounted?"


def non_text_reason(head: bytes) -> str | None:
    """Why a file with this start cannot be searched; None if it can."""
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"is compressed with {name}; unpack it first"
    text = head.lstrip(b"\0")  # zeros that a writer leaves when its log is truncated
    controls = len(text) - len(text.translate(None, _CONTROLS))
    if controls > MOST_CONTROL_SHARE * len(text):
        kind = "UTF-16" if text[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary"
        return f"is {kind}, not a text that can be searched"
    return None


def read_chunks(read: ReadRange, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Chunks of a part of a log with their offsets; a record of over 1 MiB is split."""
    while begin < end:
        text = read(begin, min(CHUNK_BYTES, end - begin))
        if not text:
            return
        if begin + len(text) < end:
            # a final carriage return may be half of a record end
            cut = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)) + 1
            text = text[: cut or len(text)]
        yield text, begin
        begin += len(text)


def split_records(text: bytes) -> Iterator[tuple[int, bytes]]:
    """The records of a text that are not empty, each with its offset."""
    start = 0
    for raw in text.replace(b"\r", b"\n").split(b"\n"):
        if raw:
            yield start, raw
        start += len(raw) + 1
