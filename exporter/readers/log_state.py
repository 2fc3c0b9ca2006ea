"""What a sidecar knows of its logs, kept in the run directory: a new one goes on where the last one was."""

import os
import time
from typing import Any

from exporter import records

LOG_STATE_DIR = "state"
LOG_STATE_SCHEMA = 1


def _state_path(run_dir: str | os.PathLike[str], node: str) -> str:
    return os.path.join(run_dir, LOG_STATE_DIR, f"{node}.json")


def read_state(run_dir: str | os.PathLike[str], node: str, job_id: str, attempt: int) -> dict[str, Any] | None:
    """The ``logs`` that were written for this attempt of the job; None when there are none to go on from."""
    try:
        body = records.read_json(_state_path(run_dir, node))
    except RecursionError:
        return None  # nested deeper than anything we write
    if body is None or body.get("schema") != LOG_STATE_SCHEMA:
        return None
    if body.get("job_id") != job_id or body.get("attempt") != attempt or isinstance(body.get("attempt"), bool):
        return None
    logs = body.get("logs")
    return logs if isinstance(logs, dict) else None


def write_state(
    run_dir: str | os.PathLike[str], node: str, job_id: str, attempt: int, logs: dict[str, Any]
) -> str | None:
    """Keep ``logs`` in place of what was kept; why that was not possible, or None."""
    path = _state_path(run_dir, node)
    body = {"schema": LOG_STATE_SCHEMA, "job_id": job_id, "attempt": attempt, "time": time.time(), "logs": logs}
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # written again within seconds: it need not outlive a power cut
        records.write_json(path, body, durable=False)
    except (OSError, ValueError) as error:  # ValueError: text that UTF-8 cannot hold
        return getattr(error, "strerror", None) or str(error)
    return None
