"""Locks on files."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from exporter.contract.file_locks import FileLockedError, lock_file


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_lock_names_its_holder_and_ends_when_it_is_closed(tmp_path: Path) -> None:
    before, path = open_files(), tmp_path / "x.lock"
    held = lock_file(path, {"job_id": "17"})
    with pytest.raises(FileLockedError, match=f"process {os.getpid()} on ") as caught:
        lock_file(path)
    assert caught.value.holder["job_id"] == "17"
    os.close(held)
    os.close(lock_file(path))
    assert open_files() == before


def test_a_full_disk_costs_only_the_name_of_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, path = open_files(), tmp_path / "x.lock"
    path.write_text('{"pid": 1}\n')
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")))
        held = lock_file(path)
    with pytest.raises(FileLockedError, match=r"^process \? on another host$"):
        lock_file(path)
    os.close(held)
    os.close(lock_file(path))
    assert open_files() == before


def test_an_error_after_the_lock_releases_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.lock"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        with pytest.raises(OSError, match="Stale"):
            lock_file(path)
    os.close(lock_file(path))
