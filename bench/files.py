"""Watching 100,000 output files, in one folder and in ten: time of a look, memory, and how right the growth is.

Times of passes over names stand beside those of a plain pass by ``os.scandir`` in the same run, since both depend on
the machine alike. Growth is that of simulated writers with buffers of any size, looked at now and then.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.clock import Figures, spread
from exporter.files.outputs.folder_reader import NOBODY, FolderWatch
from exporter.files.outputs.growth import GroupGrowth
from exporter.files.outputs.outputs_reader import FileOwnership, OutputWatch

FILES = 100_000
ROUNDS = 15
INTERVAL_S = 5.0
WRITERS = 200
TICK_S = 0.004
START = 1_700_000_000.0

_FRESH = """
import sys
from bench.files import rss_of_watches
print(rss_of_watches(sys.argv[1:]))
"""


def nobody(_: str) -> None:
    """No file has a worker's number."""


EVERYTHING = FileOwnership(nobody, frozenset(), frozenset(), owns_unranked=True)


def measure() -> Figures:
    """Milliseconds a look, MiB, and the largest error of a growth."""
    found: Figures = {"files": FILES}
    with tempfile.TemporaryDirectory() as place:
        one, ten = Path(place, "one"), Path(place, "ten")
        folders = [ten / str(number) for number in range(10)]
        for folder in (one, *folders):
            folder.mkdir(parents=True)
        for number in range(FILES):
            for folder in (one, folders[number % 10]):
                (folder / f"output_{number:06d}.bin").touch()
        found["one_folder"] = _looks([one])
        found["ten_folders"] = _looks(folders)
        found["rss_mib"] = {"one_folder": _rss([one]), "ten_folders": _rss(folders)}
    errors = [growth_error(random.Random(seed)) for seed in range(WRITERS)]
    found["growth_error_percent"] = {
        "median": float(f"{100 * statistics.median(errors):.2g}"),
        "most": float(f"{100 * max(errors):.2g}"),
    }
    quiet = [found[place]["quiet_without_hot_ms"]["median"] for place in ("one_folder", "ten_folders")]
    return {
        **found,
        "goals": {
            "at most 1 ms a folder besides the hot files where no name has changed": (
                quiet[0] <= 1 and quiet[1] <= len(folders)
            ),
            "changed names: at most 80 ms, or twice a plain pass where that takes longer": all(
                found[place]["changed_ms"]["median"] <= max(80, 2 * found[place]["plain_ms"]["median"])
                for place in ("one_folder", "ten_folders")
            ),
            "less than 20 MiB": max(found["rss_mib"].values()) < 20,
            "growth right to 1 %": max(errors) <= 0.01,
        },
    }


def _looks(folders: list[Path]) -> Figures:
    """Milliseconds for a look at all of these folders together."""
    watches = [FolderWatch(str(folder), "output_*", EVERYTHING) for folder in folders]
    now = [START]

    def look() -> None:
        for watch in watches:
            watch.poll(now[0])

    while not all(watch.complete for watch in watches):
        look()
        now[0] += INTERVAL_S
    now[0] += 600  # past the rest after the first pass, which has read the facts of all files
    look()
    look()
    quiet, changed, plain = [], [], []
    for fresh in range(1, ROUNDS + 1):
        now[0] += INTERVAL_S
        quiet.append(_ms(look))
        plain.append(_ms(lambda: [_plain_pass(folder) for folder in folders]))
        now[0] += 120
        for folder in folders:
            (folder / f"output_new_{fresh}.bin").touch()
        changed.append(_ms(look))
        now[0] += 120
        look()  # once more, to be sure of the names
        assert sum(watch.totals[NOBODY].files for watch in watches) == FILES + fresh * len(folders)
    hot = sum(len(watch.hot) for watch in watches)
    for watch in watches:
        watch.hot.clear()
    without = [_ms(look) for _ in range(ROUNDS)]
    return {
        "quiet_ms": spread(quiet),
        "hot_files": hot,
        "quiet_without_hot_ms": spread(without),
        "changed_ms": spread(changed),
        "plain_ms": spread(plain),
        "changed_over_plain": spread([ours / theirs for ours, theirs in zip(changed, plain, strict=True)]),
    }


def _ms(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)


def _plain_pass(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(1 for entry in entries if entry.name)


def _rss(folders: list[Path]) -> float:
    """What watches over these folders add to the memory of a fresh process."""
    command = [sys.executable, "-c", _FRESH, *map(str, folders)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[1])
    return float(json.loads(done.stdout))


def rss_of_watches(folders: list[str]) -> float:
    """MiB, after a few looks at files of which those that can be looked into hold nothing."""
    with tempfile.TemporaryDirectory() as empty:  # what any watch needs is there before
        OutputWatch(empty, "output_*", EVERYTHING, None).poll(START)
    before = _resident_mib()
    watches = [OutputWatch(folder, "output_*", EVERYTHING, None) for folder in folders]
    now, complete = START, False
    while not complete:
        looks = [watch.poll(now) for watch in watches]
        complete = all(look.complete for look in looks)
        now += INTERVAL_S
    for _ in range(3):
        now += 600
        for watch in watches:
            watch.poll(now)
    return round(_resident_mib() - before, 1)


def _resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as source:
        return int(source.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def growth_error(dice: random.Random) -> float:
    """The largest relative error for one writer, from the third of its writes that was seen on.

    It writes records of some size into a buffer, and the buffer into the file when it is full; the times of the file
    are those of the kernel's clock, which goes in steps.
    """
    rate = 10 ** dice.uniform(2, 8)
    period_s, look_s = dice.uniform(0.1, 30), dice.choice((1.0, 5.0, 15.0))
    record = max(1, int(rate * period_s / dice.choice((1, 7, 100, 5000))))
    writes, size, written = [], 0, 0.0
    while written < 600:
        pieces = max(1, round(rate * period_s / record))
        size += pieces * record
        written = size / rate
        writes.append((START + written // TICK_S * TICK_S, size))
    growth, last, seen, place, worst = GroupGrowth(), (START, 0), 0, 0, 0.0
    now = START + dice.random() * look_s
    while now < writes[-1][0]:
        while writes[place][0] <= now:
            place += 1
        found = writes[place - 1] if place else (START, 0)
        if found != last:
            growth.add_change(1, found[0], found[1], last, now)
            last, seen = found, seen + 1
        if seen >= 3:
            worst = max(worst, abs(growth.per_second(now) / rate - 1))
        now += look_s
    return worst
