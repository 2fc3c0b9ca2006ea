"""Clock protocol, and the clock of this machine."""

import time
from typing import Protocol


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
