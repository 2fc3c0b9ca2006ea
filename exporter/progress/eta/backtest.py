"""Back-test of the experts on the run's own past."""

import bisect
import math
from array import array
from collections.abc import MutableSequence
from dataclasses import field
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.progress.eta.blocks import WorkBlocks
from exporter.progress.eta.changes import Speed
from exporter.progress.eta.experts import (
    TREND_SHARE,
    ExpertSpeeds,
    Trend,
    WorkSegment,
    expert_forecasts,
    exponential_work,
    fit_trends,
    linear_work,
)

CHECKPOINTS_PER_RUN = 200  # parts of the total between checkpoints
MOST_CHECKPOINTS = 64
MOST_LOSS = 1.0
MOST_TREND = 3.0  # a trend this far (of the logarithm) from the recent mean is ignored
RECENT_SHARE = 1 / 3  # part of the work in the recent mean
DISTANCE_SCALE = 1.0  # scale (in logarithms) on which a past horizon is near the requested one
FAR_WEIGHT = 0.02  # weight of a distant horizon
OLD_SPEED = 0.02  # factor for forecasts at another speed
PRIOR_LOSSES = (0.10, 0.05, 0.07, 0.09, 0.09, 0.12)
PRIOR_WEIGHT = 0.3
PRIOR_SUMS = tuple(loss * PRIOR_WEIGHT for loss in PRIOR_LOSSES)
FIRST_WEIGHTS = (0.05, 0.6, 0.1, 0.05, 0.15, 0.05)
PRIOR_ERROR = 0.08
PRIOR_ERROR_WEIGHT = 0.5
SHARPNESS = 0.07  # losses that differ by this part of the least one matter
LEAST_SHARPNESS = 0.005  # losses that differ by this much always matter


class BacktestPoint(NamedTuple):
    """Facts and forecasts at a past time."""

    items: float  # items counted in work so far
    seconds: float  # seconds of work so far
    elapsed: float  # time with pauses, without time lost by restarts
    items_left: float  # items left at the time
    eta: float  # estimated seconds left at the time
    speeds: ExpertSpeeds


COLUMNS = len(BacktestPoint._fields) - 1 + len(ExpertSpeeds._fields)


class ExpertTrust(NamedTuple):
    """Trust in each expert, and the usual error of the estimate."""

    weights: tuple[float, ...]
    error: float


FIRST_TRUST = ExpertTrust(FIRST_WEIGHTS, PRIOR_ERROR)


def round_to_seven_digits(number: float) -> float:
    """Round to seven digits, enough for stored values."""
    return float(f"{number:.7g}")


def segment_between(
    before_items: float, before_seconds: float, after_items: float, after_seconds: float
) -> WorkSegment | None:
    """Work between two checkpoints; None without work or time."""
    items, seconds = after_items - before_items, after_seconds - before_seconds
    if items <= 0 or seconds <= 0:
        return None
    pace = seconds / items
    return WorkSegment((before_items + after_items) / 2, items, pace, math.log(pace))


@dataclass(slots=True)
class BacktestHistory:
    """Checkpoints of a run, and trends through them."""

    linear: Trend | None = None
    exponential: Trend | None = None
    # A column for each number of a checkpoint: those of `BacktestPoint`, then its speeds. They become arrays, which
    # have a third of the size of lists.
    columns: tuple[MutableSequence[float], ...] = field(default_factory=lambda: ([],) * COLUMNS)
    # Between checkpoints; None also if too old for a trend.
    _segments: list[WorkSegment | None] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.columns = tuple(array("d", numbers) for numbers in self.columns)
        if len({len(numbers) for numbers in self.columns}) != 1 or len(self.columns) != COLUMNS:
            raise TypeError("checkpoints need all their numbers")

    def add(self, checkpoint: BacktestPoint, warm_up_items: float, speed_start: float) -> None:
        """Add a checkpoint; drop every second one if there are too many.

        ``speed_start`` is the count at which the current speed began.
        """
        speeds = ExpertSpeeds(*map(round_to_seven_digits, checkpoint.speeds))
        items, seconds, elapsed, left, eta, _ = checkpoint
        row = (items, seconds, elapsed, left, round_to_seven_digits(eta), *speeds)
        for numbers, number in zip(self.columns, row, strict=True):
            numbers.append(number)
        if len(self.columns[0]) > MOST_CHECKPOINTS:
            for numbers in self.columns:
                del numbers[1::2]
            self._segments = []
        if len(self.columns[0]) % 2 == 0:  # trends change slowly, and fitting is costly
            self.linear, self.exponential = fit_trends(self.segments(warm_up_items), speed_start)

    def segments(self, warm_up_items: float) -> list[WorkSegment]:
        """The last part of the work, between checkpoints."""
        (items, seconds), found = self.columns[:2], self._segments
        first = max(
            bisect.bisect_left(seconds, (1 - TREND_SHARE) * seconds[-1]), bisect.bisect_left(items, warm_up_items)
        )
        gone = min(first, len(found))
        found[:gone] = [None] * gone
        for i in range(len(found), len(items) - 1):
            part = segment_between(items[i], seconds[i], items[i + 1], seconds[i + 1]) if i >= first else None
            found.append(part)
        return [part for part in found[first:] if part is not None]

    def last_point_until(self, seconds: float) -> tuple[float, float] | None:
        """Items and seconds of work at the last checkpoint up to ``seconds``; None without one."""
        done, work = self.columns[:2]
        after = bisect.bisect_right(work, seconds)
        return (done[after - 1], work[after - 1]) if after else None

    def expert_speeds(self, blocks: WorkBlocks, speed: Speed) -> ExpertSpeeds:
        """Seconds per item according to each expert, now and at this speed."""
        items, cold = blocks.items, blocks.warm_up_work
        warm = items - cold.items
        whole = (blocks.seconds - cold.seconds) / warm if warm > 0 else blocks.seconds / items
        present = (speed.seconds + blocks.open_seconds) / (speed.items + blocks.open_items)
        recent = whole
        point = self.last_point_until((1 - RECENT_SHARE) * blocks.seconds)
        if point is not None and cold.items <= point[0] < items:
            recent = (blocks.seconds - point[1]) / (items - point[0])
        linear = self.linear_speed(items, recent)
        exponential = self.exponential_speed(items, recent)
        return ExpertSpeeds(whole, present, recent, blocks.moving_mean, *linear, *exponential)

    def linear_speed(self, items: float, default: float) -> tuple[float, float]:
        """Seconds per item by the linear trend, and their slope; ``default`` and 0 without a trend."""
        if self.linear is not None:
            level = self.linear.level + self.linear.slope * (items - self.linear.items)
            if level > 0.1 * default:
                return level, self.linear.slope
        return default, 0.0

    def exponential_speed(self, items: float, default: float) -> tuple[float, float]:
        """Seconds per item by the exponential trend, and the slope of their logarithm."""
        if self.exponential is not None:
            log_pace = self.exponential.level + self.exponential.slope * (items - self.exponential.items)
            if abs(log_pace - math.log(default)) < MOST_TREND:
                return math.exp(log_pace), self.exponential.slope
        return default, 0.0

    def rate_experts(
        self, items: float, seconds: float, elapsed: float, left: float, speed_start: float
    ) -> ExpertTrust:
        """Accuracy of the experts' forecasts from each checkpoint until now.

        Forecasts over the same relative distance as the requested one count most. ``speed_start`` is the count at which
        the current speed began.
        """
        whole_sum, speed_sum, recent_sum, linear_sum, moving_sum, exponential_sum = PRIOR_SUMS
        weight_sum = PRIOR_WEIGHT
        error_sum, error_weight = PRIOR_ERROR * PRIOR_ERROR_WEIGHT, PRIOR_ERROR_WEIGHT
        distance = math.log(max(left, 1e-9) / items) if items > 0 else 0.0
        tested = False
        log, exp = math.log, math.exp
        nearness = 2 * DISTANCE_SCALE * DISTANCE_SCALE
        then = zip(*self.columns, strict=True)
        # Unrolled instead of a loop over expert_forecasts(): this is most of the cost of an estimate.
        for done, work, moment, rest, eta, whole, speed, recent, moving, level, slope, base, growth in then:
            since = items - done
            truth = seconds - work
            if since <= 0 or truth <= 0 or done <= 0:
                continue
            log_truth = log(truth)
            u = log(since / done) - distance
            weight = exp(-u * u / nearness) + FAR_WEIGHT
            if done < speed_start:
                weight *= OLD_SPEED
            most = weight * MOST_LOSS
            weight_sum += weight
            tested = True

            said = whole * since
            whole_sum += weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            said = speed * since
            speed_sum += weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            said = moving * since
            moving_sum += weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            said = recent * since
            share = weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            recent_sum += share
            straight = curved = share  # without a trend, use the forecast of the last third
            if slope or level != recent:
                said = linear_work(level, slope, since)
                straight = weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            linear_sum += straight
            if growth or base != recent:
                said = exponential_work(base, growth, since)
                curved = weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            exponential_sum += curved

            if eta > 0 and rest > 0 and elapsed > moment:
                loss = abs(log(eta * since / rest / (elapsed - moment)))
                error_sum += weight * loss if loss < MOST_LOSS else most
                error_weight += weight
        sums = (whole_sum, speed_sum, recent_sum, linear_sum, moving_sum, exponential_sum)
        weights = expert_weights([loss / weight_sum for loss in sums]) if tested else FIRST_WEIGHTS
        return ExpertTrust(weights, error_sum / error_weight)


def expert_weights(losses: list[float]) -> tuple[float, ...]:
    """Trust in each expert by its mean loss; the sum is 1."""
    best = min(losses)
    scale = max(LEAST_SHARPNESS, SHARPNESS * best)
    raw = [math.exp((best - loss) / scale) for loss in losses]
    whole = sum(raw)
    return tuple(weight / whole for weight in raw)


def mix_forecasts(speeds: ExpertSpeeds, items: float, weights: tuple[float, ...]) -> float:
    """Seconds of work for the next items: the logarithms of all forecasts, averaged by trust."""
    log_sum = weight_sum = 0.0
    for forecast, weight in zip(expert_forecasts(speeds, items), weights, strict=True):
        if forecast > 0:
            log_sum += weight * math.log(forecast)
            weight_sum += weight
    return math.exp(log_sum / weight_sum) if weight_sum else 0.0
