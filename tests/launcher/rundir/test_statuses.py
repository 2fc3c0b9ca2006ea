"""Statuses from whoever listens on the port of a sidecar."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.status import NodeStatus
from launcher.rundir import statuses
from launcher.rundir.statuses import ASK_AGAIN_S, StatusFetcher, fetch_status
from launcher.rundir.targets import SidecarRecord
from tests.support.exporter import NODE
from tests.support.statuses import node_status

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
OURS = node_status().to_json()
SENT_MOST = 64 * 1024 * 1024


@contextmanager
def answering(send: Callable[[socket.socket], None]) -> Iterator[SidecarRecord]:
    """A server that answers one request with ``send``."""

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            try:
                send(connection)
            except OSError:
                pass  # the reader has closed the connection

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield SidecarRecord(attempt=0, address=f"127.0.0.1:{server.getsockname()[1]}", labels={"job_id": "4459"})
        thread.join(10)
        assert not thread.is_alive()


def fetch_body(body: bytes) -> NodeStatus | str | None:
    with answering(lambda connection: connection.sendall(HEAD + body)) as sidecar:
        return fetch_status(NODE, sidecar, "token", 1)


def test_the_status_of_the_job_and_node_is_used() -> None:
    assert fetch_body(json.dumps(OURS).encode()) == node_status()
    diverging = OURS | {"workers": [{"worker": "w", "rank": 0, "values": {"loss": 1e299}}]}
    assert fetch_body(json.dumps(diverging).encode()) == NodeStatus.from_json(diverging)


@pytest.mark.parametrize(
    ("foreign", "problem"),
    [
        ({"job": {"job_id": "other\x1b[2J"}}, f"answers for job other__2J on {NODE}, not for job 4459 on {NODE}"),
        ({"node": {"name": "cn99"}}, f"answers for job 4459 on cn99, not for job 4459 on {NODE}"),
        ({"workers": 7}, "its status.workers: expected a list, not 7"),
        ({"time": 1e400}, "a number is out of range"),
        ({"time": -(10**301)}, "a number is out of range"),
    ],
)
def test_another_status_is_refused_in_one_line(foreign: dict[str, object], problem: str) -> None:
    error = fetch_body(json.dumps(OURS | foreign).encode())
    assert isinstance(error, str)
    assert problem in error


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[" * 500 + b"]" * 500, b'{"a":' * 400 + b"1" + b"}" * 400])
def test_deep_nesting_is_refused(body: bytes) -> None:
    assert str(fetch_body(body)).startswith("no status from 127.0.0.1:")


@pytest.mark.parametrize(("head", "byte"), [(b"HTTP/1.1 200 OK\r\nX: ", b"x"), (HEAD, b" ")], ids=["headers", "body"])
def test_an_answer_byte_by_byte_ends_at_the_deadline(head: bytes, byte: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statuses, "ANSWER_S", 0.3)
    sent = 0

    def drip(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(head)
        while sent < 1000:
            connection.sendall(byte)
            sent += 1
            time.sleep(0.02)

    with answering(drip) as sidecar:
        assert isinstance(fetch_status(NODE, sidecar, "token", 1), str)
        assert sent < 100


def test_an_endless_answer_ends_at_the_limit() -> None:
    sent = 0

    def flood(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(HEAD)
        while sent < SENT_MOST:
            sent += connection.send(b" " * 65536)

    with answering(flood) as sidecar:
        assert "no answer from" in str(fetch_status(NODE, sidecar, "token", 1))
    assert sent < SENT_MOST


def test_a_sidecar_that_lets_a_request_wait_is_asked_again_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses it, since it has not started yet, is asked each time."""
    monkeypatch.setattr(statuses, "ANSWER_S", 1.0)
    fetcher = StatusFetcher()
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        ports = (server.getsockname()[1] for server in (silent, late))
        sidecars = {
            node: SidecarRecord(attempt=0, address=f"127.0.0.1:{port}", labels={})
            for node, port in zip(("cn01", "cn02"), ports, strict=True)
        }
        first = fetcher.fetch(sidecars, "token", 1)
        late.listen()
        assert fetcher.fetch(sidecars, "token", 1)["cn01"] == first["cn01"]
        now = time.monotonic()
        monkeypatch.setattr("launcher.rundir.statuses.time.monotonic", lambda: now + ASK_AGAIN_S)
        assert set(fetcher.fetch(sidecars, "token", 1)) == {"cn01", "cn02"}
        for server, requests in ((silent, 2), (late, 2)):
            server.setblocking(False)
            for _ in range(requests):
                server.accept()[0].close()
            with pytest.raises(BlockingIOError):
                server.accept()


@given(st.data())
def test_no_answer_is_a_traceback(data: st.DataObject) -> None:
    """Any value in any place of a status, or no HTTP at all."""
    body = json.loads(json.dumps(OURS))
    place = data.draw(st.sampled_from(sorted(body)))
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    body[place] = data.draw(st.recursive(values, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
    raw = data.draw(st.just(HEAD + json.dumps(body).encode()) | st.binary(max_size=200))
    with answering(lambda connection: connection.sendall(raw)) as sidecar:
        assert isinstance(fetch_status(NODE, sidecar, "token", 1), NodeStatus | str)
