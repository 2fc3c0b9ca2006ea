"""Run directories: made whole, and found again."""

import json
import os
import stat
from pathlib import Path

import pytest

from launcher.errors import LauncherError
from launcher.plan.plan import Plan
from launcher.rundir import rundir
from launcher.rundir.rundir import find_run_dir
from launcher.steps.batch_script import render_sbatch
from tests.support.launcher import job_spec, plan_of


def staged(plan: Plan) -> Path:
    return rundir.stage_run_dir(plan, render_sbatch(plan))


def test_a_staged_directory_is_hidden_until_it_has_its_name(hard_name: str, tmp_path: Path) -> None:
    plan = plan_of(job_spec(name=hard_name), workdir=str(tmp_path / hard_name))
    staging = staged(plan)
    assert staging.name.startswith(".gpujob-")
    run_dir = rundir.finalize_run_dir(staging, plan, "4459")
    assert run_dir.parent == tmp_path / hard_name / "logs"
    assert run_dir.name.startswith("4459_")
    assert not staging.exists()
    assert json.loads((run_dir / "4459.json").read_text())["job_name"] == hard_name


def test_what_may_hold_secrets_is_for_the_owner_alone(tmp_path: Path) -> None:
    staging = staged(plan_of(workdir=str(tmp_path)))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in staging.iterdir() if path.is_file()}
    private = {name for name, mode in modes.items() if mode == 0o600}
    assert private == {"plan.json", "config.yaml", "sbatch_script.sh"}
    assert {mode for name, mode in modes.items() if name not in private} == {0o644}


def test_the_umask_of_the_user_counts(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        staging = staged(plan_of(workdir=str(tmp_path)))
    finally:
        os.umask(before)
    folders = [staging, *(path for path in staging.iterdir() if path.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert staging / "progress" in folders


def test_directories_of_the_job_are_made(tmp_path: Path) -> None:
    staged(plan_of(job_spec(paths={"output_dir": "a/b", "checkpoint_dir": str(tmp_path / "c")}), workdir=str(tmp_path)))
    assert (tmp_path / "a/b").is_dir()
    assert (tmp_path / "c").is_dir()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match=r"the run directory cannot be made in .*/file/logs: Not a directory"):
        staged(plan_of(workdir=str(tmp_path / "file")))


def test_of_a_directory_that_cannot_be_made_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError):
        staged(plan_of(job_spec(paths={"output_dir": "file/x"}), workdir=str(tmp_path)))
    assert os.listdir(tmp_path / "logs") == []


def test_a_folder_whose_name_is_not_unicode_is_a_folder(tmp_path: Path) -> None:
    workdir = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    plan = plan_of(workdir=workdir)
    run_dir = rundir.finalize_run_dir(staged(plan), plan, "4459")
    assert os.fsencode(run_dir.parent.parent).endswith(b"/caf\xe9")
    assert b"caf\xe9" in (run_dir / "sbatch_script.sh").read_bytes()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A logs directory with two runs of job 4459 and one of a job whose id begins like it."""
    made = tmp_path / "logs"
    for age, name in enumerate(
        ["4459_b_20251122_041341", "4459_a_20251121_041341", "44590_c_20251122_041341", "4459_x"]
    ):
        (made / name).mkdir(parents=True)
        if name != "4459_x":
            (made / name / "manifest.json").write_text("{}")
        os.utime(made / name, (1000 - age, 1000 - age))
    return made


def test_a_job_is_found_by_its_id(logs: Path) -> None:
    assert find_run_dir("4459", logs) == logs / "4459_b_20251122_041341"
    os.utime(logs / "4459_a_20251121_041341", (2000, 2000))
    assert find_run_dir("4459", logs) == logs / "4459_a_20251121_041341"
    assert find_run_dir("44590", logs) == logs / "44590_c_20251122_041341"


def test_a_job_is_found_by_its_directory(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = logs / "4459_b_20251122_041341"
    monkeypatch.chdir(logs)
    for words in (str(run_dir), f"{run_dir}/", f"{run_dir}/manifest.json", run_dir.name, f"./{run_dir.name}"):
        assert find_run_dir(words, Path("nowhere")) == run_dir


@pytest.mark.parametrize("job", ["1", "445", "4459*", "*", "[4]459", "", "..", "no/such", "4459_x", "-1", "a\nb"])
def test_a_job_that_is_not_there_is_told(job: str, logs: Path) -> None:
    with pytest.raises(LauncherError, match="is neither a run directory nor the id of a job in") as caught:
        find_run_dir(job, logs)
    assert repr(job) in str(caught.value)
