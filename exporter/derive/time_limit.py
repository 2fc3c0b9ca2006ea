"""Whether a job ends before its time limit does, and what it has saved by then."""

import itertools
import math
import statistics
from collections.abc import Sequence

from exporter.derive.eta import Estimate

Z_OF_QUANTILE = 1.2815515655446004
"""Standard normal deviate of the quantiles 0.1 (below the middle) and 0.9 (above it)."""
LEAST_SPREAD, MOST_SPREAD = 0.01, 3.0
"""Standard deviation of the logarithm of the time left: no estimate is surer, or tells less, than these."""
LEAST_S = 1e-3
"""Times shorter than this are as good as none."""
SUREST = 1e-6
"""What has not ended yet is neither certain nor impossible."""
SAVES_TO_LEARN_FROM = 3
OVERDUE_MOST = 0.5
"""A checkpoint that is later than this part of the interval: the rhythm is broken, and the next one unknown."""


def met_probability(now: float, deadline: float | None, eta: Estimate | None) -> float | None:
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


def checkpoint_before(deadline: float | None, moment: float | None) -> bool | None:
    """Whether a checkpoint due at that moment is whole before the deadline; None when either is unknown."""
    return None if deadline is None or moment is None else moment <= deadline
