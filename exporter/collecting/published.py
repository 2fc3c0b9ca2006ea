"""Values that one collector publishes for others.

The register (`exporter/sidecar/collectors.py`) makes one `Publisher` per value, and hands it to the one collector that
writes it and, as `Published`, to those that read it. Nothing is published before the writer's first read, and a writer
that hangs or fails leaves its last value. So a reader takes either `value`, which may be a default or old, or `recent`.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Generic, TypeVar

from exporter.contract.clock import Clock
from exporter.contract.lazy_dataclass import dataclass

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RECENT_S = 60.0  # shortest time for which a value counts as current: a busy file system can delay a read


class Published(Generic[T_co]):
    """The last value of one collector, as its readers see it."""

    def __init__(self, default: T_co, clock: Clock, *, interval_s: float = 0.0) -> None:
        """``interval_s``: between reads of the writer, if that may be more than a few seconds."""
        self._default, self._clock, self._recent_s = default, clock, max(RECENT_S, 3 * interval_s)
        self._last = (default, clock.monotonic())

    @property
    def value(self) -> T_co:
        """The last value, however old; the default if there is none yet."""
        return self._last[0]

    @property
    def recent(self) -> T_co:
        """The last value, or the default once its writer must be hanging or failing."""
        value, time = self._last
        return value if self._clock.monotonic() - time <= self._recent_s else self._default


class Publisher(Published[T]):
    """The same for its only writer."""

    def publish(self, value: T) -> None:
        """Replace the value."""
        self._last = (value, self._clock.monotonic())  # at once, since readers are on other threads


@dataclass(frozen=True, slots=True)
class WorkerProcesses:
    """Processes of this node's workers, from the collector of workers."""

    running: frozenset[int] = frozenset()  # ranks that exist while the job is running; empty before and after that
    pids: Mapping[int, frozenset[int]] = field(default_factory=dict)  # of each worker by rank, with descendants
    starts: Mapping[int, float] = field(default_factory=dict)  # start of each worker's latest run, by rank


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Progress of one worker according to its log."""

    last_rise: float | None = None  # when its position last rose; None if never, or unknown
    stalled: bool | None = None  # by the rhythm of its log, whatever its GPUs do; None if no position is known
    done: bool = False  # whether it has no work left
    waits_for_requests: bool = False  # whether it serves requests and has none


@dataclass(frozen=True, slots=True)
class JobProgress:
    """What the logs say about the job and its workers."""

    phase: str | None = None  # activity that replaces the work: checkpointing or evaluating
    workers: Mapping[int, WorkerProgress] = field(default_factory=dict)  # by rank


@dataclass(frozen=True, slots=True)
class NodeGpuUse:
    """Who uses the GPUs of this node, from the collector of workers' GPUs."""

    workers: Mapping[str, frozenset[int]] = field(default_factory=dict)  # ranks last seen on a GPU, by its UUID
    shared: frozenset[str] = frozenset()  # UUIDs of GPUs with foreign processes
    busy: Mapping[int, bool] = field(default_factory=dict)  # whether a worker's GPUs are, by rank; only where known
