"""Every mistake in a job file has its key, its value and a fix."""

import pytest

from launcher.errors import ConfigError, TopologyError
from launcher.jobfile.jobfile import parse_job
from tests.launcher.conftest import Golden
from tests.support.cases import answered
from tests.support.launcher import plan_of

FILES = {
    "mistakes": "name: x\nworkers: [{command: a}]\n",
    "mistakes-whole-files": "",
    "mistakes-serving": "name: serve\n",
}  # golden files, and the text that precedes each of their cases


@pytest.mark.parametrize("file", FILES)
def test_every_mistake_is_reported_with_its_key_and_a_fix(file: str, golden: Golden) -> None:
    def problems(case: str) -> tuple[str, ...]:
        try:
            plan_of(parse_job(FILES[file] + case, "job.yaml"))
        except (ConfigError, TopologyError) as error:
            return error.problems
        return ("accepted",)

    name = f"launcher/{file}.txt"
    golden(name, answered(name, problems))
