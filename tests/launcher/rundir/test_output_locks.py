"""Running jobs that write the same files: found by one another, unless both allow it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.plan import Plan
from launcher.rundir.output_locks import OutputInUseError, OutputLocks, find_output_in_use
from tests.support.launcher import job_spec, plan_of

NOBODY = 65534


def plan_in(folder: Path, *, shared: bool = False, **spec: Any) -> Plan:
    paths = {"output_dir": str(folder / "out"), "shared_output": shared}
    return plan_of(job_spec(name="embed", paths=paths, **spec))


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


@contextmanager
def running(plan: Plan, environ: dict[str, str], job_id: str = "1") -> Iterator[None]:
    locks = OutputLocks()
    locks.acquire(plan, job_id, environ)
    yield
    locks.release()


def test_another_job_with_the_same_files_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    plan = plan_in(tmp_path)
    with running(plan, environ, "4459"):
        with pytest.raises(OutputInUseError) as found:
            OutputLocks().acquire(plan, "4460", environ)
        linked = plan_of(job_spec(name="other", paths={"output_dir": str(tmp_path / "link")}))
        assert "job 4459 (embed) of " in (find_output_in_use(linked, environ) or "")
    text = str(found.value)
    assert text.startswith("paths.output_dir: job 4459 (embed) of ")
    assert f'writes output_worker_*.json* into "{tmp_path / "out"}": process ' in text
    assert text.endswith("or set `paths.shared_output: true` in both jobs")
    assert find_output_in_use(plan, environ) is None
    assert list((tmp_path / "home/.local/state/gpujob/outputs").iterdir()) == []


def test_the_next_attempt_of_a_job_is_no_other_job(tmp_path: Path, environ: dict[str, str]) -> None:
    with running(plan_in(tmp_path), environ, "4459"):
        OutputLocks().acquire(plan_in(tmp_path), "4459", environ)


@pytest.mark.parametrize(
    ("first", "second", "allowed"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_both_jobs_must_share(
    tmp_path: Path, environ: dict[str, str], first: bool, second: bool, allowed: bool
) -> None:
    with running(plan_in(tmp_path, shared=first), environ):
        assert (find_output_in_use(plan_in(tmp_path, shared=second), environ) is None) == allowed
        with running(plan_in(tmp_path, shared=first), environ, "1"):
            pass
        assert (find_output_in_use(plan_in(tmp_path, shared=second), environ) is None) == allowed


def test_jobs_with_other_files_do_not_meet(tmp_path: Path, environ: dict[str, str]) -> None:
    names = {"output": "other_*", "checkpoints": "other_checkpoint_*"}
    with running(plan_in(tmp_path), environ):
        assert find_output_in_use(plan_in(tmp_path, patterns=names), environ) is None
        assert find_output_in_use(plan_in(tmp_path / "elsewhere"), environ) is None
        assert find_output_in_use(plan_of(), environ) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_home_that_cannot_be_searched_does_not_hinder_a_job(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "home").mkdir(0o700)
    os.seteuid(NOBODY)
    try:
        with running(plan_in(tmp_path), environ):
            assert find_output_in_use(plan_in(tmp_path), environ) is None
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("home", ["", "/proc/nowhere"])
def test_a_job_without_a_state_folder_is_not_hindered(tmp_path: Path, home: str) -> None:
    with running(plan_in(tmp_path), {"HOME": home}):
        assert find_output_in_use(plan_in(tmp_path), {"HOME": home}) is None
