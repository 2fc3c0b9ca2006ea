"""What the wrapper adds beside each worker: memory while it waits, time around a program that ends at once."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.clock import rss_mib, spread

ROUNDS = 15


def measure() -> dict[str, Any]:
    """Milliseconds and MiB; each round pairs `true` under the wrapper with `true` alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "workers").mkdir()
        wrap = [
            sys.executable,
            "-I",
            "-m",
            "launcher.programs.wrapper",
            "--run-dir",
            folder,
            "--worker",
            "w",
            "--rank",
            "0",
            "--",
        ]
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
