"""What each expert would have said earlier in this run, and how near the truth it was."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from exporter.derive.eta.experts import TREND_SHARE, Outlook, Segment, Trend, forecasts, trends

SPACING = 200
"""A checkpoint stands at each such part of the total."""
MOST_CHECKPOINTS = 64
MOST_LOSS = 1.0
MOST_TREND = 3.0
"""A trend that leads further (of the logarithm) from the mean of late is none."""
NEARNESS = 1.0
"""How near (in logarithms) a past horizon must be to the one asked for."""
FAR_WEIGHT = 0.02
"""Weight of a horizon that is not near at all."""
OLD_SPEED = 0.02
"""Factor for what was said at another speed."""
PRIOR_LOSSES = (0.10, 0.05, 0.07, 0.09, 0.09, 0.12)
PRIOR_WEIGHT = 0.3
FIRST_WEIGHTS = (0.05, 0.6, 0.1, 0.05, 0.15, 0.05)
PRIOR_ERROR = 0.08
PRIOR_ERROR_WEIGHT = 0.5
SHARPNESS = 0.07
"""Losses that differ by this part of the least one make a difference ..."""
LEAST_SHARPNESS = 0.005
"""... and in any case those that differ by this much."""


class Checkpoint(NamedTuple):
    """What was known and said at a moment of the past."""

    items: float
    """Items counted in work so far."""
    seconds: float
    """Seconds of work so far."""
    at: float
    """The moment, pauses included, time lost by restarts left out."""
    left: float
    """Items that were left then."""
    eta: float
    """Seconds left as estimated then."""
    outlook: Outlook


class Verdict(NamedTuple):
    """How much each expert is believed, and the usual error of the estimate."""

    weights: tuple[float, ...]
    error: float


def short(number: float) -> float:
    """A number of seven digits: what is stored of the past needs no more."""
    return float(f"{number:.7g}")


def segment(before: Checkpoint, after: Checkpoint) -> Segment | None:
    """The work between two checkpoints; None when there was none that took time."""
    items, seconds = after.items - before.items, after.seconds - before.seconds
    if items <= 0 or seconds <= 0:
        return None
    pace = seconds / items
    return Segment((before.items + after.items) / 2, items, pace, math.log(pace))


@dataclass(slots=True)
class History:
    """Checkpoints of a run and the trends through them."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    linear: Trend | None = None
    exponential: Trend | None = None
    _segments: list[Segment | None] | None = None

    def state(self) -> list[Any]:
        """For restored()."""
        return [self.checkpoints, self.linear, self.exponential]

    @classmethod
    def restored(cls, state: list[Any]) -> "History":
        """The history of which this is the state."""
        checkpoints, linear, exponential = state
        return cls(
            [Checkpoint._make([*rest, Outlook(*outlook)]) for *rest, outlook in checkpoints],
            None if linear is None else Trend(*linear),
            None if exponential is None else Trend(*exponential),
        )

    def add(self, checkpoint: Checkpoint, warm_up_items: float, change: float) -> None:
        """A checkpoint; every second one is dropped when there are too many, the first one stays.

        ``change``: items done when the present speed began.
        """
        outlook = Outlook(*map(short, checkpoint.outlook))
        self.checkpoints.append(checkpoint._replace(eta=short(checkpoint.eta), outlook=outlook))
        if len(self.checkpoints) > MOST_CHECKPOINTS:
            self.checkpoints = self.checkpoints[::2]
            self._segments = None
        if len(self.checkpoints) % 2 == 0:  # trends change slowly, and fitting costs
            self.linear, self.exponential = trends(self.segments(warm_up_items), change)

    def segments(self, warm_up_items: float) -> list[Segment]:
        """The last part of the work, from checkpoint to checkpoint."""
        points = self.checkpoints
        if self._segments is None:
            self._segments = []
        for index in range(len(self._segments), len(points) - 1):
            self._segments.append(segment(points[index], points[index + 1]))
        begin = (1 - TREND_SHARE) * points[-1].seconds
        first = next(
            (i for i, point in enumerate(points) if point.seconds >= begin and point.items >= warm_up_items),
            len(points),
        )
        return [part for part in self._segments[first:] if part is not None]

    def since(self, seconds: float) -> Checkpoint | None:
        """The last checkpoint with at most so many seconds of work; None when there is none."""
        return next((point for point in reversed(self.checkpoints) if point.seconds <= seconds), None)

    def linear_here(self, items: float, otherwise: float) -> tuple[float, float]:
        """Seconds per item by the linear trend and their change with each; ``otherwise`` where there is no trend."""
        if self.linear is not None:
            level = self.linear.level + self.linear.slope * (items - self.linear.items)
            if level > 0.1 * otherwise:
                return level, self.linear.slope
        return otherwise, 0.0

    def exponential_here(self, items: float, otherwise: float) -> tuple[float, float]:
        """The same by the exponential trend, the change being that of the logarithm."""
        if self.exponential is not None:
            log_pace = self.exponential.level + self.exponential.slope * (items - self.exponential.items)
            if abs(log_pace - math.log(otherwise)) < MOST_TREND:
                return math.exp(log_pace), self.exponential.slope
        return otherwise, 0.0

    def judge(self, items: float, seconds: float, at: float, left: float, speed_items: float) -> Verdict:
        """How near the experts' forecasts from each checkpoint to here were.

        What counts most is what was said at the same relative distance as is asked for now: as long ahead
        for as much behind. ``speed_items``: items done when the present speed began.
        """
        sums = [loss * PRIOR_WEIGHT for loss in PRIOR_LOSSES]
        weight_sum = PRIOR_WEIGHT
        error, error_weight = PRIOR_ERROR * PRIOR_ERROR_WEIGHT, PRIOR_ERROR_WEIGHT
        distance = math.log(max(left, 1e-9) / items) if items > 0 else 0.0
        tested = False
        for point in self.checkpoints:
            since = items - point.items
            truth = seconds - point.seconds
            if since <= 0 or truth <= 0 or point.items <= 0:
                continue
            u = math.log(since / point.items) - distance
            weight = math.exp(-u * u / (2 * NEARNESS * NEARNESS)) + FAR_WEIGHT
            if point.items < speed_items:
                weight *= OLD_SPEED
            log_truth = math.log(truth)
            for index, forecast in enumerate(forecasts(point.outlook, since)):
                loss = abs(math.log(forecast) - log_truth) if forecast > 0 else MOST_LOSS
                if loss > MOST_LOSS:
                    loss = MOST_LOSS
                sums[index] += weight * loss
            weight_sum += weight
            tested = True
            if point.eta > 0 and point.left > 0 and at > point.at:
                said = point.eta * since / point.left
                error += weight * min(MOST_LOSS, abs(math.log(said / (at - point.at))))
                error_weight += weight
        weights = expert_weights([loss / weight_sum for loss in sums]) if tested else FIRST_WEIGHTS
        return Verdict(weights, error / error_weight)


def expert_weights(losses: list[float]) -> tuple[float, ...]:
    """Trust in each expert by its mean loss; adds up to 1."""
    best = min(losses)
    scale = max(LEAST_SHARPNESS, SHARPNESS * best)
    raw = [math.exp((best - loss) / scale) for loss in losses]
    whole = sum(raw)
    return tuple(weight / whole for weight in raw)


def mixed(outlook: Outlook, items: float, weights: tuple[float, ...]) -> float:
    """Seconds of work for the next items: the experts' forecasts, their logarithms averaged by trust."""
    log_sum = weight_sum = 0.0
    for forecast, weight in zip(forecasts(outlook, items), weights, strict=True):
        if forecast > 0:
            log_sum += weight * math.log(forecast)
            weight_sum += weight
    return math.exp(log_sum / weight_sum) if weight_sum else 0.0
