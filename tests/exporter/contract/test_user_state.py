"""Folders of the user's files."""

import errno
import os
from pathlib import Path

import pytest

from exporter.contract.errors import ExporterError
from exporter.contract.user_state import make_own_folder, make_private_folder

NOBODY = 65534


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_own_folder(tmp_path / "a" / "b")
        make_own_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [place.stat().st_mode & 0o777 for place in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_a_folder_that_is_there_is_enough_where_none_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: str, mode: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    make_private_folder(tmp_path)
    with pytest.raises(OSError, match="Read-only"):
        make_private_folder(tmp_path / "a")


@pytest.mark.parametrize("mode", [0o1777, 0o770])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    """A token that somebody else has put there would be known to them."""
    tmp_path.chmod(mode)
    with pytest.raises(ExporterError, match="others can write there"):
        make_own_folder(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["folder", "link"])
def test_a_folder_or_link_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir(0o755)
    (tmp_path / "link").symlink_to("folder")
    make_own_folder(tmp_path / "link")
    os.lchown(tmp_path / name, NOBODY, NOBODY)
    with pytest.raises(ExporterError, match="another user owns it"):
        make_own_folder(tmp_path / name)
