"""What all sidecars and workers know about files, launch, events and the end, merged for the view of a job."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from exporter.contract import run_files
from exporter.contract.events import Event, LoggedEvent
from exporter.contract.report import WorkerReport
from exporter.contract.status import (
    FileSystem,
    GpuSignals,
    NodeGpus,
    NodeStatus,
    Position,
    ProcessFacts,
    ProgressFacts,
    WorkerOutput,
    WorkerStatus,
)
from exporter.contract.view import LaunchView, OutputView, WorkerView
from exporter.gpus.analysis.node_status import worker_devices
from exporter.logs.log_files_reader import read_last_bytes
from exporter.progress import outlook

EVENTS_TAIL_BYTES = 64 * 1024  # end of `events.jsonl` that is searched
JOB_EVENTS = ("milestone", "near completion", "progress")  # of the whole job, from the orchestrator


def events(statuses: Iterable[NodeStatus], run_dir: Path, start: float | None) -> tuple[Event, ...]:
    """Events of all nodes and of the whole job since its start, oldest first."""
    events = [event for status in statuses for event in status.events]
    if start is not None:
        events += [
            Event(time=found.time, level=found.level or "info", event=found.event, detail=found.detail or "")
            for found in last_logged_events(run_dir, JOB_EVENTS, start)
        ]
    return tuple(sorted(events, key=lambda event: event.time))


def last_logged_events(run_dir: Path, names: Sequence[str], since: float) -> Iterator[LoggedEvent]:
    """The events with these names near the end of ``events.jsonl``, newest first."""
    marks = [f'"event": "{name}"'.encode() for name in names]
    for line in reversed(read_last_bytes(run_dir / run_files.EVENTS_FILE, EVENTS_TAIL_BYTES).splitlines()):
        if not any(mark in line for mark in marks):
            continue
        try:
            event = LoggedEvent.from_json(json.loads(line))
        except (ValueError, RecursionError):
            continue  # the first line may be cut off
        if event.event in names and event.time >= since:
            yield event


def _sum_known(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def first_to_stop(workers: Sequence[WorkerView]) -> str | None:
    """The running worker of all nodes that stalled first, or None; each sidecar knows only its own workers."""
    last = {worker.rank: worker.last_progress for worker in workers if worker.last_progress is not None}
    rank = outlook.first_to_stop(last, [worker.rank for worker in workers if worker.stalled], outlook.STEP_S)
    return next((worker.worker for worker in workers if worker.rank == rank), None)


def outputs(statuses: Iterable[NodeStatus]) -> tuple[OutputView, ...]:
    """Output files by path group, summed over all nodes; ``stalled_ranks`` are workers that no longer write."""
    merged: dict[str, OutputView] = {}
    for status in statuses:
        for group in status.outputs:
            entry = merged.get(group.group, OutputView(group=group.group))
            known = [stalled for stalled in (entry.stalled, group.stalled) if stalled is not None]
            merged[group.group] = entry.replace(
                counting=entry.counting or group.counting,
                files=entry.files + group.files,
                bytes=entry.bytes + group.bytes,
                growth_bytes_per_second=_sum_known(entry.growth_bytes_per_second, group.growth_bytes_per_second),
                mtime=max((t for t in (entry.mtime, group.mtime) if t is not None), default=None),
                records=_sum_known(entry.records, group.records),
                stalled=all(known) if known else None,
                stalled_ranks=(
                    *entry.stalled_ranks,
                    *(rank for rank, worker in group.workers.items() if worker.stalled),
                ),
                files_invalid=entry.files_invalid + group.files_invalid,
                invalid=(*entry.invalid, *group.invalid),
            )
    return tuple(merged.values())


def output_of_workers(statuses: Iterable[NodeStatus]) -> dict[int, WorkerOutput]:
    """Output files by rank. A worker writes them on one node, or several nodes see the same ones."""
    groups = (group for status in statuses for group in status.outputs if group.group == "output")
    return {rank: output for group in groups for rank, output in group.workers.items()}


def filesystems(statuses: Iterable[NodeStatus]) -> tuple[FileSystem, ...]:
    """The file system with the least free space per path group; one that does not answer comes first."""
    merged: dict[str, FileSystem] = {}
    for status in statuses:
        for space in status.filesystems:
            known = merged.get(space.group)
            if known is None or _space_left(space) < _space_left(known):
                merged[space.group] = space
    return tuple(merged.values())


def _space_left(space: FileSystem) -> float:
    """Free bytes for comparison: -1 if the file system does not answer, infinite if unknown."""
    if space.responding is False:
        return -1.0
    return float("inf") if space.available_bytes is None else space.available_bytes


def launch(statuses: Mapping[str, NodeStatus]) -> LaunchView:
    """Whether all nodes passed their launch checks, and the required checks that failed."""
    lacking = tuple(
        f"{node}: {check.detail}"
        for node, status in sorted(statuses.items())
        for check in status.launch.checks
        if status.launch.final and check.level == "issue" and check.passed is False
    )
    is_verified = bool(statuses) and all(status.launch.verified for status in statuses.values())
    return LaunchView(verified=is_verified, lacking=lacking)


def worker_view(
    worker: WorkerReport, seen: WorkerStatus | None, gpus: NodeGpus | None, *, is_final: bool
) -> WorkerView:
    """Merge a worker's records with its sidecar's status; ``gpus`` are those of its node.

    The sidecar's position wins while the job runs. With ``is_final`` the report's wins: it saw more.
    """
    seen = seen or WorkerStatus(worker=worker.worker, rank=worker.rank)
    first, other = (worker, seen) if is_final else (seen, worker)
    position = {
        name: getattr(first, name) if getattr(first, name) is not None else getattr(other, name)
        for name in (*Position.FIELDS, "cpu_s")
    }
    if is_final and worker.items is not None:
        position["items_expected"] = worker.items_expected  # the sidecar's total may belong to another count
    # with these states the sidecar polled before the start
    state = seen.state if worker.up and seen.state not in ("not_found", "dead") else worker.state
    return WorkerView.join(
        worker,
        ProcessFacts.of(seen),
        ProgressFacts.of(seen),
        GpuSignals.of(seen),
        **position,
        state=state,
        gpu_devices=worker_devices(seen, gpus),
    )
