"""Workers on GPUs: attribution, hangs, idle GPUs and exit reasons."""

import subprocess
from collections.abc import Iterator

import pytest

from exporter.contract import run_files
from tests.exporter.gpus.collectors.gpu_job import GpuJob, Page
from tests.fakenvml import compiler, profiles
from tests.support.exporter import NODE, until

GIB = 1 << 30
READS_S = 60.0  # enough for a read of the process list and of its collectors on a busy machine
HEALTHY, HANGS, SHARED, FAULTY = range(4)
"""Ranks of the workers, which are also the indices of their GPUs."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuJob]:
    """A job on four GPUs. The name of each rank says what its worker does."""
    job = GpuJob(tmp_path_factory.mktemp("job"), profiles.h200(4), 4, stall_timeout_s=5.0, launch_timeout_s=3.0)
    try:
        job.start()
        job.until_ready()
        start_workers(job)
        yield job
    finally:
        job.close()


@pytest.fixture(scope="module", autouse=True)
def foreign_process(job: GpuJob) -> subprocess.Popen[bytes]:
    """A foreign process on a GPU of the job. It starts early because reporting it takes a while."""
    return job.run_foreign(job.use_gpu(SHARED, "--items", "1", "--seconds", "1000", "--memory", str(5 * GIB)))


def start_workers(job: GpuJob) -> None:
    """Start all workers. The one that fails waits for the file `fail`."""
    slowly = ("--items", "5000", "--seconds", "1000")
    job.work(HEALTHY, *job.use_gpu(HEALTHY, *slowly, "--memory", str(3 * GIB)))
    job.work(HANGS, *job.use_gpu(HANGS, *slowly, "--silent-after", "40"))
    job.work(SHARED, *job.use_gpu(SHARED, *slowly))
    script = f'cd "{job.run_dir}"; "$@" & while [ ! -e fail ]; do sleep 0.05; done; kill $!; exit 1'
    job.work(FAULTY, "sh", "-c", script, "sh", *job.use_gpu(FAULTY, *slowly))


def condition(page: Page, rank: int, name: str) -> float | None:
    """Value of a condition of a worker."""
    return page.value("worker_gpu_condition", rank=str(rank), condition=name)


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


def test_a_program_error_on_a_gpu_gives_the_exit_reason_gpu_fault(job: GpuJob) -> None:
    job.until(lambda page: page.value("gpu_workers", gpu=str(FAULTY)) == 1, "the worker", READS_S)
    job.scenario.xid(31, job.scenario.gpus[FAULTY])
    job.write()
    job.until(lambda page: page.value("gpu_xid_errors_total", xid="31") == 1, "the error")
    (job.run_dir / "fail").touch()
    page = job.until(lambda page: page.value("worker_last_exit_code", rank=str(FAULTY)) == 1, "its end")
    reasons = page.by("reason", "worker_exits_total", rank=str(FAULTY))
    assert {name for name, count in reasons.items() if count} == {"gpu_fault"}
    evidence = job.of_worker(FAULTY)["exit"]["evidence"]
    place = f"Xid 31 on GPU {FAULTY} ({profiles.uuid_of(FAULTY)})"
    assert evidence[0] == "exit status 1"
    assert f"{place}: invalid address, by the program" in evidence


def test_a_busy_gpu_and_a_silent_log_mean_busy_without_progress(job: GpuJob) -> None:
    page = job.until(lambda page: condition(page, HANGS, "busy_without_progress") == 1, "the condition")
    assert condition(page, HANGS, "busy_without_progress_low_power") == 0, "its power draw is normal"
    assert condition(page, HEALTHY, "busy_without_progress") == 0
    text = job.of_worker(HANGS)["gpu_conditions"]["busy_without_progress"]
    assert text.startswith(f"GPU {HANGS} at 95% and more for ")
    assert "no progress for " in text
    signs = [detail for _, detail in job.events("GPU signature") if detail.startswith("busy_without_progress: ")]
    assert any(f"GPU {HANGS} " in detail for detail in signs)


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


def test_only_the_failed_worker_has_ended(job: GpuJob) -> None:
    assert {rank for rank, up in job.page().by("rank", "worker_up").items() if not up} == {str(FAULTY)}
    assert not [name for name, found in job.status()["collectors"].items() if not found["success"]]
    assert run_files.read_json(job.run_dir / run_files.STATUS_DIR / f"{NODE}.json") is not None
    assert "Traceback" not in job.log.read_text("utf-8")
