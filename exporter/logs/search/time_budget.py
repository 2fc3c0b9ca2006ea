"""How long searches may take that are not bounded by the form of their expression, and which patterns lose it."""

import re
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from exporter.logs.patterns import Pattern

RECORD_TIMEOUT_S = 0.1
LOOK_TIMEOUT_S = 0.5  # time that one pattern may take in one look by searches that are not bounded by their form
WINDOW_S, SLOT_S = 5.0, 0.1
"""In so long all of them together, in whatever logs, may take ``LOOK_TIMEOUT_S``; that is kept account of by slots."""
MOST_GIVEN_UP = 20  # searches of a pattern that are given up before it is left out


class TimeBudget:
    """Keeps account of slow searches; ``clock`` gives seconds that only rise."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._given_up: Counter[Pattern] = Counter()
        self._taken: deque[tuple[float, float]] = deque()
        """When searches that may be slow were made, and how long they took, by slots of time."""
        self._careful: dict[str, Any] = {}

    def careful(self, pattern: Pattern) -> Any:
        """The same expression for a search that can be stopped, or None when there is no such."""
        key = f"{pattern.regex.flags} {pattern.regex.pattern!r}"
        if key not in self._careful:
            import regex  # type: ignore[import-untyped]  # lazy: costs memory, and few logs need it

            flags = pattern.regex.flags & (re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE)
            try:
                self._careful[key] = regex.compile(pattern.regex.pattern, int(flags) | regex.VERSION0)
            except regex.error:
                self._careful[key] = None
        return self._careful[key]

    def now(self) -> float:
        """Seconds by the clock; 0 without one."""
        return 0.0 if self._clock is None else self._clock()

    def has_time(self, now: float) -> bool:
        """Whether searches that may be slow have not used up their time yet; always without a clock."""
        while self._taken and self._taken[0][0] <= now - WINDOW_S:
            self._taken.popleft()
        return sum(taken for _, taken in self._taken) < LOOK_TIMEOUT_S

    def took(self, now: float, taken: float) -> None:
        """Note how long a search took that has just ended."""
        if self._clock is None:
            return
        if self._taken and now - self._taken[-1][0] < SLOT_S:
            begun, before = self._taken.pop()
            self._taken.append((begun, before + taken))
        else:
            self._taken.append((now, taken))

    def is_lost(self, pattern: Pattern) -> bool:
        """Note that a search of a pattern was given up; whether that has just been once too often."""
        self._given_up[pattern] += 1
        return self._given_up[pattern] == MOST_GIVEN_UP
