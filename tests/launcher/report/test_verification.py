"""The verification in a report, and `gpujob report --verify` for a finished job."""

import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from exporter.contract import run_files
from exporter.contract.report import Report
from exporter.machine.mounts import MountPoint
from launcher.report.inputs import KnownEnds, ReportPace
from launcher.report.report import write_report
from launcher.report.text import FLAWS_SHOWN
from launcher.rundir.job_ids import job_id_of
from launcher.watch.view import JobClient
from tests.exporter.files.checkpoints.checkpoint_trees import torch_bytes
from tests.exporter.machine.fuse_server import FuseMount
from tests.launcher.verify.verify_job import out_of_time_after, shortest_slices
from tests.support.builders import START, RunDir, as_json, rendered
from tests.support.launcher import GPUJOB, clean_environment, gpujob, poll, read_json

ITEMS = 20


class Finished(RunDir):
    """A completed job with two workers and their output files."""

    def __init__(self, folder: Path, **over: Any) -> None:
        super().__init__(folder, **{"progress": {"total_items": ITEMS}, **over})
        for rank in range(2):
            self.ended(rank, log=f"Processed {ITEMS // 2}/{ITEMS // 2} items\n")
            self.output(rank)

    def output(self, rank: int, count: int = ITEMS // 2, end: str = "", at: float = 50.0) -> Path:
        """Write the output file of a worker: `count` records, then `end`."""
        path = self.path / f"output_worker_{rank}.jsonl"
        path.write_text("{}\n" * count + end)
        os.utime(path, (START + at, START + at))
        return path

    def write_report(self) -> dict[str, Any]:
        """Write the report, as at the end of the job."""
        report = self.report()
        write_report(self.path, Report.from_json(report))
        return report

    def verify(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`gpujob report --verify`."""
        return gpujob("report", self.path, "--verify", *options, cwd=self.path)


def check_result(report: dict[str, Any], name: str) -> bool | None:
    """Result of one check."""
    (found,) = [check["passed"] for check in report["verification"]["checks"] if check["name"] == name]
    return bool(found) if found is not None else None


def test_a_damaged_file_makes_a_job_incomplete(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    assert job.report()["state"] == "COMPLETED"
    job.output(1, end='{"id": 7, "te')
    report = job.report()
    assert (report["state"], report["exit_status"], report["verification"]["verified"]) == ("INCOMPLETE", 8, False)
    assert check_result(report, "valid") is False
    text = rendered(report)
    assert "\n- valid: FAILED: 1 of 2 files damaged: output_worker_1.jsonl\n" in text
    assert "\n    - output_worker_1.jsonl (jsonl): its last line is half-written\n" in text


def test_the_text_names_some_damaged_files_and_the_json_report_all(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    for rank in range(2, 40):
        job.output(rank, end="{")
    report = job.report()
    (check,) = [check for check in report["verification"]["checks"] if check["name"] == "valid"]
    assert (len(check["files"]), check["files_total"]) == (38, 38)
    lines = [line for line in rendered(report).splitlines() if line.startswith("    - ")]
    assert len(lines) == FLAWS_SHOWN + 1
    assert lines[-1] == "    - and 18 more"


def test_a_truncated_checkpoint_makes_a_job_incomplete(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    for step, end in ((30, None), (40, -20)):
        path = job.path / f"checkpoint_{step}.pt"
        path.write_bytes(torch_bytes()[:end])
        os.utime(path, (START + step, START + step))
    report = job.report()
    assert report["exit_status"] == 8
    assert check_result(report, "checkpoint") is False
    assert "; the newest undamaged one is checkpoint_30.pt\n" in rendered(report)


def test_a_benchmark_that_prints_no_tokens_makes_a_job_incomplete(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    job.ended(0, log="Processed 10/10 items\nTotal generated tokens:         0\n")
    assert job.report()["state"] == "INCOMPLETE"
    (job.path / "benchmark.out").write_text("Total generated tokens:         77\n")
    job.ended(0, log="Processed 10/10 items\n")
    report = job.report()
    assert (report["state"], check_result(report, "tokens")) == ("COMPLETED", True)


def test_a_worker_without_remaining_items_needs_no_file(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    (job.path / "output_worker_1.jsonl").unlink()
    assert check_result(job.report(), "outputs") is False
    entry = {"rank": 1, "unit": "items", "items": 0, "items_expected": 0, "exit": {"reason": "completed"}}
    assert check_result(job.status(entry).report(), "outputs") is True


@pytest.mark.parametrize("log", ["idle\n", "Processed 10/10 items\n", "step 10/10\n"])
def test_the_items_of_a_helper_are_not_those_of_the_job(log: str, tmp_path: Path) -> None:
    workers = [{"role": "embed", "command": "x"}, {"role": "helper", "command": "x", "critical": False}]
    run_dir = RunDir(tmp_path, workers=workers, progress={"total_items": 100})
    report = run_dir.ended(0, log="Processed 90/100 items\n").ended(1, log=log).report()
    assert (report["state"], report["items"], report["items_expected"]) == ("INCOMPLETE", 90, 100)
    assert check_result(report, "items") is False


@pytest.mark.parametrize(
    ("silent", "has_total", "state", "passed"),
    [
        ((), True, "INCOMPLETE", False),
        ((1, 3), True, "COMPLETED", True),
        ((), False, "COMPLETED", None),  # two groups may have done 20 items, each of 10 twice
    ],
)
def test_every_second_worker_may_lack_a_file_only_if_it_had_no_items(
    silent: tuple[int, ...], has_total: bool, state: str, passed: bool | None, tmp_path: Path
) -> None:
    progress = {"total_items": 10 * (4 - len(silent))} if has_total else {}
    run_dir = RunDir(tmp_path, 4, progress=progress, verify={"records_per_item": None})
    for rank in range(4):
        run_dir.ended(rank, log="" if rank in silent else "Processed 10/10 items\n")
    for rank in (0, 2):
        path = run_dir.write(f"output_worker_{rank}.jsonl", "{}\n" * 10).path / f"output_worker_{rank}.jsonl"
        os.utime(path, (START + 50, START + 50))
    report = run_dir.report()
    assert (report["state"], check_result(report, "outputs")) == (state, passed)
    assert check_result(report, "items") is (True if has_total else None)


def test_output_of_the_first_attempt_belongs_to_the_job(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    job.edit(run_files.ORCHESTRATOR_FILE, attempt=1, start=START + 1000)
    for rank in range(2):
        stem = run_files.record_name(f"worker_w{rank}", rank, 1, 0)
        first = read_json(job.path / f"workers/worker_w{rank}_rank{rank}_a0_r0.exit.json")
        job.write(f"workers/{stem}.exit.json", {**first, "start": START + 1001})
    assert check_result(job.report(), "valid") is True
    (job.path / "workers/worker_w0_rank0_a0_r0.start.json").unlink()
    checks = {check["name"]: check for check in job.report()["verification"]["checks"]}
    assert checks["outputs"]["detail"].endswith("none written since the job started")


@pytest.mark.parametrize(("submitted", "passed"), [(START - 10, True), (START + 500, None)])
def test_output_since_the_submission_counts_if_the_first_attempt_started_no_worker(
    submitted: float, passed: bool | None, tmp_path: Path
) -> None:
    job = Finished(tmp_path)
    for rank in range(2):
        stem = f"workers/worker_w{rank}_rank{rank}"
        record = {**read_json(job.path / f"{stem}_a0_r0.exit.json"), "start": START + 1001}
        job.write(f"{stem}_a1_r0.exit.json", record)
        (job.path / f"{stem}_a0_r0.start.json").unlink()
    job.edit(f"{job_id_of(job.path)}.json", submitted=submitted)
    job.edit(run_files.ORCHESTRATOR_FILE, attempt=1, start=START + 1000)
    assert check_result(job.report(), "outputs") is passed


@pytest.mark.parametrize(
    ("before", "state", "items"),
    [
        ({"items": 10, "items_expected": 10}, "COMPLETED", 20),
        ({"items": 4, "items_expected": 10}, "INCOMPLETE", 14),
    ],
)
def test_work_that_a_worker_finished_before_a_requeue_counts(
    before: dict[str, Any], state: str, items: int, tmp_path: Path
) -> None:
    job = Finished(tmp_path, verify={"records_per_item": None})
    earlier = [{"rank": 0, "unit": "items", "pattern": "items", **before}, {"rank": 1, "unit": "items", "items": 5}]
    job.write("report_a0.json", {"schema": 1, "workers": earlier})
    job.edit(run_files.ORCHESTRATOR_FILE, attempt=1, start=START + 1000)
    for rank, log in enumerate(("nothing left to do\n", "Processed 10/10 items\n")):
        stem = run_files.record_name(f"worker_w{rank}", rank, 1, 0)
        first = read_json(job.path / f"workers/worker_w{rank}_rank{rank}_a0_r0.exit.json")
        job.write(f"workers/{stem}.exit.json", {**first, "start": START + 1001})
        job.write(f"cn01_worker_w{rank}_a1.out", log)
    report = job.report()
    assert (report["state"], report["items"], report["items_expected"]) == (state, items, 20)


def test_files_that_were_not_read_are_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Finished(tmp_path)
    for number in range(2, 1200):
        job.output(number)
    shortest_slices(monkeypatch)
    report = job.report(pace=ReportPace(out_of_time=out_of_time_after(1700)))
    (coverage,) = [each["coverage"] for each in report["verification"]["checks"] if each["coverage"]]
    assert 0 < coverage["verified"] < coverage["files"] == 1200
    assert (report["exit_status"], report["verification"]["verified"]) == (0, False)
    headline = f"COMPLETED, {coverage['verified']} of 1,200 files verified (time limit of verification)\n"
    assert rendered(report).startswith(f"# Job 4459 job: {headline}")
    assert rendered(job.report()).startswith("# Job 4459 job: COMPLETED and verified\n")


@pytest.mark.parametrize(
    ("pattern", "over", "words"),
    [
        ("output_worker_*", {}, " and verified"),
        ("results_*", {}, ", output not verified"),  # none matches
        (None, {}, " and verified"),
        (None, {"progress": {}}, ""),
    ],
)
def test_the_headline_claims_no_more_than_was_verified(
    pattern: str | None, over: dict[str, Any], words: str, tmp_path: Path
) -> None:
    job = Finished(tmp_path, patterns={"output": pattern}, **over)
    assert rendered(job.report()).startswith(f"# Job 4459 job: COMPLETED{words}\n")


def test_output_that_there_was_no_time_to_list_is_not_verified(tmp_path: Path) -> None:
    report = Finished(tmp_path).report(pace=ReportPace(out_of_time=lambda: True))
    assert (check_result(report, "items"), check_result(report, "outputs")) == (True, None)
    assert rendered(report).startswith("# Job 4459 job: COMPLETED, output not verified\n")


def test_a_finished_job_can_be_verified_again(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    job.write_report()
    done = job.verify()
    assert (done.returncode, done.stderr) == (0, "")
    assert "COMPLETED and verified" in done.stdout
    written = (job.path / run_files.REPORT_FILE).read_bytes()

    (job.path / "output_worker_1.jsonl").unlink()
    done = job.verify()
    assert done.returncode == 8
    assert "- outputs: FAILED: 1 file, 30 bytes; none of worker_w1" in done.stdout
    assert done.stderr == "gpujob: different from report.json: outputs, records (COMPLETED then, INCOMPLETE now)\n"
    assert "\r" not in done.stdout + done.stderr
    assert (job.path / run_files.REPORT_FILE).read_bytes() == written
    shown = gpujob("report", job.path, cwd=tmp_path)
    assert (shown.returncode, shown.stdout.partition(" ")[0]) == (0, "#")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_job_with_removed_output_is_incomplete(damaged: bool, tmp_path: Path) -> None:
    job = Finished(tmp_path)
    if damaged:
        job.output(1, end="{")
    assert job.write_report()["state"] == ("INCOMPLETE" if damaged else "COMPLETED")
    for path in job.path.glob("output_*"):
        path.unlink()
    report = as_json(JobClient(job.path).report(verify=True))
    assert (report["state"], check_result(report, "outputs")) == ("INCOMPLETE", False)
    (check,) = [check for check in report["verification"]["checks"] if check["name"] == "outputs"]
    assert check["detail"].startswith("2 files are gone from ")


def test_files_of_a_job_whose_clock_was_set_back_are_found_again(tmp_path: Path) -> None:
    job, hour = Finished(tmp_path), 3600.0
    for rank in range(2):
        job.output(rank, at=50.0 - hour)
    report = job.report(now=START + 200.0 - hour, known=KnownEnds(elapsed_s=200.0))
    assert (report["start"], report["end"], report["state"]) == (START, START + 200.0 - hour, "COMPLETED")
    again = job.verify_again(report)
    assert (again["state"], again["verification"]["differs"]) == ("COMPLETED", [])


def test_a_job_whose_only_output_file_was_removed_is_incomplete(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, count=1).ended(0, log="Processed 10/10 items\n")
    path = run_dir.path / "output_worker_0.jsonl"
    path.write_text("{}\n" * 10)
    os.utime(path, (START + 50, START + 50))
    report = run_dir.report()
    assert report["state"] == "COMPLETED"
    path.unlink()
    again = run_dir.verify_again(report)
    assert (again["state"], check_result(again, "outputs")) == ("INCOMPLETE", False)
    (check,) = [check for check in again["verification"]["checks"] if check["name"] == "outputs"]
    assert check["detail"].startswith("1 file is gone from ")


def test_output_on_the_disk_of_another_node_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Finished(tmp_path, paths={"output_dir": "/var/tmp"}, patterns={"output": "no_such_output_*"})
    report = job.write_report()
    for check in report["verification"]["checks"]:
        if check["name"] == "outputs":
            check.update(detail="2 files, 60 bytes", passed=True)
    write_report(job.path, Report.from_json(report))
    mounts = (MountPoint("/", "ext4", "disk"), MountPoint(str(tmp_path), "nfs4", "server:/home"))
    monkeypatch.setattr("exporter.machine.mounts.MountTable.current", lambda _: mounts)
    report = as_json(JobClient(job.path).report(verify=True))
    assert (report["state"], check_result(report, "outputs")) == ("COMPLETED", None)


def test_a_job_with_repaired_files_is_complete(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    job.output(1, end="{")
    assert job.write_report()["exit_status"] == 8
    job.output(1, at=5000.0)
    done = job.verify("--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["state"], report["exit_status"]) == (0, "COMPLETED", 0)
    assert report["verification"]["verified"] is True
    assert (report["verification"]["state_before"], report["verification"]["differs"]) == ("INCOMPLETE", ["valid"])
    assert read_json(job.path / run_files.REPORT_FILE)["state"] == "INCOMPLETE"


def test_a_failed_job_stays_failed_with_valid_files(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    job.ended(1, code=3, log="Processed 10/10 items\n")
    assert job.write_report()["state"] == "FAILED"
    assert as_json(JobClient(job.path).report(verify=True))["state"] == "FAILED"
    done = job.verify()
    assert done.returncode == 1
    assert "- valid: ok: 2 files valid (jsonl)" in done.stdout


def cancelled(folder: Path) -> Finished:
    """A job cancelled after its first worker completed, without the second output file."""
    job = Finished(folder)
    job.stop("cancelled", "SIGTERM to the job")
    job.ended(1, code=None, signal=15, signals=[[START + 95, 15, 1]], log="Processed 3/10 items\n")
    (job.path / "output_worker_1.jsonl").unlink()
    assert job.write_report()["state"] == "CANCELLED"
    return job


def test_verifying_a_cancelled_job_agrees_with_its_report(tmp_path: Path) -> None:
    job = cancelled(tmp_path)
    report = as_json(JobClient(job.path).report(verify=True))
    assert (report["state"], report["exit_status"], report["verification"]["differs"]) == ("CANCELLED", 5, [])
    names = [check["name"] for check in report["verification"]["checks"]]
    assert names == ["outputs", "valid", "records", "checkpoint"]
    assert [check_result(report, name) for name in names] == [None, True, None, None]
    done = job.verify()
    assert (done.returncode, done.stderr) == (5, "")
    assert "\n- outputs: not checked: 1 file, 30 bytes; none of worker_w1; " in done.stdout
    assert done.stdout.count("; not required, because the job ended as CANCELLED\n") == 2
    assert "FAILED" not in done.stdout


def test_a_damaged_file_of_a_cancelled_job_is_reported(tmp_path: Path) -> None:
    job = cancelled(tmp_path)
    job.output(0, end="{")
    assert check_result(as_json(JobClient(job.path).report(verify=True)), "valid") is False
    done = job.verify()
    assert done.returncode == 5
    assert "\n- valid: FAILED: 1 of 1 file damaged: output_worker_0.jsonl\n" in done.stdout


def test_a_cancelled_job_without_a_report_can_be_verified(tmp_path: Path) -> None:
    job = cancelled(tmp_path)
    (job.path / run_files.REPORT_FILE).unlink()
    job.edit(run_files.ORCHESTRATOR_FILE, local=True, host="elsewhere", start_ticks=1)
    assert as_json(JobClient(job.path).report())["verification"]["checks"] == []
    assert check_result(as_json(JobClient(job.path).report(verify=True)), "valid") is True


def test_a_job_that_has_not_ended_has_nothing_to_verify(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    (job.path / run_files.ORCHESTRATOR_FILE).unlink()
    done = job.verify()
    assert done.returncode == 10
    assert done.stderr == "gpujob: the job has not ended, so there is nothing to verify yet\n"


def test_a_job_with_a_lost_orchestrator_can_be_verified(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    job.edit(run_files.ORCHESTRATOR_FILE, local=True, host="elsewhere", start_ticks=1)
    done = job.verify("--json")
    assert check_result(json.loads(done.stdout), "records") is True


def test_the_result_of_an_attached_job_comes_from_its_monitor(tmp_path: Path) -> None:
    job = Finished(tmp_path)
    report = job.write_report()
    job.edit(run_files.MANIFEST_FILE, attached=True)
    unmet = {"name": "workers", "passed": False, "detail": "as the monitor saw it"}
    unmet |= {"files": [], "files_total": 0, "coverage": None}
    verification = {"verified": False, "checks": [unmet]}
    saved = {**report, "state": "INCOMPLETE", "exit_status": 8, "verification": verification}
    for worker in saved["workers"]:
        worker["exit"] = None
    run_files.write_json(job.path / run_files.REPORT_FILE, saved)
    again = as_json(JobClient(job.path).report(verify=True))
    assert again["verification"]["checks"][0] == unmet
    assert (again["state"], check_result(again, "valid")) == ("INCOMPLETE", True)


def test_without_verify_no_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Finished(tmp_path)
    report = job.write_report()
    monkeypatch.setattr("launcher.report.verification.verify_results", lambda *_, **__: pytest.fail("it was looked at"))
    assert as_json(JobClient(job.path).report()) == report


def test_ctrl_c_ends_a_verification_that_waits_for_a_lost_file_server(tmp_path: Path) -> None:
    mount = FuseMount(tmp_path)
    try:
        job = Finished(tmp_path, paths={"output_dir": str(mount.point), "checkpoint_dir": str(tmp_path)})
        job.write_report()
        mount.say("swallow")
        terminal, child_terminal = pty.openpty()
        argv = [str(GPUJOB), "report", str(job.path), "--verify"]
        process = subprocess.Popen(
            argv,
            cwd=tmp_path,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=child_terminal,
            start_new_session=True,
        )
        shown = b""

        def progress_shown() -> bool:
            nonlocal shown
            shown += os.read(terminal, 4096)
            return b"Verifying: " in shown

        poll(progress_shown, "a line on the terminal", timeout=20.0)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) == 130
        assert b"Traceback" not in shown + os.read(terminal, 4096)
        assert process.communicate()[0] == b""
        os.close(terminal)
        os.close(child_terminal)
    finally:
        mount.say("answer")
        mount.close()


@pytest.mark.parametrize(
    ("position", "passed", "detail"),
    [
        ({"items": 30}, True, "30 of 30 items done, by the totals in the logs"),
        ({"items": 29}, None, "no total is given (--total, or progress.total_items in the job file); the logs show 29"),
        ({"items": 30, "epoch": 1}, None, "no total is given"),
        ({"items": 30, "pattern": "bar"}, None, "no total is given"),
    ],
)
def test_all_of_the_total_in_the_log_is_verified(
    position: dict[str, object], passed: bool | None, detail: str, tmp_path: Path
) -> None:
    facts = {"rank": 0, "worker": "worker_w0", "pattern": "items", "unit": "items", "items_expected": 30}
    run_dir = RunDir(tmp_path, count=1).ended(0).status({**facts, **position})
    report = run_dir.report()
    check = next(check for check in report["verification"]["checks"] if check["name"] == "items")
    assert (check["passed"], check["detail"].startswith(detail)) == (passed, True)
    assert rendered(report).startswith("# Job 4459 job: COMPLETED and verified\n") == bool(passed)
    assert run_dir.verify_again(report)["verification"]["differs"] == []


@pytest.mark.parametrize(("share", "state", "status"), [(0.99, "INCOMPLETE", 8), (0.3, "COMPLETED", 0)])
def test_exit_status_0_short_of_the_total_in_the_log_is_incomplete(
    share: float, state: str, status: int, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path, count=1, verify={"complete_share": share}).ended(0, log="Processed 6/20 items\n")
    position = {"pattern": "items", "unit": "items", "items": 6, "items_expected": 20, "items_first": 1}
    report = run_dir.status({"rank": 0, "worker": "worker_w0", **position}).report()
    assert (report["state"], report["exit_status"]) == (state, status)
    again = run_dir.verify_again(report)
    assert (again["state"], again["verification"]["differs"]) == (state, [])


WORK_LEFT = ("TIMEOUT", 3, False)


@pytest.mark.parametrize(
    ("log", "total", "warned_at", "end", "workers"),
    [
        ("Step 600/1000 loss=1\n", None, 90.0, WORK_LEFT, None),
        ("Processed 600/1000 items\n", None, 90.0, WORK_LEFT, None),
        ("Processed 600/1000 items\n", 1000, 90.0, WORK_LEFT, None),
        ("Step 600/1000 loss=1\n", None, 190.0, ("COMPLETED", 0, True), True),  # it had ended before
        ("Step 1000/1000 loss=1\n", None, 90.0, ("COMPLETED", 0, True), True),
        ("Processed 1000/1000 items\n", 1000, 90.0, ("COMPLETED", 0, True), True),
        ("Step 970/1000 loss=1\n", None, 90.0, ("COMPLETED", 0, False), None),  # it may log each 50th step
        ("Processed 600 items\n", None, 90.0, ("COMPLETED", 0, False), None),
    ],
)
def test_exit_status_0_after_the_warning_of_the_time_limit_completes_no_work_that_is_left(
    log: str, total: int | None, warned_at: float, end: tuple[str, int, bool], workers: bool | None, tmp_path: Path
) -> None:
    progress = {"total_items": total} if total else {}
    job = RunDir(tmp_path, 1, progress=progress, patterns={"output": None}).ended(0, log=log)
    path = job.path / "checkpoint_600.pt"
    path.write_bytes(torch_bytes())
    os.utime(path, (START + 98, START + 98))
    job.edit(run_files.STATE_FILE, warning={"signal": "SIGUSR1", "time": START + warned_at})
    report = job.report()
    assert (report["state"], report["exit_status"], report["verification"]["verified"]) == end
    if end == WORK_LEFT:
        assert report["stopped"]["reason"] == "time_limit"
        assert "- stopped: the workers ended after SIGUSR1, which came before the time limit\n" in rendered(report)
        assert [check["passed"] for check in report["verification"]["checks"]] == [False]
    else:
        assert check_result(report, "workers") is workers
        words = " and verified" if end[2] else ", or saved at the warning before the time limit"
        assert rendered(report).startswith(f"# Job 4459 job: COMPLETED{words}\n")
    again = job.verify_again(report)
    assert (again["state"], again["verification"]["differs"]) == (end[0], [])
