"""What has gone on at a GPU for a while, from looks at it: each keeps little, whatever the time."""

from collections import deque
from collections.abc import Mapping

from exporter.files.disks.forecast import DiskForecast

GAP_S = 30.0  # two looks further apart than this tell nothing of the time between them

CLOCK_S = 180.0
CLOCK_STEP_S = 5.0  # over so long a clock is averaged, from readings so far apart, ...
CLOCK_BUSY = 0.8  # ... of which so many must have been taken at work: an idle GPU lowers its clock

THROTTLE_S = 300.0
THROTTLE_STEP_S = 10.0

GROWTH_S = 600.0  # growth for less than this is how work begins: allocators fill their caches, batches become longer
GROWTH_COURSE_S = 3600.0
GROWTH_STEP_S = 30.0
GROWTH_GOES_ON = 0.5
"""From the second to the last third of its course it grows by at least so much of before, or it levels off."""


class ConditionTimer:
    """Since when something has held at every look."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seen: float | None = None

    def look(self, now: float, holds: bool | None) -> None:
        """Whether it holds now; None where that is not known, which ends it only when it goes on."""
        if self._seen is not None and not 0 <= now - self._seen <= GAP_S:
            self._since = self._seen = None
        if holds is None:
            return
        self._seen = now
        if not holds:
            self._since = None
        elif self._since is None:
            self._since = now

    def reset(self) -> None:
        """What has held so far does not count."""
        self._since = None

    def is_known(self, now: float) -> bool:
        """Whether it has been known lately."""
        return self._seen is not None and 0 <= now - self._seen <= GAP_S

    @property
    def lasted_s(self) -> float:
        """For how long it has held at the last look at which that was known; 0 where it does not."""
        return 0.0 if self._since is None or self._seen is None else self._seen - self._since


class ClockHistory:
    """The clock of a GPU at work, over the last minutes."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float | None]] = deque()
        self._known = 0
        """How many of them were taken at work,"""
        self._sum = 0.0
        """and what these come to: whole numbers, so that nothing is lost as they come and go."""

    def look(self, now: float, hz: float | None) -> None:
        """A reading; None while it does not work."""
        readings = self._readings
        if readings and not 0 <= now - readings[-1][0] <= GAP_S:
            readings.clear()
            self._known, self._sum = 0, 0.0
        if not readings or now - readings[-1][0] >= CLOCK_STEP_S:
            readings.append((now, hz))
            self._count(hz, 1)
        while len(readings) > 1 and now - readings[1][0] >= CLOCK_S:
            self._count(readings.popleft()[1], -1)

    def _count(self, hz: float | None, times: int) -> None:
        if hz is not None:
            self._known += times
            self._sum += times * hz

    @property
    def mean_hz(self) -> float | None:
        """None before there are readings of all the time, and where it was not at work for most of it."""
        readings = self._readings
        if not readings or readings[-1][0] - readings[0][0] < CLOCK_S - CLOCK_STEP_S:
            return None
        return self._sum / self._known if self._known and self._known >= CLOCK_BUSY * len(readings) else None


class ThrottleHistory:
    """How much of the last minutes clocks were held down, by reason, from counters of seconds."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, float]]] = deque()

    def look(self, now: float, seconds: Mapping[str, float]) -> None:
        """A reading of the counters; one that fell began anew, and with it all this."""
        readings = self._readings
        if not seconds:
            return
        if readings:
            t, last = readings[-1]
            fell = any(seconds.get(reason, 0.0) < before for reason, before in last.items())
            if fell or not 0 <= now - t <= THROTTLE_S:
                readings.clear()
        if not readings or now - readings[-1][0] >= THROTTLE_STEP_S:
            readings.append((now, dict(seconds)))
        while len(readings) > 1 and now - readings[1][0] >= THROTTLE_S:
            readings.popleft()

    @property
    def shares(self) -> dict[str, float] | None:
        """Share of the time by reason, 0 to 1; None before there are readings of all the time."""
        if not self._readings:
            return None
        (begun, first), (ended, last) = self._readings[0], self._readings[-1]
        span = ended - begun
        if span < THROTTLE_S - THROTTLE_STEP_S:
            return None
        return {reason: min(1.0, (value - first.get(reason, value)) / span) for reason, value in last.items()}


class MemoryHistory:
    """The memory of a GPU that is used, and when it is full if that goes on.

    Growth is that of the least that is used: what is taken and given back in a rhythm fills nothing by itself, and full
    it is when the most that is used comes to the limit. Whether growth still goes on is told from change to change.
    """

    def __init__(self) -> None:
        self._fill = DiskForecast()
        self._course: deque[tuple[float, float, float]] = deque()
        """The beginning of each half minute, and the least and the most that was used in it."""
        self._last: float | None = None
        self._total = 0.0
        self._full_at: float | None = None
        self.growth: float | None = None
        """Bytes per second by which it grows; None where it does not, or levels off, and before that can be told."""

    def look(self, now: float, used: float, total: float) -> None:
        """A reading in bytes."""
        self._fill.update(now, max(0.0, total - used))
        course = self._course
        if self._last is not None and now < self._last:
            course.clear()
        self._last, self._total = now, total
        if not course or now - course[-1][0] >= GROWTH_STEP_S:
            course.append((now, used, used))
            begins = True
        else:
            t, low, high = course[-1]
            course[-1] = (t, min(low, used), max(high, used))
            begins = False
        while now - course[0][0] > GROWTH_COURSE_S:
            course.popleft()
        if begins:
            self._judge(now)

    def is_known(self, now: float) -> bool:
        """Whether it has been looked at lately, and for long enough to tell growth from a beginning."""
        return self._last is not None and 0 <= now - self._last <= GAP_S and self.span_s >= GROWTH_S

    @property
    def span_s(self) -> float:
        """For how long it has been looked at, an hour at most."""
        return self._last - self._course[0][0] if self._last is not None else 0.0

    def full_at(self, now: float) -> float | None:
        """When it will be full; None where it does not grow, or no longer, and where that is too far away to know."""
        return None if self._full_at is None else max(now, self._full_at)

    def _judge(self, now: float) -> None:
        """What follows from the course, each half minute anew."""
        self.growth = self._full_at = None
        if self.span_s < GROWTH_S:
            return
        begun, third = self._course[0][0], self.span_s / 3
        lows: tuple[list[float], ...] = ([], [], [])
        most = 0.0
        for t, low, high in self._course:
            part = min(2, int((t - begun) / third))
            lows[part].append(low)
            most = max(most, high) if part == 2 else 0.0
        if not all(lows):
            return
        one, two, three = map(min, lows)
        if one < two < three and three - two >= GROWTH_GOES_ON * (two - one):
            self.growth = (three - one) / (2 * third)
            if self._fill.full_at(now) is not None:
                self._full_at = now + max(0.0, self._total - most) / self.growth
