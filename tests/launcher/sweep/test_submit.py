"""Submitting a sweep to Slurm, with fake Slurm commands on PATH."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from exporter.contract import run_files
from launcher.cli.sweep import resume_points
from launcher.errors import LauncherError
from launcher.registry.entries import read_own_entries
from launcher.sweep import submit
from launcher.sweep.directory import SweepRecord
from tests.launcher.sweep.test_directory import ENDED
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import gpujob, read_json

JOB: dict[str, Any] = {
    "name": "embed",
    "workers": [{"command": "true {lr} {bs}"}],
    "sweep": {"max_parallel": 2, "grid": {"lr": [0.1, 0.2], "bs": [8, 16, 32]}},
}
TWO_SIZES = {"max_parallel": 1, "zip": {"resources.nodes": [1, 2], "lr": [1, 2], "bs": [1, 1]}}


def write(folder: Path, **over: Any) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, **over}, sort_keys=False))


def command(slurm: FakeSlurm, folder: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return gpujob(*args, cwd=folder, env=slurm.environment())


def submitted(slurm: FakeSlurm, folder: Path) -> dict[str, Any]:
    done = command(slurm, folder, "submit", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def end(run_dir: Path, state: str) -> None:
    """Write the report of a point that ended in this state."""
    job_id = "_".join(run_dir.name.split("_")[:2])
    facts = {"job_id": job_id, "attempt": 0, "hosts": ["cn01"], "start": 1.0, "pid": 1, "host": "x", "local": False}
    run_files.write_json(run_dir / run_files.ORCHESTRATOR_FILE, facts)
    run_files.write_json(run_dir / run_files.REPORT_FILE, {**ENDED, "state": state})


def names_in_logs(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "logs")) if (folder / "logs").exists() else []


def test_an_array_is_held_until_the_directory_of_every_point_is_complete(slurm: FakeSlurm, folder: Path) -> None:
    done = command(slurm, folder, "submit", "job.yaml")
    assert done.returncode == 0
    assert done.stderr.startswith("gpujob: warning: all 6 points: slurm.time_limit: is not set, ")
    sinfo, *calls = (call for call in slurm.calls() if call["argv"] != ["show", "config"])
    assert [call["command"] for call in (sinfo, *calls)] == ["sinfo", "sbatch", "scontrol"]
    script = calls[0]["script"]
    assert calls[0]["argv"][:2] == ["--parsable", "--hold"]
    assert "#SBATCH --array=0-5%2\n" in script
    ((name, files),) = calls[1]["run_dirs"].items()
    assert calls[1]["argv"] == ["release", "4459"]
    assert re.fullmatch(r"4459_embed_\d{8}_\d{6}", name)
    timestamp = name.removeprefix("4459_embed_")
    runs = [
        f"4459_{index}_embed_lr{lr}_bs{bs}_{timestamp}"
        for index, (lr, bs) in enumerate((lr, bs) for lr in (0.1, 0.2) for bs in (8, 16, 32))
    ]
    assert files == sorted([*runs, "job.yaml", "sweep.json", "tasks"])
    home = folder / "logs" / name
    assert names_in_logs(folder) == [name]
    for index, run in enumerate(runs):
        link = home / "tasks" / f"4459_{index}"
        assert link.resolve() == home / run
        assert (link / "sbatch_script.sh").read_text() == script
        record = read_json(home / run / f"4459_{index}.json")
        assert (record["job_id"], record["job_name"]) == (
            f"4459_{index}",
            run.split("_", 2)[2].removesuffix(f"_{timestamp}"),
        )
        assert read_json(home / run / "manifest.json")["job_name"] == record["job_name"]
        for private in ("plan.json", "sbatch_script.sh", "config.yaml"):
            assert (home / run / private).stat().st_mode & 0o777 == 0o600
    assert (home / "job.yaml").read_bytes() == (folder / "job.yaml").read_bytes()
    assert (home / "job.yaml").stat().st_mode & 0o777 == 0o600, "it may contain private values"
    sweep = read_json(home / "sweep.json")
    assert [point["runs"] for point in sweep["points"]] == [[run] for run in runs]
    assert (sweep["submission"]["job_id"], sweep["submission"]["workdir"]) == ("4459", str(folder))
    assert done.stdout.splitlines() == [
        "Submitted array job 4459 of 0-5",
        f"Logs: {home}/",
        f"Table: gpujob sweep {home}",
        "Stop: gpujob stop 4459",
    ]


def test_an_array_task_runs_its_point(slurm: FakeSlurm, folder: Path) -> None:
    """Runs the real batch script with a stand-in for Python."""
    answer = submitted(slurm, folder)
    (call,) = slurm.calls("sbatch")
    script = re.sub(r"exec \S+ .*", 'readlink -f "$run_dir"', call["script"])
    env = {**os.environ, "SLURM_ARRAY_JOB_ID": "4459", "SLURM_ARRAY_TASK_ID": "4", "SLURM_JOB_ID": "4464"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == answer["points"][4]["run_dir"] + "\n"


def test_points_of_different_sizes_are_consecutive_arrays(slurm: FakeSlurm, folder: Path) -> None:
    write(folder, sweep=TWO_SIZES)
    answer = submitted(slurm, folder)
    first, second = (call["script"] for call in slurm.calls("sbatch"))
    assert ("--array=0\n" in first, "--dependency" in first) == (True, False)
    assert "#SBATCH --array=1\n" in second
    assert "#SBATCH --dependency=afterany:4459\n" in second
    assert f"#SBATCH --output={answer['sweep_dir']}/tasks/%A_%a/log.out\n" in second
    assert [call["argv"] for call in slurm.calls("scontrol")[-2:]] == [["release", "4459"]] * 2


def test_what_sbatch_says_of_accepted_jobs_is_shown_once(slurm: FakeSlurm, folder: Path) -> None:
    write(folder, sweep=TWO_SIZES)
    note = "sbatch: time limit lowered to 2:00:00\nsbatch: moved to gpu-short\n"
    slurm.say("sbatch", "err", note)
    done = command(slurm, folder, "submit", "job.yaml", "--json")
    assert (done.returncode, len(slurm.calls("sbatch")), done.stderr.count(note)) == (0, 2, 1)
    json.loads(done.stdout)


def test_a_refused_submission_leaves_no_files(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("sbatch", "status", 1)
    slurm.say("sbatch", "err", "sbatch: error: Invalid account\n")
    done = command(slurm, folder, "submit", "job.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "sbatch exited with 1" in done.stderr
    assert names_in_logs(folder) == []


def test_an_array_that_cannot_be_released_is_cancelled(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("scontrol", "status", 1)
    slurm.say("scontrol", "err", "Access denied\n")
    done = command(slurm, folder, "submit", "job.yaml")
    assert done.returncode == 2
    assert "Access denied" in done.stderr
    assert [call["argv"] for call in slurm.calls("scancel")] == [["4459"]]
    assert names_in_logs(folder) == []
    slurm.say("scancel", "status", 1)
    done = command(slurm, folder, "submit", "job.yaml")
    assert "jobs on hold that could not be cancelled: 4459 (scancel exited with 1" in done.stderr


def test_a_mistake_is_reported_before_any_file_or_query(slurm: FakeSlurm, folder: Path) -> None:
    write(folder, sweep={"grid": {"lr": [0.1], "bs": [8], "resources.nodes": [1, "x"]}})
    done = command(slurm, folder, "submit", "job.yaml")
    assert done.returncode == 2
    assert 'embed_lr0.1_bs8_nodesx: resources.nodes: "x" is not a whole number' in done.stderr
    assert (slurm.calls(), names_in_logs(folder)) == ([], [])


def test_too_many_points_for_an_array_are_refused(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("scontrol", "config", "MaxArraySize            = 5\n")
    done = command(slurm, folder, "submit", "job.yaml")
    assert done.returncode == 2
    assert "the sweep has 6 points and this cluster accepts at most 5 in an array (MaxArraySize)" in done.stderr
    assert names_in_logs(folder) == []


def test_only_failed_points_are_submitted_again(slurm: FakeSlurm, folder: Path) -> None:
    answer = submitted(slurm, folder)
    home = Path(answer["sweep_dir"])
    for point in answer["points"]:
        end(Path(point["run_dir"]), "FAILED" if point["index"] in (1, 4) else "COMPLETED")
    slurm.say("sbatch", "out", "5000\n")
    done = command(slurm, folder, "sweep", home, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "Submitted array job 5000 of 1,4: embed_lr0.1_bs16, embed_lr0.2_bs16"
    script = slurm.calls("sbatch")[-1]["script"]
    assert "#SBATCH --array=1,4\n" in script
    assert f"#SBATCH --output={home}/tasks/%A_%a/log.out\n" in script
    assert {link.name for link in (home / "tasks").iterdir()} == {
        *(f"4459_{index}" for index in range(6)),
        *("5000_1", "5000_4"),
    }
    assert all((link / "manifest.json").is_file() for link in (home / "tasks").iterdir())
    times = {name: read_json(home / "tasks" / name / f"{name}.json")["submitted"] for name in ("4459_1", "5000_1")}
    assert times["4459_1"] < times["5000_1"]
    entries = {entry.job_id: entry.submitted for entry in read_own_entries(slurm.environment())}
    assert entries == {task.partition("_")[0]: submitted for task, submitted in times.items()}
    assert [name for name in os.listdir(home) if name.startswith(".")] == []
    slurm.say("squeue", "out", "5000_1|PENDING\n5000_4|RUNNING\n")
    done = command(slurm, folder, "sweep", "4459", "--json")
    states = json.loads(done.stdout)["points"]
    assert (done.returncode, states[1]["state"], states[4]["state"]) == (10, "PENDING", "RUNNING")
    assert (states[1]["job_id"], states[1]["runs"]) == ("5000_1", 2)
    done = command(slurm, folder, "sweep", home, "--resume")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "nothing to resume: 4 of 6 points have completed, the other 2 still run or wait\n"
    done = command(slurm, folder, "submit", "job.yaml", "--resume", home, "--json")
    nothing: dict[str, Any] = {"schema": 1, "job_id": None, "arrays": [], "sweep_dir": str(home), "points": []}
    assert json.loads(done.stdout) == nothing
    assert (done.returncode, len(slurm.calls("sbatch"))) == (0, 2)
    assert json.loads(command(slurm, folder, "watch", "5000_4", "--once", "--json").stdout)["job_id"] == "5000_4"


def test_an_array_that_has_got_the_id_of_the_sweep_later_is_left_alone(slurm: FakeSlurm, folder: Path) -> None:
    home = Path(submitted(slurm, folder)["sweep_dir"])
    slurm.say("squeue", "out", "4459_0|RUNNING\n")
    record = read_json(home / "sweep.json")
    record["arrays"][0]["submitted"] -= 30 * 86400.0
    run_files.write_json(home / "sweep.json", record)
    done = command(slurm, folder, "stop", home)
    assert (done.returncode, done.stdout, slurm.calls("scancel")) == (0, "sweep 4459 has ended\n", [])


def test_nothing_is_resumed_while_slurm_does_not_answer(slurm: FakeSlurm, folder: Path) -> None:
    home = Path(submitted(slurm, folder)["sweep_dir"])
    slurm.say("squeue", "status", 1)
    slurm.say("squeue", "err", "slurm_load_jobs error: Unable to contact slurm controller\n")
    done = command(slurm, folder, "sweep", home, "--resume")
    assert done.returncode == 2
    assert "squeue does not answer, so it is unknown which of its points still run" in done.stderr
    assert len(slurm.calls("sbatch")) == 1


def resume_with_running_points(slurm: FakeSlurm, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Resume the sweep while three of its points still run or wait."""
    home = submitted(slurm, folder)["sweep_dir"]
    slurm.say("squeue", "out", "4459_0|RUNNING\n4459_1|RUNNING\n4459_2|PENDING\n")
    slurm.say("sbatch", "out", "5000\n")
    return command(slurm, folder, "submit", "job.yaml", "--resume", home, *args)


def test_resumed_points_wait_for_running_ones_with_max_parallel(slurm: FakeSlurm, folder: Path) -> None:
    done = resume_with_running_points(slurm, folder)
    assert done.returncode == 0, done.stderr
    assert "They start when array job 4459 has ended: at most 2 points run at once\n" in done.stdout
    script = slurm.calls("sbatch")[-1]["script"]
    assert "#SBATCH --array=3-5%2\n" in script
    assert "#SBATCH --dependency=afterany:4459\n" in script


def test_resumed_points_do_not_wait_without_max_parallel(slurm: FakeSlurm, folder: Path) -> None:
    write(folder, sweep={key: value for key, value in JOB["sweep"].items() if key != "max_parallel"})
    done = resume_with_running_points(slurm, folder)
    assert "They start" not in done.stdout
    assert "#SBATCH --dependency" not in slurm.calls("sbatch")[-1]["script"]


def test_consecutive_arrays_refuse_an_or_dependency(slurm: FakeSlurm, folder: Path) -> None:
    write(folder, workers=[{"command": "true {lr} {bs}", "count": 1}], sweep=TWO_SIZES)
    done = command(slurm, folder, "submit", "job.yaml", "--dependency", "afterok:1?afterok:2")
    assert done.returncode == 2
    assert "slurm.dependency: 'afterok:1?afterok:2': with max_parallel an array of the sweep waits" in done.stderr
    assert slurm.calls("sbatch") == []
    assert names_in_logs(folder) == []
    write(folder)
    done = resume_with_running_points(slurm, folder, "--dependency", "afterok:1?afterok:2")
    assert (done.returncode, len(slurm.calls("sbatch"))) == (2, 1)
    assert "join the jobs by , instead of ?" in done.stderr


def test_held_jobs_are_cancelled_after_any_failure(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(submitted(slurm, folder)["sweep_dir"])
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    slurm.say("squeue", "out", "")
    slurm.say("sbatch", "out", "5000\n")

    def fail(home: Path, record: SweepRecord) -> None:
        raise LauncherError("no space left on device")

    monkeypatch.setattr(submit, "write_record", fail)
    with click.Context(click.Command("sweep")), pytest.raises(LauncherError, match="no space left"):
        resume_points(home, as_json=True)
    assert [call["argv"] for call in slurm.calls("scancel")] == [["5000"]]
    assert list(home.glob("5000_*")) == []


def test_a_failed_resume_leaves_the_sweep_unchanged(slurm: FakeSlurm, folder: Path) -> None:
    home = Path(submitted(slurm, folder)["sweep_dir"])
    before = (sorted(os.listdir(home)), sorted(os.listdir(home / "tasks")), (home / "sweep.json").read_text())
    slurm.say("squeue", "out", "")
    slurm.say("sbatch", "out", "5000\n")
    slurm.say("scontrol", "status", 1)
    done = command(slurm, folder, "sweep", home, "--resume")
    assert done.returncode == 2
    assert [call["argv"] for call in slurm.calls("scancel")] == [["5000"]]
    assert (sorted(os.listdir(home)), sorted(os.listdir(home / "tasks")), (home / "sweep.json").read_text()) == before


def test_a_sweep_may_be_resumed_with_a_fixed_job_file(slurm: FakeSlurm, folder: Path) -> None:
    answer = submitted(slurm, folder)
    home = answer["sweep_dir"]
    for point in answer["points"]:
        end(Path(point["run_dir"]), "FAILED" if point["index"] == 0 else "COMPLETED")
    write(folder, workers=[{"command": "true --mended {lr} {bs}"}])
    slurm.say("sbatch", "out", "5000\n")
    done = command(slurm, folder, "submit", "job.yaml", "--resume", home, "--json")
    assert done.returncode == 0, done.stderr
    (run,) = Path(home).glob("5000_0_*")
    assert "--mended" in (run / "plan.json").read_text()
    assert "--mended" in Path(home, "job.yaml").read_text(), "the next resume uses it too"
    write(folder, sweep={"grid": {"lr": [0.1], "bs": [8]}})
    done = command(slurm, folder, "submit", "job.yaml", "--resume", home)
    assert done.returncode == 2
    assert "job.yaml: 1 problem\n  its points differ from those of the sweep to resume: embed_lr" in done.stderr


def test_a_single_point_can_be_stopped(slurm: FakeSlurm, folder: Path) -> None:
    submitted(slurm, folder)
    slurm.say("squeue", "out", "4459_3|PENDING\n")
    done = command(slurm, folder, "stop", "4459_3")
    assert (done.returncode, done.stdout) == (0, "job 4459_3 is being stopped\n")
    assert [call["argv"] for call in slurm.calls("scancel")] == [["4459_3"]]


def test_a_sweep_is_watched_reported_and_stopped_by_its_id_from_anywhere(slurm: FakeSlurm, folder: Path) -> None:
    submitted(slurm, folder)
    elsewhere = folder.parent
    slurm.say("squeue", "out", "4459_0|RUNNING\n4459_1|PENDING\n")
    watched = command(slurm, elsewhere, "watch", "--once", "4459")
    assert watched.returncode == 10
    assert watched.stdout.splitlines()[-1].endswith("1 RUNNING, 1 PENDING, 4 MISSING")
    assert watched.stdout == command(slurm, elsewhere, "report", "4459").stdout
    assert command(slurm, elsewhere, "stop", "4459").stdout == "sweep 4459 is being stopped\n"
    assert [call["argv"] for call in slurm.calls("scancel")] == [["4459"]]
    refused = command(slurm, elsewhere, "logs", "4459")
    assert refused.returncode == 2
    assert refused.stderr == "gpujob: '4459' is a sweep; name one of its points, as in 4459_0\n"
    slurm.say("squeue", "out", "")
    assert command(slurm, elsewhere, "stop", "4459").stdout == "sweep 4459 has ended\n"
