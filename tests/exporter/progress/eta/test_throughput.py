"""Recent items per second."""

import pytest

from exporter.progress.eta.blocks import RecentThroughput


def after(*lines: tuple[float, float]) -> float | None:
    throughput = RecentThroughput()
    for seconds, items in lines:
        throughput.add(seconds, items)
    return throughput.rate


def test_there_is_no_rate_before_any_work() -> None:
    assert after() is None


def test_the_rate_follows_a_change_within_two_windows() -> None:
    assert after(*[(1.0, 5.0)] * 300, *[(1.0, 1.0)] * 130) == pytest.approx(1.0)


def test_sparse_lines_are_collected_until_there_are_ten() -> None:
    assert after(*[(600.0, 1.0)] * 9, (1800.0, 1.0)) == pytest.approx(10 / 7200)
