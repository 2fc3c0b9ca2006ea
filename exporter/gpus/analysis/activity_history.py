"""Recent history of one GPU's readings: how long conditions last, clocks, throttling and memory growth."""

from collections import deque
from collections.abc import Mapping

from exporter.files.disks.forecast import DiskForecast

GAP_S = 30.0  # longest gap between two readings; across a longer one the history restarts

CLOCK_S = 180.0
CLOCK_STEP_S = 5.0  # readings of the clock are at least this far apart; the mean covers `CLOCK_S`
CLOCK_BUSY = 0.8  # share of those readings that must be under load, because an idle GPU lowers its clock

THROTTLE_S = 300.0
THROTTLE_STEP_S = 10.0

GROWTH_S = 600.0  # shorter growth is ordinary warm-up: allocators fill their caches, batches become longer
GROWTH_HISTORY_S = 3600.0
GROWTH_STEP_S = 30.0
# Growth from the middle to the last third must be at least this share of the earlier growth, else it levels off.
CONTINUED_GROWTH_SHARE = 0.5


class ConditionTimer:
    """Time for which a condition has been true at every reading."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seen: float | None = None

    def update(self, now: float, is_true: bool | None) -> None:
        """Record whether the condition is true now.

        None means unknown. Unknown readings do not end the condition unless they last longer than `GAP_S`.
        """
        if self._seen is not None and not 0 <= now - self._seen <= GAP_S:
            self._since = self._seen = None
        if is_true is None:
            return
        self._seen = now
        if not is_true:
            self._since = None
        elif self._since is None:
            self._since = now

    def reset(self) -> None:
        """Restart the measured time at the next reading."""
        self._since = None

    def is_known(self, now: float) -> bool:
        """Whether the condition was known within the last `GAP_S`."""
        return self._seen is not None and 0 <= now - self._seen <= GAP_S

    @property
    def lasted_s(self) -> float:
        """Seconds from the start of the condition to the last known reading; 0 if it was false then."""
        return 0.0 if self._since is None or self._seen is None else self._seen - self._since


class ClockHistory:
    """Clock of a GPU under load, over the last `CLOCK_S`."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float | None]] = deque()
        self._known = 0  # readings taken under load
        self._sum = 0.0  # sum of those readings; whole numbers of hertz, so adding and subtracting is exact

    def update(self, now: float, hz: float | None) -> None:
        """Add a reading; None while the GPU is not under load."""
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
        """Mean clock under load; None before `CLOCK_S` is covered, or if the GPU was mostly idle."""
        readings = self._readings
        if not readings or readings[-1][0] - readings[0][0] < CLOCK_S - CLOCK_STEP_S:
            return None
        return self._sum / self._known if self._known and self._known >= CLOCK_BUSY * len(readings) else None


class ThrottleHistory:
    """Share of the last `THROTTLE_S` in which clocks were reduced, by reason, from counters in seconds."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[str, float]]] = deque()

    def update(self, now: float, seconds: Mapping[str, float]) -> None:
        """Add a reading of the counters; restart the history if a counter fell."""
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
        """Share of time by reason, 0 to 1; None before `THROTTLE_S` is covered."""
        if not self._readings:
            return None
        (begun, first), (ended, last) = self._readings[0], self._readings[-1]
        span = ended - begun
        if span < THROTTLE_S - THROTTLE_STEP_S:
            return None
        return {reason: min(1.0, (value - first.get(reason, value)) / span) for reason, value in last.items()}


class MemoryHistory:
    """Memory used on a GPU, and when it will be full at the present growth.

    Growth is that of the minima, so memory that is allocated and freed in a rhythm does not count. The memory is full
    when the maximum reaches the total.
    """

    def __init__(self) -> None:
        self._forecast = DiskForecast()
        self._history: deque[tuple[float, float, float]] = deque()  # start, minimum and maximum of each half minute
        self._last: float | None = None
        self._total = 0.0
        self._full_at: float | None = None
        # Bytes per second; None if memory does not grow, levels off, or the history is too short.
        self.growth: float | None = None

    def update(self, now: float, used: float, total: float) -> None:
        """Add a reading in bytes."""
        self._forecast.update(now, max(0.0, total - used))
        history = self._history
        if self._last is not None and now < self._last:
            history.clear()
        self._last, self._total = now, total
        if not history or now - history[-1][0] >= GROWTH_STEP_S:
            history.append((now, used, used))
            begins = True
        else:
            t, low, high = history[-1]
            history[-1] = (t, min(low, used), max(high, used))
            begins = False
        while now - history[0][0] > GROWTH_HISTORY_S:
            history.popleft()
        if begins:
            self._update_growth(now)

    def is_known(self, now: float) -> bool:
        """Whether there is a recent reading and a history long enough to distinguish growth from warm-up."""
        return self._last is not None and 0 <= now - self._last <= GAP_S and self.span_s >= GROWTH_S

    @property
    def span_s(self) -> float:
        """Seconds of history, at most an hour."""
        return self._last - self._history[0][0] if self._last is not None else 0.0

    def full_at(self, now: float) -> float | None:
        """Time when the memory will be full; None if it does not grow, or if that is too far away to predict."""
        return None if self._full_at is None else max(now, self._full_at)

    def _update_growth(self, now: float) -> None:
        """Update growth and forecast, once per half minute."""
        self.growth = self._full_at = None
        if self.span_s < GROWTH_S:
            return
        begun, third = self._history[0][0], self.span_s / 3
        lows: tuple[list[float], ...] = ([], [], [])
        most = 0.0
        for t, low, high in self._history:
            part = min(2, int((t - begun) / third))
            lows[part].append(low)
            most = max(most, high) if part == 2 else 0.0
        if not all(lows):
            return
        one, two, three = map(min, lows)
        if one < two < three and three - two >= CONTINUED_GROWTH_SHARE * (two - one):
            self.growth = (three - one) / (2 * third)
            if self._forecast.full_at(now) is not None:
                self._full_at = now + max(0.0, self._total - most) / self.growth
