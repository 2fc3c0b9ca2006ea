"""Parts of us that are killed: the job ends within seconds, nothing of it stays, and the report says what it was."""

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
"""Within which a job has ended, on a machine that does other things as well; its workers would go on for longer."""


def job_of(folder: Path, command: str = "sleep 600", **over: Any) -> Guarded:
    return Guarded(folder, [{"role": "worker", "count": 2, "command": command}], {}, **over)


def killed(job: Guarded, pid: int) -> int:
    """The status of the guard after the kill, once nothing is left."""
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    status = job.wait(SECONDS)
    poll(lambda: not job.left_over(), f"the end of all processes: {job.left_over()}", SECONDS)
    assert time.monotonic() - began < SECONDS
    return status


def await_both(job: Guarded) -> None:
    """Wait until both workers have set what they do at a signal, and said so."""
    job.await_phase("running")
    poll(lambda: all("up" in job.output(f"worker_w{rank}") for rank in (0, 1)), "both workers")


def test_the_end_of_the_orchestrator_is_told(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.await_phase("running")
        assert killed(job, job.orchestrator_pid()) == 1
    report = job.report
    assert (report["state"], report["exit_status"]) == ("FAILED", 1)
    assert (report["cause"]["worker"], report["cause"]["signal"]) == ("orchestrator", "SIGKILL")
    assert report["stopped"]["cause"] == "the orchestrator was killed by SIGKILL"
    assert set(job.reasons().values()) == {"terminated_peer"}
    assert "- cause: orchestrator on" in (job.run_dir / "report.md").read_text()
    assert [event["cause"] for event in job.events("orchestrator lost")] == [report["stopped"]["cause"]]
    assert not (job.run_dir / "targets.json").exists()


def test_workers_that_do_not_listen_do_not_outlive_the_orchestrator(tmp_path: Path) -> None:
    with job_of(tmp_path, STUBBORN) as job:
        await_both(job)
        assert killed(job, job.orchestrator_pid()) == 1
    assert "Killing workers that did not end in time" in job.log
    assert set(job.reasons().values()) == {"terminated_peer"}


def test_an_orchestrator_that_is_killed_while_it_ends_the_job_keeps_the_reason(tmp_path: Path) -> None:
    with job_of(tmp_path, STUBBORN) as job:
        await_both(job)
        job.guard.terminate()
        job.await_event("job stopping")
        assert killed(job, job.orchestrator_pid()) == 5
    assert job.report["state"] == "CANCELLED"
    assert job.report["stopped"]["cause"] == "SIGTERM to the job"


def test_what_had_failed_before_the_orchestrator_was_killed_is_diagnosed(tmp_path: Path) -> None:
    command = "sh -c 'echo up; [ $RANK = 0 ] && exit 3; sleep 600'"
    workers = [{"role": "worker", "count": 2, "critical": False, "command": command}]
    with Guarded(tmp_path, workers, {}) as job:
        job.await_event("worker ended")
        poll(lambda: "up" in job.output("worker_w1"), "the other worker")
        assert killed(job, job.orchestrator_pid()) == 1
    assert "exit status 3" in (job.run_dir / "diagnostics" / "worker_w0.txt").read_text()
    assert job.report["diagnoses"] == ["diagnostics/worker_w0.txt"]


def test_an_orchestrator_that_is_killed_before_anything_runs_leaves_a_report(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        assert killed(job, job.orchestrator_pid()) == 1
    assert job.report["state"] == "FAILED"


def test_without_its_guard_the_orchestrator_ends_the_job_in_order(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.await_phase("running")
        assert killed(job, job.guard.pid) == -signal.SIGKILL
        poll(lambda: job.report, "the report")
    assert (job.report["state"], job.report["cause"]["worker"]) == ("FAILED", "guard")
    assert job.report["stopped"]["cause"] == "the guard of the orchestrator was killed"
    assert len(job.events("signal")) == 1


def test_a_wrapper_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.await_phase("running")
        assert killed(job, job.pid("worker_w1", of="wrapper_pid")) == 1
    assert (job.report["cause"]["worker"], job.report["state"]) == ("worker_w1", "FAILED")


def test_a_signal_reaches_the_job_once(tmp_path: Path) -> None:
    with job_of(tmp_path, "sh -c 'trap \"echo told; exit 7\" TERM; echo up; while :; do sleep 0.05; done'") as job:
        await_both(job)
        job.guard.terminate()
        assert job.wait() == 5
    assert [job.output(f"worker_w{rank}") for rank in (0, 1)] == ["up\ntold\n"] * 2
    assert len(job.events("signal")) == 1


def test_a_job_that_ends_by_itself_ends_its_guard_alike(tmp_path: Path) -> None:
    with job_of(tmp_path, "sh -c 'exit 3'") as job:
        assert job.wait() == 1
    assert job.report["cause"]["code"] == 3
    assert job.events("orchestrator lost") == []


def test_what_cannot_even_begin_has_no_aftermath(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", "-B", "-m", "launcher.guard", str(tmp_path), "--local"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "is this a run directory?" in done.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []
