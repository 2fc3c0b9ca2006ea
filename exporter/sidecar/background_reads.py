"""Background reads: each collector has its own daemon thread and a deadline.

A read that hangs (dead mount, stuck driver) costs only the series of its collector. A daemon thread does not delay the
end of the process, and no second read is started.
"""

import contextlib
import logging
import threading
from collections.abc import Callable

from exporter.collecting.collector import Collector, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract.clock import Clock
from exporter.contract.status import CollectorReads
from exporter.machine.own_process import name_thread

SUCCESS = Family("collector_success", "Whether the collector's last read worked.", labels=("collector",))
DURATION = Family("collector_duration_seconds", "How long the collector's last read took.", labels=("collector",))
LAST_SUCCESS = Family(
    "collector_last_success_timestamp_seconds",
    "When the collector last read without an error.",
    labels=("collector",),
)
FAMILIES = (SUCCESS, DURATION, LAST_SUCCESS)

LEAST_DEADLINE_S = 10.0
FIRST_S = 60.0  # after its start, somebody usually watches a job
FIRST_INTERVAL_S = 1.0  # between reads in that time, for collectors that read often anyway
MOST_OFTEN_S = 10.0  # longest interval of those

log = logging.getLogger("gpujob.refresh")


class CollectorSlot:
    """One collector with its thread and last snapshot."""

    def __init__(self, collector: Collector, clock: Clock, deadline_s: float | None = None) -> None:
        self.collector = collector
        self.on_read: Callable[[], None] | None = None  # called on the collector's thread after each read
        self._clock = clock
        self._deadline_s = deadline_s or max(LEAST_DEADLINE_S, 3 * collector.interval_s)
        self._snapshot: object = None
        self._has_snapshot = False
        self._started: float | None = None
        self._duration_s: float | None = None
        self._last_success: float | None = None
        self._is_failing = False
        self._is_render_failing = False
        self._wake = threading.Event()
        self.ended_reads = 0  # successful or not
        self._requested = 0
        self._served = -1

    def start(self) -> None:
        """Start reading, now and then at the collector's interval."""
        threading.Thread(target=self._loop, name=f"collector-{self.collector.name}", daemon=True).start()

    def request(self) -> int:
        """Request a read that starts after this call; returns a ticket for ``has_served``."""
        self._requested += 1
        self._wake.set()
        return self._requested

    def has_served(self, ticket: int) -> bool:
        """Whether the read requested with this ticket has ended."""
        return self._served >= ticket

    @property
    def ready(self) -> bool:
        """Whether a first read has ended, successfully or not."""
        return self._served >= 0

    @property
    def overdue(self) -> bool:
        """Whether the current read has exceeded the deadline."""
        started = self._started
        late = started is not None and self._clock.monotonic() - started > self._deadline_s
        if late and not self._is_failing:
            self._is_failing = True
            log.warning("collector %s hangs: no answer in %g s", self.collector.name, self._deadline_s)
        return late

    @property
    def snapshot(self) -> object:
        """The last snapshot; None if not read yet, failed or hanging."""
        return self._snapshot if self._has_snapshot and not self.overdue else None

    @property
    def success(self) -> bool:
        """Whether the last read succeeded and rendered, and the current one is in time."""
        return self._has_snapshot and not self._is_render_failing and not self.overdue

    def _loop(self) -> None:
        name_thread(self.collector.name)
        began = due = self._clock.monotonic()
        while True:
            self._read()
            now, interval_s = self._clock.monotonic(), self.collector.interval_s
            if now - began < FIRST_S and interval_s <= MOST_OFTEN_S:
                interval_s = min(interval_s, FIRST_INTERVAL_S)
            if due <= now:  # a requested read does not shift the regular ones
                due = max(due + interval_s, now)
            self._wake.wait(max(0.0, due - now))
            if self._wake.is_set():
                self._wake.clear()

    def _read(self) -> None:
        serving, started = self._requested, self._clock.monotonic()
        self._started = started
        try:
            snapshot = self.collector.read()
        except Exception as error:  # noqa: BLE001 - whatever fails in a collector costs that collector alone
            self._has_snapshot, self._snapshot = False, None
            if not self._is_failing:
                log.warning("collector %s fails: %s: %s", self.collector.name, type(error).__name__, error)
            self._is_failing = True
        else:
            self._snapshot, self._has_snapshot = snapshot, True
            self._last_success = self._clock.time()
            if self._is_failing:
                log.warning("collector %s works again", self.collector.name)
            self._is_failing = False
        self._duration_s = self._clock.monotonic() - started
        self._started = None
        self._served = serving
        self.ended_reads += 1
        callback = self.on_read  # the other thread may reset it at any time
        if callback is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                callback()

    def render(self, out: Samples) -> None:
        """Render the last snapshot; a failure costs only the series of this collector."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        mark = out.mark()
        try:
            self.collector.render(snapshot, out)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - see above
            out.remove_since(mark)
            if not self._is_render_failing:
                log.error("collector %s cannot be shown: %s: %s", self.collector.name, type(error).__name__, error)
            self._is_render_failing = True
        else:
            self._is_render_failing = False

    def render_self(self, out: Samples) -> None:
        """Render the success and duration of the reads."""
        name = self.collector.name
        if self.ready or self.overdue:
            out.add(SUCCESS, int(self.success), collector=name)
        out.add(DURATION, self._duration_s, collector=name)
        out.add(LAST_SUCCESS, self._last_success, collector=name)

    def describe(self, parts: StatusParts) -> None:
        """Add the last snapshot to the status."""
        snapshot = self.snapshot
        if snapshot is not None:
            self.collector.describe(snapshot, parts)  # type: ignore[arg-type]

    @property
    def reads(self) -> CollectorReads:
        """Success and duration of the reads, for the status."""
        return CollectorReads(
            success=self.success,
            duration_s=self._duration_s,
            last_success=self._last_success,
            overdue=self.overdue,
        )
