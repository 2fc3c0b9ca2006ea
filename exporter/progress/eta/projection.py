"""Projection from the last line to now: only the time since that line changes."""

from typing import NamedTuple

from exporter.contract.status import EtaEstimate
from exporter.progress.eta.interval import with_interval

RATE_S = 60.0
RATE_SILENCES = 8.0
RATE_PAUSES = 1.7  # the rate is unknown after the longest of these: seconds, usual silences, largest pauses
QUIET = 2.0  # after this many usual silences, time without a line counts in the average rate

STALL_TIMEOUT_S = 300.0
YOUNG_STALL_S = 1800.0  # stall limit while only a few lines have come
FIRST_STALL_S = 7200.0  # stall limit while only one has come and the interval is unknown
FIRST_WAITS = 2.0  # the same, in multiples of the time until that one: the first items may take hours each
LONGEST_WAIT = 6.0  # how many times as long as usual a request may take in the tail of a batch
NAMED_STALL_S = 3600.0  # limit of the first pause of a name that the log announced
BREAK_SHARE = 0.06  # part of the run so far that a break, such as a restart after a crash, may take
LONGEST_BREAK_S = 3600.0  # the most of it: in a run of days, hours without work are a stall
FIRST_PAUSE_SHARE = 0.4  # longest first pause relative to the work before it, such as an evaluation after an epoch


class EtaForecast(NamedTuple):
    """Seconds left at the last line, and how they pass."""

    seconds: float
    least_seconds: float  # the countdown stops here
    credit: float  # seconds without a line during which work continues
    width: float  # of the interval, for with_interval()

    def after(self, silence_s: float) -> EtaEstimate:
        """Estimate ``silence_s`` seconds after the last line.

        It counts down until the next line is overdue. Then it grows by half the overdue time: an unknown pause lasts
        about as long again.
        """
        overdue = max(0.0, silence_s - self.credit)
        seconds = max(self.seconds - min(silence_s, self.credit), self.least_seconds) + 0.5 * overdue
        return with_interval(seconds, self.width, overdue)


class StallLimit(NamedTuple):
    """Silence after which work has stalled, in addition to the timeout."""

    idle_s: float  # while the GPUs are known to be idle
    usual_s: float  # otherwise
    # The same while the rhythm or the pauses of the work are unknown; a shorter timeout than the default shortens it.
    unknown_s: float = 0.0
    named_s: float = 0.0  # limit of the current named pause; 0 without one
    named_after_s: float = 0.0  # from the last line to the start of that pause

    def limit(self, stall_timeout_s: float, busy: bool | None) -> float:
        """Seconds without progress after which work has stalled."""
        unknown = self.unknown_s * min(1.0, stall_timeout_s / STALL_TIMEOUT_S)
        limit = max(stall_timeout_s, self.idle_s if busy is False else max(self.usual_s, unknown))
        if busy:
            limit *= 3
        if self.named_s:
            limit = max(limit, self.named_s) + self.named_after_s
        return limit


def usual_stall_limit(
    rises: int,
    silence: float,
    longest_step_s: float,
    largest_pause_s: float,
    tail_wait_s: float,
    elapsed_s: float,
    first_pause: float,
    first_wait_s: float = 0.0,
) -> StallLimit:
    """Limits of silence without a named pause, at a line ``elapsed_s`` seconds after the worker's first.

    ``rises``: lines with progress. ``silence``: usual seconds between two of them. ``first_pause``: part of the work so
    far after which a pause may come here for the first time, 0 if none may. ``first_wait_s``: from the start of the
    worker to its first line.
    """
    tail = LONGEST_WAIT * tail_wait_s
    idle = max(4 * silence, 1.3 * largest_pause_s, tail)
    if rises < 4:
        unknown = max(FIRST_STALL_S, FIRST_WAITS * first_wait_s) if rises < 2 else YOUNG_STALL_S
        return StallLimit(idle, max(8 * silence, tail), unknown)
    away = min(LONGEST_BREAK_S, BREAK_SHARE * elapsed_s)
    usual = max(8 * silence, longest_step_s, 1.7 * largest_pause_s, away, tail)
    return StallLimit(idle, usual, min(NAMED_STALL_S, FIRST_PAUSE_SHARE * first_pause * elapsed_s))


class EtaOutlook(NamedTuple):
    """State of the work at the last line, and the meaning of silence."""

    unfinished: bool
    stall_limit: StallLimit
    # Current seconds per item relative to the fastest earlier speed; None without an earlier one.
    slowdown: float | None
    rate: float | None  # recent items per second of work
    rate_valid_s: float  # seconds after the last line until which the rate is valid
    items: float  # since the first line
    elapsed: float  # from the first to the last line
    quiet_s: float  # seconds without a line that do not count in the average

    def is_stalled(self, silence_s: float, stall_timeout_s: float, busy: bool | None) -> bool:
        """Whether work has stalled, ``silence_s`` seconds after the last line."""
        return self.unfinished and silence_s > self.stall_limit.limit(stall_timeout_s, busy)

    def rate_after(self, silence_s: float) -> float | None:
        """Recent items per second; None if out of date."""
        return None if silence_s > self.rate_valid_s else self.rate

    def average_after(self, silence_s: float) -> float | None:
        """Items per second since the first line; None before two lines."""
        elapsed = self.elapsed + (silence_s if self.unfinished and silence_s > self.quiet_s else 0.0)
        return self.items / elapsed if self.items and elapsed > 0 else None
