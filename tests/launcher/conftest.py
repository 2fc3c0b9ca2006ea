"""Fixtures of the launcher's tests."""

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import HARD_NAMES

Golden = Callable[[str, str], Path]
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def no_subreaper() -> Iterator[None]:
    """`LocalSteps` makes its process the parent of orphans; pytest would never reap those of later tests."""
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of the test are in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(params=HARD_NAMES, ids=ascii)
def hard_name(request: pytest.FixtureRequest) -> str:
    """A hard name of a job or folder, for example with shell syntax."""
    return str(request.param)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """Fake Slurm commands for processes of a test."""
    return FakeSlurm(tmp_path / "fake")


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A working directory with the ``JOB`` of the test module as job file."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "job.yaml").write_text(yaml.safe_dump(request.module.JOB, sort_keys=False))
    return work
