"""Parts of gpujob that are killed or stopped: the job ends soon, leaves no process, and the report has the cause."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exporter.contract import run_files
from exporter.machine.procfs import read_process_stat
from launcher.guard import reported_status
from launcher.plan.plan import PLAN_FILE
from launcher.run import silent_orchestrator
from launcher.run.lost_orchestrator import LocalLeftoverTasks
from launcher.run.signals import OrchestratorSignals
from launcher.watch.view import JobClient
from tests.launcher.programs.guarded import Guarded
from tests.support.builders import orchestrator_record
from tests.support.launcher import kill_all_with, poll, processes_with, settled_run_dir

STUBBORN = "sh -c 'trap \"\" TERM; echo up; while :; do sleep 0.05; done'"
UNTIL_ENOUGH = "until [ -e enough ]; do sleep 0.1; done"
# on a busy machine, an orchestrator needs some seconds from its start to its first sign of life
LIMITS = {"WAIT_S": 0.1, "SILENT_S": 1.0, "LOST_S": 15.0, "ENDING_S": 3.0}
SECONDS = 60.0
"""Limit for the end of a job on a busy machine. Its workers would run longer."""


def job_of(folder: Path, command: str = "sleep 600", **over: Any) -> Guarded:
    return Guarded(folder, [{"role": "worker", "count": 2, "command": command}], {}, **over)


def started_orchestrators(job: Guarded) -> list[int]:
    """Pids after exec(2). Until then the guard waits in vfork(2), and a stopped child would stop it too."""
    return [pid for pid, argv in processes_with(job.run_dir).items() if "launcher.run.orchestrator" in argv]


def kill_and_wait(job: Guarded, pid: int) -> int:
    """Send SIGKILL to a process; return the status of the guard when no process is left."""
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    status = job.wait(SECONDS)
    poll(lambda: not job.left_over(), f"the end of all processes: {job.left_over()}", SECONDS)
    assert time.monotonic() - killed_at < SECONDS
    return status


def await_both_workers(job: Guarded) -> None:
    """Wait until both workers handle signals."""
    job.await_phase("running")
    poll(lambda: all("up" in job.output(f"worker_w{rank}") for rank in (0, 1)), "both workers")


def test_a_killed_orchestrator_is_the_reported_cause(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.await_phase("running")
        assert kill_and_wait(job, job.orchestrator_pid()) == 1
    report = job.report
    assert (report["state"], report["exit_status"]) == ("FAILED", 1)
    assert (report["cause"]["worker"], report["cause"]["signal"]) == ("orchestrator", "SIGKILL")
    assert report["stopped"]["cause"] == "the orchestrator was killed by SIGKILL"
    assert set(job.reasons().values()) == {"terminated_peer"}
    assert "- cause: orchestrator on" in (job.run_dir / "report.md").read_text()
    assert [event["cause"] for event in job.events("orchestrator lost")] == [report["stopped"]["cause"]]
    assert not (job.run_dir / "targets.json").exists()


SLOW_TO_END = """
trap 'echo told; told=1' TERM
sh -c 'trap "echo child told" TERM; echo up; while :; do sleep 0.05; done' &
until [ "$told" ]; do sleep 0.05; done
sleep 0.8
kill -9 $!
"""


def test_a_killed_orchestrator_means_one_sigterm_for_each_worker(tmp_path: Path) -> None:
    (tmp_path / "slow.sh").write_text(SLOW_TO_END)
    with job_of(tmp_path, f"sh {tmp_path}/slow.sh") as job:
        await_both_workers(job)
        assert kill_and_wait(job, job.orchestrator_pid()) == 1
    assert [job.output(f"worker_w{rank}") for rank in (0, 1)] == ["up\ntold\n"] * 2


@pytest.mark.parametrize("name", ["job", os.fsdecode(b"ren\xe9")])
def test_a_worker_without_a_wrapper_is_told_to_end_before_its_children(name: str, tmp_path: Path) -> None:
    (tmp_path / "slow.sh").write_text(SLOW_TO_END)
    env = {**os.environ, "GPUJOB_RUN_DIR": str(tmp_path / name), "GPUJOB_WORKER": "worker_w0"}
    with subprocess.Popen(["sh", str(tmp_path / "slow.sh")], env=env, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "up\n"
        count = LocalLeftoverTasks(tmp_path / name).send_signal(signal.SIGTERM, include_sidecars=False)
        if not count:
            kill_all_with(tmp_path)
        assert worker.stdout.read() == "told\n"
    assert count >= 2


def test_workers_that_ignore_sigterm_end_with_a_killed_orchestrator(tmp_path: Path) -> None:
    with job_of(tmp_path, STUBBORN) as job:
        await_both_workers(job)
        assert kill_and_wait(job, job.orchestrator_pid()) == 1
    assert "Killing workers that did not end in time" in job.log
    assert set(job.reasons().values()) == {"terminated_peer"}


def test_a_job_runs_until_the_successor_of_its_orchestrator_has_ended_it(tmp_path: Path) -> None:
    with job_of(tmp_path, STUBBORN) as job:
        await_both_workers(job)
        watching, states = JobClient(job.run_dir), list[str]()
        states.append(watching.read_state())
        killed = job.orchestrator_pid()
        os.kill(killed, signal.SIGKILL)
        while job.guard.poll() is None:
            states.append(watching.read_state())
            time.sleep(0.02)
            if job.orchestrator_pid() != killed and job.report == {}:
                states.append(JobClient(job.run_dir).read_view().state)  # of a command that was called meanwhile
        assert_all_ended(job)
    assert list(dict.fromkeys(states)) == ["RUNNING", "FAILED"]
    assert job.orchestrator_pid() != killed
    report = job.report
    assert abs(report["end"] - report["start"] - report["duration_s"]) < 2.0, "since the first orchestrator began"


def test_killing_the_orchestrator_during_a_stop_keeps_the_stop_reason(tmp_path: Path) -> None:
    with job_of(tmp_path, STUBBORN) as job:
        await_both_workers(job)
        job.guard.terminate()
        job.await_event("job stopping")
        assert kill_and_wait(job, job.orchestrator_pid()) == 5
    assert job.report["state"] == "CANCELLED"
    assert job.report["stopped"]["cause"] == "SIGTERM to the job"


def test_failures_before_the_kill_of_the_orchestrator_are_diagnosed(tmp_path: Path) -> None:
    command = "sh -c 'echo up; [ $RANK = 0 ] && exit 3; sleep 600'"
    workers = [{"role": "worker", "count": 2, "critical": False, "command": command}]
    with Guarded(tmp_path, workers, {}) as job:
        job.await_event("worker ended")
        poll(lambda: "up" in job.output("worker_w1"), "the other worker")
        assert kill_and_wait(job, job.orchestrator_pid()) == 1
    assert "exit status 3" in (job.run_dir / "diagnostics" / "worker_w0.txt").read_text()
    assert job.report["diagnoses"] == ["diagnostics/worker_w0.txt"]


def test_an_orchestrator_killed_at_its_start_leaves_a_report(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        assert kill_and_wait(job, job.orchestrator_pid()) == 1
    assert job.report["state"] == "FAILED"


def test_a_signal_reaches_the_job_once(tmp_path: Path) -> None:
    with job_of(tmp_path, "sh -c 'trap \"echo told; exit 7\" TERM; echo up; while :; do sleep 0.05; done'") as job:
        await_both_workers(job)
        job.guard.terminate()
        assert job.wait() == 5
    assert [job.output(f"worker_w{rank}") for rank in (0, 1)] == ["up\ntold\n"] * 2
    assert len(job.events("signal")) == 1


def test_the_guard_has_the_exit_status_of_the_job(tmp_path: Path) -> None:
    with job_of(tmp_path, "sh -c 'exit 3'") as job:
        assert job.wait() == 1
    assert job.report["cause"]["code"] == 3
    assert job.events("orchestrator lost") == []


def test_a_job_that_cannot_start_leaves_no_files(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-B", "-m", "launcher.guard", str(tmp_path), "--local"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "is this a run directory?" in done.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []


# An orchestrator or guard that is stopped for good


def stop_orchestrator(job: Guarded) -> None:
    """Stop the orchestrator for good once the job runs."""
    job.await_phase("running")
    os.kill(job.orchestrator_pid(), signal.SIGSTOP)


def assert_all_ended(job: Guarded) -> None:
    poll(lambda: not job.left_over(), f"the end of all processes: {job.left_over()}", SECONDS)


def test_workers_complete_under_a_stopped_orchestrator(tmp_path: Path) -> None:
    with job_of(tmp_path, f"sh -c '{UNTIL_ENOUGH}'", limits=LIMITS) as job:
        stop_orchestrator(job)
        time.sleep(LIMITS["LOST_S"] + 1.0)  # it is not needed meanwhile
        (tmp_path / "enough").touch()
        assert job.wait() == 0
        assert_all_ended(job)
    assert (job.report["state"], job.report["cause"]) == ("COMPLETED", None)
    assert job.reasons() == {"worker_w0": "completed", "worker_w1": "completed"}
    assert "The job needs an orchestrator: its workers have ended" in job.log
    # one that waits long for a processor is silent too
    details = [event["detail"] for event in job.events("orchestrator silent")]
    assert (details.count("it is stopped (SIGSTOP)"), details[-1]) == (1, "it is stopped (SIGSTOP)")


# starts the orchestrator, but its observer and what replaces it only at the second try
SHORT_OF_PROCESSES = """(lambda real, turns: lambda *args, **more: real(*args, **more) if next(turns) else open("/no"))(
    guard.os.posix_spawn, __import__("itertools").chain((1, 0, 1, 0), __import__("itertools").repeat(1))
)"""


@pytest.mark.parametrize("changes", [{}, {"os.posix_spawn": SHORT_OF_PROCESSES}], ids=["", "short of processes"])
def test_a_failure_under_a_stopped_orchestrator_ends_the_job(changes: dict[str, Any], tmp_path: Path) -> None:
    limits = {**LIMITS, **changes}
    with job_of(tmp_path, f"sh -c '{UNTIL_ENOUGH}; [ $RANK = 0 ] && exit 3; sleep 600'", limits=limits) as job:
        stop_orchestrator(job)
        (tmp_path / "enough").touch()
        assert job.wait() == 1
        assert_all_ended(job)
    assert (job.report["cause"]["worker"], job.report["cause"]["code"]) == ("worker_w0", 3)
    assert job.reasons() == {"worker_w0": "app_error", "worker_w1": "terminated_peer"}


def test_an_orchestrator_stopped_at_its_start_is_the_cause(tmp_path: Path) -> None:
    with job_of(tmp_path, limits=LIMITS) as job:
        os.kill(poll(lambda: started_orchestrators(job), "the orchestrator")[0], signal.SIGSTOP)
        assert job.wait() == 1
        assert_all_ended(job)
    assert "The job needs an orchestrator: the job has not begun" in job.log
    (evidence,) = job.report["cause"]["evidence"]
    found = re.fullmatch(r"the orchestrator did not respond for (\d+) s and was killed", evidence)
    assert found is not None, evidence
    assert int(found[1]) >= LIMITS["LOST_S"]  # as soon as the need is known


def test_a_signal_ends_a_job_with_a_stopped_orchestrator(tmp_path: Path) -> None:
    with job_of(tmp_path, limits=LIMITS | {"LOST_S": 600.0}) as job:
        stop_orchestrator(job)
        job.guard.terminate()
        assert job.wait() == 5
        assert_all_ended(job)
    assert job.report["state"] == "CANCELLED"
    cause = "SIGTERM to the job; the orchestrator did not respond for 3 s and was killed"
    assert job.report["stopped"]["cause"] == cause


def test_an_orchestrator_stopped_during_the_end_of_the_job_is_replaced(tmp_path: Path) -> None:
    with job_of(tmp_path, STUBBORN, limits=LIMITS) as job:
        await_both_workers(job)
        job.guard.terminate()
        job.await_event("job stopping")
        os.kill(job.orchestrator_pid(), signal.SIGSTOP)
        assert job.wait() == 5
        assert_all_ended(job)
    assert job.report["stopped"]["cause"] == "SIGTERM to the job"


def test_an_orchestrator_that_responds_again_stays(tmp_path: Path) -> None:
    with job_of(tmp_path, f"sh -c '{UNTIL_ENOUGH}'", limits=LIMITS) as job:
        stop_orchestrator(job)
        job.await_event("orchestrator silent")
        time.sleep(LIMITS["LOST_S"])  # no other process has anything to do meanwhile
        before = len(job.events("orchestrator responds"))
        os.kill(job.orchestrator_pid(), signal.SIGCONT)
        job.await_event("orchestrator responds", before + 1)
        (tmp_path / "enough").touch()
        assert job.wait() == 0
    assert job.report["stopped"] is None
    assert job.events("orchestrator lost") == []


def test_a_stopped_guard_ends_with_the_job(tmp_path: Path) -> None:
    with job_of(tmp_path, f"sh -c '{UNTIL_ENOUGH}'") as job:
        job.await_phase("running")
        job.guard.send_signal(signal.SIGSTOP)
        (tmp_path / "enough").touch()
        assert job.wait() == 0
    assert job.report["state"] == "COMPLETED"


def test_a_guard_that_stays_stopped_is_continued() -> None:
    guard = subprocess.Popen(["sleep", "60"])
    try:
        signals = OrchestratorSignals(guard.pid)
        guard.send_signal(signal.SIGSTOP)
        poll(lambda: (stat := read_process_stat(guard.pid)) and stat.state == "stopped", "a stopped guard")
        assert not signals.continue_guard(after_s=0.2)
        poll(lambda: signals.continue_guard(after_s=0.2), "a continued guard")
        poll(lambda: (stat := read_process_stat(guard.pid)) and stat.state == "sleeping", "a running guard")
        assert not signals.continue_guard(after_s=0.0)
    finally:
        guard.kill()
        guard.wait()


def test_a_word_of_silence_that_comes_after_the_end_of_it_is_corrected(tmp_path: Path) -> None:
    with job_of(tmp_path, f"sh -c '{UNTIL_ENOUGH}'") as job:
        job.await_phase("running")
        path, since = job.run_dir / run_files.STATE_FILE, time.time() - 30.5
        late = {**(run_files.read_json(path) or {}), "orchestrator_silent_since": since}
        run_files.write_json(path, late)
        poll(lambda: "orchestrator_silent_since" not in (run_files.read_json(path) or late), "the corrected state")
        event = job.await_event("orchestrator responds")
        assert 30.5 <= event["silent_s"] <= time.time() - since + 0.1  # it is rounded
        (tmp_path / "enough").touch()
        assert job.wait() == 0
    assert job.events("orchestrator responds") == [event]


def test_the_observer_outlives_a_failure_of_the_file_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]})
    answers = Mock(side_effect=[OSError(errno.ESTALE, "Stale file handle"), None, "its workers have ended"])
    monkeypatch.setattr(silent_orchestrator.SilentOrchestrator, "find_need", answers)
    monkeypatch.setattr(silent_orchestrator, "POLL_S", 0.0)
    assert silent_orchestrator.main([str(run_dir), "--local", "--pid", str(os.getpid()), "--silent", "30"]) == 0
    assert answers.call_count == 3


def test_a_file_that_cannot_be_read_for_a_moment_is_no_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker has completed, and the second one runs."""
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true", "count": 2}]})
    run_files.write_json(run_dir / run_files.ORCHESTRATOR_FILE, orchestrator_record())
    workers, read_text = run_dir / run_files.WORKERS_DIR, run_files.read_json_text
    ended = workers / "worker_w0_rank0_a0_r0.exit.json"
    run_files.write_json(ended, {"code": 0, "end": 1.0})
    run_files.write_json(workers / "worker_w1_rank1_a0_r0.start.json", {"start": 1.0})
    paths = (run_dir / PLAN_FILE, run_dir / run_files.ORCHESTRATOR_FILE, ended)
    fails = {os.fspath(path) for path in paths}

    def read_json_text(path: str | os.PathLike[str]) -> str:
        if os.fspath(path) in fails:
            fails.remove(os.fspath(path))
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_text(path)

    def complete_second(_: float) -> None:
        if not fails:
            run_files.write_json(workers / "worker_w1_rank1_a0_r0.exit.json", {"code": 0, "end": 1.0})

    monkeypatch.setattr(run_files, "read_json_text", read_json_text)
    monkeypatch.setattr(time, "sleep", complete_second)
    needs: list[str] = []
    monkeypatch.setattr(silent_orchestrator, "log_line", needs.append)
    assert silent_orchestrator.main([str(run_dir), "--local", "--pid", str(os.getpid()), "--silent", "30"]) == 0
    assert (needs[1:], fails) == (["The job needs an orchestrator: its workers have ended"], set())


def test_a_job_has_its_own_status_if_its_orchestrator_was_killed_after_the_report(tmp_path: Path) -> None:
    assert reported_status(str(tmp_path), signal.SIGKILL) == signal.SIGKILL
    run_files.write_json(tmp_path / "report.json", {"exit_status": 8})
    assert os.waitstatus_to_exitcode(reported_status(str(tmp_path), signal.SIGKILL)) == 8
    assert os.waitstatus_to_exitcode(reported_status(str(tmp_path), 1 << 8)) == 1
