"""One clock for the lines of a worker, and how often its lines come.

Lines have the time of their stamp and the time at which they were read. Stamps are exact, but may
lack their zone or be set while the job runs; reading is late by as much as the writer buffers.
"""

import math
from dataclasses import dataclass

TOLERANCE_S = 60.0  # clocks that differ by less are taken to agree
SAME_CLOCK_S = 1800.0  # a first stamp further than this from its reading may be of another time zone


@dataclass(slots=True)
class LineClock:
    """Seconds since the first line, which never go back, and what ``now`` is on that clock."""

    last: float = 0.0  # time of the latest line
    zero: float | None = None  # time of the first line on the clock of `now`
    offset: float = 0.0  # what turns a stamp into seconds since the first line
    stamp: float = 0.0  # first stamp
    arrival: float = 0.0  # when the latest line was read
    corrected: bool = False  # whether the stamps have jumped: the first one then says nothing about later ones

    def read(self, t: float, arrival: float | None) -> float:
        """Time of a line with the stamp ``t``, read at ``arrival`` (None: as soon as it was written).

        A stamp ahead of its reading, or one that goes back, says that a clock was set: the time between the
        readings counts then. Stamps that only lag are right: their lines were buffered.
        """
        seen = t if arrival is None else arrival
        if self.zero is None:
            self.zero = t if seen - SAME_CLOCK_S <= t <= seen + TOLERANCE_S else seen
            self.stamp, self.offset, self.arrival = t, -t, seen
            return self.last
        at = t + self.offset
        if at + self.zero > seen + TOLERANCE_S and not self.corrected:
            # Lines that were already there when reading began: the first is older than its reading.
            self.zero = min(self.zero, max(self.stamp, seen - at))
        if at + self.zero > seen + TOLERANCE_S or at < self.last - TOLERANCE_S:
            at = self.last + (0.0 if arrival is None else max(0.0, seen - self.arrival))
            self.offset = at - t
            self.corrected = True
            if arrival is None:
                self.zero = seen - at
        elif at < self.last:
            at = self.last
        self.arrival = seen
        self.last = at
        return at

    def at(self, now: float) -> float:
        """``now`` in seconds since the first line, infinite before there is one; not before the latest line."""
        return math.inf if self.zero is None else max(self.last, now - self.zero)

    def age(self, at: float) -> float:
        """How old a line of that time was when the latest was read."""
        return 0.0 if self.zero is None else self.arrival - self.zero - at


@dataclass(slots=True)
class LineRhythm:
    """How often lines come, pauses apart."""

    gap: float = 0.0  # usual seconds between lines by their stamps
    step: float = 0.0  # usual rise of the count from line to line
    wait: float = 0.0  # mean age of the newest line when the next is read
    latest_wait: float = 0.0

    def line(self, gap: float, step: float, wait: float) -> None:
        """A line that came ``gap`` seconds after the one before, which was ``wait`` seconds old by then."""
        if not self.step:
            self.gap, self.step, self.wait = gap, step, wait
        else:
            self.gap += 0.1 * (gap - self.gap)
            self.step += 0.1 * (step - self.step)
            self.wait += 0.15 * (wait - self.wait)
        self.latest_wait = wait

    @property
    def silence(self) -> float:
        """Seconds without a new line that mean nothing."""
        return max(self.gap, self.wait, 0.7 * self.latest_wait)
