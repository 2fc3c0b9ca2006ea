"""Growth rates of files that are seen only at some moments.

A buffered writer writes in pieces. Between writes its progress is invisible and the size is too small, but at a write
size and time agree. So growth is measured from change to change.
"""

from typing import NamedTuple

WINDOW_S = 120.0  # changes within this time count, but at least the last three
LEAST_POINTS = 3
MOST_POINTS = 16
MOST_FILES = 4096  # files followed at once, the last changed


class GrowthPoint(NamedTuple):
    """A change: its time in seconds, the size then, and the longest gap before a change up to it."""

    t: float
    value: float
    gap: float


class StepGrowth:
    """Growth of anything that grows in steps, such as one file."""

    __slots__ = ("_last_seen", "_points")

    def __init__(self) -> None:
        self._points: list[GrowthPoint] = []
        self._last_seen = 0.0  # when the last change was seen, by our own clock

    @property
    def last(self) -> GrowthPoint | None:
        """Last change, or None."""
        return self._points[-1] if self._points else None

    def add(self, t: float, value: float, now: float) -> None:
        """Record a change of time ``t``, seen at ``now``; the two clocks may differ.

        Earlier changes are forgotten if the size fell, since the file was rewritten, or after a long silence, since a
        new rhythm starts.
        """
        points = self._points
        if points:
            last = points[-1]
            if (t, value) == (last.t, last.value):
                return
            if value < last.value or self.has_ended(now):
                points.clear()
            elif t <= last.t:  # its clock has large steps
                points[-1] = last._replace(value=value)
                self._last_seen = now
                return
        points.append(GrowthPoint(t, value, t - points[-1].t if points else 0.0))
        self._last_seen = now
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

    def _longest_silence_s(self) -> float:
        """Longest normal silence: twice the longest gap between changes."""
        return 2 * max(point.gap for point in self._points[1:])

    def has_ended(self, now: float) -> bool:
        """Whether nothing of it counts any more: a change from now on starts a new rhythm."""
        return len(self._points) > 1 and self._has_stopped(now)

    def _has_stopped(self, now: float) -> bool:
        return now - self._last_seen >= WINDOW_S and now - self._last_seen > self._longest_silence_s()

    def per_second(self, now: float) -> float:
        """Growth per second; 0 before the second change, and long after the last."""
        if len(self._points) < 2 or self._has_stopped(now):
            return 0.0
        first, last = self._points[0], self._points[-1]
        rate = (last.value - first.value) / (last.t - first.t)
        silence, longest = now - self._last_seen, self._longest_silence_s()
        return rate if silence <= longest else rate * longest / silence


class GroupGrowth:
    """Growth of many files: of each file by its changes, and of each owner by new files."""

    def __init__(self) -> None:
        self._files: dict[int, StepGrowth] = {}  # by number, the last changed at the end
        self._new_files: dict[int, StepGrowth] = {}  # bytes of new files, by owner

    def add_change(self, file: int, t: float, size: int, before: tuple[float, int], now: float) -> None:
        """Record a write at ``t``; ``before`` is the time and size last seen."""
        growth = self._files.pop(file, None) or StepGrowth()
        self._files[file] = growth
        if t - before[0] <= WINDOW_S:  # a repeated report changes nothing
            growth.add(*before, now)
        growth.add(t, size, now)
        if len(self._files) > MOST_FILES:
            del self._files[next(iter(self._files))]

    def add_new_files(self, owner: int, t: float | None, new_bytes: int, now: float) -> None:
        """Record new files: the last written at ``t``, ``new_bytes`` in all since the first poll."""
        growth = self._new_files.get(owner)
        if growth is None:
            growth = self._new_files[owner] = StepGrowth()
        last = growth.last
        if t is not None and (last is None or new_bytes != last.value):
            growth.add(t, new_bytes, now)

    def per_second(self, now: float) -> float:
        """Bytes per second of all files; forgets those that have ended, so that new files do not add up."""
        self._files = {file: growth for file, growth in self._files.items() if not growth.has_ended(now)}
        return sum(growth.per_second(now) for growths in (self._files, self._new_files) for growth in growths.values())
