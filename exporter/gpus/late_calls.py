"""Threads that ask about GPUs and are late: whose doing it is, a device's or the driver's.

The driver may hold a lock while a call about one device hangs: then the calls about others hang too, and say nothing of
those.
"""

from dataclasses import dataclass, field

from exporter.gpus.device_state_reader import DeviceTracker, Part
from exporter.gpus.records import GpuReader

MOST_LATE = 3  # threads that hang, before nothing more is asked


@dataclass(eq=False)
class DriverCall:
    """A thread that asks: whom and for what, and since when. Moments are those of the machine's clock."""

    part: Part | None = None
    seat: DeviceTracker | None = None
    reader: GpuReader | None = None
    began: float = 0.0
    late: bool = False  # whether it was given up
    blamed: bool = False  # whether what it asks for is at fault, and not what hung before it
    answer: float | None = None
    """When the driver answered another thread after this one was given up; None while it has not."""


@dataclass
class LateCalls:
    """Those that were given up and are not back."""

    askers: list[DriverCall] = field(default_factory=list)

    def add(self, asker: DriverCall) -> None:
        """Give one up. It is to blame where the driver has answered since the last one, if there is one."""
        asker.late = True
        asker.blamed = all(other.answer is not None for other in self.askers)
        self.askers.append(asker)

    def note_answer(self, now: float) -> None:
        """The driver has answered: those who are out may have waited for it, and can come back now."""
        for asker in self.askers:
            asker.answer = now if asker.answer is None else asker.answer

    def blame(self, now: float, after_s: float) -> list[DriverCall]:
        """Those who are to blame from now on: the driver answers others for so long, and not them."""
        found = [it for it in self.askers if not it.blamed and it.answer is not None and now - it.answer > after_s]
        for asker in found:
            asker.blamed = True
        return found

    @property
    def full(self) -> bool:
        """Whether nobody more may ask."""
        return len(self.askers) >= MOST_LATE

    @property
    def driver_hangs(self) -> bool:
        """Whether the driver answers nobody: two are out one directly after the other, or as many as may be."""
        return self.full or sum(asker.answer is None for asker in self.askers) > 1
