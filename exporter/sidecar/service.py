"""HTTP service of the sidecar: metrics, status, figures of merit, health, and when to stop."""

import asyncio
import contextlib
import logging
import signal
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from exporter import __version__
from exporter.collecting.families import OPENMETRICS_TYPE, TEXT_TYPE
from exporter.contract.clock import Deadline
from exporter.contract.manifest import AUTHENTICATED
from exporter.machine.own_process import GarbageCollection
from exporter.sidecar.background_reads import CollectorSlot
from exporter.sidecar.figures_collector import FigureOfMeritError, FomCollector
from exporter.sidecar.job_collector import JobCollector
from exporter.sidecar.scrape_log import ScrapeLog
from exporter.sidecar.sidecar import Sidecar
from exporter.web import limits, negotiation
from exporter.web.access import Access, Needs
from exporter.web.addresses import Listener
from exporter.web.aiohttp_server import web
from exporter.workers.collector import WorkersCollector
from exporter.workers.runs_reader import NOTICE_GRACE_S

FINAL_READ_S = 10.0  # limit of the last read of all collectors
KILL_MARGIN_S = 4.0  # part of KillWait reserved for the last read and the exit
LAST_READ_S = 0.6  # limit of the last read after a signal
LAST_WRITE_S = 2.0  # limit for writing the final values to a run directory that responds
ATTACHED_END_S = 3.0  # time after a signal for one more worker of an attached job to end, as with their step
NOTICE_S = NOTICE_GRACE_S  # time for the orchestrator's stop notice to appear after a signal: it asks Slurm first
BURST_S = 0.5  # signals closer together count as one: Slurm sends several at a time limit
WATCH_S = 0.25  # between two polls of the job's phase
POINT_S = 1.0  # between two looks whether the timeline needs a point
LAST_POINT_WAIT_S = 1.0  # for the last point while the timeline is being packed
SHARE_S = 0.2  # most age of a page that is sent again; values that are overdue appear this much later

log = logging.getLogger("gpujob.service")


class _Page(NamedTuple):
    """A metrics page as it is sent."""

    time: float  # monotonic clock
    reads: int  # reads that had ended
    body: bytes


def needs_of_pages(metrics_access: str) -> dict[str, Needs]:
    """What requests for the pages of a sidecar need; those that are not here show nothing of the job."""
    metrics = Needs.CREDENTIALS if metrics_access == AUTHENTICATED else Needs.WHAT_THE_SITE_ASKS
    return {"/metrics": metrics, "/status": Needs.CREDENTIALS, "/fom": Needs.TOKEN}


class HttpService:
    """The web server of one sidecar."""

    def __init__(self, sidecar: Sidecar, access: Access) -> None:
        self._sidecar = sidecar
        self._access = access
        self._clock = sidecar.context.clock
        self._scrapes = ScrapeLog(self._clock.monotonic(), announced=sidecar.context.manifest.announced)
        self._pages: dict[tuple[bool, bool], _Page] = {}  # by format and compression
        self.stopped_by: int | None = None  # signal that requested the stop
        self.stopped_at = 0.0  # time of the first such signal, monotonic clock
        self.should_restart = False  # whether it ended so that a new process can take over

    def application(self) -> web.Application:
        """Build the application with all routes."""
        application = limits.make_application(
            [
                web.get("/metrics", self._metrics),
                web.get("/status", self._status),
                web.post("/fom", self._fom),
                web.get("/-/healthy", self._healthy),
                web.get("/-/ready", self._ready),
                web.get("/", self._landing),
            ]
        )
        self._access.protect(application)
        return application

    async def _metrics(self, request: web.Request) -> web.Response:
        openmetrics = negotiation.wants_openmetrics(request.headers.get("Accept", ""))
        gzip = negotiation.accepts_gzip(request.headers.get("Accept-Encoding", ""))
        page = self._page(openmetrics=openmetrics, gzip=gzip)
        headers = {"Content-Type": OPENMETRICS_TYPE if openmetrics else TEXT_TYPE, "Vary": "Accept, Accept-Encoding"}
        if gzip:
            headers["Content-Encoding"] = "gzip"
        if request.method == "GET":  # HEAD gets no values
            client = await self._access.identify(request)
            name = f"{request.remote} {request.headers.get('User-Agent', '')}"
            self._scrapes.record(name, page.time, is_known=client.is_known)
        return web.Response(body=page.body, headers=headers)

    def _page(self, *, openmetrics: bool, gzip: bool) -> _Page:
        """The metrics page; the last one while it is young and no read has ended since, for floods of requests."""
        now, reads = self._clock.monotonic(), self._sidecar.ended_reads
        page = self._pages.get((openmetrics, gzip))
        if page is None or page.reads != reads or now - page.time >= SHARE_S:
            body = self._sidecar.page(openmetrics=openmetrics).encode("utf-8")
            if gzip:
                # A page of 8 workers on 8 GPUs: level 1 6.4 kB in 0.2 ms, 6 5.5 kB in 0.9 ms, 9 5.4 kB in 1.5 ms.
                packer = zlib.compressobj(6, zlib.DEFLATED, 31)
                body = packer.compress(body) + packer.flush()
            self._pages[openmetrics, gzip] = page = _Page(now, reads, body)
        return page

    async def _status(self, request: web.Request) -> web.Response:
        if request.query.get("timeline") == "1":
            body = await asyncio.to_thread(self._sidecar.timeline.pack)
            headers = {"Vary": "Accept-Encoding"}
            if negotiation.accepts_gzip(request.headers.get("Accept-Encoding", "")):
                headers["Content-Encoding"] = "gzip"
            else:
                body = zlib.decompress(body, 31)
            return web.Response(body=body, headers=headers, content_type="application/json", charset="utf-8")
        return web.json_response(self._sidecar.status().to_json())

    async def _fom(self, request: web.Request) -> web.Response:
        """Accept a figure of merit of the job; answers like omnistat."""
        if limits.name_peer(request.remote) != limits.LOCAL:
            why = f"{request.remote} is not this node: post to {self._sidecar.fom} on the node"
            return web.json_response({"error": why}, status=403)
        try:
            async with asyncio.timeout(limits.BODY_S):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return web.json_response({"error": f"the body has more than {limits.MOST_BODY_BYTES} bytes"}, status=413)
        except TimeoutError:
            why = f"the body did not arrive within {limits.BODY_S:g} s"
            return web.json_response({"error": why}, status=408)
        except web.RequestPayloadError:
            why = "the body is not what Content-Length, Transfer-Encoding and Content-Encoding announce"
            return web.json_response({"error": why}, status=400)
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
        title = "gpujob exporter"
        links = "".join(
            f'<li><a href="{path}">{path}</a></li>' for path in ("metrics", "status", "-/healthy", "-/ready")
        )
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
            f"<h1>{title}</h1><p>version {__version__}</p>"
            f"<ul>{links}</ul></html>"
        )
        return web.Response(text=page, content_type="text/html")

    async def run(self, listeners: Sequence[Listener]) -> None:
        """Serve at these listeners until the job has ended and its last values were scraped, or until a signal."""
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
        port, places = listeners[0].port, ", ".join(map(str, listeners))
        servers = await limits.serve(runner, [(listener.listening, listener.context) for listener in listeners])
        try:
            self._sidecar.port = port
            self._sidecar.start()
            log.info("listening on %s", places)
            watcher = asyncio.create_task(self._wait_until_over())
            maintenance = asyncio.create_task(self._maintain())
            await asyncio.wait({watcher, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set() and not self._sidecar.final:
                watcher.cancel()
                stop.clear()
                await self._wind_down(stop)
            maintenance.cancel()
        finally:
            loop.remove_reader(exits.fileno())
            for server in servers:
                server.close()
            # Do not wait for slow clients: the job step is about to end.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(runner.cleanup(), 1.0)

    async def _maintain(self) -> None:
        garbage = GarbageCollection()
        while True:
            await asyncio.sleep(POINT_S)
            self._sidecar.keep_timeline()
            garbage.poll()

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
        self._sidecar.keep_timeline(LAST_POINT_WAIT_S)
        await self._read_all([self._sidecar.publisher], LAST_WRITE_S)  # the timeline with the last phase
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
            await self._await_teardown(jobs, stop, begun + (NOTICE_S if answers else 0.0), end)
        await self._finish(LAST_READ_S, LAST_WRITE_S if answers else LAST_READ_S)

    async def _await_teardown(
        self, jobs: Sequence[CollectorSlot], stop: asyncio.Event, notice: float, end: float
    ) -> None:
        """Wait for the orchestrator to end all workers. After a signal from Slurm, its notice comes by ``notice``."""
        while not self._sidecar.workers_ended:
            now = self._clock.monotonic()
            may_get_notice = self.stopped_by == signal.SIGTERM and now < notice
            if not (may_get_notice or self._sidecar.phase == "completing") or stop.is_set() or now >= end:
                break
            for slot in jobs:
                slot.request()  # its regular reads may be later than the notice has time
            await asyncio.sleep(WATCH_S)

    async def _await_attached_workers(self, stop: asyncio.Event, begun: float, end: float) -> None:
        """Wait for the workers of this node after SIGTERM, while they are ending too.

        Slurm signals them with the sidecar. If none of them ends, the signal was for the sidecar alone.
        """
        limit = self._sidecar.context.limit_end
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
        self._sidecar.keep_timeline(LAST_POINT_WAIT_S)
        await self._read_all([self._sidecar.publisher], write_s)

    async def _read_all(self, slots: Sequence[CollectorSlot], timeout_s: float) -> bool:
        """Wait for a fresh read of these collectors, at most `timeout_s`; whether all finished."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(changed.set)

        for slot in slots:
            slot.on_read = tell
        tickets = [(slot, slot.request()) for slot in slots]
        deadline = Deadline(timeout_s)
        try:
            while not all(slot.has_served(ticket) for slot, ticket in tickets) and (left_s := deadline.left_s()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left_s)
                changed.clear()
        finally:
            for slot in slots:
                slot.on_read = None
        return all(slot.has_served(ticket) for slot, ticket in tickets)
