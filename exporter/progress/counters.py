"""Counters of a log by rank, across epochs, records out of order, resets and other counters."""

import math
from dataclasses import field

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.search.findings import SUMMED_UNITS
from exporter.progress.resumes import UndecidedStart

JITTER_RECORDS = 16  # a count this many records slightly below its maximum was reset; fewer records are out of order
DEEP_FALL_RECORDS = 2  # a count far below its maximum was reset when a second record confirms it
DEEP_FALL_STEPS = 64  # far is below half, or more steps than records of many threads can be out of order
ASIDE_MOST_S = 1800.0  # if the counter in force is silent this long, another one that moves is the work itself
AFTER_SHARE = 0.1  # a much shorter count within this part of the work's time after it evaluates or saves its result
RANK_FRESH_S = 600.0  # a rank silent this long while others write has ended, and is not the slowest


@dataclass(slots=True)
class EpochCounter:
    """One count of the batches of all epochs, from a counter that restarts at each epoch."""

    base: int  # number of the first epoch, as in the log
    index: int | None = None  # epochs before the current one
    past: float = 0  # batches of earlier epochs, which may differ in size
    size: float | None = None
    batch: float = 0
    step: float = 0  # the last rise within an epoch; 0 before one

    def epoch_index(self, epoch: int, epochs: int | None) -> int:
        """Number of epochs before this one; corrects ``base`` if the epoch number contradicts it."""
        if epoch < self.base:
            self._set_base(0)
        elif epochs is not None and epoch >= epochs + self.base:
            self._set_base(self.base + 1 if epoch == epochs + self.base else epoch - epochs + 1)
        return max(0, epoch - self.base)

    def _set_base(self, base: int) -> None:
        self.base, self.index = base, None

    def resolve_index(self, batch: float, size: float | None, index: int, epochs: int | None) -> int:
        """Number of epochs before this one, if the record with its epoch may come late.

        A counter that restarts after its last batch is in the next epoch, even if no record shows that yet.
        """
        if self.index is None or index not in (self.index - 1, self.index):
            return index
        again = size == self.size is not None and batch < self.batch / 2 and self.batch + self.step >= self.size
        return self.index + (again and (epochs is None or self.index + 1 < epochs))

    def spans_epochs(self, batch: float, size: float | None, index: int, epochs: int | None) -> bool:
        """Whether the counter spans all epochs: it continues into the next one where their sum would be."""
        if self.index is None or index != self.index + 1 or not epochs or not size or size != self.size:
            return False
        reach = 2 * self.step
        return self.batch < batch <= self.batch + reach and abs(batch / size - index / epochs) <= reach / size + 0.01

    def is_other_counter(self, batch: float, size: float | None, index: int, *, evaluating: bool) -> bool:
        """Whether a position is of another counter, because the epoch size differs or it evaluates."""
        if evaluating:
            return self.index is not None and (size != self.size or (index <= self.index and batch < self.batch))
        if self.index != index or None in (size, self.size) or size == self.size:
            return False
        return not self.batch <= batch <= 1.5 * self.batch

    def update(self, batch: float, size: float | None, index: int, epochs: int | None) -> tuple[float, float | None]:
        """(batches done, batches in all) at a record; the second is None while epochs or size are unknown."""
        if self.index is None or index < self.index:
            self.past = index * (size or 0)
        elif index > self.index:
            whole = self.size if self.size is not None else self.batch
            self.past += whole + (index - self.index - 1) * (size if size is not None else whole)
        elif batch > self.batch:
            self.step = batch - self.batch
        self.index, self.size, self.batch = index, size, batch
        each = size if size is not None else self.past / index if self.past else None
        total = self.past + max(1, epochs - index) * each if epochs is not None and each is not None else None
        return self.past + (batch if size is None else min(batch, size)), total


@dataclass(slots=True)
class LogCounter:
    """One counter of a log, robust to records out of order, resets and other counters of the same format."""

    done: float | None = None
    total: float | None = None
    begun: float = 0.0  # time of the first record of the count
    seen: float = 0.0
    begins: bool = True  # whether the next position is the first of a run or after a resume
    base: float | None = 0.0  # start value of that first position; None if unknown, so that only later rises count
    step: float = 0.0
    low: float | None = None  # first of the consecutive records below `done`
    lows: int = 0  # number of those records
    aside_since: float | None = None
    aside_first: float = 0.0  # first position of the ignored counter
    epoch: int | None = None  # its epoch, as the log counts
    first: float | None = None  # first position of a run that starts at 0: as logged, or one step
    start: UndecidedStart | None = None  # first position of this run while it may be work or a resume

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left, or less than one step of the last tenth: some logs stop before 100 %."""
        if self.done is None or self.total is None:
            return False
        return self.done >= 0.9 * self.total and self.done + self.step >= self.total

    def accept(self, done: float, total: float | None, t: float, *, evaluating: bool) -> tuple[float, bool] | None:
        """(work done, whether the count restarted) at a record; None if the record does not count."""
        if self.begins or self.done is None:
            rise = max(0, done - self.base) if self.base is not None else 0
            self.begun = t
            self._update(done, total, t)
            return rise, True
        if self._is_other_counter(done, total, evaluating):
            if self.ignore_other(done, total, t) or evaluating:
                return None
            rise = max(0, done - self.aside_first) if self.has_ended else 0
            self.begun = t
            self._update(done, total, t)
            return rise, True
        if done < self.done:
            if evaluating:
                return None
            self.low = done if self.low is None else self.low
            self.lows += 1
            deep = done < self.done / 2 or self.done - done > DEEP_FALL_STEPS * (self.step or math.inf)
            if self.lows < (JITTER_RECORDS if not deep else 1 if self.has_ended else DEEP_FALL_RECORDS):
                return None
            rise = max(0, done - self.low)
            self._update(done, total, t)
            return rise, True
        rise = done - self.done
        self._update(done, total, t)
        self.step = rise or self.step
        return rise, False

    def accept_rise(self, done: float, t: float) -> None:
        """Take a rising or equal record with the same total: a shortcut of ``accept``."""
        self.step = done - (self.done or 0) or self.step
        self.done, self.seen = done, t
        self.low, self.lows, self.aside_since = None, 0, None

    def ignore_other(self, done: float, total: float | None, t: float) -> bool:
        """Ignore a position of another counter while this one has work left and was not silent for long.

        After its end, ignore only a much shorter one that comes soon: others are the next part of the work.
        """
        if self.aside_since is None:
            self.aside_since, self.aside_first = t, done
        if not self.has_ended:
            return t - self.aside_since < ASIDE_MOST_S
        is_short = (total or 0) < (self.total or 0) / 2
        return is_short and t - self.seen < min(ASIDE_MOST_S, AFTER_SHARE * (self.seen - self.begun))

    def _update(self, done: float, total: float | None, t: float) -> None:
        self.done, self.total, self.seen = done, total if total is not None else self.total, t
        self.begins, self.low, self.lows, self.aside_since = False, None, 0, None

    def _is_other_counter(self, done: float, total: float | None, evaluating: bool) -> bool:
        """Whether a position with a different total is of another counter, such as a validation."""
        if total is None or self.total is None or self.done is None or total == self.total:
            return False
        follows = self.done <= done and (done <= 1.5 * self.done or total > self.total)
        return evaluating or not (follows or (done >= self.done / 2 and total >= self.total / 2))


@dataclass(slots=True)
class RankCounters:
    """Counts of one pattern by data-parallel rank."""

    unit: str
    source: str | None = None
    has_total: bool = False
    passed: bool = False  # whether it ended and was replaced by another pattern
    whole: bool = False  # whether it counts over all epochs, although its records contain the epoch
    of_epoch: bool = False  # whether a separate pattern found the epoch in its records
    offset: int | None = None  # offset of its last record
    counts: dict[int | None, LogCounter] = field(default_factory=dict)
    epochs: dict[int | None, EpochCounter] = field(default_factory=dict)
    highest: float = 0.0  # highest count of the slowest rank in this run

    def active(self) -> list[LogCounter]:
        """Counts of the active ranks; those with a record in this run, if any."""
        counts = [count for count in self.counts.values() if count.done is not None]
        counts = [count for count in counts if not count.begins] or counts
        last = max((count.seen for count in counts), default=0.0)
        return counts if self.unit in SUMMED_UNITS else [count for count in counts if last - count.seen <= RANK_FRESH_S]

    def start_at(self, base: float | None, rank: int | None = None) -> None:
        """Make the next position of one rank, or of all, start or continue a count at ``base``."""
        for of, count in self.counts.items():
            if rank is None or of == rank:
                count.begins, count.base = True, base
        for of, epochs in self.epochs.items():
            if rank is None or of == rank:
                epochs.index = None

    def position(self) -> tuple[float | None, float | None]:
        """(done, total) of all ranks: the sum if they share the work, else the slowest."""
        if len(self.counts) == 1:
            (count,) = self.counts.values()
            return (count.done, count.total) if count.done is not None else (None, None)
        counts = self.active()
        if not counts:
            return None, None
        if self.unit in SUMMED_UNITS:
            totals = [count.total for count in counts if count.total is not None]
            return sum(count.done or 0 for count in counts), sum(totals) if len(totals) == len(counts) else None
        slowest = min(counts, key=lambda count: count.done or 0)
        return slowest.done, slowest.total
