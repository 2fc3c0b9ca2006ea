"""What the attempts of a job before this one have left in its run directory of how far their workers had come."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exporter import records


def read_earlier_attempts(run_dir: Path, attempt: int) -> Iterator[list[dict[str, Any]]]:
    """Of each attempt before this one, the newest first, its report, or where it has left none its statuses.

    Each is read when it is asked for. The orchestrator has given their numbers to both: the sidecars of this attempt
    write their own to ``status/``, where those of the one before have written theirs.
    """
    for number in range(attempt - 1, -1, -1):
        report = records.read_json(run_dir / f"{Path(records.REPORT_FILE).stem}_a{number}.json")
        yield [report] if report is not None else _read_statuses(run_dir / f"{records.STATUS_DIR}_a{number}")


def _read_statuses(folder: Path) -> list[dict[str, Any]]:
    statuses = map(records.read_json, sorted(folder.glob("*.json")))
    return [status for status in statuses if status is not None]
