"""Time budget of searches whose cost is not bounded by their expression, and the patterns that exceed it."""

import re
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from exporter.logs.patterns import Pattern

RECORD_TIMEOUT_S = 0.1
READ_TIMEOUT_S = 0.5  # time for one pattern's unbounded searches in one read
# In this window all such searches together, in all logs, may take `READ_TIMEOUT_S`; time is recorded in slots
WINDOW_S, SLOT_S = 5.0, 0.1
MOST_TIMEOUTS = 20  # timeouts of a pattern before it is dropped


class TimedRegex(Protocol):
    """An expression of the module ``regex``."""

    def search(self, text: bytes, *, timeout: float, concurrent: bool) -> re.Match[bytes] | None:
        """Search a record. Raises TimeoutError after ``timeout`` seconds."""


class TimeBudget:
    """Records the time of slow searches; ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._timeouts: Counter[Pattern] = Counter()
        self._spent: deque[tuple[float, float]] = deque()  # start and duration of possibly slow searches, by time slot
        self._compiled: dict[str, TimedRegex | None] = {}

    def compile_with_timeout(self, pattern: Pattern) -> TimedRegex | None:
        """Return the expression compiled for searches with a timeout; None if that fails."""
        key = f"{pattern.regex.flags} {pattern.regex.pattern!r}"
        if key not in self._compiled:
            import regex  # type: ignore[import-untyped]  # lazy: costs memory, and few logs need it

            flags = pattern.regex.flags & (re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE)
            try:
                self._compiled[key] = regex.compile(pattern.regex.pattern, int(flags) | regex.VERSION0)
            except regex.error:
                self._compiled[key] = None
        return self._compiled[key]

    def now(self) -> float:
        return 0.0 if self._clock is None else self._clock()

    def has_time(self, now: float) -> bool:
        """Whether slow searches have time left; always without a clock."""
        while self._spent and self._spent[0][0] <= now - WINDOW_S:
            self._spent.popleft()
        return sum(taken for _, taken in self._spent) < READ_TIMEOUT_S

    def add(self, now: float, duration_s: float) -> None:
        """Record the duration of a search that just ended."""
        if self._clock is None:
            return
        if self._spent and now - self._spent[-1][0] < SLOT_S:
            begun, before = self._spent.pop()
            self._spent.append((begun, before + duration_s))
        else:
            self._spent.append((now, duration_s))

    def record_timeout(self, pattern: Pattern) -> bool:
        """Note that a search of a pattern timed out. Return whether the pattern has just reached its limit."""
        self._timeouts[pattern] += 1
        return self._timeouts[pattern] == MOST_TIMEOUTS
