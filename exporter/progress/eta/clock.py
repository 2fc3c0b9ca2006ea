"""One clock for the lines of a worker, and their usual interval.

Each line has the time of its stamp and the time at which it was read. Stamps are exact, but may lack a zone or jump
when a clock is set. Reads are late when the writer buffers.
"""

import math

from exporter.contract.lazy_dataclass import dataclass

TOLERANCE_S = 60.0  # clocks that differ by less agree
SET_S = (
    10.0  # a wall clock that gains or loses less between two reads runs on: time servers correct it little by little
)
SAME_CLOCK_S = 1800.0  # a first stamp further from its read may be of another time zone


@dataclass(slots=True)
class WallClockSteps:
    """Finds when the clock of the machine was set, since durations go on."""

    ahead: float | None = None  # of the monotonic clock, at the last call

    def read(self, wall: float, monotonic: float) -> float:
        """Seconds by which the clock was set forward since the last call, negative if back; 0 if it was not."""
        before, self.ahead = self.ahead, wall - monotonic
        step = 0.0 if before is None else self.ahead - before
        return step if abs(step) > SET_S else 0.0


@dataclass(slots=True)
class LineClock:
    """Time of lines in seconds since the first one, which never falls."""

    last: float = 0.0  # time of the latest line
    start: float | None = None  # time of the first line on the clock of `now`
    offset: float = 0.0  # added to a stamp to get seconds since the first line
    first_stamp: float = 0.0  # first stamp
    last_arrival: float = 0.0  # when the latest line was read
    has_jumped: bool = False  # whether stamps have jumped, so that the first one says nothing about later ones

    def read(self, t: float, arrival: float | None) -> float:
        """Time of a line with the stamp ``t``, read at ``arrival`` (None: when written).

        If a stamp is ahead of its read or falls, a clock was set: then the time between reads counts. Stamps that are
        only late are right, since their lines were buffered.
        """
        seen = t if arrival is None else arrival
        if self.start is None:
            self.start = t if seen - SAME_CLOCK_S <= t <= seen + TOLERANCE_S else seen
            self.first_stamp, self.offset, self.last_arrival = t, -t, seen
            return self.last
        at = t + self.offset
        if at + self.start > seen + TOLERANCE_S and not self.has_jumped:
            # A backlog from before the first read: its first line is older than its read.
            self.start = min(self.start, max(self.first_stamp, seen - at))
        if at + self.start > seen + TOLERANCE_S or at < self.last - TOLERANCE_S:
            at = self.last + (0.0 if arrival is None else max(0.0, seen - self.last_arrival))
            self.offset = at - t
            self.has_jumped = True
            if arrival is None:
                self.start = seen - at
        elif at < self.last:
            at = self.last
        self.last_arrival = seen
        self.last = at
        return at

    def set_wall_clock(self, step: float) -> None:
        """Take a step of the clock of ``now``; times of lines stay, and later stamps are of the set clock."""
        if self.start is not None:
            self.start += step
            self.first_stamp += step
            self.last_arrival += step
            self.offset -= step

    def elapsed(self, now: float) -> float:
        """``now`` in seconds since the first line, at least the time of the latest line; infinite without lines."""
        return math.inf if self.start is None else max(self.last, now - self.start)

    def age(self, line_time: float) -> float:
        """Age that a line of this time had when the latest was read."""
        return 0.0 if self.start is None else self.last_arrival - self.start - line_time


@dataclass(slots=True)
class LineRhythm:
    """How often lines come, without pauses."""

    gap: float = 0.0  # usual seconds between lines, by their stamps
    step: float = 0.0  # usual rise of the count between lines
    wait: float = 0.0  # mean age of the newest line at the next read
    latest_wait: float = 0.0

    def add(self, gap: float, step: float, wait: float) -> None:
        """Take a line ``gap`` seconds after the previous one, which was then ``wait`` seconds old."""
        if not self.step:
            self.gap, self.step, self.wait = gap, step, wait
        else:
            self.gap += 0.1 * (gap - self.gap)
            self.step += 0.1 * (step - self.step)
            self.wait += 0.15 * (wait - self.wait)
        self.latest_wait = wait

    @property
    def silence(self) -> float:
        """Seconds without a new line that are normal."""
        return max(self.gap, self.wait, 0.7 * self.latest_wait)
