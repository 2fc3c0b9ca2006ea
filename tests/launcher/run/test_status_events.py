"""Events of the sidecars, and milestones, as lines of events.jsonl."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.events import KNOWN_EVENTS, EventLog
from exporter.contract.status import NodeStatus
from launcher.run.status_events import PROGRESS_S, StatusEvents


def event(time: float, kind: str, **facts: object) -> dict[str, object]:
    return {"time": time, "level": "info", "event": kind, "detail": "step_100, 5 GB", **facts}


def status(*events: dict[str, object], **worker: Any) -> NodeStatus:
    return NodeStatus.from_json({"events": list(events), "workers": [{"rank": 0, "items_expected": 1000, **worker}]})


class CopiedEvents:
    """Events of sidecars and the file to which they are copied."""

    def __init__(self, folder: Path, total: int | None = None) -> None:
        self.path = folder / "events.jsonl"
        self.now = 0.0
        self.events = StatusEvents(EventLog(self.path, "7"), total, clock=lambda: self.now)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.fixture
def copied(tmp_path: Path) -> CopiedEvents:
    return CopiedEvents(tmp_path)


def test_an_event_is_copied_once_with_its_node_and_time(copied: CopiedEvents) -> None:
    messages: list[str] = []
    for _ in range(2):
        copied.events.copy_new_events({"n1": status(event(5.0, "checkpoint saved", worker=None))}, messages.append)
    (line,) = copied.lines()
    assert {key: line[key] for key in ("event", "node", "happened", "detail")} == {
        "event": "checkpoint saved",
        "node": "n1",
        "happened": 5.0,
        "detail": "step_100, 5 GB",
    }
    assert "worker" not in line
    assert messages == ["INFO n1: checkpoint saved: step_100, 5 GB"]


def test_an_event_that_stays_in_the_status_is_copied_once_however_many_others_pass(copied: CopiedEvents) -> None:
    for first in range(0, 3 * KNOWN_EVENTS, 500):
        passing = (event(10.0 + number, "checkpoint saved") for number in range(first, first + 500))
        copied.events.copy_new_events({"n1": status(event(5.0, "disk low"), *passing)})
    lines = [line["event"] for line in copied.lines()]
    assert (lines.count("disk low"), lines.count("checkpoint saved")) == (1, 3 * KNOWN_EVENTS)


def test_events_of_several_nodes_are_copied_in_order_of_time(copied: CopiedEvents) -> None:
    statuses = {node: status(event(2.0, "disk low"), event(1.0, "disk low")) for node in ("n1", "n2")}
    copied.events.copy_new_events(statuses)
    assert [line["happened"] for line in copied.lines()] == [1.0, 1.0, 2.0, 2.0]


def test_events_that_the_orchestrator_writes_are_not_copied(copied: CopiedEvents) -> None:
    copied.events.copy_new_events({"n1": status(event(1.0, "worker ended", worker="w0"), event(2.0, "output stalled"))})
    assert [line["event"] for line in copied.lines()] == ["output stalled"]


def test_each_read_gives_at_most_one_milestone_for_tenths_of_the_work(copied: CopiedEvents) -> None:
    for items in (0, 99, 100, 150, 420, 410, 999, 1000, 1000):
        copied.events.copy_new_events({"n1": status(items=items)})
    lines = [line for line in copied.lines() if line["event"] == "milestone"]
    assert [(line["event"], line["detail"], line["items"]) for line in lines] == [
        ("milestone", "10% done", 100),
        ("milestone", "40% done", 420),
        ("milestone", "90% done", 999),
        ("milestone", "100% done", 1000),
    ]


def test_there_are_no_milestones_without_a_total(copied: CopiedEvents) -> None:
    copied.events.copy_new_events({"n1": status(items=5, items_expected=None), "n2": NodeStatus()})
    assert copied.lines() == []


def test_the_total_of_the_job_file_takes_precedence_over_the_logs(tmp_path: Path) -> None:
    copied = CopiedEvents(tmp_path, total=10_000)
    copied.events.copy_new_events({"n1": status(items=1000)})
    assert [line["detail"] for line in copied.lines()] == ["10% done"]


def test_a_job_is_near_completion_once(copied: CopiedEvents) -> None:
    for items in (940, 950, 960, 1000):
        copied.events.copy_new_events({"n1": status(items=items)})
    found = [(line["level"], line["detail"]) for line in copied.lines() if line["event"] == "near completion"]
    assert found == [("info", "950 of 1000 items done")]


def test_the_eta_is_that_of_watch(copied: CopiedEvents) -> None:
    going: dict[str, Any] = {"rank": 0, "up": True, "items": 50, "items_expected": 100, "eta": [475, 400, 500]}
    stalled = {"rank": 1, "up": True, "items": 10, "items_expected": 100, "stalled": True}
    late = {**going, "eta_time": time.time() - 475}
    shown = []
    for workers in ([going], [going, stalled], [late]):
        copied.now += PROGRESS_S
        copied.events.copy_new_events({"n1": NodeStatus.from_json({"workers": workers})})
        shown.append(next(line["detail"] for line in reversed(copied.lines()) if line["event"] == "progress"))
    assert shown == ["50 of 100 items, 50.0%, ETA 7m 55s", "60 of 200 items, 30.0%", "50 of 100 items, 50.0%, ETA 0s"]


def test_progress_is_reported_at_intervals_while_workers_run(copied: CopiedEvents) -> None:
    logged: list[str] = []
    for now, running in ((0, True), (PROGRESS_S - 1, True), (PROGRESS_S, True), (2 * PROGRESS_S, False)):
        copied.now = now
        worker = {"items": 50, "up": running, "rate": 2.0, "eta": [475, 400, 500]}
        copied.events.copy_new_events({"n1": status(**worker)}, logged.append)
    assert logged == ["PROGRESS progress: 50 of 1000 items, 5.0%, 2.0/s, ETA 7m 55s"]
    assert [(line["level"], line["items"]) for line in copied.lines()] == [("progress", 50)]
    copied.now += PROGRESS_S
    copied.events.copy_new_events({"n1": status(items=999.9, up=True)}, logged.append)
    assert logged[-1] == "PROGRESS progress: 999.9 of 1000 items, 99.9%"
