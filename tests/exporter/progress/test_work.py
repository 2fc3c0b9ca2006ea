"""Progress of a job whose workers share the work, run in step, or count different things."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.status import EtaEstimate, WorkerStatus
from exporter.logs.search.findings import UNITS
from exporter.progress.work import JobWork, job_eta, job_rate, job_work, speed_text, unit_word, with_current_eta


def worker(unit: str | None, done: int | None, expected: int | None = None, **over: Any) -> WorkerStatus:
    known: dict[str, Any] = {"unit": unit, "items": done, "items_expected": expected, "items_processed": done, **over}
    return WorkerStatus(worker="worker_w0", rank=0, **known)


@pytest.mark.parametrize("unit", ["items", "requests", "tokens"])
def test_shared_work_is_summed(unit: str) -> None:
    work = job_work([worker(unit, 5, 10), worker(unit, 7, 10)])
    assert (work.unit, work.done, work.expected, work.processed, work.is_in_step) == (unit, 12, 20, 12, False)


@pytest.mark.parametrize("unit", ["steps", "batches", "epochs"])
def test_the_slowest_of_workers_in_step_counts(unit: str) -> None:
    work = job_work([worker(unit, 7, 10), worker(unit, 5, 10, items_processed=3), worker(unit, None)])
    assert (work.unit, work.done, work.expected, work.processed, work.is_in_step) == (unit, 5, 10, 3, True)
    assert not work.has_all_positions


def test_the_slowest_worker_has_the_largest_share_left() -> None:
    assert job_work([worker("steps", 90, 100), worker("steps", 100, 300)]).done == 100
    assert job_work([worker("steps", 90, 100), worker("steps", 20)]).done == 90
    assert job_work([worker("steps", 90), worker("steps", 20)]).done == 20


@pytest.mark.parametrize(("unit", "others"), [("steps", "steps"), ("items", "items"), ("items", "steps")])
def test_workers_that_are_not_critical_count_only_if_no_other_has_a_position(unit: str, others: str) -> None:
    beside = worker(others, 2, 10, critical=False)
    work = job_work([worker(unit, 7, 10), beside])
    assert (work.units, work.done, work.expected, work.has_all_positions) == ((unit,), 7, 10, True)
    assert job_work([worker(unit, None), beside]).done == 2


def test_the_eta_of_a_job_is_not_that_of_a_worker_that_is_not_critical() -> None:
    eta = EtaEstimate(9.0, 8.0, 10.0)
    beside = worker("items", 5, critical=False)
    assert job_eta([worker("items", 5, 10, eta=eta), beside]) == eta
    assert job_eta([worker("items", None), beside.replace(eta=eta)]) == eta


@pytest.mark.parametrize(
    ("eta", "left", "job"),
    [
        (EtaEstimate(0.0, 0.0, 0.0), EtaEstimate(0.0, 0.0, 0.0), EtaEstimate(290.0, 280.0, 300.0)),  # complete
        (EtaEstimate(6.0, 5.0, 9.0), None, EtaEstimate(290.0, 280.0, 300.0)),  # overdue
        (None, None, None),
    ],
)
def test_the_eta_of_a_job_is_that_of_its_slowest_worker_whatever_the_age_of_the_others(
    eta: EtaEstimate | None, left: EtaEstimate | None, job: EtaEstimate | None
) -> None:
    slow = worker("items", 100, 250, eta=EtaEstimate(300.0, 290.0, 310.0), eta_time=1000.0)
    other = worker("items", 250, 250, eta=eta, eta_time=None if eta is None else 1000.0)
    workers = [with_current_eta(each, 1010.0) for each in (slow, other)]
    assert workers[1].eta == left
    assert job_eta(workers) == job
    assert job_eta(workers[1:]) == left


@pytest.mark.parametrize(
    ("done", "totals", "total_items", "is_known"),
    [
        ((360, 120), (500, 500), 500, False),
        ((360, 160), (500, 500), 500, True),  # more than the queue has
        ((200, 120), (250, 250), 500, True),
        ((200, 120), (500, 400), 500, True),
        ((360,), (500,), 500, True),
        ((360, 120), (500, 500), None, True),
    ],
)
def test_workers_that_may_share_a_queue_have_no_eta(
    done: tuple[int, ...], totals: tuple[int, ...], total_items: int | None, is_known: bool
) -> None:
    eta = EtaEstimate(9.0, 8.0, 10.0)
    workers = [worker("items", *position, eta=eta) for position in zip(done, totals, strict=True)]
    assert job_eta(workers, total_items) == (eta if is_known else None)
    steps = [entry.replace(unit="steps") for entry in workers]
    assert job_eta(steps, total_items) == eta


def test_workers_with_different_units_have_no_sum() -> None:
    work = job_work([worker("items", 5, 10), worker("steps", 7, 10), worker("items", 5, 10)])
    assert work == JobWork(("items", "steps"), has_all_positions=True)
    assert (work.unit, work.counts_items, work.is_in_step, work.expected_total(100)) == (None, False, False, None)


def test_the_default_unit_is_items() -> None:
    assert job_work([worker(None, 5), worker("items", 7)]).unit == "items"
    assert unit_word(None) == "items"


@pytest.mark.parametrize(
    ("pattern", "total", "items", "expected"),
    [
        *(("bar", 20, True, 20), ("bar", 21, True, 21), ("bar", 160, False, 20), ("bar", None, True, 20)),
        ("items", 160, True, 160),  # a counter of items that ends before all items
    ],
)
def test_progress_bars_over_batches_do_not_count_items(
    pattern: str, total: int | None, items: bool, expected: int
) -> None:
    work = job_work([worker("items", 5, 10, pattern=pattern) for _ in range(2)])
    assert (work.counts_total_items(total), work.expected_total(total)) == (items, expected)


def test_there_is_no_progress_or_unit_before_the_first_position() -> None:
    work = job_work([worker(None, None, 10), worker(None, None, 10), worker(None, None)])
    assert (work.unit, work.done, work.expected, work.counts_items) == (None, None, 20, True)


@pytest.mark.parametrize(
    ("unit", "expected"), [("items", 100), (None, 100), ("requests", 20), ("tokens", 20), ("steps", 10)]
)
def test_total_items_apply_only_to_a_count_of_items(unit: str | None, expected: int) -> None:
    assert job_work([worker(unit, 5, 10), worker(unit, 7, 10)]).expected_total(100) == expected


@pytest.mark.parametrize(("unit", "rate"), [(None, 5.0), ("items", 5.0), ("tokens", 5.0), ("steps", 2.0)])
def test_the_rate_of_a_job_is_the_sum_or_that_of_the_slowest(unit: str | None, rate: float) -> None:
    workers = [worker(unit, 5, rate=2.0), worker(unit, 7, rate=3.0), worker(unit, 7, rate=None)]
    assert job_rate(workers, job_work(workers)) == rate
    assert job_rate(workers[2:], job_work(workers)) is None


def test_rates_in_different_units_are_not_summed() -> None:
    workers = [worker("items", 5, rate=2.0), worker("steps", 7, rate=3.0)]
    assert job_rate(workers, job_work(workers)) is None


COUNT = st.none() | st.integers(0, 1000)


@given(st.lists(st.builds(worker, st.sampled_from([None, *UNITS]), COUNT, COUNT), max_size=5))
def test_the_progress_of_a_job_is_at_most_the_sum_of_its_workers(workers: list[WorkerStatus]) -> None:
    work, known = job_work(workers), [entry.items for entry in workers if entry.items is not None]
    assert work.done is None or min(known) <= work.done <= sum(known)
    assert (work.done is None) == (len(work.units) != 1)
    assert work.has_all_positions == (len(known) == len(workers))


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (1234.56, "1234.6 items/s"),
        (1.0, "1.0 items/s"),
        (0.5, "0.5 items/s"),
        (1 / 33, "0.0303 items/s"),
        (1 / 900, "4.0 items/h"),
        (1 / 10800, "0.333 items/h"),
    ],
)
def test_slow_rates_have_digits(rate: float, text: str) -> None:
    assert speed_text(rate, "items") == text
    assert speed_text(rate) == text.replace(" items", "")
