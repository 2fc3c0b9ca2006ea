"""Report of a job: ``report.json`` in the run directory, and what ``gpujob report --json`` prints.

None means unknown, unless a comment says otherwise. Times are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from exporter.contract.records import NOTHING, JsonObject, Record
from exporter.contract.slurm_accounting import SlurmAccounting
from exporter.contract.status import DamagedFile, GpuDriver, GpuXid, LoggedValues, RunFacts, TaskPosition


class WorkerGpu(Record):
    """A GPU that the plan gives to a worker, or that it uses."""

    gpu: str | None = None  # index; None if unknown
    uuid: str | None = None  # None for a planned position without a GPU
    planned: bool = False
    used: bool | None = None
    memory_bytes: int | None = None
    sm_ratio: float | None = None
    attribution: str | None = None


class WorkerReport(TaskPosition, RunFacts, LoggedValues):
    """One worker in the report."""

    stalled_s: float | None = None  # time without progress before its end, if it had stalled by then
    restarts_max: int | None = None  # restarts that its policy allows, if any were needed
    log_errors: Mapping[str, int] = NOTHING  # lines that match an error pattern, by its name
    gpu_devices: tuple[WorkerGpu, ...] = ()
    gpu_misplaced: str | None = None


class WorkerName(Record):
    """A worker that was not ready in time."""

    worker: str
    rank: int | None = None  # None if it is no worker of the plan
    node: str


class EndCause(Record):
    """An end that decided something: why the job failed, or why a worker was restarted."""

    worker: str
    rank: int | None = None
    node: str | None = None
    reason: str
    code: int | None = None
    signal: str | None = None
    time: float | None = None
    restart: int | None = 0
    evidence: tuple[str, ...] = ()
    run: int | None = None  # number of the run from 1, of a worker that was restarted
    missing: tuple[WorkerName, ...] = ()  # the first workers that were not ready in time
    missing_total: int = 0
    diagnosis: str | None = None  # file with everything known about the end, relative to the run directory


class Stop(Record):
    """Why the job was stopped."""

    reason: str
    cause: str
    time: float


class FileCoverage(NamedTuple):
    """How many of the output files were verified."""

    verified: int  # whose contents were read
    files: int
    reason: str | None = None  # why the others were not verified


class CheckResult(Record):
    """One check of the finished job."""

    name: str
    passed: bool | None  # None if it was not checked, or is undecided
    detail: str
    files: tuple[DamagedFile, ...] = ()  # the first damaged files
    files_total: int = 0
    coverage: FileCoverage | None = None  # of a check of output files that were found; no files if none should exist


class Verification(Record):
    """Checks of the finished job."""

    verified: bool = False  # whether a check besides that of the workers has passed, and covers every output file
    checks: tuple[CheckResult, ...] = ()
    state_before: str | None = None  # state in the report that was verified again
    differs: tuple[str, ...] | None = None  # checks whose result was another one in it


class GpuSums(Record):
    """Totals of several GPUs."""

    utilization_mean_ratio: float | None = None
    seen_s: float | None = None  # GPU seconds with a known utilization
    idle_s: float | None = None  # of these: with a utilization under 1 %
    memory_peak_bytes: int | None = None  # highest of all
    energy_j: float | None = None


class GpuDeviceReport(GpuSums):
    """One GPU over the job."""

    gpu: str
    uuid: str
    name: str | None = None
    state: str | None = None
    words: str | None = None
    memory_total_bytes: int | None = None
    xids: tuple[GpuXid, ...] = ()


class NodeGpuReport(GpuDriver, GpuSums):
    """GPUs of the job on one node."""

    node: str
    gpus: tuple[GpuDeviceReport, ...] = ()


class GpuEvent(NamedTuple):
    """A GPU event of the job."""

    time: float
    node: str | None = None
    level: str | None = None
    event: str | None = None
    worker: str | None = None
    detail: str | None = None


class GpuReport(GpuSums):
    """All GPUs of the job."""

    count: int = 0
    names: Mapping[str, int] = NOTHING  # numbers by model
    nodes: tuple[NodeGpuReport, ...] = ()
    events: tuple[GpuEvent, ...] = ()  # the first of them
    events_total: int = 0


class LaunchFault(Record):
    """One fault that a launch check found."""

    worker: str | None = None
    rank: int | None = None
    node: str
    found: str
    cure: str


class LaunchResult(Record):
    """Result of one launch check on all nodes."""

    name: str
    level: str  # issue or warning
    passed: bool | None
    detail: str
    faults: tuple[LaunchFault, ...] = ()


class LaunchReport(Record):
    """Result of the launch checks."""

    SCHEMA: ClassVar[int | None] = 1

    verified: bool
    elapsed_s: float | None = None
    checks: tuple[LaunchResult, ...] = ()


class Monitoring(Record):
    """Nodes whose sidecar wrote its final values, and others."""

    nodes_with_final_values: tuple[str, ...] = ()
    nodes_without: tuple[str, ...] = ()


class Report(Record):
    """Report of a job."""

    SCHEMA: ClassVar[int | None] = 1

    job_id: str
    job_name: str
    attempt: int = 0  # from 0
    state: str
    exit_status: int
    why: tuple[str, ...] = ()  # reasons for the state, if it is unknown or gpujob did not launch the job
    cause: EndCause | None = None  # first failure
    tolerated: tuple[EndCause, ...] = ()  # failures of workers that are not critical
    restarted: tuple[EndCause, ...] = ()  # ends that were followed by a restart
    stopped: Stop | None = None
    start: float | None = None
    end: float | None = None
    duration_s: float | None = None
    unit: str | None = None  # of the items below
    items: float | None = None
    items_expected: float | None = None
    items_processed: float | None = None
    throughput_items_per_second: float | None = None
    benchmark: tuple[JsonObject, ...] | None = None  # results, of a job with a benchmark
    verification: Verification = Verification()
    gpus: GpuReport | None = None  # None for a job without GPUs
    accounting: SlurmAccounting | None = None  # Slurm's, which is complete only after the report was written
    launch: LaunchReport | None = None
    diagnoses: tuple[str, ...] = ()  # files about failed workers, relative to the run directory
    monitoring: Monitoring = Monitoring()
    nodes: tuple[str, ...] = ()
    workers: tuple[WorkerReport, ...] = ()
    run_dir: str = ""
    requeued: bool | None = None  # whether the job continues in its next attempt
    incomplete: str | None = None  # why records, logs or output in the run directory may be missing
