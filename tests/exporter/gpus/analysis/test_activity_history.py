"""What has gone on at a GPU for a while."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpus.analysis.activity_history import (
    CLOCK_S,
    GAP_S,
    GROWTH_S,
    THROTTLE_S,
    ClockHistory,
    ConditionTimer,
    MemoryHistory,
    ThrottleHistory,
)

START = 1_700_000_000.0
GIB = 2.0**30
TOTAL = 80 * GIB


def test_what_holds_at_every_look_has_lasted() -> None:
    hold = ConditionTimer()
    assert (hold.lasted_s, hold.is_known(START)) == (0.0, False)
    for second in range(0, 100, 5):
        hold.update(START + second, True)
    assert hold.lasted_s == 95
    hold.update(START + 100, False)
    assert hold.lasted_s == 0
    assert hold.is_known(START + 100)


def test_a_moment_of_not_knowing_ends_nothing_and_a_long_one_does() -> None:
    hold = ConditionTimer()
    hold.update(START, True)
    hold.update(START + 10, None)
    hold.update(START + 20, True)
    assert hold.lasted_s == 20
    hold.update(START + 20 + GAP_S + 1, None)
    assert not hold.is_known(START + 20 + GAP_S + 1)
    assert hold.lasted_s == 0
    hold.update(START + 60, True)
    assert hold.lasted_s == 0


def test_what_held_before_a_gap_does_not_count() -> None:
    hold = ConditionTimer()
    hold.update(START, True)
    hold.update(START + GAP_S + 1, True)
    assert hold.lasted_s == 0
    hold.update(START - 100, True)
    assert hold.lasted_s == 0


def test_what_is_reset_begins_at_the_next_look() -> None:
    hold = ConditionTimer()
    hold.update(START, True)
    hold.update(START + 10, True)
    hold.reset()
    assert hold.lasted_s == 0
    hold.update(START + 20, True)
    hold.update(START + 25, True)
    assert hold.lasted_s == 5


@given(st.lists(st.tuples(st.floats(0, 40), st.none() | st.booleans()), max_size=60))
def test_nothing_lasts_longer_than_it_was_looked_at(looks: list[tuple[float, bool | None]]) -> None:
    hold, now, since = ConditionTimer(), START, None
    for passed, holds in looks:
        now += passed
        hold.update(now, holds)
        if holds is False:
            since = None
        elif holds and since is None:
            since = now
        assert 0 <= hold.lasted_s <= (now - since if since is not None else 0)


def test_a_clock_is_the_mean_of_minutes_at_work() -> None:
    clock = ClockHistory()
    for second in range(int(CLOCK_S)):
        clock.update(START + second, 1.5e9 if second % 10 < 5 else 1.7e9)
        assert clock.mean_hz is None or second >= CLOCK_S - 5
    assert clock.mean_hz == pytest.approx(1.6e9, rel=0.02)


def test_of_a_gpu_that_rests_there_is_no_clock_at_work() -> None:
    clock = ClockHistory()
    for second in range(400):
        clock.update(START + second, None if second % 20 < 10 else 1.5e9)
    assert clock.mean_hz is None


def test_a_clock_from_before_a_gap_does_not_count() -> None:
    clock = ClockHistory()
    for second in range(200):
        clock.update(START + second, 1.5e9)
    assert clock.mean_hz == 1.5e9
    clock.update(START + 300, 1.5e9)
    assert clock.mean_hz is None
    assert len(clock._readings) <= CLOCK_S / 5 + 2


def test_throttling_is_a_share_of_the_last_minutes() -> None:
    throttle = ThrottleHistory()
    assert throttle.shares is None
    for second in range(0, 900, 5):
        throttle.update(START + second, {"thermal": 7 + 0.3 * second, "power_cap": 50.0})
        assert (throttle.shares is not None) == (second >= THROTTLE_S - 10)
    assert throttle.shares == pytest.approx({"thermal": 0.3, "power_cap": 0.0})
    assert len(throttle._readings) <= THROTTLE_S / 10 + 2


def test_counters_that_fell_begin_anew() -> None:
    throttle = ThrottleHistory()
    for second in range(0, 400, 10):
        throttle.update(START + second, {"thermal": 100.0 + second})
    assert throttle.shares is not None
    throttle.update(START + 400, {"thermal": 0.0})
    assert throttle.shares is None
    throttle.update(START + 410, {})
    assert throttle.shares is None


@given(st.lists(st.tuples(st.floats(-100, 400), st.floats(0, 1e6)), max_size=60))
def test_a_share_is_a_ratio(looks: list[tuple[float, float]]) -> None:
    throttle, now = ThrottleHistory(), START
    for passed, seconds in looks:
        now += passed
        throttle.update(now, {"thermal": seconds})
        assert all(0 <= share <= 1 for share in (throttle.shares or {}).values())


def full_at(used: Callable[[float], float], seconds: float, every: float = 5.0) -> float | None:
    """Second at which it will be full, as said in the end."""
    course, t = MemoryHistory(), 0.0
    for step in range(int(seconds / every)):
        t = step * every
        course.update(START + t, used(t), TOTAL)
    at = course.full_at(START + t)
    return None if at is None else at - START


def test_memory_that_grows_steadily_is_full_when_it_is_said() -> None:
    assert full_at(lambda t: 10 * GIB + 0.02 * GIB * t, 1500) == pytest.approx(3500, rel=0.02)


def test_memory_that_grows_in_steps_is_full_when_it_is_said() -> None:
    assert full_at(lambda t: 10 * GIB + (t // 60) * 1.2 * GIB, 1800) == pytest.approx(3500, rel=0.05)
    assert full_at(lambda t: 10 * GIB + (t // 400) * 4 * GIB, 3500) == pytest.approx(7200, rel=0.15)


def test_growth_for_less_than_ten_minutes_is_a_beginning() -> None:
    assert full_at(lambda t: 10 * GIB + 0.02 * GIB * t, GROWTH_S) is None


def test_an_allocator_that_has_filled_its_cache_fills_nothing_more() -> None:
    assert full_at(lambda t: 10 * GIB + min(t, 700) * 0.05 * GIB, 1200) is None
    for seconds in range(600, 3600, 100):
        assert full_at(lambda t: 10 * GIB + 30 * GIB * (1 - 0.5 ** (t / 120)), seconds) is None
        assert full_at(lambda t: 10 * GIB + 60 * GIB * (t > 20), seconds) is None


def test_memory_that_is_given_back_in_a_rhythm_fills_nothing() -> None:
    noise = random.Random(7)
    for seconds in range(700, 3600, 150):
        assert full_at(lambda t: 10 * GIB + (t % 120) * 0.3 * GIB, seconds) is None
        assert full_at(lambda _: 40 * GIB + noise.gauss(0, 1) * GIB, seconds) is None


def test_memory_that_stays_or_falls_is_never_full() -> None:
    assert full_at(lambda _: 79 * GIB, 3000) is None
    assert full_at(lambda t: 70 * GIB - 0.01 * GIB * t, 3000) is None


def test_a_new_leak_after_a_plateau_is_found() -> None:
    at = full_at(lambda t: 20 * GIB + max(0.0, t - 3000) * 0.01 * GIB, 6500)
    assert at == pytest.approx(9000, rel=0.05)


def test_growth_is_told_by_the_second() -> None:
    course = MemoryHistory()
    assert (course.span_s, course.growth, course.full_at(START)) == (0.0, None, None)
    for second in range(0, 900, 5):
        course.update(START + second, GIB * second / 100, TOTAL)
        assert course.span_s == second
    assert course.growth == pytest.approx(GIB / 100, rel=0.05)


def test_a_leak_below_a_rhythm_is_found() -> None:
    at = full_at(lambda t: 10 * GIB + 0.01 * GIB * t + (t % 120) * 0.05 * GIB, 3000)
    assert at == pytest.approx(6400, rel=0.1)


def test_a_clock_that_is_set_back_begins_a_new_course() -> None:
    course = MemoryHistory()
    for second in range(0, 900, 5):
        course.update(START + second, GIB * second / 100, TOTAL)
    course.update(START - 50, GIB, TOTAL)
    assert course.span_s == 0
    assert course.full_at(START - 50) is None


@given(st.lists(st.tuples(st.floats(0.1, 600), st.floats(-5, 10)), max_size=200))
def test_a_moment_is_never_past_and_little_is_kept(steps: list[tuple[float, float]]) -> None:
    course, now, used = MemoryHistory(), START, 10 * GIB
    for passed, change in steps:
        now += passed
        used = min(TOTAL, max(0.0, used + change * GIB))
        course.update(now, used, TOTAL)
        at = course.full_at(now)
        assert at is None or at >= now
    assert len(course._history) <= 122
