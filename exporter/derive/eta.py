"""Seconds left, from (time, done, total) of one worker.

The interface is that of the scorer of progress traces: ``update`` for each
reading, ``estimate`` at any moment, ``alarms`` beside it. This estimator
extrapolates the rate of the last minutes.
"""

from collections import deque
from typing import NamedTuple


class Estimate(NamedTuple):
    """Seconds left: the middle estimate and the ends of an interval that should hold it 4 times in 5."""

    seconds: float
    low: float
    high: float


class RecentRateEstimator:
    """Extrapolates the rate over the last five minutes.

    Between readings the estimate counts down; when a reading is overdue it stands and then grows
    by the time overdue. Without a total, or before three readings that rise, there is none.
    """

    WINDOW_S = 300.0
    MOST_READINGS = 600

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque(maxlen=self.MOST_READINGS)
        self._first: tuple[float, int] | None = None
        self._total: int | None = None
        self._gap = 0.0

    def update(self, t: float, done: int, total: int | None) -> None:
        """A reading; a count that falls (resume, reset) starts anew, the same count again is no reading."""
        self._total = total
        if self._readings:
            last_t, last_done = self._readings[-1]
            if done < last_done or t < last_t:
                self._readings.clear()
                self._first = None
            elif done == last_done:
                return
            else:
                gap = t - last_t
                self._gap = gap if not self._gap else 0.8 * self._gap + 0.2 * gap
        if self._first is None:
            self._first = (t, done)
        self._readings.append((t, done))
        while self._readings[-1][0] - self._readings[0][0] > self.WINDOW_S and len(self._readings) > 3:
            self._readings.popleft()

    def rate(self, now: float) -> float | None:
        """Items per second lately; None before two readings or when the last one is long past."""
        if len(self._readings) < 2:
            return None
        (t0, d0), (t1, d1) = self._readings[0], self._readings[-1]
        if now - t1 > max(60.0, 8 * self._gap):
            return None
        end = t1 if now - t1 <= 2 * self._gap else now
        return (d1 - d0) / (end - t0) if end > t0 else None

    def average_rate(self, now: float) -> float | None:
        """Items per second since the first reading."""
        if self._first is None or len(self._readings) < 2:
            return None
        t1, d1 = self._readings[-1]
        end = t1 if now - t1 <= 2 * self._gap else now
        return (d1 - self._first[1]) / (end - self._first[0]) if end > self._first[0] else None

    def estimate(self, now: float) -> Estimate | None:
        """Seconds left at ``now``, or None when it cannot be told."""
        if self._total is None or not self._readings:
            return None
        t1, d1 = self._readings[-1]
        left = self._total - d1
        if left <= 0:
            return Estimate(0.0, 0.0, 0.0)
        if len(self._readings) < 3:
            return None
        rates = [self._rate_between(0, len(self._readings) - 1)]
        middle = len(self._readings) // 2
        if middle >= 2:
            rates += [self._rate_between(0, middle), self._rate_between(middle, len(self._readings) - 1)]
        rates = [rate for rate in rates if rate > 0]
        if not rates:
            return None
        since = now - t1
        overdue = max(0.0, since - 2 * self._gap)
        seconds = max(0.0, left / rates[0] - min(since, 2 * self._gap)) + overdue
        low = max(0.0, min(left / max(rates) - since, seconds)) * 0.95
        high = max(left / min(rates), seconds) * 1.05 + overdue
        return Estimate(seconds, low, high)

    def _rate_between(self, start: int, end: int) -> float:
        (t0, d0), (t1, d1) = self._readings[start], self._readings[end]
        return (d1 - d0) / (t1 - t0) if t1 > t0 else 0.0

    def alarms(self, now: float, stall_timeout_s: float = 300.0) -> dict[str, bool]:
        """Whether no reading came for ``stall_timeout_s`` although work is left; slow-downs are not judged."""
        stalled = False
        if self._readings:
            t1, d1 = self._readings[-1]
            unfinished = self._total is None or d1 < self._total
            stalled = unfinished and now - t1 > stall_timeout_s
        return {"stalled": stalled, "slowdown": False}
