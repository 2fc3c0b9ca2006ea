"""Which worker holds the others back: the one that lags, and the one that stopped first."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

LEAST_WORKERS = 3
"""Of two, neither is the one out of line."""


class Standing(NamedTuple):
    """How far one worker is."""

    rank: int
    done: float
    total: float | None
    kind: str
    """Workers of one kind, such as a role and a unit, do alike work and can be compared."""


def lags(workers: Sequence[Standing]) -> dict[int, float]:
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
