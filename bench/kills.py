"""Every end is reported: a thousand workers under real wrappers end in random ways next to a real sidecar.

Fifty tasks of twenty runs each, all runs of one number at a time. How each has ended is what the wrapper's parent was
told, and for those whose wrapper was killed too, what was done to them; the sidecar's status has to say the same. An
end may be unknown only if worker and wrapper were killed before the sidecar saw them.
"""

import json
import os
import random
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.clock import Figures, cpu_s
from bench.sidecar import make_manifest, start_sidecar, write_run_dir
from bench.wrapper import wrapper
from exporter.contract import run_files
from exporter.contract.manifest import Task

TASKS, RUNS = 50, 20
PATIENCE_S = 60.0

BY_ITSELF = {
    "exit at once": "exit {code}",
    "exit": "sleep {delay}; exit {code}",
    "exec": "exec sh -c 'sleep {delay}; exit {code}'",
    "double fork": "sh -c 'setsid sleep 3 & exit 0'; sleep {delay}; exit {code}",
    "fault": "sleep {delay}; ulimit -c 0; kill -SEGV $$",
}
FROM_OUTSIDE = {
    "killed": "exec sleep 600",
    "terminated": "exec sleep 600",
    "stubborn": "trap '' TERM; exec sleep 600",
    "killed with its wrapper": "exec sleep 600",
}


@dataclass
class _Run:
    rank: int
    restart: int
    way: str
    wrapper: "subprocess.Popen[bytes]"
    seen: bool = True  # whether the sidecar or the wrapper could see the end


def measure() -> Figures:
    """Numbers of ends that the sidecar missed, and reported wrongly."""
    chosen = random.Random(time.time_ns())
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        write_run_dir(
            run_dir, make_manifest(tuple(Task(f"worker_w{rank}", "worker", rank, rank, 0, 0) for rank in range(TASKS)))
        )
        sidecar, address = start_sidecar(run_dir)
        try:
            start, start_cpu = time.monotonic(), cpu_s(sidecar.pid)
            ways: Counter[str] = Counter()
            truth: dict[tuple[int, int], int] = {}
            told: dict[tuple[int, int], int | None] = {}
            unseen: set[tuple[int, int]] = set()
            headers = {"Authorization": f"Bearer {run_files.read_token(run_dir)}"}
            status_page = urllib.request.Request(f"http://{address}/status", headers=headers)
            for restart in range(RUNS):
                runs = [_start(run_dir, rank, restart, chosen) for rank in range(TASKS)]
                ways.update(run.way for run in runs)
                truth.update(_end(run_dir, runs, chosen, status_page))
                unseen.update((run.rank, run.restart) for run in runs if not run.seen)
                told.update(_told(status_page))  # it lists the last runs only
            last = time.monotonic()
            while len(told) < len(truth) and time.monotonic() - last < PATIENCE_S:
                time.sleep(0.2)
                told.update(_told(status_page))
            took, noticed = time.monotonic() - start, time.monotonic() - last
            share = (cpu_s(sidecar.pid) - start_cpu) / took
        finally:
            sidecar.terminate()
            sidecar.wait()
    undetected = truth.keys() - told.keys()
    unknown = {run for run in unseen & told.keys() if told[run] is None}
    wrong = {run for run in truth.keys() & told.keys() - unknown if truth[run] != told[run]}
    return {
        "deaths": len(truth),
        "ways": dict(sorted(ways.items())),
        "undetected": len(undetected),
        "wrong": len(wrong),
        "unknown_and_unseen": len(unknown),
        "examples": [[*run, truth[run], told.get(run)] for run in sorted(undetected | wrong)[:5]],
        "seconds": round(took, 1),
        "last_told_after_s": round(noticed, 2),
        "sidecar_percent_of_a_core": round(100 * share, 1),
        "goals": {"none undetected": not undetected, "none wrong": not wrong, "within 3 minutes": took <= 180},
    }


def _start(run_dir: Path, rank: int, restart: int, chosen: random.Random) -> _Run:
    way = chosen.choice([*BY_ITSELF, *FROM_OUTSIDE])
    script = {**BY_ITSELF, **FROM_OUTSIDE}[way].format(code=chosen.randrange(256), delay=round(chosen.random(), 3))
    argv = [*wrapper(run_dir, f"worker_w{rank}", rank, restart), "sh", "-c", script]
    return _Run(rank, restart, way, subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


def _end(
    run_dir: Path, runs: list[_Run], chosen: random.Random, status_page: urllib.request.Request
) -> dict[tuple[int, int], int]:
    """End those that do not end by themselves; how all have ended, by rank and run: exit code or negative signal."""
    truth = {}
    pending = [run for run in runs if run.way in FROM_OUTSIDE]
    while pending:
        chosen.shuffle(pending)
        for run in pending[:]:
            name = run_files.record_name(f"worker_w{run.rank}", run.rank, 0, run.restart)
            record = run_files.read_json(run_dir / run_files.WORKERS_DIR / f"{name}.start.json")
            if record is not None and chosen.random() < 0.3:
                pid = int(str(record["pid"]))
                run.seen = run.way != "killed with its wrapper" or pid in {w["pid"] for w in _workers(status_page)}
                _kill(run, pid)
                pending.remove(run)
        time.sleep(0.05)
    for run in runs:
        truth[run.rank, run.restart] = run.wrapper.wait()
    return truth


def _kill(run: _Run, pid: int) -> None:
    if run.way == "killed with its wrapper":
        run.wrapper.kill()
    if run.way in ("terminated", "stubborn"):
        os.kill(pid, signal.SIGTERM)
    if run.way == "stubborn":
        time.sleep(0.02)
    if run.way != "terminated":
        os.kill(pid, signal.SIGKILL)


def _workers(status_page: urllib.request.Request) -> list[Figures]:
    with urllib.request.urlopen(status_page) as answer:
        found: list[Figures] = json.load(answer)["workers"]
    return found


def _told(status_page: urllib.request.Request) -> dict[tuple[int, int], int | None]:
    """What the sidecar says of the last runs."""
    workers = _workers(status_page)
    return {(worker["rank"], ended["restart"]): _code(ended) for worker in workers for ended in worker["exits"]}


def _code(ended: Figures) -> int | None:
    """Exit code, or the signal as a negative number; None where neither is known."""
    if ended["signal"] is not None:
        return -int(signal.Signals[ended["signal"]])
    code: int | None = ended["code"]
    return code
