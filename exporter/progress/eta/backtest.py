"""Back-test of the experts on the run's own past."""

import bisect
import math
from array import array
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import field
from itertools import pairwise
from operator import mul
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.progress.eta.blocks import WorkBlocks
from exporter.progress.eta.changes import Speed
from exporter.progress.eta.experts import (
    NO_TRENDS,
    NORMAL,
    RECENT,
    TRENDS,
    ExpertSpeeds,
    Trends,
    WorkSegment,
    expert_forecasts,
    exponential_work,
    fit_trends,
    linear_work,
    rank_deviate,
    sorted_work,
)

CHECKPOINTS_PER_RUN = 200  # parts of the total between checkpoints
MOST_CHECKPOINTS = 64
MOST_LOSS = 1.0
MOST_TREND = 3.0  # a trend that changes the recent pace more (of the logarithm) is ignored
MOST_LENGTH_SPREAD = 2.5  # items of a larger standard deviation (of the logarithm of their length) are not believed
REFIT = 1.06  # trends are fitted again when the work has grown by this factor
RECENT_SHARE = 1 / 3  # part of the work in the recent mean
DISTANCE_SCALE = 1.0  # scale (in logarithms) on which a past horizon is near the requested one
FAR_WEIGHT = 0.02  # weight of a distant horizon
OLD_SPEED = 0.02  # factor for forecasts at another speed
PRIOR_LOSSES = (0.10, 0.05, 0.07, 0.09, 0.09, 0.12, 0.12)
PRIOR_WEIGHT = 0.3
PRIOR_SUMS = tuple(loss * PRIOR_WEIGHT for loss in PRIOR_LOSSES)
FIRST_WEIGHTS = (0.05, 0.6, 0.1, 0.05, 0.15, 0.05, 0.0)
PRIOR_ERROR = 0.08
PRIOR_ERROR_WEIGHT = 0.5
SHARPNESS = 0.07  # losses that differ by this part of the least one matter
LEAST_SHARPNESS = 0.005  # losses that differ by this much always matter
MOST_EVIDENCE = 4.0  # of the shape of a trend alone
DISAGREEMENT_FACTOR = 1.5  # doubt if the experts disagree by 1
DRIFT_FACTOR = 0.5  # doubt if trends change the recent pace by 1 (of its logarithm)


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


ROUNDING = " ".join(["%.7g"] * (1 + len(ExpertSpeeds._fields)))


def round_to_seven_digits(*numbers: float) -> Iterator[float]:
    """Round an ETA and its speeds to seven digits, enough for stored values."""
    return map(float, (ROUNDING % numbers).split())


@dataclass(slots=True)
class BacktestHistory:
    """Checkpoints of a run, and trends through them."""

    trends: Trends = NO_TRENDS
    fitted: float = 0.0  # items counted in work at the last fit
    # A column for each number of a checkpoint: those of `BacktestPoint`, then its speeds. They become arrays, which
    # have a third of the size of lists.
    columns: tuple[MutableSequence[float], ...] = field(default_factory=lambda: ([],) * COLUMNS)

    def __post_init__(self) -> None:
        self.columns = tuple(array("d", numbers) for numbers in self.columns)
        if len({len(numbers) for numbers in self.columns}) != 1 or len(self.columns) != COLUMNS:
            raise TypeError("checkpoints need all their numbers")

    def add(
        self,
        checkpoint: BacktestPoint,
        warm_up_items: float,
        speed_starts: Sequence[float],
        done: float,
        total: float | None,
    ) -> None:
        """Add a checkpoint at the position ``done``; drop every second one if there are too many.

        ``speed_starts`` are the counts at which lasting changes of speed began.
        """
        items, seconds, elapsed, left, eta, speeds = checkpoint
        row = (items, seconds, elapsed, left, *round_to_seven_digits(eta, *speeds))
        for numbers, number in zip(self.columns, row, strict=True):
            numbers.append(number)
        if len(self.columns[0]) > MOST_CHECKPOINTS:
            for numbers in self.columns:
                del numbers[1::2]
        if items >= REFIT * self.fitted:  # trends change slowly, and fitting is costly
            self.fitted = items
            self.trends = fit_trends(self.segments(warm_up_items), speed_starts, done - items, total)

    def segments(self, warm_up_items: float) -> list[WorkSegment]:
        """The work after the warm-up, between checkpoints with work and time between them."""
        done, work = self.columns[:2]
        first = bisect.bisect_left(done, warm_up_items)
        found = []
        for (before, since), (after, until) in pairwise(zip(done[first:], work[first:], strict=True)):
            items, seconds = after - before, until - since
            if items > 0 and seconds > 0:
                pace = seconds / items
                found.append(WorkSegment((before + after) / 2, items, pace, math.log(pace)))
        return found

    def last_point_until(self, seconds: float) -> tuple[float, float] | None:
        """Items and seconds of work at the last checkpoint up to ``seconds``; None without one."""
        done, work = self.columns[:2]
        after = bisect.bisect_right(work, seconds)
        return (done[after - 1], work[after - 1]) if after else None

    def expert_speeds(self, blocks: WorkBlocks, speed: Speed, done: float, total: float | None) -> ExpertSpeeds:
        """Seconds per item according to each expert, now and at this speed."""
        items, cold = blocks.items, blocks.warm_up_work
        warm = items - cold.items
        whole = (blocks.seconds - cold.seconds) / warm if warm > 0 else blocks.seconds / items
        present = (speed.seconds + blocks.open_seconds) / (speed.items + blocks.open_items)
        since, recent = max(0.0, warm), whole
        point = self.last_point_until((1 - RECENT_SHARE) * blocks.seconds)
        if point is not None and cold.items <= point[0] < items:
            since = items - point[0]
            recent = (blocks.seconds - point[1]) / since
        trends = self.trended_speeds(recent, since, done, total)
        return ExpertSpeeds(whole, present, recent, blocks.moving_mean, *trends)

    def trended_speeds(
        self, recent: float, since: float, done: float, total: float | None
    ) -> tuple[float, float, float, float, float, float]:
        """The trends through ``recent``, the mean seconds per item of the last ``since`` items."""
        slope, growth, by_length = self.trends[:3]
        linear = recent + slope * since / 2
        if linear < 0.1 * recent:
            linear, slope = recent, 0.0
        exponential, change = recent, growth * since
        if 1e-9 < abs(change) < MOST_TREND:
            exponential = recent * change / -math.expm1(-change)
        else:
            growth = 0.0
        level = share = 0.0
        if by_length and total and done <= total and abs(by_length) < MOST_LENGTH_SPREAD:
            share = sorted_work(0.0, by_length, (done - since) / total, done / total)
        if share > 0:
            level = math.log(recent * since / total / share) if total else 0.0
        else:
            by_length = 0.0
        return linear, slope, exponential, growth, level, by_length

    def rate_experts(
        self, items: float, seconds: float, elapsed: float, left: float, speed_start: float, position: float
    ) -> ExpertTrust:
        """Accuracy of the experts' forecasts from each checkpoint until now.

        Forecasts over the same relative distance as the requested one count most. ``speed_start`` is the count at which
        the current speed began, ``position`` that of the whole work.
        """
        whole_sum, speed_sum, recent_sum, linear_sum, moving_sum, exponential_sum, sorted_sum = PRIOR_SUMS
        weight_sum = PRIOR_WEIGHT
        error_sum, error_weight = PRIOR_ERROR * PRIOR_ERROR_WEIGHT, PRIOR_ERROR_WEIGHT
        distance = math.log(max(left, 1e-9) / items) if items > 0 else 0.0
        tested = False
        log, exp, normal = math.log, math.exp, NORMAL.cdf
        offset, total = position - items, position + left
        here = rank_deviate(position / total) if total > 0 else 0.0
        old_speed = 1.0 if self.trends.is_steady else OLD_SPEED
        nearness = 2 * DISTANCE_SCALE * DISTANCE_SCALE
        then = zip(*self.columns, strict=True)
        # Unrolled instead of a loop over expert_forecasts(): this is most of the cost of an estimate.
        for (
            done,
            work,
            moment,
            rest,
            eta,
            whole,
            speed,
            recent,
            moving,
            level,
            slope,
            base,
            growth,
            median,
            spread,
        ) in then:
            since = items - done
            truth = seconds - work
            if since <= 0 or truth <= 0 or done <= 0:
                continue
            log_truth = log(truth)
            u = log(since / done) - distance
            weight = exp(-u * u / nearness) + FAR_WEIGHT
            if done < speed_start:
                weight *= old_speed
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
            straight = curved = ranked = share  # without a trend, use the forecast of the last third
            if slope or level != recent:
                said = linear_work(level, slope, since)
                straight = weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            linear_sum += straight
            if growth or base != recent:
                said = exponential_work(base, growth, since)
                curved = weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            exponential_sum += curved
            if spread:
                there = rank_deviate((done + offset) / total)
                said = total * exp(median + spread * spread / 2) * (normal(here - spread) - normal(there - spread))
                ranked = weight * loss if said > 0 and (loss := abs(log(said) - log_truth)) < MOST_LOSS else most
            sorted_sum += ranked

            if eta > 0 and rest > 0 and elapsed > moment:
                loss = abs(log(eta * since / rest / (elapsed - moment)))
                error_sum += weight * loss if loss < MOST_LOSS else most
                error_weight += weight
        sums = (whole_sum, speed_sum, recent_sum, linear_sum, moving_sum, exponential_sum, sorted_sum)
        error = error_sum / error_weight
        if not tested:
            return ExpertTrust(FIRST_WEIGHTS, error)
        losses = [loss / weight_sum for loss in sums]
        weights = expert_weights(losses, min(MOST_EVIDENCE, self.trends.sorted_evidence))
        # The estimates given then did not know what the run has taught since: the experts' own error counts as much.
        own = sum(map(mul, weights, losses))
        return ExpertTrust(weights, (error + min(error, own)) / 2)


def expert_weights(losses: list[float], sorted_evidence: float = 0.0) -> tuple[float, ...]:
    """Trust in each expert by its mean loss, the last one also by its evidence, a logarithm; the sum is 1."""
    best = min(losses)
    scale = max(LEAST_SHARPNESS, SHARPNESS * best)
    raw = [math.exp((best - loss) / scale) for loss in losses]
    raw[-1] *= math.exp(sorted_evidence)
    whole = sum(raw)
    return tuple(weight / whole for weight in raw)


def mix_forecasts(speeds: ExpertSpeeds, done: float, items: float, weights: tuple[float, ...]) -> tuple[float, float]:
    """Seconds of work for the next items, up to the last, and the doubt about them.

    It averages the logarithms of all forecasts by trust. The doubt is a standard deviation. It grows as the experts
    disagree, where less trusted ones have more of a say, and as trusted trends lead away from the recent pace.
    """
    log_sum = weight_sum = soft_sum = soft_squares = soft_weight = 0.0
    forecasts = expert_forecasts(speeds, done, items)
    for forecast, weight in zip(forecasts, weights, strict=True):
        if forecast > 0:
            number, soft = math.log(forecast), math.sqrt(weight)
            log_sum += weight * number
            weight_sum += weight
            soft_sum += soft * number
            soft_squares += soft * number * number
            soft_weight += soft
    if not weight_sum:
        return 0.0, 0.0
    mean = log_sum / weight_sum
    variance = (soft_squares - 2 * mean * soft_sum) / soft_weight + mean * mean
    recent = forecasts[RECENT]
    drift = sum(
        weights[trend] * math.log(forecasts[trend] / recent) for trend in TRENDS if min(forecasts[trend], recent) > 0
    )
    return math.exp(mean), math.hypot(DISAGREEMENT_FACTOR * math.sqrt(max(0.0, variance)), DRIFT_FACTOR * drift)
