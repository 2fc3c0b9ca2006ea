"""Events of workers, from two statuses in a row."""

from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from exporter.contract.events import Event
from exporter.contract.status import GpuDevice, JobStatus, NodeGpus, NodeStatus, WorkerStatus
from exporter.sidecar.events_collector import WorkerEventsCollector
from exporter.sidecar.worker_events import LEVEL_S, ODD_STATE_S, WorkerEvents
from tests.support.exporter import NODE, FakeClock, make_context, make_manifest, make_task
from tests.support.statuses import worker_status

GIB = 1 << 30
SEVERITIES = {"cuda_oom": "critical", "connection": "warning"}


class Node:
    """The events of a node whose status changes."""

    def __init__(self) -> None:
        self.now, self.found = 1000.0, WorkerEvents(SEVERITIES)

    def after(self, seconds: float, *, phase: str = "running", gpu_memory: int = GIB, **worker: Any) -> list[Event]:
        self.now += seconds
        status = NodeStatus(
            job=JobStatus(phase=phase),
            workers=(worker_status(0, **worker),),
            gpus=NodeGpus(gpus=(GpuDevice(gpu="3", uuid="GPU-3", memory_used_bytes=gpu_memory),)),
        )
        return self.found.update(status, self.now)


@pytest.fixture
def node() -> Node:
    return Node()


def texts(events: list[Event]) -> list[str]:
    return [f"{event.level} {event.event}: {event.detail}" for event in events]


def test_a_stall_and_its_end_are_one_event_each(node: Node) -> None:
    before: dict[str, Any] = {"stalled": False, "last_progress": 1000.0}
    stalled: dict[str, Any] = {"stalled": True, "last_progress": 1000.0}
    assert node.after(5, **before) == []
    assert texts(node.after(295, **stalled)) == ["warning worker stalled: no progress for 300 s, at 12 of 1500 items"]
    assert node.after(5, **stalled) == []
    (end,) = node.after(15, stalled=False, last_progress=1310.0, items=13, items_processed=13)
    assert texts([end]) == ["info worker recovered: progress after 310 s, at 13 of 1500 items"]
    assert (end.worker, end.rank, end.time) == ("worker_w0", 0, 1320.0)


def test_a_stalled_worker_that_is_granted_more_time_has_not_recovered(node: Node) -> None:
    node.after(310, stalled=True, last_progress=1000.0)
    assert node.after(90, stalled=False, last_progress=1000.0) == []
    assert node.after(70, stalled=True, last_progress=1000.0) == []
    found = node.after(5, stalled=False, last_progress=1474.0, items=13, items_processed=13)
    assert texts(found) == ["info worker recovered: progress after 474 s, at 13 of 1500 items"]


def test_a_stalled_worker_whose_last_progress_moves_with_the_clock_has_not_recovered(node: Node) -> None:
    """As after the job was suspended for an hour."""
    node.after(310, stalled=True, last_progress=1000.0)
    assert node.after(3600, stalled=True, last_progress=4600.0) == []
    assert node.after(5, stalled=False, last_progress=4600.0) == []
    found = node.after(5, stalled=False, last_progress=4918.0, items=13, items_processed=13)
    assert texts(found) == ["info worker recovered: progress after 318 s, at 13 of 1500 items"]


@pytest.mark.parametrize("over", [{"up": False, "stalled": False}, {"phase": "completing", "stalled": False}])
def test_a_stalled_worker_that_ends_does_not_recover(over: dict[str, Any], node: Node) -> None:
    node.after(5, stalled=True)
    assert node.after(5, **over) == []


def test_a_slowdown_begins_at_a_quarter_more_time_and_ends_near_the_earlier_rate(node: Node) -> None:
    found = [node.after(5, slowdown=ratio, rate=20 / ratio) for ratio in (1.2, 4.0, 4.0, 1.2, 1.05)]
    assert [texts(events) for events in found] == [
        [],
        ["warning worker slowed down: 75% below its rate, now 5.0 items/s"],
        [],
        [],
        ["info worker at its rate: it is as fast as before"],
    ]


def test_errors_in_a_log_are_reported_at_each_power_of_ten(node: Node) -> None:
    found = [event for count in (0, 1, 2, 9, 10, 99, 250) for event in node.after(5, log_errors={"connection": count})]
    assert [event.detail for event in found] == [
        "connection: 1 line",
        "connection: 10 lines",
        "connection: 250 lines",
    ]
    assert texts(node.after(5, log_errors={"cuda_oom": 1})) == ["critical log error: cuda_oom: 1 line"]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("zombie", "zombie: its process has ended, and its parent has not waited for it for 30 s"),
        ("disk_sleep", "disk_sleep: its process has waited for a device or file system for 30 s"),
        ("stopped", "stopped: its process is stopped for 30 s"),
    ],
)
def test_a_state_that_lasts_is_reported_and_a_short_one_is_not(state: str, text: str, node: Node) -> None:
    node.after(0, state="running")
    assert node.after(5, state=state) == node.after(5, state="running") == []
    node.after(5, state=state)
    assert texts(node.after(ODD_STATE_S, state=state)) == [f"warning worker state: {text}"]
    assert node.after(5, state=state) == []
    assert texts(node.after(5, state="running")) == ["info worker state: its process is running again"]


def test_a_jump_of_gpu_memory_after_minutes_at_one_level_is_a_spike(node: Node) -> None:
    node.after(5, gpu_memory=2 * GIB)
    assert node.after(20, gpu_memory=14 * GIB) == []  # it loads its model
    assert node.after(LEVEL_S, gpu_memory=int(14.5 * GIB)) == []
    found = node.after(5, gpu_memory=20 * GIB)
    assert texts(found) == ["warning GPU memory spike: GPU 3: 20.0 GiB, 14.0 GiB before"]
    assert node.after(LEVEL_S, gpu_memory=20 * GIB) == []


def test_the_next_run_of_a_worker_starts_anew(node: Node) -> None:
    node.after(5, stalled=True, log_errors={"connection": 1})
    assert node.after(5, restarts=1, log_errors={"connection": 3}, stalled=True) == []
    found = node.after(5, restarts=1, log_errors={"connection": 3}, stalled=True)
    assert [event.event for event in found] == ["worker stalled"]


def test_a_restarted_sidecar_repeats_no_event(tmp_path: Path) -> None:
    context = make_context(make_manifest(tmp_path, make_task(0)), FakeClock())
    worker: WorkerStatus = worker_status(0, stalled=True, log_errors={"cuda_oom": 1})
    status = NodeStatus(job=JobStatus(phase="running"), workers=(worker,))
    first = WorkerEventsCollector(context, lambda: status).read()
    assert [event.event for event in first] == ["log error", "worker stalled"]
    (tmp_path / run_files.STATUS_DIR).mkdir(exist_ok=True)
    saved = status.replace(events=first, attempt=context.identity.attempt)
    run_files.write_json(tmp_path / run_files.STATUS_DIR / f"{NODE}.json", saved.to_json())
    assert WorkerEventsCollector(context, lambda: status).read() == first
