"""GPU use from a file of metrics, whatever its columns are called."""

from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.contract.status import GpuDevice, NodeGpus, NodeStatus
from exporter.slurm.tracking import TrackedJob
from launcher.track.gpu_use import parse_gpu_metrics, read_gpu_use
from launcher.track.run_log import GpuUse

GIB = 2.0**30


@pytest.mark.parametrize(
    ("header", "rows", "found"),
    [
        (  # nvidia-smi --query-gpu=... --format=csv
            "timestamp, index, utilization.gpu [%], utilization.memory [%], memory.used [MiB], memory.total [MiB]",
            "t, 0, 10 %, 1 %, 1024 MiB, 81920 MiB\nt, 1, 90 %, 1 %, 2048 MiB, 81920 MiB\n",
            GpuUse(0.5, 3 * GIB, 160 * GIB),
        ),
        ("gpu,gpu_util,mem_used_gb,mem_total_gb", "0,1,2,80\n0,87,62,80\n", GpuUse(0.87, 62 * GIB, 80 * GIB)),
        ("util_ratio,mem_used_bytes,mem_total_bytes", "0.5,10,20\n", GpuUse(0.5, 10.0, 20.0)),
        ("gpu_util,mem_used,mem_total", "87,62,80\n", None),  # without a unit
        ("gpu_util,mem_used_gb", "87,62\n", None),
        ("gpu_util,mem_used_gb,mem_total_gb", "87,62,80\n90,6", GpuUse(0.87, 62 * GIB, 80 * GIB)),  # being written
        ("gpu_util,mem_used_gb,mem_total_gb", "87,62,80\n9\r0,6,80\n", GpuUse(0.87, 62 * GIB, 80 * GIB)),  # no row
        ("gpu_util\r,mem_used_gb", "87,62\n", None),
        ("", "", None),
    ],
)
def test_the_last_row_of_each_gpu_counts(header: str, rows: str, found: GpuUse | None) -> None:
    assert parse_gpu_metrics(header, rows) == found


def test_a_job_of_gpujob_has_the_gpu_use_of_its_sidecars(tmp_path: Path) -> None:
    job = TrackedJob(job_id="7", name="job", run_dir=str(tmp_path), log=f"{tmp_path}/")
    assert read_gpu_use(job) is None  # it has just started
    (tmp_path / run_files.STATUS_DIR).mkdir()
    for node, use in (("n1", 0.0), ("n2", 1.0)):
        device = GpuDevice(
            gpu="0",
            uuid=node,
            utilization_ratio=use,
            memory_used_bytes=int(use * GIB),
            memory_total_bytes=int(80 * GIB),
        )
        status = NodeStatus(gpus=NodeGpus(gpus=(device, GpuDevice(gpu="1", uuid="lost"))))
        run_files.write_json(tmp_path / run_files.STATUS_DIR / f"{node}.json", status.to_json())
    assert read_gpu_use(job) == GpuUse(0.5, GIB, 160 * GIB)
    assert read_gpu_use(job.replace(attempt=2)) is None  # those are of the first attempt
