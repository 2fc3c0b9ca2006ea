"""Opening files in a folder, and bounded reads of them."""

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from exporter.files.formats.source import (
    FIRST_BYTES,
    MOST_BYTES,
    MOST_READS,
    CheckUndecided,
    FileDamaged,
    FileSource,
    NotRegularFile,
    open_source,
    printable,
)
from tests.exporter.files.formats.support import source
from tests.support.exporter import open_files, without_rights

DATA = bytes(range(256)) * 64


def refusal_of(folder: Path, name: str) -> str:
    """The reason why the file cannot be opened."""
    with pytest.raises(NotRegularFile) as caught, open_source(folder, name):
        pass
    return str(caught.value)


def test_reads_return_the_content_of_the_file() -> None:
    with source(DATA) as opened:
        assert opened.size == len(DATA)
        assert opened.read(0, 4) == DATA[:4]
        assert opened.head(10) == DATA[:10]
        assert opened.read(5, 300) == DATA[5:305]
        assert opened.read(FIRST_BYTES - 2, 4) == DATA[FIRST_BYTES - 2 : FIRST_BYTES + 2]
        assert opened.read(9000, 10) == DATA[9000:9010]
        assert opened.tail(5) == DATA[-5:]
        assert opened.tail(300) == DATA[-300:]
        assert opened.tail(7) == DATA[-7:]
        assert opened.tail(0) == opened.head(0) == opened.read(3, 0) == b""
        assert opened.head(1 << 30) == opened.tail(1 << 30) == opened.read(0, len(DATA)) == DATA


def test_the_start_is_read_only_once() -> None:
    with source(DATA) as opened:
        opened.head(1)
        assert opened.bytes_read == FIRST_BYTES
        opened.head(FIRST_BYTES)
        opened.read(1, FIRST_BYTES - 1)
        assert (opened.bytes_read, opened.reads) == (FIRST_BYTES, 1)
        opened.head(FIRST_BYTES + 1)
        opened.read(FIRST_BYTES, 2)
        assert (opened.bytes_read, opened.reads) == (FIRST_BYTES + 2, 3)


def test_the_end_is_read_only_once() -> None:
    with source(DATA) as opened:
        opened.tail(100)
        opened.tail(40)
        opened.tail(120)
        assert (opened.bytes_read, opened.reads) == (120, 2)


@pytest.mark.parametrize(("offset", "length"), [(len(DATA), 1), (0, len(DATA) + 1), (1 << 80, 1), (5, 1 << 80)])
def test_a_read_beyond_the_end_reports_the_missing_bytes(offset: int, length: int) -> None:
    with (
        source(DATA) as opened,
        pytest.raises(FileDamaged, match=f"^ends {offset + length - len(DATA)} bytes too early$"),
    ):
        opened.read(offset, length)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (1, -1), (-5, -5)])
def test_nothing_before_the_start_is_read(offset: int, length: int) -> None:
    with source(DATA) as opened, pytest.raises(FileDamaged):
        opened.read(offset, length)


def test_the_number_of_bytes_read_is_bounded() -> None:
    with source(bytes(MOST_BYTES + 1)) as opened:
        with pytest.raises(CheckUndecided):
            opened.read(0, MOST_BYTES + 1)
        assert opened.bytes_read == 0
        opened.read(0, MOST_BYTES)
        with pytest.raises(CheckUndecided):
            opened.read(MOST_BYTES, 1)
        assert opened.bytes_read == MOST_BYTES


def test_the_number_of_reads_is_bounded() -> None:
    with source(DATA) as opened:
        for _ in range(MOST_READS):
            opened.read(0, 1)
        with pytest.raises(CheckUndecided):
            opened.read(0, 1)


def test_a_file_that_shrinks_during_a_check_is_undecided(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    with open_source(tmp_path, "a") as opened:
        os.truncate(tmp_path / "a", 100)
        with pytest.raises(CheckUndecided, match="shorter"):
            opened.read(90, 20)


def test_a_file_is_opened_by_name(tmp_path: Path, hard_name: str) -> None:
    (tmp_path / "below").mkdir()
    for name in (f"a{hard_name}", f"below/{hard_name}.pt"):
        (tmp_path / name).write_bytes(b"data")
        with open_source(tmp_path, name) as opened:
            assert (opened.head(9), opened.name) == (b"data", name)


def test_the_file_is_closed_afterwards(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    (tmp_path / "folder").mkdir()
    before = open_files(str(tmp_path))
    with open_source(str(tmp_path), "a") as opened:
        assert isinstance(opened, FileSource)
    for name in ("folder", "gone"):
        refusal_of(tmp_path, name)
    assert open_files(str(tmp_path)) == before


def test_the_kind_of_an_irregular_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "dangling").symlink_to("gone")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    assert refusal_of(tmp_path, "folder") == "is a directory"
    assert refusal_of(tmp_path, "") == refusal_of(tmp_path, ".") == "is a directory"
    assert refusal_of(tmp_path, "fifo") == "is a FIFO"
    assert refusal_of(tmp_path, "socket") == "is a socket"
    assert refusal_of(tmp_path, "gone") == refusal_of(tmp_path, "dangling") == "No such file or directory"
    assert refusal_of(tmp_path, "fifo/below") == "Not a directory"
    assert refusal_of(tmp_path, "circle") in ("is a circular link", "Too many levels of symbolic links")
    assert refusal_of(tmp_path, "n" * 300) == "File name too long"
    assert refusal_of(tmp_path, "a\0b") == "is not a valid file name"
    assert refusal_of(Path("/dev"), "null") == "is a device"


def test_an_unreadable_file_is_reported() -> None:
    with without_rights() as folder:
        (folder / "a").touch(mode=0)
        assert refusal_of(folder, "a") == "Permission denied"


def test_a_link_is_judged_by_its_target(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "step-1").mkdir(parents=True)
    (folder / "step-1" / "a.pt").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2" / "a.pt").write_bytes(b"outside")
    (folder / "latest").symlink_to("step-1")
    (folder / "last.pt").symlink_to(folder / "latest" / "a.pt")
    (folder / "out.pt").symlink_to("../secret")
    (folder / "sibling").symlink_to("../run-2")
    (tmp_path / "linked").symlink_to(folder)
    for name in ("last.pt", "latest/a.pt", "step-1/../last.pt"):
        for top in (folder, tmp_path / "linked"):
            with open_source(top, name) as opened:
                assert opened.head(9) == b"inside"
    for name in ("out.pt", "../secret", "sibling/a.pt", str(tmp_path / "secret"), ".."):
        assert refusal_of(folder, name) == "is a link to a place outside its folder"


def test_a_file_replaced_by_a_link_before_open_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "run" / "a").write_bytes(b"inside")
    real = os.open

    def replace_and_open(path: str, flags: int) -> int:
        os.unlink(path)
        os.symlink(tmp_path / "secret", path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", replace_and_open)
    assert refusal_of(tmp_path / "run", "a") == "Too many levels of symbolic links"


def test_a_file_replaced_by_a_fifo_before_open_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"inside")
    real = os.open

    def replace_and_open(path: str, flags: int) -> int:
        os.unlink(path)
        os.mkfifo(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", replace_and_open)
    before = open_files(str(tmp_path))
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(refusal_of(tmp_path, "a")), daemon=True)
    thread.start()
    thread.join(10)
    assert found == ["is a FIFO"]
    assert open_files(str(tmp_path)) == before
    assert stat.S_ISFIFO((tmp_path / "a").stat().st_mode)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a b", "a b"), ("a\nb", "a\\nb"), ("\x1b[31m", "\\x1b[31m"), ("é", "é"), ("\udcff", "\\udcff")],
    ids=ascii,
)
def test_any_text_is_shown_as_one_line(text: str, line: str) -> None:
    assert printable(text) == line
