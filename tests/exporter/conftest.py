"""Real processes, each gone at the end of its test."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


@pytest.fixture
def wrappers(tmp_path: Path) -> Iterator[Wrappers]:
    """Starts wrappers with the test's folder as their run directory."""
    made = Wrappers(tmp_path)
    yield made
    made.close()
