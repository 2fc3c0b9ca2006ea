"""Result of an attached job from its last status: state, summary and report."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.contract.events import LoggedEvent
from exporter.contract.report import (
    CheckResult,
    EndCause,
    LaunchReport,
    Monitoring,
    Report,
    Stop,
    Verification,
    WorkerReport,
)
from exporter.contract.status import NodeGpus, NodeStatus, RunFacts, TaskPosition, WorkerEnd, WorkerStatus
from exporter.gpus.analysis.node_status import (
    account_gpus,
    account_text,
    worker_devices,
    worker_gpu_problems,
)
from exporter.progress.work import JobWork, job_work, unit_word
from exporter.workers.exit_reason import CONSEQUENCES, first_failure

COMPLETE_SHARE = 0.99  # share of the work that counts as complete
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


def find_outcome(status: NodeStatus, critical: Collection[str], missing: str | None) -> AttachedOutcome:
    """Derive the result from the ends of the workers. ``critical``: error patterns that indicate a failure.

    If an exit status is unknown, the items or steps in the worker's log decide: complete work means completed, less
    means failed. If all workers exited with 0, too few items mean an incomplete job. Too few steps do not, because
    training may stop early and logs skip lines. ``missing`` lists workers that were never found.
    """
    workers: Sequence[WorkerStatus] = status.workers
    not_found = [missing] if missing else []
    failed = [
        f"{worker.worker} ended by {worker.exit.reason}"
        for worker in workers
        if worker.exit is not None and not has_unknown_end(worker) and worker.exit.reason != "completed"
    ]
    doubtful = [worker for worker in workers if has_unknown_end(worker) or worker.exit is None]
    work = job_work(workers)
    done, total = work.done, _total(status, work)
    enough = done is not None and total is not None and done >= COMPLETE_SHARE * total
    counted = f"{done} of {total} {unit_word(work.unit)} were done"
    share = f"{counted}; {COMPLETE_SHARE * 100:.0f} % are enough"
    short = incomplete_warnings(status)
    if failed:
        return AttachedOutcome("FAILED", (*failed, *not_found))
    if not doubtful and work.counts_items and done is not None and total is not None and not enough:
        return AttachedOutcome("INCOMPLETE", (share, *not_found))
    if not doubtful:
        return AttachedOutcome("COMPLETED", (*not_found, *short))
    for worker in doubtful:
        found = [name for name, count in worker.log_errors.items() if count and name in critical]
        if found:
            failed.append(f"the log of {worker.worker} has {', '.join(sorted(found))}")
    all_counted = done is not None and total is not None and all(worker.items is not None for worker in doubtful)
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


def incomplete_warnings(status: NodeStatus) -> list[str]:
    """Warnings for workers that exited with 0 before the total of their logs, if the job's total is unknown."""
    work = job_work(status.workers)
    counts = [(worker, worker.items, worker.items_expected) for worker in status.workers]
    known = [(worker, items, total) for worker, items, total in counts if items is not None and total]
    totals, done = {total for _, _, total in known}, sum(items for _, items, _ in known)
    whole = max(totals, default=0)
    # Each log may show the total of the job.
    of_the_job = work.unit is not None and len(totals) == 1 and COMPLETE_SHARE * whole <= done <= whole
    if (work.counts_items and _total(status, work)) or of_the_job:
        return []
    return [
        f"warning: {worker.worker} exited with 0 after {items} of the {total} "
        f"{unit_word(worker.unit)} that its log shows"
        for worker, items, total in known
        if items < COMPLETE_SHARE * total and worker.exit is not None and worker.exit.code == 0
    ]


def has_unknown_end(worker: RunFacts) -> bool:
    """Whether a worker has ended and neither its exit status nor another reason is known."""
    ended = worker.exit
    return (
        ended is not None
        and ended.code is None
        and ended.signal is None
        and ended.reason in ("completed", "killed_unknown")
    )


def _total(status: NodeStatus, work: JobWork) -> float | None:
    """Total work of the job if certain: its own total of items, or that of workers in step."""
    total = status.job.total_items
    if work.counts_total_items(total):
        return total
    return work.expected if work.is_in_step or work.has_only_bars else None


def end_summary(status: NodeStatus, outcome: AttachedOutcome, run_dir: str) -> str:
    """Summary of the end of the job as text, with a line per worker."""
    job, width = status.job, max(len(worker.worker) for worker in status.workers)
    lines = [f"job {job.job_id} {_printable(job.job_name)}: {outcome.state}"]
    lines += [
        f"  {worker.worker:<{width}}  {', '.join([*_end_texts(worker), *_item_texts(worker)])}"
        for worker in status.workers
    ]
    notes = [*outcome.reasons, *_gpu_texts(status)]
    if status.gpus and (gpus := account_gpus({_node(status): status})):
        notes.append(f"GPUs: {account_text(gpus)}")
    return "\n".join([*lines, *map(_printable, notes), f"run directory: {run_dir}"])


def _gpu_texts(status: NodeStatus) -> list[str]:
    """GPU problems of workers that did not complete."""
    gpus = status.gpus
    return [
        f"{worker.worker}: {problem.text}"
        for worker in status.workers
        if worker.exit is not None and worker.exit.reason != "completed"
        for problem in worker_gpu_problems(worker, worker.start, worker_devices(worker, gpus), gpus)
    ]


def _end_texts(worker: WorkerStatus) -> list[str]:
    ended = worker.exit
    if ended is None:
        return ["not found" if worker.pid is None else "running"]
    if has_unknown_end(worker):
        return ["exit status unknown"]
    if ended.signal is not None:
        return [ended.reason, str(ended.signal)]
    return [ended.reason, "exit status unknown" if ended.code is None else f"exit status {ended.code}"]


def _item_texts(worker: WorkerStatus) -> list[str]:
    items, expected = worker.items, worker.items_expected
    unit = unit_word(worker.unit)
    return [] if items is None else [f"{items}/{expected} {unit}" if expected else f"{items} {unit}"]


def _printable(text: str) -> str:
    """Replace control characters, so that the text is safe for a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def unfinished_report(
    status: NodeStatus, run_dir: str, now: float, clock: str, diagnoses: Mapping[str, DiagnosisRef]
) -> Report:
    """Report of a job that was still running when the watch ended; ``clock`` is the time of day."""
    running = sum(worker.up for worker in status.workers)
    running_text = f"{running} worker was" if running == 1 else f"{running} workers were"
    cause = f"the sidecar was stopped at {clock}, while {running_text} running"
    report = build_attached_report(status, AttachedOutcome("UNKNOWN", (cause,)), run_dir, now, diagnoses)
    return report.replace(cause=None, stopped=Stop(reason="unknown", cause=cause, time=now))


def build_attached_report(
    status: NodeStatus, outcome: AttachedOutcome, run_dir: str, end: float, diagnoses: Mapping[str, DiagnosisRef]
) -> Report:
    """Report for ``gpujob report`` and ``gpujob watch`` on a finished job; ``diagnoses`` by worker."""
    job, node = status.job, _node(status)
    workers = tuple(_report_worker(worker, status.gpus) for worker in status.workers)
    work = job_work(workers)
    duration = end - job.start if job.start is not None else None
    cause = _cause(workers)
    if cause is not None:
        cause = cause.replace(diagnosis=_diagnosis(diagnoses.get(cause.worker), cause, status.attempt))
    check = unit_word(work.unit) if outcome.state == "INCOMPLETE" else "workers"
    unmet = outcome.state in ("INCOMPLETE", "FAILED")
    checks = [CheckResult(name=check, passed=False, detail=why) for why in outcome.reasons if unmet and cause is None]
    events = [LoggedEvent.from_json({"job_id": job.job_id, **event.to_json()}) for event in status.events]
    return Report(
        job_id=job.job_id,
        job_name=job.job_name,
        attempt=status.attempt,
        state=outcome.state,
        exit_status=outcome.exit_status,
        why=outcome.reasons,
        cause=cause,
        start=job.start,
        end=end,
        duration_s=duration,
        unit=work.unit,
        items=work.done,
        items_expected=_total(status, work),
        items_processed=work.processed,
        throughput_items_per_second=work.processed / duration if work.processed is not None and duration else None,
        verification=Verification(checks=tuple(checks)),
        gpus=account_gpus({node: status}, events),
        launch=LaunchReport.from_json(status.launch.to_json()) if status.launch.final else None,
        diagnoses=tuple(diagnoses[name].path for name in _failed(workers) if name in diagnoses),
        monitoring=Monitoring(nodes_with_final_values=(node,)),
        nodes=(node,),
        workers=workers,
        run_dir=run_dir,
    )


def _node(status: NodeStatus) -> str:
    return status.node.name if status.node is not None else ""


def _report_worker(worker: WorkerStatus, gpus: NodeGpus | None) -> WorkerReport:
    parts = TaskPosition.of(worker), RunFacts.of(worker)
    devices = worker_devices(worker, gpus)
    return WorkerReport.join(
        *parts, gpu_devices=devices, gpu_misplaced=worker.gpu_misplaced, log_errors=worker.log_errors
    )


def _cause(workers: Sequence[WorkerReport]) -> EndCause | None:
    """The first failure in time."""
    ended = [worker for worker in workers if worker.exit is not None and not has_unknown_end(worker)]
    index = first_failure([(worker.exit.time or 0.0, worker.exit.reason) for worker in ended if worker.exit])
    if index is None:
        return None
    return EndCause.join(
        worker=ended[index].worker,
        rank=ended[index].rank,
        node=ended[index].node,
        **{name: getattr(ended[index].exit, name) for name in WorkerEnd.FIELDS if name in EndCause.FIELDS},
    )


def _failed(workers: Sequence[WorkerReport]) -> list[str]:
    return [worker.worker for worker in workers if worker.exit and worker.exit.reason not in CONSEQUENCES]


def _diagnosis(found: DiagnosisRef | None, cause: EndCause, attempt: int) -> str | None:
    """Path of the diagnosis, if it is for this run and attempt."""
    if found is None or found.body.get("attempt") != attempt:
        return None
    return found.path if all(found.body.get(key) == getattr(cause, key) for key in ("rank", "restart")) else None
