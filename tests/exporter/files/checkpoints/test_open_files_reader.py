"""Which files a process may still write, with real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.files.checkpoints.open_files_reader import are_closed

MAPPED = "import mmap, os; f = open('{0}', 'r+b'); m = mmap.mmap(f.fileno(), 0); os.closerange(3, 99)"


@contextmanager
def process(path: Path, code: str) -> Iterator[None]:
    """Run code in another process until the block ends."""
    command = [sys.executable, "-c", f"import sys\n{code.format(path)}\nprint(flush=True)\nsys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "checkpoint of these tests.pt"
    found.write_bytes(b"x" * 100)
    return found


@pytest.mark.parametrize(
    ("code", "closed"),
    [
        ("f = open('{0}', 'ab')", False),
        ("f = open('{0}', 'r+b')", False),
        (MAPPED, False),
        ("f = open('{0}', 'rb')", True),
        ("open('{0}', 'ab').close()", True),
    ],
)
def test_a_file_is_closed_when_no_process_can_write_it(path: Path, code: str, closed: bool) -> None:
    with process(path, code):
        assert are_closed([str(path)]) is closed
    assert are_closed([str(path)])


def test_a_file_renamed_by_its_writer_is_still_open(path: Path) -> None:
    with process(path, "f = open('{0}', 'ab')"):
        path = path.rename(path.with_name("final name of these tests.pt"))
        assert not are_closed([str(path)])


def test_it_is_unknown_whether_a_missing_file_is_closed(path: Path) -> None:
    assert not are_closed([str(path), f"{path}.gone"])


def test_a_process_of_this_user_that_hides_its_files_leaves_it_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, proc = tmp_path / "a.pt", tmp_path / "proc"
    path.touch()
    (proc / "7").mkdir(parents=True)
    real = os.listdir

    def listdir(folder: str) -> list[str]:
        if folder.endswith("/fd"):
            raise PermissionError(folder)
        return real(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    assert not are_closed([str(path)], str(proc))
    (proc / "7").rename(proc / "1")
    assert are_closed([str(path)], str(proc))


def test_a_file_of_another_user_leaves_it_unknown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert not are_closed([str(path)])
