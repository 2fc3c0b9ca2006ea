"""HTTP service of the sidecar: metrics, status, figures of merit, health, and when to stop."""

import asyncio
import contextlib
import html
import ipaddress
import logging
import signal
import socket
import zlib
from collections.abc import Sequence

from aiohttp import web

from exporter import __version__
from exporter.collecting.families import OPENMETRICS_TYPE, TEXT_TYPE
from exporter.contract import run_files
from exporter.sidecar.background_reads import CollectorSlot
from exporter.sidecar.figures_collector import FigureOfMeritError, FomCollector
from exporter.sidecar.job_collector import JobCollector
from exporter.sidecar.sidecar import ScrapeLog, Sidecar
from exporter.workers.collector import WorkersCollector

FINAL_READ_S = 10.0  # limit of the last read of all collectors
KILL_MARGIN_S = 4.0  # part of KillWait reserved for the last read and the exit
LAST_READ_S = 0.6  # limit of the last read after a signal
LAST_WRITE_S = 2.0  # limit for writing the final values to a run directory that responds
ATTACHED_END_S = 3.0  # time after a signal for one more worker of an attached job to end, as with their step
NOTICE_S = 0.75  # time for the orchestrator's stop notice to appear after a signal
BURST_S = 0.5  # signals closer together count as one: Slurm sends several at a time limit
WATCH_S = 0.25  # between two polls of the job's phase
MOST_BODY_BYTES = 64 * 1024  # of a POST request

log = logging.getLogger("gpujob.service")


def wants_openmetrics(accept: str) -> bool:
    """Whether the Accept header prefers OpenMetrics 1.0 to the classic text format."""
    best: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        quality, understood = 1.0, True
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
            elif name.strip() == "version" and kind == "application/openmetrics-text":
                understood = value == "1.0.0"
        best[kind] = max(best.get(kind, 0.0), quality if understood else 0.0)
    return best.get("application/openmetrics-text", 0.0) > max(best.get("text/plain", 0.0), 0.0)


def is_loopback(peer: str | None) -> bool:
    """Whether a request came over the loopback interface, also through an IPv6 socket."""
    try:
        address = ipaddress.ip_address(peer or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class HttpService:
    """The web server of one sidecar."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._clock = sidecar.context.clock
        self._scrapes = ScrapeLog(self._clock.monotonic(), announced=sidecar.context.manifest.announced)
        self.stopped_by: int | None = None  # signal that requested the stop
        self.stopped_at = 0.0  # time of the first such signal, monotonic clock
        self.should_restart = False  # whether it ended so that a new process can take over

    def application(self) -> web.Application:
        """Build the application with all routes."""
        application = web.Application(client_max_size=MOST_BODY_BYTES)
        application.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/status", self._status),
                web.post("/fom", self._fom),
                web.get("/-/healthy", self._healthy),
                web.get("/-/ready", self._ready),
                web.get("/", self._landing),
            ]
        )
        return application

    async def _metrics(self, request: web.Request) -> web.Response:
        openmetrics = wants_openmetrics(request.headers.get("Accept", ""))
        body = self._sidecar.page(openmetrics=openmetrics).encode("utf-8")
        headers = {"Content-Type": OPENMETRICS_TYPE if openmetrics else TEXT_TYPE, "Vary": "Accept, Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            # Level 9 takes ten times as long and saves a tenth of the size.
            packer = zlib.compressobj(1, zlib.DEFLATED, 31)
            body = packer.compress(body) + packer.flush()
            headers["Content-Encoding"] = "gzip"
        self._scrapes.record(f"{request.remote} {request.headers.get('User-Agent', '')}", self._clock.monotonic())
        return web.Response(body=body, headers=headers)

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._sidecar.status().to_json())

    async def _fom(self, request: web.Request) -> web.Response:
        """Accept a figure of merit of the job; answers like omnistat."""
        if not is_loopback(request.remote):
            why = f"{request.remote} is not this node: post to http://127.0.0.1:{self._sidecar.port}/fom on the node"
            return web.json_response({"error": why}, status=403)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return web.json_response({"error": f"the body has more than {MOST_BODY_BYTES} bytes"}, status=413)
        for slot in self._sidecar.slots:
            if isinstance(slot.collector, FomCollector):
                try:
                    slot.collector.accept(body)
                except FigureOfMeritError as error:
                    return web.json_response({"error": str(error)}, status=400)
                slot.request()  # so that the next scrape shows it
                return web.json_response({"status": "ok"})
        raise web.HTTPNotFound

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response(text="The exporter is healthy.\n")

    async def _ready(self, request: web.Request) -> web.Response:
        if self._sidecar.ready:
            return web.Response(text="The exporter is ready.\n")
        waiting = ", ".join(slot.collector.name for slot in self._sidecar.slots if not slot.ready)
        return web.Response(status=503, text=f"Not ready: waiting for the first read of {waiting}.\n")

    async def _landing(self, request: web.Request) -> web.Response:
        identity = self._sidecar.context.identity
        title = html.escape(f"gpujob exporter: job {identity.job_id} on {identity.node}")
        links = "".join(
            f'<li><a href="{path}">{path}</a></li>' for path in ("metrics", "status", "-/healthy", "-/ready")
        )
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
            f"<h1>{title}</h1><p>version {__version__}, phase {html.escape(self._sidecar.phase)}</p>"
            f"<ul>{links}</ul></html>"
        )
        return web.Response(text=page, content_type="text/html")

    async def run(self, listening: socket.socket) -> None:
        """Serve until the job has ended and its last values were scraped, or until a signal."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        first: list[float] = []

        def end(number: int) -> None:
            self.stopped_by = number
            first.append(self._clock.monotonic())
            self.stopped_at = first[0]
            if len(first) == 1 or first[-1] - first[0] > BURST_S:
                stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number)
        exits = self._sidecar.context.exits
        loop.add_reader(exits.fileno(), self._on_exits)
        runner = web.AppRunner(self.application(), access_log=None, handle_signals=False)
        await runner.setup()
        try:
            await web.SockSite(runner, listening).start()
            host, port = listening.getsockname()[:2]
            self._sidecar.port = port
            self._sidecar.start()
            log.info("listening on %s:%d", host, port)
            watcher = asyncio.create_task(self._wait_until_over())
            await asyncio.wait({watcher, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() and not self._sidecar.final:
                watcher.cancel()
                stop.clear()
                await self._wind_down(stop)
        finally:
            loop.remove_reader(exits.fileno())
            # Do not wait for slow clients: the job step is about to end.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(runner.cleanup(), 1.0)

    def _on_exits(self) -> None:
        """The kernel reported the end of a worker or wrapper: read the workers now."""
        self._sidecar.context.exits.dispatch()
        for slot in self._sidecar.slots:
            if slot.collector.name == WorkersCollector.name:
                slot.request()

    async def _wait_until_over(self) -> None:
        """Return when the job is finished and its final values were scraped, or linger is over."""
        linger_s = self._sidecar.context.manifest.linger_s
        outlived = False
        while not self._sidecar.workers_ended:
            if self._sidecar.has_outlived_driver and not outlived:
                self._sidecar.publisher.request()  # the publisher decides, since the run directory may hang
            outlived = self._sidecar.has_outlived_driver
            if self._sidecar.may_restart:
                log.warning("the GPU driver was replaced: restarting, because only a new process can read it")
                self.should_restart = True
                return
            await asyncio.sleep(WATCH_S)
        await self._finish(FINAL_READ_S, FINAL_READ_S)
        while self._sidecar.phase != "finished":
            await asyncio.sleep(WATCH_S)
        await self._read_all(self._sidecar.slots, FINAL_READ_S)
        final_at = self._clock.monotonic()
        while not self._scrapes.is_satisfied(final_at, self._clock.monotonic()):
            if self._clock.monotonic() - final_at > linger_s:
                log.warning("the linger time is over and the final values were not scraped")
                return
            await asyncio.sleep(WATCH_S)

    async def _wind_down(self, stop: asyncio.Event) -> None:
        """Finish after a signal.

        Slurm signals all steps of a job together. The sidecar continues while the workers save their work, within
        KillWait. A second signal ends the wait.
        """
        jobs = [slot for slot in self._sidecar.slots if slot.collector.name == JobCollector.name]
        answers = await self._read_all(jobs, 0.5)
        manifest, begun = self._sidecar.context.manifest, self._clock.monotonic()
        end = begun + manifest.kill_wait_s - KILL_MARGIN_S
        if manifest.attached:
            await self._await_attached_workers(stop, begun, end)
        else:
            await self._await_teardown(stop, begun + (NOTICE_S if answers else 0.0), end)
        await self._finish(LAST_READ_S, LAST_WRITE_S if answers else LAST_READ_S)

    async def _await_teardown(self, stop: asyncio.Event, notice: float, end: float) -> None:
        """Wait for the orchestrator to end all workers. After a signal from Slurm, its notice comes by ``notice``."""
        while not self._sidecar.workers_ended:
            now = self._clock.monotonic()
            may_get_notice = self.stopped_by == signal.SIGTERM and now < notice
            if not (may_get_notice or self._sidecar.phase == "completing") or stop.is_set() or now >= end:
                break
            await asyncio.sleep(WATCH_S)

    async def _await_attached_workers(self, stop: asyncio.Event, begun: float, end: float) -> None:
        """Wait for the workers of this node after SIGTERM, while they are ending too.

        Slurm signals them with the sidecar. If none of them ends, the signal was for the sidecar alone.
        """
        limit = self._sidecar.context.identity.end
        is_time_limit = limit is not None and self._clock.time() >= limit - ATTACHED_END_S
        running, patience = self._sidecar.running_workers, begun + ATTACHED_END_S
        while (left := self._sidecar.running_workers) and self.stopped_by == signal.SIGTERM and not stop.is_set():
            now = self._clock.monotonic()
            if left < running:
                running, patience = left, now + ATTACHED_END_S
            if now >= end or (now >= patience and not is_time_limit):
                break
            await asyncio.sleep(WATCH_S)

    async def _finish(self, timeout_s: float, write_s: float) -> None:
        """Read everything a last time and publish it as final."""
        await self._read_all(self._sidecar.slots, timeout_s)
        await self._read_all([self._sidecar.diagnostics], timeout_s)
        self._sidecar.final = True
        await self._read_all([self._sidecar.publisher], write_s)

    async def _read_all(self, slots: Sequence[CollectorSlot], timeout_s: float) -> bool:
        """Wait for a fresh read of these collectors, at most `timeout_s`; whether all finished."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(changed.set)

        for slot in slots:
            slot.on_read = tell
        tickets = [(slot, slot.request()) for slot in slots]
        end = loop.time() + timeout_s
        try:
            while not all(slot.has_served(ticket) for slot, ticket in tickets):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), max(0.0, end - loop.time()))
                changed.clear()
                if loop.time() >= end:
                    break
        finally:
            for slot in slots:
                slot.on_read = None
        return all(slot.has_served(ticket) for slot, ticket in tickets)


def find_earlier_port(sidecar: Sidecar) -> int | None:
    """Port of the previous sidecar of this node and attempt, for a restarted one to reuse; None without one."""
    identity, manifest = sidecar.context.identity, sidecar.context.manifest
    known = run_files.read_json(manifest.run_dir / run_files.SIDECARS_DIR / f"{identity.node}.json") or {}
    port = known.get("port")
    return port if isinstance(port, int) and known.get("attempt") == identity.attempt else None
