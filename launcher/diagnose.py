"""The diagnosis of a failed worker where its sidecar could not write one: it was gone, or never there."""

import time
from pathlib import Path
from typing import Any

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from exporter.logs.packs_reader import read_errors
from exporter.workers.diagnosis import Moment, build_failure, render
from exporter.workers.diagnosis_reader import is_written, read_run_files, write_diagnostics
from exporter.workers.exit_reason import CONSEQUENCES
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
    return manifest.run_dir / run_files.DIAGNOSTICS_DIR / f"{task.worker}.txt"
