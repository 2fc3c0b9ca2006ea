"""Output files: number, size, growth, records, and validity."""

from collections import deque
from dataclasses import replace
from functools import partial

from exporter.collecting.collector import WORKER_LABELS, CollectorContext, StatusParts, worker_labels
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import Published, WorkerProcesses
from exporter.contract import run_files
from exporter.contract.clock import JobStops, StopDetector
from exporter.contract.events import Event
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import PathGroup, Task
from exporter.contract.status import DamagedFile, IgnoredFile, OutputGroup, WorkerOutput
from exporter.contract.worker_names import rank_in_file_name
from exporter.files.formats.source import printable
from exporter.files.outputs.growth import GroupGrowth
from exporter.files.outputs.outputs_reader import (
    CLOCK_SLACK_S,
    FileOwnership,
    OutputReading,
    OutputWatch,
    OwnedOutput,
)
from exporter.machine.file_host import FileHelperEnded, WatchHandle, WatchHanging
from exporter.machine.mounts import is_node_local, mount_of

FILES = Family("output_files", "Files of the path group that this node counts.", labels=("group",))
BYTES = Family("output_bytes", "Size of these files.", labels=("group",))
GROWTH = Family(
    "output_growth_bytes_per_second",
    "Growth over the last two minutes, measured between writes; 0 if nothing was written in that time.",
    labels=("group",),
)
MTIME = Family("output_file_mtime_timestamp_seconds", "When the newest file was last written.", labels=("group",))
RECORDS = Family(
    "output_records",
    "Records in the files: lines of JSONL and CSV, items of JSON arrays, rows of Parquet, Arrow, HDF5 and NumPy files.",
    labels=("group",),
)
VALID = Family(
    "output_file_valid",
    "Whether every checked file is undamaged; files that are still being written are not checked.",
    labels=("group",),
)
INVALID = Family("output_files_invalid", "Damaged files.", labels=("group",))
STALLED = Family(
    "output_stalled",
    "Whether the job has written files of the path group, but none for the stall timeout while workers run.",
    labels=("group",),
)
WORKER_GROUP = (*WORKER_LABELS, "group")
WORKER_BYTES = Family("worker_output_bytes", "Size of the files with the worker's number.", labels=WORKER_GROUP)
WORKER_RECORDS = Family("worker_output_records", "Records in these files.", labels=WORKER_GROUP)
WORKER_MTIME = Family(
    "worker_output_mtime_timestamp_seconds", "When the newest file was last written.", labels=WORKER_GROUP
)
WORKER_STALLED = Family(
    "worker_output_stalled",
    "Whether the worker has written files of the path group, but none for the stall timeout while it runs.",
    labels=WORKER_GROUP,
)

OUTPUT_GROUP = "output"  # whose events name it already
CHECKPOINT = "checkpoint"  # group of checkpoints: they are rare, and have their own collector
SLOW_S = 5.0  # an unanswered poll is slow up to this, and hangs after it
MOST_EVENTS = 50


@dataclass(frozen=True)
class OutputsSnapshot:
    """All groups that could be read, and recent events."""

    groups: tuple[OutputGroup, ...]
    events: tuple[Event, ...] = ()


class _OutputGroupWatch:
    """State of one group between polls."""

    def __init__(self, group: PathGroup, directory: str, handle: WatchHandle[OutputReading]) -> None:
        self.group = group
        self.directory = directory
        self.handle = handle
        self.growth = GroupGrowth()
        self.watch_id: int | None = None  # number of the watch that growth and file numbers belong to
        self.facts: OutputGroup | None = None
        self.is_stalled = False
        self.stalled_ranks: set[int] = set()
        self.damaged: set[tuple[str, str]] = set()
        self.has_output = False
        self.last_finished_number = 0
        self.unreadable: str | None = None


class OutputsCollector:
    """Files of each path group.

    On a shared file system every node sees all files. A node counts those with the number of one of its workers; the
    first node also counts those without one, so that sums over nodes count every file once. In a node-local directory,
    a node counts all files.
    """

    name = "outputs"
    families = (
        *(FILES, BYTES, GROWTH, MTIME, RECORDS, VALID, INVALID, STALLED),
        *(WORKER_BYTES, WORKER_RECORDS, WORKER_MTIME, WORKER_STALLED),
    )

    def __init__(self, context: CollectorContext, processes: Published[WorkerProcesses]) -> None:
        manifest = context.manifest
        self._clock, self._processes, self._files = context.clock, processes, context.files
        self._timeout_s = manifest.stall_timeout_s
        self._start = context.identity.start
        self.interval_s = manifest.check_interval_s
        self._tasks = {task.rank: task for task in context.tasks}
        ranks, mounts = manifest.ranks_of_roles(), self._files.mounts.current()
        owner_of = FileOwnership(
            partial(rank_in_file_name, ranks=ranks),
            our_ranks=frozenset(self._tasks),
            other_ranks=frozenset(task.rank for task in manifest.tasks) - frozenset(self._tasks),
            owns_unranked=context.identity.node_index == 0,
            sole_rank_of=partial(rank_in_file_name, ranks=ranks, sure=True),
        )
        shared = mount_of(str(manifest.run_dir), mounts)
        self._groups = []
        for group in manifest.groups:
            if group.pattern is not None:
                directory = str(manifest.directory(group))
                local = manifest.nodes > 1 and is_node_local(mount_of(directory, mounts), shared)
                owner = replace(owner_of, is_local=local)
                make = partial(
                    OutputWatch, directory, group.pattern, owner, self._start, gpu_metrics=manifest.gpu_metrics
                )
                handle = self._files.watch(f"outputs-{group.name}", make)
                self._groups.append(_OutputGroupWatch(group, directory, handle))
        status = manifest.run_dir / run_files.STATUS_DIR / f"{context.identity.node}.json"
        self._is_first = not status.exists()  # the first sidecar of this job on this node
        self._running_since: dict[int, float] = {}
        self._stop_detector = StopDetector(self.interval_s)
        self._stops = JobStops()
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def read(self) -> OutputsSnapshot:
        now = self._clock.time()
        if stopped_s := self._stop_detector.begin_read(self._clock.monotonic()):
            self._stops.add(now, stopped_s)
        running = self._processes.value.running  # workers that can no longer be read are taken to run on
        self._running_since = {rank: self._running_since.get(rank, now) for rank in running}
        results = self._files.poll([group.handle for group in self._groups], now)
        found = [self._update_group(group, result, now) for group, result in zip(self._groups, results, strict=True)]
        self._stop_detector.end_read(self._clock.monotonic())
        return OutputsSnapshot(tuple(facts for facts in found if facts is not None), tuple(self._events))

    def _update_group(
        self, group: _OutputGroupWatch, result: OutputReading | Exception, now: float
    ) -> OutputGroup | None:
        """Return the facts of a group; None if it cannot be read."""
        if isinstance(result, WatchHanging):
            return group.facts if self._files.clock.monotonic() - result.since < SLOW_S else None
        if isinstance(result, OSError):
            self._report_unreadable(group, None if isinstance(result, FileHelperEnded) else result.strerror, now)
            group.facts = None
        elif isinstance(result, Exception):
            self._report_unreadable(group, str(result), now)
            group.facts = None
        else:
            self._report_unreadable(group, result.unreadable, now)
            group.facts = self._group_facts(group, result, now)
        return group.facts

    def _group_facts(self, group: _OutputGroupWatch, reading: OutputReading, now: float) -> OutputGroup:
        begun = group.watch_id == reading.watch_id
        files = sum(owned.files for owned in reading.owners.values())
        size = sum(owned.bytes for owned in reading.owners.values())
        if not reading.complete:
            facts = OutputGroup(group=group.group.name, counting=True, files=files, bytes=size)
            return facts.replace(directory=printable(group.directory), pattern=group.group.pattern)
        growth = self._growth(group, reading, now, is_same_watch=begun)
        if group.group.name != CHECKPOINT:
            self._report_files(group, reading, now, is_same_watch=begun)
        group.watch_id = reading.watch_id
        owners = reading.owners.values()
        counted = [owned.records for owned in owners if owned.records is not None]
        return OutputGroup(
            group=group.group.name,
            directory=printable(group.directory),
            pattern=group.group.pattern,
            files=files,
            bytes=size,
            growth_bytes_per_second=growth,
            mtime=max((owned.newest_mtime for owned in owners if owned.newest_mtime is not None), default=None),
            records=sum(counted) if counted else None,
            stalled=self._is_stalled(group, reading, now),
            valid=not reading.invalid_files if reading.valid_files or reading.invalid_files else None,
            files_checked=reading.checked_files,
            files_invalid=reading.invalid_files,
            invalid=tuple(DamagedFile(*file) for file in reading.invalid),
            first_output=reading.first_file[0] if reading.first_file is not None else None,
            workers=self._workers(group, reading, now),
            passed_over=tuple(IgnoredFile(file=name, kind=kind) for name, kind in reading.passed_over),
            problem=reading.unreadable,
        )

    def _growth(
        self, group: _OutputGroupWatch, reading: OutputReading, now: float, *, is_same_watch: bool
    ) -> float | None:
        """Bytes per second, from the second reading of a watch on."""
        if not is_same_watch:
            group.growth = GroupGrowth()
        for change in reading.changes:
            group.growth.add_change(change.file, change.mtime, change.size, change.before, now)
        for owner, owned in reading.owners.items():
            group.growth.add_new_files(owner, owned.new_mtime, owned.new_bytes, now)
        return group.growth.per_second(now) if is_same_watch else None

    def _last_written(self, owned: OwnedOutput) -> float | None:
        """When the job last wrote one of these files, if known; by our own clock if we saw it."""
        if owned.changed_at is not None:
            return owned.changed_at
        if owned.newest_mtime is None or self._start is None or owned.newest_mtime < self._start - CLOCK_SLACK_S:
            return None
        return max(owned.newest_mtime, self._start)

    def _is_stalled(self, group: _OutputGroupWatch, reading: OutputReading, now: float) -> bool | None:
        """Whether writing to the group has stalled; emits an event on a change."""
        if group.group.name == CHECKPOINT:
            return None
        written = [last for owned in reading.owners.values() if (last := self._last_written(owned)) is not None]
        stalled = self._is_silent(max(written, default=None), min(self._running_since.values(), default=None), now)
        if bool(stalled) != group.is_stalled:
            group.is_stalled = bool(stalled)
            if self._running_since:  # else it is over, and not because the output goes on
                self._report_stall(group, now, stalled=group.is_stalled)
        return stalled

    def _is_silent(self, last_write: float | None, running_since: float | None, now: float) -> bool | None:
        """Whether a writer that runs has not written for the stall timeout; None before the first write.

        Time in which the job was stopped is no silence.
        """
        if last_write is None:
            return None
        if running_since is None:
            return False
        since = max(last_write, running_since)
        return now - since - self._stops.seconds_since(since) >= self._timeout_s

    def _workers(self, group: _OutputGroupWatch, reading: OutputReading, now: float) -> dict[int, WorkerOutput]:
        """Files of each worker, for its own series."""
        found: dict[int, WorkerOutput] = {}
        if group.group.name == CHECKPOINT:
            return found
        for rank, owned in sorted(reading.owners.items()):
            if rank not in self._tasks:
                continue
            last = self._last_written(owned) if owned.has_sole_writer else None
            stalled = self._is_silent(last, self._running_since.get(rank), now)
            if bool(stalled) != (rank in group.stalled_ranks):
                group.stalled_ranks ^= {rank}
                if not group.is_stalled and rank in self._running_since:
                    self._report_stall(group, now, stalled=bool(stalled), rank=rank)
            if owned.files:
                found[rank] = WorkerOutput(
                    files=owned.files,
                    bytes=owned.bytes,
                    mtime=owned.newest_mtime,
                    records=owned.records,
                    stalled=stalled,
                )
        return found

    def _report_stall(self, group: _OutputGroupWatch, now: float, *, stalled: bool, rank: int | None = None) -> None:
        text = f"nothing written for {self._timeout_s:g} s" if stalled else "writing has resumed"
        task = self._tasks.get(rank) if rank is not None else None
        event, level = ("output stalled", "warning") if stalled else ("output resumed", "info")
        self._event(group, now, level, event, text, task)

    def _report_files(
        self, group: _OutputGroupWatch, reading: OutputReading, now: float, *, is_same_watch: bool
    ) -> None:
        """Emit events for first, complete and damaged files."""
        if reading.first_file is not None and not group.has_output:
            # what existed before the first poll of a sidecar is news only if no earlier one can have told it
            if is_same_watch or (group.watch_id is None and self._is_first):
                self._event(group, reading.first_file[0], "info", "first output", reading.first_file[1])
            group.has_output = True
        if not is_same_watch:
            group.last_finished_number = 0
        for file in reading.finished:
            if file.number > group.last_finished_number:
                group.last_finished_number = file.number
                self._event(group, file.time, "info", "output complete", f"{file.file}, {file.bytes} bytes")
        damaged = {(file.file, file.reason) for file in reading.invalid}
        for name, reason in sorted(damaged - group.damaged):
            self._event(group, now, "critical", "output damaged", f"{name} {reason}")
        group.damaged = damaged

    def _report_unreadable(self, group: _OutputGroupWatch, problem: str | None, now: float) -> None:
        if problem is not None and problem != group.unreadable:
            self._event(group, now, "warning", "output unreadable", problem)
        group.unreadable = problem

    def _event(
        self, group: _OutputGroupWatch, time: float, level: str, event: str, detail: str, task: Task | None = None
    ) -> None:
        name = group.group.name
        self._events.append(
            Event(
                time=time,
                level=level,
                event=event,
                worker=None if task is None else task.worker,
                rank=None if task is None else task.rank,
                group=name,
                detail=detail if name == OUTPUT_GROUP else f"{name}: {detail}",
            )
        )

    def render(self, snapshot: OutputsSnapshot, out: Samples) -> None:
        for group in snapshot.groups:
            if group.counting:
                continue  # a count that rises would look like new files
            row = out.row(group=group.group)
            row.add(FILES, group.files)
            row.add(BYTES, group.bytes)
            row.add(GROWTH, group.growth_bytes_per_second)
            row.add(MTIME, group.mtime)
            row.add(RECORDS, group.records)
            row.add(VALID, group.valid)
            row.add(INVALID, None if group.valid is None else group.files_invalid)
            row.add(STALLED, group.stalled)
            for rank, facts in group.workers.items():
                worker = out.row(**worker_labels(self._tasks[rank]), group=group.group)
                worker.add(WORKER_BYTES, facts.bytes)
                worker.add(WORKER_RECORDS, facts.records)
                worker.add(WORKER_MTIME, facts.mtime)
                worker.add(WORKER_STALLED, facts.stalled)

    def describe(self, snapshot: OutputsSnapshot, parts: StatusParts) -> None:
        parts.outputs = snapshot.groups
        parts.events += snapshot.events
