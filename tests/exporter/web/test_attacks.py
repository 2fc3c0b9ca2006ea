"""A real sidecar under attack by one client, with the descriptors that a site may allow."""

import contextlib
import http.client
import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.web.limits import MOST_LOCAL
from tests.exporter.sidecar.test_sidecar_process import SidecarProcess
from tests.support.certificates import Authority
from tests.support.duration import took_s
from tests.support.exporter import SOON_S, make_manifest, make_task, until, write_manifest

SCRAPE_S = 5.0  # half of the default scrape timeout of Prometheus
DESCRIPTORS = 1024
HALF_OPEN = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    """A sidecar of a job with a large page, and enough descriptors here for attackers."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    write_manifest(make_manifest(tmp_path, *map(make_task, range(32))))
    run_files.write_job_state(str(tmp_path), "running")
    process = SidecarProcess(tmp_path, "--web.listen-address", "127.0.0.1:0")
    try:
        process.until_ready()
        yield process
    finally:
        process.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def attackers(sidecar: SidecarProcess, number: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """This many connections that have sent this and read nothing."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(number):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.settimeout(SOON_S)
            client.connect(("127.0.0.1", sidecar.port))
            with contextlib.suppress(ConnectionError):  # it was closed to make room for a later one
                client.sendall(sent)
            sockets.append(client)
        yield sockets


def descriptors(sidecar: SidecarProcess) -> int:
    return len(os.listdir(f"/proc/{sidecar.process.pid}/fd"))


def rss_bytes(sidecar: SidecarProcess) -> int:
    statm = Path(f"/proc/{sidecar.process.pid}/statm").read_text()
    return int(statm.split()[1]) * resource.getpagesize()


def insecure_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def scrape_s(sidecar: SidecarProcess) -> float:
    def scrape() -> None:
        assert "gpujob_worker" in sidecar.text("/metrics")

    return took_s(sidecar.process.pid, scrape)


def test_half_open_connections_do_not_delay_a_scrape(sidecar: SidecarProcess) -> None:
    resource.prlimit(sidecar.process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    own = descriptors(sidecar)
    with attackers(sidecar, DESCRIPTORS + 50, HALF_OPEN):
        assert scrape_s(sidecar) < SCRAPE_S
        assert until(lambda: descriptors(sidecar) <= own + MOST_LOCAL, "the end of the burst")
        assert sidecar.log.stat().st_size < 2000


def test_a_scrape_finds_a_descriptor_when_none_is_left(sidecar: SidecarProcess) -> None:
    few = descriptors(sidecar) + 5
    resource.prlimit(sidecar.process.pid, resource.RLIMIT_NOFILE, (few, few))
    with attackers(sidecar, 40, HALF_OPEN):
        assert scrape_s(sidecar) < SCRAPE_S
        assert "no descriptor is left" in sidecar.log.read_text()
        assert sidecar.log.stat().st_size < 2000


@pytest.mark.parametrize("requests", [1, 40])
def test_slow_readers_take_little_memory(sidecar: SidecarProcess, requests: int) -> None:
    scrape_s(sidecar)
    before, after = rss_bytes(sidecar), []
    with attackers(sidecar, 400, GET * requests):
        for _ in range(10):
            assert scrape_s(sidecar) < SCRAPE_S
            after.append(rss_bytes(sidecar))
            time.sleep(0.1)  # the memory of the attack grows meanwhile
    assert max(after) - before < 10 << 20


def test_connections_without_a_handshake_take_little_memory(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("server", "IP:127.0.0.1")
    (tmp_path / "web.yml").write_text(f"tls_server_config: {{cert_file: {pair.certificate}, key_file: {pair.key}}}")
    write_manifest(make_manifest(tmp_path, make_task(0)))
    options = ("--web.listen-address", "127.0.0.1:0", "--web.config.file", str(tmp_path / "web.yml"))
    with contextlib.closing(SidecarProcess(tmp_path, *options)) as sidecar:

        def scrape() -> None:
            page = http.client.HTTPSConnection("127.0.0.1", sidecar.port, timeout=30, context=insecure_context())
            page.request("GET", "/metrics")
            assert page.getresponse().status == http.HTTPStatus.OK
            page.close()

        scrape()
        before = rss_bytes(sidecar)
        with attackers(sidecar, 600, b"\x16\x03\x01\x02\x00\x01"):
            assert took_s(sidecar.process.pid, scrape) < SCRAPE_S
            assert rss_bytes(sidecar) - before < 60 << 20, "asyncio would reserve 256 KiB for each"


def test_malformed_requests_do_not_fill_the_log(sidecar: SidecarProcess) -> None:
    with attackers(sidecar, 100, b"GET /" + b"\xff" * 7900 + b"\0 HTTP/1.1\r\n\r\n") as clients:
        assert all(client.recv(100).startswith(b"HTTP/1.0 400") for client in clients)
    assert "malformed request from this node\n" in sidecar.log.read_text()
    assert sidecar.log.stat().st_size < 2000


def test_a_scraper_keeps_its_connection(sidecar: SidecarProcess) -> None:
    """As Prometheus does, while others come and go."""
    connection = http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=SOON_S)
    addresses = set()
    for _ in range(5):
        connection.request("GET", "/metrics")
        assert b"gpujob_worker" in connection.getresponse().read()
        addresses.add(connection.sock.getsockname())
        with attackers(sidecar, MOST_LOCAL // 2, GET):
            pass
    connection.close()
    assert len(addresses) == 1
