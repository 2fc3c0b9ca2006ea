"""Following the logs of a full node as they are written: 32 files, 100 lines a second each.

CPU of this process for reading alone and with the search, at two intervals, and for looking at
logs to which nothing is written.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.clock import Figures
from bench.log_corpus import write_log
from bench.logs import PATTERNS
from exporter.logs.search.engine import SearchEngine
from exporter.logs.tail_reader import LogTail

FILES, LINES_PER_S = 32, 100
SECONDS = 10.0
QUICK_S, SLOW_S = 0.25, 1.0  # between two looks: a quick interval, and a usual one
ONE_LOOK = 2 << 10  # about what a quick look finds

_WRITER = """
import os, sys, time
folder, corpus, files, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lines = open(corpus, "rb").read().splitlines(keepends=True)
logs = [os.open(f"{folder}/worker_{i}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND) for i in range(files)]
print("ready", flush=True)
place, ticks, start = 0, 0, time.monotonic()
while True:
    for log in logs:
        os.write(log, b"".join(lines[place : place + rate // 10]))
        place = (place + rate // 10) % (len(lines) - rate)
    ticks += 1
    time.sleep(max(0, start + ticks / 10 - time.monotonic()))
"""

Consume = Callable[[LogTail], None]  # takes what one look at one log gives


def measure() -> Figures:
    """Shares of a core in percent."""
    engine = SearchEngine(PATTERNS)

    def read(tail: LogTail) -> None:
        for _ in tail.read_chunks():
            pass

    def search(tail: LogTail) -> None:
        scan = None
        for piece in tail.read_chunks():
            scan = scan or engine.begin_file()
            scan.feed(*piece)
        if scan is not None:
            scan.finish(tail.reread)

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        write_log(corpus, "typical", 2 << 20)
        engine.scan(corpus.read_bytes()[:ONE_LOOK])  # makes its automata
        command = [sys.executable, "-c", _WRITER, folder, str(corpus), str(FILES), str(LINES_PER_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            try:
                assert writer.stdout is not None
                writer.stdout.readline()
                paths = [Path(folder, f"worker_{number}.log") for number in range(FILES)]
                reading, _ = _share(paths, read, QUICK_S)
                quick, written = _share(paths, search, QUICK_S)
                slow, _ = _share(paths, search, SLOW_S)
            finally:
                writer.kill()
        for path in paths:
            os.utime(path, (1, 1))
        idle, _ = _share(paths, search, SLOW_S)
    goals = {"at most 1 % of a core at 250 ms": quick <= 1, "at most 0.03 % of a core when idle": idle <= 0.03}
    return {
        "files": FILES,
        "kb_per_s": round(written / 1e3),
        "reading_250ms_percent": reading,
        "searching_250ms_percent": quick,
        "searching_1s_percent": slow,
        "idle_1s_percent": idle,
        "goals": goals,
    }


def _share(paths: list[Path], consume: Consume, interval_s: float) -> tuple[float, float]:
    """Percent of a core that following these logs takes, and bytes a second that came."""
    tails = [LogTail(str(path)) for path in paths]

    def look() -> None:
        for tail in tails:
            consume(tail)

    for tail in tails:
        tail.skip_older(math.inf)
    look()  # after this one, a log to which nothing is written is known to be idle
    begin, cpu, looks = time.monotonic(), time.process_time(), 0
    while (passed := time.monotonic() - begin) < SECONDS:
        looks += 1
        time.sleep(max(0.0, looks * interval_s - passed))
        look()
    share = 100 * (time.process_time() - cpu) / passed
    for tail in tails:
        tail.close()
    return float(f"{share:.3g}"), sum(tail.bytes_read for tail in tails) / passed
