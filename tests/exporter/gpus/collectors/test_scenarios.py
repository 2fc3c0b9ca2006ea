"""Failing GPUs and drivers: what a running sidecar shows, while everything else continues."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.exporter.gpus.collectors.gpu_job import READ_INTERVAL_S, SUPERVISOR, GpuJob, Page
from tests.fakenvml import Scenario, compiler, profiles
from tests.support.exporter import SOON_S, until

NO_ACTIVITY = {"gpu_info", "gpu_up", "gpu_state", "gpu_workers", "gpu_foreign_processes"}
"""Families that a GPU may have while it does not answer."""
SLACK_S = 30.0  # extra time between two reads on a busy machine
CALL_S = 2.0  # time after which a call counts as hanging

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")
StartJob = Callable[..., GpuJob]


@pytest.fixture(scope="module")
def start_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartJob]:
    """Starts jobs and ends them afterwards."""
    jobs: list[GpuJob] = []

    def start(scenario: Scenario | None, gpus: int, *above: str, **manifest: Any) -> GpuJob:
        job = GpuJob(tmp_path_factory.mktemp("job"), scenario, gpus, **manifest)
        jobs.append(job)
        job.start(*above)
        job.until_ready()
        return job

    yield start
    for job in jobs:
        job.stop()
    for job in jobs:
        job.close()


@pytest.fixture(scope="module")
def shared(start_job: StartJob) -> GpuJob:
    """A job on four healthy GPUs."""
    job = start_job(profiles.h200(4), 4)
    job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs")
    return job


@pytest.fixture
def job(shared: GpuJob) -> Iterator[GpuJob]:
    """The shared job. Afterwards its GPUs are healthy again."""
    yield shared
    for gpu in shared.scenario.gpus:
        gpu.state = "ok"
    shared.scenario.faults.clear()
    shared.write()


def until_others_continue(job: GpuJob, but: str) -> Page:
    """Wait for new values of all GPUs but one."""
    before = job.page().by("gpu", "gpu_energy_joules_total")
    assert before.keys() == set("0123") - {but}

    def has_risen(page: Page) -> bool:
        now = page.by("gpu", "gpu_energy_joules_total")
        return now.keys() == before.keys() and all(now[gpu] > before[gpu] for gpu in before)

    return job.until(has_risen, "new values of the other GPUs", 2 * READ_INTERVAL_S + SLACK_S)


def health(page: Page) -> str | None:
    """The current health."""
    return next((name for name, value in page.by("health", "gpu_health").items() if value), None)


def failing_collectors(job: GpuJob) -> set[str]:
    """Collectors whose last read failed or takes too long."""
    collectors = job.status()["collectors"].items()
    return {name for name, found in collectors if not found["success"] or found["overdue"]}


def until_collectors_continue(job: GpuJob) -> None:
    """Wait until the frequent collectors have read again."""

    def last_success() -> dict[str, float]:
        collectors = job.status()["collectors"]
        return {name: collectors[name]["last_success"] for name in ("job", "workers", "logs", "self")}

    before = last_success()
    until(
        lambda: all(last_success()[name] > earlier for name, earlier in before.items()), "other collectors", 5 + SLACK_S
    )


def test_a_lost_gpu_has_no_activity_until_it_recovers_while_the_others_continue(job: GpuJob) -> None:
    gpu = job.scenario.gpus[1]
    assert "gpu_utilization_ratio" in job.page().of_gpu("1")
    gpu.state = "lost"
    job.write()
    page = job.until(lambda page: page.value("gpu_up", gpu="1") == 0, "the loss", READ_INTERVAL_S + SLACK_S)
    assert page.of_gpu("1") <= NO_ACTIVITY
    assert page.by("state", "gpu_state", gpu="1") == {"lost": 1}
    assert health(page) == "failure"
    assert page.value("gpu_driver_state", state="ok") == 1
    reason = {"gpu": "1", "severity": "failure"}
    gpus = job.status()["gpus"]
    assert [{key: found[key] for key in reason} for found in gpus["reasons"]] == [reason]
    assert [entry["state"] for entry in gpus["gpus"]] == ["ok", "lost", "ok", "ok"]
    ((level, detail),) = job.events("GPU lost")
    assert level == "critical"
    assert detail.startswith(f"GPU 1 ({gpu.uuid}): ")
    page = until_others_continue(job, but="1")
    assert page.by("gpu", "gpu_up") == {"0": 1, "1": 0, "2": 1, "3": 1}
    assert page.by("gpu", "gpu_state") == {"1": 1}
    assert not failing_collectors(job)
    gpu.state = "ok"
    job.write()
    page = job.until(lambda page: page.value("gpu_up", gpu="1") == 1, "its recovery")
    assert not page.by("gpu", "gpu_state")
    assert health(page) == "healthy"
    assert job.events("GPU works again") == [("info", f"GPU 1 ({gpu.uuid})")]
    assert len(job.events("GPU lost")) == 1
    job.until(lambda page: "gpu_utilization_ratio" in page.of_gpu("1"), "its activity", READ_INTERVAL_S + SLACK_S)


def test_a_hanging_call_affects_only_its_gpu_which_recovers(job: GpuJob) -> None:
    gpu = job.scenario.gpus[2]
    job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs")
    job.scenario.hang("nvmlDeviceGetUtilizationRates", gpu)
    job.write()
    page = job.until(lambda page: page.value("gpu_up", gpu="2") == 0, "the hang", READ_INTERVAL_S + CALL_S + SLACK_S)
    assert page.by("state", "gpu_state") == {"hanging": 1}
    assert page.of_gpu("2") <= NO_ACTIVITY
    assert health(page) == "failure"
    for _ in range(2):
        page = until_others_continue(job, but="2")
    assert page.by("gpu", "gpu_up") == {"0": 1, "1": 1, "2": 0, "3": 1}
    assert not failing_collectors(job)
    assert job.scrape_durations()[-3] < CALL_S
    assert job.of_gpu(2)["words"] == "activity has not returned"
    job.scenario.release()
    job.write()
    job.until(lambda page: page.value("gpu_up", gpu="2") == 1, "its recovery")
    job.until(lambda page: "gpu_utilization_ratio" in page.of_gpu("2"), "its activity", READ_INTERVAL_S + SLACK_S)


def test_a_hanging_driver_delays_nothing_else_and_is_read_again_later(start_job: StartJob) -> None:
    scenario = profiles.h200(4)
    scenario.global_lock = True
    job = start_job(scenario, 4)
    job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs")
    scenario.hang("nvmlDeviceGetUtilizationRates", scenario.gpus[2])
    job.write()
    page = job.until(lambda page: page.value("gpu_driver_state", state="hanging") == 1, "the hang")
    assert page.by("state", "gpu_driver_state") == {"hanging": 1}
    assert health(page) == "failure"
    assert 0 in page.by("gpu", "gpu_up").values()
    assert 1 not in page.by("gpu", "gpu_up").values(), "the state of unread GPUs is unknown"
    until_collectors_continue(job)
    assert not failing_collectors(job)
    assert job.scrape_durations()[-3] < CALL_S
    job.until(lambda page: not page.by("gpu", "gpu_energy_joules_total"), "the end of outdated values")
    scenario.release()
    job.write()
    page = job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "the recovery of all GPUs")
    assert page.by("state", "gpu_driver_state") == {"ok": 1}


def test_the_sidecar_exits_in_time_while_the_driver_hangs(start_job: StartJob) -> None:
    scenario = profiles.h200(4)
    scenario.global_lock = True
    job = start_job(scenario, 4)
    job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs")
    scenario.hang("nvmlDeviceGetUtilizationRates", scenario.gpus[1])
    job.write()
    job.until(lambda page: page.by("state", "gpu_state") == {"hanging": 1}, "the hang")
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=SOON_S) == 0
    assert "Traceback" not in job.log.read_text("utf-8")


def test_xid_counts_start_at_0_and_survive_a_restart_of_the_sidecar(start_job: StartJob) -> None:
    scenario = profiles.h200(4)
    job = start_job(scenario, 4)
    page = job.until(lambda page: page.by("xid", "gpu_xid_errors_total"), "the counters")
    assert {page.by("xid", "gpu_xid_errors_total")[code] for code in ("31", "79", "94")} == {0}
    assert not page.by("xid", "gpu_xid_last_timestamp_seconds")
    job.until_it_waits_for_events()
    began = time.time()
    for gpu, code in ((1, 79), (2, 94), (3, 31), (3, 31)):
        scenario.xid(code, scenario.gpus[gpu])
    job.write()
    page = job.until(lambda page: sum(page.by("xid", "gpu_xid_errors_total").values()) == 4, "the errors", SLACK_S)
    counts = page.by("xid", "gpu_xid_errors_total")
    assert {code: count for code, count in counts.items() if count} == {"79": 1, "94": 1, "31": 2}
    times = page.by("gpu", "gpu_xid_last_timestamp_seconds")
    assert times.keys() == {"1", "2", "3"}
    assert all(began <= xid_time <= time.time() for xid_time in times.values())
    assert page.value("gpu_xid_last_timestamp_seconds", gpu="1", xid="79") is not None
    levels = {detail.partition(": ")[2].partition(":")[0]: level for level, detail in job.events("GPU Xid")}
    assert levels == {"Xid 79": "critical", "Xid 94": "critical", "Xid 31": "warning"}
    assert health(page) == "failure"
    reasons = {(found["gpu"], found["severity"]) for found in job.status()["gpus"]["reasons"]}
    assert reasons == {("1", "failure"), ("2", "warning")}

    job.kill()
    job.start()
    page = job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs again")
    assert page.by("xid", "gpu_xid_errors_total") == counts
    assert page.by("gpu", "gpu_xid_last_timestamp_seconds") == times
    assert not job.events("GPU Xid"), "the first sidecar has reported them"
    assert health(page) == "failure"
    job.until_it_waits_for_events()
    scenario.xid(31, scenario.gpus[3])
    job.write()
    page = job.until(lambda page: page.by("xid", "gpu_xid_errors_total")["31"] > 2, "one more", SLACK_S)
    assert page.by("xid", "gpu_xid_errors_total") == {**counts, "31": 3}


@pytest.mark.parametrize("state", ["no_library", "version_mismatch"])
def test_an_unreadable_driver_has_a_state_and_affects_nothing_else(start_job: StartJob, state: str) -> None:
    scenario = profiles.h200(2)
    scenario.init = "LIB_RM_VERSION_MISMATCH"
    job = start_job(None if state == "no_library" else scenario, 2)
    job.work(0, "sh", "-c", "echo Processed 7/50 items; exec sleep 600")
    page = job.until(lambda page: page.by("state", "gpu_driver_state") == {state: 1}, "the state")
    assert page.value("gpus_allocated") == 2
    assert not page.by("gpu", "gpu_up")
    assert health(page) == ("warning" if state == "version_mismatch" else None)
    job.until(lambda page: page.value("worker_items", rank="0") == 7, "the worker's progress")
    job.until(lambda page: page.by("rank", "worker_up") == {"0": 1, "1": 0}, "the worker")
    assert not failing_collectors(job)
    gpus = job.status()["gpus"]
    assert (gpus["driver_state"], gpus["gpus"]) == (state, [])
    assert gpus["words"]
    if state == "version_mismatch":
        job.scenario.init = 0
        job.write()
        job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 1}, "the first reading")
    assert "Traceback" not in job.log.read_text("utf-8")


def test_a_supervised_sidecar_restarts_with_a_new_driver_and_keeps_its_counts(start_job: StartJob) -> None:
    scenario = profiles.h200(2)
    job = start_job(scenario, 2, *SUPERVISOR)
    job.work(0, "sh", "-c", "echo Processed 7/50 items; exec sleep 600")
    job.until(lambda page: page.value("worker_items", rank="0") == 7, "the worker's progress")
    job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 1}, "all GPUs")
    job.until_it_waits_for_events()
    scenario.xid(31, scenario.gpus[0])
    job.write()
    job.until(lambda page: page.value("gpu_xid_errors_total", xid="31") == 1, "the error")
    scenario.broken = "LIB_RM_VERSION_MISMATCH"
    job.write()
    until(lambda: "exit status 75; restarting it in 0 s" in job.log.read_text("utf-8"), "its end")
    scenario.broken, scenario.driver = 0, "575.57.08"
    job.write()
    page = job.until(
        lambda page: (page.labels("gpu_info", gpu="0") or {}).get("driver_version") == "575.57.08", "the new driver"
    )
    assert page.by("gpu", "gpu_up") == {"0": 1, "1": 1}
    assert page.value("gpu_xid_errors_total", xid="31") == 1
    job.until(lambda page: page.value("worker_items", rank="0") == 7, "the worker's progress")
    job.until(lambda page: page.value("worker_up", rank="0") == 1, "the worker")

    scenario.broken = "LIB_RM_VERSION_MISMATCH"  # again, shortly after the first time
    job.write()
    job.until(lambda page: page.by("state", "gpu_driver_state") == {"version_mismatch": 1}, "its state")
    until(lambda: "continues without GPUs" in job.log.read_text("utf-8"), "the decision to continue")
    until_collectors_continue(job)
    assert job.log.read_text("utf-8").count("restarting it") == 1
    scenario.broken = 0
    job.write()
    page = job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 1}, "the next reading")
    assert page.value("gpu_xid_errors_total", xid="31") == 1
    assert job.log.read_text("utf-8").count("restarting it") == 1


def test_an_unsupervised_sidecar_stays_and_reports_a_replaced_driver(start_job: StartJob) -> None:
    scenario = profiles.h200(2)
    job = start_job(scenario, 2)
    job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 1}, "all GPUs")
    scenario.broken = "LIB_RM_VERSION_MISMATCH"
    job.write()
    page = job.until(lambda page: not page.value("gpu_driver_state", state="ok"), "the driver's state")
    assert page.by("state", "gpu_driver_state") == {"version_mismatch": 1}
    assert health(page) == "warning", "running work continues"
    assert not page.by("gpu", "gpu_energy_joules_total")
    assert not page.by("gpu", "gpu_up"), "the state is unknown"
    assert job.status()["gpus"]["words"] == "RM has detected an NVML/RM version mismatch."
    until_collectors_continue(job)
    assert not failing_collectors(job)
    assert job.process.poll() is None
