"""Reads of run directories within a bounded time."""

import threading
import time
from pathlib import Path

from exporter.contract import run_files
from launcher.fleet.own_runs import MOST_RUNS, read_progress, read_within
from tests.support.builders import orchestrator_record
from tests.support.launcher import settled_run_dir


def test_what_cannot_be_read_is_left_out_and_the_rest_is_in_order() -> None:
    def read(number: int) -> int:
        if number == 1:
            raise FileNotFoundError(number)
        time.sleep(0.05 if number == 0 else 0)
        return number * 10

    assert read_within(range(4), read) == [(0, 0), (2, 20), (3, 30)]
    assert len(read_within(range(MOST_RUNS + 9), str)) == MOST_RUNS
    assert read_within([], str) == []


def test_at_the_deadline_the_known_values_are_returned() -> None:
    release = threading.Event()

    def read(number: int) -> int:
        if number % 2:
            release.wait(30)
        return number

    start = time.monotonic()
    assert read_within(range(6), read, 2.0) == [(0, 0), (2, 2), (4, 4)]
    assert time.monotonic() - start < 25
    release.set()


def test_the_end_of_a_time_limit_is_that_which_a_sidecar_last_read(tmp_path: Path) -> None:
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]}, job_id="4459")
    run_files.write_json(run_dir / "orchestrator.json", orchestrator_record(job_id="4459", local=False))
    status = {"attempt": 0, "final": False, "time": 2000.0, "job": {"phase": "running", "end": 9000.0}}
    run_files.write_json(run_dir / run_files.STATUS_DIR / "cn01.json", status)
    assert read_progress({"4459": str(run_dir / "log.out")}, 2000.0)["4459"].limit_end == 9000.0
