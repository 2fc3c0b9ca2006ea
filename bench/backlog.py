"""Logs as a user pays for them: through a sidecar and `gpujob scan`, as processes from their start.

CPU time of each process with its threads and children. The logs of a sidecar are hard links of one file, larger than
any memory cache.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.clock import Figures, cpu_s, rss_mib, spread
from bench.log_corpus import FLOOD, write_log
from bench.logs import PATTERNS
from bench.sidecar import make_manifest, start_sidecar, write_run_dir
from exporter.contract import run_files
from exporter.contract.manifest import LogPattern, Task
from exporter.logs.patterns import PatternKind

ROUNDS = 3
LOADS = {  # profile, bytes of a log, and logs
    "typical": ("typical", 128 << 20, 8),
    "small": ("typical", 8 << 20, 16),
    FLOOD: (FLOOD, 64 << 20, 2),
}
OWN = tuple(
    LogPattern(
        pattern.name,
        pattern.regex.pattern.decode(),
        "warning" if pattern.kind is PatternKind.ERROR else None,
    )
    for pattern in PATTERNS
)


def measure() -> Figures:
    """Megabytes a second of CPU time, also without what the start costs."""
    rounds: dict[str, list[float]] = {}
    memory = 0.0
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder, name) for name in LOADS}
        errors = {name: write_log(logs[name], profile, size).errors for name, (profile, size, _) in LOADS.items()}
        empty = Path(folder, "empty")
        empty.write_bytes(b"begun\n")
        for _ in range(ROUNDS):
            start_s, _ = _sidecar(empty, 16, {})
            rounds.setdefault("sidecar start, CPU s", []).append(start_s)
            for name, (_, _, count) in LOADS.items():
                megabytes = logs[name].stat().st_size * count / 1e6
                spent, rss = _sidecar(logs[name], count, errors[name])
                memory = max(memory, rss)
                rounds.setdefault(f"{name}: sidecar", []).append(megabytes / (spent - start_s))
                rounds.setdefault(f"{name}: sidecar with its start", []).append(megabytes / spent)
            for name, count in (("typical", 8), ("small", 1), (FLOOD, 1)):
                megabytes = logs[name].stat().st_size * count / 1e6
                spent, search_s = _scan([str(logs[name])] * count)
                rounds.setdefault(f"{name}: scan", []).append(megabytes / spent)
                rounds.setdefault(f"{name}: scan, times its search", []).append(spent / search_s)
    found = {name: spread(values) for name, values in rounds.items()}
    middle = {name: values["median"] for name, values in found.items()}
    goals = {
        "typical: 1500 MB/s in a sidecar": middle["typical: sidecar"] >= 1500,
        "typical: 1000 MB/s by scan": middle["typical: scan"] >= 1000,
        "small logs: 150 MB/s in a sidecar": middle["small: sidecar"] >= 150,
        "flood: 100 MB/s in a sidecar": middle["flood: sidecar"] >= 100,
        "flood: 100 MB/s by scan": middle["flood: scan"] >= 100,
        "scan: at most 1.5 times its search": middle["typical: scan, times its search"] <= 1.5,
        "at most 50 MiB": memory <= 50,
    }
    return {"rounds": ROUNDS, "rss_mib": round(memory, 1), **found, "goals": goals}


def _sidecar(log: Path, count: int, errors: dict[str, int]) -> tuple[float, float]:
    """CPU seconds and MiB of a sidecar from its start until its status has all errors of these logs."""
    with tempfile.TemporaryDirectory(dir=log.parent) as folder:
        run_dir = Path(folder)
        tasks = tuple(
            Task(*(f"worker_w{rank}", "worker", rank, rank, 0, 0), logs=(f"{rank}.out",)) for rank in range(count)
        )
        manifest = replace(make_manifest(tasks), progress=OWN[:7], errors=OWN[7:])
        write_run_dir(run_dir, manifest)
        for rank in range(count):
            os.link(log, run_dir / f"{rank}.out")
        process, _ = start_sidecar(run_dir)
        try:
            read = 0
            while read < count:
                time.sleep(0.2)
                status: Any = run_files.read_json(run_dir / run_files.STATUS_DIR / "node.json") or {}
                found = [worker.get("log_errors", {}) for worker in status.get("workers", ())]
                read = sum(all(of.get(name, 0) == number for name, number in errors.items()) for of in found)
            return cpu_s(process.pid) + _children_s(process.pid), rss_mib(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _children_s(pid: int) -> float:
    """CPU seconds of ended children (proc_pid_stat(5), fields 16 and 17)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _scan(paths: list[str]) -> tuple[float, float]:
    """CPU seconds of the command `gpujob scan` from its start, and those of its search alone."""
    gpujob = Path(sys.executable).with_name("gpujob")
    process = subprocess.Popen([gpujob, "scan", "--json", *paths], stdout=subprocess.PIPE)
    assert process.stdout is not None
    found = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"gpujob scan ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, sum(log["cpu_seconds"] for log in found["logs"])
