"""The collector protocol, and the context and status that collectors share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Never, Protocol

from exporter.collecting.families import Family, Samples
from exporter.contract.clock import Clock, SystemClock
from exporter.contract.events import Event
from exporter.contract.identity import Identity
from exporter.contract.manifest import Manifest, Task
from exporter.contract.records import Record
from exporter.contract.status import (
    Checkpoints,
    FigureOfMerit,
    FileSystem,
    JobFacts,
    JobOutlook,
    Launch,
    Memory,
    NodeGpus,
    OutputGroup,
    Readiness,
    SidecarCost,
)
from exporter.machine.file_host import FileWatchHost
from exporter.machine.kernel_log import KernelLog
from exporter.machine.process_exits import ProcessExitWatch

if TYPE_CHECKING:  # only for annotations: collectors are defined before GPUs
    from exporter.gpus.host_reader import GpuHost
    from exporter.gpus.records import GpuReading

WORKER_LABELS = ("worker", "role", "rank")


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Progress of one worker according to its log."""

    last_rise: float | None = None  # when its position last rose; None if never, or unknown
    stalled: bool | None = None  # by the rhythm of its log, whatever its GPUs do; None if no position is known
    done: bool = False  # whether it has no work left
    waits_for_requests: bool = False  # whether it serves requests and has none


@dataclass
class PublishedValues:
    """Values that one collector publishes for others."""

    log_phase: str | None = None  # activity that replaces the work, from the logs: checkpointing or evaluating
    checkpoint_times: tuple[float, ...] = ()  # times of its last checkpoint files, in order
    # Ranks of this node's workers that exist while the job is running; empty before and after that phase
    running_ranks: frozenset[int] = frozenset()
    gpu_reading: "GpuReading | None" = None  # last reading of all GPUs that this sidecar sees
    own_gpus: tuple[str, ...] = ()  # UUIDs of the job's GPUs among them, in the plan's order
    # processes of each worker by rank, with descendants
    pids: Mapping[int, frozenset[int]] = field(default_factory=dict)
    start_times: Mapping[int, float] = field(default_factory=dict)  # start of each worker's latest run, by rank
    job_phase: str = "launching"  # as its page shows it
    progress: Mapping[int, WorkerProgress] = field(default_factory=dict)  # by rank
    gpu_positions: Mapping[int, str] = field(default_factory=dict)  # UUIDs by the position in the plan
    # Ranks of the workers last seen on a GPU, by its UUID
    gpu_users: Mapping[str, frozenset[int]] = field(default_factory=dict)
    shared_gpus: frozenset[str] = frozenset()  # UUIDs of GPUs with foreign processes
    # Lost GPUs, or those that need a reset, by UUID: when first seen, and the driver's text
    gpus_lost: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    # whether a worker's GPUs are busy, by rank; only where known
    gpus_busy: Mapping[int, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectorContext:
    """Dependencies of a collector."""

    manifest: Manifest
    identity: Identity
    clock: Clock
    proc: str = "/proc"
    # reports the end of processes
    exits: ProcessExitWatch = field(default_factory=lambda: ProcessExitWatch(SystemClock()))
    kernel: KernelLog | None = None  # None if it cannot be read
    published: PublishedValues = field(default_factory=PublishedValues)
    # reads files that may hang
    files: FileWatchHost = field(default_factory=lambda: FileWatchHost(SystemClock(), use_helper=False))
    gpus: "GpuHost | None" = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks of this node."""
        return self.manifest.tasks_of(self.identity.node_index)


@dataclass
class StatusParts:
    """Parts of the status of one node; each collector adds its own."""

    job: JobFacts = field(default_factory=JobFacts)
    outlook: JobOutlook = field(default_factory=JobOutlook)
    exporter: SidecarCost | None = None
    readiness: Readiness | None = None
    workers: dict[int, list[Record]] = field(default_factory=dict)  # parts of each worker's status, by rank
    outputs: tuple[OutputGroup, ...] = ()
    checkpoints: Checkpoints | None = None
    filesystems: tuple[FileSystem, ...] = ()
    memory: Memory | None = None
    gpus: NodeGpus | None = None
    launch: Launch = field(default_factory=Launch)
    figures_of_merit: tuple[FigureOfMerit, ...] = ()
    events: list[Event] = field(default_factory=list)

    def add_worker(self, rank: int, part: Record) -> None:
        """Add a part of the status of one worker."""
        self.workers.setdefault(rank, []).append(part)


class Collector(Protocol):
    """Reads in the background, renders in the foreground.

    ``read`` may block and may raise. It runs on the collector's own thread, never twice at once. ``render`` and
    ``describe`` do no I/O: they only show the last snapshot. Each takes only what its own ``read`` returns, so the
    snapshot of an unknown collector has the type ``Never``.
    """

    @property
    def name(self) -> str: ...

    @property
    def families(self) -> tuple[Family, ...]: ...

    @property
    def interval_s(self) -> float:
        """Seconds between reads."""
        ...

    def read(self) -> object: ...

    def render(self, snapshot: Never, out: Samples, /) -> None: ...

    def describe(self, snapshot: Never, parts: StatusParts, /) -> None:
        """Add the snapshot to the status."""
        ...


def worker_labels(task: Task) -> Mapping[str, object]:
    """Return the labels of one task's series."""
    return {"worker": task.worker, "role": task.role, "rank": task.rank}
