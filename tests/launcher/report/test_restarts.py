"""Ends of earlier runs in the report: restarted workers, and failures shortly before the cause."""

from pathlib import Path

import pytest

from exporter.contract.report import WorkerReport
from exporter.contract.status import WorkerEnd
from launcher.report.exit_reasons import LISTED_RUNS
from launcher.report.restarts import RESTARTS_SHOWN, restart_causes, restart_lines, restart_text
from launcher.words import clock_text
from tests.support.builders import KILLED, START, RunDir, rendered, restartable


def end(reason: str, restart: int, time: float | None) -> WorkerEnd:
    return WorkerEnd(reason=reason, restart=restart, time=time, code=1, evidence=("status 1",))


def entry(rank: int, *exits: WorkerEnd, worker: str = "w0", restarts: int = 1) -> WorkerReport:
    return WorkerReport(worker=worker, rank=rank, node="n0", restarts=restarts, exits=exits)


def test_a_completed_job_reports_why_an_earlier_run_ended(tmp_path: Path) -> None:
    report = restartable(tmp_path).ended(0, end=30, **KILLED).ended(0, 1, end=150).ended(1).report()
    (first,) = report["restarted"]
    assert first == {
        "worker": "worker_w0",
        "rank": 0,
        "node": "cn01",
        "reason": "killed_unknown",
        "code": None,
        "signal": "SIGKILL",
        "time": START + 30,
        "restart": 0,
        "run": 1,
        "evidence": ["killed by SIGKILL", "sender unknown"],
        "missing": [],
        "missing_total": 0,
        "diagnosis": None,
    }
    expected = f"run 1, ended by killed_unknown at {clock_text(START + 30)}: killed by SIGKILL; sender unknown"
    assert f"\n- restarted: worker_w0 (rank 0) on cn01, {expected}\n" in rendered(report)
    assert (report["state"], report["cause"]) == ("COMPLETED", None)


def test_a_restarted_worker_that_failed_shortly_before_is_in_the_evidence(tmp_path: Path) -> None:
    job = restartable(tmp_path).ended(0, end=48, **KILLED).ended(0, 1, end=60).ended(1, end=50, code=3)
    report = job.report()
    before = "worker_w0 (run 1) had ended by killed_unknown 2.0 s before"
    assert (report["cause"]["worker"], report["cause"]["evidence"]) == ("worker_w1", ["exit status 3", before])
    assert report["workers"][1]["exit"]["evidence"] == ["exit status 3"]
    assert f": exit status 3; {before}\n" in rendered(report)


def test_only_the_nearest_of_many_earlier_failures_are_named(tmp_path: Path) -> None:
    workers = [{"count": 9, "command": "true", "restart": {"max": 2, "backoff": 1}}]
    job = RunDir(tmp_path, workers=workers).ended(8, end=50, code=3)
    for rank in range(8):
        job.ended(rank, end=40 + rank, **KILLED).ended(rank, 1, end=60)
    evidence = job.report()["cause"]["evidence"]
    assert evidence[:3] == [
        "exit status 3",
        "5 earlier failures of other workers within 60 s",
        "worker_w5 (run 1) had ended by killed_unknown 5.0 s before",
    ]
    assert len(evidence) == 5


def test_a_worker_that_is_to_be_restarted_is_no_cause_while_the_job_runs(tmp_path: Path) -> None:
    job = restartable(tmp_path).ended(0, end=40, code=3)
    assert job.report(ended=False)["cause"] is None
    job.ended(0, 1, end=50, code=3).ended(0, 2, end=60, code=3)
    assert job.report(ended=False)["cause"]["worker"] == "worker_w0"


@pytest.mark.parametrize("earlier", [-20.0, 50.5])
def test_failures_long_before_or_after_the_cause_are_not_in_its_evidence(earlier: float, tmp_path: Path) -> None:
    job = restartable(tmp_path).ended(0, end=earlier, **KILLED).ended(0, 1, end=60).ended(1, end=50, code=3)
    report = job.report()
    assert report["cause"]["evidence"] == ["exit status 3"]
    assert len(report["restarted"]) == 1


def test_a_job_without_restarts_has_none(tmp_path: Path) -> None:
    report = RunDir(tmp_path).ended(0).ended(1, code=3).report()
    assert report["restarted"] == []
    assert "restarted" not in rendered(report)
    del report["restarted"]
    assert rendered(report)  # a report of an older version


def test_the_end_of_the_last_run_is_not_a_restart() -> None:
    assert restart_causes([entry(0, end("app_error", 0, 5.0), restarts=0)]) == []


def test_the_first_failed_task_of_a_worker_represents_its_run() -> None:
    others = [entry(1, end("terminated_peer", 0, 4.0)), entry(2, end("cuda_oom", 0, 5.0))]
    found = restart_causes([entry(0, end("app_error", 0, 6.0), end("completed", 1, 9.0)), *others])
    assert [(cause.rank, cause.reason) for cause in found] == [(2, "cuda_oom")]
    (alone,) = restart_causes([entry(3, end("terminated_peer", 0, None))])
    assert (alone.rank, alone.reason) == (3, "terminated_peer")


def test_restarts_are_in_order_of_time() -> None:
    first = entry(0, end("app_error", 0, 20.0), end("app_error", 1, 40.0), end("completed", 2, 50.0), restarts=2)
    other = entry(1, end("cuda_oom", 0, 30.0), worker="w1")
    found = restart_causes([first, other])
    assert [(cause.worker, cause.run) for cause in found] == [("w0", 1), ("w1", 1), ("w0", 2)]
    assert restart_text(found[2]) == "w0 on n0 restarted (run 3) after app_error (status 1)"


def test_only_some_of_many_restarts_are_in_the_text() -> None:
    many = [end("app_error", run, 10.0 * run) for run in range(RESTARTS_SHOWN)]
    counts = {"app_error": 580, "cuda_oom": 21}
    worker = entry(0, *many, restarts=600).replace(exit=end("cuda_oom", 600, 9000.0), exit_counts=counts)
    (*listed, last) = restart_lines(restart_causes([worker]), [worker])
    assert len(listed) == RESTARTS_SHOWN
    assert listed[0] == f"- restarted: w0 (rank 0) on n0, run 1, ended by app_error at {clock_text(0.0)}: status 1"
    assert last == "- restarted 600 times: 580x app_error, 20x cuda_oom"


def test_the_report_of_many_restarts_lists_the_last_runs_and_counts_all(tmp_path: Path) -> None:
    job = restartable(tmp_path).ended(1)
    for run in range(50):
        job.ended(0, run, end=100.0 + run, code=3)
    job.ended(0, 50, end=160.0)
    counts = {"app_error": 45, "cuda_oom": 5, "completed": 1}  # the first ones, whose logs the report does not read
    report = job.status({"rank": 0, "exit_counts": counts}).report()
    worker, other = report["workers"]
    assert [ended["restart"] for ended in worker["exits"]] == list(range(51 - LISTED_RUNS, 51))
    assert (worker["restarts"], worker["exit_counts"]) == (50, counts)
    assert (other["restarts"], other["exit_counts"]) == (0, {"completed": 1})
    assert "\n- restarted 50 times: 45x app_error, 5x cuda_oom\n" in rendered(report)
    assert report["state"] == "COMPLETED"
