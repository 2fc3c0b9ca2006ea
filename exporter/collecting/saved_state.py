"""State that a sidecar saves in the run directory for its successor."""

import os
import time
from typing import Any

from exporter.contract import run_files

STATE_DIR = "state"
STATE_SCHEMA = 1


def _state_path(run_dir: str | os.PathLike[str], node: str, kind: str) -> str:
    return os.path.join(run_dir, STATE_DIR, f"{node}.{kind}.json")


def load_saved_state(
    run_dir: str | os.PathLike[str], node: str, job_id: str, attempt: int, *, kind: str
) -> dict[str, Any] | None:
    """Load the state of this ``kind`` for this attempt of the job; None if there is none to resume from."""
    try:
        body = run_files.read_json(_state_path(run_dir, node, kind))
    except RecursionError:
        return None  # nested deeper than anything we write
    if body is None or body.get("schema") != STATE_SCHEMA:
        return None
    if body.get("job_id") != job_id or body.get("attempt") != attempt or isinstance(body.get("attempt"), bool):
        return None
    found = body.get(kind)
    return found if isinstance(found, dict) else None


def save_state(
    run_dir: str | os.PathLike[str], node: str, job_id: str, attempt: int, state: dict[str, Any], *, kind: str
) -> str | None:
    """Replace the saved state of this ``kind``. Return why that failed, or None."""
    path = _state_path(run_dir, node, kind)
    body = {"schema": STATE_SCHEMA, "job_id": job_id, "attempt": attempt, "time": time.time(), kind: state}
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # rewritten within seconds, so it need not survive a power cut
        run_files.write_json(path, body, durable=False)
    except (OSError, ValueError) as error:  # ValueError: text that UTF-8 cannot encode
        return getattr(error, "strerror", None) or str(error)
    return None
