"""``events.jsonl``: what happened to the job, one line for each event."""

import json
import time
from pathlib import Path


class EventLog:
    """Appends events.

    One process alone writes it, since appends of several nodes may mix on a network file system: the
    orchestrator, or the sidecar of a job that others have started.
    """

    def __init__(self, path: Path, job_id: str) -> None:
        self._path = path
        self._job_id = job_id

    def write(self, event: str, **facts: object) -> None:
        """One event, now. A full disk costs the line, not the job."""
        line = json.dumps(
            {"time": time.time(), "job_id": self._job_id, "event": event, **_rename_time_fact(facts)},
            ensure_ascii=False,
        )
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as out:
                out.write(line + "\n")
        except OSError:
            pass


def _rename_time_fact(facts: dict[str, object]) -> dict[str, object]:
    """A fact called ``time`` is when it happened, not when it was written down."""
    return {("happened" if name == "time" else name): value for name, value in facts.items()}
