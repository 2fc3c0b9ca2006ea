"""The hub on a real Slurm, with jobs that gpujob has not launched."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.jobs import GPUJOB, JobSpace
from tests.realstack.cluster import ROOT

pytestmark = pytest.mark.slurm

EXPORTER = GPUJOB.parent / "gpujob-exporter"


class RealHub:
    """A hub of the test user on the head of the cluster."""

    def __init__(self, jobs: JobSpace, *options: str) -> None:
        self.jobs, self.folder = jobs, jobs.directory / "hub"
        if not self.folder.exists():
            self.folder.mkdir()
            jobs.own(self.folder)
        argv: list[str | Path] = [EXPORTER, "hub", "--interval", "5", "--state-dir", self.folder, *options]
        self.process = jobs.cluster.popen(argv, user=jobs.user, cwd=jobs.directory, env={"XDG_RUNTIME_DIR": ""})
        jobs.cluster.wait_for(
            lambda: "ready" in self.get("/-/ready") and "Not" not in self.get("/-/ready"), 60, "a look"
        )

    def get(self, path: str) -> str:
        name = next(self.folder.glob("*.sock"), Path("none"))
        argv = ["curl", "-s", "--unix-socket", str(name), f"http://hub{path}"]
        return str(self.jobs.cluster.run(argv, user=self.jobs.user).stdout)

    def json(self, path: str) -> Any:
        return json.loads(self.get(path))

    def states(self) -> dict[str, str]:
        return {job["job_id"]: job["state"] for job in self.json("/api/v1/jobs")["jobs"]}

    def kill(self) -> None:
        """End it without notice, and its file with a hot journal."""
        self.jobs.cluster.signal(self.process, signal.SIGKILL)
        self.process.communicate(timeout=60)


def sbatch(jobs: JobSpace, name: str, command: str, *options: str) -> str:
    argv = ["sbatch", "--parsable", "-J", name, "-p", "gpu", "-o", f"{jobs.directory}/%x-%A_%a.log", *options]
    return str(jobs.cluster.run([*argv, "--wrap", command], user=jobs.user, check=True).stdout.strip())


def test_every_change_is_told_once_although_the_hub_is_killed(jobs: JobSpace) -> None:
    cluster, hub = jobs.cluster, RealHub(jobs)
    time.sleep(1.5)  # Slurm counts whole seconds, and what happened before the hub is not its own
    good = sbatch(jobs, "good", "sleep 4", "--gres=gpu:1")
    bad = sbatch(jobs, "bad|'name", "exit 3")
    late = sbatch(jobs, "late", "exec sleep 300", "--time=1")
    running = sbatch(jobs, "cancelled", "exec sleep 300")
    waiting = sbatch(jobs, "held", "true", "--hold")
    array = sbatch(jobs, "arr", "sleep 3; exit $((SLURM_ARRAY_TASK_ID == 2 ? 3 : 0))", "--array=0-2%1")
    cluster.wait_for(lambda: hub.states().get(running) == "RUNNING", 90, "the hub to see a running job")
    hub.kill()
    cluster.run(["scancel", running, waiting], user=ROOT, check=True)
    cluster.wait_for(lambda: cluster.job_state(int(good)) == "COMPLETED", 60, "an end that no hub sees")
    hub = RealHub(jobs)

    def is_over() -> bool:
        found = hub.json("/api/v1/jobs")["jobs"]
        return all(job["is_over"] and (job["figures"] or not job["started"]) for job in found)

    cluster.wait_for(is_over, 240, "all ends and figures")
    changes = hub.json("/api/v1/changes?after=0")["changes"]
    assert [change["number"] for change in changes] == list(range(1, len(changes) + 1))
    told: dict[str, list[str]] = {}
    for change in changes:
        told.setdefault(change["job_id"], []).append(change["state"])
    assert told == {
        good: ["RUNNING", "COMPLETED"],
        bad: ["RUNNING", "FAILED"],
        late: ["RUNNING", "TIMEOUT"],
        running: ["RUNNING", "CANCELLED"],
        waiting: ["CANCELLED"],
        **{f"{array}_{index}": ["RUNNING", "FAILED" if index == 2 else "COMPLETED"] for index in range(3)},
    }
    found = {job["job_id"]: job for job in hub.json("/api/v1/jobs")["jobs"]}
    for job_id in told:
        argv = ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "Start,End,ExitCode"]
        text = cluster.run(argv, user=ROOT, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout
        start, end, code = text.splitlines()[0].split("|")
        job = found[job_id]
        assert job["ended"] == float(end)
        times = [change["time"] for change in changes if change["job_id"] == job_id]
        assert times == ([float(end)] if job_id == waiting else [float(start), float(end)])
        assert job_id == waiting or job["figures"]["exit_code"] == code
    cluster.wait_for(lambda: "gpujob_hub_clock_offset_seconds" in hub.get("/metrics"), 60, "the load of the controller")
    assert hub.json("/api/v1/jobs")["problems"] == []
    page = hub.get("/metrics")
    for command in ("squeue", "sacct", "sinfo"):
        assert re.search(rf'gpujob_hub_unparsed_lines_total{{[^}}]*command="{command}"}} 0\n', page)
    gpu_seconds = found[good]["ended"] - found[good]["started"]
    samples = dict(line.rpartition(" ")[::2] for line in page.splitlines() if not line.startswith("#"))
    place = f'user="{jobs.user}",partition="gpu"'
    cluster_name = next(iter(samples)).partition('cluster="')[2].partition('"')[0]
    totals = {
        name.partition("{")[0] + name.rpartition(place)[2]: value for name, value in samples.items() if place in name
    }
    assert totals["gpujob_jobs_started_total}"] == "7"
    assert totals['gpujob_jobs_ended_total,state="COMPLETED"}'] == "3"
    assert totals['gpujob_jobs_ended_total,state="CANCELLED"}'] == "2"
    assert abs(float(totals["gpujob_gpu_seconds_total}"]) - gpu_seconds) <= 10.0  # it was not watched up to its end
    assert (
        cluster_name
        == cluster.run(
            ["sh", "-c", "scontrol show config | sed -n 's/^ClusterName *= //p'"], user=ROOT, check=True
        ).stdout.strip()
    )
    cluster.signal(hub.process, signal.SIGTERM)
    hub.process.communicate(timeout=60)
    assert not list(hub.folder.glob("*.sock"))
    rebuild: list[str | Path] = [
        GPUJOB,
        "index",
        "--rebuild",
        "--since",
        "1d",
        "--json",
        "--state-dir",
        jobs.directory / "lost",
    ]
    rebuilt = json.loads(cluster.run(rebuild, user=jobs.user, cwd=jobs.directory, check=True).stdout)
    assert rebuilt["rebuilt"]["problems"] == []
    # a window of accounting lacks the job that was never eligible
    assert rebuilt["index"]["jobs"] == rebuilt["rebuilt"]["from_accounting"] >= len(told) - 1
