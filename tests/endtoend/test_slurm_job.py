"""Jobs on a real Slurm with a real Prometheus and Alertmanager."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.jobs import GPUJOB, Job, JobSpace, embed_job, kill_worker, was_asked
from tests.realstack.cluster import ROOT, Cluster, slurm_unavailable
from tests.realstack.stack import Stack

pytestmark = [pytest.mark.slurm, pytest.mark.prometheus]

PAGED_WITHIN_S = 45.0
"""Usually 5 s. Every stage on the way to the receiver may be slow on a busy machine."""
SOON_S = 30.0  # limit for steps that usually take 5 s
LINGER_S = 30.0  # how long a scrape may be late


def up_targets(stack: Stack, job: Job) -> int:
    return sum(target["health"] == "up" and target["labels"].get("job_id") == job.job_id for target in stack.targets())


def known_targets(stack: Stack, job: Job) -> int:
    return sum(target["labels"].get("job_id") == job.job_id for target in stack.targets())


def firing_alerts(stack: Stack, job: Job, name: str) -> list[dict[str, Any]]:
    wanted = {"job_id": job.job_id, "alertname": name}
    return [
        alert for alert in stack.alerts() if wanted.items() <= alert["labels"].items() and alert["status"] == "firing"
    ]


def firing_alert(stack: Stack, job: Job, name: str, worker: str) -> dict[str, Any] | None:
    return next((alert for alert in firing_alerts(stack, job, name) if alert["labels"]["worker"] == worker), None)


def last_items(stack: Stack, job: Job) -> float:
    """Sum of the last item counts of all workers, also after the end of the series."""
    series = stack.query(f'last_over_time(gpujob_worker_items_processed_total{{job_id="{job.job_id}"}}[10m])')
    return sum(float(entry["value"][1]) for entry in series)


def seconds_until(cluster: Cluster, condition: Callable[[], object], timeout: float, what: str) -> float:
    """Seconds until the condition is true."""
    start = time.monotonic()
    cluster.wait_for(condition, timeout, what)
    return time.monotonic() - start


def test_a_job_is_scraped_from_start_to_end_with_consistent_numbers(
    jobs: JobSpace, stack: Stack, cluster: Cluster
) -> None:
    job = jobs.submit(embed_job("embed", linger=LINGER_S))
    cluster.wait_for(lambda: job.json("orchestrator.json"), 60, "start of the job")
    started = float(job.json("orchestrator.json")["start"])

    cluster.wait_for(lambda: up_targets(stack, job) == 4, 60, "four targets up")
    assert time.time() - started <= SOON_S, "four targets should be up soon after the job's start"

    view = job.watch()
    assert (view["state"], len(view["workers"])) == ("RUNNING", 8)

    assert job.wait() == "COMPLETED"
    ended = time.monotonic()
    cluster.wait_for(lambda: known_targets(stack, job) == 0, 60, "no target left")
    assert time.monotonic() - ended <= SOON_S
    report = job.report()

    assert (report["state"], report["verification"]["verified"]) == ("COMPLETED", True)
    assert report["items"] == 4000 == job.output_lines()
    assert last_items(stack, job) == 4000
    assert job.our_processes() == []
    assert not (job.run_dir / "targets.json").exists()


@pytest.mark.parametrize(
    ("faults", "alert", "reason", "sent_by_test"),
    [
        pytest.param("", "GpuJobWorkerKilled", "killed_unknown", True, id="kill -9"),
        pytest.param("--exit-code 3 --at 60 --only-rank 5", "GpuJobWorkerCrashed", "app_error", False, id="exit 3"),
        pytest.param(
            "--leak 400 --at 40 --only-rank 5", "GpuJobWorkerOutOfMemory", "host_oom", False, id="out of memory"
        ),
        pytest.param("--exit-code 3 --only-rank 5", "GpuJobWorkerCrashed", "app_error", False, id="immediate crash"),
    ],
)
def test_a_failed_worker_alerts_with_worker_node_job_and_reason(
    jobs: JobSpace, stack: Stack, cluster: Cluster, faults: str, alert: str, reason: str, sent_by_test: bool
) -> None:
    job = jobs.submit(embed_job("death", faults=faults, items=16000, linger=LINGER_S))
    node = cluster.node_names[2]
    if sent_by_test:
        cluster.wait_for(lambda: up_targets(stack, job) == 4, 60, "four targets up")
        assert kill_worker(cluster, job, 5) == node
        killed_at = time.time()
        found = stack.wait_for(lambda: firing_alert(stack, job, alert, "worker_w5"), 90, f"the page {alert}")
        assert found["received"] - killed_at <= PAGED_WITHIN_S
    else:
        found = stack.wait_for(lambda: firing_alert(stack, job, alert, "worker_w5"), 90, f"the page {alert}")
        exits = json.loads((job.run_dir / "workers" / "worker_w5_rank5_a0_r0.exit.json").read_text())
        assert (
            found["received"] - exits["end"] <= PAGED_WITHIN_S + 5.0
        )  # a job that fails immediately is first discovered by Prometheus

    labels = found["labels"]
    assert (labels["node"], labels["job_name"]) == (node, "death")
    assert labels["reason"] == reason
    assert reason in found["annotations"]["description"]
    assert job.wait() == "FAILED"
    report = job.report()
    assert (report["cause"]["worker"], report["cause"]["reason"]) == ("worker_w5", reason)
    others = [worker for worker in report["workers"] if worker["worker"] != "worker_w5"]
    # until the memory of the first victim is free, the kernel may choose another one of the node
    victims = [worker for worker in others if worker["exit"]["reason"] == "host_oom" == reason]
    records = [f"workers/{worker['worker']}_rank{worker['rank']}_a0_r0.exit.json" for worker in victims]
    assert all(job.json(record)["oom_kills"] for record in records)
    alerted = {each["labels"]["worker"] for each in firing_alerts(stack, job, alert)}
    assert alerted <= {"worker_w5", *(worker["worker"] for worker in victims)}
    others = [worker for worker in others if worker not in victims]
    assert {worker["exit"]["reason"] for worker in others} == {"terminated_peer"}
    ran = [worker["exit"] for worker in others if "pid" in job.start_record(worker["rank"])]
    assert [end for end in ran if not was_asked(report, end)] == [], "the peers may save their work"
    assert job.our_processes() == []


def test_a_killed_sidecar_is_restarted_without_harm_to_the_job(jobs: JobSpace, stack: Stack, cluster: Cluster) -> None:
    job = jobs.submit(embed_job("sidecar", linger=LINGER_S))
    job.wait_for_phase("running")
    node = cluster.node_names[1]

    def sidecars() -> list[int]:
        return [
            pid
            for pid, command in cluster.node_processes(node)
            if " -m exporter sidecar" in command and "supervisor" not in command
        ]

    cluster.wait_for(lambda: up_targets(stack, job) == 4, 60, "four targets up")
    (before,) = sidecars()
    address = job.json(f"sidecars/{node}.json")["address"]
    cluster.on(node, ["kill", "-9", str(before)], user=ROOT, check=True)
    assert seconds_until(cluster, lambda: [pid for pid in sidecars() if pid != before], 60, "a new sidecar") <= SOON_S
    cluster.wait_for(lambda: up_targets(stack, job) == 4, 60, "four targets up again")

    assert job.json(f"sidecars/{node}.json")["address"] == address
    assert job.wait() == "COMPLETED"
    assert job.report()["items"] == 4000 == job.output_lines()
    assert last_items(stack, job) == 4000


def test_a_running_job_is_found_from_another_node_and_folder_and_stopped(jobs: JobSpace, cluster: Cluster) -> None:
    index = {"XDG_STATE_HOME": str(jobs.directory / "state")}
    job = jobs.submit(embed_job("stopped", items=16000), env=index)
    job.wait_for_phase("running")
    _, worker_node, _, other = cluster.node_names

    def there(*words: str, indexed: bool = False, typed: str | None = None) -> tuple[int, str]:
        env = index if indexed else {"XDG_STATE_HOME": "/nowhere"}  # then Slurm leads to the run directory
        done = cluster.on(other, [GPUJOB, *words], user=jobs.user, cwd=Path("/"), env=env, stdin=typed)
        return done.returncode, done.stdout or done.stderr

    for words, indexed in (((), True), (("stopped",), True), ((job.job_id,), False)):
        status, view = there("watch", "--once", "--json", *words, indexed=indexed)
        assert (status, json.loads(view)["run_dir"]) == (10, str(job.run_dir)), words
    status, report = there("report", "--json", job.job_id)
    assert (status, json.loads(report)["state"]) == (10, "RUNNING")
    cluster.wait_for(lambda: "Processed" in there("logs", job.job_id, "worker_w3")[1], 30, "a log line")
    shell = there("connect", job.job_id, "worker_w3", typed='echo "$GPUJOB_RANK $(hostname) $PWD"\n')
    assert shell == (0, f"3 {worker_node} {jobs.directory}\n")

    def stranger(*words: str) -> tuple[int, str, str]:
        done = cluster.on(other, words, user="nobody", cwd=Path("/"))
        return done.returncode, done.stdout, done.stderr

    for command in (("watch", "--once"), ("report",), ("logs",), ("connect",), ("stop",)):
        status, out, error = stranger(str(GPUJOB), *command, job.job_id)
        assert (status, out, error.count("\n")) == (2, "", 1), command
        assert error.endswith("manifest.json: Permission denied; ask its owner for access\n"), command
    for program, target in (("ls", job.run_dir), ("touch", job.run_dir / "report.json"), ("scancel", job.job_id)):
        status, out, error = stranger(program, str(target))
        assert (status != 0, out) == (True, ""), program
        assert "denied" in error, program
    assert there("report", "--json", job.job_id)[0] == 10

    assert there("stop", job.job_id) == (0, f"job {job.job_id} is being stopped\n")
    assert job.wait() == "CANCELLED"
    assert job.report()["state"] == "CANCELLED"
    assert "has ended: CANCELLED" in there("connect", job.job_id)[1]


def test_hard_names_and_paths_are_data(jobs: JobSpace, cluster: Cluster, stack: Stack) -> None:
    hard = "a 'b' \"c\" $(touch pwned) `touch pwned` ü %j"
    directory = jobs.directory / hard
    directory.mkdir()
    (directory / "embed.py").write_bytes((jobs.directory / "embed.py").read_bytes())
    (directory / "gpujob.yaml").write_bytes((jobs.directory / "gpujob.yaml").read_bytes())
    jobs.own(directory)
    spec = embed_job(f"{hard}\n#SBATCH --nodes=1", items=400)
    spec["paths"] = {"output_dir": "out $(touch pwned)\nput"}
    spec["workers"][0]["command"] = [*spec["workers"][0]["command"].split(), "--seed", "7"]
    spec["workers"][0]["env"] = {"WORD": hard, "LINES": "one\ntwo"}
    job = jobs.submit(spec, cwd=directory)

    assert job.wait() == "COMPLETED"
    assert job.report()["verification"]["verified"]
    assert list((directory / "out $(touch pwned)\nput").glob("output_worker_*.jsonl"))
    assert list(Path(jobs.directory).rglob("pwned")) == []


def test_an_sbatch_refusal_is_reported_and_leaves_no_files(jobs: JobSpace) -> None:
    spec = embed_job("refused")
    spec["slurm"].setdefault("directives", {})["constraint"] = "nowhere"
    path = jobs.directory / "job.yaml"
    path.write_text(json.dumps(spec))
    done = jobs.gpujob("submit", str(path))

    assert done.returncode == 2
    assert "invalid feature" in done.stderr.lower()
    assert "partition: gpu" in done.stderr
    assert [entry.name for entry in (jobs.directory / "logs").iterdir()] == []


def test_a_cluster_without_accounting_has_alerts_and_reports(space_dir: Path) -> None:
    if reason := slurm_unavailable(accounting=False):
        pytest.skip(reason)
    targets = space_dir / "targets-2"
    targets.mkdir()
    targets.chmod(0o777)
    with Cluster(space_dir / "cluster-2", nodes=2, accounting=False, prefix="two") as cluster:
        user = cluster.user if cluster.run(["true"], cwd=Path("/")).returncode == 0 else ROOT
        with Stack(space_dir / "stack-2", cluster, targets_dir=targets) as stack:
            directory = space_dir / "jobs-2"
            directory.mkdir()
            jobs = JobSpace(cluster, directory, user, targets)
            job = jobs.submit(embed_job("two", nodes=2, count=4, items=8000, linger=LINGER_S))
            cluster.wait_for(lambda: up_targets(stack, job) == 2, 60, "two targets up")
            node = kill_worker(cluster, job, 3)
            killed_at = time.time()
            found = stack.wait_for(lambda: firing_alert(stack, job, "GpuJobWorkerKilled", "worker_w3"), 90, "the page")
            assert found["received"] - killed_at <= PAGED_WITHIN_S
            assert found["labels"]["node"] == node
            alerted = {each["labels"]["worker"] for each in firing_alerts(stack, job, "GpuJobWorkerKilled")}
            assert alerted == {"worker_w3"}
            assert job.wait() == "FAILED"
            assert job.report()["cause"]["reason"] == "killed_unknown"
