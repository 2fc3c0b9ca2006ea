"""The gate of a stack: what it passes on, and to whom."""

import asyncio
import base64
from pathlib import Path

import pytest

from exporter.contract.stack_gate import GateFile, Upstream
from exporter.gate.gate import Gate
from exporter.web import limits
from exporter.web.aiohttp_server import web

TOKEN = "t" * 32


class Server:
    """One that notes the first request of each connection."""

    def __init__(self, answer: bytes) -> None:
        self.requests: list[bytes] = []
        self._answer = answer

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"ontent-" in line[:9] and b"ength" in line), 0
        )
        self.requests.append(head + await reader.readexactly(length))
        writer.write(self._answer)
        writer.close()


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


def exchange(
    folder: Path, *requests: bytes, answer: bytes = b"HTTP/1.0 200 OK\r\nX-A: b\r\n\r\nbody"
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Answers of the gate, and what Prometheus and the hub have got."""

    async def run() -> tuple[list[bytes], list[bytes], list[bytes]]:
        first, hub = Server(answer), Server(answer)
        server = await asyncio.start_server(first.take, "127.0.0.1", 0)
        local = await asyncio.start_unix_server(hub.take, folder / "hub.sock")
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        upstreams = (
            Upstream(path="hub/", address=f"unix:{folder / 'hub.sock'}", strip=True),
            Upstream(path="", address=address, password="word"),
        )
        runner = web.AppRunner(Gate(GateFile(port=0, token=TOKEN, upstreams=upstreams)).application())
        await runner.setup()
        import socket

        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listeners = await limits.serve(runner, [(listening, None)])
        answers = [await ask(port, request) for request in requests]
        for each in (server, local, *listeners):
            each.close()
        await runner.cleanup()
        return answers, first.requests, hub.requests

    return asyncio.run(run())


def get(path: str, *headers: str, method: str = "GET", body: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


@pytest.mark.parametrize("path", ["/", "/metrics", f"/{TOKEN}", f"/{TOKEN[:-1]}x/", f"/x/../{TOKEN}/", f"//{TOKEN}/"])
def test_without_the_secret_nothing_reaches_a_server(tmp_path: Path, path: str) -> None:
    answers, first, hub = exchange(tmp_path, get(path))
    assert answers[0].startswith(b"HTTP/1.1 404")
    assert TOKEN.encode() not in answers[0]
    assert first == hub == []


def test_prometheus_gets_the_path_the_body_and_the_password(tmp_path: Path) -> None:
    request = get(
        f"/{TOKEN}/api/v1/query?x=%2F",
        *("Authorization: Basic no", "Content-Length: 3", "Cookie: c"),
        method="POST",
        body="q=1",
    )
    [answer], [got], hub = exchange(tmp_path, request)
    assert got.startswith(f"POST /{TOKEN}/api/v1/query?x=%2F HTTP/1.0\r\n".encode())
    assert got.endswith(b"\r\n\r\nq=1")
    assert f"Authorization: Basic {base64.b64encode(b'gpujob:word').decode()}".encode() in got
    assert b"Cookie" not in got
    assert b"Basic no" not in got
    assert hub == []
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"X-A: b" in answer
    assert b"Referrer-Policy: no-referrer" in answer
    assert b"body" in answer


def test_the_hub_gets_its_own_path_and_no_password(tmp_path: Path) -> None:
    _, first, [got] = exchange(tmp_path, get(f"/{TOKEN}/hub/targets?kind=sidecar"))
    assert got.startswith(b"GET /targets?kind=sidecar HTTP/1.0\r\n")
    assert b"Authorization" not in got
    assert first == []


def test_a_server_that_answers_nonsense_is_a_bad_gateway(tmp_path: Path) -> None:
    [answer], _, _ = exchange(tmp_path, get(f"/{TOKEN}/"), answer=b"hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 502")
