"""TFRecord: from record to record, and checksums."""

import random
import struct

import pytest

from exporter.files.formats import FileCheck
from exporter.files.formats.source import MOST_BYTES
from exporter.files.formats.tfrecord import masked_crc32c
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

REAL = bytes.fromhex(
    "2400000000000000422b804d0a220a0f0a066c656e67746812051a030a01000a0f0a047465787412070a050a036162639915095b"
    "2400000000000000422b804d0a220a0f0a066c656e67746812051a030a01010a0f0a047465787412070a050a03616263eb1e535f"
)  # two records that tfrecord 1.14 has written with another implementation of the checksum


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def large(length: int, count: int) -> bytes:
    """Records of this length, with one checksum for all."""
    return record(random.Random(1).randbytes(length)) * count


def test_the_checksum_is_that_of_rfc_3720() -> None:
    crc = 0xE3069283
    assert masked_crc32c(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "records"),
    [
        (REAL, 2),
        (record(b""), 1),
        (record(b"") * 1000, 1000),
        (record(b"a" * 300) + record(bytes(5000)), 2),
        (large(40_000, 3), 3),
        (large(100, 4000), 4000),
        (large(300_000, 40), 40),
    ],
    ids=range(7),
)
def test_complete_files_are_valid(data: bytes, records: int) -> None:
    for name in ("a.tfrecord", "events.out.tfevents.1", "a.tfrecord-00000-of-00002"):
        assert check_bytes(data, name) == FileCheck("valid", "tfrecord", None, records)


def test_every_truncation_is_detected() -> None:
    for cut in truncated(REAL):
        assert check_bytes(cut, "a.tfrecord").state == ("valid" if len(cut) == len(REAL) // 2 else "invalid")
    assert states(truncated(large(40_000, 3)), "a.tfrecord") == {"invalid"}
    assert check_bytes(REAL[:-1], "a").reason == "ends 1 bytes before the end of record 2"
    assert check_bytes(REAL[:60], "a").reason == "ends in the middle of the header of record 2"


def test_every_flipped_byte_is_detected() -> None:
    assert states(flipped(REAL, len(REAL)), "a.tfrecord") == {"invalid"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (REAL[:20] + b"!" + REAL[21:], "the data of record 1 does not match its checksum"),
        (REAL + b"garbage garbage", "the length of record 3 does not match its checksum"),
        (REAL + bytes(100), "the length of record 3 does not match its checksum"),
        (b"garbage garbage", "is named .tfrecord, but does not begin like one"),
        (REAL[:11], "is named .tfrecord, but does not begin like one"),
    ],
)
def test_the_reason_names_the_defect(data: bytes, reason: str) -> None:
    assert check_bytes(data, "a.tfrecord") == FileCheck("invalid", "tfrecord", reason)


@pytest.mark.parametrize("length", [0, 90, 5000, 30_000])
def test_both_ends_of_a_very_large_file_are_checked(length: int) -> None:
    data = large(length, 3 * MOST_BYTES // (length + 16) + 1 if length < 4096 else 1500)
    found = check_bytes(data, "a.tfrecord")
    assert (found.state, found.format, found.records) == ("valid", "tfrecord", None)
    assert found.reason is not None
    assert found.reason.startswith("only its first ")
    cuts = [data[:-cut] for cut in (1, 4, 5, 15, 17 + length // 2, 20 + length, 17 * (16 + length) + 3)]
    assert states(iter(cuts), "a.tfrecord") <= {"invalid", "unknown"}
    assert length > 5000 or states(iter(cuts), "a.tfrecord") == {"invalid"}
    assert check_bytes(data + b"x", "a.tfrecord").state != "valid"


def test_an_end_part_without_the_start_of_a_record_is_unknown() -> None:
    data = large(100, 30_000) + record(random.Random(2).randbytes(300_000))
    assert check_bytes(data, "a.tfrecord") == FileCheck(
        "unknown", "tfrecord", "its last record is longer than the part that was checked"
    )


def test_records_within_a_record_are_not_taken_for_its_end() -> None:
    inner = large(100, 200)
    whole = large(100, 30_000) + record(inner[:-50]) + record(b"last")
    assert check_bytes(whole, "a.tfrecord").state == "valid"


def test_zeros_at_the_end_are_detected_quickly() -> None:
    assert check_bytes(large(100, 30_000) + bytes(1 << 20), "a.tfrecord").state in ("invalid", "unknown")
