"""Every mistake in a sweep has its key, its value and a fix; values that look like secrets are refused."""

from typing import Any

import pytest
import yaml

from launcher.errors import ConfigError
from launcher.sweep.points import read_sweep
from tests.launcher.conftest import Golden
from tests.launcher.sweep.test_points import BODY
from tests.support.cases import answered

SECRET = "sk-secret-1"
FILES: dict[str, dict[str, Any]] = {
    "mistakes-sweeps": BODY,
    "mistakes-secrets": {"name": "s4", "workers": [{"command": "true", "env": {"OWN": "1"}}]},
}  # golden files, and the keys of a job file that each of their cases changes


@pytest.mark.parametrize("file", FILES)
def test_every_mistake_is_reported_with_its_key_and_a_fix(file: str, golden: Golden) -> None:
    reported: list[str] = []

    def problems(case: str) -> tuple[str, ...]:
        try:
            read_sweep({**FILES[file], **yaml.safe_load(case)}, "job.yaml")
        except ConfigError as error:
            reported.append(str(error))
            return error.problems
        return ("accepted",)

    name = f"launcher/{file}.txt"
    golden(name, answered(name, problems))
    assert SECRET not in "".join(reported), "it would be in the log of whoever ran this"
