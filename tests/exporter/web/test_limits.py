"""Limits of connections, in this process: a small application, and clients that write raw bytes."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from exporter.web import limits
from exporter.web.addresses import open_socket
from exporter.web.limits import (
    LOCAL,
    MOST_HEADER_BYTES,
    MOST_LOCAL,
    MOST_PER_PEER,
    MOST_PIPELINED,
    MOST_REMOTE,
    MOST_STALLED,
)
from tests.support.exporter import SOON_S

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SHORT_S = 0.1  # a limit that a test waits for
LARGE = bytes(16 << 20)  # more than a kernel buffers


class Client:
    """A connection, and whether the server has closed it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[str, bytes]:
        """Header lines and body of the next response."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), SOON_S)).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        return head, await self.reader.readexactly(length)

    async def is_closed(self) -> bool:
        """Whether the server closes the connection without another byte, soon."""
        with contextlib.suppress(ConnectionResetError):
            return await asyncio.wait_for(self.reader.read(), SOON_S) == b""
        return True

    def close(self) -> None:
        self._writer.close()


class Site:
    """An application within the limits: ``/`` answers ``ok``, ``/large`` a lot, ``/slow`` when ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.requests = 0
        self.last = web.Response()  # response of ``/large``
        self.runner = web.AppRunner(limits.make_application(self._routes()), access_log=None)
        self.clients: list[Client] = []
        self._port = 0

    def _routes(self) -> list[web.RouteDef]:
        async def ok(_: web.Request) -> web.Response:
            self.requests += 1
            return web.Response(text="ok")

        async def large(_: web.Request) -> web.Response:
            self.last = web.Response(body=LARGE)
            return self.last

        async def slow(_: web.Request) -> web.Response:
            self.requests += 1
            await self.go.wait()
            return web.Response(text="late")

        return [web.get("/", ok), web.get("/large", large), web.get("/slow", slow)]

    async def start(self) -> asyncio.Server:
        """Start serving on a free port."""
        await self.runner.setup()
        listening = open_socket("127.0.0.1", 0)
        self._port = listening.getsockname()[1]
        return (await limits.serve(self.runner, [(listening, None)]))[0]

    async def connect(self, data: bytes = b"") -> Client:
        """A new connection that has sent this."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.clients.append(Client(reader, writer))
        self.clients[-1].send(data)
        return self.clients[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true."""
        async with asyncio.timeout(SOON_S):
            while not condition():
                await asyncio.sleep(0.001)


def on_site(test: Callable[[Site], Awaitable[None]]) -> None:
    """Run a test with a site."""

    async def run() -> None:
        site = Site()
        server = await site.start()
        try:
            await test(site)
        finally:
            for client in site.clients:
                client.close()
            server.close()
            await site.runner.cleanup()

    asyncio.run(run())


# -- which connection is closed for another one --------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_loopback_peer_is_on_this_node(host: str) -> None:
    assert limits.name_peer(host) == LOCAL


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "::", "0.0.0.0", "localhost", "", None]
)
def test_other_peers_are_not_on_this_node(host: str | None) -> None:
    assert limits.name_peer(host) != LOCAL


def test_an_address_is_one_peer_over_ipv4_and_ipv6() -> None:
    assert limits.name_peer("::ffff:10.0.0.1") == limits.name_peer("10.0.0.1") == "10.0.0.1"


@given(st.lists(st.sampled_from([LOCAL, *"abcdefg"]), max_size=400))
def test_connections_never_exceed_a_limit(newcomers: list[str]) -> None:
    peers: list[str] = []
    for newcomer in newcomers:
        before = Counter(peers)
        evicted = limits.choose_evicted(peers, newcomer)
        if evicted is not None:
            peers.remove(evicted)
            assert evicted == newcomer or before[evicted] == max(before[peer] for peer in before if peer != LOCAL)
        peers.append(newcomer)
        counts = Counter(peers)
        assert counts.pop(LOCAL, 0) <= MOST_LOCAL
        assert max(counts.values(), default=0) <= MOST_PER_PEER
        assert counts.total() <= MOST_REMOTE


def test_a_flood_from_other_nodes_takes_no_connection_of_this_node_or_of_a_scraper() -> None:
    peers = [LOCAL, "scraper", *(f"10.0.0.{number % 4}" for number in range(MOST_REMOTE - 1))]
    assert limits.choose_evicted(peers, LOCAL) is None
    assert limits.choose_evicted(peers, "10.0.0.9") not in (None, LOCAL, "scraper")


def test_an_idle_connection_makes_room_rather_than_one_being_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_LOCAL", 2)

    async def test(site: Site) -> None:
        served = await site.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await site.until(lambda: site.requests == 1)
        idle = await site.connect(GET)
        await idle.answer()
        newest = await site.connect(GET)
        assert (await newest.answer())[1] == b"ok"
        assert await idle.is_closed()
        site.go.set()
        assert (await served.answer())[1] == b"late"

    on_site(test)


# -- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX: "], ids=["nothing", "half"])
def test_a_connection_without_a_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_S", SHORT_S)

    async def test(site: Site) -> None:
        assert await (await site.connect(sent)).is_closed()

    on_site(test)


def test_an_idle_connection_is_closed_even_if_it_sends_header_by_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IDLE_S", SHORT_S)

    async def test(site: Site) -> None:
        client = await site.connect(GET)
        await client.answer()
        client.send(b"GET / HTTP/1.1\r\nX: ")
        assert await client.is_closed()

    on_site(test)


def test_a_connection_outlives_the_limit_of_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_S", SHORT_S)

    async def test(site: Site) -> None:
        client = await site.connect(GET)
        await client.answer()
        await asyncio.sleep(2 * SHORT_S)
        client.send(GET)
        assert (await client.answer())[1] == b"ok"

    on_site(test)


def test_the_response_for_a_slow_reader_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_S", SHORT_S)

    async def test(site: Site) -> None:
        await site.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        server = site.runner.server
        assert server is not None
        await site.until(lambda: bool(server.connections))
        await site.until(lambda: not server.connections)

    on_site(test)


def test_few_responses_wait_for_slow_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_S", 1e6)

    async def test(site: Site) -> None:
        clients = [await site.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(MOST_STALLED + 4)]
        server = site.runner.server
        assert server is not None
        await site.until(lambda: server.requests_count == len(clients))
        await site.until(lambda: len(server.connections) == MOST_STALLED)
        assert (await clients[-1].answer())[1] == LARGE

    on_site(test)


def test_a_large_response_arrives_whole() -> None:
    async def test(site: Site) -> None:
        client = await site.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer())[1] == LARGE
        await site.until(lambda: site.last.body is None)  # an idle connection does not keep it
        client.send(GET)
        assert (await client.answer())[1] == b"ok"

    on_site(test)


# -- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [b"", b"\r\n"], ids=["incomplete", "complete"])
def test_long_headers_close_the_connection(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_S", 1e6)

    async def test(site: Site) -> None:
        line = b"X: " + bytes(b"y" * 4000) + b"\r\n"
        client = await site.connect(b"GET / HTTP/1.1\r\nHost: x\r\n" + line * (MOST_HEADER_BYTES // 4000 + 1) + end)
        assert await client.is_closed()

    on_site(test)


def test_a_few_pipelined_requests_are_answered_in_order() -> None:
    async def test(site: Site) -> None:
        site.go.set()
        client = await site.connect(GET * (MOST_PIPELINED - 1) + b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        answers = [(await client.answer())[1] for _ in range(MOST_PIPELINED)]
        assert answers == [b"ok"] * (MOST_PIPELINED - 1) + [b"late"]

    on_site(test)


def test_many_pipelined_requests_close_the_connection() -> None:
    async def test(site: Site) -> None:
        client = await site.connect(GET * 40)
        assert await client.is_closed()
        assert site.requests <= 1

    on_site(test)


# -- answers and log -----------------------------------------------------------------------------

BAD_REQUESTS = (
    b"GET /" + b"\xff" * 7900 + b"\0 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nsecret\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01secret",
    b"GET /" + b"secret" * 2000 + b" HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nsecret\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\nContent-Encoding: gzip\r\n\r\nsecret",
)


@pytest.mark.parametrize("request_bytes", BAD_REQUESTS, ids=["NUL", "header", "TLS", "URL", "chunk", "gzip"])
def test_a_malformed_request_is_neither_repeated_nor_logged(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(site: Site) -> None:
        client = await site.connect(request_bytes)
        head, body = await client.answer()
        assert head.startswith(("HTTP/1.0 400", "HTTP/1.1 405"))
        assert b"secret" not in body
        assert len(body) < 100
        assert "server: gpujob\r\n" in head.lower()
        assert (await (await site.connect(GET)).answer())[1] == b"ok"

    on_site(test)
    for record in caplog.records:
        text = logging.Formatter().format(record)
        assert "secret" not in text
        assert len(text) < 200


def test_the_server_header_has_no_versions() -> None:
    async def test(site: Site) -> None:
        for path in ("/", "/missing"):
            head, _ = await (await site.connect(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).answer()
            assert "server: gpujob\r\n" in head.lower()

    on_site(test)
