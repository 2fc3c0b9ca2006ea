"""What a sidecar knows of checkpoints that may be gone by now, kept in the run directory for the one after it."""

import os
import time
from typing import Any

from exporter import records
from exporter.readers.log_state import LOG_STATE_DIR

CHECKPOINT_STATE_SCHEMA = 1


def _state_path(run_dir: str | os.PathLike[str], node: str) -> str:
    return os.path.join(run_dir, LOG_STATE_DIR, f"{node}.checkpoints.json")


def read_checkpoint_state(
    run_dir: str | os.PathLike[str], node: str, job_id: str, attempt: int
) -> dict[str, Any] | None:
    """The ``checkpoints`` that were written for this attempt of the job; None when there are none to go on from."""
    try:
        body = records.read_json(_state_path(run_dir, node))
    except RecursionError:
        return None  # nested deeper than anything we write
    if body is None or body.get("schema") != CHECKPOINT_STATE_SCHEMA:
        return None
    if body.get("job_id") != job_id or body.get("attempt") != attempt or isinstance(body.get("attempt"), bool):
        return None
    found = body.get("checkpoints")
    return found if isinstance(found, dict) else None


def write_checkpoint_state(
    run_dir: str | os.PathLike[str], node: str, job_id: str, attempt: int, found: dict[str, Any]
) -> str | None:
    """Keep ``found`` in place of what was kept; why that was not possible, or None."""
    path = _state_path(run_dir, node)
    body = {
        "schema": CHECKPOINT_STATE_SCHEMA,
        "job_id": job_id,
        "attempt": attempt,
        "time": time.time(),
        "checkpoints": found,
    }
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        records.write_json(path, body, durable=False)
    except (OSError, ValueError) as error:  # ValueError: text that UTF-8 cannot hold
        return getattr(error, "strerror", None) or str(error)
    return None
