"""What the wrapper adds beside each worker: memory while it waits, time around a program that ends at once."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.clock import Figures, rss_mib, spread

ROUNDS = 15


def wrapper(run_dir: Path, worker: str, rank: int, restart: int = 0) -> list[str]:
    """The command of a wrapper, to which that of its worker is added."""
    task = ["--run-dir", str(run_dir), "--worker", worker, "--rank", str(rank), "--restart", str(restart)]
    return [sys.executable, "-I", "-m", "launcher.programs.wrapper", *task, "--"]


def measure() -> Figures:
    """Milliseconds and MiB; each round pairs `true` under the wrapper with `true` alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "workers").mkdir()
        wrap = wrapper(Path(folder), "w", 0)
        added = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            subprocess.run(["true"], check=True)
            middle = time.perf_counter()
            subprocess.run([*wrap, "true"], check=True)
            added.append((time.perf_counter() - middle - (middle - start)) * 1000)
        process = subprocess.Popen([*wrap, "sleep", "60"])
        try:
            while not list(Path(folder, "workers").glob("*.start.json")):
                time.sleep(0.01)
            time.sleep(0.2)
            memory = rss_mib(process.pid)
        finally:
            process.terminate()
            process.wait()
    return {
        "added_ms": spread(added),
        "rss_mib": round(memory, 1),
        "goals": {"at most 60 ms": spread(added)["median"] <= 60, "at most 12 MiB": memory <= 12},
    }
