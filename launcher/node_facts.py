"""What only a node itself knows before a job starts on it: its address on a network, and its busy ports.

    python -I -B -m launcher.node_facts --run-dir DIR --node NAME

Writes ``nodes/NAME.json`` in the run directory:
``{"schema", "attempt", "address", "busy", "problem"}``. Exit status 2, with the problem
on standard error too, when the node does not have the network that was asked for.
"""

import argparse
import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exporter import records
from launcher.port_claims import claimed
from launcher.ports import END, OFFSETS, PORTS_FILE

_SIOCGIFADDR = 0x8915
ANY = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))  # noqa: S104 - as the services will


class NodeError(Exception):
    """Why this node cannot be used as the job file says."""


def is_free(port: int) -> bool:
    """Whether a server could listen on a TCP port, on all addresses of this machine.

    With SO_REUSEADDR, as servers set it: on Linux a port in TIME_WAIT is then free, and one on which
    somebody listens is not, whatever options that one has set (socket(7)). Others that only look, for
    other jobs or other virtual nodes at this very moment, are no hindrance to each other either.
    """
    for family, address in ANY:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6 here
                return False
    return True


def busy_ports(ports: Iterable[int]) -> list[int]:
    """Those of ``ports`` that are taken, or given to a task, with any of the offsets, offset included, in order."""
    candidates, given = {port + offset for port in ports for offset in OFFSETS}, claimed()
    return sorted(port for port in candidates if port < END and (port in given or not is_free(port)))


def interface_address(name: str) -> str:
    """IPv4 address of a network interface; raises NodeError without one.

    Not an IPv6 address: those who get ``host:port`` from us take them without brackets, or not at all.
    """
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise NodeError(f'there is no network interface "{name}"; there are {", ".join(names)}')
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # it has no IPv4 address
    raise NodeError(f'the network interface "{name}" has no IPv4 address; choose another of {", ".join(names)}')


def main(arguments: list[str]) -> int:
    """Look, and write down what was found; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m launcher.node_facts", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    options = parser.parse_args(arguments)
    asked: Any = records.read_json(options.run_dir / PORTS_FILE)
    if asked is None:
        sys.exit(
            f"gpujob: {options.run_dir / PORTS_FILE} cannot be read on {options.node}: is it on a shared file system?"
        )
    address = problem = None
    if asked["network_interface"] is not None:
        try:
            address = interface_address(asked["network_interface"])
        except NodeError as error:
            problem = f"{options.node}: network_interface: {error}"
    folder = options.run_dir / records.NODES_DIR
    folder.mkdir(exist_ok=True)
    records.write_json(
        folder / f"{options.node}.json",
        {
            "schema": records.RECORD_SCHEMA,
            "attempt": int(os.environ.get("GPUJOB_ATTEMPT") or os.environ.get("SLURM_RESTART_COUNT") or 0),
            "address": address,
            "busy": busy_ports(asked["ports"]),
            "problem": problem,
        },
    )
    if problem is not None:
        sys.stderr.write(f"gpujob: {problem}\n")
    return 0 if problem is None else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
