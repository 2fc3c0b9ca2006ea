"""Calls that hang, attributed to a device or to the driver.

The driver may hold a lock while a call about one device hangs. Calls about other devices then hang too, without being
at fault.
"""

from dataclasses import field

from exporter.contract.lazy_dataclass import dataclass
from exporter.gpus.device_state_reader import DeviceTracker, Part
from exporter.gpus.records import GpuReader

MOST_LATE = 3  # hanging threads before reads stop


@dataclass(eq=False)
class DriverCall:
    """A reading thread and its present call. Times are of `time.monotonic`."""

    part: Part | None = None
    device: DeviceTracker | None = None
    reader: GpuReader | None = None
    started_at: float = 0.0
    is_abandoned: bool = False  # whether it was abandoned
    is_at_fault: bool = False  # whether its own device is at fault, not an earlier hanging call
    # When the driver first answered another thread after this one was abandoned; None if not yet.
    driver_answered_at: float | None = None
    checked_at: float = 0.0  # first check that found the present call almost late

    def time_left(self, now: float, timeout_s: float) -> float:
        """Seconds until the call counts as hanging; 0 or less if it does.

        It does at the second of two checks, ``timeout_s / 4`` apart: when a stall of the whole machine ends, the call
        may have returned, and its thread may not have run yet.
        """
        pause_s = timeout_s / 4
        first_check = self.started_at + timeout_s - pause_s
        if now < first_check:
            return first_check - now
        if self.checked_at < first_check:
            self.checked_at = now
        return self.checked_at + pause_s - now


@dataclass
class LateCalls:
    """Abandoned calls that have not returned."""

    calls: list[DriverCall] = field(default_factory=list)

    def add(self, call: DriverCall) -> None:
        """Add an abandoned call. It is at fault if the driver has answered since each earlier one."""
        call.is_abandoned = True
        call.is_at_fault = all(other.driver_answered_at is not None for other in self.calls)
        self.calls.append(call)

    def record_answer(self, now: float) -> None:
        """Record that the driver answers, so a lock is no longer the reason for the hanging calls."""
        for call in self.calls:
            call.driver_answered_at = now if call.driver_answered_at is None else call.driver_answered_at

    def find_at_fault(self, now: float, after_s: float) -> list[DriverCall]:
        """Mark and return calls that hang although the driver has answered others for ``after_s``."""
        found = [
            it
            for it in self.calls
            if not it.is_at_fault and it.driver_answered_at is not None and now - it.driver_answered_at > after_s
        ]
        for call in found:
            call.is_at_fault = True
        return found

    @property
    def is_full(self) -> bool:
        """Whether no more threads may be started."""
        return len(self.calls) >= MOST_LATE

    @property
    def is_driver_hanging(self) -> bool:
        """Whether the driver answers no call: two hang without an answer in between, or the limit is reached."""
        return self.is_full or sum(call.driver_answered_at is None for call in self.calls) > 1
