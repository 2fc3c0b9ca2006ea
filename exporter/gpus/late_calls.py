"""Calls that hang, attributed to a device or to the driver.

The driver may hold a lock while a call about one device hangs. Calls about other devices then hang too, without being
at fault.
"""

from dataclasses import dataclass, field

from exporter.gpus.device_state_reader import DeviceTracker, Part
from exporter.gpus.records import GpuReader

MOST_LATE = 3  # hanging threads before reads stop


@dataclass(eq=False)
class DriverCall:
    """A reading thread and its present call. Times are of `time.monotonic`."""

    part: Part | None = None
    seat: DeviceTracker | None = None
    reader: GpuReader | None = None
    began: float = 0.0
    late: bool = False  # whether it was abandoned
    blamed: bool = False  # whether its own device is at fault, not an earlier hanging call
    # When the driver first answered another thread after this one was abandoned; None if not yet.
    answer: float | None = None


@dataclass
class LateCalls:
    """Abandoned calls that have not returned."""

    askers: list[DriverCall] = field(default_factory=list)

    def add(self, asker: DriverCall) -> None:
        """Add an abandoned call. It is at fault if the driver has answered since each earlier one."""
        asker.late = True
        asker.blamed = all(other.answer is not None for other in self.askers)
        self.askers.append(asker)

    def note_answer(self, now: float) -> None:
        """Record that the driver answers, so a lock is no longer the reason for the hanging calls."""
        for asker in self.askers:
            asker.answer = now if asker.answer is None else asker.answer

    def blame(self, now: float, after_s: float) -> list[DriverCall]:
        """Mark and return calls that hang although the driver has answered others for ``after_s``."""
        found = [it for it in self.askers if not it.blamed and it.answer is not None and now - it.answer > after_s]
        for asker in found:
            asker.blamed = True
        return found

    @property
    def full(self) -> bool:
        """Whether no more threads may be started."""
        return len(self.askers) >= MOST_LATE

    @property
    def driver_hangs(self) -> bool:
        """Whether the driver answers no call: two hang without an answer in between, or the limit is reached."""
        return self.full or sum(asker.answer is None for asker in self.askers) > 1
