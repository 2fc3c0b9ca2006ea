"""A job of several workers: it ends with its slowest, and the young learn from the others."""

import statistics
from collections.abc import Iterable

from exporter.derive.eta.interval import Estimate

PEERS = 3
"""Workers from which on a middle one says something."""
GROWN_UP = 8
"""Blocks after which a worker is judged by itself alone."""
LEANING = 0.8


def slowest(estimates: Iterable[Estimate | None]) -> Estimate | None:
    """Seconds left of a job whose unfinished workers have these; None when none of them is known.

    The largest of each: the job can end neither earlier than its slowest worker nor earlier than the low end of any.
    """
    known = [estimate for estimate in estimates if estimate is not None]
    if not known:
        return None
    seconds, lows, highs = zip(*known, strict=True)
    return Estimate(max(seconds), max(lows), max(highs))


def peer_pace(paces: Iterable[float | None]) -> float | None:
    """Seconds per item of the middle worker; None with fewer than three that have one."""
    known = [pace for pace in paces if pace]
    return statistics.median(known) if len(known) >= PEERS else None


def leaning(own: float, peers: float | None, blocks: int) -> float:
    """Factor by which a young worker's time per item is moved towards that of its peers."""
    if peers is None or blocks >= GROWN_UP or own <= 0 or peers <= 0:
        return 1.0
    factor: float = (peers / own) ** (LEANING * (1 - blocks / GROWN_UP))
    return factor
