"""The ETA between two log lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.projection import EtaForecast, EtaOutlook, StallLimit, usual_stall_limit

FORECAST = EtaForecast(seconds=100.0, least_seconds=5.0, credit=30.0, width=1.25)
OUTLOOK = EtaOutlook(
    unfinished=True,
    stall_limit=StallLimit(idle_s=20.0, usual_s=80.0),
    slowdown=None,
    rate=2.0,
    rate_valid_s=60.0,
    items=50.0,
    elapsed=100.0,
    quiet_s=25.0,
)


def test_the_eta_counts_down_until_a_line_is_overdue_and_then_grows_at_half_speed() -> None:
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
def test_busy_gpus_extend_the_stall_timeout_and_idle_ones_shorten_it(
    busy: bool | None, timeout: float, limit: float
) -> None:
    assert OUTLOOK.stall_limit.limit(timeout, busy) == limit
    assert not OUTLOOK.is_stalled(limit, timeout, busy)
    assert OUTLOOK.is_stalled(limit + 1, timeout, busy)
    assert not OUTLOOK._replace(unfinished=False).is_stalled(limit + 1, timeout, busy)


def test_a_named_pause_may_last_its_usual_time_from_its_start() -> None:
    assert StallLimit(20.0, 80.0, named_s=600.0, named_after_s=7.0).limit(10.0, None) == 607.0
    assert StallLimit(20.0, 80.0, named_s=50.0, named_after_s=7.0).limit(10.0, None) == 87.0


def limit(
    rises: int,
    timeout_s: float,
    *,
    silence: float = 5.0,
    tail_s: float = 0.0,
    first_pause: float = 0.0,
    first_wait_s: float = 0.0,
) -> float:
    return usual_stall_limit(rises, silence, 0.0, 0.0, tail_s, 1000.0, first_pause, first_wait_s).limit(timeout_s, None)


def test_the_limits_of_a_young_worker_shrink_with_a_timeout_below_the_default() -> None:
    assert [limit(1, timeout_s) for timeout_s in (300.0, 600.0, 60.0)] == [7200.0, 7200.0, 1440.0]
    assert [limit(3, timeout_s) for timeout_s in (300.0, 600.0, 60.0)] == [1800.0, 1800.0, 360.0]
    assert limit(0, 300.0, first_wait_s=10_000.0) == 20_000.0  # the first line took long
    assert limit(3, 300.0, first_wait_s=10_000.0) == 1800.0
    assert limit(3, 60.0, silence=100.0) == 800.0  # rare lines
    assert limit(3, 60.0, tail_s=200.0) == 1200.0  # few requests left


def test_a_first_pause_may_take_a_share_of_the_work_before_it() -> None:
    assert limit(9, 300.0) == 300.0
    assert limit(9, 300.0, first_pause=1.0) == 400.0
    assert limit(9, 60.0, first_pause=1.0) == 80.0


def test_a_break_may_take_a_share_of_the_run_but_at_most_an_hour() -> None:
    def after(elapsed_s: float) -> float:
        return usual_stall_limit(9, 5.0, 0.0, 0.0, 0.0, elapsed_s, 0.0).limit(300.0, None)

    assert [after(elapsed_s) for elapsed_s in (1000.0, 10_000.0, 1e6)] == [300.0, pytest.approx(600.0), 3600.0]


def test_an_outdated_rate_is_unknown() -> None:
    assert OUTLOOK.rate_after(60.0) == 2.0
    assert OUTLOOK.rate_after(61.0) is None


def test_the_average_includes_unusual_silence_while_work_is_left() -> None:
    assert OUTLOOK.average_after(25.0) == 0.5
    assert OUTLOOK.average_after(100.0) == 0.25
    assert OUTLOOK._replace(unfinished=False).average_after(100.0) == 0.5
    assert OUTLOOK._replace(items=0.0).average_after(0.0) is None
