"""Fixtures of the launcher's tests."""

import ctypes
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


@pytest.fixture(params=HARD_NAMES, ids=ascii)
def hard_name(request: pytest.FixtureRequest) -> str:
    """A name of a job or a folder that breaks careless code; those that a shell would act upon among them."""
    return str(request.param)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """The fake commands, for what a test starts."""
    return FakeSlurm(tmp_path / "fake")


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A working directory with a job file: the ``JOB`` of the module of the test."""
    made = tmp_path / "work"
    made.mkdir()
    (made / "job.yaml").write_text(yaml.safe_dump(request.module.JOB, sort_keys=False))
    return made
