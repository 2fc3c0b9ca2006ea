"""Ports that tasks of jobs have been given on this machine, from long before their programs listen.

A server that loads a model for minutes listens only then. Until it does, its wrapper holds a claim: an abstract
Unix socket (unix(7)) called by the port. Like the port itself it belongs to the network namespace, and it ends
with its process, however that ends. Standard library alone: one of these is in each wrapper.
"""

import re
from collections.abc import Iterable

NAME = "gpujob-port-"
_CLAIM = re.compile(rf"@{NAME}(\d+)$", re.MULTILINE)


def claim(ports: Iterable[int]) -> list[object]:
    """Hold a claim on each port until the process ends, or what is returned goes away.

    A port that another job has claimed at this very moment is left to whoever listens first, and so is one where
    the kernel has no such sockets.
    """
    import socket

    held: list[object] = []
    for port in ports:
        try:
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            holder.bind(f"\0{NAME}{port}")
        except OSError:
            continue
        held.append(holder)
    return held


def claimed(listing: str = "/proc/self/net/unix") -> set[int]:
    """Ports that somebody here holds a claim on; none where the kernel does not tell (proc(5))."""
    try:
        with open(listing, encoding="ascii", errors="replace") as source:
            return {int(port) for port in _CLAIM.findall(source.read())}
    except OSError:
        return set()
