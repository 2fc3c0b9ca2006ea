"""Judge a job that others started: an exit status may be unknown, and a worker may never have been found."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from exporter.contract.manifest import Manifest
from exporter.contract.report import CheckResult, LaunchReport, WorkerReport
from exporter.contract.status import NodeStatus
from exporter.progress.work import job_work, unit_word
from launcher.verify.verify import required_count


class Judgement(NamedTuple):
    """What is known of the ends of a job's workers, and what its work says of the others."""

    known: list[WorkerReport]  # workers whose ends are known, or who have none
    state: str = ""  # COMPLETED, FAILED or UNKNOWN according to the work
    check: CheckResult | None = None  # of the workers by their work; None if their ends decide


def has_unknown_end(worker: WorkerReport) -> bool:
    """Whether a worker has ended and neither its exit status nor another reason is known."""
    end = worker.exit
    return end is not None and end.code is None and end.signal is None and end.reason in ("completed", "killed_unknown")


def judge_ends(
    manifest: Manifest, workers: Sequence[WorkerReport], critical_errors: Collection[str], missing: str | None
) -> Judgement:
    """Judge the job by the ends of its workers or, where one is unknown and none has failed, by its work.

    Complete work then means completed, and less means failed. ``critical_errors`` are error patterns that show a
    failure. ``missing`` says which workers were not found.
    """
    known = [worker for worker in workers if not has_unknown_end(worker)]
    doubtful = [worker for worker in workers if worker.exit is None or has_unknown_end(worker)]
    if not doubtful or any(worker.exit and worker.exit.reason != "completed" for worker in known):
        return Judgement(known)
    work = job_work(workers)
    total: float | None = manifest.total_items if work.counts_total_items(manifest.total_items) else None
    if total is None and (work.is_in_step or work.has_only_bars):
        total = work.expected
    done, share = work.done, manifest.verify.complete_share
    enough = done is not None and total is not None and done >= required_count(share, total)
    counted = f"{done} of {total} {unit_word(work.unit)} were done"
    names = ", ".join(worker.worker for worker in workers if worker.exit is None and worker.start is None)
    lost = [missing or f"not found: {names}"] if names else []
    unclear = sum(map(has_unknown_end, workers))
    doubts = [f"the exit status of {unclear} of {len(workers)} workers is unknown"] if unclear else []
    failed = [
        f"the log of {worker.worker} has {', '.join(found)}"
        for worker in doubtful
        if (found := sorted(name for name, count in worker.log_errors.items() if count and name in critical_errors))
    ]
    if done is not None and total is not None and not enough and all(w.items is not None for w in doubtful):
        failed.append(f"{counted}; {100 * share:g}% are enough")
    if not enough:
        failed += lost
    if failed:
        return Judgement(known, "FAILED", _check(False, *doubts, *failed))
    if enough:
        return Judgement(known, "COMPLETED", _check(True, *doubts, *lost, counted))
    text = "it is unknown how every worker ended, and how many of how many items were done"
    return Judgement(known, "UNKNOWN", _check(None, text))


def _check(passed: bool | None, *details: str) -> CheckResult:
    return CheckResult(name="workers", passed=passed, detail="; ".join(details))


def missing_text(statuses: Mapping[str, NodeStatus]) -> str | None:
    """What the sidecar has said of workers that it did not find in time."""
    events = [event for status in statuses.values() for event in status.events]
    return next((event.detail for event in reversed(events) if event.event == "launch incomplete"), None)


def launch_report(statuses: Mapping[str, NodeStatus]) -> LaunchReport | None:
    """The launch checks of all nodes as one; None unless all are final."""
    launches = [status.launch for status in statuses.values()]
    if not launches or not all(launch.final for launch in launches):
        return None
    checks = [check for launch in launches for check in LaunchReport.from_json(launch.to_json()).checks]
    return LaunchReport(verified=all(launch.verified for launch in launches), checks=tuple(checks))
