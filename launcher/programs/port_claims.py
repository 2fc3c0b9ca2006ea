"""Claims on ports of this machine, held before a program listens on them.

A job reserves all its ports or none (``launcher.run.before.node_facts``) until its tasks have started. Then
each wrapper claims the ports of its task, since a server may load a model for minutes before it listens.

A claim is an abstract Unix socket named after the port (unix(7)). Like the port, it belongs to the network
namespace, and it ends with its process. Wrappers import this module, so it uses only the standard library.
"""

import errno
import re
from collections.abc import Iterable

# prefixes of socket names: claims of wrappers, and reservations of jobs
CLAIM_PREFIX, RESERVATION_PREFIX = "gpujob-port-", "gpujob-reserved-port-"
_CLAIM = re.compile(r"@(gpujob-(?:reserved-)?port-)(\d+)$", re.MULTILINE)


def claim_ports(ports: Iterable[int]) -> list[object]:
    """Claim each port until the process ends or the result is released.

    A port that another job has claimed is left to whoever listens first. So are all ports if the kernel lacks
    abstract sockets.
    """
    held: list[object] = []
    for port in ports:
        try:
            held.append(_bind_claim(f"{CLAIM_PREFIX}{port}"))
        except OSError:
            continue
    return held


def try_reserve_ports(ports: Iterable[int]) -> list[object] | None:
    """Reserve all ports until the result is released; None if another job has one of them.

    Ports are taken in order, so that one of several competing jobs always succeeds. If the kernel lacks
    abstract sockets, nothing is held and every job succeeds.
    """
    held: list[object] = []
    for port in sorted(ports):
        try:
            held.append(_bind_claim(f"{RESERVATION_PREFIX}{port}"))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
    return held


def _bind_claim(name: str) -> object:
    import socket  # lazy: few jobs have ports, but every worker has a wrapper

    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0{name}")
    except OSError:
        holder.close()
        raise
    return holder


def read_claimed_ports(
    prefixes: Iterable[str] = (CLAIM_PREFIX, RESERVATION_PREFIX), listing: str = "/proc/self/net/unix"
) -> set[int]:
    """Ports with claims of these kinds on this machine; empty if the kernel has no list (proc(5))."""
    try:
        with open(listing, encoding="ascii", errors="replace") as source:
            return {int(port) for kind, port in _CLAIM.findall(source.read()) if kind in prefixes}
    except OSError:
        return set()
