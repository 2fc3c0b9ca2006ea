"""The poller against real servers, among them those that hang, lie or go away."""

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from exporter.contract import run_files
from launcher.plan.plan import ReadinessPlan, ReadyRule
from launcher.run.before import poll_readiness
from launcher.run.before.poll_readiness import (
    ReadinessPoller,
    ReadinessPublisher,
    ReadinessRequest,
    ReadinessTarget,
    intro_lines,
)
from launcher.run.before.readiness import RuleStatus
from tests.support.launcher import clean_environment, poll

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"

Talk = Callable[[socket.socket], None]


def answer(body: object, status: str = "200 OK") -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(text), text)


class Server:
    """Listens on this machine; ``talk`` does with each connection what a test wants, once the request is there."""

    def __init__(self, talk: Talk | bytes) -> None:
        self.talk = talk
        self.requests: list[bytes] = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            request = b""
            while b"\r\n\r\n" not in request and (part := connection.recv(4096)):
                request += part
            self.requests.append(request)
            if isinstance(self.talk, bytes):
                connection.sendall(self.talk)
                connection.close()
            else:
                self.talk(connection)
        except OSError:
            pass

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            connection.close()


@contextmanager
def serving(talk: Talk | bytes) -> Iterator[Server]:
    server = Server(talk)
    try:
        yield server
    finally:
        server.close()


def hang(connection: socket.socket) -> None:
    """Keep a client waiting until it goes."""
    connection.recv(1)


def drip(connection: socket.socket) -> None:
    """A byte of a header now and then: no single read takes long."""
    while True:
        connection.sendall(b"X")
        time.sleep(0.02)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def silent_place() -> tuple[socket.socket, int]:
    """A port whose queue of connections is full: a further one is neither taken nor refused."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(0)
    port: int = listening.getsockname()[1]
    for _ in range(4):
        filling = socket.socket()
        filling.setblocking(False)
        assert filling.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
        KEPT.append(filling)
    return listening, port


KEPT: list[socket.socket] = []


def rule(kind: str = "http", port: int = 0, **over: Any) -> ReadyRule:
    return ReadyRule(**{"subject": "", "kind": kind, "node": 0, "port": port, **over})


def step_until(poller: ReadinessPoller, condition: Callable[[], bool], what: str) -> None:
    """Let the poller go on until something holds."""

    def holds() -> bool:
        poller.step()
        return condition()

    poll(holds, what)


def ask(kind: str, port: int, **over: Any) -> tuple[RuleStatus, bool]:
    standing, late = ReadinessRequest(ReadinessTarget(rule(kind, port, **over), "127.0.0.1", port)).poll()
    return standing, late


# -- one question --------------------------------------------------------------------------------


def test_a_service_is_asked_for_its_path_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with serving(OK) as server:
        assert ask("http", server.port, path="/v1/health?full=1") == (RuleStatus(ready=True), False)
    (request,) = server.requests
    assert request.startswith(b"GET /v1/health?full=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nConnection: close\r\n" in request


def test_the_engines_are_understood_over_the_wire() -> None:
    counts = {"prefill": 1, "decode": 1}
    entries = [{"endpoint": "generate", "component": name} for name in counts]
    with serving(answer({"instances": entries})) as dynamo:
        assert ask("dynamo", dynamo.port, expected=counts) == (RuleStatus(ready=True, seen=counts), False)
    with serving(answer({"stats": {"prefill_count": 1, "decode_count": 0, "regular_count": 0}})) as router:
        seen = {"prefill": 1, "decode": 0}
        assert ask("sglang", router.port, expected=counts) == (RuleStatus(ready=False, seen=seen), False)
        assert router.requests[0].startswith(b"GET /workers ")
    with serving(answer({"data": [{"id": "m"}]})) as vllm:
        assert ask("vllm", vllm.port)[0].ready
        assert [request.split()[1] for request in vllm.requests] == [b"/health", b"/v1/models"]


def test_a_body_in_chunks_is_put_together() -> None:
    with serving(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'8\r\n{"stats"\r\n1b\r\n: {"decode_count": 1     }}\r\n0\r\n\r\n'
    ) as server:
        assert ask("sglang", server.port, expected={"decode": 1})[0].ready


@pytest.mark.parametrize(
    ("talk", "detail"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", "/health answers 302"),
        (answer({"error": "x"}, "500 Internal Server Error"), "/health answers 500"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "the answer of PLACE is cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "the answer of PLACE is cut off"),
        (b"", "connection closed by PLACE"),
        (reset, "connection closed by PLACE"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "PLACE does not answer in HTTP: SSH-2.0-OpenSSH_9.6\r\n"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200, "PLACE does not answer in HTTP: got more than 100 headers"),
        (
            b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (4 << 20),
            "PLACE does not answer in HTTP: more than 4194304 bytes",
        ),
    ],
)
def test_a_bad_answer_is_not_ready_and_says_why(talk: Talk | bytes, detail: str) -> None:
    with serving(talk) as server:
        standing, late = ask("http", server.port, expected={"decode": 1})
    place = f"127.0.0.1:{server.port}"
    assert standing == RuleStatus(ready=False, seen={"decode": 0}, detail=detail.replace("PLACE", place))
    assert not late


def test_nobody_there_is_a_refused_connection() -> None:
    with serving(OK) as server:
        pass
    for kind in ("tcp", "http"):
        assert ask(kind, server.port)[0].detail == f"connection refused by 127.0.0.1:{server.port}"


def test_a_port_that_accepts_is_enough_for_tcp() -> None:
    with serving(hang) as server:
        assert ask("tcp", server.port) == (RuleStatus(ready=True), False)


@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_a_host_that_does_not_take_the_connection_is_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_readiness, "CONNECT_S", 0.1)
    listening, port = silent_place()
    with listening:
        assert ask(kind, port) == (
            RuleStatus(ready=False, detail=f"no answer from 127.0.0.1:{port} in time"),
            True,
        )


@pytest.mark.parametrize("talk", [hang, drip])
def test_a_server_that_never_comes_to_an_end_is_given_up(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_readiness, "ANSWER_S", 0.3)
    with serving(talk) as server:
        target = ReadinessTarget(rule("http"), "127.0.0.1", server.port)
        poller = ReadinessPoller([target], 60.0)
        step_until(poller, lambda: poller.polled[0], "an answer")
        assert poller.statuses == [RuleStatus(ready=False, detail=f"no answer from 127.0.0.1:{server.port} in time")]


def test_an_unknown_host_is_told() -> None:
    standing = ReadinessRequest(ReadinessTarget(rule("http"), "no-such-host.invalid", 80)).poll().status
    assert standing.detail.startswith("no-such-host.invalid:80 cannot be reached: ")


def test_a_path_that_is_none_is_told() -> None:
    with serving(OK) as server:
        assert "does not answer in HTTP" in ask("http", server.port, path="/a b\n")[0].detail


# -- many ----------------------------------------------------------------------------------------


def test_those_who_hang_cost_the_others_nothing() -> None:
    with serving(hang) as hanging, serving(OK) as good:
        hosts = [hanging.port] * 10 + [good.port] * 60
        poller = ReadinessPoller([ReadinessTarget(rule("http"), "127.0.0.1", port) for port in hosts], 60.0)
        step_until(poller, lambda: all(standing.ready for standing in poller.statuses[10:]), "the good ones")
        assert not any(poller.polled[:10])


def test_those_who_were_late_leave_threads_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_readiness, "ANSWER_S", 0.2)
    with serving(hang) as hanging, serving(OK) as good:
        poller = ReadinessPoller(
            [ReadinessTarget(rule(), "127.0.0.1", port) for port in [hanging.port] * 30 + [good.port]], 0.3
        )
        step_until(poller, lambda: all(poller.polled), "a first round")
        monkeypatch.setattr(poll_readiness, "ANSWER_S", 3600.0)
        before = len(good.requests)
        step_until(poller, lambda: len(good.requests) > before + 3, "the good one, time and again")


def test_a_port_that_others_wait_for_is_tried_every_second() -> None:
    with serving(OK) as server:
        pass
    poller = ReadinessPoller([ReadinessTarget(rule("tcp"), "127.0.0.1", server.port)], 3600.0)
    step_until(poller, lambda: poller.polled[0], "refused")
    with socket.create_server(("127.0.0.1", server.port)):
        step_until(poller, lambda: poller.statuses[0].ready, "accepted")


def test_all_are_asked_soon_once_one_of_them_is_not_ready_any_more() -> None:
    with serving(OK) as first, serving(OK) as second:
        targets = [ReadinessTarget(rule(), "127.0.0.1", server.port) for server in (first, second)]
        poller = ReadinessPoller(targets, 3600.0)
        step_until(poller, lambda: all(standing.ready for standing in poller.statuses), "the first round")
        second.talk = answer({}, "503 Busy")
        poller.set_interval(0.1)
        step_until(poller, lambda: not poller.statuses[1].ready, "another round")


def lines_of_a_step(targets: int) -> int:
    """Lines of the program that are run for one answer, among so many targets that wait for their turn."""
    with serving(OK) as server:
        poller = ReadinessPoller([ReadinessTarget(rule(), "127.0.0.1", server.port)] * targets, 3600.0)
        step_until(poller, lambda: all(poller.polled), "a first round")
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename == poll_readiness.__file__ else None

    poller.wake()
    sys.settrace(trace)
    try:
        assert not poller.step()
    finally:
        sys.settrace(None)
    return count


def test_a_step_costs_the_same_among_few_and_many() -> None:
    assert lines_of_a_step(20) == lines_of_a_step(400)


def test_news_of_many_rules_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []
    monkeypatch.setattr(ReadinessPublisher, "publish", lambda course, standings, now, complete: moments.append(now))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    steps = iter([True] * 5)

    def step(poller: ReadinessPoller, end: float = math.inf) -> bool:
        if next(steps, None) is None:
            monkeypatch.setattr(os, "getppid", lambda: -1)
            return False
        ends.append(end)
        return True

    ends: list[float] = []
    monkeypatch.setattr(ReadinessPoller, "step", step)
    with serving(OK) as server:
        write_job(tmp_path, *[{"subject": "", "kind": "http", "node": 0, "port": server.port}] * 2000)
        assert poll_readiness.main(["--run-dir", str(tmp_path)]) == 0
    assert len(moments) == 1
    assert ends == [math.inf, *[moments[0] + poll_readiness.PUBLISH_INTERVAL_S] * 4]


def test_one_late_answer_does_not_make_a_ready_service_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_readiness, "ANSWER_S", 0.2)
    with serving(OK) as server:
        poller = ReadinessPoller([ReadinessTarget(rule(), "127.0.0.1", server.port)], 0.3)
        step_until(poller, lambda: poller.statuses[0].ready, "ready")
        server.talk = hang
        step_until(poller, lambda: poller._was_late[0], "a late answer")
        assert poller.statuses[0].ready, "one step takes one answer of a service"
        step_until(poller, lambda: not poller.statuses[0].ready, "the second late answer")
        assert poller.statuses[0].detail.endswith("in time")


# -- what is told --------------------------------------------------------------------------------


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(poll_readiness, "log_raw_line", lines.append)
    return lines


COUNTS = {"prefill": 4, "decode": 1}
PLAN = ReadinessPlan((), timeout_s=1800.0, interval_s=5.0)
FRONT = ReadinessTarget(rule("dynamo", 8000, expected=COUNTS), "cn01", 8000)


def sees(prefill: int, decode: int) -> list[RuleStatus]:
    return [RuleStatus(prefill >= 4 and decode >= 1, {"prefill": prefill, "decode": decode})]


def test_the_lines_are_those_that_readers_of_benchmark_logs_know(tmp_path: Path, said: list[str]) -> None:
    course = ReadinessPublisher(tmp_path, [FRONT], 0, PLAN)
    course.publish(sees(0, 0), 100.0, is_complete=False)
    assert said == []
    course.publish(sees(0, 0), 101.0, is_complete=True)
    course.publish(sees(0, 0), 106.0, is_complete=True)
    course.publish(sees(2, 1), 111.0, is_complete=True)
    course.publish(sees(2, 1), 170.0, is_complete=True)
    course.publish(sees(2, 1), 171.0, is_complete=True)
    course.publish(sees(4, 1), 176.0, is_complete=True)
    course.publish(sees(4, 1), 999.0, is_complete=True)
    assert said == [
        "Model is not ready, waiting for 4 prefills and 1 decodes to spin up.",
        "Model is not ready, waiting for 2 prefills and 0 decodes to spin up.",
        "Model is not ready, waiting for 2 prefills and 0 decodes to spin up.",
        "Model is ready. Have 4 prefills and 1 decodes.",
    ]


def test_a_worker_that_is_lost_is_told_at_once_and_its_return_too(tmp_path: Path, said: list[str]) -> None:
    course = ReadinessPublisher(tmp_path, [FRONT], 0, PLAN)
    course.publish(sees(4, 1), 100.0, is_complete=True)
    first = run_files.read_json(tmp_path / "readiness.json") or {}
    course.publish(sees(4, 0), 101.0, is_complete=True)
    lost = run_files.read_json(tmp_path / "readiness.json") or {}
    course.publish(sees(5, 2), 102.0, is_complete=True)
    assert said == [
        "Model is ready. Have 4 prefills and 1 decodes.",
        "Model is not ready, waiting for 0 prefills and 1 decodes to spin up.",
        "Model is ready. Have 5 prefills and 2 decodes.",
    ]
    assert (first["ready"], lost["ready"], lost["since"], lost["waiting"]) == (
        *(True, False, None),
        "0 prefills and 1 decodes",
    )


def test_many_small_changes_make_one_line_for_each_interval(tmp_path: Path, said: list[str]) -> None:
    targets = [ReadinessTarget(rule(subject=f"agg_w{index}", expected={"agg": 1}), "cn01", 80) for index in range(64)]
    course = ReadinessPublisher(tmp_path, targets, 0, PLAN)
    for up in range(64):
        standings = [RuleStatus(index < up, {"agg": int(index < up)}) for index in range(64)]
        course.publish(standings, 100.0 + up / 10, is_complete=True)
    assert said == [
        "Model is not ready, waiting for 0 prefills and 64 decodes to spin up.",
        "Model is not ready, waiting for 0 prefills and 14 decodes to spin up.",
    ]


def test_what_is_written_is_what_others_read(tmp_path: Path, said: list[str]) -> None:
    etcd = ReadinessTarget(rule("tcp", 2379, subject="etcd", before="workers"), "cn01", 2379)
    course = ReadinessPublisher(tmp_path, [etcd, FRONT], 3, PLAN)
    course.publish([RuleStatus(ready=True), *sees(1, 1)], 100.0, is_complete=True)
    found = run_files.read_json(tmp_path / run_files.READINESS_FILE) or {}
    assert abs(float(str(found.pop("time"))) - time.time()) < 600
    assert found == {
        "schema": 1,
        "attempt": 3,
        "ready": False,
        "since": None,
        "timeout_s": 1800.0,
        "waiting": "3 prefills and 0 decodes",
        "seen": {"prefill": 1, "decode": 1},
        "expected": COUNTS,
        "rules": [
            {
                "subject": "etcd",
                "kind": "tcp",
                "ready": True,
                "seen": {},
                "expected": {},
                "before": "workers",
                "detail": "",
            },
            {
                "subject": "",
                "kind": "dynamo",
                "ready": False,
                "seen": {"prefill": 1, "decode": 1},
                "expected": COUNTS,
                "before": "benchmark",
                "detail": "",
            },
        ],
    }


def test_the_file_is_written_when_something_has_changed_and_now_and_then(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    monkeypatch.setattr(run_files, "write_json", lambda path, value, durable: written.append(value))
    course = ReadinessPublisher(tmp_path, [FRONT], 0, PLAN)
    for now in range(100, 159):
        course.publish(sees(0, 0), float(now), is_complete=True)
    assert len(written) == 1
    course.publish(sees(0, 1), 159.0, is_complete=True)
    course.publish(sees(0, 1), 219.0, is_complete=True)
    assert len(written) == 3


def test_a_full_disk_is_told_once_and_got_over(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    write = run_files.write_json

    def write_or_not(path: Path, value: object, *, durable: bool) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, value, durable=durable)

    monkeypatch.setattr(run_files, "write_json", write_or_not)
    course = ReadinessPublisher(tmp_path, [FRONT], 0, PLAN)
    for now in (100.0, 101.0, 102.0):
        course.publish(sees(4, 1), now, is_complete=True)
    full = False
    course.publish(sees(4, 1), 103.0, is_complete=True)
    assert said == [
        f"cannot write {tmp_path}/readiness.json: No space left on device",
        "Model is ready. Have 4 prefills and 1 decodes.",
    ]
    assert (run_files.read_json(tmp_path / "readiness.json") or {})["ready"] is True


def test_the_front_end_is_introduced_before_all_others() -> None:
    etcd = ReadinessTarget(rule("tcp", before="workers", subject="etcd"), "fd00::1", 2379)
    assert intro_lines([etcd, FRONT], 5.0) == [
        "Polling http://cn01:8000/health every 5 seconds...",
        "Polling 1 more in the same way...",
    ]
    assert intro_lines([etcd], 2.5) == ["Polling tcp://[fd00::1]:2379 every 2.5 seconds..."]


# -- the program ---------------------------------------------------------------------------------


def write_job(run_dir: Path, *rules: dict[str, Any], interval_s: float = 0.05, offset: int = 0) -> None:
    plan = {"readiness": {"rules": list(rules), "timeout_s": 1800.0, "interval_s": interval_s}}
    run_files.write_json(run_dir / "plan.json", plan)
    facts = {"hosts": ["cn01"], "addresses": ["127.0.0.1"], "port_offset": offset, "attempt": 1}
    run_files.write_json(run_dir / run_files.ORCHESTRATOR_FILE, facts)


@contextmanager
def polling(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-I", "-B", "-m", "launcher.run.before.poll_readiness", "--run-dir", str(run_dir)]
    with (run_dir / "benchmark.out").open("ab") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, env=clean_environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "benchmark.out").read_text().splitlines()


def test_a_job_becomes_ready_loses_a_worker_and_is_ready_again(tmp_path: Path) -> None:
    def workers(decode: int) -> bytes:
        return answer({"stats": {"prefill_count": 1, "decode_count": decode, "regular_count": 0}})

    with serving(workers(0)) as router:
        expected = {"prefill": 1, "decode": 2}
        front = {"subject": "frontend_0", "kind": "sglang", "node": 0, "port": router.port - 20, "path": "/workers"}
        write_job(tmp_path, {**front, "expected": expected, "before": "benchmark"}, offset=20)
        with polling(tmp_path) as process:
            poll(lambda: len(lines(tmp_path)) == 2, "the first answer")
            router.talk = workers(2)
            poll(lambda: lines(tmp_path)[-1].startswith("Model is ready."), "ready")
            ready = run_files.read_json(tmp_path / "readiness.json") or {}
            assert (ready["ready"], ready["attempt"], ready["seen"]) == (True, 1, expected)
            router.talk = workers(1)
            poll(lambda: "not ready" in lines(tmp_path)[-1], "one lost", timeout=30)
            router.talk = workers(2)
            poll(lambda: len(lines(tmp_path)) == 5, "ready again")
            process.terminate()
            assert process.wait(timeout=10) == 0
    assert lines(tmp_path) == [
        f"Polling http://127.0.0.1:{router.port}/workers every 0.05 seconds...",
        "Model is not ready, waiting for 0 prefills and 2 decodes to spin up.",
        "Model is ready. Have 1 prefills and 2 decodes.",
        "Model is not ready, waiting for 0 prefills and 1 decodes to spin up.",
        "Model is ready. Have 1 prefills and 2 decodes.",
    ]


def test_another_start_says_again_how_things_stand(tmp_path: Path) -> None:
    with serving(OK) as server:
        write_job(tmp_path, {"subject": "", "kind": "http", "node": 0, "port": server.port, "path": "/ping"})
        with polling(tmp_path):
            poll(lambda: lines(tmp_path)[1:] == ["Model is ready."], "ready")
        with polling(tmp_path):
            poll(lambda: lines(tmp_path)[3:] == ["Model is ready."], "ready")


def test_files_that_are_not_there_yet_are_waited_for(tmp_path: Path) -> None:
    with serving(OK) as server:
        (tmp_path / "plan.json").write_text('{"readiness": {"rules": [{"subj')
        with polling(tmp_path) as process:
            poll(lambda: signal.SIGTERM in caught(process.pid), "it has begun")
            write_job(tmp_path, {"subject": "", "kind": "tcp", "node": 0, "port": server.port})
            poll(lambda: (tmp_path / "readiness.json").exists(), "an answer")
            assert process.poll() is None


def test_it_ends_while_it_waits_for_files(tmp_path: Path) -> None:
    with polling(tmp_path) as process:
        poll(lambda: signal.SIGTERM in caught(process.pid), "it has begun")
        process.terminate()
        assert process.wait(timeout=10) == 0


def test_it_ends_at_once_while_servers_hang(tmp_path: Path) -> None:
    with serving(hang) as server:
        write_job(tmp_path, *[{"subject": "", "kind": "http", "node": 0, "port": server.port}] * 20)
        with polling(tmp_path) as process:
            poll(lambda: len(server.requests) == 16, "as many questions as there are threads")
            process.terminate()
            assert process.wait(timeout=5) == 0


def test_it_does_not_outlive_the_orchestrator(tmp_path: Path) -> None:
    with serving(OK) as server:
        write_job(tmp_path, {"subject": "", "kind": "http", "node": 0, "port": server.port})
        argv = [sys.executable, "-I", "-B", "-m", "launcher.run.before.poll_readiness", "--run-dir", str(tmp_path)]
        shell = subprocess.Popen(
            ["bash", "-c", '"$@" & echo $!; wait', "bash", *argv], stdout=subprocess.PIPE, env=clean_environment()
        )
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        poll(lambda: (tmp_path / "readiness.json").exists(), "an answer")
        shell.kill()
        shell.wait()
        poll(lambda: not Path(f"/proc/{pid}").exists() or is_gone(pid), "its end", timeout=30)
        shell.stdout.close()


def is_gone(pid: int) -> bool:
    """Whether a process has ended and nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def caught(pid: int) -> set[int]:
    """Signals that a process has handlers for."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            mask = int(line.split()[1], 16)
            return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return set()


def test_a_plan_without_rules_needs_nobody(tmp_path: Path) -> None:
    write_job(tmp_path)
    with polling(tmp_path) as process:
        assert process.wait(timeout=30) == 0
    assert lines(tmp_path) == []
    assert not (tmp_path / "readiness.json").exists()


def test_workers_that_are_given_up_while_the_job_loads_are_not_waited_for(tmp_path: Path, said: list[str]) -> None:
    def give_up(attempt: int, **workers: str) -> None:
        run_files.write_json(tmp_path / run_files.ABANDONED_FILE, {"attempt": attempt, "workers": workers})

    course = ReadinessPublisher(tmp_path, [FRONT], 1, PLAN)
    give_up(0, decode_w0="decode")
    course.publish(sees(3, 1), 100.0, is_complete=True)
    give_up(1, prefill_w3="prefill")
    course.publish(sees(3, 1), 110.0, is_complete=True)
    give_up(1, prefill_w3="prefill", decode_w0="decode")
    course.publish(sees(3, 0), 120.0, is_complete=True)
    assert said == [
        "Model is not ready, waiting for 1 prefills and 0 decodes to spin up.",
        "Model is ready. Have 3 prefills and 1 decodes.",
        "Model is not ready, waiting for 0 prefills and 1 decodes to spin up.",
    ]
