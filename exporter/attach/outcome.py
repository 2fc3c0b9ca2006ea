"""Result of an attached job from its last status: state, summary and report."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.gpus.analysis.node_status import (
    GpuStatus,
    account_gpus,
    account_text,
    worker_devices,
    worker_gpu_problems,
)
from exporter.progress.work import JobWork, job_work, unit_word
from exporter.workers.exit_reason import CONSEQUENCES, first_failure

COMPLETE_SHARE = 0.99  # share of the work that counts as complete
REPORT_SCHEMA = 1
# The same as those of `gpujob report`, which shows the report.
EXIT_STATUS = {"COMPLETED": 0, "FAILED": 1, "INCOMPLETE": 8, "UNKNOWN": 9}


@dataclass(frozen=True)
class AttachedOutcome:
    """State of the job, and the reasons as sentences."""

    state: str
    reasons: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.state]


@dataclass(frozen=True)
class DiagnosisRef:
    """A diagnosis of a worker: path relative to the run directory, and facts."""

    path: str
    body: Mapping[str, Any]


def find_outcome(status: Mapping[str, Any], critical: Collection[str], missing: str | None) -> AttachedOutcome:
    """Derive the result from the ends of the workers. ``critical``: error patterns that indicate a failure.

    If an exit status is unknown, the items or steps in the worker's log decide: complete work means completed, less
    means failed. If all workers exited with 0, too few items mean an incomplete job. Too few steps do not, because
    training may stop early and logs skip lines. ``missing`` lists workers that were never found.
    """
    workers: Sequence[Mapping[str, Any]] = status["workers"]
    not_found = [missing] if missing else []
    failed = [
        f"{worker['worker']} ended by {worker['exit']['reason']}"
        for worker in workers
        if worker["exit"] is not None and not has_unknown_end(worker) and worker["exit"]["reason"] != "completed"
    ]
    doubtful = [worker for worker in workers if has_unknown_end(worker) or worker["exit"] is None]
    work = job_work(workers)
    done, total = work.done, _total(status, work)
    enough = done is not None and total is not None and done >= COMPLETE_SHARE * total
    counted = f"{done} of {total} {unit_word({'unit': work.unit})} were done"
    share = f"{counted}; {COMPLETE_SHARE * 100:.0f} % are enough"
    short = incomplete_warnings(status)
    if failed:
        return AttachedOutcome("FAILED", (*failed, *not_found))
    if not doubtful and work.counts_items and done is not None and total is not None and not enough:
        return AttachedOutcome("INCOMPLETE", (share, *not_found))
    if not doubtful:
        return AttachedOutcome("COMPLETED", (*not_found, *short))
    for worker in doubtful:
        found = [name for name, count in (worker.get("log_errors") or {}).items() if count and name in critical]
        if found:
            failed.append(f"the log of {worker['worker']} has {', '.join(sorted(found))}")
    all_counted = done is not None and total is not None and all(worker.get("items") is not None for worker in doubtful)
    if all_counted and not enough:
        failed.append(share)
    if not enough:
        failed += not_found
    if failed:
        return AttachedOutcome("FAILED", tuple(failed))
    if enough:
        return AttachedOutcome("COMPLETED", (counted,))
    return AttachedOutcome(
        "UNKNOWN", ("it is unknown how every worker ended, and how many of how many items were done", *short)
    )


def incomplete_warnings(status: Mapping[str, Any]) -> list[str]:
    """Warnings for workers that exited with 0 before the total of their logs, if the job's total is unknown."""
    work = job_work(status["workers"])
    counts = [(worker, worker.get("items"), worker.get("items_expected")) for worker in status["workers"]]
    known = [(worker, items, total) for worker, items, total in counts if items is not None and total]
    totals, done = {total for _, _, total in known}, sum(items for _, items, _ in known)
    whole = max(totals, default=0)
    # Each log may show the total of the job.
    of_the_job = work.unit is not None and len(totals) == 1 and COMPLETE_SHARE * whole <= done <= whole
    if (work.counts_items and _total(status, work)) or of_the_job:
        return []
    return [
        f"warning: {worker['worker']} exited with 0 after {items} of the {total} {unit_word(worker)} that its log shows"
        for worker, items, total in known
        if items < COMPLETE_SHARE * total and (worker["exit"] or {}).get("code") == 0
    ]


def has_unknown_end(worker: Mapping[str, Any]) -> bool:
    """Whether a worker has ended and neither its exit status nor another reason is known."""
    ended = worker["exit"]
    return (
        ended is not None
        and ended["code"] is None
        and ended["signal"] is None
        and ended["reason"] in ("completed", "killed_unknown")
    )


def _total(status: Mapping[str, Any], work: JobWork) -> int | None:
    """Total work of the job if certain: its own total of items, or that of workers in step."""
    total: int | None = status["job"].get("total_items")
    if work.counts_total_items(total):
        return total
    return work.expected if work.is_in_step or work.has_only_bars else None


def end_summary(status: Mapping[str, Any], outcome: AttachedOutcome, run_dir: str) -> str:
    """Summary of the end of the job as text, with a line per worker."""
    job, width = status["job"], max(len(worker["worker"]) for worker in status["workers"])
    lines = [f"job {job['job_id']} {_printable(job['job_name'])}: {outcome.state}"]
    lines += [
        f"  {worker['worker']:<{width}}  {', '.join([*_end_texts(worker), *_item_texts(worker)])}"
        for worker in status["workers"]
    ]
    notes = [*outcome.reasons, *_gpu_texts(status)]
    if status.get("gpus") and (gpus := account_gpus({status["node"]["name"]: status})):
        notes.append(f"GPUs: {account_text(gpus)}")
    return "\n".join([*lines, *map(_printable, notes), f"run directory: {run_dir}"])


def _gpu_texts(status: Mapping[str, Any]) -> list[str]:
    """GPU problems of workers that did not complete."""
    devices = status.get("gpus") or {}
    return [
        f"{worker['worker']}: {problem.text}"
        for worker in status["workers"]
        if worker["exit"] is not None and worker["exit"]["reason"] != "completed"
        for problem in worker_gpu_problems(worker, worker_devices(worker, devices), devices)
    ]


def _end_texts(worker: Mapping[str, Any]) -> list[str]:
    ended = worker["exit"]
    if ended is None:
        return ["not found" if worker["pid"] is None else "running"]
    if has_unknown_end(worker):
        return ["exit status unknown"]
    if ended["signal"] is not None:
        return [ended["reason"], str(ended["signal"])]
    return [ended["reason"], "exit status unknown" if ended["code"] is None else f"exit status {ended['code']}"]


def _item_texts(worker: Mapping[str, Any]) -> list[str]:
    items, expected = worker.get("items"), worker.get("items_expected")
    unit = unit_word(worker)
    return [] if items is None else [f"{items}/{expected} {unit}" if expected else f"{items} {unit}"]


def _printable(text: str) -> str:
    """Replace control characters, so that the text is safe for a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def unfinished_report(
    status: Mapping[str, Any], run_dir: str, now: float, clock: str, diagnoses: Mapping[str, DiagnosisRef]
) -> dict[str, Any]:
    """Report of a job that was still running when the watch ended; ``clock`` is the time of day."""
    seen = [worker for worker in status["workers"] if "rank" in worker]  # the others have not been read yet
    status, running = {**status, "workers": seen}, sum(bool(worker["up"]) for worker in seen)
    running_text = f"{running} worker was" if running == 1 else f"{running} workers were"
    cause = f"the sidecar was stopped at {clock}, while {running_text} running"
    stopped = {"reason": "unknown", "cause": cause, "time": now}
    report = build_attached_report(status, AttachedOutcome("UNKNOWN", (cause,)), run_dir, now, diagnoses)
    return report | {"cause": None, "stopped": stopped}


def build_attached_report(
    status: Mapping[str, Any], outcome: AttachedOutcome, run_dir: str, end: float, diagnoses: Mapping[str, DiagnosisRef]
) -> dict[str, Any]:
    """Report for ``gpujob report`` and ``gpujob watch`` on a finished job; ``diagnoses`` by worker."""
    job, node, launch = status["job"], status["node"]["name"], status["launch"]
    workers = [_report_worker(worker, status.get("gpus") or {}) for worker in status["workers"]]
    work = job_work(workers)
    duration = end - job["start"] if job["start"] is not None else None
    cause = _cause(workers)
    if cause is not None:
        cause["diagnosis"] = _diagnosis(diagnoses.get(cause["worker"]), cause, status["attempt"])
    check = unit_word({"unit": work.unit}) if outcome.state == "INCOMPLETE" else "workers"
    unmet = outcome.state in ("INCOMPLETE", "FAILED")
    checks = [{"name": check, "passed": False, "detail": line} for line in outcome.reasons if unmet and cause is None]
    return {
        "schema": REPORT_SCHEMA,
        "job_id": job["job_id"],
        "job_name": job["job_name"],
        "attempt": status["attempt"],
        "state": outcome.state,
        "exit_status": outcome.exit_status,
        "why": list(outcome.reasons),
        "cause": cause,
        "stopped": None,
        "start": job["start"],
        "end": end,
        "duration_s": duration,
        "unit": work.unit,
        "items": work.done,
        "items_expected": _total(status, work),
        "items_processed": work.processed,
        "throughput_items_per_second": work.processed / duration if work.processed is not None and duration else None,
        "verification": {"verified": False, "checks": checks},
        "gpus": account_gpus({node: status}, status.get("events") or ()),
        "launch": launch if launch.get("final") else None,
        "tolerated": [],  # no worker is known to be optional
        "restarted": [],  # and gpujob restarts none
        "diagnoses": [diagnoses[name].path for name in _failed(workers) if name in diagnoses],
        "monitoring": {"nodes_with_final_values": [node], "nodes_without": []},
        "nodes": [node],
        "workers": workers,
        "run_dir": run_dir,
    }


def _report_worker(worker: Mapping[str, Any], gpus: GpuStatus) -> dict[str, Any]:
    same = ("worker", "role", "rank", "node", "gpus", "up", "state", "start", "restarts", "exit", "exits")
    progress = ("unit", "pattern", "items", "items_expected", "items_processed", "items_first", "cpu_s")
    entry = {name: worker[name] for name in same} | {name: worker.get(name) for name in progress}
    used = {"gpu_devices": worker_devices(worker, gpus), "gpu_misplaced": worker.get("gpu_misplaced")}
    return {**entry, **used, "critical": True, "log_errors": worker.get("log_errors") or {}}


def _cause(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first failure in time."""
    ended = [worker for worker in workers if worker["exit"] is not None and not has_unknown_end(worker)]
    index = first_failure([(worker["exit"]["time"], worker["exit"]["reason"]) for worker in ended])
    if index is None:
        return None
    worker = ended[index]
    return {key: worker[key] for key in ("worker", "rank", "node")} | {
        key: worker["exit"][key] for key in ("reason", "code", "signal", "time", "restart", "evidence")
    }


def _failed(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    return [worker["worker"] for worker in workers if worker["exit"] and worker["exit"]["reason"] not in CONSEQUENCES]


def _diagnosis(found: DiagnosisRef | None, cause: Mapping[str, Any], attempt: int) -> str | None:
    """Path of the diagnosis, if it is for this run and attempt."""
    if found is None or found.body.get("attempt") != attempt:
        return None
    return found.path if all(found.body.get(key) == cause[key] for key in ("rank", "restart")) else None
