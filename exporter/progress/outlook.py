"""Outlook of a job: whether it finishes before its time limit, and what it has saved by then."""

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from exporter.contract.status import EtaEstimate

Z_OF_QUANTILE = 1.2815515655446004  # standard normal deviate of the quantile 0.9; that of 0.1 is its negative
LEAST_SPREAD, MOST_SPREAD = 0.01, 3.0  # bounds on the standard deviation of the logarithm of the ETA
LEAST_TIME_S = 1e-3  # shorter times count as this
LEAST_PROBABILITY = 1e-6  # unfinished work is neither certain nor impossible
LEAST_CHECKPOINTS = 3
MOST_OVERDUE = 0.5  # a checkpoint later than this part of the interval breaks the rhythm: the next one is unknown


def time_limit_met_probability(now: float, deadline: float | None, eta: EtaEstimate | None) -> float | None:
    """Probability that the work is complete by the deadline; None without a deadline or an estimate.

    It is 1 for complete work. The ETA has a log-normal distribution through the three quantiles of the estimate, with
    its own spread on each side of the median. While work is left, the result is strictly between 0 and 1.
    """
    if deadline is None or eta is None:
        return None
    if eta.seconds <= 0 and eta.high <= 0:
        return 1.0
    left = deadline - now
    if left <= LEAST_TIME_S:
        return LEAST_PROBABILITY
    middle = max(eta.seconds, LEAST_TIME_S)
    beyond = eta.high if left > middle else eta.low
    spread = abs(math.log(max(beyond, LEAST_TIME_S) / middle)) / Z_OF_QUANTILE
    deviate = math.log(left / middle) / min(MOST_SPREAD, max(LEAST_SPREAD, spread))
    return min(1 - LEAST_PROBABILITY, max(LEAST_PROBABILITY, 0.5 * math.erfc(-deviate / math.sqrt(2))))


def next_checkpoint(
    starts: Sequence[float], durations: Sequence[float], now: float, interval_s: float | None = None
) -> float | None:
    """Time at which the next checkpoint should be complete; None if the rhythm is unknown or broken.

    ``starts`` has the start times of the last checkpoints, in order, and ``durations`` their seconds. Without
    ``interval_s``, the interval is the median between at least three checkpoints.
    """
    if not starts:
        return None
    if interval_s is None:
        if len(starts) < LEAST_CHECKPOINTS:
            return None
        interval_s = statistics.median(after - before for before, after in itertools.pairwise(starts))
    if interval_s <= 0 or now - starts[-1] > (1 + MOST_OVERDUE) * interval_s:
        return None
    return max(now, starts[-1] + interval_s) + (statistics.median(durations) if durations else 0.0)


STEP_S = 2.0  # clock differences and log buffers hide the order of stops closer than twice this
LEAST_WORKERS = 3  # with two, the median does not show which one lags


class WorkerPosition(NamedTuple):
    rank: int
    done: float
    total: float | None
    kind: str  # group of comparable workers, such as the same role and unit


def lags(workers: Sequence[WorkerPosition]) -> dict[int, float]:
    """Lag of each worker behind the median of its kind, as a share from 0 (level or ahead) to 1.

    It compares the completed share of each worker's total, or the positions if no total is known. Workers without a
    known lag are omitted: fewer than three of a kind, or a median of 0.
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
    """Rank of the stalled worker that stopped first: in a hanging collective, the others wait for it.

    None if no worker is stalled or only one worker's progress is known, as when only rank 0 writes. None also if
    another stopped within two usual gaps between records (``gap_s``).
    """
    stops = sorted((last_rises[rank], rank) for rank in stalled if rank in last_rises)
    if not stops or len(last_rises) < 2:
        return None
    if len(stops) > 1 and stops[1][0] - stops[0][0] <= 2 * gap_s:
        return None
    return stops[0][1]
