"""RPCs that a hub and its watchers cost a real controller, for any number of jobs, as sdiag counts them by user.

RPCS_JOBS are the numbers of held jobs. RPCS_WATCHERS is the number of `gpujob ps -w` and of `gpujob fleet -w` at once:
with a hub and each number of jobs, and at last without a hub. Each is counted for RPCS_SECONDS. Needs root and the
packages of tests/realstack.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.clock import Figures
from exporter.slurm.diagnostics import parse_diagnostics
from tests.endtoend.jobs import GPUJOB
from tests.realstack.cluster import ROOT, Cluster, slurm_unavailable

JOBS = tuple(int(number) for number in os.environ.get("RPCS_JOBS", "1,100,5000").split(","))
WATCHERS = tuple(int(number) for number in os.environ.get("RPCS_WATCHERS", "50,50").split(","))
PREFIX = os.environ.get("RPCS_PREFIX", "rpcs")  # of the nodes: two clusters at once need two
SECONDS = float(os.environ.get("RPCS_SECONDS", "600"))
MOST_A_MINUTE = 3.0
SUBMITTED_AT_ONCE = 2
STEADY_S = 10.0  # from the start of a hub or of watchers to the first count
BEGIN_S = 0.5  # of a watcher, on two cores


def measure() -> Figures:
    """RPCs a minute of the user whose hub and commands ask."""
    if reason := slurm_unavailable(accounting=False):
        raise SystemExit(f"hub_rpcs: {reason}")
    folder, found = Path(tempfile.mkdtemp(prefix="gpujob-rpcs-", dir="/tmp")), dict[str, float]()
    folder.chmod(0o777)
    try:
        with Cluster(folder / "cluster", nodes=1, accounting=False, prefix=PREFIX) as cluster:
            held = 0
            for jobs in JOBS:
                _hold(cluster, jobs - held)
                held = jobs
                with _hub(cluster, folder), _watchers(cluster, folder):
                    found[f"{jobs} jobs, hub"] = _rpcs_a_minute(cluster)
            if any(WATCHERS):
                with _watchers(cluster, folder):
                    found[f"{held} jobs, no hub"] = _rpcs_a_minute(cluster)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    goals = {f"{name}: at most 3 RPCs a minute": rpcs <= MOST_A_MINUTE for name, rpcs in found.items()}
    return {"seconds": SECONDS, "watchers": list(WATCHERS), "rpcs_a_minute": found, "goals": goals}


def _hold(cluster: Cluster, count: int) -> None:
    """Submit jobs that wait for ever: each with a row of its own, as those of an array have not."""
    one = "sbatch --hold --parsable --wrap true -o /dev/null"
    argv = ["sh", "-c", f"seq {count} | xargs -P {SUBMITTED_AT_ONCE} -I@ {one} -J held@ > /dev/null"]
    cluster.run(argv, timeout=1200, check=True)


@contextmanager
def _hub(cluster: Cluster, folder: Path) -> Iterator[None]:
    state = folder / "state"
    argv: list[str | Path] = [GPUJOB.parent / "gpujob-exporter", "hub", "--state-dir", state / "gpujob" / "hub"]
    process = cluster.popen(argv, env=_environ(folder), stderr=subprocess.DEVNULL)
    try:
        socket = state / "gpujob" / "hub" / "hub.sock"
        ask: list[str | Path] = ["curl", "-sf", "--unix-socket", socket, "http://hub/-/ready"]
        cluster.wait_for(lambda: cluster.run(ask).returncode == 0, 60, "the hub")
        yield
    finally:
        cluster.signal(process, signal.SIGTERM)
        process.communicate(timeout=60)


@contextmanager
def _watchers(cluster: Cluster, folder: Path) -> Iterator[None]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    words = (["ps", "-w", "--json", "-n", "1"], ["fleet", "-w", "--json"])
    argvs = [[GPUJOB, *each] for each, count in zip(words, WATCHERS, strict=True) for _ in range(count)]
    running = [cluster.popen(argv, env=_environ(folder), **quiet) for argv in argvs]  # type: ignore[arg-type] # both are of subprocess
    try:
        time.sleep(sum(WATCHERS) * BEGIN_S)  # all of them have begun
        yield
    finally:
        for process in running:
            cluster.kill(process)


def _environ(folder: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}


def _rpcs_a_minute(cluster: Cluster) -> float:
    time.sleep(STEADY_S)
    begun, before = time.monotonic(), _calls(cluster)
    time.sleep(SECONDS)
    return round((_calls(cluster) - before) * 60 / (time.monotonic() - begun), 2)


def _calls(cluster: Cluster) -> int:
    """Calls of the cluster's user up to now, asked by root."""
    uid = int(cluster.run(["id", "-u"], check=True).stdout)
    text = cluster.run(["sdiag"], user=ROOT, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout
    found = parse_diagnostics(text, uid)
    assert found is not None, text
    return found.own_rpcs.calls
