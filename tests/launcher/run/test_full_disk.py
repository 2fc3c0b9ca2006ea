"""Local jobs whose run directory is full: the verdict is that of the workers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.launcher import LocalJob, clean_environment, kill_all_with

AT_ONCE = 3
WORKER = """
import os, sys, time
fails = os.environ["RANK"] == "1" and len(sys.argv) > 1
for done in range(1, 26):
    time.sleep(0.1)
    try:
        print(f"Processed {done}/25 items", flush=True)
    except OSError:
        pass  # its log is on the full disk too
    if fails and done == 20:
        os._exit(3)
os._exit(0)
"""
# takes every block that becomes free, once both workers have started
FILLER = """
import glob, os, time
while len(glob.glob("logs/*/workers/*.start.json")) < 2:
    time.sleep(0.02)
with open("logs/filler", "ab", buffering=0) as out:
    while True:
        try:
            out.write(bytes(4096))
        except OSError:
            time.sleep(0.002)
"""
IN_A_SMALL_DISK = 'mkdir logs && mount -t tmpfs -o "$0" none logs && { python3 filler.py & exec "$@"; }'
FULL = {"bytes": "size=3m", **{f"{count} inodes": f"nr_inodes={count}" for count in (20, 22, 24, 26, 28, 30, 34, 40)}}
BOTH_ENDS = ("bytes", "22 inodes")  # disks on which one job fails and one does not; elsewhere it is one of the two


class Case(NamedTuple):
    """A disk, and whether a worker fails."""

    disk: str
    fails: bool


class Verdict(NamedTuple):
    """What `gpujob run` said, and what `gpujob report` says later."""

    status: int
    report: dict[str, Any]
    log: str


CASES = [
    Case(disk, fails)
    for number, disk in enumerate(FULL)
    for fails in ((False, True) if disk in BOTH_ENDS else (bool(number % 2),))
]


def run_on_small_disk(folder: Path, case: Case) -> Verdict:
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    (folder / "filler.py").write_text(FILLER if case.disk == "bytes" else "")
    spec = {
        "name": "small",
        "workers": [{"count": 2, "command": f"{sys.executable} worker.py{' fails' if case.fails else ''}"}],
        "progress": {"total_items": 50},
        "monitoring": {"check_interval": 0.5, "linger": 0},
    }
    prefix = ["unshare", "-m", "bash", "-c", IN_A_SMALL_DISK, FULL[case.disk]]
    env = clean_environment(XDG_STATE_HOME=str(folder / "state"))
    with LocalJob(folder, spec, "--json", prefix=prefix, env=env) as job:
        status = job.wait(120)
        (line,) = [line for line in job.output.splitlines() if line.startswith("{")] or [job.output]
    return Verdict(status, json.loads(line), job.output)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Future[Verdict]]]:
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode != 0:
        pytest.skip("a small disk needs root (mount in a mount namespace)")
    folder = tmp_path_factory.mktemp("disks")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {case: pool.submit(run_on_small_disk, folder / str(number), case) for number, case in enumerate(CASES)}
        pool.shutdown(wait=False, cancel_futures=True)
        kill_all_with(folder)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_verdict_is_that_of_the_workers(case: Case, verdicts: dict[Case, Future[Verdict]]) -> None:
    status, report, log = verdicts[case].result()
    ends = [(worker["exit"]["reason"], worker["exit"]["code"]) for worker in report["workers"]]
    cause = report["cause"] and (report["cause"]["worker"], report["cause"]["reason"], report["cause"]["code"])
    if case.fails:
        # without a line in its log, a disk without a byte explains the failure best
        reason = "disk_full" if case.disk == "bytes" else "app_error"
        assert (status, report["state"], cause) == (1, "FAILED", ("worker_w1", reason, 3)), log
    else:
        assert (status, report["state"], cause) == (0, "COMPLETED", None), log
        assert ends == [("completed", 0)] * 2
    if case.disk in ("bytes", "20 inodes", "22 inodes"):
        assert report["incomplete"] == "the run directory is full"
        assert report["launch"] is None or report["launch"]["verified"], "nothing can be said about the launch"


@pytest.mark.parametrize("case", [case for case in CASES if case.disk == "22 inodes"], ids=str)
def test_the_report_is_in_the_state_directory(
    case: Case, verdicts: dict[Case, Future[Verdict]], tmp_path: Path
) -> None:
    report = verdicts[case].result().report
    (place,) = Path(report["run_dir"]).parents[1].glob(f"state/gpujob/reports/{report['job_id']}.json")
    assert json.loads(place.read_text()) == report
    assert "- records incomplete: the run directory is full" in place.with_suffix(".md").read_text()
