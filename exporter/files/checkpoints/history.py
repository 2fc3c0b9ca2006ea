"""Remember earlier checkpoints: their count, rhythm, usual files and usual size."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from exporter.files.checkpoints.sets import Checkpoint, CheckpointSet

LEARN_FROM = 3  # checkpoints needed to learn the interval, the usual size and the usual shards
SHORT_BEFORE = 2  # after this many others without the same ranks, a checkpoint is complete without them
ODD_RATIO = 2.0
KEPT = 16
MOST_SHAPES = 50_000
REMEMBERED = 1024  # counted checkpoints, so that one which disappears briefly is not counted twice


class _PastCheckpoint(NamedTuple):
    """An earlier complete checkpoint."""

    key: str
    step: int | None
    end: float
    bytes: int
    seconds: float
    shapes: frozenset[str]  # of its shards and markers


class CheckpointHistory:
    """Earlier checkpoints of one job, to compare the next one with.

    ``interval_s`` is the configured interval, if any.
    """

    def __init__(self, interval_s: float | None = None) -> None:
        self.total = 0  # checkpoints written; never falls
        self.real = False  # whether there was ever more than text files without a step
        # last start or end of a worker; since then, different ranks may save together
        self.disturbed: float | None = None
        self._interval_s = interval_s
        self._past: deque[_PastCheckpoint] = deque(maxlen=KEPT)
        self._beats: deque[float] = deque(maxlen=KEPT)
        self._shapes_of_beat: frozenset[str] = frozenset()
        self._counted: dict[str, float] = {}
        # end, key and shapes of the last checkpoint with this shape
        self._holders: dict[str, tuple[float, str, frozenset[str]]] = {}
        # keys and shapes of checkpoints with missing ranks
        self._short: deque[tuple[str, frozenset[str]]] = deque(maxlen=KEPT)

    @property
    def interval_s(self) -> float | None:
        """Seconds between checkpoints: as given, or the recent median. None with fewer than three."""
        if self._interval_s is not None:
            return self._interval_s
        if len(self._beats) < LEARN_FROM:
            return None
        gap = statistics.median(after - before for before, after in itertools.pairwise(self._beats))
        return gap if gap > 0 else None

    @property
    def interval_steps(self) -> float | None:
        """Median steps between recent checkpoints; None with fewer than three known steps."""
        steps = sorted({past.step for past in self._past if past.step is not None})
        if len(steps) < LEARN_FROM:
            return None
        return statistics.median(after - before for before, after in itertools.pairwise(steps))

    @property
    def next_expected(self) -> float | None:
        """When the next checkpoint is due, in the past if it is late; None if the interval is unknown."""
        interval = self.interval_s
        return self._beats[-1] + interval if self._beats and interval is not None else None

    @property
    def saved(self) -> tuple[float, ...]:
        """End times of recent checkpoints, in order. Ranks that save at different times share one."""
        return tuple(self._beats)

    def state(self) -> dict[str, Any]:
        """Return the state to restore later, for JSON."""
        return {
            "total": self.total,
            "beats": list(self._beats),
            "counted": dict(self._counted),
            "real": self.real,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state`` before the first update; raise ValueError if it is malformed."""
        total, beats, counted, real = (state.get(name) for name in ("total", "beats", "counted", "real"))
        if not isinstance(total, int) or isinstance(total, bool) or total < 0 or not isinstance(real, bool):
            raise ValueError("has no number of checkpoints")
        if not isinstance(beats, list) or not all(map(_is_moment, beats)) or sorted(set(beats)) != beats:
            raise ValueError("has no times of checkpoints")
        if not isinstance(counted, dict) or not all(map(_is_moment, counted.values())):
            raise ValueError("has no names of checkpoints")
        self.total, self.real = total, real
        self._beats.extend(beats)
        self._counted.update((str(key), float(end)) for key, end in list(counted.items())[-REMEMBERED:])

    def begin_real(self) -> None:
        """Discard notes counted so far: the first real checkpoint shows that they were none."""
        self.real = True
        self._past.clear()
        self._beats.clear()
        self._counted.clear()
        self._shapes_of_beat = frozenset()

    def count(self, shown: Checkpoint, shapes: frozenset[str], *, addition: bool) -> bool:
        """Record a complete checkpoint; return whether it is a new one.

        It is not if it was already counted unchanged, or is an ``addition`` to a counted one.
        """
        past = _PastCheckpoint(shown.key, shown.step, shown.end, shown.bytes, shown.seconds or 0.0, shapes)
        if self._counted.get(shown.key) == shown.end:
            if all(one.key != shown.key for one in self._past):
                self._past.append(past)  # counted by the sidecar that we restored from
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
        """Record the end of a checkpoint.

        Files of ranks that have not saved since the last checkpoint belong to that one.
        """
        others = self._shapes_of_beat
        if self._beats and shapes and others and not shapes & others:
            self._beats[-1] = max(end, self._beats[-1])
            self._shapes_of_beat = others | shapes
        elif not self._beats or end > self._beats[-1]:
            self._beats.append(end)
            self._shapes_of_beat = shapes

    def note_holder(self, found: CheckpointSet) -> None:
        """Record this checkpoint as the latest with its shapes."""
        if len(self._holders) > MOST_SHAPES:
            self._holders.clear()
        holder = (found.end, found.key, found.shapes)
        for told in found.shapes:
            if told not in self._holders or self._holders[told][0] <= holder[0]:
                self._holders[told] = holder

    def note_short(self, key: str, shapes: frozenset[str]) -> None:
        """Record a checkpoint with missing ranks."""
        self._short.append((key, shapes))

    def leaves_out(self, key: str, shapes: frozenset[str]) -> bool:
        """Whether several others had exactly these files, so that the writer omits the rest on purpose."""
        others = {other for other, had in self._short if had == shapes}
        others.update(past.key for past in self._past if past.shapes == shapes)
        others.discard(key)
        return len(others) >= SHORT_BEFORE

    def odd_size(self, size: int, key: str, shapes: frozenset[str]) -> float | None:
        """Size relative to the median of similar ones, if below half or above twice that.

        After a worker starts or ends, ranks may save at different times, and each set may hold only a few of them. Then
        earlier checkpoints count only with exactly these files, and later ones also with more. So a lone shard is odd
        beside three full sets, but the shard of a rank that saves by itself is not. None with fewer than three to
        compare.
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
        """Seconds that the longest recent checkpoint took."""
        return max((past.seconds for past in itertools.islice(reversed(self._past), LEARN_FROM)), default=0.0)

    def usual(self, key: str) -> frozenset[str]:
        """Shapes that all recent similar checkpoints had.

        After a worker starts or ends, ranks may save at different times. Then only later checkpoints count, and the
        result is empty until there are a few.
        """
        alike = self._alike(key)
        since = -math.inf if self.disturbed is None else self.disturbed
        last = [past.shapes for past in alike if past.end >= since]
        if len(last) < min(LEARN_FROM, len(alike)):
            return frozenset()
        return frozenset.intersection(*last) if last else frozenset()

    def _alike(self, key: str) -> list[_PastCheckpoint]:
        """Recent checkpoints to compare with: ``final`` need not resemble those with a step."""
        if key.startswith("fixed"):
            return [past for past in self._past if past.key == key]
        return [past for past in self._past if past.key != key and not past.key.startswith("fixed")]

    def is_elsewhere(self, usual: str, found: CheckpointSet) -> bool:
        """Whether this file's rank last saved without the ranks here: they save at different times."""
        if usual.startswith("/") or usual not in self._holders:
            return False
        _, key, shapes = self._holders[usual]
        return key != found.key and not found.shapes <= shapes


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
