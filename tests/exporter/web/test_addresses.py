"""Addresses on which a page listens, and names under which it is asked for."""

import errno
import socket
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from exporter.contract.errors import ExporterError
from exporter.web import addresses
from exporter.web.addresses import (
    LOOPBACK,
    OwnNames,
    find_node_address,
    open_socket,
    open_sockets,
    parse_listen_address,
)

OWN = addresses._sending_address()  # an address of this machine that others can reach
needs_network = pytest.mark.skipif(OWN is None, reason="this machine has only loopback")
Names = Callable[[dict[str, list[str]]], None]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Replace the name service: addresses by name, the first of which is also a canonical name."""
    resolve = socket.getaddrinfo

    def replace(known: dict[str, list[str]]) -> None:
        def look_up(host: str, port: int | None, *arguments: Any, **options: Any) -> list[Any]:
            if host and host[0].isdigit():
                return resolve(host, port, *arguments, **options)
            if host not in known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            flags = options.get("flags", 0)
            if flags & socket.AI_CANONNAME:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, known[host][0], ("0.0.0.0", 0))]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[host]]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return replace


@needs_network
def test_a_node_listens_on_the_address_of_its_name(names: Names) -> None:
    names({"node01": ["127.0.1.1", str(OWN)]})
    assert find_node_address("node01", None) == ("node01", (OWN,))


@needs_network
@pytest.mark.parametrize("known", [["127.0.1.1"], ["198.51.100.7"], None])
def test_a_node_whose_name_does_not_lead_to_it_uses_its_network(names: Names, known: list[str] | None) -> None:
    """Debian gives a machine 127.0.1.1 for its own name; Slurm's name of a node may be nobody else's."""
    names({"node01": known} if known else {})
    assert find_node_address("node01", OWN) == (OWN, (OWN,))
    assert find_node_address("node01", "198.51.100.8") == (OWN, (OWN,)), "the address it sends from"


def test_a_node_without_a_network_listens_on_loopback_alone(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    names({})
    monkeypatch.setattr(addresses, "_sending_address", lambda: None)
    assert find_node_address("node01", None) == (LOOPBACK, (LOOPBACK,))


def test_several_addresses_share_one_free_port() -> None:
    opened = open_sockets((LOOPBACK, "127.0.0.2"), 0)
    assert len({listening.getsockname()[1] for listening in opened}) == 1
    for listening in opened:
        listening.close()


def test_a_port_that_is_taken_on_one_address_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    given, taken = iter(range(3)), []

    def open_or_fail(host: str, port: int) -> socket.socket:
        if host == "127.0.0.2" and next(given) < 2:
            taken.append(port)
            raise ExporterError("taken") from OSError(errno.EADDRINUSE, "Address already in use")
        return open_socket(host, port)

    monkeypatch.setattr(addresses, "open_socket", open_or_fail)
    opened = open_sockets((LOOPBACK, "127.0.0.2"), 0)
    assert len(taken) == 2
    assert opened[0].getsockname()[1] == opened[1].getsockname()[1]
    for listening in opened:
        listening.close()


@pytest.mark.parametrize(("low", "found"), [(3, 10_000), (100, 9500)])
def test_a_port_that_prometheus_does_not_scrape_is_given_back(
    monkeypatch: pytest.MonkeyPatch, low: int, found: int
) -> None:
    """The kernel chooses below 10,000 with a wide ``net.ipv4.ip_local_port_range``; some ranges have no other ports."""
    ports = iter([9500] * low + [10_000])
    given = []

    def open_chosen(host: str, port: int) -> Mock:
        given.append(Mock(**{"getsockname.return_value": (host, next(ports))}))
        return given[-1]

    monkeypatch.setattr(addresses, "open_socket", open_chosen)
    (opened,) = open_sockets((LOOPBACK,), 0)
    assert opened.getsockname()[1] == found
    assert [each.close.called for each in given] == [True] * (len(given) - 1) + [False]


def test_a_given_port_that_is_taken_is_refused() -> None:
    with open_socket("127.0.0.2", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ExporterError, match=rf"cannot listen on 127\.0\.0\.2:{port}: Address already in use"):
            open_sockets((LOOPBACK, "127.0.0.2"), port)


def test_a_machine_is_known_by_its_names_with_and_without_domains(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    names({"gn1": ["gn1.cluster.site"], "own": ["own.elsewhere."]})
    monkeypatch.setattr(socket, "gethostname", lambda: "own")
    monkeypatch.setattr(socket, "getfqdn", lambda: "Own.Third")
    monkeypatch.setattr(addresses, "_search_domains", lambda: ["fourth."])
    known = OwnNames("GN1", "")
    assert all(name in known for name in ("gn1", "Gn1.", "own", "localhost"))
    assert "gn1.cluster.site" not in known
    known.learn()
    end = time.monotonic() + 30
    while "own.third" not in known:
        assert time.monotonic() < end
        time.sleep(0.005)
    for name in ("gn1", "gn1.cluster.site", "own", "OWN.elsewhere", "gn1.fourth", "own.fourth.", "localhost"):
        assert name in known, name
    for name in ("", "gn1.evil.example", "cluster.site", "gn1.cluster.site.evil.example", "fourth"):
        assert name not in known, name


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
