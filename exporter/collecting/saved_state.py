"""State that a sidecar saves in the run directory for its successor.

It consists of JSON values, named tuples, dataclasses and arrays. ``contract.records.from_json`` reads it by type.
"""

import dataclasses
import os
import time
from array import array
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from exporter.contract import run_files

STATE_DIR = "state"
STATE_SCHEMA = 1


def _state_path(run_dir: str | os.PathLike[str], node: str, kind: str) -> str:
    return os.path.join(run_dir, STATE_DIR, f"{node}.{kind}.json")


def load_saved_state(
    run_dir: str | os.PathLike[str], node: str, job_id: str, attempt: int, *, kind: str
) -> dict[str, Any] | None:
    """Load the state of this ``kind`` for this attempt of the job; None if there is none to resume from."""
    body = run_files.read_json(_state_path(run_dir, node, kind))
    if body is None or body.get("schema") != STATE_SCHEMA:
        return None
    if body.get("job_id") != job_id or body.get("attempt") != attempt or isinstance(body.get("attempt"), bool):
        return None
    found = body.get(kind)
    return found if isinstance(found, dict) else None


def save_state(
    run_dir: str | os.PathLike[str], node: str, job_id: str, attempt: int, state: Mapping[str, object], *, kind: str
) -> str | None:
    """Replace the saved state of this ``kind``. Return why that failed, or None."""
    path = _state_path(run_dir, node, kind)
    body = {"schema": STATE_SCHEMA, "job_id": job_id, "attempt": attempt, "time": time.time(), kind: state}
    try:
        os.makedirs(os.path.dirname(path), run_files.FOLDER_MODE, exist_ok=True)
        # rewritten within seconds, so it need not survive a power cut
        run_files.write_json(path, body, durable=False, default=state_fields)
    except (OSError, ValueError) as error:  # ValueError: text that UTF-8 cannot encode
        return getattr(error, "strerror", None) or str(error)
    return None


def state_fields(value: object) -> list[object]:
    """The fields of a dataclass that its constructor takes, or the numbers of an array, for ``json.dumps``.

    A list, as for named tuples, since names would double the size of a state.
    """
    if isinstance(value, array):
        return value.tolist()
    return [getattr(value, name) for name in _field_names(cast(type, type(value)))]


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)
