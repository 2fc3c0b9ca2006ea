"""`gpujob track` on a real Slurm, with jobs that gpujob has not launched."""

import json

import pytest

from tests.endtoend.jobs import GPUJOB, JobSpace
from tests.realstack.cluster import ROOT

pytestmark = pytest.mark.slurm

COUNTED_SQUEUE = '#!/bin/sh\necho >> "$0.calls"\nexec /usr/bin/squeue "$@"\n'
REQUEUED = "exec sleep $([ $SLURM_RESTART_COUNT ] && echo 1 || echo 300)"  # the first attempt waits to be requeued


def sbatch(jobs: JobSpace, name: str, command: str, *options: str) -> str:
    argv = ["sbatch", "--parsable", "-J", name, "-p", "gpu", "-o", f"{jobs.directory}/%x-%j.log", *options]
    return str(jobs.cluster.run([*argv, "--wrap", command], user=jobs.user, check=True).stdout.strip())


def test_every_change_of_every_job_is_logged_once_with_slurms_times(jobs: JobSpace) -> None:
    cluster = jobs.cluster
    squeue = jobs.directory / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(COUNTED_SQUEUE)
    squeue.chmod(0o755)
    jobs.own(squeue.parent)
    array = sbatch(jobs, "arr", "sleep 2; exit $((SLURM_ARRAY_TASK_ID == 2 ? 3 : 0))", "--array=0-2%2")
    late = sbatch(jobs, "late", "exec sleep 300", "--time=1", "--gres=gpu:1", "-c2", "--mem=100")
    held = sbatch(jobs, "a|b 'c'", "true", "--hold")
    again = sbatch(jobs, "again", REQUEUED, "--requeue")
    ids = [f"{array}_[0-2]", late, held, again]
    tracking = cluster.popen(
        [GPUJOB, "track", *ids, "--interval", "10", "--name", "r8", "--json", "--state-file", "run-r8-state.json"],
        user=jobs.user,
        cwd=jobs.directory,
        env={"PATH": f"{squeue.parent}:/usr/bin:/bin"},
    )
    cluster.wait_for(lambda: cluster.job_state(int(again)) == "RUNNING", 60, "the job that is requeued")
    cluster.wait_for((jobs.directory / "run-r8-state.json").exists, 60, "the first poll")
    shown = json.loads(jobs.gpujob("ps", "--json", check=True).stdout)["runs"]
    resources = {run["jobs"][0]["job_id"]: run["jobs"][0]["resources"] for run in shown}
    assert resources[late] == {"gpus": [{"name": None, "memory_mib": None}], "cpus": 2, "memory_mib": 100}
    cluster.run(["scancel", held], user=ROOT, check=True)
    cluster.run(["scontrol", "requeue", again], user=ROOT, check=True)
    out, log = tracking.communicate(timeout=240)

    state = json.loads(out)
    assert state == json.loads((jobs.directory / "run-r8-state.json").read_text())
    first = min((job["ended"], job["state"]) for job in state["jobs"].values() if job["state"] != "COMPLETED")
    assert tracking.returncode == state["exit_status"] == {"FAILED": 1, "CANCELLED": 5}[first[1]], log
    found = {job_id: [event["state"] for event in job["history"]] for job_id, job in state["jobs"].items()}
    assert found == {
        **{f"{array}_{index}": ["RUNNING", "FAILED" if index == 2 else "COMPLETED"] for index in range(3)},
        late: ["RUNNING", "TIMEOUT"],
        held: ["CANCELLED"],
        again: ["RUNNING", "PENDING", "RUNNING", "COMPLETED"],
    }
    for job_id, job in state["jobs"].items():
        (row,) = _accounting(jobs, job_id)
        # of a job that was cancelled while it waited, accounting gives no start or that of its end
        started = None if job_id == held else float(row["Start"])
        assert (job["ended"], job["started"]) == (float(row["End"]), started), job_id
        assert job["name"] == {held: "r8/a|b 'c'", late: "r8/late", again: "r8/again"}.get(
            job_id, f"r8/arr/{job_id.partition('_')[2]}"
        )
    changes = sum(len(events) for events in found.values())
    assert log.count("STATE_CHANGE: ") == changes
    assert log.count("COMPUTE_METRICS: ") == 5
    assert "(**EXCEEDED**)\n⚠️ Time limit exceeded" in log
    assert "Summary: 6 jobs completed - 3 COMPLETED, 1 FAILED, 1 CANCELLED, 1 TIMEOUT\n" in log
    assert len(squeue.with_suffix(".calls").read_text().splitlines()) == state["polls"]


def _accounting(jobs: JobSpace, job_id: str) -> list[dict[str, str]]:
    argv = ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "Start,End"]
    text = jobs.cluster.run(argv, user=ROOT, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout
    return [dict(zip(("Start", "End"), line.split("|"), strict=True)) for line in text.splitlines()]
