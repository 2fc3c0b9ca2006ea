"""The readiness poller against real servers, some of which hang, give bad answers or disappear."""

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
from contextlib import contextmanager, suppress
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
from tests.support.builders import orchestrator_record
from tests.support.launcher import clean_environment, poll, read_json

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"

Respond = Callable[[socket.socket], None]


def answer(body: object, status: str = "200 OK") -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(text), text)


class Server:
    """A server on this machine that runs ``respond`` on each connection after the request has arrived."""

    def __init__(self, respond: Respond | bytes) -> None:
        self.respond = respond
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
            threading.Thread(target=self._respond, args=(connection,), daemon=True).start()

    def _respond(self, connection: socket.socket) -> None:
        try:
            request = b""
            while b"\r\n\r\n" not in request and (part := connection.recv(4096)):
                request += part
            self.requests.append(request)
            if isinstance(self.respond, bytes):
                connection.sendall(self.respond)
                connection.close()
            else:
                self.respond(connection)
        except OSError:
            pass

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it; a close does not
            connection.close()


@contextmanager
def serving(respond: Respond | bytes) -> Iterator[Server]:
    server = Server(respond)
    try:
        yield server
    finally:
        server.close()


def hang(connection: socket.socket) -> None:
    """Keep a client waiting until it disconnects."""
    connection.recv(1)


def drip(connection: socket.socket) -> None:
    """Send a header byte by byte, so that no single read takes long."""
    while True:
        connection.sendall(b"X")
        time.sleep(0.02)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def port_with_full_queue() -> tuple[socket.socket, int]:
    """A port with a full connection queue: further connections are neither accepted nor refused."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(0)
    port: int = listening.getsockname()[1]
    for _ in range(4):
        filling = socket.socket()
        filling.setblocking(False)
        assert filling.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
        OPEN_SOCKETS.append(filling)
    return listening, port


OPEN_SOCKETS: list[socket.socket] = []


def rule(kind: str = "http", port: int = 0, **over: Any) -> ReadyRule:
    return ReadyRule(**{"subject": "", "kind": kind, "node": 0, "port": port, **over})


def step_until(poller: ReadinessPoller, condition: Callable[[], bool], what: str) -> None:
    """Step the poller until the condition is true."""

    def is_true_after_step() -> bool:
        poller.step()
        return condition()

    poll(is_true_after_step, what)


def poll_once(kind: str, port: int, **over: Any) -> tuple[RuleStatus, bool]:
    status, late = ReadinessRequest(ReadinessTarget(rule(kind, port, **over), "127.0.0.1", port)).poll()
    return status, late


# -- one request ---------------------------------------------------------------------------------


def test_a_service_is_polled_at_its_path_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with serving(OK) as server:
        assert poll_once("http", server.port, path="/v1/health?full=1") == (RuleStatus(ready=True), False)
    (request,) = server.requests
    assert request.startswith(b"GET /v1/health?full=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nConnection: close\r\n" in request


def test_the_answers_of_the_engines_are_parsed() -> None:
    counts = {"prefill": 1, "decode": 1}
    entries = [{"endpoint": "generate", "component": name} for name in counts]
    with serving(answer({"instances": entries})) as dynamo:
        assert poll_once("dynamo", dynamo.port, expected=counts) == (RuleStatus(ready=True, seen=counts), False)
    with serving(answer({"stats": {"prefill_count": 1, "decode_count": 0, "regular_count": 0}})) as router:
        seen = {"prefill": 1, "decode": 0}
        assert poll_once("sglang", router.port, expected=counts) == (RuleStatus(ready=False, seen=seen), False)
        assert router.requests[0].startswith(b"GET /workers ")
    with serving(answer({"data": [{"id": "m"}]})) as vllm:
        assert poll_once("vllm", vllm.port)[0].ready
        assert [request.split()[1] for request in vllm.requests] == [b"/health", b"/v1/models"]


def test_a_chunked_body_is_joined() -> None:
    with serving(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'8\r\n{"stats"\r\n1b\r\n: {"decode_count": 1     }}\r\n0\r\n\r\n'
    ) as server:
        assert poll_once("sglang", server.port, expected={"decode": 1})[0].ready


@pytest.mark.parametrize(
    ("respond", "detail"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", "/health answers 302"),
        (answer({"error": "x"}, "500 Internal Server Error"), "/health answers 500"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "the answer from PLACE is truncated"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "the answer from PLACE is truncated"),
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
def test_a_bad_answer_means_not_ready_with_a_detail(respond: Respond | bytes, detail: str) -> None:
    with serving(respond) as server:
        status, late = poll_once("http", server.port, expected={"decode": 1})
    address = f"127.0.0.1:{server.port}"
    assert status == RuleStatus(ready=False, seen={"decode": 0}, detail=detail.replace("PLACE", address))
    assert not late


def test_a_closed_port_is_reported_as_a_refused_connection() -> None:
    with serving(OK) as server:
        pass
    for kind in ("tcp", "http"):
        assert poll_once(kind, server.port)[0].detail == f"connection refused by 127.0.0.1:{server.port}"


def test_a_tcp_rule_needs_only_an_accepted_connection() -> None:
    with serving(hang) as server:
        assert poll_once("tcp", server.port) == (RuleStatus(ready=True), False)


@pytest.mark.parametrize("kind", ["tcp", "http"])
def test_connecting_has_a_timeout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_readiness, "CONNECT_S", 0.1)
    listening, port = port_with_full_queue()
    with listening:
        assert poll_once(kind, port) == (
            RuleStatus(ready=False, detail=f"no answer from 127.0.0.1:{port} in time"),
            True,
        )


@pytest.mark.parametrize("respond", [hang, drip])
def test_answering_has_a_timeout(respond: Respond, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_readiness, "ANSWER_S", 0.3)
    with serving(respond) as server:
        target = ReadinessTarget(rule("http"), "127.0.0.1", server.port)
        poller = ReadinessPoller([target], 60.0)
        step_until(poller, lambda: poller.polled[0], "an answer")
        assert poller.statuses == [RuleStatus(ready=False, detail=f"no answer from 127.0.0.1:{server.port} in time")]


def test_an_unknown_host_is_reported() -> None:
    status = ReadinessRequest(ReadinessTarget(rule("http"), "no-such-host.invalid", 80)).poll().status
    assert status.detail.startswith("no-such-host.invalid:80 cannot be reached: ")


def test_an_invalid_path_is_reported() -> None:
    with serving(OK) as server:
        assert "does not answer in HTTP" in poll_once("http", server.port, path="/a b\n")[0].detail


# -- many targets --------------------------------------------------------------------------------


def test_hanging_servers_do_not_delay_the_others() -> None:
    with serving(hang) as hanging, serving(OK) as good:
        ports = [hanging.port] * 10 + [good.port] * 60
        poller = ReadinessPoller([ReadinessTarget(rule("http"), "127.0.0.1", port) for port in ports], 60.0)
        step_until(poller, lambda: all(status.ready for status in poller.statuses[10:]), "the good ones")
        assert not any(poller.polled[:10])


def test_late_servers_do_not_occupy_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_readiness, "ANSWER_S", 0.2)
    with serving(hang) as hanging, serving(OK) as good:
        poller = ReadinessPoller(
            [ReadinessTarget(rule(), "127.0.0.1", port) for port in [hanging.port] * 30 + [good.port]], 0.3
        )
        step_until(poller, lambda: all(poller.polled), "a first round")
        monkeypatch.setattr(poll_readiness, "ANSWER_S", 3600.0)
        earlier_requests = len(good.requests)
        step_until(poller, lambda: len(good.requests) > earlier_requests + 3, "repeated requests to the good server")


def test_a_refused_port_is_retried_every_second() -> None:
    with serving(OK) as server:
        pass
    poller = ReadinessPoller([ReadinessTarget(rule("tcp"), "127.0.0.1", server.port)], 3600.0)
    step_until(poller, lambda: poller.polled[0], "refused")
    with socket.create_server(("127.0.0.1", server.port)):
        step_until(poller, lambda: poller.statuses[0].ready, "accepted")


def test_a_shorter_interval_applies_immediately() -> None:
    with serving(OK) as first, serving(OK) as second:
        targets = [ReadinessTarget(rule(), "127.0.0.1", server.port) for server in (first, second)]
        poller = ReadinessPoller(targets, 3600.0)
        step_until(poller, lambda: all(status.ready for status in poller.statuses), "the first round")
        second.respond = answer({}, "503 Busy")
        poller.set_interval(0.1)
        step_until(poller, lambda: not poller.statuses[1].ready, "another round")


def lines_of_a_step(targets: int) -> int:
    """Lines of code that run for one answer while this number of targets waits."""
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


def test_a_step_costs_the_same_for_few_and_many_targets() -> None:
    assert lines_of_a_step(20) == lines_of_a_step(400)


def test_changes_of_many_rules_are_published_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_times: list[float] = []
    monkeypatch.setattr(
        ReadinessPublisher, "publish", lambda publisher, statuses, now, *, is_complete: publish_times.append(now)
    )
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
    assert len(publish_times) == 1
    assert ends == [math.inf, *[publish_times[0] + poll_readiness.PUBLISH_INTERVAL_S] * 4]


def test_one_late_answer_does_not_make_a_ready_service_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_readiness, "ANSWER_S", 0.2)
    with serving(OK) as server:
        poller = ReadinessPoller([ReadinessTarget(rule(), "127.0.0.1", server.port)], 0.3)
        step_until(poller, lambda: poller.statuses[0].ready, "ready")
        server.respond = hang
        step_until(poller, lambda: poller._was_late[0], "a late answer")
        assert poller.statuses[0].ready, "one step processes one answer of a service"
        step_until(poller, lambda: not poller.statuses[0].ready, "the second late answer")
        assert poller.statuses[0].detail.endswith("in time")


# -- published state -----------------------------------------------------------------------------


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(poll_readiness, "log_raw_line", lines.append)
    return lines


COUNTS = {"prefill": 4, "decode": 1}
PLAN = ReadinessPlan((), timeout_s=1800.0, interval_s=5.0)
FRONT = ReadinessTarget(rule("dynamo", 8000, expected=COUNTS), "cn01", 8000)


def front_end_status(prefill: int, decode: int) -> list[RuleStatus]:
    return [RuleStatus(prefill >= 4 and decode >= 1, {"prefill": prefill, "decode": decode})]


def test_readiness_lines_have_the_format_of_benchmark_logs(tmp_path: Path, printed: list[str]) -> None:
    publisher = ReadinessPublisher(tmp_path, [FRONT], 0, PLAN)
    publisher.publish(front_end_status(0, 0), 100.0, is_complete=False)
    assert printed == []
    publisher.publish(front_end_status(0, 0), 101.0, is_complete=True)
    publisher.publish(front_end_status(0, 0), 106.0, is_complete=True)
    publisher.publish(front_end_status(2, 1), 111.0, is_complete=True)
    publisher.publish(front_end_status(2, 1), 170.0, is_complete=True)
    publisher.publish(front_end_status(2, 1), 171.0, is_complete=True)
    publisher.publish(front_end_status(4, 1), 176.0, is_complete=True)
    publisher.publish(front_end_status(4, 1), 999.0, is_complete=True)
    assert printed == [
        "Model is not ready, waiting for 4 prefills and 1 decodes to spin up.",
        "Model is not ready, waiting for 2 prefills and 0 decodes to spin up.",
        "Model is not ready, waiting for 2 prefills and 0 decodes to spin up.",
        "Model is ready. Have 4 prefills and 1 decodes.",
    ]


def test_many_small_changes_give_one_line_per_interval(tmp_path: Path, printed: list[str]) -> None:
    targets = [ReadinessTarget(rule(subject=f"agg_w{index}", expected={"agg": 1}), "cn01", 80) for index in range(64)]
    publisher = ReadinessPublisher(tmp_path, targets, 0, PLAN)
    for up in range(64):
        statuses = [RuleStatus(index < up, {"agg": int(index < up)}) for index in range(64)]
        publisher.publish(statuses, 100.0 + up / 10, is_complete=True)
    assert printed == [
        "Model is not ready, waiting for 0 prefills and 64 decodes to spin up.",
        "Model is not ready, waiting for 0 prefills and 14 decodes to spin up.",
    ]


def test_the_readiness_file_has_the_documented_format(tmp_path: Path, printed: list[str]) -> None:
    etcd = ReadinessTarget(rule("tcp", 2379, subject="etcd", before="workers"), "cn01", 2379)
    publisher = ReadinessPublisher(tmp_path, [etcd, FRONT], 3, PLAN)
    publisher.publish([RuleStatus(ready=True), *front_end_status(1, 1)], 100.0, is_complete=True)
    document = run_files.read_json(tmp_path / run_files.READINESS_FILE) or {}
    assert abs(float(str(document.pop("time"))) - time.time()) < 600
    assert document == {
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


def test_the_file_is_written_after_changes_and_periodically(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    monkeypatch.setattr(run_files, "write_json", lambda path, value, durable: written.append(value))
    publisher = ReadinessPublisher(tmp_path, [FRONT], 0, PLAN)
    for now in range(100, 159):
        publisher.publish(front_end_status(0, 0), float(now), is_complete=True)
    assert len(written) == 1
    publisher.publish(front_end_status(0, 1), 159.0, is_complete=True)
    publisher.publish(front_end_status(0, 1), 219.0, is_complete=True)
    assert len(written) == 3


def test_a_full_disk_is_logged_once_and_writing_resumes(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True
    write = run_files.write_json

    def write_or_not(path: Path, value: object, *, durable: bool) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, value, durable=durable)

    monkeypatch.setattr(run_files, "write_json", write_or_not)
    publisher = ReadinessPublisher(tmp_path, [FRONT], 0, PLAN)
    for now in (100.0, 101.0, 102.0):
        publisher.publish(front_end_status(4, 1), now, is_complete=True)
    full = False
    publisher.publish(front_end_status(4, 1), 103.0, is_complete=True)
    assert printed == [
        f"cannot write {tmp_path}/readiness.json: No space left on device",
        "Model is ready. Have 4 prefills and 1 decodes.",
    ]
    assert (run_files.read_json(tmp_path / "readiness.json") or {})["ready"] is True


def test_the_intro_names_the_front_end_first() -> None:
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
    record = orchestrator_record(addresses=["127.0.0.1"], port_offset=offset, attempt=1)
    run_files.write_json(run_dir / run_files.ORCHESTRATOR_FILE, record)


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
            router.respond = workers(2)
            poll(lambda: lines(tmp_path)[-1].startswith("Model is ready."), "ready")
            ready = run_files.read_json(tmp_path / "readiness.json") or {}
            assert (ready["ready"], ready["attempt"], ready["seen"]) == (True, 1, expected)
            router.respond = workers(1)
            poll(lambda: "not ready" in lines(tmp_path)[-1], "one lost", timeout=30)
            lost = read_json(tmp_path / "readiness.json")
            assert (lost["ready"], lost["since"], lost["waiting"]) == (False, None, "0 prefills and 1 decodes")
            router.respond = workers(2)
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


def test_a_restarted_poller_prints_the_status_again(tmp_path: Path) -> None:
    with serving(OK) as server:
        write_job(tmp_path, {"subject": "", "kind": "http", "node": 0, "port": server.port, "path": "/ping"})
        with polling(tmp_path):
            poll(lambda: lines(tmp_path)[1:] == ["Model is ready."], "ready")
        with polling(tmp_path):
            poll(lambda: lines(tmp_path)[3:] == ["Model is ready."], "ready")


def test_the_poller_waits_for_missing_files(tmp_path: Path) -> None:
    with serving(OK) as server:
        (tmp_path / "plan.json").write_text('{"readiness": {"rules": [{"subj')
        with polling(tmp_path) as process:
            poll(lambda: signal.SIGTERM in handled_signals(process.pid), "the start of the poller")
            write_job(tmp_path, {"subject": "", "kind": "tcp", "node": 0, "port": server.port})
            poll(lambda: (tmp_path / "readiness.json").exists(), "an answer")
            assert process.poll() is None


def test_sigterm_ends_the_poller_while_it_waits_for_files(tmp_path: Path) -> None:
    with polling(tmp_path) as process:
        poll(lambda: signal.SIGTERM in handled_signals(process.pid), "the start of the poller")
        process.terminate()
        assert process.wait(timeout=10) == 0


def test_sigterm_ends_the_poller_immediately_while_servers_hang(tmp_path: Path) -> None:
    with serving(hang) as server:
        write_job(tmp_path, *[{"subject": "", "kind": "http", "node": 0, "port": server.port}] * 20)
        with polling(tmp_path) as process:
            poll(lambda: len(server.requests) == 16, "one request per thread")
            process.terminate()
            assert process.wait(timeout=9) == 0  # before the first of them has ANSWER_S behind it


def test_the_poller_does_not_outlive_the_orchestrator(tmp_path: Path) -> None:
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
    """Whether a process has ended, also if it is still a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def handled_signals(pid: int) -> set[int]:
    """Signals that a process has handlers for."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            mask = int(line.split()[1], 16)
            return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return set()


def test_the_poller_ends_immediately_without_rules(tmp_path: Path) -> None:
    write_job(tmp_path)
    with polling(tmp_path) as process:
        assert process.wait(timeout=30) == 0
    assert lines(tmp_path) == []
    assert not (tmp_path / "readiness.json").exists()


def test_abandoned_workers_are_not_awaited(tmp_path: Path, printed: list[str]) -> None:
    def abandon(attempt: int, **workers: str) -> None:
        run_files.write_json(tmp_path / run_files.ABANDONED_FILE, {"attempt": attempt, "workers": workers})

    publisher = ReadinessPublisher(tmp_path, [FRONT], 1, PLAN)
    abandon(0, decode_w0="decode")
    publisher.publish(front_end_status(3, 1), 100.0, is_complete=True)
    abandon(1, prefill_w3="prefill")
    publisher.publish(front_end_status(3, 1), 110.0, is_complete=True)
    abandon(1, prefill_w3="prefill", decode_w0="decode")
    publisher.publish(front_end_status(3, 0), 120.0, is_complete=True)
    assert printed == [
        "Model is not ready, waiting for 1 prefills and 0 decodes to spin up.",
        "Model is ready. Have 3 prefills and 1 decodes.",
        "Model is not ready, waiting for 0 prefills and 1 decodes to spin up.",
    ]
