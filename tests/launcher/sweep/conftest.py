"""Fixtures for sweeps."""

from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Fake Slurm commands for code in this process, with an empty queue."""
    fake = FakeSlurm(tmp_path / "fake")
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    fake.say("squeue", "out", "")
    return fake
