"""GPUs that fail, and drivers that do: what a running sidecar shows of them, and that all else goes on."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.exporter.gpus.collectors.gpu_job import LOOK_S, SUPERVISOR, GpuJob, Page
from tests.fakenvml import Scenario, compiler, profiles
from tests.support.exporter import SOON_S, until

NO_ACTIVITY = {"gpu_info", "gpu_up", "gpu_state", "gpu_workers", "gpu_foreign_processes"}
"""All that may be told of a GPU that does not answer."""
SLACK_S = 30.0  # what a busy machine may add to the time between two looks
CALL_S = 2.0  # after which a call counts as one that hangs

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")
Begin = Callable[..., GpuJob]


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begin]:
    """Begins jobs, and ends them."""
    begun: list[GpuJob] = []

    def begin(scenario: Scenario | None, gpus: int, *above: str, **manifest: Any) -> GpuJob:
        job = GpuJob(tmp_path_factory.mktemp("job"), scenario, gpus, **manifest)
        begun.append(job)
        job.start(*above)
        job.until_ready()
        return job

    yield begin
    for job in begun:
        job.stop()
    for job in begun:
        job.close()


@pytest.fixture(scope="module")
def shared(begin: Begin) -> GpuJob:
    """A job on four GPUs, nothing the matter with them."""
    job = begin(profiles.h200(4), 4)
    job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs")
    return job


@pytest.fixture
def job(shared: GpuJob) -> Iterator[GpuJob]:
    """The same; what is done to its GPUs is taken back."""
    yield shared
    for gpu in shared.scenario.gpus:
        gpu.state = "ok"
    shared.scenario.faults.clear()
    shared.write()


def until_others_go_on(job: GpuJob, but: str) -> Page:
    """Wait for fresh values of all GPUs but one."""
    before = job.page().by("gpu", "gpu_energy_joules_total")
    assert before.keys() == set("0123") - {but}

    def rise(page: Page) -> bool:
        now = page.by("gpu", "gpu_energy_joules_total")
        return now.keys() == before.keys() and all(now[gpu] > before[gpu] for gpu in before)

    return job.until(rise, "fresh values of the other GPUs", 2 * LOOK_S + SLACK_S)


def health(page: Page) -> str | None:
    """The present one."""
    return next((name for name, value in page.by("health", "gpu_health").items() if value), None)


def collectors_that_fail(job: GpuJob) -> set[str]:
    """Those whose last read was no success, or takes too long."""
    told = job.status()["collectors"].items()
    return {name for name, found in told if not found["success"] or found["overdue"]}


def until_collectors_go_on(job: GpuJob) -> None:
    """Wait until those that read often have read again."""

    def last() -> dict[str, float]:
        told = job.status()["collectors"]
        return {name: told[name]["last_success"] for name in ("job", "workers", "logs", "self")}

    before = last()
    until(lambda: all(last()[name] > moment for name, moment in before.items()), "other collectors", 5 + SLACK_S)


def test_a_lost_gpu_has_no_activity_while_the_others_go_on_and_works_again_later(job: GpuJob) -> None:
    gpu = job.scenario.gpus[1]
    assert "gpu_utilization_ratio" in job.page().of_gpu("1")
    gpu.state = "lost"
    job.write()
    page = job.until(lambda page: page.value("gpu_up", gpu="1") == 0, "the loss", LOOK_S + SLACK_S)
    assert page.of_gpu("1") <= NO_ACTIVITY
    assert page.by("state", "gpu_state", gpu="1") == {"lost": 1}
    assert health(page) == "failure"
    assert page.value("gpu_driver_state", state="ok") == 1
    reason = {"gpu": "1", "severity": "failure"}
    told = job.status()["gpus"]
    assert [{key: found[key] for key in reason} for found in told["reasons"]] == [reason]
    assert [entry["state"] for entry in told["gpus"]] == ["ok", "lost", "ok", "ok"]
    ((level, detail),) = job.events("GPU lost")
    assert level == "critical"
    assert detail.startswith(f"GPU 1 ({gpu.uuid}): ")
    page = until_others_go_on(job, but="1")
    assert page.by("gpu", "gpu_up") == {"0": 1, "1": 0, "2": 1, "3": 1}
    assert page.by("gpu", "gpu_state") == {"1": 1}
    assert not collectors_that_fail(job)
    gpu.state = "ok"
    job.write()
    page = job.until(lambda page: page.value("gpu_up", gpu="1") == 1, "that it works again")
    assert not page.by("gpu", "gpu_state")
    assert health(page) == "healthy"
    assert job.events("GPU works again") == [("info", f"GPU 1 ({gpu.uuid})")]
    assert len(job.events("GPU lost")) == 1
    job.until(lambda page: "gpu_utilization_ratio" in page.of_gpu("1"), "its activity", LOOK_S + SLACK_S)


def test_a_call_that_hangs_costs_its_own_gpu_alone_and_that_comes_back(job: GpuJob) -> None:
    gpu = job.scenario.gpus[2]
    job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs")
    job.scenario.hang("nvmlDeviceGetUtilizationRates", gpu)
    job.write()
    page = job.until(lambda page: page.value("gpu_up", gpu="2") == 0, "the hang", LOOK_S + CALL_S + SLACK_S)
    assert page.by("state", "gpu_state") == {"hanging": 1}
    assert page.of_gpu("2") <= NO_ACTIVITY
    assert health(page) == "failure"
    for _ in range(2):
        page = until_others_go_on(job, but="2")
    assert page.by("gpu", "gpu_up") == {"0": 1, "1": 1, "2": 0, "3": 1}
    assert not collectors_that_fail(job)
    assert job.seconds_of_scrapes()[-3] < CALL_S
    assert job.of_gpu(2)["words"] == "activity has not come back"
    job.scenario.release()
    job.write()
    job.until(lambda page: page.value("gpu_up", gpu="2") == 1, "that it is back")
    job.until(lambda page: "gpu_utilization_ratio" in page.of_gpu("2"), "its activity", LOOK_S + SLACK_S)


def test_a_gpu_that_needs_a_reset_says_so(job: GpuJob) -> None:
    job.scenario.gpus[0].state = "reset_required"
    job.write()
    page = job.until(lambda page: page.value("gpu_up", gpu="0") == 0, "its state", LOOK_S + SLACK_S)
    assert page.by("state", "gpu_state", gpu="0") == {"reset_required": 1}
    assert page.of_gpu("0") <= NO_ACTIVITY
    assert health(page) == "failure"
    until_others_go_on(job, but="0")


def test_a_driver_that_answers_nobody_holds_up_nothing_else_and_is_read_again_later(begin: Begin) -> None:
    scenario = profiles.h200(4)
    scenario.global_lock = True
    job = begin(scenario, 4)
    job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs")
    scenario.hang("nvmlDeviceGetUtilizationRates", scenario.gpus[2])
    job.write()
    page = job.until(lambda page: page.value("gpu_driver_state", state="hanging") == 1, "the hang")
    assert page.by("state", "gpu_driver_state") == {"hanging": 1}
    assert health(page) == "failure"
    assert 0 in page.by("gpu", "gpu_up").values()
    assert 1 not in page.by("gpu", "gpu_up").values(), "nobody knows of those that have not been asked"
    until_collectors_go_on(job)
    assert not collectors_that_fail(job)
    assert job.seconds_of_scrapes()[-3] < CALL_S
    job.until(lambda page: not page.by("gpu", "gpu_energy_joules_total"), "that nothing old is shown")
    scenario.release()
    job.write()
    page = job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "that all are back")
    assert page.by("state", "gpu_driver_state") == {"ok": 1}


def test_a_sidecar_ends_in_time_while_the_driver_answers_nobody(begin: Begin) -> None:
    scenario = profiles.h200(4)
    scenario.global_lock = True
    job = begin(scenario, 4)
    job.until(lambda page: page.by("gpu", "gpu_up") == dict.fromkeys("0123", 1), "all GPUs")
    scenario.hang("nvmlDeviceGetUtilizationRates", scenario.gpus[1])
    job.write()
    job.until(lambda page: page.by("state", "gpu_state") == {"hanging": 1}, "the hang")
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=SOON_S) == 0
    assert "Traceback" not in job.log.read_text("utf-8")


def test_xids_are_counted_from_0_on_and_over_a_restart_of_the_sidecar(begin: Begin) -> None:
    scenario = profiles.h200(4)
    job = begin(scenario, 4)
    page = job.until(lambda page: page.by("xid", "gpu_xid_errors_total"), "the counters")
    assert {page.by("xid", "gpu_xid_errors_total")[code] for code in ("31", "79", "94")} == {0}
    assert not page.by("xid", "gpu_xid_last_timestamp_seconds")
    job.until_it_listens()
    began = time.time()
    for gpu, code in ((1, 79), (2, 94), (3, 31), (3, 31)):
        scenario.xid(code, scenario.gpus[gpu])
    job.write()
    page = job.until(lambda page: sum(page.by("xid", "gpu_xid_errors_total").values()) == 4, "the errors", SLACK_S)
    counts = page.by("xid", "gpu_xid_errors_total")
    assert {code: count for code, count in counts.items() if count} == {"79": 1, "94": 1, "31": 2}
    times = page.by("gpu", "gpu_xid_last_timestamp_seconds")
    assert times.keys() == {"1", "2", "3"}
    assert all(began <= moment <= time.time() for moment in times.values())
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
    assert not job.events("GPU Xid"), "they are no news"
    assert health(page) == "failure"
    job.until_it_listens()
    scenario.xid(31, scenario.gpus[3])
    job.write()
    page = job.until(lambda page: page.by("xid", "gpu_xid_errors_total")["31"] > 2, "one more", SLACK_S)
    assert page.by("xid", "gpu_xid_errors_total") == {**counts, "31": 3}


def refusing(init: str) -> Scenario:
    """Two GPUs that nobody may open."""
    scenario = profiles.h200(2)
    scenario.init = init
    return scenario


@pytest.mark.parametrize(
    ("scenario", "state"),
    [
        (None, "no_library"),
        ("DRIVER_NOT_LOADED", "no_driver"),
        ("NO_PERMISSION", "no_permission"),
        ("LIB_RM_VERSION_MISMATCH", "version_mismatch"),
    ],
)
def test_where_no_gpu_can_be_read_the_state_says_why_and_nothing_else_suffers(
    begin: Begin, scenario: str | None, state: str
) -> None:
    job = begin(None if scenario is None else refusing(scenario), 2)
    job.work(0, "sh", "-c", "echo Processed 7/50 items; exec sleep 600")
    page = job.until(lambda page: page.by("state", "gpu_driver_state") == {state: 1}, "the state")
    assert page.value("gpus_allocated") == 2
    assert not page.by("gpu", "gpu_up")
    assert health(page) == ("warning" if state == "version_mismatch" else None)
    job.until(lambda page: page.value("worker_items", rank="0") == 7, "the worker's progress")
    job.until(lambda page: page.by("rank", "worker_up") == {"0": 1, "1": 0}, "the worker")
    assert not collectors_that_fail(job)
    told = job.status()["gpus"]
    assert (told["driver_state"], told["gpus"]) == (state, [])
    assert told["words"]
    if state == "version_mismatch":
        job.scenario.init = 0
        job.write()
        job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 1}, "that they can be read after all")
    assert "Traceback" not in job.log.read_text("utf-8")


def test_a_supervised_sidecar_is_replaced_with_the_driver_and_keeps_what_it_counted(begin: Begin) -> None:
    scenario = profiles.h200(2)
    job = begin(scenario, 2, *SUPERVISOR)
    job.work(0, "sh", "-c", "echo Processed 7/50 items; exec sleep 600")
    job.until(lambda page: page.value("worker_items", rank="0") == 7, "the worker's progress")
    job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 1}, "all GPUs")
    job.until_it_listens()
    scenario.xid(31, scenario.gpus[0])
    job.write()
    job.until(lambda page: page.value("gpu_xid_errors_total", xid="31") == 1, "the error")
    scenario.broken = "LIB_RM_VERSION_MISMATCH"
    job.write()
    until(lambda: "exit status 75; starting it again in 0 s" in job.log.read_text("utf-8"), "its end")
    scenario.broken, scenario.driver = 0, "575.57.08"
    job.write()
    page = job.until(
        lambda page: (page.labels("gpu_info", gpu="0") or {}).get("driver_version") == "575.57.08", "the new driver"
    )
    assert page.by("gpu", "gpu_up") == {"0": 1, "1": 1}
    assert page.value("gpu_xid_errors_total", xid="31") == 1
    job.until(lambda page: page.value("worker_items", rank="0") == 7, "the worker's progress")
    job.until(lambda page: page.value("worker_up", rank="0") == 1, "the worker")

    scenario.broken = "LIB_RM_VERSION_MISMATCH"  # and so soon after the first time
    job.write()
    job.until(lambda page: page.by("state", "gpu_driver_state") == {"version_mismatch": 1}, "its state")
    until(lambda: "goes on without GPUs" in job.log.read_text("utf-8"), "that it stays")
    until_collectors_go_on(job)
    assert job.log.read_text("utf-8").count("starting it again") == 1
    scenario.broken = 0
    job.write()
    page = job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 1}, "that they are read again")
    assert page.value("gpu_xid_errors_total", xid="31") == 1
    assert job.log.read_text("utf-8").count("starting it again") == 1


def test_one_call_that_says_that_the_driver_was_replaced_costs_its_own_values(begin: Begin) -> None:
    scenario = profiles.h200(2)
    job = begin(scenario, 2, *SUPERVISOR)
    job.until(lambda page: page.by("gpu", "gpu_utilization_ratio").keys() == {"0", "1"}, "both GPUs")
    scenario.fail("nvmlDeviceGetUtilizationRates", "UNINITIALIZED", scenario.gpus[1])
    job.write()
    job.until(lambda page: page.by("gpu", "gpu_utilization_ratio").keys() == {"0"}, "the failure")
    until_collectors_go_on(job)
    page = job.page()
    assert page.by("state", "gpu_driver_state") == {"ok": 1}
    assert page.by("gpu", "gpu_up") == {"0": 1, "1": 1}
    assert "starting it again" not in job.log.read_text("utf-8")


def test_a_gpu_that_cannot_be_identified_does_not_shift_those_after_it(begin: Begin) -> None:
    scenario = profiles.h200(3)
    scenario.fail("nvmlDeviceGetHandleByIndex_v2", "UNKNOWN", scenario.gpus[1])
    job = begin(scenario, 3)
    page = job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 0, "2": 1}, "all places")
    assert page.by("state", "gpu_state", gpu="1") == {"lost": 1}
    assert health(page) == "failure"
    uuids = [entry["uuid"] for entry in job.status()["gpus"]["gpus"]]
    assert [uuids[0], uuids[2]] == [scenario.gpus[0].uuid, scenario.gpus[2].uuid]


def test_a_sidecar_that_nobody_starts_again_stays_and_says_that_the_driver_was_replaced(begin: Begin) -> None:
    scenario = profiles.h200(2)
    job = begin(scenario, 2)
    job.until(lambda page: page.by("gpu", "gpu_up") == {"0": 1, "1": 1}, "all GPUs")
    scenario.broken = "LIB_RM_VERSION_MISMATCH"
    job.write()
    page = job.until(lambda page: not page.value("gpu_driver_state", state="ok"), "the driver's state")
    assert page.by("state", "gpu_driver_state") == {"version_mismatch": 1}
    assert health(page) == "warning", "what runs goes on"
    assert not page.by("gpu", "gpu_energy_joules_total")
    assert not page.by("gpu", "gpu_up"), "nobody knows"
    assert job.status()["gpus"]["words"] == "RM has detected an NVML/RM version mismatch."
    until_collectors_go_on(job)
    assert not collectors_that_fail(job)
    assert job.process.poll() is None
