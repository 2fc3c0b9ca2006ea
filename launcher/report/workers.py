"""Workers in the report: their runs, last end and position."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.contract.manifest import Manifest, Task
from exporter.contract.records import Record
from exporter.contract.report import EndCause, WorkerReport
from exporter.contract.status import Position, TaskFacts, WorkerEnd, WorkerStatus
from exporter.progress.resumes import earlier_positions
from exporter.progress.work import unit_word
from exporter.workers.exit_reason import CONSEQUENCES, OOM_BURST_S, PEER_WINDOW_S, JobStop
from launcher.plan.plan import PLAN_FILE
from launcher.report.exit_reasons import LISTED_RUNS, ExitReasonFinder, TaskRun, never_started_end, task_failures
from launcher.words import duration_text, names_text

if TYPE_CHECKING:
    from launcher.verify.timed_reads import OutOfTime


def read_runs(
    finder: ExitReasonFinder,
    tasks: Sequence[Task],
    attempt: int,
    nodes: Mapping[int, str],
    stop: JobStop | None,
    out_of_time: "OutOfTime",
) -> dict[int, list[TaskRun]]:
    """Last runs of each task by rank, oldest first, each with its exit if it has ended.

    The last ones of all tasks come first, then those before them, since tasks of a group restart together and explain
    each other. Once `out_of_time`, only the last run of each task is left to read.
    """
    counts = {task.rank: finder.count_runs(task, attempt) for task in tasks}
    runs: dict[int, list[TaskRun]] = {task.rank: [] for task in tasks}
    for back in range(1, LISTED_RUNS + 1):
        is_late = back > 1 and out_of_time()
        for task in tasks:
            own, restart = runs[task.rank], counts[task.rank] - back
            if restart < 0 or (is_late and own):
                continue
            if (run := finder.describe_run(task, restart, nodes[task.rank], stop)) is not None:
                own.insert(0, run)
    return runs


def exit_counts(runs: Sequence[TaskRun], seen: WorkerStatus) -> dict[str, int]:
    """Ends of all runs by exit reason: of those before ``runs`` as the sidecar has counted them."""
    listed = Counter(run.exit.reason for run in runs if run.exit is not None)
    earlier = Counter(seen.exit_counts) - listed if runs and runs[0].restart else Counter[str]()
    return dict(listed + earlier)


def add_peer_evidence(
    finder: ExitReasonFinder,
    manifest: Manifest,
    runs: dict[int, list[TaskRun]],
    nodes: Mapping[int, str],
    stop: JobStop | None,
) -> None:
    """Find the exit reasons again, with the failures of other workers as evidence."""
    failed = task_failures((task, run.exit) for task in manifest.tasks for run in runs[task.rank] if run.exit)
    failed.sort(key=lambda entry: entry[1].end)
    times = [peer.end for _, peer in failed]
    for task in manifest.tasks:
        for place, run in enumerate(runs[task.rank]):
            if run.exit is None or run.exit.time is None:
                continue
            first = bisect_left(times, run.exit.time - PEER_WINDOW_S)
            last = bisect_right(times, run.exit.time + OOM_BURST_S)
            if peers := [peer for rank, peer in failed[first:last] if rank != task.rank]:
                runs[task.rank][place] = finder.describe_run(task, run.restart, nodes[task.rank], stop, peers) or run


def add_stop_evidence(
    finder: ExitReasonFinder,
    manifest: Manifest,
    runs: dict[int, list[TaskRun]],
    nodes: Mapping[int, str],
    stop: JobStop | None,
) -> None:
    """Let the failure for which the job was stopped explain lost connections on other nodes that seem to precede it.

    Clocks of nodes differ, and the orchestrator saw that failure first. It explains none if it follows from an earlier
    one itself.
    """
    if stop is None or stop.rank is None:
        return
    named = [run.exit for run in runs.get(stop.rank, ()) if run.restart == stop.restart and run.exit is not None]
    if not named or named[0].reason in CONSEQUENCES:
        return
    for task in manifest.tasks:
        node = nodes[task.rank]
        for place, run in enumerate(runs[task.rank] if node != nodes[stop.rank] else ()):
            if run.exit is not None and run.exit.reason not in CONSEQUENCES and finder.has_lost_peer(task, run.restart):
                runs[task.rank][place] = finder.describe_run(task, run.restart, node, stop, follows_stop=True) or run


def last_end(
    finder: ExitReasonFinder,
    task: Task,
    node: str,
    runs: Sequence[TaskRun],
    stop: JobStop | None,
    known_end: WorkerEnd | None,
    has_ended: bool,
) -> WorkerEnd | None:
    """End of the last run: from its record, from the orchestrator, or without evidence.

    Once the job has ended for a known reason, a task that never started has an end too.
    """
    found = runs[-1].exit if runs else None
    if known_end is not None and (found is None or (known_end.restart or 0) > runs[-1].restart):
        return known_end
    if found is not None or not has_ended:
        return found
    if runs:
        return finder.describe_end(task, runs[-1].restart, node, {}, stop)
    return never_started_end(task, node, stop) if stop is not None else None


def with_restart_evidence(worker: WorkerReport, limit: int) -> WorkerReport:
    """Return the worker with its restart ``limit``, and with the number of restarts if it failed for good."""
    if not limit or not worker.restarts:
        return worker
    end = worker.exit
    if end is not None and end.reason not in CONSEQUENCES and worker.restarts >= limit:
        end = end.replace(evidence=(*end.evidence, f"restarted {worker.restarts} of {limit} times"))
        exits = tuple(end if other is worker.exit else other for other in worker.exits)
        worker = worker.replace(exit=end, exits=exits)
    return worker.replace(restarts_max=limit)


VALUES_SHOWN = ("loss", "eval_loss", "accuracy", "eval_accuracy", "learning_rate", "lr", "grad_norm")  # in this order


def values_text(workers: Iterable[WorkerReport]) -> str:
    """``worker_w0: loss 1.826 (best 1.75), grad_norm 0.44``: values of the first worker that logs any of them."""
    for worker in workers:
        if known := [_value_text(worker, name) for name in VALUES_SHOWN if name in worker.values]:
            return f"{worker.worker}: {', '.join(known)}"
    return ""


def _value_text(worker: WorkerReport, name: str) -> str:
    last, best = worker.values[name], worker.best_values.get(name)
    return f"{name} {last:.4g}" + (f" (best {best:.4g})" if best is not None else "")


class _RestartPolicy(Record):
    task: TaskFacts
    restart_max: int = 0


class _RestartPolicies(Record):
    tasks: tuple[_RestartPolicy, ...] = ()


def restart_limits(run_dir: Path, workers: Iterable[WorkerReport]) -> dict[int, int]:
    """Restart limits by rank; empty without restarts, to avoid reading a large plan."""
    return _planned_limits(run_dir) if any(worker.restarts for worker in workers) else {}


def is_to_be_restarted(run_dir: Path, end: EndCause) -> bool:
    """Whether the policy of the worker allows another restart after this end."""
    return end.rank is not None and (end.restart or 0) < _planned_limits(run_dir).get(end.rank, 0)


def _planned_limits(run_dir: Path) -> dict[int, int]:
    plan = _RestartPolicies.read_valid(run_dir / PLAN_FILE) or _RestartPolicies()
    return {planned.task.rank: planned.restart_max for planned in plan.tasks}


def state_of_worker(runs: Sequence[TaskRun], exit_: WorkerEnd | None, *, ended: bool, stalled: bool = False) -> str:
    """``not_found`` is a worker still to be started, ``not_started`` one that never was."""
    if exit_ is not None and exit_.restart is not None:
        return "dead"
    if runs:
        return "stalled" if stalled and not ended else "running"
    return "not_started" if ended else "not_found"


def stalled_s(seen: WorkerStatus, end: WorkerEnd | None, stop: JobStop | None) -> float | None:
    """Time without progress before the end of a worker that had stalled by then.

    None for one that completed, and for a helper that was ended because the work was done.
    """
    stalled = seen.stalled if seen.stalled_at_end is None else seen.stalled_at_end
    if not stalled or seen.last_progress is None or end is None or end.time is None:
        return None
    is_helper = end.reason == "terminated_peer" and stop is not None and stop.reason == "completed"
    return None if is_helper or end.reason == "completed" else max(0.0, end.time - seen.last_progress)


STALLED_SHOWN = 4  # workers named in the text; the JSON has all


def stalled_text(workers: Iterable[WorkerReport]) -> str:
    """``worker_w0, worker_w2: no progress in the last 12m to 1h 3m before the end``; empty if none had stalled."""
    found = [worker for worker in workers if worker.stalled_s is not None]
    if not found:
        return ""
    names = dict.fromkeys(worker.worker for worker in found)  # one that ran on several nodes is there for each
    times = sorted(worker.stalled_s or 0.0 for worker in found)
    spans = dict.fromkeys(map(duration_text, (times[0], times[-1])))
    return f"{names_text(list(names), STALLED_SHOWN)}: no progress in the last {' to '.join(spans)} before the end"


def with_earlier_positions(manifest: Manifest, attempt: int, workers: Sequence[WorkerReport]) -> list[WorkerReport]:
    """Return the workers, with positions of earlier attempts for those that completed and logged none in this one.

    A requeued job starts them all again, and one that had done its work before finds nothing to do.
    """
    from exporter.progress.history_reader import read_earlier_attempts  # lazy: only a requeued job has such attempts

    counting = {task.rank for task in manifest.tasks if not (task.service or task.later)}
    silent = {each.rank for each in workers if each.items is None and each.exit and each.exit.reason == "completed"}
    attempts = read_earlier_attempts(manifest.run_dir, attempt)
    earlier = earlier_positions(attempts, silent & counting) if silent & counting else {}
    return [
        worker.replace(unit=before.unit, pattern=before.pattern, items=before.done, items_expected=before.total)
        if (before := earlier.get(worker.rank)) is not None
        else worker
        for worker in workers
    ]


def last_known_position(finder: ExitReasonFinder, task: Task, node: str, run: TaskRun, seen: WorkerStatus) -> Position:
    """Position of a worker whose end its sidecar missed: that of its log, unless it counts in another unit."""
    logged = finder.last_position(task, node, run)
    if logged is None or (seen.items is not None and logged[2] != unit_word(seen.unit)):
        return Position.of(seen)
    last, total, unit = logged
    processed, expected = seen.items_processed, None
    if seen.items is not None:
        expected = seen.items_expected
        processed = processed + max(0, last - seen.items) if processed is not None else None
    return Position.of(seen).replace(items=last, items_expected=total or expected, items_processed=processed, unit=unit)
