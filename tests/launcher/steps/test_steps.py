"""The environment of a step."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from launcher.plan.plan import RunFacts
from launcher.steps.steps import run_environment
from tests.support.launcher import job_spec, plan_of

URL = "http://127.0.0.1:40001/fom"


@pytest.fixture
def facts(tmp_path: Path) -> RunFacts:
    """A job on two nodes. Only the second one has a listening sidecar."""
    (tmp_path / run_files.SIDECARS_DIR).mkdir()
    run_files.write_json(tmp_path / run_files.SIDECARS_DIR / "cn01.json", {"attempt": 0, "fom": URL})
    return RunFacts("4459", tmp_path, ("cn00", "cn01"))


def url_of(facts: RunFacts, rank: int, **over: Any) -> str:
    """URL for figures of merit of the task with this rank."""
    plan = plan_of(job_spec(resources={"nodes": 2}, workers=[{"count": 2, "command": "x"}], **over))
    return run_environment(plan, plan.tasks[rank], facts, 0)["GPUJOB_FOM_URL"]


def test_a_worker_has_the_url_of_the_sidecar_on_its_node(facts: RunFacts) -> None:
    assert (url_of(facts, 0), url_of(facts, 1)) == ("", URL)


def test_a_sidecar_of_an_earlier_attempt_is_not_used(facts: RunFacts) -> None:
    assert url_of(dataclasses.replace(facts, attempt=1), 1) == ""


def test_a_sidecar_without_a_loopback_url_is_not_used(facts: RunFacts) -> None:
    run_files.write_json(facts.run_dir / run_files.SIDECARS_DIR / "cn01.json", {"attempt": 0, "fom": None})
    assert url_of(facts, 1) == ""


def test_a_url_of_the_job_file_is_kept(facts: RunFacts) -> None:
    assert url_of(facts, 1, env={"GPUJOB_FOM_URL": "http://localhost:8001/fom"}) == "http://localhost:8001/fom"


@pytest.mark.parametrize(
    ("shell", "env", "value"),
    [
        (None, {}, "1"),
        ("", {}, ""),  # off
        ("x", {}, "x"),
        (None, {"PYTHONUNBUFFERED": ""}, ""),
        ("x", {"PYTHONUNBUFFERED": "{rank}"}, "0"),
    ],
)
def test_the_users_environment_and_job_file_decide_whether_python_buffers(
    shell: str | None, env: dict[str, str], value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if shell is not None:
        monkeypatch.setenv("PYTHONUNBUFFERED", shell)
    plan = plan_of(job_spec(env=env))
    facts = RunFacts("4459", tmp_path, ("cn00",))
    assert run_environment(plan, plan.tasks[0], facts, 0)["PYTHONUNBUFFERED"] == value
