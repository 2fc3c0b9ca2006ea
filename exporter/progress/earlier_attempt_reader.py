"""What the attempts of a job before this one have left in its run directory of how far their workers had come."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exporter.contract import run_files


def read_earlier_attempts(run_dir: Path, attempt: int) -> Iterator[list[dict[str, Any]]]:
    """Of each attempt before this one, the newest first, its report, or where it has left none its statuses.

    Each is read when it is asked for. The orchestrator has given their numbers to both: the sidecars of this attempt
    write their own to ``status/``, where those of the one before have written theirs.
    """
    for number in range(attempt - 1, -1, -1):
        report = run_files.read_json(run_dir / f"{Path(run_files.REPORT_FILE).stem}_a{number}.json")
        yield [report] if report is not None else _read_statuses(run_dir / f"{run_files.STATUS_DIR}_a{number}")


def _read_statuses(folder: Path) -> list[dict[str, Any]]:
    statuses = map(run_files.read_json, sorted(folder.glob("*.json")))
    return [status for status in statuses if status is not None]
