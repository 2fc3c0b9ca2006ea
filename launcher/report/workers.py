"""Workers in the report: their runs, last end and position."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from exporter.progress.work import unit_word
from exporter.workers.exit_reason import CONSEQUENCES, JobStop
from launcher.plan.plan import PLAN_FILE
from launcher.report.exit_reasons import ExitReasonFinder, never_started_end, task_failures


def read_runs(
    finder: ExitReasonFinder, manifest: Manifest, task: Task, attempt: int, node: str, stop: JobStop | None
) -> list[dict[str, Any]]:
    """Runs of one task, oldest first, each with its records and its exit if it has ended."""
    folder = manifest.run_dir / run_files.WORKERS_DIR
    runs: list[dict[str, Any]] = []
    while True:
        stem = run_files.record_name(task.worker, task.rank, attempt, len(runs))
        start = run_files.read_json(folder / f"{stem}.start.json")
        ended = run_files.read_json(folder / f"{stem}.exit.json")
        if start is None and ended is None:
            return runs
        run: dict[str, Any] = {"restart": len(runs), **(start or {}), "record": ended, "exit": None}
        if ended is not None:
            run["start"] = ended.get("start", run.get("start"))
            run["exit"] = finder.describe_end(task, len(runs), node, ended, stop)
        runs.append(run)


def add_peer_evidence(
    finder: ExitReasonFinder,
    manifest: Manifest,
    runs: Mapping[int, list[dict[str, Any]]],
    nodes: Mapping[int, str],
    stop: JobStop | None,
) -> None:
    """Find the exit reasons again, with the failures of other workers as evidence."""
    failed = task_failures((task, run["exit"]) for task in manifest.tasks for run in runs[task.rank] if run["exit"])
    for task in manifest.tasks:
        peers = [peer for rank, peer in failed if rank != task.rank]
        for run in runs[task.rank] if peers else ():
            if run["exit"] is not None:
                run["exit"] = finder.describe_end(task, run["restart"], nodes[task.rank], run["record"], stop, peers)


def last_end(
    finder: ExitReasonFinder,
    task: Task,
    node: str,
    runs: list[dict[str, Any]],
    stop: JobStop | None,
    known_end: Mapping[str, Any] | None,
    has_ended: bool,
) -> dict[str, Any] | None:
    """End of the last run: from its record, from the orchestrator, or without evidence.

    Once the job has ended for a known reason, a task that never started has an end too.
    """
    if known_end is not None and int(known_end["restart"]) >= len(runs):
        return dict(known_end)
    found = runs[-1]["exit"] if runs else None
    if found is None and known_end is not None:
        return dict(known_end)
    if found is not None or not has_ended:
        return found
    if runs:
        return finder.describe_end(task, len(runs) - 1, node, {}, stop)
    return never_started_end(task, node, stop) if stop is not None else None


def add_restart_evidence(workers: Iterable[dict[str, Any]], limits: Mapping[int, int]) -> None:
    """Add the number of restarts to workers that failed for good. ``limits`` is the limit by rank."""
    for worker in workers:
        limit, end = limits.get(worker["rank"]), worker["exit"]
        if not limit or not worker["restarts"]:
            continue
        worker["restarts_max"] = limit
        if end is not None and end["reason"] not in CONSEQUENCES and worker["restarts"] >= limit:
            end["evidence"] = [*end["evidence"], f"restarted {worker['restarts']} of {limit} times"]


def restart_limits(run_dir: Path, workers: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Restart limits by rank; empty without restarts, to avoid reading a large plan."""
    if not any(worker["restarts"] for worker in workers):
        return {}
    plan: Any = run_files.read_json(run_dir / PLAN_FILE) or {}
    return {planned["task"]["rank"]: planned.get("restart_max", 0) for planned in plan.get("tasks", ())}


def state_of_worker(runs: Sequence[object], exit_: Mapping[str, Any] | None, *, ended: bool) -> str:
    """``not_found`` is a worker still to be started, ``not_started`` one that never was."""
    if exit_ is not None and exit_["restart"] is not None:
        return "dead"
    if runs:
        return "running"
    return "not_started" if ended else "not_found"


def worker_entry(
    manifest: Manifest,
    task: Task,
    attempt: int,
    node: str,
    runs: list[dict[str, Any]],
    exit_: Mapping[str, Any] | None,
    sidecar_entry: Mapping[str, Any],
    *,
    ended: bool,
    quick: bool,
) -> dict[str, Any]:
    """Describe one worker from its runs and its sidecar's ``sidecar_entry``, and from its logs unless ``quick``."""
    position, expected, processed, unit = (
        sidecar_entry.get(key) for key in ("items", "items_expected", "items_processed", "unit")
    )
    if ended and not quick and runs and (position is None or not sidecar_entry.get("exit")):
        from launcher.report.run_logs import last_position  # lazy: few runs need the log patterns

        # the sidecar missed the end: prefer the log, unless it counts in another unit
        logged = last_position(manifest, task, attempt, len(runs) - 1, node, runs[-1].get("start"))
        if logged is not None and (position is None or logged[2] == unit_word(sidecar_entry)):
            last, total, unit = logged
            if position is not None and processed is not None:
                processed += max(0, last - position)
            position, expected = last, total or (expected if position is not None else None)
    return {
        "worker": task.worker,
        "role": task.role,
        "rank": task.rank,
        "critical": task.critical,
        "node": node,
        "gpus": list(task.gpus),
        "up": bool(runs) and exit_ is None,
        "state": state_of_worker(runs, exit_, ended=ended),
        "start": runs[-1].get("start") if runs else None,
        "restarts": max(0, len(runs) - 1),
        "exit": exit_,
        "exits": [run["exit"] for run in runs if run["exit"]],
        "unit": unit,
        "pattern": sidecar_entry.get("pattern"),
        "items": position,
        "items_expected": expected,
        "items_processed": processed,
        "items_first": sidecar_entry.get("items_first"),
        "cpu_s": sidecar_entry.get("cpu_s"),
        "log_errors": sidecar_entry.get("log_errors", {}),
    }
