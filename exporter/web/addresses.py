"""On which addresses a page listens, and the names under which clients may ask for it."""

import contextlib
import errno
import ipaddress
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from exporter.contract.errors import ExporterError

if TYPE_CHECKING:
    import ssl

LOOPBACK = "127.0.0.1"
ALL_INTERFACES = ("", "0.0.0.0", "::")  # noqa: S104 - for comparison
MOST_TRIES = 20  # searches for a port that is free on several addresses, or that Prometheus scrapes
LEAST_FREE_PORT = 10_000  # our scrape configuration leaves out lower ones, which are of other services
ELSEWHERE = "192.0.2.1"  # an address for documentation (RFC 5737); nothing is sent to it


def parse_listen_address(text: str) -> tuple[str, int]:
    """Parse ``host:port``, ``:port`` or ``[v6]:port``; an empty host means every interface."""
    host, separator, port = text.rpartition(":")
    if not separator or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ExporterError(f"--web.listen-address: {text!r} is not host:port; for example :9410 or 127.0.0.1:0")
    return host.strip("[]"), int(port)


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; an empty host means every interface, IPv4 and IPv6."""
    try:
        if host:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ExporterError(f"cannot listen on {host or '*'}:{port}: {why}") from error


def open_sockets(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Open one socket per address, all with the same port; for port 0 one that is free on all of them.

    Where the kernel may choose ports below LEAST_FREE_PORT, another one is asked for.
    """
    for left in reversed(range(MOST_TRIES)):
        opened = [open_socket(hosts[0], port)]
        if port == 0 and left and opened[0].getsockname()[1] < LEAST_FREE_PORT:
            opened[0].close()
            continue
        try:
            opened += [open_socket(host, opened[0].getsockname()[1]) for host in hosts[1:]]
        except ExporterError as error:
            for listening in opened:
                listening.close()
            is_taken = getattr(error.__cause__, "errno", None) == errno.EADDRINUSE
            if port or not left or not is_taken:
                raise
        else:
            return opened
    raise AssertionError("unreachable")


class Listener(NamedTuple):
    """A listening socket of a page, with TLS or without."""

    listening: socket.socket
    context: "ssl.SSLContext | None" = None

    @property
    def port(self) -> int:
        return int(self.listening.getsockname()[1])

    def __str__(self) -> str:
        host = self.listening.getsockname()[0]
        text = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        return text if self.context is None else f"{text} (TLS)"


class NodeAddress(NamedTuple):
    """Where clients on other machines reach this one."""

    host: str  # for clients: the node's name, or an address if the name leads to none of this machine
    addresses: tuple[str, ...]  # to listen on


def find_node_address(node: str, network_address: str | None) -> NodeAddress:
    """The node's own addresses: those of its name, else that of its network, else the one it sends from.

    Many machines know their own name as a loopback address only. Others would look it up elsewhere, and so do we.
    """
    if addresses := [text for text in _addresses_of(node) if _is_own(text)]:
        return NodeAddress(node, tuple(addresses))
    for address in (network_address, _sending_address()):
        if address and _is_own(address):
            return NodeAddress(address, (address,))
    return NodeAddress(LOOPBACK, (LOOPBACK,))


def _addresses_of(name: str) -> list[str]:
    """Addresses of a name in their order, without loopback."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    texts = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [text for text in texts if not ipaddress.ip_address(text.partition("%")[0]).is_loopback]


def _sending_address() -> str | None:
    """The address from which this machine sends to others; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((ELSEWHERE, 9))
        return str(probe.getsockname()[0])
    return None


def _is_own(address: str) -> bool:
    """Whether this machine has the address."""
    try:
        open_socket(address, 0).close()
    except ExporterError:
        return False
    return True


class OwnNames:
    """Names under which clients may ask for this machine: those given, and its own with their domains."""

    def __init__(self, *given: str) -> None:
        self._names = {_plain(name) for name in (*given, socket.gethostname(), "localhost") if name}

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _plain(name) in self._names

    def learn(self) -> None:
        """Look the names up, on a thread of its own: a name server may take long to answer."""
        threading.Thread(target=self._look_up, name="own_names", daemon=True).start()

    def _look_up(self) -> None:
        found = {_plain(socket.getfqdn())}
        for name in self._names:
            with contextlib.suppress(OSError, UnicodeError):
                found |= {_plain(entry[3]) for entry in socket.getaddrinfo(name, None, flags=socket.AI_CANONNAME)}
            if "." not in name:
                found |= {f"{name}.{_plain(domain)}" for domain in _search_domains()}
        self._names |= found - {""}


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _search_domains() -> Iterable[str]:
    """Domains that complete a short name on this machine (resolv.conf(5))."""
    try:
        with open("/etc/resolv.conf", encoding="utf-8", errors="replace") as source:
            lines = [line.split() for line in source]
    except OSError:
        return ()
    return [word for words in lines if words[:1] in (["search"], ["domain"]) for word in words[1:]]
