"""Growth of files that are written in steps and polled now and then."""

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.files.outputs.growth import MOST_FILES, WINDOW_S, GroupGrowth, StepGrowth


def growth_of(*points: tuple[float, float]) -> StepGrowth:
    """Growth of changes that are seen immediately."""
    growth = StepGrowth()
    for t, value in points:
        growth.add(t, value, t)
    return growth


def test_growth_is_measured_between_changes() -> None:
    growth = growth_of((0, 0), (5, 500), (10, 1000))
    assert growth.per_second(10) == growth.per_second(14.9) == 100


def test_one_change_gives_no_growth() -> None:
    assert growth_of((0, 5000)).per_second(1) == 0
    assert StepGrowth().per_second(0) == 0


def test_growth_falls_once_a_change_is_overdue() -> None:
    growth = growth_of((0, 0), (5, 500), (10, 1000))
    assert growth.per_second(20) == 100
    assert growth.per_second(30) == pytest.approx(50)
    assert growth.per_second(110) == pytest.approx(10)


def test_growth_is_0_after_a_window_without_changes() -> None:
    assert growth_of((0, 0), (5, 500)).per_second(5 + WINDOW_S) == 0


def test_the_longest_gap_so_far_does_not_lower_the_growth() -> None:
    growth = growth_of((0, 0), (1, 100), (41, 200), (42, 300))
    assert growth.per_second(120) == pytest.approx(300 / 42)


def test_growth_restarts_after_the_size_falls() -> None:
    growth = growth_of((0, 0), (5, 500), (10, 20))
    assert growth.per_second(10) == 0
    growth.add(15, 120, 15)
    assert growth.per_second(15) == 20


def test_only_the_new_rhythm_counts_after_a_long_silence() -> None:
    growth = growth_of((0, 0), (5, 5000), (10, 10_000), (4000, 10_100), (4010, 10_200))
    assert growth.per_second(4010) == 10


def test_a_change_without_a_new_mtime_extends_the_previous_one() -> None:
    growth = growth_of((0, 0), (10, 50), (10, 100))
    assert growth.per_second(10) == 10


def test_a_change_reported_twice_counts_once() -> None:
    growth = growth_of((0, 0), (5, 500), (10, 1000))
    growth.add(10, 1000, 15)
    assert growth.per_second(40) == pytest.approx(100 * 10 / 30)


def test_silence_is_measured_by_our_own_clock() -> None:
    growth = StepGrowth()
    for t in (0, 5, 10):
        growth.add(t, 100 * t, 1_000_000 + t)
    assert growth.per_second(1_000_015) == 100


def test_only_the_last_two_minutes_count() -> None:
    growth = growth_of(*((t, 1000 * t) for t in range(0, 500, 5)))
    for t in range(500, 700, 5):
        growth.add(t, 500_000 + t - 500, t)
    assert growth.per_second(700) == pytest.approx(1)


def flushes(rate: float, buffer: int, start: float, seconds: float) -> list[tuple[float, int]]:
    """Times at which a buffered writer flushes, with the file size from then on."""
    period = buffer / rate
    return [(start + count * period, count * buffer) for count in range(1, int(seconds / period) + 1)]


@given(
    rate=st.floats(0.5, 1e9),
    period=st.floats(0.05, 400),
    poll_s=st.floats(0.2, 30),
    phase=st.floats(0, 1),
    polls=st.integers(1, 200),
)
@example(rate=1000, period=5.0, poll_s=5.0, phase=0.0, polls=30)
@example(rate=1000, period=300.0, poll_s=5.0, phase=0.3, polls=200)
@example(rate=1e6, period=4.0, poll_s=5.0, phase=0.99, polls=60)
def test_growth_of_a_buffered_writer_is_right_after_three_writes(
    rate: float, period: float, poll_s: float, phase: float, polls: int
) -> None:
    buffer = max(1, round(rate * period))
    writes = flushes(rate, buffer, 1000.0, (polls + 1) * poll_s)
    growth, seen, place, last = GroupGrowth(), 0, 0, (1000.0, 0)
    for number in range(polls):
        now = 1000.0 + (number + phase) * poll_s
        while place < len(writes) and writes[place][0] <= now:
            place += 1
        found = writes[place - 1] if place else (1000.0, 0)
        if found != last:
            growth.add_change(1, found[0], found[1], last, now)
            seen, last = seen + 1, found
        if seen >= 3:
            assert growth.per_second(now) == pytest.approx(rate, rel=0.01)


@given(st.lists(st.tuples(st.floats(-10, 1e6), st.floats(0, 1e12), st.floats(0, 1e6), st.floats(0, 1e6)), max_size=60))
def test_growth_is_never_negative(steps: list[tuple[float, float, float, float]]) -> None:
    t, now, growth = 0.0, 0.0, StepGrowth()
    for gap, value, wait, later in steps:
        t, now = t + gap, now + wait
        growth.add(t, value, now)
        assert growth.per_second(now + later) >= 0


def test_files_that_appear_complete_are_growth_of_their_owner() -> None:
    growth = GroupGrowth()
    for place in range(1, 6):
        growth.add_new_files(0, 10.0 * place, 1000 * place, 10.0 * place)
        growth.add_new_files(1, 10.0 * place + 3, 500 * place, 10.0 * place + 3)
    assert growth.per_second(54) == pytest.approx(150)


def test_owners_without_new_files_have_no_growth() -> None:
    growth = GroupGrowth()
    growth.add_new_files(0, None, 0, 10.0)
    growth.add_new_files(0, 5.0, 700, 15.0)
    assert growth.per_second(15) == 0


def test_an_unreported_change_is_made_up_for() -> None:
    growth = GroupGrowth()
    growth.add_change(1, 5, 500, (0, 0), 5)
    growth.add_change(1, 15, 1500, (10, 1000), 15)
    assert growth.per_second(15) == 100


def test_growth_of_an_old_file_starts_with_its_first_change() -> None:
    growth = GroupGrowth()
    growth.add_change(1, 100_000, 1100, (5.0, 1000), 100_000)
    growth.add_change(1, 100_010, 1200, (100_000, 1100), 100_010)
    assert growth.per_second(100_010) == 10


def test_only_the_most_recently_changed_of_too_many_files_are_followed() -> None:
    growth = GroupGrowth()
    for file in range(MOST_FILES + 10):
        growth.add_change(file, 10, 100, (0, 0), 10)
    assert growth.per_second(10) == pytest.approx(10 * MOST_FILES)


def test_files_that_came_and_went_take_no_memory() -> None:
    growth = GroupGrowth()
    tracemalloc.start()
    try:
        for now in range(0, 2000, 50):
            for file in range(now, now + 50):
                growth.add_change(file, now, 10, (now - 1, 0), now)
            growth.per_second(now)
        assert tracemalloc.get_traced_memory()[0] < 200_000  # those of the last two minutes
    finally:
        tracemalloc.stop()
