"""Find the address and the busy ports of one node, and reserve the job's ports on it.

    python -I -B -m launcher.run.before.node_facts --run-dir DIR --node NAME

Write ``nodes/NAME.json`` in the run directory, then a line to standard output.
Exit with 2 and the problem on standard error if the node lacks the requested network.

The node reserves its ports with the first offset that works, and records it as ``offset``. It keeps them
reserved until the file ``nodes/released_a0_0`` (attempt and round) exists.
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

from exporter.contract import run_files
from exporter.contract.records import Record
from launcher.plan.ports import OFFSETS, PORT_END, SURVEY_FILE
from launcher.programs.port_claims import CLAIM_PREFIX, read_claimed_ports, try_reserve_ports
from launcher.programs.supervisor import IGNORED_SIGNALS

# Printed when the file is written or failed: on a network file system a poller may miss a new file for long. It is a
# full line because srun forwards only those, and a site's own output may precede it.
DONE_LINE = b"gpujob has looked\n"
_SIOCGIFADDR = 0x8915
ANY_ADDRESS = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))  # noqa: S104 - as the services will

POLL_INTERVALS_S = (0.2, 2.0)  # first and last interval for polling that file: loading a model may take 30 minutes


class SurveyRequest(Record):
    """``survey.json``: the network of the job, the different sets of ports, and which of them each node has."""

    network_interface: str | None
    ports: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]


class NodeAnswer(Record):
    """``nodes/NAME.json``: what one node found out and reserved."""

    SCHEMA = run_files.RECORD_SCHEMA
    attempt: int
    round: int
    address: str | None = None
    busy: tuple[int, ...] = ()
    offset: int | None = None
    problem: str | None = None


class NodeError(Exception):
    """Why this node does not match the job file."""


def is_free(port: int) -> bool:
    """Whether a server could listen on a TCP port on all addresses of this machine.

    SO_REUSEADDR, as servers set it, makes a port in TIME_WAIT free but not one with a listener (Linux,
    socket(7)). It also lets several jobs or virtual nodes test a port at the same time.
    """
    for family, address in ANY_ADDRESS:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6 here
                return False
    return True


def busy_ports(ports: Iterable[int]) -> list[int]:
    """Sums of a port and any of ``OFFSETS`` that are in use or claimed as ports, sorted."""
    candidates, given = {port + offset for port in ports for offset in OFFSETS}, read_claimed_ports()
    return sorted(port for port in candidates if port < PORT_END and (port in given or not is_free(port)))


def reserve_ports(ports: Collection[int], offsets: Iterable[int]) -> tuple[int | None, list[object]]:
    """Return the first offset for which all ports can be reserved, and their locks; None if there is none."""
    for offset in offsets:
        wanted = {port + offset for port in ports}
        locks = try_reserve_ports(wanted)
        if locks is not None and wanted.isdisjoint(read_claimed_ports((CLAIM_PREFIX,))) and all(map(is_free, wanted)):
            return offset, locks
    return None, []


def node_ports(request: SurveyRequest, node: str, nodes: str, index: str = "") -> tuple[int, ...]:
    """Planned ports of a node. ``nodes`` are all host names, separated by commas; surplus nodes have none.

    If the names are too many for a variable, the ``index`` of the node counts.
    """
    names = nodes.split(",")
    place = int(index) if not nodes and index.isdecimal() else names.index(node) if node in names else None
    return () if place is None or place >= len(request.nodes) else request.ports[request.nodes[place]]


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface; raise NodeError without one.

    IPv6 is not used: consumers of ``host:port`` expect it without brackets, or not at all.
    """
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise NodeError(f'there is no network interface "{name}"; use one of {", ".join(names)}')
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # no IPv4 address
    raise NodeError(f'the network interface "{name}" has no IPv4 address; use one of {", ".join(names)}')


def own_address() -> str | None:
    """Return the IPv4 address of this machine that its name leads to, otherwise its first one; None without one.

    Loopback and link-local addresses, such as that of a board controller, do not count.
    """
    own = list[str]()
    for _, name in socket.if_nameindex():
        with contextlib.suppress(NodeError):
            if not (address := interface_address(name)).startswith(("127.", "169.254.")):
                own.append(address)
    if len(own) > 1:
        with contextlib.suppress(OSError):
            named = [str(place[0]) for *_, place in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
            return next((address for address in named if address in own), own[0])
    return own[0] if own else None


def released_file(run_dir: Path, attempt: int, round_number: int) -> Path:
    """File that ends the reservation of this round of an attempt."""
    return run_dir / run_files.NODES_DIR / f"released_a{attempt}_{round_number}"


def file_exists(path: Path) -> bool:
    """Whether a file exists, without NFS's stale answers.

    NFS may repeat a negative answer for up to a minute unless the directory is opened again. Listing it would
    also help, but is slow with a thousand nodes.
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


def hold_ports_until(release_file: Path) -> None:
    pause, longest = POLL_INTERVALS_S
    while not file_exists(release_file):
        time.sleep(pause)
        pause = min(longest, pause * 1.1)


def survey_node(run_dir: Path, node: str, attempt: int, round_number: int) -> tuple[str | None, list[object]]:
    """Survey this node and write its answer. Return the problem and the locks of its ports."""
    body = run_files.read_json(run_dir / SURVEY_FILE)
    if body is None:
        sys.exit(f"gpujob: {run_dir / SURVEY_FILE} cannot be read on {node}: is it on a shared file system?")
    asked = SurveyRequest.from_json(body)
    address, problem = own_address(), None
    if asked.network_interface is not None:
        try:
            address = interface_address(asked.network_interface)
        except NodeError as error:
            address, problem = None, f"{node}: network_interface: {error}"
    ports = node_ports(asked, node, os.environ.get("GPUJOB_NODES", ""), os.environ.get("SLURM_NODEID", ""))
    offsets = [int(offset) for offset in os.environ.get("GPUJOB_PORT_OFFSETS", "").split(",") if offset]
    offset, locks = reserve_ports(ports, offsets) if ports else (None, [])
    own = set() if offset is None else {port + offset for port in ports}
    folder = run_dir / run_files.NODES_DIR
    folder.mkdir(run_files.FOLDER_MODE, exist_ok=True)
    busy = tuple(port for port in busy_ports(ports) if port not in own)
    answer = NodeAnswer(attempt=attempt, round=round_number, address=address, busy=busy, offset=offset, problem=problem)
    run_files.write_json(folder / f"{node}.json", answer.to_json())
    return problem, locks


def report_survey_done() -> None:
    """Report that this node is surveyed, if the reader still exists."""
    with contextlib.suppress(OSError):
        os.write(1, DONE_LINE)


def main(arguments: list[str]) -> int:
    """Survey the node, then hold its ports while needed; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m launcher.run.before.node_facts", allow_abbrev=False)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    options = parser.parse_args(arguments)
    attempt = int(os.environ.get("GPUJOB_ATTEMPT") or os.environ.get("SLURM_RESTART_COUNT") or 0)
    number = int(os.environ.get("GPUJOB_SURVEY_ROUND") or 0)
    try:
        problem, locks = survey_node(options.run_dir, options.node, attempt, number)
        if problem is not None:
            sys.stderr.write(f"gpujob: {problem}\n")
            sys.stderr.flush()
    finally:
        report_survey_done()  # even after an error: the others would wait for this node
    if locks:
        hold_ports_until(released_file(options.run_dir, attempt, number))
    return 0 if problem is None else 2


if __name__ == "__main__":
    for warning in IGNORED_SIGNALS:  # a warning before the time limit reaches every step
        signal.signal(warning, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
