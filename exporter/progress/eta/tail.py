"""The tail of a batch of requests, when fewer and fewer run in parallel."""

import math

from exporter.contract.lazy_dataclass import dataclass

AGREEMENT = 0.3  # largest difference (of the logarithm) at which items left and requests of the server are the same
PARALLEL_SD = 0.5  # items of which the time (its logarithm) varies more may be requests that run in parallel
USUAL_PARALLEL = 32  # at most so many then, if no server says how many
GUESSED_PARALLEL = 16.0  # as many as likely, between 8 and 32
TAIL_SD, GUESSED_TAIL_SD = 0.5, 0.8  # standard deviation of the logarithm of a tail's length: requests differ much
# Ends of independent requests are a Poisson process: the logarithm of a gap then has the deviation 1.28 and the
# skewness -1.14. Items of different lengths, one after the other, have no negative skewness.
LEAST_ENDS_SD, MOST_ENDS_SD = 0.9, 1.5
ENDS_SKEWNESS, SKEWNESS_ERRORS = -0.35, 2.0
LEAST_ENDS = 40


@dataclass(slots=True)
class GapMoments:
    """Moments of the logarithm of the seconds per item between lines."""

    count: int = 0
    first: float = 0.0
    second: float = 0.0
    third: float = 0.0

    def add(self, log_seconds_per_item: float) -> None:
        """Take a line."""
        square = log_seconds_per_item * log_seconds_per_item
        self.count += 1
        self.first += log_seconds_per_item
        self.second += square
        self.third += square * log_seconds_per_item

    def are_parallel(self) -> bool:
        """Whether lines come like the ends of requests that run in parallel."""
        if self.count < LEAST_ENDS:
            return False
        mean, square = self.first / self.count, self.second / self.count
        variance = square - mean * mean
        if not LEAST_ENDS_SD**2 < variance < MOST_ENDS_SD**2:
            return False
        skewness: float = (self.third / self.count - 3 * mean * square + 2 * mean**3) / variance**1.5
        return skewness < min(ENDS_SKEWNESS, -SKEWNESS_ERRORS * math.sqrt(6 / self.count))


@dataclass(slots=True)
class BatchTail:
    """Forecast of the end of the work from a server's running and waiting requests, or from the rhythm of lines."""

    most_parallel: float = 0.0  # most requests that ran in parallel
    counts_requests: bool = False  # whether the counted items are these requests
    seconds_per_item: float = 0.0  # seconds per item while the server was full
    is_told: bool = False  # whether a server said so

    def update(self, running: float, waiting: float, left: float, seconds_per_item: float | None) -> None:
        """Take the server's counts, with ``left`` items left at this time per item."""
        self.most_parallel = max(self.most_parallel, running) if self.is_told else running
        self.is_told = True
        if left > 0 and running > 0 and (waiting > 0 or running < 0.9 * self.most_parallel):
            self.counts_requests = abs(math.log(left / (running + waiting))) < AGREEMENT
        self._note_speed(left, seconds_per_item)

    def guess(self, parallel: bool, left: float, seconds_per_item: float) -> None:
        """Guess, from the rhythm of the lines, that the items run in parallel; a server knows better."""
        if not self.is_told and left > GUESSED_PARALLEL:
            self.counts_requests, self.most_parallel = parallel, GUESSED_PARALLEL
            self._note_speed(left, seconds_per_item)

    def _note_speed(self, left: float, seconds_per_item: float | None) -> None:
        if seconds_per_item and (left >= self.most_parallel or not self.seconds_per_item):
            self.seconds_per_item = seconds_per_item

    @property
    def sd(self) -> float:
        """Standard deviation of the logarithm of a tail's length."""
        return TAIL_SD if self.is_told else GUESSED_TAIL_SD

    def has_begun(self, left: float) -> bool:
        """Whether fewer items are left than ran in parallel, so that the rate falls."""
        return self.is_told and self.counts_requests and self.seconds_per_item > 0 and left < self.most_parallel

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
