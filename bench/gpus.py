"""What eight GPUs cost a sidecar, beside one that has none, over a stand-in for NVIDIA's library.

32 workers of nine processes each on eight GPUs with all that an H200 tells, every collector at one second, one scrape a
second. Both sidecars run at the same time over the same processes. The library measures
its own time, which is subtracted, since a real driver's differs. Two results: the cost of serving the series of GPUs
once a second, and the difference of the other threads, which have more to write and share the caches.
"""

import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.clock import Figures, cpu_by_thread, rss_mib, spread
from bench.sidecar import prepare, record_start, start_sidecar, start_workers
from tests.fakenvml import profiles, seconds_inside

GPUS = 8
ROUNDS, ROUND_S = 5, 12
READING, SERVING = ("gpu-driver", "gpu-events", "gpus", "gpu_workers"), "serving"
"""Threads that read GPUs and bring them together with workers, and the one that answers scrapes."""
GOAL_SHARE, GOAL_SERIES, GOAL_MIB = 0.003, 45, 50


def measure() -> Figures:
    """Per cent of a core beyond the library's own time by rounds, series of a GPU, and MiB of the whole sidecar."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        scenario, told = profiles.h200(GPUS), place / "scenario"
        scenario.write(told)
        for name in ("processes", "calls", "with", "without"):
            (place / name).mkdir()
        environment = {
            **scenario.environment(told),
            "FAKENVML_PROCESSES": str(place / "processes"),
            "FAKENVML_CALLS": str(place / "calls"),
        }
        prepare(place / "with", GPUS)
        prepare(place / "without")
        tree, pids = start_workers()
        running: list[subprocess.Popen[str] | subprocess.Popen[bytes]] = [tree]
        try:
            for rank, pid in enumerate(pids):
                record_start(place / "with", rank, pid)
                record_start(place / "without", rank, pid)
                use = f"{scenario.gpus[rank % GPUS].uuid} {1 << 30} 20\n"
                (place / "processes" / str(pid)).write_text(use)
            sidecars = [start_sidecar(place / "with", **environment), start_sidecar(place / "without")]
            running += [process for process, _ in sidecars]
            return _compare(sidecars, place / "calls")
        finally:
            for process in running:
                process.kill()
                process.wait()


def _compare(sidecars: "list[tuple[subprocess.Popen[bytes], str]]", calls: Path) -> Figures:
    (gpu, gpu_address), (plain, plain_address) = sidecars
    pages = [f"http://{address}/metrics" for address in (gpu_address, plain_address)]
    _scrape(pages, 8)
    page = urllib.request.urlopen(pages[0]).read().decode()
    series = sum('gpu="0"' in line and "worker=" not in line for line in page.splitlines())
    reading, serving, rest, library = [], [], [], []
    for _ in range(ROUNDS):
        start, inside = time.monotonic(), seconds_inside(calls)
        before = [cpu_by_thread(process.pid) for process in (gpu, plain)]
        _scrape(pages, ROUND_S)
        after = [cpu_by_thread(process.pid) for process in (gpu, plain)]
        share = 100 / (time.monotonic() - start)
        taken = seconds_inside(calls) - inside
        own, others = (
            {name: now[name] - was.get(name, 0.0) for name in now} for was, now in zip(before, after, strict=True)
        )
        reading.append(share * (sum(own.get(name, 0.0) for name in READING) - taken))
        serving.append(share * (own[SERVING] - others[SERVING]))
        rest.append(share * sum(own[name] - others.get(name, 0.0) for name in own if name not in (*READING, SERVING)))
        library.append(share * taken)
    memory, spent = rss_mib(gpu.pid), spread(reading)
    return {
        "percent_of_a_core_reading_beyond_the_library": spent,
        "percent_of_a_core_serving_more_series": spread(serving),
        "percent_of_a_core_of_all_other_threads": spread(rest),
        "percent_of_a_core_in_the_library": spread(library),
        "series_of_a_gpu": series,
        "series": sum(not line.startswith("#") for line in page.splitlines()),
        "rss_mib": round(memory, 1),
        "rss_mib_without_gpus": round(rss_mib(plain.pid), 1),
        "goals": {
            "reading at most 0.3 % of a core beyond the library": spent["median"] <= 100 * GOAL_SHARE,
            "at most 45 series a GPU": series <= GOAL_SERIES,
            "at most 50 MiB": memory <= GOAL_MIB,
        },
    }


def _scrape(pages: list[str], seconds: int) -> None:
    """Scrape all pages once a second."""
    start = time.monotonic()
    for tick in range(1, seconds + 1):
        for page in pages:
            urllib.request.urlopen(page).read()
        time.sleep(max(0.0, start + tick - time.monotonic()))
