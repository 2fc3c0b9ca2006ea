"""The web server of a sidecar and its end, in this process, with test clocks and collectors."""

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporter.collecting.collector import StatusParts
from exporter.collecting.families import Samples
from exporter.collecting.published import JobProgress, Published
from exporter.collecting.saved_state import STATE_DIR, save_state
from exporter.contract import clock as machine_clock
from exporter.contract import run_files, timeline_file
from exporter.contract.manifest import OPEN
from exporter.gpus.records import GpuReading, JobGpus
from exporter.sidecar import service
from exporter.sidecar.background_reads import SUCCESS
from exporter.sidecar.figures_collector import FIGURE, FomCollector
from exporter.sidecar.job_collector import JobCollector
from exporter.sidecar.listeners import open_listeners
from exporter.sidecar.scrape_log import ScrapeLog
from exporter.sidecar.service import (
    BURST_S,
    LAST_READ_S,
    HttpService,
    needs_of_pages,
)
from exporter.sidecar.sidecar import (
    RESTART_PAUSE_S,
    RESTARTS_KIND,
    DriverRestarts,
    Sidecar,
)
from exporter.web import limits
from exporter.web.access import Access
from exporter.web.limits import MOST_BODY_BYTES
from tests.support.exporter import (
    NODE,
    SOON_S,
    FakeClock,
    ShiftedClock,
    make_context,
    make_manifest,
    make_sidecar,
    publisher,
    samples_of,
)

TOKEN = "3f9a"
TIMEOUT_S = SOON_S  # for events that must happen


class BlockedCollector:
    """A collector whose reads block until the test releases them."""

    families = ()
    interval_s = 1e6

    def __init__(self, name: str = "waiting") -> None:
        self.name = name
        self.reading, self.release = threading.Event(), threading.Event()

    def read(self) -> int:
        self.reading.set()
        self.release.wait(60)
        return 1

    def render(self, snapshot: int, out: Samples) -> None:
        """Add nothing."""

    def describe(self, snapshot: int, parts: StatusParts) -> None:
        """Add nothing."""


class Served:
    """A service that runs in this event loop, with a client."""

    scrape_check_begun = threading.Event()  # set when a service first checks who scraped its final values

    def __init__(self, sidecar: Sidecar, http: aiohttp.ClientSession, task: "asyncio.Task[None]", url: str) -> None:
        self.sidecar = sidecar
        self.run_dir = sidecar.context.manifest.run_dir
        self.task = task
        self._http = http
        self._url = url

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text of one request."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.get(self._url + path, headers=named) as response:
            return response.status, await response.text()

    async def head(self, path: str) -> tuple[int, str, Mapping[str, str]]:
        """Status, text and headers of one HEAD request."""
        async with self._http.head(self._url + path, headers={"Accept-Encoding": "identity"}) as response:
            return response.status, await response.text(), response.headers

    async def post(self, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
        """Status and JSON answer of one POST request."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post(self._url + path, data=body, headers=named) as response:
            return response.status, await response.json()

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition is true."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, f"waited for {what}"
            await asyncio.sleep(0.005)

    def advance(self, seconds: float) -> None:
        """Let this many seconds pass."""
        assert isinstance(self.sidecar.context.clock, ShiftedClock)
        self.sidecar.context.clock.shift += seconds

    async def ended(self) -> None:
        """Wait for the service to end."""
        await asyncio.wait_for(asyncio.shield(self.task), TIMEOUT_S)

    async def read_final_values(self) -> None:
        """End the job and wait until the sidecar has read its final values."""
        finish(self.run_dir)
        await self.until(self.scrape_check_begun.is_set, "the last values")

    async def keeps_running(self, seconds: float = 0.2) -> None:
        """Check that the service keeps running for a while."""
        await asyncio.wait({self.task}, timeout=seconds)
        assert not self.task.done()


@contextlib.asynccontextmanager
async def serving(sidecar: Sidecar) -> AsyncIterator[Served]:
    """Serve on a free port until the end of the block."""
    listeners = open_listeners(sidecar, "127.0.0.1:0")
    access = Access(needs_of_pages(OPEN), names=("node01",), token=TOKEN)
    task = asyncio.create_task(HttpService(sidecar, access).run(listeners))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S), headers=headers) as http:
        served = Served(sidecar, http, task, f"http://127.0.0.1:{listeners[0].port}")
        try:
            assert (await served.get("/-/healthy"))[0] == 200
            yield served
        finally:
            if not task.done():
                os.kill(os.getpid(), signal.SIGINT)  # no stop notice is awaited after this one
            await asyncio.wait_for(task, TIMEOUT_S)


def scenario(sidecar: Sidecar, play: Callable[[Served], Awaitable[None]]) -> None:
    """Run a scenario against a service."""

    async def run_service() -> None:
        async with serving(sidecar) as served:
            await play(served)

    try:
        asyncio.run(run_service())
    finally:
        for slot in (*sidecar.slots, sidecar.publisher):
            slot.collector.interval_s = 1e6  # type: ignore[misc]  # its thread outlives the test and should sleep


@pytest.fixture(autouse=True)
def scrape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the first check of who scraped the final values, and let services read the phase often."""
    first_check, is_satisfied = threading.Event(), ScrapeLog.is_satisfied

    def record_check(log: ScrapeLog, since: float, now: float) -> bool:
        first_check.set()
        return is_satisfied(log, since, now)

    monkeypatch.setattr(ScrapeLog, "is_satisfied", record_check)
    monkeypatch.setattr(Served, "scrape_check_begun", first_check)
    monkeypatch.setattr(service, "WATCH_S", 0.005)


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


def phase_sidecar(run_dir: Path, clock: ShiftedClock | FakeClock, *others: Any, **changes: Any) -> Sidecar:
    """A sidecar that reads the phase all the time and publishes on request."""
    context = make_context(make_manifest(run_dir, **changes), clock)
    job = JobCollector(context, publisher(""), publisher(JobProgress()))
    job.interval_s = 0.005
    sidecar = make_sidecar(context, job, *others)
    for slot in (sidecar.diagnostics, sidecar.publisher):
        slot.collector.interval_s = 1e6  # type: ignore[misc]  # they read only on request
    return sidecar


def in_sidecar(**changes: Any) -> Callable[[Callable[[Served], Awaitable[None]]], Callable[[Path], None]]:
    """Run a test with a service, and these changes of the manifest."""

    def decorate(test: Callable[[Served], Awaitable[None]]) -> Callable[[Path], None]:
        return lambda tmp_path: scenario(phase_sidecar(tmp_path, ShiftedClock(), **changes), test)

    return decorate


def finish(run_dir: Path) -> None:
    run_files.write_job_state(str(run_dir), "finished")


# -- pages ---------------------------------------------------------------------------------------


def test_a_sidecar_is_ready_when_every_collector_has_read(tmp_path: Path, clock: ShiftedClock) -> None:
    blocked = BlockedCollector("slow")

    async def play(served: Served) -> None:
        await served.until(lambda: served.sidecar.slots[0].ready, "the phase")
        assert await served.get("/-/ready") == (503, "Not ready: waiting for the first read of slow.\n")
        blocked.release.set()
        await served.until(lambda: served.sidecar.ready, "the first read")
        assert await served.get("/-/ready") == (200, "The exporter is ready.\n")

    scenario(phase_sidecar(tmp_path, clock, blocked), play)


def test_pages_without_credentials_show_nothing_of_the_job(tmp_path: Path, clock: ShiftedClock) -> None:
    context = make_context(make_manifest(tmp_path, job_name="apollo"), clock, job_id="4242", node="gn77")

    async def play(served: Served) -> None:
        for path in ("/", "/-/healthy", "/-/ready"):
            status, text = await served.get(path, Authorization="")
            assert status in (200, 503)
            assert not {"apollo", "4242", "gn77"} & set(re.findall(r"\w+", text)), path
        assert 'href="metrics"' in (await served.get("/"))[1]

    scenario(make_sidecar(context), play)


def test_a_page_is_served_while_a_collector_hangs(tmp_path: Path, clock: ShiftedClock) -> None:
    blocked = BlockedCollector()

    async def play(served: Served) -> None:
        await served.until(blocked.reading.is_set, "the read that hangs")  # it is late only if it began before
        clock.shift += 3e6 + 1
        await served.until(lambda: served.sidecar.slots[0].success, "the phase")
        success = samples_of((await served.get("/metrics"))[1], SUCCESS)
        assert [value for key, value in success.items() if 'collector="waiting"' in key] == [0]
        assert [value for key, value in success.items() if 'collector="job"' in key] == [1]
        blocked.release.set()

    scenario(phase_sidecar(tmp_path, clock, blocked), play)


def test_the_run_directory_records_where_a_sidecar_listens(tmp_path: Path, clock: ShiftedClock) -> None:
    sidecar = phase_sidecar(tmp_path, clock)
    sidecar.host = "127.0.0.1"
    path = tmp_path / run_files.SIDECARS_DIR / f"{NODE}.json"

    async def play(served: Served) -> None:
        await served.until(path.exists, "the record")
        record = run_files.read_json(path) or {}
        assert record.pop("time") == pytest.approx(time.time(), abs=TIMEOUT_S)
        port = record["port"]
        assert record == {
            "schema": 1,
            "node": NODE,
            "node_index": 0,
            "attempt": 0,
            "address": f"127.0.0.1:{port}",
            "port": port,
            "fom": f"http://127.0.0.1:{port}/fom",
            "certificate": None,
            "labels": sidecar.context.identity.constant_labels(),
        }

    scenario(sidecar, play)


@pytest.mark.parametrize(
    ("host", "address"),
    [("", f"{NODE}:7"), ("0.0.0.0", f"{NODE}:7"), ("::", f"{NODE}:7"), ("10.0.0.1", "10.0.0.1:7"), ("::1", "[::1]:7")],
)
def test_clients_can_connect_to_the_published_address(
    tmp_path: Path, clock: ShiftedClock, host: str, address: str
) -> None:
    sidecar = phase_sidecar(tmp_path, clock)
    sidecar.host, sidecar.port = host, 7
    sidecar.publisher.collector.read()
    assert (run_files.read_json(tmp_path / run_files.SIDECARS_DIR / f"{NODE}.json") or {})["address"] == address


def test_a_full_run_directory_only_prevents_publishing(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def play(served: Served) -> None:
        await served.until(lambda: served.sidecar.publisher.ready, "an attempt to publish")
        success = samples_of((await served.get("/metrics"))[1], SUCCESS)
        assert [value for key, value in success.items() if 'collector="publish"' in key] == [0]
        assert "collector publish fails: OSError: [Errno 28] No space left on device" in caplog.messages

    with monkeypatch.context() as patch:
        patch.setattr(run_files, "write_json", full)
        scenario(phase_sidecar(tmp_path, clock), play)


def test_a_page_is_sent_again_until_a_read_ends(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SHARE_S", TIMEOUT_S)
    rendered, page = [], Sidecar.page

    def count(sidecar: Sidecar, *, openmetrics: bool = False) -> str:
        rendered.append(page(sidecar, openmetrics=openmetrics))
        return rendered[-1]

    monkeypatch.setattr(Sidecar, "page", count)

    async def play(served: Served) -> None:
        job, publishing = served.sidecar.slots[0], served.sidecar.publisher
        await served.until(lambda: job.ready and publishing.ready, "the first reads")
        assert {await served.get("/metrics") for _ in range(3)} == {(200, rendered[0])}
        assert len(rendered) == 1
        ticket = publishing.request()
        await served.until(lambda: publishing.has_served(ticket), "a read")
        await served.get("/metrics")
        assert len(rendered) == 2
        clock.shift += TIMEOUT_S
        await served.get("/metrics")
        assert len(rendered) == 3

    sidecar = phase_sidecar(tmp_path, clock)
    sidecar.slots[0].collector.interval_s = 1e9  # type: ignore[misc]  # it reads once
    scenario(sidecar, play)


@in_sidecar()
async def test_head_has_the_headers_of_the_page_and_is_no_scrape(served: Served) -> None:
    await served.until(lambda: served.sidecar.ended_reads, "a first read, before which the page is empty")
    status, text, headers = await served.head("/metrics")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 100
    finish(served.run_dir)
    await served.ended()


# -- figures of merit ----------------------------------------------------------------------------


def with_figures(run_dir: Path, clock: ShiftedClock) -> Sidecar:
    """A sidecar that accepts figures of merit and reads them on request."""
    fom = FomCollector(make_context(make_manifest(run_dir), clock))
    fom.interval_s = 1e6
    return phase_sidecar(run_dir, clock, fom)


def test_a_posted_figure_of_merit_is_immediately_on_both_pages(tmp_path: Path, clock: ShiftedClock) -> None:
    sidecar = with_figures(tmp_path, clock)

    async def play(served: Served) -> None:
        await served.until(lambda: served.sidecar.ready, "the first reads")
        body = b'{"name": "step gflops", "value": 134.45}'
        assert await served.post("/fom", body, Content_Type="application/json") == (200, {"status": "ok"})
        await served.until(lambda: served.sidecar.status().figures_of_merit, "the figure")
        page = (await served.get("/metrics"))[1]
        assert [value for key, value in samples_of(page, FIGURE).items() if 'name="step_gflops"' in key] == [134.45]
        (figure,) = json.loads((await served.get("/status"))[1])["figures_of_merit"]
        assert (figure["name"], figure["value"]) == ("step_gflops", 134.45)
        assert figure["time"] == pytest.approx(time.time(), abs=TIMEOUT_S)

    scenario(sidecar, play)


def test_a_figure_of_merit_is_kept_until_the_end(tmp_path: Path, clock: ShiftedClock) -> None:
    async def play(served: Served) -> None:
        await served.post("/fom", b'{"name": "score", "value": 1}')
        clock.shift += 86400.0
        finish(tmp_path)
        await served.ended()
        status = run_files.read_json(tmp_path / run_files.STATUS_DIR / f"{NODE}.json") or {}
        assert status["final"]
        (figure,) = served.sidecar.status().figures_of_merit
        assert status["figures_of_merit"] == [figure._asdict()]

    scenario(with_figures(tmp_path, clock), play)


def test_a_figure_without_the_token_is_refused(tmp_path: Path, clock: ShiftedClock) -> None:
    async def play(served: Served) -> None:
        for header in ("", "Bearer 3f9", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN):
            status, _ = await served.get("/fom", Authorization=header)
            assert status == 401
        assert served.sidecar.status().figures_of_merit == ()

    scenario(with_figures(tmp_path, clock), play)


def test_an_invalid_figure_is_refused_with_an_example(tmp_path: Path, clock: ShiftedClock) -> None:
    async def play(served: Served) -> None:
        status, answer = await served.post("/fom", b"gflops=1", Content_Type="application/x-www-form-urlencoded")
        assert status == 400
        assert '{"name": "gflops", "value": 511.26}' in answer["error"]
        assert (await served.get("/fom"))[0] == 405

    scenario(with_figures(tmp_path, clock), play)


def test_the_size_of_a_body_is_limited(tmp_path: Path, clock: ShiftedClock) -> None:
    async def play(served: Served) -> None:
        body = b'{"name": "a", "value": 1}'
        assert (await served.post("/fom", body.ljust(MOST_BODY_BYTES)))[0] == 200
        status, answer = await served.post("/fom", body.ljust(MOST_BODY_BYTES + 1))
        assert (status, answer) == (413, {"error": "the body has more than 65536 bytes"})
        status, answer = await served.post("/fom", zlib.compress(body.ljust(64 << 20)), Content_Encoding="deflate")
        assert status == 413

    scenario(with_figures(tmp_path, clock), play)


def test_a_body_that_does_not_arrive_is_an_error(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.1)

    async def answer(served: Served, headers: bytes) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.sidecar.port)
        writer.write(
            f"POST /fom HTTP/1.1\r\nHost: node01\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
            + headers
            + b"\r\n\r\n{oops"
        )
        text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S) + await reader.read(1000)
        writer.close()
        return text.decode()

    async def play(served: Served) -> None:
        await served.until(lambda: served.sidecar.port, "the port")
        slow = await answer(served, b"Content-Length: 100")
        assert slow.startswith("HTTP/1.1 408")
        assert "the body did not arrive within 0.1 s" in slow
        broken = await answer(served, b"Content-Length: 5\r\nContent-Encoding: gzip")
        assert broken.startswith("HTTP/1.1 400")
        assert "the body is not what Content-Length, Transfer-Encoding and Content-Encoding announce" in broken
        assert not any("oops" in logging.Formatter().format(record) for record in caplog.records)

    scenario(with_figures(tmp_path, clock), play)


def test_a_figure_from_another_node_is_refused(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "name_peer", str)

    async def play(served: Served) -> None:
        status, answer = await served.post("/fom", b'{"name": "a", "value": 1}')
        assert status == 403
        assert f"post to http://127.0.0.1:{served.sidecar.port}/fom" in answer["error"]
        assert (await served.get("/metrics"))[0] == 200

    scenario(with_figures(tmp_path, clock), play)


# -- the end -------------------------------------------------------------------------------------


def test_a_sidecar_that_was_never_scraped_ends_immediately(tmp_path: Path, clock: ShiftedClock) -> None:
    async def play(served: Served) -> None:
        await served.keeps_running()
        finish(tmp_path)
        await served.ended()
        status = json.loads((tmp_path / run_files.STATUS_DIR / f"{NODE}.json").read_text(encoding="utf-8"))
        assert status["final"]

    scenario(phase_sidecar(tmp_path, clock), play)


@in_sidecar()
async def test_a_scraper_gets_the_final_values_before_the_end(served: Served) -> None:
    await served.get("/metrics")
    await served.read_final_values()
    await served.keeps_running()
    page = (await served.get("/metrics"))[1]
    await served.ended()
    assert 'phase="finished"} 1\n' in page


@in_sidecar()
async def test_the_status_is_final_before_the_job_is_finished(served: Served) -> None:
    """The launcher waits for the final status, writes its report, and only then sets the phase `finished`."""
    path = served.run_dir / run_files.STATUS_DIR / f"{NODE}.json"
    run_files.write_job_state(str(served.run_dir), "completing", workers_ended=True)
    await served.until(lambda: (run_files.read_json(path) or {}).get("final"), "the final status")
    await served.keeps_running()
    await served.read_final_values()
    await served.ended()


@in_sidecar(kill_wait_s=0.0)
async def test_the_status_is_not_final_while_a_worker_still_runs(served: Served) -> None:
    run_files.write_job_state(str(served.run_dir), "completing")
    await served.until(lambda: served.sidecar.phase == "completing", "the phase")
    await served.keeps_running()
    assert not served.sidecar.final


async def terminate_while_workers_save(served: Served) -> None:
    """Send SIGTERM while the workers still save their work, as Slurm does."""
    run_files.write_job_state(str(served.run_dir), "completing")
    await served.until(lambda: served.sidecar.phase == "completing", "the phase")
    os.kill(os.getpid(), signal.SIGTERM)
    await served.keeps_running()


@in_sidecar()
async def test_a_sidecar_keeps_running_while_workers_save_their_work(served: Served) -> None:
    await terminate_while_workers_save(served)
    run_files.write_job_state(str(served.run_dir), "completing", workers_ended=True)
    await served.ended()
    assert served.sidecar.final


@in_sidecar(kill_wait_s=60.0)
async def test_a_sidecar_ends_before_slurm_kills_it(served: Served) -> None:
    await terminate_while_workers_save(served)
    served.advance(60.0)
    await served.ended()
    assert served.sidecar.final


def test_the_final_values_are_written_even_if_writing_is_slow(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LAST_WRITE_S", TIMEOUT_S)
    write = run_files.write_json

    def write_slowly(path: Path, body: Any, *, durable: bool = False) -> None:
        if durable:
            time.sleep(LAST_READ_S + 0.4)
        write(path, body, durable=durable)

    monkeypatch.setattr(run_files, "write_json", write_slowly)

    async def play(served: Served) -> None:
        run_files.write_job_state(str(tmp_path), "completing", workers_ended=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await served.ended()

    scenario(phase_sidecar(tmp_path, clock), play)
    assert (run_files.read_json(tmp_path / run_files.STATUS_DIR / f"{NODE}.json") or {})["final"]


def test_the_final_values_are_written_although_the_process_stood_still(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last write stood still too, and goes on when the loop finds the limit over."""
    monkeypatch.setattr(service, "LAST_WRITE_S", 5.0)
    shifted, stood_still, write = ShiftedClock(), threading.Event(), run_files.write_json
    finish_service, found = HttpService._finish, []

    async def finish(http: HttpService, timeout_s: float, write_s: float) -> None:
        await finish_service(http, timeout_s, write_s)
        found.append((run_files.read_json(tmp_path / run_files.STATUS_DIR / f"{NODE}.json") or {}).get("final"))

    async def play(served: Served) -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", shifted.monotonic)
        monkeypatch.setattr(machine_clock, "time", shifted)

        def stand_still() -> None:
            shifted.shift += 2 * service.LAST_WRITE_S
            stood_still.set()

        def write_after_that(path: Path, body: Any, *, durable: bool = False) -> None:
            if Path(path).name == f"{NODE}.json" and durable and not stood_still.is_set():
                loop.call_soon_threadsafe(stand_still)
                stood_still.wait(TIMEOUT_S)
                time.sleep(0.2)
            write(path, body, durable=durable)

        monkeypatch.setattr(run_files, "write_json", write_after_that)
        monkeypatch.setattr(HttpService, "_finish", finish)
        run_files.write_job_state(str(tmp_path), "completing", workers_ended=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await served.ended()

    scenario(phase_sidecar(tmp_path, clock), play)
    assert stood_still.is_set()
    assert found == [True]


@in_sidecar(kill_wait_s=1e6)
async def test_a_second_signal_ends_a_sidecar_immediately(served: Served) -> None:
    await terminate_while_workers_save(served)
    served.advance(BURST_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await served.ended()


def test_a_sidecar_waits_for_a_stop_notice_after_the_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals the steps before the batch step, and more than once at a time limit."""
    clock = FakeClock()
    read_all = HttpService._read_all
    monkeypatch.setattr(HttpService, "_read_all", lambda self, slots, _: read_all(self, slots, TIMEOUT_S))

    async def play(served: Served) -> None:
        job = served.sidecar.slots[0]
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        begun = job.ended_reads
        await served.until(lambda: job.ended_reads > begun + 2, "the wait, which reads the phase often")
        clock.advance(2.0)  # the orchestrator asks Slurm meanwhile
        await served.keeps_running()
        notice: dict[str, object] = {"reason": "time_limit", "cause": "c", "time": time.time()}
        run_files.write_job_state(str(tmp_path), "completing", notice)
        await served.until(lambda: served.sidecar.phase == "completing", "the phase")
        clock.advance(20.0)
        await served.keeps_running()
        run_files.write_job_state(str(tmp_path), "completing", notice, workers_ended=True)
        await served.ended()

    sidecar = phase_sidecar(tmp_path, clock, kill_wait_s=30.0)
    sidecar.slots[0].collector.interval_s = 1e6  # type: ignore[misc]  # a regular read would come too late
    scenario(sidecar, play)


@in_sidecar(kill_wait_s=1e6)
async def test_a_sidecar_that_is_signalled_alone_ends_without_a_notice(served: Served) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await served.keeps_running()
    served.advance(service.NOTICE_S)
    await served.ended()


@in_sidecar()
async def test_only_requests_for_metrics_count_as_scrapes(served: Served) -> None:
    for path in ("/status", "/", "/-/healthy", "/-/ready"):
        await served.get(path)
    finish(served.run_dir)
    await served.ended()


@pytest.mark.parametrize("announced", [False, True])
def test_one_scrape_of_a_stranger_does_not_hold_the_job(tmp_path: Path, clock: ShiftedClock, announced: bool) -> None:
    async def play(served: Served) -> None:
        served.advance(100.0)
        assert (await served.get("/metrics", Authorization=""))[0] == 200
        finish(tmp_path)
        await served.ended()

    scenario(phase_sidecar(tmp_path, clock, linger_s=1e6, announced=announced), play)


@in_sidecar(linger_s=1e6)
async def test_a_regular_scraper_without_credentials_gets_the_final_values(served: Served) -> None:
    await served.get("/metrics", Authorization="")
    served.advance(15.0)
    await served.get("/metrics", Authorization="")
    await served.read_final_values()
    await served.keeps_running()
    served.advance(15.0)
    assert 'phase="finished"} 1\n' in (await served.get("/metrics", Authorization=""))[1]
    await served.ended()


def test_a_missing_scraper_is_awaited_for_at_most_the_linger_time(
    tmp_path: Path, clock: ShiftedClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(served: Served) -> None:
        await served.get("/metrics")
        await served.read_final_values()
        await served.keeps_running()
        clock.shift += 100.0
        await served.keeps_running()
        clock.shift += 40.0
        await served.ended()
        assert "the linger time is over and the final values were not scraped" in caplog.messages

    scenario(phase_sidecar(tmp_path, clock, linger_s=120.0), play)


@in_sidecar(announced=True, linger_s=1e6)
async def test_an_announced_job_leaves_time_for_discovery(served: Served) -> None:
    await served.read_final_values()
    await served.keeps_running()
    served.advance(ScrapeLog.DISCOVERY_S)
    await served.ended()


def test_a_hanging_collector_does_not_block_the_end(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FINAL_READ_S", 0.1)
    blocked = BlockedCollector()

    async def play(served: Served) -> None:
        finish(tmp_path)
        await served.ended()
        blocked.release.set()

    scenario(phase_sidecar(tmp_path, clock, blocked), play)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_sidecar_promptly_while_a_collector_hangs(
    tmp_path: Path, clock: ShiftedClock, number: signal.Signals
) -> None:
    blocked = BlockedCollector()

    async def play(served: Served) -> None:
        await served.get("/metrics")
        os.kill(os.getpid(), number)
        await served.ended()
        path = tmp_path / run_files.STATUS_DIR / f"{NODE}.json"
        await served.until(lambda: (run_files.read_json(path) or {}).get("final"), "the final status")
        blocked.release.set()

    scenario(phase_sidecar(tmp_path, clock, blocked), play)


def test_a_signal_ends_a_sidecar_while_the_run_directory_hangs(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, go = BlockedCollector(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        go.wait(60)

    async def play(served: Served) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await served.ended()
        go.set()
        blocked.release.set()

    with monkeypatch.context() as patch:
        patch.setattr(run_files, "write_json", hang)
        scenario(phase_sidecar(tmp_path, clock, blocked), play)


# -- scrapes, headers, addresses -----------------------------------------------------------------


# -- restart after the driver was replaced -------------------------------------------------------

REPLACED = JobGpus(GpuReading(0.0, "version_mismatch", is_driver_replaced=True))


def test_driver_restarts_become_rarer(tmp_path: Path) -> None:
    clock = FakeClock()
    context = make_context(make_manifest(tmp_path), clock)
    restart_times = []
    for _ in range(24 * 360):
        if DriverRestarts(context).acquire():
            restart_times.append(clock.now)
        clock.advance(10)
    pauses = [later - earlier for earlier, later in itertools.pairwise(restart_times)]
    assert pauses == [RESTART_PAUSE_S * 2**number for number in range(len(pauses))]
    assert 10 <= len(restart_times) <= 12


def test_the_next_attempt_may_restart_immediately(tmp_path: Path) -> None:
    assert DriverRestarts(make_context(make_manifest(tmp_path), attempt=0)).acquire()
    assert DriverRestarts(make_context(make_manifest(tmp_path), attempt=1)).acquire()


def test_a_restart_that_cannot_be_recorded_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / STATE_DIR).write_text("no folder")
    restarts = DriverRestarts(make_context(make_manifest(tmp_path)))
    assert [restarts.acquire() for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize("saved", [{}, {"times": "1", "last": 0.0}, {"times": 3, "last": None}, {"times": 2}])
def test_an_invalid_record_of_restarts_is_ignored(saved: dict[str, Any], tmp_path: Path) -> None:
    context = make_context(make_manifest(tmp_path))
    identity = context.identity
    save_state(tmp_path, identity.node, identity.job_id, identity.attempt, saved, kind=RESTARTS_KIND)
    assert DriverRestarts(context).acquire()
    assert not DriverRestarts(context).acquire()


def make_supervised_sidecar(
    run_dir: Path, clock: ShiftedClock, gpus: Published[JobGpus], *, supervised: bool = True
) -> Sidecar:
    """A sidecar with a supervisor that would restart it."""
    sidecar = make_sidecar(make_context(make_manifest(run_dir), clock, supervised=supervised), gpus=gpus)
    sidecar.publisher.collector.interval_s = 0.02  # type: ignore[misc]
    return sidecar


def test_a_service_restarts_once_for_a_replaced_driver(tmp_path: Path, clock: ShiftedClock) -> None:
    gpus = publisher(REPLACED)

    async def ends(served: Served) -> None:
        await served.ended()

    async def stays(served: Served) -> None:
        await served.keeps_running()
        gpus.publish(JobGpus())  # its publisher outlives the test

    scenario(make_supervised_sidecar(tmp_path, clock, gpus), ends)
    scenario(make_supervised_sidecar(tmp_path, clock, gpus), stays)
    clock.shift += 1.1 * RESTART_PAUSE_S
    scenario(make_supervised_sidecar(tmp_path, clock, publisher(REPLACED)), ends)


def test_a_service_without_a_supervisor_does_not_end_for_a_driver(tmp_path: Path, clock: ShiftedClock) -> None:
    async def play(served: Served) -> None:
        await served.keeps_running()

    scenario(make_supervised_sidecar(tmp_path, clock, publisher(REPLACED), supervised=False), play)


def test_a_moment_that_could_not_be_recorded_is_one_at_the_next_look(tmp_path: Path) -> None:
    clock = FakeClock()
    sidecar = make_sidecar(make_context(make_manifest(tmp_path), clock))
    sidecar.timeline.take_up()
    sidecar.keep_timeline()
    sidecar.final = True
    clock.advance(1)
    begun = time.monotonic()
    with sidecar.timeline._lock:
        sidecar.keep_timeline()
    assert time.monotonic() - begun < 0.5, "the event loop does not wait"
    clock.advance(1)
    sidecar.keep_timeline()
    clock.advance(1)
    sidecar.keep_timeline()
    with timeline_file.open_timeline(write_timeline(sidecar, tmp_path)) as (head, _):
        assert list(head.moments) == [clock.now - 3, clock.now - 1]


def write_timeline(sidecar: Sidecar, folder: Path) -> Path:
    path = folder / "timeline.json.gz"
    path.write_bytes(sidecar.timeline.pack())
    return path
