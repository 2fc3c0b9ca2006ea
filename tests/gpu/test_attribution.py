"""Attribution of processes on a real GPU, with real programs under the real wrapper."""

import shlex
from typing import Any

import pytest

from tests.gpu import nvidia_smi
from tests.gpu.comparison import columns
from tests.gpu.conftest import Show
from tests.gpu.hardware import SEEN_S, HardwareJob, torch_python
from tests.realstack.waiting import wait_for

MIB = 1 << 20
HELD_MIB = 4096
MOST_CONTEXT_MIB = 2048
"""Memory of the driver and of kernels, in addition to allocations: some hundred MiB on large GPUs."""

pytestmark = pytest.mark.gpu


def start(job: HardwareJob, *command: str) -> dict[str, Any]:
    """Start the worker and the sidecar. Returns the GPU use when memory and load are reported."""
    job.work(0, *command)
    job.until_printed(f"holds {HELD_MIB} MiB")
    job.start()
    job.until_ready()
    job.until(lambda page: (page.value("worker_gpu_sm_utilization_ratio") or 0) > 0, "its load", SEEN_S)
    return job.until_seen()


def only_process(job: HardwareJob) -> tuple[int, int | None]:
    """Pid and memory of the only process that ``nvidia-smi`` lists."""
    ((pid, memory),) = nvidia_smi.processes(job.device).items()
    return pid, memory


def check(job: HardwareJob, use: dict[str, Any], name: str, show: Show) -> None:
    """Check the GPU use of a worker that holds `HELD_MIB`."""
    _, theirs = only_process(job)
    rows = [("", "MiB"), ("allocated", str(HELD_MIB)), ("ours", f"{use['memory_bytes'] / MIB:.0f}")]
    rows += [("nvidia-smi", "-" if theirs is None else f"{theirs / MIB:.0f}")]
    rows += [("context and kernels", f"{use['memory_bytes'] / MIB - HELD_MIB:.0f}")]
    rows += [("utilization, %", f"{100 * use['sm_ratio']:.0f}")]
    show(f"attribution-{name}", columns(rows))
    assert (use["gpu"], use["uuid"], use["attribution"]) == (job.device.index, job.device.uuid, "process")
    assert 0 <= use["memory_bytes"] / MIB - HELD_MIB < MOST_CONTEXT_MIB
    assert theirs is None or abs(use["memory_bytes"] - theirs) <= 2 * MIB
    assert 0 < use["sm_ratio"] <= 1
    page = job.page()
    assert page.value("gpu_workers", gpu=job.device.index) == 1
    assert page.value("gpu_foreign_processes", gpu=job.device.index) == 0
    assert page.value("worker_gpu_misplaced") == 0


def test_a_cuda_program_has_the_memory_that_it_allocated(job: HardwareJob, show: Show) -> None:
    use = start(job, *job.cuda("--seconds", "120", "--memory-mib", str(HELD_MIB)))
    check(job, use, "cuda", show)
    job.order("grow")
    job.until_printed(f"holds {2 * HELD_MIB} MiB")
    page = job.until(
        lambda page: (page.value("worker_gpu_memory_bytes") or 0) > use["memory_bytes"], "the larger memory", SEEN_S
    )
    grown = (page.value("worker_gpu_memory_bytes") or 0) - use["memory_bytes"]
    assert grown == pytest.approx(HELD_MIB * MIB, rel=0.01)
    job.order("rest")
    job.until(lambda page: page.value("worker_gpu_sm_utilization_ratio") == 0, "the end of its load", SEEN_S)


def test_a_pytorch_program_has_the_memory_that_it_allocated(job: HardwareJob, show: Show) -> None:
    if torch_python() is None:
        pytest.skip("needs a GPU and PyTorch")
    use = start(job, *job.torch("--seconds", "120", "--memory-mib", str(HELD_MIB)))
    check(job, use, "pytorch", show)


def test_a_child_process_is_attributed_to_the_worker(job: HardwareJob, show: Show) -> None:
    command = shlex.join(job.cuda("--seconds", "120", "--memory-mib", str(HELD_MIB)))
    use = start(job, "sh", "-c", f"{command}; exit $?")
    assert only_process(job)[0] != job.wrappers.record(job.tasks[0], "start")["pid"]
    check(job, use, "child", show)


def test_a_process_outside_the_job_is_foreign(job: HardwareJob) -> None:
    foreign = job.run_foreign(job.cuda("--seconds", "120", "--memory-mib", "1024", "--rest"))
    job.work(0, *job.cuda("--seconds", "120", "--memory-mib", str(HELD_MIB)))
    job.start()
    job.until_ready()
    job.until(
        lambda page: page.value("gpu_foreign_processes", gpu=job.device.index) == 1, "the foreign process", SEEN_S
    )
    (entry,) = job.of_gpu(0)["foreign"]
    assert entry["pid"] == foreign.pid
    assert 1024 <= entry["memory_bytes"] / MIB < 1024 + MOST_CONTEXT_MIB
    ((level, _),) = wait_for(lambda: job.events("GPU foreign process"), SEEN_S, "the event", logs=job.log)
    assert level == "warning"
    foreign.terminate()
    foreign.wait()
    job.until(lambda page: page.value("gpu_foreign_processes", gpu=job.device.index) == 0, "its end", SEEN_S)


def test_a_gpu_that_its_worker_does_not_use_has_no_workers(job: HardwareJob) -> None:
    job.work(0, "sleep", "120")
    job.start()
    job.until_ready()
    job.until(lambda page: page.value("gpu_workers", gpu=job.device.index) == 0, "a GPU without workers")
    wait_for(lambda: job.of_worker(0)["gpu_use"] == [], SEEN_S, "a worker known to use no GPU", logs=job.run_dir)
    assert job.of_worker(0)["gpu_plan"] == [job.device.uuid]
