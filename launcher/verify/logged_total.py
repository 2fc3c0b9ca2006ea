"""Whether workers completed the total that their own log states, or short of it."""

from collections.abc import Collection, Iterable, Sequence

from exporter.contract.status import TaskPosition
from exporter.progress.progress_file import PATTERN as PROGRESS_FILE
from exporter.progress.work import ITEMS, unit_word

# Patterns whose total is that of the worker's whole work. Those of bars, steps, batches and epochs may be of a part.
STATED_TOTALS = frozenset((ITEMS, PROGRESS_FILE))
UNLOGGED_STEPS = 2  # intervals of the log that may be missing at its end: the last one, and a shorter one
SHARED_TOTAL_LEAST = 0.1  # least missing share if the workers may all log the position of one common count


def short_workers(workers: Iterable[TaskPosition], share: float, counts_epochs: Collection[int]) -> list[TaskPosition]:
    """Critical workers whose logs show that items of their own total were left.

    ``share`` is the share of the total that is enough. Ranks of ``counts_epochs`` may stop early. Nothing is certain of
    a count that restarted, that was first seen after a resume, or whose rest is within two intervals of the log.
    """
    counted = [worker for worker in workers if worker.critical and _states_total(worker)]
    return [
        worker
        for worker in counted
        if worker.rank not in counts_epochs and _is_short(worker, share) and not _may_share_total(worker, counted)
    ]


def state_totals(workers: Iterable[TaskPosition], counts_epochs: Collection[int]) -> bool:
    """Whether the logs show the total of the whole work: every critical worker states that of its own.

    The work of one without a position is unknown. But if only the first of a role has one, it logs for all.
    """
    critical = [worker for worker in workers if worker.critical]
    counted = [worker for worker in critical if worker.items is not None]
    if not counted:
        return False
    first = min(worker.rank for worker in critical if worker.role == counted[0].role)
    is_whole = len(counted) == len(critical) or [worker.rank for worker in counted] == [first]
    return is_whole and all(_states_total(each) and each.rank not in counts_epochs for each in counted)


def _states_total(worker: TaskPosition) -> bool:
    counts_items = unit_word(worker.unit) == ITEMS and worker.pattern in STATED_TOTALS
    return counts_items and worker.items is not None and bool(worker.items_expected)


def _is_short(worker: TaskPosition, share: float) -> bool:
    done, total, step = worker.items or 0, worker.items_expected or 0, worker.items_first
    is_one_count = worker.items_processed is None or worker.items_processed <= done
    return bool(step) and is_one_count and done < share * total and total - done > UNLOGGED_STEPS * (step or 0)


def _may_share_total(worker: TaskPosition, counted: Sequence[TaskPosition]) -> bool:
    """Whether the workers may take their items from one queue and log its total, or its position."""
    total = worker.items_expected or 0
    others = [other for other in counted if other.role == worker.role and other.items_expected == total]
    if len(others) < 2 or sum(other.items or 0 for other in others) < total:
        return False
    own_totals = any((other.items or 0) >= total for other in others)
    return not own_totals or total - (worker.items or 0) <= SHARED_TOTAL_LEAST * total
