"""Events of the workers of a node, from two statuses in a row."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field

from exporter.contract.events import Event
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import GpuDevice, NodeStatus, WorkerStatus
from exporter.progress.work import speed_text

SLOW, NOT_SLOW = 1.25, 1.1  # factors to the earlier time per item at which a slowdown begins and ends
ODD_STATE_S = 30.0  # a wait for a disk that is shorter is ordinary
SPIKE_SHARE, SPIKE_BYTES = 1.25, 1 << 30  # GPU memory above its level by both is a spike
LEVEL_S = 300.0  # a level of GPU memory is what was used at least this long
ODD_STATES = {
    "zombie": "has ended, and its parent has not waited for it",
    "disk_sleep": "has waited for a device or file system",
    "stopped": "is stopped",
}

STALLED, RECOVERED, SLOW_EVENT, FAST_EVENT = (
    "worker stalled",
    "worker recovered",
    "worker slowed down",
    "worker at its rate",
)
LOG_ERROR, STATE, SPIKE = "log error", "worker state", "GPU memory spike"
EVENT_KINDS = frozenset((STALLED, RECOVERED, SLOW_EVENT, FAST_EVENT, LOG_ERROR, STATE, SPIKE))


@dataclass
class _WorkerMemory:
    """What events have said about a worker."""

    run: int = 0
    stalled_since: float | None = None
    stalled_at: float | None = None  # items processed then
    is_slow: bool = False
    state: str = ""
    state_since: float = 0.0
    is_odd: bool = False
    errors: dict[str, int] = field(default_factory=dict)  # lines by pattern, at its last event


@dataclass
class _GpuMemory:
    """Memory of a GPU: the level since a time."""

    level: int
    since: float


class WorkerEvents:
    """Finds what has changed for the workers since the last status. Their ends have events of their own."""

    def __init__(self, severities: Mapping[str, str], earlier: NodeStatus | None = None) -> None:
        """``severities`` are those of error patterns; ``earlier`` is the last status of an earlier sidecar."""
        self._severities = severities
        self._workers: dict[int, _WorkerMemory] = {}
        self._gpus: dict[str, _GpuMemory] = {}
        for worker in earlier.workers if earlier is not None else ():
            list(self._of_worker(worker, earlier.time if earlier is not None else 0.0))

    def update(self, status: NodeStatus, now: float) -> list[Event]:
        """Events of this status; none once the job is ending."""
        if status.job.phase in ("completing", "finished"):
            return []
        found = [event for worker in status.workers for event in self._of_worker(worker, now)]
        if status.gpus is not None and any(worker.items is not None for worker in status.workers):
            found += [event for gpu in status.gpus.gpus if (event := self._memory_spike(gpu, now)) is not None]
        return found

    def _of_worker(self, worker: WorkerStatus, now: float) -> Iterator[Event]:
        known = self._workers.setdefault(worker.rank, _WorkerMemory(run=worker.restarts))

        def event(level: str, kind: str, detail: str) -> Event:
            return Event(time=now, level=level, event=kind, worker=worker.worker, rank=worker.rank, detail=detail)

        if not worker.up or known.run != worker.restarts:
            # the end of a run has an event with the errors that led to it
            self._workers[worker.rank] = _WorkerMemory(run=worker.restarts, errors=dict(worker.log_errors))
            return
        yield from self._log_errors(worker, known.errors, event)
        if worker.stalled and known.stalled_since is None:
            known.stalled_since = worker.last_progress if worker.last_progress is not None else now
            known.stalled_at = worker.items_processed
            seconds = now - known.stalled_since
            yield event("warning", STALLED, f"no progress for {seconds:.0f} s{_position(worker)}")
        elif known.stalled_since is None or worker.last_progress is None:
            pass
        elif worker.items_processed == known.stalled_at:
            # More time may be granted, as while its GPUs are busy. A set clock or a suspension moves the last progress.
            known.stalled_since = worker.last_progress
        elif worker.stalled is False:
            seconds = worker.last_progress - known.stalled_since
            known.stalled_since = None
            yield event("info", RECOVERED, f"progress after {seconds:.0f} s{_position(worker)}")
        slowdown = worker.slowdown
        if slowdown is not None and not worker.stalled and (slowdown >= SLOW) != known.is_slow:
            if slowdown >= SLOW:
                known.is_slow = True
                rate = f", now {speed_text(worker.rate, worker.unit or 'items')}" if worker.rate else ""
                yield event("warning", SLOW_EVENT, f"{100 * (1 - 1 / slowdown):.0f}% below its rate{rate}")
            elif slowdown <= NOT_SLOW:
                known.is_slow = False
                yield event("info", FAST_EVENT, "it is as fast as before")
        if worker.state != known.state:
            if known.is_odd:
                yield event("info", STATE, f"its process is {worker.state} again")
            known.state, known.state_since, known.is_odd = worker.state, now, False
        elif worker.state in ODD_STATES and not known.is_odd and now - known.state_since >= ODD_STATE_S:
            known.is_odd = True
            text = f"{worker.state}: its process {ODD_STATES[worker.state]} for {now - known.state_since:.0f} s"
            yield event("warning", STATE, text)

    def _log_errors(
        self, worker: WorkerStatus, known: dict[str, int], event: Callable[[str, str, str], Event]
    ) -> Iterator[Event]:
        """An event for the first line of each error pattern, and each time that there are ten times as many."""
        for pattern, count in worker.log_errors.items():
            if count >= max(1, 10 * known.get(pattern, 0)):
                known[pattern] = count
                level = "critical" if self._severities.get(pattern) == "critical" else "warning"
                yield event(level, LOG_ERROR, f"{pattern}: {count} {'line' if count == 1 else 'lines'}")

    def _memory_spike(self, gpu: GpuDevice, now: float) -> Event | None:
        """An event if a GPU has much more memory in use than it had for minutes; that is its level from then on."""
        used = gpu.memory_used_bytes
        if used is None:
            return None
        known = self._gpus.setdefault(gpu.uuid, _GpuMemory(used, now))
        if used < known.level + SPIKE_BYTES or used < known.level * SPIKE_SHARE:
            return None
        before, was_level = known.level, now - known.since >= LEVEL_S
        self._gpus[gpu.uuid] = _GpuMemory(used, now)
        if not was_level:
            return None  # it still allocates what it needs
        detail = f"GPU {gpu.gpu}: {_gib(used)} GiB, {_gib(before)} GiB before"
        return Event(time=now, level="warning", event=SPIKE, detail=detail)


def _position(worker: WorkerStatus) -> str:
    if worker.items is None:
        return ""
    total = f" of {worker.items_expected}" if worker.items_expected else ""
    return f", at {worker.items}{total} {worker.unit or 'items'}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"
