"""Whether a job has come up: each check for itself, and the collector over what others have seen."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.collecting.collector import NodeStatus
from exporter.contract import run_files
from exporter.contract.manifest import LogPattern, PathGroup
from exporter.launch.checks import (
    LEVELS,
    SETTLE_S,
    NodeLaunchCheck,
    NodeLaunchFacts,
    WorkerLaunchFacts,
    check_launch,
    is_launch_verified,
)
from exporter.launch.collector import DEVICES_VARIABLE, FINAL_INTERVAL_S, POLL_S, LaunchCollector, LaunchSnapshot
from exporter.launch.facts_reader import read_open_gpus, why_not_writable
from exporter.machine.procfs import read_environment
from tests.support.exporter import NODE, FakeClock, make_context, make_manifest, make_task, page_of, until

TIMEOUT_S = 60.0
NODE_IN_ORDER = NodeLaunchFacts(output_dir="/out", output_files=2, expects_progress=True, has_gpus=True)
EVERYTHING = tuple(LEVELS)


def worker(rank: int = 0, **changes: Any) -> WorkerLaunchFacts:
    """A worker with nothing missing and one GPU of its own."""
    made = WorkerLaunchFacts(
        worker=f"worker_w{rank}",
        rank=rank,
        gpus=(rank,),
        pid=100 + rank,
        started=True,
        up=True,
        age_s=10.0,
        devices=str(rank),
        device_files=1,
        log_files=2,
        log_bytes=80,
        items=5,
    )
    return dataclasses.replace(made, **changes)


def ended(rank: int, reason: str, evidence: str = "") -> WorkerLaunchFacts:
    return worker(rank, up=False, reason=reason, evidence=evidence, devices=None, device_files=None)


def checks_of(
    *workers: WorkerLaunchFacts, node: NodeLaunchFacts = NODE_IN_ORDER, elapsed_s: float = 10.0, over: bool = False
) -> dict[str, NodeLaunchCheck]:
    found = check_launch(workers, node, elapsed_s=elapsed_s, launch_timeout_s=TIMEOUT_S, is_over=over)
    return {check.name: check for check in found}


def test_a_launch_with_nothing_missing_passes_every_check_in_order() -> None:
    found = checks_of(worker(0), worker(1))
    assert tuple(found) == EVERYTHING
    assert all(check.passed is True and not check.problems for check in found.values())
    assert is_launch_verified(found.values())
    assert found["processes"].detail == "2 of 2 workers started"


NOT_STARTED = WorkerLaunchFacts("worker_w1", 1, gpus=(1,))


@pytest.mark.parametrize(
    ("name", "second", "found"),
    [
        ("processes", NOT_STARTED, "none of its processes was found"),
        (
            "processes",
            dataclasses.replace(NOT_STARTED, reason="launch_failed", evidence="cannot start 'x'"),
            "it could not be started: cannot start 'x'",
        ),
        ("count", NOT_STARTED, "none of its processes was found"),
        ("count", ended(1, "app_error", "exit status 3"), "it has ended: app_error (exit status 3)"),
        ("count", worker(1, up=False), "its process is gone"),
        ("count", worker(1, pid=100), "process 100 is counted for worker_w0 too"),
        (
            "gpus",
            worker(1, devices="1,2"),
            'CUDA_VISIBLE_DEVICES is "1,2", 2 devices; the plan gives it 1 device (GPU 1)',
        ),
        ("gpus", worker(1, devices=""), 'CUDA_VISIBLE_DEVICES is "", 0 devices; the plan gives it 1 device (GPU 1)'),
        ("gpus", worker(1, devices="0"), "it shares device 0 with worker_w0; the plan gives each its own"),
        (
            "gpus",
            worker(1, devices=None, devices_unset=True),
            "CUDA_VISIBLE_DEVICES is not set in its environment: it sees every GPU of the node",
        ),
        ("gpus", worker(1, gpus=(), devices="7"), 'CUDA_VISIBLE_DEVICES is "7", 1 device; the plan gives it 0 devices'),
        (
            "gpus",
            worker(1, misplaced="uses GPU 0 (GPU-a), the plan gives it GPU 1"),
            "it uses GPU 0 (GPU-a), the plan gives it GPU 1",
        ),
        ("gpu_use", worker(1, device_files=0), "neither it nor a process of it has opened a GPU"),
        ("logs", worker(1, log_files=0, log_bytes=0), "it has no log file"),
        ("log_lines", worker(1, log_bytes=0), "its log is empty"),
        ("progress", worker(1, items=None), "no position was found in its log"),
    ],
)
def test_what_one_worker_lacks_is_waited_for_and_then_told(name: str, second: WorkerLaunchFacts, found: str) -> None:
    waiting = checks_of(worker(0), second)[name]
    assert waiting.passed is None
    told = checks_of(worker(0), second, elapsed_s=TIMEOUT_S)[name]
    assert told.passed is False
    assert (told.problems[-1].worker, told.problems[-1].rank, told.problems[-1].found) == ("worker_w1", 1, found)
    assert "worker_w1 (rank 1)" in told.detail
    assert is_launch_verified(checks_of(worker(0), second, elapsed_s=TIMEOUT_S).values()) is (LEVELS[name] == "warning")
    assert checks_of(worker(0), second, over=True)[name].passed is (found == "its process is gone")


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("output_dir", NodeLaunchFacts(output_dir="/out", output_problem="/out is not there")),
        ("output", NodeLaunchFacts(output_dir="/out", output_files=0)),
    ],
)
def test_what_the_node_lacks_is_waited_for_and_then_told(name: str, node: NodeLaunchFacts) -> None:
    assert checks_of(worker(), node=node)[name].passed is None
    told = checks_of(worker(), node=node, elapsed_s=TIMEOUT_S)[name]
    assert (told.passed, told.problems[0].worker) == (False, None)


def test_what_does_not_apply_is_not_checked() -> None:
    """A job without GPUs, without output to look for, and without a way to know of progress."""
    found = checks_of(worker(gpus=(), devices="0", items=None), node=NodeLaunchFacts())
    assert tuple(found) == ("processes", "count", "logs", "log_lines")
    assert is_launch_verified(found.values())


def test_workers_that_serve_are_not_expected_to_tell_a_position() -> None:
    engine = worker(1, service=True, items=None)
    assert checks_of(worker(0), engine)["progress"].detail == "1 of 1 workers with a position"
    assert "progress" not in checks_of(engine, elapsed_s=TIMEOUT_S)


def test_only_critical_workers_need_progress() -> None:
    helper = worker(1, critical=False, items=None)
    assert checks_of(worker(0), helper)["progress"].passed is True
    assert "progress" not in checks_of(helper, elapsed_s=TIMEOUT_S)


def test_a_worker_that_has_completed_lacks_nothing_that_only_a_live_one_can_show() -> None:
    found = checks_of(ended(0, "completed"), worker(1))
    assert all(check.passed for check in found.values())


@pytest.mark.parametrize("reason", ["terminated_peer", "cancelled", "time_limit", "preempted"])
def test_a_worker_that_was_ended_from_outside_is_no_fault_of_the_launch(reason: str) -> None:
    assert checks_of(worker(0), ended(1, reason), over=True)["count"].passed is True


def test_a_worker_has_come_up_once_it_has_lived_for_a_while() -> None:
    assert checks_of(worker(age_s=SETTLE_S - 1))["count"].passed is None
    assert checks_of(worker(age_s=SETTLE_S))["count"].passed is True
    assert checks_of(worker(age_s=0.5), over=True)["count"].passed is True
    short = check_launch([worker(age_s=1.0)], NODE_IN_ORDER, elapsed_s=1.0, launch_timeout_s=2.0)
    assert all(check.passed for check in short)


def test_an_environment_that_cannot_be_read_is_waited_for_and_never_a_fault() -> None:
    hidden = worker(0, devices=None, device_files=None)
    found = checks_of(hidden, worker(1))
    assert (found["gpus"].passed, found["gpu_use"].passed) == (None, None)
    found = checks_of(hidden, worker(1), elapsed_s=TIMEOUT_S)
    assert (found["gpus"].passed, found["gpu_use"].passed) == (True, True)
    found = checks_of(hidden, elapsed_s=TIMEOUT_S)
    assert not {"gpus", "gpu_use"} & found.keys()
    assert is_launch_verified(found.values())


def test_workers_that_share_gpus_by_the_plan_may() -> None:
    pair = worker(0, gpus=(0,), devices="0"), worker(1, gpus=(0,), devices="0")
    assert checks_of(*pair)["gpus"].passed is True


WORKERS = st.builds(
    WorkerLaunchFacts,
    worker=st.just("w"),
    rank=st.integers(0, 5),
    gpus=st.sampled_from([(), (0,), (0, 1)]),
    pid=st.none() | st.integers(1, 5),
    started=st.booleans(),
    up=st.booleans(),
    reason=st.sampled_from([None, "completed", "app_error", "launch_failed", "cancelled"]),
    devices=st.none() | st.text("0123,-", max_size=5),
    device_files=st.none() | st.integers(0, 2),
    log_files=st.integers(0, 2),
    items=st.none() | st.integers(0),
)
NODES = st.builds(
    NodeLaunchFacts,
    output_dir=st.none() | st.just("/o"),
    output_problem=st.none() | st.just("no"),
    output_files=st.none() | st.integers(0, 2),
    gives_progress=st.booleans(),
    has_gpus=st.booleans(),
    tells_devices=st.booleans(),
)


@given(st.lists(WORKERS, max_size=4), NODES, st.booleans())
def test_at_the_end_every_check_has_an_answer(
    workers: list[WorkerLaunchFacts], node: NodeLaunchFacts, over: bool
) -> None:
    elapsed_s = 0.0 if over else TIMEOUT_S
    for check in check_launch(workers, node, elapsed_s=elapsed_s, launch_timeout_s=TIMEOUT_S, is_over=over):
        assert check.passed is (not check.problems)
    for check in check_launch(workers, node, elapsed_s=0.0, launch_timeout_s=TIMEOUT_S):
        assert check.passed is not False


# -- what is looked at ---------------------------------------------------------------------------


def test_gpus_are_counted_by_their_device_files_in_the_whole_tree(tmp_path: Path) -> None:
    """A shell starts the program, so the worker's own process has none open."""
    for pid, children, targets in (
        (7, "8", ["/dev/null", "/dev/nvidiactl"]),
        (8, "", ["/dev/nvidia0", "/dev/nvidia0", "/dev/nvidia12", "/dev/nvidia-uvm", "pipe:[1]"]),
    ):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/task/{pid}/children").write_text(children)
        (tmp_path / f"{pid}/fd").mkdir()
        for number, target in enumerate(targets):
            (tmp_path / f"{pid}/fd/{number}").symlink_to(target)
    assert read_open_gpus(7, str(tmp_path)) == 2
    assert read_open_gpus(9, str(tmp_path)) is None
    assert read_open_gpus(os.getpid()) == 0


def test_a_directory_that_cannot_be_written_to_is_told_with_its_reason(tmp_path: Path, locked: Path) -> None:
    (tmp_path / "file").write_text("")
    assert why_not_writable(tmp_path) is None
    assert why_not_writable(tmp_path / "none") == f"{tmp_path}/none is not there"
    assert why_not_writable(tmp_path / "file") == f"{tmp_path}/file is not a directory"
    assert why_not_writable(locked) == f"{locked} cannot be written to"


class Others:
    """The status as the other collectors would fill it."""

    def __init__(self) -> None:
        self.phase = "running"
        self.workers: dict[int, dict[str, Any]] = {}
        self.files = 1
        self.read = True
        self.asked = 0
        self.gpus: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        self.asked += 1
        reading = {"duration_s": 0.01 if self.read else None, "last_success": 2e9, "overdue": False}
        return {
            "job": {"phase": self.phase},
            "workers": list(self.workers.values()),
            "gpus": self.gpus,
            "outputs": [{"group": "output", "files": self.files, "mtime": 2e9}],
            "collectors": dict.fromkeys(("workers", "logs", "outputs"), reading),
        }

    def see(self, rank: int, **changes: Any) -> None:
        """A worker that lives and works, or what is given."""
        entry = {"rank": rank, "pid": os.getpid(), "up": True, "start": 1_699_999_990.0, "restarts": 0}
        self.workers[rank] = {**entry, "rss_bytes": None, "exit": None, "items": 3, **changes}


class Launch:
    """A collector over such a status."""

    def __init__(self, run_dir: Path, *ranks: int, **manifest: Any) -> None:
        tasks = [dataclasses.replace(make_task(rank), gpus=()) for rank in ranks or (0,)]
        self.run_dir, self.clock, self.others = run_dir, FakeClock(), Others()
        self.manifest = make_manifest(run_dir, *tasks, **{"groups": (PathGroup("output", ".", "o*"),), **manifest})
        self.begin()
        for task in tasks:
            self.others.see(task.rank)
            (run_dir / f"{NODE}_{task.worker}.out").write_text("hello\n")

    def begin(self) -> None:
        """Make the collector, as a sidecar does that starts."""
        self.collector = LaunchCollector(make_context(self.manifest, self.clock), self.others)

    def look(self, after_s: float = 1.0) -> LaunchSnapshot:
        self.clock.advance(after_s)
        return self.collector.read()

    def passed(self, snapshot: LaunchSnapshot) -> dict[str, bool | None]:
        return {name: check["passed"] for name, check in snapshot.checks.items()}


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def test_a_launch_that_is_complete_is_verified_and_not_looked_at_again(launch: Launch) -> None:
    assert launch.collector.interval_s == POLL_S
    found = launch.look()
    assert (found.verified, found.final) == (True, True)
    names = ("processes", "count", "logs", "log_lines", "output_dir", "output", "progress")
    assert launch.passed(found) == dict.fromkeys(names, True)
    asked = launch.others.asked
    launch.others.workers.clear()
    assert launch.look(100) is found
    assert (launch.others.asked, launch.collector.interval_s) == (asked, FINAL_INTERVAL_S)


@pytest.mark.parametrize(("uses", "passed"), [([{"gpu": "0"}], True), ([], None)])
def test_where_the_driver_tells_who_computes_open_devices_do_not_count(
    uses: list[dict[str, str]], passed: bool | None, tmp_path: Path
) -> None:
    launch = Launch(tmp_path)
    launch.manifest = dataclasses.replace(launch.manifest, tasks=(make_task(0),))
    launch.others.gpus = {"driver_state": "ok"}
    launch.others.see(0, rss_bytes=1, gpu_use=uses)
    launch.begin()
    assert launch.passed(launch.look())["gpu_use"] is passed
    launch.others.see(0, rss_bytes=1, gpu_use=uses, gpu_misplaced="uses GPU 1, the plan gives it GPU 0")
    assert "uses GPU 1" in launch.look(TIMEOUT_S).checks["gpus"]["lacking"][0]["found"]


def test_nothing_is_judged_before_the_others_have_looked(launch: Launch) -> None:
    launch.others.read = False
    found = launch.look(1000)
    assert (found.verified, found.final, found.checks) == (False, False, {})
    launch.others.read = True
    assert launch.look().final


def test_a_warning_is_waited_for_after_the_launch_is_verified(launch: Launch) -> None:
    launch.others.files = 0
    found = launch.look()
    assert (found.verified, found.final, launch.passed(found)["output"]) == (True, False, None)
    launch.others.see(0, up=False, exit={"reason": "app_error", "evidence": ["exit status 1"]})
    found = launch.look(TIMEOUT_S)
    assert (found.verified, found.final) == (True, True)
    assert (launch.passed(found)["count"], launch.passed(found)["output"]) == (True, False)


def test_a_launch_that_lacks_a_worker_is_final_when_its_time_is_over(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 0, 1)
    del launch.others.workers[1]
    found = launch.look()
    assert (found.verified, found.final, launch.passed(found)["processes"]) == (False, False, None)
    found = launch.look(TIMEOUT_S)
    assert (found.verified, found.final, launch.passed(found)["processes"]) == (False, True, False)
    launch.others.see(1)
    assert launch.look() is found


@pytest.mark.parametrize("phase", ["completing", "finished"])
def test_a_job_that_ends_early_ends_its_launch(phase: str, launch: Launch) -> None:
    launch.others.see(0, up=False, exit={"reason": "app_error", "evidence": ["exit status 3"]})
    assert not launch.look().final
    launch.others.phase = phase
    found = launch.look()
    assert (found.verified, found.final) == (False, True)
    assert found.checks["count"]["lacking"][0]["found"] == "it has ended: app_error (exit status 3)"


def test_old_output_is_not_output_of_this_job(launch: Launch) -> None:
    launch.collector = LaunchCollector(make_context(launch.manifest, launch.clock, start=2e9 + 100), launch.others)
    assert launch.passed(launch.look())["output"] is None


def test_output_is_not_expected_before_there_is_anybody_to_write_it(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    engine, benchmark = dataclasses.replace(make_task(), service=True), make_task(1, role="benchmark")
    launch.manifest = dataclasses.replace(launch.manifest, tasks=(engine, dataclasses.replace(benchmark, later=True)))
    launch.others.files = 0
    launch.begin()
    assert "output" not in launch.look().checks
    launch.others.files = 1
    assert launch.passed(launch.look())["output"] is True
    launch.manifest = dataclasses.replace(launch.manifest, tasks=(engine, benchmark))
    launch.others.files = 0
    launch.begin()
    assert launch.passed(launch.look())["output"] is None


def test_only_the_first_node_is_asked_for_output_of_the_job(launch: Launch) -> None:
    launch.collector = LaunchCollector(make_context(launch.manifest, launch.clock, node_index=1), launch.others)
    assert "output" not in launch.look().checks


def test_progress_is_asked_for_only_where_it_can_be_known(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.others.see(0, items=None)
    assert "progress" not in launch.look().checks
    for known in ({"total_items": 10}, {"progress": (LogPattern("items", "at (\\d+)"),)}):
        launch.manifest = dataclasses.replace(launch.manifest, **known)
        launch.begin()
        assert launch.passed(launch.look())["progress"] is None


def test_the_position_of_a_benchmark_is_not_expected_of_those_it_measures(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    engine, benchmark = make_task(), make_task(1, role="benchmark")
    benchmark = dataclasses.replace(benchmark, later=True)
    for served in (engine, dataclasses.replace(engine, service=True)):
        launch.manifest = make_manifest(tmp_path, served, benchmark)
        launch.begin()
        launch.others.see(0, items=None)
        launch.others.see(1, items=5)
        assert "progress" not in launch.look().checks
    launch.manifest = dataclasses.replace(launch.manifest, total_items=10)
    launch.begin()
    assert "progress" not in launch.look().checks, "it serves"


def test_logs_are_those_of_the_present_run_and_of_the_jobs_own_pattern(tmp_path: Path) -> None:
    launch = Launch(tmp_path, logs=PathGroup("log", ".", "mine_*.log"))
    launch.others.see(0, restarts=1)
    assert launch.passed(launch.look())["logs"] is None
    (tmp_path / "mine_worker_0.log").write_text("")
    found = launch.look()
    assert (launch.passed(found)["logs"], launch.passed(found)["log_lines"]) == (True, None)
    (tmp_path / f"{NODE}_worker_w0_r1.out").write_text("x")
    assert launch.passed(launch.look())["log_lines"] is True


def test_a_sidecar_that_comes_back_keeps_what_was_found_in_this_attempt(launch: Launch) -> None:
    found = launch.look()
    status = NodeStatus()
    launch.collector.describe(found, status)
    (launch.run_dir / run_files.STATUS_DIR).mkdir()
    path = launch.run_dir / run_files.STATUS_DIR / f"{NODE}.json"
    launch.others.workers.clear()
    for known, kept in (
        ({"attempt": 0, "launch": status.launch}, True),
        ({"attempt": 1, "launch": status.launch}, False),
        ({"attempt": 0, "launch": {"verified": True}}, False),
        ({"attempt": 0}, False),
    ):
        run_files.write_json(path, known)
        launch.begin()
        assert (launch.look().verified, launch.collector.read().final) == (kept, kept)


def process_with(devices: str | None) -> "subprocess.Popen[bytes]":
    """A process that waits for its standard input, with these devices named in its environment."""
    environment = {name: value for name, value in os.environ.items() if name != DEVICES_VARIABLE}
    if devices is not None:
        environment[DEVICES_VARIABLE] = devices
    process = subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE)
    until(lambda: read_environment(process.pid, ()) is not None, "its environment: execve is not at its end yet")
    return process


def test_a_job_that_others_have_started_is_looked_at_from_now_on(tmp_path: Path) -> None:
    """It may have run for days, and finds its GPUs by itself."""
    launch = Launch(tmp_path)
    launch.manifest = make_manifest(tmp_path, make_task(0), attached=True, groups=())
    launch.clock.advance(1e6)
    launch.begin()
    with process_with(None) as process:
        launch.others.see(0, pid=process.pid, rss_bytes=1, items=None, up=False)
        found = launch.look()
        assert (found.final, launch.passed(found)["count"]) == (False, None)
        launch.others.see(0, pid=process.pid, rss_bytes=1, items=None)
        found = launch.look()
        assert found.verified
        assert "gpus" not in found.checks
        found = launch.look(TIMEOUT_S)
        assert (found.final, launch.passed(found)["gpu_use"]) == (True, False)


@pytest.mark.parametrize(
    ("value", "passed"), [("0", True), ("0,1", False), ("", False), (None, False)], ids=["one", "two", "none", "unset"]
)
def test_devices_are_read_from_the_environment_of_the_process(value: str | None, passed: bool, tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.manifest = make_manifest(tmp_path, make_task(0), groups=())
    launch.begin()
    with process_with(value) as process:
        launch.others.see(0, pid=process.pid, rss_bytes=1)
        found = launch.look(TIMEOUT_S)
    assert (launch.passed(found)["gpus"], launch.passed(found)["gpu_use"]) == (passed, False)


def test_the_environment_of_a_process_that_was_not_seen_here_is_not_read(tmp_path: Path) -> None:
    """In another pid namespace the number is that of somebody else."""
    launch = Launch(tmp_path)
    launch.manifest = make_manifest(tmp_path, make_task(0), groups=())
    launch.begin()
    assert "gpus" not in launch.look(TIMEOUT_S).checks


def test_a_check_without_an_answer_has_no_sample(launch: Launch) -> None:
    launch.others.files = 0
    page = page_of(launch.collector, launch.look())
    assert 'gpujob_launch_check{check="processes"} 1' in page
    assert 'check="output"}' not in page
    assert "gpujob_launch_verified 1\n" in page
    assert 'gpujob_launch_check{check="output"} 0' in page_of(launch.collector, launch.look(TIMEOUT_S))
