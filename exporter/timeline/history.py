"""A bounded history of series that thins itself: 360 to 720 points, whatever the duration.

A point is a set of values at one time, as a scrape would have read them. Thinning drops whole points and changes no
value, so a counter stays one, and what is left is what a Prometheus with a longer interval would have stored.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from exporter.contract.timeline_file import EXACT, TimelineSeries

MOST_POINTS = 720
MOST_VALUES = 250_000  # of all series together, 4 bytes each: about 350 series that always change
MOST_SERIES = 4_000
MOST_MOMENTS = 0.25  # share of the points that thinning keeps since a worker ended or restarted then
KEPT_SHARE = 0.75  # most points that a thinning leaves, so that it is rare
_ABSENT = math.nan


class _Series:
    """Values of one series at the points where they change.

    They are stored in 4 bytes, large ones as differences from the first: exact to 1e-7 of the value or the largest
    difference, and rising where the values rise. 0 stays 0, and counts below `EXACT` what they are.
    """

    __slots__ = ("base", "changes", "last", "points")

    def __init__(self, first: float) -> None:
        self.base = 0.0 if abs(first) < EXACT else array("f", (first,))[0]
        self.points = 0  # bit n: whether it changes at point n
        self.changes = array("f")
        self.last: float | None = None

    def put(self, point: int, value: float | None) -> None:
        self.points |= 1 << point
        self.changes.append(_ABSENT if value is None else value - self.base)
        self.last = value

    def rows(self) -> list[int]:
        return [row for row, bit in enumerate(reversed(f"{self.points:b}")) if bit == "1"]

    def keep(self, points: Sequence[int]) -> None:
        """Drop all points but these."""
        rows, old, position, last = self.rows(), self.changes, 0, _ABSENT
        self.points, self.changes = 0, array("f")
        for number, point in enumerate(points):
            while position < len(rows) and rows[position] <= point:
                position += 1
            change = old[position - 1] if position else _ABSENT
            if change != last and not (math.isnan(change) and math.isnan(last)):
                self.points |= 1 << number
                self.changes.append(change)
                last = change


class History:
    """Points of all series of one node."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s  # between points; it doubles when there are too many
        self.times = array("d")
        self.moments: list[float] = []  # times of points at which a worker ended or restarted
        self._series: dict[str, _Series] = {}
        self._values = 0  # of all series

    def load(
        self, step_s: float, times: Iterable[float], moments: Iterable[float], series: Iterable[TimelineSeries]
    ) -> None:
        """Continue a history that was stored."""
        self.step_s, self.times, self.moments = max(step_s, self.step_s), array("d", times), list(moments)
        for name, rows, values in series:
            stored = self._series[name] = _Series(next((value for value in values if value is not None), 0.0))
            for row, value in zip(rows, values, strict=True):
                stored.put(row, value)
        self._values = sum(len(stored.changes) for stored in self._series.values())
        self._thin()

    def is_due(self, now: float) -> bool:
        """Whether the step of the last point is over."""
        return not self.times or now // self.step_s > self.times[-1] // self.step_s

    def add(self, now: float, values: Mapping[str, float], *, is_moment: bool = False) -> None:
        """Add a point with the finite values of all series. A series that is not there is absent from then on."""
        if self.times and now <= self.times[-1]:
            return  # the clock was set back
        point = len(self.times)
        self.times.append(now)
        if is_moment:
            self.moments.append(now)
        for name, value in values.items():
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= MOST_SERIES:
                    continue
                series = self._series[name] = _Series(value)
            if value != series.last:
                series.put(point, value)
                self._values += 1
        for name, series in self._series.items():
            if series.last is not None and name not in values:
                series.put(point, None)
                self._values += 1
        self._thin()

    def series(self) -> Iterator[TimelineSeries]:
        """All series with the points at which their values change."""
        for name, series in self._series.items():
            base = series.base
            values = [None if math.isnan(change) else base + change for change in series.changes]
            yield TimelineSeries(name, series.rows(), values)

    def _thin(self) -> None:
        if len(self.times) < MOST_POINTS and self._values < MOST_VALUES:
            return
        most = int(KEPT_SHARE * len(self.times))
        self.moments = self.moments[-max(1, int(MOST_MOMENTS * len(self.times))) :]
        while len(kept := self._points_of_steps()) > max(most, 3):
            self.step_s *= 2
        self.times = array("d", (self.times[point] for point in kept))
        for series in self._series.values():
            series.keep(kept)
        self._series = {name: series for name, series in self._series.items() if series.points}
        self._values = sum(len(series.changes) for series in self._series.values())

    def _points_of_steps(self) -> list[int]:
        """The first point of each step, the last point, and those of moments."""
        steps, moments, last = [time // self.step_s for time in self.times], set(self.moments), len(self.times) - 1
        return [
            point
            for point, time in enumerate(self.times)
            if point in (0, last) or steps[point] != steps[point - 1] or time in moments
        ]
