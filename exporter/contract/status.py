"""Status of one node: what a sidecar publishes under ``/status`` and in ``status/{node}.json``.

A worker's status is made of parts, each from one collector. Report and view of the job are made of the same parts.
None means unknown, unless a comment says otherwise. Times are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from exporter.contract.events import Event
from exporter.contract.records import NOTHING, JsonObject, Record

LISTED_RUNS = 5  # ends of a worker in the status of its node: it is rewritten every few seconds

# -- workers ---------------------------------------------------------------------------------------


class EtaEstimate(NamedTuple):
    """Seconds left: the middle estimate and an interval that should contain the true value 4 times in 5."""

    seconds: float
    low: float
    high: float


class WorkerEnd(Record):
    """How one run of a worker ended."""

    reason: str  # exit reason
    code: int | None = None  # exit status
    signal: str | None = None  # that killed it
    core: bool | None = None  # whether the kernel dumped its memory
    time: float | None = None
    restart: int | None = None  # number of the run, from 0; None if the worker never started
    evidence: tuple[str, ...] = ()  # facts behind the reason, for people
    max_rss_bytes: int | None = None  # most memory that one of its processes used
    asked_to_end: bool | None = None  # whether it ended after a signal of the launcher


class TaskFacts(Record):
    """A worker according to the plan."""

    worker: str = ""
    role: str = ""
    rank: int
    node: str = ""
    gpus: tuple[int, ...] = ()  # planned, by position on the node
    critical: bool = True  # whether the job fails with it


class Position(Record):
    """How far a worker is, according to its log or its progress file."""

    unit: str | None = None  # of the position; items if None
    pattern: str | None = None  # name of the pattern that found it
    items: float | None = None
    items_expected: float | None = None  # total
    items_processed: float | None = None  # by this run and earlier ones, without repeats
    items_first: float | None = None  # first position of this run


class TaskPosition(TaskFacts, Position):
    """A worker, and how far it is."""


class RunFacts(Record):
    """The runs of a worker."""

    up: bool = False  # whether it is running
    state: str = "not_found"  # that of its process, or not_found before it starts, or dead
    start: float | None = None  # of its latest run
    restarts: int = 0
    exit: WorkerEnd | None = None  # of its latest run; None while it runs
    exits: tuple[WorkerEnd, ...] = ()  # of its last runs, oldest first
    exit_counts: Mapping[str, int] = NOTHING  # ends of all runs, by exit reason
    cpu_s: float | None = None  # CPU time of all its processes


class ProcessDetails(Record):
    """Costlier facts about the processes of a worker."""

    pss_bytes: int | None = None  # memory, with each shared page divided among its users
    open_files: int | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    paths: tuple[str, ...] = ()  # files that the worker itself has open
    devices: tuple[str, ...] = ()  # `/dev/nvidia*` files that any of them has open


class ProcessFacts(Record):
    """The processes of a worker."""

    pid: int | None = None
    rss_bytes: int | None = None
    children: int | None = None
    threads: int | None = None


class LoggedValues(Record):
    """Named values in the log of a worker, such as its loss."""

    values: Mapping[str, float] = NOTHING  # last ones, however old
    best_values: Mapping[str, float] = NOTHING  # the best one that a read has found, of losses and accuracies


class ProgressFacts(LoggedValues):
    """Pace and outlook of a worker."""

    rate: float | None = None  # units per second, lately; None while it is stalled
    average_rate: float | None = None  # over the whole run
    output_tokens_per_second: float | None = None
    input_tokens_per_second: float | None = None
    eta: EtaEstimate | None = None  # None while it is stalled
    eta_time: float | None = None  # when the ETA was estimated; set without one once that is overdue
    last_progress: float | None = None  # when its position last rose
    stalled: bool | None = None
    stalled_at_end: bool | None = None  # whether it had stalled when its latest run ended; None while that runs
    at: str | None = None  # what it does instead of its work, such as evaluating
    confidence: str | None = None  # in the ETA: high, medium or low
    slowdown: float | None = None  # factor by which it is slower than before
    lag: float | None = None  # share of the work by which it is behind the other workers
    pack: str | None = None  # log pack that was recognised


class GpuUse(Record):
    """Use of one GPU by a worker."""

    gpu: str | None = None  # index; of a MIG instance with its number, such as 0:1
    uuid: str
    memory_bytes: int | None = None
    sm_ratio: float | None = None  # share of time in which its kernels ran
    attribution: str | None = None  # how its use is known: by the driver's process list, or inferred


class GpuSignals(Record):
    """What is odd about a worker and its GPUs."""

    gpu_misplaced: str | None = None  # description; None if it uses the planned GPUs
    gpu_conditions: Mapping[str, str] | None = None  # descriptions by name
    gpu_memory_full: float | None = None  # when its GPU memory became full


class ProcessStatus(RunFacts, ProcessFacts):
    """What the collector of processes knows about a worker."""

    found_by: str | None = None  # how a worker that others started was found
    details: ProcessDetails | None = None


class LogStatus(Position, ProgressFacts):
    """What the collector of logs knows about a worker."""

    epoch: float | None = None
    log_errors: Mapping[str, int] = NOTHING  # lines that match an error pattern, by its name
    log_lag_bytes: int | None = None  # log not yet read
    log_problems: tuple[str, ...] = ()
    prior: JsonObject | None = None  # how this run went, for the ETA of later runs


class GpuUseStatus(GpuSignals):
    """What the collector of GPU users knows about a worker."""

    gpu_plan: tuple[str, ...] = ()  # UUIDs of the planned GPUs
    gpu_use: tuple[GpuUse, ...] | None = None


class MissingGpus(Record):
    """GPUs that a worker lacks, from the collector of GPUs."""

    gpu_missing: tuple[str, ...] = ()  # planned positions without a GPU


class WorkerStatus(TaskPosition, ProcessStatus, LogStatus, GpuUseStatus, MissingGpus):
    """One worker in the status of its node."""


# -- GPUs ------------------------------------------------------------------------------------------


class GpuXid(Record):
    """An error that the NVIDIA driver reported."""

    xid: int
    class_: str  # hardware, application or noise, for example
    count: int = 1
    time: float | None = None  # of the last one
    words: str | None = None  # its meaning


class ForeignProcess(Record):
    """A process of another job or user on a GPU of the job."""

    pid: int
    memory_bytes: int | None = None
    name: str | None = None
    uid: int | None = None


class GpuDevice(Record):
    """One GPU of the job, or one MIG instance."""

    gpu: str  # index; of a MIG instance with its number, such as 0:1
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    state: str | None = None  # ok, lost or hanging, for example
    words: str | None = None  # message of the driver's library
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None  # since the driver was loaded
    energy_job_j: float | None = None  # since the job began
    temperature_c: float | None = None
    sm_activity_ratio: float | None = None
    tensor_activity_ratio: float | None = None
    utilization_mean_ratio: float | None = None  # over the job
    seen_s: float | None = None  # time of the job with a known utilization
    idle_s: float | None = None  # of that time: with a utilization under 1 %
    memory_peak_bytes: int | None = None  # over the job
    workers: tuple[str, ...] = ()  # that use it
    foreign: tuple[ForeignProcess, ...] = ()
    xids: tuple[GpuXid, ...] = ()
    lost_since: float | None = None


class HealthReason(Record):
    """Why a GPU, or a node's GPUs, are not healthy."""

    gpu: str | None = None  # None if it is about all
    severity: str
    words: str


class GpuDriver(Record):
    """The driver of a node's GPUs, and their health."""

    driver_state: str | None = None
    words: str | None = None  # message of the driver's library
    vendor: str | None = None
    driver: str | None = None  # version
    cuda: str | None = None  # version that the driver supports
    allocated: int | None = None  # GPUs that the plan needs on this node
    visible: int | None = None  # GPUs that the driver shows
    health: str | None = None
    reasons: tuple[HealthReason, ...] = ()


class NodeGpus(GpuDriver):
    """GPUs of the job on one node."""

    absent: Mapping[str, str] = NOTHING  # values that the driver does not report, and why
    gpus: tuple[GpuDevice, ...] = ()


# -- files -----------------------------------------------------------------------------------------


class DamagedFile(NamedTuple):
    """A damaged file; name and reason are printable."""

    file: str
    format: str | None
    reason: str


class IgnoredFile(Record):
    """An entry with a matching name that is no regular file."""

    file: str
    kind: str


class WorkerOutput(Record):
    """Output files of one worker."""

    files: int
    bytes: int
    mtime: float | None = None
    records: int | None = None
    stalled: bool | None = None


class OutputGroup(Record):
    """Output files of one path group."""

    group: str
    directory: str | None = None
    pattern: str | None = None
    counting: bool = False  # whether files remain to be counted; then only files and bytes are set
    files: int = 0
    bytes: int = 0
    growth_bytes_per_second: float | None = None
    mtime: float | None = None
    records: int | None = None
    stalled: bool | None = None
    valid: bool | None = None
    files_checked: int | None = None  # files whose present contents have been checked
    files_invalid: int = 0
    invalid: tuple[DamagedFile, ...] = ()  # the first of them
    first_output: float | None = None
    workers: Mapping[int, WorkerOutput] = NOTHING  # by rank
    passed_over: tuple[IgnoredFile, ...] = ()
    problem: str | None = None


class Checkpoint(Record):
    """One checkpoint."""

    name: str
    step: int | None = None
    epoch: float | None = None
    bytes: int = 0
    files: int = 0
    time: float | None = None  # when it was complete
    seconds: float | None = None  # that writing it took
    state: str | None = None  # writing, complete, incomplete or invalid
    missing: int = 0  # files that it lacks
    missing_files: tuple[str, ...] = ()  # the first of them
    valid: bool | None = None
    reason: str | None = None  # why it is incomplete or invalid
    odd_size: float | None = None  # factor to the usual size, if far from it
    odd: str | None = None  # what else is unusual


class IgnoredName(Record):
    """An entry with the name of a checkpoint that is neither file nor directory."""

    name: str
    kind: str


class Checkpoints(Record):
    """Checkpoints of the job, on its first node."""

    count: int = 0
    writing: bool = False
    last: Checkpoint | None = None
    last_complete: Checkpoint | None = None
    interval_s: float | None = None
    interval_steps: float | None = None
    next_expected: float | None = None
    passed_over: tuple[IgnoredName, ...] = ()


class Quota(NamedTuple):
    """One quota with a limit, in bytes."""

    kind: str
    limit_bytes: int
    available_bytes: int  # left below the limit, at least 0


class FileSystem(Record):
    """The file system of one path group."""

    group: str
    mount: str | None = None
    fstype: str | None = None
    responding: bool | None = None
    since: float | None = None  # when it stopped answering
    error: str | None = None
    available_bytes: int | None = None
    size_bytes: int | None = None
    inodes_available: int | None = None
    inodes: int | None = None
    low: bool | None = None
    full_at: float | None = None  # when it will be full at the present pace
    lacks: str | None = None  # what is used up then if not the space: inodes or quota
    quota: Quota | None = None


# -- node and job ----------------------------------------------------------------------------------


class KernelXid(Record):
    """An error of an NVIDIA GPU in the kernel log."""

    pci: str
    code: int
    pid: int | None = None
    time: float


class CgroupMemory(Record):
    """Memory of one cgroup and its descendants; None if the kernel does not report it."""

    used_bytes: int | None = None
    limit_bytes: int | None = None  # smallest one up to the mount, also if it throttles instead of killing
    peak_bytes: int | None = None
    working_set_bytes: int | None = None  # without the page cache, which the kernel reclaims before it kills
    oom_kills: int | None = None  # in version 1 of this cgroup alone
    pressure_some_s: float | None = None  # time in which some process waited for memory
    pressure_full_s: float | None = None  # time in which all processes did


class Memory(CgroupMemory):
    """Memory of the job on this node."""

    cgroup: str | None = None
    version: int | None = None  # of the cgroup hierarchy
    kmsg: str | None = None  # whether the kernel log can be read
    oom_victims: Mapping[int, float] = NOTHING  # times by pid
    xids: tuple[KernelXid, ...] = ()  # the last ones


class LaunchProblem(Record):
    """What a launch check found wrong with one worker, or with the node itself."""

    worker: str | None = None
    rank: int | None = None
    found: str


class LaunchCheck(Record):
    """One check of the launch."""

    name: str
    level: str = "issue"  # or warning
    passed: bool | None = None
    detail: str = ""
    lacking: tuple[LaunchProblem, ...] = ()
    unseen: int = 0  # workers for which it could not be seen, such as those that ended early


class Launch(Record):
    """Launch checks of one node."""

    verified: bool = False
    final: bool = False  # whether the checks are over
    checks: tuple[LaunchCheck, ...] = ()


class RoleReadiness(Record):
    """Workers of one role that are ready."""

    ready: int
    expected: int


class Readiness(Record):
    """Whether the services of the job accept work."""

    ready: bool
    since: float | None = None
    waiting: str = ""  # what is missing, for people
    workers: Mapping[str, RoleReadiness] = NOTHING  # by role


class SidecarCost(Record):
    """The sidecar itself."""

    version: str
    cpu_s: float | None = None
    rss_bytes: int | None = None


class JobFacts(Record):
    """The job according to the launcher and Slurm."""

    job_id: str = ""
    job_name: str = ""
    cluster: str = ""
    user: str = ""
    partition: str = ""
    attempt: int = 0
    phase: str = "launching"
    stop_reason: str | None = None
    orchestrator_silent_since: float | None = None  # epoch seconds; None while the orchestrator responds
    start: float | None = None
    end: float | None = None  # of the allocation
    time_limit_s: float | None = None
    total_items: int | None = None
    workers_expected: int | None = None
    nodes: int | None = None


class JobOutlook(Record):
    """Outlook of the job, from its logs."""

    eta: EtaEstimate | None = None
    deadline: float | None = None
    time_limit_met_probability: float | None = None
    checkpoint_next: float | None = None
    checkpoint_before_time_limit: bool | None = None
    first_to_stop: int | None = None  # rank of the worker without progress that stopped first
    pattern_notes: tuple[str, ...] = ()


class JobStatus(JobFacts, JobOutlook):
    """The job as one sidecar sees it."""

    exporter: SidecarCost | None = None
    readiness: Readiness | None = None  # on the first node


class FigureOfMerit(NamedTuple):
    """A figure that the job reported, and when it was received."""

    name: str
    value: float
    time: float


class CollectorReads(Record):
    """Reads of one collector."""

    success: bool
    duration_s: float | None = None
    last_success: float | None = None
    overdue: bool = False


class NodeName(Record):
    """Name and position of a node."""

    name: str
    index: int = 0


class NodeStatus(Record):
    """Status of one node."""

    SCHEMA: ClassVar[int | None] = 1

    time: float = 0.0
    final: bool = False  # whether these are the last values of the job
    attempt: int = 0
    job: JobStatus = JobStatus()
    node: NodeName | None = None
    workers: tuple[WorkerStatus, ...] = ()  # by rank
    outputs: tuple[OutputGroup, ...] = ()
    checkpoints: Checkpoints | None = None
    filesystems: tuple[FileSystem, ...] = ()
    memory: Memory | None = None
    gpus: NodeGpus | None = None  # None if the job has none
    launch: Launch = Launch()
    figures_of_merit: tuple[FigureOfMerit, ...] = ()
    events: tuple[Event, ...] = ()  # oldest first
    collectors: Mapping[str, CollectorReads] = NOTHING  # by name
