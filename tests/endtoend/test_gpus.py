"""GPUs of a real Slurm job: indices restart at 0 inside the job, so workers are matched by UUID."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.fake_gpus import GPUS, uuid_of
from tests.endtoend.jobs import Job, JobSpace
from tests.realstack.cluster import Cluster
from tests.support.launcher import read_events

NODES, TAKEN = 4, 2
EACH = GPUS - TAKEN
WORKERS = NODES * EACH
ASTRAY = 5  # rank of the worker that uses the other GPU of its node
USE = Path(__file__).parents[1] / "fakenvml" / "use_gpu.py"

pytestmark = pytest.mark.slurm


def status(job: Job, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Last status of each sidecar, by node."""
    return {name: found for name in cluster.node_names if (found := job.json(f"status/{name}.json"))}


def uses(found: dict[str, dict[str, Any]]) -> dict[int, list[str]]:
    """UUIDs of the GPUs that each worker uses, by rank."""
    return {
        entry["rank"]: [use["uuid"] for use in entry["gpu_use"]]
        for node in found.values()
        for entry in node["workers"]
        if entry.get("gpu_use")
    }


def test_each_worker_is_matched_to_its_gpu_although_indices_restart_at_0(
    jobs: JobSpace, cluster: Cluster, fake_gpus: dict[str, str]
) -> None:
    if "ConstrainDevices=yes" not in (cluster.directory / "etc" / "cgroup.conf").read_text():
        pytest.skip("no device control groups here")
    # another job uses the first two GPUs of every node
    taken = ["sbatch", "--parsable", f"--nodes={NODES}", f"--gres=gpu:{TAKEN}", "--mem=100", "-o", "/dev/null"]
    other = cluster.run([*taken, "--wrap", "sleep 300"], user=jobs.user, cwd=jobs.directory, check=True).stdout.strip()
    try:
        cluster.wait_for(lambda: cluster.job_state(int(other)) == "RUNNING", 30, "the other job")
        script = jobs.directory / "worker.sh"
        script.write_text(
            f"if [ $GPUJOB_RANK = {ASTRAY} ]; then export CUDA_VISIBLE_DEVICES=0; fi\n"
            f"exec {shlex.quote(sys.executable)} {shlex.quote(str(USE))} --items 400 --seconds 25 --percent 60\n"
        )
        job = jobs.submit(
            {
                "name": "gpus",
                "resources": {"nodes": NODES, "gpus_per_node": EACH},
                "workers": [{"role": "worker", "count": WORKERS, "gpus": 1, "command": "bash worker.sh"}],
                "slurm": {"partition": "gpu", "time_limit": "00:10:00"},
                "progress": {"total_items": 400 * WORKERS},
                "monitoring": {"check_interval": 1, "linger": 8, "stall_timeout": 60},
            },
            env=fake_gpus,
        )
        cluster.wait_for(lambda: len(uses(status(job, cluster))) == WORKERS, 90, "every worker on a GPU")
        found = status(job, cluster)
        page = cluster.run(
            [
                "curl",
                "-sS",
                f"http://{job.json(f'sidecars/{cluster.node_names[ASTRAY // EACH]}.json')['address']}/metrics",
            ]
        ).stdout
    finally:
        cluster.run(["scancel", other], user=jobs.user)
    expected, planned = {}, {}
    for rank in range(WORKERS):
        node, position = divmod(rank, EACH)
        planned[rank] = [uuid_of(node, TAKEN + position)]
        expected[rank] = planned[rank] if rank != ASTRAY else [uuid_of(node, TAKEN)]
    assert uses(found) == expected
    workers = {entry["rank"]: entry for node in found.values() for entry in node["workers"]}
    assert {rank: entry["gpu_plan"] for rank, entry in workers.items()} == planned
    assert all(use["attribution"] == "process" for entry in workers.values() for use in entry["gpu_use"])
    assert {rank for rank, entry in workers.items() if entry["gpu_misplaced"]} == {ASTRAY}
    for index, name in enumerate(cluster.node_names):
        gpus = found[name]["gpus"]
        assert [gpu["uuid"] for gpu in gpus["gpus"]] == [uuid_of(index, number) for number in range(TAKEN, GPUS)]
        assert [gpu["gpu"] for gpu in gpus["gpus"]] == ["0", "1"]
        assert (gpus["driver_state"], gpus["visible"], gpus["allocated"], gpus["health"]) == ("ok", 2, 2, "healthy")
    misplaced = re.findall(r"^gpujob_worker_gpu_misplaced\{.*worker=\"(\w+)\".*\} (\d)$", page, re.MULTILINE)
    assert misplaced == [(f"worker_w{ASTRAY}", "1")]
    assert job.wait() == "COMPLETED"
    misplaced_events = read_events(job.run_dir, "GPU misplaced")
    assert [(event["worker"], event["rank"]) for event in misplaced_events] == [(f"worker_w{ASTRAY}", ASTRAY)]
    report = job.report()
    assert report["gpus"]["count"] == WORKERS
    for worker in report["workers"]:
        rank = worker["rank"]
        seen = {device["uuid"]: (device["planned"], device["used"]) for device in worker["gpu_devices"]}
        astray_on = {planned[rank][0]: (True, False), expected[rank][0]: (False, True)}
        assert seen == (astray_on if rank == ASTRAY else {planned[rank][0]: (True, True)})
        assert bool(worker["gpu_misplaced"]) is (rank == ASTRAY)
