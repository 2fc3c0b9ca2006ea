"""Workers that completed short of the total of their own log."""

from typing import Any

import pytest

from exporter.contract.status import TaskPosition
from exporter.progress.work import ITEMS
from launcher.verify.logged_total import short_workers, state_totals


def worker(rank: int = 0, done: float | None = 6, total: float | None = 20, **over: Any) -> TaskPosition:
    given = {"worker": f"w{rank}", "pattern": ITEMS, "items_first": 1, "items_processed": done, **over}
    return TaskPosition(rank=rank, role="worker", items=done, items_expected=total, **given)


def short(*workers: TaskPosition, share: float = 0.99, epochs: tuple[int, ...] = ()) -> list[int]:
    return [each.rank for each in short_workers(workers, share, epochs)]


def test_a_worker_that_ends_far_from_the_total_of_its_log_is_short() -> None:
    assert short(worker()) == [0]
    assert short(worker(pattern="progress_file", unit="items")) == [0]
    assert short(worker(items_processed=None)) == [0]


@pytest.mark.parametrize(
    "complete",
    [
        worker(done=20),
        worker(done=None),
        worker(total=None),
        worker(critical=False),
        worker(done=980, total=1000, items_first=10),  # the log may skip the rest of its last interval
        worker(done=996, total=1000),  # enough by `complete_share`
    ],
)
def test_a_worker_within_reach_of_its_total_is_not_short(complete: TaskPosition) -> None:
    assert short(complete) == []


@pytest.mark.parametrize(
    "unsure",
    [
        worker(pattern="bar"),
        worker(pattern="epoch_items"),
        worker(pattern="samples"),
        worker(unit="steps"),
        worker(unit="requests"),
        worker(items_processed=1006),  # an evaluation after 1000 items
        worker(items_first=None),  # a resume
        worker(items_first=0),  # no interval known
    ],
)
def test_a_count_that_may_be_of_a_part_of_the_work_proves_nothing(unsure: TaskPosition) -> None:
    assert short(unsure) == []


@pytest.mark.parametrize("unsure", [worker(1, pattern="bar"), worker(1, unit="steps"), worker(1, total=None)])
def test_the_logs_show_the_whole_work_if_every_count_has_its_own_total(unsure: TaskPosition) -> None:
    assert state_totals([worker(0), worker(1, done=None, total=None)], ())
    assert not state_totals([worker(0)], (0,))
    assert not state_totals([worker(0), unsure], ())
    assert not state_totals([worker(done=None)], ())


SILENT = worker(2, done=None, total=None)
SERVER = SILENT.replace(rank=3, role="server")
HELPER = SILENT.replace(rank=4, critical=False)


@pytest.mark.parametrize(
    ("workers", "is_whole"),
    [
        ((worker(0), worker(1)), True),
        ((worker(0), worker(1), HELPER), True),
        ((worker(0), SILENT), True),  # the first worker logs for all
        ((worker(0), SERVER), True),
        ((worker(0), worker(1), SILENT), False),
        ((SILENT.replace(rank=0), worker(1)), False),
        ((worker(0), worker(1), SERVER), False),
        ((SILENT, worker(4, critical=False)), False),
    ],
)
def test_a_silent_worker_may_have_lost_its_work_unless_the_first_one_logs_for_all(
    workers: tuple[TaskPosition, ...], is_whole: bool
) -> None:
    assert state_totals(workers, ()) == is_whole


def test_a_smaller_share_accepts_less() -> None:
    assert short(worker(), share=0.3) == []
    assert short(worker(), share=0.31) == [0]


def test_items_within_epochs_may_stop_early() -> None:
    assert short(worker(), epochs=(0,)) == []


def test_workers_that_share_a_queue_are_not_short() -> None:
    queue = [worker(rank, done=done) for rank, done in enumerate((6, 9, 5))]  # 20 in all
    assert short(*queue) == []
    common_count = [worker(rank, done=done, total=100) for rank, done in enumerate((94, 97, 100))]
    assert short(*common_count) == []


def test_workers_with_totals_of_their_own_are_short() -> None:
    assert short(worker(0, done=20), worker(1, done=20), worker(2, done=6)) == [2]
    assert short(worker(0, done=6), worker(1, done=6)) == [0, 1]  # short of a common total as well
    assert short(worker(0, done=6), worker(1, done=30, total=30)) == [0]
