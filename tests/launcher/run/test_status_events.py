"""Events of the sidecars, and parts of the work that are done, as lines of events.jsonl."""

import json
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.events import EventLog
from launcher.run.status_events import StatusEvents


def event(time: float, kind: str, **facts: object) -> dict[str, object]:
    return {"time": time, "level": "info", "event": kind, "detail": "step_100, 5 GB", **facts}


def status(*events: dict[str, object], **workers: Any) -> dict[str, Any]:
    return {"events": list(events), "workers": [{"rank": 0, "items_expected": 1000, **workers}]}


class Written:
    """Events that are written to a file of their own."""

    def __init__(self, folder: Path, total: int | None = None) -> None:
        self.path = folder / "events.jsonl"
        self.events = StatusEvents(EventLog(self.path, "7"), total)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_what_a_sidecar_tells_is_written_once_with_its_node_and_its_time(written: Written) -> None:
    said: list[str] = []
    for _ in range(2):
        written.events.copy_new_events({"n1": status(event(5.0, "checkpoint saved", worker=None))}, said.append)
    (line,) = written.lines()
    assert {key: line[key] for key in ("event", "node", "happened", "detail")} == {
        "event": "checkpoint saved",
        "node": "n1",
        "happened": 5.0,
        "detail": "step_100, 5 GB",
    }
    assert "worker" not in line
    assert said == ["n1: checkpoint saved: step_100, 5 GB"]


def test_the_same_on_two_nodes_and_at_two_times_are_four_events_in_their_order(written: Written) -> None:
    statuses = {node: status(event(2.0, "disk low"), event(1.0, "disk low")) for node in ("n1", "n2")}
    written.events.copy_new_events(statuses)
    assert [line["happened"] for line in written.lines()] == [1.0, 1.0, 2.0, 2.0]


def test_what_the_orchestrator_knows_itself_is_not_told_twice(written: Written) -> None:
    written.events.copy_new_events(
        {"n1": status(event(1.0, "worker ended", worker="w0"), event(2.0, "output stalled"))}
    )
    assert [line["event"] for line in written.lines()] == ["output stalled"]


def test_each_tenth_of_the_work_is_one_event_whatever_the_looks_have_missed(written: Written) -> None:
    for items in (0, 99, 100, 150, 420, 410, 999, 1000, 1000):
        written.events.copy_new_events({"n1": status(items=items)})
    assert [(line["event"], line["detail"], line["items"]) for line in written.lines()] == [
        ("milestone", "10% done", 100),
        ("milestone", "40% done", 420),
        ("milestone", "90% done", 999),
        ("milestone", "100% done", 1000),
    ]


def test_without_a_total_there_is_no_part_of_it(written: Written) -> None:
    written.events.copy_new_events({"n1": status(items=5, items_expected=None), "n2": {}})
    assert written.lines() == []


def test_the_total_of_the_job_file_counts_before_what_the_logs_say(tmp_path: Path) -> None:
    written = Written(tmp_path, total=10_000)
    written.events.copy_new_events({"n1": status(items=1000)})
    assert [line["detail"] for line in written.lines()] == ["10% done"]
