"""Experts: several forecasts of the remaining work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.experts import (
    EXPERTS,
    NO_TRENDS,
    ExpertSpeeds,
    WorkSegment,
    expert_forecasts,
    exponential_work,
    fit_trends,
    linear_work,
    rank_deviate,
    sorted_work,
)


def segments(pace_at: list[float]) -> list[WorkSegment]:
    return [WorkSegment(10.0 * place + 5, 10.0, pace, math.log(pace)) for place, pace in enumerate(pace_at)]


def test_each_expert_has_its_own_forecast() -> None:
    speeds = ExpertSpeeds(1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 6.0, 0.0, math.log(7.0), 1e-12)
    assert dict(zip(EXPERTS, expert_forecasts(speeds, 90.0, 10.0), strict=True)) == {
        "whole run": 10.0,
        "present speed": 20.0,
        "last third": 30.0,
        "linear trend": 50.0,
        "moving average": 40.0,
        "exponential trend": 60.0,
        "sorted by length": pytest.approx(70.0),
    }


def test_a_linear_trend_sums_over_the_items() -> None:
    assert linear_work(1.0, 0.1, 100.0) == pytest.approx(sum(1 + 0.1 * (k + 0.5) for k in range(100)))


def test_a_falling_linear_trend_does_not_reach_zero() -> None:
    assert linear_work(1.0, -0.01, 1000.0) == pytest.approx(85 * (1 + 0.15) / 2 + 0.15 * 915)


def test_an_exponential_trend_sums_over_the_items_with_bounded_growth() -> None:
    assert exponential_work(1.0, 0.01, 100.0) == pytest.approx(math.expm1(1.0) / 0.01)
    assert exponential_work(1.0, 0.01, 1000.0) < 1000 * math.exp(1.5)


@given(st.floats(1e-9, 1e9), st.floats(-1e3, 1e3), st.floats(1e-3, 1e9))
def test_remaining_work_is_never_negative(pace: float, slope: float, items: float) -> None:
    assert linear_work(pace, slope, items) >= 0
    assert exponential_work(pace, slope, items) >= 0


WOBBLE = [0.99, 1.01, 1.0]
DRIFT = segments([(1 + 0.02 * k) * WOBBLE[k % 3] for k in range(30)])


def test_work_sorted_by_length_is_summed_over_the_items() -> None:
    lengths = [math.exp(0.3 + 0.8 * rank_deviate((k + 0.5) / 1000)) for k in range(1000)]
    assert 1000 * sorted_work(0.3, 0.8, 0.4, 1.0) == pytest.approx(sum(lengths[400:]), rel=0.02)
    assert sorted_work(0.3, 0.8, 0.0, 0.4) + sorted_work(0.3, 0.8, 0.4, 1.0) == pytest.approx(math.exp(0.3 + 0.32))


def test_a_trend_is_found_in_trending_data() -> None:
    trends = fit_trends(DRIFT, (), 0.0, 600.0)
    assert trends.linear == pytest.approx(0.002, rel=0.1)
    assert trends.is_steady


@pytest.mark.parametrize("slope", [-0.8, 0.8])
def test_the_spread_of_sorted_lengths_is_found_in_their_first_quarter(slope: float) -> None:
    paces = [math.exp(slope * rank_deviate((10 * k + 5) / 1200)) * WOBBLE[k % 3] for k in range(30)]
    assert fit_trends(segments(paces), (), 0.0, 1200.0).by_length == pytest.approx(slope, rel=0.05)


def test_the_first_tenth_shows_whether_items_are_sorted_or_the_start_was_slow() -> None:
    by_length = [math.exp(-0.8 * rank_deviate((10 * k + 5) / 3000)) * WOBBLE[k % 3] for k in range(30)]
    assert fit_trends(segments(by_length), (), 0.0, 3000.0).sorted_evidence > 4
    slow_start = [(1 + 2 * math.exp(-k / 4)) * WOBBLE[k % 3] for k in range(30)]
    assert fit_trends(segments(slow_start), (), 0.0, 3000.0).sorted_evidence == 0
    assert fit_trends(DRIFT, (), 0.0, 3000.0).sorted_evidence < 1


def test_noise_and_few_segments_are_no_trend() -> None:
    noise = fit_trends(segments([1.0, 1.4, 0.8, 1.2, 0.7, 1.3] * 4), (), 0.0, 480.0)
    assert abs(noise.linear) * 240 < 0.05
    assert abs(noise.by_length) < 0.05
    assert fit_trends(segments([1.0 + 0.1 * k for k in range(7)]), (), 0.0, 140.0) == NO_TRENDS


def test_a_step_is_no_trend_and_a_trend_is_no_step() -> None:
    step = segments([(1.0 if k < 20 else 1.7) * WOBBLE[k % 3] for k in range(30)])
    assert fit_trends(step, (), 0.0, 600.0).linear > 0.001
    found = fit_trends(step, (200.0,), 0.0, 600.0)
    assert abs(found.linear) < 1e-4
    assert not found.is_steady
    assert fit_trends(DRIFT, (100.0, 200.0), 0.0, 600.0) == fit_trends(DRIFT, (), 0.0, 600.0)
