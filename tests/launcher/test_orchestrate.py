"""How long the batch step may take for what it does at the end of a job."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launcher import ending
from launcher.course import Course
from launcher.crew import Crew
from launcher.ending import LEAST_VERIFY_S, LIMIT_MARGIN_S, VERIFY_S, End, verification_s
from launcher.plan import RunFacts
from launcher.signals import Signals
from launcher.steps import Steps
from tests.launcher.support import plan_of, settled_run_dir


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
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]})
    facts, steps, signals, limit = RunFacts("1", run_dir, ("cn01",)), Mock(spec=Steps), Signals(), time.time() + left_s
    course = Course(facts, 30.0, signals)
    crew = Crew(plan_of(), facts, steps, course, signals, limit)
    end = End(plan_of(), facts, steps, course, signals, crew, Mock(), limit)

    def build(_run_dir: Path, **values: Any) -> dict[str, Any]:
        given.update(values)
        raise LookupError

    monkeypatch.setattr(ending, "build_report", build)
    with pytest.raises(LookupError):
        end._report(None, requeued=False)
    now = time.monotonic()
    monkeypatch.setattr("launcher.ending.time.monotonic", lambda: now + 30.0)
    assert given["out_of_time"]() is is_over
