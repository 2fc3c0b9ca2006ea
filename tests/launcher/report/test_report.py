"""The report of a job and its checks, built from hand-written run directories."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from exporter.contract import run_files
from exporter.contract.manifest import PathGroup, read_manifest
from exporter.contract.report import Report, WorkerReport
from exporter.contract.status import WorkerStatus
from exporter.logs.log_files_reader import progress_path
from exporter.logs.log_starts_reader import LogStartFinder
from exporter.machine.folders import read_mtime
from exporter.progress.work import job_work
from launcher.report.exit_reasons import ExitReasonFinder, TaskRun
from launcher.report.inputs import KnownEnds, ReportPace
from launcher.report.report import build_report, write_report
from launcher.report.state import EXIT_STATUS, log_for_missing_report
from launcher.report.workers import read_runs, stalled_text
from launcher.verify.verify import FinishedJob, VerificationCheck, verify_results
from launcher.words import clock_text, duration_text, names_text, percent_text
from tests.launcher.conftest import Golden
from tests.launcher.verify.verify_job import out_of_time_after
from tests.support.builders import KILLED, START, TERM_SENT, RunDir, as_json, rendered, restartable
from tests.support.exporter import FakeClock, make_context
from tests.support.launcher import read_json, settled_run_dir


def test_a_stop_during_the_read_explains_the_workers_that_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path).ended(0, code=3, end=90)

    def stopped_meanwhile(*given: Any) -> dict[int, list[TaskRun]]:
        if not (run_dir.path / "cn01_worker_w1.out").exists():
            run_dir.ended(1, end=96, **TERM_SENT).stop("terminated_peer", "worker_w0 rank 0 ended by app_error")
        return read_runs(*given)

    monkeypatch.setattr("launcher.report.report.read_runs", stopped_meanwhile)
    report = run_dir.report(now=START + 97, ended=False)
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["app_error", "terminated_peer"]
    assert report["stopped"]["cause"] == "worker_w0 rank 0 ended by app_error"


def test_a_quick_report_reads_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path).ended(0, code=1, log="Watchdog caught collective operation timeout\n")
    run_dir.ended(1, log="Processed 80/100 items\n", end=96, **TERM_SENT).stop("time_limit", "the time limit", at=91)
    workers = [{"rank": 1, "worker": "worker_w1", "items": 60, "items_expected": 100, "unit": "items"}]
    run_dir.status(*workers)
    full_report = run_dir.report()
    assert [worker["exit"]["reason"] for worker in full_report["workers"]] == ["nccl_timeout", "time_limit"]
    assert (full_report["state"], [worker["items"] for worker in full_report["workers"]]) == ("TIMEOUT", [None, 80])
    finder = ExitReasonFinder(read_manifest(run_dir.path), 0, None)
    known = run_dir.report(finder=finder)
    assert known == full_report

    def read(path: Path, *_: object) -> bytes:
        raise AssertionError(f"looked into {path}")

    for name in ("read_last_bytes", "read_first_bytes"):
        monkeypatch.setattr(f"launcher.report.run_logs.{name}", read)
    # a finder that has read the logs keeps their evidence
    for given, first in ((finder, "nccl_timeout"), (None, "app_error")):
        quick = run_dir.report(finder=given, quick=True)
        assert [worker["exit"]["reason"] for worker in quick["workers"]] == [first, "time_limit"]
        assert (quick["state"], [worker["items"] for worker in quick["workers"]]) == ("TIMEOUT", [None, 60])
    with pytest.raises(AssertionError, match="looked into"):
        run_dir.report()


@pytest.fixture
def opened_records(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the records of runs that were opened so far; `.logs.json` belongs to the logs."""
    names, read_json = list[str](), run_files.read_json

    def read(path: str | Path) -> dict[str, Any] | None:
        if Path(path).parent.name == run_files.WORKERS_DIR and not str(path).endswith(".logs.json"):
            names.append(Path(path).name)
        return read_json(path)

    monkeypatch.setattr(run_files, "read_json", read)
    return names


def test_runs_that_were_seen_are_not_looked_for_again(tmp_path: Path, opened_records: list[str]) -> None:
    run_dir = RunDir(tmp_path).ended(1)
    for restart in range(50):
        run_dir.ended(0, restart, code=1, end=restart + 1)
    finder = ExitReasonFinder(read_manifest(run_dir.path), 0, None)
    first = run_dir.report(finder=finder, ended=False)
    run_dir.ended(0, 50, code=1, end=60)
    opened_records.clear()
    second = run_dir.report(finder=finder, ended=False)
    assert [report["workers"][0]["restarts"] for report in (first, second)] == [49, 50]
    assert second["workers"][0]["exits"][:-1] == first["workers"][0]["exits"][1:]
    assert opened_records == ["worker_w0_rank0_a0_r50.exit.json"]
    stopped = run_dir.stop("cancelled", "scancel", at=61).report(finder=finder, ended=False)
    assert stopped["workers"][0]["exits"] == second["workers"][0]["exits"]


def test_each_record_is_opened_once_and_none_that_does_not_exist(tmp_path: Path, opened_records: list[str]) -> None:
    run_dir = RunDir(tmp_path).ended(1, 1, end=97)
    for rank, code in enumerate((1, 0)):
        run_dir.ended(rank, code=code, end=95 + rank)  # the failure of one is evidence for the other
    run_dir.report()
    ends = ("worker_w0_rank0_a0_r0", "worker_w1_rank1_a0_r0", "worker_w1_rank1_a0_r1")
    assert sorted(opened_records) == [f"{end}.exit.json" for end in ends]


def test_a_quick_report_reads_the_last_run_of_each_worker(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0, code=1).ended(0, 1, code=2, end=150).ended(0, 2, end=160).ended(1)
    run_dir.status({"rank": 0, "exit_counts": {"app_error": 2, "completed": 1}})
    finder = ExitReasonFinder(read_manifest(run_dir.path), 0, None)
    reports = [run_dir.report(finder=finder, quick=quick) for quick in (True, False)]
    assert [[end["restart"] for end in report["workers"][0]["exits"]] for report in reports] == [[2], [0, 1, 2]]
    for name in ("exit", "exit_counts", "restarts", "start"):
        assert reports[0]["workers"][0][name] == reports[1]["workers"][0][name]
    assert [report["state"] for report in reports] == ["COMPLETED", "COMPLETED"]


def test_what_a_quick_report_has_found_is_not_read_again(tmp_path: Path, opened_records: list[str]) -> None:
    run_dir = RunDir(tmp_path).ended(0, code=1, log="Watchdog caught collective operation timeout\n").ended(1)
    finder = ExitReasonFinder(read_manifest(run_dir.path), 0, None)
    assert run_dir.report(finder=finder, quick=True)["cause"]["reason"] == "app_error"
    opened_records.clear()
    assert run_dir.report(finder=finder)["cause"]["reason"] == "nccl_timeout", "its log was not read before"
    assert opened_records == ["worker_w0_rank0_a0_r0.exit.json"]


def test_a_report_without_time_lacks_the_first_runs_of_all_workers(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for restart in range(5):
        for rank in range(2):
            run_dir.ended(rank, restart, code=1, end=10.0 * restart + rank)
    for name in ("exit", "start"):
        run_dir.write(f"workers/worker_w1_rank1_a0_r4.{name}.json", "{")  # a full disk
    for polls, expected in ((2, [[2, 3, 4], [2, 3]]), (0, [[4], [3]])):
        report = run_dir.report(pace=ReportPace(out_of_time_for_runs=out_of_time_after(polls)))
        assert [[end["restart"] for end in worker["exits"]] for worker in report["workers"]] == expected


def test_the_logs_of_workers_that_fail_together_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, logs = RunDir(tmp_path, 20), PathGroup("logs", str(tmp_path / "logs"), "worker_*.log")
    for rank in range(20):
        run_dir.ended(rank, code=1).write(f"{logs.directory}/worker_{rank}.log", "ValueError: no data\n")
    os.utime(logs.directory, (1, 1))
    read_time, scan, show_life = Mock(wraps=read_mtime), Mock(wraps=os.scandir), Mock()
    monkeypatch.setattr("exporter.logs.log_files_reader.read_mtime", read_time)
    monkeypatch.setattr(os, "scandir", scan)
    finder = ExitReasonFinder(replace(read_manifest(run_dir.path), logs=logs), 0, None, show_life)
    report = run_dir.report(finder=finder)
    for worker in report["workers"]:
        assert f"ValueError: no data (worker_{worker['rank']}.log)" in worker["exit"]["evidence"][-1]
    assert scan.mock_calls.count(call(logs.directory)) == 1
    assert read_time.call_count == 2 * 20, "for its end and its position, each worker needs the time of its own log"
    assert show_life.call_count >= 2 * 20


def test_a_quick_report_of_a_completed_job_is_not_verified(tmp_path: Path) -> None:
    report = RunDir(tmp_path).ended(0).ended(1).report(quick=True)
    assert (report["state"], report["verification"]["checks"]) == ("COMPLETED", [])
    assert rendered(report).startswith("# Job 4459 job: COMPLETED, output not verified\n")


def test_an_attached_job_ends_with_its_last_worker(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0, end=190).ended(1, end=196)
    run_dir.edit(run_files.MANIFEST_FILE, attached=True)
    report = run_dir.report()
    assert (report["end"], report["duration_s"]) == (START + 196, 196.0)
    only_one = RunDir(tmp_path / "lost").ended(0, end=190).edit(run_files.MANIFEST_FILE, attached=True)
    assert only_one.report()["duration_s"] == 200.0


def test_a_job_with_completed_workers_is_completed(tmp_path: Path) -> None:
    report = RunDir(tmp_path).ended(0).ended(1).report()
    assert (report["state"], report["exit_status"], report["cause"]) == ("COMPLETED", 0, None)
    assert report["duration_s"] == 200.0
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["completed", "completed"]


def test_a_job_without_a_report_has_ended_at_its_last_sign_of_life(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).write("state.json", {"phase": "launching"})
    past: dict[str, Any] = {"known": KnownEnds(slurm_state="NODE_FAIL", is_past=True), "now": START + 1e6}

    def figures() -> tuple[Any, ...]:
        report = run_dir.report(**past)
        return report["start"], report["end"], report["duration_s"]

    assert figures() == (START, START, 0.0)
    run_dir.write("state.json", {"phase": "running", "time": START + 10})
    assert figures() == (START, START + 10, 10.0)
    run_dir.ended(0, code=1)
    assert figures() == (START, START + 100, 100.0)
    run_dir.status({"rank": 1, "unit": "items", "items": 40, "items_processed": 40}, time=START + 400)
    assert figures() == (START, START + 400, 400.0)
    assert run_dir.report(**past)["throughput_items_per_second"] == 0.1
    run_dir.status(time=START + 1e7)  # by a clock that is ahead
    assert figures() == (START, START + 1e6, 1e6)
    for name in ("orchestrator.json", "state.json", "status/cn01.json"):
        (run_dir.path / name).unlink()
    for path in (run_dir.path / "workers").iterdir():
        path.unlink()
    assert figures() == (None, None, None)
    assert "\n- time: - to -, " in rendered(run_dir.report(**past))


@pytest.mark.parametrize(
    ("facts", "log", "reason", "state"),
    [
        ({"code": 3}, "", "app_error", "FAILED"),
        ({"code": 1}, "RuntimeError: CUDA out of memory. Tried to allocate\n", "cuda_oom", "FAILED"),
        ({"code": 1}, "Watchdog caught collective operation timeout\n", "nccl_timeout", "FAILED"),
        ({"code": 1}, "OSError: [Errno 28] No space left on device\n", "disk_full", "FAILED"),
        ({"code": None, "signal": 11}, "", "crashed_signal", "FAILED"),
        (KILLED, "", "killed_unknown", "FAILED"),
        ({**KILLED, "oom_kills": 1}, "", "host_oom", "OUT_OF_MEMORY"),
        ({"code": 127, "error": "cannot start 'x'"}, "", "launch_failed", "FAILED"),
    ],
)
def test_the_state_follows_from_the_cause(
    facts: dict[str, Any], log: str, reason: str, state: str, tmp_path: Path
) -> None:
    report = RunDir(tmp_path).ended(0).ended(1, log=log, **facts).report()
    assert (report["cause"]["worker"], report["cause"]["reason"]) == ("worker_w1", reason)
    assert (report["state"], report["exit_status"]) == (state, EXIT_STATUS[state])


@pytest.mark.parametrize(
    ("reason", "state", "status"),
    [("cancelled", "CANCELLED", 5), ("time_limit", "TIMEOUT", 3), ("preempted", "PREEMPTED", 7)],
)
def test_an_external_stop_decides_the_state_and_reasons(reason: str, state: str, status: int, tmp_path: Path) -> None:
    report = RunDir(tmp_path).stop(reason, "SIGTERM").ended(0, **TERM_SENT).ended(1, **TERM_SENT).report()
    assert (report["state"], report["exit_status"], report["cause"]) == (state, status, None)
    assert {worker["exit"]["reason"] for worker in report["workers"]} == {reason}


def test_exit_status_0_on_cancellation_does_not_complete_the_job(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).stop("cancelled", "SIGTERM").ended(0, end=60).ended(1, signals=[[START + 95, 15, 1]])
    report = run_dir.report()
    assert (report["state"], report["workers"][1]["exit"]["reason"]) == ("CANCELLED", "completed")
    text = rendered(report)
    assert "| worker_w0 | 0 | cn01 | completed (exit status 0) |" in text
    assert "| worker_w1 | 1 | cn01 | completed when asked to end (exit status 0) |" in text


def test_a_job_that_is_to_be_requeued_has_not_completed(tmp_path: Path) -> None:
    """Its workers saved their state after the warning, and ended before any other signal."""
    run_dir = RunDir(tmp_path).stop("time_limit", "the time limit is near", at=50, requeue=True)
    assert run_dir.ended(0, end=51).ended(1, end=51).report()["state"] == "TIMEOUT"


def test_the_first_failure_in_time_is_the_cause(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, count=3).ended(0, end=80, code=4).ended(1, end=50, **KILLED)
    run_dir.stop("terminated_peer", "worker_w1 rank 1", at=51).ended(2, end=60, **TERM_SENT)
    report = run_dir.report()
    assert (report["cause"]["worker"], report["cause"]["reason"]) == ("worker_w1", "killed_unknown")
    assert report["workers"][2]["exit"]["reason"] == "terminated_peer"
    assert report["state"] == "FAILED"


@pytest.mark.parametrize("killed_at", [52, 54])
def test_the_largest_victim_of_the_oom_killer_is_the_cause(killed_at: int, tmp_path: Path) -> None:
    """The kernel kills a neighbour while the largest process still frees its memory, and the stop reaches both."""
    run_dir = RunDir(tmp_path, count=3).stop("terminated_peer", "worker_w1 rank 1", at=50)
    run_dir.ended(0, end=90, **TERM_SENT).ended(1, end=50, oom_kills=1, max_rss_bytes=20 << 20, **KILLED)
    run_dir.ended(2, end=killed_at, oom_kills=1, max_rss_bytes=3 << 30, signals=[[START + 51, 15, 1]], **KILLED)
    report = run_dir.report()
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["terminated_peer", "host_oom", "host_oom"]
    assert (report["state"], report["cause"]["worker"]) == ("OUT_OF_MEMORY", "worker_w2")
    assert report["cause"]["evidence"][1].endswith("and its largest process had used 3072 MiB")


def test_a_worker_that_is_killed_long_after_an_oom_kill_next_to_it_is_no_victim(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).stop("terminated_peer", "worker_w0 rank 0", at=50)
    run_dir.ended(0, end=50, oom_kills=1, max_rss_bytes=1 << 30, **KILLED)
    run_dir.ended(1, end=80, oom_kills=1, max_rss_bytes=2 << 30, signals=[[START + 51, 15, 1]], **KILLED)
    report = run_dir.report()
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["host_oom", "terminated_peer"]
    assert report["cause"]["worker"] == "worker_w0"


def remove_exit_record(run_dir: RunDir, rank: int) -> RunDir:
    """Remove the exit record of a worker, as if its node had failed."""
    (run_dir.path / f"workers/worker_w{rank}_rank{rank}_a0_r0.exit.json").unlink()
    return run_dir


def test_a_worker_without_an_exit_record_was_killed_by_an_unknown_sender(tmp_path: Path) -> None:
    run_dir = remove_exit_record(RunDir(tmp_path).ended(0).ended(1), 1)
    report = run_dir.report()
    assert (report["state"], report["cause"]["reason"]) == ("FAILED", "killed_unknown")
    assert report["cause"]["evidence"] == ["exit status unknown", "no exit record was left"]


def on_two_nodes(folder: Path) -> RunDir:
    """A job with a worker on each of two nodes."""
    run_dir = RunDir(folder, resources={"nodes": 2, "cpus_per_node": 2})
    tasks = read_json(run_dir.path / "manifest.json")["tasks"]
    run_dir.edit("manifest.json", tasks=[{**task, "node_index": task["rank"]} for task in tasks])
    return run_dir.edit("orchestrator.json", hosts=["cn01", "cn02"])


def test_a_failed_node_is_the_cause_and_other_workers_are_consequences(tmp_path: Path) -> None:
    """The orchestrator publishes the node when srun names it."""
    run_dir = on_two_nodes(tmp_path).ended(0, **TERM_SENT).ended(1)
    remove_exit_record(run_dir, 1)
    orphaned = run_dir.report(slurm_state="NODE_FAIL")
    run_dir.stop("terminated_peer", "Slurm: node cn02 has failed", nodes=["cn02"])

    report = run_dir.report()
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["terminated_peer", "node_failure"]
    assert (report["state"], report["exit_status"]) == ("NODE_FAIL", 6)
    assert report["cause"]["node"] == "cn02"
    assert report["cause"]["evidence"] == ["exit status unknown", "Slurm: node cn02 has failed"]

    assert [worker["exit"]["reason"] for worker in orphaned["workers"]] == ["terminated_peer", "node_failure"]
    assert orphaned["state"] == "NODE_FAIL"
    assert orphaned["cause"]["evidence"][-1] == "Slurm: NODE_FAIL; no exit records from cn02"


@pytest.mark.parametrize(
    ("slurm_state", "state", "reason"),
    [
        ("TIMEOUT", "TIMEOUT", "time_limit"),
        ("PREEMPTED", "PREEMPTED", "preempted"),
        ("CANCELLED", "CANCELLED", "cancelled"),
        ("FAILED", "FAILED", "terminated_peer"),
    ],
)
def test_the_slurm_state_is_used_without_a_stop_of_the_orchestrator(
    slurm_state: str, state: str, reason: str, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path).ended(0, **TERM_SENT).ended(1, **TERM_SENT)
    report = run_dir.report(slurm_state=slurm_state)
    assert {worker["exit"]["reason"] for worker in report["workers"]} == {reason}
    assert report["state"] == state


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "Lmod has detected an error\ngpujob: the module cuda cannot be loaded\n\n",
            "the batch script ended before gpujob started: gpujob: the module cuda cannot be loaded",
        ),
        ("", "the batch script ended before gpujob started: log.err is empty"),
        (None, "the batch script left no log: can the node reach {run_dir}?"),
    ],
)
def test_a_failure_before_gpujob_started_is_explained_by_the_error_log(
    log: str | None, cause: str, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path)
    (run_dir.path / "orchestrator.json").unlink()
    if log is not None:
        run_dir.write("log.err", log)
    report = run_dir.report(slurm_state="FAILED")
    assert report["state"] == "FAILED"
    assert report["stopped"]["cause"] == f"Slurm: FAILED; {cause.format(run_dir=run_dir.path)}"


def test_an_oom_kill_found_by_the_sidecar_explains_the_end(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0).ended(1, **KILLED)
    found = {"schema": 1, "oom_victim": "its process 7 was killed for lack of memory"}
    run_dir.write("workers/worker_w1_rank1_a0_r0.found.json", found)
    report = run_dir.report()
    assert (report["state"], report["cause"]["reason"]) == ("OUT_OF_MEMORY", "host_oom")
    assert report["cause"]["evidence"][-1] == "the kernel log says: its process 7 was killed for lack of memory"


def test_the_errors_of_an_earlier_run_in_the_same_log_are_not_the_cause(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0).ended(1, **KILLED)
    log, manifest = run_dir.path / "worker_1.log", read_manifest(run_dir.path)
    run_dir.write("worker_1.log", "torch.OutOfMemoryError: CUDA out of memory.\n")
    os.utime(log, (START - 9, START - 9))
    (task,) = (task for task in manifest.tasks if task.rank == 1)
    record = run_dir.path / "workers/worker_w1_rank1_a0_r0.logs.json"
    finder = LogStartFinder(make_context(manifest, FakeClock(START), node_index=task.node_index))
    finder.note()
    finder.save(task, START + 1, record)
    with log.open("a") as out:
        out.write("starting\n")
    assert run_dir.report()["cause"]["reason"] == "killed_unknown"
    record.unlink()
    assert run_dir.report()["cause"]["reason"] == "cuda_oom"


def test_a_worker_that_lost_a_peer_is_not_the_cause(tmp_path: Path) -> None:
    broken = "RuntimeError: [../third_party/gloo] Connection closed by peer [10.0.0.2]:4711\n"
    run_dir = RunDir(tmp_path).ended(0, end=60.0, code=1, log=broken).ended(1, end=59.0, code=None, signal=11)
    report = run_dir.report()
    assert report["cause"]["worker"] == "worker_w1"
    first = report["workers"][0]["exit"]
    assert (first["reason"], first["evidence"][-1]) == (
        "terminated_peer",
        "it lost worker_w1, which had ended by crashed_signal",
    )


def test_a_worker_that_lost_the_one_with_the_faster_clock_is_not_the_cause(tmp_path: Path) -> None:
    def report_of(run_dir: RunDir) -> dict[str, Any]:
        run_dir.ended(0, end=58.5, code=1, log="RuntimeError: Connection closed by peer\n")
        run_dir.ended(1, end=60.0, code=3).stop("terminated_peer", "worker_w1 rank 1 ended", at=59, rank=1, restart=0)
        return run_dir.report()

    report = report_of(on_two_nodes(tmp_path))
    assert report["cause"]["worker"] == "worker_w1"
    assert report["workers"][0]["exit"]["evidence"][-1] == (
        "it lost a peer, and the job was being stopped: worker_w1 rank 1 ended"
    )
    assert report_of(RunDir(tmp_path / "same"))["cause"]["worker"] == "worker_w0", "one node has one clock"


def test_a_lost_connection_that_stopped_the_job_does_not_hide_an_earlier_one(tmp_path: Path) -> None:
    lost = "RuntimeError: Connection closed by peer\n"
    run_dir = on_two_nodes(tmp_path).ended(0, end=58.5, code=1, log=lost).ended(1, end=59.0, code=1)
    run_dir.write("cn02_worker_w1.out", lost)
    report = run_dir.stop("terminated_peer", "worker_w1 rank 1 ended", at=59, rank=1, restart=0).report()
    assert [worker["exit"]["reason"] for worker in report["workers"]] == ["app_error", "terminated_peer"]
    assert report["cause"]["worker"] == "worker_w0"


def test_all_runs_of_a_worker_are_listed_and_the_last_one_counts(tmp_path: Path) -> None:
    report = RunDir(tmp_path).ended(0, code=3).ended(0, 1, end=150).ended(1).report()
    first = report["workers"][0]
    assert (first["restarts"], [end["reason"] for end in first["exits"]]) == (1, ["app_error", "completed"])
    assert (report["state"], report["cause"]) == ("COMPLETED", None)


def test_used_up_restarts_are_in_the_evidence(tmp_path: Path) -> None:
    run_dir = restartable(tmp_path).ended(1, end=90)
    for restart in range(3):
        run_dir.ended(0, restart, end=10.0 * restart + 10, code=3)
    report = run_dir.report()
    used_up = ["exit status 3", "restarted 2 of 2 times"]
    assert (report["cause"]["worker"], report["cause"]["evidence"]) == ("worker_w0", used_up)
    assert [worker.get("restarts_max") for worker in report["workers"]] == [2, None]
    text = rendered(report)
    assert "\n- cause: worker_w0 (rank 0) on cn01 ended by app_error at " in text
    assert ": exit status 3; restarted 2 of 2 times\n" in text
    assert "| app_error (exit status 3; restarted 2 of 2 times) | - | 2 of 2 |\n" in text


def test_remaining_restarts_and_completed_workers_are_not_in_the_evidence(tmp_path: Path) -> None:
    report = restartable(tmp_path).ended(0, code=3).ended(0, 1, code=3).ended(1).report()
    assert report["cause"]["evidence"] == ["exit status 3"]
    assert "| app_error (exit status 3) | - | 1 of 2 |\n" in rendered(report)
    run_dir = restartable(tmp_path / "b").ended(0, code=3).ended(0, 1, code=3).ended(0, 2).ended(1)
    assert run_dir.report()["workers"][0]["exit"]["evidence"] == ["exit status 0"]
    (run_dir.path / "plan.json").unlink()
    assert run_dir.report()["workers"][0]["restarts_max"] is None


@pytest.mark.parametrize(
    ("stop", "state", "reason"),
    [
        ("launch_failed", "FAILED", "terminated_peer"),
        ("terminated_peer", "FAILED", "terminated_peer"),
        ("cancelled", "CANCELLED", "cancelled"),
        ("time_limit", "TIMEOUT", "time_limit"),
        ("preempted", "PREEMPTED", "preempted"),
    ],
)
def test_a_worker_of_a_later_stage_is_not_started_when_the_job_stops(
    stop: str, state: str, reason: str, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path, workers=[{"command": "true"}, {"role": "benchmark", "command": "true"}])
    tasks = read_json(run_dir.path / "manifest.json")["tasks"]
    run_dir.edit("manifest.json", tasks=[{**task, "later": task["role"] == "benchmark"} for task in tasks])
    report = run_dir.ended(0, **TERM_SENT).stop(stop, "why it ended").report()
    never = next(worker for worker in report["workers"] if worker["role"] == "benchmark")
    evidence = ["never started: the job ended in an earlier stage", "the job was being stopped: why it ended"]
    assert (never["state"], never["up"], never["exit"]["reason"]) == ("not_started", False, reason)
    assert (never["exit"]["evidence"], never["exit"]["restart"], never["exits"]) == (evidence, None, [])
    assert (report["state"], report["cause"]) == (state, None)
    expected = "not started (the job ended in an earlier stage; the job was being stopped: why it ended)"
    assert f"| benchmark_w0 | 1 | cn01 | {expected} | - | 0 |\n" in rendered(report)


def test_a_worker_of_the_first_stage_may_never_have_started(tmp_path: Path) -> None:
    report = RunDir(tmp_path).ended(0, **TERM_SENT).stop("cancelled", "SIGTERM to the job").report()
    assert report["workers"][1]["exit"]["evidence"][0] == "never started: the job ended before its turn"
    running = as_json(build_report(Path(report["run_dir"]), now=START + 200, ended=False))
    assert (running["workers"][1]["state"], running["workers"][1]["exit"]) == ("not_found", None)


def test_a_worker_that_never_started_has_no_exit_without_a_known_stop(tmp_path: Path) -> None:
    report = RunDir(tmp_path).ended(0).report()
    assert (report["workers"][1]["state"], report["workers"][1]["exit"]) == ("not_started", None)
    assert "| worker_w1 | 1 | cn01 | not started | - | 0 |\n" in rendered(report)
    assert report["state"] == "FAILED"


def test_a_node_that_failed_before_its_worker_started_is_the_cause(tmp_path: Path) -> None:
    report = RunDir(tmp_path).report(slurm_state="NODE_FAIL")
    assert (report["state"], report["cause"]["reason"]) == ("NODE_FAIL", "node_failure")
    assert report["cause"]["evidence"][0] == "never started: its node failed"
    assert (report["workers"][0]["state"], report["diagnoses"]) == ("not_started", [])


def test_services_that_were_not_ready_in_time_are_reported_line_by_line(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, count=6)
    missing = [{"worker": f"worker_w{rank}", "rank": rank, "node": "cn01"} for rank in range(5)]
    log = ["worker_w0 is not ready: refused", "cn01_worker_w0.out:", "    loading | 10 %", "    loading;  20 %"]
    failed = {**missing[0], "missing": missing, "missing_total": 9, "reason": "launch_failed"}
    why = "not ready after 60 s: missing worker_w0"
    run_dir.stop("launch_failed", why, failed={**failed, "evidence": [why, *log]})
    text = rendered(run_dir.report())
    first = text.index("- cause: ")
    names = ", ".join(f"worker_w{rank} (rank {rank}) on cn01" for rank in range(4))
    when = clock_text(START + 90)
    assert text[first : text.index("\n- no final")].splitlines() == [
        f"- cause: {names} and 5 more: launch_failed at {when}: not ready after 60 s: missing worker_w0",
        "    - worker_w0 is not ready: refused",
        "    - cn01_worker_w0.out:",
        "        - loading \\| 10 %",
        "        - loading; 20 %",
    ]


@pytest.mark.parametrize(
    ("out", "err", "name"),
    [
        ("Job 7\ncannot build the report: Traceback (most recent call last):\n", "", "log.out"),
        ("Job 7\ncannot write the report: Is a directory\n", "slurmstepd: error: late\n", "log.out"),
        ("Job 7\n", "Traceback (most recent call last):\nMemoryError\n", "log.err"),
        ("Job 7\n", "\n", "log.out"),
    ],
)
def test_the_log_that_explains_a_missing_report_is_named(out: str, err: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "log.out").write_text(out)
    (tmp_path / "log.err").write_text(err)
    assert log_for_missing_report(tmp_path) == tmp_path / name


def test_positions_come_from_the_logs_without_a_sidecar(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, progress={"total_items": 100})
    run_dir.ended(0, log="Processed 10/50 items\nProcessed 50/50 items\n").ended(1, log="Processed 48/50 items\n")
    report = run_dir.report()
    assert (report["items"], report["items_expected"]) == (98, 100)
    assert [worker["items"] for worker in report["workers"]] == [50, 48]
    assert (report["state"], report["exit_status"]) == ("INCOMPLETE", 8)


def test_positions_come_from_progress_files_without_a_sidecar(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, progress={"total_items": 100})
    for rank in range(2):
        run_dir.ended(rank, log="Processed 10/50 items\n")
        own = Path(progress_path(read_manifest(run_dir.path).tasks[rank], run_dir.path, "cn01", 0, 0))
        own.parent.mkdir(exist_ok=True)
        own.write_text('{"done": 50, "total": 50}\n{"phase": "evaluating"}\n{"done": 3, "total": 10}\n')
    report = run_dir.report()
    assert (report["state"], report["items"], report["items_expected"]) == ("COMPLETED", 100, 100)


def test_positions_come_from_the_logs_of_the_program_without_a_sidecar(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, progress={"total_items": 100}).ended(0).ended(1)
    run_dir.edit("manifest.json", logs={"name": "log", "directory": "own", "pattern": "*.log"})
    (run_dir.path / "own").mkdir()
    for name, done, mtime in (("a_worker_0", 7, START), ("b_worker_0", 50, START + 9), ("b_worker_1", 50, START + 9)):
        path = run_dir.path / "own" / f"{name}.log"
        path.write_text(f"Processed {done}/50 items\n")
        os.utime(path, (mtime, mtime))
    report = run_dir.report()
    assert (report["state"], [worker["items"] for worker in report["workers"]]) == ("COMPLETED", [50, 50])


BARS = "".join(f"\rTraining: {done:3d}%|##        | {done}/100 [00:05<00:45,  2.00it/s]" for done in (7, 8, 9)) + "\n"


def test_the_pack_is_detected_from_the_log(tmp_path: Path) -> None:
    report = RunDir(tmp_path).ended(0, log=BARS).ended(1, log="Epoch 2/3, Batch 4/10, loss: 0.5\n").report()
    assert [(worker["items"], worker["items_expected"]) for worker in report["workers"]] == [(9, 100), (14, 30)]
    named = RunDir(tmp_path / "named", progress={"pack": "generic"}).ended(0, log=BARS).ended(1).report()
    assert named["items"] is None


def checks(report: dict[str, Any]) -> list[tuple[str, bool | None, str]]:
    """Checks of a report, without those of workers and files."""
    found = [(check["name"], check["passed"], check["detail"]) for check in report["verification"]["checks"]]
    return [check for check in found if check[0] not in ("workers", "outputs", "checkpoint")]


def test_the_epochs_of_the_job_file_set_the_total(tmp_path: Path) -> None:
    log = "Epoch: [0][100/100]\nEpoch: [1][ 50/100]\n"
    report = RunDir(tmp_path, count=1, progress={"total_epochs": 2}).ended(0, log=log).report()
    assert [report[key] for key in ("unit", "items", "items_expected")] == ["batches", 150, 200]


def test_batches_are_not_compared_with_the_items_of_the_job(tmp_path: Path) -> None:
    report = RunDir(tmp_path, count=1, progress={"total_items": 5000}).ended(0, log="Batch 10/10\n").report()
    assert [report[key] for key in ("state", "unit", "items", "items_expected")] == ["COMPLETED", "batches", 10, 10]
    assert checks(report) == [
        ("batches", True, "10 of 10 batches done"),
        ("items", None, "batches are counted, not items"),
    ]


def test_the_slowest_of_workers_in_step_counts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0, log="step 300/300\n").ended(1, log="step 298/300\n")
    report = run_dir.report()
    assert [report[key] for key in ("unit", "items", "items_expected")] == ["steps", 298, 300]
    assert [worker["unit"] for worker in report["workers"]] == ["steps", "steps"]
    assert (report["state"], report["verification"]["verified"]) == ("COMPLETED", True)
    text = rendered(report)
    assert "\n- steps: 298 of 300\n" in text
    assert "\n| worker | rank | node | end | steps | restarts |\n" in text
    assert "\n- steps: ok: 298 of 300 steps done\n" in text


AS_LOGGED = ", according to the logs; the job file gives no total"


def test_a_job_that_stops_before_its_last_step_is_complete_with_a_remark(tmp_path: Path) -> None:
    report = RunDir(tmp_path).ended(0, log="step 300/300\n").ended(1, log="step 200/300\n").report()
    assert (report["state"], report["exit_status"], report["items"]) == ("COMPLETED", 0, 200)
    assert checks(report) == [("steps", None, f"200 of 300 steps done{AS_LOGGED}")]


def test_no_total_is_suggested_when_the_job_file_has_one(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, progress={"total_steps": 300})
    report = run_dir.ended(0, log="step 300/300\n").ended(1, log="step 200/300\n").report()
    detail = "200 of 300 steps done, according to the logs; the program may have stopped early"
    assert checks(report) == [("steps", None, detail)]


def test_steps_without_a_total_are_not_compared_with_the_items_of_the_job(tmp_path: Path) -> None:
    own = {"step": r"at step (?P<done>\d+)"}
    run_dir = RunDir(tmp_path, progress={"total_items": 100, "patterns": own})
    report = run_dir.ended(0, log="at step 30\n").ended(1, log="at step 30\n").report()
    assert (report["state"], report["items"], report["items_expected"]) == ("COMPLETED", 30, None)
    assert checks(report) == [("items", None, "steps are counted, not items")]


def test_different_units_are_not_added_up(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, progress={"total_items": 100})
    report = run_dir.ended(0, log="step 5/30\n").ended(1, log="Processed 50/50 items\n").report()
    assert [report[key] for key in ("unit", "items", "items_expected", "items_processed")] == [None] * 4
    assert checks(report) == [("items", None, "steps and items are counted, which have no common total")]
    text = rendered(report)
    assert "| end | position | restarts |\n" in text
    assert " | 5/30 steps | 0 |\n" in text
    assert " | 50/50 items | 0 |\n" in text


def test_the_rate_of_a_job_is_in_its_unit(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0).ended(1)
    entry = {"unit": "steps", "items": 300, "items_expected": 300, "exit": {"reason": "completed"}}
    workers = [{**entry, "rank": rank, "items_processed": 200 + rank} for rank in range(2)]
    report = run_dir.status(*workers).report()
    assert (report["items"], report["items_processed"], report["throughput_items_per_second"]) == (300, 200, 1.0)
    assert "\n- steps: 300 of 300, 1.0 steps/s over the whole job\n" in rendered(report)


def test_a_log_that_counts_another_unit_does_not_change_the_position(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, count=1).ended(0, log="step 7/9\n")
    entry = {"rank": 0, "unit": "tokens", "items": 5000, "items_expected": None, "items_processed": 5000}
    report = run_dir.status(entry).report()
    assert [report[key] for key in ("unit", "items", "items_processed")] == ["tokens", 5000, 5000]
    report = run_dir.status({**entry, "unit": "steps"}).report()
    assert [report[key] for key in ("unit", "items", "items_expected")] == ["steps", 7, 9]


def test_the_report_of_a_running_job_is_not_final(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0)
    report = run_dir.report(ended=False)
    assert (report["state"], report["exit_status"], report["end"]) == ("RUNNING", 10, None)


@pytest.mark.parametrize(
    ("seen", "code", "stalled_s"),
    [
        ({"stalled_at_end": True}, 3, 40.0),
        ({"stalled_at_end": False, "stalled": False}, 3, None),
        ({"stalled": True}, 3, 40.0),  # the sidecar did not see the end
        ({"stalled_at_end": True}, 0, None),
    ],
)
def test_a_worker_that_had_stalled_when_it_ended_is_reported_so(
    seen: dict[str, Any], code: int, stalled_s: float | None, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path, count=1).ended(0, end=50, code=code)
    run_dir.status({"worker": "worker_w0", "rank": 0, "last_progress": START + 10, **seen})
    report = run_dir.report()
    assert report["workers"][0]["stalled_s"] == stalled_s
    text = "- stalled: worker_w0: no progress in the last 40s before the end\n"
    assert (text in rendered(report)) == (stalled_s is not None)


@pytest.mark.parametrize(("reason", "stalled_s"), [("completed", None), ("cancelled", 90.0)])
def test_a_helper_that_waits_until_the_work_is_done_has_not_stalled(
    reason: str, stalled_s: float | None, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path, count=1).stop(reason, "why").ended(0, **TERM_SENT)
    run_dir.status({"worker": "worker_w0", "rank": 0, "last_progress": START + 10, "stalled_at_end": True})
    (worker,) = run_dir.report()["workers"]
    assert worker["exit"]["reason"] == ("terminated_peer" if reason == "completed" else reason)
    assert worker["stalled_s"] == stalled_s


def test_a_stalled_worker_of_several_nodes_is_named_once() -> None:
    seconds = (None, 4000.0, 90.0, 1000.0)
    found = [WorkerReport(worker="worker_w0", rank=rank, stalled_s=each) for rank, each in enumerate(seconds)]
    assert stalled_text(found) == "worker_w0: no progress in the last 1m 30s to 1h 06m before the end"


def test_a_running_worker_that_is_stalled_is_reported_so(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0).status({"worker": "worker_w1", "rank": 1, "stalled": True})
    run_dir.write("workers/worker_w1_rank1_a0_r0.start.json", {"pid": 1, "start": 50.0})
    assert [worker["state"] for worker in run_dir.report(ended=False)["workers"]] == ["dead", "stalled"]


STEPS = {"unit": "steps", "expected": 50}


def checks_of(folder: Path, *, total: int | None = 100, **values: Any) -> dict[str, VerificationCheck]:
    """Checks of a job with two workers and 100 items, by name."""
    progress = {} if total is None else {"total_items": total}
    path = settled_run_dir(folder, {"name": "job", "workers": [{"command": "x"}], "progress": progress})
    given = {"processed": None, "unit": None, "positions": [50, 50], "expected": None, **values}
    for name, text in given.get("files", {}).items():
        (path / name).write_text(text)
    done = given["processed"]
    workers = [
        WorkerStatus(
            rank=rank, items=position, items_expected=given["expected"], items_processed=done, unit=given["unit"]
        )
        for rank, position in enumerate(given["positions"])
    ]
    reasons = values.get("reasons", ["completed"] * 2)
    job = FinishedJob(read_manifest(path), job_work(workers), reasons)
    return {check.name: check for check in verify_results(job)}


@pytest.mark.parametrize(
    ("values", "name", "passed", "detail"),
    [
        ({}, "workers", True, "2 of 2 workers completed"),
        ({"reasons": ["completed", None]}, "workers", False, "1 of 2 workers completed"),
        ({}, "items", True, "100 of 100 items done"),
        ({"processed": 65}, "items", True, "100 of 100 items done (130 including repeated ones)"),
        ({"positions": [50, 40]}, "items", False, "90 of 100 items done"),
        ({"positions": [None, None]}, "items", False, "no log shows how many of 100 items were done"),
        ({"files": {"output_worker_0.jsonl": "1\n" * 100}}, "outputs", True, "1 file, 200 bytes"),
        ({"files": {"output_worker_0.jsonl": ""}}, "outputs", False, "1 file, 0 bytes; empty: output_worker_0.jsonl"),
        ({"files": {"output_worker_0.jsonl": "1\n" * 100}}, "records", True, "100 records for 100 items"),
        ({"files": {"output_worker_0.jsonl": "1\n" * 90}}, "records", False, "90 records for 100 items"),
        ({"total": None}, "items", None, "no total is given (--total, or progress.total_items in the job file)"),
        (
            {"total": None, "expected": 60},
            "items",
            None,
            "no total is given (--total, or progress.total_items in the job file); the logs show 100",
        ),
        ({**STEPS, "positions": [50, 50]}, "items", None, "steps are counted, not items"),
        ({**STEPS, "positions": [50, 50]}, "steps", True, "50 of 50 steps done"),
        (
            {**STEPS, "positions": [50, 50], "processed": 70},
            "steps",
            True,
            "50 of 50 steps done (70 including repeated",
        ),
        ({**STEPS, "positions": [50, 40]}, "steps", None, f"40 of 50 steps done{AS_LOGGED}"),
        ({**STEPS, "positions": [None, 50]}, "steps", True, "50 of 50 steps done"),
        ({**STEPS, "total": None, "positions": [50, 40]}, "steps", None, f"40 of 50 steps done{AS_LOGGED}"),
        ({**STEPS, "files": {"output_worker_0.jsonl": "1\n" * 99}}, "records", True, "99 records for 100 items"),
        ({**STEPS, "files": {"output_worker_0.jsonl": "1\n" * 98}}, "records", False, "98 records for 100 items"),
        (
            {**STEPS, "total": None, "files": {"output_worker_0.jsonl": "1\n"}},
            *("records", None, "steps are counted, not items"),
        ),
        (
            {"total": None, "unit": "tokens", "expected": 60},
            "items",
            None,
            "no total is given (--total, or progress.total_items in the job file); ",
        ),
        ({"unit": "tokens"}, "items", None, "tokens are counted, not items"),
    ],
)
def test_the_work_is_checked(
    values: dict[str, Any], name: str, passed: bool | None, detail: str, tmp_path: Path
) -> None:
    check = checks_of(tmp_path, **values)[name]
    assert check.passed is passed
    assert check.detail.startswith(detail)


def test_steps_of_the_log_replace_an_unknown_number_of_items(tmp_path: Path) -> None:
    assert "items" not in checks_of(tmp_path, total=None, **STEPS)


def test_without_output_files_there_is_nothing_to_check(tmp_path: Path) -> None:
    checks = checks_of(tmp_path)
    assert checks["outputs"].passed is None
    assert "records" not in checks


def test_output_of_an_earlier_job_is_ignored(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, count=1, paths={"output_dir": "out"}, progress={"total_items": 5})
    (tmp_path / "out/output_worker_0.jsonl").write_text("1\n" * 5)
    os.utime(tmp_path / "out/output_worker_0.jsonl", (START - 1000, START - 1000))
    report = run_dir.ended(0, log="Processed 5/5 items\n").report()
    assert not [check for check in report["verification"]["checks"] if check["name"] == "records" and check["passed"]]


@pytest.mark.usefixtures("utc")
def test_the_text_report_matches_the_golden_page(tmp_path: Path, golden: Golden) -> None:
    run_dir = RunDir(tmp_path, count=3, name="embed | v2\nß", progress={"total_items": 100})
    run_dir.ended(0, end=50, log="Processed 20/34 items\n", code=3).ended(1, 0, end=40, **KILLED)
    run_dir.ended(1, 1, end=70, log="Processed 33/33 items\n")
    run_dir.stop("terminated_peer", "worker_w0 rank 0 on cn01 ended by app_error", at=51).ended(2, end=60, **TERM_SENT)
    golden("launcher/report.md", rendered(run_dir.report()))
    ended = RunDir(tmp_path / "b", progress={"total_items": 10})
    for rank in range(2):
        ended.ended(rank, log="Processed 5/5 items\n")
        (ended.path / f"output_worker_{rank}.jsonl").write_text("1\n" * 5)
        os.utime(ended.path / f"output_worker_{rank}.jsonl", (START + 50, START + 50))
    golden("launcher/report-completed.md", rendered(ended.report()))


def test_the_report_is_written_as_json_and_as_text(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path).ended(0).ended(1)
    report = run_dir.report()
    write_report(run_dir.path, Report.from_json(report))
    assert read_json(run_dir.path / "report.json") == report
    assert (run_dir.path / "report.md").read_text() == rendered(report)
    assert not list(run_dir.path.glob(".*tmp"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (12.4, "12s"),
        (59.6, "1m 00s"),
        (65, "1m 05s"),
        (3600, "1h 00m"),
        (9284, "2h 34m"),
        (90000, "1d 01h"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (2070, 6000, "34.5%"),
        (2, 3, "66.7%"),
        (99_999, 100_000, "99.9%"),
        (100, 100, "100.0%"),
        (150, 100, "150.0%"),
    ],
)
def test_only_all_of_the_work_is_100_percent(done: int, total: int, text: str) -> None:
    assert percent_text(done, total) == text


@pytest.mark.parametrize(
    ("names", "total", "text"),
    [
        ("", None, ""),
        ("a", None, "a"),
        ("ab", None, "a, b"),
        ("abc", None, "a, b and 1 more"),
        ("ab", 9, "a, b and 7 more"),
    ],
)
def test_only_the_first_of_many_names_are_listed(names: str, total: int | None, text: str) -> None:
    assert names_text(names, 2, total) == text
