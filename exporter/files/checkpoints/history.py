"""What is remembered of earlier checkpoints: how many there were, their rhythm, their usual files and size."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from exporter.files.checkpoints.sets import Checkpoint, CheckpointSet

LEARN_FROM = 3  # checkpoints from which the interval, the usual size and the usual shards are learned
SHORT_BEFORE = 2  # after so many with the same ranks missing the next one is whole without them
ODD_RATIO = 2.0
KEPT = 16
MOST_SHAPES = 50_000
REMEMBERED = 1024
"""Checkpoints that have been counted, so that one which is lost from sight for a moment is not counted twice."""


class _PastCheckpoint(NamedTuple):
    """What is remembered of a checkpoint that was whole."""

    key: str
    step: int | None
    end: float
    bytes: int
    seconds: float
    shapes: frozenset[str]  # shapes of its shards and markers


class CheckpointHistory:
    """The checkpoints of one job that were there before, with what the next one is compared with.

    ``interval_s`` is that between two of them, where it is given.
    """

    def __init__(self, interval_s: float | None = None) -> None:
        self.total = 0
        """How many have been written; it never falls."""
        self.real = False
        """Whether there has been anything besides texts that tell no step."""
        self.disturbed: float | None = None
        """When a worker has last begun or ended: who saves, and which steps they save together, is new since then."""
        self._interval_s = interval_s
        self._past: deque[_PastCheckpoint] = deque(maxlen=KEPT)
        self._beats: deque[float] = deque(maxlen=KEPT)
        self._shapes_of_beat: frozenset[str] = frozenset()
        self._counted: dict[str, float] = {}
        self._holders: dict[str, tuple[float, str, frozenset[str]]] = {}
        """End, key and shapes of the last checkpoint with a file of this shape."""
        self._short: deque[tuple[str, frozenset[str]]] = deque(maxlen=KEPT)
        """Keys and shapes of those that had fewer files than the ones before them."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two checkpoints: given, or the median of the last; None while fewer than three are known."""
        if self._interval_s is not None:
            return self._interval_s
        if len(self._beats) < LEARN_FROM:
            return None
        gap = statistics.median(after - before for before, after in itertools.pairwise(self._beats))
        return gap if gap > 0 else None

    @property
    def interval_steps(self) -> float | None:
        """Steps between two checkpoints, by the median of the last; None while fewer than three tell their steps."""
        steps = sorted({past.step for past in self._past if past.step is not None})
        if len(steps) < LEARN_FROM:
            return None
        return statistics.median(after - before for before, after in itertools.pairwise(steps))

    @property
    def next_expected(self) -> float | None:
        """When the next one should be whole; in the past where it is late, None when the interval is not known."""
        interval = self.interval_s
        return self._beats[-1] + interval if self._beats and interval is not None else None

    @property
    def saved(self) -> tuple[float, ...]:
        """When the last ones were whole, in order; ranks that do not keep in step are of one."""
        return tuple(self._beats)

    def state(self) -> dict[str, Any]:
        """What another one may go on from, as JSON can hold it."""
        return {
            "total": self.total,
            "beats": list(self._beats),
            "counted": dict(self._counted),
            "real": self.real,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there, before the first update; raises ValueError for what ``state`` has never given."""
        total, beats, counted, real = (state.get(name) for name in ("total", "beats", "counted", "real"))
        if not isinstance(total, int) or isinstance(total, bool) or total < 0 or not isinstance(real, bool):
            raise ValueError("tells no number of checkpoints")
        if not isinstance(beats, list) or not all(map(_is_moment, beats)) or sorted(set(beats)) != beats:
            raise ValueError("tells no moments of checkpoints")
        if not isinstance(counted, dict) or not all(map(_is_moment, counted.values())):
            raise ValueError("tells no names of checkpoints")
        self.total, self.real = total, real
        self._beats.extend(beats)
        self._counted.update((str(key), float(end)) for key, end in list(counted.items())[-REMEMBERED:])

    def begin_real(self) -> None:
        """There is more than texts that tell no step: those were no checkpoints."""
        self.real = True
        self._past.clear()
        self._beats.clear()
        self._counted.clear()
        self._shapes_of_beat = frozenset()

    def count(self, shown: Checkpoint, shapes: frozenset[str], *, addition: bool) -> bool:
        """Note one that is whole; gives whether it is a new one.

        One that was counted as it is now is none, nor is an ``addition`` to one that was.
        """
        past = _PastCheckpoint(shown.key, shown.step, shown.end, shown.bytes, shown.seconds or 0.0, shapes)
        if self._counted.get(shown.key) == shown.end:
            if all(one.key != shown.key for one in self._past):
                self._past.append(past)  # it was counted by another one that this one goes on from
            return False
        self._counted.pop(shown.key, None)
        self._counted[shown.key] = shown.end
        while len(self._counted) > REMEMBERED:
            del self._counted[next(iter(self._counted))]
        if addition:
            return False
        self.total += 1
        self._past.append(past)
        self._beat(shown.end, shapes)
        return True

    def _beat(self, end: float, shapes: frozenset[str]) -> None:
        """Note the moment; files of ranks that have not saved since the last one belong to that."""
        others = self._shapes_of_beat
        if self._beats and shapes and others and not shapes & others:
            self._beats[-1] = max(end, self._beats[-1])
            self._shapes_of_beat = others | shapes
        elif not self._beats or end > self._beats[-1]:
            self._beats.append(end)
            self._shapes_of_beat = shapes

    def note_holder(self, found: CheckpointSet) -> None:
        """Note whose the files of these shapes are by now."""
        if len(self._holders) > MOST_SHAPES:
            self._holders.clear()
        holder = (found.end, found.key, found.shapes)
        for told in found.shapes:
            if told not in self._holders or self._holders[told][0] <= holder[0]:
                self._holders[told] = holder

    def note_short(self, key: str, shapes: frozenset[str]) -> None:
        """Note one of which files between others are missing."""
        self._short.append((key, shapes))

    def leaves_out(self, key: str, shapes: frozenset[str]) -> bool:
        """Whether several others had the same files only: what is not among them is left out by their writer."""
        others = {other for other, had in self._short if had == shapes}
        others.update(past.key for past in self._past if past.shapes == shapes)
        others.discard(key)
        return len(others) >= SHORT_BEFORE

    def odd_size(self, size: int, key: str, shapes: frozenset[str]) -> float | None:
        """The size by the median of those like it, where it is less than half or more than twice of that.

        Once a worker has begun or ended between them, ranks need not be in step any more, and each set may be that of
        a few of them. Then it is compared with those that had just its files, and of those since then with all that had
        its files at least: a lone shard is odd beside three that came with the others, and one of a rank that is out
        of step has none such. While there are fewer than three nothing tells the one from the other.
        """
        alike = self._alike(key)
        since = -math.inf if self.disturbed is None else self.disturbed
        if any(past.end < since for past in alike):
            alike = [past for past in alike if past.shapes == shapes or (past.end >= since and past.shapes > shapes)]
        sizes = [past.bytes for past in alike]
        if len(sizes) < LEARN_FROM:
            return None
        usual = statistics.median(sizes)
        ratio = size / usual if usual else 1.0
        return ratio if not 1 / ODD_RATIO <= ratio <= ODD_RATIO else None

    @property
    def longest_s(self) -> float:
        """How long the longest of the last checkpoints took."""
        return max((past.seconds for past in itertools.islice(reversed(self._past), LEARN_FROM)), default=0.0)

    def usual(self, key: str) -> frozenset[str]:
        """Shapes that all of the last that are like it had.

        Once a worker has begun or ended between them, ranks need not be in step any more: those since then count, and
        none before there are a few.
        """
        alike = self._alike(key)
        since = -math.inf if self.disturbed is None else self.disturbed
        last = [past.shapes for past in alike if past.end >= since]
        if len(last) < min(LEARN_FROM, len(alike)):
            return frozenset()
        return frozenset.intersection(*last) if last else frozenset()

    def _alike(self, key: str) -> list[_PastCheckpoint]:
        """The last that may be compared with it: one that is called ``final`` need not be like those with a step."""
        if key.startswith("fixed"):
            return [past for past in self._past if past.key == key]
        return [past for past in self._past if past.key != key and not past.key.startswith("fixed")]

    def is_elsewhere(self, usual: str, found: CheckpointSet) -> bool:
        """Whether the rank of this file has last saved without the ranks that are here: they are not in step."""
        if usual.startswith("/") or usual not in self._holders:
            return False
        _, key, shapes = self._holders[usual]
        return key != found.key and not found.shapes <= shapes


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
