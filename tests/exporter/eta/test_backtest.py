"""Experts judged by the run's own past."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.derive.eta.backtest import (
    FIRST_WEIGHTS,
    MOST_CHECKPOINTS,
    PRIOR_ERROR,
    PRIOR_LOSSES,
    Checkpoint,
    History,
    expert_weights,
    mixed,
    segment,
)
from exporter.derive.eta.experts import EXPERTS, Outlook

SAME = Outlook(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0)


def steady(count: int, outlook: Outlook = SAME, eta_factor: float = 1.0) -> History:
    """A run of 1000 items of a second each, ``count`` checkpoints 5 apart."""
    history = History()
    for place in range(1, count + 1):
        items = 5.0 * place
        history.add(Checkpoint(items, items, items, 1000 - items, eta_factor * (1000 - items), outlook), 0.0, 0.0)
    return history


def test_there_is_a_first_weight_and_a_prior_loss_for_each_expert() -> None:
    assert len(FIRST_WEIGHTS) == len(PRIOR_LOSSES) == len(EXPERTS)
    assert sum(FIRST_WEIGHTS) == pytest.approx(1)


def test_without_a_past_the_first_weights_hold() -> None:
    verdict = History().judge(5.0, 5.0, 5.0, 995.0, 0.0)
    assert verdict.weights == FIRST_WEIGHTS
    assert verdict.error == pytest.approx(PRIOR_ERROR)


@pytest.mark.parametrize("right", range(len(EXPERTS)))
def test_the_expert_who_was_right_is_believed(right: int) -> None:
    values = [1.5] * 6
    values[right] = 1.0
    whole, speed, recent, linear, moving, exponential = values
    outlook = Outlook(whole, speed, recent, moving, linear, 0.0, exponential, 0.0)
    verdict = steady(40, outlook).judge(400.0, 400.0, 400.0, 600.0, 0.0)
    assert verdict.weights[right] > 0.95


def test_what_was_said_at_another_speed_hardly_counts() -> None:
    history = steady(40, SAME._replace(whole=2.0, speed=2.0))
    late = history.judge(300.0, 300.0, 300.0, 700.0, 0.0)
    changed = history.judge(300.0, 300.0, 300.0, 700.0, 250.0)
    assert changed.weights[0] > late.weights[0]


def test_the_error_is_that_of_the_estimates_given() -> None:
    assert steady(40).judge(400.0, 400.0, 400.0, 600.0, 0.0).error < 0.03
    assert steady(40, eta_factor=1.3).judge(400.0, 400.0, 400.0, 600.0, 0.0).error == pytest.approx(0.25, abs=0.05)


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_weights_add_up_to_one_and_the_best_has_most(losses: list[float]) -> None:
    weights = expert_weights(losses)
    assert sum(weights) == pytest.approx(1)
    assert weights[losses.index(min(losses))] == max(weights)


def test_forecasts_are_mixed_by_their_logarithms() -> None:
    outlook = SAME._replace(whole=4.0, speed=1.0)
    assert mixed(outlook, 10.0, (0.5, 0.5, 0.0, 0.0, 0.0, 0.0)) == pytest.approx(20.0)


def test_checkpoints_are_bounded_and_the_first_one_stays() -> None:
    history = steady(1000)
    assert len(history.checkpoints) <= MOST_CHECKPOINTS
    assert history.checkpoints[0].items == 5.0
    assert history.checkpoints[-1].items > 4900


def test_segments_join_neighbouring_checkpoints_of_the_last_part_of_the_work() -> None:
    history = steady(100)
    parts = history.segments(0.0)
    points = history.checkpoints
    assert parts == [segment(a, b) for a, b in pairwise(points) if a.seconds >= 0.4 * points[-1].seconds]


def test_the_past_is_found_by_its_work() -> None:
    history = steady(10)
    found = history.since(31.0)
    assert found is not None
    assert found.seconds == 30.0
    assert history.since(1.0) is None
