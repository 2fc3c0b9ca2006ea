"""The tail of a batch of requests: the server runs many at a time, and at the end ever fewer."""

import math
from dataclasses import dataclass

AGREEMENT = 0.3
"""Items left and requests running or waiting are the same thing when they differ by no more (of the logarithm)."""
TAIL_SD = 0.5  # standard deviation of the logarithm of a tail's length: requests differ much


@dataclass(slots=True)
class BatchTail:
    """What a server's counts of running and waiting requests tell about the end of the work."""

    parallel: float = 0.0  # most requests that ran at a time
    agrees: bool = False  # whether the items that are counted are these requests
    pace: float = 0.0  # seconds per item while the server was full

    def look(self, running: float, waiting: float, left: float, pace: float | None) -> None:
        """So many requests run and wait while so many items are left, at this pace."""
        self.parallel = max(self.parallel, running)
        if left > 0 and running > 0 and (waiting > 0 or running < 0.9 * self.parallel):
            self.agrees = abs(math.log(left / (running + waiting))) < AGREEMENT
        if pace and (left >= self.parallel or not self.pace):
            self.pace = pace

    def begun(self, left: float) -> bool:
        """Whether fewer items are left than have run at a time: from now on the rate falls."""
        return self.agrees and self.pace > 0 and left < self.parallel

    def length(self, left: float) -> float:
        """Seconds until the last of the items that run at a time is done, when so many are left in all.

        Where requests end at random, the k-th last takes 1/k of the time that one takes: the harmonic sum.
        """
        count = min(left, self.parallel)
        return self.pace * self.parallel * (math.log(max(1.0, count)) + 0.577 + 0.5 / max(1.0, count))

    def work(self, left: float, forecast: float) -> tuple[float, float]:
        """Seconds of work left and the part of them that is the tail, where steady work would take ``forecast``."""
        if not self.agrees or self.pace <= 0:
            return forecast, 0.0
        tail = self.length(left)
        return forecast * max(0.0, left - self.parallel) / left + tail, tail

    def wait(self, left: float) -> float:
        """Seconds to be expected from one end to the next; 0 before the tail."""
        return self.pace * self.parallel / max(1.0, left) if self.begun(left) else 0.0
