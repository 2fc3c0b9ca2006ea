"""Launch checks of this node, repeated until they pass or the launch timeout ends."""

import time
from collections.abc import Callable, Mapping
from functools import partial

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract import run_files
from exporter.contract.clock import StopDetector
from exporter.contract.manifest import Task
from exporter.contract.status import CollectorReads, Launch, NodeGpus, NodeStatus, WorkerStatus
from exporter.contract.worker_names import rank_in_file_name
from exporter.launch.checks import (
    DEVICES_VARIABLES,
    LEVELS,
    NodeLaunchFacts,
    WorkerLaunchFacts,
    check_launch,
    is_launch_verified,
)
from exporter.launch.facts_reader import WriteWatch, read_file_size, read_open_gpus
from exporter.logs.lexicon_reader import compile_job_patterns
from exporter.logs.log_files_reader import find_extra_logs, log_paths
from exporter.logs.patterns import PatternKind
from exporter.machine.file_host import HANG_REPORT_S, WatchFailed, WatchHanging
from exporter.machine.procfs import read_environment

CHECK = Family(
    "launch_check",
    "Whether this launch check has passed on this node; absent while it may still pass, or when it does not apply.",
    labels=("check",),
)
VERIFIED = Family(
    "launch_verified",
    "Whether all required launch checks have passed on this node; once 1, it stays 1 for the attempt.",
)

POLL_S = 1.0
FINAL_INTERVAL_S = 60.0  # between two reads after the final result
LAST_POLLS, LAST_POLL_INTERVAL_S = 20, 0.05  # most polls for facts that are as recent as the end of the job
CLOCK_SLACK_S = 60.0  # most that the clock of a file server is behind
MOST_LATE_S = 60.0  # a sidecar that starts later after the job is a new one, or the clock was set in between

SOURCES = ("workers", "logs", "outputs")  # collectors that provide the facts


class LaunchCollector:
    """Checks the facts of the other collectors, from ``status``, and the few that no other collector reads."""

    name = "launch"
    families = (CHECK, VERIFIED)

    def __init__(self, context: CollectorContext, status: Callable[[], NodeStatus]) -> None:
        self._context = context
        self._status = status
        self._rank_of = partial(rank_in_file_name, ranks=context.manifest.ranks_of_roles())
        self._started_at: float | None = None
        self._began = 0.0  # the same on the monotonic clock, moved by the length of each stop of the job
        self._stops = StopDetector(POLL_S)
        self._first_seen: dict[tuple[int, int], float] = {}  # by rank and run, monotonic clock
        self._last_snapshot = Launch()  # final: no further read follows
        self._open_gpu_counts: dict[
            int, int
        ] = {}  # GPUs that a process has open, by pid; not read again when it has some
        manifest = context.manifest
        # Without a pattern, an attached job has its working directory here, since its output is unknown.
        groups = [g for g in manifest.groups if g.name == "output" and (g.pattern or not manifest.attached)]
        self._directory = manifest.directory(groups[0]) if groups else None
        self._write_watch = (
            None
            if self._directory is None
            else context.files.watch("launch-output", partial(WriteWatch, str(self._directory)))
        )

    @property
    def interval_s(self) -> float:
        return FINAL_INTERVAL_S if self._last_snapshot.final else POLL_S

    def read(self) -> Launch:
        if self._started_at is None:
            self._begin()
        if not self._last_snapshot.final:
            clock = self._context.clock
            self._began += self._stops.begin_read(clock.monotonic())
            self._last_snapshot = self._poll(clock.time())
            self._stops.end_read(clock.monotonic())
        return self._last_snapshot

    def _begin(self) -> None:
        """Note when the launch began, and take over the results of an earlier sidecar."""
        manifest, identity, clock = self._context.manifest, self._context.identity, self._context.clock
        now = clock.time()
        self._started_at = now if manifest.attached or identity.start is None else identity.start
        late_s = now - self._started_at
        self._began = clock.monotonic() - (late_s if 0.0 < late_s <= MOST_LATE_S else 0.0)
        if manifest.attached:
            return  # each attachment is a separate launch
        known = NodeStatus.read_valid(manifest.run_dir / run_files.STATUS_DIR / f"{identity.node}.json")
        if known is not None and known.attempt == identity.attempt:
            self._last_snapshot = known.launch

    def _poll(self, now: float) -> Launch:
        manifest, before = self._context.manifest, self._last_snapshot
        status = self._status()
        over = status.job.phase in ("completing", "finished")
        if over:
            status = self._status_since(now)
        if not all(_has_read(status.collectors.get(name)) for name in SOURCES):
            return before  # facts that have not been read yet do not count as missing
        entries = {worker.rank: worker for worker in status.workers}
        logs = find_extra_logs(manifest, self._rank_of)
        workers = [
            self._worker_facts(task, entries.get(task.rank), logs, now, status.gpus or NodeGpus())
            for task in self._context.tasks
            if not task.later
        ]
        elapsed_s = self._context.clock.monotonic() - self._began
        found = check_launch(
            workers,
            self._node_facts(status, is_last=over or elapsed_s >= manifest.launch_timeout_s),
            elapsed_s=elapsed_s,
            launch_timeout_s=manifest.launch_timeout_s,
            is_over=over,
        )
        checks = {check.name: check for check in found}
        if before.verified:  # a worker that ends later was launched, and has its own alerts
            checks.update((check.name, check) for check in before.checks if check.level == "issue")
        return Launch(
            verified=before.verified or is_launch_verified(found),
            final=over or all(check.passed for check in checks.values()) or elapsed_s >= manifest.launch_timeout_s,
            checks=tuple(checks[name] for name in LEVELS if name in checks),
        )

    def _status_since(self, earliest: float) -> NodeStatus:
        """Status with a read of the workers after ``earliest``, or the latest after about a second."""
        for _ in range(LAST_POLLS):
            status = self._status()
            reads = status.collectors.get("workers")
            began = (reads.last_success or 0.0) - (reads.duration_s or 0.0) if reads is not None else earliest
            if began >= earliest - LAST_POLL_INTERVAL_S:
                break
            time.sleep(LAST_POLL_INTERVAL_S)
        return status

    def _worker_facts(
        self, task: Task, entry: WorkerStatus | None, extra: Mapping[int, list[str]], now: float, gpus: NodeGpus
    ) -> WorkerLaunchFacts:
        identity, manifest = self._context.identity, self._context.manifest
        entry = entry or WorkerStatus(worker=task.worker, rank=task.rank)
        pid, start, ended = entry.pid, entry.start, entry.exit
        monotonic = self._context.clock.monotonic()
        first_seen = self._first_seen.setdefault((task.rank, entry.restarts), monotonic)
        reason = None if ended is None else ended.reason
        listed: dict[str, str] | None = None  # devices by variable; None if its environment is unknown
        opened = None
        # Only a process that is visible here has a known resident memory; any other pid may belong to another process.
        if pid is not None and entry.rss_bytes is not None and (task.gpus or not manifest.attached):
            # CUDA ignores the lists for AMD, which Slurm sets as well unless gres.conf names the vendor
            variables = DEVICES_VARIABLES[:1] if gpus.vendor == "nvidia" else DEVICES_VARIABLES
            listed = read_environment(pid, variables, self._context.proc)
        variable = next((name for name in DEVICES_VARIABLES if name in (listed or {})), DEVICES_VARIABLES[0])
        # Prefer the driver's report of GPU use, also for an ended worker, to the opened devices.
        uses = entry.gpu_use if gpus.driver_state == "ok" and task.gpus else None
        if uses is not None:
            opened = len(uses)
        elif task.gpus and pid is not None and entry.rss_bytes is not None:
            opened = self._count_open_gpus(pid)
        paths = log_paths(task, manifest.run_dir, identity.node, identity.attempt, entry.restarts)
        sizes = [size for path in {*paths, *extra.get(task.rank, [])} if (size := read_file_size(path)) is not None]
        return WorkerLaunchFacts(
            worker=task.worker,
            rank=task.rank,
            gpus=task.gpus,
            visible_gpus=task.visible_gpus,
            critical=task.critical,
            service=task.service,
            pid=pid,
            started=pid is not None or reason not in (None, "launch_failed"),
            up=entry.up,
            age_s=None if start is None else max(now - start, monotonic - first_seen),
            reason=reason,
            evidence="" if ended is None else "; ".join(ended.evidence),
            devices=(listed or {}).get(variable),
            devices_variable=variable,
            devices_unset=listed == {},
            misplaced=entry.gpu_misplaced,
            device_files=opened,
            log_files=len(sizes) if task.logs or manifest.logs is not None else None,
            log_bytes=sum(sizes),
            items=entry.items,
        )

    def _count_open_gpus(self, pid: int) -> int | None:
        if not self._open_gpu_counts.get(pid):
            opened = read_open_gpus(pid, self._context.proc)
            if opened is not None:
                self._open_gpu_counts[pid] = opened
        return self._open_gpu_counts.get(pid)

    def _node_facts(self, status: NodeStatus, *, is_last: bool) -> NodeLaunchFacts:
        manifest = self._context.manifest
        reported = next((found for found in status.outputs if found.group == "output" and not found.counting), None)
        files = None
        # On a shared file system a node counts only its own workers' files; the first node also counts all others.
        if reported is not None and self._context.identity.node_index == 0:
            fresh = reported.mtime is not None and reported.mtime >= (self._started_at or 0.0) - CLOCK_SLACK_S
            files = reported.files if fresh or manifest.attached else 0
        if not files and all(task.service or task.later for task in manifest.tasks):
            files = None  # their writer, such as a benchmark, has not started yet
        # Tasks that start after the launch, such as a benchmark, do not count.
        later = {task.rank for task in manifest.tasks if task.later}
        known = any(worker.items is not None for worker in status.workers if worker.rank not in later)
        return NodeLaunchFacts(
            output_dir=str(self._directory) if self._directory is not None else None,
            output_problem=self._output_problem(is_last=is_last),
            output_files=files,
            expects_progress=known
            or manifest.total_items is not None
            or any(pattern.kind is PatternKind.POSITION for pattern in compile_job_patterns(manifest.progress)),
            has_gpus=any(task.gpus for task in manifest.tasks),
            sets_devices=not manifest.attached,
        )

    def _output_problem(self, *, is_last: bool) -> str | None:
        """Why the job cannot write its output, or None. The last result stays: only for it is a hang waited out."""
        if self._write_watch is None:
            return None
        files = self._context.files
        (found,) = files.poll([self._write_watch], self._context.clock.time())
        if is_last and isinstance(found, WatchHanging):
            try:
                found = self._write_watch.result(max(0.0, found.since + HANG_REPORT_S - files.clock.monotonic()))
            except (WatchHanging, WatchFailed, OSError) as error:
                found = error
        if isinstance(found, WatchHanging):
            return f"{self._directory} does not answer: its file system, {found.mount or 'which is not known,'} hangs"
        if isinstance(found, Exception):
            raise found
        problem: str | None = found
        return problem

    def render(self, launch: Launch, out: Samples) -> None:
        for check in launch.checks:
            out.add(CHECK, None if check.passed is None else int(check.passed), check=check.name)
        out.add(VERIFIED, int(launch.verified))

    def describe(self, launch: Launch, parts: StatusParts) -> None:
        parts.launch = launch


def _has_read(reads: CollectorReads | None) -> bool:
    """Whether a collector has finished a read or hangs; true for one that does not exist."""
    return reads is None or reads.duration_s is not None or reads.overdue
