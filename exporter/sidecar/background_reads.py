"""Reading in the background: each collector on its own daemon thread, with a deadline.

A read that hangs (a dead mount, a wedged driver) costs the series of its own
collector and nothing else: its thread is a daemon, so it does not keep the
process from ending, and no second read is started beside it.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from exporter.collecting.collector import Collector
from exporter.collecting.families import Family, Samples
from exporter.contract.clock import Clock
from exporter.machine.thread_name import name_thread

SUCCESS = Family("collector_success", "Whether the collector's last read worked.", labels=("collector",))
DURATION = Family("collector_duration_seconds", "How long the collector's last read took.", labels=("collector",))
LAST_SUCCESS = Family(
    "collector_last_success_timestamp_seconds",
    "When the collector last read without an error.",
    labels=("collector",),
)
FAMILIES = (SUCCESS, DURATION, LAST_SUCCESS)

LEAST_DEADLINE_S = 10.0

log = logging.getLogger("gpujob.refresh")


class CollectorSlot:
    """One collector with its thread and its last snapshot."""

    def __init__(self, collector: Collector[Any], clock: Clock, deadline_s: float | None = None) -> None:
        self.collector = collector
        self.on_read: Callable[[], None] | None = None
        """Called on the collector's thread after each read."""
        self._clock = clock
        self._deadline_s = deadline_s or max(LEAST_DEADLINE_S, 3 * collector.interval_s)
        self._snapshot: Any = None
        self._known = False
        self._started: float | None = None
        self._duration_s: float | None = None
        self._last_success: float | None = None
        self._failing = False
        self._unshowable = False
        self._wake = threading.Event()
        self._wanted = 0
        self._served = -1

    def start(self) -> None:
        """Begin to read, at once and then every interval of the collector."""
        threading.Thread(target=self._loop, name=f"collector-{self.collector.name}", daemon=True).start()

    def request(self) -> int:
        """Ask for a read that starts after this moment; the ticket is for ``has_served``."""
        self._wanted += 1
        self._wake.set()
        return self._wanted

    def has_served(self, ticket: int) -> bool:
        """Whether the read asked for with this ticket has ended."""
        return self._served >= ticket

    @property
    def ready(self) -> bool:
        """Whether a first read has ended, well or not."""
        return self._served >= 0

    @property
    def overdue(self) -> bool:
        """Whether a read has been under way for longer than the deadline."""
        started = self._started
        late = started is not None and self._clock.monotonic() - started > self._deadline_s
        if late and not self._failing:
            self._failing = True
            log.warning("collector %s hangs: no answer in %g s", self.collector.name, self._deadline_s)
        return late

    @property
    def snapshot(self) -> Any:
        """The last snapshot, or None when there is none to show: not read yet, failed, or hanging."""
        return self._snapshot if self._known and not self.overdue else None

    @property
    def success(self) -> bool:
        """Whether the last read worked, can be shown, and the present one is in time."""
        return self._known and not self._unshowable and not self.overdue

    def _loop(self) -> None:
        name_thread(self.collector.name)
        due = self._clock.monotonic()
        while True:
            self._read()
            now = self._clock.monotonic()
            if due <= now:  # a read that was asked for in between does not move the ordinary ones
                due = max(due + self.collector.interval_s, now)
            self._wake.wait(max(0.0, due - now))
            if self._wake.is_set():
                self._wake.clear()

    def _read(self) -> None:
        serving, started = self._wanted, self._clock.monotonic()
        self._started = started
        try:
            snapshot = self.collector.read()
        except Exception as error:  # noqa: BLE001 - whatever fails in a collector costs that collector alone
            self._known, self._snapshot = False, None
            if not self._failing:
                log.warning("collector %s fails: %s: %s", self.collector.name, type(error).__name__, error)
            self._failing = True
        else:
            self._snapshot, self._known = snapshot, True
            self._last_success = self._clock.time()
            if self._failing:
                log.warning("collector %s works again", self.collector.name)
            self._failing = False
        self._duration_s = self._clock.monotonic() - started
        self._started = None
        self._served = serving
        told = self.on_read  # the other thread may take it away at any moment
        if told is not None:
            with contextlib.suppress(RuntimeError):  # an event loop that is closed
                told()

    def render(self, out: Samples) -> None:
        """Samples of the last snapshot; one that cannot be shown costs the series of this collector alone."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        mark = out.mark()
        try:
            self.collector.render(snapshot, out)
        except Exception as error:  # noqa: BLE001 - see above
            out.take_back(mark)
            if not self._unshowable:
                log.error("collector %s cannot be shown: %s: %s", self.collector.name, type(error).__name__, error)
            self._unshowable = True
        else:
            self._unshowable = False

    def render_self(self, out: Samples) -> None:
        """How reading goes."""
        name = self.collector.name
        if self.ready or self.overdue:
            out.add(SUCCESS, int(self.success), collector=name)
        out.add(DURATION, self._duration_s, collector=name)
        out.add(LAST_SUCCESS, self._last_success, collector=name)

    def describe(self) -> dict[str, Any]:
        """How reading goes, for the status page."""
        return {
            "success": self.success,
            "duration_s": self._duration_s,
            "last_success": self._last_success,
            "overdue": self.overdue,
        }
