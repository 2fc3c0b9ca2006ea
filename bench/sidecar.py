"""A whole sidecar under a full node's load, by its own CPU clock.

32 workers of nine processes each, 32 logs at ten lines a second, 64 output files,
every collector at one second, one scrape a second.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from bench.clock import Figures, cpu_by_thread, cpu_s, rss_mib
from exporter.contract import run_files
from exporter.contract.manifest import Manifest, PathGroup, Task, render_manifest
from exporter.contract.process_identity import read_pid_namespace, read_start_ticks
from exporter.machine.own_process import MOST_CHARACTERS

WORKERS, CHILDREN, FILES, LINES_PER_S = 32, 8, 64, 10
SECONDS = 60

_TREE = """
import ctypes, json, os, signal, sys
die = lambda: ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
r, w = os.pipe()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        die()
        for _ in range(int(sys.argv[2])):
            if os.fork() == 0:
                die()
                while True: signal.pause()
        os.write(w, b"%d\\n" % os.getpid())
        while True: signal.pause()
pids = []
while len(pids) < int(sys.argv[1]):
    pids += [int(p) for p in os.read(r, 65536).split()]
print(json.dumps(pids), flush=True)
while True: signal.pause()
"""

_WRITER = """
import sys, time
folder, workers, rate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
logs = [open(f"{folder}/node_worker_w{i}.out", "a", buffering=1) for i in range(workers)]
n, start = 0, time.monotonic()
while True:
    n += 1
    for log in logs:
        log.write(f"2026-01-01 00:00:00 [INFO] Processed {n}/100000 items ({rate}.0 items/s)\\n")
    time.sleep(max(0.0, start + n / rate - time.monotonic()))
"""


def measure() -> Figures:
    """Per cent of one core, MiB, what a scrape and each collector's read take, and the descriptors that are held."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        prepare(run_dir)
        tree, pids = start_workers()
        processes: list[subprocess.Popen[str] | subprocess.Popen[bytes]] = [tree]
        try:
            for rank, pid in enumerate(pids):
                record_start(run_dir, rank, pid)
            processes.append(subprocess.Popen([sys.executable, "-c", _WRITER, folder, str(WORKERS), str(LINES_PER_S)]))
            sidecar, address = start_sidecar(run_dir)
            processes.append(sidecar)
            return _watch(run_dir, f"http://{address}/metrics", sidecar.pid)
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGKILL if process is tree else signal.SIGTERM)
                process.wait()


def start_workers() -> "tuple[subprocess.Popen[str], list[int]]":
    """The process that has all workers with their descendants, which end with it, and the pids of the workers."""
    tree = subprocess.Popen(
        [sys.executable, "-c", _TREE, str(WORKERS), str(CHILDREN)], stdout=subprocess.PIPE, text=True
    )
    assert tree.stdout is not None
    return tree, json.loads(tree.stdout.readline())


def start_sidecar(run_dir: Path, **environment: str) -> "tuple[subprocess.Popen[bytes], str]":
    """A sidecar of this run directory as node ``node``, and the address at which it listens by now."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "exporter", "sidecar", "--run-dir", str(run_dir)],
        env={**os.environ, "GPUJOB_NODE": "node", "GPUJOB_JOB_ID": "1", **environment},
        stderr=subprocess.DEVNULL,
    )
    while (published := run_files.read_json(run_dir / run_files.SIDECARS_DIR / "node.json")) is None:
        if process.poll() is not None:
            raise RuntimeError(f"the sidecar has ended at once, with status {process.returncode}")
        time.sleep(0.02)
    return process, str(published["address"])


def prepare(run_dir: Path, gpus: int = 0) -> None:
    """Create the run directory of all workers, which share this many GPUs evenly."""
    for index in range(FILES):
        (run_dir / f"output_worker_{index % WORKERS}_{index}.jsonl").write_text("{}\n" * 100)
    tasks = tuple(
        Task(
            *(f"worker_w{rank}", "worker", rank, rank, 0, 0),
            gpus=(rank % gpus,) if gpus else (),
            logs=(f"{{node}}_worker_w{rank}{{run}}.out",),
        )
        for rank in range(WORKERS)
    )
    groups = (PathGroup("output", ".", "output_worker_*.jsonl"), PathGroup("checkpoint", ".", "checkpoint_*"))
    write_run_dir(run_dir, replace(make_manifest(tasks), groups=groups))


def make_manifest(tasks: tuple[Task, ...]) -> Manifest:
    """The manifest of these workers on one node."""
    return Manifest(
        job_name="bench",
        user="bench",
        cluster="local",
        partition="local",
        nodes=1,
        tasks=tasks,
        check_interval_s=1.0,
        launch_timeout_s=5.0,
        listen_address="127.0.0.1:0",
    )


def write_run_dir(run_dir: Path, manifest: Manifest) -> None:
    """Write what a sidecar needs of a run directory."""
    for name in (run_files.WORKERS_DIR, run_files.SIDECARS_DIR, run_files.STATUS_DIR):
        (run_dir / name).mkdir()
    (run_dir / run_files.MANIFEST_FILE).write_text(json.dumps(render_manifest(manifest)))
    run_files.make_token(run_dir)
    run_files.write_job_state(str(run_dir), "running")


def record_start(run_dir: Path, rank: int, pid: int) -> None:
    """What the wrapper of a worker leaves when it has started it."""
    name = run_files.record_name(f"worker_w{rank}", rank, 0, 0)
    facts = {"pid": pid, "start_ticks": read_start_ticks(pid), "pid_namespace": read_pid_namespace()}
    run_files.write_json(run_dir / run_files.WORKERS_DIR / f"{name}.start.json", {**facts, "start": time.time()})


def _watch(run_dir: Path, url: str, pid: int) -> Figures:
    status = run_dir / run_files.STATUS_DIR / "node.json"
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    time.sleep(3)
    series = sum(not line.startswith(b"#") for line in urllib.request.urlopen(url).read().splitlines())
    start, start_cpu, start_threads, latency = time.monotonic(), cpu_s(pid), cpu_by_thread(pid), []
    reads: defaultdict[str, list[float]] = defaultdict(list)
    for tick in range(1, SECONDS + 1):
        before = time.perf_counter()
        with urllib.request.urlopen(request) as answer:
            answer.read()
        latency.append((time.perf_counter() - before) * 1000)
        for name, read in json.loads(status.read_text())["collectors"].items():
            reads[name].append((read["duration_s"] or 0.0) * 1000)
        time.sleep(max(0.0, start + tick - time.monotonic()))
    share = (cpu_s(pid) - start_cpu) / (time.monotonic() - start)
    threads = {name: cost - start_threads.get(name, 0.0) for name, cost in cpu_by_thread(pid).items()}
    costs = {name: threads.pop(name[:MOST_CHARACTERS], 0.0) for name in ("serving", *reads)}
    costs["others"] = sum(threads.values())
    memory = rss_mib(pid)
    latency.sort()
    return {
        "percent_of_a_core": round(100 * share, 2),
        "rss_mib": round(memory, 1),
        "series": series,
        "scrape_ms": {"median": round(latency[len(latency) // 2], 1), "p99": round(latency[-1], 1)},
        "percent_by_thread": {name: round(100 * cost / SECONDS, 2) for name, cost in costs.items()},
        "read_ms": {name: round(statistics.mean(values), 2) for name, values in reads.items()},
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "seconds": SECONDS,
        "goals": {"at most 2 % of a core": share <= 0.02, "at most 55 MiB": memory <= 55},
    }
