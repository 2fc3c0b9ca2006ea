"""What a hub costs with 10,000 jobs: one answer of the queue with 200 changes, its page, and memory."""

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from exporter.contract.clock import SystemClock
from exporter.hub.engine import Engine, Settings
from exporter.hub.store import Store
from exporter.slurm.commands_reader import SlurmReader

TEXT = "#!/bin/sh\ncat {folder}/rows\n"
CONFIG = "#!/bin/sh\necho 'ClusterName = c1'; echo 'PrivateData = none'\n"
CHANGED = 200
RECENTLY_S = 3600


def row(number: int, state: str, now: float) -> str:
    """A job of one of 100 users, which began within the last hour."""
    submit = int(now) - RECENTLY_S + number % 1800
    end = submit + 1700 if state == "COMPLETED" else "N/A"
    where = "|" if state == "PENDING" else f"node{number % 500}|"
    start = "N/A" if state == "PENDING" else submit + 60
    return (
        f"{number}|{state}|{'Priority' if state == 'PENDING' else 'None'}|{submit}|{start}|{end}|1-00:00:00|0|{where}"
        f"gpu|billing=8,cpu=8,gres/gpu=1,mem=64G,node=1|{number}|user{number % 100}|lab{number % 9}|normal|1|(null)|"
        f"/home/user{number % 100}/logs/{number}.out|train-{number % 1000}|\n"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--polls", type=int, default=10)
    jobs, polls = vars(parser.parse_args()).values()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command, text in (("squeue", TEXT), ("scontrol", CONFIG), ("sacct", "#!/bin/sh\n")):
            (folder / command).write_text(text.format(folder=folder))
            (folder / command).chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        store = Store(folder / "hub.sqlite")
        engine = Engine(SlurmReader(None, None, os.environ), store, Settings(True, None, 0.0, jobs), SystemClock())
        states = ["RUNNING"] * jobs
        walls, cpus, now = [], [], time.time()
        for poll in range(polls):
            for number in range(poll * CHANGED, (poll + 1) * CHANGED):
                states[number % jobs] = "COMPLETED"
            (folder / "rows").write_text("".join(row(number, state, now) for number, state in enumerate(states)))
            begun, used = time.perf_counter(), time.process_time()
            engine.step()
            walls.append(time.perf_counter() - begun)
            cpus.append(time.process_time() - used)
        status = Path("/proc/self/status").read_text()
        rss_mib = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"first answer: {walls[0]:.2f} s; later ones: {min(walls[1:]):.2f} to {max(walls[1:]):.2f} s, "
            f"{sum(cpus[1:]) / (polls - 1):.2f} s of CPU"
        )
        print(f"page: {len(engine.view.page) / 1e6:.2f} MB compressed; file: {(store.size_bytes() or 0) / 1e6:.1f} MB")
        print(f"memory: {rss_mib:.0f} MiB, at most {peak_mib:.0f} MiB")
        begun = time.perf_counter()
        store.close()
        restarted = Store(folder / "hub.sqlite")
        Engine(SlurmReader(None, None, os.environ), restarted, Settings(True, None, 0.0, jobs), SystemClock())
        print(f"restart: {time.perf_counter() - begun:.2f} s for {len(restarted.saved.jobs)} jobs")


if __name__ == "__main__":
    main()
