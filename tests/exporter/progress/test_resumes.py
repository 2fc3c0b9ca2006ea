"""Whether the first position of a run is work or a resume."""

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.logs.search.findings import LogPosition
from exporter.progress.resumes import (
    MOST_START_S,
    STAMP_S,
    EarlierProgress,
    UndecidedStart,
    earlier_positions,
    is_resume,
    may_be_resume,
)
from exporter.progress.track import ProgressTrack, TrackState
from tests.support.exporter import saved_and_read

ITEMS = EarlierProgress("items", 141, 400, 1)


@pytest.mark.parametrize(
    ("done", "total", "earlier", "resumes"),
    [
        (142, 400, ITEMS, True),  # the last position
        (141, None, ITEMS, True),
        (101, 400, ITEMS, True),  # from a checkpoint on
        (70, 400, ITEMS, None),  # less than half of it: later positions decide
        (5, 400, ITEMS, None),  # five times as far as at first, as a faster node may be
        (2, 400, ITEMS, None),
        (1, 400, ITEMS, False),
        (0, 400, ITEMS, False),
        (142, 500, ITEMS, None),  # other work
        (142, 400, ITEMS._replace(first=None), None),
        (100, 400, ITEMS._replace(first=100), False),  # a hundred at a time
        (300, 400, EarlierProgress("steps", 300, 400, 100), None),  # a resume, or a faster run
        (400, 400, ITEMS._replace(first=100), None),
        (600, 800, EarlierProgress("items", 550, 800, 100), True),
        (6, 400, ITEMS._replace(done=4), None),  # the earlier run had not come far either
        (6, 400, ITEMS._replace(done=5), None),
        (6, 400, ITEMS._replace(done=6), True),
        (0, 400, ITEMS._replace(done=0, first=0), False),
    ],
)
def test_a_run_that_starts_near_the_end_of_an_earlier_one_is_a_resume(
    done: float, total: float | None, earlier: EarlierProgress, resumes: bool | None
) -> None:
    assert is_resume(done, total, earlier) is resumes


@pytest.mark.parametrize(
    ("done", "total", "after_s", "expected"),
    [
        (5000, 10_000, 3.0, True),
        (200, 10_000, 3.0, True),
        (199, 10_000, 3.0, False),  # less than a fiftieth
        (5000, 10_000, MOST_START_S + 1, False),
        (5000, 10_000, -1.0, False),  # by another clock
        (10_000, 10_000, 3.0, False),  # all at once: nothing follows
        (0, 10, 3.0, False),
        (50, None, 3.0, True),
        (49, None, 3.0, False),
    ],
)
def test_a_large_first_position_soon_after_the_start_may_be_a_resume(
    done: float, total: float | None, after_s: float, expected: bool
) -> None:
    assert may_be_resume(done, total, after_s) is expected


def test_a_first_position_that_the_later_pace_explains_is_work() -> None:
    start = UndecidedStart.from_position(40, 1003.0, began=1000.0)
    assert start.update(40, 1004.0) is None
    assert start.update(46, 1005.0) is None, "3 a second after it, up to 9 before, in at most 4 seconds"
    assert start.update(50, 1006.0) is True, "4 a second after it, up to 12 before"


def test_a_first_position_that_three_rises_do_not_explain_is_a_resume() -> None:
    start = UndecidedStart.from_position(5000, 1003.0, began=1000.0)
    assert [start.update(5000 + 10 * n, 1003.0 + n) for n in (1, 2, 3)] == [None, None, False]


def test_a_pause_between_two_records_is_no_sign_of_a_resume() -> None:
    start = UndecidedStart.from_position(100, 1010.0, began=1000.0)
    assert start.update(110, 1040.0) is None
    assert start.update(210, 1050.0) is True


def test_simultaneous_records_give_no_pace() -> None:
    start = UndecidedStart.from_position(10, 1005.0, began=1000.0)
    assert [start.update(done, 1005.0) for done in (20, 30, 100)] == [None] * 3
    assert (start.pace, start.rises, start.last) == (0.0, 0, 100)
    assert start.decide(), "nothing speaks against it"


def at(done: int, total: int | None) -> LogPosition:
    return LogPosition("items", "items", next(OFFSETS), done, total)


OFFSETS = itertools.count()
BEGAN = 1000.0


def track_of(earlier: EarlierProgress | None = None, began: float | None = BEGAN) -> ProgressTrack:
    track = ProgressTrack(earlier=earlier)
    track.began = began
    return track


def test_a_counter_that_is_half_way_within_seconds_is_a_resume() -> None:
    track = track_of()
    for n in range(5):
        track.update("log", at(5000 + 10 * n, 10_000), BEGAN + 3 + n)
        assert track.processed == 10 * n
    assert (track.done, track.total, track.first) == (5040, 10_000, 10)


def test_the_run_after_a_resume_resumes_too_however_long_it_loads() -> None:
    track = track_of()
    for n in range(5):
        track.update("log", at(5000 + 10 * n, 10_000), BEGAN + 3 + n)
    track.begin_run()
    track.began = BEGAN + 10
    for n in range(5):
        track.update("log", at(5030 + 10 * n, 10_000), BEGAN + 600 + n)
    assert track.processed == 40 + 40


def test_the_pace_decides_after_a_restart_if_the_trainer_rarely_logs() -> None:
    track = track_of(EarlierProgress("items", 300, 400, 100))
    for n, done in enumerate((300, 310, 320, 330)):
        track.update("log", at(done, 400), BEGAN + 5 + 60 * n)
    assert (track.done, track.processed) == (330, 30)


@pytest.mark.parametrize("later", [64, 50, 100])
def test_a_fast_first_batch_is_work(later: int) -> None:
    """Much of the progress of a benchmark in its first seconds is its initial queue."""
    track = track_of()
    for n in range(4):
        track.update("log", at(64 + later * n, 1000), BEGAN + 3 + 64 * n)
    assert (track.done, track.processed, track.first) == (64 + 3 * later, 64 + 3 * later, 64)


def test_a_first_position_is_work_if_the_start_of_the_run_is_unknown() -> None:
    track = track_of(began=None)
    track.update("log", at(5000, 10_000), BEGAN)
    assert (track.processed, track.first) == (5000, 5000)


def test_all_items_of_a_fast_worker_are_work() -> None:
    track = track_of()
    track.update("log", at(500, 1000), BEGAN + 1)
    assert track.processed == 0, "not known yet"
    track.update("log", at(900, 1000), BEGAN + 2)
    assert (track.processed, track.first) == (900, 500)


def test_the_end_of_a_run_decides_by_the_evidence_so_far() -> None:
    track = track_of()
    track.update("log", at(500, 1000), BEGAN + 1)
    track.decide_starts()
    assert (track.processed, track.first) == (500, 500)
    for moment, processed in (
        (1.5, 1),
        (3.0, 1),
        (2.0, 501),
    ):  # with timestamps in whole seconds it may have come at once
        track = track_of()
        track.update("log", at(500, 1000), BEGAN + 1)
        track.update("log", at(501, 1000), BEGAN + moment)
        track.decide_starts()
        assert track.processed == processed


def test_a_resume_record_decides_too() -> None:
    track = track_of()
    track.update("log", at(500, 1000), BEGAN + 1)
    track.update("log", LogPosition("resume", "items", next(OFFSETS), 500, None, resumed=True), BEGAN + 1)
    track.update("log", at(900, 1000), BEGAN + 2)
    assert track.processed == 400


def test_the_next_attempt_resumes_where_the_previous_one_ended() -> None:
    track = track_of(ITEMS)
    for n, done in enumerate((141, 142, 150)):
        track.update("log", at(done, 400), BEGAN + 60 + n)
    assert (track.processed, track.first) == (9, 1), "however long it has taken to load"


def test_a_run_after_a_restart_resumes_where_the_previous_one_ended() -> None:
    track = track_of()
    for n, done in enumerate((1, 50, 141)):
        track.update("log", at(done, 400), BEGAN + n)
    for began, first in ((BEGAN + 60, 121), (BEGAN + 120, 131)):
        track.begin_run()
        track.began = began
        track.update("again", at(first, 400), began + 30)
        track.update("again", at(first + 9, 400), began + 31)
    assert (track.done, track.processed, track.first) == (140, 141 + 9 + 9, 1)
    track.begin_run()
    track.update("again", at(1, 400), BEGAN + 500)
    assert track.processed == 160, "this run starts over"


def test_a_first_position_is_work_while_a_backlog_is_skimmed() -> None:
    track = track_of(ITEMS)
    track.skips_positions = True
    track.update("log", at(300, 400), BEGAN + 5)
    assert track.processed == 300


def test_ranks_that_share_the_work_are_decided_separately() -> None:
    track = track_of()
    for n in range(4):
        for rank in (0, 1):
            place = 5000 * rank + 10 * (n + 1)
            track.update("log", at(place, 10_000)._replace(rank=rank), BEGAN + 3 + n)
    assert track.processed == 40 + 30


def test_ranks_in_step_start_together() -> None:
    track = track_of()
    for n in range(5):
        for rank in (0, 1):
            positions = LogPosition("steps", "steps", next(OFFSETS), 5000 + 10 * n, 10_000, rank=rank)
            track.update("log", positions, BEGAN + 3 + n)
    assert (track.done, track.processed, track.first) == (5040, 40, 10)


def test_undecided_starts_are_saved_for_the_next_sidecar() -> None:
    track = track_of()
    track.update("log", at(500, 1000), BEGAN + 1)
    restored = ProgressTrack(state=saved_and_read(TrackState, track))
    restored.update("log", at(900, 1000), BEGAN + 2)
    assert restored.processed == 900


@given(
    pace=st.floats(0.01, 1000),
    delay=st.floats(0, 300),
    gaps=st.lists(st.floats(0.1, 100), min_size=1, max_size=12),
    total=st.integers(1, 10**6) | st.none(),
    earlier=st.builds(EarlierProgress, st.just("items"), st.integers(0, 10**5), st.none(), st.none()) | st.none(),
    seconds=st.booleans(),
)
@example(pace=0.9, delay=0.0, gaps=[1.0] * 8, total=8, earlier=None, seconds=False)
@example(pace=553.0, delay=0.0, gaps=[24.5, 1.0], total=13_549, earlier=None, seconds=False)
@example(pace=100.0, delay=0.0, gaps=[5.0, 1.0], total=1000, earlier=None, seconds=False)
@example(pace=20.0, delay=0.95, gaps=[1.0] * 25, total=500, earlier=None, seconds=True)
@example(pace=9.0, delay=1.75, gaps=[1.125, 0.125], total=12, earlier=None, seconds=True)
@example(pace=20.0, delay=0.05, gaps=[0.9] + [0.1] * 40, total=500, earlier=None, seconds=True)
def test_an_even_worker_that_starts_at_zero_loses_no_item(
    pace: float, delay: float, gaps: list[float], total: int | None, earlier: EarlierProgress | None, seconds: bool
) -> None:
    """For any log interval, loading time and earlier progress, and with timestamps in whole seconds."""
    track, t = track_of(earlier), BEGAN + delay
    for gap in gaps:
        t += gap
        done = int(pace * (t - BEGAN - delay))
        logged_at = max(BEGAN, math.floor(t)) if seconds else t
        track.update("log", at(done if total is None else min(done, total), total), logged_at)
    track.decide_starts()
    assert track.processed == track.done


@given(
    pace=st.floats(0.1, 100),
    gap=st.floats(0.2, 30),
    after_s=st.floats(0.1, 60),
    times=st.floats(7.5, 1000),
    many=st.integers(5, 20),
)
def test_only_later_items_are_work_if_the_first_position_is_unreachable(
    pace: float, gap: float, after_s: float, times: float, many: int
) -> None:
    """The first position is at least seven times what is reachable, and two steps: the pace is in whole items."""
    step = max(1.0, pace * gap)
    base = int(max(times * (after_s + STAMP_S) * step / gap, 2.0 * step)) + 50
    track = track_of()
    for n in range(many):
        track.update("log", at(base + int(step * n), None), BEGAN + after_s + gap * n)
    track.decide_starts()
    assert track.processed == int(step * (many - 1))


@given(
    first=st.integers(1, 1000),
    steps=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    after_s=st.floats(0.1, 60),
    gaps=st.lists(st.floats(0.1, 1000), min_size=8, max_size=8),
    total=st.integers(10**4, 10**6) | st.none(),
)
def test_no_item_is_lost_if_the_first_step_is_not_the_largest(
    first: int, steps: list[int], after_s: float, gaps: list[float], total: int | None
) -> None:
    """At any pace, if the larger step is among the awaited ones."""
    steps[0] = max(steps[0], first)
    track, t, done = track_of(), BEGAN + after_s, first
    track.update("log", at(done, total), t)
    for step, gap in zip(steps, gaps, strict=False):
        t, done = t + gap, done + step
        track.update("log", at(done, total), t)
    track.decide_starts()
    assert track.processed == track.done == done


@given(
    first=st.integers(0, 50),
    done=st.integers(0, 10**4),
    share=st.floats(0.5, 1.5),
    gaps=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
)
def test_a_resume_near_an_earlier_position_is_recognized_at_once(
    first: int, done: int, share: float, gaps: list[float]
) -> None:
    earlier = EarlierProgress("items", max(done, first), None, first)
    begins = int(earlier.done * share) + 1
    track, t, place = track_of(earlier), BEGAN + 1, begins
    for gap in gaps:
        track.update("log", at(place, None), t)
        t, place = t + gap, place + 3
    far = min(begins, earlier.done) > 5 * max(1, first)
    if far:
        assert track.processed == 3 * (len(gaps) - 1)
    else:
        assert (track.processed or 0) <= place


WORKER = {"rank": 3, "unit": "items", "items": 141, "items_expected": 400, "items_first": 1}


def test_the_newest_attempt_with_a_position_counts() -> None:
    positions = earlier_positions(
        [[{"workers": []}], [{"workers": [WORKER]}], [{"workers": [{**WORKER, "items": 7}]}]], {3}
    )
    assert positions == {3: EarlierProgress("items", 141, 400, 1)}


def test_attempts_are_only_read_until_all_ranks_are_known() -> None:
    read_attempts = []

    def attempts() -> Iterator[list[dict[str, object]]]:
        for number, ranks in enumerate(((2, 9), (1, 2), (0, 1, 2))):
            read_attempts.append(number)
            yield [{"workers": [{**WORKER, "rank": rank, "items": 100 - number} for rank in ranks]}]

    positions = earlier_positions(attempts(), {1, 2})
    assert ({rank: earlier.done for rank, earlier in positions.items()}, read_attempts) == ({2: 100, 1: 99}, [0, 1])
    assert earlier_positions(attempts(), {4}) == {}


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"workers": None},
        {"workers": [None]},
        {"workers": [{**WORKER, "items": None}]},
        {"workers": [{**WORKER, "items": "9"}]},
        {"workers": [{**WORKER, "items": -1}]},
        {"workers": [{**WORKER, "items": float("nan")}]},
        {"workers": [{**WORKER, "unit": None}]},
        {"workers": [{**WORKER, "rank": "0"}]},
    ],
)
def test_a_page_without_a_usable_position_is_ignored(page: dict[str, object]) -> None:
    assert earlier_positions([[page]], {0, 3}) == {}
