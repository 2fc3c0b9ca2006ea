"""ZIP archives: the directory at the end must match the file before it."""

import io
import struct
import zipfile

import pytest

from exporter.files.formats import FileCheck
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

MEMBERS = {"a.txt": b"text " * 20, "folder/b.txt": b"", "é": bytes(300)}


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive_file:
        archive_file.comment = comment
        for name, data in members.items():
            archive_file.writestr(name, data)
    return out.getvalue()


class Pipe(io.RawIOBase):
    """An output that cannot seek: the lengths then follow the bytes of each member."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.data += bytes(data)
        return len(data)


def streamed() -> bytes:
    out = Pipe()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive_file:
        archive_file.writestr("a.txt", b"text " * 20)
        archive_file.writestr("b.txt", b"text")
    return out.data


def wide() -> bytes:
    """An archive with eight-byte lengths everywhere, as for more than 4 GiB."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive_file:
        with archive_file.open("a.txt", "w", force_zip64=True) as member:
            member.write(b"text")
    data = out.getvalue()
    directory, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    extra = struct.pack("<HHQQQ", 1, 24, 4, 4, 0)
    entry = bytearray(data[directory : directory + 46 + 5])
    struct.pack_into("<LL", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", entry, 30, len(extra))
    struct.pack_into("<L", entry, 42, 0xFFFFFFFF)
    size = len(entry) + len(extra)
    wide_end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, size, directory)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, directory + size, 1)
    last = data[end : end + 8] + b"\xff" * 12 + b"\0\0"
    return data[:directory] + bytes(entry) + extra + wide_end + locator + last


WHOLE = {
    "stored": archive(MEMBERS),
    "packed": archive(MEMBERS, zipfile.ZIP_DEFLATED),
    "commented": archive(MEMBERS, comment=b"PK\x05 " * 3),
    "streamed": streamed(),
    "wide": wide(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_complete_archives_are_valid_and_truncated_ones_are_not(name: str) -> None:
    members = {"streamed": 2, "wide": 1}.get(name, 3)
    assert check_bytes(WHOLE[name]) == FileCheck("valid", "zip", None, members)
    assert len(zipfile.ZipFile(io.BytesIO(WHOLE[name])).namelist()) == members
    assert states(truncated(WHOLE[name], 1000), "a.zip") <= {"invalid", "unknown"}
    assert states(flipped(WHOLE[name], 10_000), "a.zip") <= {"valid", "invalid", "unknown"}


def test_a_comment_may_look_like_the_end_record() -> None:
    data = archive(MEMBERS, comment=b"comment")
    assert check_bytes(data.replace(b"comment", b"PK\x05\x06 no")) == FileCheck("valid", "zip", None, 3)


def test_an_archive_without_members_is_valid() -> None:
    assert check_bytes(archive({}), "a.zip") == FileCheck("valid", "zip", None, 0)


def test_the_end_of_a_nested_archive_is_not_taken_for_the_end() -> None:
    outer = archive({"first": b"a", "inner.zip": WHOLE["stored"], "more": bytes(50)})
    assert check_bytes(outer) == FileCheck("valid", "zip", None, 3)
    cuts = [outer[:end] for end in range(outer.index(b"PK\x05\x06") + 22, outer.index(b"PK\x05\x06") + 70)]
    assert states(iter(cuts), "a.zip") == {"unknown"}


def test_bytes_after_the_end_belong_to_nothing() -> None:
    found = check_bytes(WHOLE["stored"] + b"abc", "model.keras")
    assert found == FileCheck("valid", "zip", "continues for 3 bytes after its end", 3)


def test_several_archives_in_one_file_are_undecided() -> None:
    for name in ("stored", "wide"):
        twice = WHOLE["stored"] + WHOLE[name]
        expected = "contains several archives, or has other data before its directory"
        assert check_bytes(twice) == FileCheck("unknown", "zip", expected)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"PK\x05\x06", b"PK\x05\x07", "has no end record: it was not completely written, or its end is lost"),
        (b"PK\x01\x02", b"PK\x01\x03", "its directory has other data where an entry should begin"),
        (b"PK\x03\x04", b"PK\x03\x05", "its member 'folder/b.txt' is not where its directory says"),
        (b"a.txttext", b"b.txttext", "has 'b.txt' where its directory says 'a.txt'"),
    ],
)
def test_the_reason_names_the_defect(old: bytes, new: bytes, reason: str) -> None:
    data = WHOLE["stored"]
    assert data.count(old) >= 1
    place = data.index(old, 1) if old.startswith(b"PK") else data.index(old)
    found = check_bytes(data[:place] + new + data[place + len(old) :], "a.zip")
    assert (found.state, (found.reason or "")[: len(reason)]) == ("invalid", reason)


def test_a_wrong_count_a_wrong_length_and_a_gap_are_damage() -> None:
    data = WHOLE["stored"]
    end = data.index(b"PK\x05\x06")
    more = bytearray(data)
    struct.pack_into("<H", more, end + 10, 4)
    assert check_bytes(bytes(more)).reason == "has 3 members in its directory, but its end record says 4"
    longer = bytearray(data)
    struct.pack_into("<L", longer, data.index(b"PK\x01\x02") + 20, 5000)
    assert check_bytes(bytes(longer)).reason == "its member 'a.txt' does not fit before its directory"
    second = data.index(b"PK\x03\x04", 1)
    assert check_bytes(data[:second] + bytes(30) + data[second + 30 :]).state == "invalid"


def test_only_the_first_part_of_a_long_directory_is_checked() -> None:
    many = archive({f"a member with quite a long name {number:05}": b"" for number in range(7000)})
    found = check_bytes(many)
    assert (found.state, found.format, found.records) == ("valid", "zip", None)
    assert (found.reason or "").endswith(" of its 7000 members were checked")
    assert check_bytes(many[:-1]).state == "invalid"
