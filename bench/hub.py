"""What a hub costs with 10,000 jobs: one answer of the queue with 200 changes, its page, and a restart.

Then `gpujob ps` from its start to its last line, for a user with some and for one with all of 10,000 jobs.
"""

import os
import pwd
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.clock import rss_mib
from exporter.contract.clock import SystemClock
from exporter.hub.engine import Engine, Settings
from exporter.hub.jobs import Job
from exporter.hub.polling import JITTER
from exporter.hub.store import Batch, Store
from exporter.slurm.commands_reader import SlurmReader
from exporter.slurm.tracking import TrackedJob

TEXT = '#!/bin/sh\nfor last; do :; done\nsed "s/|$/${{last##*:}}/" {folder}/rows\n'  # rows end as the format says
CONFIG = "#!/bin/sh\necho 'ClusterName = c1'; echo 'PrivateData = none'\n"
JOBS, POLLS = 10_000, 10
CHANGED = 200  # jobs between two looks
INTERVAL_S = 60.0
MOST_LOOK_MS, MOST_PAGE_MS, MOST_PAGE_MB, MOST_RSS_MIB = 60, 80, 1.0, 100
RECENTLY_S = 3600
OWN_JOBS, COMMANDS, MOST_PS_S = (100, JOBS), 7, 0.3
READY_S = 30.0  # for a hub to read the queue
YEAR_JOBS, BATCH, YEAR_S, MOST_YEAR_S = 100_000, 10_000, 365 * 86400, 0.05


def row(number: int, state: str, now: float, user: str | None = None) -> str:
    """A job of one of 100 users, or of a named one, which began within the last hour."""
    user = user or f"user{number % 100}"
    submit = int(now) - RECENTLY_S + number % 1800
    end = submit + 1700 if state == "COMPLETED" else "N/A"
    where = "|" if state == "PENDING" else f"node{number % 500}|"
    start = "N/A" if state == "PENDING" else submit + 60
    return (
        f"{number}|{state}|{'Priority' if state == 'PENDING' else 'None'}|{submit}|{start}|{end}|1-00:00:00|0|{where}"
        f"gpu|billing=8,cpu=8,gres/gpu=1,mem=64G,node=1|{number}|{user}|lab{number % 9}|normal|1|(null)|"
        f"/home/{user}/logs/{number}.out|train-{number % 1000}|\n"
    )


def measure() -> dict[str, Any]:
    """Answers of a queue of which 2 % change each time, as a hub's thread takes them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command, text in (("squeue", TEXT), ("scontrol", CONFIG)):  # without accounting
            (folder / command).write_text(text.format(folder=folder))
            (folder / command).chmod(0o755)
        environ = os.environ | {"PATH": f"{folder}:/bin"}
        old_path, os.environ["PATH"] = os.environ["PATH"], environ["PATH"]
        try:
            return _measure(folder, environ)
        finally:
            os.environ["PATH"] = old_path


def _measure_year(folder: Path) -> float:
    """Time that SQLite takes for a year of one user's jobs, among those of 100 users."""
    store, now = Store(folder / "year.sqlite"), time.time()
    for first in range(0, YEAR_JOBS, BATCH):
        ends = {number: now - YEAR_S * (1 - number / YEAR_JOBS) for number in range(first, first + BATCH)}
        store.save(Batch(max(ends.values()), [_ended(number, end) for number, end in ends.items()]))
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        found = store.bodies_since(now - YEAR_S, "user5", None, YEAR_JOBS)
        times.append(time.perf_counter() - begun)
    store.close()
    assert len(found) == YEAR_JOBS // 100
    return statistics.median(times)


def _ended(number: int, end: float) -> Job:
    tracked = TrackedJob(
        job_id=str(number), name=f"train-{number % 1000}", state="FAILED", started=end - 8.0, ended=end
    )
    job = Job(tracked, end - 9.0, f"user{number % 100}", "gpu", "lab", "normal", node_count=1, nodes="node7")
    return job._replace(resources="billing=8,cpu=8,gres/gpu=1,mem=64G,node=1")


def _measure_ps(folder: Path, environ: Mapping[str, str], own: int) -> float:
    """Seconds of `gpujob ps` that asks a hub of the cluster, without a copy of an earlier answer."""
    me, now = pwd.getpwuid(os.geteuid()).pw_name, time.time()
    rows = (row(number, "RUNNING", now, me if number < own else None) for number in range(JOBS + 1))
    (folder / "rows").write_text("".join(rows))
    state = folder / f"state{own}"
    environ = {name: value for name, value in environ.items() if not name.startswith(("PYTHON", "SLURM_", "XDG_"))}
    environ |= {"GPUJOB_HUB": f"unix:{state}/hub-cluster.sock", "XDG_STATE_HOME": str(state)}
    words = [_program("gpujob-exporter"), "hub", "--scope", "cluster", "--state-dir", str(state)]
    hub = subprocess.Popen(words, env=environ, stderr=subprocess.DEVNULL)
    try:
        times, end = list[float](), time.monotonic() + READY_S
        while len(times) < COMMANDS:
            cache = tempfile.mkdtemp(dir=folder)
            begun = time.perf_counter()
            done = subprocess.run(
                [_program("gpujob"), "ps"], env={**environ, "XDG_CACHE_HOME": cache}, capture_output=True, text=True
            )
            took_s = time.perf_counter() - begun
            if done.stdout.count("RUNNING") == own and not done.stderr:
                times.append(took_s)
            elif time.monotonic() < end:  # the hub is not ready, so squeue was asked, which here has all jobs
                time.sleep(0.5)
            else:
                raise SystemExit(f"hub: gpujob ps does not show its jobs: {done.stderr}")
    finally:
        hub.send_signal(signal.SIGTERM)
        hub.wait()
    return statistics.median(times)


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


class _Clock(SystemClock):
    """Passes a minute when told so."""

    passed_s = 0.0

    def time(self) -> float:
        return super().time() + self.passed_s

    def monotonic(self) -> float:
        return super().monotonic() + self.passed_s


def _measure(folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    store, clock = Store(folder / "hub.sqlite"), _Clock()
    engine = Engine(SlurmReader(None, None, environ), store, Settings(True, None, INTERVAL_S, JOBS), clock)
    states, looks, pages, now = ["RUNNING"] * JOBS, list[float](), list[float](), time.time()
    for poll in range(POLLS):
        for number in range(poll * CHANGED, (poll + 1) * CHANGED):
            states[number % JOBS] = "COMPLETED"
        (folder / "rows").write_text("".join(row(number, state, now) for number, state in enumerate(states)))
        clock.passed_s += INTERVAL_S * (1 + JITTER)
        begun = time.process_time()
        engine.step()
        looks.append(time.process_time() - begun)
        page = engine.page()
        pages.append(time.process_time() - begun - looks[-1])
    file_mb, rss = (store.size_bytes() or 0) / 1e6, rss_mib(os.getpid())
    store.close()
    begun = time.perf_counter()
    restarted = Store(folder / "hub.sqlite")
    Engine(SlurmReader(None, None, environ), restarted, Settings(True, None, 0.0, JOBS), SystemClock())
    restart_s = time.perf_counter() - begun
    restarted.close()
    ps_s = {own: _measure_ps(folder, environ, own) for own in OWN_JOBS}
    look_s, page_s, year_s = statistics.median(looks[1:]), statistics.median(pages[1:]), _measure_year(folder)
    return {
        "jobs": JOBS,
        "cpu_ms_of_a_look": round(1000 * look_s),
        "cpu_ms_of_a_page": round(1000 * page_s),
        "page_mb": round(len(page) / 1e6, 2),
        "rss_mib": round(rss),
        "file_mb": round(file_mb, 1),
        "restart_s": round(restart_s, 2),
        "sqlite_ms_of_a_year": round(1000 * year_s, 1),
        **{f"ps_s_with_{own}_jobs": round(each, 3) for own, each in ps_s.items()},
        "goals": {
            f"at most {MOST_LOOK_MS} ms of CPU for a look": look_s <= MOST_LOOK_MS / 1000,
            f"at most {MOST_PAGE_MS} ms of CPU for a page": page_s <= MOST_PAGE_MS / 1000,
            f"a page of at most {MOST_PAGE_MB:g} MB": len(page) <= MOST_PAGE_MB * 1e6,
            f"at most {MOST_RSS_MIB} MiB": rss <= MOST_RSS_MIB,
            f"at most {MOST_PS_S:g} s for `gpujob ps`": max(ps_s.values()) <= MOST_PS_S,
            "at most 50 ms of SQLite for a user's jobs of a year among 100,000": year_s <= MOST_YEAR_S,
        },
    }
