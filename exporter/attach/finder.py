"""Finds the workers of an attached job, writes their start records and publishes the phase of the job.

It runs in a slot like a collector, on its own thread. It writes the start records that a wrapper would write, so
readers of records need no special case. On several nodes, every sidecar finds the workers of its node; the one of the
first node publishes phase and events for all.
"""

import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from exporter.attach.workers_reader import PID_FILE_NAME, WorkerCandidate, WorkerSearch
from exporter.collecting.collector import StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract import run_files
from exporter.contract.events import Event, EventFilter, EventLog, event_title
from exporter.contract.manifest import Task
from exporter.contract.process_identity import read_pid_namespace
from exporter.contract.records import RecordError, from_json
from exporter.contract.status import LISTED_RUNS, NodeStatus, WorkerStatus
from exporter.sidecar.sidecar import PUBLISH_INTERVAL_S, Sidecar
from exporter.workers.collector import WorkersCollector

SETTLE_S = 2.0  # minimum age of a process without a number, so that earlier ones have been found before it
RESTART_S = 3.0  # all workers must have ended for this long before the job is over, because scripts may restart them
TICK_SLACK_S = 1.0  # tolerance for a start that seems to be earlier than the end before it

_ENDS = frozenset(("worker ended", "worker daemonised"))  # events that also go to our log

log = logging.getLogger("gpujob.finder")


class WorkerFinder:
    """Searches every second until all workers are found, then every check interval for restarted ones."""

    name = "finder"
    interval_s = 1.0
    families: tuple[Family, ...] = ()

    def __init__(self, sidecar: Sidecar, search: WorkerSearch) -> None:
        context = sidecar.context
        self._sidecar = sidecar
        self._search = search
        self._context = context
        self._manifest = context.manifest
        self._workers_dir = context.manifest.run_dir / run_files.WORKERS_DIR
        self._tasks = {task.rank: task for task in context.tasks}
        self._runs: dict[int, deque[WorkerCandidate]] = {}  # last runs by rank
        self._run_counts: Counter[int] = Counter()
        for task in context.tasks:
            self._read_runs(task)
        self._phases = _JobPhases(sidecar) if context.identity.node_index == 0 else None
        self._started_at = context.clock.monotonic()
        self._searched_at = float("-inf")
        self._idle_since: float | None = None  # since when no worker of this node is running
        self._gone: Mapping[int, str] = {}
        self._problems: tuple[str, ...] = ()
        self._surplus_reported = False
        self._events: deque[Event] = deque(maxlen=50)

    def read(self) -> tuple[Event, ...]:
        now = self._context.clock.time()
        status = self._sidecar.status()
        entries = {worker.rank: worker for worker in status.workers}
        ends = {rank: self._end_time(rank, entries.get(rank)) for rank in self._tasks}
        if not self._sidecar.final and self._is_due(ends, now):
            self._searched_at = self._context.clock.monotonic()
            self._find_workers(entries, ends, now)
        if self._phases is not None:
            found = {rank: ends[rank] for rank, runs in self._runs.items() if runs}
            missing = self._phases.update(status, found, self._gone, self._waited_s(), now)
            if missing:
                self._report_missing(missing, now)
        return tuple(self._events)

    def render(self, snapshot: tuple[Event, ...], out: Samples) -> None:
        """Add nothing: workers have their own series."""

    def describe(self, snapshot: tuple[Event, ...], parts: StatusParts) -> None:
        parts.events += snapshot

    # -- records -----------------------------------------------------------------------------------

    def _record_path(self, task: Task, restart: int) -> Path:
        stem = run_files.record_name(task.worker, task.rank, self._context.identity.attempt, restart)
        return self._workers_dir / f"{stem}.start.json"

    def _read_runs(self, task: Task) -> None:
        """Read the runs recorded by an earlier sidecar of this directory."""
        self._runs[task.rank] = deque(maxlen=LISTED_RUNS)
        while (record := run_files.read_json(self._record_path(task, self._run_counts[task.rank]))) is not None:
            try:
                self._add_run(task, from_json(WorkerCandidate, record))
            except RecordError:
                break

    def _add_run(self, task: Task, candidate: WorkerCandidate) -> None:
        self._runs[task.rank].append(candidate)
        self._run_counts[task.rank] += 1

    def _write_run(self, task: Task, candidate: WorkerCandidate) -> None:
        restart, identity = self._run_counts[task.rank], self._context.identity
        run_files.write_json(
            self._record_path(task, restart),
            {
                "schema": run_files.RECORD_SCHEMA,
                "worker": task.worker,
                "rank": task.rank,
                "attempt": identity.attempt,
                "restart": restart,
                "host": os.uname().nodename,
                "node": identity.node,
                "pid_namespace": read_pid_namespace(self._context.proc),
                "pid": candidate.pid,
                "start_ticks": candidate.start_ticks,
                "start": candidate.start,
                "found_by": candidate.found_by,
                "directory": candidate.directory,
                "session": candidate.session,
            },
        )
        self._add_run(task, candidate)
        log.info("%s is process %d (found by %s)", task.worker, candidate.pid, candidate.found_by)
        for slot in self._sidecar.slots:
            if slot.collector.name == WorkersCollector.name:
                slot.request()  # read immediately, so that an end within the next second is noticed

    # -- search ------------------------------------------------------------------------------------

    def _end_time(self, rank: int, worker: WorkerStatus | None) -> float | None:
        """End of a worker's latest run; None if it runs or was never found."""
        latest = self._run_counts[rank] - 1
        return next((end.time for end in (worker.exits if worker else ()) if end.restart == latest), None)

    def _is_due(self, ends: Mapping[int, float | None], now: float) -> bool:
        """Whether to search now: always while workers are expected, else once per check interval."""
        if any(runs and ends[rank] is None for rank, runs in self._runs.items()):
            self._idle_since = None
        elif self._idle_since is None and any(self._runs.values()):
            self._idle_since = now
        if not self._all_found() and self._waited_s() < self._manifest.launch_timeout_s:
            return True
        if self._idle_since is not None and now - self._idle_since <= RESTART_S:
            return True
        wanted = any(not runs or ends[rank] is not None for rank, runs in self._runs.items())
        return wanted and self._context.clock.monotonic() - self._searched_at >= self._manifest.check_interval_s

    def _find_workers(self, entries: Mapping[int, WorkerStatus], ends: dict[int, float | None], now: float) -> None:
        running = {runs[-1].pid for rank, runs in self._runs.items() if runs and ends[rank] is None}
        # A daemonised worker has another pid than its record.
        running |= {worker.pid for worker in entries.values() if worker.up and worker.pid}
        found = self._search.find(running, by_name=not self._has_pid_file())
        self._gone = {rank: why for number, why in found.gone.items() for rank in self._ranks_of_number(number)}
        for problem in found.problems:
            if problem not in self._problems:
                log.warning("%s", problem)
                self._add_event(now, "warning", "pid file", problem)
        self._problems = found.problems
        before = {(run.pid, run.start_ticks) for runs in self._runs.values() for run in runs}
        surplus = []
        for candidate in found.candidates:
            if (candidate.pid, candidate.start_ticks) in before:
                continue
            rank = self._assign_rank(candidate, ends, now)
            if rank is not None:
                self._write_run(self._tasks[rank], candidate)
                ends[rank] = None
            elif candidate.number is not None or now - candidate.start >= SETTLE_S:
                surplus.append(f"{candidate.pid} ({candidate.command})" if candidate.command else str(candidate.pid))
        if surplus and not self._surplus_reported and self._all_found():
            self._surplus_reported = True
            pids = ", ".join(surplus[:16])
            detail = f"{len(surplus)} more than the {len(self._tasks)} workers expected: pid {pids}"
            log.warning("processes that resemble workers are not watched: %s", detail)
            self._add_event(now, "warning", "surplus", detail)

    def _ranks_of_number(self, number: int) -> list[int]:
        """Rank with this number of a worker, which counts within the job or within this node; empty without one."""
        local = sorted(self._tasks)
        if number in self._tasks:
            return [number]
        return local[number : number + 1]

    def _assign_rank(self, candidate: WorkerCandidate, ends: Mapping[int, float | None], now: float) -> int | None:
        """Rank of the worker that this process is, if that worker is missing or has ended; else None."""
        if candidate.number is not None:
            ranks = self._ranks_of_number(candidate.number)
        elif now - candidate.start < SETTLE_S:
            return None
        else:
            ranks = sorted(self._tasks, key=lambda rank: (bool(self._runs[rank]), rank))
        for rank in ranks:
            if not self._runs[rank]:
                return rank
            end, before = ends[rank], self._runs[rank][-1]
            if end is None or not _may_be_next_run(before, candidate):
                continue
            # Leftover processes are older than the end of their worker. A pid file is explicit.
            if candidate.start >= end - TICK_SLACK_S or (
                candidate.found_by == "pid_file" and candidate.start > before.start
            ):
                return rank
        return None

    def _has_pid_file(self) -> bool:
        """Whether a worker was found by pid file; names are then ignored."""
        return any(run.found_by == "pid_file" for runs in self._runs.values() for run in runs)

    def _all_found(self) -> bool:
        return all(self._runs.values())

    def _waited_s(self) -> float:
        return self._context.clock.monotonic() - self._started_at

    def _report_missing(self, missing: Sequence[Task], now: float) -> None:
        names = ", ".join(
            task.worker + (f" ({self._gone[task.rank]})" if task.rank in self._gone else "") for task in missing
        )
        count, waited = len(self._manifest.tasks), min(self._waited_s(), self._manifest.launch_timeout_s)
        problems = "".join(f"; {problem}" for problem in self._problems)
        text = f"found {count - len(missing)} of {count} workers within {waited:.0f} s; missing: {names}{problems}"
        if any(task.rank not in self._gone for task in missing):
            name = "" if self._has_pid_file() else ", or put the job's name into their command lines"
            text += f"; write their pids to {PID_FILE_NAME} in the log directory, or to --pid-file{name}"
        log.error("%s", text)
        self._add_event(now, "critical", "launch incomplete", text)

    def _add_event(self, now: float, level: str, kind: str, detail: str) -> None:
        self._events.append(Event(time=now, level=level, event=kind, detail=detail))


class _JobPhases:
    """Phase and events of the whole job, from the workers of all nodes."""

    def __init__(self, sidecar: Sidecar) -> None:
        context = sidecar.context
        self._sidecar = sidecar
        self._context = context
        self._manifest = context.manifest
        self._phase = ""
        self._published_phase = ""
        self._all_ended_since: float | None = None
        self._elsewhere: dict[str, NodeStatus] = {}  # last statuses of the other nodes
        self._elsewhere_read_at = float("-inf")
        self._log = EventLog(context.manifest.run_dir / run_files.EVENTS_FILE, context.identity.job_id)
        self._filter = EventFilter()

    def update(
        self,
        status: NodeStatus,
        found: Mapping[int, float | None],
        gone: Mapping[int, str],
        waited_s: float,
        now: float,
    ) -> list[Task]:
        """Publish events and phase; return the tasks to report as missing, once.

        ``found`` are the workers of this node with the end of the latest run, None while it runs. ``gone`` are those
        that can no longer be found.
        """
        if self._phase == "finished":
            return []
        self._read_elsewhere()
        statuses = {self._context.identity.node: status, **self._elsewhere}
        self._log_events((node, event) for node, seen in statuses.items() for event in seen.events)
        found = {**found, **self._found_elsewhere()}
        running = any(end is None for end in found.values())
        if running:
            self._all_ended_since = None
        elif self._all_ended_since is None and found:
            self._all_ended_since = now
        over = self._all_ended_since is not None and now - self._all_ended_since >= RESTART_S
        missing = [task for task in self._manifest.tasks if task.rank not in found]
        to_report: list[Task] = []
        if self._phase in ("", "launching"):
            late = waited_s >= self._manifest.launch_timeout_s
            if missing and not late and not (over and all(task.rank in gone for task in missing)):
                self._enter("launching")
                return []
            to_report = missing
        if running:
            self._enter("running")
        elif not over and found:
            self._enter("completing")
        elif self._sidecar.final and self._phase == "ended":
            self._enter("finished")
        else:
            self._enter("ended")
        return to_report

    def _enter(self, phase: str) -> None:
        """Publish a phase; ``ended`` is ``completing`` without any worker left."""
        if phase != self._phase:
            shown = "completing" if phase == "ended" else phase
            run_files.write_job_state(
                str(self._manifest.run_dir),
                shown,
                workers_ended=phase in ("ended", "finished"),
                attempt=self._context.identity.attempt,
            )
            if shown != self._published_phase:
                self._published_phase = shown
                self._log.write("phase", phase=shown)
            self._phase = phase

    def _log_events(self, found: Iterable[tuple[str, Event]]) -> None:
        """Log new events of these nodes."""
        for node, event in self._filter.find_new(found):
            if event.event in _ENDS:
                log.info("%s: %s", event_title(event), event.detail)
            body = {**event.to_json(), "node": node}
            facts = {name: value for name, value in body.items() if name != "event" and value not in ("", None)}
            self._log.write(event.event, **facts)

    def _read_elsewhere(self) -> None:
        """Read what the sidecars of the other nodes have published in this attempt."""
        now = self._context.clock.monotonic()
        if self._manifest.nodes == 1 or now - self._elsewhere_read_at < PUBLISH_INTERVAL_S / 2:
            return
        self._elsewhere_read_at = now
        own, attempt = self._context.identity.node, self._context.identity.attempt
        self._elsewhere = {}
        for path in sorted((self._manifest.run_dir / run_files.STATUS_DIR).glob("*.json")):
            status = NodeStatus.read_valid(path) if path.stem != own else None
            if status is not None and status.attempt == attempt:
                self._elsewhere[path.stem] = status

    def _found_elsewhere(self) -> dict[int, float | None]:
        workers = [worker for status in self._elsewhere.values() for worker in status.workers]
        return {
            worker.rank: worker.exit.time if worker.exit and not worker.up else None
            for worker in workers
            if worker.start is not None
        }


def _may_be_next_run(before: WorkerCandidate, candidate: WorkerCandidate) -> bool:
    """Whether a process can be the next run of a worker; other programs may also contain the job's name.

    A worker returns by the method that found it. One found by name may return by a more certain method, or by name in
    the same directory or session.
    """
    if before.found_by != "name":
        return candidate.found_by == before.found_by
    return candidate.found_by != "name" or candidate.is_related(before.directory, before.session)
