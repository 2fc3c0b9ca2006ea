"""Exit reasons of programs that fail on a real GPU."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.gpu.hardware import FOLDER, HardwareJob, torch_python
from tests.realstack.waiting import wait_for

WITNESS = FOLDER / "xid_witness.py"
XIDS = ("13", "31")
"""A kernel exception and an invalid address. The address decides which of them a stray write causes."""

pytestmark = pytest.mark.gpu


@pytest.fixture
def witness(job: HardwareJob) -> Iterator["subprocess.Popen[str]"]:
    """A separate program that prints each error event of the driver."""
    process = subprocess.Popen([sys.executable, str(WITNESS), job.device.uuid], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def xid_counts(job: HardwareJob) -> dict[str, float]:
    """Nonzero Xid counts of the sidecar, by code."""
    return {xid: count for xid, count in job.page().by("xid", "gpu_xid_errors_total").items() if count}


def test_a_write_to_an_invalid_address_gives_the_exit_reason_gpu_fault(
    job: HardwareJob, witness: "subprocess.Popen[str]"
) -> None:
    job.start()
    job.until_ready()
    job.work(0, *job.cuda("--seconds", "120"))
    job.until_seen()
    assert xid_counts(job) == {}
    job.order("fault")
    ended = job.until_ended()
    assert ended["code"] == 1
    try:
        wait_for(lambda: xid_counts(job), 15, "an Xid", logs=job.log)
    except TimeoutError:
        witness.terminate()
        seen = witness.communicate()[0].split()
        assert not seen, f"the driver has reported Xid {seen}, and the sidecar has not"
        pytest.skip("needs a GPU whose driver reports Xids by events or in a readable kernel log")
    assert xid_counts(job).keys() & set(XIDS)
    assert ended["reason"] == "gpu_fault", ended
    reported = {entry["xid"]: entry for entry in job.of_gpu(0)["xids"]}
    assert {reported[int(xid)]["class"] for xid in xid_counts(job).keys() & set(XIDS)} == {"application"}
    assert "warning" in {level for level, _ in job.events("GPU Xid")}
    page = job.page()
    assert page.value("gpu_up", gpu=job.device.index) == 1
    assert page.value("gpu_health", health="healthy") == 1


def test_a_program_that_exhausts_gpu_memory_has_the_exit_reason_cuda_oom(job: HardwareJob) -> None:
    if torch_python() is None:
        pytest.skip("needs a GPU and PyTorch")
    job.start()
    job.until_ready()
    job.work(0, *job.torch("--exhaust"))
    ended = job.until_ended()
    assert (ended["reason"], ended["code"]) == ("cuda_oom", 1)
    assert xid_counts(job) == {}
