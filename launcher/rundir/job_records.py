"""Files of the run directory that the orchestrator writes, for other processes of the job and for commands."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from exporter.contract import run_files
from exporter.contract.manifest import Manifest
from exporter.contract.process_identity import read_pid_namespace, read_start_ticks
from exporter.contract.records import JsonObject, Record, RecordError
from exporter.contract.report import Report
from exporter.contract.user_state import user_state_folder
from exporter.machine.procfs import CLOCK_TICKS
from exporter.slurm.states import array_of
from launcher.errors import SlurmTimeoutError
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.rundir import SWEEP_FILE

STARTING_S = 30.0  # a local job without an orchestrator after this time will never start


class ProcessRecord(Record):
    """A process on some machine."""

    pid: int = 0
    start_ticks: int | None = None  # start time in clock ticks since boot
    host: str = ""
    pid_namespace: int | None = None  # in which the pid is valid; None if unknown

    @property
    def place(self) -> str:
        """Where the process was started, for messages."""
        is_in_container = self.is_elsewhere() and self.host == socket.gethostname()
        return f"{self.host}, in another container" if is_in_container else self.host

    def is_running_here(self) -> bool:
        """Whether the process runs on this machine. Start ticks guard against a reused pid."""
        ticks = read_start_ticks(self.pid)
        return not self.is_elsewhere() and ticks is not None and self.start_ticks in (None, ticks)

    def is_elsewhere(self) -> bool:
        """Whether the process was started on another machine, so that nothing here shows whether it still runs.

        A container may have the host's name, and its own pids.
        """
        is_same = self.pid_namespace is None or read_pid_namespace() in (None, self.pid_namespace)
        return self.host != socket.gethostname() or not is_same

    def is_hidden(self) -> bool:
        """Whether nothing here shows whether the process runs: it is elsewhere, or another user's under `hidepid`."""
        if self.is_elsewhere():
            return True
        if read_start_ticks(self.pid) is not None:
            return False
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):  # the latter for a number that no process can have
            pass
        return False


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

    def elapsed_s(self) -> float | None:
        """Seconds since the process started, on its own machine and by a clock that nobody sets."""
        if self.start_ticks is None:
            return None
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_ticks / CLOCK_TICKS


class LimitWarning(Record):
    """The signal before the time limit that workers got."""

    signal: str
    time: float


class JobStateRecord(Record):
    """``state.json``: the phase of the job, and why it is being stopped."""

    phase: str = "launching"
    stop: JsonObject | None = None  # while the job is being stopped
    orchestrator_silent_since: float | None = None  # epoch seconds; None while the orchestrator responds
    time_limit_end: float | None = None  # epoch seconds, of a limit that was changed while the job runs
    warning: LimitWarning | None = None

    @classmethod
    def of_attempt(cls, run_dir: Path, attempt: int) -> Self:
        """The state of this attempt; that of a job that is launching if it has published none, or a damaged one."""
        return cls.of_content(read_job_state(run_dir, attempt))

    @classmethod
    def of_content(cls, content: object) -> Self:
        """The state with this content; that of a job that is launching if the content is damaged."""
        try:
            return cls.from_json(content)
        except RecordError:
            return cls()


class StopRequest(Record):
    """``stop_request.json``: who stopped an attempt of the job with `gpujob stop`, and where."""

    SCHEMA = run_files.RECORD_SCHEMA
    attempt: int = 0
    user: str = ""
    host: str = ""


class AbandonedWorkers(Record):
    """``given_up.json``: workers (name -> role) that failed while the job continues."""

    SCHEMA = run_files.RECORD_SCHEMA
    attempt: int
    workers: Mapping[str, str]


def read_orchestrator(run_dir: Path) -> OrchestratorRecord | None:
    """The record of the job's last orchestrator; None before it has one."""
    return OrchestratorRecord.read_valid(run_dir / run_files.ORCHESTRATOR_FILE)


def read_job_state(run_dir: Path, attempt: int) -> dict[str, object]:
    """Content of ``state.json``; empty if it is of another attempt.

    An attempt publishes its state only after the survey of its nodes and the search for a checkpoint.
    """
    state = run_files.read_json(run_dir / run_files.STATE_FILE) or {}
    return state if state.get("attempt", attempt) == attempt else {}


def read_first_start(manifest: Manifest) -> float | None:
    """When the first worker started in the first attempt, or else when the job was submitted; None if unknown.

    The first attempt may have failed before any worker started.
    """
    for task in manifest.tasks[:1]:
        stem = run_files.record_name(task.worker, task.rank, 0, 0)
        record = run_files.read_json(manifest.run_dir / run_files.WORKERS_DIR / f"{stem}.start.json") or {}
        start = record.get("start")
        if isinstance(start, int | float):
            return float(start)
    return read_submitted(manifest.run_dir)


def read_submitted(run_dir: Path) -> float | None:
    """When the job was submitted, epoch seconds; None if that is unknown."""
    job_id = job_id_of(run_dir)
    submitted = (run_files.read_json(run_dir / f"{job_id}.json") or {}).get("submitted")
    if "_" in job_id:  # older versions gave a resumed point the time of its sweep
        arrays = (run_files.read_json(run_dir.parent / SWEEP_FILE) or {}).get("arrays")
        for array in arrays if isinstance(arrays, list) else ():
            if isinstance(array, dict) and array.get("job_id") == array_of(job_id):
                submitted = array.get("submitted", submitted)
    return submitted if isinstance(submitted, float) else None


@contextlib.contextmanager
def stop_request(run_dir: Path, user: str) -> Iterator[None]:
    """Record for the report that this user stops the job, unless that fails within the context.

    A full disk does not prevent a stop, and a stop that is repeated and fails leaves the record of the one before.
    """
    path = run_dir / run_files.STOP_REQUEST_FILE
    earlier = run_files.read_json(path)
    orchestrator = read_orchestrator(run_dir) or OrchestratorRecord()
    request = StopRequest(attempt=orchestrator.attempt, user=user, host=socket.gethostname())
    with contextlib.suppress(OSError):
        run_files.write_json(path, request.to_json())
    try:
        yield
    except (SlurmTimeoutError, KeyboardInterrupt):
        raise  # the stop may be on its way
    except BaseException:  # the request would explain a later end
        with contextlib.suppress(OSError):
            if earlier is None:
                path.unlink()
            else:
                run_files.write_json(path, earlier)
        raise


def stop_request_text(run_dir: Path, attempt: int) -> str | None:
    """Describe who stopped this attempt with `gpujob stop`; None if nobody did."""
    request = StopRequest.read_valid(run_dir / run_files.STOP_REQUEST_FILE)
    return f"gpujob stop by {request.user} on {request.host}" if request and request.attempt == attempt else None


def report_path_elsewhere(run_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Path in the user's state directory; None if the user has none."""
    folder = user_state_folder(environ)
    return Path(folder, "reports", f"{job_id_of(run_dir)}.json") if folder else None


def read_report(run_dir: Path) -> Report | None:
    """The report of a job; None if it has none. Raises RecordError."""
    return Report.read(run_dir / run_files.REPORT_FILE) or read_report_elsewhere(run_dir)


def read_report_elsewhere(run_dir: Path) -> Report | None:
    """The report in the user's state directory; None if there is none. Raises RecordError."""
    path = report_path_elsewhere(run_dir, os.environ)
    report = None if path is None else Report.read(path)
    # another cluster may have a job of this number
    return report if report is not None and report.run_dir == str(run_dir) else None
