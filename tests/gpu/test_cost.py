"""Cost of reading a real GPU: of each call, each part of a read, and the whole sidecar."""

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.clock import cpu_s, rss_mib, spread
from bench.sidecar import prepare, record_start, start_sidecar, start_workers
from tests.gpu.comparison import columns
from tests.gpu.conftest import Show
from tests.gpu.hardware import HardwareJob
from tests.gpu.nvidia_smi import Device

ROOT = Path(__file__).resolve().parents[2]
MOST_PARTS_US = {"activity": 20_000, "processes": 100_000, "condition": 200_000, "list": 20_000}
"""Limits of medians: a read must leave the driver free for others nearly all the time."""
SETTLE_S, ROUNDS, ROUND_S = 8, 5, 10
MOST_MIB = 50  # of the sidecar without GPUs
MOST_GPU_MIB = 8  # that GPUs add to it, in addition to what the driver's library takes as soon as it is loaded
MOST_PERCENT = 2.0  # of a core, including the time in the library

LIBRARY_MIB = """
import ctypes, os
def rss_mib(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
before = rss_mib()
assert ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() == 0
print(rss_mib() - before)
"""

pytestmark = pytest.mark.gpu


def measure(device: Device, *options: str) -> dict[str, list[float]]:
    """Output of ``cost.py``."""
    argv = [sys.executable, "-m", "tests.gpu.cost", device.uuid, *options]
    result = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found: dict[str, list[float]] = json.loads(result.stdout)
    return found


def cost_table(durations: Mapping[str, list[float]]) -> str:
    """Durations by name, the most expensive first."""
    rows: list[tuple[str, ...]] = [("microseconds", "number", "median", "p99", "most")]
    for name, times in sorted(durations.items(), key=lambda item: -statistics.median(item[1])):
        p99 = sorted(times)[min(len(times) - 1, len(times) * 99 // 100)]
        shown = [f"{value:.1f}" for value in (statistics.median(times), p99, max(times))]
        rows.append((name, str(len(times)), *shown))
    return columns(rows)


@pytest.mark.parametrize("load", ["idle", "busy"])
def test_a_read_is_cheap(job: HardwareJob, show: Show, load: str) -> None:
    if load == "busy":
        job.work(0, *job.cuda("--seconds", "120"))
        job.until_printed("holds")
    calls, parts = measure(job.device, "--calls"), measure(job.device)
    show(f"cost-of-calls-{load}", cost_table(calls))
    show(f"cost-of-reads-{load}", cost_table(parts))
    assert {name: statistics.median(parts[name]) < most for name, most in MOST_PARTS_US.items()} == dict.fromkeys(
        MOST_PARTS_US, True
    )
    assert "nvmlDeviceGetPcieThroughput" not in calls, "it blocks for 20 ms"


def test_a_gpu_adds_little_cpu_time_and_memory_to_the_sidecar(tmp_path: Path, device: Device, show: Show) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    prepare(tmp_path / "with", 1)
    prepare(tmp_path / "without")
    tree, pids = start_workers()
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank, pid in enumerate(pids):
            record_start(tmp_path / "with", rank, pid)
            record_start(tmp_path / "without", rank, pid)
        pages = []
        for name, visible_devices in (("with", device.uuid), ("without", "")):
            process, address = start_sidecar(tmp_path / name, CUDA_VISIBLE_DEVICES=visible_devices)
            running.append(process)
            pages.append(f"http://{address}/metrics")
        scrape(pages, SETTLE_S)
        assert b"gpujob_gpu_utilization_ratio{" in urllib.request.urlopen(pages[0]).read()
        assert b"gpujob_gpu_info{" not in urllib.request.urlopen(pages[1]).read()
        shares: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            began, before = time.monotonic(), [cpu_s(process.pid) for process in running]
            scrape(pages, ROUND_S)
            seconds = time.monotonic() - began
            for share, process, earlier in zip(shares, running, before, strict=True):
                share.append(100 * (cpu_s(process.pid) - earlier) / seconds)
        memory = [rss_mib(process.pid) for process in running]
        library = float(subprocess.check_output([sys.executable, "-c", LIBRARY_MIB], text=True))
    finally:
        for process in running:
            process.terminate()
            process.wait(timeout=20)
        tree.kill()
        tree.wait()
    extra = spread([with_gpu - without_gpu for with_gpu, without_gpu in zip(*shares, strict=True)])
    rows = [
        ("sidecar", "% of a core", "MiB"),
        ("with the GPU", f"{statistics.median(shares[0]):.3f}", f"{memory[0]:.1f}"),
        ("without", f"{statistics.median(shares[1]):.3f}", f"{memory[1]:.1f}"),
        (
            "difference",
            f"{extra['median']:.3f} ({extra['least']:.3f} to {extra['most']:.3f})",
            f"{memory[0] - memory[1]:.1f}",
        ),
        ("of it the driver's library", "", f"{library:.1f}"),
    ]
    show("cost-of-sidecar", columns(rows))
    assert memory[1] <= MOST_MIB
    assert memory[0] - memory[1] - library <= MOST_GPU_MIB
    assert extra["median"] <= MOST_PERCENT


def scrape(pages: list[str], seconds: int) -> None:
    """Scrape all pages once a second."""
    start = time.monotonic()
    for tick in range(1, seconds + 1):
        for page in pages:
            urllib.request.urlopen(page).read()
        time.sleep(max(0.0, start + tick - time.monotonic()))
