"""How long a process took to serve something, without the time for which it could not run."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

TICK_S = 0.01
GAP_S = 0.2  # a tick that comes this much late: the machine stood still, or this process was starved


class _StallMeter(threading.Thread):
    """Sums how long ticks stayed away."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stalled_s = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(TICK_S):
            last = self._count(last)
        self._count(last)

    def _count(self, last: float) -> float:
        now = time.monotonic()
        if now - last - TICK_S > GAP_S:
            self.stalled_s += now - last - TICK_S
        return now

    def end(self) -> float:
        """Seconds of all stalls."""
        self._ended.set()
        self.join()
        return self.stalled_s


def took_s(pid: int, action: Callable[[], object]) -> float:
    """Seconds that an action took which a process serves on its main thread.

    Without those in which it could work and had no core, since a sidecar gives way to jobs and here to other tests, or
    in which the whole machine stood still.
    """
    meter = _StallMeter()
    meter.start()
    begun, waited = time.monotonic(), _core_wait_s(pid)
    action()
    duration_s = time.monotonic() - begun
    return duration_s - max(_core_wait_s(pid) - waited, meter.end())


def _core_wait_s(pid: int) -> float:
    """Seconds that its main thread has waited for a core since its start."""
    return int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[1]) / 1e9
