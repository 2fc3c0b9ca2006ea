"""Whether a job ends before its time limit does, and what it has saved by then."""

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from exporter.progress.eta import EtaEstimate

Z_OF_QUANTILE = 1.2815515655446004  # standard normal deviate of the quantiles 0.1 (below the middle) and 0.9 (above it)
LEAST_SPREAD, MOST_SPREAD = 0.01, 3.0
"""Standard deviation of the logarithm of the time left: no estimate is surer, or tells less, than these."""
LEAST_S = 1e-3  # times shorter than this are as good as none
SUREST = 1e-6  # what has not ended yet is neither certain nor impossible
SAVES_TO_LEARN_FROM = 3
OVERDUE_MOST = 0.5
"""A checkpoint that is later than this part of the interval: the rhythm is broken, and the next one unknown."""


def time_limit_met_probability(now: float, deadline: float | None, eta: EtaEstimate | None) -> float | None:
    """Probability that the work is done by the deadline, and 1 once it is; None without a deadline or an estimate.

    The time left has a log-normal distribution through the three quantiles of the estimate, with a spread of its own
    on each side of the middle. Between 0 and 1, exclusive, as long as work is left.
    """
    if deadline is None or eta is None:
        return None
    if eta.seconds <= 0 and eta.high <= 0:
        return 1.0
    left = deadline - now
    if left <= LEAST_S:
        return SUREST
    middle = max(eta.seconds, LEAST_S)
    beyond = eta.high if left > middle else eta.low
    spread = abs(math.log(max(beyond, LEAST_S) / middle)) / Z_OF_QUANTILE
    deviate = math.log(left / middle) / min(MOST_SPREAD, max(LEAST_SPREAD, spread))
    return min(1 - SUREST, max(SUREST, 0.5 * math.erfc(-deviate / math.sqrt(2))))


def next_checkpoint(
    begun: Sequence[float], durations: Sequence[float], now: float, interval_s: float | None = None
) -> float | None:
    """Moment at which the next checkpoint should be whole; None when the rhythm is unknown or broken.

    ``begun`` are the moments at which the last ones began, in order, ``durations`` the seconds that they took. The
    interval is the median of those seen, of three checkpoints at least, unless it is given.
    """
    if not begun:
        return None
    if interval_s is None:
        if len(begun) < SAVES_TO_LEARN_FROM:
            return None
        interval_s = statistics.median(after - before for before, after in itertools.pairwise(begun))
    if interval_s <= 0 or now - begun[-1] > (1 + OVERDUE_MOST) * interval_s:
        return None
    return max(now, begun[-1] + interval_s) + (statistics.median(durations) if durations else 0.0)


def checkpoint_meets_deadline(deadline: float | None, moment: float | None) -> bool | None:
    """Whether a checkpoint due at that moment is whole before the deadline; None when either is unknown."""
    return None if deadline is None or moment is None else moment <= deadline


LEAST_WORKERS = 3  # of two, neither is the one out of line


class WorkerPosition(NamedTuple):
    """How far one worker is."""

    rank: int
    done: float
    total: float | None
    kind: str  # workers of one kind, such as a role and a unit, do alike work and can be compared


def lags(workers: Sequence[WorkerPosition]) -> dict[int, float]:
    """By which part of it each worker lags behind the median of its kind: 0 for one that is level or ahead, 1 at most.

    Compared is the share done of the own total, or what is done where no total is known. Workers of which no lag is
    known are left out: fewer than three of the kind, or a median that has done nothing.
    """
    found: dict[int, float] = {}
    for kind in dict.fromkeys(worker.kind for worker in workers):
        alike = [worker for worker in workers if worker.kind == kind]
        shares = {worker.rank: worker.done / worker.total for worker in alike if worker.total}
        if not shares and not any(worker.total == 0 for worker in alike):
            shares = {worker.rank: float(worker.done) for worker in alike}
        if len(shares) < LEAST_WORKERS:
            continue
        median = statistics.median(shares.values())
        if median > 0:
            found.update({rank: min(1.0, max(0.0, (median - share) / median)) for rank, share in shares.items()})
    return found


def first_to_stop(last_rises: Mapping[int, float], stalled: Collection[int], gap_s: float) -> int | None:
    """Rank of the stalled worker whose progress ended first: in a collective that hangs, the one the others wait for.

    None when that is unclear: when none is stalled, another stopped within two usual gaps between records (``gap_s``)
    of it, or no other worker's progress is known, as when rank 0 alone writes.
    """
    stops = sorted((last_rises[rank], rank) for rank in stalled if rank in last_rises)
    if not stops or len(last_rises) < 2:
        return None
    if len(stops) > 1 and stops[1][0] - stops[0][0] <= 2 * gap_s:
        return None
    return stops[0][1]
