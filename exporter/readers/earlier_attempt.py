"""What the attempts of a job before this one have left in its run directory of how far their workers had come."""

from pathlib import Path
from typing import Any

from exporter import records


def read_earlier_attempts(run_dir: Path, attempt: int) -> list[list[dict[str, Any]]]:
    """Of each attempt before this one, the newest first, its report, or where it has left none its statuses."""
    return [_read_attempt(run_dir, number) for number in range(attempt - 1, -1, -1)]


def _read_attempt(run_dir: Path, attempt: int) -> list[dict[str, Any]]:
    report = records.read_json(run_dir / f"{Path(records.REPORT_FILE).stem}_a{attempt}.json")
    if report is not None:
        return [report]
    statuses = map(records.read_json, sorted((run_dir / records.STATUS_DIR).glob("*.json")))
    return [status for status in statuses if status is not None and status.get("attempt") == attempt]
