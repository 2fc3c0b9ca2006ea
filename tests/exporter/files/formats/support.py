"""Files of any content, in memory, and checks of them within their bounds."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

from exporter.files.formats import FileCheck, check_file
from exporter.files.formats.source import MOST_BYTES, MOST_READS, FileSource

STATES = {"valid", "invalid", "empty", "unfinished", "unknown"}


@contextmanager
def source(data: bytes, name: str = "file") -> Iterator[FileSource]:
    """A file with this content."""
    fd = os.memfd_create("source")
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], written)
        yield FileSource(fd, name)
    finally:
        os.close(fd)


def check_bytes(data: bytes, name: str = "file") -> FileCheck:
    """The result of a check, which must respect its bounds and give a reason."""
    with source(data, name) as opened:
        found = check_file(opened)
        assert opened.bytes_read <= MOST_BYTES
        assert opened.reads <= MOST_READS + 1
    assert found.state in STATES
    assert found.state == "valid" or found.reason
    assert found.reason is None or found.reason.isprintable()
    return found


def states(texts: Iterator[bytes], name: str) -> set[str]:
    """All states that checks of these files give."""
    return {check_bytes(text, name).state for text in texts}


def truncated(data: bytes, places: int = 200) -> Iterator[bytes]:
    """The data truncated at every length, or at random ones; never empty, never whole."""
    ends = range(1, len(data))
    chosen = random.Random(len(data))
    for end in ends if len(ends) <= places else chosen.sample(ends, places):
        yield data[:end]


def flipped(data: bytes, length: int) -> Iterator[bytes]:
    """The data with each of its first bytes changed, in one bit and in all bits."""
    for place in range(min(length, len(data))):
        for mask in (1, 0x80, 0xFF):
            changed = bytearray(data)
            changed[place] ^= mask
            yield bytes(changed)
