"""From the kill of a process to the notice: by the watch in an event loop, and by polling once a second.

Beside the loop a thread works as the sidecar's collectors do: it looks at processes for some milliseconds, again and
again, and holds the interpreter meanwhile. The killed processes are children of another program, which reaps them.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time

from bench.clock import Figures, spread
from exporter.contract.clock import SystemClock
from exporter.contract.process_identity import read_start_ticks
from exporter.machine.process_exits import ProcessEnd, ProcessExitWatch
from exporter.machine.process_tree import ProcessTree

KILLS, BATCH, PAUSE_S, POLL_S = 400, 100, 0.02, 1.0
WORK_S, REST_S = 0.02, 0.08

_PARENT = """
import os, signal, sys
for line in sys.stdin:
    pids = []
    for _ in range(int(line)):
        pid = os.fork()
        if pid == 0:
            while True: signal.pause()
        pids.append(pid)
    print(*pids, flush=True)
    for _ in pids: os.wait()
"""


def measure() -> Figures:
    """Milliseconds from the kill to the notice."""
    parent = subprocess.Popen(
        [sys.executable, "-I", "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stop = threading.Event()
    worker = threading.Thread(target=_work, args=(stop,))
    worker.start()
    try:
        noticed: list[float] = []
        statuses = 0
        for _ in range(KILLS // BATCH):
            delays, told = asyncio.run(_by_watch(_start(parent)))
            noticed += delays
            statuses += told
        polled = _by_polling(_start(parent))
    finally:
        stop.set()
        worker.join()
        parent.kill()
        parent.wait()
    noticed.sort()
    p99 = noticed[int(0.99 * (len(noticed) - 1))]
    return {
        "kills": len(noticed),
        "watch_ms": {**spread(noticed), "p99": round(p99, 3)},
        "polling_ms": spread(polled),
        "polling_over_watch": round(spread(polled)["median"] / spread(noticed)["median"]),
        "statuses_known": statuses,
        "goals": {
            "all noticed": len(noticed) == KILLS,
            "median at most 2 ms": spread(noticed)["median"] <= 2,
            "99 of 100 within 10 ms": p99 <= 10,
        },
    }


def _work(stop: threading.Event) -> None:
    """About what reading 288 processes takes, ten times as often."""
    tree = ProcessTree(os.getpid())
    while not stop.wait(REST_S):
        end = time.monotonic() + WORK_S
        while time.monotonic() < end:
            tree.read()
    tree.close()


def _start(parent: "subprocess.Popen[str]") -> list[int]:
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(f"{BATCH}\n")
    parent.stdin.flush()
    pids = [int(word) for word in parent.stdout.readline().split()]
    random.shuffle(pids)
    return pids


async def _by_watch(pids: list[int]) -> tuple[list[float], int]:
    """Delays in milliseconds, and how many statuses were right at once."""
    watch, killed, delays, told = ProcessExitWatch(SystemClock()), dict.fromkeys(pids, 0.0), [], 0

    def notice(ending: ProcessEnd) -> None:
        nonlocal told
        delays.append((time.perf_counter() - killed[ending.pid]) * 1000)
        told += ending.status == signal.SIGKILL

    for pid in pids:
        watch.watch(pid, read_start_ticks(pid))
    watch.on_exit = notice
    loop = asyncio.get_running_loop()
    loop.add_reader(watch.fileno(), watch.dispatch)
    for pid in pids:
        await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))
        killed[pid] = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    loop.remove_reader(watch.fileno())
    watch.close()
    return delays, told


def _by_polling(pids: list[int]) -> list[float]:
    """Delays in milliseconds with one poll a second."""
    starts, delays = {pid: read_start_ticks(pid) for pid in pids}, []
    killed: dict[int, float] = {}

    def kill() -> None:
        for pid in pids:
            time.sleep(PAUSE_S * random.uniform(0.5, 1.5))
            killed[pid] = time.perf_counter()
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    while starts:
        time.sleep(POLL_S)
        for pid in [pid for pid, start in starts.items() if read_start_ticks(pid) != start]:
            delays.append((time.perf_counter() - killed[pid]) * 1000)
            del starts[pid]
    killer.join()
    return delays
