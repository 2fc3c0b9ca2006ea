"""The work of a whole job, out of the entries of its workers, each in its own unit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exporter.logs.search.findings import ADDED_UP, UNITS

ITEMS = UNITS[0]
BARS = frozenset(("bar", "plain_bar"))
"""Patterns of progress bars. Those of tqdm count iterations, be they items or batches, and do not say which."""
BATCH_LEAST = 1.5  # bars that come to less than the items of the job by this factor count batches of them


@dataclass(frozen=True)
class JobWork:
    """How far a job is. Everything is None before the first position, and where workers count different things."""

    units: tuple[str, ...] = ()  # what the positions count, each once; none before the first position
    done: int | None = None
    expected: int | None = None  # as the logs of the workers say, whatever the job file does
    processed: int | None = None
    whole: bool = False  # whether every worker has a position
    bars: bool = False  # whether the positions are those of progress bars

    @property
    def unit(self) -> str | None:
        """What the job counts; None before the first position, and where workers count different things."""
        return self.units[0] if len(self.units) == 1 else None

    @property
    def counts_items(self) -> bool:
        """Whether the items of the job file are what is counted, as far as anything is yet."""
        return self.units in ((), (ITEMS,))

    def counts_items_of(self, total_items: int | None) -> bool:
        """Whether the items of the job file are what is counted, so many as that says there are."""
        few = self.bars and total_items and self.expected and self.expected * BATCH_LEAST <= total_items
        return self.counts_items and not few

    @property
    def in_step(self) -> bool:
        """Whether all workers do the same work, so that the slowest counts."""
        return self.unit is not None and self.unit not in ADDED_UP

    def expected_of(self, total_items: int | None) -> int | None:
        """What there is to do: items as the job file says, all else as the logs say."""
        return total_items or self.expected if self.counts_items_of(total_items) else self.expected


def job_work(workers: Iterable[Mapping[str, Any]]) -> JobWork:
    """The work of workers with ``unit`` (None: items), ``items``, ``items_expected``, and ``items_processed``.

    What workers share is added up. Of workers in step the slowest counts: of those whose total is known, if it is of
    any, and of those that are not ``critical`` only where no other has a position.
    """
    workers = list(workers)
    known = [worker for worker in workers if worker.get("items") is not None]
    units = tuple(dict.fromkeys(worker.get("unit") or ITEMS for worker in known))
    whole = len(known) == len(workers)
    bars = bool(known) and all(worker.get("pattern") in BARS for worker in known)
    if len(units) > 1:
        return JobWork(units, whole=whole)
    if not units or units[0] in ADDED_UP:
        done, expected, processed = (_sum(workers, key) for key in ("items", "items_expected", "items_processed"))
        return JobWork(units, done, expected, processed, whole, bars)
    known = [worker for worker in known if worker.get("critical", True)] or known
    known = [worker for worker in known if worker.get("items_expected")] or known
    slowest = min(known, key=lambda worker: worker["items"] / (worker.get("items_expected") or 1))
    done, expected, processed = (slowest.get(key) for key in ("items", "items_expected", "items_processed"))
    return JobWork(units, done, expected, processed, whole)


def job_rate(workers: Iterable[Mapping[str, Any]], work: JobWork) -> float | None:
    """Units per second of the job: the rates of ``workers`` added up, or the lowest where they are in step."""
    rates = [float(worker["rate"]) for worker in workers if worker.get("rate") is not None]
    if not rates or len(work.units) > 1:
        return None
    return min(rates) if work.in_step else sum(rates)


def unit_word(entry: Mapping[str, Any]) -> str:
    """What the position of a worker or a job counts, as a word; items where that is not said."""
    return str(entry.get("unit") or ITEMS)


def _sum(workers: Iterable[Mapping[str, Any]], key: str) -> int | None:
    known = [worker[key] for worker in workers if worker.get(key) is not None]
    return sum(known) if known else None
