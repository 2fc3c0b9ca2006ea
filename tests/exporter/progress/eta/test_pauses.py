"""Pauses: distinguished from slow work, grouped and expected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.progress.eta.pauses import (
    MOST_OBSERVED,
    AnnouncedPauses,
    ExpectedPauses,
    Pause,
    Pauses,
    group_pauses,
    is_pause,
    pause_factor,
    pause_period,
)
from exporter.progress.eta.prior import PriorPause


def pauses(*seen: tuple[float, float], name: str | None = None, start: float = 0.0) -> Pauses:
    """Pauses of (items done, seconds), ten seconds of work to the item."""
    found = Pauses(start=start)
    for done, seconds in seen:
        found.add(Pause(done, seconds, 10.0 * done, name), 1.0)
    return found


@pytest.mark.parametrize(
    ("gap", "expected", "sd", "paused"),
    [(9.0, 1.0, 0.1, True), (2.9, 1.0, 0.1, False), (9.0, 1.0, 1.0, False), (40.0, 1.0, 1.0, True)],
    ids=["long", "not long", "varying work", "long even so"],
)
def test_a_pause_is_much_longer_than_the_work_for_a_line(gap: float, expected: float, sd: float, paused: bool) -> None:
    assert is_pause(gap, expected, pause_factor(sd), 1.0, alone=False) == paused


def test_a_few_times_the_usual_gap_is_no_pause() -> None:
    assert not is_pause(2.0, 0.1, 3.0, 1.0, alone=False)


def test_a_small_pause_is_one_if_it_is_alone() -> None:
    assert [is_pause(2.0, 1.0, pause_factor(0.05), 1.0, alone) for alone in (True, False)] == [True, False]
    assert not is_pause(2.0, 1.0, pause_factor(0.3), 1.0, alone=True), "the work varies as much"
    known = pauses((100, 3.0), start=50.0)
    assert [known.is_alone(done, 2.0) for done in (119.0, 120.0)] == [False, True]
    assert [pauses(start=50.0).is_alone(done, 2.0) for done in (69.0, 70.0)] == [False, True]


@pytest.mark.parametrize(
    ("done", "period"),
    [
        ([100, 200, 300, 400], 100.0),
        ([95, 195, 300, 405], 310 / 3),
        ([100, 200], 100.0),
        ([100, 170], None),
        ([100, 130, 300, 330, 700], None),
        ([10, 11, 12, 13], None),
        ([100], None),
    ],
    ids=["even", "nearly even", "two at multiples", "two elsewhere", "uneven", "at every line", "one"],
)
def test_periodic_positions_are_recognized(done: list[float], period: float | None) -> None:
    assert pause_period(done, 1.0) == (None if period is None else pytest.approx(period))


def test_multiples_of_a_small_distance_are_not_periodic() -> None:
    assert pause_period([10, 20, 50, 60, 110, 140, 230], 1.0) is None


def test_pauses_of_one_duration_are_one_kind() -> None:
    found = group_pauses([Pause(d, s, 0.0) for d, s in [(50, 5), (100, 60), (150, 5), (200, 70), (250, 6)]], 1.0)
    assert [(kind.times, kind.period) for kind in found] == [(2, 100.0), (3, 100.0)]


def test_pauses_with_one_name_are_one_kind_whatever_their_duration() -> None:
    seen = [Pause(100, 5.0, 0.0, "saving"), Pause(150, 5.0, 0.0, "evaluating"), Pause(200, 50.0, 0.0, "saving")]
    assert [(kind.name, kind.times) for kind in group_pauses(seen, 1.0)] == [("saving", 2), ("evaluating", 1)]


def test_periodic_pauses_are_expected_before_the_end_but_not_at_it() -> None:
    assert pauses((100, 30.0), (200, 30.0), (300, 30.0)).expected(350, 600, 1.0) == ExpectedPauses(60.0, 0.0)


def test_few_pauses_do_not_predict_one_just_before_the_end() -> None:
    assert pauses((330, 30.0), (660, 30.0)).expected(700, 1000, 1.0).seconds == 0.0
    assert pauses((300, 30.0), (600, 30.0)).expected(700, 1000, 1.0).seconds == 30.0


def test_a_periodic_pause_is_due_at_its_position() -> None:
    assert pauses((100, 30.0), (200, 30.0), (300, 30.0)).expected(400, 600, 1.0) == ExpectedPauses(60.0, 30.0)


def test_pauses_that_fail_to_appear_are_no_longer_expected() -> None:
    assert pauses((100, 30.0), (200, 30.0), (300, 30.0)).expected(520, 1000, 1.0).seconds == 0


def test_irregular_pauses_continue_at_their_rate() -> None:
    ahead = pauses((10, 30.0), (150, 30.0), (180, 30.0), (500, 30.0)).expected(500, 1000, 1.0)
    assert ahead.seconds == pytest.approx(120.0)
    assert ahead.due == 0.0


@pytest.mark.parametrize(("place", "expected"), [(100, 0.9 * 0.9 * 8), (97, 0.5 * 0.806 * 9), (600, 0.0)])
def test_an_early_pause_at_a_round_position_is_likely_to_recur(place: float, expected: float) -> None:
    ahead = pauses((place, 30.0)).expected(place + 5, 1000, 1.0)
    assert ahead.seconds == pytest.approx(expected * 30.0, rel=0.02)


def test_a_single_long_pause_is_unlikely_to_recur() -> None:
    short, long = pauses((100, 399.0)), pauses((100, 401.0))
    assert long.expected(105, 1000, 1.0).seconds < 0.3 * short.expected(105, 1000, 1.0).seconds


def test_a_named_pause_is_expected_after_its_first_occurrence() -> None:
    found = pauses((100, 30.0), name="evaluating")
    assert found.expected(150, 1000, 1.0) == ExpectedPauses(8 * 30.0, 0.0)
    assert found.expected(200, 1000, 1.0) == ExpectedPauses(8 * 30.0, 30.0)
    assert found.expected(250, 1000, 1.0).seconds == 0.0


def test_pauses_of_earlier_runs_are_expected_until_they_fail_to_appear() -> None:
    usual = Pauses(prior_pauses=(PriorPause(None, 30.0, 100.0),))
    assert usual.expected(50, 1000, 1.0) == ExpectedPauses(9 * 30.0, 0.0)
    assert usual.expected(160, 1000, 1.0).seconds == 0.0


def test_earlier_runs_give_the_period_of_a_pause_seen_once() -> None:
    found = Pauses(prior_pauses=(PriorPause(None, 30.0, 97.0),))
    found.add(Pause(97, 40.0, 970.0), 1.0)
    assert found.expected(100, 1000, 1.0) == ExpectedPauses(9 * 40.0, 0.0)


def test_a_falling_count_drops_positions_but_not_the_longest_pause() -> None:
    found = pauses((100, 30.0), (200, 30.0), (300, 30.0))
    found.restart(50)
    assert found.expected(60, 600, 1.0) == ExpectedPauses(0.0, 0.0)
    assert found.largest == 30.0


def test_the_number_of_kept_pauses_is_bounded() -> None:
    assert len(pauses(*[(float(place), 5.0) for place in range(1000)]).seen) == MOST_OBSERVED


def test_announced_pauses_end_with_the_next_one_and_before_the_work_for_the_line() -> None:
    announced = AnnouncedPauses()
    announced.begin("evaluating", 100.0)
    announced.begin("saving", 130.0)
    assert announced.pop_all(145.0, gap=45.0, expected=5.0) == [("evaluating", 30.0), ("saving", 10.0)]
    assert announced.pop_all(150.0, gap=5.0, expected=5.0) == []


def test_an_announced_pause_lasts_until_its_announced_end() -> None:
    announced = AnnouncedPauses()
    announced.begin("evaluating", 100.0)
    announced.end(120.0)
    assert announced.pop_all(145.0, gap=45.0, expected=5.0) == [("evaluating", 20.0)]


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from([None, "saving"])), max_size=60),
    st.floats(0, 1e6),
    st.floats(1, 1e6),
    st.floats(0, 1e3),
)
def test_the_expected_pause_time_is_never_negative(
    seen: list[tuple[float, float, str | None]], done: float, left: float, step: float
) -> None:
    found = Pauses()
    for place, seconds, name in sorted(seen, key=lambda pause: pause[0]):
        found.add(Pause(place, seconds, place, name), step)
    ahead = found.expected(done, done + left, step)
    assert ahead.seconds >= 0
    assert ahead.due >= 0


@pytest.mark.parametrize(
    ("start", "done", "share"),
    [
        (0.0, 250.0, 1.0),  # the end of the first of four epochs
        (0.0, 249.0, 1.0),
        (0.0, 244.0, 0.0),
        (0.0, 750.0, 0.0),  # of the third: the first ones had no pause
        (500.0, 750.0, 1.0),  # the first since a resume
        (0.0, 105.0, 1.0),  # early in the run
        (0.0, 1000.0, 0.0),
    ],
)
def test_a_first_pause_is_likely_early_and_at_the_end_of_an_epoch(start: float, done: float, share: float) -> None:
    assert Pauses(start=start).first_share(done, 1000.0, 1.0) == share


@pytest.mark.parametrize("step", [1.0, 5.0])
def test_a_run_that_counts_its_first_step_is_not_a_resumed_one(step: float) -> None:
    fresh, resumed = Pauses(start=step), Pauses(start=3 * step)
    assert fresh.first_share(160.0, 1000.0, step) == 1.0  # early, not after the third of 19 epochs
    assert fresh.first_share(750.0, 1000.0, step) == 0.0
    assert resumed.first_share(750.0, 1000.0, step) > 0.0


def test_a_first_pause_is_not_expected_early_after_another_one() -> None:
    pauses = Pauses()
    pauses.add(Pause(30.0, 60.0, 300.0), 1.0)
    assert pauses.first_share(110.0, 1000.0, 1.0) == 0.0


def test_the_next_pauses_are_as_far_apart_as_the_first_until_their_length_is_known() -> None:
    pauses = Pauses()
    for times in (1, 2, 3):
        pauses.add(Pause(68.0 * times, 400.0, 2000.0 * times), 1.0)
        share = 1 / (times + 1) if times < 3 else 0.0
        assert pauses.first_share(68.0 * (times + 1), 1010.0, 1.0) == pytest.approx(share)
        assert pauses.first_share(68.0 * (times + 1) + 10, 1010.0, 1.0) == 0.0
