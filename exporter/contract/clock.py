"""Clock protocol, the clock of this machine, and time limits."""

import time
from typing import Protocol

LATE_S = 0.25  # a limit that is over for this long when its waiter wakes: the waiter stood still


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
