"""`gpujob pipeline`, and a pipeline in other commands, with fake Slurm commands on PATH."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.contract import run_files
from launcher.pipeline.directory import PartState, pipeline_exit_status
from launcher.track.selection import select
from tests.launcher.sweep.test_directory import ENDED
from tests.support.fake_slurm import BIN, FakeSlurm
from tests.support.launcher import gpujob, read_json

JOB: dict[str, Any] = {"name": "part", "workers": [{"command": "true"}], "slurm": {"time_limit": "1:00:00"}}
PIPELINE = """\
name: r8
jobs:
  eval: {file: job.yaml, after: {train: any}}
  train: {file: job.yaml, after: prep}
  prep: {file: job.yaml}
"""
COUNTING_SBATCH = f"""\
#!/bin/sh
id=$(($(cat "$FAKE_SLURM/id" 2>/dev/null || echo 0) + 1))
echo $id > "$FAKE_SLURM/id"
[ "$id" = "$(cat "$FAKE_SLURM/fails_at" 2>/dev/null)" ] && echo 1 > "$FAKE_SLURM/sbatch.status"
echo $id > "$FAKE_SLURM/sbatch.out"
exec {BIN}/sbatch "$@"
"""
ROW = "{id}|{state}|{reason}|{submitted}|N/A|N/A|5:00|0||gpu|cpu=1|{id}|ada|lab|normal|1|{dependency}|/dev/null|part|\n"


def row_of(job_id: str, state: str, reason: str, dependency: str) -> str:
    """A job that was submitted just now, as squeue prints it."""
    facts = {"id": job_id, "state": state, "reason": reason, "dependency": dependency}
    return ROW.format(**facts, submitted=round(time.time()))


class Pipeline:
    """A folder with a pipeline, and the commands that run there."""

    def __init__(self, slurm: FakeSlurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        (folder / "r8.yaml").write_text(PIPELINE)
        sbatch = folder / "bin" / "sbatch"
        sbatch.parent.mkdir()
        sbatch.write_text(COUNTING_SBATCH)
        sbatch.chmod(0o755)
        environment = slurm.environment()
        self.environment = {**environment, "PATH": f"{sbatch.parent}{os.pathsep}{environment['PATH']}"}

    def command(self, *args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return gpujob(*args, cwd=cwd or self.folder, env=self.environment)

    def submit(self) -> dict[str, Any]:
        done = self.command("pipeline", "r8.yaml", "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def queue(self, *rows: tuple[str, str, str, str]) -> None:
        """Set what squeue prints: id, state, reason, dependency."""
        self.slurm.say("squeue", "out", "".join(row_of(*row) for row in rows))

    def names_in_logs(self) -> list[str]:
        return sorted(os.listdir(self.folder / "logs")) if (self.folder / "logs").exists() else []


@pytest.fixture
def pipeline(slurm: FakeSlurm, folder: Path) -> Pipeline:
    return Pipeline(slurm, folder)


def end(run_dir: str, job_id: str, state: str) -> None:
    """Write the report of a job that ended in this state."""
    facts = {"job_id": job_id, "attempt": 0, "hosts": ["cn01"], "start": 1.0, "pid": 1, "host": "x", "local": False}
    run_files.write_json(Path(run_dir) / run_files.ORCHESTRATOR_FILE, facts)
    run_files.write_json(Path(run_dir) / run_files.REPORT_FILE, {**ENDED, "state": state})


def test_all_jobs_are_held_until_the_record_is_written(pipeline: Pipeline) -> None:
    done = pipeline.command("pipeline", "r8.yaml")
    assert done.returncode == 0, done.stderr
    calls = [call for call in pipeline.slurm.calls() if call["argv"] != ["show", "config"]]
    changing = [call for call in calls if call["command"] != "sinfo"]
    assert [call["command"] for call in changing] == ["sbatch"] * 3 + ["scontrol"] * 3
    assert all(call["argv"][:2] == ["--parsable", "--hold"] for call in changing[:3])
    scripts = [call["script"] for call in changing[:3]]
    assert "--dependency" not in scripts[0]
    assert "#SBATCH --dependency=afterok:1\n" in scripts[1]
    assert "#SBATCH --dependency=afterany:2\n" in scripts[2]
    assert [call["argv"] for call in changing[3:]] == [["release", "1"], ["release", "2"], ["release", "3"]]
    (name,) = (name for name in changing[3]["run_dirs"] if name.startswith("pipeline_r8_"))
    assert changing[3]["run_dirs"][name] == ["pipeline.json"]
    directory = pipeline.folder / "logs" / name
    record = read_json(directory / "pipeline.json")
    assert [(part["name"], part["job_id"], part["after"]) for part in record["parts"]] == [
        ("prep", "1", {}),
        ("train", "2", {"prep": "ok"}),
        ("eval", "3", {"train": "any"}),
    ]
    assert all(Path(part["run_dir"], "manifest.json").is_file() for part in record["parts"])
    assert done.stdout.splitlines() == [
        *("Submitted batch job 1: prep", "Submitted batch job 2: train", "Submitted batch job 3: eval"),
        f"Watch: gpujob watch {directory}",
        f"Stop: gpujob stop {directory}",
    ]


def test_a_dry_run_prints_the_plan_and_submits_nothing(pipeline: Pipeline) -> None:
    done = pipeline.command("pipeline", "r8.yaml", "--dry-run")
    assert (done.returncode, pipeline.slurm.calls("sbatch"), pipeline.names_in_logs()) == (0, [], [])
    assert done.stdout.splitlines() == [
        "job    file      after      nodes  GPUs  time limit",
        "prep   job.yaml  -          1      0     1:00:00",
        "train  job.yaml  prep ok    1      0     1:00:00",
        "eval   job.yaml  train any  1      0     1:00:00",
    ]
    body = json.loads(pipeline.command("pipeline", "r8.yaml", "--dry-run", "--json").stdout)
    assert [job["after"] for job in body["jobs"]] == [{}, {"prep": "ok"}, {"train": "any"}]


def test_a_failure_in_the_middle_leaves_nothing(pipeline: Pipeline) -> None:
    (pipeline.slurm.folder / "fails_at").write_text("3")
    pipeline.slurm.say("sbatch", "err", "sbatch: error: Invalid account\n")
    done = pipeline.command("pipeline", "r8.yaml")
    assert done.returncode == 2
    assert "sbatch exited with 1 and no job was submitted" in done.stderr
    assert [call["argv"] for call in pipeline.slurm.calls("scancel")] == [["2"], ["1"]]
    assert pipeline.names_in_logs() == []


def test_jobs_that_cannot_be_released_are_cancelled(pipeline: Pipeline) -> None:
    pipeline.slurm.say("scontrol", "status", 1)
    pipeline.slurm.say("scancel", "status", 1)
    done = pipeline.command("pipeline", "r8.yaml")
    assert done.returncode == 2
    assert "jobs on hold that could not be cancelled: 3 (scancel exited with 1" in done.stderr
    assert [call["argv"] for call in pipeline.slurm.calls("scancel")] == [["3"], ["2"], ["1"]]
    assert pipeline.names_in_logs() == []


def test_a_job_that_can_never_start_is_told_with_its_cure_and_counts_as_ended(pipeline: Pipeline) -> None:
    jobs = pipeline.submit()["jobs"]
    pipeline.queue(("1", "RUNNING", "None", "(null)"), *_waiting("Dependency"))
    running = pipeline.command("watch", "r8", "--once", cwd=pipeline.folder.parent)
    assert running.returncode == 10, running.stderr
    assert running.stdout.splitlines()[-1] == "3 jobs: 1 RUNNING, 2 PENDING"
    end(jobs[0]["run_dir"], "1", "OUT_OF_MEMORY")
    pipeline.queue(*_waiting("DependencyNeverSatisfied"))
    shown = pipeline.command("watch", "r8")  # ends at once
    lines = [line.split("  ") for line in shown.stdout.splitlines()]
    words = [[word.strip() for word in line if word] for line in lines]
    assert words[0] == ["job", "state", "after", "id", "took", "cause"]
    assert words[1][:4] == ["prep", "OUT_OF_MEMORY", "-", "1"]
    assert words[2] == ["train", "never (needs prep)", "prep ok", "2", "to cancel it: scancel 2"]
    assert words[3] == ["eval", "never (needs train)", "train any", "3", "to cancel it: scancel 3"]
    assert words[4] == ["3 jobs: 1 OUT_OF_MEMORY, 2 never"]
    assert shown.returncode == 4
    reported = pipeline.command("report", "pipeline-1", "--json")
    body = json.loads(reported.stdout)
    assert (reported.returncode, body["exit_status"]) == (4, 4)
    assert [(job["state"], job["needs"]) for job in body["jobs"]][1:] == [("NEVER", ["prep"]), ("NEVER", ["train"])]
    stopped = pipeline.command("stop", "r8")
    assert stopped.stdout == "pipeline r8 is being stopped: train, eval\n"
    assert [call["argv"] for call in pipeline.slurm.calls("scancel")] == [["3"], ["2"]]
    requests = [Path(job["run_dir"], run_files.STOP_REQUEST_FILE) for job in jobs]
    assert [path.exists() for path in requests] == [False, True, True]
    requests[2].unlink()
    pipeline.slurm.say("scancel", "status", 1)
    assert pipeline.command("stop", "r8").returncode == 2
    assert [path.exists() for path in requests] == [False, True, False], "the last one cannot be stopped"


def _waiting(reason: str) -> tuple[tuple[str, str, str, str], ...]:
    return (
        ("2", "PENDING", reason, "afterok:1(failed)"),
        ("3", "PENDING", "Dependency", "afterany:2(unfulfilled)"),
    )


def test_all_completed_is_status_0_without_a_question_to_slurm(pipeline: Pipeline) -> None:
    for job in pipeline.submit()["jobs"]:
        end(job["run_dir"], job["job_id"], "COMPLETED")
    pipeline.slurm.say("squeue", "status", 1)
    done = pipeline.command("report", "r8")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "3 jobs: 3 COMPLETED")
    assert pipeline.command("stop", "r8").stdout == "pipeline r8 has ended\n"


def test_a_pipeline_goes_on_while_slurm_runs_its_last_job_again(pipeline: Pipeline) -> None:
    states = {"1": "COMPLETED", "2": "COMPLETED", "3": "PREEMPTED"}
    for job in pipeline.submit()["jobs"]:
        end(job["run_dir"], job["job_id"], states[job["job_id"]])
    pipeline.queue(("3", "PENDING", "BeginTime", "(null)"))
    done = pipeline.command("watch", "r8", "--once")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (10, "3 jobs: 2 COMPLETED, 1 PENDING")
    pipeline.queue(("3", "RUNNING", "None", "(null)"))
    assert pipeline.command("watch", "r8", "--once").returncode == 7, "its batch step ends"
    row = row_of("3", "RUNNING", "None", "(null)").replace("|5:00|0|", "|5:00|1|")
    pipeline.slurm.say("squeue", "out", row)
    done = pipeline.command("watch", "r8", "--once")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (10, "3 jobs: 2 COMPLETED, 1 RUNNING")


def test_a_job_for_a_failure_that_did_not_happen_is_no_failure(pipeline: Pipeline) -> None:
    text = "name: r8\njobs: {prep: {file: job.yaml}, mend: {file: job.yaml, after: {prep: notok}}}\n"
    (pipeline.folder / "r8.yaml").write_text(text)
    jobs = pipeline.submit()["jobs"]
    end(jobs[0]["run_dir"], "1", "COMPLETED")
    pipeline.queue(("2", "PENDING", "DependencyNeverSatisfied", "afternotok:1(failed)"))
    done = pipeline.command("watch", "r8", "--once")
    assert "never (needs prep)" in done.stdout
    assert done.returncode == 0
    pipeline.queue()
    for state, known in (("CANCELLED", "JobState=CANCELLED\n"), ("UNKNOWN", "")):  # as the table says; then forgotten
        pipeline.slurm.say("scontrol", "job", known)
        for command in ("report", "watch"):
            done = pipeline.command(command, "r8")
            assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"2 jobs: 1 COMPLETED, 1 {state}")


@pytest.mark.parametrize(("known", "state"), [("CANCELLED by 1000", "CANCELLED"), ("PENDING", "MISSING")])
def test_a_sweep_for_a_failure_that_did_not_happen_is_no_failure(pipeline: Pipeline, known: str, state: str) -> None:
    """Its points were cancelled while they waited; accounting may not have learnt that."""
    sweep = {**JOB, "name": "mend", "env": {"X": "{x}"}, "sweep": {"grid": {"x": [1, 2]}}}
    (pipeline.folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    text = "name: r8\njobs: {prep: {file: job.yaml}, mend: {file: sweep.yaml, after: {prep: notok}}}\n"
    (pipeline.folder / "r8.yaml").write_text(text)
    end(pipeline.submit()["jobs"][0]["run_dir"], "1", "COMPLETED")
    pipeline.queue()
    pipeline.slurm.replace("sacct", f'echo "2_[0-1]|$(date +%s)|$(date +%s)|{known}"')
    done = pipeline.command("watch", "r8")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"2 jobs: 1 COMPLETED, 1 {state}")


@pytest.mark.parametrize(
    ("over", "before", "status"),
    [
        ({}, "COMPLETED", 0),
        ({"points": {"CANCELLED": 3}}, "COMPLETED", 0),
        ({"points": {"CANCELLED": 2, "COMPLETED": 1}}, "COMPLETED", 5),
        ({"duration_s": 3.0}, "COMPLETED", 5),  # it had started
        ({"after": {"prep": "ok"}}, "COMPLETED", 5),
        ({"after": {"prep": "notok", "train": "ok"}}, "COMPLETED", 5),  # train failed
        ({"after": {}}, "COMPLETED", 5),
        ({}, "FAILED", 5),
        ({"state": "FAILED"}, "COMPLETED", 1),
    ],
)
def test_a_cancelled_job_is_no_failure_only_if_it_was_not_needed(
    over: dict[str, Any], before: str, status: int
) -> None:
    prep = PartState("prep", "1", "/logs/1", before, {}, duration_s=9.0)
    train = PartState("train", "2", "/logs/2", "FAILED" if "train" in over.get("after", {}) else "COMPLETED", {})
    values: dict[str, Any] = {"state": "CANCELLED", "after": {"prep": "notok"}, **over}
    assert pipeline_exit_status((PartState("mend", "3", "/logs/3", **values), prep, train)) == status


def test_a_pipeline_is_known_by_its_directory_and_name(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = pipeline.submit()
    monkeypatch.setenv("XDG_STATE_HOME", pipeline.environment["XDG_STATE_HOME"])
    for word in ("r8", answer["pipeline_dir"]):
        found = select([word], os.environ, pipeline.folder)
        assert found.ids == ("1", "2", "3")
        assert [run.name for run in found.own_runs.values()] == ["prep", "train", "eval"]
    refused = pipeline.command("logs", "r8")
    assert refused.stderr == "gpujob: 'r8' is a pipeline; name one of its jobs, as `gpujob watch` shows them\n"
    pipeline.slurm.say("squeue", "err", "slurm_load_jobs error: Unable to contact slurm controller\n")
    pipeline.slurm.say("squeue", "status", 1)
    unanswered = pipeline.command("watch", "r8", "--once")
    assert (unanswered.returncode, unanswered.stdout) == (2, "")
    assert unanswered.stderr.startswith("gpujob: squeue exited with 1: slurm_load_jobs error")


def test_a_sweep_in_a_pipeline_is_held_recorded_shown_and_stopped_like_a_job(pipeline: Pipeline) -> None:
    sweep = {**JOB, "name": "embed", "env": {"X": "{x}"}, "sweep": {"grid": {"x": [1, 2, 3]}}}
    (pipeline.folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (pipeline.folder / "r8.yaml").write_text(
        "name: r8\njobs:\n  prep: {file: job.yaml}\n  embed: {file: sweep.yaml, after: prep}\n"
        "  eval: {file: sweep.yaml, after: {embed: each}}\n  sum: {file: job.yaml, after: eval}\n"
    )
    planned = pipeline.command("pipeline", "r8.yaml", "--dry-run").stdout.splitlines()
    assert planned[2].split()[:5] == ["embed", "sweep.yaml", "(3", "points)", "prep"]
    jobs = {job["name"]: job for job in pipeline.submit()["jobs"]}
    calls = [call for call in pipeline.slurm.calls() if call["command"] in ("sbatch", "scontrol")]
    scripts = [call["script"] for call in calls if call["command"] == "sbatch"]
    found = [re.findall(r"^#SBATCH --(array|dependency)=(.*)$", script, re.MULTILINE) for script in scripts]
    assert [sorted(options) for options in found] == [
        [],
        [("array", "0-2"), ("dependency", "afterok:1")],
        [("array", "0-2"), ("dependency", "aftercorr:2")],
        [("dependency", "afterok:3")],
    ]
    released = [call["argv"] for call in calls if call["argv"][:1] == ["release"]]
    assert released == [["release", str(number)] for number in range(1, 5)]

    end(jobs["prep"]["run_dir"], "1", "COMPLETED")
    home = Path(jobs["embed"]["run_dir"])
    points = sorted(path for path in home.iterdir() if path.name.startswith("2_"))
    for path, state in zip(points, ("COMPLETED", "FAILED"), strict=False):
        end(str(path), path.name[:3], state)
    pipeline.queue(
        ("2_2", "RUNNING", "None", "(null)"),
        ("3_[0-2]", "PENDING", "Dependency", "aftercorr:2_*(unfulfilled)"),
        ("4", "PENDING", "Dependency", "afterok:3_*(unfulfilled)"),
    )
    shown = pipeline.command("watch", "r8", "--once")
    lines = [re.split(r" {2,}", line) for line in shown.stdout.splitlines()]
    assert [line[:2] for line in lines[1:5]] == [
        ["prep", "COMPLETED"],
        ["embed", "RUNNING"],
        ["eval", "PENDING"],
        ["sum", "PENDING"],
    ]
    assert lines[2][-1] == "1 COMPLETED, 1 FAILED, 1 RUNNING"
    end(str(points[2]), "2_2", "COMPLETED")
    pipeline.queue(
        ("3_1", "PENDING", "DependencyNeverSatisfied", "aftercorr:2_*(failed)"),
        ("3_0", "RUNNING", "None", "(null)"),
        ("3_2", "RUNNING", "None", "(null)"),
        ("4", "PENDING", "Dependency", "afterok:3_*(unfulfilled)"),
    )
    body = json.loads(pipeline.command("report", "r8", "--json").stdout)
    assert [job["state"] for job in body["jobs"]] == ["COMPLETED", "FAILED", "RUNNING", "NEVER"]
    assert body["jobs"][1]["points"] == {"COMPLETED": 2, "FAILED": 1}
    points = json.loads(pipeline.command("watch", "3", "--once", "--json").stdout)["points"]
    assert [point["cause"] for point in points] == [None, "DependencyNeverSatisfied", None]
    pipeline.queue(
        ("3_1", "PENDING", "DependencyNeverSatisfied", "aftercorr:2_*(failed)"),
        ("4", "PENDING", "DependencyNeverSatisfied", "afterok:3_*(failed)"),
    )
    for path in sorted(Path(jobs["eval"]["run_dir"]).iterdir()):
        if path.name.startswith(("3_0", "3_2")):
            end(str(path), path.name[:3], "COMPLETED")
    done = pipeline.command("watch", "r8")
    assert "never (needs embed)" in done.stdout
    assert "to cancel it: scancel 3" in done.stdout
    assert done.returncode == 1
    assert pipeline.command("watch", "2", "--once").stdout.splitlines()[0].split()[0] == "point"
    assert pipeline.command("stop", "r8").stdout == "pipeline r8 is being stopped: eval, sum\n"
    assert [call["argv"] for call in pipeline.slurm.calls("scancel")] == [["4"], ["3"]]


def test_a_sweep_that_was_resumed_has_the_states_of_its_new_array(pipeline: Pipeline) -> None:
    sweep = {**JOB, "name": "embed", "env": {"X": "{x}"}, "sweep": {"grid": {"x": [1, 2]}}}
    (pipeline.folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (pipeline.folder / "r8.yaml").write_text("name: r8\njobs:\n  embed: {file: sweep.yaml}\n")
    (job,) = pipeline.submit()["jobs"]
    home = Path(job["run_dir"])
    for path in sorted(home.glob("1_?_*")):
        end(str(path), path.name[:3], "FAILED")
    resumed = pipeline.command("sweep", home, "--resume", "--json")
    assert resumed.returncode == 0, resumed.stderr
    pipeline.queue(("2_0", "RUNNING", "None", "(null)"), ("2_1", "PENDING", "Resources", "(null)"))
    shown = pipeline.command("watch", "r8", "--once")
    assert (shown.returncode, shown.stdout.splitlines()[1].split()[-4:]) == (10, ["1", "PENDING,", "1", "RUNNING"])
    assert pipeline.command("stop", "r8").stdout == "pipeline r8 is being stopped: embed\n"
    assert [call["argv"] for call in pipeline.slurm.calls("scancel")] == [["2"]]


def test_a_sweep_that_is_refused_leaves_nothing_of_the_pipeline(pipeline: Pipeline) -> None:
    sweep = {**JOB, "env": {"X": "{x}"}, "sweep": {"grid": {"x": [1, 2]}}}
    (pipeline.folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    text = "name: r8\njobs: {a: {file: sweep.yaml}, b: {file: job.yaml, after: a}, c: {file: sweep.yaml, after: b}}\n"
    (pipeline.folder / "r8.yaml").write_text(text)
    (pipeline.slurm.folder / "fails_at").write_text("3")
    assert pipeline.command("pipeline", "r8.yaml").returncode == 2
    assert [call["argv"] for call in pipeline.slurm.calls("scancel")] == [["2"], ["1"]]
    assert pipeline.names_in_logs() == []


def test_the_tasks_of_a_sweep_are_tracked_by_name(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = {**JOB, "env": {"X": "{x}"}, "sweep": {"grid": {"x": [1, 2]}}}
    (pipeline.folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    text = "name: r8\njobs: {prep: {file: job.yaml}, embed: {file: sweep.yaml, after: prep}}\n"
    (pipeline.folder / "r8.yaml").write_text(text)
    pipeline.submit()
    monkeypatch.setenv("XDG_STATE_HOME", pipeline.environment["XDG_STATE_HOME"])
    found = select(["r8"], os.environ, pipeline.folder)
    assert [run.name for run in found.own_runs.values()] == ["prep", "embed/part_x1", "embed/part_x2"]
    assert found.ids == ("1", "2_0", "2_1")
