"""Reports and statuses of earlier attempts of a job, in its run directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exporter.contract import run_files


def read_earlier_attempts(run_dir: Path, attempt: int) -> Iterator[list[dict[str, Any]]]:
    """The report of each earlier attempt, newest first, or its statuses if it has no report.

    Files are read on demand. The orchestrator added the attempt to their names, since sidecars of this attempt write to
    ``status/``.
    """
    for number in range(attempt - 1, -1, -1):
        report = run_files.read_json(run_dir / f"{Path(run_files.REPORT_FILE).stem}_a{number}.json")
        yield [report] if report is not None else _read_statuses(run_dir / f"{run_files.STATUS_DIR}_a{number}")


def _read_statuses(folder: Path) -> list[dict[str, Any]]:
    statuses = map(run_files.read_json, sorted(folder.glob("*.json")))
    return [status for status in statuses if status is not None]
