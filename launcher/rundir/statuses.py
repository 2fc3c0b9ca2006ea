"""Latest statuses of a job's sidecars, for its report and its view."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exporter.contract import run_files


def read_statuses(run_dir: Path, attempt: int) -> dict[str, dict[str, Any]]:
    """The latest status of each sidecar of this attempt, by node."""
    found = {}
    try:
        names = sorted(path for path in (run_dir / run_files.STATUS_DIR).iterdir() if path.suffix == ".json")
    except OSError:
        return {}
    for path in names:
        status = run_files.read_json(path)
        if status is not None and status.get("attempt", attempt) == attempt:
            found[path.stem] = status
    return found


def merge_workers(statuses: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Worker entries of all nodes by rank."""
    merged: dict[int, dict[str, Any]] = {}
    for status in statuses.values():
        for entry in status.get("workers", ()):
            if "rank" in entry:  # missing until the sidecar first reads the workers
                merged[int(entry["rank"])] = dict(entry)
    return merged
