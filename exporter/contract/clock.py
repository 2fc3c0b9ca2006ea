"""Time as an argument: a protocol, and the machine's clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time and monotonic time in seconds."""

    def time(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The clock of this machine."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
