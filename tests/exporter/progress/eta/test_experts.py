"""Experts: several forecasts of the remaining work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.experts import (
    EXPERTS,
    ExpertSpeeds,
    WorkSegment,
    expert_forecasts,
    exponential_work,
    fit_trends,
    linear_work,
)


def segments(pace_at: list[float]) -> list[WorkSegment]:
    return [WorkSegment(10.0 * place + 5, 10.0, pace, math.log(pace)) for place, pace in enumerate(pace_at)]


def test_each_expert_has_its_own_forecast() -> None:
    speeds = ExpertSpeeds(1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 6.0, 0.0)
    assert dict(zip(EXPERTS, expert_forecasts(speeds, 10.0), strict=True)) == {
        "whole run": 10.0,
        "present speed": 20.0,
        "last third": 30.0,
        "linear trend": 50.0,
        "moving average": 40.0,
        "exponential trend": 60.0,
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


def test_a_trend_is_found_in_trending_data() -> None:
    wobble = [0.99, 1.01, 1.0]
    linear, exponential = fit_trends(segments([(1 + 0.02 * k) * wobble[k % 3] for k in range(30)]), 0.0)
    assert linear is not None
    assert exponential is not None
    assert linear.slope == pytest.approx(0.002, rel=0.1)
    assert linear.level + linear.slope * (295 - linear.items) == pytest.approx(1.58, rel=0.02)


def test_noise_and_few_segments_are_no_trend() -> None:
    assert fit_trends(segments([1.0, 1.4, 0.8, 1.2, 0.7, 1.3] * 4), 0.0) == (None, None)
    assert fit_trends(segments([1.0 + 0.1 * k for k in range(7)]), 0.0) == (None, None)


def test_a_step_is_no_trend_and_a_trend_is_no_step() -> None:
    wobble = [0.99, 1.01, 1.0]
    step = segments([(1.0 if k < 20 else 1.7) * wobble[k % 3] for k in range(30)])
    assert fit_trends(step, 0.0) != (None, None)
    assert fit_trends(step, 200.0) == (None, None)
    drift = segments([(1 + 0.02 * k) * wobble[k % 3] for k in range(30)])
    assert fit_trends(drift, 200.0) == fit_trends(drift, 0.0) != (None, None)
