"""Remember earlier checkpoints: their count, rhythm, usual files and usual size."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from exporter.contract.clock import JobStops
from exporter.contract.records import Record
from exporter.files.checkpoints.sets import Checkpoint, CheckpointSet

LEARN_FROM = 3  # checkpoints needed to learn the interval, the usual size and the usual shards
LEAST_WITHOUT_RANKS = 2  # after this many others without the same ranks, a checkpoint is complete without them
ODD_RATIO = 2.0
MOST_KEPT = 16
MOST_SHAPES = 50_000
MOST_REMEMBERED = 1024  # counted checkpoints, so that one which disappears briefly is not counted twice


class _PastCheckpoint(NamedTuple):
    """An earlier complete checkpoint."""

    key: str
    step: int | None
    end: float
    bytes: int
    seconds: float
    shapes: frozenset[str]  # of its shards and markers
    parts: frozenset[str]  # shapes of its other parts


class SavedCheckpoints(Record):
    """What the next sidecar continues from."""

    total: int
    beats: tuple[float, ...]  # end times
    counted: Mapping[str, float]  # ends by key
    real: bool
    stops: tuple[tuple[float, float], ...] = ()  # of the job: begin and seconds of each


class CheckpointHistory:
    """Earlier checkpoints of one job, to compare the next one with.

    ``interval_s`` is the configured interval, if any.
    """

    def __init__(self, interval_s: float | None = None) -> None:
        self.total = 0  # checkpoints written; never falls
        self.has_real_checkpoints = False  # whether there was ever more than text files without a step
        # last start or end of a worker; since then, different ranks may save together
        self.last_worker_change: float | None = None
        self.stops = JobStops()  # time that does not count for the rhythm
        self._interval_s = interval_s
        self._past: deque[_PastCheckpoint] = deque(maxlen=MOST_KEPT)
        self._end_times: deque[float] = deque(maxlen=MOST_KEPT)
        self._last_shapes: frozenset[str] = frozenset()
        self._counted: dict[str, float] = {}
        self._forgotten_until = -math.inf  # ends before this were counted by the sidecar that we restored from
        # end, key and shapes of the last checkpoint with this shape
        self._latest_by_shape: dict[str, tuple[float, str, frozenset[str]]] = {}
        # keys and shapes of checkpoints with missing ranks
        self._with_missing_ranks: deque[tuple[str, frozenset[str]]] = deque(maxlen=MOST_KEPT)

    @property
    def interval_s(self) -> float | None:
        """Seconds between checkpoints: as given, or the recent median. None with fewer than three."""
        if self._interval_s is not None:
            return self._interval_s
        if len(self._end_times) < LEARN_FROM:
            return None
        gap = statistics.median(after - before for before, after in itertools.pairwise(self.save_times))
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
        return self.save_times[-1] + interval if self._end_times and interval is not None else None

    @property
    def save_times(self) -> tuple[float, ...]:
        """End times of recent checkpoints, in order, each moved by the later stops of the job.

        Ranks that save at different times share one.
        """
        return tuple(end + self.stops.seconds_since(end) for end in self._end_times)

    def state(self) -> SavedCheckpoints:
        """Return the state to restore later."""
        return SavedCheckpoints(
            total=self.total,
            beats=tuple(self._end_times),
            counted=dict(self._counted),
            real=self.has_real_checkpoints,
            stops=tuple(self.stops),
        )

    def restore(self, saved: SavedCheckpoints) -> None:
        """Restore the result of ``state`` before the first update."""
        self.total, self.has_real_checkpoints = saved.total, saved.real
        self._end_times.extend(saved.beats)
        self.stops = JobStops(saved.stops)
        self._counted.update(saved.counted)
        if len(saved.counted) >= MOST_REMEMBERED:
            self._forgotten_until = min(saved.counted.values())

    def discard_text_files(self) -> None:
        """Discard notes counted so far: the first real checkpoint shows that they were none."""
        self.has_real_checkpoints = True
        self._past.clear()
        self._end_times.clear()
        self._counted.clear()
        self._forgotten_until = -math.inf
        self._last_shapes = frozenset()

    def count(
        self,
        checkpoint: Checkpoint,
        shapes: frozenset[str],
        *,
        is_addition: bool,
        replaces_copy: bool = False,
        parts: frozenset[str] = frozenset(),
    ) -> bool:
        """Record a complete checkpoint; return whether it is a new one.

        It is not if it was already counted unchanged, is an ``is_addition`` to a counted one, or ``replaces_copy``:
        a copy in another form was counted before it. Later ones may resemble either.
        """
        past = _PastCheckpoint(
            checkpoint.key, checkpoint.step, checkpoint.end, checkpoint.bytes, checkpoint.seconds or 0.0, shapes, parts
        )
        if self._counted.get(checkpoint.key) == checkpoint.end or checkpoint.end < self._forgotten_until:
            if all(one.key != checkpoint.key for one in self._past):
                self._past.append(past)  # counted by the sidecar that we restored from
            return False
        self._counted.pop(checkpoint.key, None)
        self._counted[checkpoint.key] = checkpoint.end
        while len(self._counted) > MOST_REMEMBERED:
            del self._counted[next(iter(self._counted))]
        if replaces_copy:
            self._past.append(past)
        if is_addition or replaces_copy:
            return False
        self.total += 1
        self._past.append(past)
        self._add_end_time(checkpoint.end, shapes)
        return True

    def _add_end_time(self, end: float, shapes: frozenset[str]) -> None:
        """Record the end of a checkpoint.

        Files of ranks that have not saved since the last checkpoint belong to that one.
        """
        others = self._last_shapes
        if self._end_times and shapes and others and not shapes & others:
            self._end_times[-1] = max(end, self._end_times[-1])
            self._last_shapes = others | shapes
        elif not self._end_times or end > self._end_times[-1]:
            self._end_times.append(end)
            self._last_shapes = shapes

    def record_latest(self, found: CheckpointSet) -> None:
        """Record this checkpoint as the latest with its shapes."""
        if len(self._latest_by_shape) > MOST_SHAPES:
            self._latest_by_shape.clear()
        holder = (found.end, found.key, found.shapes)
        for shape in found.shapes:
            if shape not in self._latest_by_shape or self._latest_by_shape[shape][0] <= holder[0]:
                self._latest_by_shape[shape] = holder

    def record_missing_ranks(self, key: str, shapes: frozenset[str]) -> None:
        """Record a checkpoint with missing ranks."""
        self._with_missing_ranks.append((key, shapes))

    def omits_on_purpose(self, key: str, shapes: frozenset[str]) -> bool:
        """Whether several others had exactly these files, so that the writer omits the rest on purpose."""
        others = {other for other, had in self._with_missing_ranks if had == shapes}
        others.update(past.key for past in self._past if past.shapes == shapes)
        others.discard(key)
        return len(others) >= LEAST_WITHOUT_RANKS

    def had_same(self, key: str, shapes: frozenset[str]) -> bool:
        """Whether another checkpoint had exactly these shards."""
        return any(past.key != key and past.shapes == shapes for past in self._past)

    def odd_size(self, size: int, key: str, shapes: frozenset[str]) -> float | None:
        """Size relative to the median of similar ones, if below half or above twice that.

        After a worker starts or ends, ranks may save at different times, and each set may hold only a few of them. Then
        earlier checkpoints count only with exactly these files, and later ones also with more. So a lone shard is odd
        beside three full sets, but the shard of a rank that saves by itself is not. None with fewer than three to
        compare.
        """
        alike = self._similar(key)
        since = -math.inf if self.last_worker_change is None else self.last_worker_change
        if any(past.end < since for past in alike):
            alike = [past for past in alike if past.shapes == shapes or (past.end >= since and past.shapes > shapes)]
        sizes = [past.bytes for past in alike]
        if len(sizes) < LEARN_FROM:
            return None
        usual = statistics.median(sizes)
        ratio = size / usual if usual else 1.0
        return ratio if not 1 / ODD_RATIO <= ratio <= ODD_RATIO else None

    @property
    def longest_write_s(self) -> float:
        """Seconds that the longest recent checkpoint took."""
        return max((past.seconds for past in itertools.islice(reversed(self._past), LEARN_FROM)), default=0.0)

    def usual_shapes(self, key: str) -> frozenset[str]:
        """Shapes that all recent similar checkpoints had.

        After a worker starts or ends, ranks may save at different times. Then only later checkpoints count, and the
        result is empty until there are a few.
        """
        alike = self._similar(key)
        since = -math.inf if self.last_worker_change is None else self.last_worker_change
        last = [past.shapes for past in alike if past.end >= since]
        if len(last) < min(LEARN_FROM, len(alike)):
            return frozenset()
        return frozenset.intersection(*last) if last else frozenset()

    def usual_parts(self, key: str) -> frozenset[str]:
        """Shapes of other parts that all recent similar checkpoints had."""
        alike = [past.parts for past in self._similar(key)]
        return frozenset.intersection(*alike) if alike else frozenset()

    def _similar(self, key: str) -> list[_PastCheckpoint]:
        """Recent checkpoints to compare with: ``final`` need not resemble those with a step."""
        if key.startswith("fixed"):
            return [past for past in self._past if past.key == key]
        return [past for past in self._past if past.key != key and not past.key.startswith("fixed")]

    def is_saved_separately(self, shape: str, found: CheckpointSet) -> bool:
        """Whether this file's rank last saved without the ranks here: they save at different times."""
        if shape.startswith("/") or shape not in self._latest_by_shape:
            return False
        _, key, shapes = self._latest_by_shape[shape]
        return key != found.key and not found.shapes <= shapes
