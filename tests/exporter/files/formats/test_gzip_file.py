"""gzip: small files unpack up to their checksums; of large ones only the first part is tried."""

import gzip
import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.formats import FileCheck
from exporter.files.formats.gzip_file import MAGIC
from exporter.files.formats.source import MOST_BYTES
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

TEXT = b"".join(b"line %d of a text\n" % number for number in range(500))
SMALL = gzip.compress(TEXT)
LARGE = gzip.compress(random.Random(1).randbytes(2 * MOST_BYTES), 1)


def named(name: bytes) -> bytes:
    """A member whose header has a name, a comment, an extra field and its own checksum."""
    head = MAGIC + b"\x08\x1e" + bytes(6) + b"\x04\0data" + name + b"\0" + b"a comment\0"
    engine = zlib.compressobj(wbits=-15)
    body = engine.compress(TEXT) + engine.flush()
    return head + struct.pack("<H", zlib.crc32(head) & 0xFFFF) + body + struct.pack("<II", zlib.crc32(TEXT), len(TEXT))


@pytest.mark.parametrize(
    "data",
    [
        SMALL,
        gzip.compress(b""),
        gzip.compress(TEXT, 0),
        SMALL * 3,
        gzip.compress(b"") * 2 + SMALL,
        SMALL + bytes(512),
        named(b"a.txt"),
        gzip.compress(bytes(20 << 20)),
        gzip.compress(random.Random(2).randbytes(MOST_BYTES - 1000)),
    ],
    ids=range(9),
)
def test_complete_files_are_valid(data: bytes) -> None:
    assert check_bytes(data, "a.gz") == check_bytes(data) == FileCheck("valid", "gzip")


@given(st.lists(st.binary(), min_size=1, max_size=4))
def test_output_of_the_gzip_module_is_valid(texts: list[bytes]) -> None:
    assert check_bytes(b"".join(map(gzip.compress, texts))).state == "valid"


def test_every_truncation_is_detected() -> None:
    for data in (SMALL, named(b"a"), gzip.compress(random.Random(3).randbytes(300_000))):
        assert states(truncated(data), "a.gz") == {"invalid"}
    two = SMALL + SMALL
    for cut in truncated(two):
        assert check_bytes(cut, "a.gz").state == ("valid" if len(cut) == len(SMALL) else "invalid")
    assert check_bytes(SMALL[:-1], "a.gz").reason == "ends in the middle of its data"


def test_relevant_flipped_bytes_are_detected() -> None:
    for data in flipped(SMALL, len(SMALL)):
        unpacked = None
        try:
            unpacked = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            pass
        whole = unpacked == TEXT and not data[3] & 0xE0  # Python ignores reserved flags
        assert check_bytes(data, "a.gz").state == ("valid" if whole else "invalid")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (SMALL + b"garbage", "has 7 bytes after its end that are not gzip data"),
        (SMALL + bytes(5) + b"x", "has 6 bytes after its end that are not gzip data"),
        (SMALL[:-8] + bytes(4) + SMALL[-4:], "cannot be unpacked: incorrect data check"),
        (SMALL[:-4] + bytes(4), "cannot be unpacked: incorrect length check"),
        (TEXT, "is named .gz, but does not begin like one"),
        (b"\x1f", "is named .gz, but does not begin like one"),
    ],
)
def test_the_reason_names_the_defect(data: bytes, reason: str) -> None:
    assert check_bytes(data, "a.gz") == FileCheck("invalid", "gzip", reason)


def test_only_the_first_part_of_a_large_file_is_unpacked() -> None:
    for data in (LARGE, LARGE[:-50], SMALL * 20_000):
        assert len(data) > MOST_BYTES
        assert check_bytes(data, "a.gz") == FileCheck("unknown", "gzip", "only its first 64 KiB were checked")
    assert check_bytes(SMALL[:500] + LARGE, "a.gz").state == "invalid"
    assert check_bytes(SMALL + LARGE[3:], "a.gz").state == "invalid"


def test_the_number_of_unpacked_bytes_is_bounded() -> None:
    bomb = gzip.compress(bytes(65 << 20))
    assert check_bytes(bomb, "a.gz") == FileCheck("unknown", "gzip", "is more than 64 MiB when unpacked")
    members = gzip.compress(bytes(13 << 20)) * 5
    assert check_bytes(members, "a.gz").state == "unknown"
