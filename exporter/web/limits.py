"""Bounds on what clients can take from a sidecar: connections, descriptors, time and memory.

A sidecar shares its node with the job, and any host may reach its page.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from exporter.web.aiohttp_server import web

if TYPE_CHECKING:
    import ssl

MOST_REMOTE = 64  # connections from other nodes; node_exporter serves 40 requests at once
MOST_PER_PEER = 16  # of these from one address: some Prometheus servers and many `gpujob watch` behind one
MOST_LOCAL = 128  # connections from this node: all its workers may report a figure at the same time
ACCEPTS_AT_ONCE = 16  # new connections between two rounds of reading; bounds the descriptors above these limits
KERNEL_QUEUE = 4096  # connections that wait in the kernel, so that a burst does not delay others by a lost SYN
HEADERS_S = 10.0  # from the connection to the last header of its first request, and for a TLS handshake
IDLE_S = 120.0  # from a response to the end of the next request's headers; scrapes come at least once a minute
BODY_S = 10.0  # for the body of a request
UNREAD_BODY_S = 2.0  # for the rest of a body that nobody wants
WRITE_S = 10.0  # for a response that the kernel does not take at once; Prometheus gives up after 10 s too
MOST_STALLED = 8  # responses that wait for their readers; each is in memory
MOST_HEADER_BYTES = 16 * 1024  # of one request; a Prometheus sends less than 1 KiB
MOST_BODY_BYTES = 64 * 1024  # of a request
MOST_PIPELINED = 4  # requests that wait behind another one; no known scraper pipelines
TLS_BUFFER_BYTES = 16 * 1024  # which asyncio reserves for each TLS connection; its 256 KiB are for uploads
SERVER = "gpujob"  # without versions of Python and aiohttp

LOCAL = "this node"  # peer of all loopback connections

log = logging.getLogger("gpujob.web")


class _OpenConnection(NamedTuple):
    """One open connection."""

    connection: socket.socket
    peer: str


def name_peer(host: str | None) -> str:
    """Name of the peer that shares one limit: `LOCAL` for loopback, else the address."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host or "unknown"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return LOCAL if (mapped or address).is_loopback else str(mapped or address)


def choose_evicted(peers: Sequence[str], newcomer: str) -> str | None:
    """Peer whose oldest connection must close for a new one; None within all limits.

    One at its own limit gives up one of its own. If all other nodes together are at theirs, the one with the most
    connections does, and so a flood from one address does not affect others.
    """
    counts = Counter(peers)
    if counts[newcomer] >= (MOST_LOCAL if newcomer == LOCAL else MOST_PER_PEER):
        return newcomer
    local = counts.pop(LOCAL, 0)
    if newcomer == LOCAL or len(peers) - local < MOST_REMOTE:
        return None
    return max(counts, key=counts.__getitem__)


class LimitedListener(socket.socket):
    """A listening socket that closes an old connection for a new one beyond the limits.

    Closing the one that has waited longest, rather than refusing the newest, lets a scrape in while a flood lasts:
    its request is read at once. It works on sockets, since a TLS handshake comes before any protocol.
    """

    def __init__(
        self, listening: socket.socket, server: web.Server, connections: dict[object, _OpenConnection]
    ) -> None:
        """``connections`` are those of all listeners, by address and port, oldest first."""
        super().__init__(fileno=listening.detach())
        self._server = server
        self._open = connections

    def listen(self, backlog: int = KERNEL_QUEUE) -> None:
        """Listen with our own queue, since asyncio uses ``backlog`` also for the connections it accepts at once."""
        super().listen(KERNEL_QUEUE)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and close another one if there are too many."""
        for gone in [key for key, one in self._open.items() if one.connection.fileno() < 0]:
            del self._open[gone]
        peers = [one.peer for one in self._open.values()]
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not peers:
                raise
            self._close_one_of(Counter(peers).most_common(1)[0][0], "no descriptor is left")
            raise BlockingIOError(errno.EAGAIN, "its descriptor is free in the next round") from error
        peer = name_peer(address[0])
        evicted = choose_evicted(peers, peer)
        if evicted is not None:
            self._close_one_of(evicted, "there are too many")
        self._open[address] = _OpenConnection(connection, peer)
        return connection, address

    def _close_one_of(self, peer: str, reason: str) -> None:
        """Close the oldest connection of this peer; one without a request in progress, if there is one."""
        serving = {one.peername for one in self._server.connections if isinstance(one, Connection) and one.is_serving}
        addresses = [address for address, one in self._open.items() if one.peer == peer]
        closed = self._open.pop(min(addresses, key=serving.__contains__))
        with contextlib.suppress(OSError):  # the client has closed it
            closed.connection.shutdown(socket.SHUT_RDWR)
        _log_closed(peer, reason)


def _log_closed(peer: str, reason: str) -> None:
    log.warning("closed a connection of %s: %s", peer, reason)


class Connection(web.RequestHandler):
    """aiohttp's side of one connection, with limits of time and memory."""

    __slots__ = ("_deadline", "_header_bytes")

    def __init__(self, server: web.Server) -> None:
        options: dict[str, Any] = {"access_log": None}
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_S, lingering_time=UNREAD_BODY_S, **options)
        self._header_bytes = 0  # of a request whose headers are incomplete
        self._deadline = loop.call_later(HEADERS_S, self._require_request)

    @property
    def is_serving(self) -> bool:
        """Whether a request is in progress."""
        return self._waiter is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)  # the next request waits until the kernel has this response

    def connection_lost(self, exc: BaseException | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages or self.is_serving:
            self._header_bytes = 0
            if any(_header_size(message) > MOST_HEADER_BYTES for message, _ in self._messages):
                self._abort("its headers are too long")
            elif len(self._messages) > MOST_PIPELINED:
                self._abort("it sent too many requests at once")
        else:
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES:
                self._abort("its headers are too long")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline.cancel()
        self._deadline = self._loop.call_later(WRITE_S, self._abort, "it reads too slowly")
        connections = self._manager.connections if self._manager else ()
        stalled = [one for one in connections if isinstance(one, Connection) and one.writing_paused]
        if len(stalled) > MOST_STALLED:
            min(stalled, key=lambda one: one._deadline.when())._abort("it reads too slowly")

    def resume_writing(self) -> None:
        self._deadline.cancel()
        super().resume_writing()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer without the bytes of a malformed request, which aiohttp would log and repeat."""
        if status == 400:
            log.warning("malformed request from %s", name_peer(request.remote))
            response: web.StreamResponse = web.Response(status=400, text="malformed request\n")
            response.force_close()
        else:
            response = super().handle_error(request, status, exc, message)
        response.headers["Server"] = SERVER
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the response and forget its body, which aiohttp would keep until the next request."""
        result = await super().finish_response(request, resp, start_time)
        if isinstance(resp, web.Response):
            resp.body = None
        return result

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an error of ours, but no body that broke off."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def _require_request(self) -> None:
        if self._request_count == 0:
            self._abort("it sent no request")

    def _abort(self, reason: str) -> None:
        """Close now. Unlike `force_close`, this drops what the client did not read."""
        if self.transport is not None:
            host = self.peername[0] if isinstance(self.peername, tuple) else None
            _log_closed(name_peer(host), reason)
            self.transport.abort()


def _header_size(message: object) -> int:
    """Bytes of names and values of a parsed request; 0 for a malformed one."""
    return sum(map(len, chain.from_iterable(getattr(message, "raw_headers", ()))))


async def _name_server(_: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER


def make_application(routes: Iterable[web.RouteDef]) -> web.Application:
    """An application with bounded bodies, and without versions in its answers."""
    application = web.Application(client_max_size=MOST_BODY_BYTES)
    application.add_routes(routes)
    application.on_response_prepare.append(_name_server)
    return application


async def serve(
    runner: web.AppRunner, listening: Iterable[tuple[socket.socket, "ssl.SSLContext | None"]]
) -> list[asyncio.Server]:
    """Serve an application on these sockets, with TLS or without, within the limits of all together."""
    server = runner.server
    if server is None:
        raise RuntimeError("the runner is not set up")
    loop, connections, listening = asyncio.get_running_loop(), dict[object, _OpenConnection](), list(listening)
    if any(context is not None for _, context in listening):
        from asyncio.sslproto import SSLProtocol  # lazy: OpenSSL takes 8 MiB

        SSLProtocol.max_size = TLS_BUFFER_BYTES
    return [
        await loop.create_server(
            lambda: Connection(server),
            sock=LimitedListener(place, server, connections),
            backlog=ACCEPTS_AT_ONCE,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HEADERS_S,
        )
        for place, context in listening
    ]
