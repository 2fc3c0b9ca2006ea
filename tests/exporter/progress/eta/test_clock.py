"""One clock for timestamps and readings."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.clock import LineClock, LineRhythm, WallClockSteps


def times(lines: list[tuple[float, float | None]]) -> list[float]:
    clock = LineClock()
    return [clock.read(t, arrival) for t, arrival in lines]


def test_timestamps_count_if_lines_arrive_late_in_one_flush() -> None:
    assert times([(100.0, 100.0), (110.0, 160.0), (120.0, 160.0), (150.0, 160.0)]) == [0, 10, 20, 50]


def test_lines_that_were_there_before_reading_began_keep_their_times() -> None:
    clock = LineClock()
    assert [clock.read(t, 10_000.0) for t in (0.0, 3000.0, 9990.0)] == [0, 3000, 9990]
    assert clock.elapsed(10_000.0) == pytest.approx(10_000.0, abs=60)


@pytest.mark.parametrize("offset", [-25200.0, -3600.0, -120.0, 3600.0, 7200.0])
def test_readings_bridge_a_clock_that_is_set(offset: float) -> None:
    assert times([(0.0, 0.0), (10.0, 10.0), (20.0 + offset, 20.0), (30.0 + offset, 30.0)]) == [0, 10, 20, 30]


@pytest.mark.parametrize("step", [-25200.0, -60.0, 3600.0])
@pytest.mark.parametrize("has_stamps", [True, False])
def test_the_time_of_lines_goes_on_while_the_clock_of_the_node_is_set(step: float, has_stamps: bool) -> None:
    clock, lag = LineClock(), 4.0 if has_stamps else 0.0
    for t in (1000.0, 1010.0):
        clock.read(t - lag, t)
    clock.set_wall_clock(step)
    assert clock.elapsed(1015 + step) == 15 + lag
    assert clock.age(clock.last) == lag
    assert clock.read(1020 + step - lag, 1020 + step) == 20
    assert clock.elapsed(1030 + step) == 30 + lag


def test_only_a_difference_to_the_monotonic_clock_shows_that_the_clock_was_set() -> None:
    steps = WallClockSteps()
    found = [steps.read(wall, monotonic) for wall, monotonic in [(1e9, 5.0), (1e9 + 3600, 3605.0), (1e9 + 20, 3625.0)]]
    assert found == [0.0, 0.0, -3600.0]
    assert steps.read(1e9 + 31, 3635.0) == 0.0  # it runs a little fast


@pytest.mark.parametrize("zone", [-36000.0, 7200.0, 34200.0])
def test_timestamps_of_another_zone_are_shifted_to_the_clock_of_the_readings(zone: float) -> None:
    clock = LineClock()
    for t in (1e6, 1e6 + 10, 1e6 + 20):
        clock.read(t + zone, t)
    assert clock.last == 20
    assert clock.elapsed(1e6 + 50) == 50


def test_timestamps_that_jump_back_continue_without_readings() -> None:
    clock = LineClock()
    for t in (7200.0, 7210.0, 3610.0, 3620.0):
        clock.read(t, None)
    assert clock.last == 20
    assert clock.elapsed(3650.0) == 50


def test_a_line_slightly_out_of_order_does_not_set_the_time_back() -> None:
    assert times([(0.0, 0.0), (10.0, 10.0), (7.0, 10.0), (20.0, 20.0)]) == [0, 10, 10, 20]


def test_there_is_no_current_time_before_the_first_line() -> None:
    assert LineClock().elapsed(5.0) == math.inf


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.none() | st.floats(-1e9, 1e9))), st.floats(-1e9, 1e9))
def test_time_never_goes_back(lines: list[tuple[float, float | None]], now: float) -> None:
    clock = LineClock()
    read = [clock.read(t, arrival) for t, arrival in lines]
    assert read == sorted(read)
    assert clock.elapsed(now) >= clock.last


def test_silence_is_measured_against_the_usual_age_of_the_newest_line() -> None:
    rhythm = LineRhythm()
    for _ in range(50):
        rhythm.add(gap=2.0, step=10.0, wait=60.0)
    assert rhythm.gap == pytest.approx(2.0)
    assert rhythm.step == pytest.approx(10.0)
    assert rhythm.silence == pytest.approx(60.0)
