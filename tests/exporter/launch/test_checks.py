"""The launch checks, and the collector that runs them on the status of other collectors."""

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract import run_files, status
from exporter.contract.manifest import LogPattern, PathGroup
from exporter.contract.status import LaunchCheck
from exporter.launch import collector
from exporter.launch.checks import (
    DEVICES_VARIABLES,
    LEVELS,
    SETTLE_S,
    NodeLaunchFacts,
    WorkerLaunchFacts,
    check_launch,
    is_launch_verified,
)
from exporter.launch.collector import FINAL_INTERVAL_S, POLL_S, LaunchCollector
from exporter.launch.facts_reader import WriteWatch, read_open_gpus, why_not_writable
from exporter.machine.procfs import read_environment
from tests.support.exporter import NODE, SOON_S, FakeClock, make_context, make_manifest, make_task, page_of, until
from tests.support.statuses import worker_status

TIMEOUT_S = 60.0
NODE_IN_ORDER = NodeLaunchFacts(output_dir="/out", output_files=2, expects_progress=True, has_gpus=True)
ALL_CHECKS = tuple(LEVELS)


def worker(rank: int = 0, **changes: Any) -> WorkerLaunchFacts:
    """A worker that passes every check, with its own GPU."""
    facts = WorkerLaunchFacts(
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
    return dataclasses.replace(facts, **changes)


def ended(rank: int, reason: str, evidence: str = "") -> WorkerLaunchFacts:
    return worker(rank, up=False, reason=reason, evidence=evidence, devices=None, device_files=None)


def checks_of(
    *workers: WorkerLaunchFacts, node: NodeLaunchFacts = NODE_IN_ORDER, elapsed_s: float = 10.0, over: bool = False
) -> dict[str, LaunchCheck]:
    checks = check_launch(workers, node, elapsed_s=elapsed_s, launch_timeout_s=TIMEOUT_S, is_over=over)
    return {check.name: check for check in checks}


def test_a_complete_launch_passes_every_check_in_order() -> None:
    checks = checks_of(worker(0), worker(1))
    assert tuple(checks) == ALL_CHECKS
    assert all(check.passed is True and not check.lacking for check in checks.values())
    assert is_launch_verified(checks.values())
    assert checks["processes"].detail == "2 of 2 workers started"


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
        ("count", worker(1, up=False), "its process no longer exists"),
        ("count", worker(1, pid=100), "process 100 is also counted for worker_w0"),
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
        ("gpu_use", worker(1, device_files=0), "none of its processes has opened a GPU"),
        ("logs", worker(1, log_files=0, log_bytes=0), "it has no log file"),
        ("log_lines", worker(1, log_bytes=0), "its log is empty"),
        ("progress", worker(1, items=None), "no position was found in its log"),
    ],
)
def test_a_problem_of_a_worker_is_awaited_and_then_reported(name: str, second: WorkerLaunchFacts, found: str) -> None:
    pending = checks_of(worker(0), second)[name]
    assert pending.passed is None
    failed = checks_of(worker(0), second, elapsed_s=TIMEOUT_S)[name]
    assert failed.passed is False
    assert (failed.lacking[-1].worker, failed.lacking[-1].rank, failed.lacking[-1].found) == ("worker_w1", 1, found)
    assert "worker_w1 (rank 1)" in failed.detail
    assert is_launch_verified(checks_of(worker(0), second, elapsed_s=TIMEOUT_S).values()) is (LEVELS[name] == "warning")
    assert checks_of(worker(0), second, over=True)[name].passed is (found == "its process no longer exists")


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("output_dir", NodeLaunchFacts(output_dir="/out", output_problem="/out does not exist")),
        ("output", NodeLaunchFacts(output_dir="/out", output_files=0)),
    ],
)
def test_a_problem_of_the_node_is_awaited_and_then_reported(name: str, node: NodeLaunchFacts) -> None:
    assert checks_of(worker(), node=node)[name].passed is None
    failed = checks_of(worker(), node=node, elapsed_s=TIMEOUT_S)[name]
    assert (failed.passed, failed.lacking[0].worker) == (False, None)


def test_checks_that_do_not_apply_are_left_out() -> None:
    """Example: a job without GPUs, output patterns and progress."""
    checks = checks_of(worker(gpus=(), devices="0", items=None), node=NodeLaunchFacts())
    assert tuple(checks) == ("processes", "count", "logs", "log_lines")
    assert is_launch_verified(checks.values())


def test_services_need_no_progress() -> None:
    engine = worker(1, service=True, items=None)
    assert checks_of(worker(0), engine)["progress"].detail == "1 of 1 workers with a position"
    assert "progress" not in checks_of(engine, elapsed_s=TIMEOUT_S)


def test_only_critical_workers_need_progress() -> None:
    helper = worker(1, critical=False, items=None)
    assert checks_of(worker(0), helper)["progress"].passed is True
    assert "progress" not in checks_of(helper, elapsed_s=TIMEOUT_S)


def test_a_completed_worker_passes_checks_of_running_workers() -> None:
    checks = checks_of(ended(0, "completed"), worker(1))
    assert all(check.passed for check in checks.values())


@pytest.mark.parametrize("reason", ["terminated_peer", "cancelled", "time_limit", "preempted"])
def test_a_worker_ended_from_outside_is_not_a_launch_problem(reason: str) -> None:
    assert checks_of(worker(0), ended(1, reason), over=True)["count"].passed is True


def test_a_worker_counts_as_started_after_the_settling_time() -> None:
    assert checks_of(worker(age_s=SETTLE_S - 1))["count"].passed is None
    assert checks_of(worker(age_s=SETTLE_S))["count"].passed is True
    assert checks_of(worker(age_s=0.5), over=True)["count"].passed is True
    short = check_launch([worker(age_s=1.0)], NODE_IN_ORDER, elapsed_s=1.0, launch_timeout_s=2.0)
    assert all(check.passed for check in short)


def test_an_unreadable_environment_is_awaited_and_never_a_problem() -> None:
    hidden = worker(0, devices=None, device_files=None)
    checks = checks_of(hidden, worker(1))
    assert (checks["gpus"].passed, checks["gpu_use"].passed) == (None, None)
    checks = checks_of(hidden, worker(1), elapsed_s=TIMEOUT_S)
    assert (checks["gpus"].passed, checks["gpu_use"].passed) == (True, True)
    checks = checks_of(hidden, elapsed_s=TIMEOUT_S)
    assert not {"gpus", "gpu_use"} & checks.keys()
    assert is_launch_verified(checks.values())


def test_gpus_of_a_worker_that_ended_unseen_are_not_confirmed() -> None:
    assert not {"gpus", "gpu_use"} & checks_of(ended(0, "completed")).keys()
    checks = checks_of(ended(0, "completed"), worker(1))
    assert [(checks[name].passed, checks[name].unseen) for name in ("gpus", "gpu_use")] == [(True, 1), (True, 1)]
    assert checks["gpu_use"].detail == "1 of 2 workers with a GPU in use"


def test_workers_may_share_gpus_if_the_plan_says_so() -> None:
    pair = worker(0, gpus=(0,), devices="0"), worker(1, gpus=(0,), devices="0")
    assert checks_of(*pair)["gpus"].passed is True


def test_processes_that_select_by_rank_see_all_gpus_of_their_worker() -> None:
    """As those of deepspeed and MPI do."""

    def process(rank: int, devices: str = "0,1") -> WorkerLaunchFacts:
        return worker(rank, worker=f"worker_w{rank // 2}", visible_gpus=2, devices=devices)

    others = process(2, "2,3"), process(3, "2,3")
    assert checks_of(process(0), process(1), *others)["gpus"].passed is True
    assert checks_of(process(0, "0"), process(1), *others)["gpus"].lacking[0].found == (
        'CUDA_VISIBLE_DEVICES is "0", 1 device; the plan gives it 2 devices'
    )
    (first, *_) = checks_of(process(0, "1,2"), process(1), *others)["gpus"].lacking
    assert first.found == "it shares device 2 with worker_w1; the plan gives each its own"


def test_attached_workers_that_see_each_others_gpus_are_not_checked() -> None:
    """As those of `CUDA_VISIBLE_DEVICES=0,1 torchrun`; a worker with its own device still is."""
    node = dataclasses.replace(NODE_IN_ORDER, sets_devices=False)
    pair = worker(0, devices="0,1"), worker(1, devices="0,1")
    assert "gpus" not in checks_of(*pair, node=node)
    (wrong,) = checks_of(*pair, worker(2, devices=""), worker(3), node=node)["gpus"].lacking
    assert wrong.worker == "worker_w2"


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
    expects_progress=st.booleans(),
    has_gpus=st.booleans(),
    sets_devices=st.booleans(),
)


@given(st.lists(WORKERS, max_size=4), NODES, st.booleans())
def test_every_check_has_a_result_at_the_end(
    workers: list[WorkerLaunchFacts], node: NodeLaunchFacts, over: bool
) -> None:
    elapsed_s = 0.0 if over else TIMEOUT_S
    for check in check_launch(workers, node, elapsed_s=elapsed_s, launch_timeout_s=TIMEOUT_S, is_over=over):
        assert check.passed is (not check.lacking)
    for check in check_launch(workers, node, elapsed_s=0.0, launch_timeout_s=TIMEOUT_S):
        assert check.passed is not False


# -- reading -------------------------------------------------------------------------------------


def test_open_gpus_are_counted_in_the_whole_process_tree(tmp_path: Path) -> None:
    """A shell starts the program, so the worker process itself has no GPU open."""
    for pid, children, targets in (
        (7, "8", ["/dev/null", "/dev/nvidiactl"]),
        (8, "", ["/dev/nvidia0", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/renderD128", "pipe:[1]"]),
    ):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/task/{pid}/children").write_text(children)
        (tmp_path / f"{pid}/fd").mkdir()
        for number, target in enumerate(targets):
            (tmp_path / f"{pid}/fd/{number}").symlink_to(target)
    assert read_open_gpus(7, str(tmp_path)) == 2
    assert read_open_gpus(9, str(tmp_path)) is None
    assert read_open_gpus(os.getpid()) == 0


def test_the_reason_for_an_unwritable_directory_is_reported(tmp_path: Path, locked: Path) -> None:
    (tmp_path / "file").write_text("")
    assert why_not_writable(tmp_path) is None
    assert why_not_writable(tmp_path / "none") == f"{tmp_path}/none does not exist"
    assert why_not_writable(tmp_path / "file") == f"{tmp_path}/file is not a directory"
    assert why_not_writable(locked) == f"{locked} cannot be written to"


class OtherCollectors:
    """The status as other collectors write it."""

    def __init__(self) -> None:
        self.phase = "running"
        self.workers: dict[int, status.WorkerStatus] = {}
        self.files = 1
        self.read = True
        self.calls = 0
        self.gpus: status.NodeGpus | None = None

    def __call__(self) -> status.NodeStatus:
        self.calls += 1
        read = status.CollectorReads(success=True, duration_s=0.01, last_success=2e9)
        read = read if self.read else status.CollectorReads(success=False)
        return status.NodeStatus(
            job=status.JobStatus(phase=self.phase),
            workers=tuple(self.workers.values()),
            gpus=self.gpus,
            outputs=(status.OutputGroup(group="output", files=self.files, mtime=2e9),),
            collectors=dict.fromkeys(("workers", "logs", "outputs"), read),
        )

    def set_worker(self, rank: int, **changes: Any) -> None:
        """Set the entry of a running worker with progress, and these changes."""
        facts = {"pid": os.getpid(), "start": 1_699_999_990.0, "rss_bytes": None, "items": 3, **changes}
        self.workers[rank] = worker_status(rank, **facts)


def failed(code: int) -> status.WorkerEnd:
    return status.WorkerEnd(reason="app_error", evidence=(f"exit status {code}",))


class Launch:
    """A launch collector that reads this status."""

    def __init__(self, run_dir: Path, *ranks: int, **manifest: Any) -> None:
        tasks = [dataclasses.replace(make_task(rank), gpus=()) for rank in ranks or (0,)]
        self.run_dir, self.clock, self.status = run_dir, FakeClock(), OtherCollectors()
        self.manifest = make_manifest(run_dir, *tasks, **{"groups": (PathGroup("output", ".", "o*"),), **manifest})
        self.create_collector()
        for task in tasks:
            self.status.set_worker(task.rank)
            (run_dir / f"{NODE}_{task.worker}.out").write_text("hello\n")

    def create_collector(self) -> None:
        """Create the collector, as a starting sidecar does."""
        self.collector = LaunchCollector(make_context(self.manifest, self.clock), self.status)

    def read_after(self, after_s: float = 1.0) -> status.Launch:
        self.clock.advance(after_s)
        return self.collector.read()

    def passed(self, snapshot: status.Launch) -> dict[str, bool | None]:
        return {check.name: check.passed for check in snapshot.checks}

    def fault(self, snapshot: status.Launch, name: str) -> str:
        """First problem of a failed check."""
        return next(check for check in snapshot.checks if check.name == name).lacking[0].found


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def test_a_complete_launch_is_verified_and_not_read_again(launch: Launch) -> None:
    assert launch.collector.interval_s == POLL_S
    snapshot = launch.read_after()
    assert (snapshot.verified, snapshot.final) == (True, True)
    names = ("processes", "count", "logs", "log_lines", "output_dir", "output", "progress")
    assert launch.passed(snapshot) == dict.fromkeys(names, True)
    reads = launch.status.calls
    launch.status.workers.clear()
    assert launch.read_after(100) is snapshot
    assert (launch.status.calls, launch.collector.interval_s) == (reads, FINAL_INTERVAL_S)


@pytest.mark.parametrize(("uses", "passed"), [((status.GpuUse(gpu="0", uuid="GPU-0"),), True), ((), None)])
def test_the_gpu_use_of_the_driver_takes_precedence_over_open_devices(
    uses: tuple[status.GpuUse, ...], passed: bool | None, tmp_path: Path
) -> None:
    launch = Launch(tmp_path)
    launch.manifest = dataclasses.replace(launch.manifest, tasks=(make_task(0),))
    launch.status.gpus = status.NodeGpus(driver_state="ok")
    launch.status.set_worker(0, rss_bytes=1, gpu_use=uses)
    launch.create_collector()
    assert launch.passed(launch.read_after())["gpu_use"] is passed
    launch.status.set_worker(0, rss_bytes=1, gpu_use=uses, gpu_misplaced="uses GPU 1, the plan gives it GPU 0")
    assert "uses GPU 1" in launch.fault(launch.read_after(TIMEOUT_S), "gpus")


@pytest.mark.parametrize("phase", ["running", "completing"])
def test_there_are_no_checks_before_the_other_collectors_have_read(launch: Launch, phase: str) -> None:
    launch.status.read, launch.status.phase = False, phase
    snapshot = launch.read_after(1000)
    assert (snapshot.verified, snapshot.final, snapshot.checks) == (False, False, ())
    launch.status.read = True
    assert launch.read_after().final


def test_warnings_are_awaited_after_the_launch_is_verified(launch: Launch) -> None:
    launch.status.files = 0
    snapshot = launch.read_after()
    assert (snapshot.verified, snapshot.final, launch.passed(snapshot)["output"]) == (True, False, None)
    launch.status.set_worker(0, up=False, exit=failed(1))
    snapshot = launch.read_after(TIMEOUT_S)
    assert (snapshot.verified, snapshot.final) == (True, True)
    assert (launch.passed(snapshot)["count"], launch.passed(snapshot)["output"]) == (True, False)


def test_a_launch_with_a_missing_worker_is_final_after_its_timeout(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 0, 1)
    del launch.status.workers[1]
    snapshot = launch.read_after()
    assert (snapshot.verified, snapshot.final, launch.passed(snapshot)["processes"]) == (False, False, None)
    snapshot = launch.read_after(TIMEOUT_S)
    assert (snapshot.verified, snapshot.final, launch.passed(snapshot)["processes"]) == (False, True, False)
    launch.status.set_worker(1)
    assert launch.read_after() is snapshot


def test_a_stop_of_the_job_does_not_count_for_the_launch(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 0, 1)
    del launch.status.workers[1]
    waits = (10.0, 3600.0, TIMEOUT_S / 2, TIMEOUT_S / 2)
    assert [launch.read_after(wait_s).final for wait_s in waits] == [False, False, False, True]


@pytest.mark.parametrize("phase", ["completing", "finished"])
def test_a_launch_is_final_when_the_job_ends_early(phase: str, launch: Launch) -> None:
    launch.status.set_worker(0, up=False, exit=failed(3))
    assert not launch.read_after().final
    launch.status.phase = phase
    snapshot = launch.read_after()
    assert (snapshot.verified, snapshot.final) == (False, True)
    assert launch.fault(snapshot, "count") == "it has ended: app_error (exit status 3)"


@pytest.mark.parametrize("answers", [True, False])
def test_the_last_check_of_the_output_waits_out_a_short_silence(
    answers: bool, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(WriteWatch, "poll", lambda *_: gate.wait(2 * SOON_S) and None)
    assert launch.passed(launch.read_after())["output_dir"] is None
    if answers:
        threading.Timer(0.3, gate.set).start()
    else:
        monkeypatch.setattr(collector, "HANG_REPORT_S", 0.0)  # what it is after so long
    launch.status.phase = "completing"
    snapshot = launch.read_after()
    gate.set()
    assert (snapshot.final, launch.passed(snapshot)["output_dir"]) == (True, answers)
    assert answers or "does not answer: its file system, /" in launch.fault(snapshot, "output_dir")


def test_old_output_does_not_count(launch: Launch) -> None:
    launch.collector = LaunchCollector(make_context(launch.manifest, launch.clock, start=2e9 + 100), launch.status)
    assert launch.passed(launch.read_after())["output"] is None


def test_output_is_not_expected_before_its_writer_starts(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    engine, benchmark = dataclasses.replace(make_task(), service=True), make_task(1, role="benchmark")
    launch.manifest = dataclasses.replace(launch.manifest, tasks=(engine, dataclasses.replace(benchmark, later=True)))
    launch.status.files = 0
    launch.create_collector()
    assert "output" not in launch.passed(launch.read_after())
    launch.status.files = 1
    assert launch.passed(launch.read_after())["output"] is True
    launch.manifest = dataclasses.replace(launch.manifest, tasks=(engine, benchmark))
    launch.status.files = 0
    launch.create_collector()
    assert launch.passed(launch.read_after())["output"] is None


def test_only_the_first_node_checks_the_output(launch: Launch) -> None:
    launch.collector = LaunchCollector(make_context(launch.manifest, launch.clock, node_index=1), launch.status)
    assert "output" not in launch.passed(launch.read_after())


def test_progress_is_checked_only_if_it_can_be_known(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.status.set_worker(0, items=None)
    assert "progress" not in launch.passed(launch.read_after())
    for settings in ({"total_items": 10}, {"progress": (LogPattern("items", "at (\\d+)"),)}):
        launch.manifest = dataclasses.replace(launch.manifest, **settings)
        launch.create_collector()
        assert launch.passed(launch.read_after())["progress"] is None


def test_progress_of_a_benchmark_is_not_expected_from_its_services(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    engine, benchmark = make_task(), make_task(1, role="benchmark")
    benchmark = dataclasses.replace(benchmark, later=True)
    for served in (engine, dataclasses.replace(engine, service=True)):
        launch.manifest = make_manifest(tmp_path, served, benchmark)
        launch.create_collector()
        launch.status.set_worker(0, items=None)
        launch.status.set_worker(1, items=5)
        assert "progress" not in launch.passed(launch.read_after())
    launch.manifest = dataclasses.replace(launch.manifest, total_items=10)
    launch.create_collector()
    assert "progress" not in launch.passed(launch.read_after()), "it serves"


def test_logs_of_the_current_run_and_of_the_log_pattern_count(tmp_path: Path) -> None:
    launch = Launch(tmp_path, logs=PathGroup("log", ".", "mine_*.log"))
    launch.status.set_worker(0, restarts=1)
    assert launch.passed(launch.read_after())["logs"] is None
    (tmp_path / "mine_worker_0.log").write_text("")
    snapshot = launch.read_after()
    assert (launch.passed(snapshot)["logs"], launch.passed(snapshot)["log_lines"]) == (True, None)
    (tmp_path / f"{NODE}_worker_w0_r1.out").write_text("x")
    assert launch.passed(launch.read_after())["log_lines"] is True


def test_a_restarted_sidecar_keeps_the_result_of_this_attempt(launch: Launch) -> None:
    snapshot = launch.read_after()
    (launch.run_dir / run_files.STATUS_DIR).mkdir()
    path = launch.run_dir / run_files.STATUS_DIR / f"{NODE}.json"
    launch.status.workers.clear()
    for document, is_kept in (
        ({"attempt": 0, "launch": snapshot.to_json()}, True),
        ({"attempt": 1, "launch": snapshot.to_json()}, False),
        ({"attempt": 0, "launch": {"verified": 1}}, False),
        ({"attempt": 0}, False),
    ):
        run_files.write_json(path, document)
        launch.create_collector()
        assert (launch.read_after().verified, launch.collector.read().final) == (is_kept, is_kept)


def process_with(**devices: str) -> "subprocess.Popen[bytes]":
    """A process that waits for standard input, with these variables for devices in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in DEVICES_VARIABLES} | devices
    process = subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE)
    until(lambda: read_environment(process.pid, ()) is not None, "its environment after execve")
    return process


def test_the_launch_time_of_an_attached_job_counts_from_the_attachment(tmp_path: Path) -> None:
    """Such a job may have run for days, and chooses its GPUs itself."""
    launch = Launch(tmp_path)
    launch.manifest = make_manifest(tmp_path, make_task(0), attached=True, groups=())
    launch.clock.advance(1e6)
    launch.create_collector()
    with process_with() as process:
        launch.status.set_worker(0, pid=process.pid, rss_bytes=1, items=None, up=False)
        snapshot = launch.read_after()
        assert (snapshot.final, launch.passed(snapshot)["count"]) == (False, None)
        launch.status.set_worker(0, pid=process.pid, rss_bytes=1, items=None)
        snapshot = launch.read_after()
        assert snapshot.verified
        assert "gpus" not in snapshot.checks
        snapshot = launch.read_after(TIMEOUT_S)
        assert (snapshot.final, launch.passed(snapshot)["gpu_use"]) == (True, False)


@pytest.mark.parametrize(("attached", "passed"), [(False, True), (True, None)])
def test_an_unknown_output_directory_of_an_attached_job_is_not_checked(
    attached: bool, passed: bool | None, tmp_path: Path
) -> None:
    launch = Launch(tmp_path, groups=(PathGroup("output", ".", None),), attached=attached)
    assert launch.passed(launch.read_after(TIMEOUT_S)).get("output_dir") is passed


CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("vendor", "devices", "found"),
    [
        ("nvidia", {CUDA: "0"}, None),
        ("nvidia", {CUDA: "0,1"}, 'CUDA_VISIBLE_DEVICES is "0,1", 2 devices; the plan gives it 1 device (GPU 0)'),
        ("nvidia", {CUDA: ""}, 'CUDA_VISIBLE_DEVICES is "", 0 devices; the plan gives it 1 device (GPU 0)'),
        ("nvidia", {}, "CUDA_VISIBLE_DEVICES is not set in its environment: it sees every GPU of the node"),
        ("nvidia", {ROCR: "0"}, "CUDA_VISIBLE_DEVICES is not set in its environment: it sees every GPU of the node"),
        ("amd", {ROCR: "3"}, None),
        (None, {ROCR: "3"}, None),
        ("amd", {ROCR: "0,1,2,3", CUDA: "3"}, None),
        ("amd", {ROCR: "0,1", HIP: "1"}, None),
        ("amd", {ROCR: "0,1"}, 'ROCR_VISIBLE_DEVICES is "0,1", 2 devices; the plan gives it 1 device (GPU 0)'),
    ],
    ids=["one", "two", "none", "unset", "amd's", "amd", "unknown", "amd narrowed", "hip", "amd two"],
)
def test_devices_are_read_from_the_environment_of_the_process(
    vendor: str | None, devices: dict[str, str], found: str | None, tmp_path: Path
) -> None:
    launch = Launch(tmp_path)
    launch.status.gpus = status.NodeGpus(vendor=vendor)
    launch.manifest = make_manifest(tmp_path, make_task(0), groups=())
    launch.create_collector()
    with process_with(**devices) as process:
        launch.status.set_worker(0, pid=process.pid, rss_bytes=1)
        snapshot = launch.read_after(TIMEOUT_S)
    assert (launch.passed(snapshot)["gpus"], launch.passed(snapshot)["gpu_use"]) == (found is None, False)
    assert found is None or launch.fault(snapshot, "gpus") == found


def test_the_environment_of_a_process_outside_this_namespace_is_not_read(tmp_path: Path) -> None:
    """In another pid namespace, the pid belongs to another process."""
    launch = Launch(tmp_path)
    launch.manifest = make_manifest(tmp_path, make_task(0), groups=())
    launch.create_collector()
    assert "gpus" not in launch.read_after(TIMEOUT_S).checks


def test_a_check_without_a_result_has_no_sample(launch: Launch) -> None:
    launch.status.files = 0
    page = page_of(launch.collector, launch.read_after())
    assert 'gpujob_launch_check{check="processes"} 1' in page
    assert 'check="output"}' not in page
    assert "gpujob_launch_verified 1\n" in page
    assert 'gpujob_launch_check{check="output"} 0' in page_of(launch.collector, launch.read_after(TIMEOUT_S))
