"""Sums of what sacct prints, and what sstat prints of running jobs."""

from pathlib import Path

import pytest

from exporter.slurm.usage import RUNNING_FORMAT, RunningUse, parse_running_use, parse_usage, sum_usage

SAMPLES = Path(__file__).parent / "samples"
SSTAT = """2.batch|00:00:00|1|cpu=00:00:00,energy=0,fs/disk=26082,mem=4022272,pages=0,vmem=3928K
2.0|00:00:00|4|cpu=00:00:03,energy=0,fs/disk=145656,mem=171356160,pages=0,vmem=167340K
"""


@pytest.mark.parametrize(("version", "ok_s"), [("22.05.8", 8), ("24.11.5", 8), ("26.05.5", 8)])
def test_gpu_seconds_are_elapsed_time_times_gpus(version: str, ok_s: int) -> None:
    rows = parse_usage((SAMPLES / f"usage.{version}.txt").read_text())
    assert rows[1]._replace(elapsed_s=0) == ("2", "ada", "", "gpu", "COMPLETED", 0, 4, {"": 4}, "ok", None)
    (odd,) = (row for row in rows if row.job_id == "13")
    assert odd.name == "a|b`c d \\\\ $(id) {x}"
    used = sum_usage(rows)
    assert used.gpu_s == {"": 4.0 * ok_s}
    assert used.cpu_s == sum(row.elapsed_s * row.cpus for row in rows)


def test_all_attempts_count_and_waiting_jobs_do_not() -> None:
    rows = parse_usage((SAMPLES / "usage.24.11.5.txt").read_text())
    requeued = [row for row in rows if row.job_id in ("12", "33")]
    assert sum_usage(requeued)[:3] == (1, 2, 9.0)


def test_components_of_a_heterogeneous_job_are_one_job() -> None:
    rows = parse_usage("".join(f"9+{part}|ada|lab|gpu|COMPLETED|10|8|cpu=8,gres/gpu=4|job\n" for part in range(2)))
    assert sum_usage(rows)[:3] == (1, 2, 160.0)


def test_types_of_gpus_are_told_apart() -> None:
    text = "7|ada|lab|gpu|RUNNING|10|8|billing=8,cpu=8,gres/gpu:a100=1,gres/gpu:h100=2,gres/gpu=4,mem=1G|job\nno row\n"
    (row,) = parse_usage(text)
    assert (row.gpus, row.gpu_seconds) == ({"a100": 1, "h100": 2, "": 1}, 40.0)


def test_running_use_is_the_sum_of_the_steps() -> None:
    assert RUNNING_FORMAT == "JobID,AveCPU,NTasks,TRESUsageInTot"
    assert parse_running_use(SSTAT) == RunningUse(3.0, 4022272.0 + 171356160.0)
    assert parse_running_use("") == RunningUse(None, None)
