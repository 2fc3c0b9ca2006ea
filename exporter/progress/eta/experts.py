"""Experts: several forecasts of the seconds that the next items take."""

import bisect
import math
import statistics
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

EXPERTS = (
    *("whole run", "present speed", "last third", "linear trend", "moving average", "exponential trend"),
    "sorted by length",
)
RECENT, TRENDS = 2, (3, 5, 6)  # places in it; without a trend, their forecasts are the recent one
TREND_SEGMENTS = 8
TREND_PROBABILITY = 0.2  # part of all runs in which the pace has a trend
TREND_SPREAD = 0.5  # usual size of a trend: change of the logarithm of the pace over a whole run
LENGTH_SPREAD = 0.6  # the same for items sorted by length: standard deviation of the logarithm of their length
RESIDUAL_FACTOR = 1.2  # neighbouring segments deviate alike, so that a slope is less certain than it looks
STEP_PARAMETERS = 2  # a step is described by its position and its level
SLOWEST_FALL = 0.15  # a falling trend ends at this part of the current time per item
MOST_GROWTH = 1.5  # an exponential trend ends at growth by exp() of this
NORMAL = statistics.NormalDist()
LEAST_RANK = 1e-4  # of the shortest and, from the end, of the longest item


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
    # Logarithm of the seconds of the median item, and its change per normal deviate of an item's rank; 0 if unsorted.
    sorted_level: float = 0.0
    sorted_slope: float = 0.0


def expert_forecasts(speeds: ExpertSpeeds, done: float, items: float) -> tuple[float, ...]:
    """Seconds of work for the next items up to the last, in the order of EXPERTS, ``done`` of all being complete."""
    return (
        speeds.overall * items,
        speeds.present * items,
        speeds.recent * items,
        linear_work(speeds.linear, speeds.linear_slope, items),
        speeds.moving * items,
        exponential_work(speeds.exponential, speeds.exponential_slope, items),
        (done + items) * sorted_work(speeds.sorted_level, speeds.sorted_slope, done / (done + items), 1.0)
        if speeds.sorted_slope
        else speeds.recent * items,
    )


def rank_deviate(share: float) -> float:
    """Normal deviate of the length of the item at this share of sorted ones."""
    return NORMAL.inv_cdf(min(1 - LEAST_RANK, max(LEAST_RANK, share)))


def sorted_work(level: float, slope: float, start: float, end: float) -> float:
    """Seconds per item of all, for the items from one share to another, if sorted by their log-normal lengths."""
    low = 0.0 if start <= 0 else NORMAL.cdf(rank_deviate(start) - slope)
    high = 1.0 if end >= 1 else NORMAL.cdf(rank_deviate(end) - slope)
    return math.exp(level + slope * slope / 2) * (high - low)


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


class Trends(NamedTuple):
    """How seconds per item change; a slope is 0 without evidence."""

    linear: float = 0.0  # change per item
    exponential: float = 0.0  # change of the logarithm per item
    by_length: float = 0.0  # change of the logarithm per normal deviate of the rank
    is_steady: bool = False  # whether lines fit better than steps at changes of speed: old speeds still teach something
    sorted_evidence: float = 0.0  # how much more likely the lengths of sorted items are than a trend; a logarithm


NO_TRENDS = Trends()


def fit_trends(segments: Sequence[WorkSegment], starts: Sequence[float], offset: float, total: float | None) -> Trends:
    """Slopes through the segments, as far as they exceed the noise.

    ``starts`` are the counts at which lasting changes of speed began. If steps there fit better than lines, only the
    segments of the present speed count. ``offset`` is the position at the count 0.
    """
    if len(segments) < TREND_SEGMENTS:
        return NO_TRENDS
    middles, weights, paces, logs = zip(*segments, strict=True)
    scale = total or 2 * (middles[-1] + offset)
    places = [(middle + offset) / scale for middle in middles]
    curved = fit_line(places, logs, weights)
    by_length = fit_line([rank_deviate(place) for place in places], logs, weights) if total else curved
    inner = [start for start in starts if middles[0] < start < middles[-1]]
    if inner and step_residual(segments, inner) < min(curved.residual, by_length.residual):
        present = [part for part in segments if part.middle >= inner[-1]]
        return fit_trends(present, (), offset, total)._replace(is_steady=False)
    straight = fit_line(places, paces, weights)
    return Trends(
        straight.likely_slope(TREND_SPREAD * straight.mean) / scale,
        curved.likely_slope(TREND_SPREAD) / scale,
        by_length.likely_slope(LENGTH_SPREAD) if total else 0.0,
        is_steady=True,
        sorted_evidence=sorted_evidence(places, logs, weights, by_length, curved) if total else 0.0,
    )


def sorted_evidence(
    places: Sequence[float],
    logs: Sequence[float],
    weights: Sequence[float],
    by_length: "FittedLine",
    curved: "FittedLine",
) -> float:
    """How much more likely the lengths of sorted items are than a trend or a slow start; a logarithm, never negative.

    After a slow start the later half is level. ``by_length`` and ``curved`` are the fits of all.
    """
    if by_length.residual >= curved.residual:
        return 0.0
    half = len(places) // 2
    deviates = [rank_deviate(place) for place in places]
    late = [log - by_length.slope * deviate for log, deviate in zip(logs[half:], deviates[half:], strict=True)]
    ratios = (
        (len(places), curved.residual, by_length.residual),
        (len(late), _variance(logs[half:], weights[half:]), _variance(late, weights[half:])),
    )
    if any(other <= 0 or sorted_ <= 0 for _, other, sorted_ in ratios):
        return 0.0
    return max(0.0, min(size / 2 / RESIDUAL_FACTOR * math.log(other / sorted_) for size, other, sorted_ in ratios))


def _variance(values: Sequence[float], weights: Sequence[float]) -> float:
    mean: float = sum(map(mul, values, weights)) / sum(weights)
    return sum(weight * (value - mean) * (value - mean) for value, weight in zip(values, weights, strict=True))


class FittedLine(NamedTuple):
    """A weighted least-squares fit."""

    mean: float  # of y
    slope: float
    variance: float  # of the slope
    residual: float  # variance of y about the line

    def likely_slope(self, spread: float) -> float:
        """Expected slope, if `TREND_PROBABILITY` of all lines have one, which has this standard deviation."""
        if self.variance <= 0:
            return self.slope
        variance = RESIDUAL_FACTOR * self.variance
        share = spread * spread / (spread * spread + variance)
        evidence = math.sqrt(1 - share) * math.exp(min(50.0, self.slope * self.slope / variance * share / 2))
        odds = TREND_PROBABILITY / (1 - TREND_PROBABILITY) * evidence
        return self.slope * share * odds / (1 + odds)


def fit_line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> FittedLine:
    """Fit a line."""
    weight = sum(weights)
    x_mean, y_mean = sum(map(mul, x, weights)) / weight, sum(map(mul, y, weights)) / weight
    dx, dy = [value - x_mean for value in x], [value - y_mean for value in y]
    weighted = list(map(mul, dx, weights))
    xx, xy = sum(map(mul, weighted, dx)), sum(map(mul, weighted, dy))
    yy = sum(map(mul, map(mul, dy, dy), weights))
    slope = xy / xx if xx > 0 else 0.0
    residual = max(0.0, yy - slope * xy) / (len(x) - 2)
    return FittedLine(y_mean, slope, residual / xx if xx > 0 else math.inf, residual)


def step_residual(segments: Sequence[WorkSegment], starts: Sequence[float]) -> float:
    """Variance of the logarithm about a level for each speed."""
    sums = [[0.0, 0.0, 0.0] for _ in range(len(starts) + 1)]
    for middle, items, _, log_pace in segments:
        level = sums[bisect.bisect_right(starts, middle)]
        level[0] += items
        level[1] += items * log_pace
        level[2] += items * log_pace * log_pace
    squares = sum(yy - y * y / weight for weight, y, yy in sums if weight)
    return squares / max(1, len(segments) - 1 - STEP_PARAMETERS * len(starts))
