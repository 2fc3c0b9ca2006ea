"""The collector protocol, and the context and status that collectors share."""

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

if TYPE_CHECKING:  # only for annotations: collectors are defined before GPUs
    from exporter.gpus.host_reader import GpuHost

Snapshot = TypeVar("Snapshot")

WORKER_LABELS = ("worker", "role", "rank")


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
    # reads files that may hang
    files: FileWatchHost = field(default_factory=lambda: FileWatchHost(SystemClock(), use_helper=False))
    gpus: "GpuHost | None" = None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks of this node."""
        return self.manifest.tasks_of(self.identity.node_index)


@dataclass
class NodeStatus:
    """Status of one node as JSON-ready values; each collector adds its part."""

    job: dict[str, Any] = field(default_factory=dict)
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank
    outputs: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: dict[str, Any] = field(default_factory=dict)  # of the job, on its first node
    filesystems: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)  # of the job on this node, from its cgroup
    launch: dict[str, Any] = field(default_factory=dict)  # launch checks: passed and missing ones of each worker
    gpus: dict[str, Any] = field(default_factory=dict)  # of the job on this node; empty if it has none
    figures_of_merit: list[dict[str, Any]] = field(default_factory=list)  # reported by the job on this node

    def worker(self, rank: int) -> dict[str, Any]:
        """Return the entry of one worker, creating it if needed."""
        return self.workers.setdefault(rank, {})


class Collector(Protocol[Snapshot]):
    """Reads in the background, renders in the foreground.

    ``read`` may block and may raise. It runs on the collector's own thread, never twice at once. ``render`` and
    ``describe`` do no I/O: they only show the last snapshot.
    """

    @property
    def name(self) -> str: ...

    @property
    def families(self) -> tuple[Family, ...]: ...

    @property
    def interval_s(self) -> float:
        """Seconds between reads."""
        ...

    def read(self) -> Snapshot: ...

    def render(self, snapshot: Snapshot, out: Samples, /) -> None: ...

    def describe(self, snapshot: Snapshot, status: NodeStatus, /) -> None:
        """Add the snapshot to the status."""
        ...


def worker_labels(task: Task) -> Mapping[str, object]:
    """Return the labels of one task's series."""
    return {"worker": task.worker, "role": task.role, "rank": task.rank}
