"""What a signal to the batch step makes of its job."""

import json
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exporter.contract import run_files
from launcher.plan.plan import RunFacts
from launcher.run.job_state import QUERY_MARGIN_S, JobState
from launcher.run.orchestrator import load_plan
from launcher.run.signals import OrchestratorSignals
from launcher.run.stages import ReadinessState, Stages
from launcher.run.stop_reasons import StopReasons
from launcher.run.tasks import JobTasks
from launcher.steps.steps import ExternalEnd, Steps
from tests.support.launcher import settled_run_dir


class Made:
    """A batch step that has had its SIGTERM, and steps that say what is given here of the end of the job."""

    def __init__(self, place: Path, **ending: Any) -> None:
        run_dir = settled_run_dir(place, {"name": "job", "workers": [{"command": "true"}]})
        plan, facts = load_plan(run_dir), RunFacts("1", run_dir, ("cn01",))
        self.steps, self.signals = Mock(spec=Steps), OrchestratorSignals()
        self.steps.ending.return_value = ExternalEnd(**ending)
        self.signals.end_signal, self.signals.end_signal_at = signal.SIGTERM, time.monotonic()
        self.course = JobState(facts, 30.0, self.signals)
        self.crew = JobTasks(plan, facts, self.steps, self.course, self.signals, None)
        stages = Stages(plan, facts, ReadinessState(plan, facts, self.steps))
        self.stopping = StopReasons(plan, facts, self.course, self.signals, self.crew, stages, None)
        self._events = run_dir / run_files.EVENTS_FILE

    def signals_told(self) -> int:
        """How many events are about signals."""
        return [json.loads(line)["event"] for line in self._events.read_text().splitlines()].count("signal")


def test_workers_are_told_to_end_once_slurm_says_that_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path, is_unanswered=True)
    made.stopping.handle_end_signal()
    assert (made.course.is_sigterm_due, made.crew.slurm_end_query.is_left_to_slurm) == (False, True)
    now = time.monotonic()
    for later_s, answer, asks in ((2.0, ExternalEnd(is_unanswered=True), False), (4.0, ExternalEnd(), True)):
        monkeypatch.setattr("launcher.run.slurm_end.time.monotonic", lambda moment=now + later_s: moment)
        made.steps.ending.return_value = answer
        made.stopping.handle_signals()
        assert (made.course.is_sigterm_due, made.crew.slurm_end_query.is_left_to_slurm) == (asks, not asks)
    made.steps.ending.reset_mock()
    monkeypatch.setattr("launcher.run.slurm_end.time.monotonic", lambda: now + 60.0)
    made.stopping.handle_signals()
    made.steps.ending.assert_not_called()


def ask_again(made: Made, answer: ExternalEnd, monkeypatch: pytest.MonkeyPatch, later_s: float = 2.0) -> None:
    """A turn some time after a question that nobody has answered."""
    now = time.monotonic()
    made.steps.ending.return_value = answer
    with monkeypatch.context() as patch:
        patch.setattr("launcher.run.slurm_end.time.monotonic", lambda: now + later_s)
        made.stopping.handle_signals()


def test_a_late_answer_tells_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path, is_unanswered=True)
    made.stopping.handle_end_signal()
    assert made.course.stop is not None
    assert made.course.stop["reason"] == "cancelled"
    ask_again(made, ExternalEnd(True, "time_limit", "Slurm: the time limit was reached"), monkeypatch)
    assert (made.course.stop["reason"], made.course.is_sigterm_due) == ("time_limit", False)


def test_nobody_is_told_to_end_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path, is_unanswered=True)
    number, made.signals.end_signal = made.signals.end_signal, None
    made.course.begin_stop("terminated_peer", "worker_w0 rank 0 on cn01 ended by cancelled")
    made.crew.terminate_if_due()
    made.crew.unconfirmed_since = time.time()
    made.signals.end_signal = number
    made.stopping.handle_end_signal()
    assert made.crew.slurm_end_query.is_left_to_slurm
    ask_again(made, ExternalEnd(), monkeypatch)
    assert (made.course.is_sigterm_due, made.crew.slurm_end_query.is_left_to_slurm) == (False, False)


def test_nothing_is_asked_shortly_before_the_report_has_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path, is_unanswered=True)
    made.stopping.handle_end_signal()
    made.steps.ending.reset_mock()
    made.course.deadline = time.monotonic() + QUERY_MARGIN_S - 0.5
    ask_again(made, ExternalEnd(), monkeypatch)
    made.steps.ending.assert_not_called()


@pytest.mark.parametrize("asked", [False, True])
def test_a_signal_ends_the_time_in_which_a_job_saves_before_it_is_queued_again(asked: bool, tmp_path: Path) -> None:
    made = Made(tmp_path, ends_all=True, reason="cancelled", cause="Slurm: cancelled")
    made.course.begin_stop("time_limit", "the time limit is near", {"requeue": True}, sigterm_after_s=255.0)
    if asked:
        made.course.mark_signalled()
    made.stopping.handle_end_signal()
    assert made.course.stop is not None
    assert made.course.stop["reason"] == ("time_limit" if asked else "cancelled")
    if not asked:
        assert made.course.deadline == pytest.approx(made.signals.end_signal_at + 27.0)


def test_a_signal_is_told_once_also_where_its_reason_was_known_before(tmp_path: Path) -> None:
    made = Made(tmp_path)
    number, made.signals.end_signal = made.signals.end_signal, None
    made.crew.slurm_end_query.stop_job(ExternalEnd(True, "time_limit", "Slurm: the time limit was reached"), "")
    stop, deadline = made.course.stop, made.course.deadline
    made.signals.end_signal, made.signals.end_signal_at = number, time.monotonic() + 4.0
    for _ in range(2):
        made.stopping.handle_end_signal()
    assert (made.course.stop, made.signals_told()) == (stop, 1)
    assert made.course.deadline == pytest.approx((deadline or 0.0) + 4.0, abs=1.0)


def test_a_worker_that_somebody_has_ended_stays_the_cause_where_a_signal_says_no_more(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.course.begin_stop("terminated_peer", "worker_w0 rank 0 on cn01 ended by cancelled")
    made.crew.unconfirmed_since = time.time()
    stop = made.course.stop
    made.stopping.handle_end_signal()
    assert (made.course.stop, made.signals_told()) == (stop, 1)
