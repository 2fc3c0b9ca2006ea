"""The table of `gpujob metrics`, by source."""

import time
from pathlib import Path
from typing import Any

from exporter.contract.report import GpuDeviceReport, GpuReport, NodeGpuReport, Report, WorkerReport
from exporter.contract.status import JobStatus, Memory
from exporter.slurm.accounting import parse_accounting
from exporter.slurm.queue import AttemptSnapshot, QueueRow
from exporter.slurm.usage import RunningUse
from launcher.fleet.metrics_view import (
    ended_metrics,
    metrics_json,
    render_metrics,
    report_metrics,
    running_metrics,
    sidecar_metrics,
)
from launcher.rundir.statuses import read_statuses
from tests.launcher.conftest import Golden
from tests.launcher.fleet.run_dirs import GIB, run_directory
from tests.support.statuses import node_status, worker_status

SAMPLES = Path(__file__).parents[2] / "exporter" / "slurm" / "samples"


def test_the_tables_are_those_of_the_golden_page(golden: Golden, tmp_path: Path) -> None:
    (status,) = read_statuses(run_directory(tmp_path / "run"), 0).values()
    known = {"n1": status, "n2": status.replace(memory=Memory(), gpus=None, workers=())}
    sidecars = sidecar_metrics("gentle-mayfly", "RUNNING", known)
    gpu = GpuDeviceReport(
        gpu="0", uuid="GPU-0", utilization_mean_ratio=0.93, memory_peak_bytes=72 * GIB, memory_total_bytes=80 * GIB
    )
    report = Report(
        job_id="4459",
        job_name="gentle-mayfly",
        state="COMPLETED",
        exit_status=0,
        end=1000.0,
        duration_s=100.0,
        gpus=GpuReport(nodes=(NodeGpuReport(node="n1", gpus=(gpu,)),)),
        workers=(WorkerReport(worker="w", rank=0, cpu_s=250.0),),
    )
    row = QueueRow("7", AttemptSnapshot("RUNNING", 1.0, 1000.0), "job", None, "gpu", "cpu=4,mem=1G,gres/gpu=4")
    attempts = parse_accounting((SAMPLES / "sacct.24.11.5.txt").read_text(encoding="utf-8"))
    ended = [attempt for attempt in attempts if attempt.job_id == "2"]
    tables = [
        render_metrics(sidecars, status.time + 3),
        render_metrics(report_metrics(report), 1060.0),
        render_metrics(running_metrics(row, RunningUse(30.0, 2.0**29), 1010.0), 1010.0),
        render_metrics(running_metrics(row, RunningUse(None, None), 1010.0), 1010.0),
        render_metrics(ended_metrics(ended), (ended[0].snapshot.ended or 0.0) + 90),
    ]
    golden("launcher/metrics.txt", "\n\n".join("\n".join(lines) for lines in tables) + "\n")


def test_json_has_values_in_base_units(tmp_path: Path) -> None:
    statuses = read_statuses(run_directory(tmp_path / "run"), 0)
    body: Any = metrics_json(sidecar_metrics("job", "RUNNING", statuses))
    (job,) = body["jobs"]
    assert (body["source"], body["gpu_utilization_ratio"], job["name"]) == ("sidecars", 0.25, "job")
    assert abs(job["cpu_cores"] - 3.5) < 0.1
    assert job["gpus"][1] == {
        "gpu": "1",
        "utilization_ratio": 0.5,
        "memory_bytes": 20 * GIB,
        "memory_total_bytes": 80 * GIB,
    }
    assert abs(body["time"] - time.time()) < 60


def test_the_cpu_time_of_a_restarted_worker_is_that_since_the_start_of_the_job() -> None:
    worker = worker_status(start=3540.0, restarts=1, cpu_s=7200.0)
    status = node_status(worker, time=3600.0, job=JobStatus(start=0.0))
    (row,) = sidecar_metrics("job", "RUNNING", {"n1": status}).rows
    assert row.cpu_cores == 2.0
