"""How fast files grow, of which only some moments are seen.

A buffered writer writes a piece now and then. Between two of its writes nothing tells how far it is, and a size read at
any other moment is too small; but at each write size and time go together. So growth is taken from change to change.
"""

from typing import NamedTuple

WINDOW_S = 120.0  # growth is that of the changes within so long; where there are fewer, of the last three
LEAST_POINTS = 3
MOST_POINTS = 16
MOST_FILES = 4096  # followed at once: those that changed last


class GrowthPoint(NamedTuple):
    """A change: its own time in seconds, the size since, and the longest wait for a change up to then."""

    t: float
    value: float
    gap: float


class StepGrowth:
    """Growth of one file, or of anything else that grows in steps."""

    __slots__ = ("_points", "_seen")

    def __init__(self) -> None:
        self._points: list[GrowthPoint] = []
        self._seen = 0.0
        """When the last change was seen, by our own clock."""

    @property
    def last(self) -> GrowthPoint | None:
        """The last change."""
        return self._points[-1] if self._points else None

    def note(self, t: float, value: float, now: float) -> None:
        """A change of time ``t`` that is seen at ``now``, by a clock that may be another one.

        What has become smaller was written anew, and what comes after a long silence has a rhythm of its own: the
        changes before are forgotten.
        """
        points = self._points
        if points:
            last = points[-1]
            if (t, value) == (last.t, last.value):
                return
            if value < last.value or (len(points) > 1 and self._is_over(now)):
                points.clear()
            elif t <= last.t:  # by a clock with large steps
                points[-1] = last._replace(value=value)
                self._seen = now
                return
        points.append(GrowthPoint(t, value, t - points[-1].t if points else 0.0))
        self._seen = now
        while len(points) > LEAST_POINTS and points[0].t < t - WINDOW_S:
            del points[0]
        if len(points) > MOST_POINTS:
            self._thin_out()

    def _thin_out(self) -> None:
        """Keep every second point, and the last one."""
        old, self._points = self._points, self._points[:1]
        for place in range(2, len(old), 2):
            self._points.append(old[place]._replace(gap=max(old[place - 1].gap, old[place].gap)))
        if len(old) % 2 == 0:
            self._points.append(old[-1])

    def _patience_s(self) -> float:
        """Silence that is nothing unusual: twice the longest between two changes."""
        return 2 * max(point.gap for point in self._points[1:])

    def _is_over(self, now: float) -> bool:
        return now - self._seen >= WINDOW_S and now - self._seen > self._patience_s()

    def per_second(self, now: float) -> float:
        """Growth per second; 0 before the second change, and when the last one is long ago."""
        if len(self._points) < 2 or self._is_over(now):
            return 0.0
        first, last = self._points[0], self._points[-1]
        rate = (last.value - first.value) / (last.t - first.t)
        silence, patience = now - self._seen, self._patience_s()
        return rate if silence <= patience else rate * patience / silence


class GroupGrowth:
    """Growth of many files: of each by its own changes, and of each owner by the files that appear."""

    def __init__(self) -> None:
        self._files: dict[int, StepGrowth] = {}
        """By number, those that changed last at the end."""
        self._births: dict[int, StepGrowth] = {}
        """Bytes of files that have appeared, by owner."""

    def changed(self, file: int, t: float, size: int, before: tuple[float, int], now: float) -> None:
        """A file was written at ``t``; ``before`` are time and size as they were last seen."""
        growth = self._files.pop(file, None) or StepGrowth()
        self._files[file] = growth
        if t - before[0] <= WINDOW_S:  # where it has been told already it changes nothing
            growth.note(*before, now)
        growth.note(t, size, now)
        if len(self._files) > MOST_FILES:
            del self._files[next(iter(self._files))]

    def born(self, owner: int, t: float | None, born_bytes: int, now: float) -> None:
        """Files have appeared, the last one written at ``t``, of so many bytes in all since we look."""
        growth = self._births.get(owner)
        if growth is None:
            growth = self._births[owner] = StepGrowth()
        last = growth.last
        if t is not None and (last is None or born_bytes != last.value):
            growth.note(t, born_bytes, now)

    def per_second(self, now: float) -> float:
        """Bytes per second of all."""
        return sum(growth.per_second(now) for growths in (self._files, self._births) for growth in growths.values())
