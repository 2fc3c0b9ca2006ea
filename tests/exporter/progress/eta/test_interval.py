"""The interval and confidence of an estimate, and of a job of several workers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.status import EtaEstimate
from exporter.progress.eta.interval import (
    confidence,
    drift_doubt,
    half_width,
    log_deviation,
    median_seconds_per_item,
    peer_adjustment,
    slowest_eta,
    start_doubt,
    with_interval,
)

SHARES = st.floats(0, 3)
ESTIMATES = st.builds(
    lambda low, more, most: EtaEstimate(low + more, low, low + more + most), *[st.floats(0, 1e6) for _ in range(3)]
)


@given(st.floats(0, 1e12), SHARES, st.floats(0, 1e9))
def test_the_interval_contains_the_estimate(seconds: float, sd: float, overdue: float) -> None:
    estimate = with_interval(seconds, half_width(sd), overdue)
    assert 0 <= estimate.low <= estimate.seconds <= estimate.high


def test_a_pace_may_drift_as_far_again_as_it_has() -> None:
    assert drift_doubt(2.0, 3.0) == pytest.approx(math.log(1.5))
    assert drift_doubt(3.0, 2.0) == pytest.approx(math.log(1.5))
    assert drift_doubt(2.0, 2.0) == drift_doubt(0.0, 1.0) == 0.0


def test_an_overdue_line_moves_only_the_upper_end() -> None:
    plain, late = with_interval(100.0, 1.1, 0.0), with_interval(100.0, 1.1, 50.0)
    assert late.low == plain.low
    assert late.high == plain.high + 100


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (log_deviation(0.05, 0.1, 100, 50, 0.0), log_deviation(0.20, 0.1, 100, 50, 0.0)),
        (log_deviation(0.05, 0.1, 100, 50, 0.0), log_deviation(0.05, 1.0, 100, 50, 0.0)),
        (log_deviation(0.05, 1.0, 100, 50, 0.0), log_deviation(0.05, 1.0, 2, 50, 0.0)),
        (log_deviation(0.05, 0.1, 100, 50, 0.0), log_deviation(0.05, 0.1, 100, 50, 0.2)),
        (start_doubt(50), start_doubt(2)),
    ],
    ids=["past errors", "varying work", "few steps left", "young run", "fewer blocks"],
)
def test_the_uncertainty_grows_with(less: float, more: float) -> None:
    assert less < more


@pytest.mark.parametrize(
    ("width", "blocks", "stalled", "expected"),
    [
        (0.1, 50, False, "high"),
        (0.1, 5, False, "medium"),
        (0.4, 50, False, "medium"),
        (0.9, 50, False, "low"),
        (0.1, 2, False, "low"),
        (0.1, 50, True, "low"),
    ],
)
def test_confidence_depends_on_width_and_evidence(width: float, blocks: int, stalled: bool, expected: str) -> None:
    assert confidence(EtaEstimate(100.0, 100 - 50 * width, 100 + 50 * width), blocks, stalled) == expected


@given(st.lists(st.none() | ESTIMATES, max_size=8))
def test_the_eta_of_a_job_is_at_least_that_of_its_slowest_worker(estimates: list[EtaEstimate | None]) -> None:
    job = slowest_eta(estimates)
    known = [estimate for estimate in estimates if estimate is not None]
    assert (job is None) == (not known)
    if job is not None:
        assert job.low <= job.seconds <= job.high
        for part in range(3):
            assert all(job[part] >= estimate[part] for estimate in known)
            assert any(job[part] == estimate[part] for estimate in known)


def test_the_pace_of_peers_is_the_median_of_three_workers() -> None:
    assert median_seconds_per_item([1.0, 9.0, 2.0, None]) == 2.0
    assert median_seconds_per_item([1.0, 9.0, None]) is None


def test_a_new_worker_uses_the_pace_of_its_peers_and_an_old_one_does_not() -> None:
    assert 4.0 * peer_adjustment(4.0, 1.0, 1) == pytest.approx(1.5, abs=0.1)
    assert 4.0 * peer_adjustment(4.0, 1.0, 6) > 3.0
    assert peer_adjustment(4.0, 1.0, 8) == 1.0
    assert peer_adjustment(4.0, None, 1) == 1.0
