"""Which worker delays the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.outlook import WorkerPosition, first_to_stop, lags


def workers_in_unit(
    *done: float, total: float | None = 100, kind: str = "worker", first: int = 0
) -> list[WorkerPosition]:
    """Workers of one kind, by rank."""
    return [WorkerPosition(rank, share, total, kind) for rank, share in enumerate(done, first)]


def test_the_lag_is_the_distance_to_the_median() -> None:
    assert lags(workers_in_unit(50, 40, 60, 50, 25)) == pytest.approx({0: 0, 1: 0.2, 2: 0, 3: 0, 4: 0.5})


def test_of_two_workers_neither_is_the_straggler() -> None:
    assert lags(workers_in_unit(50, 10)) == {}
    assert lags([]) == {}


def test_only_workers_with_the_same_unit_are_compared() -> None:
    found = lags(
        [
            *workers_in_unit(50, 50, 25),
            *workers_in_unit(5, 5, 5, kind="server", first=3),
            *workers_in_unit(1, kind="x", first=9),
        ]
    )
    assert found == {0: 0, 1: 0, 2: 0.5, 3: 0, 4: 0, 5: 0}


def test_completed_shares_of_each_total_are_compared() -> None:
    workers = [WorkerPosition(0, 50, 100, "a"), WorkerPosition(1, 500, 1000, "a"), WorkerPosition(2, 100, 400, "a")]
    assert lags(workers) == {0: 0, 1: 0, 2: 0.5}


def test_positions_are_compared_if_there_is_no_total() -> None:
    assert lags(workers_in_unit(50, 50, 25, total=None)) == {0: 0, 1: 0, 2: 0.5}
    assert lags([*workers_in_unit(50, 50, 25), WorkerPosition(3, 7, None, "worker")]) == {0: 0, 1: 0, 2: 0.5}


def test_workers_without_progress_do_not_lag() -> None:
    assert lags(workers_in_unit(0, 0, 0, 5)) == {}
    assert lags(workers_in_unit(0, 0, 0, total=0)) == {}


@given(st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([None, 0, 1000])), max_size=12))
def test_a_lag_is_a_ratio(workers: list[tuple[int, int | None]]) -> None:
    found = lags([WorkerPosition(rank, done, total, "a") for rank, (done, total) in enumerate(workers)])
    assert all(0 <= ratio <= 1 for ratio in found.values())
    assert not found or 0 in found.values()


def test_the_worker_that_stopped_first_is_the_suspect() -> None:
    assert first_to_stop({0: 100.0, 1: 50.0, 2: 99.0}, [0, 1, 2], gap_s=10.0) == 1


def test_there_is_no_suspect_if_workers_stopped_together() -> None:
    assert first_to_stop({0: 100.0, 1: 85.0, 2: 99.0}, [0, 1, 2], gap_s=10.0) is None


def test_only_a_stalled_worker_is_a_suspect() -> None:
    assert first_to_stop({0: 100.0, 1: 50.0, 2: 10.0}, [0, 1], gap_s=10.0) == 1
    assert first_to_stop({0: 100.0, 1: 50.0}, [1], gap_s=10.0) == 1
    assert first_to_stop({0: 100.0, 1: 50.0}, [], gap_s=10.0) is None


@pytest.mark.parametrize("last_rises", [{}, {0: 50.0}])
def test_one_worker_that_logs_for_all_is_no_suspect(last_rises: dict[int, float]) -> None:
    assert first_to_stop(last_rises, [0, 1], gap_s=10.0) is None
