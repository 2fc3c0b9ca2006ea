"""What ends a job in place of its orchestrator, without real processes, which `programs/test_guard.py` has."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from launcher.run.lost_orchestrator import LostOrchestrator, OrchestratorEnd
from launcher.run.orchestrator import load_plan
from launcher.watch.view import JobClient
from tests.support.builders import orchestrator_record
from tests.support.fake_slurm import FakeSlurm
from tests.support.launcher import read_json, settled_run_dir

EARLIER_STOP = {"reason": "time_limit", "cause": "the job will be requeued", "time": 1900.0, "requeue": True}
EARLIER_REPORT = {"job_id": "4459", "job_name": "job", "attempt": 0, "state": "TIMEOUT", "exit_status": 3, "items": 777}


class NoLeftovers:
    """Slurm steps, all of which have ended."""

    poll_interval_s = 0.01

    def send_signal(self, signal_number: int, *, include_sidecars: bool) -> int:
        return 0


@pytest.fixture
def requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of a Slurm job whose second attempt has begun, with the records of the first one."""
    fake = FakeSlurm(tmp_path / "fake")
    for name, value in {**fake.environment(), "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    fake.say("squeue", "out", "4459|RUNNING*1\n")
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]}, job_id="4459")
    first = orchestrator_record(job_id="4459", local=False, start_ticks=1)
    run_files.write_json(run_dir / run_files.ORCHESTRATOR_FILE, first)
    run_files.write_job_state(str(run_dir), "finished", dict(EARLIER_STOP), workers_ended=True)
    run_files.write_json(run_dir / run_files.REPORT_FILE, EARLIER_REPORT)
    return run_dir


def end_job(run_dir: Path) -> int:
    leftovers: Any = NoLeftovers()
    return LostOrchestrator(load_plan(run_dir), run_dir, leftovers, OrchestratorEnd(signal.SIGKILL)).run()


@pytest.mark.parametrize("has_recorded_itself", [False, True])
def test_an_orchestrator_lost_at_the_start_of_an_attempt_leaves_the_report_of_the_one_before(
    requeued: Path, *, has_recorded_itself: bool
) -> None:
    if has_recorded_itself:  # but lost in the survey of its nodes
        second = orchestrator_record(job_id="4459", local=False, attempt=1, start_ticks=1)
        run_files.write_json(requeued / run_files.ORCHESTRATOR_FILE, second)
    assert end_job(requeued) == 1
    assert read_json(requeued / "report_a0.json") == EARLIER_REPORT
    report = read_json(requeued / run_files.REPORT_FILE)
    assert (report["attempt"], report["state"], report["requeued"]) == (1, "FAILED", False)
    assert report["stopped"]["cause"] == "the orchestrator was killed by SIGKILL"
    record = read_json(requeued / run_files.ORCHESTRATOR_FILE)
    assert (record["attempt"], record["pid"]) == (1, os.getpid())
    assert JobClient(requeued).report().state == "FAILED"


def test_a_job_that_has_not_begun_for_others_does_not_begin_with_its_end(requeued: Path) -> None:
    (requeued / run_files.ORCHESTRATOR_FILE).unlink()
    assert end_job(requeued) == 1
    assert not (requeued / run_files.ORCHESTRATOR_FILE).exists()
    assert read_json(requeued / run_files.REPORT_FILE)["attempt"] == 1
