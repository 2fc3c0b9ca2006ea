"""Activities of workers, and the phase of the job."""

import pytest

from exporter.logs.search.findings import ActivityMark
from exporter.progress.phases import LEAST_ACTIVITY_S, MOST_ACTIVITY_S, WorkerActivities, job_phase
from tests.support.exporter import saved_and_read


def marks(*records: tuple[float, str, bool]) -> WorkerActivities:
    """Marks of a worker from (moment, name, whether it begins)."""
    found = WorkerActivities()
    for t, name, begins in records:
        found.apply(ActivityMark(name, begins, 0), t)
    return found


def test_an_activity_lasts_until_its_end_mark() -> None:
    worker = marks((100.0, "checkpointing", True))
    assert worker.current_phase(150.0, 90.0) == "checkpointing"
    worker.apply(ActivityMark("checkpointing", False, 0), 160.0)
    assert worker.current_phase(161.0, 90.0) is None


def test_progress_ends_an_activity() -> None:
    worker = marks((100.0, "checkpointing", True))
    assert worker.current_phase(150.0, 100.0) == "checkpointing"
    assert worker.current_phase(150.0, 101.0) is None


def test_an_activity_without_an_end_expires() -> None:
    worker = marks((100.0, "evaluating", True))
    assert worker.current_phase(100.0 + MOST_ACTIVITY_S, None) == "evaluating"
    assert worker.current_phase(101.0 + MOST_ACTIVITY_S, None) is None


@pytest.mark.parametrize(("lasted_s", "expires_after_s"), [(10.0, LEAST_ACTIVITY_S), (1000.0, 3000.0)])
def test_an_activity_with_an_earlier_duration_expires_after_three_times_that(
    lasted_s: float, expires_after_s: float
) -> None:
    worker = marks((0.0, "evaluating", True), (lasted_s, "evaluating", False), (5000.0, "evaluating", True))
    assert worker.current_phase(5000.0 + expires_after_s, None) == "evaluating"
    assert worker.current_phase(5001.0 + expires_after_s, None) is None


def test_a_checkpoint_counts_during_an_evaluation() -> None:
    assert marks((1.0, "evaluating", True), (2.0, "checkpointing", True)).current_phase(3.0, None) == "checkpointing"


@pytest.mark.parametrize("name", ["compiling", "loading", "completing"])
def test_other_activities_are_no_phase(name: str) -> None:
    assert marks((1.0, name, True)).current_phase(2.0, None) is None


def test_times_and_durations_of_checkpoints_are_kept() -> None:
    worker = marks(
        (100.0, "checkpointing", True),
        (101.0, "checkpointing", True),  # its second file
        (120.0, "checkpointing", False),
        (121.0, "checkpointing", False),
        (700.0, "checkpointing", False),  # a log with only the end
        (1300.0, "checkpointing", True),
        (1900.0, "checkpointing", True),  # the previous one has no end mark
    )
    assert list(worker.recent_starts["checkpointing"]) == [100.0, 700.0, 1300.0, 1900.0]
    assert list(worker.durations["checkpointing"]) == [20.0]
    assert worker.active_since == {"checkpointing": 1900.0}


def test_a_new_run_has_no_activity() -> None:
    worker = marks((100.0, "evaluating", True))
    worker.begin_run()
    assert worker.current_phase(101.0, None) is None


def test_activities_continue_from_the_saved_state() -> None:
    worker = marks((1.0, "evaluating", True), (9.0, "evaluating", False), (10.0, "checkpointing", True))
    assert saved_and_read(WorkerActivities, worker) == worker


def test_the_phase_is_the_activity_of_more_than_half_of_the_workers() -> None:
    busy = marks((1.0, "evaluating", True))
    idle = marks((1.0, "evaluating", True), (2.0, "evaluating", False))
    assert job_phase([(busy, None), (busy, None), (idle, None)], 5.0) == "evaluating"
    assert job_phase([(busy, None), (idle, None)], 5.0) is None
    assert job_phase([(busy, None), (busy, 4.0)], 5.0) is None


def test_workers_without_activity_marks_do_not_count() -> None:
    leader = marks((1.0, "checkpointing", True))
    others = [(WorkerActivities(), 0.5), (marks((1.0, "loading", True)), 0.5), (WorkerActivities(), None)]
    assert job_phase([(leader, 0.5), *others], 5.0) == "checkpointing"
    assert job_phase(others, 5.0) is None
    assert job_phase([], 5.0) is None
