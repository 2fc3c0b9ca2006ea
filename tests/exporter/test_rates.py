"""Growth per second."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.derive.rates import Growth


def growth_of(*readings: tuple[float, float], window_s: float = 60.0) -> float | None:
    growth = Growth(window_s)
    for t, value in readings:
        growth.update(t, value)
    return growth.per_second()


def test_growth_needs_two_readings() -> None:
    assert growth_of() is None
    assert growth_of((0, 5)) is None
    assert growth_of((0, 5), (10, 25)) == 2.0


def test_no_change_is_no_growth_and_not_unknown() -> None:
    assert growth_of((0, 5), (10, 5)) == 0.0


def test_two_readings_at_one_moment_tell_no_growth() -> None:
    assert growth_of((0, 5), (0, 25)) is None


def test_a_fall_is_not_growth_and_begins_anew() -> None:
    assert growth_of((0, 100), (10, 200), (20, 50)) is None
    assert growth_of((0, 100), (10, 200), (20, 50), (30, 60)) == 1.0


def test_only_the_last_minute_counts() -> None:
    readings = [(float(t), 1000.0 * t) for t in range(0, 100, 5)]
    readings += [(float(t), 95_000.0 + t - 95) for t in range(100, 200, 5)]
    assert growth_of(*readings) == pytest.approx(1.0)


def test_readings_further_apart_than_the_window_still_tell() -> None:
    assert growth_of((0, 0), (100, 100), (200, 400)) == 3.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e12)), max_size=40))
def test_growth_is_never_negative(steps: list[tuple[float, float]]) -> None:
    now, growth = 0.0, Growth()
    for gap, value in steps:
        now += gap
        growth.update(now, value)
        rate = growth.per_second()
        assert rate is None or rate >= 0
