"""Whether the work meets the time limit, and whether a checkpoint is saved before it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.status import EtaEstimate
from exporter.progress.outlook import next_checkpoint, time_limit_met_probability

ESTIMATES = st.tuples(st.floats(0, 1e7), st.floats(0, 1), st.floats(1, 100)).map(
    lambda parts: EtaEstimate(parts[0], parts[0] * parts[1], parts[0] * parts[2])
)


@pytest.mark.parametrize(("deadline", "probability"), [(1700.0, 0.1), (2000.0, 0.5), (4000.0, 0.9)])
def test_the_probability_at_the_quantiles_of_the_eta_is_exact(deadline: float, probability: float) -> None:
    assert time_limit_met_probability(1000.0, deadline, EtaEstimate(1000.0, 700.0, 3000.0)) == pytest.approx(
        probability, abs=1e-9
    )


def test_finished_work_meets_any_limit() -> None:
    assert time_limit_met_probability(1000.0, 900.0, EtaEstimate(0.0, 0.0, 0.0)) == 1.0


def test_the_probability_for_unfinished_work_is_neither_0_nor_1() -> None:
    for deadline in (900.0, 1000.0, 1000.1, 1e12):
        probability = time_limit_met_probability(1000.0, deadline, EtaEstimate(10.0, 10.0, 10.0))
        assert probability is not None
        assert 0 < probability < 1


def test_the_probability_is_unknown_without_a_limit_or_an_eta() -> None:
    assert time_limit_met_probability(0.0, None, EtaEstimate(1.0, 1.0, 1.0)) is None
    assert time_limit_met_probability(0.0, 10.0, None) is None


@given(ESTIMATES, st.lists(st.floats(-1e6, 1e9), min_size=2, max_size=10))
def test_a_later_deadline_is_never_less_likely_to_be_met(eta: EtaEstimate, deadlines: list[float]) -> None:
    found = [time_limit_met_probability(0.0, deadline, eta) for deadline in sorted(deadlines)]
    assert all(p is not None and 0 < p <= 1 and math.isfinite(p) for p in found)
    assert found == sorted(p for p in found if p is not None)


def test_three_checkpoints_give_an_interval() -> None:
    assert next_checkpoint([100.0, 200.0], [], 210.0) is None
    assert next_checkpoint([100.0, 200.0, 305.0], [], 310.0) == 305.0 + 102.5
    assert next_checkpoint([100.0, 200.0, 305.0], [10.0, 30.0, 20.0], 310.0) == 305.0 + 102.5 + 20.0


def test_a_configured_interval_needs_one_checkpoint() -> None:
    assert next_checkpoint([100.0], [], 110.0, interval_s=60.0) == 160.0
    assert next_checkpoint([], [], 110.0, interval_s=60.0) is None


def test_an_overdue_checkpoint_is_due_now_and_a_long_overdue_one_is_unknown() -> None:
    assert next_checkpoint([100.0], [5.0], 180.0, interval_s=60.0) == 185.0
    assert next_checkpoint([100.0], [5.0], 191.0, interval_s=60.0) is None


def test_simultaneous_checkpoints_give_no_interval() -> None:
    assert next_checkpoint([100.0, 100.0, 100.0], [], 100.0) is None


@given(st.lists(st.floats(0, 1e6), max_size=8).map(sorted), st.floats(0, 1e6))
def test_the_next_checkpoint_is_never_in_the_past(starts: list[float], later: float) -> None:
    now = (starts[-1] if starts else 0.0) + later
    moment = next_checkpoint(starts, [], now)
    assert moment is None or moment >= now
