"""Intervals of estimates."""

import math
from collections.abc import Iterable

from exporter.contract.status import EtaEstimate

INTERVAL_DEVIATIONS = 0.85  # standard deviations on each side that contain the true value four times in five
FUTURE_ERROR_FACTOR = 1.2  # future errors exceed past ones by this factor
LEAST_DEVIATION = 0.02


def start_doubt(blocks: int) -> float:
    """Doubt about the speed of a run that has just started."""
    return 0.25 / (1 + blocks / 4)


def drift_doubt(overall: float, recent: float) -> float:
    """Doubt about a pace that has drifted from the mean of the whole run: it may drift as far again."""
    return abs(math.log(recent / overall)) if min(recent, overall) > 0 else 0.0


def log_deviation(error: float, sd: float, steps_left: float, blocks: int, start: float) -> float:
    """Standard deviation of the logarithm of the seconds left.

    ``error`` is that of earlier estimates. ``sd`` is that of a block's time per item, from ``blocks`` blocks. ``start``
    is the doubt about the speed of a young run.
    """
    chance = math.expm1(sd * sd) * (1 / max(1.0, steps_left) + 1 / max(1, blocks))
    return math.sqrt((FUTURE_ERROR_FACTOR * error) ** 2 + chance + LEAST_DEVIATION**2 + start**2)


def half_width(sd: float) -> float:
    """Factor from the middle estimate to the ends of its interval, if its logarithm has this deviation."""
    return math.exp(min(50.0, INTERVAL_DEVIATIONS * sd))


def with_interval(seconds: float, width: float, overdue: float) -> EtaEstimate:
    """The estimate with an interval of this half_width(); an overdue line moves only the upper end."""
    return EtaEstimate(seconds, seconds / width, seconds * width + 2 * overdue)


def confidence(estimate: EtaEstimate, blocks: int, stalled: bool) -> str:
    """high, medium or low, by the width of the interval and the number of blocks."""
    width = (estimate.high - estimate.low) / estimate.seconds if estimate.seconds > 0 else 0.0
    if stalled or blocks < 3 or width > 0.6:
        return "low"
    return "high" if width <= 0.2 and blocks >= 8 else "medium"


LEAST_PEERS = 3  # workers needed for a useful median
MATURE_BLOCKS = 8  # blocks after which a worker's own pace suffices
PEER_WEIGHT = 0.8


def slowest_eta(estimates: Iterable[EtaEstimate | None]) -> EtaEstimate | None:
    """Seconds left of a job, from its unfinished workers; None if none is known.

    The largest of each value: the job ends neither before its slowest worker nor before the low end of any.
    """
    known = [estimate for estimate in estimates if estimate is not None]
    if not known:
        return None
    seconds, lows, highs = zip(*known, strict=True)
    return EtaEstimate(max(seconds), max(lows), max(highs))


def median_seconds_per_item(values: Iterable[float | None]) -> float | None:
    """Median seconds per item; None with fewer than three known values."""
    import statistics  # lazy: 5 ms of commands such as `gpujob ps`, which ask for no pace

    known = [pace for pace in values if pace]
    return statistics.median(known) if len(known) >= LEAST_PEERS else None


def peer_adjustment(own: float, peers: float | None, blocks: int) -> float:
    """Factor that moves a young worker's time per item towards that of its peers."""
    if peers is None or blocks >= MATURE_BLOCKS or own <= 0 or peers <= 0:
        return 1.0
    factor: float = (peers / own) ** (PEER_WEIGHT * (1 - blocks / MATURE_BLOCKS))
    return factor
