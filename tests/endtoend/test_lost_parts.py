"""Parts of a job on a real Slurm that are killed, signals that reach it, and a job that goes back into the queue."""

import json
import time
from typing import Any

import pytest

from tests.endtoend.jobs import Job, JobSpace, events
from tests.realstack.cluster import ROOT, Cluster

pytestmark = pytest.mark.slurm

SECONDS = 60.0
"""A job has ended within this, as a rule in 5: SIGTERM, its time, SIGKILL, the report and Slurm's own end of it."""
WAITS = "trap 'echo told; exit 7' TERM; trap 'echo saving' USR1; echo up; while :; do sleep 0.1; done"


def job_file(name: str, command: str = WAITS, **over: Any) -> dict[str, Any]:
    """A job of four workers on two nodes."""
    return {
        "name": name,
        "resources": {"nodes": 2},
        "workers": [{"role": "worker", "count": 4, "command": command, "shell": True}],
        "slurm": {"time_limit": "00:10:00", **over.pop("slurm", {})},
        "monitoring": {"check_interval": 1, "linger": 0},
        **over,
    }


def outputs(job: Job, run: str = "") -> list[str]:
    """What each worker has printed."""
    found = [next(job.run_dir.glob(f"*_worker_w{index}{run}.out"), None) for index in range(4)]
    return [path.read_text() if path is not None else "" for path in found]


def started(jobs: JobSpace, spec: dict[str, Any]) -> Job:
    """A job whose workers listen."""
    job = jobs.submit(spec)
    job.wait_for_phase("running")
    jobs.cluster.wait_for(lambda: all("up" in text for text in outputs(job)), 60, "the workers")
    return job


def ours(job: Job) -> list[str]:
    """Processes of the job on any node."""
    return [line for line in job.our_processes() if "sleep" not in line or str(job.run_dir) in line]


def kill(cluster: Cluster, job: Job, what: str) -> float:
    """kill -9 of the process of the batch step whose command line has these words; when."""
    node = job.json("orchestrator.json")["hosts"][0]
    (pid,) = [pid for pid, command in cluster.node_processes(node) if what in command and str(job.run_dir) in command]
    cluster.on(node, ["kill", "-9", str(pid)], user=ROOT, check=True)
    return time.monotonic()


def test_a_job_whose_orchestrator_is_killed_ends_and_says_so(jobs: JobSpace, cluster: Cluster) -> None:
    job = started(jobs, job_file("lost"))
    began = kill(cluster, job, "-m launcher.run.orchestrator ")
    assert job.wait() == "FAILED"
    cluster.wait_for(lambda: not ours(job), SECONDS, "no process left")
    assert time.monotonic() - began < SECONDS
    report = job.report()
    assert (report["state"], report["cause"]["worker"], report["cause"]["signal"]) == (
        *("FAILED", "orchestrator", "SIGKILL"),
    )
    assert report["stopped"]["cause"] == "the orchestrator was killed by SIGKILL"
    assert {worker["exit"]["reason"] for worker in report["workers"]} == {"terminated_peer"}
    assert outputs(job) == ["up\ntold\n"] * 4
    assert not (job.run_dir / "targets.json").exists()


def test_a_job_whose_guard_is_killed_ends(jobs: JobSpace, cluster: Cluster) -> None:
    job = started(jobs, job_file("guardless"))
    began = kill(cluster, job, "-m launcher.guard ")
    assert job.wait() == "FAILED"
    cluster.wait_for(lambda: not ours(job), SECONDS, "no process left")
    assert time.monotonic() - began < SECONDS
    told = json.loads(jobs.gpujob("report", job.job_id, "--json").stdout)
    assert told["state"] != "RUNNING"
    assert told["state"] != "COMPLETED"


def test_each_signal_reaches_the_workers_once(jobs: JobSpace, cluster: Cluster) -> None:
    job = started(jobs, job_file("signals", slurm={"signal": "USR1@60"}))
    cluster.run(["scancel", "--batch", "--signal=USR1", job.job_id], user=jobs.user, check=True)
    cluster.wait_for(lambda: all("saving" in text for text in outputs(job)), 60, "the workers' answer")

    def told(kind: str) -> list[dict[str, Any]]:
        return [event for event in events(job.run_dir) if event["event"] == kind]

    cluster.wait_for(lambda: told("checkpoint signal"), 60, "the word that they were warned")
    cluster.run(["scancel", job.job_id], user=jobs.user, check=True)
    assert job.wait() == "CANCELLED"
    assert job.report()["state"] == "CANCELLED"
    assert outputs(job) == ["up\nsaving\ntold\n"] * 4
    assert [event["processes"] for event in told("checkpoint signal")] == [4]
    assert told("job stopping")[-1]["reason"] == "cancelled"
    assert len(told("signal")) <= 1, "it may have learned that before its own signal came"


def test_the_ranks_of_one_step_are_told_apart(jobs: JobSpace) -> None:
    """Two workers of MPI on whole nodes, with a process for each GPU."""
    command = 'echo "$SLURM_PROCID $SLURM_NTASKS $GPUJOB_RANK $GPUJOB_LOCAL_RANK $GPUJOB_NODE $SLURMD_NODENAME"'
    spec = {
        "name": "ranks",
        "resources": {"gpus_per_node": 2, "process_granularity": "gpu"},
        "backend": {"type": "mpi", "mpi": "pmi2"},
        "workers": [{"role": "solver", "count": 2, "gpus": 4, "command": command, "shell": True}],
        "slurm": {"partition": "gpu", "time_limit": "00:05:00"},
        "monitoring": {"check_interval": 1, "linger": 0},
    }
    job = jobs.submit(spec)
    state = job.wait()
    assert state == "COMPLETED", (job.run_dir / "log.out").read_text() + (job.run_dir / "log.err").read_text()
    hosts = job.json("orchestrator.json")["hosts"]
    for worker in range(2):
        told = [
            (job.run_dir / f"{hosts[2 * worker + place // 2]}_solver_w{worker}_p{place}.out").read_text().split()
            for place in range(4)
        ]
        nodes = [hosts[2 * worker + place // 2] for place in range(4)]
        expected = [[str(at), "4", str(4 * worker + at), str(at), node, node] for at, node in enumerate(nodes)]
        assert told == expected
    assert {worker["exit"]["reason"] for worker in job.report()["workers"]} == {"completed"}
    assert (job.run_dir / "log.err").read_text() == ""


def test_a_job_goes_back_into_the_queue_before_its_time_is_over(jobs: JobSpace, cluster: Cluster) -> None:
    command = 'if [ -n "$GPUJOB_RESUME" ]; then echo resumed; exit 0; fi; ' + WAITS
    limit = {"time_limit": "00:01:00", "requeue": {"time_limit": True, "max": 1}}
    job = jobs.submit(job_file("again", command, slurm=limit))
    cluster.wait_for(lambda: job.json("orchestrator.json").get("attempt") == 1, 240, "the second attempt")
    assert job.wait(240) == "COMPLETED"
    first = job.json("report_a0.json")
    assert (first["state"], first["requeued"]) == ("TIMEOUT", True)
    assert {worker["exit"]["reason"] for worker in first["workers"]} == {"time_limit"}
    assert outputs(job, "_a1") == ["resumed\n"] * 4
    assert (job.report()["state"], job.report()["requeued"]) == ("COMPLETED", False)
