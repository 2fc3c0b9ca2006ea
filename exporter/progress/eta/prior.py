"""What earlier runs of the same job tell of this one before it can speak for itself."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

FIRST_SPREAD = 0.12  # usual difference (of the logarithm of time per item) between two runs of a job
LEAST_SPREAD, MOST_SPREAD = 0.04, 0.5
YOUNG_BLOCKS = 3  # with fewer blocks nobody can tell slow work from a warm-up
YOUNG_DOUBT = 1.0
CURVE_GROWTH = 0.3
CURVE_POINTS = 40
MOST_POINTS = 100
MOST_PAUSES = 48
LEAST_NUMBER, MOST_NUMBER = 1e-12, 1e15
"""Paces, spreads, times and counts beyond these are of no job, and would overflow in what is made of them."""
SAME_LENGTH = 0.02  # runs whose totals differ by no more than this are taken to be alike from beginning to end
DISAGREEMENT = 2.5  # a prior so many standard deviations from what is seen is about something else


class PriorPause(NamedTuple):
    """A kind of pause of the earlier runs."""

    name: str | None
    seconds: float
    period: float  # items from one to the next


@dataclass(slots=True)
class WorkCurve:
    """Work over the count, kept for the next run: close together at the beginning, then at even distances."""

    points: list[tuple[float, float]] = field(default_factory=list)
    next: float = 0.0  # items done at which the next point stands

    @classmethod
    def restored(cls, state: list[Any]) -> "WorkCurve":
        """The curve of which this is the state."""
        points, following = state
        return cls([(done, seconds) for done, seconds in points], following)

    def add(self, done: float, seconds: float, total: float | None) -> None:
        """Where the work stands."""
        self.points.append(curve_point(done, seconds))
        apart = CURVE_GROWTH * (done - self.points[0][0])
        if total is not None:
            apart = min(apart, total / CURVE_POINTS)
        self.next = done + apart if len(self.points) < MOST_POINTS else math.inf

    def until(self, done: float, seconds: float) -> tuple[tuple[float, float], ...]:
        """The points up to the end of the run, each count once; empty when the run was interrupted."""
        if not self.points:
            return ()
        # Rounded like those before it, the end never lies below them.
        return (*(point for point in self.points if point[0] < done), curve_point(done, seconds))


def curve_point(done: float, seconds: float) -> tuple[float, float]:
    """A point of a curve: its seconds to seven digits, which is all that a forecast needs."""
    return done, float(f"{seconds:.7g}")


class RunPrior(NamedTuple):
    """An earlier run, or several."""

    pace: float  # seconds per item once warm, without pauses
    spread: float  # standard deviation of its logarithm from run to run
    warm_up_seconds: float  # what the first items took beyond that
    gap: float  # usual seconds between lines
    pauses: tuple[PriorPause, ...]
    items: float  # length of the run
    seconds: float
    curve: tuple[tuple[float, float], ...] = ()
    """Items done and seconds of work so far, from the beginning to the end; empty when the run was interrupted."""
    runs: int = 1
    unit: str | None = None  # what the items are; None when it is not known

    def work(self, start: float, done: float) -> float:
        """Seconds of work from one count to another."""
        return self._until(done) - self._until(start)

    def _until(self, done: float) -> float:
        if not self.curve:
            return self.pace * done
        index = bisect.bisect_right(self.curve, (done, math.inf))
        if index == len(self.curve):
            last_done, seconds = self.curve[-1]
            return seconds + self.pace * (done - last_done)
        last_done, seconds = self.curve[index - 1] if index else (0.0, 0.0)
        next_done, next_seconds = self.curve[index]
        return seconds + (next_seconds - seconds) * (done - last_done) / (next_done - last_done)

    def left(self, done: float, total: float) -> float:
        """Seconds of work left: as the earlier run took from there, where this one is as long."""
        if abs(total - self.items) <= SAME_LENGTH * self.items:
            return max(self.work(done, total), 0.01 * self.pace * (total - done))
        return self.pace * (total - done)

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {
            **self._asdict(),
            "pauses": [list(pause) for pause in self.pauses],
            "curve": [list(point) for point in self.curve],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RunPrior":
        """The prior of which this is the JSON; ValueError when it is of no prior."""
        try:
            pauses = tuple(PriorPause(name, float(size), float(period)) for name, size, period in data["pauses"])
            numbers = {
                name: float(data[name]) for name in ("pace", "spread", "warm_up_seconds", "gap", "items", "seconds")
            }
            curve = tuple((float(done), float(seconds)) for done, seconds in data["curve"])
            prior = cls(pauses=pauses, curve=curve, runs=int(data["runs"]), unit=data.get("unit"), **numbers)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a prior: {error!r}") from error
        fault = prior.fault()
        if fault is not None:
            raise ValueError(f"not a prior: {fault}")
        return prior

    def fault(self) -> str | None:
        """What in it no run can have been like, in words; None when it can be used."""
        if not all(LEAST_NUMBER <= number <= MOST_NUMBER for number in (self.pace, self.spread)):
            return "its pace and spread must be above 0 and finite"
        if not 1 <= self.runs <= MOST_NUMBER:
            return "it must be of one run or more"
        if not all(name is None or isinstance(name, str) for name in (self.unit, *(p.name for p in self.pauses))):
            return "its unit and the names of its pauses must be text"
        if len(self.pauses) > MOST_PAUSES or len(self.curve) > MOST_POINTS + 1:  # the end is a point too
            return "it has more pauses or points than are kept of a run"
        numbers = [self.warm_up_seconds, self.gap, self.items, self.seconds]
        numbers += [number for pause in self.pauses for number in (pause.seconds, pause.period)]
        numbers += [number for point in self.curve for number in point]
        if not all(0 <= number <= MOST_NUMBER for number in numbers):
            return "its numbers must not be negative, and must be finite"
        if any(pause.period < 1 for pause in self.pauses):
            return "pauses come after at least one item"
        if any(not (a[0] < b[0] and a[1] <= b[1]) for a, b in pairwise(self.curve)):
            return "its curve must rise"
        return None

    def after(self, earlier: "RunPrior | None") -> "RunPrior":
        """This run together with those before it: its own pace, and the spread that they show."""
        if earlier is None:
            return self
        difference = math.log(self.pace / earlier.pace)
        runs = earlier.runs + 1
        variance = (earlier.runs * earlier.spread**2 + difference**2) / runs
        spread = min(MOST_SPREAD, max(LEAST_SPREAD, math.sqrt(variance)))
        return self._replace(spread=spread, runs=runs)


class PriorWeight(NamedTuple):
    """How far a prior counts beside the run's own evidence."""

    weight: float  # of the prior, 0 to 1
    doubt: float  # standard deviation of the logarithm of the time left, of both together
    scale: float  # how much longer than the earlier run this one is expected to take


def prior_weight(prior: RunPrior, ratio: float, measured: float, doubt: float, blocks: int) -> PriorWeight:
    """Weight of a prior beside a forecast of the run's own that has this ``doubt``: each by its precision.

    So far the run took ``ratio`` times as long as the earlier one, known to within ``measured``. A prior that
    this contradicts counts for nothing, however sure it is.
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
