"""Find the exit reasons of a job's tasks from the records and logs in its run directory."""

import bisect
import copy
import math
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from exporter.contract.status import WorkerEnd
from exporter.workers.exit_reason import (
    CONSEQUENCES,
    OOM_BURST_S,
    PEER_LOST,
    PEER_WINDOW_S,
    SHELL_KILL,
    ExitEvidence,
    FailedPeer,
    JobStop,
    LogEvidence,
    awaits_oom_victim,
    evidence_from_record,
    failed_peer,
    find_exit_reason,
    needs_log_evidence,
    parse_job_stop,
    signal_name,
)

if TYPE_CHECKING:
    from launcher.report.run_logs import RunLogs

LISTED_RUNS = 20  # runs of a task whose ends are in the report; earlier ones are counted
SETTLED_S = 60.0 + OOM_BURST_S  # after its end, when sidecars have added what they found to it and to its peers


class RecordSnapshot:
    """The records of all runs as they are now. Each is read once, and one that does not exist is not opened.

    A job may have 100,000 of them, and on a network file system even the attempt to open one takes a millisecond.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._records: dict[str, Mapping[str, object] | None] = {}  # those read so far
        try:
            self._names: Container[str] | None = frozenset(os.listdir(folder))
        except OSError:
            self._names = None  # each is tried

    def has(self, name: str) -> bool:
        """Whether there is a record of this name."""
        return os.path.exists(f"{self._folder}/{name}") if self._names is None else name in self._names

    def read(self, name: str) -> Mapping[str, object] | None:
        """The record of this name; None if it does not exist or was only half written."""
        if name not in self._records:
            self._records[name] = run_files.read_json(f"{self._folder}/{name}") if self.has(name) else None
        return self._records[name]


class TaskRun(NamedTuple):
    """One run of a task."""

    restart: int
    start: float | None
    exit: WorkerEnd | None  # None while it runs


class ExitReasonFinder:
    """Finds exit reasons in one attempt. It reads the end of a log only if needed, and once per run.

    It keeps the descriptions of runs that ended long ago, one for each stop of the job and kind of evidence. Their
    records would take twice the memory: only a copy for one report keeps them.
    """

    def __init__(
        self,
        manifest: Manifest,
        attempt: int,
        job_end: float | None,
        show_life: Callable[[], object] = lambda: None,
    ) -> None:
        """``show_life`` is called for each record: thousands of them take long."""
        self._show_life = show_life
        self._manifest = manifest
        self.attempt = attempt
        self.job_end = job_end
        self._logs: RunLogs | None = None
        self._evidence_by_run: dict[tuple[int, int], LogEvidence] = {}
        self._settled: dict[tuple[int, int], dict[tuple[JobStop | None, bool, bool], TaskRun]] = {}
        self._counts: dict[tuple[int, int], int] = {}  # runs, by rank and attempt
        self._unread: set[tuple[int, int]] | None = None  # runs whose logs were needed; None if they are read
        self._folder = f"{manifest.run_dir}/{run_files.WORKERS_DIR}"
        self._snapshot: RecordSnapshot | None = None

    def without_log_reads(self) -> "ExitReasonFinder":
        """Return a copy that reads no further logs, which cost about 10 ms each."""
        other = copy.copy(self)
        other._unread = set()
        return other

    def with_snapshot(self) -> "ExitReasonFinder":
        """Return a copy for one report: it takes the records of all runs as they are now."""
        other = copy.copy(self)
        other._snapshot = RecordSnapshot(self._folder)
        return other

    def count_runs(self, task: Task, attempt: int) -> int:
        """How many runs have records. Those of an earlier call are not looked for again."""
        count, snapshot = self._counts.get((task.rank, attempt), 0), self._snapshot or RecordSnapshot(self._folder)
        while any(snapshot.has(_record_file(task, attempt, count, kind)) for kind in ("exit", "start")):
            count += 1
        self._counts[task.rank, attempt] = count
        return count

    def _read_record(self, task: Task, restart: int, kind: str) -> Mapping[str, object] | None:
        self._show_life()
        name = _record_file(task, self.attempt, restart, kind)
        return run_files.read_json(f"{self._folder}/{name}") if self._snapshot is None else self._snapshot.read(name)

    def describe_run(
        self,
        task: Task,
        restart: int,
        node: str,
        stop: JobStop | None,
        peers: Sequence[FailedPeer] = (),
        *,
        follows_stop: bool = False,
    ) -> TaskRun | None:
        """One run with its end, if it has ended; None if its records were half-written by a process that was killed.

        ``follows_stop``: whether the failure for which the job is stopped explains a lost connection.
        """
        asked = stop, bool(peers), follows_stop
        if (settled := self._settled.get((task.rank, restart), {}).get(asked)) is not None:
            return settled
        record = self._read_record(task, restart, "exit")
        has_start = record is not None and "start" in record
        started = record if has_start else self._read_record(task, restart, "start")
        if record is None and started is None:
            return None
        end = None
        if record is not None:
            end = self.describe_end(task, restart, node, record, stop, peers, follows_stop=follows_stop)
        run = TaskRun(restart, _start_time(started or {}), end)
        has_evidence = (task.rank, restart) not in (self._unread or ())
        if end is not None and end.time is not None and end.time < time.time() - SETTLED_S and has_evidence:
            described = self._settled.setdefault((task.rank, restart), {})
            described[asked] = next((other for other in described.values() if other.exit == end), run)
            self._settled.pop((task.rank, restart - LISTED_RUNS), None)
        return run

    def describe_end(
        self,
        task: Task,
        restart: int,
        node: str,
        record: Mapping[str, object],
        stop: JobStop | None,
        peers: Iterable[FailedPeer] = (),
        *,
        follows_stop: bool = False,
    ) -> WorkerEnd:
        """Describe one end by its exit ``record``: status, exit reason and evidence.

        ``peers`` are failures of other tasks. ``stop`` is the stop of the job. A run that was stopped
        while the job continued has its own.
        """
        evidence = self._collect_evidence(task, restart, node, record, stop, peers)
        evidence = self._with_log(replace(evidence, follows_stop=follows_stop), task, restart, node, record)
        judged = find_exit_reason(evidence)
        return WorkerEnd(
            reason=judged.reason,
            code=evidence.code,
            signal=signal_name(evidence.signal) if evidence.signal is not None else None,
            core=evidence.core,
            time=evidence.end,
            restart=restart,
            evidence=tuple(judged.evidence),
            max_rss_bytes=evidence.max_rss_bytes,
            asked_to_end=(
                evidence.stop is not None and evidence.stop.reason != "completed" and bool(evidence.forwarded)
            ),
        )

    def awaits_oom_victim(
        self, task: Task, restart: int, node: str, record: Mapping[str, object], peers: Iterable[FailedPeer]
    ) -> bool:
        """Whether the end of another task of its node may still show which of them the OOM killer chose."""
        is_alone = all(other.node_index != task.node_index or other is task for other in self._manifest.tasks)
        end = evidence_from_record(record).end
        if not record.get("oom_kills") or is_alone or end is None or time.time() - end >= OOM_BURST_S:
            return False
        evidence = self._collect_evidence(task, restart, node, record, None, peers)
        return awaits_oom_victim(self._with_log(evidence, task, restart, node, record))

    def _collect_evidence(
        self,
        task: Task,
        restart: int,
        node: str,
        record: Mapping[str, object],
        stop: JobStop | None,
        peers: Iterable[FailedPeer],
    ) -> ExitEvidence:
        """Evidence about one end, without that of its log."""
        stop = parse_job_stop(self._read_record(task, restart, "stop") or {}) or stop
        if stop is not None and stop.was_caused_by(task.rank, restart):
            stop = None
        found = self._read_record(task, restart, "found") or {}  # by the sidecar
        return replace(
            evidence_from_record({**found, **record}, stop).with_peers(peers, task.node_index),
            node=node,
            job_end=self.job_end,
            attached=self._manifest.attached,
        )

    def _with_log(
        self, evidence: ExitEvidence, task: Task, restart: int, node: str, record: Mapping[str, object]
    ) -> ExitEvidence:
        if not needs_log_evidence(evidence):
            return evidence
        return replace(evidence, log=self._read_log_evidence(task, restart, node, _start_time(record)))

    def _read_log_evidence(self, task: Task, restart: int, node: str, since: float | None) -> LogEvidence:
        evidence = self._evidence_by_run.get((task.rank, restart))
        if evidence is None and self._unread is not None:
            self._unread.add((task.rank, restart))
            return LogEvidence()
        if evidence is None:
            evidence = self._run_logs().read_evidence(task, restart, node, since)
            self._evidence_by_run[task.rank, restart] = evidence
            self._evidence_by_run.pop((task.rank, restart - LISTED_RUNS), None)
        return evidence

    def has_lost_peer(self, task: Task, restart: int) -> bool:
        """Whether the log of a run, as far as it was read, says that it lost another worker."""
        evidence = self._evidence_by_run.get((task.rank, restart))
        return evidence is not None and PEER_LOST in evidence.classes

    def last_position(self, task: Task, node: str, run: TaskRun) -> tuple[int, int | None, str] | None:
        """Final position, total and unit in the logs of a run; None if they contain no position."""
        self._show_life()
        return self._run_logs().last_position(task, run.restart, node, run.start)

    def _run_logs(self) -> "RunLogs":
        if self._logs is None:
            from launcher.report.run_logs import RunLogs  # lazy: only a failed run needs the log patterns

            self._logs = RunLogs(self._manifest, self.attempt)
        return self._logs


def _record_file(task: Task, attempt: int, restart: int, kind: str) -> str:
    return f"{run_files.record_name(task.worker, task.rank, attempt, restart)}.{kind}.json"


def _start_time(record: Mapping[str, object]) -> float | None:
    start = record.get("start")
    return float(start) if isinstance(start, int | float) and abs(start) < run_files.MOST_NUMBER else None


def never_started_end(task: Task, node: str, stop: JobStop) -> WorkerEnd:
    """End of a task that never started."""
    if node in stop.nodes:
        reason, fact = "node_failure", "never started: its node failed"
    else:
        # the task cannot be the cause of the stop
        inherited = stop.reason in CONSEQUENCES and stop.reason != "completed"
        reason = stop.reason if inherited else "terminated_peer"
        when = "in an earlier stage" if task.later else "before its turn"
        fact = f"never started: the job ended {when}"
    return WorkerEnd(reason=reason, evidence=(fact, f"the job was being stopped: {stop.cause}"), asked_to_end=False)


class TaskFailures:
    """Last failure of each task, ordered by time."""

    def __init__(self) -> None:
        self._by_time: list[tuple[float, int]] = []  # (time, rank)
        self._peers: dict[int, FailedPeer] = {}

    def add(self, task: Task, end: WorkerEnd) -> None:
        """Record the last end of a task, whether or not it is a failure."""
        earlier = self._peers.pop(task.rank, None)
        if earlier is not None:
            del self._by_time[bisect.bisect_left(self._by_time, (earlier.end, task.rank))]
        for rank, peer in task_failures([(task, end)]):
            self._peers[rank] = peer
            bisect.insort(self._by_time, (peer.end, rank))

    def find_before(self, rank: int, end: float | None) -> list[FailedPeer]:
        """First failure of another task within ``PEER_WINDOW_S`` before ``end``, and all victims of the OOM killer.

        Empty if there is none, or ``end`` is None.
        """
        if end is None:
            return []
        first = bisect.bisect_left(self._by_time, (end - PEER_WINDOW_S, -1))
        last = bisect.bisect_right(self._by_time, (end + OOM_BURST_S, math.inf))
        lately = [self._peers[other] for _, other in self._by_time[first:last] if other != rank]
        return [peer for at, peer in enumerate(lately) if peer.oom_node is not None or (at == 0 and peer.end <= end)]


def task_failures(ends: Iterable[tuple[Task, WorkerEnd]]) -> list[tuple[int, FailedPeer]]:
    """Failures among these ends, with their ranks. Consequences of other ends are left out."""
    return [
        (
            task.rank,
            failed_peer(task, end.time, end.reason, killed=end.signal == "SIGKILL" or end.code == SHELL_KILL),
        )
        for task, end in ends
        if end.reason not in CONSEQUENCES and end.time is not None
    ]
