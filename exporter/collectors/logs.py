"""Logs to progress: position, work done, throughput, time left, values and errors of each worker."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from exporter import records
from exporter.collectors.base import WORKER_LABELS, Context, Status, worker_labels
from exporter.derive.eta import Estimate, RecentRateEstimator
from exporter.derive.patterns import ERRORS, PROGRESS, Pattern, Scan, Scanner, compile_pattern, merge
from exporter.derive.progress import Progress, expected_items
from exporter.derive.workers import worker_rank
from exporter.families import Family, Samples
from exporter.identity import safe_label
from exporter.manifest import LogPattern, Task
from exporter.readers.tail import LogTail
from exporter.readers.worker_logs import extra_logs, log_paths

ITEMS = Family("worker_items", "Position of the worker: items done as its log says.", labels=WORKER_LABELS)
ITEMS_EXPECTED = Family("worker_items_expected", "Items the worker has to do in all.", labels=WORKER_LABELS)
ITEMS_PROCESSED = Family(
    "worker_items_processed_total",
    "Items done since the job started; never falls, work of an earlier job does not count.",
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
    kind="summary",  # what the label `quantile` is reserved for
)
FINISH = Family("worker_finish_timestamp_seconds", "When the worker should be done.", labels=WORKER_LABELS)
LAST_PROGRESS = Family("worker_progress_last_timestamp_seconds", "When the position last rose.", labels=WORKER_LABELS)
STALLED = Family(
    "worker_stalled",
    "Whether a worker with work left has been silent for the stall timeout.",
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

VALUE_FRESH_S = 900.0
"""A logged value older than this is no longer shown: silence is not the last value."""


@dataclass(frozen=True)
class LogFacts:
    """What the logs of one worker have said so far."""

    task: Task
    position: int | None
    expected: int | None
    processed: int | None
    last_rise: float | None
    rate: float | None
    average_rate: float | None
    eta: Estimate | None
    stalled: bool | None
    values: tuple[tuple[str, float, float], ...]
    """(name, value, time) of each value that is fresh."""
    errors: tuple[tuple[str, str, int], ...]
    """(pattern, severity, lines) of each error pattern."""
    bytes_read: int
    lines: int
    lag_bytes: int
    read_at: float


@dataclass
class _Followed:
    """One worker's logs and what came out of them."""

    task: Task
    errors: dict[str, int]
    tails: dict[str, LogTail] = field(default_factory=dict)
    restart: int = -1
    progress: Progress = field(default_factory=Progress)
    estimator: RecentRateEstimator = field(default_factory=RecentRateEstimator)
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    lines: int = 0
    ended: bool = False
    """Whether its latest run has ended: it has no rate and no time left then."""
    source: str | None = None
    """The log of this run that gives the position: a worker may write the same lines to two."""


class LogsCollector:
    """Follows the logs of this node's workers."""

    name = "logs"
    families = (
        ITEMS,
        ITEMS_EXPECTED,
        ITEMS_PROCESSED,
        THROUGHPUT,
        ETA,
        FINISH,
        LAST_PROGRESS,
        STALLED,
        LOG_VALUE,
        LOG_VALUE_TIME,
        LOG_ERRORS,
        LOG_BYTES,
        LOG_LINES,
        LOG_LAG,
    )

    def __init__(self, context: Context) -> None:
        manifest = context.manifest
        self._context = context
        self.interval_s = manifest.check_interval_s
        progress = merge(PROGRESS, _compile(manifest.progress))
        errors = merge(ERRORS, _compile(manifest.errors))
        self._scanner = Scanner(progress, errors)
        self._severity = {pattern.name: pattern.severity or "warning" for pattern in errors}
        self._rank_of = partial(worker_rank, ranks=manifest.ranks_of_roles())
        self._followed = [_Followed(task, dict.fromkeys(self._severity, 0)) for task in context.tasks]

    def read(self) -> tuple[LogFacts, ...]:
        restarts = self._restarts()
        extra = extra_logs(self._context.manifest, self._rank_of)
        return tuple(self._look(followed, restarts, extra) for followed in self._followed)

    def _restarts(self) -> dict[tuple[str, int], int]:
        """Latest run of each worker, by (worker, rank), from the names of the start records."""
        latest: dict[tuple[str, int], int] = {}
        attempt = self._context.identity.attempt
        folder = self._context.manifest.run_dir / records.WORKERS_DIR
        for followed in self._followed:
            task, restart = followed.task, max(0, followed.restart)
            while (folder / f"{records.record_name(task.worker, task.rank, attempt, restart + 1)}.start.json").exists():
                restart += 1
            latest[(task.worker, task.rank)] = restart
        return latest

    def _look(
        self, followed: _Followed, restarts: dict[tuple[str, int], int], extra: dict[int, list[Path]]
    ) -> LogFacts:
        task, context = followed.task, self._context
        restart = restarts[(task.worker, task.rank)]
        while followed.restart < restart:
            if followed.restart >= 0:
                self._drain(followed)  # the last words of the run before, ahead of the first of the next
                for tail in followed.tails.values():
                    tail.close()
                followed.progress.begin_run()
                followed.source = None
            followed.restart += 1
            for path in log_paths(
                task, context.manifest.run_dir, context.identity.node, context.identity.attempt, followed.restart
            ):
                followed.tails.setdefault(str(path), LogTail(str(path)))
        for name in map(str, extra.get(task.rank, ())):
            if name not in followed.tails:
                followed.tails[name] = LogTail(name)
                followed.tails[name].skip_older(context.identity.start)
        self._drain(followed)
        followed.ended = self._has_ended(task, followed.restart)
        if followed.ended:
            for tail in followed.tails.values():
                self._take_text(followed, tail.rest(), tail.path)
        if followed.progress.position is not None:
            # one reading per look: lines that came in one piece have no times of their own
            followed.estimator.update(context.clock.time(), followed.progress.position, self._expected(followed))
        return self._facts(followed)

    def _drain(self, followed: _Followed) -> None:
        for tail in followed.tails.values():
            for chunk in tail.read():
                self._take_text(followed, chunk, tail.path)

    def _has_ended(self, task: Task, restart: int) -> bool:
        """Whether this run has left its exit record: its log gets no more lines, nor the end of the last one."""
        name = records.record_name(task.worker, task.rank, self._context.identity.attempt, restart)
        return (self._context.manifest.run_dir / records.WORKERS_DIR / f"{name}.exit.json").exists()

    def _take_text(self, followed: _Followed, text: bytes, path: str) -> None:
        if text:
            followed.lines += text.count(b"\n") + (not text.endswith((b"\n", b"\r")))
            self._take(followed, self._scanner.scan(text), path)

    def _take(self, followed: _Followed, scan: Scan, path: str) -> None:
        now = self._context.clock.time()
        if scan.positions and followed.source is None:
            followed.source = path
        positions = scan.positions if path == followed.source else []
        for resumed, done, total in positions:
            if resumed:
                followed.progress.resume(done, total)
            else:
                followed.progress.update(now, done, total)
        for name, value in scan.values.items():
            followed.values[name] = (value, now)
        for name, count in scan.errors.items():
            followed.errors[name] += count

    def _expected(self, followed: _Followed) -> int | None:
        if followed.progress.total is not None:
            return followed.progress.total
        manifest = self._context.manifest
        return expected_items(manifest.total_items, len(manifest.tasks), followed.task.rank)

    def _facts(self, followed: _Followed) -> LogFacts:
        now = self._context.clock.time()
        progress, estimator = followed.progress, followed.estimator
        alarms = estimator.alarms(now, self._context.manifest.stall_timeout_s)
        return LogFacts(
            task=followed.task,
            position=progress.position,
            expected=self._expected(followed),
            processed=progress.processed,
            last_rise=progress.last_rise,
            rate=None if followed.ended else estimator.rate(now),
            average_rate=estimator.average_rate(now),
            eta=None if followed.ended else estimator.estimate(now),
            stalled=alarms["stalled"] and not followed.ended if progress.position is not None else None,
            values=tuple(
                (name, value, time) for name, (value, time) in followed.values.items() if now - time < VALUE_FRESH_S
            ),
            errors=tuple((name, self._severity[name], count) for name, count in followed.errors.items()),
            bytes_read=sum(tail.bytes_read for tail in followed.tails.values()),
            lines=followed.lines,
            lag_bytes=sum(tail.lag_bytes for tail in followed.tails.values()),
            read_at=now,
        )

    def render(self, snapshot: tuple[LogFacts, ...], out: Samples) -> None:
        for facts in snapshot:
            labels = worker_labels(facts.task)
            out.add(ITEMS, facts.position, **labels)
            out.add(ITEMS_EXPECTED, facts.expected, **labels)
            out.add(ITEMS_PROCESSED, facts.processed, **labels)
            out.add(THROUGHPUT, facts.rate, **labels, window="current")
            out.add(THROUGHPUT, facts.average_rate, **labels, window="average")
            if facts.eta is not None:
                out.add(ETA, facts.eta.low, **labels, quantile="0.1")
                out.add(ETA, facts.eta.seconds, **labels, quantile="0.5")
                out.add(ETA, facts.eta.high, **labels, quantile="0.9")
                out.add(FINISH, facts.read_at + facts.eta.seconds, **labels)
            out.add(LAST_PROGRESS, facts.last_rise, **labels)
            if facts.stalled is not None:
                out.add(STALLED, int(facts.stalled), **labels)
            for name, value, time in facts.values:
                out.add(LOG_VALUE, value, **labels, name=name)
                out.add(LOG_VALUE_TIME, time, **labels, name=name)
            for pattern, severity, count in facts.errors:
                out.add(LOG_ERRORS, count, **labels, pattern=pattern, severity=severity)
            out.add(LOG_BYTES, facts.bytes_read, **labels)
            out.add(LOG_LINES, facts.lines, **labels)
            out.add(LOG_LAG, facts.lag_bytes, **labels)

    def describe(self, snapshot: tuple[LogFacts, ...], status: Status) -> None:
        for facts in snapshot:
            status.worker(facts.task.rank).update(
                items=facts.position,
                items_expected=facts.expected,
                items_processed=facts.processed,
                rate=facts.rate,
                average_rate=facts.average_rate,
                eta=facts.eta._asdict() if facts.eta is not None else None,
                last_progress=facts.last_rise,
                stalled=facts.stalled,
                values={name: value for name, value, _ in facts.values if math.isfinite(value)},  # JSON has no others
                log_errors={pattern: count for pattern, _, count in facts.errors if count},
                log_lag_bytes=facts.lag_bytes,
            )


def _compile(patterns: Iterable[LogPattern]) -> list[Pattern]:
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(compile_pattern(safe_label(pattern.name), pattern.pattern, pattern.severity))
        except (re.error, ValueError, OverflowError):
            continue  # the launcher refuses these before it submits
    return compiled
