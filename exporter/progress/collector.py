"""Progress of each worker from its logs: position, throughput, ETA, values and errors."""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from functools import partial

from exporter.collecting.collector import WORKER_LABELS, CollectorContext, StatusParts, worker_labels
from exporter.collecting.families import Family, Samples
from exporter.collecting.published import JobProgress, NodeGpuUse, Published, Publisher
from exporter.collecting.saved_state import load_saved_state, save_state
from exporter.contract import run_files
from exporter.contract.clock import StopDetector
from exporter.contract.events import Event
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from exporter.contract.status import LogStatus
from exporter.contract.worker_names import rank_in_file_name
from exporter.logs.lexicon import Lexicon
from exporter.logs.lexicon_reader import lexicon_of_job
from exporter.logs.log_files_reader import extra_log_finder, log_paths, progress_path
from exporter.machine.folders import FolderChangeCheck
from exporter.progress import job_eta
from exporter.progress.eta.clock import WallClockSteps
from exporter.progress.eta.interval import median_seconds_per_item
from exporter.progress.eta.prior import RunPrior
from exporter.progress.history_reader import RunHistory, read_earlier_attempts, read_run_history
from exporter.progress.phases import job_phase
from exporter.progress.resumes import EarlierProgress, earlier_positions
from exporter.progress.worker_logs_reader import PROGRESS_FILE, WorkerLogFacts, WorkerLogs

ITEMS = Family("worker_items", "Position of the worker: items done according to its log.", labels=WORKER_LABELS)
ITEMS_EXPECTED = Family("worker_items_expected", "Total number of items of the worker.", labels=WORKER_LABELS)
ITEMS_PROCESSED = Family(
    "worker_items_processed_total",
    "Items done since the job started, without work of an earlier job; falls only when a progress file counts in "
    "another unit than the log before it.",
    labels=WORKER_LABELS,
    kind="counter",
)
THROUGHPUT = Family(
    "worker_throughput_items_per_second",
    "Items per second over the last minutes (current) and since the first position (average).",
    labels=(*WORKER_LABELS, "window"),
)
ETA = Family(
    "worker_eta_seconds",
    "Seconds of work left: the middle estimate and the ends of an interval.",
    labels=(*WORKER_LABELS, "quantile"),
    kind="summary",  # the label `quantile` is reserved for this kind
)
FINISH = Family("worker_finish_timestamp_seconds", "When the worker should finish.", labels=WORKER_LABELS)
LAST_PROGRESS = Family("worker_progress_last_timestamp_seconds", "When the position last rose.", labels=WORKER_LABELS)
PROGRESS_INFO = Family(
    "worker_progress_info",
    "What the position counts, the pattern that gives it, and the pack of the log.",
    labels=(*WORKER_LABELS, "unit", "pattern", "pack"),
    kind="info",
)
SLOWDOWN = Family(
    "worker_slowdown_ratio",
    "Time per item now, divided by that at the fastest earlier speed of the run; absent before the speed has changed.",
    labels=WORKER_LABELS,
)
UNMATCHED = Family(
    "worker_progress_unmatched",
    "Whether a log has grown for minutes without a match of any pattern.",
    labels=WORKER_LABELS,
)
STALLED = Family(
    "worker_stalled",
    "Whether a worker with work left has been silent for the stall timeout, and for longer than its rhythm and its "
    "pauses explain.",
    labels=WORKER_LABELS,
)
LOG_VALUE = Family("worker_log_value", "Last value of a named pattern in the log.", labels=(*WORKER_LABELS, "name"))
LOG_VALUE_TIME = Family(
    "worker_log_value_timestamp_seconds", "When that value was last logged.", labels=(*WORKER_LABELS, "name")
)
LOG_ERRORS = Family(
    "log_errors_total",
    "Log lines that match an error pattern.",
    labels=(*WORKER_LABELS, "pattern", "severity"),
    kind="counter",
)
LOG_BYTES = Family("log_bytes_total", "Log bytes read.", labels=WORKER_LABELS, kind="counter")
LOG_LINES = Family("log_lines_total", "Log lines read.", labels=WORKER_LABELS, kind="counter")
LOG_LAG = Family("log_lag_bytes", "Log bytes written and not read yet.", labels=WORKER_LABELS)
TIMEOUTS = Family(
    "log_pattern_timeouts_total",
    "Records in which the search for a pattern of the job was stopped because it took too long.",
    labels=("pattern",),
    kind="counter",
)

SAVE_INTERVAL_S = 30.0  # text read after the last save is read again after a restart, and nothing counts twice
HISTORY_TIMEOUT_S = 2.0  # limit for reading earlier runs, which help only in the first minutes
POLL_S = 2.0  # time of one poll; the rest of the text waits for the next

log = logging.getLogger("gpujob.logs")


@dataclass(frozen=True)
class LogsSnapshot:
    workers: tuple[WorkerLogFacts, ...]
    outlook: job_eta.NodeOutlook
    timeouts: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()  # messages for the user about the patterns


class LogsCollector:
    """Reads the logs of this node's workers."""

    name = "logs"
    families = (
        *(ITEMS, ITEMS_EXPECTED, ITEMS_PROCESSED, PROGRESS_INFO, THROUGHPUT, ETA, FINISH, LAST_PROGRESS),
        *(STALLED, SLOWDOWN, UNMATCHED, LOG_VALUE, LOG_VALUE_TIME),
        *(LOG_ERRORS, LOG_BYTES, LOG_LINES, LOG_LAG, TIMEOUTS),
        *job_eta.FAMILIES,
    )

    def __init__(
        self,
        context: CollectorContext,
        published: Publisher[JobProgress],
        gpu_use: Published[NodeGpuUse],
        checkpoint_times: Published[tuple[float, ...]],
    ) -> None:
        manifest = context.manifest
        self._context, self._published = context, published
        self._gpu_use, self._checkpoint_times = gpu_use, checkpoint_times
        self.interval_s = manifest.check_interval_s
        self._finder = extra_log_finder(manifest, partial(rank_in_file_name, ranks=manifest.ranks_of_roles()))
        self._records_dir = manifest.run_dir / run_files.WORKERS_DIR
        self._records_check = FolderChangeCheck(self._records_dir)
        self._progress_dir = manifest.run_dir / run_files.PROGRESS_DIR
        self._progress_check = FolderChangeCheck(self._progress_dir)
        self._progress_paths: dict[int, str] = {}  # progress file of each worker's current run, by rank
        self._stale: set[int] = set()  # indexes of workers that may have new records or progress files
        self._lexicon: Lexicon | None = None
        # Created at the first read, like the lexicon, since that reads files which may hang.
        self._workers: list[WorkerLogs] = []
        self._priors: dict[str, RunPrior] = {}
        self._earlier_progress: dict[int, EarlierProgress] = {}
        self._untested_ranks: set[int] = set()  # ranks with a restored state that has not been tried yet
        self._clock_steps = WallClockSteps()
        self._stops = StopDetector(self.interval_s)
        self._next_worker = 0  # worker at which the next poll starts, so that all get their turn
        identity = context.identity
        self._saved_state_key = (manifest.run_dir, identity.node, identity.job_id, identity.attempt)
        self._saved_at = context.clock.monotonic()
        self._saved_reads: list[tuple[int, bool, int]] = []  # of each worker: run, whether it has ended, bytes read
        self._save_problem: str | None = None  # why the last state could not be saved

    def _create_workers(self, lexicon: Lexicon) -> list[WorkerLogs]:
        """The workers of this node, restored from the state of an earlier sidecar."""
        context, manifest = self._context, self._context.manifest
        saved = load_saved_state(*self._saved_state_key, kind="logs") or {}
        self._priors = load_run_history(manifest.job_name)
        attempts = read_earlier_attempts(manifest.run_dir, context.identity.attempt)
        self._earlier_progress = earlier_positions(attempts, {task.rank for task in context.tasks})
        found = []
        for task in context.tasks:
            worker, state = self._new_worker(task, lexicon), saved.get(str(task.rank))
            if state is not None:
                try:
                    worker.restore(state)
                    worker.facts(context.clock.time())  # fails now if the state is unusable
                    self._untested_ranks.add(task.rank)
                except Exception as error:  # noqa: BLE001 - a file, in which anything can be
                    log.warning("the saved state of %s is not used, its logs are read again: %s", task.worker, error)
                    worker = self._new_worker(task, lexicon)
            found.append(worker)
        return found

    def _new_worker(self, task: Task, lexicon: Lexicon) -> WorkerLogs:
        prior, earlier = self._priors.get(task.role), self._earlier_progress.get(task.rank)
        return WorkerLogs(task, self._context.manifest, lexicon, prior, earlier)

    def read(self) -> LogsSnapshot:
        if self._lexicon is None:
            lexicon = lexicon_of_job(self._context.manifest)
            self._workers = self._create_workers(lexicon)
            self._lexicon = lexicon
        workers, count, clock = self._workers, len(self._workers), self._context.clock
        now, monotonic = clock.time(), clock.monotonic()  # after the slow reads of the first call
        until = monotonic + POLL_S
        if step := self._clock_steps.read(now, monotonic):
            for worker in workers:
                worker.set_wall_clock(step)
        stopped_s = self._stops.begin_read(monotonic)
        stopped = self._find_stopped(now - stopped_s, now) if stopped_s else frozenset()
        # An attached job has no directory of progress files.
        if self._records_check.may_have_changed(now) | (
            os.path.exists(self._progress_dir) and self._progress_check.may_have_changed(now)
        ):
            self._stale.update(range(count))
        extra = self._finder.find() if self._finder is not None else {}
        for place in range(count):
            number = (self._next_worker + place) % count
            read_at = now - stopped_s if number in stopped else now  # what it wrote before the stop is that old
            self._poll_worker(number, extra.get(workers[number].task.rank, ()), read_at, until)
            if clock.monotonic() > until:
                self._next_worker = (self._next_worker + place + 1) % count
                break
        for number in stopped:  # also those that were not polled
            if not workers[number].ended:
                workers[number].set_wall_clock(stopped_s)  # so that its silence does not count
        self._save(workers)
        peers = {
            role: median_seconds_per_item(worker.seconds_per_item for worker in workers if worker.task.role == role)
            for role in {worker.task.role for worker in workers}
        }
        busy = self._gpu_use.recent.busy  # GPUs that were busy long ago must not hide a stall
        facts = tuple(worker.facts(now, peers[worker.task.role], busy=busy.get(worker.task.rank)) for worker in workers)
        self._published.publish(
            JobProgress(
                job_phase(((w.activities, w.track.last_rise) for w in workers if not w.ended), now),
                {worker.task.rank: worker.progress(now) for worker in workers},
            )
        )
        self._stops.end_read(clock.monotonic())
        engines = self._lexicon.engines.values()
        timeouts = {name: 0 for engine in engines for name in engine.timeouts}
        for engine in engines:
            for name, given_up in engine.timeouts.items():
                timeouts[name] += given_up
        return LogsSnapshot(
            workers=facts,
            outlook=job_eta.job_outlook(
                *(facts, now, job_deadline(self._context), self._checkpoint_times.value),
                self._context.manifest.checkpoint_interval_s,
                self._context.manifest.total_items,
            ),
            timeouts=tuple(timeouts.items()),
            notes=tuple(dict.fromkeys(note for engine in engines for note in engine.notes)),
        )

    def _find_stopped(self, since: float, now: float) -> frozenset[int]:
        """Indexes of running workers that were stopped with the sidecar."""
        return frozenset(
            index
            for index, worker in enumerate(self._workers)
            if not worker.ended
            and not worker.has_worked_since(since, now)
            and self._latest_restart(worker.task, worker.restart) == worker.restart
        )

    def _poll_worker(self, index: int, extra: Sequence[str], now: float, poll_end: float) -> None:
        """Poll one worker; the first poll shows whether a restored state is usable."""
        worker, fresh = self._workers[index], index in self._stale
        try:
            whole = self._poll(worker, extra, now, poll_end, check_records=fresh)
        except Exception as error:
            if worker.task.rank not in self._untested_ranks or self._lexicon is None:
                raise
            log.warning("the saved state of %s is not used, its logs are read again: %s", worker.task.worker, error)
            self._workers[index] = self._new_worker(worker.task, self._lexicon)
            whole = self._poll(self._workers[index], extra, now, poll_end, check_records=True)
        finally:
            self._untested_ranks.discard(worker.task.rank)
        if whole:
            self._stale.discard(index)

    def _poll(
        self, worker: WorkerLogs, extra: Iterable[str], now: float, poll_end: float, *, check_records: bool
    ) -> bool:
        """Poll one worker; whether its latest run was reached."""
        context, task, clock = self._context, worker.task, self._context.clock
        run_dir, identity = context.manifest.run_dir, context.identity

        def out_of_time() -> bool:
            return clock.monotonic() > poll_end

        latest = self._latest_restart(task, worker.restart) if check_records or worker.restart < 0 else worker.restart
        for restart in range(worker.restart + 1, latest + 1):
            if worker.restart >= 0:
                # The last lines of a run come before the next run
                worker.poll(now, end=now, should_stop=out_of_time)
                if worker.has_unread:
                    return False  # they continue at the next poll
            worker.begin_run(restart)
            for path in log_paths(task, run_dir, identity.node, identity.attempt, restart):
                worker.add_file(path)
            self._progress_paths.pop(task.rank, None)
        if check_records:
            if worker.track.began is None:
                worker.begin_at(self._read_start(task, worker.restart))
            if (file := self._progress_paths.get(task.rank)) is None:
                file = progress_path(task, run_dir, identity.node, identity.attempt, worker.restart)
                self._progress_paths[task.rank] = file
            if os.path.exists(file):
                worker.add_file(file, PROGRESS_FILE)
        for path in extra:
            tail = worker.add_file(path, lasting=True)
            if tail is not None:
                tail.skip_older(identity.start)
        end = worker.end
        if check_records and end is None:
            end = self._read_end(task, worker.restart, now)
        worker.poll(now, end=end, should_stop=out_of_time)
        return True

    def _latest_restart(self, task: Task, restart: int) -> int:
        """Latest run of a worker, from the names of the records; one that could not start has an exit record only."""
        restart = max(0, restart)
        while any(os.path.exists(self._record_path(task, restart + 1, kind)) for kind in ("start", "exit")):
            restart += 1
        return restart

    def _read_start(self, task: Task, restart: int) -> float | None:
        """Start time of a run; None if it is not recorded."""
        return self._read_time(task, restart, "start", "start")

    def _read_end(self, task: Task, restart: int, now: float) -> float | None:
        """When a run ended, so that its log is complete; None without an exit record."""
        if not os.path.exists(self._record_path(task, restart, "exit")):
            return None
        end = self._read_time(task, restart, "exit", "end")
        return now if end is None else end

    def _read_time(self, task: Task, restart: int, kind: str, key: str) -> float | None:
        """A time in a record of a run; None if it is not there."""
        time = (run_files.read_json(self._record_path(task, restart, kind)) or {}).get(key)
        return float(time) if isinstance(time, int | float) and not isinstance(time, bool) else None

    def _record_path(self, task: Task, restart: int, kind: str) -> str:
        """Path of a wrapper's record about one run."""
        name = run_files.record_name(task.worker, task.rank, self._context.identity.attempt, restart)
        return f"{self._records_dir}/{name}.{kind}.json"

    def _save(self, workers: Sequence[WorkerLogs]) -> None:
        """Save the state for the next sidecar of this node, unless nothing was read since."""
        now = self._context.clock.monotonic()
        if now - self._saved_at < SAVE_INTERVAL_S:
            return
        self._saved_at = now
        read = [(worker.restart, worker.ended, worker.bytes_read) for worker in workers]
        if read == self._saved_reads and self._save_problem is None:
            return
        self._saved_reads = read
        state = {str(worker.task.rank): worker.state() for worker in workers}
        problem = save_state(*self._saved_state_key, state, kind="logs")
        if problem is not None and self._save_problem is None:
            log.warning("log positions cannot be saved: %s; a restarted sidecar would read all logs again", problem)
        elif problem is None and self._save_problem is not None:
            log.warning("log positions are saved again")
        self._save_problem = problem

    def render(self, snapshot: LogsSnapshot, out: Samples) -> None:
        for facts in snapshot.workers:
            row = out.row(**worker_labels(facts.task))
            row.add(ITEMS, facts.position)
            row.add(ITEMS_EXPECTED, facts.expected)
            row.add(ITEMS_PROCESSED, facts.processed)
            if facts.unit is not None:
                info_labels = {"unit": facts.unit, "pattern": facts.pattern or "", "pack": facts.pack}
                row.add(PROGRESS_INFO, 1, **info_labels)
            row.add(THROUGHPUT, facts.rate, window="current")
            row.add(THROUGHPUT, facts.average_rate, window="average")
            if facts.eta is not None:
                row.add(ETA, facts.eta.low, quantile="0.1")
                row.add(ETA, facts.eta.seconds, quantile="0.5")
                row.add(ETA, facts.eta.high, quantile="0.9")
                row.add(FINISH, facts.read_at + facts.eta.seconds)
            row.add(LAST_PROGRESS, facts.last_rise)
            if facts.stalled is not None:
                row.add(STALLED, int(facts.stalled))
            row.add(SLOWDOWN, facts.slowdown)
            row.add(UNMATCHED, int(facts.unmatched is not None))
            for name, value, seen in facts.values:
                row.add(LOG_VALUE, value, name=name)
                row.add(LOG_VALUE_TIME, seen, name=name)
            for pattern, severity, count in facts.errors:
                row.add(LOG_ERRORS, count, pattern=pattern, severity=severity)
            row.add(LOG_BYTES, facts.bytes_read)
            row.add(LOG_LINES, facts.lines)
            row.add(LOG_LAG, facts.lag_bytes)
        for name, given_up in snapshot.timeouts:
            out.add(TIMEOUTS, given_up, pattern=name)
        job_eta.render_outlook(snapshot.outlook, snapshot.workers, out)

    def describe(self, snapshot: LogsSnapshot, parts: StatusParts) -> None:
        for facts in snapshot.workers:
            parts.add_worker(
                facts.task.rank,
                LogStatus(
                    unit=facts.unit,
                    pattern=facts.pattern,
                    items=facts.position,
                    items_expected=facts.expected,
                    items_processed=facts.processed,
                    items_first=facts.first,
                    rate=facts.rate,
                    average_rate=facts.average_rate,
                    output_tokens_per_second=facts.output_tokens_rate,
                    input_tokens_per_second=facts.input_tokens_rate,
                    eta=facts.eta,
                    eta_time=facts.read_at if facts.eta is not None else None,
                    last_progress=facts.last_rise,
                    stalled=facts.stalled,
                    stalled_at_end=facts.stalled_at_end,
                    at=facts.phase,
                    confidence=facts.confidence,
                    slowdown=facts.slowdown,
                    lag=snapshot.outlook.lags.get(facts.task.rank),
                    pack=facts.pack,
                    values=facts.last_values,
                    best_values=facts.best_values,
                    epoch=facts.epoch,
                    log_errors={pattern: count for pattern, _, count in facts.errors if count},
                    log_lag_bytes=facts.lag_bytes,
                    log_problems=(*facts.problems, *([facts.unmatched] if facts.unmatched is not None else ())),
                    prior=facts.prior._asdict() if facts.prior is not None else None,
                ),
            )
            if facts.unmatched is not None and facts.unmatched_at is not None:
                parts.events.append(
                    Event(
                        time=facts.unmatched_at,
                        level="warning",
                        event="progress unknown",
                        worker=facts.task.worker,
                        rank=facts.task.rank,
                        detail=facts.first_unmatched or facts.unmatched,  # with another text it would be a new event
                    )
                )
        parts.outlook = snapshot.outlook.job.replace(pattern_notes=snapshot.notes)


def load_run_history(job_name: str) -> dict[str, RunPrior]:
    """Priors from the last run of a job of this name, by role; empty if reading takes too long.

    The home directory may hang even if the run directory does not.
    """
    runs: queue.SimpleQueue[Sequence[RunHistory]] = queue.SimpleQueue()
    threading.Thread(
        target=lambda: runs.put(read_run_history(job_name, os.environ)), name="earlier-runs", daemon=True
    ).start()
    found = {}
    try:
        for run in runs.get(timeout=HISTORY_TIMEOUT_S):
            for role, prior in run.prior.items():
                with contextlib.suppress(ValueError):
                    found[role] = RunPrior.from_json(prior)
    except queue.Empty:
        log.warning("earlier runs of the job are unknown: no answer from their file in %g s", HISTORY_TIMEOUT_S)
    return found


def job_deadline(context: CollectorContext) -> float | None:
    """End of the job's time limit, if known."""
    identity, limit_s = context.identity, context.manifest.time_limit_s
    if context.limit_end is not None:
        return context.limit_end
    return identity.start + limit_s if identity.start is not None and limit_s is not None else None
