"""What a collector is, and what it is given."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from exporter.collecting.families import Family, Samples
from exporter.contract.clock import Clock, SystemClock
from exporter.contract.identity import Identity
from exporter.contract.manifest import Manifest, Task
from exporter.machine.file_host import FileWatchHost
from exporter.machine.kernel_log import KernelLog
from exporter.machine.process_exits import ProcessExitWatch

if TYPE_CHECKING:  # only annotations name them: a collector is defined before the GPUs are
    from exporter.gpus.host_reader import GpuHost
    from exporter.gpus.records import GpuReading

Snapshot = TypeVar("Snapshot")

WORKER_LABELS = ("worker", "role", "rank")


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """What the log of one worker says of its work."""

    last_rise: float | None = None  # when its position last rose; None before it ever has, and where nothing tells
    stalled: bool | None = None
    """Whether it has stalled by the rhythm of its own log, whatever its GPUs do; None where no position is known."""
    done: bool = False  # whether nothing is left for it to do
    waits: bool = False  # whether it serves requests and has none


@dataclass
class Board:
    """What one collector has found and another shows."""

    phase: str | None = None  # what the job is at instead of its work, as its logs say: checkpointing or evaluating
    checkpoints: tuple[float, ...] = ()  # moments at which its last checkpoint files were written, in order
    running: frozenset[int] = frozenset()
    """Ranks of this node's workers that are there while the job is running, not before or after that phase."""
    gpus: "GpuReading | None" = None  # the last look at all GPUs that this sidecar sees
    own_gpus: tuple[str, ...] = ()  # UUIDs of the job's own among them, in the order of the plan
    pids: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Processes of each worker by rank, descendants included,"""
    starts: Mapping[int, float] = field(default_factory=dict)  # and when its latest run started
    job_phase: str = "launching"  # phase of the job as its page shows it
    progress: Mapping[int, WorkerProgress] = field(default_factory=dict)
    """What the log of each worker says of its work, by rank."""
    gpu_positions: Mapping[int, str] = field(default_factory=dict)  # their UUIDs by the positions of the plan
    gpu_users: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Ranks of the workers that were last seen on a GPU, by its UUID."""
    shared_gpus: frozenset[str] = frozenset()  # UUIDs of GPUs on which processes are that are not the job's
    gpus_lost: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """GPUs that are lost or need a reset, by UUID: when that was first seen, and what the driver says of it."""
    gpus_busy: Mapping[int, bool] = field(default_factory=dict)
    """Whether the GPUs of a worker work, by rank, where that is known."""


@dataclass(frozen=True)
class CollectorContext:
    """What every collector is made from."""

    manifest: Manifest
    identity: Identity
    clock: Clock
    proc: str = "/proc"
    exits: ProcessExitWatch = field(default_factory=lambda: ProcessExitWatch(SystemClock()))
    """Told by the kernel when a process ends."""
    kernel: KernelLog | None = None  # the kernel's log, where there is one to read
    board: Board = field(default_factory=Board)
    files: FileWatchHost = field(default_factory=lambda: FileWatchHost(SystemClock(), process=False))
    """What looks at files that may hang."""
    gpus: "GpuHost | None" = None  # what reads the GPUs

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks of this node."""
        return self.manifest.tasks_of(self.identity.node_index)


@dataclass
class NodeStatus:
    """One node's status as JSON-ready values; each collector fills in what it knows."""

    job: dict[str, Any] = field(default_factory=dict)
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    outputs: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: dict[str, Any] = field(default_factory=dict)  # of the job, on its first node
    filesystems: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)  # of the job on this node, from its control group
    launch: dict[str, Any] = field(default_factory=dict)
    """Checks of the launch: what has been seen of every worker, and what has not."""
    gpus: dict[str, Any] = field(default_factory=dict)  # of the job on this node; empty where it has none
    figures_of_merit: list[dict[str, Any]] = field(default_factory=list)
    """What the job has told of itself, on this node."""

    def worker(self, rank: int) -> dict[str, Any]:
        """The entry of one worker, made when it is not there."""
        return self.workers.setdefault(rank, {})


class Collector(Protocol[Snapshot]):
    """Reads in the background, renders in the foreground.

    ``read`` may block and may raise; it runs on the collector's own thread, never twice at once.
    ``render`` and ``describe`` do no I/O: they only show the last snapshot.
    """

    @property
    def name(self) -> str: ...

    @property
    def families(self) -> tuple[Family, ...]: ...

    @property
    def interval_s(self) -> float:
        """Seconds between two reads."""
        ...

    def read(self) -> Snapshot: ...

    def render(self, snapshot: Snapshot, out: Samples, /) -> None: ...

    def describe(self, snapshot: Snapshot, status: NodeStatus, /) -> None:
        """Add what the snapshot holds to the status page."""
        ...


def worker_labels(task: Task) -> Mapping[str, object]:
    """Labels of the series of one task."""
    return {"worker": task.worker, "role": task.role, "rank": task.rank}
