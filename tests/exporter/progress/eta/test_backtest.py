"""Experts rated by the past of the run."""

import math
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.backtest import (
    DISAGREEMENT_FACTOR,
    DISTANCE_SCALE,
    DRIFT_FACTOR,
    FAR_WEIGHT,
    FIRST_WEIGHTS,
    MOST_CHECKPOINTS,
    MOST_LOSS,
    OLD_SPEED,
    PRIOR_ERROR,
    PRIOR_ERROR_WEIGHT,
    PRIOR_LOSSES,
    PRIOR_WEIGHT,
    BacktestHistory,
    BacktestPoint,
    ExpertTrust,
    expert_weights,
    mix_forecasts,
)
from exporter.progress.eta.experts import (
    EXPERTS,
    NO_TRENDS,
    ExpertSpeeds,
    Trends,
    expert_forecasts,
    sorted_work,
)
from tests.support.exporter import saved_and_read

SAME = ExpertSpeeds(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0)


def points(history: BacktestHistory) -> list[BacktestPoint]:
    return [BacktestPoint._make((*row[:5], ExpertSpeeds(*row[5:]))) for row in zip(*history.columns, strict=True)]


def steady(count: int, outlook: ExpertSpeeds = SAME, eta_factor: float = 1.0) -> BacktestHistory:
    """A run of 1000 items of a second each, ``count`` checkpoints 5 apart."""
    history = BacktestHistory()
    for place in range(1, count + 1):
        items = 5.0 * place
        history.add(
            BacktestPoint(items, items, items, 1000 - items, eta_factor * (1000 - items), outlook),
            0.0,
            (),
            items,
            1000.0,
        )
    return history


def test_each_expert_has_an_initial_weight_and_a_prior_loss() -> None:
    assert len(FIRST_WEIGHTS) == len(PRIOR_LOSSES) == len(EXPERTS)
    assert sum(FIRST_WEIGHTS) == pytest.approx(1)


def test_the_initial_weights_apply_without_a_past() -> None:
    verdict = BacktestHistory().rate_experts(5.0, 5.0, 5.0, 995.0, 0.0, 5.0)
    assert verdict.weights == FIRST_WEIGHTS
    assert verdict.error == pytest.approx(PRIOR_ERROR)


@pytest.mark.parametrize("right", range(len(EXPERTS)))
def test_the_expert_that_was_right_gets_the_most_weight(right: int) -> None:
    values = [1.5] * len(EXPERTS)
    values[right] = 1.0
    whole, speed, recent, linear, moving, exponential, ranked = values
    outlook = ExpertSpeeds(whole, speed, recent, moving, linear, 1e-9, exponential, 1e-9, math.log(ranked), 1e-9)
    verdict = steady(40, outlook).rate_experts(400.0, 400.0, 400.0, 600.0, 0.0, 400.0)
    assert verdict.weights[right] > 0.95


def test_forecasts_at_another_speed_hardly_count() -> None:
    history = steady(40, SAME._replace(overall=2.0, present=2.0))
    history.trends = NO_TRENDS
    late = history.rate_experts(300.0, 300.0, 300.0, 700.0, 0.0, 300.0)
    changed = history.rate_experts(300.0, 300.0, 300.0, 700.0, 250.0, 300.0)
    assert changed.weights[0] > late.weights[0]


def test_old_speeds_count_if_lines_describe_their_changes_better_than_steps() -> None:
    history = steady(40, SAME._replace(overall=2.0, present=2.0))
    history.trends = Trends(is_steady=True)
    ratings = [history.rate_experts(300.0, 300.0, 300.0, 700.0, start, 300.0) for start in (0.0, 250.0)]
    assert ratings[0] == ratings[1]


def test_the_error_is_half_that_of_the_published_estimates_and_half_that_of_the_experts() -> None:
    assert steady(40).rate_experts(400.0, 400.0, 400.0, 600.0, 0.0, 400.0).error < 0.03
    verdict = steady(40, eta_factor=1.3).rate_experts(400.0, 400.0, 400.0, 600.0, 0.0, 400.0)
    assert verdict.error == pytest.approx(0.13, abs=0.03)


@given(st.lists(st.floats(0, 1), min_size=len(EXPERTS), max_size=len(EXPERTS)))
def test_weights_add_up_to_one_and_the_best_has_most(losses: list[float]) -> None:
    weights = expert_weights(losses)
    assert sum(weights) == pytest.approx(1)
    assert weights[losses.index(min(losses))] == max(weights)


def test_forecasts_are_averaged_by_their_logarithms() -> None:
    outlook = SAME._replace(overall=4.0, present=1.0)
    seconds, doubt = mix_forecasts(outlook, 90.0, 10.0, (0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert seconds == pytest.approx(20.0)
    assert doubt == pytest.approx(DISAGREEMENT_FACTOR * math.log(2))


def test_experts_that_agree_leave_no_doubt_and_a_doubted_one_that_differs_leaves_some() -> None:
    weights = (0.9, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01)
    assert mix_forecasts(SAME, 90.0, 10.0, weights)[1] == pytest.approx(0.0, abs=1e-6)
    assert mix_forecasts(SAME._replace(linear=2.0), 90.0, 10.0, weights)[1] > 0.2


@pytest.mark.parametrize("slope", [-0.05, 0.05])
def test_a_pace_that_is_expected_to_drift_leaves_doubt_even_if_one_expert_has_all_trust(slope: float) -> None:
    outlook = SAME._replace(exponential_slope=slope)
    seconds, doubt = mix_forecasts(outlook, 90.0, 10.0, (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    assert doubt == pytest.approx(DRIFT_FACTOR * abs(math.log(seconds / (10.0 * outlook.recent))))
    assert doubt > 0.05


def test_checkpoints_are_bounded_and_the_first_one_stays() -> None:
    history = steady(1000)
    assert len(points(history)) <= MOST_CHECKPOINTS
    assert points(history)[0].items == 5.0
    assert points(history)[-1].items > 4900


def test_segments_connect_adjacent_checkpoints_after_the_warm_up() -> None:
    history = steady(100)
    parts = history.segments(200.0)
    all_points = points(history)
    after = [(a, b) for a, b in pairwise(all_points) if a.items >= 200.0]
    assert [(part.middle, part.items) for part in parts] == [
        ((a.items + b.items) / 2, b.items - a.items) for a, b in after
    ]
    paces = [(b.seconds - a.seconds) / (b.items - a.items) for a, b in after]
    assert [part.seconds_per_item for part in parts] == paces
    assert [part.log_seconds_per_item for part in parts] == [math.log(pace) for pace in paces]


def test_past_points_are_found_by_their_work() -> None:
    history = steady(10)
    assert history.last_point_until(31.0) == (30.0, 30.0)
    assert history.last_point_until(30.0) == (30.0, 30.0)
    assert history.last_point_until(1.0) is None


def plain_ratings(history: BacktestHistory, now: BacktestPoint, speed_items: float) -> ExpertTrust:
    """The result of ``rate_experts``, calculated plainly from the forecasts."""
    losses = [loss * PRIOR_WEIGHT for loss in PRIOR_LOSSES]
    weights, error, error_weight = PRIOR_WEIGHT, PRIOR_ERROR * PRIOR_ERROR_WEIGHT, PRIOR_ERROR_WEIGHT
    for point in points(history):
        since, truth = now.items - point.items, now.seconds - point.seconds
        if since <= 0 or truth <= 0:
            continue
        u = math.log(since / point.items) - math.log(now.items_left / now.items)
        weight = (math.exp(-u * u / (2 * DISTANCE_SCALE**2)) + FAR_WEIGHT) * (
            OLD_SPEED if point.items < speed_items else 1
        )
        forecasts = list(expert_forecasts(point.speeds, point.items, since))
        if slope := point.speeds.sorted_slope:
            total = now.items + now.items_left
            forecasts[-1] = total * sorted_work(
                point.speeds.sorted_level, slope, point.items / total, now.items / total
            )
        for index, forecast in enumerate(forecasts):
            losses[index] += weight * (min(MOST_LOSS, abs(math.log(forecast / truth))) if forecast > 0 else MOST_LOSS)
        weights += weight
        if point.eta > 0 and now.elapsed > point.elapsed:
            error += weight * min(
                MOST_LOSS, abs(math.log(point.eta * since / point.items_left / (now.elapsed - point.elapsed)))
            )
            error_weight += weight
    losses = [loss / weights for loss in losses]
    trust = expert_weights(losses)
    own = sum(weight * loss for weight, loss in zip(trust, losses, strict=True))
    return ExpertTrust(trust, (error / error_weight + min(error / error_weight, own)) / 2)


PACES = st.floats(1e-3, 1e3)
SLOPES = st.just(0.0) | st.floats(-0.1, 0.1)
OUTLOOKS = st.builds(
    ExpertSpeeds, *(PACES, PACES, PACES, PACES, PACES, SLOPES, PACES, SLOPES, st.floats(-3, 3), SLOPES)
) | PACES.map(lambda pace: ExpertSpeeds(pace, 1.0, pace, 1.0, pace, 0.0, pace, 0.0))


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.floats(0.1, 100), st.just(0.0) | st.floats(1, 1e4), OUTLOOKS), max_size=90
    ),
    st.sampled_from([0.0, 100.0]),
)
def test_experts_are_rated_by_their_forecasts(
    steps: list[tuple[int, float, float, ExpertSpeeds]], speed_items: float
) -> None:
    history = BacktestHistory()
    items = seconds = 0.0
    for rise, step_s, eta, outlook in steps:
        items, seconds = items + rise, seconds + step_s
        history.add(BacktestPoint(items, seconds, seconds, 5000 - items, eta, outlook), 0.0, (), items, 5000.0)
    now = BacktestPoint(items + 3, seconds + 4, seconds + 5, 4900 - items, 0.0, SAME)
    history.trends = NO_TRENDS
    found = history.rate_experts(now.items, now.seconds, now.elapsed, now.items_left, speed_items, now.items)
    if steps:
        reference = plain_ratings(history, now, speed_items)
        assert found.weights == pytest.approx(reference.weights, rel=1e-6)
        assert found.error == pytest.approx(reference.error)
    restored = saved_and_read(BacktestHistory, history)
    assert restored.rate_experts(now.items, now.seconds, now.elapsed, now.items_left, speed_items, now.items) == found


def test_checkpoints_take_little_memory() -> None:
    assert sum(map(sys.getsizeof, steady(50).columns)) < 10_000
