"""State of a job, the cause of its failure, and its exit status."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exporter.logs.log_files_reader import read_last_bytes
from exporter.workers.exit_reason import CONSEQUENCES, JobStop, first_failure

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
}  # exit reason that workers inherit from Slurm's state of the job
BATCH_LOST = "the batch step ended without a report: was the guard killed?"

# log messages that come with a traceback when there will be no report
_NO_REPORT = (b"cannot build the report", b"cannot write the report")
LOG_TAIL_BYTES = 64 * 1024


def log_for_missing_report(run_dir: Path) -> Path:
    """Launcher log that explains why a job has left no report."""
    log, error_log = run_dir / "log.out", run_dir / "log.err"
    if any(message in read_last_bytes(log, LOG_TAIL_BYTES) for message in _NO_REPORT):
        return log
    return error_log if read_last_bytes(error_log, LOG_TAIL_BYTES).strip() else log


def stop_from_slurm(
    state: str, hosts: list[str], nodes: Mapping[int, str], runs: Mapping[int, list[dict[str, Any]]]
) -> JobStop | None:
    """Derive a stop from Slurm's state. On a node failure, nodes without any exit record have failed."""
    reason = REASON_OF_STATE.get(state)
    if reason is None:
        return None
    reporting_nodes = {nodes[rank] for rank, found in runs.items() if found and found[-1]["record"] is not None}
    silent = [host for host in hosts if host in nodes.values() and host not in reporting_nodes]
    if reason == "node_failure" and silent:
        cause = f"Slurm: {state}; no exit records from {', '.join(silent)}"
        return JobStop("terminated_peer", cause, 0.0, nodes=tuple(silent))
    return JobStop(reason, f"Slurm: {state}; {BATCH_LOST}" if state == "FAILED" else f"Slurm: {state}", 0.0)


def job_cause(workers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """First failure among the last ends of critical workers."""
    needed = [worker for worker in workers if worker["critical"]] or workers
    ended = [worker for worker in needed if worker["exit"]]
    index = first_failure([(worker["exit"]["time"] or float("inf"), worker["exit"]["reason"]) for worker in ended])
    if index is None:
        return None
    return _end_entry(ended[index])


def tolerated_failures(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failures of workers that are not critical, earliest first."""
    others = [worker for worker in workers if not worker["critical"] and worker["exit"]]
    if len(workers) == sum(not worker["critical"] for worker in workers):
        return []  # one of them is the cause
    failed = [_end_entry(worker) for worker in others if worker["exit"]["reason"] not in CONSEQUENCES]
    return sorted(failed, key=lambda end: end["time"] or float("inf"))


def _end_entry(worker: Mapping[str, Any]) -> dict[str, Any]:
    """Worker and details of an end."""
    return {key: worker[key] for key in ("worker", "rank", "node")} | {
        key: worker["exit"][key] for key in ("reason", "code", "signal", "time", "restart", "evidence")
    }


def stop_cause(stop: Any) -> dict[str, Any] | None:
    """Failure named by the stop itself: a gpujob process, or a worker that was not ready in time."""
    failed = stop.get("failed") if isinstance(stop, dict) else None
    if not isinstance(failed, dict):
        return None
    return {"code": None, "signal": None, "restart": 0, "time": stop.get("time"), **failed}


def job_end_state(
    workers: list[dict[str, Any]], cause: dict[str, Any] | None, stop_reason: str | None, ended: bool
) -> str:
    if not ended:
        return "RUNNING"
    needed = [worker for worker in workers if worker["critical"]] or workers
    ends = [worker["exit"] or {} for worker in needed]
    reasons = [end.get("reason") for end in ends]
    # a task that exits with 0 after SIGTERM has not completed its work
    if all(reason == "completed" for reason in reasons) and not any(end.get("asked_to_end") for end in ends):
        return "COMPLETED"
    if stop_reason in _STATE_OF_REASON:
        return _STATE_OF_REASON[stop_reason]
    if cause is not None:
        return _STATE_OF_REASON.get(cause["reason"], "FAILED")
    inherited = [reason for reason in reasons if reason in CONSEQUENCES and reason in _STATE_OF_REASON]
    return _STATE_OF_REASON[inherited[0]] if inherited else "FAILED"


def verification_entry(state: str, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """The ``verification`` part of the report."""
    return {
        # at least one check besides the exit statuses must have passed
        "verified": state == "COMPLETED" and any(check["passed"] and check["name"] != "workers" for check in checks),
        "checks": checks,
    }
