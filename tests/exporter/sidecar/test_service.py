"""The web server of a sidecar and its end, in this process, with test clocks and collectors."""

import asyncio
import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporter.collecting.collector import StatusParts
from exporter.collecting.families import Samples
from exporter.collecting.published import JobProgress, Published
from exporter.collecting.saved_state import STATE_DIR, save_state
from exporter.contract import run_files
from exporter.contract.errors import ExporterError
from exporter.gpus.records import GpuReading, JobGpus
from exporter.sidecar import service
from exporter.sidecar.background_reads import SUCCESS
from exporter.sidecar.figures_collector import FIGURE, FomCollector
from exporter.sidecar.job_collector import JobCollector
from exporter.sidecar.service import (
    BURST_S,
    LAST_READ_S,
    MOST_BODY_BYTES,
    HttpService,
    find_earlier_port,
    is_loopback,
    wants_openmetrics,
)
from exporter.sidecar.sidecar import (
    RESTART_PAUSE_S,
    RESTARTS_KIND,
    DriverRestarts,
    ScrapeLog,
    Sidecar,
    fom_url,
    open_socket,
    parse_listen_address,
)
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

TIMEOUT_S = SOON_S  # for events that must happen


class BlockedCollector:
    """A collector whose reads block until the test releases them."""

    families = ()
    interval_s = 1e6

    def __init__(self, name: str = "waiting") -> None:
        self.name = name
        self.release = threading.Event()

    def read(self) -> int:
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
    listening = open_socket("127.0.0.1", 0)
    task = asyncio.create_task(HttpService(sidecar).run(listening))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as http:
        served = Served(sidecar, http, task, f"http://127.0.0.1:{listening.getsockname()[1]}")
        try:
            assert (await served.get("/-/healthy"))[0] == 200
            yield served
        finally:
            if not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
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


def phase_sidecar(run_dir: Path, clock: ShiftedClock, *others: Any, **changes: Any) -> Sidecar:
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


def test_the_landing_page_shows_names_as_text(tmp_path: Path, clock: ShiftedClock) -> None:
    context = make_context(make_manifest(tmp_path), clock, job_id="<script>1</script>", node="a&b")

    async def play(served: Served) -> None:
        status, text = await served.get("/")
        assert status == 200
        assert "<h1>gpujob exporter: job &lt;script&gt;1&lt;/script&gt; on a&amp;b</h1>" in text
        assert "<script>" not in text
        assert 'href="metrics"' in text

    scenario(make_sidecar(context), play)


def test_a_page_is_served_while_a_collector_hangs(tmp_path: Path, clock: ShiftedClock) -> None:
    blocked = BlockedCollector()

    async def play(served: Served) -> None:
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
            "labels": sidecar.context.identity.constant_labels(),
        }
        assert find_earlier_port(sidecar) == port

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


@pytest.mark.parametrize("record", [{"port": 7, "attempt": 1}, {"port": "7", "attempt": 0}, {"attempt": 0}, None])
def test_only_a_valid_record_of_this_attempt_gives_the_earlier_port(
    tmp_path: Path, clock: ShiftedClock, record: dict[str, object] | None
) -> None:
    (tmp_path / run_files.SIDECARS_DIR).mkdir()
    if record is not None:
        run_files.write_json(tmp_path / run_files.SIDECARS_DIR / f"{NODE}.json", record)
    assert find_earlier_port(phase_sidecar(tmp_path, clock)) is None


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


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.5.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_loopback_peer_is_on_this_node(peer: str) -> None:
    assert is_loopback(peer)


@pytest.mark.parametrize(
    "peer", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "::", "0.0.0.0", "localhost", "", None]
)
def test_other_peers_are_not_on_this_node(peer: str | None) -> None:
    assert not is_loopback(peer)


def test_a_figure_from_another_node_is_refused(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "is_loopback", lambda peer: is_loopback(peer) and peer != "127.0.0.1")

    async def play(served: Served) -> None:
        status, answer = await served.post("/fom", b'{"name": "a", "value": 1}')
        assert status == 403
        assert f"post to http://127.0.0.1:{served.sidecar.port}/fom" in answer["error"]
        assert (await served.get("/metrics"))[0] == 200

    scenario(with_figures(tmp_path, clock), play)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:7/fom"),
        ("0.0.0.0", "http://127.0.0.1:7/fom"),
        ("127.0.0.1", "http://127.0.0.1:7/fom"),
        ("localhost", "http://localhost:7/fom"),
        ("::", "http://[::1]:7/fom"),
        ("::1", "http://[::1]:7/fom"),
        ("10.0.0.1", None),
        ("node01", None),
    ],
)
def test_workers_get_a_fom_url_only_if_loopback_reaches_it(host: str, url: str | None) -> None:
    assert fom_url(host, 7) == url


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


@in_sidecar(kill_wait_s=1e6)
async def test_a_second_signal_ends_a_sidecar_immediately(served: Served) -> None:
    await terminate_while_workers_save(served)
    served.advance(BURST_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await served.ended()


def test_a_sidecar_waits_for_a_stop_notice_after_the_signals(
    tmp_path: Path, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm signals the steps before the batch step, and more than once at a time limit."""
    monkeypatch.setattr(service, "BURST_S", TIMEOUT_S)
    monkeypatch.setattr(service, "NOTICE_S", TIMEOUT_S)
    read_all = HttpService._read_all
    monkeypatch.setattr(HttpService, "_read_all", lambda self, slots, _: read_all(self, slots, TIMEOUT_S))

    async def play(served: Served) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        notice: dict[str, object] = {"reason": "time_limit", "cause": "c", "time": time.time()}
        run_files.write_job_state(str(tmp_path), "completing", notice)
        await served.until(lambda: served.sidecar.phase == "completing", "the phase")
        clock.shift += 2 * TIMEOUT_S
        await served.keeps_running()
        run_files.write_job_state(str(tmp_path), "completing", notice, workers_ended=True)
        await served.ended()

    scenario(phase_sidecar(tmp_path, clock, kill_wait_s=1e6), play)


@in_sidecar()
async def test_only_requests_for_metrics_count_as_scrapes(served: Served) -> None:
    for path in ("/status", "/", "/-/healthy", "/-/ready"):
        await served.get(path)
    finish(served.run_dir)
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


def test_a_scrape_log_is_satisfied_when_all_scrapers_have_the_final_values() -> None:
    log = ScrapeLog(0.0, announced=False)
    assert log.is_satisfied(100.0, 100.0)
    log.record("a", 90.0)
    log.record("b", 95.0)
    assert not log.is_satisfied(100.0, 101.0)
    log.record("a", 101.0)
    assert not log.is_satisfied(100.0, 102.0)
    log.record("b", 103.0)
    assert log.is_satisfied(100.0, 104.0)


def test_a_scraper_that_stopped_long_ago_does_not_count() -> None:
    log = ScrapeLog(0.0, announced=False)
    log.record("a", 10.0)
    assert not log.is_satisfied(100.0, 10.0 + ScrapeLog.RECENT_S - 1)
    assert log.is_satisfied(100.0, 10.0 + ScrapeLog.RECENT_S)


def test_an_announced_job_waits_half_a_minute_for_the_first_scrape() -> None:
    log = ScrapeLog(50.0, announced=True)
    assert not log.is_satisfied(60.0, 79.9)
    assert log.is_satisfied(60.0, 80.0)
    log.record("a", 55.0)
    assert not log.is_satisfied(60.0, 80.0)


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text", True),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.2", False),
        ("application/openmetrics-text;version=1.0.0;q=0", False),
        ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.5", False),
        ("application/openmetrics-text;q=high", False),
        ("application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
    ],
)
def test_openmetrics_is_sent_to_clients_that_prefer_it(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":9410", "", 9410),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("node01:65535", "node01", 65535),
        ("[::1]:9410", "::1", 9410),
    ],
)
def test_a_listen_address_has_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_listen_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "9410", "node01", "node01:", "node01:http", ":65536", ":-1", "[::1]", ":²"])
def test_an_invalid_listen_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ExporterError) as info:
        parse_listen_address(text)
    assert str(info.value) == (f"--web.listen-address: {text!r} is not host:port; for example :9410 or 127.0.0.1:0")


def test_the_error_for_a_used_port_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ExporterError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: .*in use"):
            open_socket("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b"])
def test_the_error_for_an_unknown_host_names_it(host: str) -> None:
    with pytest.raises(ExporterError, match=f"^cannot listen on {host}:0: "):
        open_socket(host, 0)


def test_an_empty_host_means_every_interface() -> None:
    with open_socket("", 0) as listening:
        with socket.create_connection(("127.0.0.1", listening.getsockname()[1]), timeout=5):
            pass


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
