"""Pipelines on a real Slurm."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.endtoend.jobs import JobSpace
from tests.realstack.cluster import ROOT

pytestmark = pytest.mark.slurm


def submit(jobs: JobSpace, commands: dict[str, str], after: dict[str, Any]) -> dict[str, Any]:
    """Submit a pipeline with a job for each command."""
    for name, command in commands.items():
        spec = {
            "name": name,
            "workers": [{"command": ["sh", "-c", command]}],
            "slurm": {"partition": "gpu", "time_limit": "00:02:00"},
            "monitoring": {"check_interval": 1, "linger": 0},
        }
        (jobs.directory / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    parts = {name: {"file": f"{name}.yaml", "after": after.get(name, {})} for name in commands}
    (jobs.directory / "r8.yaml").write_text(yaml.safe_dump({"name": "r8", "jobs": parts}, sort_keys=False))
    jobs.own(jobs.directory)
    done = jobs.gpujob("pipeline", "r8.yaml", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def waiting(jobs: JobSpace) -> dict[str, str]:
    """Slurm's reasons of the jobs that wait, by id."""
    text = jobs.cluster.run(["squeue", "-h", "-t", "PENDING", "-o", "%i|%r"], user=ROOT, check=True).stdout
    return dict(line.split("|") for line in text.splitlines())


def test_jobs_run_in_their_order(jobs: JobSpace) -> None:
    commands = {"eval": "sleep 1", "train": "sleep 1", "prep": "sleep 1"}
    answer = submit(jobs, commands, {"train": "prep", "eval": {"train": "any"}})
    directory = answer["pipeline_dir"]
    assert [job["name"] for job in answer["jobs"]] == ["prep", "train", "eval"]
    done = jobs.gpujob("watch", directory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 jobs: 3 COMPLETED"
    reports = [json.loads(Path(job["run_dir"], "report.json").read_text()) for job in answer["jobs"]]
    for before, after in itertools.pairwise(reports):
        assert before["end"] <= after["start"]


def test_jobs_behind_a_failure_are_never_and_nothing_is_left_held(jobs: JobSpace) -> None:
    commands = {"prep": "exit 3", "train": "true", "eval": "true", "mend": "true"}
    after = {"train": "prep", "eval": {"train": "any"}, "mend": {"prep": "notok"}}
    answer = submit(jobs, commands, after)
    ids = {job["name"]: job["job_id"] for job in answer["jobs"]}
    directory = answer["pipeline_dir"]
    done = jobs.gpujob("watch", directory)
    assert done.returncode == 1, done.stdout + done.stderr
    shown = json.loads(jobs.gpujob("report", directory, "--json").stdout)
    states = {job["name"]: (job["state"], job["needs"]) for job in shown["jobs"]}
    assert states == {
        "prep": ("FAILED", []),
        "train": ("NEVER", ["prep"]),
        "eval": ("NEVER", ["train"]),  # Slurm itself lets it wait for a job that will never end
        "mend": ("COMPLETED", []),
    }
    assert re.search(rf"^train  never \(needs prep\) +prep ok +{ids['train']} ", done.stdout, re.MULTILINE)
    assert f"to cancel it: scancel {ids['eval']}" in done.stdout
    left = waiting(jobs)
    assert set(left) == {ids["train"], ids["eval"]}
    assert "JobHeldUser" not in left.values()
    tracked = jobs.gpujob("track", directory, "--interval", "10", "--json")
    assert tracked.returncode == 1, tracked.stderr
    assert json.loads(tracked.stdout)["jobs"].keys() == set(ids.values())
    stopped = jobs.gpujob("stop", directory)
    assert stopped.stdout == "pipeline r8 is being stopped: train, eval\n"
    jobs.cluster.wait_for(lambda: not waiting(jobs), 30, "the end of the jobs that can never start")


def test_a_failure_in_the_middle_cancels_what_was_submitted(jobs: JobSpace) -> None:
    before = waiting(jobs)
    (jobs.directory / "other.yaml").write_text(
        "name: x\nworkers: [{command: 'true'}]\nslurm: {directives: {constraint: none}}\n"
    )
    (jobs.directory / "first.yaml").write_text("name: x\nworkers: [{command: 'true'}]\nslurm: {partition: gpu}\n")
    text = "name: r8\njobs: {a: {file: first.yaml}, b: {file: other.yaml, after: a}}\n"
    (jobs.directory / "r8.yaml").write_text(text)
    jobs.own(jobs.directory)
    done = jobs.gpujob("pipeline", "r8.yaml")
    assert done.returncode == 2, done.stdout
    assert "no job was submitted" in done.stderr
    jobs.cluster.wait_for(lambda: waiting(jobs) == before, 30, "the end of the first job")
    assert not list((jobs.directory / "logs").iterdir())


def test_sweeps_follow_each_other_point_by_point(jobs: JobSpace) -> None:
    job = {"slurm": {"partition": "gpu", "time_limit": "00:02:00"}, "monitoring": {"check_interval": 1, "linger": 0}}
    commands = {"embed": "sleep {x}; exit $(({x} == 2 ? 3 : 0))", "eval": "sleep 1; true {x}"}
    for name, command in commands.items():
        spec = {
            **job,
            "name": name,
            "workers": [{"command": ["sh", "-c", command]}],
            "sweep": {"grid": {"x": [1, 2, 3]}},
        }
        (jobs.directory / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    (jobs.directory / "sum.yaml").write_text(yaml.safe_dump({**job, "name": "sum", "workers": [{"command": "true"}]}))
    text = (
        "name: r9\njobs:\n  embed: {file: embed.yaml}\n  eval: {file: eval.yaml, after: {embed: each}}\n"
        "  sum: {file: sum.yaml, after: {embed: any}}\n  all: {file: sum.yaml, after: embed}\n"
    )
    (jobs.directory / "r9.yaml").write_text(text)
    jobs.own(jobs.directory)
    done = jobs.gpujob("pipeline", "r9.yaml", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    ids = {part["name"]: part["job_id"] for part in answer["jobs"]}
    watched = jobs.gpujob("watch", answer["pipeline_dir"])
    assert watched.returncode == 1, watched.stdout + watched.stderr
    shown = json.loads(jobs.gpujob("report", answer["pipeline_dir"], "--json").stdout)
    states = {part["name"]: (part["state"], part["points"]) for part in shown["jobs"]}
    assert states["embed"] == ("FAILED", {"COMPLETED": 2, "FAILED": 1})
    assert states["eval"] == ("NEVER", {"COMPLETED": 2, "PENDING": 1})  # the point behind the failed one
    assert (states["sum"][0], states["all"][0]) == ("COMPLETED", "NEVER")
    assert set(waiting(jobs).values()) == {"DependencyNeverSatisfied"}
    assert jobs.gpujob("stop", answer["pipeline_dir"]).stdout == "pipeline r9 is being stopped: eval, all\n"
    left = {ids["eval"], ids["all"]}
    jobs.cluster.wait_for(
        lambda: not any(job_id.partition("_")[0] in left for job_id in waiting(jobs)), 30, "their end"
    )
