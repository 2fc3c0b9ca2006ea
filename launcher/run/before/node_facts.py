"""What only a node itself knows before a job starts on it: its address on a network, and its busy ports.

    python -I -B -m launcher.run.before.node_facts --run-dir DIR --node NAME

Writes ``nodes/NAME.json`` in the run directory:
``{"schema", "attempt", "round", "address", "busy", "offset", "problem"}``, then a line to standard output that says so.
Exit status 2, with the problem on standard error too, when the node does not have the network that was asked for.

Of the offsets that it is given it reserves its ports with the first that it can, tells which (``offset``), and
holds them until there is a file ``nodes/released_a0_0`` (of its attempt and round): nobody else who looks for ports
here gets them.
"""

import argparse
import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from exporter.contract import run_files
from launcher.plan.ports import END, OFFSETS, SURVEY_FILE
from launcher.programs.port_claims import GIVEN, hold_reservation, ports_claimed_here
from launcher.programs.supervisor import IGNORED

TOLD = b"gpujob has looked\n"
"""Says to who waits that the file is there, or will never be: one on a network may be seen late by those who look
for it in vain.

A line, for srun passes on whole ones alone; others there may come from what a site runs before each task.
"""
_SIOCGIFADDR = 0x8915
ANY = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))  # noqa: S104 - as the services will

LOOKS_S = (0.2, 2.0)  # between two looks for that file, at first and at last: a model may take half an hour to load


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
    candidates, given = {port + offset for port in ports for offset in OFFSETS}, ports_claimed_here()
    return sorted(port for port in candidates if port < END and (port in given or not is_free(port)))


def reserve_ports(ports: Collection[int], offsets: Iterable[int]) -> tuple[int | None, list[object]]:
    """The first of ``offsets`` with which all ports could be reserved and nobody uses one, and what holds them."""
    for offset in offsets:
        wanted = {port + offset for port in ports}
        held = hold_reservation(wanted)
        if held is not None and wanted.isdisjoint(ports_claimed_here((GIVEN,))) and all(map(is_free, wanted)):
            return offset, held
    return None, []


def ports_of_node(asked: dict[str, Any], node: str, nodes: str) -> list[int]:
    """Ports of the plan on a node: ``nodes`` are the names of all, in their order and with commas; more have none."""
    places = dict(zip(nodes.split(","), asked["nodes"], strict=False))
    return list(asked["ports"][places[node]]) if node in places else []


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


def released_file(run_dir: Path, attempt: int, number: int) -> Path:
    """What is there once the ports need not be held any more that were found in this round of an attempt."""
    return run_dir / run_files.NODES_DIR / f"released_a{attempt}_{number}"


def file_exists(path: Path) -> bool:
    """Whether there is a file by now.

    Its folder is opened anew: NFS goes on for up to a minute to miss what it has missed once, unless it is asked so
    for the present state of the folder. A listing would do as well, but of a thousand nodes it is long.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        os.stat(path.name, dir_fd=folder)
    except OSError:
        return False
    finally:
        os.close(folder)
    return True


def hold_ports_until(released: Path) -> None:
    """Wait for the file."""
    pause, longest = LOOKS_S
    while not file_exists(released):
        time.sleep(pause)
        pause = min(longest, pause * 1.1)


def survey_node(run_dir: Path, node: str, attempt: int, number: int) -> tuple[str | None, list[object]]:
    """Look, and write down what was found; what is wrong with this node, and what holds its ports."""
    asked: Any = run_files.read_json(run_dir / SURVEY_FILE)
    if asked is None:
        sys.exit(f"gpujob: {run_dir / SURVEY_FILE} cannot be read on {node}: is it on a shared file system?")
    address = problem = None
    if asked["network_interface"] is not None:
        try:
            address = interface_address(asked["network_interface"])
        except NodeError as error:
            problem = f"{node}: network_interface: {error}"
    ports = ports_of_node(asked, node, os.environ.get("GPUJOB_NODES", ""))
    offsets = [int(offset) for offset in os.environ.get("GPUJOB_PORT_OFFSETS", "").split(",") if offset]
    offset, held = reserve_ports(ports, offsets) if ports else (None, [])
    own = set() if offset is None else {port + offset for port in ports}
    folder = run_dir / run_files.NODES_DIR
    folder.mkdir(exist_ok=True)
    run_files.write_json(
        folder / f"{node}.json",
        {
            "schema": run_files.RECORD_SCHEMA,
            "attempt": attempt,
            "round": number,
            "address": address,
            "busy": [port for port in busy_ports(ports) if port not in own],
            "offset": offset,
            "problem": problem,
        },
    )
    return problem, held


def report_survey_done() -> None:
    """Say that this node has looked, if anybody still listens."""
    with contextlib.suppress(OSError):
        os.write(1, TOLD)


def main(arguments: list[str]) -> int:
    """Look, tell, and hold the ports for as long as they have to be; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m launcher.run.before.node_facts", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    options = parser.parse_args(arguments)
    attempt = int(os.environ.get("GPUJOB_ATTEMPT") or os.environ.get("SLURM_RESTART_COUNT") or 0)
    number = int(os.environ.get("GPUJOB_SURVEY_ROUND") or 0)
    try:
        problem, held = survey_node(options.run_dir, options.node, attempt, number)
        if problem is not None:
            sys.stderr.write(f"gpujob: {problem}\n")
            sys.stderr.flush()
    finally:
        report_survey_done()  # whatever came of it: all others would wait for one that cannot look
    if held:
        hold_ports_until(released_file(options.run_dir, attempt, number))
    return 0 if problem is None else 2


if __name__ == "__main__":
    for warning in IGNORED:  # before the time limit one reaches every step
        signal.signal(warning, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
