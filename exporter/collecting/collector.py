"""The collector protocol, and the context and status that collectors share."""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Never, Protocol

from exporter.collecting.families import Family, Samples
from exporter.collecting.published import Publisher
from exporter.contract.clock import Clock, SystemClock
from exporter.contract.events import Event
from exporter.contract.identity import Identity
from exporter.contract.lazy_dataclass import dataclass
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

WORKER_LABELS = ("worker", "role", "rank")
IDLE_INTERVAL_S = 60.0  # of a collector with nothing to read: GpuJobCollectorFailing fires after 5 minutes without one


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
    # end of a time limit that was changed while the job runs, from the collector of the job
    changed_limit_end: Publisher[float | None] = field(default_factory=lambda: Publisher(None, SystemClock()))

    @property
    def limit_end(self) -> float | None:
        """When the time limit of the job ends now, epoch seconds; None without a known one."""
        changed = self.changed_limit_end.value
        return self.identity.end if changed is None else changed

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
