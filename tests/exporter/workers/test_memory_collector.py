"""Memory of the job on this node: its cgroup, the published values, and OOM kills that stay counted."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import CollectorContext
from exporter.contract import run_files
from exporter.contract.manifest import Task
from exporter.contract.status import Memory
from exporter.machine import kernel_log
from exporter.workers.memory_collector import (
    LIMIT,
    OOM_KILLS,
    PEAK,
    PRESSURE,
    USED,
    WORKING_SET,
    MemoryCollector,
)
from tests.exporter.machine.cgroup_trees import MIB, UNIFIED_MOUNT, V1_MOUNT, V2_MOUNT, Machine, real_cgroup
from tests.support.exporter import (
    NODE,
    FakeClock,
    Wrappers,
    make_identity,
    make_manifest,
    make_task,
    open_files,
    page_of,
    samples_of,
    until,
)

TASKS = (make_task(0), make_task(1), make_task(2, node_index=1))
SLURM_V1 = "/slurm_node01/uid_1000"
SLURM_V2 = "/system.slice/slurmstepd.scope"


class Node:
    """A node with a run directory, a sidecar in its own cgroup, and workers with start records."""

    def __init__(self, root: Path, version: int, own: str, **manifest: Any) -> None:
        self.version = version
        self.machine = Machine(root, V2_MOUNT if version == 2 else V1_MOUNT + UNIFIED_MOUNT)
        self.run_dir = root / "run"
        self.folder = self.run_dir / run_files.WORKERS_DIR
        self.folder.mkdir(parents=True)
        self.machine.process("self", self.lines(own))
        manifest = {"tasks": TASKS, **manifest}
        self.context = CollectorContext(
            make_manifest(self.run_dir, *manifest.pop("tasks"), **manifest),
            make_identity(),
            FakeClock(),
            str(root / "proc"),
        )
        self.collector = MemoryCollector(self.context)

    def lines(self, cgroup: str) -> str:
        return f"0::{cgroup}\n" if self.version == 2 else f"4:memory:{cgroup}\n0::/system.slice/slurmd.service\n"

    def cgroups(self, *paths: str, **facts: int) -> None:
        for path in paths:
            (self.machine.v2 if self.version == 2 else self.machine.v1)(path, **facts)  # type: ignore[arg-type]

    def remove(self, path: str) -> None:
        """Remove a v1 cgroup; its open files become empty."""
        folder = self.machine.root / f"sys/fs/cgroup/memory{path}"
        for file in folder.iterdir():
            file.write_text("", encoding="ascii")
        shutil.rmtree(folder)

    def start(self, task: Task, pid: int, cgroup: str, restart: int = 0, **record: Any) -> None:
        """Start a worker in this cgroup, with its start record."""
        self.machine.process(pid, self.lines(cgroup), start_ticks=pid * 10)
        self.write(task, "start", restart, pid=pid, start_ticks=pid * 10, **record)

    def end(self, task: Task, pid: int, restart: int = 0, **record: Any) -> None:
        """End a worker, with its exit record."""
        shutil.rmtree(self.machine.root / f"proc/{pid}", ignore_errors=True)
        self.write(task, "exit", restart, pid=pid, **record)

    def write(self, task: Task, kind: str, restart: int, **record: Any) -> None:
        stem = run_files.record_name(task.worker, task.rank, 0, restart)
        run_files.write_json(self.folder / f"{stem}.{kind}.json", record)

    def read(self) -> Memory:
        return self.collector.read()

    def path(self) -> str | None:
        """Path of the cgroup of the job, from a new read."""
        return self.read().cgroup


def test_the_cgroup_of_the_sidecar_is_used_before_a_worker_is_known(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, f"{SLURM_V2}/job_7/step_0/user/task_0")
    node.cgroups(f"{SLURM_V2}/job_7/step_0/user/task_0")
    assert node.path() == f"{SLURM_V2}/job_7/step_0/user/task_0"


@pytest.mark.parametrize(
    ("version", "job", "step"),
    [
        (1, f"{SLURM_V1}/job_7", "/step_{}/task_0"),
        (2, f"{SLURM_V2}/job_7", "/step_{}/user/task_0"),
        (2, "/system.slice/node01_slurmstepd.scope/job_7", "/step_{}/user/task_0"),
        (2, f"{SLURM_V2}/s4H7XK2M9QZ1", "/step_{}/user/task_special"),
    ],
)
def test_the_cgroup_of_a_slurm_job_contains_its_steps(tmp_path: Path, version: int, job: str, step: str) -> None:
    node = Node(tmp_path, version, job + step.format(0))
    node.cgroups(job, *(job + step.format(number) for number in range(3)), limit=700 * MIB)
    node.cgroups(job, used=300 * MIB, limit=800 * MIB)
    node.start(TASKS[0], 11, job + step.format(1))
    node.start(TASKS[1], 12, job + step.format(2))
    snapshot = node.read()
    assert (snapshot.cgroup, snapshot.used_bytes, snapshot.limit_bytes) == (job, 300 * MIB, 800 * MIB)
    node.end(TASKS[0], 11)
    node.end(TASKS[1], 12)
    assert node.path() == job  # also after all workers have ended


def test_the_common_cgroup_of_sidecar_and_workers_is_used(tmp_path: Path) -> None:
    session = "/user.slice/user-1000.slice/session-3.scope"
    node = Node(tmp_path, 2, session)
    node.cgroups("/user.slice", session)
    node.start(TASKS[0], 11, session)
    assert node.path() == session


@pytest.mark.parametrize("version", [1, 2])
def test_the_root_cgroup_gives_no_values(tmp_path: Path, version: int) -> None:
    node = Node(tmp_path, version, "/a")
    node.cgroups("/a", "/b", oom_kills=3)
    if version == 1:
        node.cgroups("")
        node.machine.write("sys/fs/cgroup/memory/release_agent", "")
    else:
        node.machine.v2_without_memory("")
    assert node.read().used_bytes is not None
    node.start(TASKS[0], 11, "/b")
    snapshot = node.read()
    assert (snapshot.cgroup, snapshot.used_bytes, snapshot.oom_kills) == ("/", None, None)
    assert page_of(node.collector, snapshot) == ""


def test_a_machine_without_cgroups_gives_no_values_and_no_error(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, "/a")
    shutil.rmtree(tmp_path / "proc")
    snapshot = node.read()
    assert (snapshot.cgroup, snapshot.used_bytes, snapshot.oom_kills) == (None, None, None)
    assert page_of(node.collector, snapshot) == ""


def test_workers_in_another_pid_namespace_are_skipped(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, "/job/step_0")
    node.machine.write("proc/self/ns/pid", "")
    node.cgroups("/job", "/job/step_0", "/job/step_1", "/other")
    here = (tmp_path / "proc/self/ns/pid").stat().st_ino
    node.collector = MemoryCollector(node.context)
    node.start(TASKS[0], 11, "/other", pid_namespace=here + 1)
    node.start(TASKS[2], 13, "/other")  # on another node
    assert node.path() == "/job/step_0"
    node.start(TASKS[1], 12, "/job/step_1", pid_namespace=here)
    assert node.path() == "/job"


def test_a_worker_with_a_reused_pid_is_skipped(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, "/job/step_0")
    node.cgroups("/job/step_0", "/other")
    node.start(TASKS[0], 11, "/other")
    node.write(TASKS[0], "start", 0, pid=11, start_ticks=5)
    assert node.path() == "/job/step_0"


@pytest.mark.parametrize("broken", ["proc", "pid"])
def test_incomplete_records_are_ignored(tmp_path: Path, broken: str) -> None:
    node = Node(tmp_path, 2, "/job/step_0")
    node.cgroups("/job/step_0")
    node.write(TASKS[0], "start", 0, pid=11 if broken == "proc" else None)
    node.write(TASKS[1], "exit", 0, pid=None, oom_kills=None)
    assert node.path() == "/job/step_0"


def test_only_the_workers_give_the_cgroup_of_an_attached_job(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, "/session", attached=True)
    node.cgroups("/session", oom_kills=9)
    node.cgroups("/job", "/job/step_1", "/job/step_2", oom_kills=1)
    assert node.read().used_bytes is None
    node.start(TASKS[0], 11, "/job/step_1")
    node.start(TASKS[1], 12, "/job/step_2")
    snapshot = node.read()
    assert (snapshot.cgroup, snapshot.oom_kills) == ("/job", 2)


def test_v2_counts_the_kills_of_all_child_cgroups(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, "/job/step_0")
    node.cgroups("/job", oom_kills=4)
    node.cgroups("/job/step_0", "/job/step_1", oom_kills=2)
    node.start(TASKS[0], 11, "/job/step_1")
    assert node.read().oom_kills == 4


def test_the_count_of_kills_never_falls(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, "/job")
    node.cgroups("/job", oom_kills=4)
    assert node.read().oom_kills == 4
    node.cgroups("/job", oom_kills=0)
    assert node.read().oom_kills == 4


def test_v1_keeps_counting_the_kills_of_removed_cgroups(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, "/job/step_0")
    node.cgroups("/job", "/job/step_0", "/job/step_1", "/job/step_2")
    node.start(TASKS[0], 11, "/job/step_1")
    node.start(TASKS[1], 12, "/job/step_2")
    assert node.read().oom_kills == 0
    node.cgroups("/job/step_1", oom_kills=1)
    node.cgroups("/job/step_0", oom_kills=1)
    assert node.read().oom_kills == 2
    node.remove("/job/step_1")
    assert node.read().oom_kills == 2
    # the cgroup of the last worker is removed when it is killed; only its wrapper has seen the kill
    node.end(TASKS[1], 12, oom_kills=1)
    node.remove("/job/step_2")
    assert node.read().oom_kills == 3
    assert node.read().oom_kills == 3


def test_a_kill_reported_by_kernel_and_wrapper_counts_once(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, "/job/step_0")
    node.cgroups("/job", "/job/step_0", "/job/step_1")
    node.start(TASKS[0], 11, "/job/step_1")
    node.read()
    node.cgroups("/job/step_1", oom_kills=1)
    node.end(TASKS[0], 11, oom_kills=1)
    assert node.read().oom_kills == 1
    node.cgroups("/job/step_2")
    node.start(TASKS[0], 14, "/job/step_2", restart=1)  # restarted in its own cgroup
    node.read()
    node.end(TASKS[0], 14, restart=1, oom_kills=1)
    assert node.read().oom_kills == 2


def test_many_runs_in_cgroups_of_their_own_hold_no_more_files_and_stay_counted(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, "/job/step_0")
    node.cgroups("/job", "/job/step_0")
    held = []
    for restart in range(20):
        step = f"/job/step_{restart + 1}"
        node.cgroups(step)
        node.start(TASKS[0], 100 + restart, step, restart=restart)
        assert node.path() == "/job"
        node.cgroups(step, oom_kills=1)
        node.read()
        node.end(TASKS[0], 100 + restart, restart=restart, oom_kills=restart % 2)
        node.remove(step)
        assert node.read().oom_kills == restart + 1
        held.append(len(open_files(str(tmp_path))))
    assert held[-1] == held[2]


def test_a_kill_in_a_shared_cgroup_counts_once_for_several_wrappers(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, "/session")
    node.cgroups("/session", oom_kills=0)
    node.start(TASKS[0], 11, "/session")
    node.read()
    node.start(TASKS[1], 12, "/session")
    node.cgroups("/session", oom_kills=1)
    node.end(TASKS[0], 11, oom_kills=1)
    node.end(TASKS[1], 12, oom_kills=1)  # ended before the first read
    assert node.read().oom_kills == 1


def test_kills_of_a_worker_that_was_never_read_are_counted_by_its_record(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, "/job/step_0")
    node.cgroups("/job", "/job/step_0", "/job/step_1")
    node.start(TASKS[0], 11, "/job/step_1")
    node.end(TASKS[1], 12, oom_kills=1)
    node.write(TASKS[1], "start", 0, pid=12)
    assert node.read().oom_kills == 1


@pytest.mark.parametrize("version", [1, 2])
def test_the_page_has_the_memory_of_the_cgroup(tmp_path: Path, version: int) -> None:
    node = Node(tmp_path, version, "/job")
    node.cgroups("/job", used=100 * MIB, limit=128 * MIB, oom_kills=2)
    page = page_of(node.collector, node.read())
    expected = {USED: 100, LIMIT: 128, PEAK: 200, WORKING_SET: 70}
    assert {family: samples_of(page, family)[""] / MIB for family in expected} == expected
    assert samples_of(page, OOM_KILLS) == {"": 2}
    pressure = {'kind="some"': 2.5, 'kind="full"': 1.25} if version == 2 else {}
    assert samples_of(page, PRESSURE) == pressure


def test_a_cgroup_without_a_limit_has_no_limit_sample(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, "/job")
    node.cgroups("/job")
    page = page_of(node.collector, node.read())
    assert samples_of(page, LIMIT) == {}
    assert samples_of(page, USED) == {"": 100 * MIB}


@pytest.mark.parametrize(("cgroup", "victims"), [("/job_7", {999}), ("/system.slice/slurmd.service", set())])
def test_victims_in_a_cgroup_of_many_jobs_are_not_those_of_this_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, victims: set[int]
) -> None:
    node = Node(tmp_path, 2, cgroup)
    node.cgroups(cgroup)
    node.machine.write("proc/self/ns/pid", "")
    namespace = (tmp_path / "proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr(kernel_log, "FIRST_PID_NAMESPACE", namespace)
    line = f"oom-kill:constraint=CONSTRAINT_NONE,global_oom,task_memcg={cgroup},task=python,pid=999,uid=0"
    node.machine.write("dev/kmsg", f"6,1,1700000000000000,-;{line}\n")
    assert node.read().oom_victims.keys() == victims


def test_the_status_has_the_memory_of_the_cgroup_as_json(tmp_path: Path) -> None:
    node = Node(tmp_path, 2, "/job")
    node.cgroups("/job", limit=128 * MIB, oom_kills=2)
    assert node.read().to_json() == {
        "cgroup": "/job",
        "version": 2,
        "used_bytes": 100 * MIB,
        "limit_bytes": 128 * MIB,
        "peak_bytes": 200 * MIB,
        "working_set_bytes": 70 * MIB,
        "oom_kills": 2,
        "pressure_some_s": 2.5,
        "pressure_full_s": 1.25,
        "kmsg": "unavailable: No such file or directory",
        "oom_victims": {},
        "xids": [],
    }


@pytest.mark.parametrize(("check", "interval"), [(1.0, 2.0), (5.0, 5.0), (60.0, 5.0)])
def test_the_read_interval_is_between_two_and_five_seconds(tmp_path: Path, check: float, interval: float) -> None:
    assert Node(tmp_path, 2, "/job", check_interval_s=check).collector.interval_s == interval


# The real kernel


def real_context(run_dir: Path, *tasks: Task, proc: str = "/proc") -> CollectorContext:
    return CollectorContext(make_manifest(run_dir, *tasks), make_identity(node=NODE, start=None), FakeClock(), proc)


def test_a_real_oom_kill_stays_counted(tmp_path: Path, wrappers: Wrappers) -> None:
    task, go = make_task(), tmp_path / "go"
    program = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nbytearray(b'x' * (1 << 27))"
    with real_cgroup("worker") as real:
        real.limit(32 * MIB)
        script = f'echo $$ > {real.procs} && exec "$0" -I -c "$1"'
        collector = MemoryCollector(real_context(tmp_path, task))
        before = collector.read()
        if before.used_bytes is None:
            pytest.skip("this process is in the root of its hierarchy")
        wrapper = wrappers.start(task, "sh", "-c", script, sys.executable, program)
        pid = wrappers.record(task, "start")["pid"]
        until(lambda: str(pid) in real.procs.read_text(encoding="ascii").split(), "the worker in its cgroup")
        running = collector.read()
        assert running.used_bytes is not None
        assert before.oom_kills == running.oom_kills
        go.touch()
        wrapper.wait(timeout=60)
        after = collector.read()
        assert after.oom_kills == (running.oom_kills or 0) + 1
        real.directory.rmdir()
        assert collector.read().oom_kills == after.oom_kills
        assert open_files(str(real.directory)) == []
        if after.kmsg == "available":
            assert pid in after.oom_victims


def test_this_process_has_a_cgroup_or_is_in_the_root() -> None:
    snapshot = MemoryCollector(real_context(Path("/nonexistent"))).read()
    if snapshot.used_bytes is not None:
        assert snapshot.used_bytes > MIB
        assert snapshot.working_set_bytes is None or snapshot.working_set_bytes <= snapshot.used_bytes
