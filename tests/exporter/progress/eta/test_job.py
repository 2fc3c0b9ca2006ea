"""A job of several workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.interval import EtaEstimate, median_seconds_per_item, peer_adjustment, slowest_eta

ESTIMATES = st.builds(
    lambda low, more, most: EtaEstimate(low + more, low, low + more + most), *[st.floats(0, 1e6) for _ in range(3)]
)


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
