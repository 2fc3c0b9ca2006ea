"""Sweeps as array jobs on a real Slurm."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.endtoend.jobs import JobSpace, was_asked
from tests.endtoend.test_hub import RealHub
from tests.realstack.cluster import ROOT, Cluster

pytestmark = pytest.mark.slurm

PROGRAM = """\
import glob, os, sys, time
print(os.environ["GPUJOB_JOB_ID"], os.environ["LR"], sys.argv[1:], flush=True)
fails = sys.argv[1:] == ["0.001", "16"] and not os.path.exists("fixed")
while not os.path.exists("go"):
    time.sleep(0.1)
while fails and not glob.glob(os.environ["GPUJOB_RUN_DIR"] + "/workers/*_rank1_*.start.json"):
    time.sleep(0.1)
time.sleep(300 if fails and os.environ["GPUJOB_RANK"] == "1" else float(os.environ.get("SECONDS_EACH", "1")))
sys.exit(3 if fails else 0)
"""
"""All points wait for the file ``go``.

One point fails: its first worker ends with 3 when the second one, which runs for long, has started.
"""


def sweep_job(**over: Any) -> dict[str, Any]:
    return {
        "name": "points",
        "resources": {"nodes": 1},
        "workers": [{"count": 2, "command": "python3 point.py {lr} {bs}", "env": {"LR": "{lr}"}}],
        "slurm": {"partition": "gpu", "time_limit": "00:05:00"},
        "monitoring": {"check_interval": 1, "linger": 0},
        "sweep": {"max_parallel": 2, "grid": {"lr": [0.00001, 0.001], "bs": [8, 16, 32]}},
        **over,
    }


class Sweep:
    """A submitted sweep."""

    def __init__(self, jobs: JobSpace, spec: Mapping[str, Any]) -> None:
        self.jobs = jobs
        (jobs.directory / "point.py").write_text(PROGRAM)
        (jobs.directory / "job.yaml").write_text(yaml.safe_dump(dict(spec), sort_keys=False))
        jobs.own(jobs.directory)
        done = jobs.gpujob("submit", "job.yaml", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        self.answer = json.loads(done.stdout)
        self.directory = Path(self.answer["sweep_dir"])

    def go(self) -> None:
        """Let the points work."""
        (self.jobs.directory / "go").touch()

    def started(self, *points: int) -> None:
        """Wait until the workers of these points have started."""
        run_dirs = [Path(self.answer["points"][index]["run_dir"]) for index in points]
        self.jobs.cluster.wait_for(
            lambda: all([*(run_dir / "workers").glob("*.start.json")] for run_dir in run_dirs), 90, "their start"
        )

    def command(self, *options: str) -> tuple[int, dict[str, Any]]:
        """Exit status and JSON of ``gpujob sweep``."""
        done = self.jobs.gpujob("sweep", str(self.directory), "--json", *options)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def wait(self) -> tuple[int, dict[str, Any]]:
        """The same when no point runs or waits any more."""
        return self.jobs.cluster.wait_for(
            lambda: result if (result := self.command())[0] != 10 else None, 180, "the end of the sweep", interval=0.5
        )

    def close(self) -> None:
        arrays = json.loads((self.directory / "sweep.json").read_text())["arrays"]
        self.jobs.cluster.run(["scancel", *(array["job_id"] for array in arrays)], user=ROOT)
        self.wait()


def test_the_hub_has_the_targets_of_the_points_that_run(jobs: JobSpace) -> None:
    hub, spec = RealHub(jobs), sweep_job(sweep={"max_parallel": 1, "grid": {"lr": [0.1, 0.2], "bs": [8]}})
    sweep = Sweep(jobs, spec)
    first = sweep.answer["points"][0]["job_id"]

    def targets() -> list[str]:
        return [group["labels"]["job_id"] for group in hub.json("/targets")]

    jobs.cluster.wait_for(lambda: targets() == [first], 60, "the first point")
    run_dirs = [sweep.answer["points"][0]["run_dir"]]
    jobs.cluster.wait_for(
        lambda: [job["run_dir"] for job in hub.json(f"/api/v1/jobs/{first}")["jobs"]] == run_dirs, 30, "its directory"
    )
    sweep.go()
    _, states = sweep.wait()
    assert states["states"] == {"COMPLETED": 2}
    jobs.cluster.wait_for(lambda: targets() == [], 30, "the points to go")


def most_at_once(run_dirs: list[Path]) -> int:
    """Most jobs that ran at the same time, from their records."""
    changes = []
    for run_dir in run_dirs:
        start = json.loads((run_dir / "orchestrator.json").read_text())["start"]
        end = json.loads((run_dir / "report.json").read_text())["end"]
        changes += [(start, 1), (end, -1)]
    running, most = 0, 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def test_two_points_run_at_once_and_only_failed_ones_are_resumed(jobs: JobSpace, cluster: Cluster) -> None:
    sweep = Sweep(jobs, sweep_job())
    array = sweep.answer["job_id"]
    assert [point["job_id"] for point in sweep.answer["points"]] == [f"{array}_{index}" for index in range(6)]
    sweep.started(0, 1)
    waiting = jobs.gpujob("watch", f"{array}_5", "--once", "--json")
    assert (waiting.returncode, json.loads(waiting.stdout)["state"]) == (10, "PENDING")
    sweep.go()

    status, found = sweep.wait()
    names = [f"points_lr{lr}_bs{bs}" for lr in ("1e-05", "0.001") for bs in (8, 16, 32)]
    assert [point["name"] for point in found["points"]] == names
    assert [point["state"] for point in found["points"]] == [*["COMPLETED"] * 4, "FAILED", "COMPLETED"]
    assert status == found["exit_status"] == 1
    failed = found["points"][4]
    assert failed["cause"].startswith(f"worker_w0 (rank 0) on {failed['nodes'][0]}: app_error: exit status 3")
    assert most_at_once([Path(point["run_dir"]) for point in found["points"]]) == 2
    for point in found["points"]:
        assert point["job_id"] == f"{array}_{point['index']}"
        run_dir = Path(point["run_dir"])
        assert run_dir.parent == sweep.directory
        assert run_dir.name.startswith(f"{point['job_id']}_{point['name']}_")
        (log,) = run_dir.glob("*_worker_w0.out")
        values = point["values"]
        expected = f"{point['job_id']} {values['lr']} ['{values['lr']}', '{values['bs']}']\n"
        assert log.read_text() == expected
    reported = jobs.gpujob("report", f"{array}_4", "--json")
    report = json.loads(reported.stdout)
    assert (reported.returncode, report["job_id"], report["job_name"]) == (1, f"{array}_4", names[4])
    peer = report["workers"][1]["exit"]
    assert peer["reason"] == "terminated_peer"
    assert was_asked(report, peer)

    (jobs.directory / "fixed").touch()
    resumed = jobs.gpujob("sweep", str(sweep.directory), "--resume", "--json", cwd=Path("/"))
    assert resumed.returncode == 0, resumed.stderr
    (again,) = json.loads(resumed.stdout)["points"]
    assert again["name"] == names[4]
    assert again["job_id"] not in (f"{array}_4", None)
    status, found = sweep.wait()
    assert (status, found["states"]) == (0, {"COMPLETED": 6})
    assert (found["points"][4]["job_id"], found["points"][4]["runs"]) == (again["job_id"], 2)
    assert Path(failed["run_dir"]).is_dir()
    assert jobs.gpujob("report", again["job_id"]).returncode == 0
    nothing = jobs.gpujob("sweep", str(sweep.directory), "--resume")
    assert (nothing.returncode, nothing.stderr) == (0, "")
    assert nothing.stdout == "nothing to resume: all 6 points have completed\n"


def test_points_of_different_sizes_are_consecutive_arrays(jobs: JobSpace, cluster: Cluster) -> None:
    spec = sweep_job(
        env={"SECONDS_EACH": "{seconds}"},
        sweep={"max_parallel": 1, "zip": {"resources.nodes": [1, 2], "seconds": [300, 1]}},
    )
    spec["workers"][0] |= {"count": 1, "command": "python3 point.py {seconds}", "env": {"LR": "{point}"}}
    sweep = Sweep(jobs, spec)
    try:
        first, second = sweep.answer["arrays"]
        one, two = (point["job_id"] for point in sweep.answer["points"])
        assert (one, two) == (f"{first}_0", f"{second}_1")
        sweep.started(0)
        sweep.go()
        status, found = sweep.command()
        assert (status, [point["state"] for point in found["points"]]) == (10, ["RUNNING", "PENDING"])
        assert jobs.gpujob("stop", one).returncode == 0
        status, found = sweep.wait()
        assert [point["state"] for point in found["points"]] == ["CANCELLED", "COMPLETED"]
        assert [len(point["nodes"]) for point in found["points"]] == [1, 2]
        assert most_at_once([Path(point["run_dir"]) for point in found["points"]]) == 1
        assert status == 5
    finally:
        sweep.close()
