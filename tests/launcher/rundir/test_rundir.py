"""Run directories: creation and lookup."""

import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from exporter.contract import run_files
from exporter.contract.budget import Budget
from launcher.errors import LauncherError
from launcher.plan.plan import Plan
from launcher.registry.entries import read_own_entries, register_job
from launcher.rundir import rundir
from launcher.steps.batch_script import render_sbatch
from tests.support.launcher import LocalJob, job_spec, plan_of


def stage(plan: Plan) -> Path:
    return rundir.stage_run_dir(plan, render_sbatch(plan))


def test_a_staged_directory_is_hidden_until_it_has_its_name(hard_name: str, tmp_path: Path) -> None:
    plan = plan_of(job_spec(name=hard_name), workdir=str(tmp_path / hard_name))
    staging = stage(plan)
    assert staging.name.startswith(".gpujob-")
    run_dir = rundir.finalize_run_dir(staging, plan, "4459")
    assert run_dir.parent == tmp_path / hard_name / "logs"
    assert run_dir.name.startswith("4459_")
    assert not staging.exists()
    assert json.loads((run_dir / "4459.json").read_text())["job_name"] == hard_name


def test_the_budget_of_a_job_and_who_is_notified_go_to_its_entry(tmp_path: Path) -> None:
    plan = plan_of(job_spec(budget={"gpu_hours": 9}, alerts={"notify": "oncall"}), workdir=str(tmp_path))
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    register_job(tmp_path / "run", rundir.describe_submission(plan, "7"), environ, tmp_path)
    (entry,) = read_own_entries(environ)
    assert (entry.budget, entry.notify) == (Budget(gpu_hours=9), "oncall")


def test_files_that_may_contain_secrets_are_private(tmp_path: Path) -> None:
    staging = stage(plan_of(workdir=str(tmp_path)))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in staging.iterdir() if path.is_file()}
    private = {name for name, mode in modes.items() if mode == 0o600}
    assert private == {"plan.json", "config.yaml", "sbatch_script.sh", "token"}
    assert {mode for name, mode in modes.items() if name not in private} == {0o644}


def test_the_umask_of_the_user_applies(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        staging = stage(plan_of(workdir=str(tmp_path)))
    finally:
        os.umask(before)
    folders = [staging, *(path for path in staging.iterdir() if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert staging / "progress" in folders


def test_no_umask_lets_others_see_or_write_into_the_run_directory(tmp_path: Path) -> None:
    spec = {"name": "open", "workers": [{"command": "sleep 2", "count": 2, "restart": {"max": 1}}]}
    job = LocalJob(tmp_path / "job", spec, prefix=("sh", "-c", 'umask 0; exec "$@"', "sh"))
    with job:
        assert job.wait() == 0, job.output
        found = [job.run_dir, *job.run_dir.rglob("*")]
        ours = [job.run_dir.parent, *found]
        assert [path for path in ours if not path.is_symlink() and path.stat().st_mode & 0o022] == []
        assert [path for path in found if path.is_dir() and path.stat().st_mode & 0o027] == []
        assert {run_files.STATUS_DIR, "log.out", run_files.EVENTS_FILE} <= {path.name for path in found}


def test_directories_of_the_job_are_created(tmp_path: Path) -> None:
    stage(plan_of(job_spec(paths={"output_dir": "a/b", "checkpoint_dir": str(tmp_path / "c")}), workdir=str(tmp_path)))
    assert (tmp_path / "a/b").is_dir()
    assert (tmp_path / "c").is_dir()


def test_a_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match=r"the run directory cannot be created in .*/file/logs: Not a directory"):
        stage(plan_of(workdir=str(tmp_path / "file")))


def test_an_output_directory_that_cannot_be_created_is_named_by_its_key(tmp_path: Path) -> None:
    plan = plan_of(job_spec(paths={"output_dir": "/proc/none"}), workdir=str(tmp_path))
    with pytest.raises(LauncherError, match=r'^paths\.output_dir: "/proc/none" cannot be created: No such file'):
        stage(plan)
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_failed_creation_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError):
        stage(plan_of(job_spec(paths={"output_dir": "file/x"}), workdir=str(tmp_path)))
    assert os.listdir(tmp_path / "logs") == []


def test_a_working_directory_may_have_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    workdir = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    plan = plan_of(workdir=workdir)
    run_dir = rundir.finalize_run_dir(stage(plan), plan, "4459")
    assert os.fsencode(run_dir.parent.parent).endswith(b"/caf\xe9")
    assert b"caf\xe9" in (run_dir / "sbatch_script.sh").read_bytes()


@pytest.mark.parametrize("step", ["run_files.make_token", "describe_submission", "write_secrets"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_start_leaves_no_secrets(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"launcher.rundir.rundir.{step}", Mock(side_effect=error))
    plan = plan_of(workdir=str(tmp_path))
    with pytest.raises((KeyboardInterrupt, LauncherError)):
        rundir.create_run_dir(plan, render_sbatch(plan), "local-1")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
