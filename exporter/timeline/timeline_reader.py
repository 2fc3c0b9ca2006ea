"""The timeline of this node, and its file in the run directory."""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from exporter.collecting.collector import CollectorContext
from exporter.collecting.detail import TIMELINE_FAMILIES
from exporter.collecting.families import Family
from exporter.contract import run_files
from exporter.contract.records import RecordError
from exporter.contract.timeline_file import MOST_VALUE, SUFFIX, TimelineHead, open_timeline, pack_timeline
from exporter.timeline.history import History

LEAST_STEP_S = 5.0  # between points
POINT_COST = 1500  # least time between points, in units of their CPU time: 0.067 % of a core
WRITE_EVERY_S = 300.0  # what a node that dies loses of its timeline
MOMENT_WRITE_S = 60.0  # the same if a worker ended or restarted
WRITE_COST = 4000  # pause after a write, in units of its CPU time: 0.025 % of a core
DAMAGED = ".damaged"

log = logging.getLogger("gpujob.timeline")


class NodeTimeline:
    """History of the series of one node. Points are added on one thread, and written on another."""

    def __init__(self, context: CollectorContext) -> None:
        identity = context.identity
        self._clock, self._identity = context.clock, identity
        self._path = context.manifest.run_dir / run_files.STATUS_DIR / f"{identity.node}{SUFFIX}"
        self._history = History(max(LEAST_STEP_S, context.manifest.check_interval_s))
        self._lock = threading.Lock()
        self._costs = deque[float](maxlen=3)  # CPU time of the last points; the first one may be slow
        self._rests_until = -math.inf
        self.is_taken_up = False  # whether the timeline of an earlier sidecar is known
        self._has_moment = False  # whether a worker ended or restarted since the last write
        self._written, self._pause_s = -math.inf, 0.0
        self._is_failing = False
        labels = ",".join(f'{name}="{value}"' for name, value in identity.constant_labels().items())
        self._up = f"up{{{labels}}}"  # what Prometheus adds to a page
        self.instance = ""  # address of the page

    def is_due(self) -> bool:
        """Whether it is time for a point."""
        is_rested = self._clock.monotonic() >= self._rests_until
        return self.is_taken_up and is_rested and self._history.is_due(self._clock.time())

    def record(
        self, render: Callable[[], Mapping[Family, Sequence[str]]], *, is_moment: bool, wait_s: float = 0.0
    ) -> bool:
        """Add a point with the samples of a page; return whether it was added.

        It is not without the history of the earlier sidecar, while the clock is set back, or if the timeline is being
        packed for longer than ``wait_s``.
        """
        began, now = time.thread_time(), self._clock.time()
        if not self.is_taken_up or not self._history.can_add(now) or not self._lock.acquire(timeout=wait_s):
            return False
        try:
            values = {self._up: 1.0}
            for family, lines in render().items():
                if family.name in TIMELINE_FAMILIES:
                    for line in lines:
                        series, _, value = line.rpartition(" ")
                        values[series] = float(value)
            known = {series: value for series, value in values.items() if abs(value) < MOST_VALUE}  # not NaN
            self._history.add(now, known, is_moment=is_moment)
            self._has_moment |= is_moment
        finally:
            self._lock.release()
        self._costs.append(time.thread_time() - began)
        self._rests_until = self._clock.monotonic() + POINT_COST * min(self._costs)
        return True

    def pack(self) -> bytes:
        """The timeline as gzipped JSON."""
        with self._lock:
            history, identity = self._history, self._identity
            head = TimelineHead(
                job_id=identity.job_id,
                attempt=identity.attempt,
                node=identity.node,
                instance=self.instance,
                step_s=history.step_s,
                times=tuple(history.times),
                moments=tuple(history.moments),
            )
            return pack_timeline(head, history.series())

    def take_up(self) -> None:
        """Continue the timeline of an earlier sidecar of this attempt. A damaged file is put aside."""
        if self.is_taken_up:
            return
        known, identity = self._history, self._identity
        try:
            with open_timeline(self._path) as (head, series):
                if (head.job_id, head.attempt) == (identity.job_id, identity.attempt):
                    known.load(head.step_s, head.times, head.moments, series)
        except FileNotFoundError:
            pass
        except RecordError as error:
            self._history = History(max(LEAST_STEP_S, known.step_s))
            log.warning("the timeline starts again: %s", error)
            with contextlib.suppress(OSError):
                self._path.rename(f"{self._path}{DAMAGED}")
        self.is_taken_up = True

    def write(self, *, final: bool) -> None:
        """Replace the file, if it is time for that."""
        now = self._clock.monotonic()
        due = self._written + max(MOMENT_WRITE_S if self._has_moment else WRITE_EVERY_S, self._pause_s)
        if not self._history.times or (now < due and not final):
            return
        began = time.thread_time()
        self._has_moment, self._written = False, now
        try:
            run_files.replace_file(self._path, self.pack(), durable=final)
        except OSError as error:  # the earlier file is still there
            if not self._is_failing:
                log.warning("the timeline cannot be written: %s", error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False
        self._pause_s = WRITE_COST * (time.thread_time() - began)
