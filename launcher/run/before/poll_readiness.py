"""Asks the services of a job whether they are ready, until it is ended.

    python -I -B -m launcher.run.before.poll_readiness --run-dir DIR

Each rule of the plan's readiness is asked every interval, more rarely once all hold. What has been found is in
``readiness.json``, for the orchestrator and the sidecar; standard output is for people and for the logs of
benchmarks, whose readers know its lines. It ends with SIGTERM, and with the process that has started it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from exporter.contract import run_files
from launcher.plan.plan import BENCHMARK, COUNTING, PLAN_FILE, ReadinessPlan, ReadyRule
from launcher.run.before.readiness import (
    RuleStatus,
    ServerReply,
    missing_text,
    paths_of,
    present_text,
    rule_status,
    unreached_status,
    without_workers,
    worker_totals,
)
from launcher.run.job_log import log_raw_line

CONNECT_S = 3.0
ANSWER_S = 10.0  # for everything that one rule asks: a server that sends a byte now and then is no answer either
CONNECT_EVERY_S = 1.0
"""Between two looks whether a port takes connections: services that others wait for are up within seconds."""
AFTERWARDS_S = 10.0  # least time between two questions once all is ready
AGAIN_S = 60.0  # between two lines that say the same, and two files
GIVEN_UP_EVERY_S = 1.0  # between two looks whether the orchestrator still counts on all workers
TELL_EVERY_S = 0.5
"""Least time between two looks at what is to be told of many rules, a thousand of them or more; less for fewer."""
MOST_THREADS = 16
FREE_THREADS = 4  # of them, that are kept from services which did not answer in time: those may take long again
MOST_BODY = 4 * 1024 * 1024
LOAD_S = 0.2
MOST_PAUSE_S = 10.0  # after so long without anything to do it looks whether there still is somebody to do it for


@dataclass(frozen=True)
class ReadinessTarget:
    """One rule and where it is asked."""

    rule: ReadyRule
    host: str
    port: int

    @property
    def place(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What is asked, for people."""
        paths = paths_of(self.rule)
        return f"http://{self.place}{paths[0]}" if paths else f"tcp://{self.place}"


class PollResult(NamedTuple):
    """What came of asking once."""

    standing: RuleStatus
    late: bool = False  # whether there was no answer in time, rather than a bad one


class ReadinessRequest:
    """One rule, asked once, on a thread of its own; ``give_up`` may come from another."""

    def __init__(self, target: ReadinessTarget) -> None:
        self._target = target
        self._socket: socket.socket | None = None
        self._given_up = False
        self.end = time.monotonic() + ANSWER_S

    def give_up(self) -> None:
        """End it soon: what it waits for from the network ends now."""
        self._given_up = True
        waiting = self._socket
        if waiting is not None:
            try:
                waiting.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended by itself

    def ask(self) -> PollResult:
        """What the service says; never raises."""
        target = self._target
        try:
            return PollResult(self._ask())
        except TimeoutError:
            return PollResult(unreached_status(target.rule, f"no answer from {target.place} in time"), late=True)
        except Exception as error:  # noqa: BLE001 - whatever a service sends, the others are still to be asked
            if self._given_up:
                return PollResult(unreached_status(target.rule, f"no answer from {target.place} in time"), late=True)
            return PollResult(unreached_status(target.rule, _words(error, target)))

    def _ask(self) -> RuleStatus:
        target, replies = self._target, list[ServerReply]()
        paths = paths_of(target.rule)
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
            left_s = self.end - time.monotonic()
            if self._given_up or left_s <= 0:
                raise TimeoutError
            connection.sock.settimeout(left_s)
            connection.request("GET", path, headers={"Accept": "application/json", "Connection": "close"})
            with connection.getresponse() as response:
                body = response.read(MOST_BODY)
                if len(body) == MOST_BODY:
                    raise http.client.HTTPException(f"more than {MOST_BODY} bytes")
                if response.length:  # a limited read does not say that something is missing
                    raise http.client.IncompleteRead(body, response.length)
                return ServerReply(response.status, body)
        finally:
            self._socket = None
            connection.close()


def _words(error: Exception, target: ReadinessTarget) -> str:
    """Why a service cannot be asked, for people."""
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused by {target.place}"
    if isinstance(error, ConnectionError):  # as when a server goes away before it answers
        return f"connection closed by {target.place}"
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer of {target.place} is cut off"
    if isinstance(error, OSError):
        return f"{target.place} cannot be reached: {error.strerror or error}"
    return f"{target.place} does not answer in HTTP: {str(error) or type(error).__name__}"


class ReadinessPoller:
    """Asks all targets time and again, each on one of a few threads, so that none waits for another."""

    def __init__(self, targets: Sequence[ReadinessTarget], interval_s: float) -> None:
        self._targets = targets
        self._interval_s = interval_s
        self.standings = [unreached_status(target.rule, "not asked yet") for target in targets]
        self.asked = [False] * len(targets)
        self._turns: tuple[list[tuple[float, int]], ...] = ([(0.0, index) for index in range(len(targets))], [])
        """Heaps of when somebody's turn comes: of those who answer in time, and of those who were late."""
        self._next = [0.0] * len(targets)
        self._late = [False] * len(targets)
        self._under_way: dict[int, ReadinessRequest] = {}
        self._threads = min(MOST_THREADS, len(targets))
        self._work: queue.SimpleQueue[tuple[int, ReadinessRequest]] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[tuple[int, PollResult] | None] = queue.SimpleQueue()
        for _ in range(self._threads):
            threading.Thread(target=self._serve, daemon=True).start()  # name resolution cannot be ended

    def _serve(self) -> None:
        while True:
            index, question = self._work.get()
            self._news.put((index, question.ask()))

    def pace(self, interval_s: float) -> None:
        """Ask every so often from now on: nobody's turn comes later than that."""
        if interval_s < self._interval_s:
            latest = time.monotonic() + interval_s
            self._next = [min(due, latest) for due in self._next]
            for turns in self._turns:
                turns[:] = [(min(due, latest), index) for due, index in turns]
                heapq.heapify(turns)
        self._interval_s = interval_s

    def wake(self) -> None:
        """End the present ``step``, also from a signal handler."""
        self._news.put(None)

    def step(self, end: float = math.inf) -> bool:
        """Ask whoever is due, and wait for news, for a while, or until ``end``; whether there was any."""
        now = time.monotonic()
        for question in self._under_way.values():
            if question.end <= now:
                question.give_up()
        self._ask_due(now)
        moments = [
            max(now, end),
            now + MOST_PAUSE_S,
            *(question.end for question in self._under_way.values() if question.end > now),
        ]
        if len(self._under_way) < self._threads:
            moments += [turns[0][0] for turns in self._turns if turns and turns[0][0] > now]
        fresh = False
        try:
            news = self._news.get(timeout=min(moments) - now)
            while news is not None:
                self._take(*news)
                fresh = True
                news = self._news.get_nowait()
        except queue.Empty:
            pass
        return fresh

    def _ask_due(self, now: float) -> None:
        kept = FREE_THREADS if len(self._targets) > self._threads else 0
        slow = sum(self._late[index] for index in self._under_way)
        for late, turns in enumerate(self._turns):
            while turns and turns[0][0] <= now and len(self._under_way) < self._threads:
                if late and slow >= self._threads - kept:
                    return
                slow += late
                _, index = heapq.heappop(turns)
                self._under_way[index] = question = ReadinessRequest(self._targets[index])
                asks_little = self._targets[index].rule.kind == "tcp" and not self.standings[index].ready
                self._next[index] = now + (min(self._interval_s, CONNECT_EVERY_S) if asks_little else self._interval_s)
                self._work.put((index, question))

    def _take(self, index: int, answer: PollResult) -> None:
        del self._under_way[index]
        # a busy engine may be slow once: it has not gone
        once = answer.late and not self._late[index] and self.standings[index].ready
        self._late[index] = answer.late
        self.asked[index] = True
        if not once:
            self.standings[index] = answer.standing
        heapq.heappush(self._turns[answer.late], (self._next[index], index))


class ReadinessPublisher:
    """What is told of readiness, in the file and in lines."""

    def __init__(
        self, run_dir: Path, targets: Sequence[ReadinessTarget], attempt: int, readiness: ReadinessPlan
    ) -> None:
        self._path = run_dir / run_files.READINESS_FILE
        self._given_up_path = run_dir / run_files.GIVEN_UP_FILE
        self._given_up: dict[str, str] = {}
        """Roles of the workers that nobody waits for any more, by their names."""
        self._given_up_due = 0.0
        self._rules = [target.rule for target in targets]
        self._attempt = attempt
        self._readiness = readiness
        self.ready = self._was_ready = False
        self._since: float | None = None
        self._written: dict[str, Any] | None = None
        self._written_at = self._said_at = 0.0
        self._said: str | None = None
        self._problem: str | None = None

    def tell(self, standings: Sequence[RuleStatus], now: float, *, complete: bool) -> None:
        """Say and write what has changed; nothing is said before it is ``complete``, each rule asked once."""
        self._look_for_given_up(now)
        rules, standings = without_workers(self._rules, standings, self._given_up)
        seen, expected = worker_totals(rules, standings)
        waiting = missing_text(rules, standings, seen, expected)
        was_ready, self.ready = self.ready, not waiting
        self._was_ready = self._was_ready or self.ready
        if self.ready != was_ready:
            self._since = time.time() if self.ready else None
        self._write(rules, standings, seen, expected, waiting, now)
        if self.ready:
            if self._said != "":
                log_raw_line("Model is ready." + (f" Have {present_text(seen)}." if expected else ""))
                self._said, self._said_at = "", now
        elif complete:
            changed = waiting != self._said and (was_ready or now - self._said_at >= self._readiness.interval_s)
            if self._said is None or changed or now - self._said_at >= AGAIN_S:
                log_raw_line(f"Model is not ready, waiting for {waiting} to spin up.")
                self._said, self._said_at = waiting, now

    def _look_for_given_up(self, now: float) -> None:
        """Of a job that was ready once it is to be told what it has lost since."""
        if self._was_ready or now < self._given_up_due:
            return
        self._given_up_due = now + GIVEN_UP_EVERY_S
        told: Any = run_files.read_json(self._given_up_path)
        if told is not None and told.get("attempt") == self._attempt:
            self._given_up = told["workers"]

    def _write(
        self,
        rules: Sequence[ReadyRule],
        standings: Sequence[RuleStatus],
        seen: Mapping[str, int],
        expected: Mapping[str, int],
        waiting: str,
        now: float,
    ) -> None:
        body = {
            "schema": run_files.RECORD_SCHEMA,
            "attempt": self._attempt,
            "ready": self.ready,
            "since": self._since,
            "timeout_s": self._readiness.timeout_s,
            "waiting": waiting,
            "seen": seen,
            "expected": expected,
            "rules": [
                {
                    "subject": rule.subject,
                    "kind": rule.kind,
                    "ready": standing.ready,
                    "seen": standing.seen,
                    "expected": rule.expected,
                    "before": rule.before,
                    "detail": standing.detail,
                }
                for rule, standing in zip(rules, standings, strict=True)
            ],
        }
        if body == self._written and now - self._written_at < AGAIN_S:
            return
        try:
            run_files.write_json(self._path, {**body, "time": time.time()}, durable=False)
        except OSError as error:
            problem = f"cannot write {self._path}: {error.strerror}"
            if problem != self._problem:
                log_raw_line(problem)
            self._problem = problem
            return
        self._written, self._written_at, self._problem = body, now, None


def load_readiness_targets(run_dir: Path) -> tuple[ReadinessPlan, tuple[ReadinessTarget, ...], int] | None:
    """How readiness is waited for, where each rule is asked, and the attempt; None while the files are not there."""
    plan, orchestrator = (run_files.read_json(run_dir / name) for name in (PLAN_FILE, run_files.ORCHESTRATOR_FILE))
    if plan is None or orchestrator is None:
        return None
    body: Any = plan.get("readiness") or {"rules": ()}
    facts: Any = orchestrator
    readiness = ReadinessPlan(**{**body, "rules": tuple(ReadyRule(**rule) for rule in body["rules"])})
    hosts, offset = facts.get("addresses") or facts["hosts"], facts.get("port_offset", 0)
    targets = tuple(ReadinessTarget(rule, hosts[rule.node], rule.port + offset) for rule in readiness.rules)
    return readiness, targets, facts["attempt"]


def intro_lines(targets: Sequence[ReadinessTarget], interval_s: float) -> list[str]:
    """The lines that say who is asked: the front end, or whoever stands for the model."""
    last = [target for target in targets if target.rule.before == BENCHMARK] or list(targets)
    first = next((target for target in last if target.rule.kind in COUNTING), last[0])
    more = len(targets) - 1
    return [
        f"Polling {first.url} every {interval_s:g} seconds...",
        *([f"Polling {more} more in the same way..."] if more else []),
    ]


def main(arguments: list[str]) -> int:
    """Ask until SIGTERM; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m launcher.run.before.poll_readiness", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir: Path = parser.parse_args(arguments).run_dir
    parent, ended, poller = os.getppid(), False, None

    def end(*_: object) -> None:
        nonlocal ended
        ended = True
        if poller is not None:
            poller.wake()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    while (loaded := load_readiness_targets(run_dir)) is None:
        if ended or os.getppid() != parent:
            return 0
        time.sleep(LOAD_S)
    readiness, targets, attempt = loaded
    if not targets:
        return 0
    course = ReadinessPublisher(run_dir, targets, attempt, readiness)
    for line in intro_lines(targets, readiness.interval_s):
        log_raw_line(line)
    poller, begun = ReadinessPoller(targets, readiness.interval_s), time.monotonic()
    gap_s = min(TELL_EVERY_S, TELL_EVERY_S * len(targets) / 1000)
    due, fresh = begun, False
    while not ended and os.getppid() == parent:
        now = time.monotonic()
        if now >= due:
            course.tell(poller.standings, now, complete=all(poller.asked) or now - begun > ANSWER_S)
            poller.pace(max(readiness.interval_s, AFTERWARDS_S) if course.ready else readiness.interval_s)
            due, fresh = now + gap_s, False
        fresh = poller.step(due if fresh else math.inf) or fresh
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
