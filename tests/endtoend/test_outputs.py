"""A job on a real Slurm that ends with status 0 and incomplete output: sidecar pages, events and report."""

import json
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.endtoend.jobs import JobSpace, embed_job
from tests.realstack.cluster import Cluster
from tests.support.launcher import read_events

ITEMS, WORKERS, NODES, RATE = 1600, 4, 2, 10.0
BROKEN, AT = 2, 100
STALL_S = 15
"""Half of the time without output of the broken worker. On a busy machine the others may pause, too."""


def samples(cluster: Cluster, address: str) -> dict[tuple[str, ...], float]:
    """Samples of a sidecar page by name, group and rank, empty after its end."""
    page = cluster.run(["curl", "-sS", "--max-time", "5", f"http://{address}/metrics"]).stdout
    return {
        (sample.name.removeprefix("gpujob_"), *filter(None, (sample.labels.get("group"), sample.labels.get("rank")))): (
            sample.value
        )
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.mark.slurm
def test_stalled_output_and_a_truncated_checkpoint_are_reported(jobs: JobSpace, cluster: Cluster) -> None:
    faults = f"--no-output --cut-checkpoint --only-rank {BROKEN} --at {AT}"
    spec = embed_job("short", items=ITEMS, rate=RATE, nodes=NODES, count=WORKERS, faults=faults)
    spec["workers"][0]["command"] = spec["workers"][0]["command"].replace(
        "--checkpoint-every 100", "--checkpoint-every 150"
    )
    spec["monitoring"]["stall_timeout"] = STALL_S
    job = jobs.submit(spec)
    seen: dict[tuple[str, ...], float] = {}
    checkpoints: dict[str, Any] = {}
    while cluster.job_state(int(job.job_id)) in ("PENDING", "RUNNING", "CONFIGURING"):
        for name in cluster.node_names:
            address = job.json(f"sidecars/{name}.json").get("address")
            if address:
                for key, value in samples(cluster, address).items():
                    if key[0] in ("worker_output_stalled", "output_stalled", "checkpoint_valid"):
                        seen[key] = max(seen.get(key, 0), value) if "stalled" in key[0] else value
            checkpoints = job.json(f"status/{name}.json").get("checkpoints") or checkpoints
        time.sleep(0.5)
    # in Slurm a job whose script does not end with 0 is FAILED
    assert job.wait() == "FAILED"
    stalled = {key[2]: value for key, value in seen.items() if key[:2] == ("worker_output_stalled", "output")}
    assert stalled == {str(BROKEN): 1.0}
    assert seen["checkpoint_valid",] == 0, checkpoints
    report = job.report()
    assert (report["state"], report["exit_status"], report["items"]) == ("INCOMPLETE", 8, ITEMS)
    assert all(worker["exit"]["reason"] == "completed" for worker in report["workers"])
    checks = {check["name"]: check for check in report["verification"]["checks"]}
    missing = ITEMS // WORKERS - AT
    assert checks["items"]["passed"] is True
    assert checks["records"]["passed"] is False
    assert str(ITEMS - missing) in checks["records"]["detail"]
    assert checks["checkpoint"]["passed"] is False
    assert f"checkpoint_worker_{BROKEN}_step_400.json" in checks["checkpoint"]["detail"]
    job_events = read_events(job.run_dir)
    assert [event["rank"] for event in job_events if event["event"] == "output stalled"] == [BROKEN]
    event_names = {event["event"] for event in job_events}
    assert {"checkpoint saved", "first output", "milestone"} <= event_names, event_names
    print(json.dumps({name: [check["passed"], check["detail"]] for name, check in checks.items()}))
    done = jobs.gpujob("report", str(job.run_dir), "--verify")
    assert done.returncode == 8, done.stdout + done.stderr
