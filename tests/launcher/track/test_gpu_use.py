"""GPU use from a file of metrics, whatever its columns are called."""

import pytest

from launcher.track.gpu_use import parse_gpu_metrics
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
        ("", "", None),
    ],
)
def test_the_last_row_of_each_gpu_counts(header: str, rows: str, found: GpuUse | None) -> None:
    assert parse_gpu_metrics(header, rows) == found
