"""When the hub asks Slurm."""

import math

import pytest

from exporter.hub.polling import AFTER_END_S, MOST_IN_QUESTION, MOST_INTERVAL_S, PollInterval, due_at, next_query
from exporter.slurm.accounting import Figures
from exporter.slurm.tracking import TrackedJob

ENDED = TrackedJob(job_id="7", name="job", state="COMPLETED", submitted=0.0, started=10.0, ended=1000.0)


def test_failures_and_slow_answers_double_the_interval_up_to_a_bound() -> None:
    pace = PollInterval.of(60.0).after(0.1)
    assert [(pace := pace.after(None)).interval_s for _ in range(4)] == [120.0, 240.0, MOST_INTERVAL_S, MOST_INTERVAL_S]
    assert pace.after(0.1).interval_s == 60.0
    assert pace.after(0.9).interval_s == 60.0  # nine times the usual, but under a second
    assert pace.after(2.0).interval_s == MOST_INTERVAL_S


def test_a_controller_that_is_always_slow_becomes_the_usual_one() -> None:
    pace = PollInterval.of(60.0).after(0.3)
    for _ in range(3):
        pace = pace.after(3.0)
    assert pace.interval_s == 60.0


def test_the_interval_is_never_shorter_than_asked_for() -> None:
    assert [PollInterval.of(60.0).wait_s(chance) for chance in (0.0, 1.0)] == [60.0, 66.0]


def test_figures_are_asked_for_at_growing_distances_from_the_end() -> None:
    asked, times = None, list[float]()
    while (at := due_at(ENDED.replace(figures_asked=asked), None)) < math.inf:
        times.append(at - 1000.0)
        asked = at
    assert tuple(times) == AFTER_END_S


@pytest.mark.parametrize(
    "job",
    [
        ENDED.replace(figures=Figures()),
        ENDED.replace(state="RUNNING", ended=None),
        ENDED.replace(state="CANCELLED", started=None),  # it never ran
        ENDED.replace(state="UNKNOWN", given_up=True),
    ],
)
def test_nothing_is_asked_about_other_jobs(job: TrackedJob) -> None:
    assert due_at(job, None) == math.inf


def test_a_job_that_left_the_queue_is_asked_about_at_once_and_for_an_hour() -> None:
    lost = ENDED.replace(state="RUNNING", ended=None, missing_since=1000.0)
    assert due_at(lost, None) == 1000.0
    assert due_at(lost, 1000.0) == 1005.0
    assert due_at(lost, 1600.0) == 4600.0
    assert due_at(lost, 4600.0) == math.inf


def test_one_question_has_the_oldest_ends_and_each_array_once() -> None:
    jobs = [(float(number), ENDED.replace(job_id=f"{number}_{task}")) for number in range(1200) for task in (1, 2)]
    question = next_query([*jobs[::-1], (1300.0, ENDED)], 1299.0)
    assert question is not None
    assert question.arrays == tuple(str(number) for number in range(MOST_IN_QUESTION))
    assert len(question.jobs) == 2 * MOST_IN_QUESTION
    assert next_query([(1300.0, ENDED)], 1299.0) is None
