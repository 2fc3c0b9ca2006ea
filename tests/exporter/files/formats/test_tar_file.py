"""tar archives: from header to header, and the end."""

import io
import os
import random
import tarfile
from pathlib import Path

import pytest

from exporter.files.formats import FileCheck, check_file
from exporter.files.formats.source import FileSource
from tests.exporter.files.formats.support import check_bytes, states, truncated

MEMBERS = {"./model_config.yaml": 700, "./model_weights.ckpt": 30_000, "./" + 30 * "long name/" + "x": 5, "./empty": 0}
VALID = FileCheck("valid", "tar")


def archive(members: dict[str, int], form: int = tarfile.GNU_FORMAT) -> bytes:
    out, chance = io.BytesIO(), random.Random(1)
    with tarfile.open(fileobj=out, mode="w", format=form) as target:
        folder = tarfile.TarInfo("./folder")
        folder.type = tarfile.DIRTYPE
        target.addfile(folder)
        for name, size in members.items():
            member = tarfile.TarInfo(name)
            member.size = size
            target.addfile(member, io.BytesIO(chance.randbytes(size)))
    return out.getvalue()


WHOLE = archive(MEMBERS)
END = len(WHOLE.rstrip(b"\0")) // 512 * 512 + 512  # where the zeros begin


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_archive_of_python_is_valid(form: int) -> None:
    members = {name: size for name, size in MEMBERS.items() if form != tarfile.USTAR_FORMAT or len(name) < 100}
    for name in ("a.nemo", "a.tar", "a.bin", "a"):
        assert check_bytes(archive(members, form), name) == VALID


def test_no_part_of_it_is_valid() -> None:
    assert states(truncated(WHOLE[: END + 512], 1000), "a.nemo") <= {"invalid", "unfinished"}
    assert check_bytes(WHOLE[:END], "a.nemo").state == "unfinished"
    assert check_bytes(WHOLE[:20_000], "a.nemo").state == "invalid"


def test_zeros_behind_the_end_may_be_left_out() -> None:
    found = check_bytes(WHOLE[: END + 1024], "a.nemo")
    assert (found.state, found.reason) == (
        "valid",
        "is not filled up with zeros: its writer leaves them out, or its end is lost",
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (WHOLE + b"x" * 512, "has other data behind its end"),
        (WHOLE[:-1] + b"x", "has other data behind its end"),
        (WHOLE[:2048] + bytes(512) + WHOLE[2560:], "has other data behind its end"),
        (WHOLE[:2048] + b"x" * 512 + WHOLE[2560:], "has other data where a member should begin"),
        (bytes(20_480), "is named .nemo, but does not begin like one"),
    ],
)
def test_damage_is_named(content: bytes, reason: str) -> None:
    assert check_bytes(content, "a.nemo") == FileCheck("invalid", "tar", reason)


def test_members_of_more_than_8_gib_have_binary_sizes() -> None:
    member = tarfile.TarInfo("large")
    member.size = 9 << 30
    found = check_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(1024), "a.nemo")
    assert found.reason == f"ends {(9 << 30) - 1024} bytes before the end of a member"


def test_a_size_may_be_in_the_header_before(tmp_path: Path) -> None:
    """Python writes members of more than 8 GiB like that. The next member has its own size again."""
    path, large = tmp_path / "a.nemo", 9 << 30

    def check() -> FileCheck:
        with path.open("rb") as opened:
            return check_file(FileSource(opened.fileno(), path.name))

    with path.open("wb") as out:
        for name, size in (("large", large), ("small", 5)):
            member = tarfile.TarInfo(name)
            member.size = size
            out.write(member.tobuf(tarfile.PAX_FORMAT))
            out.seek(-(-size // 512) * 512, io.SEEK_CUR)
        out.truncate((out.tell() // tarfile.RECORDSIZE + 2) * tarfile.RECORDSIZE)
    assert check() == VALID
    os.truncate(path, large)
    assert check().state == "invalid"


def test_a_size_of_thousands_of_digits_is_none() -> None:
    data = b"6010 size=" + b"9" * 6000 + b"\n"
    member = tarfile.TarInfo("pax")
    member.type, member.size = tarfile.XHDTYPE, len(data)
    content = member.tobuf(tarfile.USTAR_FORMAT) + data.ljust(6144, b"\0") + WHOLE
    assert check_bytes(content, "a.nemo").state == "valid"
