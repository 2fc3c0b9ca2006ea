"""Files of the run directory that the orchestrator writes, for other processes of the job and for commands."""

from collections.abc import Mapping
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.records import Record, RecordError


class OrchestratorRecord(Record):
    """``orchestrator.json``: which process orchestrates the job, and the facts of the job."""

    SCHEMA = run_files.RECORD_SCHEMA
    job_id: str
    pid: int
    start_ticks: int | None
    host: str
    hosts: tuple[str, ...]
    attempt: int
    start: float
    local: bool
    addresses: tuple[str, ...] = ()
    port_offset: int = 0


class AbandonedWorkers(Record):
    """``given_up.json``: workers (name -> role) that failed while the job continues."""

    SCHEMA = run_files.RECORD_SCHEMA
    attempt: int
    workers: Mapping[str, str]


def read_orchestrator(run_dir: Path) -> OrchestratorRecord | None:
    """The record of the job's last orchestrator; None before it has one."""
    try:
        return OrchestratorRecord.from_json(run_files.read_json(run_dir / run_files.ORCHESTRATOR_FILE))
    except RecordError:
        return None
