"""Killed parts of gpujob: the job ends soon, leaves no process, and the report has the cause."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.launcher.programs.guarded import Guarded
from tests.support.launcher import poll

STUBBORN = "sh -c 'trap \"\" TERM; echo up; while :; do sleep 0.05; done'"
SECONDS = 60.0
"""Limit for the end of a job on a busy machine. Its workers would run longer."""


def job_of(folder: Path, command: str = "sleep 600", **over: Any) -> Guarded:
    return Guarded(folder, [{"role": "worker", "count": 2, "command": command}], {}, **over)


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


def test_workers_that_ignore_sigterm_end_with_a_killed_orchestrator(tmp_path: Path) -> None:
    with job_of(tmp_path, STUBBORN) as job:
        await_both_workers(job)
        assert kill_and_wait(job, job.orchestrator_pid()) == 1
    assert "Killing workers that did not end in time" in job.log
    assert set(job.reasons().values()) == {"terminated_peer"}


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
