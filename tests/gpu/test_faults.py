"""Programs that fail on a real GPU, and the reason that is given for their ends."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.gpu.hardware import FOLDER, HardwareJob, torch_python
from tests.realstack.waiting import wait_for

WITNESS = FOLDER / "xid_witness.py"
XIDS = ("13", "31")
"""An exception in a kernel, and an invalid address: which of them a stray write is depends on the address."""

pytestmark = pytest.mark.gpu


@pytest.fixture
def witness(job: HardwareJob) -> Iterator["subprocess.Popen[str]"]:
    """A program of its own that waits for the driver to tell of an error, and prints it."""
    process = subprocess.Popen([sys.executable, str(WITNESS), job.device.uuid], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def counted(job: HardwareJob) -> dict[str, float]:
    """Errors that the sidecar has counted, by code."""
    return {xid: count for xid, count in job.page().by("xid", "gpu_xid_errors_total").items() if count}


def test_a_write_to_an_invalid_address_ends_its_worker_with_a_gpu_fault(
    job: HardwareJob, witness: "subprocess.Popen[str]"
) -> None:
    job.start()
    job.until_ready()
    job.work(0, *job.cuda("--seconds", "120"))
    job.until_seen()
    assert counted(job) == {}
    job.order("fault")
    ended = job.until_ended()
    assert ended["code"] == 1
    try:
        wait_for(lambda: counted(job), 15, "an Xid", logs=job.log)
    except TimeoutError:
        witness.terminate()
        seen = witness.communicate()[0].split()
        assert not seen, f"the driver has told of Xid {seen}, and the sidecar has not"
        pytest.skip("needs a GPU whose driver tells of Xid here: by events, or in a kernel log that can be read")
    assert counted(job).keys() & set(XIDS)
    assert ended["reason"] == "gpu_fault", ended
    told = {entry["xid"]: entry for entry in job.of_gpu(0)["xids"]}
    assert {told[int(xid)]["class"] for xid in counted(job).keys() & set(XIDS)} == {"application"}
    assert "warning" in {level for level, _ in job.events("GPU Xid")}
    page = job.page()
    assert page.value("gpu_up", gpu=job.device.index) == 1
    assert page.value("gpu_health", health="healthy") == 1


def test_a_program_that_asks_for_more_memory_than_there_is_ends_with_cuda_oom(job: HardwareJob) -> None:
    if torch_python() is None:
        pytest.skip("needs a GPU and PyTorch")
    job.start()
    job.until_ready()
    job.work(0, *job.torch("--exhaust"))
    ended = job.until_ended()
    assert (ended["reason"], ended["code"]) == ("cuda_oom", 1)
    assert counted(job) == {}
