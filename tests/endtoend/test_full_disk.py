"""A job on a real Slurm whose run directory becomes full and stays so: the verdict is that of the workers."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.endtoend.jobs import JobSpace, user_for
from tests.realstack.cluster import Cluster, slurm_unavailable
from tests.support.launcher import poll

pytestmark = pytest.mark.slurm

WORKER = """
import os, sys, time
for done in range(1, 81):
    time.sleep(0.1)
    try:
        print(f"Processed {done}/80 items", flush=True)
    except OSError:
        pass  # its log is on the full disk too
    if done == 60 and os.environ["RANK"] == "1" and sys.argv[1] == "fails":
        os._exit(3)
os._exit(0)
"""
# takes every block that becomes free, until the test ends it
FILLER = """
import sys, time
with open(sys.argv[1], "ab", buffering=0) as out:
    while True:
        try:
            out.write(bytes(4096))
        except OSError:
            time.sleep(0.002)
"""


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A directory on a disk of 4 MB, which the hosts of a cluster started later see too."""
    if reason := slurm_unavailable():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="gpujob-small-", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=755", "small-disk", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        folder.rmdir()
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


def test_a_disk_that_stays_full_does_not_change_the_verdict(small_disk: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="gpujob-e2e-", dir="/tmp"))
    directory.chmod(0o755)
    try:
        with Cluster(directory / "cluster", nodes=2, accounting=False, prefix="full") as cluster:
            space = JobSpace(cluster, small_disk, user_for(cluster), directory)
            (small_disk / "worker.py").write_text(WORKER)
            state = directory / "state"
            state.mkdir()
            space.own(small_disk, state)
            try:
                for fails in (False, True):
                    check_verdict(space, state, fails=fails)
            finally:
                space.close()
    finally:
        if not os.environ.get("GPUJOB_KEEP"):
            shutil.rmtree(directory, ignore_errors=True)


def check_verdict(space: JobSpace, state: Path, *, fails: bool) -> None:
    env = {"XDG_STATE_HOME": str(state)}
    spec = {
        "name": "small",
        "resources": {"nodes": 2},
        "workers": [{"count": 2, "command": f"python3 worker.py {'fails' if fails else 'completes'}"}],
        "slurm": {"partition": "gpu", "time_limit": "00:05:00"},
        "progress": {"total_items": 160},
        "monitoring": {"check_interval": 1, "linger": 0},
    }
    job = space.submit(spec, env=env)
    poll(lambda: all(job.start_record(rank) for rank in (0, 1)), "both workers")
    filler = subprocess.Popen([sys.executable, "-c", FILLER, str(space.directory / "filler")])
    try:
        assert job.wait() == ("FAILED" if fails else "COMPLETED")
        printed = space.gpujob("report", str(job.run_dir), "--json", env=env).stdout
    finally:
        filler.kill()
        filler.wait()
        (space.directory / "filler").unlink()
    report = json.loads(printed)
    assert "accounting storage" in report["accounting"]["problem"]  # asked now, and this cluster has none
    assert {**report, "accounting": None} == json.loads((state / "gpujob/reports" / f"{job.job_id}.json").read_text())
    assert (report["state"], report["incomplete"]) == ("FAILED" if fails else "COMPLETED", "the run directory is full")
    ends = [(worker["exit"]["reason"], worker["exit"]["code"]) for worker in report["workers"]]
    if fails:
        assert (report["cause"]["worker"], report["cause"]["code"]) == ("worker_w1", 3)
        assert ends[0][0] == "terminated_peer"
    else:
        assert (report["cause"], ends) == (None, [("completed", 0)] * 2)
