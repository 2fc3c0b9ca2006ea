"""Work of a whole job, from the entries of its workers."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import EtaEstimate, ProgressFacts, TaskPosition, WorkerStatus
from exporter.logs.search.findings import SUMMED_UNITS, UNITS
from exporter.progress.eta.interval import slowest_eta

if TYPE_CHECKING:
    from exporter.contract.view import WorkerView

P = TypeVar("P", bound=TaskPosition)
W = TypeVar("W", bound=ProgressFacts)

ITEMS = UNITS[0]
# Patterns of progress bars; those of tqdm count items or batches and do not show which.
BARS = frozenset(("bar", "plain_bar"))
LEAST_PER_SECOND = 0.01  # slower work is counted by the hour
BATCH_LEAST = 1.5  # bars whose total is this factor below the job's items count batches


@dataclass(frozen=True)
class JobWork:
    """Progress of a job; all None before the first position, or if workers count different units."""

    units: tuple[str, ...] = ()  # units of the positions, without repeats; empty before the first position
    done: float | None = None
    expected: float | None = None  # total from the logs, independent of the job file
    processed: float | None = None
    has_all_positions: bool = False  # whether every worker that counts has a position
    has_only_bars: bool = False  # whether all positions are from progress bars

    @property
    def unit(self) -> str | None:
        """Unit of the job; None before the first position, or if workers count different units."""
        return self.units[0] if len(self.units) == 1 else None

    @property
    def counts_items(self) -> bool:
        """Whether the job counts items of the job file, as far as known."""
        return self.units in ((), (ITEMS,))

    def counts_total_items(self, total_items: int | None) -> bool:
        """Whether the job counts items, and about as many as the job file specifies."""
        few = self.has_only_bars and total_items and self.expected and self.expected * BATCH_LEAST <= total_items
        return self.counts_items and not few

    @property
    def is_in_step(self) -> bool:
        """Whether all workers do the same work, so that the slowest one counts."""
        return self.unit is not None and self.unit not in SUMMED_UNITS

    def expected_total(self, total_items: int | None) -> float | None:
        """Total of the job: items from the job file, other units from the logs."""
        return total_items or self.expected if self.counts_total_items(total_items) else self.expected


def counting_workers(workers: Iterable[P]) -> list[P]:
    """Workers whose work is that of the job: the critical ones, or all while no critical one has a position."""
    workers = list(workers)
    critical = [worker for worker in workers if worker.critical]
    return critical if any(worker.items is not None for worker in critical) else workers


def position_units(workers: Iterable[TaskPosition]) -> tuple[str, ...]:
    """Units of the positions of these workers, without repeats."""
    return tuple(dict.fromkeys(unit_word(worker.unit) for worker in workers if worker.items is not None))


def job_work(workers: Iterable[TaskPosition]) -> JobWork:
    """Work of a job from the positions of its workers that count.

    Shared work is summed. For workers in step the slowest counts, preferably among those with a known total.
    """
    workers = counting_workers(workers)
    known = [worker for worker in workers if worker.items is not None]
    units = position_units(workers)
    whole = len(known) == len(workers)
    bars = bool(known) and all(worker.pattern in BARS for worker in known)
    if len(units) > 1:
        return JobWork(units, has_all_positions=whole)
    if not units or units[0] in SUMMED_UNITS:
        done = _sum(worker.items for worker in workers)
        expected = _sum(worker.items_expected for worker in workers)
        return JobWork(units, done, expected, _sum(worker.items_processed for worker in workers), whole, bars)
    known = [worker for worker in known if worker.items_expected] or known
    slowest = min(known, key=lambda worker: (worker.items or 0) / (worker.items_expected or 1))
    return JobWork(units, slowest.items, slowest.items_expected, slowest.items_processed, whole)


def job_rate(workers: Iterable[ProgressFacts], work: JobWork) -> float | None:
    """Units per second of the job: the sum of the workers' rates, or the lowest if they are in step."""
    return _joint_rate((worker.rate for worker in workers), work)


def job_average_rate(workers: Iterable[ProgressFacts], work: JobWork) -> float | None:
    """The same since the first positions of the workers' runs, so without the time in which they load."""
    return _joint_rate((worker.average_rate for worker in workers), work)


def with_current_eta(worker: W, now: float) -> W:
    """The worker with its ETA counted from ``now``, so that the moment of the end stays.

    Once it is overdue there is none, and only its time stays.
    """
    if worker.eta is None or worker.eta_time is None:
        return worker
    age = max(0.0, now - worker.eta_time)
    if 0 < worker.eta.high < age:  # complete work is never overdue
        return worker.replace(eta=None)
    return worker.replace(eta=EtaEstimate(*(max(0.0, left - age) for left in worker.eta)), eta_time=now)


def may_share_queue(positions: Sequence[tuple[str | None, float, float | None]], total_items: int | None) -> bool:
    """Whether several workers may take their items from one queue, so that none works up to its own total.

    ``positions`` has the unit, position and total of each. Each total is that of the whole job, and all together have
    not done more than that.
    """
    return (
        total_items is not None
        and len(positions) > 1
        and all(unit_word(unit) == ITEMS and (total or 0) >= total_items for unit, _, total in positions)
        and sum(done for _, done, _ in positions) <= total_items
    )


def job_eta(
    workers: "Sequence[WorkerView] | Sequence[WorkerStatus]", total_items: int | None = None
) -> EtaEstimate | None:
    """ETA of the job: that of its slowest worker that counts.

    None if a running worker with a position has no ETA, or if the workers may share a queue of ``total_items``. If any
    worker has a position, those without one are ignored: often only the first worker writes a log. So are workers with
    an overdue ETA: they are about to end.
    """
    counting: list[WorkerView | WorkerStatus] = counting_workers(workers)
    positions = [(worker.unit, worker.items, worker.items_expected) for worker in counting if worker.items is not None]
    if may_share_queue(positions, total_items):
        return None
    progressing = any(worker.items is not None for worker in counting)
    estimates = [
        worker.eta
        for worker in counting
        if not (worker.exit or (progressing and worker.items is None) or (worker.eta is None and worker.eta_time))
    ]
    return None if None in estimates else slowest_eta(estimates)


def unit_word(unit: str | None) -> str:
    """Unit of a position as a word; "items" if unspecified."""
    return unit or ITEMS


def speed_text(rate: float, unit: str = "") -> str:
    """``12.3 items/s``, below one with three digits, ``0.0303 items/s``; below 0.01 by the hour, ``4.0 items/h``."""
    count, time = (rate, "s") if rate >= LEAST_PER_SECOND else (3600 * rate, "h")
    digits = f"{count:.1f}" if count >= 1 else f"{count:.3g}"
    return f"{digits} {unit}/{time}" if unit else f"{digits}/{time}"


def _joint_rate(rates: Iterable[float | None], work: JobWork) -> float | None:
    known = [rate for rate in rates if rate is not None]
    if not known or len(work.units) > 1:
        return None
    return min(known) if work.is_in_step else sum(known)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
