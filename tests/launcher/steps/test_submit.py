"""Submitting to Slurm, with fake Slurm commands on PATH."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from exporter.contract import run_files
from exporter.slurm.commands_reader import clean_environment as slurm_environment
from launcher.cli.main import commands
from launcher.errors import SlurmError, SlurmTimeoutError
from launcher.planner import planned_job
from launcher.rundir.job_records import stop_request, stop_request_text
from launcher.steps import slurm_steps
from launcher.steps.batch_script import sbatch_arguments
from launcher.steps.slurm_steps import read_kill_wait_s, run_command, submit_held
from tests.support.builders import orchestrator_record
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import HARD_NAMES, clean_environment, gpujob, job_spec, plan_of, read_json

JOB: dict[str, Any] = {
    "name": "embed v2",
    "resources": {"nodes": 2, "gpus_per_node": 1},
    "workers": [{"count": 2, "gpus": 1, "command": "true {rank}"}],
    "slurm": {"partition": "gpu", "account": "nlp2", "time_limit": "00:10:00"},
    "env": {"LANGUAGE": "en"},
}
FILES = [
    *("config.yaml", "manifest.json", "plan.json", "progress", "sbatch_script.sh", "sidecars", "state.json", "status"),
    *("survey.json", "token", "workers"),
]  # contents of a run directory before the job has an id


def submit(
    slurm: FakeSlurm, folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return gpujob("submit", "job.yaml", *options, cwd=folder, env=slurm.environment() | dict(env or {}))


def names_in_logs(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "logs")) if (folder / "logs").exists() else []


def test_a_job_is_held_until_its_run_directory_is_complete(slurm: FakeSlurm, folder: Path) -> None:
    done = submit(slurm, folder)
    assert (done.returncode, done.stderr) == (0, "")
    calls = slurm.calls()
    assert [call["command"] for call in calls] == ["sinfo", "scontrol", "sbatch", "scontrol"]
    _, asked, submitted, released = calls
    assert asked["argv"] == ["show", "config"]
    assert submitted["argv"][:2] == ["--parsable", "--hold"]
    assert len(submitted["argv"]) == 3
    assert submitted["files"] == FILES
    assert released["argv"] == ["release", "4459"]
    ((name, files),) = released["run_dirs"].items()
    assert re.fullmatch(r"4459_embed_v2_\d{8}_\d{6}", name)
    assert files == sorted([*FILES, "4459.json"])
    run_dir = folder / "logs" / name
    assert names_in_logs(folder) == [name]
    assert (run_dir / "sbatch_script.sh").read_text() == submitted["script"]
    assert f"--output={run_dir.parent}/%j_{name.partition('_')[2]}/log.out" in submitted["script"]
    assert done.stdout.splitlines() == [
        "Submitted batch job 4459",
        f"Logs: {run_dir}/",
        "Watch: gpujob watch 4459",
        "Connect: gpujob connect 4459",
        "Stop: gpujob stop 4459",
    ]


def test_more_nodes_than_the_partition_has_are_refused_before_the_submission(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("sinfo", "out", "gpu|up|infinite|4|gpu:8\n")
    done = submit(slurm, folder, "--nodes", "9")
    problem = "--nodes: 9 requested and gpu has 4; ask for less, or use another partition"
    assert done.returncode == 2
    assert done.stderr.endswith(f"gpujob: job.yaml: 1 problem\n  {problem}\n")
    assert [call["command"] for call in slurm.calls()] == ["sinfo"]
    assert names_in_logs(folder) == []


def test_a_job_is_submitted_although_slurm_does_not_show_its_partitions(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("sinfo", "status", 1)
    done = submit(slurm, folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_run_directory_records_the_submission(slurm: FakeSlurm, folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "env": {"HF_TOKEN": "hunter2"}}))
    printed = json.loads(submit(slurm, folder, "--json").stdout)
    run_dir = Path(printed["run_dir"])
    assert printed == {"schema": 1, "job_id": "4459", "run_dir": str(run_dir), "nodes": 2}
    record = read_json(run_dir / "4459.json")
    assert (record["job_id"], record["job_name"], record["workdir"]) == ("4459", "embed v2", str(folder))
    assert record["versions"]["gpujob"]
    assert "hunter2" not in "".join(
        path.read_text() for path in run_dir.iterdir() if path.is_file() and path.name != "plan.json"
    )
    assert (run_dir / "plan.json").stat().st_mode & 0o777 == 0o600
    assert read_json(run_dir / "state.json")["phase"] == "launching"


def test_submit_passes_the_script_of_plan_to_sbatch(slurm: FakeSlurm, folder: Path) -> None:
    shown = json.loads(gpujob("plan", "job.yaml", "--json", cwd=folder).stdout)["script"]
    submit(slurm, folder)
    (call,) = slurm.calls("sbatch")
    timestamp = re.compile(r"\d{8}_\d{6}")
    assert timestamp.sub("TIME", call["script"]) == timestamp.sub("TIME", shown)


def test_a_refusal_is_reported_with_the_slurm_options(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("sbatch", "status", 1)
    slurm.say("sbatch", "out", "")
    refusal = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    slurm.say("sbatch", "err", f"sbatch: error: Batch job submission failed: Invalid account\n{refusal}\n")
    done = submit(slurm, folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpujob: sbatch exited with 1 and no job was submitted: ")
    assert "Invalid account or account/partition combination specified" in done.stderr
    assert "sbatch: error" not in done.stderr
    assert "partition: gpu   account: nlp2   time_limit: 00:10:00" in done.stderr
    assert names_in_logs(folder) == []
    assert [call["command"] for call in slurm.calls()] == ["sinfo", "scontrol", "sbatch"]


def test_a_refusal_names_all_requested_options(slurm: FakeSlurm, folder: Path) -> None:
    options = {
        "dependency": "afterok:1",
        "exclusive": True,
        "segment": 2,
        "signal": "USR1@60",
        "requeue": {"preempted": True},
        "directives": {"constraint": "h100", "reboot": False},
    }
    resources = {**JOB["resources"], "gpu_type": "h100", "memory_per_node": "64G"}
    job = {**JOB, "slurm": {**JOB["slurm"], **options}, "resources": resources}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    slurm.say("sbatch", "status", 1)
    done = submit(slurm, folder)
    node, job_line = done.stderr.splitlines()[-2:]
    assert node == "  nodes: 2   gpus_per_node: 1   gpu_type: h100   cpus_per_node: 2   memory_per_node: 64G"
    assert job_line == (
        "  partition: gpu   account: nlp2   time_limit: 00:10:00   dependency: afterok:1   exclusive: yes   "
        "segment: 2   signal: USR1@60   requeue: preempted   constraint: h100"
    )


def test_a_job_of_another_cluster_is_released_queried_and_stopped_there(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("sbatch", "out", "sbatch: lua: welcome\n4459;other\n")
    assert submit(slurm, folder).returncode == 0
    assert slurm.calls("scontrol")[-1]["argv"] == ["--clusters=other", "release", "4459"]
    slurm.say("squeue", "out", "CLUSTER: other\nPENDING\n")
    seen = gpujob("watch", "4459", "--once", "--json", cwd=folder, env=slurm.environment())
    assert json.loads(seen.stdout)["state"] == "PENDING"
    assert slurm.calls("squeue")[-1]["argv"][0] == "--clusters=other"
    assert gpujob("stop", "4459", cwd=folder, env=slurm.environment()).returncode == 0
    assert slurm.calls("scancel")[-1]["argv"] == ["--clusters=other", "4459"]
    slurm.say("squeue", "out", "CLUSTER: other\n")
    gpujob("report", "4459", cwd=folder, env=slurm.environment())
    assert {call["argv"][0] for call in slurm.calls() if call["command"] in ("sacct", "scontrol")} >= {
        "--clusters=other"
    }


def test_a_job_is_planned_once(slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    slurm.say("scontrol", "config", "KillWait                = 77 sec\n")
    planned: list[str] = []

    def counted(job: planned_job.JobText, **options: Any) -> planned_job.PlannedJob:
        planned.append(job.source)
        return read_planned_job(job, **options)

    read_planned_job = planned_job.read_planned_job
    monkeypatch.setattr(planned_job, "read_planned_job", counted)
    done = CliRunner().invoke(commands, ["submit", "job.yaml", "--json"])
    assert done.exit_code == 0, done.output
    assert planned == ["job.yaml"]
    run_dir = Path(json.loads(done.output)["run_dir"])
    assert read_json(run_dir / "plan.json")["kill_wait_s"] == 77.0
    assert read_json(run_dir / "manifest.json")["kill_wait_s"] == 77.0


def test_a_dependency_of_the_command_reaches_sbatch(slurm: FakeSlurm, folder: Path) -> None:
    done = submit(slurm, folder, "--dependency", "afterok:4458")
    assert (done.returncode, done.stderr) == (0, "")
    (call,) = slurm.calls("sbatch")
    assert "#SBATCH --dependency=afterok:4458" in call["script"].splitlines()
    (config,) = folder.glob("logs/4459_*/config.yaml")
    assert yaml.safe_load(config.read_text())["slurm"]["dependency"] == "afterok:4458"


def test_an_invalid_dependency_is_refused_before_any_command(slurm: FakeSlurm, folder: Path) -> None:
    done = submit(slurm, folder, "--dependency", "4458")
    message = 'gpujob: --dependency: \'4458\' is not a dependency; write for example "afterok:4459" or "singleton"\n'
    assert (done.returncode, done.stderr, slurm.calls()) == (2, message, [])


def test_without_slurm_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/true").symlink_to("/bin/true")
    done = gpujob("submit", "job.yaml", cwd=folder, env=clean_environment(PATH=str(tmp_path / "empty")))
    assert (done.returncode, done.stdout) == (2, "")
    assert "sbatch: is not on PATH; load the Slurm module, or use `gpujob run`" in done.stderr
    assert os.listdir(folder) == ["job.yaml"]


def test_a_job_that_cannot_work_is_not_submitted(slurm: FakeSlurm, folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "workers": [{"command": "python3 missing.py"}]}))
    done = submit(slurm, folder)
    assert done.returncode == 2
    assert 'workers (worker).command: "missing.py" does not exist in' in done.stderr
    assert [call["command"] for call in slurm.calls()] == ["sinfo"]
    assert os.listdir(folder) == ["job.yaml"]


def test_an_sbatch_answer_without_a_job_id_is_reported(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("sbatch", "out", "what a nice day\n")
    done = submit(slurm, folder)
    assert done.returncode == 2
    assert "what a nice day" in done.stderr
    assert names_in_logs(folder) == []


def test_variables_of_sbatch_say_who_pays_and_where_and_change_nothing_else(slurm: FakeSlurm, folder: Path) -> None:
    chosen = {"ACCOUNT": "other", "PARTITION": "other", "QOS": "high", "RESERVATION": "r1"}
    given = {f"SBATCH_{option}": value for option, value in {**chosen, "EXPORT": "NONE"}.items()}
    submit(slurm, folder, env={**given, "MY_SBATCH_": "x"})
    (call,) = slurm.calls("sbatch")
    assert {"#SBATCH --qos=high", "#SBATCH --reservation=r1"} <= set(call["script"].splitlines())
    assert "other" not in call["script"]  # the job file names account and partition
    assert not [name for name in call["env"] if name.startswith("SBATCH_")]
    assert call["stdin"] == ""


def test_a_job_submitted_from_a_requeued_job_begins_as_its_first_attempt(slurm: FakeSlurm, folder: Path) -> None:
    submit(slurm, folder, env={"SLURM_RESTART_COUNT": "2", "SLURM_CONF": "/etc/slurm/slurm.conf"})
    (call,) = slurm.calls("sbatch")
    assert "SLURM_RESTART_COUNT" not in call["env"], "sbatch would pass it on"
    assert call["env"]["SLURM_CONF"] == "/etc/slurm/slurm.conf"


def test_a_job_that_cannot_be_released_is_cancelled_without_traces(slurm: FakeSlurm, folder: Path) -> None:
    slurm.say("scontrol", "status", 1)
    slurm.say("scontrol", "err", "slurm_update error: Access denied\n")
    done = submit(slurm, folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "scontrol exited with 1: slurm_update error: Access denied" in done.stderr
    assert slurm.calls("scancel")[0]["argv"] == ["4459"]
    assert names_in_logs(folder) == []


def test_failures_of_release_and_cancel_are_both_reported(slurm: FakeSlurm, folder: Path) -> None:
    for command in ("scontrol", "scancel"):
        slurm.say(command, "status", 1)
        slurm.say(command, "err", f"{command} is ill\n")
    done = submit(slurm, folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "scontrol is ill" in done.stderr
    assert "scancel is ill" in done.stderr
    assert "4459" in done.stderr


def test_hard_names_reach_sbatch_as_data(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*(name for name in HARD_NAMES if "\\" not in name))
    folder.mkdir(parents=True)
    job = {**JOB, "name": "".join(HARD_NAMES)}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    done = submit(slurm, folder, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    run_dir = Path(json.loads(done.stdout)["run_dir"])
    assert run_dir.parent == folder / "logs"
    (call,) = slurm.calls("sbatch")
    expected = sbatch_arguments(plan_of(job_spec(**job), workdir=str(folder)))
    assert [word.partition("=")[0] for word in call["argv"][2:-1]] == [word.partition("=")[0] for word in expected]
    assert f"--chdir={folder}" in call["argv"]
    assert (call["argv"][-1], slurm.calls("scontrol")[-1]["argv"]) == (call["argv"][-1], ["release", "4459"])
    assert not list(tmp_path.rglob("pwned"))


def test_a_folder_that_slurm_cannot_write_to_is_reported(slurm: FakeSlurm, tmp_path: Path) -> None:
    folder = tmp_path / "back\\slash"
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    done = submit(slurm, folder)
    assert done.returncode == 2
    assert "backslash" in done.stderr
    assert os.listdir(folder) == ["job.yaml"]


# One command


@pytest.fixture
def on_path(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Fake Slurm commands for code in this process."""
    for name, value in slurm.environment().items():
        monkeypatch.setenv(name, value)
    return slurm


def test_a_slurm_command_runs_in_a_fixed_locale(on_path: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_FORMAT", "SQUEUE_USERS", "SLURM_TIME_FORMAT", "LC_ALL"):
        monkeypatch.setenv(name, "x")
    assert run_command(["squeue", "-h", "-j", "1"]) == "RUNNING\n"
    (call,) = on_path.calls()
    assert (call["argv"], call["env"]) == (["-h", "-j", "1"], {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"})


def test_scancel_never_asks_for_confirmation() -> None:
    assert slurm_environment({"SCANCEL_INTERACTIVE": "1", "SCONTROL_ALL": "1", "A": "a"}).keys() == {
        *("A", "LC_ALL", "SLURM_TIME_FORMAT")
    }


def test_a_missing_failing_or_hanging_command_is_reported(on_path: FakeSlurm) -> None:
    with pytest.raises(SlurmError, match="sacct-of-nobody is not on PATH; load the Slurm module"):
        run_command(["sacct-of-nobody"])
    on_path.say("squeue", "status", 1)
    on_path.say("squeue", "err", "slurm_load_jobs error: Invalid job id specified\n")
    with pytest.raises(SlurmError, match=r"^squeue exited with 1: slurm_load_jobs error: Invalid job id specified$"):
        run_command(["squeue"])
    on_path.say("squeue", "sleep", 30)
    with pytest.raises(SlurmError, match=r"^squeue did not answer in 0\.3 s$"):
        run_command(["squeue"], timeout_s=0.3)


def test_a_state_of_accounting_that_is_not_final_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "sacct": "100|Unknown|RUNNING\n",
        "scontrol": "   JobState=NODE_FAIL Reason=NodeDown Dependency=(null)\n",
    }
    monkeypatch.setattr(slurm_steps, "run_reading", lambda argv, *_: answers[argv[0]])
    assert slurm_steps.read_final_state("7") == "NODE_FAIL"
    answers["sacct"] = "100|200|CANCELLED by 1000\n"
    assert slurm_steps.read_final_state("7") == "CANCELLED"
    answers |= {"sacct": "", "scontrol": "   JobState=COMPLETING Reason=None\n"}
    assert slurm_steps.read_final_state("7") is None


def test_the_end_of_another_job_with_the_id_is_not_that_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = ["100|900|NODE_FAIL", "910|5000|FAILED", "9000|9100|TIMEOUT"]  # the second is this job, requeued
    answers = {"sacct": "\n".join(attempts), "scontrol": "Requeue=1 Restarts=0\n JobState=FAILED SubmitTime=9000\n"}
    monkeypatch.setattr(slurm_steps, "run_reading", lambda argv, *_: answers[argv[0]])
    found = [slurm_steps.read_final_state("7", None, submitted) for submitted in (101.0, 8999.0, 7000.0)]
    assert found == ["FAILED", "TIMEOUT", None]
    answers["sacct"] = ""
    assert [slurm_steps.read_final_state("7", None, submitted) for submitted in (101.0, 8999.0)] == [None, "FAILED"]


def test_kill_wait_has_a_default_without_an_answer(on_path: FakeSlurm) -> None:
    assert read_kill_wait_s(12.0) == 12.0
    on_path.say("scontrol", "config", "nothing of interest")
    assert read_kill_wait_s(12.0) == 12.0
    on_path.say("scontrol", "config", "KillWait = 5 sec")
    assert read_kill_wait_s(12.0) == 5.0


def test_a_submission_without_an_answer_is_reported(
    on_path: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path.say("sbatch", "sleep", 30)
    monkeypatch.setattr(slurm_steps, "COMMAND_TIMEOUT_S", 0.3)
    (tmp_path / "script.sh").write_text("")
    with pytest.raises(SlurmError, match=r"sbatch did not answer in 0\.3 s"):
        submit_held(plan_of(), tmp_path / "script.sh")


# After the submission


def test_a_queued_job_is_pending(slurm: FakeSlurm, folder: Path) -> None:
    run_dir = json.loads(submit(slurm, folder, "--json").stdout)["run_dir"]
    slurm.say("squeue", "out", "PENDING\n")
    done = gpujob("watch", "4459", "--once", "--json", cwd=folder, env=slurm.environment())
    view = json.loads(done.stdout)
    assert (done.returncode, view["state"], view["run_dir"]) == (10, "PENDING", run_dir)
    assert [worker["state"] for worker in view["workers"]] == ["not_found", "not_found"]
    done = gpujob("report", "4459", "--json", cwd=folder, env=slurm.environment())
    assert (done.returncode, json.loads(done.stdout)["state"]) == (10, "PENDING")


def test_a_job_that_slurm_no_longer_knows_is_unknown(slurm: FakeSlurm, folder: Path) -> None:
    submit(slurm, folder)
    slurm.say("squeue", "out", "")
    done = gpujob("watch", "4459", "--once", "--json", cwd=folder, env=slurm.environment())
    assert (done.returncode, json.loads(done.stdout)["state"]) == (9, "UNKNOWN")


def test_stopping_a_job_cancels_it(slurm: FakeSlurm, folder: Path) -> None:
    submit(slurm, folder)
    slurm.say("squeue", "out", "PENDING\n")
    done = gpujob("stop", "4459", cwd=folder, env=slurm.environment())
    assert (done.returncode, done.stdout) == (0, "job 4459 is being stopped\n")
    assert slurm.calls("scancel")[0]["argv"] == ["4459"]
    assert len(list(folder.glob("logs/4459_*/stop_request.json"))) == 1


def test_a_job_is_stopped_without_its_sidecars(slurm: FakeSlurm, folder: Path) -> None:
    submit(slurm, folder)
    slurm.say("squeue", "out", "RUNNING\n")
    (run_dir,) = folder.glob("logs/4459_*/")
    run_files.write_json(run_dir / run_files.ORCHESTRATOR_FILE, orchestrator_record(job_id="4459", local=False))
    with socket.create_server(("127.0.0.1", 0)) as sidecar:
        sidecar.setblocking(False)
        record = {"attempt": 0, "address": f"127.0.0.1:{sidecar.getsockname()[1]}", "labels": {}}
        run_files.write_json(run_dir / run_files.SIDECARS_DIR / "cn01.json", record)
        done = gpujob("stop", "4459", cwd=folder, env=slurm.environment())
        assert (done.returncode, done.stdout) == (0, "job 4459 is being stopped\n")
        with pytest.raises(BlockingIOError):
            sidecar.accept()


def test_a_stop_that_failed_does_not_explain_a_later_end(slurm: FakeSlurm, folder: Path) -> None:
    submit(slurm, folder)
    slurm.say("squeue", "out", "PENDING\n")
    slurm.say("scancel", "status", 1)
    slurm.say("scancel", "err", "slurm_load_jobs error: Unable to contact slurm controller\n")
    assert gpujob("stop", "4459", cwd=folder, env=slurm.environment()).returncode == 2
    assert not list(folder.glob("logs/4459_*/stop_request.json"))


def test_a_repeated_stop_that_fails_keeps_the_request_of_the_first(slurm: FakeSlurm, folder: Path) -> None:
    submit(slurm, folder)
    slurm.say("squeue", "out", "PENDING\n")
    assert gpujob("stop", "4459", cwd=folder, env=slurm.environment()).returncode == 0
    (request,) = folder.glob("logs/4459_*/stop_request.json")
    first = {**read_json(request), "user": "eva"}
    request.write_text(json.dumps(first))
    slurm.say("scancel", "status", 1)
    assert gpujob("stop", "4459", cwd=folder, env=slurm.environment()).returncode == 2
    assert read_json(request) == first


@pytest.mark.parametrize("error", [SlurmTimeoutError("scancel did not answer in 30 s"), KeyboardInterrupt()])
def test_a_stop_that_may_be_on_its_way_keeps_its_request(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), stop_request(tmp_path, "ana"):
        raise error
    assert stop_request_text(tmp_path, 0) is not None
