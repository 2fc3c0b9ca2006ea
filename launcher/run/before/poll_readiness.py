"""Poll the services of a job for readiness, until SIGTERM or the end of the parent process.

    python -I -B -m launcher.run.before.poll_readiness --run-dir DIR

Each rule is polled every interval, and less often when all are ready. The orchestrator and the sidecar read the
result in ``readiness.json``. Standard output is for people and for parsers of benchmark logs, which rely on its
lines.
"""

import argparse
import heapq
import http.client
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import RecordError, from_json, to_json
from launcher.plan.plan import BENCHMARK, COUNTING_KINDS, PLAN_FILE, ReadinessPlan, ReadyRule
from launcher.run.before.readiness import (
    JobReadiness,
    RuleReadiness,
    RuleStatus,
    ServerReply,
    missing_text,
    present_text,
    request_paths,
    rule_status,
    unreached_status,
    without_workers,
    worker_totals,
)
from launcher.run.job_log import log_raw_line
from launcher.rundir.job_records import AbandonedWorkers, read_orchestrator

CONNECT_S = 3.0
ANSWER_S = 10.0  # for all requests of one rule, which also ends servers that send byte by byte
# between two connection attempts to a port: services that others wait for start within seconds
CONNECT_INTERVAL_S = 1.0
READY_INTERVAL_S = 10.0  # shortest interval once everything is ready
REPEAT_INTERVAL_S = 60.0  # between two equal lines, and two equal files
ABANDONED_INTERVAL_S = 1.0  # between two reads of the workers that the job continues without
PUBLISH_INTERVAL_S = 0.5  # interval between evaluations for 1000 rules or more, proportionally less for fewer
MOST_THREADS = 16
FREE_THREADS = 4  # threads kept free of services that were late: they may take long again
MOST_BODY = 4 * 1024 * 1024
LOAD_INTERVAL_S = 0.2
MOST_PAUSE_S = 10.0  # longest wait before checking whether the parent still runs


@dataclass(frozen=True)
class ReadinessTarget:
    """One rule with its address."""

    rule: ReadyRule
    host: str
    port: int

    @property
    def address(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """URL for messages."""
        paths = request_paths(self.rule)
        return f"http://{self.address}{paths[0]}" if paths else f"tcp://{self.address}"


class PollResult(NamedTuple):
    """Result of polling a rule once."""

    status: RuleStatus
    is_late: bool = False  # whether there was no answer in time


class ReadinessRequest:
    """One poll of a rule, run on its own thread. ``cancel`` may be called from another."""

    def __init__(self, target: ReadinessTarget) -> None:
        self._target = target
        self._socket: socket.socket | None = None
        self._is_cancelled = False
        self.deadline = time.monotonic() + ANSWER_S

    def cancel(self) -> None:
        """Abort a pending read from the network."""
        self._is_cancelled = True
        waiting = self._socket
        if waiting is not None:
            try:
                waiting.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended by itself

    def poll(self) -> PollResult:
        """Poll the service; never raises."""
        target = self._target
        try:
            return PollResult(self._poll_service())
        except TimeoutError:
            return PollResult(unreached_status(target.rule, f"no answer from {target.address} in time"), is_late=True)
        except Exception as error:  # noqa: BLE001 - one service's answer must not stop the others
            if self._is_cancelled:
                return PollResult(
                    unreached_status(target.rule, f"no answer from {target.address} in time"), is_late=True
                )
            return PollResult(unreached_status(target.rule, _error_text(error, target)))

    def _poll_service(self) -> RuleStatus:
        target, replies = self._target, list[ServerReply]()
        paths = request_paths(target.rule)
        if not paths:
            socket.create_connection((target.host, target.port), CONNECT_S).close()
        for path in paths:
            replies.append(self._get(path))
            if replies[-1].status != 200:
                break
        return rule_status(target.rule, replies)

    def _get(self, path: str) -> ServerReply:
        connection = http.client.HTTPConnection(self._target.host, self._target.port, timeout=CONNECT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            left_s = self.deadline - time.monotonic()
            if self._is_cancelled or left_s <= 0:
                raise TimeoutError
            connection.sock.settimeout(left_s)
            connection.request("GET", path, headers={"Accept": "application/json", "Connection": "close"})
            with connection.getresponse() as response:
                body = response.read(MOST_BODY)
                if len(body) == MOST_BODY:
                    raise http.client.HTTPException(f"more than {MOST_BODY} bytes")
                if response.length:  # read(limit) does not report a short body
                    raise http.client.IncompleteRead(body, response.length)
                return ServerReply(response.status, body)
        finally:
            self._socket = None
            connection.close()


def _error_text(error: Exception, target: ReadinessTarget) -> str:
    """Describe why a service cannot be polled."""
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused by {target.address}"
    if isinstance(error, ConnectionError):  # e.g. the server ended before it answered
        return f"connection closed by {target.address}"
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer from {target.address} is truncated"
    if isinstance(error, OSError):
        return f"{target.address} cannot be reached: {error.strerror or error}"
    return f"{target.address} does not answer in HTTP: {str(error) or type(error).__name__}"


class ReadinessPoller:
    """Polls all targets repeatedly on a few threads, so that a slow one does not delay others."""

    def __init__(self, targets: Sequence[ReadinessTarget], interval_s: float) -> None:
        self._targets = targets
        self._interval_s = interval_s
        self.statuses = [unreached_status(target.rule, "not polled yet") for target in targets]
        self.polled = [False] * len(targets)
        # heaps of (due, index): targets that answer in time, and late ones
        self._schedules: tuple[list[tuple[float, int]], ...] = ([(0.0, index) for index in range(len(targets))], [])
        self._next_due = [0.0] * len(targets)
        self._was_late = [False] * len(targets)
        self._pending: dict[int, ReadinessRequest] = {}
        self._threads = min(MOST_THREADS, len(targets))
        self._work: queue.SimpleQueue[tuple[int, ReadinessRequest]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[int, PollResult] | None] = queue.SimpleQueue()
        for _ in range(self._threads):
            threading.Thread(target=self._serve, daemon=True).start()  # name resolution cannot be interrupted

    def _serve(self) -> None:
        while True:
            index, question = self._work.get()
            self._results.put((index, question.poll()))

    def set_interval(self, interval_s: float) -> None:
        """Set the interval; a shorter one also applies to polls that are already scheduled."""
        if interval_s < self._interval_s:
            latest = time.monotonic() + interval_s
            self._next_due = [min(due, latest) for due in self._next_due]
            for turns in self._schedules:
                turns[:] = [(min(due, latest), index) for due, index in turns]
                heapq.heapify(turns)
        self._interval_s = interval_s

    def wake(self) -> None:
        """End the current ``step``; safe in a signal handler."""
        self._results.put(None)

    def step(self, end: float = math.inf) -> bool:
        """Start due polls and wait for a result, at most until ``end``. Return whether there was one."""
        now = time.monotonic()
        for question in self._pending.values():
            if question.deadline <= now:
                question.cancel()
        self._start_due(now)
        moments = [
            max(now, end),
            now + MOST_PAUSE_S,
            *(question.deadline for question in self._pending.values() if question.deadline > now),
        ]
        if len(self._pending) < self._threads:
            moments += [turns[0][0] for turns in self._schedules if turns and turns[0][0] > now]
        fresh = False
        try:
            news = self._results.get(timeout=min(moments) - now)
            while news is not None:
                self._apply_result(*news)
                fresh = True
                news = self._results.get_nowait()
        except queue.Empty:
            pass
        return fresh

    def _start_due(self, now: float) -> None:
        kept = FREE_THREADS if len(self._targets) > self._threads else 0
        slow = sum(self._was_late[index] for index in self._pending)
        for late, turns in enumerate(self._schedules):
            while turns and turns[0][0] <= now and len(self._pending) < self._threads:
                if late and slow >= self._threads - kept:
                    return
                slow += late
                _, index = heapq.heappop(turns)
                self._pending[index] = question = ReadinessRequest(self._targets[index])
                asks_little = self._targets[index].rule.kind == "tcp" and not self.statuses[index].ready
                self._next_due[index] = now + (
                    min(self._interval_s, CONNECT_INTERVAL_S) if asks_little else self._interval_s
                )
                self._work.put((index, question))

    def _apply_result(self, index: int, result: PollResult) -> None:
        del self._pending[index]
        # one late answer from a busy engine does not make it unready
        once = result.is_late and not self._was_late[index] and self.statuses[index].ready
        self._was_late[index] = result.is_late
        self.polled[index] = True
        if not once:
            self.statuses[index] = result.status
        heapq.heappush(self._schedules[result.is_late], (self._next_due[index], index))


class ReadinessPublisher:
    """Writes readiness to its file and to standard output."""

    def __init__(
        self, run_dir: Path, targets: Sequence[ReadinessTarget], attempt: int, readiness: ReadinessPlan
    ) -> None:
        self._path = run_dir / run_files.READINESS_FILE
        self._abandoned_path = run_dir / run_files.ABANDONED_FILE
        self._abandoned: Mapping[str, str] = {}  # workers that the job continues without: name -> role
        self._next_abandoned_read_at = 0.0
        self._rules = [target.rule for target in targets]
        self._attempt = attempt
        self._readiness = readiness
        self.ready = self._was_ready = False
        self._ready_since: float | None = None
        self._written: JobReadiness | None = None
        self._written_at = self._logged_at = 0.0
        self._logged_waiting: str | None = None
        self._problem: str | None = None

    def publish(self, statuses: Sequence[RuleStatus], now: float, *, is_complete: bool) -> None:
        """Publish changes. Lines wait until it is ``is_complete``: every rule polled once, or ``ANSWER_S`` over."""
        self._read_abandoned(now)
        rules, statuses = without_workers(self._rules, statuses, self._abandoned)
        seen, expected = worker_totals(rules, statuses)
        waiting = missing_text(rules, statuses, seen, expected)
        was_ready, self.ready = self.ready, not waiting
        self._was_ready = self._was_ready or self.ready
        if self.ready != was_ready:
            self._ready_since = time.time() if self.ready else None
        rule_entries = tuple(
            RuleReadiness(rule.subject, rule.kind, status.ready, status.seen, rule.expected, rule.before, status.detail)
            for rule, status in zip(rules, statuses, strict=True)
        )
        found = JobReadiness(
            run_files.RECORD_SCHEMA,
            self._attempt,
            self.ready,
            self._ready_since,
            self._readiness.timeout_s,
            waiting,
            seen,
            expected,
            rule_entries,
        )
        self._write(found, now)
        if self.ready:
            if self._logged_waiting != "":
                log_raw_line("Model is ready." + (f" Have {present_text(seen)}." if expected else ""))
                self._logged_waiting, self._logged_at = "", now
        elif is_complete:
            changed = waiting != self._logged_waiting and (
                was_ready or now - self._logged_at >= self._readiness.interval_s
            )
            if self._logged_waiting is None or changed or now - self._logged_at >= REPEAT_INTERVAL_S:
                log_raw_line(f"Model is not ready, waiting for {waiting} to spin up.")
                self._logged_waiting, self._logged_at = waiting, now

    def _read_abandoned(self, now: float) -> None:
        """Read the workers that the job continues without. After readiness, later losses are reported instead."""
        if self._was_ready or now < self._next_abandoned_read_at:
            return
        self._next_abandoned_read_at = now + ABANDONED_INTERVAL_S
        try:
            found = AbandonedWorkers.from_json(run_files.read_json(self._abandoned_path))
        except RecordError:
            return  # there are none
        if found.attempt == self._attempt:
            self._abandoned = found.workers

    def _write(self, found: JobReadiness, now: float) -> None:
        if found == self._written and now - self._written_at < REPEAT_INTERVAL_S:
            return
        try:
            body = to_json(found._replace(time=time.time()))
            run_files.write_json_with_reserve(self._path.parent, self._path, body, spare=self._path, durable=False)
        except OSError as error:
            problem = f"cannot write {self._path}: {error.strerror}"
            if problem != self._problem:
                log_raw_line(problem)
            self._problem = problem
            return
        self._written, self._written_at, self._problem = found, now, None


def load_readiness_targets(run_dir: Path) -> tuple[ReadinessPlan, tuple[ReadinessTarget, ...], int] | None:
    """Load the readiness plan, targets and attempt; None while the files do not exist."""
    plan, job = run_files.read_json(run_dir / PLAN_FILE), read_orchestrator(run_dir)
    if plan is None or job is None:
        return None
    readiness = from_json(ReadinessPlan, plan.get("readiness") or {"rules": ()})
    hosts = job.addresses or job.hosts
    targets = tuple(ReadinessTarget(rule, hosts[rule.node], rule.port + job.port_offset) for rule in readiness.rules)
    return readiness, targets, job.attempt


def intro_lines(targets: Sequence[ReadinessTarget], interval_s: float) -> list[str]:
    """Name the polled front end, or the service that represents the model."""
    last = [target for target in targets if target.rule.before == BENCHMARK] or list(targets)
    first = next((target for target in last if target.rule.kind in COUNTING_KINDS), last[0])
    more = len(targets) - 1
    return [
        f"Polling {first.url} every {interval_s:g} seconds...",
        *([f"Polling {more} more in the same way..."] if more else []),
    ]


def main(arguments: list[str]) -> int:
    """Poll until SIGTERM; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m launcher.run.before.poll_readiness", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir: Path = parser.parse_args(arguments).run_dir
    parent, is_ended, poller = os.getppid(), False, None

    def end(*_: object) -> None:
        nonlocal is_ended
        is_ended = True
        if poller is not None:
            poller.wake()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    while (loaded := load_readiness_targets(run_dir)) is None:
        if is_ended or os.getppid() != parent:
            return 0
        time.sleep(LOAD_INTERVAL_S)
    readiness, targets, attempt = loaded
    if not targets:
        return 0
    publisher = ReadinessPublisher(run_dir, targets, attempt, readiness)
    for line in intro_lines(targets, readiness.interval_s):
        log_raw_line(line)
    poller, started_at = ReadinessPoller(targets, readiness.interval_s), time.monotonic()
    gap_s = min(PUBLISH_INTERVAL_S, PUBLISH_INTERVAL_S * len(targets) / 1000)
    publish_at, has_results = started_at, False
    while not is_ended and os.getppid() == parent:
        now = time.monotonic()
        if now >= publish_at:
            publisher.publish(poller.statuses, now, is_complete=all(poller.polled) or now - started_at > ANSWER_S)
            poller.set_interval(
                max(readiness.interval_s, READY_INTERVAL_S) if publisher.ready else readiness.interval_s
            )
            publish_at, has_results = now + gap_s, False
        has_results = poller.step(publish_at if has_results else math.inf) or has_results
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
