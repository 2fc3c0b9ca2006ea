"""``orchestrator.json``: which process controls a job, and where the job runs."""

import socket

from exporter.contract.process_identity import read_start_ticks
from exporter.contract.records import JsonObject, Record


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
    """Content of ``orchestrator.json``."""

    attempt: int = 0
    job_id: str | None = None
    start: float | None = None  # of the attempt, epoch seconds
    hosts: tuple[str, ...] = ()  # in the order of the plan
    local: bool = False  # whether the job runs without Slurm


class JobStateRecord(Record):
    """Content of ``state.json``."""

    phase: str = "launching"
    stop: JsonObject | None = None  # while the job is being stopped
