"""Signals, steps and requeues of jobs on a real Slurm."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.endtoend.jobs import Job, JobSpace
from tests.realstack.cluster import Cluster
from tests.support.launcher import read_events

pytestmark = pytest.mark.slurm

WAIT_FOR_SIGNALS = "trap 'echo told; exit 7' TERM; trap 'echo saving' USR1; echo up; while :; do sleep 0.1; done"


def job_file(name: str, command: str = WAIT_FOR_SIGNALS, **over: Any) -> dict[str, Any]:
    """A job with four workers on two nodes."""
    return {
        "name": name,
        "resources": {"nodes": 2},
        "workers": [{"role": "worker", "count": 4, "command": command, "shell": True}],
        "slurm": {"time_limit": "00:10:00", **over.pop("slurm", {})},
        "monitoring": {"check_interval": 1, "linger": 0},
        **over,
    }


def outputs(job: Job, run: str = "") -> list[str]:
    """Output of each worker."""
    found = [next(job.run_dir.glob(f"*_worker_w{index}{run}.out"), None) for index in range(4)]
    return [path.read_text() if path is not None else "" for path in found]


def started(jobs: JobSpace, spec: dict[str, Any], env: Mapping[str, str] | None = None) -> Job:
    """Submit a job and wait until its workers handle signals."""
    job = jobs.submit(spec, env=env)
    job.wait_for_phase("running")
    jobs.cluster.wait_for(lambda: all("up" in text for text in outputs(job)), 60, "the workers")
    return job


def test_each_signal_reaches_the_workers_once(jobs: JobSpace, cluster: Cluster) -> None:
    spec = job_file("signals", slurm={"signal": "USR1@60"}, secrets=["HF_TOKEN"])
    job = started(jobs, spec, env={"HF_TOKEN": "a secret"})
    cluster.run(["scancel", "--batch", "--signal=USR1", job.job_id], user=jobs.user, check=True)
    cluster.wait_for(lambda: all("saving" in text for text in outputs(job)), 60, "the workers' answer")

    cluster.wait_for(lambda: read_events(job.run_dir, "checkpoint signal"), 60, "the word that they were warned")
    cluster.run(["scancel", job.job_id], user=jobs.user, check=True)
    assert job.wait() == "CANCELLED"
    assert job.report()["state"] == "CANCELLED"
    assert outputs(job) == ["up\nsaving\ntold\n"] * 4
    assert [event["processes"] for event in read_events(job.run_dir, "checkpoint signal")] == [4]
    assert read_events(job.run_dir, "job stopping")[-1]["reason"] == "cancelled"
    assert not (job.run_dir / "secrets.json").exists()
    assert len(read_events(job.run_dir, "signal")) <= 1, "Slurm may report the cancellation before the signal arrives"


def test_the_ranks_of_one_step_are_distinct(jobs: JobSpace) -> None:
    """Two MPI workers on whole nodes, with one task per GPU."""
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
        outputs_of_ranks = [
            (job.run_dir / f"{hosts[2 * worker + place // 2]}_solver_w{worker}_p{place}.out").read_text().split()
            for place in range(4)
        ]
        nodes = [hosts[2 * worker + place // 2] for place in range(4)]
        expected = [[str(at), "4", str(4 * worker + at), str(at), node, node] for at, node in enumerate(nodes)]
        assert outputs_of_ranks == expected
    assert {worker["exit"]["reason"] for worker in job.report()["workers"]} == {"completed"}
    assert (job.run_dir / "log.err").read_text() == ""


def test_a_job_is_requeued_before_its_time_limit(jobs: JobSpace, cluster: Cluster) -> None:
    command = 'if [ -n "$GPUJOB_RESUME" ]; then echo resumed; exit 0; fi; ' + WAIT_FOR_SIGNALS
    limit = {"time_limit": "00:01:00", "requeue": {"time_limit": True, "max": 1}}
    job = jobs.submit(job_file("again", command, slurm=limit))
    cluster.wait_for(lambda: job.json("orchestrator.json").get("attempt") == 1, 240, "the second attempt")
    assert job.wait(240) == "COMPLETED"
    first = job.json("report_a0.json")
    assert (first["state"], first["requeued"]) == ("TIMEOUT", True)
    assert {worker["exit"]["reason"] for worker in first["workers"]} == {"time_limit"}
    assert outputs(job, "_a1") == ["resumed\n"] * 4
    assert (job.report()["state"], job.report()["requeued"]) == ("COMPLETED", False)
