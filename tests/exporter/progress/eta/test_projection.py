"""What holds from one line to the next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.projection import EtaForecast, EtaOutlook, StallLimit

FORECAST = EtaForecast(seconds=100.0, least_seconds=5.0, credit=30.0, width=1.25)
STANDING = EtaOutlook(
    unfinished=True,
    stall_limit=StallLimit(idle_s=20.0, usual_s=80.0),
    is_slow=False,
    slowdown=None,
    rate=2.0,
    rate_valid_s=60.0,
    items=50.0,
    elapsed=100.0,
    quiet_s=25.0,
)


def test_seconds_left_are_counted_down_until_a_line_is_overdue_and_then_grow_by_half() -> None:
    assert [FORECAST.after(since).seconds for since in (0.0, 10.0, 30.0, 50.0)] == [100.0, 90.0, 70.0, 80.0]
    assert FORECAST._replace(seconds=20.0).after(30.0).seconds == 5.0


@given(st.floats(0, 1e12))
def test_an_overdue_line_moves_only_the_upper_end(since: float) -> None:
    estimate = FORECAST.after(since)
    assert 0 < estimate.low < estimate.seconds < estimate.high
    assert estimate.low == pytest.approx(estimate.seconds / 1.25)
    assert estimate.high == pytest.approx(estimate.seconds * 1.25 + 2 * max(0.0, since - 30.0))


@pytest.mark.parametrize(
    ("busy", "timeout", "limit"), [(None, 10.0, 80.0), (None, 90.0, 90.0), (False, 10.0, 20.0), (True, 10.0, 240.0)]
)
def test_busy_gpus_give_more_time_and_idle_ones_less(busy: bool | None, timeout: float, limit: float) -> None:
    assert STANDING.stall_limit.limit(timeout, busy) == limit
    assert not STANDING.is_stalled(limit, timeout, busy)
    assert STANDING.is_stalled(limit + 1, timeout, busy)
    assert not STANDING._replace(unfinished=False).is_stalled(limit + 1, timeout, busy)


def test_a_pause_with_a_name_may_last_its_time_from_where_it_began() -> None:
    assert StallLimit(20.0, 80.0, named_s=600.0, named_after_s=7.0).limit(10.0, None) == 607.0
    assert StallLimit(20.0, 80.0, named_s=50.0, named_after_s=7.0).limit(10.0, None) == 87.0


def test_the_rate_is_not_said_when_it_is_long_past() -> None:
    assert STANDING.rate_after(60.0) == 2.0
    assert STANDING.rate_after(61.0) is None


def test_the_average_counts_silence_that_is_more_than_usual_while_work_is_left() -> None:
    assert STANDING.average_after(25.0) == 0.5
    assert STANDING.average_after(100.0) == 0.25
    assert STANDING._replace(unfinished=False).average_after(100.0) == 0.5
    assert STANDING._replace(items=0.0).average_after(0.0) is None
