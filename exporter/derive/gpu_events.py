"""What happened to the GPUs of a job, out of its events."""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

PREFIX = "GPU "
"""Begins the name of every event that is about GPUs."""
MOST_EVENTS = 200
_RECOVERIES = ("GPU works again", "GPU driver")
"""Told although they are good news: they say how long something lasted."""
_KEYS = ("level", "event", "worker", "detail")


def gpu_events(events: Iterable[Mapping[str, Any]], node: str | None = None) -> dict[str, Any]:
    """``events`` in the order in which they happened, the first of too many, and ``events_total``, how many there were.

    Warnings and worse, and that something works again. ``node`` is that of events that name none.
    """
    found: list[dict[str, Any]] = [
        {"time": moment, "node": event.get("node") or node, **{key: event.get(key) for key in _KEYS}}
        for event in events
        if str(event.get("event")).startswith(PREFIX)
        and (event.get("level") != "info" or event.get("event") in _RECOVERIES)
        # in a line of a log ``time`` is when it was written
        and isinstance(moment := event.get("happened", event.get("time")), int | float)
    ]
    found.sort(key=itemgetter("time"))
    return {"events": found[:MOST_EVENTS], "events_total": len(found)}
