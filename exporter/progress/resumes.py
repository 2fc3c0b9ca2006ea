"""Where the work of a run begins: at nothing, or where an earlier run has left it without a word in the log."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

FIRSTS = 5.0  # a worker that begins anew says first about what it has said first before; hardly so many times that,
REACHED = 0.5  # and not so much of what it had reached: checkpoints are seldom older
SOON_S = 600.0  # a first position that comes later may be work, whatever its size
LARGE_SHARE, LARGE = 0.02, 50.0
"""Share of the total, or without one the number, from which a first position may be that of a resume."""
FASTER = 3.0  # so many times as fast as it is now a worker may have been before its first position
STEPS = 1.5
"""So many times its largest step a worker that begins at nothing may say first: batches are seldom less alike."""
STAMP_S = 1.0  # many logs tell their time in whole seconds: a record may be so much later than it says
RISES = 3  # after so many it is known how fast a worker is: of a pause between two of them the others tell


class EarlierProgress(NamedTuple):
    """How far an earlier run has come."""

    unit: str
    done: float
    total: float | None = None
    first: float | None = None  # the first position of a run that has begun at nothing; None where that is not known


def earlier_positions(attempts: Iterable[Iterable[Mapping[str, Any]]], ranks: set[int]) -> dict[int, EarlierProgress]:
    """How far the workers of these ranks had come, by rank, each in the first of these attempts that tells it.

    Of each attempt these are its reports or statuses; whatever is in them, they tell positions or nothing. Once all
    are known no further attempt is asked for.
    """
    found: dict[int, EarlierProgress] = {}
    for pages in attempts:
        for rank, earlier in _positions(pages):
            if rank in ranks:
                found.setdefault(rank, earlier)
        if found.keys() >= ranks:
            break
    return found


def _positions(pages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, EarlierProgress]]:
    for page in pages:
        workers = page.get("workers")
        for worker in workers if isinstance(workers, list) else ():
            if not isinstance(worker, dict):
                continue
            rank, unit = worker.get("rank"), worker.get("unit")
            done, total, first = (_count(worker.get(key)) for key in ("items", "items_expected", "items_first"))
            if isinstance(rank, int) and isinstance(unit, str) and done is not None:
                yield rank, EarlierProgress(unit, done, total, first)


def _count(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return value


def is_resume(done: float, total: float | None, earlier: EarlierProgress) -> bool | None:
    """Whether a run whose first position is ``done`` goes on with the work of an earlier one; None if it may.

    It does not where it says no more than a run that has begun at nothing has said first, and it does from half of
    what the earlier one had reached, where both are more than five times that. What has another total is other work.
    """
    if earlier.first is None or (None not in (total, earlier.total) and total != earlier.total):
        return None
    anew = max(1.0, earlier.first)
    if done <= anew:
        return False
    return True if min(done, earlier.done) > FIRSTS * anew and done >= REACHED * earlier.done else None


def may_be_resume(done: float, total: float | None, after_s: float) -> bool:
    """Whether a first position, so long after the start of its run, is large enough to ask how it has come about.

    What has come to its end at once is none: nothing will tell how fast it was.
    """
    large = done >= max(1.0, LARGE_SHARE * total) and done < total if total is not None else done >= LARGE
    return large and 0.0 <= after_s <= SOON_S


@dataclass(slots=True)
class UndecidedStart:
    """A first position of which is not known whether it has been worked for, until the pace after it tells.

    It has where the worker, at up to three times its fastest pace since, could have come so far since its run began,
    and where it is about one step of the count: a first batch may be the fastest by far. Once that is so it stays so,
    since the fastest pace and the largest step can only rise. When the count has risen three times and it is not so,
    the first position is where the work goes on.
    """

    done: float
    after_s: float  # seconds from the start of the run to the first position
    since: float  # when that was
    last: float
    last_at: float
    pace: float = 0.0  # the fastest so far, per second
    step: float = 0.0  # the largest so far, from one record to the next
    rises: int = 0

    @classmethod
    def at(cls, done: float, t: float, began: float) -> "UndecidedStart":
        """A first position at ``t`` of a run that has begun at ``began``."""
        return cls(done, t - began, t, done, t)

    def take(self, done: float, t: float) -> bool | None:
        """Whether the first position has been worked for, now that the count stands here; None while unknown.

        Records of one moment are one, since there is no telling how long they took; so where ten have the same second
        the whole way tells more than the step to the next one.
        """
        if done > self.last:
            self.step = max(self.step, done - self.last)
            if t > self.last_at:
                whole = (done - self.done) / (t - self.since)
                self.pace = max(self.pace, whole, (done - self.last) / (t - self.last_at))
                self.rises += 1
                self.last_at = t
            self.last = done
        worked_for = self.pace > 0 and self._can_be_work
        return True if worked_for else False if self.rises >= RISES else None

    def verdict(self) -> bool:
        """The same when nothing more will come: without any evidence it has been worked for.

        Whole seconds are none before there are two: the second record may have come just after the first.
        """
        whole_seconds = self.since % 1 == 0 and self.last_at % 1 == 0
        return self.pace == 0 or self._can_be_work or (whole_seconds and self.last_at - self.since <= STAMP_S)

    @property
    def _can_be_work(self) -> bool:
        return self.done <= max(FASTER * (self.after_s + STAMP_S) * self.pace, STEPS * self.step)


Key = tuple[str, int | None]  # pattern and data-parallel rank of a count


class UndecidedStarts:
    """First positions of the counts of one run that are not decided."""

    def __init__(self) -> None:
        self.open: dict[Key, UndecidedStart] = {}

    def hold(self, key: Key, beginning: UndecidedStart) -> None:
        """From now on the records of this count are asked."""
        self.open[key] = beginning

    def take(self, key: Key, done: float, total: float | None, t: float) -> float | None:
        """Work that is now known to have been done before the first position of this count: all of it, or none.

        None where that is not known, or has been for long.
        """
        beginning = self.open.get(key)
        if beginning is None:
            return None
        ended = total is not None and done >= total  # perhaps long ago: this rise tells no pace
        worked_for = beginning.verdict() if ended else beginning.take(done, t)
        if worked_for is None and t - beginning.last_at > SOON_S:
            worked_for = beginning.verdict()
        if worked_for is None:
            return None
        del self.open[key]
        return beginning.done if worked_for else 0

    def settle(self) -> dict[Key, float]:
        """Nothing more comes: the work that was done before first positions, of each count that has done some."""
        found = {key: beginning.done for key, beginning in self.open.items() if beginning.verdict()}
        self.open.clear()
        return found

    def drop(self) -> None:
        """The worker has said that it resumes: none of them has been worked for."""
        self.open.clear()

    def state(self) -> list[list[Any]]:
        """All of them, ready for JSON."""
        return [[name, rank, asdict(beginning)] for (name, rank), beginning in self.open.items()]

    @classmethod
    def from_state(cls, state: list[tuple[str, int | None, Mapping[str, Any]]]) -> "UndecidedStarts":
        """Those that ``state`` gave; TypeError or ValueError where that is malformed."""
        found = cls()
        found.open = {(name, rank): UndecidedStart(**fields) for name, rank, fields in state}
        return found
