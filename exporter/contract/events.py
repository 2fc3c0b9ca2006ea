"""``events.jsonl``: events of the job, one per line."""

import json
import time
from pathlib import Path


class EventLog:
    """Appends events to the file.

    Only one process writes it, because appends from several nodes may interleave on a network file system: the
    orchestrator, or the sidecar of an attached job.
    """

    def __init__(self, path: Path, job_id: str) -> None:
        self._path = path
        self._job_id = job_id

    def write(self, event: str, **facts: object) -> None:
        """Write one event with the present time. A full disk loses the line, not the job."""
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
    """Rename a fact called ``time``: it is when the event happened, not when it was written."""
    return {("happened" if name == "time" else name): value for name, value in facts.items()}
