"""Experts: several forecasts of the seconds that the next items take."""

import math
from collections.abc import Sequence
from typing import NamedTuple

EXPERTS = ("whole run", "present speed", "last third", "linear trend", "moving average", "exponential trend")
TREND_SHARE = 0.6  # trends are fitted to this last part of the work
TREND_SEGMENTS = 8
TREND_ERRORS = 4.0  # a slope counts from this many standard errors
SLOWEST_FALL = 0.15  # a falling trend ends at this part of the current time per item
MOST_GROWTH = 1.5  # an exponential trend ends at growth by exp() of this


class Trend(NamedTuple):
    """A line through time per item, or its logarithm, over items done."""

    level: float  # value at `items`
    slope: float
    items: float


class ExpertSpeeds(NamedTuple):
    """Seconds per item according to each expert, with the slopes of the trends."""

    overall: float
    present: float
    recent: float
    moving: float
    linear: float
    linear_slope: float
    exponential: float
    exponential_slope: float


def expert_forecasts(speeds: ExpertSpeeds, items: float) -> tuple[float, ...]:
    """Seconds of work for the next items, in the order of EXPERTS."""
    return (
        speeds.overall * items,
        speeds.present * items,
        speeds.recent * items,
        linear_work(speeds.linear, speeds.linear_slope, items),
        speeds.moving * items,
        exponential_work(speeds.exponential, speeds.exponential_slope, items),
    )


def linear_work(seconds_per_item: float, slope: float, items: float) -> float:
    """Seconds of work if seconds per item change by ``slope`` with each item."""
    if slope < 0:
        falling = min(items, (SLOWEST_FALL - 1) * seconds_per_item / slope)
        return (
            seconds_per_item * falling
            + slope * falling * falling / 2
            + SLOWEST_FALL * seconds_per_item * (items - falling)
        )
    return seconds_per_item * items + slope * items * items / 2


def exponential_work(seconds_per_item: float, slope: float, items: float) -> float:
    """Seconds of work if the logarithm of seconds per item changes by ``slope`` with each item."""
    growth = slope * items
    if abs(growth) < 1e-6:
        return seconds_per_item * items
    if growth <= MOST_GROWTH:
        return seconds_per_item * math.expm1(growth) / slope
    growing = MOST_GROWTH / slope
    return seconds_per_item * (math.expm1(MOST_GROWTH) / slope + math.exp(MOST_GROWTH) * (items - growing))


class WorkSegment(NamedTuple):
    """Work between two checkpoints."""

    middle: float  # items done at its middle
    items: float
    seconds_per_item: float
    log_seconds_per_item: float


def fit_trends(segments: Sequence[WorkSegment], speed_start: float) -> tuple[Trend | None, Trend | None]:
    """Lines through seconds per item and through their logarithm; None if not clearly linear.

    ``speed_start`` is the count at which the current speed began. If a step there fits better than a line, only later
    segments count.
    """
    if len(segments) < TREND_SEGMENTS:
        return None, None
    _, _, pace0, log0 = segments[-1]
    x0 = segments[-1].middle
    weight = x = xx = y = xy = yy = z = xz = zz = 0.0
    weight_before = y_before = 0.0
    # One pass for both. Sums relative to the last segment stay small and so exact.
    for middle, items, pace, log_pace in segments:
        dx, dy, dz = middle - x0, pace - pace0, log_pace - log0
        wx, wy, wz = items * dx, items * dy, items * dz
        weight += items
        x += wx
        xx += wx * dx
        y += wy
        xy += wx * dy
        yy += wy * dy
        z += wz
        xz += wx * dz
        zz += wz * dz
        if middle < speed_start:
            weight_before += items
            y_before += wy
    line = FitSums(weight, x, xx, y, xy, yy)
    if 0 < weight_before < weight and line.explained_by_step(weight_before, y_before) > line.explained_by_line():
        return fit_trends([segment for segment in segments if segment.middle >= speed_start], -math.inf)
    freedom = len(segments) - 2
    return clear_trend(line, freedom, x0, pace0), clear_trend(FitSums(weight, x, xx, z, xz, zz), freedom, x0, log0)


class FitSums(NamedTuple):
    """Weighted sums of a least-squares fit."""

    weight: float
    x: float
    xx: float
    y: float
    xy: float
    yy: float

    def explained_by_line(self) -> float:
        """Sum of squares explained by a line."""
        xx, xy = self.xx - self.x * self.x / self.weight, self.xy - self.x * self.y / self.weight
        return xy * xy / xx if xx > 0 else 0.0

    def explained_by_step(self, weight_before: float, y_before: float) -> float:
        """Sum of squares explained by two levels, the first with this weight and sum."""
        difference = y_before / weight_before - (self.y - y_before) / (self.weight - weight_before)
        return weight_before * (self.weight - weight_before) / self.weight * difference * difference


def clear_trend(sums: FitSums, freedom: int, x0: float, y0: float) -> Trend | None:
    """The line, if its slope exceeds the noise, else None; sums are relative to (x0, y0)."""
    mean_x, mean_y = sums.x / sums.weight, sums.y / sums.weight
    xx = sums.xx - sums.x * mean_x
    if xx <= 0:
        return None
    xy = sums.xy - sums.x * mean_y
    slope = xy / xx
    residual = max(0.0, sums.yy - sums.y * mean_y - slope * xy) / freedom
    if abs(slope) <= TREND_ERRORS * math.sqrt(residual / xx):
        return None
    return Trend(y0 + mean_y, slope, x0 + mean_x)
