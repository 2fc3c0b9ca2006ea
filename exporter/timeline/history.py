"""A bounded history of series that thins itself: 360 to 720 points, whatever the duration.

A point is a set of values at one time, as a scrape would have read them. Thinning drops whole points and changes no
value, so a counter stays one, and what is left is what a Prometheus with a longer interval would have stored.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, compress

from exporter.contract.timeline_file import EXACT, TimelineSeries

MOST_POINTS = 720
MOST_VALUES = 250_000  # of all series together, 4 bytes each: about 350 series that always change
MOST_SERIES = 4_000
MOST_MOMENTS = 0.25  # share of the points that thinning keeps since a worker ended or restarted then
KEPT_SHARE = 0.75  # most points that a thinning leaves, so that it is rare
_ABSENT = math.nan
_DIGITS = bytes.maketrans(b"01", b"\0\1")


class History:
    """Points of all series of one node.

    A change takes 4 bytes: large values are stored as differences from the first of their series. They are exact to
    1e-7 of the value or the largest difference, and rise where the values rise. 0 stays 0, and counts below `EXACT`
    what they are.

    All changes are in one array, by point and then by series. Its room is claimed when series begin, as if they changed
    at every point: what a job takes after minutes is what it takes after days.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s  # between points; it doubles when there are too many
        self.times = array("d")
        self.moments: list[float] = []  # times of points at which a worker ended or restarted
        self._numbers: dict[str, int] = {}  # of series
        self._free: list[int] = []  # numbers of series that no point has any more
        self._bases, self._last = array("d"), array("d")  # by number; the last values, NaN if absent
        self._points: list[int] = []  # of each point, bit n: whether series n changes
        self._counts = array("H")  # changes of each series, by number
        self._changes = array("f")
        self._used = 0  # changes of all points

    def load(
        self, step_s: float, times: Iterable[float], moments: Iterable[float], series: Iterable[TimelineSeries]
    ) -> None:
        """Continue a history that was stored."""
        self.step_s, self.times, self.moments = max(step_s, self.step_s), array("d", times), list(moments)
        points, numbers, changes = array("H"), array("H"), array("f")  # of all changes, by series
        for name, rows, values in series:
            number = self._begin(name, next((value for value in values if value is not None), 0.0))
            for row, value in zip(rows, values, strict=True):
                self._last[number] = _ABSENT if value is None else value
                points.append(row)
                numbers.append(number)
                changes.append(self._last[number] - self._bases[number])
        self._claim(len(changes))
        self._used, self._points = len(changes), [0] * len(self.times)
        starts = list(accumulate(map(Counter(points).__getitem__, range(len(self.times))), initial=0))
        for point, number, change in zip(points, numbers, changes, strict=True):
            self._points[point] |= 1 << number
            self._counts[number] += 1
            self._changes[starts[point]] = change
            starts[point] += 1
        self._thin()

    def is_due(self, now: float) -> bool:
        """Whether the step of the last point is over."""
        return not self.times or now // self.step_s > self.times[-1] // self.step_s

    def can_add(self, now: float) -> bool:
        """Whether this time is after the last point; it is not while the clock is set back."""
        return not self.times or now > self.times[-1]

    def add(self, now: float, values: Mapping[str, float], *, is_moment: bool = False) -> None:
        """Add a point with the finite values of all series. A series that is not there is absent from then on."""
        if not self.can_add(now):
            return
        self.times.append(now)
        if is_moment:
            self.moments.append(now)
        bases, last = self._bases, self._last
        changes: list[tuple[int, float]] = []
        for name, value in values.items():
            number = self._numbers.get(name)
            if number is None:
                if len(self._numbers) >= MOST_SERIES:
                    continue
                number = self._begin(name, value)
            if value != last[number]:
                changes.append((number, value - bases[number]))
                last[number] = value
                self._counts[number] += 1
        for name, number in self._numbers.items():
            if name not in values and not math.isnan(last[number]):
                changes.append((number, _ABSENT))
                last[number] = _ABSENT
                self._counts[number] += 1
        changes.sort()
        self._claim(len(changes))
        self._changes[self._used : self._used + len(changes)] = array("f", [change for _, change in changes])
        self._used += len(changes)
        self._points.append(sum(1 << number for number, _ in changes))
        self._thin()

    def _begin(self, name: str, first: float) -> int:
        """Return the number of a new series."""
        if not self._free:
            self._free.append(len(self._bases))
            self._bases.append(0.0)
            self._last.append(_ABSENT)
            self._counts.append(0)
        number = self._numbers[name] = self._free.pop()
        self._bases[number] = 0.0 if abs(first) < EXACT else array("f", (first,))[0]
        return number

    def _claim(self, more: int) -> None:
        """Make room for more changes, and for those that are to come."""
        room = max(self._used, min(MOST_VALUES, MOST_POINTS * len(self._numbers))) + more
        if room > len(self._changes):
            self._changes.frombytes(bytes((room - len(self._changes)) * self._changes.itemsize))

    def series(self) -> Iterator[TimelineSeries]:
        """All series with the points at which their values change."""
        starts = list(accumulate(self._counts, initial=0))
        points, changes, nexts = array("H", bytes(2 * self._used)), array("f", bytes(4 * self._used)), starts.copy()
        ordered = iter(self._changes)
        for point, bits in enumerate(self._points):
            for number, change in zip(_ones(bits), ordered, strict=False):
                position = nexts[number]
                points[position] = point
                changes[position] = change
                nexts[number] = position + 1
        for name, number in self._numbers.items():
            own, base = slice(starts[number], nexts[number]), self._bases[number]
            values = [None if math.isnan(change) else base + change for change in changes[own]]
            yield TimelineSeries(name, points[own].tolist(), values)

    def _thin(self) -> None:
        if len(self.times) < MOST_POINTS and self._used < MOST_VALUES:
            return
        most = int(KEPT_SHARE * len(self.times))
        self.moments = self.moments[-max(1, int(MOST_MOMENTS * len(self.times))) :]
        while len(kept := self._points_of_steps()) > max(most, 3):
            self.step_s *= 2
        self.times = array("d", (self.times[point] for point in kept))
        self._keep(kept)
        for name in [name for name, number in self._numbers.items() if not self._counts[number]]:
            self._free.append(self._numbers.pop(name))

    def _keep(self, points: Sequence[int]) -> None:
        """Drop all points but these. A kept one gets the changes of those dropped before it."""
        kept, changes, place, changed = set(points), self._changes, 0, 0
        latest = array("f", (_ABSENT for _ in self._bases))  # of each series
        stored = latest[:]
        old, self._points, self._used = self._points, [], 0
        self._counts = array("H", bytes(2 * len(self._bases)))
        for point, bits in enumerate(old):
            for number in _ones(bits):
                latest[number], place = changes[place], place + 1
            changed |= bits
            if point in kept:
                for number in _ones(changed):
                    change = latest[number]
                    if change == stored[number] or (math.isnan(change) and math.isnan(stored[number])):
                        changed ^= 1 << number
                    else:
                        stored[number] = changes[self._used] = change
                        self._used += 1
                        self._counts[number] += 1
                self._points.append(changed)
                changed = 0

    def _points_of_steps(self) -> list[int]:
        """The first point of each step, the last point, and those of moments."""
        steps, moments, last = [time // self.step_s for time in self.times], set(self.moments), len(self.times) - 1
        return [
            point
            for point, time in enumerate(self.times)
            if point in (0, last) or steps[point] != steps[point - 1] or time in moments
        ]


def _ones(bits: int) -> Iterator[int]:
    """The places of the bits that are set."""
    places = f"{bits:b}".encode()[::-1]
    return compress(range(len(places)), places.translate(_DIGITS))
