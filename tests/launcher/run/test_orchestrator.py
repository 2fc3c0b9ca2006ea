"""The end of a job in the batch step: time limits, reports and the reserve."""

import errno
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY, Mock

import pytest

from exporter.contract import run_files
from exporter.contract.report import Report
from exporter.contract.status import NodeStatus, WorkerEnd
from exporter.workers.exit_reason import LIMIT_OVERRUN_S
from exporter.workers.slurm_end_notice import CANCELLED, TIME_LIMIT
from launcher.plan.plan import Plan, RunFacts
from launcher.report.report import build_report, write_report
from launcher.report.state import EXIT_STATUS
from launcher.run import end_of_job
from launcher.run.before.nodes_survey import PortReservation
from launcher.run.end_of_job import (
    LEAST_VERIFY_S,
    MOST_DIAGNOSES,
    REPORT_MARGIN_S,
    VERIFY_S,
    EndOfJob,
    verification_s,
    write_diagnoses,
)
from launcher.run.job_state import JobRun, JobState
from launcher.run.orchestrator import Orchestrator, load_plan, write_orchestrator_record
from launcher.run.signals import OrchestratorSignals
from launcher.run.tasks import JobTasks
from launcher.rundir.job_records import report_path_elsewhere
from launcher.rundir.secrets_file import SECRETS_FILE
from launcher.steps.steps import ExternalEnd, Steps
from tests.support.exporter import make_manifest, make_task
from tests.support.launcher import read_json, settled_run_dir


def end_of(folder: Path, signals: OrchestratorSignals, sidecars: Any = None, limit: float | None = None) -> EndOfJob:
    """The end of a job with one worker."""
    run_dir = settled_run_dir(folder, {"name": "job", "workers": [{"command": "true"}]})
    facts, plan, steps = RunFacts("1", run_dir, ("cn01",)), load_plan(run_dir), Mock(spec=Steps)
    job = JobRun(plan, facts, steps, JobState(facts, 30.0, signals), signals, limit)
    return EndOfJob(job, JobTasks(job), sidecars or Mock())


def begin_attempt(run_dir: Path, attempt: int) -> None:
    """Begin an attempt of this job."""
    facts, plan, signals = RunFacts("1", run_dir, ("cn01",), attempt), load_plan(run_dir), OrchestratorSignals()
    job = JobRun(plan, facts, Mock(spec=Steps), JobState(facts, 30.0, signals), signals, None)
    Orchestrator(job, PortReservation())._archive_earlier_report()


def test_a_report_keeps_the_number_of_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]})
    first = build_report(run_dir, now=2000.0, ended=True)
    write_report(run_dir, first)
    begin_attempt(run_dir, 2)
    assert "Attempt 1 left no report" in capfd.readouterr().out
    assert sorted(path.name for path in run_dir.glob("report*")) == ["report_a0.json", "report_a0.md"]

    elsewhere = report_path_elsewhere(run_dir, os.environ)
    assert elsewhere is not None
    elsewhere.parent.mkdir(parents=True)
    run_files.write_json(elsewhere, first.replace(attempt=2).to_json())  # the disk was full
    begin_attempt(run_dir, 3)
    assert capfd.readouterr().out == ""
    begin_attempt(run_dir, 4)
    assert "Attempt 3 left no report" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("left_s", "allowed_s"),
    [
        (None, VERIFY_S),
        (3600.0, VERIFY_S),
        (REPORT_MARGIN_S + VERIFY_S, VERIFY_S),
        (REPORT_MARGIN_S + 20.0, 20.0),
        (REPORT_MARGIN_S, LEAST_VERIFY_S),
        (-5.0, LEAST_VERIFY_S),
        (-LIMIT_OVERRUN_S - 1.0, VERIFY_S),  # it was extended, or is that of an earlier allocation
    ],
)
def test_the_verification_ends_before_the_time_limit(left_s: float | None, allowed_s: float) -> None:
    assert verification_s(None if left_s is None else 1000.0 + left_s, 1000.0) == allowed_s


def test_the_end_of_a_job_knows_that_its_limit_was_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = settled_run_dir(tmp_path, {"name": "job", "workers": [{"command": "true"}]})
    facts, signals, end = RunFacts("1", run_dir, ("cn01",)), OrchestratorSignals(), Mock()
    job = JobRun(load_plan(run_dir), facts, Mock(spec=Steps), JobState(facts, 30.0, signals), signals, 1000.0)
    orchestrator = Orchestrator(job, PortReservation())
    orchestrator._sidecars = Mock()
    monkeypatch.setattr(
        orchestrator, "_run_until_done", lambda: setattr(orchestrator._stop_reasons, "time_limit_end", 9000.0)
    )
    monkeypatch.setattr("launcher.run.orchestrator.EndOfJob", end)
    orchestrator.run()
    assert end.call_args.args[0].time_limit_end == 9000.0


@pytest.mark.parametrize(("left_s", "is_over"), [(REPORT_MARGIN_S + 20.0, True), (3600.0, False)])
def test_the_report_knows_when_no_time_is_left(
    left_s: float, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {}
    limit = time.time() + left_s
    end = end_of(tmp_path, OrchestratorSignals(), limit=limit)

    def build(_run_dir: Path, **values: Any) -> dict[str, Any]:
        arguments.update(values)
        raise LookupError

    monkeypatch.setattr(end_of_job, "build_report", build)
    with pytest.raises(LookupError):
        end._build_and_publish_report(None, requeued=False)
    now = time.monotonic()
    monkeypatch.setattr("launcher.run.end_of_job.time.monotonic", lambda: now + 30.0)
    assert arguments["pace"].out_of_time() is is_over


@pytest.mark.parametrize("is_signalled_before", [True, False])
def test_a_part_of_kill_wait_is_for_the_earlier_runs(
    is_signalled_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, arguments = OrchestratorSignals(), dict[str, Any]()
    end = end_of(tmp_path, signals)

    def build(_run_dir: Path, **values: Any) -> Report:
        arguments.update(values)
        raise LookupError

    def signalled() -> None:
        signals.end_signal, signals.end_signal_at = signal.SIGTERM, time.monotonic()

    if is_signalled_before:
        signalled()
        end._job_state.begin_stop("cancelled", "scancel")
    monkeypatch.setattr(end_of_job, "build_report", build)
    with pytest.raises(LookupError):
        end._build_and_publish_report(None, requeued=False)
    pace = arguments["pace"]
    assert (pace.out_of_time(), pace.out_of_time_for_runs()) == (is_signalled_before, False)
    if is_signalled_before:
        now = time.monotonic()
        monkeypatch.setattr("launcher.run.end_of_job.time.monotonic", lambda: now + 30.0 / 2)
    else:
        signalled()
    assert (pace.out_of_time(), pace.out_of_time_for_runs()) == (True, True)


def test_failed_writes_of_the_state_and_the_orchestrator_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    facts = RunFacts("1", tmp_path, ("cn01",))
    job_state = JobState(facts, 30.0, OrchestratorSignals())
    job_state.publish("launching")
    for phase in ("running", "completing"):
        with monkeypatch.context() as patched:
            patched.setattr(run_files, "replace_file", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
            job_state.publish(phase)
            write_orchestrator_record(facts, job_state, local=True)
            job_state.repeat_writes()
        assert re.findall("cannot write (.*): Stale file handle", capfd.readouterr().out) == [
            "state.json",
            "orchestrator.json",
        ]
        assert read_json(tmp_path / "state.json")["phase"] != phase
        job_state.repeat_writes()
        assert read_json(tmp_path / "state.json")["phase"] == phase
        assert read_json(tmp_path / "orchestrator.json")["pid"] == os.getpid()
        (tmp_path / "orchestrator.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(run_files, "replace_file", Mock(side_effect=AssertionError))
        job_state.repeat_writes()


def test_the_first_failures_without_a_diagnosis_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = MOST_DIAGNOSES + 4
    tasks = tuple(replace(make_task(rank, node_index=rank), critical=rank < count - 1) for rank in range(count))
    manifest, hosts = make_manifest(tmp_path, *tasks), [f"cn{rank:02}" for rank in range(count)]
    (tmp_path / "status").mkdir()
    for host in hosts:
        run_files.write_json(tmp_path / "status" / f"{host}.json", {"attempt": 0})
    ends = [(task, WorkerEnd(reason="app_error", code=1, time=1000.0 - task.rank, restart=0)) for task in tasks]
    read = Mock(wraps=NodeStatus.read_valid)
    monkeypatch.setattr(NodeStatus, "read_valid", read)
    found, reads, show_life = list[set[int]](), list[int](), Mock()
    for _ in range(3):
        write_diagnoses(manifest, 0, hosts, ends, show_life)
        found.append({int(path.stem.removeprefix("worker_w")) for path in (tmp_path / "diagnostics").glob("*.txt")})
        reads.append(read.call_count)
    assert found == [set(range(3, count - 1)), set(range(count)), set(range(count))], "later ranks failed earlier"
    assert reads == [count, 2 * count, 2 * count], "the statuses are read at most once"
    assert show_life.call_count >= count


@pytest.mark.parametrize(
    ("answer", "is_over"),
    [(ExternalEnd(), True), (ExternalEnd(ends_all=True), False), (ExternalEnd(is_unanswered=True), False)],
)
def test_a_job_that_cannot_be_requeued_leaves_no_secrets_and_no_running_runs(
    answer: ExternalEnd, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, ended, steps = end_of(tmp_path, OrchestratorSignals()), list[Any](), Mock(spec=Steps)
    end._steps, secrets = steps, end._facts.run_dir / SECRETS_FILE
    steps.requeue.return_value, steps.query_end.return_value = "Requeue is disabled for the job", answer
    secrets.write_text("{}")

    def end_runs(_plan: Plan, report: Report, *_: object) -> list[str]:
        assert report.requeued or secrets.exists(), "the credentials of the tracker may be there"
        ended.append(report.requeued)
        return []

    monkeypatch.setattr(end_of_job, "end_runs", end_runs)
    end._job_state.begin_stop("time_limit", "the time limit is near", {"requeue": True})
    end.finish(None, lambda: None, lambda: None)
    assert (ended, secrets.exists()) == ([True, False] if is_over else [True], not is_over)


@pytest.mark.parametrize(
    ("is_signalled", "answer", "state"),
    [
        (True, ExternalEnd(True, *CANCELLED), "CANCELLED"),
        (True, ExternalEnd(True, *TIME_LIMIT), "TIMEOUT"),
        (True, ExternalEnd(is_unanswered=True), "TIMEOUT"),
        (False, ExternalEnd(True, *CANCELLED), "TIMEOUT"),
    ],
)
def test_a_job_that_is_cancelled_after_its_workers_ended_is_not_requeued(
    is_signalled: bool, answer: ExternalEnd, state: str, tmp_path: Path
) -> None:
    signals, sidecars, steps = OrchestratorSignals(), Mock(), Mock(spec=Steps)

    def receive_signal(**_: object) -> None:
        signals.end_signal = signal.SIGTERM

    end = end_of(tmp_path, signals, sidecars)
    end._steps, run_dir = steps, end._facts.run_dir
    steps.query_end.return_value = answer
    steps.requeue.side_effect = receive_signal
    if is_signalled:
        sidecars.end.side_effect = receive_signal
    (run_dir / SECRETS_FILE).write_text("{}")
    end._job_state.begin_stop("time_limit", "the time limit is near; the job will be requeued", {"requeue": True})
    status = end.finish(None, lambda: None, lambda: None)
    report, is_requeued = read_json(run_dir / run_files.REPORT_FILE), state == "TIMEOUT"
    assert (report["state"], report["requeued"], status) == (state, is_requeued, EXIT_STATUS[state])
    assert (steps.requeue.called, (run_dir / SECRETS_FILE).exists()) == (is_requeued, is_requeued)
    if not is_requeued:
        stopped = {"reason": "cancelled", "cause": "Slurm: cancelled (SIGTERM to the job)", "time": ANY}
        assert (report["exit_status"], report["stopped"]) == (EXIT_STATUS[state], stopped)


def test_a_job_that_slurm_ends_has_a_report_before_the_final_values(tmp_path: Path) -> None:
    reports: list[Any] = []
    signals, sidecars = OrchestratorSignals(), Mock()
    signals.end_signal = signal.SIGTERM
    sidecars.await_final_values.side_effect = lambda *_: reports.append(
        run_files.read_json(next(tmp_path.rglob(run_files.REPORT_FILE)))
    )
    end = end_of(tmp_path, signals, sidecars)
    end._job_state.begin_stop("cancelled", "scancel")
    end.finish(None, lambda: None, lambda: None)
    assert [report["state"] for report in reports] == ["CANCELLED"]


@pytest.mark.parametrize("final", [False, True])
def test_the_first_report_is_quick_and_is_skipped_if_the_status_is_final(
    final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = OrchestratorSignals()
    signals.end_signal = signal.SIGTERM
    end = end_of(tmp_path, signals)
    run_dir = end._facts.run_dir
    run_files.write_json(run_dir / run_files.STATUS_DIR / "cn01.json", {"attempt": 0, "workers": [], "final": final})
    arguments: list[dict[str, Any]] = []

    def build(run_dir: Path, **values: Any) -> Report:
        arguments.append(values)
        return build_report(run_dir, **values)

    monkeypatch.setattr(end_of_job, "build_report", build)
    end.finish(None, lambda: None, lambda: None)
    assert [values["pace"].is_quick for values in arguments] == ([False] if final else [True, False])
    assert {values["known"].finder for values in arguments} == {end._job_tasks.exit_reason_finder}


@pytest.mark.parametrize(("number", "exists_at_final_values"), [(None, True), (signal.SIGTERM, False)])
def test_the_reserve_is_released_only_for_the_report(
    number: int | None, exists_at_final_values: bool, tmp_path: Path
) -> None:
    seen: list[bool] = []
    signals, sidecars = OrchestratorSignals(), Mock()
    signals.end_signal = number
    end = end_of(tmp_path, signals, sidecars)
    reserve = end._facts.run_dir / run_files.RESERVE_DIR
    run_files.make_reserve(end._facts.run_dir)
    sidecars.await_final_values.side_effect = lambda *_: seen.append(reserve.exists())
    end.finish(None, lambda: None, lambda: None)
    assert seen == [exists_at_final_values]
    assert not reserve.exists()
