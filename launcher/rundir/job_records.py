"""Files of the run directory that the orchestrator writes, for other processes of the job and for commands."""

import socket
from collections.abc import Mapping
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.process_identity import read_start_ticks
from exporter.contract.records import JsonObject, Record, RecordError


class ProcessRecord(Record):
    """A process on some machine."""

    pid: int = 0
    start_ticks: int | None = None  # start time in clock ticks since boot
    host: str = ""

    def is_running_here(self) -> bool:
        """Whether the process runs on this machine. Start ticks guard against a reused pid."""
        ticks = read_start_ticks(self.pid)
        return self.host == socket.gethostname() and ticks is not None and self.start_ticks in (None, ticks)


class OrchestratorRecord(ProcessRecord):
    """``orchestrator.json``: which process orchestrates the job, and the facts of the job."""

    SCHEMA = run_files.RECORD_SCHEMA
    job_id: str | None = None
    hosts: tuple[str, ...] = ()  # in the order of the plan
    attempt: int = 0
    start: float | None = None  # of the attempt, epoch seconds
    local: bool = False  # whether the job runs without Slurm
    addresses: tuple[str, ...] = ()
    port_offset: int = 0


class JobStateRecord(Record):
    """``state.json``: the phase of the job, and why it is being stopped."""

    phase: str = "launching"
    stop: JsonObject | None = None  # while the job is being stopped


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
