"""GPUs in the report and the summary of an attached job."""

from typing import Any

from exporter.attach.outcome import AttachedOutcome
from tests.exporter.attach.test_settings import build_attached_report, end_summary
from tests.support.builders import dead, worker_entry
from tests.support.gpu_status import XID_79, gpu, gpus, of_worker, use


def status(**over: Any) -> dict[str, Any]:
    """Status of a job with two workers, one of which lost its GPU."""
    workers = [
        worker_entry(0, node="cn01", **dead("app_error", 1), **of_worker(0)),
        worker_entry(1, node="cn01", **dead("completed", 0), **of_worker(1, gpu_use=[use(0)])),
    ]
    return {
        "attempt": 0,
        "job": {"job_id": "7", "job_name": "a", "start": 1.0},
        "node": {"name": "cn01"},
        "launch": {},
        "workers": workers,
        "gpus": gpus(gpu(0, xids=[XID_79]), gpu(1)),
        **over,
    }


def test_the_report_has_the_gpus_of_the_node_and_of_each_worker() -> None:
    report = build_attached_report(status(), AttachedOutcome("FAILED", ()), "/r", 6.0, {})
    assert (report["gpus"]["count"], report["gpus"]["energy_j"]) == (2, 7.2e6)
    assert [node["node"] for node in report["gpus"]["nodes"]] == ["cn01"]
    used = [[(device["gpu"], device["planned"], device["used"]) for device in worker["gpu_devices"]]
            for worker in report["workers"]]  # fmt: skip
    assert used == [[("0", True, True)], [("1", True, False), ("0", False, True)]]


def test_the_report_has_the_events_of_gpus() -> None:
    event = {"time": 3.0, "level": "critical", "event": "GPU lost", "detail": "GPU 0"}
    (reported_event,) = build_attached_report(status(events=[event]), AttachedOutcome("FAILED", ()), "/r", 6.0, {})[
        "gpus"
    ]["events"]
    assert (reported_event["time"], reported_event["node"], reported_event["event"]) == (3.0, "cn01", "GPU lost")


def test_the_summary_names_gpu_problems_of_failed_workers() -> None:
    lines = end_summary(status(), AttachedOutcome("FAILED", ()), "/r").splitlines()
    assert lines[-3:] == [
        "worker_w0: GPU 0: Xid 79, GPU has fallen off the bus",
        "GPUs: 2 x NVIDIA H200, 90 % busy, 2.0 kWh",
        "run directory: /r",
    ]


def test_the_report_of_a_job_without_gpus_has_no_gpu_section() -> None:
    bare = status(gpus={})
    for worker in bare["workers"]:
        worker |= of_worker(gpu_use=None)
    report = build_attached_report(bare, AttachedOutcome("FAILED", ()), "/r", 6.0, {})
    assert (report["gpus"], report["workers"][0]["gpu_devices"]) == (None, [])
    assert "GPU" not in end_summary(bare, AttachedOutcome("FAILED", ()), "/r")
