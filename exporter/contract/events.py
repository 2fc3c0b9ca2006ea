"""Events of a job: in the status of each node, and in ``events.jsonl``, one per line."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from exporter.contract.records import Record, to_json
from exporter.contract.run_files import open_with_file_mode

KNOWN_EVENTS = 1000  # besides those of the present statuses


class Event(Record):
    """Something that happened on one node."""

    time: float  # epoch seconds
    level: str  # info, progress, warning or critical
    event: str  # what happened, in two or three words
    worker: str | None = None
    rank: int | None = None
    group: str | None = None  # path group of the files
    detail: str = ""


def event_title(event: Event) -> str:
    """What happened, after its worker if it has one: ``worker_w3 ended``, ``first output``."""
    if event.worker is None:
        return event.event
    return f"{event.worker} {event.event.removeprefix('worker ')}"


class LoggedEvent(Record):
    """One line of ``events.jsonl``. Each kind of event adds keys of its own."""

    time: float  # when it was written, epoch seconds
    job_id: str
    event: str
    happened: float | None = None  # when it happened, if that was earlier
    level: str | None = None
    node: str | None = None
    worker: str | None = None
    rank: int | None = None
    detail: str | None = None


class EventFilter:
    """Finds new events among those of statuses, which repeat each event for as long as it is among their last.

    A restarted sidecar repeats an event with the same time, or not at all.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], None] = {}  # those read last at the end

    def find_new(self, found: Iterable[tuple[str, Event]]) -> list[tuple[str, Event]]:
        """Return the new ones of these nodes and events, oldest first."""
        keys = {(node, event.time, event.event, event.worker, event.detail): (node, event) for node, event in found}
        new = [entry for key, entry in keys.items() if key not in self._known]
        known = [*(key for key in self._known if key not in keys), *keys]
        self._known = dict.fromkeys(known[-max(KNOWN_EVENTS, len(keys)) :])
        return sorted(new, key=lambda entry: entry[1].time)


class EventLog:
    """Appends events to the file.

    Only one node writes it, because appends from several nodes may interleave on a network file system: the
    orchestrator and what stands in for it, or the sidecar of an attached job.
    """

    def __init__(self, path: Path, job_id: str) -> None:
        self._path = path
        self._job_id = job_id

    def write(self, event: str, **facts: object) -> None:
        """Write one event with the present time. A full disk loses the line, not the job."""
        facts = {name: to_json(value) for name, value in facts.items()}
        line = json.dumps(
            {"time": time.time(), "job_id": self._job_id, "event": event, **_rename_time_fact(facts)},
            ensure_ascii=False,
        )
        try:
            with open(self._path, "ab", buffering=0, opener=open_with_file_mode) as out:
                size, content = os.fstat(out.fileno()).st_size, f"{line}\n".encode("utf-8", "replace")
                if out.write(content) < len(content):
                    out.truncate(size)  # no room for all of it: a part would swallow the next line
        except OSError:
            pass


def _rename_time_fact(facts: dict[str, object]) -> dict[str, object]:
    """Rename a fact called ``time``: it is when the event happened, not when it was written."""
    return {("happened" if name == "time" else name): value for name, value in facts.items()}
