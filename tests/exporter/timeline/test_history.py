"""The history of a node thins itself and changes no value."""

import math
import tracemalloc
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.timeline import history
from exporter.timeline.history import MOST_MOMENTS, MOST_POINTS, MOST_SERIES, MOST_VALUES, History

FIRST = 1_700_000_000.0


def dense(kept: History) -> dict[str, list[float | None]]:
    """The value of each series at each point."""
    found = {}
    for name, points, values in kept.series():
        changes = dict(zip(points, values, strict=True))
        column: list[float | None] = []
        for point in range(len(kept.times)):
            column.append(changes.get(point, column[-1] if column else None))
        found[name] = column
    return found


def run(seconds: int, step_s: float = 5.0, moments: frozenset[int] = frozenset(), every: float = 1.0) -> History:
    """A job of this duration, of which point `n` has the counter ``n``."""
    kept, now = History(step_s), FIRST
    for second in range(int(seconds / every)):
        now = FIRST + second * every
        is_moment = second in moments
        if is_moment or kept.is_due(now):
            kept.add(now, values_at(now), is_moment=is_moment)
    return kept


def values_at(now: float) -> Mapping[str, float]:
    age = now - FIRST
    found = {"items_total": 3 * age, "constant": 8.0, "when": now, "wave": math.sin(age / 100)}
    if age % 1000 < 500:
        found["sometimes"] = age
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 20_000), st.sampled_from((1.0, 5.0, 30.0)), st.frozensets(st.integers(0, 20_000), max_size=300))
def test_thinning_keeps_bounds_ends_order_moments_and_values(
    seconds: int, step_s: float, moments: frozenset[int]
) -> None:
    kept = run(seconds, step_s, moments)
    times = list(kept.times)
    assert min(seconds / step_s // 1, MOST_POINTS // 2) <= len(times) <= MOST_POINTS
    assert times[0] == FIRST
    assert times[-1] > FIRST + seconds - 1 - kept.step_s
    assert all(earlier < later for earlier, later in pairwise(times))
    assert set(kept.moments) <= set(times)
    happened = sorted(FIRST + moment for moment in moments if moment < seconds)
    latest = happened[-int(MOST_MOMENTS * MOST_POINTS / 4) :]
    assert set(latest) <= set(times)
    for number, now in enumerate(times):
        for name, column in dense(kept).items() if number in (0, len(times) // 2, len(times) - 1) else ():
            known, value = values_at(now).get(name), column[number]
            assert (known is None) == (value is None)
            assert known is None or value is None or math.isclose(known, value, rel_tol=1e-6, abs_tol=1e-6)
    counter = dense(kept)["items_total"]
    assert all(later is not None and earlier is not None and earlier <= later for earlier, later in pairwise(counter))


def test_a_week_has_hundreds_of_points_and_its_first_one() -> None:
    kept = run(7 * 86_400, every=5.0)
    assert MOST_POINTS // 2 <= len(kept.times) <= MOST_POINTS
    assert kept.times[0] == FIRST
    assert max(later - earlier for earlier, later in pairwise(kept.times)) <= kept.step_s


def test_a_worker_that_restarts_each_second_does_not_thin_the_hours_before() -> None:
    kept = History(5.0)
    for second in range(3000):
        if kept.is_due(FIRST + second):
            kept.add(FIRST + second, values_at(FIRST + second))
    before = set(kept.times)
    for second in range(3000, 6600):
        kept.add(FIRST + second, values_at(FIRST + second), is_moment=True)
    assert kept.step_s <= 20.0
    assert len(before & set(kept.times)) >= 3000 / kept.step_s
    assert len(kept.times) <= MOST_POINTS


def test_its_memory_is_claimed_when_its_series_begin() -> None:
    kept, sizes = History(5.0), []
    tracemalloc.start()
    try:
        for number in range(110):
            kept.add(FIRST + 5 * number, {f"s{name}": FIRST + number * (1 + name) for name in range(200)})
            if number in (10, 109):
                traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, history.__file__)])
                sizes.append(sum(trace.size for trace in traces.traces))  # not what other threads of pytest allocate
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 100 * 150  # which series change at each point; their values would take 800


def test_a_series_that_begins_anew_has_nothing_of_the_one_before() -> None:
    kept = History(5.0)
    for number in range(3 * MOST_POINTS):
        name = number // MOST_POINTS if number % 8 < 4 or number > MOST_POINTS else "brief"
        kept.add(FIRST + 5 * number, {f"s{name}": float(number), f"of{number}": 1.0})
    columns = dense(kept)
    assert len(columns) < 2 * MOST_POINTS + 10
    for row, now in enumerate(kept.times):
        number = round((now - FIRST) / 5)
        assert {name: column[row] for name, column in columns.items() if column[row] is not None} == {
            f"s{number // MOST_POINTS if number % 8 < 4 or number > MOST_POINTS else 'brief'}": float(number),
            f"of{number}": 1.0,
        }


def test_very_many_series_have_fewer_points() -> None:
    kept, series = History(5.0), 1500
    for number in range(400):
        now = FIRST + 5 * number
        kept.add(now, {f"s{name}": now + name for name in range(series)}, is_moment=number % 2 == 0)
    assert 40 <= len(kept.times) <= MOST_VALUES / series + 1
    assert kept.times[0] == FIRST
    assert kept.times[-1] == FIRST + 5 * 399


def test_a_clock_that_is_set_back_adds_no_point() -> None:
    kept = History(5.0)
    for now in (FIRST, FIRST - 100, FIRST, FIRST + 5):
        kept.add(now, {"a": now})
    assert list(kept.times) == [FIRST, FIRST + 5]


def test_no_more_series_than_the_bound() -> None:
    kept = History(5.0)
    kept.add(FIRST, {f"s{name}": 1.0 for name in range(MOST_SERIES + 5)})
    assert len(list(kept.series())) == MOST_SERIES


def test_zero_one_and_whole_numbers_stay_what_they_are() -> None:
    values = [0.1, 0.0, 1.0, 7e9, 0.0, 1_795_902_440.0, 16_000_001.0]
    for first in values:
        kept = History(5.0)
        for number, value in enumerate((first, *values)):
            kept.add(FIRST + 5 * number, {"a": value})
        column = dense(kept)["a"]
        assert [column[number] for number in (2, 5)] == [0.0, 0.0]
        assert first >= 2**24 or (column[3], column[7]) == (1.0, 16_000_001.0)
        assert [value for value in column if value is not None] == pytest.approx([first, *values], rel=1e-6, abs=600)
