"""Where a sidecar listens, and what it publishes about it."""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.contract import run_files
from exporter.sidecar.listeners import fom_url, open_listeners
from exporter.sidecar.sidecar import Sidecar
from exporter.web.addresses import LOOPBACK, Listener, NodeAddress, find_node_address, open_sockets
from tests.support.exporter import NODE, make_context, make_manifest, make_sidecar
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def _lasting_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sidecars choose ports that no other test takes before the next one has them again."""
    monkeypatch.setattr(
        "exporter.sidecar.listeners.open_sockets", lambda hosts, port: open_sockets(hosts, port or free_port())
    )


@contextmanager
def opened(run_dir: Path, address: str | None, *, tls: bool = False) -> Iterator[tuple[Sidecar, list[Listener]]]:
    """A sidecar that listens."""
    sidecar = make_sidecar(make_context(make_manifest(run_dir)))
    listeners = open_listeners(sidecar, address, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None)
    try:
        yield sidecar, listeners
    finally:
        for listener in listeners:
            listener.listening.close()


def publish(run_dir: Path, record: Mapping[str, object]) -> None:
    """Write the record of an earlier sidecar."""
    (run_dir / run_files.SIDECARS_DIR).mkdir(exist_ok=True)
    run_files.write_json(run_dir / run_files.SIDECARS_DIR / f"{NODE}.json", record)


def hosts_of(listeners: list[Listener]) -> list[str]:
    return [listener.listening.getsockname()[0] for listener in listeners]


@pytest.fixture
def own_address(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of this machine that others can reach, which the node's name leads to."""
    own = find_node_address("no.such.name.invalid", None).host
    if own == LOOPBACK:
        pytest.skip("this machine has only loopback")
    monkeypatch.setattr(
        "exporter.sidecar.listeners.find_node_address", lambda node, network: NodeAddress(node, (network or own,))
    )
    return own


def test_without_an_address_a_sidecar_listens_on_its_node_and_on_loopback(tmp_path: Path, own_address: str) -> None:
    with opened(tmp_path, None) as (sidecar, listeners):
        assert hosts_of(listeners) == [own_address, LOOPBACK]
        assert len({listener.port for listener in listeners}) == 1
        assert (sidecar.host, sidecar.fom) == (NODE, f"http://127.0.0.1:{listeners[0].port}/fom")


def test_the_address_of_the_node_survey_is_that_of_its_network(tmp_path: Path, own_address: str) -> None:
    (tmp_path / run_files.NODES_DIR).mkdir()
    run_files.write_json(tmp_path / run_files.NODES_DIR / f"{NODE}.json", {"address": "127.0.0.3"})
    with opened(tmp_path, None) as (_, listeners):
        assert hosts_of(listeners) == ["127.0.0.3", LOOPBACK]


@pytest.mark.parametrize("address", [":0", "0.0.0.0:0", "[::]:0"])
def test_every_interface_is_an_explicit_choice(tmp_path: Path, address: str) -> None:
    with opened(tmp_path, address) as (_, listeners):
        assert len(listeners) == 1
        assert hosts_of(listeners)[0] in ("0.0.0.0", "::")


@pytest.mark.parametrize("tls", [True, False])
def test_with_tls_or_another_address_figures_have_a_door_of_their_own(
    tmp_path: Path, own_address: str, tls: bool
) -> None:
    with opened(tmp_path, None if tls else f"{own_address}:0", tls=tls) as (sidecar, listeners):
        *page, own = listeners
        assert all((listener.context is not None) is tls for listener in page)
        assert (hosts_of([own]), own.context) == ([LOOPBACK], None)
        assert sidecar.fom == f"http://127.0.0.1:{own.port}/fom"


def test_a_restarted_sidecar_has_the_same_ports(tmp_path: Path, own_address: str) -> None:
    with opened(tmp_path, None, tls=True) as (sidecar, listeners):
        before = [listener.port for listener in listeners]
        publish(tmp_path, {"attempt": 0, "port": before[0], "fom": sidecar.fom})
    with opened(tmp_path, None, tls=True) as (_, listeners):
        assert [listener.port for listener in listeners] == before


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"port": "7"}, {"port": None}, None])
def test_only_a_valid_record_of_this_attempt_gives_the_earlier_port(
    tmp_path: Path, changes: Mapping[str, object] | None
) -> None:
    record = {"attempt": 0, "port": free_port()}
    publish(tmp_path, record)
    with opened(tmp_path, "127.0.0.1:0") as (_, listeners):
        assert listeners[0].port == record["port"]
    publish(tmp_path, {} if changes is None else {**record, **changes})
    with opened(tmp_path, "127.0.0.1:0") as (_, listeners):
        assert listeners[0].port != record["port"]


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
