"""Zstandard: frames and blocks are gone through by their headers."""

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.formats import FileCheck
from tests.exporter.files.formats.support import flipped, states, truncated, verdict

SAMPLES = {
    name: base64.b64decode(text)
    for name, text in {
        "with a checksum": (
            "KLUv/WT4BjUDAIIIExGwJ2OAj0HEGAw1U1JSriaZS+WUu5xyl1PucspdTrnLKeWUu5xyl1PucspdTrnLKeWUu5xyl1PucspdTrnL"
            "CVAciGIEhsAwMojCgBB4qBHg778B4OcQEuFEmA8BAMALnECqApYNwt8="
        ),
        "without one": (
            "KLUv/WCoAaUDAIQDbGluZSAwIG9mIGEgdGV4dAoxMjM0NTYwMTIzNDU2MDEyMzQ1NjAxMjM0NTYwMTIzNDU2MDEyMzQoIODnhiCH"
            "MESQQxgiyCEMEeQQhghyCEMEOYQhAjmEIYIcwhBBDmGIIIcwRJBDGCLIIQwR5DiydCUw"
        ),
        "several blocks": (
            "KLUv/QRYxAMA1ANsaW5lIDAgb2YgYSB0ZXh0CmxpbmUgMTIzNDU2MDEyMzQ1NjAxMjM0NTYwMTIzNDU2MDEyMzQ1NjAxMjM0JyDg"
            "54YghzBEkEMYIsghDBHkEIYIcghDBDmEIQI5hCGCHMIQQQ5hiCCHMESQQxgiyCEMEY3chKQmdAIAlAJsMDEyMzQ1NjAxMjM0NTYw"
            "MTIzNDU2MDEyMzQ1NjAxMjM0NTYwMTIzNClQAQAGgiAIgiAIgiAIgiAIgiAIgiAIgiAIgiAIgiAIgmAQdAIAlAJsMDEyMzQ1NjAx"
            "MjM0NTYwMTIzNDU2MDEyMzQ1NjAxMjM0NTYwMTIzNClQAQAGgiAIgiAIgiAIgiAIgiAIgiAIgiAIgiAIgiAIgmAQAQAAlg3C3w=="
        ),
        "raw": "KLUv/SQ84QEA9bFlIkpYt5HfavHYMD5hzcS7hsPRxCcQPDRMQYnrLx571dR+RG/OwqPYEXNhEOV4G8zOppZ2LmEWxunJp3fqZg==",
        "repeated": "KLUv/aTgkwQAVAAAEAAAAQD7/znAAgIAEAADnwQALSjeJg==",
        "empty": "KLUv/SQAAQAAmenYUQ==",
    }.items()
}  # made by zstandard 0.25.0 (Zstandard 1.5.7)
ALL = b"".join(SAMPLES.values())


def skippable(data: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A5E, len(data)) + data


def large(blocks: int) -> bytes:
    """A frame of raw blocks as large as can be."""
    size = 128 << 10
    body = b"".join(
        (size << 3 | (number == blocks - 1)).to_bytes(3, "little") + bytes(size) for number in range(blocks)
    )
    return b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size * blocks) + body


@pytest.mark.parametrize("data", SAMPLES.values(), ids=SAMPLES)
def test_whole_files_are_valid(data: bytes) -> None:
    assert verdict(data, "a.zst") == verdict(data) == FileCheck("valid", "zstd")


@pytest.mark.parametrize(
    "data", [ALL, skippable(b"note") + ALL, ALL + skippable(b""), skippable(b"only"), large(40)], ids=range(5)
)
def test_frames_may_follow_each_other(data: bytes) -> None:
    assert verdict(data, "a.zst") == FileCheck("valid", "zstd")


def test_every_truncation_is_seen() -> None:
    ends: set[int] = set()
    for data in SAMPLES.values():
        assert states(truncated(data, 400), "a.zst") == {"invalid"}
        ends.add(len(data) + max(ends, default=0))
    for cut in truncated(ALL, 1000):
        assert verdict(cut, "a.zst").state == ("valid" if len(cut) in ends else "invalid")
    assert states(truncated(large(3), 50), "a.zst") == {"invalid"}
    assert verdict(SAMPLES["raw"][:-1], "a.zst").reason == "ends at least 1 bytes too early"


@pytest.mark.parametrize("data", SAMPLES.values(), ids=SAMPLES)
def test_a_flipped_byte_of_the_magic_number_is_seen(data: bytes) -> None:
    # one of them makes it the number of an older version
    assert [verdict(text, "a.zst").state for text in flipped(data, 4)].count("invalid") >= 11
    assert states(flipped(data, 20), "a.zst") <= {"valid", "invalid", "unknown"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (SAMPLES["raw"] + b"garbage", "has 7 bytes at byte 73 that begin no frame"),
        (SAMPLES["raw"] + b"ga", "ends at least 2 bytes too early"),
        (skippable(b"note")[:-1], "ends at least 1 bytes too early"),
        (skippable(b"note") + b"garbage", "has 7 bytes at byte 12 that begin no frame"),
        (b"\x28\xb5\x2f\xfd\x28\x00", "has a reserved bit set in the header of a frame"),
        (b"\x28\xb5\x2f\xfd\x20\x00\x07\x00\x00", "the header of the block at byte 6 is damaged"),
        (b"\x28\xb5\x2f\xfd\x20\x05\x21\x00\x00aaaa", "a frame is said to hold 5 bytes and has blocks for 4 to 4"),
        (b"no frame", "is named .zst, but does not begin like one"),
        (b"\x28\xb5", "is named .zst, but does not begin like one"),
    ],
)
def test_what_is_wrong_is_told(data: bytes, reason: str) -> None:
    assert verdict(data, "a.zst") == FileCheck("invalid", "zstd", reason)


def test_a_size_of_two_bytes_counts_from_256() -> None:
    head, block = b"\x28\xb5\x2f\xfd\x60", (300 << 3 | 1).to_bytes(3, "little") + bytes(300)
    assert verdict(head + struct.pack("<H", 300 - 256) + block, "a.zst").state == "valid"
    assert verdict(head + struct.pack("<H", 300) + block, "a.zst").state == "invalid"


def test_what_cannot_be_told_is_unknown() -> None:
    assert verdict(b"\x27\xb5\x2f\xfd" + bytes(50), "a.zst").reason == "is of a version before 0.8"
    assert verdict(skippable(b"note") + b"\x04\x22\x4d\x18" + bytes(9), "a.lz4").state == "unknown"
    blocks = b"\x28\xb5\x2f\xfd\x00\x58" + b"\x02\x00\x00a" * 400_000
    assert verdict(blocks, "a.zst") == FileCheck("unknown", "zstd", "cannot be checked within 1024 KiB of it")


@given(st.binary(max_size=60), st.integers(0, len(ALL)), st.integers(0, 60))
def test_any_bytes_are_looked_at(data: bytes, place: int, length: int) -> None:
    verdict(b"\x28\xb5\x2f\xfd" + data, "a.zst")
    verdict(ALL[:place] + data + ALL[place + length :], "a.zst")
