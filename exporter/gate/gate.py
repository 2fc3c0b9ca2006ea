"""One port of loopback with a secret path, in front of the servers of a user's own stack.

Prometheus and Alertmanager cannot hide behind a path of their own: both answer a request for ``/`` with a redirect to
it. So they ask for a password, which this gate knows, and the gate answers everything but the secret path with 404.
"""

import asyncio
import base64
import hmac
import logging
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from exporter.contract.errors import ExporterError
from exporter.contract.file_locks import FileLockedError, lock_file
from exporter.contract.stack_gate import GATE_FILE, GATE_LOCK, USER, GateFile, Upstream
from exporter.web import limits
from exporter.web.addresses import LOOPBACK, open_socket
from exporter.web.aiohttp_server import web

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")  # DELETE ends a silence
ASKED = ("Accept", "Accept-Encoding", "Content-Type", "If-None-Match", "If-Modified-Since", "Origin")  # passed on
NOT_ANSWERED = frozenset({"connection", "keep-alive", "server", "transfer-encoding", "date"})  # of this connection
ANSWER_S = 120.0  # for the headers of an answer; a query of Prometheus may take two minutes
END_S = 1.0  # for open requests at the end
CHUNK_BYTES = 64 * 1024
MOST_HEADER_BYTES = 64 * 1024

log = logging.getLogger("gpujob.gate")


class Gate:
    """Passes requests with the secret path on to the servers, and their answers back."""

    def __init__(self, file: GateFile) -> None:
        self._prefix, self._upstreams = f"/{file.token}/", file.upstreams

    def application(self) -> web.Application:
        """All pages."""
        return limits.make_application([web.route("*", "/{path:.*}", self._pass)])

    def _upstream(self, path: str) -> Upstream:
        """The server of a path. Raises HTTPNotFound without the secret."""
        given = path.encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given[: len(self._prefix)], self._prefix.encode()):
            rest = path[len(self._prefix) :]
            for upstream in self._upstreams:
                if rest.startswith(upstream.path):
                    return upstream
        raise web.HTTPNotFound(text="404: not found\n")

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.method not in METHODS:
            raise web.HTTPMethodNotAllowed(request.method, METHODS)
        upstream = self._upstream(request.raw_path)
        body = await request.read()
        try:
            async with _connection(upstream) as (reader, writer):
                writer.write(self._head(request, upstream, len(body)) + body)
                await writer.drain()
                status, headers = await asyncio.wait_for(_read_head(reader), ANSWER_S)
                # the address of the page is a secret, which no site that it links to needs to see
                response = web.StreamResponse(status=status, headers={**headers, "Referrer-Policy": "no-referrer"})
                await response.prepare(request)
                while chunk := await reader.read(CHUNK_BYTES):
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            if isinstance(error, ConnectionError) and request.transport is None:
                raise  # the client has gone
            log.warning("%s does not answer: %s", upstream.path or "prometheus", error)
            raise web.HTTPBadGateway(text="502: the server does not answer; see `gpujob stack status`\n") from error

    def _head(self, request: web.Request, upstream: Upstream, length: int) -> bytes:
        """The request as HTTP/1.0, which is answered without chunks and by one connection each."""
        path = request.raw_path
        if upstream.strip:
            path = f"/{path[len(self._prefix) + len(upstream.path) :]}"
        headers = {name: request.headers[name] for name in ASKED if name in request.headers}
        headers["Host"] = request.headers.get("Host", "localhost") if upstream.password else "localhost"
        if request.can_read_body or length:
            headers["Content-Length"] = str(length)
        if upstream.password is not None:
            headers["Authorization"] = f"Basic {base64.b64encode(f'{USER}:{upstream.password}'.encode()).decode()}"
        lines = [f"{request.method} {path} HTTP/1.0", *(f"{name}: {text}" for name, text in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")

    async def run(self, port: int) -> None:
        """Serve until a signal."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        runner = web.AppRunner(self.application(), access_log=None, handle_signals=False)
        await runner.setup()
        servers = await limits.serve(runner, [(open_socket(LOOPBACK, port), None)])
        await stop.wait()
        for server in servers:
            server.close()
        try:
            await asyncio.wait_for(runner.cleanup(), END_S)
        except TimeoutError:
            pass  # a slow client does not delay the end


@asynccontextmanager
async def _connection(upstream: Upstream) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if upstream.address.startswith("unix:"):
        path = upstream.address.removeprefix("unix:")
        reader, writer = await asyncio.open_unix_connection(path, limit=MOST_HEADER_BYTES)
    else:
        host, _, port = upstream.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=MOST_HEADER_BYTES)
    try:
        yield reader, writer
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str]]:
    """Status and headers of an answer. Raises ValueError if it is none."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    match = re.match(r"HTTP/1\.[01] ([2-5]\d\d)\b", first)
    if match is None:
        raise ValueError("no answer of HTTP")
    headers = {}
    for line in lines:
        name, _, text = line.partition(":")
        if name and name.lower() not in NOT_ANSWERED:
            headers[name] = text.strip()
    return int(match[1]), headers


def run_gate(folder: Path) -> None:
    """Run until a signal. Raises ExporterError before it listens if anything is not as it should be."""
    try:
        lock_file(folder / GATE_LOCK)
        file = GateFile.read_valid(folder / GATE_FILE)
        if file is None:
            raise ExporterError(f"{folder / GATE_FILE} is missing; use `gpujob stack up`")
        asyncio.run(Gate(file).run(file.port))
    except FileLockedError as error:
        raise ExporterError(f"{folder} already has a gate: {error}") from error
    except OSError as error:
        raise ExporterError(f"{error.filename or 'gate'}: {error.strerror}") from error
