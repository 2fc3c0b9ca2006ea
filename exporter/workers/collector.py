"""Worker processes: state, start, CPU, memory, I/O, children, threads, restarts and exits."""

from collections import deque
from collections.abc import Iterable

from exporter.collecting.collector import WORKER_LABELS, CollectorContext, StatusParts, worker_labels
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import NodeGpuUse, Published, Publisher, WorkerProcesses
from exporter.contract import run_files
from exporter.contract.events import Event
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from exporter.contract.status import ProcessStatus, WorkerEnd
from exporter.gpus.records import JobGpus
from exporter.logs.log_starts_reader import LogStartFinder
from exporter.machine.folders import FolderChangeCheck
from exporter.workers.exit_facts_reader import NodeFacts
from exporter.workers.exit_reason import OOM_BURST_S, REASONS, parse_job_stop, signal_name
from exporter.workers.run_totals import WorkerExit
from exporter.workers.runs_reader import RunEnd, WorkerReading, WorkerRuns

STATES = ("running", "sleeping", "disk_sleep", "stopped", "zombie", "dead", "not_found")

UP = Family("worker_up", "Whether the worker's process is running.", labels=WORKER_LABELS)
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
PSS = Family(
    "worker_memory_pss_bytes",
    "Memory of the worker and its descendants with shared pages divided among those who share them; twice a minute, "
    "less often for large workers, absent above some 15 GiB.",
    labels=WORKER_LABELS,
)
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
OPEN_FILES = Family(
    "worker_open_files", "Open descriptors of the worker and its descendants; twice a minute.", labels=WORKER_LABELS
)
SWITCHES = Family(
    "worker_context_switches_total",
    "Context switches of the worker and its descendants over all its runs since they were first read; updated twice a "
    "minute.",
    labels=(*WORKER_LABELS, "kind"),
    kind="counter",
)
RESTARTS = Family("worker_restarts_total", "Runs of the worker after its first.", labels=WORKER_LABELS, kind="counter")
EXITS = Family("worker_exits_total", "Ends of the worker by reason.", labels=(*WORKER_LABELS, "reason"), kind="counter")
LAST_CODE = Family("worker_last_exit_code", "Exit status of the last end; absent after a signal.", labels=WORKER_LABELS)
LAST_SIGNAL = Family("worker_last_exit_signal", "Signal of the last end; absent after an exit.", labels=WORKER_LABELS)
LAST_TIME = Family(
    "worker_last_exit_timestamp_seconds",
    "When the worker last ended, for each reason that has occurred.",
    labels=(*WORKER_LABELS, "reason"),
)
RESTARTS_LEFT = Family(
    "worker_last_exit_restarts_left",
    "Restarts that the policy of the worker still allowed when it last ended, for each reason of a recent end; 0 for "
    "the latest once a failure stops the job.",
    labels=(*WORKER_LABELS, "reason"),
)

FAILURES_OF_JOB = ("terminated_peer", "launch_failed")  # reasons of a stop; then no worker is restarted


@dataclass(frozen=True)
class WorkersSnapshot:
    """All workers of this node and their recent events."""

    workers: tuple[WorkerReading, ...]
    events: tuple[Event, ...]
    has_job_failed: bool = False  # the job is being stopped for that, and restarts nobody

    @property
    def running(self) -> int:
        """Workers whose latest run has no exit yet."""
        ended = {(facts.task.rank, end.restart) for facts in self.workers for end in facts.exits.last}
        return sum(facts.start is not None and (facts.task.rank, facts.restart) not in ended for facts in self.workers)


class WorkersCollector:
    """Reads the start and exit records of this node's workers, and the processes they name."""

    name = "workers"
    interval_s = 1.0
    families = (
        *(UP, STATE, START, CPU, RSS, PSS, IO_READ, IO_WRITE, CHILDREN, THREADS, OPEN_FILES, SWITCHES),
        *(RESTARTS, EXITS, LAST_CODE, LAST_SIGNAL, LAST_TIME, RESTARTS_LEFT),
    )

    def __init__(
        self,
        context: CollectorContext,
        published: Publisher[WorkerProcesses],
        gpus: Published[JobGpus],
        gpu_use: Published[NodeGpuUse],
    ) -> None:
        self._context, self._published = context, published
        self._events: deque[Event] = deque(maxlen=50)
        self._state_file = run_files.JobStateFile(context.manifest.run_dir)
        self._change_check = FolderChangeCheck(context.manifest.run_dir / run_files.WORKERS_DIR)
        node = NodeFacts(context, published, gpus, gpu_use)
        self._log_starts = LogStartFinder(context)
        self._must_note_logs = True
        self._workers = [WorkerRuns(context, task, node, self._log_starts, self._add_event) for task in context.tasks]

    def read(self) -> WorkersSnapshot:
        self._context.exits.dispatch()  # in case no other thread does it
        now, state = self._context.clock.time(), self._state_file.read()
        stop = parse_job_stop(state)
        fresh = self._change_check.may_have_changed(now)
        ends = [end for worker in self._workers for end in worker.poll(stop, now, fresh=fresh)]
        self._judge(ends, now)
        found = tuple(worker.facts() for worker in self._workers)
        at_work = state.get("phase") == "running"
        self._published.publish(
            WorkerProcesses(
                running=frozenset(facts.task.rank for facts in found if facts.up and at_work),
                pids={worker.task.rank: worker.pids for worker in self._workers},
                starts={facts.task.rank: facts.start for facts in found if facts.start is not None},
            )
        )
        # Not before the first poll: text of the runs that it finds must not pass for that of earlier ones.
        if self._must_note_logs or ends:
            self._must_note_logs = not self._log_starts.note()
        has_job_failed = stop is not None and stop.reason in FAILURES_OF_JOB
        return WorkersSnapshot(found, tuple(self._events), has_job_failed)

    def _judge(self, ends: Iterable[RunEnd], now: float) -> None:
        """Find the reasons of new ends, oldest first: a failure explains later ends of other workers.

        A victim of the OOM killer may end after those that it explains, so these come last.
        """
        ordered = sorted(ends, key=lambda end: (end.time, end.worker.task.rank, end.run.restart))
        waiting = [end.worker.with_evidence(end) for end in ordered]
        for is_last in (False, True):
            judged, waiting = waiting, []
            for end in judged:
                peers = [peer for other in self._workers if other is not end.worker for peer in other.failures()]
                can_wait = not is_last or now - end.time < OOM_BURST_S
                if not end.worker.judge(end, peers, may_await_victim=can_wait):
                    waiting.append(end)

    def _add_event(self, time: float | None, level: str, kind: str, task: Task, detail: str) -> None:
        moment = time if time is not None else self._context.clock.time()
        self._events.append(
            Event(time=moment, level=level, event=kind, worker=task.worker, rank=task.rank, detail=detail)
        )

    def render(self, snapshot: WorkersSnapshot, out: Samples) -> None:
        for facts in snapshot.workers:
            row = out.row(**worker_labels(facts.task))
            row.add(UP, int(facts.up))
            for state in STATES:
                row.add(STATE, int(state == facts.state), state=state)
            row.add(START, facts.start)
            row.add(CPU, facts.usage.cpu_s)
            row.add(IO_READ, facts.usage.io_read_bytes)
            row.add(IO_WRITE, facts.usage.io_write_bytes)
            if facts.sample is not None:
                row.add(RSS, facts.sample.rss_bytes)
                row.add(CHILDREN, facts.sample.children)
                row.add(THREADS, facts.sample.threads)
            if facts.details is not None:
                row.add(PSS, facts.details.pss_bytes if facts.up else None)
                row.add(OPEN_FILES, facts.details.open_files if facts.up else None)
            row.add(SWITCHES, facts.usage.voluntary_switches, kind="voluntary")
            row.add(SWITCHES, facts.usage.involuntary_switches, kind="involuntary")
            row.add(RESTARTS, facts.restart)
            for reason, count in {**dict.fromkeys(REASONS, 0), **facts.exits.counts}.items():
                row.add(EXITS, count, reason=reason)
            if facts.exits.last:
                last = facts.exits.last[-1]
                row.add(LAST_CODE, last.code)
                row.add(LAST_SIGNAL, last.signal)
            for reason, end in facts.exits.times.items():
                row.add(LAST_TIME, end, reason=reason)
            if facts.task.restarts:
                left = {end.reason: max(0, facts.task.restarts - end.restart) for end in facts.exits.last}
                if snapshot.has_job_failed:
                    left |= {end.reason: 0 for end in facts.exits.last if end.restart == facts.restart}
                for reason, count in left.items():
                    row.add(RESTARTS_LEFT, count, reason=reason)

    def describe(self, snapshot: WorkersSnapshot, parts: StatusParts) -> None:
        for facts in snapshot.workers:
            exits = tuple(map(worker_end, facts.exits.last))
            sample = facts.sample
            parts.add_worker(
                facts.task.rank,
                ProcessStatus(
                    up=facts.up,
                    state=facts.state,
                    start=facts.start,
                    restarts=facts.restart,
                    exit=exits[-1] if exits and not facts.up else None,
                    exits=exits,
                    exit_counts=facts.exits.counts,
                    cpu_s=facts.usage.cpu_s,
                    pid=facts.pid,
                    rss_bytes=sample.rss_bytes if sample else None,
                    children=sample.children if sample else None,
                    threads=sample.threads if sample else None,
                    found_by=facts.found_by,
                    details=facts.details,
                ),
            )
        parts.events += snapshot.events


def worker_end(ended: WorkerExit) -> WorkerEnd:
    """One end as it is in the status."""
    return WorkerEnd(
        reason=ended.reason,
        code=ended.code,
        signal=signal_name(ended.signal) if ended.signal is not None else None,
        time=ended.end,
        restart=ended.restart,
        evidence=ended.evidence,
    )
