"""Lasting changes of speed."""

import random

import pytest

from exporter.progress.eta.blocks import WorkBlock
from exporter.progress.eta.changes import MOST_PAST_SPEEDS, PastSpeed, Speed, SpeedChanges


def after(*phases: tuple[int, float], spread: float = 0.05, seed: int = 1) -> SpeedChanges:
    """Changes after blocks of one item, given as (number, seconds)."""
    r = random.Random(seed)
    changes = SpeedChanges()
    for count, seconds in phases:
        for _ in range(count):
            changes.add(WorkBlock(seconds * r.lognormvariate(0, spread), 1.0))
    return changes


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.4, 2.0])
def test_a_step_starts_a_new_speed_close_to_its_position(factor: float) -> None:
    changes = after((100, 1.0), (20, factor))
    assert changes.speed.blocks == pytest.approx(20, abs=2)
    assert changes.speed.seconds_per_item == pytest.approx(factor, rel=0.1)
    assert [past.seconds_per_item for past in changes.past] == [pytest.approx(1.0, rel=0.05)]


def test_randomly_slow_blocks_before_a_step_are_not_part_of_it() -> None:
    changes = after((100, 1.0), (8, 1.06), (20, 1.8), spread=0.05)
    assert changes.speed.seconds_per_item == pytest.approx(1.8, rel=0.03)
    assert changes.speed.blocks == pytest.approx(20, abs=1)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_random_variation_is_no_change_of_speed(spread: float, seed: int) -> None:
    assert not after((200, 1.0), spread=spread, seed=seed).past


def test_an_occasional_slow_block_is_no_change() -> None:
    assert not after(*[(15, 1.0), (1, 8.0)] * 6).past


@pytest.mark.parametrize(("seconds", "blocks"), [(50.0, 7), (1.0, 20)], ids=["few blocks", "little work"])
def test_a_short_burst_is_no_speed_to_compare_with(seconds: float, blocks: int) -> None:
    usual, burst = PastSpeed(1.0, 60.0, 60, 60.0), PastSpeed(0.4, seconds, blocks, 10.0)
    assert SpeedChanges(past=[usual, burst]).fastest_past_speed(100.0) == usual


def test_the_slowdown_ratio_compares_with_the_fastest_earlier_speed() -> None:
    assert SpeedChanges().slowdown_ratio(0.0) is None
    assert after((60, 1.0)).slowdown_ratio(60.0) is None
    assert after((60, 2.0), (60, 1.0), (30, 1.8)).slowdown_ratio(234.0) == pytest.approx(1.8, rel=0.1)
    assert after((60, 1.0), (20, 2.0), (20, 1.0)).slowdown_ratio(120.0) == pytest.approx(1.0, rel=0.1)


def test_only_the_latest_speeds_are_kept() -> None:
    assert len(after(*[(30, 1.0 + phase % 2) for phase in range(20)]).past) == MOST_PAST_SPEEDS


def test_removing_a_part_leaves_the_figures_of_the_rest() -> None:
    whole, part = Speed(), Speed()
    for seconds in (1.0, 2.0):
        whole.add(WorkBlock(seconds, 1.0), seconds)
    for seconds in (3.0, 5.0):
        whole.add(WorkBlock(seconds, 1.0), seconds)
        part.add(WorkBlock(seconds, 1.0), seconds)
    rest = whole.without(part)
    assert (rest.seconds_per_item, rest.blocks, rest.mean) == (1.5, 2, 1.5)


def test_the_starts_of_known_speeds_are_counted_back_from_the_present_one() -> None:
    assert SpeedChanges().starts(5.0) == []
    past = [PastSpeed(1.0, 60.0, 60, 60.0), PastSpeed(2.0, 60.0, 30, 30.0)]
    assert SpeedChanges(past=past).starts(90.0) == [60.0, 90.0]
