"""Target files that a new stack takes over from run directories."""

import os
from pathlib import Path

import pytest

from exporter.contract.records import JsonValue
from launcher.registry.entries import register_job
from launcher.stack.up import running_target_files


def test_the_targets_of_a_job_are_found_however_many_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for number in range(120):
        submission: dict[str, JsonValue] = {"job_id": f"{number}", "job_name": "job", "submitted": float(number)}
        register_job(tmp_path / f"{number}_job", submission, os.environ, tmp_path)
    (tmp_path / "0_job").mkdir()
    (tmp_path / "0_job/targets.json").touch()
    assert running_target_files() == [str(tmp_path / "0_job/targets.json")]
