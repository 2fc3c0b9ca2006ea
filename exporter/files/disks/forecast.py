"""When a file system is full, from its own course of free space; works for bytes and for inodes."""

from collections import deque
from itertools import pairwise
from statistics import median

MOST_CHANGES = 256
FEWEST_CHANGES = 5  # a slope is measured over at least so many
COURSE_S = 3600.0  # what is older counts for nothing
TRUSTED = 4.0
"""A slope counts at once for so many times the span that it was measured over; what is later, longer spans decide,"""
FARTHEST = 60.0  # and beyond so many times the longest span nothing is said
QUIET = 3.0
LEAST_QUIET_S = 10.0  # falling has ended once nothing fell for so many times the longest pause, and at least so long
REGULAR_RISES = 2
"""Fewer rises in a span are an exception, such as cleaning up, and make nothing slower; more are a rhythm."""
OUTSTANDING = 10.0  # a single fall so many times the usual is no part of the course, such as another's large file
FEW_OUTSTANDING = 2

LOW_BYTES = 10e9
LOW_SHARE = 0.10
PLENTY_BYTES = 1e12


def is_space_low(available_bytes: float, size_bytes: float) -> bool:
    """Whether there is too little left: less than 10 GB, or a tenth where less than 1 TB is left."""
    return available_bytes < LOW_BYTES or (available_bytes < PLENTY_BYTES and available_bytes < LOW_SHARE * size_bytes)


class DiskForecast:
    """The course of what is free, told by readings in the order of their times.

    Only readings at which the value has changed count: writers flush in steps, and a slope from change to change is
    right where one from reading to reading is not.
    """

    def __init__(self) -> None:
        self._changes: deque[tuple[float, float]] = deque()
        self._last: tuple[float, float] | None = None
        self._since_full: float | None = None

    def update(self, t: float, free: float) -> None:
        """A reading at time ``t`` in seconds; after a step of the clock back everything begins anew."""
        if self._last is not None and t <= self._last[0]:
            if t == self._last[0]:
                return
            self._changes.clear()
            self._last = None
        if self._last is None or free != self._last[1]:
            self._changes.append((t, free))
        self._last = (t, free)
        self._since_full = None if free > 0 else t if self._since_full is None else self._since_full
        while len(self._changes) > 1 and t - self._changes[1][0] > COURSE_S:
            self._changes.popleft()
        if len(self._changes) > MOST_CHANGES:
            self._thin()

    def _thin(self) -> None:
        """Drop every other of the older half: the sums stay right."""
        kept = list(self._changes)
        half = len(kept) // 2
        self._changes = deque([*kept[:half:2], *kept[half:]])

    def full_at(self, now: float) -> float | None:
        """When nothing will be free, in the readings' seconds; since when nothing is, where that is so.

        None while it is not falling, before it has fallen a few times, and where it is too far away to be known.
        """
        if self._last is None:
            return None
        if self._since_full is not None:
            return self._since_full
        changes, free = list(self._changes)[1:], self._last[1]  # when the first began is not known
        if len(changes) < FEWEST_CHANGES:
            return None
        count, best = FEWEST_CHANGES, None
        while True:
            part = changes[-count:]
            span = part[-1][0] - part[0][0]
            slope = _use_rate(part, now)
            ahead = None if slope is None else free / slope
            if ahead is not None and ahead <= TRUSTED * span:
                best = ahead
                break
            if count >= len(changes):
                best = ahead if ahead is not None and ahead <= FARTHEST * span else None
                break
            count = min(2 * count, len(changes))
        return None if best is None else max(now, changes[-1][0] + best)


def _use_rate(course: list[tuple[float, float]], now: float) -> float | None:
    """What is used up in a second, over a course of changes; None where it does not fall, or no longer."""
    steps = [(t1 - t0, v0 - v1) for (t0, v0), (t1, v1) in pairwise(course)]
    falls = sorted(fall for _, fall in steps if fall > 0)
    if not falls:
        return None
    last = max(t1 for (_, v0), (t1, v1) in pairwise(course) if v1 < v0)
    if now - last > max(LEAST_QUIET_S, QUIET * max(pause for pause, _ in steps)):
        return None
    rises = sum(fall < 0 for _, fall in steps)
    usual = median(falls)
    outstanding = sum(fall > OUTSTANDING * usual for fall in falls)
    total, used = 0.0, [0.0]
    for _, fall in steps:
        single = outstanding <= FEW_OUTSTANDING < len(falls) // 2 and fall > OUTSTANDING * usual
        lonely = rises < REGULAR_RISES and fall < 0
        total += 0.0 if single or lonely else fall
        used.append(total)
    slope = _middle_slope([t for t, _ in course], used)
    return slope if slope > 0 else None


def _middle_slope(times: list[float], values: list[float]) -> float:
    """Median of the slopes from each point to the last one that is at least half the span before it.

    So few points that lie far off do not count (the incomplete method of Theil), and rests between bursts do.
    """
    half = (times[-1] - times[0]) / 2
    slopes, early = [], 0
    for late in range(1, len(times)):
        while early + 1 < late and times[early + 1] <= times[late] - half:
            early += 1
        if times[early] <= times[late] - half:
            slopes.append((values[late] - values[early]) / (times[late] - times[early]))
    return median(slopes)
