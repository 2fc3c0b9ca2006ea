"""Priors from earlier runs of the same job, used until a run has evidence of its own."""

import bisect
import math
from dataclasses import field
from itertools import pairwise
from typing import NamedTuple

from exporter.contract import records
from exporter.contract.lazy_dataclass import dataclass

FIRST_SPREAD = 0.12  # usual difference (of the logarithm of time per item) between two runs of a job
LEAST_SPREAD, MOST_SPREAD = 0.04, 0.5
YOUNG_BLOCKS = 3  # with fewer blocks, slow work cannot be distinguished from a warm-up
YOUNG_DOUBT = 1.0
CURVE_GROWTH = 0.3
CURVE_POINTS = 40
MOST_POINTS = 100
MOST_PAUSES = 48
# Bounds on paces, spreads, times and counts; others would overflow in later calculations.
LEAST_NUMBER, MOST_NUMBER = 1e-12, 1e15
SAME_LENGTH = 0.02  # runs whose totals differ by at most this are alike from start to end
DISAGREEMENT = 2.5  # a prior this many standard deviations from the observations does not apply


class PriorPause(NamedTuple):
    """A kind of pause of earlier runs."""

    name: str | None
    seconds: float
    period: float  # items between two of them


@dataclass(slots=True)
class WorkCurve:
    """Work over the count, saved for the next run: dense points at the start, then evenly spaced ones."""

    points: list[tuple[float, float]] = field(default_factory=list)
    next_due: float = 0.0  # count at which the next point is due

    def add(self, done: float, seconds: float, total: float | None) -> None:
        """Add a point."""
        self.points.append(curve_point(done, seconds))
        apart = CURVE_GROWTH * (done - self.points[0][0])
        if total is not None:
            apart = min(apart, total / CURVE_POINTS)
        self.next_due = done + apart if len(self.points) < MOST_POINTS else math.inf

    def points_until(self, done: float, seconds: float) -> tuple[tuple[float, float], ...]:
        """All points up to the end of the run; empty if the run was interrupted."""
        if not self.points:
            return ()
        # Rounded like the earlier points, the end is never below them.
        return (*(point for point in self.points if point[0] < done), curve_point(done, seconds))


def curve_point(done: float, seconds: float) -> tuple[float, float]:
    """A point of a curve, with seconds in seven digits, enough for a forecast."""
    return done, float(f"{seconds:.7g}")


class RunPrior(NamedTuple):
    """One or more earlier runs."""

    pace: float  # seconds per item after the warm-up, without pauses
    spread: float  # standard deviation of its logarithm between runs
    warm_up_seconds: float  # additional time for the first items
    gap: float  # usual seconds between lines
    pauses: tuple[PriorPause, ...]
    items: float  # length of the run
    seconds: float
    # Items done and seconds of work so far, from start to end; empty if the run was interrupted.
    curve: tuple[tuple[float, float], ...] = ()
    runs: int = 1
    unit: str | None = None  # unit of the items; None if unknown

    def work_between(self, start: float, done: float) -> float:
        """Seconds of work from one count to another."""
        return self._work_until(done) - self._work_until(start)

    def _work_until(self, done: float) -> float:
        if not self.curve:
            return self.pace * done
        index = bisect.bisect_right(self.curve, (done, math.inf))
        if index in (0, len(self.curve)):  # before a resumed run began, or after its end
            end_done, seconds = self.curve[-1 if index else 0]
            return seconds + self.pace * (done - end_done)
        last_done, seconds = self.curve[index - 1]
        next_done, next_seconds = self.curve[index]
        return seconds + (next_seconds - seconds) * (done - last_done) / (next_done - last_done)

    def work_left(self, done: float, total: float) -> float:
        """Seconds of work left: as in the earlier run if the totals agree, else by its pace."""
        if abs(total - self.items) <= SAME_LENGTH * self.items:
            return max(self.work_between(done, total), 0.01 * self.pace * (total - done))
        return self.pace * (total - done)

    def to_json(self) -> dict[str, records.JsonValue]:
        """The prior as JSON; its pauses and points are lists."""
        pauses = [list(pause) for pause in self.pauses]
        return {**self._asdict(), "pauses": pauses, "curve": [list(point) for point in self.curve]}

    @classmethod
    def from_json(cls, value: object) -> "RunPrior":
        """Read from JSON; ValueError if malformed or impossible."""
        prior = records.from_json(cls, value, "prior")
        if (fault := prior.problem()) is not None:
            raise ValueError(f"not a prior: {fault}")
        return prior

    def problem(self) -> str | None:
        """Why the values are impossible, in words; None if they are usable."""
        if not all(LEAST_NUMBER <= number <= MOST_NUMBER for number in (self.pace, self.spread)):
            return "its pace and spread must be above 0 and finite"
        if not 1 <= self.runs <= MOST_NUMBER:
            return "it must come from at least one run"
        if len(self.pauses) > MOST_PAUSES or len(self.curve) > MOST_POINTS + 1:  # including the end
            return "it has too many pauses or points"
        numbers = [self.warm_up_seconds, self.gap, self.items, self.seconds]
        numbers += [number for pause in self.pauses for number in (pause.seconds, pause.period)]
        numbers += [number for point in self.curve for number in point]
        if not all(0 <= number <= MOST_NUMBER for number in numbers):
            return "its numbers must be finite and not negative"
        if any(pause.period < 1 for pause in self.pauses):
            return "its pauses must be at least one item apart"
        if any(not (a[0] < b[0] and a[1] <= b[1]) for a, b in pairwise(self.curve)):
            return "its curve must rise"
        return None

    def combined_with(self, earlier: "RunPrior | None") -> "RunPrior":
        """Combine with earlier runs: this run's pace, and the spread between all runs."""
        if earlier is None:
            return self
        difference = math.log(self.pace / earlier.pace)
        runs = earlier.runs + 1
        variance = (earlier.runs * earlier.spread**2 + difference**2) / runs
        spread = min(MOST_SPREAD, max(LEAST_SPREAD, math.sqrt(variance)))
        return self._replace(spread=spread, runs=runs)


class PriorWeight(NamedTuple):
    """Weight of a prior relative to the run's own evidence."""

    weight: float  # of the prior, 0 to 1
    doubt: float  # standard deviation of the logarithm of the combined ETA
    scale: float  # expected duration relative to the earlier run


def prior_weight(prior: RunPrior, ratio: float, measured: float, doubt: float, blocks: int) -> PriorWeight:
    """Weight a prior against the run's own forecast with this ``doubt``, by precision.

    So far the run took ``ratio`` times as long as the earlier one, with the uncertainty ``measured``. A prior that
    contradicts this has no weight, however precise it is.
    """
    young = blocks < YOUNG_BLOCKS
    measured = YOUNG_DOUBT if young else measured
    own = max(doubt, YOUNG_DOUBT) if young else doubt
    z = math.log(ratio) / (DISAGREEMENT * math.hypot(prior.spread, measured))
    trust = 1 / (1 + min(z * z, 1e6) ** 4)
    precision, own_precision = trust / prior.spread**2, 1 / own**2
    share = prior.spread**2 / (prior.spread**2 + measured**2)
    return PriorWeight(
        precision / (precision + own_precision), math.sqrt(1 / (precision + own_precision)), ratio**share
    )
