"""The diagnosis of a failed worker where its sidecar could not write one: it was gone, or never there."""

import time
from pathlib import Path
from typing import Any

from exporter import records
from exporter.derive.diagnostics import Moment, build_failure, render
from exporter.derive.exits import CONSEQUENCES
from exporter.manifest import Manifest, Task
from exporter.readers.diagnostics import is_written, read_run_files, write_diagnostics
from exporter.readers.packs import read_errors
from launcher.statuses import read_statuses


def write_missing(manifest: Manifest, attempt: int, task: Task, node: str, ended: dict[str, Any]) -> Path | None:
    """Write the diagnosis of one end unless it is there or needs none; where it is. Raises OSError."""
    if ended["reason"] in CONSEQUENCES:
        return None
    files = read_run_files(manifest, task, node, attempt, ended["restart"])
    status = read_statuses(manifest.run_dir, attempt).get(node, {})
    body = build_failure(files, Moment(time.time(), status), ended, read_errors())
    if is_written(manifest.run_dir, body) or not write_diagnostics(manifest.run_dir, body, render(body)):
        return None
    return manifest.run_dir / records.DIAGNOSTICS_DIR / f"{task.worker}.txt"
