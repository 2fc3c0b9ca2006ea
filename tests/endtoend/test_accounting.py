"""The accounting in a job's report on a real Slurm."""

import json
from typing import Any

import pytest

from tests.endtoend.jobs import JobSpace
from tests.realstack.cluster import ROOT

pytestmark = pytest.mark.slurm

FIELDS = "JobID,ExitCode,DerivedExitCode,AllocTRES,AllocCPUS,ElapsedRaw,TotalCPU,MaxRSS,TRESUsageInTot,End"
WORK = "import time; held = b'x' * 60_000_000\nwhile time.process_time() < 4: sum(range(10_000))"


def sacct(jobs: JobSpace, job_id: str) -> list[dict[str, str]]:
    """The rows of the job and of its steps."""
    argv = ["sacct", "-n", "-P", "--noconvert", "-j", job_id, "-o", FIELDS]
    text = jobs.cluster.run(argv, user=ROOT, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout
    return [dict(zip(FIELDS.split(","), line.split("|"), strict=True)) for line in text.splitlines()]


def seconds(text: str) -> float:
    parts = [float(part) for part in text.replace("-", ":").split(":")]
    return sum(part * factor for part, factor in zip(reversed(parts), (1, 60, 3600, 86400), strict=False))


def used_memory(step: dict[str, str]) -> int:
    usage = dict(pair.split("=") for pair in step["TRESUsageInTot"].split(",") if pair)
    return int(usage.get("mem", 0))


def test_the_figures_of_the_report_are_those_of_sacct_and_seff(jobs: JobSpace) -> None:
    command = ["python3", "-c", WORK]
    spec: dict[str, Any] = {
        "name": "figures",
        "resources": {"nodes": 2, "gpus_per_node": 2, "cpus_per_node": 2, "memory_per_node": "300M"},
        "workers": [{"count": 2, "gpus": 2, "command": command}],
        "slurm": {"partition": "gpu", "time_limit": "00:05:00"},
        "monitoring": {"check_interval": 1, "linger": 0},
    }
    job = jobs.submit(spec)
    assert job.wait() == "COMPLETED"
    shown = json.loads(jobs.gpujob("report", job.job_id, "--json", check=True).stdout)
    found = shown["accounting"]
    row, *steps = sacct(jobs, job.job_id)
    assert (found["exit_code"], found["derived_exit_code"]) == (row["ExitCode"], row["DerivedExitCode"])
    assert found["allocated"] == row["AllocTRES"]
    assert found["cpu_s"] == pytest.approx(seconds(row["TotalCPU"]))
    assert found["max_rss_bytes"] == max(float(step["MaxRSS"] or 0) for step in steps)
    available_s = int(row["ElapsedRaw"]) * int(row["AllocCPUS"])
    assert found["cpu_ratio"] == pytest.approx(sum(int(seconds(step["TotalCPU"])) for step in steps) / available_s)
    assert found["cpu_ratio"] > 0.02
    assert found["memory_bytes"] == max(map(used_memory, steps)) > 60_000_000
    assert found["memory_requested_bytes"] == 2 * 300 * 1024**2
    assert found["gpu_time"] == [{"gpu_type": None, "gpu_seconds": 4.0 * int(row["ElapsedRaw"])}]
    assert (found["complete"], found["attempts"], found["slurm_energy_j"]) == (True, 1, None)
    kept = job.run_dir / "accounting.json"
    assert json.loads(kept.read_text()) == found
    assert kept.stat().st_mode & 0o777 == 0o640
    assert "## Slurm's accounting\n" in (job.run_dir / "report.md").read_text()
    again = jobs.gpujob("report", job.job_id, "--json", env=without_sacct(jobs))  # kept, so it is not asked
    assert json.loads(again.stdout)["accounting"] == found, again.stderr


def without_sacct(jobs: JobSpace) -> dict[str, str]:
    """An environment in which sacct hangs."""
    fake = jobs.directory / "bin" / "sacct"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 300\n")
    fake.chmod(0o755)
    jobs.own(fake.parent)
    return {"PATH": f"{fake.parent}:/usr/bin:/bin"}


def test_a_sacct_that_hangs_costs_one_line_and_ten_seconds(jobs: JobSpace) -> None:
    spec = {
        "name": "short",
        "workers": [{"command": "true"}],
        "slurm": {"partition": "gpu"},
        "monitoring": {"linger": 0},
    }
    job = jobs.submit(spec)
    job.wait()
    done = jobs.gpujob("report", job.job_id, env=without_sacct(jobs))
    assert done.returncode == 0, done.stderr
    assert "- not measured: sacct did not answer in 10 s\n" in done.stdout
    assert not (job.run_dir / "accounting.json").exists()
