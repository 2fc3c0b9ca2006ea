"""View of a job: what ``gpujob watch --json`` prints, merged from the run directory and all sidecars.

None means unknown, unless a comment says otherwise. Times are epoch seconds.
"""

from __future__ import annotations

from typing import ClassVar

from exporter.contract.events import Event
from exporter.contract.records import Record
from exporter.contract.report import EndCause, Report, WorkerReport
from exporter.contract.status import (
    Checkpoints,
    DamagedFile,
    EtaEstimate,
    FileSystem,
    GpuSignals,
    NodeGpus,
    ProcessFacts,
    ProgressFacts,
    Readiness,
    WorkerOutput,
)


class WorkerView(WorkerReport, ProcessFacts, ProgressFacts, GpuSignals):
    """One worker in the view."""

    service: bool = False  # whether it serves until the job ends
    output: WorkerOutput | None = None  # its output files


class OutputView(Record):
    """Output files of one path group on all nodes."""

    group: str
    counting: bool = False  # whether not all files have been counted yet
    files: int = 0
    bytes: int = 0
    growth_bytes_per_second: float | None = None
    mtime: float | None = None
    records: int | None = None
    stalled: bool | None = None
    stalled_ranks: tuple[int, ...] = ()  # workers that no longer write
    files_invalid: int = 0
    invalid: tuple[DamagedFile, ...] = ()


class NodeGpusView(NodeGpus):
    """GPUs of the job on one node."""

    node: str


class ReadinessView(Readiness):
    """Whether the services of the job accept work."""

    not_ready_since: float | None = None


class NodeView(Record):
    """How the status of one node was obtained."""

    node: str
    address: str
    source: str  # http or file
    age_s: float | None = None
    error: str | None = None


class EarlierAttempt(Record):
    """The attempt that ended before the job was requeued."""

    attempt: int
    state: str | None = None
    items: float | None = None
    items_expected: float | None = None
    unit: str | None = None


class LaunchView(Record):
    """Launch checks of all nodes."""

    verified: bool = False
    lacking: tuple[str, ...] = ()  # required checks that failed


class StopView(Record):
    """Why a running job is being stopped."""

    reason: str | None = None  # exit reason that the workers inherit
    cause: str | None = None  # a sentence for people
    kill_at: float | None = None  # when the remaining workers are killed


class MutedAlert(Record):
    """Alerts of the job that fire without notifying anybody."""

    alert: str | None  # its name; None for all alerts of the job
    until: float | None
    by: str


class JobView(Record):
    """The state of a job."""

    SCHEMA: ClassVar[int | None] = 1

    time: float
    job_id: str
    job_name: str
    user: str = ""
    state: str
    pending_reason: str | None = None  # Slurm's reason why the job waits
    unknown_reason: str | None = None  # why the state is UNKNOWN
    suspended: bool = False  # whether Slurm has stopped the running job for now; it then has no ETA
    attempt: int = 0
    requeued: EarlierAttempt | None = None  # set while the job waits for its next attempt
    phase: str = "launching"
    orchestrator_silent_since: float | None = None  # epoch seconds; None while the orchestrator responds
    start: float | None = None
    end: float | None = None
    time_limit_s: float | None = None
    limit_end: float | None = None  # when the time limit ends the job
    unit: str | None = None
    items: float | None = None
    items_expected: float | None = None
    items_processed: float | None = None
    rate: float | None = None  # units per second, lately
    average_rate: float | None = None  # units per second since the first positions of the running workers
    output_tokens_per_second: float | None = None
    eta: EtaEstimate | None = None
    time_limit_met_probability: float | None = None
    stop: StopView | None = None  # set while the job is being stopped
    readiness: ReadinessView | None = None  # None if nothing is waited for
    first_to_stop: str | None = None  # worker without progress that stopped first
    workers: tuple[WorkerView, ...] = ()
    outputs: tuple[OutputView, ...] = ()
    checkpoints: Checkpoints | None = None
    filesystems: tuple[FileSystem, ...] = ()
    gpus: tuple[NodeGpusView, ...] = ()
    events: tuple[Event, ...] = ()  # oldest first
    nodes: tuple[NodeView, ...] = ()
    launch: LaunchView = LaunchView()
    muted: tuple[MutedAlert, ...] = ()  # only in `gpujob watch`, and if the cluster file names the Alertmanager
    cause: EndCause | None = None
    report: Report | None = None  # when the job has ended
    run_dir: str = ""
