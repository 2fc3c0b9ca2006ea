"""The tail of a batch of requests, when fewer and fewer run in parallel."""

import math

from exporter.contract.lazy_dataclass import dataclass

AGREEMENT = 0.3  # largest difference (of the logarithm) at which items left and requests of the server are the same
PARALLEL_SD = 0.5  # items of which the time (its logarithm) varies more may be requests that run in parallel
USUAL_PARALLEL = 32  # so many then, if no server says how many
TAIL_SD = 0.5  # standard deviation of the logarithm of a tail's length: requests differ much


@dataclass(slots=True)
class BatchTail:
    """Forecast of the end of the work from a server's running and waiting requests."""

    most_parallel: float = 0.0  # most requests that ran in parallel
    counts_requests: bool = False  # whether the counted items are these requests
    seconds_per_item: float = 0.0  # seconds per item while the server was full

    def update(self, running: float, waiting: float, left: float, seconds_per_item: float | None) -> None:
        """Take the server's counts, with ``left`` items left at this time per item."""
        self.most_parallel = max(self.most_parallel, running)
        if left > 0 and running > 0 and (waiting > 0 or running < 0.9 * self.most_parallel):
            self.counts_requests = abs(math.log(left / (running + waiting))) < AGREEMENT
        if seconds_per_item and (left >= self.most_parallel or not self.seconds_per_item):
            self.seconds_per_item = seconds_per_item

    def has_begun(self, left: float) -> bool:
        """Whether fewer items are left than ran in parallel, so that the rate falls."""
        return self.counts_requests and self.seconds_per_item > 0 and left < self.most_parallel

    def length(self, left: float) -> float:
        """Seconds until the last of the parallel items is complete, with ``left`` items left in all.

        If requests end at random, the k-th last takes 1/k of the time that one takes: the harmonic sum.
        """
        count = min(left, self.most_parallel)
        return self.seconds_per_item * self.most_parallel * (math.log(max(1.0, count)) + 0.577 + 0.5 / max(1.0, count))

    def work(self, left: float, forecast: float) -> tuple[float, float]:
        """Seconds of work left, and the tail's part of it; ``forecast`` is the value for steady work."""
        if not self.counts_requests or self.seconds_per_item <= 0:
            return forecast, 0.0
        tail = self.length(left)
        return forecast * max(0.0, left - self.most_parallel) / left + tail, tail

    def wait(self, left: float) -> float:
        """Expected seconds between two ends; 0 before the tail."""
        return self.seconds_per_item * self.most_parallel / max(1.0, left) if self.has_begun(left) else 0.0


def possible_tail_wait(left: float, seconds_per_item: float, sd: float) -> float:
    """Expected seconds between two ends of the last items, if they may be requests in parallel; else 0.

    No server says so, but their times differ as much as those of requests (``sd``).
    """
    if sd <= PARALLEL_SD or left >= USUAL_PARALLEL:
        return 0.0
    return seconds_per_item * USUAL_PARALLEL / max(1.0, left)
