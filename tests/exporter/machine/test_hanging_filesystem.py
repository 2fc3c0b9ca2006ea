"""A real sidecar with a file system that stops answering and answers again."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.families import Family
from exporter.contract import run_files
from exporter.contract.manifest import PathGroup
from exporter.files.disks.collector import AVAILABLE, RESPONDING
from exporter.files.outputs.collector import BYTES, FILES
from exporter.machine.file_host import POLL_WAIT_S
from tests.exporter.machine.fuse_server import FuseMount
from tests.exporter.sidecar.test_sidecar_process import SidecarProcess
from tests.support.duration import took_s
from tests.support.exporter import SOON_S, make_manifest, until, write_manifest

REMOTE, LOCAL, RUN = "output", "local", "run"


class Job:
    """A sidecar with one path group on the FUSE mount and one on local disk."""

    def __init__(self, directory: Path, mount: FuseMount) -> None:
        self.mount, self.local = mount, directory / "local"
        self.local.mkdir()
        run_dir = directory / "run"
        run_dir.mkdir()
        (mount.folder / "output_0.jsonl").write_bytes(b"{}\n" * 100)
        groups = (
            PathGroup(REMOTE, str(mount.point), "output_*.jsonl"),
            PathGroup(LOCAL, str(self.local), "output_*.jsonl"),
        )
        write_manifest(make_manifest(run_dir, groups=groups, check_interval_s=0.2, linger_s=60.0))
        run_files.write_job_state(str(run_dir), "running")
        self.sidecar = SidecarProcess(run_dir, "--web.listen-address", "127.0.0.1:0")
        self.sidecar.until_ready()

    @property
    def pid(self) -> int:
        return self.sidecar.process.pid

    def values(self, family: Family) -> dict[str, float]:
        """Values of a family by group."""
        found = {}
        for line in self.sidecar.text("/metrics").splitlines():
            if line.startswith(f"{family.full_name}{{"):
                found[line.partition('group="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
        return found

    def filesystems(self) -> dict[str, dict[str, Any]]:
        """File systems in the status, by group."""
        return {entry["group"]: entry for entry in json.loads(self.sidecar.text("/status"))["filesystems"]}

    def event_names(self) -> list[str]:
        """Events of the FUSE mount."""
        events = json.loads(self.sidecar.text("/status"))["events"]
        remote = [event for event in events if event["detail"].startswith(f"{REMOTE}: ")]
        return [event["event"] for event in remote if event["event"].startswith("file system")]

    def all_collectors_work(self) -> bool:
        """Whether the last read of each collector succeeded."""
        lines = self.sidecar.text("/metrics").splitlines()
        return all(line.endswith(" 1") for line in lines if line.startswith("gpujob_collector_success"))

    def helpers(self) -> list[int]:
        """Child processes of the sidecar, including hanging ones."""
        children = Path(f"/proc/{self.pid}/task")
        return [int(word) for task in children.iterdir() for word in (task / "children").read_text("ascii").split()]

    def write(self) -> int:
        """Append to the local file and return its size."""
        with open(self.local / "output_0.jsonl", "ab") as out:
            out.write(b"{}\n" * 1000)
            return out.tell()

    def until_it_hangs(self) -> None:
        """Wait until the sidecar has detected the hang."""
        until(lambda: self.values(RESPONDING).get(REMOTE) == 0, "the hanging file system")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose file systems all respond."""
    mount = FuseMount(tmp_path)
    try:
        sidecar_job = Job(tmp_path, mount)
        until(lambda: sidecar_job.values(RESPONDING) == {REMOTE: 1, LOCAL: 1, RUN: 1}, "all file systems")
        until(lambda: sidecar_job.values(BYTES).get(REMOTE) == 300, "the file on the mount")
        yield sidecar_job
    finally:
        mount.say("answer")
        mount.close()
    sidecar_job.sidecar.close()


def has_ended(pid: int) -> bool:
    """Whether a process has ended. One that hangs in the kernel still exists after a kill."""
    threads = Path(f"/proc/{pid}/task")
    try:
        return all(
            (thread / "stat").read_text("utf-8").rpartition(")")[2].split()[0] in "ZX" for thread in threads.iterdir()
        )
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("mode", ["ignore", "swallow"])
def test_a_hanging_file_system_affects_only_its_own_group(mode: str, job: Job) -> None:
    job.mount.say(mode)
    job.until_it_hangs()
    durations = []
    for _ in range(20):
        durations.append(took_s(job.pid, lambda: job.sidecar.text("/metrics")))
        time.sleep(0.05)
    assert sorted(durations)[-3] < POLL_WAIT_S, durations
    until(lambda: job.values(RESPONDING) == {REMOTE: 0, LOCAL: 1, RUN: 1}, "the answers of the others")
    until(lambda: job.values(AVAILABLE).keys() == {LOCAL, RUN}, "their available space")
    for _ in range(3):  # files of the other group are still counted as they grow
        size = job.write()
        until(lambda wanted=size: job.values(BYTES).get(LOCAL) == wanted, "the growth of the other group")
    until(lambda: job.values(FILES).keys() == {LOCAL}, "the end of the hanging group's series")
    hanging = job.filesystems()[REMOTE]
    assert (hanging["responding"], hanging["mount"]) == (False, str(job.mount.point))
    assert hanging["fstype"] == "fuse.gpujob_test"
    assert time.time() - 60 < hanging["since"] < time.time()
    until(job.all_collectors_work, "the success of all collectors")
    process_state = Path(f"/proc/{job.pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    assert process_state in "SR"
    job.sidecar.process.send_signal(signal.SIGTERM)
    assert job.sidecar.process.wait(timeout=SOON_S) == 0
    assert has_ended(job.pid)
    status = run_files.read_json(job.sidecar.run_dir / run_files.STATUS_DIR / "node01.json") or {}
    assert status["final"] is True
    assert "Traceback" not in job.sidecar.log.read_text("utf-8")


def test_sigterm_ends_the_sidecar_right_after_a_file_system_began_to_hang(job: Job) -> None:
    helpers = job.helpers()
    assert len(helpers) == 1
    job.mount.say("swallow")
    time.sleep(0.5)
    job.sidecar.process.send_signal(signal.SIGTERM)
    assert job.sidecar.process.wait(timeout=SOON_S) == 0
    assert has_ended(job.pid)
    job.mount.close()
    until(lambda: has_ended(helpers[0]), "the end of the helper after the mount is has_ended")


def test_sigkill_leaves_no_helper(job: Job) -> None:
    helpers = job.helpers()
    job.sidecar.process.kill()
    job.sidecar.process.wait()
    until(lambda: all(has_ended(pid) for pid in helpers), "the end of the helper")


def test_everything_continues_when_the_file_system_answers_again(job: Job) -> None:
    job.mount.say("swallow")
    job.until_it_hangs()
    with open(job.mount.folder / "output_0.jsonl", "ab") as out:
        out.write(b"{}\n" * 100)
    (job.mount.folder / "output_1.jsonl").write_bytes(b"{}\n")
    before = job.write()
    until(lambda: job.values(BYTES).get(LOCAL) == before, "the growth of the other group")
    until(lambda: job.event_names() == ["file system hangs"], "the event")
    job.mount.say("answer")
    until(lambda: job.values(RESPONDING).get(REMOTE) == 1, "the answer")
    until(lambda: job.values(BYTES).get(REMOTE) == 603, "the bytes written meanwhile")
    assert job.values(FILES) == {REMOTE: 2, LOCAL: 1}
    until(lambda: job.values(AVAILABLE).keys() == {REMOTE, LOCAL, RUN}, "the available space of all")
    assert job.event_names() == ["file system hangs", "file system answers again"]
    assert len(job.helpers()) == 1
