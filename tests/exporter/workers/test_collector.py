"""The workers of a node, with real wrappers over real processes."""

import ctypes
import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import NodeStatus
from exporter.contract import run_files
from exporter.contract.manifest import Task
from exporter.machine.kernel_log import KernelEvent, KernelLog, KernelXid, OomVictim
from exporter.machine.process_tree import ProcessTree
from exporter.machine.procfs import read_start_ticks
from exporter.workers.collector import (
    CPU,
    EXITS,
    LAST_CODE,
    LAST_SIGNAL,
    LAST_TIME,
    OPEN_FILES,
    PSS,
    RESTARTS,
    RSS,
    START,
    STATE,
    UP,
    WorkersCollector,
)
from exporter.workers.exit_reason import REASONS
from exporter.workers.runs_reader import NO_RECORD_GRACE_S, NOTICE_GRACE_S, STATUS_GRACE_S, WorkerReading
from tests.support.exporter import (
    FakeClock,
    Wrappers,
    make_context,
    make_identity,
    make_manifest,
    make_task,
    page_of,
    samples_of,
    until,
)

TASK = make_task(0)
LABELS = 'worker="worker_w0",role="worker",rank="0"'


class Watched:
    """A collector with a clock that stands still, over the run directory of some wrappers."""

    def __init__(self, run_dir: Path, *tasks: Task) -> None:
        self.clock = FakeClock(time.time())
        self.collector = WorkersCollector(make_context(make_manifest(run_dir, *tasks), self.clock, end=None))

    def facts(self) -> WorkerReading:
        """What a look says of the first worker."""
        return self.collector.read().workers[0]

    def page(self) -> str:
        return page_of(self.collector, self.collector.read())

    def status(self) -> dict[str, Any]:
        """The first worker as the status page shows it."""
        status = NodeStatus()
        self.collector.describe(self.collector.read(), status)
        return status.worker(0)

    def events(self) -> list[tuple[str, str]]:
        return [(event["event"], event["detail"]) for event in self.collector.read().events]


@pytest.fixture
def watched(wrappers: Wrappers) -> Watched:
    return Watched(wrappers.run_dir, TASK)


def outcome(facts: WorkerReading) -> tuple[bool, str, str, int | None, int | None]:
    """Up, state, and reason, code and signal of the last end."""
    last = facts.exits[-1]
    return facts.up, facts.state, last.reason, last.code, last.signal


def test_a_worker_without_a_record_is_not_found(watched: Watched) -> None:
    page = watched.page()
    assert samples_of(page, UP) == {LABELS: 0}
    assert samples_of(page, STATE)[f'{LABELS},state="not_found"'] == 1
    assert samples_of(page, EXITS) == {f'{LABELS},reason="{reason}"': 0 for reason in REASONS}
    assert samples_of(page, START) == samples_of(page, CPU) == samples_of(page, LAST_TIME) == {}


def test_a_folder_that_is_not_there_yet_is_no_failure(tmp_path: Path) -> None:
    assert not Watched(tmp_path, TASK).facts().up


def test_a_running_worker_is_up(wrappers: Wrappers, watched: Watched) -> None:
    wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    facts = until(lambda: (facts := watched.facts()).state == "sleeping" and facts, "sleep to sleep")
    assert facts.up
    assert facts.pid == record["pid"]
    assert facts.start == pytest.approx(time.time(), abs=20)
    assert (facts.sample.children, facts.sample.threads) == (0, 1)
    assert facts.exits == ()
    page = watched.page()
    assert samples_of(page, UP) == {LABELS: 1}
    assert samples_of(page, STATE)[f'{LABELS},state="sleeping"'] == 1
    assert sum(samples_of(page, STATE).values()) == 1
    assert samples_of(page, START) == {LABELS: record["start"]}
    assert samples_of(page, RSS)[LABELS] > 100_000
    assert watched.events() == [("worker started", f"pid {record['pid']}")]


def test_a_worker_that_completes_says_so(wrappers: Wrappers, watched: Watched) -> None:
    wrappers.start(TASK, "true").wait()
    assert outcome(watched.facts()) == (False, "dead", "completed", 0, None)
    page = watched.page()
    assert samples_of(page, EXITS)[f'{LABELS},reason="completed"'] == 1
    assert sum(samples_of(page, EXITS).values()) == 1
    assert samples_of(page, LAST_CODE) == {LABELS: 0}
    assert samples_of(page, LAST_SIGNAL) == {}
    assert list(samples_of(page, LAST_TIME)) == [f'{LABELS},reason="completed"']
    assert samples_of(page, RSS) == {}


def test_exit_3_is_the_programs_own_error(wrappers: Wrappers, watched: Watched) -> None:
    assert wrappers.start(TASK, "sh", "-c", "exit 3").wait() == 3
    assert outcome(watched.facts()) == (False, "dead", "app_error", 3, None)
    assert watched.status()["exit"] == {
        "reason": "app_error",
        "code": 3,
        "signal": None,
        "time": wrappers.record(TASK, "exit")["end"],
        "restart": 0,
        "evidence": ["exit status 3"],
    }


def test_sigkill_without_evidence_is_unknown(wrappers: Wrappers, watched: Watched) -> None:
    assert wrappers.start(TASK, "sh", "-c", "kill -KILL $$").wait() == -signal.SIGKILL
    assert outcome(watched.facts()) == (False, "dead", "killed_unknown", None, signal.SIGKILL)
    assert samples_of(watched.page(), LAST_SIGNAL) == {LABELS: signal.SIGKILL}
    assert watched.status()["exit"]["signal"] == "SIGKILL"


def test_an_oom_kill_in_the_record_is_the_reason(wrappers: Wrappers, watched: Watched) -> None:
    wrappers.start(TASK, "sh", "-c", "kill -KILL $$").wait()
    run_files.write_json(wrappers.path(TASK, "exit"), {**wrappers.record(TASK, "exit"), "oom_kills": 1})
    assert watched.facts().exits[-1].reason == "host_oom"


def test_the_end_of_the_log_is_evidence(wrappers: Wrappers, watched: Watched) -> None:
    wrappers.start(TASK, "sh", "-c", "echo 'RuntimeError: CUDA out of memory.' >&2; exit 1").wait()
    assert watched.facts().exits[-1].reason == "cuda_oom"


def test_a_command_that_does_not_exist_is_a_failed_launch(wrappers: Wrappers, watched: Watched) -> None:
    assert wrappers.start(TASK, "/no/such/program").wait() == 127
    assert outcome(watched.facts()) == (False, "dead", "launch_failed", 127, None)
    (evidence,) = watched.facts().exits[-1].evidence
    assert evidence == "cannot start '/no/such/program': No such file or directory"


def test_a_crash_within_50_ms_is_not_missed(wrappers: Wrappers, watched: Watched) -> None:
    wrappers.start(TASK, "sh", "-c", "ulimit -c 0; sleep 0.05; kill -SEGV $$").wait()
    assert outcome(watched.facts()) == (False, "dead", "crashed_signal", None, signal.SIGSEGV)
    assert samples_of(watched.page(), START) == {LABELS: wrappers.record(TASK, "start")["start"]}
    assert [kind for kind, _ in watched.events()] == ["worker started", "worker ended"]


def test_a_restarted_worker_counts_both_runs(wrappers: Wrappers, watched: Watched) -> None:
    burn = "import time\nwhile time.process_time() < 0.1: pass\ntime.sleep(60)"
    wrappers.start(TASK, sys.executable, "-I", "-c", burn)
    worker = wrappers.record(TASK, "start")["pid"]
    before = until(lambda: (cpu_s := watched.facts().cpu_s or 0) >= 0.05 and cpu_s, "some CPU time")
    os.kill(worker, signal.SIGKILL)
    first_end = wrappers.record(TASK, "exit")["end"]
    assert watched.facts().exits[-1].reason == "killed_unknown"
    wrappers.start(TASK, "sleep", "60", restart=1)
    start = wrappers.record(TASK, "start", 1)["start"]
    facts = watched.facts()
    assert (facts.up, facts.restart, facts.start) == (True, 1, start)
    assert facts.cpu_s is not None
    assert facts.cpu_s >= before
    page = watched.page()
    assert samples_of(page, RESTARTS) == {LABELS: 1}
    assert samples_of(page, EXITS)[f'{LABELS},reason="killed_unknown"'] == 1
    assert samples_of(page, LAST_TIME) == {f'{LABELS},reason="killed_unknown"': first_end}
    assert watched.status()["exit"] is None, "the present run has not ended"
    assert [kind for kind, _ in watched.events()] == ["worker started", "worker ended", "worker restarted"]


def test_a_sidecar_that_starts_late_finds_all_runs(wrappers: Wrappers, watched: Watched) -> None:
    for restart, code in enumerate((3, 4, 0)):
        wrappers.start(TASK, "sh", "-c", f"exit {code}", restart=restart).wait()
    facts = watched.facts()
    assert [(ended.restart, ended.reason, ended.code) for ended in facts.exits] == [
        (0, "app_error", 3),
        (1, "app_error", 4),
        (2, "completed", 0),
    ]
    times = samples_of(watched.page(), LAST_TIME)
    assert times == {
        f'{LABELS},reason="app_error"': facts.exits[1].end,
        f'{LABELS},reason="completed"': facts.exits[2].end,
    }


def test_records_of_another_attempt_do_not_count(wrappers: Wrappers) -> None:
    wrappers.start(TASK, "true").wait()
    context = make_context(make_manifest(wrappers.run_dir, TASK), FakeClock(), attempt=1)
    assert WorkersCollector(context).read().workers[0].state == "not_found"


def test_a_node_watches_its_own_workers_alone(wrappers: Wrappers) -> None:
    other = make_task(1, node_index=1)
    wrappers.start(other, "true").wait()
    manifest = make_manifest(wrappers.run_dir, TASK, other)
    (mine,) = WorkersCollector(make_context(manifest)).read().workers
    (its,) = WorkersCollector(make_context(manifest, node_index=1)).read().workers
    assert (mine.task.rank, mine.state) == (0, "not_found")
    assert (its.task.rank, its.state) == (1, "dead")


def test_a_worker_in_another_pid_namespace_is_believed_until_its_exit_record(wrappers: Wrappers) -> None:
    wrappers.start(TASK, "true").wait()
    exit_record = wrappers.record(TASK, "exit")
    wrappers.path(TASK, "exit").unlink()
    start_record = wrappers.record(TASK, "start")
    elsewhere = {**start_record, "pid_namespace": start_record["pid_namespace"] + 1}
    run_files.write_json(wrappers.path(TASK, "start"), elsewhere)
    watched = Watched(wrappers.run_dir, TASK)
    for _ in range(2):
        facts = watched.facts()
        assert (facts.up, facts.state, facts.sample) == (True, "running", None)
        watched.clock.advance(10 * NO_RECORD_GRACE_S)
    run_files.write_json(wrappers.path(TASK, "exit"), exit_record)
    assert outcome(watched.facts()) == (False, "dead", "completed", 0, None)


def test_a_pid_that_another_process_has_now_is_not_the_worker(wrappers: Wrappers, watched: Watched) -> None:
    wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    run_files.write_json(wrappers.path(TASK, "start"), {**record, "pid": os.getpid()})
    try:
        facts = watched.facts()
        assert (facts.up, facts.state, facts.sample) == (False, "dead", None)
    finally:
        run_files.write_json(wrappers.path(TASK, "start"), record)


@pytest.fixture
def reaper() -> Iterator[None]:
    """Makes this process the parent of orphans, so that a test decides when they are reaped."""
    libc, set_child_subreaper = ctypes.CDLL(None), 36
    libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    yield
    libc.prctl(set_child_subreaper, 0, 0, 0, 0)


def lose_wrapper(wrappers: Wrappers, watched: Watched) -> int:
    """Kill the wrapper of a running worker; gives the worker's pid."""
    wrapper = wrappers.start(TASK, "sleep", "60")
    pid: int = wrappers.record(TASK, "start")["pid"]
    until(lambda: watched.facts().up, "the worker")
    wrapper.kill()
    wrapper.wait()
    return pid


@pytest.mark.usefixtures("reaper")
def test_a_worker_without_its_wrapper_is_watched_and_the_kernel_tells_its_end(
    wrappers: Wrappers, watched: Watched
) -> None:
    pid = lose_wrapper(wrappers, watched)
    assert watched.facts().up, "the worker lives on"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    facts = watched.facts()
    assert (facts.up, facts.state, facts.exits) == (False, "dead", ()), "a notice may still come"
    watched.clock.advance(NOTICE_GRACE_S + 1)
    (ended,) = watched.facts().exits
    assert (ended.reason, ended.code, ended.signal) == ("killed_unknown", None, signal.SIGKILL)
    assert ended.evidence[:2] == (
        "killed by SIGKILL",
        "its wrapper was killed by SIGKILL and left no record: it ended with that",
    )
    record = wrappers.record(TASK, "exit")
    assert (record["source"], record["signal"], record["pid"]) == ("kernel", signal.SIGKILL, pid), "for the report"


@pytest.mark.usefixtures("reaper")
def test_on_an_old_kernel_such_an_end_is_unknown(
    wrappers: Wrappers, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "not there")))
    pid = lose_wrapper(wrappers, watched)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not watched.facts().up
    watched.clock.advance(NO_RECORD_GRACE_S + NOTICE_GRACE_S)
    (ended,) = watched.facts().exits
    assert (ended.reason, ended.code, ended.signal) == ("killed_unknown", None, None)
    assert ended.evidence == ("exit status unknown", "its wrapper has ended and left no record: it ended with that")


@pytest.mark.usefixtures("reaper")
def test_a_worker_that_nobody_reaps_has_ended_too(wrappers: Wrappers, watched: Watched) -> None:
    pid = lose_wrapper(wrappers, watched)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not watched.facts().up, "its end")
    try:
        for _ in range(3):
            watched.clock.advance(NO_RECORD_GRACE_S)
            facts = watched.facts()
        assert [ended.reason for ended in facts.exits] == ["killed_unknown"]
    finally:
        os.waitpid(pid, 0)


def test_a_verdict_waits_while_the_wrapper_lives(wrappers: Wrappers, watched: Watched) -> None:
    """As when the file system of the run directory takes long to write the record down."""
    wrapper = wrappers.start(TASK, "sleep", "60")
    pid = wrappers.record(TASK, "start")["pid"]
    until(lambda: watched.facts().up, "the worker")
    wrapper.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not watched.facts().up, "its end")
    try:
        for _ in range(3):
            watched.clock.advance(NO_RECORD_GRACE_S)
            assert watched.facts().exits == ()
    finally:
        wrapper.send_signal(signal.SIGCONT)
    wrapper.wait()
    assert watched.facts().exits[-1].signal == signal.SIGKILL


@pytest.mark.usefixtures("reaper")
def test_the_worker_that_ended_the_job_is_no_consequence_of_that(wrappers: Wrappers, watched: Watched) -> None:
    pid = lose_wrapper(wrappers, watched)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    now, cause = watched.clock.now, "worker_w0 rank 0 on node01 ended by killed_unknown"
    notice: dict[str, object] = {
        "reason": "terminated_peer",
        "cause": cause,
        "time": now + 0.2,
        "rank": 0,
        "restart": 0,
    }
    run_files.write_job_state(str(wrappers.run_dir), "completing", notice)
    watched.clock.advance(1)
    watched.facts()
    watched.clock.advance(NO_RECORD_GRACE_S + 1)
    assert watched.facts().exits[-1].reason == "killed_unknown"


def test_a_forwarded_sigterm_after_the_notice_is_a_consequence(wrappers: Wrappers, watched: Watched) -> None:
    wrapper = wrappers.start(TASK, "sleep", "60")
    wrappers.record(TASK, "start")
    notice: dict[str, object] = {"reason": "terminated_peer", "cause": "worker_w1 rank 1 ended", "time": time.time()}
    run_files.write_job_state(str(wrappers.run_dir), "completing", notice)
    wrapper.terminate()
    assert wrapper.wait() == -signal.SIGTERM
    assert outcome(watched.facts()) == (False, "dead", "terminated_peer", None, signal.SIGTERM)
    assert watched.facts().exits[-1].evidence[-1] == "the job was being stopped: worker_w1 rank 1 ended"


def end_by_sigterm(wrappers: Wrappers) -> None:
    """A worker that is told to end from outside, without a notice why."""
    wrapper = wrappers.start(TASK, "sleep", "60")
    wrappers.record(TASK, "start")
    wrapper.terminate()
    wrapper.wait()


def test_a_sigterm_waits_for_a_notice_and_is_a_cancellation_without_one(wrappers: Wrappers) -> None:
    end_by_sigterm(wrappers)
    watched = Watched(wrappers.run_dir, TASK)
    assert watched.facts().exits == ()
    watched.clock.advance(NOTICE_GRACE_S + 1)
    assert outcome(watched.facts()) == (False, "dead", "cancelled", None, signal.SIGTERM)


def test_a_worker_is_not_up_while_the_verdict_waits(wrappers: Wrappers) -> None:
    end_by_sigterm(wrappers)
    facts = Watched(wrappers.run_dir, TASK).facts()
    assert (facts.up, facts.state, facts.exits) == (False, "dead", ())


def test_a_reason_that_is_none_does_not_break_the_page(wrappers: Wrappers, watched: Watched) -> None:
    wrapper = wrappers.start(TASK, "sleep", "60")
    wrappers.record(TASK, "start")
    notice: dict[str, object] = {"reason": "lunch", "cause": "hunger", "time": time.time()}
    run_files.write_job_state(str(wrappers.run_dir), "completing", notice)
    wrapper.terminate()
    wrapper.wait()
    watched.clock.advance(NOTICE_GRACE_S + 1)
    assert samples_of(watched.page(), UP) == {LABELS: 0}


def test_the_status_says_who_the_worker_is_and_how_it_is(wrappers: Wrappers, watched: Watched) -> None:
    wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    status = until(lambda: (found := watched.status())["state"] == "sleeping" and found, "sleep to sleep")
    assert {
        key: status[key] for key in ("worker", "role", "rank", "node", "gpus", "up", "pid", "restarts", "exit")
    } == {
        "worker": "worker_w0",
        "role": "worker",
        "rank": 0,
        "node": make_identity().node,
        "gpus": [0],
        "up": True,
        "pid": record["pid"],
        "restarts": 0,
        "exit": None,
    }


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
def test_a_worker_that_leaves_itself_in_the_background_has_completed_and_the_rest_is_told(
    wrappers: Wrappers, watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "daemon.pid"
    for name, value in (("GPUJOB_JOB_ID", make_identity().job_id), ("GPUJOB_RANK", "0")):
        monkeypatch.setenv(name, value)
    wrappers.start(TASK, sys.executable, "-c", DAEMON, str(place)).wait()
    daemon = int(until(lambda: place.exists() and place.read_text(), "the daemon"))
    try:
        (ended,) = watched.facts().exits
        assert (ended.reason, ended.evidence) == (
            "completed",
            ("exit status 0", "it had left a process in the background"),
        )
        assert wrappers.record(TASK, "found")["survivors"] == 1, "for the report"
    finally:
        os.kill(daemon, signal.SIGKILL)


def attach(run_dir: Path, pid: int) -> Watched:
    """A collector over a job of others, whose worker somebody has found."""
    watched = Watched(run_dir, TASK)
    manifest = make_manifest(run_dir, TASK, attached=True)
    watched.collector = WorkersCollector(make_context(manifest, watched.clock, end=None))
    record = {"pid": pid, "start_ticks": read_start_ticks(pid), "start": time.time(), "found_by": "pid_file"}
    run_files.write_json(run_dir / run_files.WORKERS_DIR / "worker_w0_rank0_a0_r0.start.json", record)
    return watched


@pytest.mark.parametrize(
    ("command", "reason", "code", "number"),
    [
        ("read x; exit 0", "completed", 0, None),
        ("read x; exit 3", "app_error", 3, None),
        ("ulimit -c 0; read x; kill -SEGV $$", "crashed_signal", None, signal.SIGSEGV),
    ],
)
def test_the_kernel_tells_how_a_worker_of_others_has_ended(
    wrappers: Wrappers, command: str, reason: str, code: int | None, number: int | None
) -> None:
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE) as process:
        watched = attach(wrappers.run_dir, process.pid)
        assert watched.facts().up
        process.communicate(b"\n")
    assert outcome(watched.facts()) == (False, "dead", reason, code, number)
    assert wrappers.record(TASK, "exit")["source"] == "kernel"


def test_a_worker_of_others_that_nobody_tells_of_is_unknown_and_says_so(
    wrappers: Wrappers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pidfd_open", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "not there")))
    with subprocess.Popen(["sh", "-c", "read x"], stdin=subprocess.PIPE) as process:
        watched = attach(wrappers.run_dir, process.pid)
        assert watched.facts().up
        process.communicate(b"\n")
    watched.facts()
    watched.clock.advance(STATUS_GRACE_S + 1)
    (ended,) = watched.facts().exits
    assert (ended.reason, ended.code, ended.signal) == ("killed_unknown", None, None)
    assert ended.evidence[-1] == "it was not started by gpujob, so its status is unknown"


@pytest.mark.usefixtures("reaper")
def test_a_worker_of_others_that_daemonises_is_followed(wrappers: Wrappers, tmp_path: Path) -> None:
    place = tmp_path / "daemon.pid"
    forks_once = DAEMON.replace("os._exit(0)", "time.sleep(1) or os._exit(0)", 1)
    forks_once = forks_once.replace("if os.fork():\n    os._exit(0)\n", "")
    program = f"import sys\nsys.stdin.readline()\nsys.argv[1] = {str(place)!r}\n{forks_once}"
    with subprocess.Popen([sys.executable, "-c", program, ""], stdin=subprocess.PIPE) as process:
        watched = attach(wrappers.run_dir, process.pid)
        assert watched.facts().up
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        daemon = int(until(lambda: watched.facts() and place.exists() and place.read_text(), "the daemon"))
        process.wait()
    facts = until(lambda: (found := watched.facts()).pid == daemon and found, "the daemon to be followed")
    assert (facts.up, facts.exits) == (True, ())
    assert watched.events()[-1] == ("worker daemonised", f"pid {process.pid} has ended, pid {daemon} goes on")
    os.kill(daemon, signal.SIGKILL)
    os.waitpid(daemon, 0)
    (ended,) = watched.facts().exits
    assert (ended.reason, ended.signal) == ("killed_unknown", signal.SIGKILL)


def test_the_kernels_log_is_evidence_and_kept_for_the_report(wrappers: Wrappers) -> None:
    kernel = KernelLog(FakeClock(), None, path="/nowhere")
    watched = Watched(wrappers.run_dir, TASK)
    context = make_context(make_manifest(wrappers.run_dir, TASK), watched.clock, end=None)
    watched.collector = WorkersCollector(dataclasses.replace(context, kernel=kernel))
    wrapper = wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    until(lambda: watched.facts().up, "the worker")
    of_another, of_this = OomVictim(1), KernelXid("0000:3b:00", 79, record["pid"])
    kernel.events = tuple(KernelEvent(record["start"] + 1, what) for what in (of_another, of_this))
    os.kill(record["pid"], signal.SIGKILL)
    wrapper.wait()
    (ended,) = watched.facts().exits
    assert ended.reason == "gpu_fault"
    assert ended.evidence[-1] == f"Xid 79 on the GPU at 0000:3b:00, process {record['pid']}: fallen off the bus"
    assert [fault["xid"] for fault in wrappers.record(TASK, "found")["gpu_faults"]] == [79]


def test_a_worker_that_cannot_be_looked_at_for_want_of_a_descriptor_is_looked_at_later(
    wrappers: Wrappers, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> ProcessTree:
        raise OSError(errno.EMFILE, "too many open files")

    wrappers.start(TASK, "sleep", "60")
    record = wrappers.record(TASK, "start")
    with monkeypatch.context() as patched:
        patched.setattr("exporter.workers.runs_reader.ProcessTree", refuse)
        facts = watched.facts()
        assert (facts.up, facts.pid, facts.exits) == (True, None, ())
    facts = watched.facts()
    assert (facts.up, facts.pid) == (True, record["pid"])


def test_a_closer_look_comes_later_and_is_shown(wrappers: Wrappers, watched: Watched) -> None:
    wrappers.start(TASK, "sleep", "60")
    until(lambda: watched.facts().up, "the worker")
    assert watched.facts().details is None
    watched.clock.advance(5)
    details = watched.facts().details
    assert details is not None
    assert details.open_files is not None
    assert samples_of(watched.page(), OPEN_FILES) == {LABELS: details.open_files}
    assert samples_of(watched.page(), PSS) == {LABELS: details.pss_bytes}
