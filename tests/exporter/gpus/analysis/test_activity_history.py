"""Recent history of a GPU: conditions, clocks, throttling and memory."""

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


def test_a_condition_lasts_while_every_reading_confirms_it() -> None:
    timer = ConditionTimer()
    assert (timer.lasted_s, timer.is_known(START)) == (0.0, False)
    for second in range(0, 100, 5):
        timer.update(START + second, True)
    assert timer.lasted_s == 95
    timer.update(START + 100, False)
    assert timer.lasted_s == 0
    assert timer.is_known(START + 100)


def test_a_short_unknown_time_ends_nothing_but_a_long_one_does() -> None:
    timer = ConditionTimer()
    timer.update(START, True)
    timer.update(START + 10, None)
    timer.update(START + 20, True)
    assert timer.lasted_s == 20
    timer.update(START + 20 + GAP_S + 1, None)
    assert not timer.is_known(START + 20 + GAP_S + 1)
    assert timer.lasted_s == 0
    timer.update(START + 60, True)
    assert timer.lasted_s == 0


def test_time_before_a_gap_does_not_count() -> None:
    timer = ConditionTimer()
    timer.update(START, True)
    timer.update(START + GAP_S + 1, True)
    assert timer.lasted_s == 0
    timer.update(START - 100, True)
    assert timer.lasted_s == 0


def test_a_reset_timer_starts_at_the_next_reading() -> None:
    timer = ConditionTimer()
    timer.update(START, True)
    timer.update(START + 10, True)
    timer.reset()
    assert timer.lasted_s == 0
    timer.update(START + 20, True)
    timer.update(START + 25, True)
    assert timer.lasted_s == 5


@given(st.lists(st.tuples(st.floats(0, 40), st.none() | st.booleans()), max_size=60))
def test_a_condition_lasts_no_longer_than_it_was_observed(steps: list[tuple[float, bool | None]]) -> None:
    timer, now, since = ConditionTimer(), START, None
    for elapsed_s, holds in steps:
        now += elapsed_s
        timer.update(now, holds)
        if holds is False:
            since = None
        elif holds and since is None:
            since = now
        assert 0 <= timer.lasted_s <= (now - since if since is not None else 0)


def test_the_clock_is_the_mean_of_recent_minutes_under_load() -> None:
    clock = ClockHistory()
    for second in range(int(CLOCK_S)):
        clock.update(START + second, 1.5e9 if second % 10 < 5 else 1.7e9)
        assert clock.mean_hz is None or second >= CLOCK_S - 5
    assert clock.mean_hz == pytest.approx(1.6e9, rel=0.02)


def test_a_gpu_with_idle_times_has_no_mean_clock() -> None:
    clock = ClockHistory()
    for second in range(400):
        clock.update(START + second, None if second % 20 < 10 else 1.5e9)
    assert clock.mean_hz is None


def test_clock_readings_before_a_gap_do_not_count() -> None:
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


def test_falling_throttle_counters_restart_the_history() -> None:
    throttle = ThrottleHistory()
    for second in range(0, 400, 10):
        throttle.update(START + second, {"thermal": 100.0 + second})
    assert throttle.shares is not None
    throttle.update(START + 400, {"thermal": 0.0})
    assert throttle.shares is None
    throttle.update(START + 410, {})
    assert throttle.shares is None


@given(st.lists(st.tuples(st.floats(-100, 400), st.floats(0, 1e6)), max_size=60))
def test_throttle_shares_are_between_0_and_1(steps: list[tuple[float, float]]) -> None:
    throttle, now = ThrottleHistory(), START
    for elapsed_s, seconds in steps:
        now += elapsed_s
        throttle.update(now, {"thermal": seconds})
        assert all(0 <= share <= 1 for share in (throttle.shares or {}).values())


def full_at(used: Callable[[float], float], seconds: float, interval_s: float = 5.0) -> float | None:
    """Predicted second at which the memory is full, after these readings."""
    memory, t = MemoryHistory(), 0.0
    for step in range(int(seconds / interval_s)):
        t = step * interval_s
        memory.update(START + t, used(t), TOTAL)
    full_time = memory.full_at(START + t)
    return None if full_time is None else full_time - START


def test_the_prediction_is_accurate_for_steady_growth() -> None:
    assert full_at(lambda t: 10 * GIB + 0.02 * GIB * t, 1500) == pytest.approx(3500, rel=0.02)


def test_the_prediction_is_accurate_for_growth_in_steps() -> None:
    assert full_at(lambda t: 10 * GIB + (t // 60) * 1.2 * GIB, 1800) == pytest.approx(3500, rel=0.05)
    assert full_at(lambda t: 10 * GIB + (t // 400) * 4 * GIB, 3500) == pytest.approx(7200, rel=0.15)


def test_growth_for_less_than_ten_minutes_has_no_prediction() -> None:
    assert full_at(lambda t: 10 * GIB + 0.02 * GIB * t, GROWTH_S) is None


def test_an_allocator_with_a_full_cache_has_no_prediction() -> None:
    assert full_at(lambda t: 10 * GIB + min(t, 700) * 0.05 * GIB, 1200) is None
    for seconds in range(600, 3600, 100):
        assert full_at(lambda t: 10 * GIB + 30 * GIB * (1 - 0.5 ** (t / 120)), seconds) is None
        assert full_at(lambda t: 10 * GIB + 60 * GIB * (t > 20), seconds) is None


def test_periodically_released_memory_has_no_prediction() -> None:
    noise = random.Random(7)
    for seconds in range(700, 3600, 150):
        assert full_at(lambda t: 10 * GIB + (t % 120) * 0.3 * GIB, seconds) is None
        assert full_at(lambda _: 40 * GIB + noise.gauss(0, 1) * GIB, seconds) is None


def test_constant_or_falling_memory_has_no_prediction() -> None:
    assert full_at(lambda _: 79 * GIB, 3000) is None
    assert full_at(lambda t: 70 * GIB - 0.01 * GIB * t, 3000) is None


def test_a_new_leak_after_a_plateau_is_found() -> None:
    at = full_at(lambda t: 20 * GIB + max(0.0, t - 3000) * 0.01 * GIB, 6500)
    assert at == pytest.approx(9000, rel=0.05)


def test_growth_is_in_bytes_per_second() -> None:
    memory = MemoryHistory()
    assert (memory.span_s, memory.growth, memory.full_at(START)) == (0.0, None, None)
    for second in range(0, 900, 5):
        memory.update(START + second, GIB * second / 100, TOTAL)
        assert memory.span_s == second
    assert memory.growth == pytest.approx(GIB / 100, rel=0.05)


def test_a_leak_below_periodic_use_is_found() -> None:
    at = full_at(lambda t: 10 * GIB + 0.01 * GIB * t + (t % 120) * 0.05 * GIB, 3000)
    assert at == pytest.approx(6400, rel=0.1)


def test_a_clock_set_back_restarts_the_memory_history() -> None:
    memory = MemoryHistory()
    for second in range(0, 900, 5):
        memory.update(START + second, GIB * second / 100, TOTAL)
    memory.update(START - 50, GIB, TOTAL)
    assert memory.span_s == 0
    assert memory.full_at(START - 50) is None


@given(st.lists(st.tuples(st.floats(0.1, 600), st.floats(-5, 10)), max_size=200))
def test_the_predicted_time_is_never_past_and_the_history_is_bounded(steps: list[tuple[float, float]]) -> None:
    memory, now, used = MemoryHistory(), START, 10 * GIB
    for elapsed_s, change in steps:
        now += elapsed_s
        used = min(TOTAL, max(0.0, used + change * GIB))
        memory.update(now, used, TOTAL)
        at = memory.full_at(now)
        assert at is None or at >= now
    assert len(memory._history) <= 122
