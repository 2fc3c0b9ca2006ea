"""Workers on GPUs: who uses which, what looks like a hang or like idleness, and whose end a GPU was the reason of."""

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
NOBODY_HERE = (1 << 22) - 7  # a pid of another namespace
LOOKS_S = 25.0  # enough for the driver's list of processes to be read, and for whoever looks at it, on a busy machine
HEALTHY, HANGS, ASTRAY, UNUSED, HELD, SHARED, FAULTY, OUT_OF_MEMORY, OFF_THE_BUS, HUNG_BEFORE = range(10)
"""Workers by their ranks, which are the GPUs of the plan too."""
OOM = """Traceback (most recent call last):
  File "train.py", line 88, in <module>
    loss = model(batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of \
which 1.12 GiB is free."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuJob]:
    """A job on ten GPUs whose workers do what their names say."""
    scenario = profiles.h200(10)
    draw_power(scenario.gpus[HUNG_BEFORE], 150)
    job = GpuJob(tmp_path_factory.mktemp("job"), scenario, 10, stall_timeout_s=5.0, launch_timeout_s=3.0)
    try:
        begin_one_that_hung_before(job)
        job.start()
        job.until_ready()
        begin_workers(job)
        job.until(lambda page: condition(page, HELD, "held_idle") == 0, "that it was seen at work", LOOKS_S)
        scenario.gpus[HELD].utilization = 0
        job.write()
        yield job
    finally:
        job.close()


@pytest.fixture(scope="module", autouse=True)
def stranger(job: GpuJob) -> subprocess.Popen[bytes]:
    """A process of nobody's on one of the job's GPUs, there from the beginning, since it takes a while to be told."""
    return job.run_beside(job.use_gpu(SHARED, "--items", "1", "--seconds", "1000", "--memory", str(5 * GIB)))


def draw_power(gpu: FakeGpu, watts: int) -> None:
    """Have a GPU draw so much."""
    gpu.power_mw = watts * 1000
    gpu.energy_mj = gpu.fields[83] = Rate(80_000_000_000, watts * 1000)
    gpu.fields[185] = gpu.fields[186] = watts * 1000


def begin_workers(job: GpuJob) -> None:
    """Start them all; those that fail wait until they are told to."""
    slowly = ("--items", "5000", "--seconds", "1000")
    job.work(HEALTHY, *job.use_gpu(HEALTHY, *slowly, "--memory", str(3 * GIB)))
    job.work(HANGS, *job.use_gpu(HANGS, *slowly, "--silent-after", "40"))
    job.work(ASTRAY, *job.use_gpu(UNUSED, *slowly))
    job.work(UNUSED, "sleep", "1000")
    job.work(HELD, *job.use_gpu(HELD, *slowly, "--silent-after", "40", "--percent", "0"))
    job.work(SHARED, *job.use_gpu(SHARED, *slowly))
    for rank, words in ((FAULTY, "the kernel is bad"), (OUT_OF_MEMORY, OOM), (OFF_THE_BUS, "something is bad")):
        (job.run_dir / f"words{rank}").write_text(words)
        script = f'"$@" & while [ ! -e fail{rank} ]; do sleep 0.05; done; cat words{rank} >&2; kill $!; exit 1'
        job.work(rank, "sh", "-c", f"cd '{job.run_dir}'; {script}", "sh", *job.use_gpu(rank, *slowly))


def begin_one_that_hung_before(job: GpuJob) -> None:
    """A worker that has worked for a while and then hung, ten minutes ago."""
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
    """Whether a condition of a worker holds."""
    return page.value("worker_gpu_condition", rank=str(rank), condition=name)


def ends(job: GpuJob, rank: int, reason: str) -> list[str]:
    """The evidence, once a worker that is told to fail has ended for this reason."""
    (job.run_dir / f"fail{rank}").touch()
    page = job.until(lambda page: page.value("worker_last_exit_code", rank=str(rank)) == 1, "its end")
    reasons = page.by("reason", "worker_exits_total", rank=str(rank))
    assert {name for name, count in reasons.items() if count} == {reason}
    found: list[str] = job.of_worker(rank)["exit"]["evidence"]
    return found


def test_a_worker_has_the_gpu_of_its_plan_by_its_processes(job: GpuJob) -> None:
    page = job.until(lambda page: page.value("worker_gpu_memory_bytes", rank="0"), "its memory", LOOKS_S)
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
    page = job.until(lambda page: page.value("worker_gpu_sm_utilization_ratio", rank="0"), "its share", LOOKS_S)
    assert page.value("worker_gpu_sm_utilization_ratio", rank="0") == pytest.approx(0.9, abs=0.05)


def test_the_process_of_a_child_is_its_workers(job: GpuJob) -> None:
    page = job.until(lambda page: page.value("gpu_workers", gpu=str(OFF_THE_BUS)) == 1, "the worker", LOOKS_S)
    assert page.labels("worker_gpu_info", rank=str(OFF_THE_BUS))["attribution"] == "process"  # type: ignore[index]


def test_a_worker_on_the_gpu_of_another_is_misplaced(job: GpuJob) -> None:
    rank = str(ASTRAY)
    page = job.until(lambda page: page.value("worker_gpu_misplaced", rank=rank) == 1, "the wrong GPU", LOOKS_S)
    assert page.by("gpu", "worker_gpu_info", rank=rank) == {str(UNUSED): 1}
    words = f"uses GPU {UNUSED} ({profiles.uuid_of(UNUSED)}), the plan gives it GPU {ASTRAY}"
    assert job.of_worker(ASTRAY)["gpu_misplaced"] == words
    assert job.events("GPU misplaced") == [("warning", words)]
    misplaced = page.by("rank", "worker_gpu_misplaced")
    assert misplaced[str(HEALTHY)] == 0
    assert {rank for rank, value in misplaced.items() if value} == {rank}


def test_a_gpu_on_which_its_worker_has_no_process_is_unused(job: GpuJob) -> None:
    job.until(lambda page: condition(page, UNUSED, "unused") == 1, "the condition", LOOKS_S)
    page = job.until(lambda page: condition(page, ASTRAY, "unused") == 1, "that of the GPU that is left", LOOKS_S)
    assert condition(page, HEALTHY, "unused") == 0
    words = job.of_worker(UNUSED)["gpu_conditions"]["unused"]
    assert words.startswith(f"no process of it on GPU {UNUSED} for ")


def test_a_program_with_an_error_of_its_own_on_a_gpu_ends_by_a_gpu_fault_of_the_program(job: GpuJob) -> None:
    job.until(lambda page: page.value("gpu_workers", gpu=str(FAULTY)) == 1, "the worker", LOOKS_S)
    job.scenario.xid(31, job.scenario.gpus[FAULTY])
    job.write()
    job.until(lambda page: page.value("gpu_xid_errors_total", xid="31") == 1, "the error", 30)
    evidence = ends(job, FAULTY, "gpu_fault")
    place = f"Xid 31 on GPU {FAULTY} ({profiles.uuid_of(FAULTY)})"
    assert evidence[0] == "exit status 1"
    assert f"{place}: invalid address, by the program" in evidence


def test_a_program_that_finds_no_memory_on_its_gpu_ends_by_cuda_oom(job: GpuJob) -> None:
    evidence = ends(job, OUT_OF_MEMORY, "cuda_oom")
    assert any("CUDA out of memory" in words for words in evidence)


def test_a_program_whose_gpu_has_fallen_off_the_bus_ends_by_a_gpu_fault(job: GpuJob) -> None:
    job.scenario.xid(79, job.scenario.gpus[OFF_THE_BUS])
    job.scenario.gpus[OFF_THE_BUS].state = "lost"
    job.write()
    job.until(lambda page: page.value("gpu_xid_errors_total", xid="79") == 1, "the error", 30)
    evidence = ends(job, OFF_THE_BUS, "gpu_fault")
    assert f"Xid 79 on GPU {OFF_THE_BUS} ({profiles.uuid_of(OFF_THE_BUS)}): fallen off the bus" in evidence


def test_pids_of_another_namespace_are_inferred_to_be_the_one_workers_of_the_plan(tmp_path: Path) -> None:
    scenario = profiles.h200(2)
    scenario.gpus[0].processes = [FakeProcess(NOBODY_HERE, 7 * GIB, 60)]
    job = GpuJob(tmp_path, scenario, 2)
    try:
        job.work(0, "sleep", "1000")
        job.start()
        page = job.until(lambda page: page.value("worker_gpu_info", rank="0"), "the worker's GPU", LOOKS_S)
        assert page.labels("worker_gpu_info", rank="0")["attribution"] == "inferred"  # type: ignore[index]
        assert page.by("gpu", "worker_gpu_memory_bytes", rank="0") == {"0": 7 * GIB}
        assert page.value("worker_gpu_misplaced", rank="0") is None
        assert page.by("gpu", "gpu_foreign_processes") == {"0": 0, "1": 0}
        assert job.of_worker(0)["gpu_use"][0]["attribution"] == "inferred"
    finally:
        job.close()


def test_a_worker_that_is_busy_without_progress_is_known_by_its_gpu_and_its_log(job: GpuJob) -> None:
    page = job.until(lambda page: condition(page, HANGS, "busy_without_progress") == 1, "the condition", 40)
    assert condition(page, HANGS, "busy_without_progress_low_power") == 0, "it draws what its work does"
    assert condition(page, HEALTHY, "busy_without_progress") == 0
    words = job.of_worker(HANGS)["gpu_conditions"]["busy_without_progress"]
    assert words.startswith(f"GPU {HANGS} at 95% and more for ")
    assert "no progress for " in words
    signs = [detail for _, detail in job.events("GPU signature") if detail.startswith("busy_without_progress: ")]
    assert any(f"GPU {HANGS} " in detail for detail in signs)


def test_one_that_draws_little_power_meanwhile_hangs_in_a_collective(job: GpuJob) -> None:
    name = "busy_without_progress_low_power"
    page = job.until(lambda page: condition(page, HUNG_BEFORE, name) == 1, "the condition", 40)
    assert condition(page, HUNG_BEFORE, "busy_without_progress") == 1
    assert condition(page, HEALTHY, name) == 0
    assert job.of_worker(HUNG_BEFORE)["gpu_conditions"][name].endswith("150 W, 21% of its limit")


def test_a_worker_that_holds_memory_and_does_nothing_is_idle(job: GpuJob) -> None:
    page = job.until(lambda page: condition(page, HELD, "held_idle") == 1, "the condition", 40)
    assert condition(page, HEALTHY, "held_idle") == 0
    assert condition(page, HELD, "busy_without_progress") == 0
    words = job.of_worker(HELD)["gpu_conditions"]["held_idle"]
    assert words.startswith("memory held and no use for ")
    assert "no progress for " in words


def test_a_process_that_is_not_of_the_job_is_foreign_while_it_is_there(
    job: GpuJob, stranger: subprocess.Popen[bytes]
) -> None:
    gpu = str(SHARED)
    page = job.until(lambda page: page.value("gpu_foreign_processes", gpu=gpu) == 1, "the process", LOOKS_S)
    assert page.value("gpu_workers", gpu=gpu) == 1
    assert sum(page.by("gpu", "gpu_foreign_processes").values()) == 1
    (found,) = job.of_gpu(SHARED)["foreign"]
    assert (found["pid"], found["memory_bytes"]) == (stranger.pid, 5 * GIB)
    assert found["name"].startswith("python")
    until(lambda: job.events("GPU foreign process"), "the event", LOOKS_S)
    ((level, words),) = job.events("GPU foreign process")
    assert level == "warning"
    assert f"process {stranger.pid} (python" in words
    stranger.terminate()
    stranger.wait()
    job.until(lambda page: page.value("gpu_foreign_processes", gpu=gpu) == 0, "its end", LOOKS_S)
    assert job.of_gpu(SHARED)["foreign"] == []


def test_nobody_but_the_failed_has_ended(job: GpuJob) -> None:
    page = job.page()
    failed = {str(rank) for rank in (FAULTY, OUT_OF_MEMORY, OFF_THE_BUS)}
    assert {rank for rank, up in page.by("rank", "worker_up").items() if not up} == failed
    assert not [name for name, found in job.status()["collectors"].items() if not found["success"]]
    assert run_files.read_json(job.run_dir / run_files.STATUS_DIR / f"{NODE}.json") is not None
    assert "Traceback" not in job.log.read_text("utf-8")
