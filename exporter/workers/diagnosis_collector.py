"""Writes a diagnosis when a worker fails or stalls, while its processes and files can still be read."""

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract import run_files
from exporter.contract.manifest import Task
from exporter.contract.process_identity import read_start_ticks
from exporter.contract.status import NodeStatus, ProcessDetails, WorkerStatus
from exporter.contract.worker_names import rank_in_file_name
from exporter.logs.log_files_reader import find_extra_logs
from exporter.logs.packs_reader import read_error_patterns
from exporter.machine.job_processes import find_leftover_processes
from exporter.machine.python_stacks import find_py_spy, python_processes, read_stacks
from exporter.workers.diagnosis import (
    Diagnosis,
    NodeSituation,
    RecentSamples,
    RunFiles,
    build_failure_diagnosis,
    build_stall_diagnosis,
)
from exporter.workers.diagnosis_reader import has_diagnosis, read_run_files, write_diagnosis
from exporter.workers.diagnosis_text import render_diagnosis
from exporter.workers.exit_reason import CONSEQUENCES
from exporter.workers.runs_reader import StartRecord, present_start

READ_INTERVAL_S = 1.0
WORKERS = "workers"  # collector of the runs in the status
STACK_PEERS = 4  # other workers of this node whose stacks are read
STACKS_OF_WORKER = 2
STACKS_TIMEOUT_S = 2.0

NO_PY_SPY = {"workers of this node": "no stack: py-spy is not installed"}

log = logging.getLogger("gpujob.diagnostics")

DiagnosisBuilder = Callable[[RunFiles, NodeSituation], Diagnosis]


class DiagnosticsCollector:
    """Finds workers that failed or stalled in the status of its own sidecar.

    It is not in the register of collectors: it has no series, and it writes to a run directory that may hang.
    """

    name = "diagnostics"
    interval_s = READ_INTERVAL_S
    families: tuple[Family, ...] = ()

    def __init__(self, context: CollectorContext, status: Callable[[], NodeStatus]) -> None:
        self._context = context
        self._status = status
        self._tasks = {task.rank: task for task in context.tasks}
        self._recent_samples: dict[tuple[int, int], RecentSamples] = {}  # by rank and restart
        self._details: dict[tuple[int, int], ProcessDetails] = {}
        self._diagnosed_runs: dict[int, set[int]] = {}  # by rank: those whose ends are in the status
        self._diagnosed = 0
        # Restart and items processed of each worker at its last stall, by rank: the time of its last progress moves
        # with a set clock or a suspension, and more time may be granted without progress.
        self._diagnosed_stalls: dict[int, tuple[int, float | None]] = {}
        self._is_disk_full = False

    def read(self) -> int:
        """Diagnose new failures and stalls; return the number of failed runs diagnosed so far."""
        status = self._status()
        reads = status.collectors.get(WORKERS)
        if reads is not None and not reads.success:
            return self._diagnosed  # the status has no runs
        fresh = []
        for worker in status.workers:
            task = self._tasks.get(worker.rank)
            if task is not None:
                self._record_sample(worker, status)
                fresh += [(task, *new) for new in self._find_new(worker)]
        if fresh:
            self._diagnose(status, fresh)
        return self._diagnosed

    def _record_sample(self, worker: WorkerStatus, status: NodeStatus) -> None:
        run = worker.rank, worker.restarts
        if worker.details is not None:
            self._details[run] = worker.details
        if not worker.up:
            return
        if run not in self._recent_samples:
            for old in [old for old in self._details.keys() | self._recent_samples if _is_long_ago(old, run)]:
                self._recent_samples.pop(old, None)
                self._details.pop(old, None)
            self._recent_samples[run] = RecentSamples()
        self._recent_samples[run].add(worker, status)

    def _find_new(self, worker: WorkerStatus) -> Iterator[tuple[int, DiagnosisBuilder]]:
        """Runs that failed or stalled since the last read, each with its diagnosis builder."""
        rank = worker.rank
        failed = {ended.restart or 0: ended for ended in worker.exits if ended.reason not in CONSEQUENCES}
        known = self._diagnosed_runs.get(rank, set())
        self._diagnosed_runs[rank] = set(failed)
        for restart in failed.keys() - known:
            self._diagnosed += 1
            yield restart, partial(build_failure_diagnosis, ended=failed[restart], errors=read_error_patterns())
        stall = worker.restarts, worker.items_processed
        if worker.stalled and worker.up and stall != self._diagnosed_stalls.get(rank):
            self._diagnosed_stalls[rank] = stall
            since = worker.last_progress
            yield worker.restarts, partial(build_stall_diagnosis, since=since, errors=read_error_patterns())

    def _diagnose(self, status: NodeStatus, fresh: list[tuple[Task, int, DiagnosisBuilder]]) -> None:
        """Diagnose one run after the other: the files and samples of all together would be the peak of the memory."""
        with_stacks = find_py_spy() is not None
        written = []
        for task, restart, build in fresh:
            diagnosis, has_samples = self._build(status, task, restart, build, {} if with_stacks else NO_PY_SPY)
            if has_samples or not has_diagnosis(self._context.manifest.run_dir, diagnosis):
                self._write(diagnosis)
                written.append((task, restart, build))
            # else it is by an earlier sidecar, which had the samples before the end
        if not written or not with_stacks:
            return
        # Write all files first: stacks take seconds, which a stopping node may not have.
        stacks = self._read_stacks(status, {task.rank for task, _, _ in fresh})
        for task, restart, build in written:
            diagnosis, _ = self._build(status, task, restart, build, stacks)
            self._write(diagnosis)

    def _build(
        self, status: NodeStatus, task: Task, restart: int, build: DiagnosisBuilder, stacks: Mapping[str, str]
    ) -> tuple[Diagnosis, bool]:
        """The diagnosis of a run, and whether it has samples from before the end."""
        recent = self._recent_samples.get((task.rank, restart))
        samples = [] if recent is None else recent.samples()
        situation = NodeSituation(status.time, status, samples, self._details.get((task.rank, restart)), stacks)
        return build(self._read_files(task, restart), situation), bool(samples)

    def _read_files(self, task: Task, restart: int) -> RunFiles:
        context = self._context
        manifest, identity = context.manifest, context.identity
        rank_of = partial(rank_in_file_name, ranks=manifest.ranks_of_roles())
        record = self._start_record(task.worker, task.rank, restart)
        since = present_start(record.start, record.start_ticks, context.clock)
        more = find_extra_logs(manifest, rank_of, since, [task.rank]).get(task.rank, ())
        return read_run_files(manifest, task, identity.node, identity.attempt, restart, more)

    def _read_stacks(self, status: NodeStatus, ranks: set[int]) -> dict[str, str]:
        """Python stacks of what is left of these workers, and of some running peers."""
        proc, job_id = self._context.proc, self._context.identity.job_id
        wanted: dict[int, str] = {}
        others = 0
        for worker in sorted(status.workers, key=lambda worker: worker.rank not in ranks):
            task = self._tasks.get(worker.rank)
            if task is None or worker.pid is None:
                continue
            if worker.up and (task.rank in ranks or others < STACK_PEERS):
                others += task.rank not in ranks
                roots, what = [worker.pid] if self._is_recorded_process(worker.pid, worker) else [], ""
            elif not worker.up and task.rank in ranks:
                roots, what = sorted(find_leftover_processes(job_id, task.rank, proc)), ", left over"
            else:
                continue
            pids = list(dict.fromkeys(pid for root in roots for pid in python_processes(root, STACKS_OF_WORKER, proc)))
            for pid in pids[:STACKS_OF_WORKER]:
                wanted[pid] = f"{task.worker} (rank {task.rank}{what}), pid {pid}"
        found = read_stacks(list(wanted), STACKS_TIMEOUT_S)
        return {wanted[pid]: text for pid, text in found.items()}

    def _is_recorded_process(self, pid: int, worker: WorkerStatus) -> bool:
        """Whether the recorded pid is this worker in our pid namespace, not an unrelated process."""
        known = self._start_record(worker.worker, worker.rank, worker.restarts).start_ticks
        return known is None or known == read_start_ticks(pid, self._context.proc)

    def _start_record(self, worker: str, rank: int, restart: int) -> StartRecord:
        """The start record of a run; empty if there is none."""
        name = run_files.record_name(worker, rank, self._context.identity.attempt, restart)
        path = f"{self._context.manifest.run_dir}/{run_files.WORKERS_DIR}/{name}.start.json"
        return StartRecord.read_valid(path) or StartRecord()

    def _write(self, found: Diagnosis) -> None:
        try:
            write_diagnosis(self._context.manifest.run_dir, found, render_diagnosis(found))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not (full and self._is_disk_full):
                log.warning("the diagnosis of %s cannot be written: %s", found.worker, error.strerror)
            self._is_disk_full = self._is_disk_full or full

    def render(self, snapshot: int, out: Samples) -> None:
        """Render nothing: the diagnoses are files."""

    def describe(self, snapshot: int, parts: StatusParts) -> None:
        """Add nothing."""


def _is_long_ago(old: tuple[int, int], run: tuple[int, int]) -> bool:
    """Whether a run is of the same rank and before the previous one."""
    return old[0] == run[0] and old[1] < run[1] - 1
