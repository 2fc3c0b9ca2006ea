"""Clock protocol, the clock of this machine, time limits, and stops of the whole job."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from exporter.contract.lazy_dataclass import dataclass

LATE_S = 0.25  # a limit that is over for this long when its waiter wakes: the waiter stood still
STOPPED_S = 60.0  # a read that begins later than this was held up by a stop of the job, as by `scontrol suspend`
MOST_STOPS = 1000  # kept, the last ones: a scheduler may suspend a job every minute to share its nodes


class Clock(Protocol):
    """Wall-clock and monotonic time in seconds."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """Clock of this machine."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class Deadline:
    """A limit of a wait that is not over merely because this process stood still: stopped, paused or starved.

    What it waits for stood still too. So the time by which the wait ended late is added, once, and at most the limit.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._end = time.monotonic() + limit_s
        self._is_extended = False

    def left_s(self) -> float:
        """Seconds left; 0 if it is over."""
        now = time.monotonic()
        late_s = now - self._end
        if late_s >= LATE_S and not self._is_extended:
            self._end, self._is_extended = now + min(late_s, self._limit_s), True
        return max(0.0, self._end - now)


@dataclass(slots=True)
class StopDetector:
    """Finds for how long this process was stopped, since it reads at its interval."""

    interval_s: float
    next_read_at: float | None = None  # monotonic clock; None after a read that was not completed

    def begin_read(self, monotonic: float) -> float:
        """Seconds for which this process was stopped before this read; 0 if it was not."""
        late_s = 0.0 if self.next_read_at is None else monotonic - self.next_read_at
        self.next_read_at = None
        return late_s if late_s > STOPPED_S else 0.0

    def end_read(self, monotonic: float) -> None:
        """Take the end of a read."""
        self.next_read_at = monotonic + self.interval_s


class JobStops:
    """The last stops of the whole job: begin in epoch seconds, and seconds of each."""

    def __init__(self, stops: Iterable[tuple[float, float]] = ()) -> None:
        self._stops = deque(stops, maxlen=MOST_STOPS)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return iter(self._stops)

    def add(self, end: float, seconds: float) -> None:
        """Add a stop that ended at this time."""
        self._stops.append((end - seconds, seconds))

    def seconds_since(self, moment: float) -> float:
        """Seconds of all stops that began at this time or later."""
        return sum(seconds for begin, seconds in self._stops if begin >= moment)
