"""Lines gathered into blocks, and recent items per second."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.blocks import WARM_UP_BLOCKS, RecentThroughput, WorkBlock, WorkBlocks, count_warmup_blocks


def test_each_of_the_first_lines_is_a_block() -> None:
    blocks = WorkBlocks()
    assert [blocks.add(2.0, 4.0) for _ in range(12)] == [WorkBlock(2.0, 4.0)] * 12


def test_the_number_of_blocks_grows_with_the_logarithm_of_the_run() -> None:
    blocks = WorkBlocks()
    counts = []
    for line in range(1, 100_001):
        blocks.add(1.0, 1.0)
        if line in (10_000, 100_000):
            counts.append(blocks.count)
    assert counts[0] < 2000
    assert counts[1] - counts[0] < 1000  # 300 x ln 10


def test_simultaneous_lines_stay_in_one_block() -> None:
    blocks = WorkBlocks()
    assert blocks.add(0.0, 5.0) is None
    assert blocks.close() is None
    assert blocks.add(2.0, 5.0) == WorkBlock(2.0, 10.0)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(1, 1000)), max_size=300))
def test_no_work_is_lost_between_blocks(lines: list[tuple[float, int]]) -> None:
    blocks = WorkBlocks()
    closed = [block for line in lines if (block := blocks.add(*line)) is not None]
    assert sum(items for _, items in closed) + blocks.open_items == sum(items for _, items in lines)
    assert sum(seconds for seconds, _ in closed) + blocks.open_seconds == pytest.approx(sum(s for s, _ in lines))
    assert len(blocks.first_blocks) <= WARM_UP_BLOCKS


def test_slow_blocks_at_the_start_are_the_warm_up() -> None:
    assert count_warmup_blocks([WorkBlock(s, 1.0) for s in (60.0, 5.0, 1.0, 1.1, 0.9)]) == 2
    assert count_warmup_blocks([WorkBlock(s, 1.0) for s in (1.0, 5.0, 1.0, 1.1, 0.9)]) == 0


def test_a_warm_up_is_reported_once_with_the_blocks_after_it() -> None:
    blocks = WorkBlocks()
    warm_ups = []
    for seconds in (60.0, 1.0, 1.0, 1.0, 1.0):
        blocks.add(seconds, 2.0)
        warm_ups.append(blocks.update_warm_up())
    assert warm_ups == [None, None, [WorkBlock(1.0, 2.0)] * 2, None, None]
    assert blocks.warm_up_work == WorkBlock(60.0, 2.0)


def test_work_that_slows_down_later_is_no_warm_up() -> None:
    blocks = WorkBlocks()
    for line in range(40):
        blocks.add(1.0 if line < 20 else 3.0, 1.0)
        assert blocks.update_warm_up() is None


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
