"""Turns positions in logs into work done, across resumes, restarts and falling counters."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.search.findings import SUMMED_UNITS, ActivityMark, LogPosition, LogValue
from exporter.progress.counters import EpochCounter, LogCounter, RankCounters
from exporter.progress.resumes import EarlierProgress, UndecidedStart, is_resume, may_be_resume


def items_of_worker(total_of_job: int | None, workers: int, index: int) -> int | None:
    """Share of one of ``workers`` workers when items are dealt out in turn; None without a total."""
    if total_of_job is None or workers <= 0:
        return None
    return total_of_job // workers + (index < total_of_job % workers)


def items_of_rank(total_of_job: int | None, tasks: Iterable[tuple[str, str, int, bool]], rank: int) -> int | None:
    """Share of the task's worker when items are dealt out to the workers of its role.

    ``tasks`` are all tasks of the job, as (role, worker, rank, whether critical). All tasks of a worker have its whole
    share. None without a total or such a task. With several roles, the role that does the items is known only if it
    alone is critical; else None.
    """
    tasks = sorted(tasks, key=lambda task: task[2])
    own = next(((role, worker) for role, worker, of, _ in tasks if of == rank), None)
    if own is None:
        return None
    if len({role for role, *_ in tasks}) > 1 and {role for role, _, _, critical in tasks if critical} != {own[0]}:
        return None
    workers = list(dict.fromkeys(worker for role, worker, *_ in tasks if role == own[0]))
    return items_of_worker(total_of_job, len(workers), workers.index(own[1]))


EPOCH_BASE = 1
EVALUATING_MOST_S = 3600.0  # an evaluation without a logged end is believed for this long
MOST_RANKS = 4096


@dataclass
class TrackState:
    """The part of a track that is saved."""

    pattern: str | None = None
    processed: float | None = None
    last_rise: float | None = None
    epoch: int | None = None
    epochs: int | None = None
    # Number of changes of pattern or source. Positions before and after a change are not of one count.
    changes: int = 0
    began: float | None = None  # start of the current run; if None, the first position is work
    _before: tuple[str, float] | None = None  # unit and work of earlier runs
    _patterns: dict[str, RankCounters] = field(default_factory=dict)
    _order: int = 0
    _evaluating_since: float | None = None
    _epoch_base: int = EPOCH_BASE
    _epoch_record: tuple[str, int] | None = None  # log and offset of the last record that counted epochs
    _count_in_epoch: tuple[str, int, int, int | None] | None = None  # log, offset and count of the last one
    _resumed: tuple[str, float, float | None] | None = None
    _from: float | None = 0.0  # start value of new counters
    _bases: dict[str, float] = field(default_factory=dict)  # start value after a resume, by unit


class ProgressTrack(TrackState):
    """Progress of one worker over all its runs, from the positions in its logs.

    - For each pattern the first log with positions counts, since a worker may write the same lines to two. A source of
      higher order, such as a progress file, replaces all of lower order.
    - In force is the first pattern of ``preference`` among those with a total, else the first seen. After it ends, a
      pattern with a larger total replaces it. A change of pattern is neither work nor a reset.
    - Counters that restart at each epoch are summed over epochs. Counts of shared work are summed over ranks; of ranks
      in step the slowest counts.
    - A slightly lower position is a record out of order, unless the count stays there. A far lower one is a reset when
      a second record confirms it. Neither is work, nor is an announced resume.
    - The first position of a run without an announced resume is work, unless it is a resume by the rules of
      ``progress.resumes``.
    - A count with another total is another counter, such as a validation, while the one in force has work left. During
      a logged evaluation it always is. It does not count, but sets ``has_other_counter``.

    ``processed`` is the work done since the job started, in units of the pattern in force. It falls only when a source
    of higher order counts another unit: then it restarts at the work of earlier runs in that unit. Everything is None
    before the first position.
    """

    def __init__(
        self,
        preference: Sequence[str] = (),
        *,
        epoch_bases: Mapping[str, int] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        share: int | None = None,
        earlier: EarlierProgress | None = None,
        state: TrackState | None = None,
    ) -> None:
        """Create a track; ``epochs``, ``steps`` and ``share`` (of items) are totals to use if the log has none.

        If a worker exceeds such a total, its real total is unknown. ``earlier`` is its progress in an earlier attempt
        of the job. It continues from ``state``, which must not be used again.
        """
        state = state if state is not None else TrackState(epochs=epochs)
        super().__init__(*(getattr(state, field.name) for field in fields(TrackState)))
        if self.pattern is not None and self.pattern not in self._patterns:
            raise ValueError(f"pattern {self.pattern!r} is in force and unknown")
        self._preference = {name: index for index, name in reversed(list(enumerate(preference)))}
        self._epoch_bases = dict(epoch_bases or {})
        self._epochs = epochs
        self._steps = steps
        self._share = share
        self._earlier = earlier
        # Whether positions are skipped at present, so that the first one says nothing about a resume.
        self.skips_positions = False

    @property
    def unit(self) -> str | None:
        """Unit of the position."""
        if self.pattern is not None:
            return self._patterns[self.pattern].unit
        return self._resumed[0] if self._resumed is not None else None

    @property
    def done(self) -> float | None:
        """Current position."""
        return self.standing()[0]

    @property
    def total(self) -> float | None:
        """Total from the log, else from the job file."""
        return self.standing()[1]

    def standing(self) -> tuple[float | None, float | None]:
        """``done`` and ``total``, at the cost of one."""
        done, total = self._logged()
        if total is None:
            expected = self._expected_total(self.unit)
            total = None if expected is not None and (done or 0) > expected else expected
        return done, total

    def _logged(self) -> tuple[float | None, float | None]:
        """Position and total according to the log."""
        if self.pattern is not None:
            return self._patterns[self.pattern].position()
        return self._resumed[1:] if self._resumed is not None else (None, None)

    def _expected_total(self, unit: str | None) -> int | None:
        """Total of this unit for the worker, from the job file."""
        if unit in (None, "items", "requests"):
            return self._share
        return {"steps": self._steps, "epochs": self._epochs}.get(unit or "")

    @property
    def has_other_counter(self) -> bool:
        """Whether another counter than the one in force is moving."""
        if self.pattern is not None:
            for count in self._patterns[self.pattern].counts.values():
                if count.aside_since is not None:
                    return True
        return False

    @property
    def may_go_on(self) -> bool:
        """Whether another counter moves after the one in force ended: an evaluation, or the next part of the work."""
        force = self._patterns.get(self.pattern or "")
        return force is not None and any(
            count.aside_since is not None and count.has_ended for count in force.counts.values()
        )

    def begin_run(self) -> None:
        """Start a new run: its first position counts from 0, unless it is a resume."""
        self.decide_starts()
        if self.unit is not None and self.processed is not None:
            self._before = self.unit, self.processed
        self.began = None
        self._order = 0
        self._evaluating_since = None
        self._from = 0.0
        self._bases = {}
        self.epoch, self.epochs = None, self._epochs
        for pattern in self._patterns.values():
            pattern.source, pattern.passed = None, False
            pattern.start_at(0.0)

    @property
    def first(self) -> float | None:
        """First position of a run that started at 0, if seen; the largest for ranks in step."""
        force = self._patterns[self.pattern] if self.pattern is not None else None
        if force is not None and (len(force.counts) == 1 or force.unit not in SUMMED_UNITS):
            known = [count.first for count in force.counts.values() if count.first is not None]
            if known:
                return max(known)
        return self._earlier.first if self._earlier is not None and self._earlier.unit == self.unit else None

    def decide_starts(self) -> None:
        """End the run: decide undecided first positions with the available records."""
        for count in self._counts():
            if count.start is not None and count.start.decide():
                self.processed = (self.processed or 0) + count.start.done
                count.first = count.start.done
            count.start = None

    def _counts(self) -> Iterator[LogCounter]:
        for pattern in self._patterns.values():
            yield from pattern.counts.values()

    def apply_activity(self, activity: ActivityMark, t: float) -> None:
        """Take a record about the worker's activity."""
        if activity.name == "evaluating":
            self._evaluating_since = t if activity.begins else None

    def update(self, source: str, position: LogPosition, t: float, order: int = 0) -> bool:
        """Take a position of a source at time ``t``; whether it is of the count in force."""
        if self._update_fast(source, position, t, order):
            return True
        if not self._accepts(source, position.pattern, position.unit, order):
            return False
        if position.resumed:
            self._resume(position, t)
            return True
        count = source, position.offset, position.done, position.total
        if position.epoch is not None:
            self._count_in_epoch = count
        elif self._count_in_epoch == count:
            return False  # the same count, by a pattern that does not see its epoch
        self._detect_epoch_records(source, position)
        return self._apply(position, t)

    def _update_fast(self, source: str, position: LogPosition, t: float, order: int) -> bool:
        """Take a record that only raises the count in force, as nearly all do; false for any other.

        A shortcut of ``update``, which would do the same in four times the time.
        """
        if position.pattern != self.pattern or order != self._order or position.resumed or position.epoch is not None:
            return False
        if self.epoch is not None or self._evaluating_since is not None:
            return False
        pattern = self._patterns[self.pattern]
        count = pattern.counts.get(position.rank)
        if (
            count is None
            or count.start is not None
            or pattern.source != source
            or pattern.unit not in SUMMED_UNITS
            or pattern.passed
            or not pattern.has_total
        ):
            return False
        if count.begins or count.done is None or position.total is None or position.total != count.total:
            return False
        rise = position.done - count.done
        if rise < 0:
            return False
        pattern.offset = position.offset
        count.accept_rise(position.done, t)
        count.epoch = None
        self.processed = (self.processed or 0) + rise
        if rise:
            self.last_rise = t
        return True

    def _accepts(self, source: str, name: str, unit: str, order: int) -> bool:
        """Whether the pattern accepts this source."""
        if order < self._order:
            return False
        if order > self._order:
            self.decide_starts()
            self._order = order
            force = self._patterns[self.pattern] if self.pattern is not None else None
            goes_on = force is not None and self.pattern == name and force.source in (None, source)
            if force is not None and not goes_on:
                done, total = self._logged()
                self._resumed = (force.unit, done or 0, total)
                self._from = None  # the same work in another unit
                self._bases = {}
                self.changes += 1
                if force.unit != unit:
                    self.processed = self._before[1] if self._before is not None and self._before[0] == unit else 0
            # Keep what it has counted in an earlier run.
            self._patterns = {name: force} if force is not None and goes_on else {}
            self.pattern = name if goes_on else None
        pattern = self._patterns.setdefault(name, RankCounters(unit))
        if pattern.source is None:
            pattern.source = source
        return pattern.source == source

    def _resume(self, position: LogPosition, t: float) -> None:
        """Continue the work at this position."""
        for count in self._counts():
            count.start = None
        self._resumed = (position.unit, position.done, position.total)
        self._from = None
        self._bases[position.unit] = position.done
        self.processed = self.processed or 0
        if position.unit == "epochs":
            self._update_epoch(position)
        for pattern in self._patterns.values():
            if pattern.unit != position.unit:
                pattern.start_at(None, position.rank)
                continue
            pattern.start_at(position.done, position.rank)
            if len(pattern.counts) == 1 and not pattern.epochs:
                (count,) = pattern.counts.values()
                count.done, count.seen = position.done, t
                count.total = position.total if position.total is not None else count.total

    def _detect_epoch_records(self, source: str, position: LogPosition) -> None:
        """Note which patterns are in the same records as an epoch."""
        pattern = self._patterns[position.pattern]
        pattern.offset = position.offset
        if pattern.unit == "epochs":
            self._epoch_record = source, position.offset
            for other in self._patterns.values():
                other.of_epoch |= other.source == source and other.offset == position.offset
        elif self._epoch_record == (source, position.offset):
            pattern.of_epoch = True

    def _update_epoch(self, position: LogPosition) -> None:
        """Note the current epoch."""
        epoch = position.epoch
        if epoch is None and position.unit == "epochs":
            epoch = position.done
            self._epoch_base = self._epoch_bases.get(position.pattern, EPOCH_BASE)
        if epoch is not None:
            self.epoch = epoch
            total = position.total if position.unit == "epochs" else None
            epochs = position.epochs if position.epochs is not None else total
            if epochs is not None:
                self.epochs = epochs
            elif self.epochs == self._epochs is not None and epoch > self._epochs:
                self._drop_epochs()

    def _drop_epochs(self) -> None:
        """Drop the number of epochs: the worker exceeded the job file's."""
        self.epochs = None
        for pattern in self._patterns.values():
            for rank, count in pattern.counts.items():
                if rank in pattern.epochs:
                    count.total = None

    def _apply(self, position: LogPosition, t: float) -> bool:
        done: float = position.done
        total: float | None = position.total
        name, rank = position.pattern, position.rank
        pattern = self._patterns[name]
        since = self._evaluating_since
        evaluating = since is not None and t - since < EVALUATING_MOST_S
        if evaluating and self.pattern not in (None, name):
            return False
        count = pattern.counts.get(rank)
        if count is None:
            if len(pattern.counts) >= MOST_RANKS:
                return False
            base = self._bases.get(pattern.unit, self._from)
            count = pattern.counts[rank] = LogCounter(base=base)
        self._update_epoch(position)
        if pattern.unit != "epochs" and self.epoch is not None:
            over = self._position_over_epochs(pattern, count, position, t, evaluating)
            if over is None:
                return False
            done, total = over
        known = count.done is not None
        begins = count.begins and all(other.begins for other in pattern.counts.values())
        shared = count.begins and pattern.unit in SUMMED_UNITS
        undecided_start = self._undecided_start(pattern.unit, count, done, total, t) if begins or shared else None
        taken = count.accept(done, total, t, evaluating=evaluating)
        if taken is None:
            return False
        rise, again = taken
        count.epoch = self.epoch
        pattern.has_total |= total is not None or (pattern.unit == "steps" and self._steps is not None)
        if begins:
            pattern.highest = count.base if count.base is not None else done
        before = self.pattern
        if not self._choose_pattern(name, pattern):
            return False
        if pattern.unit not in SUMMED_UNITS:
            several = len(pattern.counts) > 1
            slowest = (pattern.position()[0] if several else count.done) or 0
            if again and known and not begins:
                pattern.highest = min(pattern.highest, slowest)
            rise = max(0, slowest - pattern.highest) if several else rise
            pattern.highest = max(pattern.highest, slowest)
        if before not in (None, name):
            rise = 0
            self.changes += 1
            self.decide_starts()
        elif undecided_start is not None:
            count.start = undecided_start
        elif count.start is not None and (was_work := count.start.update(done, t, total)) is not None:
            worked = count.start.done if was_work else 0
            count.first = worked or count.step  # its first position if it started at 0
            count.start = None
            rise += worked
        self.processed = (self.processed or 0) + rise
        if rise:
            self.last_rise = t
            self._evaluating_since = None  # it works again, whether logged or not
        return True

    def _undecided_start(
        self, unit: str, count: LogCounter, done: float, total: float | None, t: float
    ) -> UndecidedStart | None:
        """The first position of a count in this run, if later records must decide whether it was work.

        If it was not, or is undecided, the count continues from it.
        """
        if count.base != 0.0 or self.skips_positions:
            return None  # its start value is known, or positions before it were skipped
        earlier = self._earlier if self._earlier is not None and self._earlier.unit == unit else None
        if count.done is not None:
            known = count.first if count.first is not None or earlier is None else earlier.first
            earlier = EarlierProgress(unit, count.done, count.total, known)
        resumes = is_resume(done, total, earlier) if earlier is not None else None
        open_ = resumes is None and self.began is not None and may_be_resume(done, total, t - self.began)
        if resumes or open_:
            count.base = None
        else:
            count.first = done
        return UndecidedStart.from_position(done, t, self.began) if open_ and self.began is not None else None

    def _position_over_epochs(
        self, pattern: RankCounters, count: LogCounter, position: LogPosition, t: float, evaluating: bool
    ) -> tuple[float, float | None] | None:
        """(done, total) over all epochs, for a counter that restarts at each; None if it is another counter.

        Records with an epoch, or the unit, show whether it restarts; otherwise this is learned.
        """
        batch, size, epoch, epochs = position.done, position.total, self.epoch, self.epochs
        told_here = position.epoch is not None
        over = pattern.epochs.get(position.rank)
        if epoch is None or pattern.whole:
            return batch, size
        if over is None:
            over = EpochCounter(self._epoch_bases.get(position.pattern, EPOCH_BASE) if told_here else self._epoch_base)
            if told_here or pattern.of_epoch or pattern.unit == "batches":
                if not count.begins and over.epoch_index(epoch, epochs):
                    count.begins, count.base = True, None  # it counted within one epoch so far
            elif not self._restarts_with_epoch(over, count, batch, size):
                return batch, size
            pattern.epochs[position.rank] = over
        base = over.base
        index = over.epoch_index(epoch, epochs)
        if over.base != base and not count.begins:
            count.begins, count.base = True, None
        if not told_here:
            index = over.resolve_index(batch, size, index, epochs)
        if over.spans_epochs(batch, size, index, epochs):
            pattern.whole = True
            if over.past:
                pattern.start_at(None)
            return batch, size
        is_other = over.is_other_counter(batch, size, index, evaluating=evaluating)
        if is_other and (count.ignore_other(batch, size, t) or evaluating):
            return None
        return over.update(batch, size, index, epochs)

    def _restarts_with_epoch(self, over: EpochCounter, count: LogCounter, batch: float, size: float | None) -> bool:
        """Whether the counter restarted with an epoch, so that its earlier count was of one epoch.

        Also if it ends, or is replaced by a shorter one, before the last epoch.
        """
        if count.begins or count.done is None or count.epoch is None or self.epoch is None:
            return False
        index = over.epoch_index(count.epoch, self.epochs)
        fell = self.epoch > count.epoch and batch < count.done / 2
        to_come = self.epochs is not None and index + 1 < self.epochs
        shorter = None not in (size, count.total) and (size or 0) < (count.total or 0)
        if not fell and not (to_come and count.has_ended and (shorter or (size == count.total and batch < count.done))):
            return False
        step = count.step
        count.done, count.total = over.update(count.done, count.total, index, self.epochs)
        over.step = step
        return True

    def _choose_pattern(self, name: str, pattern: RankCounters) -> bool:
        """Whether the pattern of the latest record is in force."""
        if self.pattern is None or self.pattern == name:
            self.pattern = name
            return True
        force = self._patterns[self.pattern]
        better = pattern.has_total and (
            not force.has_total or self._preference_rank(name) < self._preference_rank(self.pattern)
        )
        (_, old), (_, new) = force.position(), pattern.position()
        if old is not None and new is not None and new > old and all(count.has_ended for count in force.active()):
            force.passed = better = True
        if pattern.passed or not better:
            return False
        self.pattern = name
        return True

    def _preference_rank(self, name: str) -> int:
        """Rank in the order of preference; whole epochs, the coarsest count, come last unless preferred."""
        return self._preference.get(name, len(self._preference) + (self._patterns[name].unit == "epochs"))


# Endings of value names that have a separate part for each data-parallel rank.
ADDED_ENDINGS = ("_per_second", "_requests")


def combine_ranks(name: str, values: Mapping[int | None, LogValue], now: float, fresh_s: float) -> float | None:
    """Combine the values of a worker's data-parallel ranks into one number; None if none is fresh.

    Rates and requests are summed; for other values the latest counts. Values without a time, or older than ``fresh_s``,
    are omitted. A value without a rank is omitted next to others, since it may be their sum.
    """
    fresh = {rank: v for rank, v in values.items() if v.stamp is not None and now - v.stamp < fresh_s}
    if len(fresh) == 1:
        return next(iter(fresh.values())).number
    if len(fresh) > 1:
        fresh.pop(None, None)
    if not fresh:
        return None
    if name.endswith(ADDED_ENDINGS):
        return math.fsum(value.number for value in fresh.values())
    return max(fresh.values(), key=lambda value: (value.stamp or 0.0, value.offset)).number
