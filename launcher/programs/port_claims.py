"""Ports that jobs have been given on this machine, from long before their programs listen.

Two kinds of claims follow one upon the other, and so leave no gap. When a job looks for ports
(``launcher.run.before.node_facts``) it reserves them, all or none, which of several that look at once only one can;
it holds them until its tasks have started. From then on the wrapper of each holds a claim for it: a server that
loads a model for minutes listens only then.

A claim is an abstract Unix socket (unix(7)) called by the port. Like the port itself it belongs to the network
namespace, and it ends with its process, however that ends. Standard library alone: one of these is in each wrapper.
"""

import errno
import re
from collections.abc import Iterable

GIVEN, RESERVED = "gpujob-port-", "gpujob-reserved-port-"
"""Beginnings of the names: of the claims of wrappers, and of those of jobs that have just looked for ports."""
_CLAIM = re.compile(r"@(gpujob-(?:reserved-)?port-)(\d+)$", re.MULTILINE)


def claim_ports(ports: Iterable[int]) -> list[object]:
    """Hold a claim on each port until the process ends, or what is returned goes away.

    A port that another job has claimed at this very moment is left to whoever listens first, and so is one where
    the kernel has no such sockets.
    """
    held: list[object] = []
    for port in ports:
        try:
            held.append(_bound(f"{GIVEN}{port}"))
        except OSError:
            continue
    return held


def hold_reservation(ports: Iterable[int]) -> list[object] | None:
    """Hold all of these ports, for as long as what is returned is there; None when another job has one of them.

    In order: of jobs that want some of the same ports at the same moment, one always gets all of its own. Where the
    kernel has no such sockets nothing is held, and everybody gets what he asks for.
    """
    held: list[object] = []
    for port in sorted(ports):
        try:
            held.append(_bound(f"{RESERVED}{port}"))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
    return held


def _bound(name: str) -> object:
    import socket  # lazy: few jobs have ports; a wrapper stands beside every worker

    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0{name}")
    except OSError:
        holder.close()
        raise
    return holder


def ports_claimed_here(kinds: Iterable[str] = (GIVEN, RESERVED), listing: str = "/proc/self/net/unix") -> set[int]:
    """Ports that somebody here holds a claim of these kinds on; none where the kernel does not tell (proc(5))."""
    try:
        with open(listing, encoding="ascii", errors="replace") as source:
            return {int(port) for kind, port in _CLAIM.findall(source.read()) if kind in kinds}
    except OSError:
        return set()
