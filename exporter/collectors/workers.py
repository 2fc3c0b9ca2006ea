"""Worker processes: up, state, start, CPU, memory, IO, children, threads, restarts and exits."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter import records
from exporter.collectors.base import WORKER_LABELS, Context, Status, worker_labels
from exporter.derive.exits import REASONS, Stop, exit_evidence, parse_stop, signal_name, verdict
from exporter.derive.patterns import ERRORS, Scanner
from exporter.families import Family, Samples
from exporter.manifest import Task
from exporter.readers.procfs import ProcessTree, TreeSample
from exporter.readers.worker_logs import log_paths, read_end

STATES = ("running", "sleeping", "disk_sleep", "stopped", "zombie", "dead", "not_found")

UP = Family("worker_up", "Whether the worker's process is there.", labels=WORKER_LABELS)
STATE = Family(
    "worker_state", "State of the worker's process, 1 for the present one.", labels=(*WORKER_LABELS, "state")
)
START = Family("worker_start_timestamp_seconds", "When the worker's latest run started.", labels=WORKER_LABELS)
CPU = Family(
    "worker_cpu_seconds_total",
    "CPU time of the worker and its descendants over all its runs.",
    labels=WORKER_LABELS,
    kind="counter",
)
RSS = Family("worker_memory_rss_bytes", "Resident memory of the worker and its descendants.", labels=WORKER_LABELS)
IO_READ = Family(
    "worker_io_read_bytes_total",
    "Bytes read from storage, descendants included.",
    labels=WORKER_LABELS,
    kind="counter",
)
IO_WRITE = Family(
    "worker_io_write_bytes_total",
    "Bytes written to storage, descendants included.",
    labels=WORKER_LABELS,
    kind="counter",
)
CHILDREN = Family("worker_children", "Descendants of the worker's process.", labels=WORKER_LABELS)
THREADS = Family("worker_threads", "Threads of the worker and its descendants.", labels=WORKER_LABELS)
RESTARTS = Family("worker_restarts_total", "Runs of the worker after its first.", labels=WORKER_LABELS, kind="counter")
EXITS = Family("worker_exits_total", "Ends of the worker by reason.", labels=(*WORKER_LABELS, "reason"), kind="counter")
LAST_CODE = Family("worker_last_exit_code", "Exit status of the last end; absent after a signal.", labels=WORKER_LABELS)
LAST_SIGNAL = Family("worker_last_exit_signal", "Signal of the last end; absent after an exit.", labels=WORKER_LABELS)
LAST_TIME = Family(
    "worker_last_exit_timestamp_seconds",
    "When the worker last ended, for each reason that has occurred.",
    labels=(*WORKER_LABELS, "reason"),
)
LAUNCH_VERIFIED = Family("launch_verified", "Whether every worker of this node has been started.")

NO_RECORD_GRACE_S = 3.0
"""A process that is gone gets this long for its exit record to appear."""
NOTICE_GRACE_S = 3.0
"""An end by a signal from outside gets this long for the launcher's notice to appear."""
LOG_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Exit:
    """One end of a worker, with its reason."""

    restart: int
    code: int | None
    signal: int | None
    end: float
    reason: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class WorkerFacts:
    """One worker at one look."""

    task: Task
    up: bool
    state: str
    pid: int | None = None
    start: float | None = None
    restart: int = 0
    sample: TreeSample | None = None
    cpu_s: float | None = None
    io_read_bytes: int | None = None
    io_write_bytes: int | None = None
    exits: tuple[Exit, ...] = ()


@dataclass(frozen=True)
class WorkersSnapshot:
    """All workers of this node, and what happened to them lately."""

    workers: tuple[WorkerFacts, ...]
    events: tuple[dict[str, Any], ...]


@dataclass
class _Run:
    """One run of one worker, followed from its start record to its verdict."""

    restart: int
    pid: int | None = None
    wrapper: ProcessTree | None = None
    """Its wrapper, as long as that is there: it has not said its last word."""
    start: float | None = None
    tree: ProcessTree | None = None
    visible: bool = True
    sample: TreeSample | None = None
    gone_since: float | None = None
    exit_seen: bool = False
    """Whether its exit record is there, also while its verdict waits for a notice."""
    ended: Exit | None = None


@dataclass
class _Worker:
    task: Task
    runs: dict[int, _Run] = field(default_factory=dict)


class WorkersCollector:
    """Follows the start and exit records of this node's workers, and the processes they name."""

    name = "workers"
    interval_s = 1.0
    families = (
        UP,
        STATE,
        START,
        CPU,
        RSS,
        IO_READ,
        IO_WRITE,
        CHILDREN,
        THREADS,
        RESTARTS,
        EXITS,
        LAST_CODE,
        LAST_SIGNAL,
        LAST_TIME,
        LAUNCH_VERIFIED,
    )

    def __init__(self, context: Context) -> None:
        self._context = context
        self._folder = context.manifest.run_dir / records.WORKERS_DIR
        self._workers = [_Worker(task) for task in context.tasks]
        self._scanner = Scanner(errors=ERRORS)
        self._events: deque[dict[str, Any]] = deque(maxlen=50)
        try:
            self._pid_namespace: int | None = Path(context.proc, "self/ns/pid").stat().st_ino
        except OSError:
            self._pid_namespace = None

    def read(self) -> WorkersSnapshot:
        now = self._context.clock.time()
        stop = self._read_stop()
        facts = tuple(self._look(worker, stop, now) for worker in self._workers)
        return WorkersSnapshot(facts, tuple(self._events))

    def _read_stop(self) -> Stop | None:
        state = records.read_json(self._context.manifest.run_dir / records.STATE_FILE) or {}
        return parse_stop(state)

    def _look(self, worker: _Worker, stop: Stop | None, now: float) -> WorkerFacts:
        self._find_runs(worker)
        for run in worker.runs.values():
            if run.ended is None:
                self._follow(worker.task, run, stop, now)
        if not worker.runs:
            return WorkerFacts(worker.task, up=False, state="not_found")
        runs = [worker.runs[restart] for restart in sorted(worker.runs)]
        last = runs[-1]
        samples = [run.sample for run in runs if run.sample is not None]
        reads = [sample.io_read_bytes for sample in samples if sample.io_read_bytes is not None]
        writes = [sample.io_write_bytes for sample in samples if sample.io_write_bytes is not None]
        alive = last.ended is None and last.gone_since is None and not last.exit_seen
        if not alive:
            state = "dead"
        elif last.sample is not None:
            state = last.sample.state
        else:
            state = "running"
        return WorkerFacts(
            worker.task,
            up=alive and state not in ("zombie", "dead"),
            state=state,
            pid=last.pid,
            start=last.start,
            restart=last.restart,
            sample=last.sample if alive else None,
            cpu_s=sum(sample.cpu_s for sample in samples) if samples else None,
            io_read_bytes=sum(reads) if reads else None,
            io_write_bytes=sum(writes) if writes else None,
            exits=tuple(run.ended for run in runs if run.ended is not None),
        )

    def _find_runs(self, worker: _Worker) -> None:
        """Runs that have left a first record since the last look.

        By name, not by listing: the folder holds the records of all nodes, and the ones looked for
        are written on this node, so that even a network file system knows at once.
        """
        while any(self._record(worker.task, len(worker.runs), kind).exists() for kind in ("start", "exit")):
            worker.runs[len(worker.runs)] = _Run(len(worker.runs))

    def _record(self, task: Task, restart: int, kind: str) -> Path:
        stem = records.record_name(task.worker, task.rank, self._context.identity.attempt, restart)
        return self._folder / f"{stem}.{kind}.json"

    def _follow(self, task: Task, run: _Run, stop: Stop | None, now: float) -> None:
        if run.pid is None:
            self._begin(task, run, records.read_json(self._record(task, run.restart, "start")) or {})
        ended = records.read_json(self._record(task, run.restart, "exit"))
        stop = None if stop is not None and stop.follows_from(task.rank, run.restart) else stop
        if ended is not None:
            run.exit_seen = True
            self._end(task, run, ended, stop, now)
            return
        if run.tree is not None:
            sample = run.tree.read()
            if sample is not None:
                run.sample = sample
                if sample.state != "zombie":
                    return  # a zombie that nobody reaps has ended, and its wrapper has too
            else:
                run.tree.close()
                run.tree = None
        if not run.visible or run.pid is None:
            return
        if run.gone_since is None:
            run.gone_since = now
        elif now - run.gone_since > NO_RECORD_GRACE_S and not self._wrapper_is_there(run):
            self._end(task, run, {"end": run.gone_since}, stop, now)

    def _wrapper_is_there(self, run: _Run) -> bool:
        if run.wrapper is None:
            return False
        sample = run.wrapper.read()
        if sample is not None and sample.state != "zombie":
            return True
        run.wrapper.close()
        run.wrapper = None
        return False

    def _begin(self, task: Task, run: _Run, record: Mapping[str, Any]) -> None:
        pid = record.get("pid")
        if not isinstance(pid, int):
            return
        run.pid, run.start = pid, record.get("start")
        namespace = record.get("pid_namespace")
        run.visible = namespace is None or self._pid_namespace is None or namespace == self._pid_namespace
        if run.visible:
            try:
                run.tree = ProcessTree(pid, record.get("start_ticks"), self._context.proc)
            except ProcessLookupError:
                run.tree = None  # it has ended already; its exit record follows
            try:
                run.wrapper = ProcessTree(int(record.get("wrapper_pid", 0)), None, self._context.proc)
            except ProcessLookupError:
                run.wrapper = None
        kind = "worker restarted" if run.restart else "worker started"
        self._event(run.start, "info", kind, task, f"pid {pid}")

    def _end(self, task: Task, run: _Run, record: Mapping[str, Any], stop: Stop | None, now: float) -> None:
        """Judge one end, unless a notice that may explain it is still on its way."""
        evidence = exit_evidence(record, stop, (), self._context.identity.end)
        if evidence.forwarded and stop is None and evidence.end is not None and now - evidence.end < NOTICE_GRACE_S:
            return
        if run.tree is not None:
            run.sample = run.tree.read() or run.sample
            run.tree.close()
            run.tree = None
        if run.wrapper is not None:
            run.wrapper.close()
            run.wrapper = None
        run.start = run.start if run.start is not None else record.get("start")
        evidence = exit_evidence(record, stop, self._log_classes(task, run.restart), self._context.identity.end)
        judged = verdict(evidence)
        run.ended = Exit(
            run.restart,
            evidence.code,
            evidence.signal,
            evidence.end if evidence.end is not None else now,
            judged.reason,
            judged.evidence,
        )
        level = "info" if judged.reason == "completed" else "critical"
        self._event(run.ended.end, level, "worker ended", task, f"{judged.reason}: {'; '.join(judged.evidence)}")

    def _log_classes(self, task: Task, restart: int) -> tuple[str, ...]:
        found: set[str] = set()
        identity = self._context.identity
        for path in log_paths(task, self._context.manifest.run_dir, identity.node, identity.attempt, restart):
            found |= set(self._scanner.scan(read_end(path, LOG_TAIL_BYTES)).errors)
        return tuple(sorted(found))

    def _event(self, time: float | None, level: str, kind: str, task: Task, detail: str) -> None:
        moment = time if time is not None else self._context.clock.time()
        self._events.append(
            {
                "time": moment,
                "level": level,
                "event": kind,
                "worker": task.worker,
                "rank": task.rank,
                "detail": detail,
            }
        )

    def render(self, snapshot: WorkersSnapshot, out: Samples) -> None:
        for facts in snapshot.workers:
            labels = worker_labels(facts.task)
            out.add(UP, int(facts.up), **labels)
            for state in STATES:
                out.add(STATE, int(state == facts.state), **labels, state=state)
            out.add(START, facts.start, **labels)
            out.add(CPU, facts.cpu_s, **labels)
            out.add(IO_READ, facts.io_read_bytes, **labels)
            out.add(IO_WRITE, facts.io_write_bytes, **labels)
            if facts.sample is not None:
                out.add(RSS, facts.sample.rss_bytes, **labels)
                out.add(CHILDREN, facts.sample.children, **labels)
                out.add(THREADS, facts.sample.threads, **labels)
            out.add(RESTARTS, facts.restart, **labels)
            counts = dict.fromkeys(REASONS, 0)
            for ended in facts.exits:
                counts[ended.reason] = counts.get(ended.reason, 0) + 1
            for reason, count in counts.items():
                out.add(EXITS, count, **labels, reason=reason)
            if facts.exits:
                last = facts.exits[-1]
                out.add(LAST_CODE, last.code, **labels)
                out.add(LAST_SIGNAL, last.signal, **labels)
                for reason, end in {ended.reason: ended.end for ended in facts.exits}.items():
                    out.add(LAST_TIME, end, **labels, reason=reason)
        out.add(LAUNCH_VERIFIED, int(all(facts.pid is not None for facts in snapshot.workers)))

    def describe(self, snapshot: WorkersSnapshot, status: Status) -> None:
        for facts in snapshot.workers:
            entry = status.worker(facts.task.rank)
            entry.update(
                worker=facts.task.worker,
                role=facts.task.role,
                rank=facts.task.rank,
                node=self._context.identity.node,
                gpus=list(facts.task.gpus),
                up=facts.up,
                state=facts.state,
                pid=facts.pid,
                start=facts.start,
                restarts=facts.restart,
                cpu_s=facts.cpu_s,
                rss_bytes=facts.sample.rss_bytes if facts.sample else None,
                children=facts.sample.children if facts.sample else None,
                threads=facts.sample.threads if facts.sample else None,
                exit=describe_exit(facts.exits[-1]) if facts.exits and not facts.up else None,
                exits=[describe_exit(ended) for ended in facts.exits],
            )
        status.events.extend(snapshot.events)


def describe_exit(ended: Exit) -> dict[str, Any]:
    """One end as a JSON object."""
    return {
        "reason": ended.reason,
        "code": ended.code,
        "signal": signal_name(ended.signal) if ended.signal is not None else None,
        "time": ended.end,
        "restart": ended.restart,
        "evidence": list(ended.evidence),
    }
