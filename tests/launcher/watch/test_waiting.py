"""The text about what a job waits for."""

from typing import Any

import pytest

from exporter.contract.view import JobView
from launcher.watch.waiting import wait_text
from tests.support.builders import NOW, job_view

pytestmark = pytest.mark.usefixtures("utc")


def text_for(state: str = "RUNNING", reason: str | None = None, **readiness: Any) -> str:
    """Text for a job. Without readiness values it waits for nothing."""
    unknown = {"ready": False, "since": None, "not_ready_since": None, "waiting": ""}
    found = {**unknown, **readiness} if readiness else None
    return wait_text(JobView.from_json(job_view(state=state, time=NOW, pending_reason=reason, readiness=found)))


def test_a_job_without_services_waits_for_nothing() -> None:
    assert text_for() == ""
    assert text_for("COMPLETED") == ""


def test_ready_services_have_a_time() -> None:
    assert text_for(ready=True, since=NOW - 60) == "ready since 2025-11-22 04:12"


def test_missing_services_are_named_with_the_waiting_time() -> None:
    assert text_for(not_ready_since=NOW - 130, waiting="the model") == "not ready for 2m 10s: waiting for the model"
    assert text_for(waiting="4 prefills and 1 decodes") == "not ready: waiting for 4 prefills and 1 decodes"
    assert text_for(not_ready_since=NOW + 3) == "not ready for 0s: no answer yet", "clocks of nodes differ"


def test_a_pending_job_waits_in_the_queue() -> None:
    assert text_for("PENDING", "Dependency", waiting="the model") == "waiting in the queue: Dependency"
    assert text_for("PENDING") == "not started yet"


@pytest.mark.parametrize(
    ("over", "reason", "expected"),
    [
        (
            {"state": "TIMEOUT", "items": 141, "items_expected": 400, "unit": None},
            "BeginTime",
            "requeued (attempt 1 ended TIMEOUT at 141/400 items), waiting in the queue for attempt 2: BeginTime",
        ),
        (
            {"state": "PREEMPTED", "items": 70, "items_expected": None, "unit": "steps"},
            None,
            "requeued (attempt 1 ended PREEMPTED at 70 steps), waiting in the queue for attempt 2",
        ),
        (
            {"state": None, "items": None, "items_expected": None, "unit": None},
            "Resources",
            "requeued (attempt 1 ended), waiting in the queue for attempt 2: Resources",
        ),
    ],
)
def test_a_requeued_job_shows_its_last_attempt_and_the_queue_reason(
    over: dict[str, Any], reason: str | None, expected: str
) -> None:
    view: dict[str, Any] = {"state": "PENDING", "time": NOW, "pending_reason": reason, "attempt": 1}
    view |= {"requeued": {"attempt": 0, **over}}
    assert wait_text(JobView.from_json(job_view(**view))) == expected
