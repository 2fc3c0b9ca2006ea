"""State of a job, the cause of its failure, and its exit status."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from exporter.contract.records import RecordError
from exporter.contract.report import CheckResult, EndCause, Verification, WorkerReport
from exporter.logs.log_files_reader import read_last_bytes
from exporter.logs.redact import redact
from exporter.workers.exit_reason import CONSEQUENCES, OOM_BURST_S, JobStop, first_failure
from launcher.report.exit_reasons import TaskRun
from launcher.report.restarts import end_cause, end_time

UNFINISHED = ("PENDING", "RUNNING")  # states of a job that has not ended
EXIT_STATUS = {
    "COMPLETED": 0,
    "FAILED": 1,
    "TIMEOUT": 3,
    "OUT_OF_MEMORY": 4,
    "CANCELLED": 5,
    "NODE_FAIL": 6,
    "BOOT_FAIL": 6,
    "PREEMPTED": 7,
    "INCOMPLETE": 8,
    "UNKNOWN": 9,
    "RUNNING": 10,
    "PENDING": 10,
}  # exit status of `run`, `report` and `watch --until done`, by state of the job

_STATE_OF_REASON = {
    "host_oom": "OUT_OF_MEMORY",
    "node_failure": "NODE_FAIL",
    "time_limit": "TIMEOUT",
    "preempted": "PREEMPTED",
    "cancelled": "CANCELLED",
}

VERIFIED_STATES = ("COMPLETED", "INCOMPLETE")  # states of a job that ended well; its verification decides between them

REASON_OF_STATE = {
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "FAILED": "terminated_peer",
    "OUT_OF_MEMORY": "terminated_peer",  # of some workers, which their records know
}  # exit reason that workers inherit from Slurm's state of the job
BATCH_LOST = "the batch step ended without a report: was the guard killed?"

# log messages that come with a traceback when there will be no report
_NO_REPORT = (b"cannot build the report", b"cannot write the report")
LOG_TAIL_BYTES = 64 * 1024
MOST_LINE_CHARACTERS = 500  # of a log line in the cause


def log_for_missing_report(run_dir: Path) -> Path:
    """Launcher log that explains why a job has left no report."""
    log, error_log = run_dir / "log.out", run_dir / "log.err"
    if any(message in read_last_bytes(log, LOG_TAIL_BYTES) for message in _NO_REPORT):
        return log
    return error_log if read_last_bytes(error_log, LOG_TAIL_BYTES).strip() else log


def end_before_start(run_dir: Path) -> str:
    """Explain a batch script that failed before its guard started, such as by a module: its last error log line."""
    error_log = run_dir / "log.err"
    if not error_log.exists():
        return f"the batch script left no log: can the node reach {run_dir}?"
    lines = read_last_bytes(error_log, LOG_TAIL_BYTES).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "log.err is empty")
    return f"the batch script ended before gpujob started: {redact(last[:MOST_LINE_CHARACTERS])}"


def stop_from_slurm(
    state: str,
    hosts: Sequence[str],
    nodes: Mapping[int, str],
    runs: Mapping[int, Sequence[TaskRun]],
    failure: str = BATCH_LOST,
) -> JobStop | None:
    """Derive a stop from Slurm's state. On a node failure, nodes without any exit record have failed.

    ``failure`` explains the state FAILED.
    """
    reason = REASON_OF_STATE.get(state)
    if reason is None:
        return None
    reporting_nodes = {nodes[rank] for rank, found in runs.items() if found and found[-1].exit is not None}
    silent = [host for host in hosts if host in nodes.values() and host not in reporting_nodes]
    if reason == "node_failure" and silent:
        cause = f"Slurm: {state}; no exit records from {', '.join(silent)}"
        return JobStop("terminated_peer", cause, 0.0, nodes=tuple(silent))
    return JobStop(reason, f"Slurm: {state}; {failure}" if state == "FAILED" else f"Slurm: {state}", 0.0)


def deciding_workers(workers: Sequence[WorkerReport]) -> Sequence[WorkerReport]:
    """The critical workers, or all if none is critical."""
    return [worker for worker in workers if worker.critical] or workers


def job_cause(workers: Sequence[WorkerReport]) -> EndCause | None:
    """First failure among the last ends of critical workers.

    Where memory ran out, it is the victim that used most: the kernel may have killed smaller ones before it was gone.
    """
    ends = [(worker, worker.exit) for worker in deciding_workers(workers) if worker.exit is not None]
    index = first_failure([(end.time or float("inf"), end.reason) for _, end in ends])
    if index is None:
        return None
    worker, first = ends[index]
    if first.reason == "host_oom" and first.time is not None:
        victims = [
            (other, end)
            for other, end in ends
            if (other.node, end.reason) == (worker.node, first.reason) and (end.time or 0) <= first.time + OOM_BURST_S
        ]
        worker, first = max(victims, key=lambda victim: victim[1].max_rss_bytes or 0)
    return end_cause(worker, first)


def tolerated_failures(workers: Sequence[WorkerReport]) -> list[EndCause]:
    """Failures of workers that are not critical, earliest first."""
    if not any(worker.critical for worker in workers):
        return []  # one of them is the cause
    others = [end_cause(worker, worker.exit) for worker in workers if not worker.critical and worker.exit is not None]
    return sorted((end for end in others if end.reason not in CONSEQUENCES), key=end_time)


def stop_cause(stop: object) -> EndCause | None:
    """Failure named by the stop itself: a gpujob process, or a worker that was not ready in time."""
    failed = stop.get("failed") if isinstance(stop, dict) else None
    if not isinstance(stop, dict) or not isinstance(failed, dict):
        return None
    try:
        return EndCause.from_json({"time": stop.get("time"), **failed})
    except RecordError:
        return None  # written by another version


def job_end_state(workers: Sequence[WorkerReport], cause: EndCause | None, stop: JobStop | None, ended: bool) -> str:
    if not ended:
        return "RUNNING"
    ends = [worker.exit for worker in deciding_workers(workers)]
    # a task that exits with 0 after SIGTERM, or once the job is to be requeued, has not completed its work
    is_interrupted = stop is not None and stop.requeue
    if not is_interrupted and all(
        end is not None and end.reason == "completed" and not end.asked_to_end for end in ends
    ):
        return "COMPLETED"
    if stop is not None and stop.reason in _STATE_OF_REASON:
        return _STATE_OF_REASON[stop.reason]
    if cause is not None:
        return _STATE_OF_REASON.get(cause.reason, "FAILED")
    inherited = [end.reason for end in ends if end is not None and end.reason in CONSEQUENCES]
    return next((_STATE_OF_REASON[reason] for reason in inherited if reason in _STATE_OF_REASON), "FAILED")


def verification_result(state: str, checks: Iterable[CheckResult]) -> Verification:
    """The ``verification`` part of the report."""
    checks = tuple(checks)
    # at least one check besides the exit statuses must have passed, and these must not leave open whether they saved
    passed = not _is_work_unknown(checks) and any(check.passed and check.name != "workers" for check in checks)
    found = [check.coverage for check in checks if check.coverage is not None]
    covered = all(each.verified == each.files for each in found) and (found or not _has_output_check(checks))
    return Verification(verified=state == "COMPLETED" and passed and bool(covered), checks=checks)


def verification_words(state: str, verification: Verification) -> str:
    """What follows the state in the headline: how far a completed job was verified; empty without output to verify."""
    if state != "COMPLETED":
        return ""
    if verification.verified:
        return " and verified"
    if _is_work_unknown(verification.checks):
        return ", or saved at the warning before the time limit"
    partial = (each for check in verification.checks if (each := check.coverage) and each.verified < each.files)
    if (coverage := next(partial, None)) is not None:
        reason = f" ({coverage.reason})" if coverage.reason else ""
        return f", {coverage.verified:,} of {coverage.files:,} files verified{reason}"
    return ", output not verified" if not verification.checks or _has_output_check(verification.checks) else ""


def _is_work_unknown(checks: Iterable[CheckResult]) -> bool:
    """Whether workers may have ended with 0 because they saved their state for the time limit."""
    return any(check.name == "workers" and check.passed is None for check in checks)


def _has_output_check(checks: Iterable[CheckResult]) -> bool:
    return any(check.name == "outputs" for check in checks)
