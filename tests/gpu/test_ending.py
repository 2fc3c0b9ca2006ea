"""The sidecar exits promptly while the driver is busy."""

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from exporter.contract import run_files
from tests.gpu.hardware import HardwareJob
from tests.support.exporter import NODE

LONGEST_S = 2.0
BUSY = ("nvidia-smi", "--query", "--loop-ms=20")
"""These programs hold the lock of the driver, so each call has to wait."""
MANY = 4

pytestmark = pytest.mark.gpu


@pytest.fixture
def busy() -> Iterator[None]:
    """Keep the driver busy with calls of other programs."""
    others = [subprocess.Popen(BUSY, stdout=subprocess.DEVNULL) for _ in range(MANY)]
    yield
    for other in others:
        other.terminate()
        other.wait(timeout=20)


@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.3, 0.6, 1.1])
def test_sigterm_ends_the_sidecar_while_the_driver_is_busy(job: HardwareJob, busy: None, after_s: float) -> None:
    job.work(0, *job.cuda("--seconds", "60"))
    job.until_printed("holds")
    job.start()
    job.until_ready()
    time.sleep(after_s)
    began = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=20) == 0
    assert time.monotonic() - began < LONGEST_S
    assert (run_files.read_json(job.run_dir / run_files.STATUS_DIR / f"{NODE}.json") or {})["final"] is True
    assert "Traceback" not in job.log.read_text("utf-8")


def test_sigterm_ends_the_sidecar_during_its_first_listing(job: HardwareJob, busy: None) -> None:
    job.start()
    job.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert job.process.wait(timeout=20) == 0
    assert time.monotonic() - began < LONGEST_S
    assert "Traceback" not in job.log.read_text("utf-8")
