"""Zstandard: frames and blocks are walked by their headers."""

import base64
import struct

import pytest

from exporter.files.formats import FileCheck
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

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
    """A frame of raw blocks of maximal size."""
    size = 128 << 10
    body = b"".join(
        (size << 3 | (number == blocks - 1)).to_bytes(3, "little") + bytes(size) for number in range(blocks)
    )
    return b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size * blocks) + body


@pytest.mark.parametrize("data", SAMPLES.values(), ids=SAMPLES)
def test_complete_files_are_valid(data: bytes) -> None:
    assert check_bytes(data, "a.zst") == check_bytes(data) == FileCheck("valid", "zstd")


@pytest.mark.parametrize(
    "data", [ALL, skippable(b"note") + ALL, ALL + skippable(b""), skippable(b"only"), large(40)], ids=range(5)
)
def test_frames_may_follow_one_another(data: bytes) -> None:
    assert check_bytes(data, "a.zst") == FileCheck("valid", "zstd")


def test_every_truncation_is_detected() -> None:
    ends: set[int] = set()
    for data in SAMPLES.values():
        assert states(truncated(data, 400), "a.zst") == {"invalid"}
        ends.add(len(data) + max(ends, default=0))
    for cut in truncated(ALL, 1000):
        assert check_bytes(cut, "a.zst").state == ("valid" if len(cut) in ends else "invalid")
    assert states(truncated(large(3), 50), "a.zst") == {"invalid"}
    assert check_bytes(SAMPLES["raw"][:-1], "a.zst").reason == "ends at least 1 bytes too early"


@pytest.mark.parametrize("data", SAMPLES.values(), ids=SAMPLES)
def test_a_flipped_byte_of_the_magic_number_is_detected(data: bytes) -> None:
    # one change gives the magic number of an older version
    assert [check_bytes(text, "a.zst").state for text in flipped(data, 4)].count("invalid") >= 11
    assert states(flipped(data, 20), "a.zst") <= {"valid", "invalid", "unknown"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (SAMPLES["raw"] + b"garbage", "has 7 bytes at byte 73 that are not a frame"),
        (SAMPLES["raw"] + b"ga", "ends at least 2 bytes too early"),
        (skippable(b"note")[:-1], "ends at least 1 bytes too early"),
        (skippable(b"note") + b"garbage", "has 7 bytes at byte 12 that are not a frame"),
        (b"\x28\xb5\x2f\xfd\x28\x00", "has a reserved bit set in the header of a frame"),
        (b"\x28\xb5\x2f\xfd\x20\x00\x07\x00\x00", "the header of the block at byte 6 is damaged"),
        (b"\x28\xb5\x2f\xfd\x20\x05\x21\x00\x00aaaa", "a frame declares 5 bytes, but its blocks give 4 to 4"),
        (b"no frame", "is named .zst, but does not begin like one"),
        (b"\x28\xb5", "is named .zst, but does not begin like one"),
    ],
)
def test_the_reason_names_the_defect(data: bytes, reason: str) -> None:
    assert check_bytes(data, "a.zst") == FileCheck("invalid", "zstd", reason)


def test_a_two_byte_size_counts_from_256() -> None:
    head, block = b"\x28\xb5\x2f\xfd\x60", (300 << 3 | 1).to_bytes(3, "little") + bytes(300)
    assert check_bytes(head + struct.pack("<H", 300 - 256) + block, "a.zst").state == "valid"
    assert check_bytes(head + struct.pack("<H", 300) + block, "a.zst").state == "invalid"


def test_an_undecidable_file_is_unknown() -> None:
    assert check_bytes(b"\x27\xb5\x2f\xfd" + bytes(50), "a.zst").reason == "is of a Zstandard version before 0.8"
    assert check_bytes(skippable(b"note") + b"\x04\x22\x4d\x18" + bytes(9), "a.lz4").state == "unknown"
    blocks = b"\x28\xb5\x2f\xfd\x00\x58" + b"\x02\x00\x00a" * 400_000
    assert check_bytes(blocks, "a.zst") == FileCheck("unknown", "zstd", "cannot be checked by reading at most 1024 KiB")
