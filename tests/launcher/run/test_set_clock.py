"""Local jobs on a machine whose clock is set while they run. Only the clocks of the processes are: see set_clock.c."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.launcher import LocalJob, clean_environment, kill_all_with, poll

AT_ONCE = 3
SOURCE = Path(__file__).parents[2] / "support" / "set_clock.c"
HOUR_S, DAY_S = 3600, 86400
# its output has the time that its clock shows, as on a machine with that clock
WORKER = """
import os, sys, time
name, fails = f"output_worker_{os.environ['RANK']}.jsonl", os.environ["RANK"] == "1" and len(sys.argv) > 1
for done in range(1, 26 if len(sys.argv) == 1 else 300):
    time.sleep(0.1)
    print(f"Processed {done}/25 items", flush=True)
    with open(name, "a") as out:
        out.write("{}\\n")
    os.utime(name, (time.time(), time.time()))
    if fails and done == 12:
        sys.exit(3)
"""


class Case(NamedTuple):
    """By how many seconds the clock is set, and whether a worker fails afterwards."""

    shift_s: int
    fails: bool = False


CASES = [
    *map(Case, (-60, -1000 * DAY_S, 3650 * DAY_S)),
    *(Case(shift_s, fails=True) for shift_s in (-HOUR_S, HOUR_S)),
]


def run_with_clock(folder: Path, library: Path, case: Case) -> tuple[int, dict[str, Any]]:
    """Set the clock once both workers run; return exit status and report."""
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    shift = folder / "shift"
    shift.write_text("0")
    spec = {
        "name": "clock",
        "workers": [{"count": 2, "command": f"{sys.executable} worker.py{' fails' if case.fails else ''}"}],
        "paths": {"output_dir": "."},
        "progress": {"total_items": 50},
        "verify": {"outputs": 2},
        "monitoring": {"check_interval": 0.5, "linger": 0},
    }
    env = clean_environment(LD_PRELOAD=str(library), SET_CLOCK_FILE=str(shift))
    with LocalJob(folder, spec, "--json", env=env) as job:
        poll(lambda: len(list(folder.glob("logs/*/workers/*.start.json"))) == 2, "both workers")
        new = folder / "new"
        new.write_text(str(case.shift_s))
        new.replace(shift)
        status = job.wait(120)
        (line,) = [line for line in job.output.splitlines() if line.startswith("{")] or [job.output]
    return status, json.loads(line)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Future[tuple[int, dict[str, Any]]]]]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc)")
    folder = tmp_path_factory.mktemp("clocks")
    library = folder / "set_clock.so"
    options = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared")
    subprocess.run([compiler, *options, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            case: pool.submit(run_with_clock, folder / str(number), library, case) for number, case in enumerate(CASES)
        }
        pool.shutdown(wait=False, cancel_futures=True)
        kill_all_with(folder)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_clock_that_is_set_changes_no_verdict(
    case: Case, results: dict[Case, Future[tuple[int, dict[str, Any]]]]
) -> None:
    status, report = results[case].result()
    shift_s = report["end"] - report["start"] - report["duration_s"]
    assert abs(shift_s - case.shift_s) < 5, "the clock was not set while the job ran"
    assert 2.0 <= report["duration_s"] < 60.0
    cause = report["cause"] and (report["cause"]["worker"], report["cause"]["reason"], report["cause"]["code"])
    if case.fails:
        assert (status, report["state"], cause) == (1, "FAILED", ("worker_w1", "app_error", 3))
        assert report["workers"][0]["exit"]["reason"] == "terminated_peer"
    else:
        assert (status, report["state"], cause) == (0, "COMPLETED", None)
        assert report["launch"]["verified"], report["launch"]
        checks = {check["name"]: check["passed"] for check in report["verification"]["checks"]}
        assert (checks["items"], checks["outputs"]) == (True, True), report["verification"]
        assert report["throughput_items_per_second"] == report["items_processed"] / report["duration_s"]
