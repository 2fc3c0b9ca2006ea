"""Latest statuses of a job's sidecars, for its report and its view."""

from collections.abc import Mapping
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.status import NodeStatus, WorkerStatus


def read_statuses(run_dir: Path, attempt: int) -> dict[str, NodeStatus]:
    """The latest status of each sidecar of this attempt, by node. One that cannot be read counts as absent."""
    try:
        paths = sorted(path for path in (run_dir / run_files.STATUS_DIR).iterdir() if path.suffix == ".json")
    except OSError:
        return {}
    found = {path.stem: NodeStatus.read_valid(path) for path in paths}
    return {node: status for node, status in found.items() if status is not None and status.attempt == attempt}


def merge_workers(statuses: Mapping[str, NodeStatus]) -> dict[int, WorkerStatus]:
    """Workers of all nodes by rank."""
    return {worker.rank: worker for status in statuses.values() for worker in status.workers}
