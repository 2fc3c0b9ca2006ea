"""Work done, over resumes, restarts and counters that fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.derive.progress import Progress, expected_items


def test_nothing_is_known_before_the_first_position() -> None:
    assert Progress() == Progress(position=None, total=None, processed=None, last_rise=None)


def test_work_done_follows_the_position() -> None:
    progress = Progress()
    for now, done in ((1.0, 3), (2.0, 3), (3.0, 10)):
        progress.update(now, done, 100)
    assert (progress.position, progress.processed, progress.total, progress.last_rise) == (10, 10, 100, 3.0)


def test_a_first_position_of_zero_is_known_and_no_rise() -> None:
    progress = Progress()
    progress.update(1.0, 0, 100)
    assert (progress.position, progress.processed, progress.last_rise) == (0, 0, None)


def test_the_total_stays_when_a_line_does_not_tell_it() -> None:
    progress = Progress()
    progress.update(1.0, 1, 100)
    progress.update(2.0, 2, None)
    assert progress.total == 100


def test_what_an_earlier_job_did_is_not_work_of_this_one() -> None:
    progress = Progress()
    progress.resume(60, 100)
    assert (progress.position, progress.processed, progress.last_rise) == (60, 0, None)
    progress.update(5.0, 65, 100)
    assert (progress.position, progress.processed, progress.last_rise) == (65, 5, 5.0)


def test_a_position_that_falls_is_no_work_and_the_next_rise_is() -> None:
    progress = Progress()
    progress.update(1.0, 80, 100)
    progress.update(2.0, 50, 100)
    assert (progress.position, progress.processed, progress.last_rise) == (50, 80, 1.0)
    progress.update(3.0, 51, 100)
    assert (progress.processed, progress.last_rise) == (81, 3.0)


def test_a_restarted_worker_counts_from_zero() -> None:
    progress = Progress()
    progress.update(1.0, 80, 100)
    progress.begin_run()
    progress.update(2.0, 5, 100)
    assert (progress.position, progress.processed) == (5, 85)


def test_a_restarted_worker_that_says_where_it_goes_on_does_nothing_twice() -> None:
    progress = Progress()
    progress.update(1.0, 80, 100)
    progress.begin_run()
    progress.resume(75, 100)
    progress.update(2.0, 90, 100)
    assert (progress.position, progress.processed) == (90, 95), "75 to 80 was done a second time"


STEPS = st.lists(st.tuples(st.sampled_from(["update", "resume", "restart"]), st.integers(0, 1000)), max_size=30)


@given(STEPS)
def test_work_done_never_falls(steps: list[tuple[str, int]]) -> None:
    progress, before, last_rise = Progress(), 0, 0.0
    for now, (step, done) in enumerate(steps):
        if step == "update":
            progress.update(float(now), done, None)
        elif step == "resume":
            progress.resume(done, None)
        else:
            progress.begin_run()
        assert (progress.processed or 0) >= before
        assert (progress.last_rise or 0.0) >= last_rise
        assert (progress.processed is None) == (progress.position is None)
        before, last_rise = progress.processed or 0, progress.last_rise or 0.0


@given(st.lists(st.integers(0, 1000)))
def test_work_done_is_the_last_position_of_a_count_that_only_rises(positions: list[int]) -> None:
    progress = Progress()
    for done in sorted(positions):
        progress.update(1.0, done, None)
    assert progress.processed == max(positions, default=None)


@pytest.mark.parametrize(
    ("total", "tasks", "shares"), [(10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1, 0]), (8, 1, [8]), (0, 2, [0, 0])]
)
def test_items_are_dealt_out_in_turn(total: int, tasks: int, shares: list[int]) -> None:
    assert [expected_items(total, tasks, rank) for rank in range(tasks)] == shares


@given(st.integers(0, 10**9), st.integers(1, 100))
def test_the_shares_of_all_tasks_are_the_whole(total: int, tasks: int) -> None:
    assert sum(expected_items(total, tasks, rank) or 0 for rank in range(tasks)) == total


def test_without_a_total_or_tasks_no_share_is_known() -> None:
    assert expected_items(None, 4, 0) is None
    assert expected_items(10, 0, 0) is None
