"""Faults of the example workload that only jobs on a real Slurm use; jobs of this machine test the others."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.launcher import FAULTY_EMBED, clean_environment, poll

RATE = 100


@contextmanager
def worker(folder: Path, faults: str, items: int = 40) -> Iterator[subprocess.Popen[str]]:
    options = f"--items {items} --rate {RATE} --log-every 10 --checkpoint-every 20 --output-dir {folder} {faults}"
    argv = ["python3", "-u", str(FAULTY_EMBED), *options.split()]
    with subprocess.Popen(argv, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run(folder: Path, faults: str) -> str:
    """The log of a worker that completes."""
    with worker(folder, faults) as process:
        log, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return log


def lines(folder: Path) -> int:
    output = folder / "output_worker_0.jsonl"
    return output.read_bytes().count(b"\n") if output.exists() else 0


def test_a_stalled_worker_is_silent_until_a_signal_and_not_stalled_again(tmp_path: Path) -> None:
    with worker(tmp_path, "--stall --once --at 15") as process:
        poll(lambda: lines(tmp_path) == 15, "15 items")
        time.sleep(1.2)
        process.terminate()
        log, _ = process.communicate(timeout=10)
    assert (process.returncode, lines(tmp_path)) == (-signal.SIGTERM, 15)
    assert "15/40" not in log.partition("Received")[0]
    assert "Resuming at 15/40" in run(tmp_path, "--stall --once --at 15")


def test_slow_work_and_slow_checkpoints_take_their_time(tmp_path: Path) -> None:
    before = time.monotonic()
    log = run(tmp_path, "--slow-down 4 --at 10 --checkpoint-seconds 0.4")
    assert time.monotonic() - before >= 9 / RATE + 20 * 4 / RATE + 0.4  # it may catch up for 0.1 s after a pause
    assert log.count("Saving a checkpoint") == 1, "the last one is not delayed"


def test_lost_results_and_cut_checkpoints(tmp_path: Path) -> None:
    assert "Processed 40/40 items" in run(tmp_path, "--no-output --cut-checkpoint --at 30")
    assert lines(tmp_path) == 30
    json.loads((tmp_path / "checkpoint_worker_0_step_20.json").read_text())
    with pytest.raises(json.JSONDecodeError):
        json.loads((tmp_path / "checkpoint_worker_0_step_40.json").read_text())
    assert "Cannot resume from checkpoint_worker_0_step_40.json: it is damaged" in run(tmp_path, "")


def test_a_leak_is_resident_memory_and_an_ignored_sigterm_leaves_sigkill(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with worker(tmp_path, "--leak 200 --ignore-sigterm", items=9999) as process:
        poll(lambda: lines(tmp_path) > 0, "some work")
        process.terminate()
        poll(lambda: resident_bytes() > 120 << 20, "a leak")
        assert process.poll() is None
