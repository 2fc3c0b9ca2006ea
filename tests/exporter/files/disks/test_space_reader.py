"""The disk space available to a directory."""

import os
from pathlib import Path

import pytest

from exporter.files.disks.space_reader import SpaceFacts, SpaceWatch, read_space
from tests.support.exporter import FakeClock


def test_space_is_that_of_the_file_system(tmp_path: Path) -> None:
    facts = os.statvfs(tmp_path)
    space = read_space(tmp_path)
    assert isinstance(space, SpaceFacts)
    assert space.size_bytes == facts.f_blocks * facts.f_frsize
    assert 0 <= space.available_bytes <= space.size_bytes
    assert space.inodes == (facts.f_files or None)


def test_an_absent_directory_has_the_space_of_its_nearest_parent(tmp_path: Path) -> None:
    space, parent = read_space(tmp_path / "a" / "b"), read_space(tmp_path)
    assert space is not None
    assert parent is not None
    assert space.size_bytes == parent.size_bytes


def test_a_path_below_a_file_has_the_space_of_its_file_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_space(tmp_path / "file" / "out") is not None


@pytest.mark.parametrize("place", ["no/such", "nothing", "/no/such", "/no/such/"])
def test_the_search_for_a_parent_ends(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_space(place) is not None

    def absent(path: str) -> os.statvfs_result:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "statvfs", absent)
    assert read_space(place) is None


@pytest.mark.parametrize(
    ("blocks", "files", "space"),
    [
        (100, 50, SpaceFacts(40 * 512, 100 * 512, 20, 50)),
        (100, 0, SpaceFacts(40 * 512, 100 * 512, None, None)),
        (0, 0, None),
    ],
)
def test_figures_that_a_file_system_does_not_report_are_unknown(
    blocks: int, files: int, space: SpaceFacts | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs_result = os.statvfs_result((4096, 512, blocks, 60, 40, files, 30, 20, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: statvfs_result)
    assert read_space("/x") == space


def test_a_watch_reports_space_and_time(tmp_path: Path) -> None:
    clock = FakeClock()
    reading = SpaceWatch(str(tmp_path / "later")).poll(clock.time())
    assert reading.time == clock.time()
    assert reading.space is not None
    assert reading.space.size_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_an_inaccessible_path_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str) -> os.statvfs_result:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "statvfs", denied)
    with pytest.raises(PermissionError):
        SpaceWatch("/x").poll(0.0)
