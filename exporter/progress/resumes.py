"""Whether a run starts at 0 or resumes earlier work without a message in its log."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass

FIRST_POSITION_FACTOR = 5.0  # a resume starts above this multiple of a fresh start's first position
LEAST_REACHED_SHARE = 0.5  # a resume starts at or above this part of the earlier progress: checkpoints are rarely older
MOST_START_S = 600.0  # a later first position may be work, whatever its size
# A first position may be a resume from this share of the total, or this count without a total.
LARGE_SHARE, LARGE_COUNT = 0.02, 50.0
THROUGHPUT_FACTOR = 3.0  # most that the throughput before the first position may exceed the fastest one since
FIRST_STEP_FACTOR = 1.5  # most that a fresh start reports first, in steps: batches rarely differ more
STAMP_S = 1.0  # many logs have times in whole seconds, so a record may be this much later than its time
LEAST_RISES = 3  # rises needed before the throughput is trusted: with three, one pause does not distort it


class EarlierProgress(NamedTuple):
    unit: str
    done: float
    total: float | None = None
    first: float | None = None  # first position of a run that started at 0; None if unknown
    pattern: str | None = None  # name of the pattern that found it


def earlier_positions(
    attempts: Iterable[Iterable[Mapping[str, object]]], ranks: set[int]
) -> dict[int, EarlierProgress]:
    """Earlier progress by rank, each from the first attempt that contains it.

    An attempt consists of its reports or statuses, which may contain anything. No further attempt is read when all
    ranks are found.
    """
    found: dict[int, EarlierProgress] = {}
    for pages in attempts:
        for rank, earlier in _positions(pages):
            if rank in ranks:
                found.setdefault(rank, earlier)
        if found.keys() >= ranks:
            break
    return found


def _positions(pages: Iterable[Mapping[str, object]]) -> Iterator[tuple[int, EarlierProgress]]:
    for page in pages:
        workers = page.get("workers")
        for worker in workers if isinstance(workers, list) else ():
            if not isinstance(worker, dict):
                continue
            rank, unit, pattern = worker.get("rank"), worker.get("unit"), worker.get("pattern")
            done, total, first = (_count(worker.get(key)) for key in ("items", "items_expected", "items_first"))
            if isinstance(rank, int) and isinstance(unit, str) and done is not None:
                yield rank, EarlierProgress(unit, done, total, first, pattern if isinstance(pattern, str) else None)


def _count(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return value


def is_resume(done: float, total: float | None, earlier: EarlierProgress) -> bool | None:
    """Whether a run with first position ``done`` resumes an earlier one; None if undecided.

    It does not if it reports no more than a fresh start reported first. It does if it reports at least half of the
    earlier progress, and both are more than five times that first position. A different total is different work.
    """
    if earlier.first is None or (None not in (total, earlier.total) and total != earlier.total):
        return None
    anew = max(1.0, earlier.first)
    if done <= anew:
        return False
    return (
        True
        if min(done, earlier.done) > FIRST_POSITION_FACTOR * anew and done >= LEAST_REACHED_SHARE * earlier.done
        else None
    )


def may_be_resume(done: float, total: float | None, after_s: float) -> bool:
    """Whether a first position, ``after_s`` into its run, is large enough for a resume.

    Work that is already complete does not count: its throughput cannot be measured.
    """
    large = done >= max(1.0, LARGE_SHARE * total) and done < total if total is not None else done >= LARGE_COUNT
    return large and 0.0 <= after_s <= MOST_START_S


@dataclass(slots=True)
class UndecidedStart:
    """A first position that is either work or a resume, until the following throughput decides.

    It is work if the worker could have reached it from the start of the run at three times its fastest throughput
    since. It is also work if it is about one step, since the first batch may be the fastest. Both limits only rise, so
    such a result is final. After three rises without it, the first position is a resume.
    """

    done: float
    after_s: float  # seconds from the start of the run to the first position
    since: float  # time of the first position
    last: float
    last_at: float
    pace: float = 0.0  # fastest throughput so far, per second
    step: float = 0.0  # largest so far, between two records
    rises: int = 0

    @classmethod
    def from_position(cls, done: float, t: float, began: float) -> "UndecidedStart":
        """Create from a first position at ``t`` of a run that started at ``began``."""
        return cls(done, t - began, t, done, t)

    def update(self, done: float, t: float, total: float | None = None) -> bool | None:
        """Whether the first position was work, given the latest count; None while undecided.

        Records with the same time are one, since their duration is unknown. With ten records a second, the throughput
        over all records is more reliable than one step.
        """
        if total is not None and done >= total:
            return self.decide()  # perhaps it ended long ago, so that this rise has no usable throughput
        if done > self.last:
            self.step = max(self.step, done - self.last)
            if t > self.last_at:
                whole = (done - self.done) / (t - self.since)
                self.pace = max(self.pace, whole, (done - self.last) / (t - self.last_at))
                self.rises += 1
                self.last_at = t
            self.last = done
        if self.pace > 0 and self._can_be_work:
            return True
        if self.rises >= LEAST_RISES:
            return False
        return self.decide() if t - self.last_at > MOST_START_S else None

    def decide(self) -> bool:
        """Decide with the available records: without evidence, the first position was work.

        Times in whole seconds are no evidence before they span two: the second record may have followed immediately.
        """
        whole_seconds = self.since % 1 == 0 and self.last_at % 1 == 0
        return self.pace == 0 or self._can_be_work or (whole_seconds and self.last_at - self.since <= STAMP_S)

    @property
    def _can_be_work(self) -> bool:
        return self.done <= max(THROUGHPUT_FACTOR * (self.after_s + STAMP_S) * self.pace, FIRST_STEP_FACTOR * self.step)
