"""Logs that are there, as files: whether one can be searched, and its records."""

import os
import stat
from collections.abc import Callable, Iterator

from exporter.readers.tail import CHUNK_BYTES

PROBE_BYTES = 64 << 10
MOST_CONTROLS = 0.05
"""Share of control characters above which a file is no text."""

_CONTROLS = bytes(code for code in range(32) if code not in b"\b\t\n\v\f\r\x1b")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}
Read = Callable[[int, int], bytes]
"""Gives so many bytes of a log from an offset on, less where it ends."""


def why_not_readable(path: str) -> str | None:
    """Why a log cannot be read; None when it can."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return "is a directory; name the logs in it"
        if not stat.S_ISREG(mode):
            return "is not a regular file"
        with open(path, "rb"):
            return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def why_not_text(head: bytes) -> str | None:
    """Why a file that begins like this cannot be searched; None when it can."""
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"is compressed by {name}: unpack it first"
    text = head.lstrip(b"\0")  # a hole that a writer leaves when its log is truncated
    controls = len(text) - len(text.translate(None, _CONTROLS))
    if controls > MOST_CONTROLS * len(text):
        kind = "UTF-16" if text[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary"
        return f"is {kind}, not a text that can be searched"
    return None


def pieces(read: Read, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
    """A part of a log in pieces of whole records, each with its offset; a record of over 1 MiB in several."""
    while begin < end:
        text = read(begin, min(CHUNK_BYTES, end - begin))
        if not text:
            return
        if begin + len(text) < end:
            # a return at the end may be the first half of a record end
            cut = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)) + 1
            text = text[: cut or len(text)]
        yield text, begin
        begin += len(text)


def records_of(text: bytes) -> Iterator[tuple[int, bytes]]:
    """The records of a text that hold anything, each with the byte at which it begins."""
    start = 0
    for raw in text.replace(b"\r", b"\n").split(b"\n"):
        if raw:
            yield start, raw
        start += len(raw) + 1
