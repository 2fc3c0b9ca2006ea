"""The workers of a node, with real wrappers and real processes."""

import ctypes
import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import CollectorContext
from exporter.collecting.published import NodeGpuUse, WorkerProcesses
from exporter.contract import run_files
from exporter.contract.clock import SystemClock
from exporter.contract.manifest import PathGroup, Task
from exporter.contract.process_identity import read_start_ticks
from exporter.contract.status import WorkerEnd, WorkerStatus
from exporter.gpus.records import JobGpus
from exporter.logs.log_files_reader import LogFinder
from exporter.machine.kernel_log import KernelEvent, KernelLog, KernelXid, OomVictim
from exporter.machine.process_tree import ProcessTree
from exporter.workers.collector import (
    CPU,
    EXITS,
    LAST_CODE,
    LAST_SIGNAL,
    LAST_TIME,
    OPEN_FILES,
    PSS,
    RESTARTS,
    RESTARTS_LEFT,
    RSS,
    START,
    STATE,
    UP,
    WorkersCollector,
)
from exporter.workers.exit_reason import OOM_BURST_S, REASONS
from exporter.workers.runs_reader import NO_RECORD_GRACE_S, NOTICE_GRACE_S, QUICK_END_S, STATUS_GRACE_S, WorkerReading
from tests.support.exporter import (
    NODE,
    FakeClock,
    Wrappers,
    make_context,
    make_identity,
    make_manifest,
    make_task,
    page_of,
    publisher,
    samples_of,
    until,
)
from tests.support.statuses import described, worker_of

TASK = make_task(0)
LABELS = 'worker="worker_w0",role="worker",rank="0"'


def make_collector(context: CollectorContext) -> WorkersCollector:
    return WorkersCollector(context, publisher(WorkerProcesses()), publisher(JobGpus()), publisher(NodeGpuUse()))


class CollectedWorker:
    """A collector with a fake clock over the run directory of real wrappers."""

    def __init__(self, run_dir: Path, *tasks: Task) -> None:
        self.clock = FakeClock(time.time())
        self.collector = make_collector(make_context(make_manifest(run_dir, *tasks), self.clock, end=None))

    def facts(self) -> WorkerReading:
        """The first worker from one read."""
        return self.collector.read().workers[0]

    def page(self) -> str:
        return page_of(self.collector, self.collector.read())

    def status(self) -> WorkerStatus:
        """The first worker as the status shows it."""
        return worker_of(described(self.collector, self.collector.read()))

    def events(self) -> list[tuple[str, str]]:
        return [(event.event, event.detail) for event in self.collector.read().events]


@pytest.fixture
def collected(wrappers: Wrappers) -> CollectedWorker:
    return CollectedWorker(wrappers.run_dir, TASK)


def last_end(facts: WorkerReading) -> tuple[bool, str, str, int | None, int | None]:
    """Up, state, and reason, code and signal of the last end."""
    last = facts.exits.last[-1]
    return facts.up, facts.state, last.reason, last.code, last.signal


def test_a_worker_without_a_record_is_not_found(collected: CollectedWorker) -> None:
    page = collected.page()
    assert samples_of(page, UP) == {LABELS: 0}
    assert samples_of(page, STATE)[f'{LABELS},state="not_found"'] == 1
    assert samples_of(page, EXITS) == {f'{LABELS},reason="{reason}"': 0 for reason in REASONS}
    assert samples_of(page, START) == samples_of(page, CPU) == samples_of(page, LAST_TIME) == {}


def test_a_missing_records_folder_is_not_an_error(tmp_path: Path) -> None:
    assert not CollectedWorker(tmp_path, TASK).facts().up


def test_a_running_worker_is_up(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    facts = until(lambda: (facts := collected.facts()).state == "sleeping" and facts, "sleep to sleep")
    assert facts.up
    assert facts.pid == record["pid"]
    assert facts.start == pytest.approx(time.time(), abs=20)
    assert (facts.sample.children, facts.sample.threads) == (0, 1)
    assert facts.exits.last == ()
    page = collected.page()
    assert samples_of(page, UP) == {LABELS: 1}
    assert samples_of(page, STATE)[f'{LABELS},state="sleeping"'] == 1
    assert sum(samples_of(page, STATE).values()) == 1
    assert samples_of(page, START) == {LABELS: record["start"]}
    assert samples_of(page, RSS)[LABELS] > 100_000
    assert collected.events() == [("worker started", f"pid {record['pid']}")]


def test_a_worker_that_exits_with_0_has_completed(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrappers.start(TASK, "true").wait()
    assert last_end(collected.facts()) == (False, "dead", "completed", 0, None)
    page = collected.page()
    assert samples_of(page, EXITS)[f'{LABELS},reason="completed"'] == 1
    assert sum(samples_of(page, EXITS).values()) == 1
    assert samples_of(page, LAST_CODE) == {LABELS: 0}
    assert samples_of(page, LAST_SIGNAL) == {}
    assert list(samples_of(page, LAST_TIME)) == [f'{LABELS},reason="completed"']
    assert samples_of(page, RSS) == {}


def test_exit_3_is_an_app_error(wrappers: Wrappers, collected: CollectedWorker) -> None:
    assert wrappers.start(TASK, "sh", "-c", "exit 3").wait() == 3
    assert last_end(collected.facts()) == (False, "dead", "app_error", 3, None)
    end = wrappers.record(TASK, "exit")["end"]
    assert collected.status().exits == (
        WorkerEnd(reason="app_error", code=3, time=end, restart=0, evidence=("exit status 3",)),
    )
    assert collected.status().exit == collected.status().exits[0]


def test_sigkill_without_evidence_is_unknown(wrappers: Wrappers, collected: CollectedWorker) -> None:
    assert wrappers.start(TASK, "sh", "-c", "kill -KILL $$").wait() == -signal.SIGKILL
    assert last_end(collected.facts()) == (False, "dead", "killed_unknown", None, signal.SIGKILL)
    assert samples_of(collected.page(), LAST_SIGNAL) == {LABELS: signal.SIGKILL}
    assert [end.signal for end in collected.status().exits] == ["SIGKILL"]


def test_an_oom_kill_in_the_record_is_the_reason(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrappers.start(TASK, "sh", "-c", "kill -KILL $$").wait()
    run_files.write_json(wrappers.path(TASK, "exit"), {**wrappers.record(TASK, "exit"), "oom_kills": 1})
    assert collected.facts().exits.last[-1].reason == "host_oom"


def end_with_oom_kill(wrappers: Wrappers, task: Task, command: str, after: float | None = None) -> float:
    """End a worker in a cgroup with an OOM kill, a second ``after`` another one whatever a busy machine takes."""
    wrappers.start(task, "sh", "-c", command).wait()
    record = wrappers.record(task, "exit")
    end = float(record["end"] if after is None else after + 1.0)
    run_files.write_json(wrappers.path(task, "exit"), {**record, "end": end, "oom_kills": 1})
    return end


@pytest.mark.parametrize(
    ("victim_ends", "reason"), [("first", "terminated_peer"), ("later", "terminated_peer"), ("never", "host_oom")]
)
def test_an_oom_kill_in_a_shared_cgroup_waits_for_the_end_of_its_victim(
    wrappers: Wrappers, victim_ends: str, reason: str
) -> None:
    victim = make_task(1)
    collected = CollectedWorker(wrappers.run_dir, TASK, victim)
    first = end_with_oom_kill(wrappers, victim, "kill -KILL $$") if victim_ends == "first" else None
    end = end_with_oom_kill(wrappers, TASK, "kill -TERM $$", first)
    facts = collected.facts()
    known = [ended.reason for ended in facts.exits.last]
    assert (facts.up, known) == (False, [reason] if victim_ends == "first" else []), "its peer may be the victim"
    if victim_ends == "later":
        end_with_oom_kill(wrappers, victim, "kill -KILL $$", end)
        collected.collector.read()
    elif victim_ends == "never":
        collected.clock.advance(OOM_BURST_S + 1)
    assert collected.facts().exits.last[-1].reason == reason


def lose_peers(wrappers: Wrappers, *tasks: Task) -> None:
    """End these workers one after the other: the first fails, and the others lose it."""
    wrappers.start(tasks[0], "sh", "-c", "exit 3").wait()
    for task in tasks[1:]:
        wrappers.start(task, "sh", "-c", "echo 'Connection reset by peer' >&2; exit 1").wait()


def test_workers_that_end_in_the_same_read_as_the_one_they_lost_are_its_peers(wrappers: Wrappers) -> None:
    """So a restarted sidecar finds the reasons that the earlier one found, whatever the order of the ranks."""
    first, failed, last = (make_task(rank) for rank in range(3))
    lose_peers(wrappers, failed, last, first)
    found = CollectedWorker(wrappers.run_dir, first, failed, last).collector.read()
    assert [facts.exits.last[-1].reason for facts in found.workers] == [
        "terminated_peer",
        "app_error",
        "terminated_peer",
    ]
    ends = [event.worker for event in found.events if event.event == "worker ended"]
    assert ends == ["worker_w1", "worker_w2", "worker_w0"]


def stop_for(run_dir: Path, rank: int, at: float) -> None:
    """Write the launcher's notice that it stops the job for this worker."""
    notice: dict[str, object] = {"reason": "terminated_peer", "cause": f"rank {rank} ended", "time": at, "rank": rank}
    run_files.write_job_state(str(run_dir), "completing", {**notice, "restart": 0})


@pytest.mark.parametrize(("named", "reason"), [(300, "terminated_peer"), (TASK.rank, "app_error"), (None, "app_error")])
def test_a_worker_that_lost_a_peer_waits_for_the_notice_that_names_it(
    named: int | None, reason: str, wrappers: Wrappers
) -> None:
    """A sidecar has no records of other nodes, and a whole job loses the worker that failed."""
    wrappers.start(TASK, "sh", "-c", "echo 'Connection reset by peer' >&2; exit 1").wait()
    collected = CollectedWorker(wrappers.run_dir, TASK)
    facts = collected.facts()
    assert (facts.up, facts.exits.counts) == (False, {}), "a count never goes down"
    if named is None:
        collected.clock.advance(NOTICE_GRACE_S + 1)
    else:
        stop_for(wrappers.run_dir, named, collected.clock.now)
    assert collected.facts().exits.counts == {reason: 1}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo 'ValueError: bad shard' >&2", "app_error"),
        ("echo 'Connection reset by peer'; echo 'torch.OutOfMemoryError: CUDA out of memory.' >&2", "cuda_oom"),
    ],
)
def test_a_worker_whose_own_error_ended_it_waits_for_no_notice(
    program: str, reason: str, wrappers: Wrappers, collected: CollectedWorker
) -> None:
    wrappers.start(TASK, "sh", "-c", f"{program}; exit 1").wait()
    assert collected.facts().exits.counts == {reason: 1}


def test_one_of_the_same_node_for_which_the_job_stops_explains_no_earlier_loss(wrappers: Wrappers) -> None:
    later = make_task(1)
    wrappers.start(TASK, "sh", "-c", "echo 'Connection reset by peer' >&2; exit 1").wait()
    wrappers.start(later, "sh", "-c", "exit 3").wait()
    stop_for(wrappers.run_dir, later.rank, time.time())
    assert CollectedWorker(wrappers.run_dir, TASK, later).facts().exits.counts == {"app_error": 1}


def test_a_restarted_sidecar_finds_the_victim_that_explains_an_earlier_end(wrappers: Wrappers) -> None:
    victim = make_task(1)
    end_with_oom_kill(wrappers, victim, "kill -KILL $$", end_with_oom_kill(wrappers, TASK, "kill -TERM $$"))
    collected = CollectedWorker(wrappers.run_dir, TASK, victim)
    collected.clock.advance(OOM_BURST_S + 60)
    found = collected.collector.read()
    assert [facts.exits.last[-1].reason for facts in found.workers] == ["terminated_peer", "host_oom"]


def test_the_end_of_the_log_explains_the_exit(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrappers.start(TASK, "sh", "-c", "echo 'RuntimeError: CUDA out of memory.' >&2; exit 1").wait()
    assert collected.facts().exits.last[-1].reason == "cuda_oom"


def test_the_errors_of_earlier_runs_in_a_log_of_all_runs_explain_nothing(wrappers: Wrappers) -> None:
    """The first of them is of an earlier job, and the last run writes the log anew."""
    collected, log = CollectedWorker(wrappers.run_dir, TASK), wrappers.run_dir / "worker_0.log"
    manifest = make_manifest(wrappers.run_dir, TASK, logs=PathGroup("log", ".", "*.log"))
    collected.collector = make_collector(make_context(manifest, collected.clock, end=None))
    failed = "echo 'torch.OutOfMemoryError: CUDA out of memory.'"
    log.write_text("Loading the model\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    os.utime(log, (1.0, 1.0))
    collected.facts()
    ends = []
    for restart, command in enumerate(
        (
            f"echo starting >> {log}; kill -KILL $$",
            f"{failed} >> {log}; exit 1",
            f"echo starting >> {log}; kill -KILL $$",
            f"(seq 100; {failed}) > {log}; exit 1",
        )
    ):
        # The time of a write may be that of the last tick of the kernel.
        wrappers.start(TASK, "sh", "-c", f"sleep 0.1; {command}", restart=restart).wait()
        ends.append(collected.facts().exits.last[-1].reason)
    assert ends == ["killed_unknown", "cuda_oom", "killed_unknown", "cuda_oom"]


def test_a_later_sidecar_takes_no_text_of_the_run_for_that_of_an_earlier_one(wrappers: Wrappers) -> None:
    """The clock was set back since the run began."""
    collected, log = CollectedWorker(wrappers.run_dir, TASK), wrappers.run_dir / "worker_0.log"
    manifest = make_manifest(wrappers.run_dir, TASK, logs=PathGroup("log", ".", "*.log"))
    collected.clock.advance(-3600)
    os.mkfifo(wrappers.run_dir / "go")
    collected.collector = make_collector(make_context(manifest, collected.clock, end=None))
    failed = f"echo 'torch.OutOfMemoryError: CUDA out of memory.' > {log}; touch {wrappers.run_dir}/failed"
    process = wrappers.start(
        TASK, "sh", "-c", f"{failed}; read _ < {wrappers.run_dir}/go; echo 'the end' >> {log}; exit 1"
    )
    until((wrappers.run_dir / "failed").exists, "the error")
    wrappers.record(TASK, "start")
    os.utime(log, (collected.clock.now, collected.clock.now))
    assert collected.facts().up
    (wrappers.run_dir / "go").write_text("now\n")
    process.wait()
    assert collected.facts().exits.last[-1].reason == "cuda_oom"


@pytest.mark.parametrize(
    ("set_back_s", "after_s", "reason"),
    [(0.0, -2.0, "cuda_oom"), (0.0, -100.0, "app_error"), (3600.0, 1.0, "cuda_oom"), (3600.0, -100.0, "app_error")],
)
def test_a_log_explains_an_end_although_its_time_is_before_the_start(
    wrappers: Wrappers, set_back_s: float, after_s: float, reason: str
) -> None:
    """The clock of the file server may be behind, and that of the node may have been set back."""
    manifest = make_manifest(wrappers.run_dir, TASK, logs=PathGroup("log", ".", "*.log"))
    collector = make_collector(make_context(manifest, ClockThatWasSetBack(set_back_s), end=None))
    log = wrappers.run_dir / "worker_0.log"
    wrappers.start(TASK, "sh", "-c", f"echo 'torch.OutOfMemoryError: CUDA out of memory.' > {log}; exit 1").wait()
    written = wrappers.record(TASK, "start")["start"] - set_back_s + after_s
    os.utime(log, (written, written))
    assert collector.read().workers[0].exits.last[-1].reason == reason


def test_a_hanging_log_directory_hides_no_worker(wrappers: Wrappers, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest(wrappers.run_dir, TASK, logs=PathGroup("log", ".", "*.log"))
    collected, answers = CollectedWorker(wrappers.run_dir, TASK), threading.Event()
    context = make_context(manifest, collected.clock, end=None)
    collected.collector = make_collector(context)
    monkeypatch.setattr(LogFinder, "find", lambda _: answers.wait(60) and {})
    try:
        with ThreadPoolExecutor(1) as thread:
            try:
                assert not thread.submit(collected.facts).result(20).up
                wrappers.start(TASK, "true").wait()
                assert last_end(thread.submit(collected.facts).result(20))[2] == "completed"
            finally:
                answers.set()
    finally:
        context.files.close()


def test_a_missing_command_has_the_reason_launch_failed(wrappers: Wrappers, collected: CollectedWorker) -> None:
    assert wrappers.start(TASK, "/no/such/program").wait() == 127
    assert last_end(collected.facts()) == (False, "dead", "launch_failed", 127, None)
    (evidence,) = collected.facts().exits.last[-1].evidence
    assert evidence == "cannot start '/no/such/program': No such file or directory"


def test_a_crash_within_50_ms_is_reported(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrappers.start(TASK, "sh", "-c", "ulimit -c 0; sleep 0.05; kill -SEGV $$").wait()
    assert last_end(collected.facts()) == (False, "dead", "crashed_signal", None, signal.SIGSEGV)
    assert samples_of(collected.page(), START) == {LABELS: wrappers.record(TASK, "start")["start"]}
    assert [kind for kind, _ in collected.events()] == ["worker started", "worker ended"]


def test_a_restarted_worker_counts_both_runs(wrappers: Wrappers, collected: CollectedWorker) -> None:
    burn = "import time\nwhile time.process_time() < 0.1: pass\ntime.sleep(60)"
    wrappers.start(TASK, sys.executable, "-I", "-c", burn)
    worker = wrappers.record(TASK, "start")["pid"]
    before = until(lambda: (cpu_s := collected.facts().usage.cpu_s or 0) >= 0.05 and cpu_s, "some CPU time")
    os.kill(worker, signal.SIGKILL)
    first_end = wrappers.record(TASK, "exit")["end"]
    assert collected.facts().exits.last[-1].reason == "killed_unknown"
    wrappers.start(TASK, "sleep", "60", restart=1)
    start = wrappers.record(TASK, "start", 1)["start"]
    facts = collected.facts()
    assert (facts.up, facts.restart, facts.start) == (True, 1, start)
    assert facts.usage.cpu_s is not None
    assert facts.usage.cpu_s >= before
    page = collected.page()
    assert samples_of(page, RESTARTS) == {LABELS: 1}
    assert samples_of(page, EXITS)[f'{LABELS},reason="killed_unknown"'] == 1
    assert samples_of(page, LAST_TIME) == {f'{LABELS},reason="killed_unknown"': first_end}
    assert collected.status().exit is None, "the current run has not ended"
    assert [kind for kind, _ in collected.events()] == ["worker started", "worker ended", "worker restarted"]


def test_a_later_sidecar_counts_the_runs_that_ended_before_it(wrappers: Wrappers, collected: CollectedWorker) -> None:
    written = wrappers.run_dir / "written"
    work = (
        "import sys, time\nwhile time.process_time() < 0.1: pass\n"
        "with open(sys.argv[1], 'wb') as out: out.write(bytes(1 << 20))\n"
        "print(1, flush=True); time.sleep(60)"
    )
    wrappers.start(TASK, sys.executable, "-I", "-c", work, str(written))
    until(lambda: "1" in (wrappers.run_dir / f"{NODE}_worker_w0.out").read_text(), "its work")
    before = collected.facts().usage
    os.kill(wrappers.record(TASK, "start")["pid"], signal.SIGKILL)
    wrappers.record(TASK, "exit")
    wrappers.start(TASK, "sleep", "60", restart=1)
    wrappers.record(TASK, "start", 1)
    after = CollectedWorker(wrappers.run_dir, TASK).facts().usage
    assert (after.cpu_s or 0.0) >= (before.cpu_s or 0.0) > 0.0
    assert (after.io_read_bytes or 0) >= (before.io_read_bytes or 0)
    assert (after.io_write_bytes or 0) >= (before.io_write_bytes or 0)


def test_a_sidecar_that_starts_late_finds_all_runs(wrappers: Wrappers) -> None:
    collected = CollectedWorker(wrappers.run_dir, dataclasses.replace(TASK, restarts=2))
    for restart, code in enumerate((3, 4, 0)):
        wrappers.start(TASK, "sh", "-c", f"exit {code}", restart=restart).wait()
    facts = collected.facts()
    assert [(ended.restart, ended.reason, ended.code) for ended in facts.exits.last] == [
        (0, "app_error", 3),
        (1, "app_error", 4),
        (2, "completed", 0),
    ]
    left = samples_of(collected.page(), RESTARTS_LEFT)
    assert left == {f'{LABELS},reason="app_error"': 1, f'{LABELS},reason="completed"': 0}
    times = samples_of(collected.page(), LAST_TIME)
    assert times == {
        f'{LABELS},reason="app_error"': facts.exits.last[1].end,
        f'{LABELS},reason="completed"': facts.exits.last[2].end,
    }


def test_a_failure_that_stops_the_job_leaves_no_restart(wrappers: Wrappers) -> None:
    """The worker that waits for its restart pages then: the alerts wait for an end without a restart left."""
    collected = CollectedWorker(wrappers.run_dir, dataclasses.replace(TASK, restarts=3))
    for restart, script in enumerate(("exit 3", "kill -SEGV $$")):
        wrappers.start(TASK, "sh", "-c", script, restart=restart).wait()
    left = {f'{LABELS},reason="app_error"': 3, f'{LABELS},reason="crashed_signal"': 2}
    assert samples_of(collected.page(), RESTARTS_LEFT) == left
    notice: dict[str, object] = {"reason": "cancelled", "cause": "scancel", "time": time.time()}
    run_files.write_job_state(str(wrappers.run_dir), "completing", notice)
    assert samples_of(collected.page(), RESTARTS_LEFT) == left
    stop_for(wrappers.run_dir, 300, time.time())
    assert samples_of(collected.page(), RESTARTS_LEFT) == {**left, f'{LABELS},reason="crashed_signal"': 0}


def test_records_of_another_attempt_do_not_count(wrappers: Wrappers) -> None:
    wrappers.start(TASK, "true").wait()
    context = make_context(make_manifest(wrappers.run_dir, TASK), FakeClock(), attempt=1)
    assert make_collector(context).read().workers[0].state == "not_found"


def test_a_node_reads_only_its_own_workers(wrappers: Wrappers) -> None:
    other = make_task(1, node_index=1)
    wrappers.start(other, "true").wait()
    manifest = make_manifest(wrappers.run_dir, TASK, other)
    (first,) = make_collector(make_context(manifest)).read().workers
    (second,) = make_collector(make_context(manifest, node_index=1)).read().workers
    assert (first.task.rank, first.state) == (0, "not_found")
    assert (second.task.rank, second.state) == (1, "dead")


def test_a_worker_in_another_pid_namespace_is_up_until_its_exit_record(wrappers: Wrappers) -> None:
    wrappers.start(TASK, "true").wait()
    exit_record = wrappers.record(TASK, "exit")
    wrappers.path(TASK, "exit").unlink()
    start_record = wrappers.record(TASK, "start")
    elsewhere = {**start_record, "pid_namespace": start_record["pid_namespace"] + 1}
    run_files.write_json(wrappers.path(TASK, "start"), elsewhere)
    collected = CollectedWorker(wrappers.run_dir, TASK)
    for _ in range(2):
        facts = collected.facts()
        assert (facts.up, facts.state, facts.sample) == (True, "running", None)
        collected.clock.advance(10 * NO_RECORD_GRACE_S)
    run_files.write_json(wrappers.path(TASK, "exit"), exit_record)
    assert last_end(collected.facts()) == (False, "dead", "completed", 0, None)


def test_a_reused_pid_is_not_the_worker(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    run_files.write_json(wrappers.path(TASK, "start"), {**record, "pid": os.getpid()})
    try:
        facts = collected.facts()
        assert (facts.up, facts.state, facts.sample) == (False, "dead", None)
    finally:
        run_files.write_json(wrappers.path(TASK, "start"), record)


@pytest.fixture
def reaper() -> Iterator[None]:
    """Make this process the parent of orphans, so that the test decides when they are reaped."""
    libc, set_child_subreaper = ctypes.CDLL(None), 36
    libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    yield
    libc.prctl(set_child_subreaper, 0, 0, 0, 0)


def lose_wrapper(wrappers: Wrappers, collected: CollectedWorker) -> int:
    """Kill the wrapper of a running worker and return the pid of the worker."""
    wrapper = wrappers.start(TASK, "sleep", "60")
    pid: int = wrappers.record(TASK, "start")["pid"]
    until(lambda: collected.facts().up, "the worker")
    wrapper.kill()
    wrapper.wait()
    return pid


@pytest.mark.usefixtures("reaper")
def test_the_kernel_reports_the_end_of_a_worker_without_its_wrapper(
    wrappers: Wrappers, collected: CollectedWorker
) -> None:
    pid = lose_wrapper(wrappers, collected)
    assert collected.facts().up, "the worker still runs"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    facts = collected.facts()
    assert (facts.up, facts.state, facts.exits.last) == (False, "dead", ()), "a notice may still arrive"
    collected.clock.advance(NOTICE_GRACE_S + 1)
    (ended,) = collected.facts().exits.last
    assert (ended.reason, ended.code, ended.signal) == ("killed_unknown", None, signal.SIGKILL)
    assert ended.evidence[:2] == (
        "killed by SIGKILL",
        "its wrapper was killed by SIGKILL and left no record, so the worker ended with it",
    )
    record = wrappers.record(TASK, "exit")
    assert (record["source"], record["signal"], record["pid"]) == ("kernel", signal.SIGKILL, pid), "for the report"


@pytest.mark.usefixtures("reaper")
def test_the_end_of_a_worker_without_its_wrapper_is_unknown_on_old_kernels(
    wrappers: Wrappers, collected: CollectedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "not there")))
    pid = lose_wrapper(wrappers, collected)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not collected.facts().up
    collected.clock.advance(NO_RECORD_GRACE_S + NOTICE_GRACE_S)
    (ended,) = collected.facts().exits.last
    assert (ended.reason, ended.code, ended.signal) == ("killed_unknown", None, None)
    assert ended.evidence == (
        "exit status unknown",
        "its wrapper has ended and left no record, so the worker ended with it",
    )


@pytest.mark.usefixtures("reaper")
def test_a_zombie_worker_has_ended(wrappers: Wrappers, collected: CollectedWorker) -> None:
    pid = lose_wrapper(wrappers, collected)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not collected.facts().up, "its end")
    try:
        for _ in range(3):
            collected.clock.advance(NO_RECORD_GRACE_S)
            facts = collected.facts()
        assert [ended.reason for ended in facts.exits.last] == ["killed_unknown"]
    finally:
        os.waitpid(pid, 0)


def test_the_exit_reason_waits_for_the_record_while_the_wrapper_runs(
    wrappers: Wrappers, collected: CollectedWorker
) -> None:
    """Example: the file system of the run directory is slow to write the record."""
    wrapper = wrappers.start(TASK, "sleep", "60")
    pid = wrappers.record(TASK, "start")["pid"]
    until(lambda: collected.facts().up, "the worker")
    wrapper.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not collected.facts().up, "its end")
    try:
        for _ in range(3):
            collected.clock.advance(NO_RECORD_GRACE_S)
            assert collected.facts().exits.last == ()
    finally:
        wrapper.send_signal(signal.SIGCONT)
    wrapper.wait()
    assert collected.facts().exits.last[-1].signal == signal.SIGKILL


@pytest.mark.usefixtures("reaper")
def test_the_worker_that_caused_the_stop_is_not_its_consequence(wrappers: Wrappers, collected: CollectedWorker) -> None:
    pid = lose_wrapper(wrappers, collected)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    now, cause = collected.clock.now, "worker_w0 rank 0 on node01 ended by killed_unknown"
    about = {"cause": cause, "time": now + 0.2, "rank": 0, "restart": 0}
    notice: dict[str, object] = {"reason": "terminated_peer", **about}
    run_files.write_job_state(str(wrappers.run_dir), "completing", notice)
    collected.clock.advance(1)
    collected.facts()
    collected.clock.advance(NO_RECORD_GRACE_S + 1)
    assert collected.facts().exits.last[-1].reason == "killed_unknown"


def test_a_forwarded_sigterm_after_the_notice_is_a_consequence(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrapper = wrappers.start(TASK, "sleep", "60")
    wrappers.record(TASK, "start")
    notice: dict[str, object] = {"reason": "terminated_peer", "cause": "worker_w1 rank 1 ended", "time": time.time()}
    run_files.write_job_state(str(wrappers.run_dir), "completing", notice)
    wrapper.terminate()
    assert wrapper.wait() == -signal.SIGTERM
    assert last_end(collected.facts()) == (False, "dead", "terminated_peer", None, signal.SIGTERM)
    assert collected.facts().exits.last[-1].evidence[-1] == "the job was being stopped: worker_w1 rank 1 ended"


def test_a_sigterm_without_a_stop_notice_is_a_cancellation(wrappers: Wrappers) -> None:
    wrapper = wrappers.start(TASK, "sleep", "60")
    wrappers.record(TASK, "start")
    wrapper.terminate()
    wrapper.wait()
    collected = CollectedWorker(wrappers.run_dir, TASK)
    collected.clock.now = wrappers.record(TASK, "exit")["end"] + 1.0
    facts = collected.facts()
    assert (facts.up, facts.state, facts.exits.last) == (False, "dead", ()), "a notice may still arrive"
    collected.clock.advance(NOTICE_GRACE_S + 1)
    assert last_end(collected.facts()) == (False, "dead", "cancelled", None, signal.SIGTERM)


def test_the_status_has_the_state_of_the_worker(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    status = until(lambda: (found := collected.status()).state == "sleeping" and found, "sleep to sleep")
    assert (status.up, status.pid, status.restarts, status.exit) == (True, record["pid"], 0, None)


DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1] + ".new", "w") as out:
    out.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""


@pytest.mark.usefixtures("reaper")
def test_a_daemonised_worker_has_completed_and_its_survivors_are_counted(
    wrappers: Wrappers, collected: CollectedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_path = tmp_path / "daemon.pid"
    for name, value in (("GPUJOB_JOB_ID", make_identity().job_id), ("GPUJOB_RANK", "0")):
        monkeypatch.setenv(name, value)
    wrappers.start(TASK, sys.executable, "-c", DAEMON, str(pid_path)).wait()
    daemon = int(until(lambda: pid_path.exists() and pid_path.read_text(), "the daemon"))
    try:
        (ended,) = collected.facts().exits.last
        assert (ended.reason, ended.evidence) == (
            "completed",
            ("exit status 0", "it had left a process in the background"),
        )
        assert wrappers.record(TASK, "found")["survivors"] == 1, "for the report"
    finally:
        os.kill(daemon, signal.SIGKILL)


def attach(run_dir: Path, pid: int, age_s: float = 0.0) -> CollectedWorker:
    """A collector for an attached job whose worker has been found; it started ``age_s`` seconds ago."""
    collected = CollectedWorker(run_dir, TASK)
    manifest = make_manifest(run_dir, TASK, attached=True)
    collected.collector = make_collector(make_context(manifest, collected.clock, end=None))
    record = {"pid": pid, "start_ticks": read_start_ticks(pid), "start": time.time() - age_s, "found_by": "pid_file"}
    run_files.write_json(run_dir / run_files.WORKERS_DIR / "worker_w0_rank0_a0_r0.start.json", record)
    return collected


@pytest.mark.parametrize(
    ("command", "reason", "code", "number"),
    [
        ("read x; exit 0", "completed", 0, None),
        ("read x; exit 3", "app_error", 3, None),
        ("ulimit -c 0; read x; kill -SEGV $$", "crashed_signal", None, signal.SIGSEGV),
    ],
)
def test_the_kernel_reports_how_an_attached_worker_ended(
    wrappers: Wrappers, command: str, reason: str, code: int | None, number: int | None
) -> None:
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE) as process:
        collected = attach(wrappers.run_dir, process.pid)
        assert collected.facts().up
        process.communicate(b"\n")
    assert last_end(collected.facts()) == (False, "dead", reason, code, number)
    assert wrappers.record(TASK, "exit")["source"] == "kernel"


def test_the_end_of_an_attached_worker_is_unknown_on_old_kernels(
    wrappers: Wrappers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "not there")))
    with subprocess.Popen(["sh", "-c", "read x"], stdin=subprocess.PIPE) as process:
        collected = attach(wrappers.run_dir, process.pid)
        assert collected.facts().up
        process.communicate(b"\n")
    collected.facts()
    collected.clock.advance(STATUS_GRACE_S + 1)
    (ended,) = collected.facts().exits.last
    assert (ended.reason, ended.code, ended.signal) == ("killed_unknown", None, None)
    assert ended.evidence[-1] == "it was not started by gpujob, so its status is unknown"


@pytest.mark.usefixtures("reaper")
def test_an_attached_worker_is_followed_when_it_daemonises(wrappers: Wrappers, tmp_path: Path) -> None:
    pid_path = tmp_path / "daemon.pid"
    forks_once = DAEMON.replace("os._exit(0)", "(sys.stdin.readline(), os._exit(0))", 1)
    forks_once = forks_once.replace("if os.fork():\n    os._exit(0)\n", "")
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    program = f"import sys\n{burn}\nsys.stdin.readline()\nsys.argv[1] = {str(pid_path)!r}\n{forks_once}"
    with subprocess.Popen([sys.executable, "-c", program, ""], stdin=subprocess.PIPE) as process:
        collected = attach(wrappers.run_dir, process.pid)
        before = until(lambda: (cpu_s := collected.facts().usage.cpu_s or 0) >= 0.4 and cpu_s, "some CPU time")
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        daemon = int(until(lambda: pid_path.exists() and pid_path.read_text(), "the daemon"))
        until(lambda: (sample := collected.facts().sample) and sample.children, "the daemon to be seen")
        process.communicate(b"\n")
    facts = until(lambda: (found := collected.facts()).pid == daemon and found, "the daemon to be followed")
    assert (facts.up, facts.exits.last) == (True, ())
    assert collected.events()[-1] == ("worker daemonised", f"pid {process.pid} has ended, pid {daemon} continues")
    assert (collected.facts().usage.cpu_s or 0) >= before, "a counter never falls"
    os.kill(daemon, signal.SIGKILL)
    os.waitpid(daemon, 0)
    (ended,) = collected.facts().exits.last
    assert (ended.reason, ended.signal) == ("killed_unknown", signal.SIGKILL)


def test_a_helper_that_outlives_an_attached_worker_is_not_followed(wrappers: Wrappers) -> None:
    command = ["sh", "-c", "setsid sleep 60 >/dev/null & echo $!; read x; exit 0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        collected = attach(wrappers.run_dir, process.pid, age_s=QUICK_END_S + 1)
        until(lambda: (sample := collected.facts().sample) and sample.children, "the helper to be seen")
        process.communicate(b"\n")
    try:
        (ended,) = collected.facts().exits.last
        assert (ended.reason, ended.evidence[-1]) == ("completed", "it had left a process in the background")
    finally:
        os.kill(helper, signal.SIGKILL)


def test_the_kernel_log_is_evidence_and_is_kept_for_the_report(wrappers: Wrappers) -> None:
    kernel = KernelLog(FakeClock(), None, path="/nowhere")
    collected = CollectedWorker(wrappers.run_dir, TASK)
    context = make_context(make_manifest(wrappers.run_dir, TASK), collected.clock, end=None)
    collected.collector = make_collector(dataclasses.replace(context, kernel=kernel))
    wrapper = wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    until(lambda: collected.facts().up, "the worker")
    foreign_event, own_event = OomVictim(1), KernelXid("0000:3b:00", 79, record["pid"])
    kernel.events = tuple(KernelEvent(record["start"] + 1, event) for event in (foreign_event, own_event))
    os.kill(record["pid"], signal.SIGKILL)
    wrapper.wait()
    (ended,) = collected.facts().exits.last
    assert ended.reason == "gpu_fault"
    assert ended.evidence[-1] == f"Xid 79 on the GPU at 0000:3b:00, process {record['pid']}: fallen off the bus"
    assert [fault["xid"] for fault in wrappers.record(TASK, "found")["gpu_faults"]] == [79]


class ClockThatWasSetBack(SystemClock):
    """The clock of the machine, set back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time(self) -> float:
        return super().time() - self._seconds


@pytest.mark.parametrize(("after_s", "reason"), [(1.0, "gpu_fault"), (-10.0, "killed_unknown")])
def test_a_clock_that_was_set_back_hides_no_event_of_a_run(wrappers: Wrappers, after_s: float, reason: str) -> None:
    clock = ClockThatWasSetBack(3600)
    kernel = KernelLog(clock, None, path="/nowhere")
    context = make_context(make_manifest(wrappers.run_dir, TASK), clock, end=None)
    collector = make_collector(dataclasses.replace(context, kernel=kernel))
    wrapper = wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    until(lambda: collector.read().workers[0].up, "the worker")
    xid = KernelXid("0000:3b:00", 79, record["pid"])
    kernel.events = (KernelEvent(record["start"] - 3600 + after_s, xid),)
    os.kill(record["pid"], signal.SIGKILL)
    wrapper.wait()
    (ended,) = collector.read().workers[0].exits.last
    assert ended.reason == reason


def test_a_worker_is_read_later_if_no_file_descriptor_is_free(
    wrappers: Wrappers, collected: CollectedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> ProcessTree:
        raise OSError(errno.EMFILE, "too many open files")

    wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    with monkeypatch.context() as patched:
        patched.setattr("exporter.workers.runs_reader.ProcessTree", refuse)
        facts = collected.facts()
        assert (facts.up, facts.pid, facts.exits.last) == (True, None, ())
    facts = collected.facts()
    assert (facts.up, facts.pid) == (True, record["pid"])


def test_process_details_are_read_less_often(wrappers: Wrappers, collected: CollectedWorker) -> None:
    wrappers.start(TASK, "sleep", "60")
    until(lambda: collected.facts().up, "the worker")
    assert collected.facts().details is None
    collected.clock.advance(5)
    details = collected.facts().details
    assert details is not None
    assert details.open_files is not None
    assert samples_of(collected.page(), OPEN_FILES) == {LABELS: details.open_files}
    assert samples_of(collected.page(), PSS) == {LABELS: details.pss_bytes}
