"""Events of the workers of this node: stalls, slowdowns, errors in logs, odd states, and jumps of GPU memory."""

from collections import deque
from collections.abc import Callable

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract import run_files
from exporter.contract.events import Event
from exporter.contract.status import NodeStatus
from exporter.logs.lexicon_reader import lexicon_of_job
from exporter.sidecar.worker_events import EVENT_KINDS, WorkerEvents

MOST_EVENTS = 50


class WorkerEventsCollector:
    """Compares the status of the node with that of its last read."""

    name = "events"
    families: tuple[Family, ...] = ()

    def __init__(self, context: CollectorContext, status: Callable[[], NodeStatus]) -> None:
        self._context, self._status = context, status
        self.interval_s = context.manifest.check_interval_s
        self._earlier = self._read_earlier()  # now: later it is the status of this sidecar
        known = self._earlier.events if self._earlier is not None else ()
        self._events = deque((event for event in known if event.event in EVENT_KINDS), maxlen=MOST_EVENTS)
        self._found: WorkerEvents | None = None

    def read(self) -> tuple[Event, ...]:
        if self._found is None:
            self._found = WorkerEvents(lexicon_of_job(self._context.manifest).severities, self._earlier)
        self._events += self._found.update(self._status(), self._context.clock.time())
        return tuple(self._events)

    def _read_earlier(self) -> NodeStatus | None:
        """Last status of an earlier sidecar of this node and attempt, whose events it repeats."""
        manifest, identity = self._context.manifest, self._context.identity
        status = NodeStatus.read_valid(manifest.run_dir / run_files.STATUS_DIR / f"{identity.node}.json")
        return None if status is None or status.attempt != identity.attempt or manifest.attached else status

    def render(self, snapshot: tuple[Event, ...], out: Samples) -> None:
        """Render nothing: the series of other collectors have the same facts."""

    def describe(self, snapshot: tuple[Event, ...], parts: StatusParts) -> None:
        parts.events += snapshot
