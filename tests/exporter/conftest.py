"""Real processes, each gone at the end of its test."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter.logs.inotify_reader import InotifyWatches, sees_all_writes
from exporter.machine.mounts import mount_table
from tests.support.exporter import Wrappers

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts programs with pipes to them; each with all its descendants is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*argv: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of them have ended
        process.communicate()


@pytest.fixture(scope="session")
def local_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of whose files the kernel knows all writes: where the others of the tests are, else in memory."""
    root = tmp_path_factory.mktemp("local")
    if _is_local(root):
        yield root
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if not _is_local(Path(memory)):
            pytest.skip("the kernel does not know of all that is written here")
        yield Path(memory)


def _is_local(folder: Path) -> bool:
    return sees_all_writes(str(folder), folder.stat().st_dev, mount_table().current())


@pytest.fixture
def local_folder(local_root: Path) -> Path:
    """A new one of these."""
    return Path(tempfile.mkdtemp(dir=local_root))


@pytest.fixture
def resting_log(local_folder: Path) -> Path:
    """A log of one line, to which nothing has been written for long."""
    log = local_folder / "worker.log"
    log.write_bytes(b"one\n")
    os.utime(log, (1, 1))
    return log


@pytest.fixture
def wakeups() -> Iterator[InotifyWatches]:
    """The watches of one follower."""
    made = InotifyWatches()
    yield made
    made.close()


@pytest.fixture
def wrappers(tmp_path: Path) -> Iterator[Wrappers]:
    """Starts wrappers with the test's folder as their run directory."""
    made = Wrappers(tmp_path)
    yield made
    made.close()
