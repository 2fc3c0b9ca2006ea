"""Events, and the file that they are appended to."""

import json
import resource
from pathlib import Path

import pytest

from exporter.contract.events import Event, EventLog, event_title


@pytest.mark.parametrize(
    ("event", "worker", "title"),
    [
        ("worker ended", "worker_w3", "worker_w3 ended"),
        ("progress unknown", "worker_w3", "worker_w3 progress unknown"),
        ("first output", None, "first output"),
    ],
)
def test_the_worker_of_an_event_comes_first(event: str, worker: str | None, title: str) -> None:
    assert event_title(Event(time=1.0, level="info", event=event, worker=worker)) == title


def test_a_line_without_room_is_left_out_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, "17")
    log.write("job started")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        log.write("worker ended")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write("job ended")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["job started", "job ended"]
