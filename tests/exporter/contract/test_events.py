"""Events are shown with their subject first."""

import pytest

from exporter.contract.events import Event, event_title


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
