"""HDF5: the end that the superblock names, and the rows of the datasets in the root group."""

import struct

import pytest

from exporter.files.formats import FileCheck
from exporter.files.formats.hdf5_objects import lookup3
from tests.exporter.files.formats.sample_files import sample
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

SAMPLES = {bound: sample(f"rows-{bound}.h5") for bound in ("earliest", "v108", "latest")}
VALID = FileCheck("valid", "hdf5", None, 50)
EARLIEST, LATEST = SAMPLES["earliest"], SAMPLES["latest"]
END_OF_FILE = {"earliest": 40, "v108": 28, "latest": 28}  # offset of the end of file in the superblock


def resealed(data: bytes | bytearray) -> bytes:
    """A file with a changed superblock of version 2 or 3 and a corrected checksum."""
    return bytes(data[:44] + struct.pack("<L", lookup3(bytes(data[:44]))) + data[48:])


@pytest.mark.parametrize(("data", "expected"), [(b"", 0xDEADBEEF), (b"Four score and seven years ago", 0x17770551)])
def test_the_checksum_equals_the_published_values(data: bytes, expected: int) -> None:
    assert lookup3(data) == expected  # from driver5 of lookup3.c


@pytest.mark.parametrize("bound", SAMPLES)
def test_each_kind_of_file_is_valid_and_has_the_rows_of_its_longest_dataset(bound: str) -> None:
    data = SAMPLES[bound]
    assert data[8] == {"earliest": 0, "v108": 2, "latest": 3}[bound]
    assert check_bytes(data) == check_bytes(data, "a.h5") == VALID


@pytest.mark.parametrize("bound", SAMPLES)
def test_a_truncated_file_is_invalid_and_a_longer_one_is_undecided(bound: str) -> None:
    data = SAMPLES[bound]
    assert states(truncated(data, 1000), "a.h5") == {"invalid"}
    assert check_bytes(data[:-7]) == FileCheck("invalid", "hdf5", "ends 7 bytes too early")
    reason = "continues for 7 bytes after its end: its writer has not closed it"
    assert check_bytes(data + bytes(7)) == FileCheck("unknown", "hdf5", reason)


@pytest.mark.parametrize("bound", SAMPLES)
def test_each_byte_of_a_superblock_is_checked(bound: str) -> None:
    data = SAMPLES[bound]
    assert states(flipped(data, 8), "a.h5") == {"invalid"}
    found = states(flipped(data, 48), "a.h5")
    # without a checksum some bytes are not checked: reserved ones, the flags, the sizes of tree nodes
    assert found <= ({"valid", "invalid", "unknown"} if bound == "earliest" else {"invalid", "unknown"})
    end = END_OF_FILE[bound]
    for text in (data[:end] + struct.pack("<Q", len(data) + more) + data[end + 8 :] for more in (-1, 1, 1 << 40)):
        assert check_bytes(text if bound == "earliest" else resealed(text)).state in ("invalid", "unknown")


@pytest.mark.parametrize("bound", SAMPLES)
@pytest.mark.parametrize("length", [512, 1024, 8192])
def test_a_user_block_may_precede_the_superblock(bound: str, length: int) -> None:
    shifted = b"text\n".ljust(length, b"\0") + SAMPLES[bound]
    assert check_bytes(shifted, "a.h5") == check_bytes(shifted, "A.H5") == VALID
    assert states((shifted[:end] for end in range(length + 8, len(shifted), 50)), "a.h5") == {"invalid"}
    assert check_bytes(shifted[: length - 1], "a.h5").state == "unknown"
    assert check_bytes(b"more" + SAMPLES[bound], "a.h5").state == "unknown"


def test_a_file_that_its_writer_did_not_close_is_unfinished() -> None:
    for flags in (1, 4, 5):
        marked = bytearray(LATEST)
        marked[11] = flags
        reason = "is not closed: its superblock says that it is open for writing"
        assert check_bytes(resealed(marked)) == FileCheck("unfinished", "hdf5", reason)
        assert check_bytes(bytes(marked)) == FileCheck("invalid", "hdf5", "has a superblock with a wrong checksum")
        older = bytearray(SAMPLES["v108"])
        older[11] = flags  # has no meaning in this version
        assert check_bytes(resealed(older)) == VALID


def test_a_file_family_member_and_a_newer_version_are_undecided() -> None:
    family = EARLIEST[:48] + struct.pack("<Q", 96) + EARLIEST[56:]
    assert check_bytes(family).reason == "is one of several files that belong together"
    assert check_bytes(LATEST[:8] + b"\x04" + LATEST[9:]).state == "unknown"


@pytest.mark.parametrize("bound", SAMPLES)
def test_a_missing_root_group_is_damage(bound: str) -> None:
    data = SAMPLES[bound]
    place = 64 if bound == "earliest" else 36
    root = struct.unpack_from("<Q", data, place)[0]
    hole = data[:root] + bytes(16) + data[root + 16 :]
    reason = "has other data where an object should be"
    assert check_bytes(hole) == FileCheck("invalid", "hdf5", reason)
    none = data[:place] + b"\xff" * 8 + data[place + 8 :]
    none = none if bound == "earliest" else resealed(none)
    assert check_bytes(none) == FileCheck("invalid", "hdf5", "has no root group")


def test_a_missing_list_of_objects_is_damage() -> None:
    for mark in (b"TREE", b"SNOD"):
        hole = EARLIEST.replace(mark, bytes(4), 1)
        assert check_bytes(hole).reason == "has other data where its list of objects should be"
    second = LATEST.index(b"OHDR", LATEST.index(b"OHDR") + 1)
    flipped_object = LATEST[: second + 9] + bytes((LATEST[second + 9] ^ 1,)) + LATEST[second + 10 :]
    assert check_bytes(flipped_object).reason == "has an object with a wrong checksum"


def test_an_unusual_group_is_valid_without_a_row_count() -> None:
    """A tree that contains itself, and one with more nodes than are read."""
    tree = EARLIEST.index(b"TREE")
    child = tree + 24 + 8
    circle = EARLIEST[:child] + struct.pack("<Q", tree) + EARLIEST[child + 8 :]
    assert check_bytes(circle) == FileCheck("valid", "hdf5")
