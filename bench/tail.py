"""Following the logs of a full node as they are written: CPU of a sidecar, and of its thread for logs."""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.backlog import OWN
from bench.clock import Figures, cpu_by_thread
from bench.log_corpus import write_log
from bench.sidecar import make_manifest, start_sidecar, write_run_dir
from exporter.contract.manifest import Task

FILES, WARM_S, WINDOW_S, WINDOWS = 32, 5.0, 5.0, 4
RUNS = {  # lines a second of each log, check interval, and the most per cent of a core for the thread
    "100 lines/s at 1 s": (100, 1.0, 1.0),
    "10 lines/s at 250 ms": (10, 0.25, 0.6),
    "idle at 1 s": (0, 1.0, 0.03),
}

_WRITER = """
import os, sys, time
folder, corpus, files, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lines = open(corpus, "rb").read().splitlines(keepends=True)
logs = [os.open(f"{folder}/{i}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for i in range(files)]
place, ticks, start = 0, 0, time.monotonic()
while True:
    for log in logs:
        os.write(log, b"".join(lines[place : place + rate // 10]))
        place = (place + rate // 10) % (len(lines) - rate)
    ticks += 1
    time.sleep(max(0, start + ticks / 10 - time.monotonic()))
"""


def measure() -> Figures:
    """Shares of a core in percent, by load."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        write_log(corpus, "typical", 2 << 20)
        found: Figures = {}
        for name, (rate, interval_s, _) in RUNS.items():
            run_dir = Path(folder, str(len(found)))
            run_dir.mkdir()
            found[name] = _follow(run_dir, corpus, rate, interval_s)
    goals = {f"{name}: at most {most} %": found[name]["logs"]["median"] <= most for name, (*_, most) in RUNS.items()}
    return {"files": FILES, **found, "goals": goals}


def _follow(run_dir: Path, corpus: Path, rate: int, interval_s: float) -> Figures:
    tasks = tuple(
        Task(*(f"worker_w{rank}", "worker", rank, rank, 0, 0), logs=(f"{rank}.out",)) for rank in range(FILES)
    )
    write_run_dir(run_dir, replace(make_manifest(tasks), progress=OWN[:7], errors=OWN[7:], check_interval_s=interval_s))
    for rank in range(FILES):
        (run_dir / f"{rank}.out").write_bytes(corpus.read_bytes()[: 4 << 10])
    command = [sys.executable, "-c", _WRITER, str(run_dir), str(corpus), str(FILES), str(rate)]
    shares: dict[str, list[float]] = {"logs": [], "whole": []}
    with subprocess.Popen(command) as writer:
        sidecar, _ = start_sidecar(run_dir)
        try:
            time.sleep(WARM_S)
            for _ in range(WINDOWS):
                began, before = time.monotonic(), cpu_by_thread(sidecar.pid)
                time.sleep(WINDOW_S)
                after, passed = cpu_by_thread(sidecar.pid), time.monotonic() - began
                shares["logs"].append(100 * (after["logs"] - before["logs"]) / passed)
                shares["whole"].append(100 * (sum(after.values()) - sum(before.values())) / passed)
        finally:
            writer.kill()
            sidecar.terminate()
            sidecar.wait()
    return {
        name: {"median": round(statistics.median(of), 3), "least": round(min(of), 3), "most": round(max(of), 3)}
        for name, of in shares.items()
    }
