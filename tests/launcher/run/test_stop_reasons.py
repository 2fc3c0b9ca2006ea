"""The stop of a job after a signal to its batch step."""

import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import pytest

from exporter.contract import run_files
from exporter.workers.slurm_end_notice import CANCELLED
from launcher.plan.plan import RequeueRule, RunFacts
from launcher.report.state import EXIT_STATUS
from launcher.run.end_of_job import EndOfJob
from launcher.run.job_state import OWN_TEARDOWN_S, QUERY_MARGIN_S, JobRun, JobState, StopOrigin
from launcher.run.orchestrator import load_plan
from launcher.run.run_records import RunRecords
from launcher.run.signals import OrchestratorSignals
from launcher.run.stages import ReadinessState, Stages
from launcher.run.stop_reasons import LIMIT_INTERVAL_S, REQUEUE_MARGIN_S, StopReasons
from launcher.run.tasks import JobTasks
from launcher.rundir.job_records import JobStateRecord, StopRequest
from launcher.steps.steps import ExternalEnd, Steps
from tests.support.launcher import read_json, settled_run_dir


class SignalledJob:
    """A batch step that has received SIGTERM, and steps whose end query gives these values."""

    def __init__(self, folder: Path, **ending: Any) -> None:
        run_dir = settled_run_dir(folder, {"name": "job", "workers": [{"command": "true"}]})
        plan, facts = load_plan(run_dir), RunFacts("1", run_dir, ("cn01",))
        self.steps, self.signals = Mock(spec=Steps), OrchestratorSignals()
        self.steps.query_end.return_value = ExternalEnd(**ending)
        self.steps.read_time_limit_end.return_value = None
        self.signals.end_signal, self.signals.end_signal_at = signal.SIGTERM, time.monotonic()
        self.job_state = JobState(facts, 30.0, self.signals)
        self.job = job = JobRun(plan, facts, self.steps, self.job_state, self.signals)
        self.job_tasks = JobTasks(job)
        stages = Stages(plan, facts, ReadinessState(plan, facts, self.steps))
        self.stop_reasons = StopReasons(job, self.job_tasks, stages)
        self.events = run_dir / run_files.EVENTS_FILE

    def count_signal_events(self) -> int:
        """Number of events about signals."""
        return [json.loads(line)["event"] for line in self.events.read_text().splitlines()].count("signal")


def near_its_limit(job: SignalledJob, left_s: float, job_id: str = "4459", kill_wait_s: float = 30.0) -> StopReasons:
    """What stops this job, which runs in a queue, is to be requeued and has so many seconds of four hours left."""
    reasons, job.signals.end_signal = job.stop_reasons, None
    slurm = reasons._plan.slurm._replace(requeue=RequeueRule(preempted=False, time_limit=True, max=3))
    reasons._plan = dataclasses.replace(reasons._plan, slurm=slurm, kill_wait_s=kill_wait_s)
    reasons.time_limit_end, reasons._job_tasks = time.time() + left_s, Mock(busy=True)
    reasons._facts = dataclasses.replace(reasons._facts, job_id=job_id, start=reasons.time_limit_end - 4 * 3600.0)
    return reasons


@pytest.mark.parametrize(("job_id", "is_stopped"), [("4459", True), ("local-1f2e", False)])
def test_only_a_job_in_a_queue_is_stopped_for_a_requeue(job_id: str, is_stopped: bool, tmp_path: Path) -> None:
    reasons = near_its_limit(SignalledJob(tmp_path), 10.0, job_id)
    reasons._stop_if_requeue_due()
    assert (reasons._job_state.stop is not None) == is_stopped


@pytest.mark.parametrize(
    ("kill_wait_s", "limit_s", "save_s"),
    [
        (30.0, 4 * 3600.0, 27.0),  # as long as workers have at the limit
        (600.0, 4 * 3600.0, 597.0),
        (600.0, 3600.0, 180.0),  # not the time in which the job should work
        (30.0, 60.0, OWN_TEARDOWN_S),
        (5.0, 4 * 3600.0, OWN_TEARDOWN_S),
    ],
)
def test_a_job_that_is_requeued_has_time_to_save_and_leaves_time_for_the_report(
    kill_wait_s: float, limit_s: float, save_s: float, tmp_path: Path
) -> None:
    job = SignalledJob(tmp_path)
    for left_s, is_due in ((save_s + REQUEUE_MARGIN_S + 5.0, False), (save_s + REQUEUE_MARGIN_S, True)):
        reasons = near_its_limit(job, left_s, kill_wait_s=kill_wait_s)
        reasons._facts = dataclasses.replace(reasons._facts, start=time.time() + left_s - limit_s)
        reasons._stop_if_requeue_due()
        assert (job.job_state.stop is not None) is is_due
    assert (job.job_state.deadline or 0.0) - time.monotonic() == pytest.approx(save_s, abs=2.0)


def test_a_limit_that_was_extended_is_read_once_before_a_stop(tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    reasons = near_its_limit(job, 100.0)
    first = reasons.time_limit_end or 0.0
    job.steps.read_time_limit_end.return_value = first + 3600.0
    reasons._stop_if_requeue_due()
    job.steps.read_time_limit_end.assert_not_called()
    reasons.time_limit_end = time.time() + 10.0
    for _ in range(3):
        reasons._stop_if_requeue_due()
    job.steps.read_time_limit_end.assert_called_once()
    assert (job.job_state.stop, reasons.time_limit_end) == (None, first + 3600.0)

    job.steps.read_time_limit_end.return_value = reasons.time_limit_end = time.time() + 10.0
    reasons._stop_if_requeue_due()
    assert job.job_state.stop is not None


def test_a_limit_that_is_changed_while_the_job_runs_is_found_and_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SignalledJob(tmp_path)
    reasons = near_its_limit(job, 3 * 3600.0)
    job.job_state.publish("running")
    later = (reasons.time_limit_end or 0.0) + 3600.0
    job.steps.read_time_limit_end.return_value = later
    began = time.monotonic()
    for passed_s, asked in ((LIMIT_INTERVAL_S - 5, 0), (LIMIT_INTERVAL_S + 5, 1), (2 * LIMIT_INTERVAL_S, 1)):
        monkeypatch.setattr(time, "monotonic", lambda moment=began + passed_s: moment)
        reasons._read_limit_if_due()
        assert job.steps.read_time_limit_end.call_count == asked
    assert (reasons.time_limit_end, reasons._job_tasks.exit_reason_finder.job_end) == (later, later)
    assert JobStateRecord.of_attempt(reasons._facts.run_dir, 0).time_limit_end == later


def test_after_a_warning_the_workers_have_until_the_extended_limit(tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    reasons = near_its_limit(job, -600.0)
    job.steps.read_time_limit_end.return_value = time.time() + 120.0
    reasons._plan = dataclasses.replace(reasons._plan, slurm=reasons._plan.slurm._replace(signal="USR1@120"))
    job.signals.warnings.add(signal.SIGUSR1)
    reasons._job_tasks.warn_workers = Mock(return_value=1)  # type: ignore[method-assign]
    reasons._forward_warnings()
    assert (job.job_state.deadline or 0.0) - time.monotonic() == pytest.approx(120.0 - REQUEUE_MARGIN_S, abs=2.0)


@pytest.mark.parametrize("count", [0, 2])
def test_the_report_knows_the_warning_that_workers_got(count: int, tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    reasons = job.stop_reasons
    reasons._plan = dataclasses.replace(reasons._plan, slurm=reasons._plan.slurm._replace(signal="USR1@120"))
    job.signals.warnings.add(signal.SIGUSR1)
    reasons._job_tasks.warn_workers = Mock(return_value=count)  # type: ignore[method-assign]
    reasons._forward_warnings()
    published = JobStateRecord.of_attempt(reasons._facts.run_dir, 0).warning
    assert (published is not None and published.signal == "SIGUSR1") == (count > 0)
    assert JobStateRecord.of_content(job.job.know({}).job_state).warning == published


def test_before_a_requeue_the_signal_of_the_job_comes_first(tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    reasons = near_its_limit(job, 50.0)
    reasons._plan = dataclasses.replace(reasons._plan, slurm=reasons._plan.slurm._replace(signal="USR1@48"))
    reasons._stop_if_requeue_due()
    assert job.job_state.stop is None


def test_the_hour_that_comes_twice_changes_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        job = SignalledJob(tmp_path)
        reasons = near_its_limit(job, 50.0)
        for known, asked, expected in (
            (1792891800.0, 1792888200.0, 1792891800.0),  # 02:30 CET on 2026-10-25, read as 02:30 CEST
            (1792891800.0, 1792880000.0, 1792880000.0),
            (1792791800.0, 1792788200.0, 1792788200.0),  # a day before
        ):
            reasons.time_limit_end, job.steps.read_time_limit_end.return_value = known, asked
            reasons._read_limit()
            assert reasons.time_limit_end == expected
    finally:
        monkeypatch.undo()
        time.tzset()


def test_workers_that_got_a_warning_before_a_requeue_have_the_same_end(tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    reasons = near_its_limit(job, 120.0)
    reasons._stop_for_requeue()
    now = time.monotonic()
    assert job.job_state.sigterm_at - now == pytest.approx(120.0 - REQUEUE_MARGIN_S - 27.0, abs=2.0)
    assert (job.job_state.deadline or 0.0) - now == pytest.approx(120.0 - REQUEUE_MARGIN_S, abs=2.0)


def test_a_stop_for_a_requeue_that_comes_late_leaves_the_least_time_to_save(tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    near_its_limit(job, 30.0)._stop_if_requeue_due()
    assert (job.job_state.deadline or 0.0) - time.monotonic() == pytest.approx(OWN_TEARDOWN_S, abs=2.0)


def test_workers_are_terminated_if_slurm_is_not_ending_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SignalledJob(tmp_path, is_unanswered=True)
    job.stop_reasons.handle_end_signal()
    assert (job.job_state.is_sigterm_due, job.job_tasks.slurm_end_query.is_left_to_slurm) == (False, True)
    now = time.monotonic()
    for later_s, answer, is_due in ((2.0, ExternalEnd(is_unanswered=True), False), (4.0, ExternalEnd(), True)):
        monkeypatch.setattr("launcher.run.slurm_end.time.monotonic", lambda time_s=now + later_s: time_s)
        job.steps.query_end.return_value = answer
        job.stop_reasons.handle_signals()
        assert (job.job_state.is_sigterm_due, job.job_tasks.slurm_end_query.is_left_to_slurm) == (is_due, not is_due)
    job.steps.query_end.reset_mock()
    monkeypatch.setattr("launcher.run.slurm_end.time.monotonic", lambda: now + 60.0)
    job.stop_reasons.handle_signals()
    job.steps.query_end.assert_not_called()


def query_again(job: SignalledJob, answer: ExternalEnd, monkeypatch: pytest.MonkeyPatch, later_s: float = 2.0) -> None:
    """Handle signals again, some time after an unanswered query, with this answer."""
    now = time.monotonic()
    job.steps.query_end.return_value = answer
    with monkeypatch.context() as patch:
        patch.setattr("launcher.run.slurm_end.time.monotonic", lambda: now + later_s)
        job.stop_reasons.handle_signals()


def test_a_late_answer_of_slurm_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SignalledJob(tmp_path, is_unanswered=True)
    job.stop_reasons.handle_end_signal()
    assert job.job_state.stop is not None
    assert job.job_state.stop.reason == "cancelled"
    query_again(job, ExternalEnd(True, "time_limit", "Slurm: the time limit was reached"), monkeypatch)
    assert (job.job_state.stop.reason, job.job_state.is_sigterm_due) == ("time_limit", False)


@pytest.mark.parametrize(
    "origin", [{}, {"rank": 0, "restart": 0}, {"nodes": ("cn01",)}, {"requeue": True}, {"failed": {"worker": "guard"}}]
)
def test_the_published_stop_has_what_caused_it(origin: StopOrigin, tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    job.job_state.begin_stop("time_limit", "the time limit is near", origin)
    stop = (run_files.read_json(job.events.with_name(run_files.STATE_FILE)) or {})["stop"]
    why = {"reason": "time_limit", "cause": "the time limit is near", "time": ANY}
    assert stop == why | json.loads(json.dumps(origin)) | {"kill_at": ANY}


def test_workers_are_terminated_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SignalledJob(tmp_path, is_unanswered=True)
    number, job.signals.end_signal = job.signals.end_signal, None
    job.job_state.begin_stop("terminated_peer", "worker_w0 rank 0 on cn01 ended by cancelled")
    job.job_tasks.terminate_if_due()
    job.job_tasks.unconfirmed_since = time.time()
    job.signals.end_signal = number
    job.stop_reasons.handle_end_signal()
    assert job.job_tasks.slurm_end_query.is_left_to_slurm
    query_again(job, ExternalEnd(), monkeypatch)
    assert (job.job_state.is_sigterm_due, job.job_tasks.slurm_end_query.is_left_to_slurm) == (False, False)


def test_slurm_is_not_queried_shortly_before_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SignalledJob(tmp_path, is_unanswered=True)
    job.stop_reasons.handle_end_signal()
    job.steps.query_end.reset_mock()
    job.job_state.deadline = time.monotonic() + QUERY_MARGIN_S - 0.5
    query_again(job, ExternalEnd(), monkeypatch)
    job.steps.query_end.assert_not_called()


@pytest.mark.parametrize("signalled", [False, True])
def test_a_signal_ends_the_time_to_save_before_a_requeue(signalled: bool, tmp_path: Path) -> None:
    job = SignalledJob(tmp_path, ends_all=True, reason="cancelled", cause="Slurm: cancelled")
    job.job_state.begin_stop("time_limit", "the time limit is near", {"requeue": True}, sigterm_after_s=255.0)
    if signalled:
        job.job_state.mark_signalled()
    job.stop_reasons.handle_end_signal()
    assert job.job_state.stop is not None
    assert job.job_state.stop.reason == "cancelled"
    if not signalled:
        assert job.job_state.deadline == pytest.approx(job.signals.end_signal_at + 27.0)


@pytest.mark.parametrize(
    ("answer", "state", "cause"),
    [
        (ExternalEnd(True, *CANCELLED), "CANCELLED", "Slurm: cancelled (gpujob stop by ada on login1)"),
        (ExternalEnd(True, "preempted", "Slurm: preempted"), "PREEMPTED", "Slurm: preempted (SIGTERM to the job)"),
        (ExternalEnd(is_unanswered=True), "TIMEOUT", "the time limit is near; the job will be requeued"),
    ],
)
def test_a_job_that_ends_while_its_workers_save_for_a_requeue_reports_why(
    answer: ExternalEnd, state: str, cause: str, tmp_path: Path
) -> None:
    job = SignalledJob(tmp_path)
    number, job.signals.end_signal = job.signals.end_signal, None
    job.job_state.begin_stop("time_limit", "the time limit is near; the job will be requeued", {"requeue": True})
    job.job_state.mark_signalled()
    deadline, run_dir = job.job_state.deadline, job.job.facts.run_dir
    saved = {"code": 0, "signal": None, "end": time.time()}
    RunRecords(job.job.facts).save_exit(job.job.plan.tasks[0], 0, saved)
    if state == "CANCELLED":
        request = StopRequest(user="ada", host="login1")
        run_files.write_json(run_dir / run_files.STOP_REQUEST_FILE, request.to_json())
    job.signals.end_signal, job.steps.query_end.return_value = number, answer
    job.stop_reasons.handle_end_signal()
    assert job.job_state.deadline == deadline, "the workers save as before"
    status = EndOfJob(job.job, job.job_tasks, Mock()).finish(None, lambda: None, lambda: None)
    report = read_json(run_dir / run_files.REPORT_FILE)
    assert (report["state"], report["requeued"], status) == (state, False, EXIT_STATUS[state])
    assert report["stopped"]["cause"] == cause
    job.steps.requeue.assert_not_called()


def test_a_signal_is_recorded_once_even_if_its_reason_is_known(tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    number, job.signals.end_signal = job.signals.end_signal, None
    job.job_tasks.slurm_end_query.stop_job(ExternalEnd(True, "time_limit", "Slurm: the time limit was reached"), "")
    stop, deadline = job.job_state.stop, job.job_state.deadline
    job.signals.end_signal, job.signals.end_signal_at = number, time.monotonic() + 4.0
    for _ in range(2):
        job.stop_reasons.handle_end_signal()
    assert (job.job_state.stop, job.count_signal_events()) == (stop, 1)
    assert job.job_state.deadline == pytest.approx((deadline or 0.0) + 4.0, abs=1.0)


def test_a_terminated_worker_stays_the_cause_if_slurm_gives_no_reason(tmp_path: Path) -> None:
    job = SignalledJob(tmp_path)
    job.job_state.begin_stop("terminated_peer", "worker_w0 rank 0 on cn01 ended by cancelled")
    job.job_tasks.unconfirmed_since = time.time()
    stop = job.job_state.stop
    job.stop_reasons.handle_end_signal()
    assert (job.job_state.stop, job.count_signal_events()) == (stop, 1)
