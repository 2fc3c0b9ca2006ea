"""Processed items, over resumes, restarts and counters that fall."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.contract.records import from_json
from exporter.logs.search.findings import ActivityMark, LogPosition, LogValue
from exporter.progress.counters import ASIDE_MOST_S, JITTER_RECORDS, RANK_FRESH_S
from exporter.progress.track import (
    EVALUATING_MOST_S,
    ProgressTrack,
    TrackState,
    combine_ranks,
    items_of_rank,
    items_of_worker,
)
from tests.support.exporter import saved_and_read, saved_text


@pytest.mark.parametrize(
    ("total", "tasks", "shares"), [(10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1, 0]), (8, 1, [8]), (0, 2, [0, 0])]
)
def test_items_are_distributed_round_robin(total: int, tasks: int, shares: list[int]) -> None:
    assert [items_of_worker(total, tasks, rank) for rank in range(tasks)] == shares


@given(st.integers(0, 10**9), st.integers(1, 100))
def test_the_shares_of_all_tasks_add_up_to_the_total(total: int, tasks: int) -> None:
    assert sum(items_of_worker(total, tasks, rank) or 0 for rank in range(tasks)) == total


def test_the_share_is_unknown_without_a_total_or_tasks() -> None:
    assert items_of_worker(None, 4, 0) is None
    assert items_of_worker(10, 0, 0) is None


SERVER, CLIENT = ("server", "server_w0", 0), ("client", "client_w0", 1)


def test_a_worker_on_two_nodes_has_one_share() -> None:
    tasks = [("worker", f"worker_w{rank // 2}", rank, True) for rank in range(4)]
    assert [items_of_rank(11, tasks[::-1], rank) for rank in range(4)] == [6, 6, 5, 5]
    assert items_of_rank(11, tasks[:2], 1) == 11
    assert items_of_rank(None, tasks, 0) is items_of_rank(11, tasks, 9) is None


@pytest.mark.parametrize(
    ("critical", "shares"),
    [((True, True), [None, None]), ((False, False), [None, None]), ((False, True), [None, 10])],
)
def test_only_the_critical_role_has_shares_of_the_items(critical: tuple[bool, bool], shares: list[int | None]) -> None:
    tasks = [(*SERVER, critical[0]), (*CLIENT, critical[1])]
    assert [items_of_rank(10, tasks, rank) for rank in range(2)] == shares


def test_a_worker_beyond_its_share_has_no_known_total() -> None:
    track = track_after(at(50), share=50)
    assert track.total == 50
    feed(track, at(51))
    assert track.total is None
    feed(track, at(52, 60))
    assert track.total == 60


OFFSETS = itertools.count()  # each record has its own offset


def at(done: int, total: int | None = None, unit: str = "items", name: str | None = None, **also: int) -> LogPosition:
    """A position of a pattern that is named like its unit by default."""
    return LogPosition(name or unit, unit, 0, done, total, **also)  # type: ignore[arg-type]


def resumed(done: int, total: int | None = None, unit: str = "items") -> LogPosition:
    """A record of a resume."""
    return LogPosition("resume", unit, 0, done, total, resumed=True)


def evaluating(begins: bool) -> ActivityMark:
    """The mark at the start or end of an evaluation."""
    return ActivityMark("evaluating", begins, 0)


def feed(
    track: ProgressTrack, *records: LogPosition | ActivityMark, source: str = "a.out", start: float = 1.0
) -> list[bool]:
    """Whether each position was accepted, with records a second apart."""
    accepted = []
    for t, record in enumerate(records):
        if isinstance(record, ActivityMark):
            track.apply_activity(record, start + t)
        else:
            accepted.append(track.update(source, record._replace(offset=next(OFFSETS)), start + t))
    return accepted


def track_after(*records: LogPosition | ActivityMark, preference: Sequence[str] = (), **options: Any) -> ProgressTrack:
    """A track that has taken these records."""
    track = ProgressTrack(preference, **options)
    feed(track, *records)
    return track


def counts(done: Iterable[int], total: int | None = 1000, unit: str = "items") -> list[LogPosition]:
    """Positions of one counter."""
    return [at(number, total, unit) for number in done]


def test_a_track_knows_nothing_before_the_first_position() -> None:
    track = ProgressTrack(share=7)
    assert (track.pattern, track.unit, track.done, track.processed, track.last_rise) == (None,) * 5
    assert track.total == 7


def test_a_track_follows_its_count() -> None:
    track = ProgressTrack()
    assert all(feed(track, *counts([0, 3, 3, 10])))
    assert (track.pattern, track.unit, track.done, track.total) == ("items", "items", 10, 1000)
    assert (track.processed, track.last_rise) == (10, 4.0)


def test_lines_present_in_two_logs_count_once() -> None:
    track = ProgressTrack()
    assert feed(track, *counts([1, 2, 3])) == [True] * 3
    assert feed(track, *counts([1, 2, 3, 4]), source="a.err") == [False] * 4
    assert (track.done, track.processed) == (3, 3)


def test_epochs_in_one_log_and_batches_in_another_are_combined() -> None:
    track = ProgressTrack()
    feed(track, at(2, 3, "epochs"), source="a.out")
    feed(track, at(1, 10, "batches"), at(4, 10, "batches"), source="a.err")
    assert (track.unit, track.done, track.total) == ("batches", 14, 30)


def test_a_source_of_higher_order_replaces_the_log_without_progress_or_reset() -> None:
    track = track_after(*counts([100]))
    assert track.update("file", at(103, 2000), 5.0, order=1)
    assert (track.done, track.total, track.processed) == (103, 2000, 100)
    assert not track.update("a.out", at(104, 1000), 6.0)
    assert track.update("file", at(110, 2000), 7.0, order=1)
    assert track.processed == 107
    track.begin_run()
    assert track.update("a.out", at(5, 1000), 8.0), "a new run has its sources to find again"


def test_a_source_of_higher_order_in_another_unit_starts_a_new_count() -> None:
    track = track_after(at(5, 100, "steps"), at(9, 100, "steps"))
    assert track.update("file", at(900, 2000, name="progress_file"), 5.0, order=1)
    assert (track.unit, track.processed, track.changes) == ("items", 0, 1)
    assert track.update("file", at(950, 2000, name="progress_file"), 6.0, order=1)
    assert (track.processed, track.changes) == (50, 1)


def test_a_source_of_higher_order_continues_its_count_in_a_later_run() -> None:
    track = ProgressTrack(("steps",))
    track.update("file", at(900, 2000, name="progress_file"), 1.0, order=1)
    track.begin_run()
    track.update("file_r1", at(100, 2000, name="progress_file"), 2.0, order=1)
    assert (track.done, track.processed, track.changes) == (100, 1000, 0)
    track.begin_run()
    feed(track, at(1, 10, "steps"), start=3.0)
    track = ProgressTrack(("steps",), state=saved_and_read(TrackState, track))
    track.update("file_r2", at(10, 2000, name="progress_file"), 4.0, order=1)
    assert (track.unit, track.done, track.processed) == ("items", 10, 1000)


def test_the_first_pattern_is_used_until_one_with_a_total_matches() -> None:
    track = ProgressTrack(("items", "steps", "epochs"))
    assert feed(track, at(5, None, "steps"), at(6, None), at(7, 100), at(6, None, "steps"), at(9, 100)) == [
        *(True, False, True, False, True)
    ]
    assert (track.pattern, track.done, track.processed, track.changes) == ("items", 9, 7, 1)


def test_the_preferred_of_two_patterns_with_totals_is_used() -> None:
    track = track_after(at(10, 100), at(1, 10, "steps"), at(20, 100), at(2, 10, "steps"), preference=("steps", "items"))
    assert (track.pattern, track.done, track.total, track.processed) == ("steps", 2, 10, 11)


def test_epochs_give_way_to_an_unranked_finer_count() -> None:
    track = track_after(at(1, 3, "epochs"), at(2, 10, "batches"))
    assert (track.unit, track.done, track.total) == ("batches", 2, 30)


def test_a_count_that_ended_gives_way_to_a_longer_one() -> None:
    track = track_after(
        at(4, 4),
        at(1, 1000, "steps"),
        at(2, 1000, "steps"),
        at(1, 2),
        at(5, 1000, "steps"),
        preference=("items", "steps"),
    )
    assert (track.pattern, track.done, track.total, track.processed) == ("steps", 5, 1000, 8)


def test_a_large_fall_is_a_reset_once_a_second_record_confirms_it() -> None:
    track = ProgressTrack()
    assert feed(track, *counts([500, 3, 4, 6])) == [True, False, True, True]
    assert (track.done, track.processed) == (6, 503)


def test_a_single_far_lower_record_is_no_reset() -> None:
    track = track_after(*counts([500, 3, 501]))
    assert (track.done, track.processed) == (501, 501)


def test_records_out_of_order_are_no_resets() -> None:
    track = track_after(*counts([50, 48, 49, 51, 47, 53, 52]))
    assert (track.done, track.processed) == (53, 53)


def test_a_count_that_stays_a_little_lower_is_a_reset() -> None:
    track = track_after(*counts([900, *range(800, 800 + JITTER_RECORDS - 1)]))
    assert track.done == 900
    feed(track, *counts([830, 840]))
    assert (track.done, track.processed) == (840, 940)


def test_a_fall_by_many_increments_is_a_reset() -> None:
    track = track_after(*counts([898, 900, 600]))
    assert track.done == 900, "one record is no evidence"
    feed(track, *counts([602]))
    assert (track.done, track.processed) == (602, 902)


def test_a_complete_count_may_restart_at_once() -> None:
    track = ProgressTrack()
    assert feed(track, *counts([999, 1000, 1000, 1, 5])) == [True] * 5
    assert (track.done, track.processed) == (5, 1004)


def test_a_late_record_out_of_order_does_not_undo_completion() -> None:
    track = track_after(*counts([998, 1000, 999]))
    assert track.done == 1000


def test_items_before_a_resume_are_not_processed_items() -> None:
    track = track_after(resumed(60, 100))
    assert (track.done, track.total, track.processed, track.last_rise) == (60, 100, 0, None)
    feed(track, at(65, 100))
    assert (track.done, track.processed) == (65, 5)


def test_a_resume_in_another_unit_leaves_the_first_position_uncounted() -> None:
    track = track_after(resumed(3, None, "epochs"), at(1200, 5000, "steps"), at(1210, 5000, "steps"))
    assert (track.done, track.processed) == (1210, 10)


def test_a_resume_lowers_the_position_at_once() -> None:
    track = ProgressTrack()
    assert all(feed(track, *counts([900]), resumed(800, 1000), *counts([810])))
    assert (track.done, track.processed) == (810, 910)


def test_a_new_run_counts_from_zero_unless_it_resumes() -> None:
    track = track_after(*counts([80]))
    track.begin_run()
    assert (track.done, track.processed) == (80, 80)
    feed(track, *counts([5]))
    assert (track.done, track.processed) == (5, 85)
    track.begin_run()
    feed(track, resumed(75, 1000), *counts([90]))
    assert (track.done, track.processed) == (90, 100)


def test_batches_are_counted_across_epochs() -> None:
    track = ProgressTrack()
    for epoch in (1, 2, 3):
        feed(track, at(1, 10, "batches", epoch=epoch, epochs=3), at(10, 10, "batches", epoch=epoch, epochs=3))
        assert (track.done, track.total, track.processed) == (10 * epoch, 30, 10 * epoch)
    assert (track.epoch, track.epochs) == (3, 3)


def test_epochs_may_be_counted_from_zero() -> None:
    track = track_after(
        at(10, 10, "batches", epoch=0), at(0, 10, "batches", epoch=1), epoch_bases={"batches": 0}, epochs=3
    )
    assert (track.done, track.total, track.processed, track.epoch) == (10, 30, 10, 1)


@pytest.mark.parametrize(("base", "numbers"), [(1, (0, 1, 2)), (0, (1, 2, 3))])
def test_a_wrong_number_of_the_first_epoch_is_corrected(base: int, numbers: tuple[int, ...]) -> None:
    track = ProgressTrack(epoch_bases={"batches": base})
    for number in numbers:
        feed(track, at(10, 10, "batches", epoch=number, epochs=3))
    assert (track.done, track.total) == (30, 30)


def test_the_position_is_corrected_at_once_with_the_number_of_the_first_epoch() -> None:
    track = track_after(
        at(10, 10, "batches", epoch=2, epochs=3), at(1, 10, "batches", epoch=3, epochs=3), epoch_bases={"batches": 0}
    )
    assert (track.done, track.total, track.processed) == (21, 30, 30)


def test_inconsistent_numbers_of_batches_and_epochs_stay_within_bounds() -> None:
    track = track_after(at(12, 10, "batches", epoch=1, epochs=3))
    assert (track.done, track.total) == (10, 30)
    track = track_after(at(5, 10, "batches", epoch=1, epochs=0))
    assert (track.done, track.total) == (5, 10)


def test_the_total_is_unknown_without_a_number_of_epochs() -> None:
    track = track_after(at(4, 10, "batches", epoch=0), at(5, 10, "batches", epoch=1), epoch_bases={"batches": 0})
    assert (track.done, track.total, track.processed) == (15, None, 15)


def test_epochs_may_differ_in_size() -> None:
    track = track_after(at(10, 10, "batches", epoch=1, epochs=3), at(1, 6, "batches", epoch=2, epochs=3))
    assert (track.done, track.total) == (11, 22)
    feed(track, at(6, 6, "batches", epoch=2, epochs=3), at(1, 8, "batches", epoch=3, epochs=3))
    assert (track.done, track.total, track.processed) == (17, 24, 17)


def test_batches_after_the_line_of_their_epoch_are_no_resets() -> None:
    track = ProgressTrack()
    for epoch in (1, 2, 3):
        feed(track, at(epoch, 3, "epochs"), *counts([1, 5, 10], 10, "batches"))
        assert (track.done, track.total, track.processed) == (10 * epoch, 30, 10 * epoch)


def test_batches_may_come_before_the_line_of_their_epoch() -> None:
    track = track_after(at(1, 3, "epochs"), *counts([1, 9, 10, 1], 10, "batches"), at(2, 3, "epochs"))
    feed(track, *counts([2], 10, "batches"))
    assert (track.done, track.processed) == (12, 12)


def test_batches_before_the_first_epoch_line_are_not_compared_with_later_ones() -> None:
    track = track_after(*counts([5], 10, "batches"), at(3, 5, "epochs"), *counts([6, 8], 10, "batches"))
    assert (track.done, track.total, track.processed) == (28, 50, 7)


def test_a_new_run_starts_in_the_epoch_that_it_logs() -> None:
    track = track_after(at(3, 5, "epochs"), *counts([4], 10, "batches"))
    track.begin_run()
    feed(track, at(2, 5, "epochs"), *counts([1], 10, "batches"))
    assert (track.done, track.total) == (11, 50)


def test_any_counter_that_restarts_with_each_epoch_is_recognized() -> None:
    track = ProgressTrack(("items", "epochs"))
    for epoch in (1, 2, 3):
        feed(track, at(epoch, 3, "epochs"), *counts([1, 5, 10, 10], 10), *counts([1, 3], 3))
        assert track.processed == 10 * epoch, "the shorter count is that of a validation"
    assert (track.done, track.total) == (30, 30)


@pytest.mark.parametrize("order", [1, -1])
def test_a_counter_whose_records_name_the_epoch_belongs_to_that_epoch(order: int) -> None:
    track = ProgressTrack(("items", "epochs"))
    for offset, (epoch, done) in enumerate([(1, 0), (1, 5), (1, 9), (2, 0), (2, 3)]):
        for position in (at(done, 10), at(epoch, 3, "epochs"))[::order]:
            track.update("a.err", position._replace(offset=offset), float(offset))
        assert track.total == (10 if offset == 0 and order == 1 else 30)
    assert (track.done, track.last_rise) == (13, 4.0)
    assert track.processed == (13 if order == 1 else 14), "an epoch that came first was the first position"


def test_a_reset_within_an_epoch_is_not_the_next_epoch() -> None:
    track = track_after(at(1, 3, "epochs"), *counts([50, 60, 3, 4], 100), preference=("items", "epochs"))
    assert (track.done, track.total) == (4, 100)


def test_a_counter_that_continues_across_epochs_is_not_multiplied() -> None:
    track = ProgressTrack(("steps", "epochs"))
    for epoch in (1, 2, 3):
        feed(track, at(epoch, 3, "epochs"), at(epoch * 10, 30, "steps"), at(epoch * 10, 30, "steps"))
        assert (track.done, track.total) == (epoch * 10, 30)


def test_a_counter_of_all_epochs_is_recognized_in_the_second_epoch() -> None:
    track = ProgressTrack()
    for done in range(50, 550, 50):
        feed(track, at(done, 1500, "steps", epoch=1, epochs=3))
    assert track.total == 4500, "so far it may be one of each epoch"
    feed(track, at(550, 1500, "steps", epoch=2, epochs=3), at(600, 1500, "steps", epoch=2, epochs=3))
    assert (track.done, track.total, track.processed) == (600, 1500, 600)
    track.begin_run()
    feed(track, at(50, 1500, "steps", epoch=1, epochs=3))
    assert (track.done, track.total) == (50, 1500)


def test_a_counter_seen_once_an_epoch_is_not_taken_for_one_of_all_epochs() -> None:
    track = track_after(*(at(49 + epoch, 100, "steps", epoch=epoch, epochs=2) for epoch in (1, 2)))
    assert (track.done, track.total) == (151, 200)
    track = track_after(at(40, 100, "steps", epoch=1, epochs=9), at(50, 100, "steps", epoch=1, epochs=9))
    feed(track, at(60, 100, "steps", epoch=2, epochs=9))
    assert (track.done, track.total) == (160, 900)


@pytest.mark.parametrize(("base", "first"), [(0, 0), (1, 1)])
def test_a_progress_bar_per_epoch_and_total_epochs_give_a_total(base: int, first: int) -> None:
    track = track_after(at(45, 100, "batches", epoch=first + 3), epoch_bases={"batches": base}, epochs=90)
    assert (track.done, track.total) == (345, 9000)
    track.begin_run()
    assert track.epochs == 90
    feed(track, at(1, 100, "batches", epoch=first + 4))
    assert (track.done, track.total) == (401, 9000)


def test_the_number_of_epochs_in_the_log_overrides_the_job_file() -> None:
    track = track_after(at(45, 100, "batches", epoch=4, epochs=10), epochs=90)
    assert track.total == 1000
    track = track_after(at(4, 10, "epochs"), at(45, 100, "batches"), epochs=90)
    assert track.total == 1000


def test_the_total_is_unknown_after_the_last_epoch_of_the_job_file() -> None:
    track = track_after(*(at(10, 10, "batches", epoch=epoch) for epoch in (1, 2, 3)), epochs=3)
    assert (track.done, track.total) == (30, 30)
    feed(track, at(4, 10, "batches", epoch=4), at(5, 10, "batches", epoch=5))
    assert (track.done, track.total, track.epochs) == (45, None, None)


def test_a_count_of_epochs_has_its_total_from_the_job_file() -> None:
    track = track_after(at(2, None, "epochs"), epochs=3)
    assert (track.done, track.total) == (2, 3)
    feed(track, at(4, None, "epochs"))
    assert (track.done, track.total) == (4, None)


def test_a_count_of_steps_has_its_total_from_the_job_file() -> None:
    track = track_after(at(5, None, "steps"), steps=500)
    assert (track.done, track.total) == (5, 500)
    feed(track, at(6, 600, "steps"))
    assert track.total == 600
    track = track_after(at(501, None, "steps"), steps=500)
    assert track.total is None
    track = track_after(at(5, None, "batches"), steps=500)
    assert track.total is None, "with gradient accumulation there are more batches than steps"


def test_steps_with_a_total_in_the_job_file_precede_a_bar_with_a_total() -> None:
    records = (at(5, None, "steps"), at(3, 20, "items"), at(6, None, "steps"))
    for steps, pattern in ((500, "steps"), (None, "items")):
        track = ProgressTrack(("steps", "items"), steps=steps)
        feed(track, *records)
        assert track.pattern == pattern


def test_shared_work_is_summed_over_ranks() -> None:
    track = track_after(at(10, 100, rank=0), at(20, 100, rank=1), at(30, 100, rank=0))
    assert (track.done, track.total, track.processed) == (50, 200, 50)


def test_the_slowest_of_ranks_in_step_counts() -> None:
    track = track_after(at(10, 100, "steps", rank=0), at(5, 100, "steps", rank=1), at(20, 100, "steps", rank=0))
    assert (track.done, track.total, track.processed) == (5, 100, 10)
    feed(track, at(12, 100, "steps", rank=1), at(21, 100, "steps", rank=1))
    assert (track.done, track.processed) == (20, 20)


def test_a_rank_that_is_gone_is_not_the_slowest() -> None:
    track = track_after(at(5, 100, "steps", rank=1), at(20, 100, "steps", rank=0))
    feed(track, at(30, 100, "steps", rank=0), start=10.0 + RANK_FRESH_S)
    assert track.done == 30


def test_the_total_in_the_log_overrides_the_share_of_the_job() -> None:
    track = track_after(at(5), share=50)
    assert track.total == 50
    feed(track, at(6, 60))
    assert track.total == 60
    feed(track, at(7))
    assert track.total == 60


@pytest.mark.parametrize("unit", ["tokens", "steps", "batches", "epochs"])
def test_a_share_of_items_is_no_total_of_tokens_or_steps(unit: str) -> None:
    track = track_after(at(5, None, unit), share=50)
    assert track.total is None


def test_a_share_of_items_is_a_total_of_requests() -> None:
    track = track_after(at(5, None, "requests"), share=50)
    assert track.total == 50


def test_a_total_may_change_while_the_count_rises() -> None:
    track = track_after(at(100, 1000), at(101, 5000), at(102, 300), at(103, 120))
    assert (track.done, track.total, track.processed) == (103, 120, 103)


def test_a_count_with_another_total_is_ignored_while_work_is_left() -> None:
    track = ProgressTrack()
    assert feed(track, at(100, 1000), at(1, 50), at(50, 50)) == [True, False, False]
    assert track.has_other_counter
    feed(track, at(101, 1000))
    assert (track.done, track.total, track.processed, track.has_other_counter) == (101, 1000, 101, False)


def test_a_count_with_another_total_is_used_once_it_lasts() -> None:
    track = track_after(at(100, 1000), at(1, 300))
    feed(track, at(50, 300), at(52, 300), start=2.0 + ASIDE_MOST_S)
    assert (track.done, track.total, track.processed) == (52, 300, 102)


def test_a_short_count_soon_after_the_end_is_not_the_work() -> None:
    track = track_after(*counts(range(0, 501, 10), 500))  # for 50 seconds
    feed(track, at(1, 20), at(10, 20), start=53.0)
    assert (track.done, track.total, track.processed) == (500, 500, 500)
    feed(track, at(1, 260), start=55.0)
    assert (track.done, track.total) == (1, 260)
    track = track_after(*counts(range(0, 501, 10), 500))
    feed(track, at(19, 20), at(20, 20), start=56.0)
    assert (track.done, track.total) == (20, 20)


@pytest.mark.parametrize("totals", [(1000, 300), (1000, 400, 90), (500, 100, 100, 100, 100, 100), (1000, 600)])
def test_all_of_the_parts_that_follow_each_other_is_work(totals: tuple[int, ...]) -> None:
    track = track_after(*(position for total in totals for position in counts(range(total + 1), total)))
    assert (track.done, track.total, track.processed) == (totals[-1], totals[-1], sum(totals))


def test_other_totals_are_ignored_between_marks_of_an_evaluation() -> None:
    track = track_after(at(10, 12), evaluating(True), at(11, 13), at(13, 13), evaluating(False), at(11, 12))
    assert (track.done, track.total, track.processed) == (11, 12, 11)


def test_counts_are_not_reset_during_an_evaluation() -> None:
    track = track_after(at(10, 12), evaluating(True), at(1, 12), at(2, 12), at(5, 12), evaluating(False), at(11, 12))
    assert (track.done, track.processed) == (11, 11)


def test_an_evaluation_ends_when_the_count_rises_again() -> None:
    track = track_after(at(10, 1000), evaluating(True), at(3, 50), at(11, 1000), at(12, 1200))
    assert (track.done, track.total) == (12, 1200)
    track = track_after(
        at(10, 10, "batches", epoch=1, epochs=3), evaluating(True), at(1, 10, "batches", epoch=1, epochs=3)
    )
    assert track.done == 10
    feed(track, at(1, 10, "batches", epoch=2, epochs=3))
    assert track.done == 11


def test_a_count_that_rose_by_a_half_is_not_complete() -> None:
    track = track_after(at(0, 100), at(50, 100), at(1, 20))
    assert (track.done, track.total) == (50, 100)


def test_a_count_may_end_a_little_below_its_total() -> None:
    track = track_after(at(980, 995), at(990, 995), at(1, 20), at(2, 20))
    assert (track.done, track.total, track.processed) == (2, 20, 991)


def test_the_pattern_does_not_change_during_an_evaluation() -> None:
    track = track_after(
        at(10, 100, "steps"),
        evaluating(True),
        at(5, 50),
        evaluating(False),
        at(11, 100, "steps"),
        preference=("items", "steps"),
    )
    assert (track.pattern, track.done) == ("steps", 11)


def test_an_evaluation_without_an_end_mark_expires() -> None:
    track = track_after(at(12, 12), evaluating(True), at(1, 500))
    assert track.done == 12
    feed(track, at(2, 500), start=2.0 + EVALUATING_MOST_S)
    assert (track.done, track.total) == (2, 500)


RECORDS = st.one_of(
    st.builds(
        LogPosition,
        st.sampled_from(["one", "two"]),
        st.sampled_from(["items", "steps"]),
        st.just(0),
        st.integers(0, 60),
        st.sampled_from([None, 20, 60]),
        st.sampled_from([None, None, None, 0, 1, 2]),
        st.sampled_from([None, 3]),
        st.sampled_from([None, 0, 1]),
        st.sampled_from([False] * 9 + [True]),
    ),
    st.builds(ActivityMark, st.just("evaluating"), st.booleans(), st.just(0)),
    st.just("run"),
)


def apply(track: ProgressTrack, record: LogPosition | ActivityMark | str, t: float) -> None:
    """Apply a record to the track, or begin a run."""
    if isinstance(record, ActivityMark):
        track.apply_activity(record, t)
    elif isinstance(record, LogPosition):
        track.update("a.out", record, t)
    else:
        track.begin_run()


@given(st.lists(st.tuples(RECORDS, st.floats(0, 1000)), max_size=40))
def test_processed_items_never_fall(records: list[tuple[LogPosition | ActivityMark | str, float]]) -> None:
    track, t, before, last_rise = ProgressTrack(("one",)), 0.0, 0.0, 0.0
    for record, gap_s in records:
        t += gap_s
        apply(track, record, t)
        assert (track.processed or 0) >= before
        assert (track.last_rise or 0) >= last_rise
        assert (track.processed is None) == (track.done is None)
        assert track.done is None or track.done >= 0
        before, last_rise = track.processed or 0, track.last_rise or 0


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from([None, 40, 100])), max_size=60))
def test_processed_items_are_at_most_the_sum_of_the_rises(positions: list[tuple[int, int | None]]) -> None:
    track, rises, last = ProgressTrack(), 0, 0
    for t, (done, total) in enumerate(positions):
        track.update("a.out", at(done, total), float(t))
        rises += max(0, done - last)
        last = done
        assert (track.processed or 0) <= rises


@given(st.lists(RECORDS, max_size=20), st.lists(RECORDS, max_size=20))
def test_a_track_continues_from_its_saved_state(
    before: list[LogPosition | ActivityMark | str], after: list[LogPosition | ActivityMark | str]
) -> None:
    track = ProgressTrack(("one",), epochs=3, steps=50)
    for t, record in enumerate(before):
        apply(track, record, float(t))
    other = ProgressTrack(("one",), epochs=3, steps=50, state=saved_and_read(TrackState, track))
    for t, record in enumerate(after, len(before)):
        apply(track, record, float(t))
        apply(other, record, float(t))
    assert saved_text(other) == saved_text(track)


@pytest.mark.parametrize("state", [{"_patterns": {"x": {}}}, {"pattern": "unknown"}, {"_resumed": 5}, []])
def test_a_malformed_state_is_refused(state: object) -> None:
    with pytest.raises(ValueError, match=r"unknown|expected|missing"):
        ProgressTrack(state=from_json(TrackState, state, "state"))


def test_rates_and_requests_are_summed_over_ranks_and_other_values_are_the_last() -> None:
    values: dict[int | None, LogValue] = {0: LogValue(6.5, 10, 100.0), 1: LogValue(3.5, 20, 101.0)}
    assert combine_ranks("generated_tokens_per_second", values, 110.0, 60.0) == 10.0
    assert combine_ranks("running_requests", values, 110.0, 60.0) == 10.0
    assert combine_ranks("loss", values, 110.0, 60.0) == 3.5


def test_silent_ranks_are_left_out_of_the_sum() -> None:
    values: dict[int | None, LogValue] = {
        0: LogValue(6.5, 10, 100.0),
        1: LogValue(3.5, 20, 150.0),
        2: LogValue(9.0, 30),
    }
    assert combine_ranks("tokens_per_second", values, 165.0, 60.0) == 3.5
    assert combine_ranks("tokens_per_second", values, 300.0, 60.0) is None
    assert combine_ranks("tokens_per_second", {}, 300.0, 60.0) is None


def test_a_rate_without_a_rank_is_ignored_beside_rates_of_ranks() -> None:
    values: dict[int | None, LogValue] = {
        None: LogValue(10.0, 5, 100.0),
        0: LogValue(6.5, 10, 100.0),
        1: LogValue(3.5, 20, 100.0),
    }
    assert combine_ranks("tokens_per_second", values, 101.0, 60.0) == 10.0
    assert combine_ranks("tokens_per_second", {None: values[None]}, 101.0, 60.0) == 10.0


class SlowTrack(ProgressTrack):
    """A track without the shortcut of `_update_fast`."""

    def _update_fast(self, *_: object) -> bool:
        return False


def test_an_undecided_start_of_one_rank_does_not_slow_down_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    track = ProgressTrack()
    track.began = 0.0
    track.update("a.out", at(50, 100)._replace(rank=1), 1.0)
    track.update("a.out", at(1, 100)._replace(rank=0), 1.0)
    assert track.processed == 1
    monkeypatch.delattr(ProgressTrack, "_apply")
    track.update("a.out", at(2, 100)._replace(rank=0), 2.0)
    assert track.processed == 2
    with pytest.raises(AttributeError, match="_apply"):
        track.update("a.out", at(51, 100)._replace(rank=1), 2.0)


PLAIN = st.one_of(
    st.builds(at, st.integers(0, 6), st.sampled_from([20, 20, 20, 30, None])),
    st.builds(lambda done: at(done, 20)._replace(rank=1), st.integers(0, 6)),
    st.builds(lambda done: at(done, 20, "requests"), st.integers(0, 6)),
    st.builds(ActivityMark, st.just("evaluating"), st.booleans(), st.just(0)),
    st.sampled_from([resumed(3, 20), "run"]),
)
GAPS = st.sampled_from([0.0, 1.0, 400.0])
SOURCES = st.sampled_from(["a.out", "a.out", "a.out", "b.out"])


@settings(max_examples=400)
@given(
    st.lists(st.tuples(PLAIN, GAPS, SOURCES), max_size=40) | st.lists(st.tuples(RECORDS, GAPS, SOURCES), max_size=40),
    st.booleans(),
)
@example([(record, 0.0, "a.out") for record in (at(0), resumed(3, 20), at(0), at(0, 20))], False)
def test_the_fast_path_gives_the_same_state(
    records: list[tuple[LogPosition | ActivityMark | str, float, str]], starts_known: bool
) -> None:
    fast, slow, t = ProgressTrack(("one",), share=25), SlowTrack(("one",), share=25), 0.0
    for record, gap_s, source in records:
        t += gap_s
        for track in (fast, slow):
            if starts_known and track.began is None:
                track.began = t
            if isinstance(record, LogPosition):
                track.update(source, record, t)
            else:
                apply(track, record, t)
        assert saved_text(fast) == saved_text(slow)
