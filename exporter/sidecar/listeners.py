"""Where a sidecar listens."""

import ipaddress
from collections.abc import Sequence
from socket import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from exporter.contract import run_files
from exporter.contract.errors import ExporterError
from exporter.sidecar.sidecar import Sidecar
from exporter.web.addresses import (
    ALL_INTERFACES,
    LOOPBACK,
    Listener,
    find_node_address,
    open_sockets,
    parse_listen_address,
)

if TYPE_CHECKING:
    import ssl


def open_listeners(sidecar: Sidecar, address: str | None, tls: "ssl.SSLContext | None" = None) -> list[Listener]:
    """Listen at ``address``, or without one on the node's own addresses and on loopback; tell the sidecar where.

    Processes of the job report their figures on loopback, without TLS: they know no certificate. If that is not a part
    of the page, it gets a listener of its own, which is the last. Ports of an earlier sidecar are used again.
    """
    identity, run_dir = sidecar.context.identity, sidecar.context.manifest.run_dir
    known = run_files.read_json(run_dir / run_files.SIDECARS_DIR / f"{identity.node}.json") or {}
    earlier = known if known.get("attempt") == identity.attempt else {}
    hosts: Sequence[str]
    if address is None:
        survey = run_files.read_json(run_dir / run_files.NODES_DIR / f"{identity.node}.json") or {}
        network = survey.get("address")
        sidecar.host, own = find_node_address(identity.node, network if isinstance(network, str) else None)
        hosts, port = tuple(dict.fromkeys((*own, LOOPBACK))), 0
    else:
        sidecar.host, port = parse_listen_address(address)
        hosts = (sidecar.host,)
    listeners = [Listener(listening, tls) for listening in _open_again(hosts, port, earlier.get("port"))]
    urls = [None if tls else fom_url(host, listeners[0].port) for host in hosts]
    sidecar.fom = next(filter(None, urls), None)
    if sidecar.fom is None:
        listeners += map(Listener, _open_again((LOOPBACK,), 0, urlsplit(str(earlier.get("fom"))).port))
        sidecar.fom = fom_url(LOOPBACK, listeners[-1].port)
    return listeners


def _open_again(hosts: Sequence[str], port: int, earlier: object) -> list[socket]:
    """Open sockets; for port 0 with the earlier port, if there is one and it is free."""
    if port == 0 and isinstance(earlier, int):
        try:
            return open_sockets(hosts, earlier)
        except ExporterError:
            pass  # the port is taken
    return open_sockets(hosts, port)


def fom_url(host: str, port: int) -> str | None:
    """URL of ``/fom`` for processes of this node; None if ``host`` is not reachable by loopback."""
    local = ("::1" if host == "::" else LOOPBACK) if host in ALL_INTERFACES else host
    try:
        if not (local == "localhost" or ipaddress.ip_address(local).is_loopback):
            return None
    except ValueError:
        return None
    return f"http://[{local}]:{port}/fom" if ":" in local else f"http://{local}:{port}/fom"
