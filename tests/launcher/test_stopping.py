"""What a signal to the batch step makes of its job."""

import json
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exporter import records
from launcher.course import Course
from launcher.crew import Crew
from launcher.orchestrate import load_plan
from launcher.plan import RunFacts
from launcher.signals import Signals
from launcher.stages import Readiness, Stages
from launcher.steps import Ending, Steps
from launcher.stopping import Stopping
from tests.launcher.support import settled_run_dir


class Made:
    """A batch step that has had its SIGTERM, and steps that say what is given here of the end of the job."""

    def __init__(self, place: Path, **ending: Any) -> None:
        run_dir = settled_run_dir(place, {"name": "job", "workers": [{"command": "true"}]})
        plan, facts = load_plan(run_dir), RunFacts("1", run_dir, ("cn01",))
        self.steps, self.signals = Mock(spec=Steps), Signals()
        self.steps.ending.return_value = Ending(**ending)
        self.signals.ending, self.signals.ending_at = signal.SIGTERM, time.monotonic()
        self.course = Course(facts, 30.0, self.signals)
        self.crew = Crew(plan, facts, self.steps, self.course, self.signals, None)
        stages = Stages(plan, facts, Readiness(plan, facts, self.steps))
        self.stopping = Stopping(plan, facts, self.steps, self.course, self.signals, self.crew, stages, None)
        self._events = run_dir / records.EVENTS_FILE

    def signals_told(self) -> int:
        """How many events are about signals."""
        return [json.loads(line)["event"] for line in self._events.read_text().splitlines()].count("signal")


def test_workers_are_told_to_end_once_slurm_says_that_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path, unanswered=True)
    made.stopping.heed_end()
    assert (made.course.ask, made.crew.ends_by_itself) == (False, True)
    now = time.monotonic()
    for later_s, answer, asks in ((2.0, Ending(unanswered=True), False), (4.0, Ending(), True)):
        monkeypatch.setattr("launcher.stopping.time.monotonic", lambda moment=now + later_s: moment)
        made.steps.ending.return_value = answer
        made.stopping.heed_signals()
        assert (made.course.ask, made.crew.ends_by_itself) == (asks, not asks)
    made.steps.ending.reset_mock()
    monkeypatch.setattr("launcher.stopping.time.monotonic", lambda: now + 60.0)
    made.stopping.heed_signals()
    made.steps.ending.assert_not_called()


def test_a_signal_is_told_once_also_where_its_reason_was_known_before(tmp_path: Path) -> None:
    made = Made(tmp_path)
    number, made.signals.ending = made.signals.ending, None
    made.crew.begin_stop_of(Ending(True, "time_limit", "Slurm: the time limit was reached"), "")
    stop, deadline = made.course.stop, made.course.deadline
    made.signals.ending, made.signals.ending_at = number, time.monotonic() + 4.0
    for _ in range(2):
        made.stopping.heed_end()
    assert (made.course.stop, made.signals_told()) == (stop, 1)
    assert made.course.deadline == pytest.approx((deadline or 0.0) + 4.0, abs=1.0)


def test_a_worker_that_somebody_has_ended_stays_the_cause_where_a_signal_says_no_more(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.course.begin_stop("terminated_peer", "worker_w0 rank 0 on cn01 ended by cancelled")
    made.crew.presumed_since = time.time()
    stop = made.course.stop
    made.stopping.heed_end()
    assert (made.course.stop, made.signals_told()) == (stop, 1)
