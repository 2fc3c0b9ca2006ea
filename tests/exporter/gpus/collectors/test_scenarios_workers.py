"""Workers on GPUs: attribution, hangs, idle GPUs and exit reasons."""

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from exporter.contract import run_files
from tests.exporter.gpus.collectors.gpu_job import GpuJob, Page
from tests.fakenvml import FakeGpu, FakeProcess, Rate, compiler, profiles
from tests.support.exporter import NODE, until

GIB = 1 << 30
OTHER_NAMESPACE_PID = (1 << 22) - 7
READS_S = 25.0  # enough for a read of the process list and of its collectors on a busy machine
HEALTHY, HANGS, ASTRAY, UNUSED, HELD, SHARED, FAULTY, OUT_OF_MEMORY, OFF_THE_BUS, HUNG_BEFORE = range(10)
"""Ranks of the workers, which are also the indices of their planned GPUs."""
OOM = """Traceback (most recent call last):
  File "train.py", line 88, in <module>
    loss = model(batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of \
which 1.12 GiB is free."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuJob]:
    """A job on ten GPUs. The name of each rank says what its worker does."""
    scenario = profiles.h200(10)
    draw_power(scenario.gpus[HUNG_BEFORE], 150)
    job = GpuJob(tmp_path_factory.mktemp("job"), scenario, 10, stall_timeout_s=5.0, launch_timeout_s=3.0)
    try:
        start_worker_that_hung_before(job)
        job.start()
        job.until_ready()
        start_workers(job)
        job.until(lambda page: condition(page, HELD, "held_idle") == 0, "its first activity", READS_S)
        scenario.gpus[HELD].utilization = 0
        job.write()
        yield job
    finally:
        job.close()


@pytest.fixture(scope="module", autouse=True)
def foreign_process(job: GpuJob) -> subprocess.Popen[bytes]:
    """A foreign process on a GPU of the job. It starts early because reporting it takes a while."""
    return job.run_foreign(job.use_gpu(SHARED, "--items", "1", "--seconds", "1000", "--memory", str(5 * GIB)))


def draw_power(gpu: FakeGpu, watts: int) -> None:
    """Set the power draw of a GPU."""
    gpu.power_mw = watts * 1000
    gpu.energy_mj = gpu.fields[83] = Rate(80_000_000_000, watts * 1000)
    gpu.fields[185] = gpu.fields[186] = watts * 1000


def start_workers(job: GpuJob) -> None:
    """Start all workers. Those that fail first wait for their file `failRANK`."""
    slowly = ("--items", "5000", "--seconds", "1000")
    job.work(HEALTHY, *job.use_gpu(HEALTHY, *slowly, "--memory", str(3 * GIB)))
    job.work(HANGS, *job.use_gpu(HANGS, *slowly, "--silent-after", "40"))
    job.work(ASTRAY, *job.use_gpu(UNUSED, *slowly))
    job.work(UNUSED, "sleep", "1000")
    job.work(HELD, *job.use_gpu(HELD, *slowly, "--silent-after", "40", "--percent", "0"))
    job.work(SHARED, *job.use_gpu(SHARED, *slowly))
    for rank, text in ((FAULTY, "the kernel is bad"), (OUT_OF_MEMORY, OOM), (OFF_THE_BUS, "something is bad")):
        (job.run_dir / f"text{rank}").write_text(text)
        script = f'"$@" & while [ ! -e fail{rank} ]; do sleep 0.05; done; cat text{rank} >&2; kill $!; exit 1'
        job.work(rank, "sh", "-c", f"cd '{job.run_dir}'; {script}", "sh", *job.use_gpu(rank, *slowly))


def start_worker_that_hung_before(job: GpuJob) -> None:
    """Start a worker whose log shows progress until ten minutes ago."""
    task, begun = job.tasks[HUNG_BEFORE], datetime.now(UTC) - timedelta(seconds=700)
    stamps = [begun + timedelta(seconds=each) for each in range(100)]
    lines = [f"{stamp:%Y-%m-%dT%H:%M:%S}Z INFO Processed {n}/500 items\n" for n, stamp in enumerate(stamps)]
    log = job.run_dir / task.logs[0].replace("{node}", NODE).replace("{run}", "")
    log.write_text("".join(lines))
    os.utime(log, (stamps[-1].timestamp(), stamps[-1].timestamp()))
    job.work(HUNG_BEFORE, *job.use_gpu(HUNG_BEFORE, "--items", "1", "--seconds", "1000"))
    record = job.wrappers.record(task, "start")
    job.wrappers.path(task, "start").write_text(json.dumps({**record, "start": begun.timestamp() - 10}))


def condition(page: Page, rank: int, name: str) -> float | None:
    """Value of a condition of a worker."""
    return page.value("worker_gpu_condition", rank=str(rank), condition=name)


def end_with(job: GpuJob, rank: int, reason: str) -> list[str]:
    """Let a worker fail, check its exit reason and return the evidence."""
    (job.run_dir / f"fail{rank}").touch()
    page = job.until(lambda page: page.value("worker_last_exit_code", rank=str(rank)) == 1, "its end")
    reasons = page.by("reason", "worker_exits_total", rank=str(rank))
    assert {name for name, count in reasons.items() if count} == {reason}
    found: list[str] = job.of_worker(rank)["exit"]["evidence"]
    return found


def test_a_worker_is_attributed_to_its_planned_gpu_by_its_processes(job: GpuJob) -> None:
    page = job.until(lambda page: page.value("worker_gpu_memory_bytes", rank="0"), "its memory", READS_S)
    assert page.labels("worker_gpu_info", rank="0") == {
        **(page.labels("worker_gpu_memory_bytes", rank="0") or {}),
        "attribution": "process",
    }
    assert page.by("gpu", "worker_gpu_memory_bytes", rank="0") == {"0": 3 * GIB}
    assert page.value("worker_gpu_misplaced", rank="0") == 0
    assert page.value("gpu_workers", gpu="0") == 1
    assert page.value("gpu_foreign_processes", gpu="0") == 0
    found = job.of_worker(HEALTHY)
    assert found["gpu_plan"] == [use["uuid"] for use in found["gpu_use"]] == [profiles.uuid_of(HEALTHY)]
    assert found["gpu_misplaced"] is None
    page = job.until(lambda page: page.value("worker_gpu_sm_utilization_ratio", rank="0"), "its share", READS_S)
    assert page.value("worker_gpu_sm_utilization_ratio", rank="0") == pytest.approx(0.9, abs=0.05)


def test_a_child_process_is_attributed_to_its_worker(job: GpuJob) -> None:
    page = job.until(lambda page: page.value("gpu_workers", gpu=str(OFF_THE_BUS)) == 1, "the worker", READS_S)
    assert page.labels("worker_gpu_info", rank=str(OFF_THE_BUS))["attribution"] == "process"  # type: ignore[index]


def test_a_worker_on_the_gpu_of_another_worker_is_misplaced(job: GpuJob) -> None:
    rank = str(ASTRAY)
    page = job.until(lambda page: page.value("worker_gpu_misplaced", rank=rank) == 1, "the wrong GPU", READS_S)
    assert page.by("gpu", "worker_gpu_info", rank=rank) == {str(UNUSED): 1}
    detail = f"uses GPU {UNUSED} ({profiles.uuid_of(UNUSED)}), the plan gives it GPU {ASTRAY}"
    assert job.of_worker(ASTRAY)["gpu_misplaced"] == detail
    assert job.events("GPU misplaced") == [("warning", detail)]
    misplaced = page.by("rank", "worker_gpu_misplaced")
    assert misplaced[str(HEALTHY)] == 0
    assert {rank for rank, value in misplaced.items() if value} == {rank}


def test_a_gpu_without_a_process_of_its_worker_is_unused(job: GpuJob) -> None:
    job.until(lambda page: condition(page, UNUSED, "unused") == 1, "the condition", READS_S)
    page = job.until(lambda page: condition(page, ASTRAY, "unused") == 1, "the condition of the abandoned GPU", READS_S)
    assert condition(page, HEALTHY, "unused") == 0
    text = job.of_worker(UNUSED)["gpu_conditions"]["unused"]
    assert text.startswith(f"none of its processes on GPU {UNUSED} for ")


def test_a_program_error_on_a_gpu_gives_the_exit_reason_gpu_fault(job: GpuJob) -> None:
    job.until(lambda page: page.value("gpu_workers", gpu=str(FAULTY)) == 1, "the worker", READS_S)
    job.scenario.xid(31, job.scenario.gpus[FAULTY])
    job.write()
    job.until(lambda page: page.value("gpu_xid_errors_total", xid="31") == 1, "the error", 30)
    evidence = end_with(job, FAULTY, "gpu_fault")
    place = f"Xid 31 on GPU {FAULTY} ({profiles.uuid_of(FAULTY)})"
    assert evidence[0] == "exit status 1"
    assert f"{place}: invalid address, by the program" in evidence


def test_a_lack_of_gpu_memory_gives_the_exit_reason_cuda_oom(job: GpuJob) -> None:
    evidence = end_with(job, OUT_OF_MEMORY, "cuda_oom")
    assert any("CUDA out of memory" in text for text in evidence)


def test_a_gpu_fallen_off_the_bus_gives_the_exit_reason_gpu_fault(job: GpuJob) -> None:
    job.scenario.xid(79, job.scenario.gpus[OFF_THE_BUS])
    job.scenario.gpus[OFF_THE_BUS].state = "lost"
    job.write()
    job.until(lambda page: page.value("gpu_xid_errors_total", xid="79") == 1, "the error", 30)
    evidence = end_with(job, OFF_THE_BUS, "gpu_fault")
    assert f"Xid 79 on GPU {OFF_THE_BUS} ({profiles.uuid_of(OFF_THE_BUS)}): fallen off the bus" in evidence


def test_pids_of_another_namespace_are_attributed_to_the_only_planned_worker(tmp_path: Path) -> None:
    scenario = profiles.h200(2)
    scenario.gpus[0].processes = [FakeProcess(OTHER_NAMESPACE_PID, 7 * GIB, 60)]
    job = GpuJob(tmp_path, scenario, 2)
    try:
        job.work(0, "sleep", "1000")
        job.start()
        page = job.until(lambda page: page.value("worker_gpu_info", rank="0"), "the worker's GPU", READS_S)
        assert page.labels("worker_gpu_info", rank="0")["attribution"] == "inferred"  # type: ignore[index]
        assert page.by("gpu", "worker_gpu_memory_bytes", rank="0") == {"0": 7 * GIB}
        assert page.value("worker_gpu_misplaced", rank="0") is None
        assert page.by("gpu", "gpu_foreign_processes") == {"0": 0, "1": 0}
        assert job.of_worker(0)["gpu_use"][0]["attribution"] == "inferred"
    finally:
        job.close()


def test_a_busy_gpu_and_a_silent_log_mean_busy_without_progress(job: GpuJob) -> None:
    page = job.until(lambda page: condition(page, HANGS, "busy_without_progress") == 1, "the condition", 40)
    assert condition(page, HANGS, "busy_without_progress_low_power") == 0, "its power draw is normal"
    assert condition(page, HEALTHY, "busy_without_progress") == 0
    text = job.of_worker(HANGS)["gpu_conditions"]["busy_without_progress"]
    assert text.startswith(f"GPU {HANGS} at 95% and more for ")
    assert "no progress for " in text
    signs = [detail for _, detail in job.events("GPU signature") if detail.startswith("busy_without_progress: ")]
    assert any(f"GPU {HANGS} " in detail for detail in signs)


def test_little_power_without_progress_means_a_hang_in_a_collective(job: GpuJob) -> None:
    name = "busy_without_progress_low_power"
    page = job.until(lambda page: condition(page, HUNG_BEFORE, name) == 1, "the condition", 40)
    assert condition(page, HUNG_BEFORE, "busy_without_progress") == 1
    assert condition(page, HEALTHY, name) == 0
    assert job.of_worker(HUNG_BEFORE)["gpu_conditions"][name].endswith("150 W, 21% of its limit")


def test_a_worker_that_holds_memory_without_activity_is_idle(job: GpuJob) -> None:
    page = job.until(lambda page: condition(page, HELD, "held_idle") == 1, "the condition", 40)
    assert condition(page, HEALTHY, "held_idle") == 0
    assert condition(page, HELD, "busy_without_progress") == 0
    text = job.of_worker(HELD)["gpu_conditions"]["held_idle"]
    assert text.startswith("holds memory, GPU idle for ")
    assert "no progress for " in text


def test_a_process_outside_the_job_is_foreign_until_it_ends(
    job: GpuJob, foreign_process: subprocess.Popen[bytes]
) -> None:
    gpu = str(SHARED)
    page = job.until(lambda page: page.value("gpu_foreign_processes", gpu=gpu) == 1, "the process", READS_S)
    assert page.value("gpu_workers", gpu=gpu) == 1
    assert sum(page.by("gpu", "gpu_foreign_processes").values()) == 1
    (found,) = job.of_gpu(SHARED)["foreign"]
    assert (found["pid"], found["memory_bytes"]) == (foreign_process.pid, 5 * GIB)
    assert found["name"].startswith("python")
    until(lambda: job.events("GPU foreign process"), "the event", READS_S)
    ((level, detail),) = job.events("GPU foreign process")
    assert level == "warning"
    assert f"process {foreign_process.pid} (python" in detail
    foreign_process.terminate()
    foreign_process.wait()
    job.until(lambda page: page.value("gpu_foreign_processes", gpu=gpu) == 0, "its end", READS_S)
    assert job.of_gpu(SHARED)["foreign"] == []


def test_only_the_failed_workers_have_ended(job: GpuJob) -> None:
    page = job.page()
    failed = {str(rank) for rank in (FAULTY, OUT_OF_MEMORY, OFF_THE_BUS)}
    assert {rank for rank, up in page.by("rank", "worker_up").items() if not up} == failed
    assert not [name for name, found in job.status()["collectors"].items() if not found["success"]]
    assert run_files.read_json(job.run_dir / run_files.STATUS_DIR / f"{NODE}.json") is not None
    assert "Traceback" not in job.log.read_text("utf-8")
