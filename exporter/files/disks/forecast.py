"""Forecast when a file system is full from its readings of free space, in bytes or inodes."""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

MOST_CHANGES = 256
FEWEST_CHANGES = 5  # changes needed to measure a slope
HISTORY_S = 3600.0  # older changes are dropped
TRUSTED_SPANS = 4.0  # trust a slope this many times its span ahead; further ahead, measure over a longer span
MOST_SPANS = 60.0  # no forecast beyond this many times the longest span
QUIET_PAUSES = 3.0
LEAST_QUIET_S = 10.0  # the fall has ended after this long without one, and after `QUIET_PAUSES` times the longest pause
REGULAR_RISES = 2  # fewer rises in a span are an exception such as a cleanup, and are ignored
OUTLIER_RATIO = 10.0  # a fall this many times the median is ignored, such as another user's large file
MOST_OUTLIERS = 2

LOW_BYTES = 10e9
LOW_SHARE = 0.10
PLENTY_BYTES = 1e12


def is_space_low(available_bytes: float, size_bytes: float) -> bool:
    """Whether less than 10 GB is left, or less than a tenth if that is below 1 TB."""
    return available_bytes < LOW_BYTES or (available_bytes < PLENTY_BYTES and available_bytes < LOW_SHARE * size_bytes)


class DiskForecast:
    """Forecast from readings of free space in the order of their times.

    Only changed values count: writers flush in steps, so slopes are exact between changes, not between readings.
    """

    def __init__(self) -> None:
        self._times, self._free = array("d"), array("d")  # of the changes: an hour of tuples would scatter in memory
        self._last: tuple[float, float] | None = None
        self._full_since: float | None = None

    def update(self, t: float, free: float) -> None:
        """Add a reading at time ``t`` in seconds; restart if the clock was set back."""
        if self._last is not None and t <= self._last[0]:
            if t == self._last[0]:
                return
            del self._times[:], self._free[:]
            self._last = None
        if self._last is None or free != self._last[1]:
            self._times.append(t)
            self._free.append(free)
        self._last = (t, free)
        self._full_since = None if free > 0 else t if self._full_since is None else self._full_since
        while len(self._times) > 1 and t - self._times[1] > HISTORY_S:
            del self._times[0], self._free[0]
        if len(self._times) > MOST_CHANGES:
            self._thin()

    def _thin(self) -> None:
        """Drop every other change of the older half; this keeps the sums right."""
        half = len(self._times) // 2
        del self._times[1:half:2], self._free[1:half:2]

    def full_at(self, now: float) -> float | None:
        """When nothing will be free, by the clock of the readings; in the past if already full.

        None if free space is not falling, has not fallen often enough, or would last too long to forecast.
        """
        if self._last is None:
            return None
        if self._full_since is not None:
            return self._full_since
        times, values = self._times[1:], self._free[1:]  # the start of the first change is unknown
        if len(times) < FEWEST_CHANGES:
            return None
        count, best = FEWEST_CHANGES, None
        while True:
            span = times[-1] - times[-count]
            slope = _use_rate(times[-count:], values[-count:], now)
            ahead = None if slope is None else self._last[1] / slope
            if ahead is not None and ahead <= TRUSTED_SPANS * span:
                best = ahead
                break
            if count >= len(times):
                best = ahead if ahead is not None and ahead <= MOST_SPANS * span else None
                break
            count = min(2 * count, len(times))
        return None if best is None else max(now, times[-1] + best)


def _use_rate(times: Sequence[float], free: Sequence[float], now: float) -> float | None:
    """Amount used per second over these changes; None if it does not fall, or no longer does."""
    steps = [before - after for before, after in pairwise(free)]
    falls = sorted(fall for fall in steps if fall > 0)
    if not falls:
        return None
    last = max(time for time, fall in zip(times[1:], steps, strict=True) if fall > 0)
    if now - last > max(LEAST_QUIET_S, QUIET_PAUSES * max(after - before for before, after in pairwise(times))):
        return None
    rises = sum(fall < 0 for fall in steps)
    usual = median(falls)
    outliers = sum(fall > OUTLIER_RATIO * usual for fall in falls)
    total, used = 0.0, [0.0]
    for fall in steps:
        is_outlier = outliers <= MOST_OUTLIERS < len(falls) // 2 and fall > OUTLIER_RATIO * usual
        is_rare_rise = rises < REGULAR_RISES and fall < 0
        total += 0.0 if is_outlier or is_rare_rise else fall
        used.append(total)
    slope = _middle_slope(times, used)
    return slope if slope > 0 else None


def _middle_slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Median of the slopes between each point and the nearest one at least half the span before it.

    This ignores a few outliers (incomplete Theil method) and includes rests between bursts.
    """
    half = (times[-1] - times[0]) / 2
    slopes, early = [], 0
    for late in range(1, len(times)):
        while early + 1 < late and times[early + 1] <= times[late] - half:
            early += 1
        if times[early] <= times[late] - half:
            slopes.append((values[late] - values[early]) / (times[late] - times[early]))
    return median(slopes)
