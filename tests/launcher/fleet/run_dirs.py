"""Run directories of jobs with a sidecar."""

import time
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.manifest import Task, render_manifest
from exporter.contract.status import EtaEstimate, GpuDevice, HealthReason, NodeGpus, NodeName
from tests.support.exporter import make_manifest
from tests.support.statuses import node_status, worker_status

GIB = 1 << 30


def run_directory(folder: Path, health: str = "healthy", idle_s: float | None = None) -> Path:
    """The run directory of a job that runs on node n1, with two of its three steps done."""
    (folder / "status").mkdir(parents=True)
    task = Task("worker_w0", "worker", 0, 0, 0, 0, gpus=(0, 1))
    run_files.write_json(folder / "manifest.json", render_manifest(make_manifest(folder, task)))
    run_files.write_json(folder / "orchestrator.json", {"schema": 1, "attempt": 0, "start": 110.0})
    now = time.time()
    worker = worker_status(
        node="n1",
        start=now - 100,
        cpu_s=350.0,
        items=2.0,
        items_expected=3.0,
        unit="steps",
        eta=EtaEstimate(600.0, 500.0, 700.0),
        eta_time=now - 60,
    )
    devices = [
        GpuDevice(
            gpu=str(index),
            uuid=f"GPU-{index}",
            name="NVIDIA H100",
            utilization_ratio=0.5 * index,
            memory_used_bytes=20 * GIB,
            memory_total_bytes=80 * GIB,
            seen_s=idle_s,
            idle_s=idle_s,
        )
        for index in range(2)
    ]
    reasons = () if health == "healthy" else (HealthReason(gpu="1", severity=health, words="uncorrectable ECC error"),)
    gpus = NodeGpus(driver_state="ok", health=health, reasons=reasons, gpus=tuple(devices))
    status = node_status(worker, time=now, node=NodeName(name="n1"), gpus=gpus)
    run_files.write_json(folder / "status" / "n1.json", status.to_json())
    return folder
