"""A look at processes: ours, the least that C needs for the same files, and psutil, side by side.

Two loads: 32 workers of nine processes each, and one worker with 2,000 descendants. Each twice: with processes that
wait, looked at back to back, for which the goals are; and, for comparison, with processes that all have used memory
and written something since the last look, and so have taken the caches too. Of processes that wait ours reads the
bytes at whole looks alone, the floor and psutil at each.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from bench.clock import Figures, spread
from exporter.machine.process_tree import ProcessTree

LOADS = {"288 processes": (32, 8), "2,000 descendants": (1, 2000)}
ROUNDS = 15

_TREE = """
import ctypes, json, mmap, os, signal, sys
workers, children = int(sys.argv[1]), int(sys.argv[2])
libc, sink, used = ctypes.CDLL(None), os.open("/dev/null", os.O_WRONLY), 0
def move(*_):
    global used
    memory[used * 4096 % len(memory)] = 1
    used += 1
    os.write(sink, b"x")
def live(parent):
    global memory
    libc.prctl(1, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    memory = mmap.mmap(-1, 4096 * 4096)
    while True:
        signal.pause()
signal.signal(signal.SIGUSR1, move)
r, w = os.pipe()
for _ in range(workers):
    parent = os.getpid()
    if os.fork() == 0:
        own = os.getpid()
        pids = [own]
        for _ in range(children):
            pid = os.fork()
            if pid == 0:
                live(own)
            pids.append(pid)
        while pids:
            os.write(w, b"".join(b"%d %d\\n" % (own, pid) for pid in pids[:50]))
            del pids[:50]
        live(parent)
found = []
with os.fdopen(r) as source:
    while len(found) < workers * (children + 1):
        found.append([int(word) for word in source.readline().split()])
print(json.dumps(found), flush=True)
while True:
    signal.pause()
"""

_FLOOR = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int main(int count, char **pids) {
    int *fds = calloc(2 * count, sizeof(int));
    char text[1024];
    for (int i = 1; i < count; i++) {
        snprintf(text, sizeof text, "/proc/%s/stat", pids[i]);
        fds[2 * i] = open(text, O_RDONLY);
        snprintf(text, sizeof text, "/proc/%s/io", pids[i]);
        fds[2 * i + 1] = open(text, O_RDONLY);
    }
    for (char line[8]; read(0, line, sizeof line) > 0;) {
        struct timespec start, end;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
        for (int i = 1; i < count; i++)
            if (pread(fds[2 * i], text, 1024, 0) <= 0 || pread(fds[2 * i + 1], text, 512, 0) <= 0)
                return 1;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
        printf("%lld\n", (end.tv_sec - start.tv_sec) * 1000000000LL + end.tv_nsec - start.tv_nsec);
        fflush(stdout);
    }
}
"""


def measure() -> Figures:
    """Microseconds of CPU for each process and look, and how often that is the floor's and psutil's share of it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loads: Figures = {}
    goals = {}
    for name, shape in LOADS.items():
        with _tree(*shape) as processes:
            loads[name] = found = _compare(processes, ROUNDS, moving=False)
            loads[f"{name}, all moving"] = _compare(processes, ROUNDS // 3, moving=True)
        goals[f"{name}: at most 10 us a process"] = found["ours_us"]["median"] <= 10
        if "ours_over_floor" in found:
            goals[f"{name}: at most 2.2 times the floor"] = found["ours_over_floor"]["median"] <= 2.2
        goals[f"{name}: 9 times below psutil"] = found["psutil_over_ours"]["median"] >= 9
    return {"rounds": ROUNDS, "looks_a_round": ProcessTree.FULL_READ_EVERY, **loads, "goals": goals}


@contextlib.contextmanager
def _tree(workers: int, children: int) -> Iterator[list[tuple[int, int]]]:
    """Worker and pid of each process."""
    tree = subprocess.Popen(
        [sys.executable, "-c", _TREE, str(workers), str(children)], stdout=subprocess.PIPE, text=True
    )
    assert tree.stdout is not None
    try:
        yield json.loads(tree.stdout.readline())
    finally:
        tree.kill()
        tree.wait()


@contextlib.contextmanager
def _floor(pids: Sequence[int]) -> Iterator[Callable[[], float] | None]:
    """One pass of the C program over these processes, its CPU seconds; None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "floor.c"), Path(folder, "floor")
        source.write_text(_FLOOR)
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
        process = subprocess.Popen(
            [str(program), *map(str, pids)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def once() -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            return int(process.stdout.readline()) / 1e9

        try:
            yield once
        finally:
            process.communicate()


def _compare(found: Sequence[tuple[int, int]], rounds: int, *, moving: bool) -> Figures:
    """Each round is a whole look and those until the next one: ours are of two kinds."""
    pids = [pid for _, pid in found]
    with _floor(pids) as floor:
        trees = [ProcessTree(worker) for worker in dict.fromkeys(worker for worker, _ in found)]
        others = [psutil.Process(pid) for pid in pids]

        def ours() -> float:
            start = time.thread_time()
            seen = [tree.read() for tree in trees]
            cost = time.thread_time() - start
            assert sum(1 + sample.children for sample in seen if sample is not None) == len(pids)
            return cost

        def theirs() -> float:
            start = time.thread_time()
            for process in others:
                with process.oneshot():
                    process.status(), process.cpu_times(), process.memory_info(), process.num_threads()
                    process.ppid(), process.io_counters()
            return time.thread_time() - start

        arms: dict[str, Callable[[], float]] = {"ours": ours, "psutil": theirs}
        if floor is not None:
            arms["floor"] = floor
        costs: dict[str, list[float]] = {name: [] for name in arms}
        for arm in arms.values():
            arm()
        for turn in range(rounds):
            total = dict.fromkeys(arms, 0.0)
            for look in range(ProcessTree.FULL_READ_EVERY):
                if moving:
                    _wake(pids)
                for at in range(len(arms)):
                    name = list(arms)[(at + turn + look) % len(arms)]
                    total[name] += arms[name]()
            for name, cost in total.items():
                costs[name].append(cost / ProcessTree.FULL_READ_EVERY / len(pids) * 1e6)
        for tree in trees:
            tree.close()
    result = {**{f"{name}_us": spread(values) for name, values in costs.items()}}
    pairs = list(zip(costs["ours"], costs["psutil"], strict=True))
    result["psutil_over_ours"] = spread([theirs / ours for ours, theirs in pairs])
    if floor is not None:
        result["ours_over_floor"] = spread([a / b for a, b in zip(costs["ours"], costs["floor"], strict=True)])
    return result


def _wake(pids: Sequence[int]) -> None:
    """Have every process use a page and write a byte, and wait until they have."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    end = time.monotonic() + 0.5  # what runs may be others' work
    while time.monotonic() < end:
        time.sleep(0.02)
        with open("/proc/loadavg", encoding="ascii") as source:
            if int(source.read().split()[3].partition("/")[0]) <= 2:
                return
