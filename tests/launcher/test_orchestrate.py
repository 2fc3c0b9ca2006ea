"""What the batch step does when its job is to end, and how long that may take."""

import json
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exporter import records
from launcher import ending
from launcher.course import Course
from launcher.crew import Crew
from launcher.ending import LEAST_VERIFY_S, LIMIT_MARGIN_S, VERIFY_S, End, verification_s
from launcher.orchestrate import Orchestrator, load_plan
from launcher.plan import RunFacts
from launcher.report import build_report
from launcher.signals import Signals
from launcher.steps import Ending, Steps
from launcher.survey import Reservation
from tests.launcher.support import settled_run_dir


def end_of(place: Path, signals: Signals, sidecars: Any = None, limit: float | None = None) -> End:
    """The end of a job that has one worker."""
    run_dir = settled_run_dir(place, {"name": "job", "workers": [{"command": "true"}]})
    facts, plan, steps = RunFacts("1", run_dir, ("cn01",)), load_plan(run_dir), Mock(spec=Steps)
    course = Course(facts, 30.0, signals)
    crew = Crew(plan, facts, steps, course, signals, limit)
    return End(plan, facts, steps, course, signals, crew, sidecars or Mock(), limit)


@pytest.mark.parametrize(
    ("left_s", "allowed_s"),
    [
        (None, VERIFY_S),
        (3600.0, VERIFY_S),
        (LIMIT_MARGIN_S + VERIFY_S, VERIFY_S),
        (LIMIT_MARGIN_S + 20.0, 20.0),
        (LIMIT_MARGIN_S, LEAST_VERIFY_S),
        (-5.0, LEAST_VERIFY_S),
    ],
)
def test_the_verification_ends_before_the_time_limit(left_s: float | None, allowed_s: float) -> None:
    assert verification_s(None if left_s is None else 1000.0 + left_s, 1000.0) == allowed_s


@pytest.mark.parametrize(("left_s", "is_over"), [(LIMIT_MARGIN_S + 20.0, True), (3600.0, False)])
def test_a_report_is_told_when_there_is_no_time_left(
    left_s: float, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    limit = time.time() + left_s
    end = end_of(tmp_path, Signals(), limit=limit)

    def build(_run_dir: Path, **values: Any) -> dict[str, Any]:
        given.update(values)
        raise LookupError

    monkeypatch.setattr(ending, "build_report", build)
    with pytest.raises(LookupError):
        end._report(None, requeued=False)
    now = time.monotonic()
    monkeypatch.setattr("launcher.ending.time.monotonic", lambda: now + 30.0)
    assert given["out_of_time"]() is is_over


def test_the_report_of_a_job_that_slurm_is_ending_is_there_before_the_last_values(tmp_path: Path) -> None:
    reports: list[Any] = []
    signals, sidecars = Signals(), Mock()
    signals.ending = signal.SIGTERM
    sidecars.await_final_values.side_effect = lambda _timeout_s: reports.append(
        records.read_json(next(tmp_path.rglob(records.REPORT_FILE)))
    )
    end = end_of(tmp_path, signals, sidecars)
    end._course.begin_stop("cancelled", "scancel")
    end.finish(None, lambda: None, lambda: None)
    assert [report["state"] for report in reports] == ["CANCELLED"]


@pytest.mark.parametrize("final", [False, True])
def test_the_first_report_of_such_a_job_looks_into_no_log_and_is_not_made_where_all_is_known(
    final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = Signals()
    signals.ending = signal.SIGTERM
    end = end_of(tmp_path, signals)
    run_dir = end._facts.run_dir
    records.write_json(run_dir / records.STATUS_DIR / "cn01.json", {"attempt": 0, "workers": [], "final": final})
    given: list[dict[str, Any]] = []

    def build(run_dir: Path, **values: Any) -> dict[str, Any]:
        given.append(values)
        return build_report(run_dir, **values)

    monkeypatch.setattr(ending, "build_report", build)
    end.finish(None, lambda: None, lambda: None)
    assert [values["quick"] for values in given] == ([False] if final else [True, False])
    assert {values["judge"] for values in given} == {end._crew.judge_of_ends}


@pytest.mark.parametrize(("number", "is_there"), [(None, True), (signal.SIGTERM, False)])
def test_the_reserve_is_given_up_for_the_report_and_not_long_before(
    number: int | None, is_there: bool, tmp_path: Path
) -> None:
    seen: list[bool] = []
    signals, sidecars = Signals(), Mock()
    signals.ending = number
    end = end_of(tmp_path, signals, sidecars)
    reserve = end._facts.run_dir / records.RESERVE_FILE
    records.make_reserve(end._facts.run_dir)
    sidecars.await_final_values.side_effect = lambda _timeout_s: seen.append(reserve.exists())
    end.finish(None, lambda: None, lambda: None)
    assert seen == [is_there]
    assert not reserve.exists()


def signalled(place: Path, **ending: Any) -> tuple[Orchestrator, Mock]:
    """A batch step that has had its SIGTERM, and steps that say this of the end of the job."""
    run_dir = settled_run_dir(place, {"name": "job", "workers": [{"command": "true"}]})
    steps, signals = Mock(spec=Steps), Signals()
    signals.ending, signals.ending_at = signal.SIGTERM, time.monotonic()
    steps.ending.return_value = Ending(**ending)
    return Orchestrator(
        load_plan(run_dir), RunFacts("1", run_dir, ("cn01",)), steps, signals, None, Reservation()
    ), steps


def signals_told(made: Orchestrator) -> int:
    lines = (made._facts.run_dir / records.EVENTS_FILE).read_text().splitlines()
    return [json.loads(line)["event"] for line in lines].count("signal")


def test_workers_are_told_to_end_once_slurm_says_that_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, steps = signalled(tmp_path, unanswered=True)
    made._heed_signal()
    assert (made._course.ask, made._crew.ends_by_itself) == (False, True)
    now = time.monotonic()
    for later_s, answer, asks in ((2.0, Ending(unanswered=True), False), (4.0, Ending(), True)):
        monkeypatch.setattr("launcher.orchestrate.time.monotonic", lambda moment=now + later_s: moment)
        steps.ending.return_value = answer
        made._ask_again()
        assert (made._course.ask, made._crew.ends_by_itself) == (asks, not asks)
    steps.ending.reset_mock()
    monkeypatch.setattr("launcher.orchestrate.time.monotonic", lambda: now + 60.0)
    made._ask_again()
    steps.ending.assert_not_called()


def test_a_signal_is_told_once_also_where_its_reason_was_known_before(tmp_path: Path) -> None:
    made, _ = signalled(tmp_path)
    number, made._signals.ending = made._signals.ending, None
    made._crew.begin_stop_of(Ending(True, "time_limit", "Slurm: the time limit was reached"), "")
    stop, deadline = made._course.stop, made._course.deadline
    made._signals.ending, made._signals.ending_at = number, time.monotonic() + 4.0
    for _ in range(2):
        made._heed_signal()
    assert (made._course.stop, signals_told(made)) == (stop, 1)
    assert made._course.deadline == pytest.approx((deadline or 0.0) + 4.0, abs=1.0)


def test_a_worker_that_somebody_has_ended_stays_the_cause_where_a_signal_says_no_more(tmp_path: Path) -> None:
    made, _ = signalled(tmp_path)
    made._course.begin_stop("terminated_peer", "worker_w0 rank 0 on cn01 ended by cancelled")
    made._crew.presumed_since = time.time()
    stop = made._course.stop
    made._heed_signal()
    assert (made._course.stop, signals_told(made)) == (stop, 1)
