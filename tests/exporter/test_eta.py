"""Seconds left: never negative, unknown where nothing can tell, right for steady work."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.derive.eta import Estimate, RecentRateEstimator


def after(readings: list[tuple[float, int]], total: int | None) -> RecentRateEstimator:
    estimator = RecentRateEstimator()
    for t, done in readings:
        estimator.update(t, done, total)
    return estimator


def steady(per_second: float, every_s: float, seconds: float, total: int | None = 10_000) -> RecentRateEstimator:
    looks = int(seconds / every_s)
    return after([(look * every_s, int(look * every_s * per_second)) for look in range(looks + 1)], total)


READINGS = st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 1000)), max_size=40)


@given(READINGS, st.none() | st.integers(0, 50_000), st.floats(-100, 1e7))
@example([(0.0, 1), (0.0, 2), (0.0, 3)], 10, 0.0)
@example([(0.0, 1), (1.0, 2), (2.0, 3)], 10, -100.0)
def test_an_estimate_is_never_negative_and_lies_in_its_interval(
    gaps: list[tuple[float, int]], total: int | None, wait: float
) -> None:
    """Readings that only rise, as long gaps as may be, asked at any moment, before the last one too."""
    now, done, readings = 0.0, 0, []
    for gap, rise in gaps:
        now, done = now + gap, done + rise
        readings.append((now, done))
    estimate = after(readings, total).estimate(now + wait)
    if estimate is not None:
        assert all(math.isfinite(part) for part in estimate)
        assert 0.0 <= estimate.low <= estimate.seconds <= estimate.high


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1000)), max_size=30), st.integers(0, 1000))
def test_counts_and_clocks_that_jump_back_break_nothing(readings: list[tuple[float, int]], total: int) -> None:
    estimator = after(readings, total)
    for now in (0.0, 1e7):
        estimate = estimator.estimate(now)
        assert estimate is None or estimate.seconds >= 0
        for rate in (estimator.rate(now), estimator.average_rate(now)):
            assert rate is None or rate >= 0


@pytest.mark.parametrize("per_second", [0.5, 7.0, 100.0])
@pytest.mark.parametrize("every_s", [2.0, 5.0, 30.0])
def test_steady_work_ends_when_it_should(per_second: float, every_s: float) -> None:
    seconds, total = 600.0, int(per_second * 3000)
    estimator = steady(per_second, every_s, seconds, total)
    estimate = estimator.estimate(seconds)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(3000 - seconds, rel=0.02)
    assert estimate.low <= 3000 - seconds <= estimate.high
    assert estimator.rate(seconds) == pytest.approx(per_second, rel=0.02)
    assert estimator.average_rate(seconds) == pytest.approx(per_second, rel=0.02)


def test_without_a_total_there_is_no_estimate_but_a_rate() -> None:
    estimator = steady(10, 5, 300, total=None)
    assert estimator.estimate(300) is None
    assert estimator.rate(300) == pytest.approx(10)


def test_before_three_readings_that_rise_there_is_no_estimate() -> None:
    estimator = after([(0, 1), (5, 1), (10, 2), (15, 2)], 100)
    assert estimator.estimate(15) is None
    estimator.update(20, 3, 100)
    assert estimator.estimate(20) is not None


def test_nothing_is_known_before_the_first_reading() -> None:
    estimator = RecentRateEstimator()
    assert estimator.estimate(0) is None
    assert estimator.rate(0) is None
    assert estimator.average_rate(0) is None
    assert estimator.alarms(1e9) == {"stalled": False, "slowdown": False}


@pytest.mark.parametrize("done", [100, 101])
def test_work_that_is_done_needs_no_more_time(done: int) -> None:
    assert after([(0, done)], 100).estimate(1e6) == Estimate(0.0, 0.0, 0.0)


def test_the_estimate_counts_down_between_readings() -> None:
    estimator = steady(10, 5, 300)
    estimates = [estimator.estimate(300 + wait) for wait in (0, 1, 2, 5)]
    seconds = [estimate.seconds for estimate in estimates if estimate is not None]
    assert seconds == [pytest.approx(700 - wait) for wait in (0, 1, 2, 5)]


def test_the_estimate_grows_while_a_reading_is_overdue() -> None:
    estimator = steady(10, 5, 300)
    estimates = [estimator.estimate(300 + wait) for wait in (10, 60, 600)]
    seconds = [estimate.seconds for estimate in estimates if estimate is not None]
    assert seconds == [pytest.approx(690), pytest.approx(740), pytest.approx(1280)]


def test_a_change_of_pace_is_followed_within_minutes() -> None:
    readings = [(t, 10 * t) for t in range(0, 1000, 5)] + [(t, 10_000 + 2 * (t - 1000)) for t in range(1000, 1600, 5)]
    estimator = after([(float(t), done) for t, done in readings], 20_000)
    estimate = estimator.estimate(1595)
    assert estimate is not None
    assert estimate.seconds == pytest.approx((20_000 - 11_190) / 2, rel=0.02)


def test_a_count_that_falls_starts_anew() -> None:
    estimator = steady(10, 5, 300)
    estimator.update(305, 100, 10_000)
    assert estimator.estimate(305) is None
    assert estimator.rate(305) is None
    for look in range(1, 5):
        estimator.update(305 + 5 * look, 100 + 10 * look, 10_000)
    assert estimator.average_rate(325) == pytest.approx(2)


def test_a_rate_is_unknown_once_it_is_long_past() -> None:
    estimator = steady(10, 5, 300)
    assert estimator.rate(355) is not None
    assert estimator.rate(361) is None


def test_a_rate_sinks_while_nothing_comes() -> None:
    estimator = steady(10, 5, 100)
    waiting, later = estimator.rate(112), estimator.rate(150)
    assert waiting is not None
    assert later is not None
    assert later < waiting < 10


@pytest.mark.parametrize(
    ("total", "wait", "stalled"), [(10_000, 301, True), (10_000, 299, False), (3000, 1e6, False), (None, 301, True)]
)
def test_silence_with_work_left_is_a_stall(total: int | None, wait: float, stalled: bool) -> None:
    assert steady(10, 5, 300, total).alarms(300 + wait, 300)["stalled"] is stalled


def test_the_same_count_again_does_not_hide_a_stall() -> None:
    estimator = steady(10, 5, 300)
    for t in range(305, 700, 5):
        estimator.update(t, 3000, 10_000)
    assert estimator.alarms(695, 300)["stalled"]
