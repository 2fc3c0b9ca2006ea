"""The runs of one worker, from start record to exit reason."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, reduce
from signal import SIGKILL
from typing import NamedTuple

from exporter.collecting.collector import CollectorContext
from exporter.contract import run_files
from exporter.contract.clock import Clock
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from exporter.contract.process_identity import read_pid_namespace, read_start_ticks
from exporter.contract.records import Record
from exporter.contract.status import ProcessDetails
from exporter.contract.worker_names import rank_in_file_name
from exporter.logs.lexicon_reader import lexicon_of_job
from exporter.logs.log_files_reader import find_extra_logs, log_paths, read_last_bytes
from exporter.logs.log_starts_reader import LogStartFinder, read_log_starts
from exporter.machine.job_processes import find_leftover_processes
from exporter.machine.process_tree import ProcessTree, ProcessTreeSample
from exporter.machine.procfs import CLOCK_TICKS
from exporter.workers.exit_facts_reader import NodeFacts
from exporter.workers.exit_reason import (
    CONSEQUENCES,
    SHELL_KILL,
    ExitEvidence,
    FailedPeer,
    JobStop,
    awaits_notice,
    awaits_oom_victim,
    evidence_from_record,
    failed_peer,
    find_exit_reason,
    needs_log_evidence,
    parse_job_stop,
    signal_name,
)
from exporter.workers.log_evidence import log_evidence
from exporter.workers.run_totals import NO_EXITS, NO_USAGE, ExitTotals, RunUsage, WorkerExit, recorded_usage

NO_RECORD_GRACE_S = 3.0  # time for the exit record of an ended process to appear
NOTICE_GRACE_S = 3.0  # time for the launcher's notice to appear after a signal from outside or the loss of a peer
STATUS_GRACE_S = 1.0  # time for the kernel to report the status of a process that is not our child
LOG_TAIL_BYTES = 64 * 1024
DETAILS_EVERY_S = 30.0  # between reads of costly values: proportional memory, open files, context switches
QUICK_END_S = 10.0  # a worker that ends sooner may have moved itself into the background

Facts = Mapping[str, object]  # of a run, as in its exit record
EventSink = Callable[[float | None, str, str, Task, str], None]  # sink of events: time, level, kind, task, detail


class StartRecord(Record):
    """Start of one run, from its wrapper or from the search for workers of others."""

    pid: int | None = None
    start: float | None = None
    start_ticks: int | None = None
    found_by: str | None = None
    pid_namespace: int | None = None
    wrapper_pid: int | None = None
    wrapper_start_ticks: int | None = None


class ExitStatus(NamedTuple):
    """Status of an ended process; all unknown if nothing is known of it."""

    code: int | None = None
    signal: int | None = None
    core: bool = False


@dataclass(frozen=True)
class WorkerReading:
    """One worker at one read."""

    task: Task
    up: bool
    state: str
    pid: int | None = None
    start: float | None = None
    restart: int = 0
    sample: ProcessTreeSample | None = None
    details: ProcessDetails | None = None
    found_by: str | None = None
    usage: RunUsage = NO_USAGE  # of all runs
    exits: ExitTotals = NO_EXITS


@dataclass
class _WorkerRun:
    """One run of one worker."""

    restart: int
    pid: int | None = None
    start: float | None = None
    start_ticks: int | None = None
    found_by: str | None = None
    visible: bool = True  # false in another pid namespace, where its pid means nothing
    session: int | None = None
    tree: ProcessTree | None = None
    pids: frozenset[int] = frozenset()  # the worker and its descendants as last found
    # Pid and start of the wrapper while it exists and may still write a record.
    wrapper: tuple[int, int | None] | None = None
    is_wrapper_watched: bool = False  # whether the kernel notifies us of the wrapper's end
    sample: ProcessTreeSample | None = None
    recorded: RunUsage = NO_USAGE  # of a run that ended before it was read, as before the start of this sidecar
    details: ProcessDetails | None = None
    details_due: float = 0.0
    gone_since: float | None = None
    has_exit_record: bool = False  # its exit record exists, though its reason may wait for a notice
    ended: WorkerExit | None = None

    @property
    def usage(self) -> RunUsage:
        """Usage as of the last read."""
        if self.sample is None:
            return self.recorded
        details, sample = self.details or ProcessDetails(), self.sample
        switches = details.voluntary_switches, details.involuntary_switches
        return RunUsage(sample.cpu_s, sample.io_read_bytes, sample.io_write_bytes, *switches)


class RunEnd(NamedTuple):
    """The end of a run that has no exit reason yet."""

    worker: "WorkerRuns"
    run: _WorkerRun
    record: Facts
    evidence: ExitEvidence  # according to the record
    time: float
    may_get_notice: bool  # whether the launcher's notice of a stop may still appear


class WorkerRuns:
    """All runs of one worker of this node."""

    def __init__(
        self,
        context: CollectorContext,
        task: Task,
        node: NodeFacts,
        log_starts: LogStartFinder,
        log_event: EventSink,
    ) -> None:
        self.task = task
        self._context, self._node, self._log_starts = context, node, log_starts
        self._log_event = log_event
        self._folder = str(context.manifest.run_dir / run_files.WORKERS_DIR)
        self._runs: list[_WorkerRun] = []  # the latest one, and earlier ones that have not ended
        self._next_restart = 0
        self._exits, self._earlier_usage = NO_EXITS, NO_USAGE
        self._rank_of = partial(rank_in_file_name, ranks=context.manifest.ranks_of_roles())
        self._ranks_of_node = {each.rank for each in context.tasks}
        self._pid_namespace = read_pid_namespace(context.proc)

    def failures(self) -> list[FailedPeer]:
        """Last failures of this worker, as evidence for its peers."""
        return [
            failed_peer(self.task, end.end, end.reason, killed=end.signal == SIGKILL or end.code == SHELL_KILL)
            for end in self._exits.last
            if end.reason not in CONSEQUENCES
        ]

    @property
    def pids(self) -> frozenset[int]:
        """Processes of its latest run as last found; empty after that has ended."""
        return self._runs[-1].pids if self._runs and self._runs[-1].ended is None else frozenset()

    def poll(self, stop: JobStop | None, now: float, *, fresh: bool = True) -> list[RunEnd]:
        """Update every run that has not ended, and return new ends, for `judge`.

        ``fresh``: whether new records may exist since the last read.
        """
        # By name, not by listing: the directory contains the records of all nodes. Ours are written on this node, so
        # even a network file system shows them immediately.
        while fresh and any(os.path.exists(self._record_path(self._next_restart, kind)) for kind in ("start", "exit")):
            self._runs.append(_WorkerRun(self._next_restart))
            self._next_restart += 1
        for run in self._runs[:-1]:
            if run.ended is not None:
                self._earlier_usage = self._earlier_usage.plus(run.usage)
                self._runs.remove(run)
        polled = [self._poll_run(run, stop, now, fresh=fresh) for run in self._runs if run.ended is None]
        return [end for end in polled if end is not None]

    def facts(self) -> WorkerReading:
        """The worker as of the last read."""
        if not self._runs:
            return WorkerReading(self.task, up=False, state="not_found")
        last = self._runs[-1]
        alive = last.ended is None and last.gone_since is None and not last.has_exit_record
        if not alive:
            zombie = last.ended is None and last.sample is not None and last.sample.state == "zombie"
            state = "zombie" if zombie else "dead"
        else:
            state = last.sample.state if last.sample is not None else "running"
        return WorkerReading(
            self.task,
            up=alive and state not in ("zombie", "dead"),
            state=state,
            pid=last.pid,
            start=last.start,
            restart=last.restart,
            sample=last.sample if alive else None,
            details=last.details,
            found_by=last.found_by,
            usage=reduce(RunUsage.plus, (run.usage for run in self._runs), self._earlier_usage),
            exits=self._exits,
        )

    def _record_path(self, restart: int, kind: str) -> str:
        # no `Path`: each one interns its name, and these are looked for all the time
        stem = run_files.record_name(self.task.worker, self.task.rank, self._context.identity.attempt, restart)
        return f"{self._folder}/{stem}.{kind}.json"

    # -- while it runs -----------------------------------------------------------------------------

    def _start_watching(self, run: _WorkerRun, now: float) -> None:
        record = StartRecord.read_valid(self._record_path(run.restart, "start"))
        if record is None or record.pid is None:
            return
        pid, run.start, run.found_by, run.start_ticks = record.pid, record.start, record.found_by, record.start_ticks
        run.visible = record.pid_namespace is None or self._pid_namespace in (None, record.pid_namespace)
        if run.visible:
            try:
                run.tree = self._open_process(pid, run.start_ticks)
            except OSError:
                return  # no free file descriptor: tried again at the next read
            run.details_due = now + 2.0 + self.task.rank % DETAILS_EVERY_S  # spread over time, not all workers together
            run.session = _read_session_id(pid)
            if record.wrapper_pid is not None:
                wrapper = record.wrapper_pid, record.wrapper_start_ticks
                with contextlib.suppress(ProcessLookupError):
                    run.is_wrapper_watched = self._context.exits.watch(*wrapper)
                    run.wrapper = wrapper
        if run.start is not None:
            with contextlib.suppress(OSError):  # a full disk
                self._log_starts.save(self.task, run.start, self._record_path(run.restart, "logs"))
        run.pid = pid
        what = "worker restarted" if run.restart else "worker started"
        self._log_event(run.start, "info", what, self.task, f"pid {pid}")

    def _open_process(self, pid: int, start_ticks: int | None) -> ProcessTree | None:
        """Open the process and watch for its end; None if it has ended or the pid was reused."""
        try:
            tree = ProcessTree(pid, start_ticks, self._context.proc)
        except ProcessLookupError:
            return None
        with contextlib.suppress(ProcessLookupError):  # it has just ended: the next read shows it
            self._context.exits.watch(pid, tree.start_ticks)
        return tree

    def _poll_run(self, run: _WorkerRun, stop: JobStop | None, now: float, *, fresh: bool) -> RunEnd | None:
        """Update one run; its end if that is known, unless a notice that may explain it is still expected."""
        if run.pid is None:
            self._start_watching(run, now)
        silent = run.wrapper is not None and not self._is_wrapper_running(run)  # before reading its record
        record = (
            run_files.read_json(self._record_path(run.restart, "exit"))
            if fresh or silent or run.has_exit_record
            else None
        )
        if record is None and self._is_running(run, now):
            return None
        if record is None and not fresh:
            record = run_files.read_json(self._record_path(run.restart, "exit"))
        if record is None and run.visible and run.pid is not None:
            if run.gone_since is None:
                ending = self._context.exits.find_end(run.pid, run.tree.start_ticks if run.tree else None)
                run.gone_since = ending.time if ending is not None else now
            if not self._is_replaced_by_descendant(run, now):
                record = self._record_from_kernel(run, run.pid, now - run.gone_since, has_wrapper_ended=silent)
        if record is None:
            return None
        run.has_exit_record = True
        of_worker = parse_job_stop(
            run_files.read_json(self._record_path(run.restart, "stop")) or {}
        )  # stopped with its peers only
        notice = of_worker or stop
        stop = None if notice is None or notice.was_caused_by(self.task.rank, run.restart) else notice
        recorded = evidence_from_record(record, stop)
        is_recent = recorded.end is not None and abs(now - recorded.end) < NOTICE_GRACE_S
        may_get_notice = notice is None and is_recent and not self._context.manifest.attached
        if may_get_notice and (recorded.forwarded or recorded.source == "kernel"):
            return None
        return RunEnd(self, run, record, recorded, recorded.end if recorded.end is not None else now, may_get_notice)

    def _is_running(self, run: _WorkerRun, now: float) -> bool:
        """Read its processes; a zombie that is not reaped has ended."""
        if run.tree is None:
            return False
        sample = run.tree.read()
        if sample is None:
            return False
        run.sample = sample
        if sample.state == "zombie":
            return False
        run.pids = run.tree.pids
        if now >= run.details_due:
            run.details = run.tree.read_details()
            run.details_due = now + DETAILS_EVERY_S
        return True

    def _is_replaced_by_descendant(self, run: _WorkerRun, now: float) -> bool:
        """Whether a worker of an attached job has daemonised and continues in a descendant.

        A process that briefly outlives a killed worker does not count, nor does a helper that outlives one that ran for
        long, such as a TensorBoard.
        """
        if not self._context.manifest.attached or run.tree is None or run.pid is None:
            return False
        if not _has_ended_soon(run.start, run.gone_since):
            return False
        ended = run.pid, run.tree.start_ticks
        status = self._wait_status(*ended)
        for pid in run.tree.survivors():
            if status != 0 and (status is not None or _read_session_id(pid) == run.session):
                continue
            if run.tree.follow(pid):
                self._log_event(
                    now, "info", "worker daemonised", self.task, f"pid {run.pid} has ended, pid {pid} continues"
                )
                self._context.exits.drop(*ended)
                with contextlib.suppress(ProcessLookupError):  # it has just ended: the next read shows it
                    self._context.exits.watch(pid, run.tree.start_ticks)
                run.pid, run.gone_since = pid, None
                return True
        return False

    # -- its end -------------------------------------------------------------------------------------

    def _record_from_kernel(
        self, run: _WorkerRun, pid: int, waited_s: float, *, has_wrapper_ended: bool
    ) -> dict[str, object] | None:
        """Record of a run that left none, from the kernel; None while one may still appear.

        ``has_wrapper_ended``: whether the wrapper is known to have ended.
        """
        attached = self._context.manifest.attached
        if not attached and not has_wrapper_ended and (run.wrapper is not None or waited_s <= NO_RECORD_GRACE_S):
            return None
        status = self._wait_status(pid, run.tree.start_ticks if run.tree else run.start_ticks)
        if status is None and attached and run.tree is not None and waited_s <= STATUS_GRACE_S:
            return None
        record: dict[str, object] = {
            "schema": run_files.RECORD_SCHEMA,
            "worker": self.task.worker,
            "rank": self.task.rank,
            "pid": pid,
            "start": run.start,
            "end": run.gone_since,
            "source": "kernel",
            **_exit_status(status)._asdict(),
        }
        if run.wrapper is not None:
            number = _exit_status(self._wait_status(*run.wrapper)).signal
            record["wrapper"] = f"was killed by {signal_name(number)}" if number is not None else "has ended"
        with contextlib.suppress(OSError):  # a full disk: the result is valid without the file
            run_files.write_json_if_absent(self._record_path(run.restart, "exit"), record)
        return record

    def _wait_status(self, pid: int, start_ticks: int | None) -> int | None:
        return self._context.exits.status(pid, start_ticks)

    def _is_wrapper_running(self, run: _WorkerRun) -> bool:
        if run.wrapper is None:
            return False
        pid, start_ticks = run.wrapper
        if self._context.exits.find_end(pid, start_ticks) is not None:
            return False
        if run.is_wrapper_watched:
            return True
        found = read_start_ticks(pid, self._context.proc)
        return found is not None and start_ticks in (None, found)

    def with_evidence(self, end: RunEnd) -> RunEnd:
        """Add what node and logs say of an end. Takes long, so it comes after the poll of all workers."""
        run, record, recorded = end.run, end.record, end.evidence
        if run.tree is not None:
            run.sample = run.tree.read() or run.sample
        if run.sample is None and run.visible:
            run.recorded = recorded_usage(record)
        start = record.get("start")
        if run.start is None and isinstance(start, float):
            run.start = start
        earlier = run_files.read_json(self._record_path(run.restart, "found")) or {}  # from an earlier sidecar
        record = {**earlier, **record, **self._save_node_facts(run, recorded, earlier)}
        evidence = replace(
            evidence_from_record(record, recorded.stop),
            follows_stop=recorded.stop is not None and recorded.stop.rank not in self._ranks_of_node,
            node=self._context.identity.node,
            job_end=self._context.limit_end,
            attached=self._context.manifest.attached,
        )
        if needs_log_evidence(evidence):
            ends = self._read_log_ends(run.restart, present_start(run.start, run.start_ticks, self._context.clock))
            evidence = replace(evidence, log=log_evidence(ends, lexicon_of_job(self._context.manifest)))
        return end._replace(evidence=evidence)

    def judge(self, end: RunEnd, peers: Iterable[FailedPeer], *, may_await_victim: bool) -> bool:
        """Find the reason of an end from its evidence and the failures of other workers.

        False if it waits for the end of a peer that may explain it, or for the notice of one on another node.
        """
        run, evidence = end.run, end.evidence.with_peers(peers, self.task.node_index)
        if may_await_victim and len(self._context.tasks) > 1 and awaits_oom_victim(evidence):
            return False
        if end.may_get_notice and awaits_notice(evidence):
            return False
        self._stop_watching(run)
        result = find_exit_reason(evidence)
        run.ended = WorkerExit(run.restart, evidence.code, evidence.signal, end.time, result.reason, result.evidence)
        self._exits = self._exits.plus(run.ended)
        level = "info" if result.reason == "completed" else "critical"
        self._log_event(end.time, level, "worker ended", self.task, f"{result.reason}: {'; '.join(result.evidence)}")
        return True

    def _save_node_facts(self, run: _WorkerRun, evidence: ExitEvidence, earlier: Facts) -> Facts:
        """Facts that only this node can see, saved for the report in addition to the exit record.

        They are merged with ``earlier``, the facts from an earlier sidecar.
        """
        found: Facts = {}
        pids = run.pids | ({run.pid} if run.pid is not None else set())
        since = present_start(run.start, run.start_ticks, self._context.clock) or 0.0
        if evidence.code != 0:
            found = {**self._node.oom_facts(pids, since), **self._node.gpu_facts(self.task, pids, since)}
        elif run.visible and (left := self._count_background_processes(run, evidence)):
            found = {"survivors": left}
        if found:
            with contextlib.suppress(OSError):  # a full disk
                run_files.write_json(
                    self._record_path(run.restart, "found"), {**earlier, "schema": run_files.RECORD_SCHEMA, **found}
                )
        return found

    def _count_background_processes(self, run: _WorkerRun, evidence: ExitEvidence) -> int:
        """Number of processes left in the background; those of its own session do not count, they end with it."""
        left = {pid for pid in (run.tree.survivors() if run.tree else ()) if _read_session_id(pid) != run.session}
        if _has_ended_soon(run.start, evidence.end):
            left |= (
                find_leftover_processes(self._context.identity.job_id, self.task.rank, self._context.proc) - run.pids
            )
        return len(left)

    def _stop_watching(self, run: _WorkerRun) -> None:
        """Stop watching its processes."""
        if run.pid is not None:
            self._context.exits.drop(run.pid, run.tree.start_ticks if run.tree else None)
        if run.wrapper is not None:
            self._context.exits.drop(*run.wrapper)
            run.wrapper = None
        if run.tree is not None:
            run.tree.close()
            run.tree = None

    def _read_log_ends(self, restart: int, since: float | None) -> list[tuple[str, bytes]]:
        identity, manifest = self._context.identity, self._context.manifest
        paths = log_paths(self.task, manifest.run_dir, identity.node, identity.attempt, restart)
        others = find_extra_logs(manifest, self._rank_of, since, [self.task.rank]).get(self.task.rank, [])
        starts = read_log_starts(self._record_path(restart, "logs"))
        return [
            (os.path.basename(path), read_last_bytes(path, LOG_TAIL_BYTES, starts.get(path)))
            for path in (*paths, *others)
        ]


def present_start(start: float | None, start_ticks: int | None, clock: Clock) -> float | None:
    """Start of a run on the present clock, which may have been set back since; None if unknown."""
    if start is None or start_ticks is None:
        return start
    return min(start, clock.time() - clock.monotonic() + start_ticks / CLOCK_TICKS)


def _exit_status(wait_status: int | None) -> ExitStatus:
    if wait_status is None:
        return ExitStatus()
    if os.WIFSIGNALED(wait_status):
        return ExitStatus(signal=os.WTERMSIG(wait_status), core=os.WCOREDUMP(wait_status))
    return ExitStatus(code=os.WEXITSTATUS(wait_status))


def _has_ended_soon(start: float | None, end: float | None) -> bool:
    return start is not None and end is not None and end - start < QUICK_END_S


def _read_session_id(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
