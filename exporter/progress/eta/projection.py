"""What holds from one line to the next: all that is left to know is how long ago the last one was."""

from typing import NamedTuple

from exporter.progress.eta.interval import EtaEstimate, with_interval

RATE_S = 60.0
RATE_SILENCES = 8.0
RATE_PAUSES = 1.7
"""The rate is no longer said after so many seconds, usual silences, or largest pauses; the longest of them counts."""
QUIET = 2.0  # beyond so many usual silences the time without a line counts against the average rate

STALL_TIMEOUT_S = 300.0
YOUNG_STALL_S = 1800.0  # silence that means something while only a few lines have come ...
FIRST_STALL_S = 7200.0  # ... and while only one has, when nothing tells how often they come
LONGEST_WAIT = 6.0  # how many times as long as usual a request may take, in the tail of a batch
NAMED_STALL_S = 3600.0  # how long a pause may last that the log has named for the first time


class EtaForecast(NamedTuple):
    """Seconds left when the last line came, and how they pass."""

    seconds: float
    least: float  # they are not counted down below this
    credit: float  # seconds without a line in which work goes on
    width: float  # of the interval, as around() takes it

    def after(self, since: float) -> EtaEstimate:
        """Seconds left so many seconds after the last line.

        They are counted down. When a line is overdue they stand, and grow by half the time overdue: a pause that is
        not known lasts about as long again.
        """
        overdue = max(0.0, since - self.credit)
        seconds = max(self.seconds - min(since, self.credit), self.least) + 0.5 * overdue
        return with_interval(seconds, self.width, overdue)


class StallLimit(NamedTuple):
    """How long silence may last before work has stalled, beside the timeout."""

    idle_s: float  # while the GPUs are known to do nothing,
    usual_s: float  # and else
    named_s: float = 0.0  # how long the pause that goes on under its name may last; 0 when there is none,
    named_after_s: float = 0.0  # and how long after the last line it began

    def limit(self, stall_timeout_s: float, busy: bool | None) -> float:
        """Seconds without progress from which on work has stalled."""
        limit = max(stall_timeout_s, self.idle_s if busy is False else self.usual_s)
        if busy:
            limit *= 3
        if self.named_s:
            limit = max(limit, self.named_s) + self.named_after_s
        return limit


def usual_stall_limit(
    rises: int, silence: float, longest_step_s: float, largest_pause_s: float, tail_wait_s: float, at: float
) -> StallLimit:
    """What may pass without a line, ``at`` so many seconds after the first of the worker, no pause being named.

    ``rises``: lines that brought work. ``silence``: what usually passes between two of them.
    """
    tail = LONGEST_WAIT * tail_wait_s
    idle = max(4 * silence, 1.3 * largest_pause_s, tail)
    if rises < 4:
        return StallLimit(idle, max(FIRST_STALL_S if rises < 2 else YOUNG_STALL_S, 8 * silence, tail))
    return StallLimit(idle, max(8 * silence, longest_step_s, 1.7 * largest_pause_s, 0.04 * at, tail))


class EtaOutlook(NamedTuple):
    """How the work goes, and what silence would mean."""

    unfinished: bool
    patience: StallLimit
    slow: bool
    slowdown: float | None
    """Present seconds per item over those of the fastest earlier speed; None when there was no other."""
    rate: float | None  # items per second of work lately
    rate_until: float  # seconds after the last line until which that says something
    items: float  # since the first line,
    elapsed: float  # in so many seconds until the last one
    quiet: float  # seconds without a line that mean nothing for that

    def stalled(self, since: float, stall_timeout_s: float, busy: bool | None) -> bool:
        """Whether work has stalled, so many seconds after the last line."""
        return self.unfinished and since > self.patience.limit(stall_timeout_s, busy)

    def rate_after(self, since: float) -> float | None:
        """Items per second lately; None when the last of them is long past."""
        return None if since > self.rate_until else self.rate

    def average_after(self, since: float) -> float | None:
        """Items per second since the first line; None before two lines."""
        elapsed = self.elapsed + (since if self.unfinished and since > self.quiet else 0.0)
        return self.items / elapsed if self.items and elapsed > 0 else None
