"""Ports of a job: one table, and who gets which. Pure.

A plan's ports are those of the table, counted up on each node. Everything of a job is moved by one offset
when it starts, so that two jobs on a node do not meet and a port that somebody has taken costs nothing:
the nodes look for it (``launcher.run.before.node_facts``), and ``ports.json`` tells what came of it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from exporter.contract import run_files
from launcher.errors import TopologyError
from launcher.plan.plan import Plan, RunFacts


class PortKind(NamedTuple):
    """What one kind of port begins with, and how many ports its program may take from there on."""

    base: int
    width: int
    meaning: str


TABLE: Mapping[str, PortKind] = {
    "public": PortKind(8000, 1, "where clients send requests: the balancer, or the only front end"),
    "internal": PortKind(8180, 1, "a front end behind the balancer"),
    "etcd": PortKind(2379, 1, "etcd, for its clients"),
    "etcd_peer": PortKind(2380, 1, "etcd, for its peers"),
    "nats": PortKind(4222, 1, "NATS"),
    "kv_events": PortKind(5200, 1, "events of a worker's KV cache"),
    "nixl": PortKind(5400, 8, "side channels of NIXL, one for each rank of data parallelism on the node"),
    "http": PortKind(6100, 32, "the server of a worker"),
    "bootstrap": PortKind(7200, 1, "where decode workers find a prefill worker"),
    "system": PortKind(7500, 1, "health and metrics of a process"),
    "dist_init": PortKind(8300, 20, "rendezvous of a worker's processes, and of their schedulers behind it"),
    "dp_rpc": PortKind(8650, 1, "calls between the ranks of data parallelism"),
    "nccl": PortKind(17500, 1, "NCCL of a worker"),
    "vllm": PortKind(20000, 50, "VLLM_PORT: what vLLM takes by itself"),
}  # bases are those that the engines and srtctl use, so that what people know by heart stays true

SURVEY_FILE, PORTS_FILE = "survey.json", "ports.json"
"""What the nodes are asked for before the start, ports as they are in the plan, and which ports the job has."""
EPHEMERAL = 32768  # where Linux begins to hand out ports by itself (ip_local_port_range)
END = 65536

OFFSETS = (0, 17, 34, 544, 561, 578, 4046, 4063, 4080, 4590, 4607, 4624, 8092, 8109, 8126, 8636)
"""Tried in turn. With up to 16 workers on a node, jobs of two offsets are given no port in common.

The ports behind a given one, which its program may take, can meet those of another job: programs try the next then.
"""


def assign_ports(requests: Sequence[tuple[int, tuple[str, ...]]], *, one_machine: bool) -> list[dict[str, int]]:
    """Ports of each process before the offset: ``requests`` are its node and what it needs ports for.

    No port, and none of the ports behind it that the table keeps for its program, is given away twice on a
    node, or at all where ``one_machine`` plays all nodes. Raises TopologyError when a node has no more.
    """
    by_place: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
    for node, names in requests:
        by_place.setdefault(0 if one_machine else node, []).append((node, names))
    given: dict[int, Iterator[dict[str, int]]] = {}
    alike: dict[tuple[tuple[str, ...], ...], list[dict[str, int]]] = {}
    for place, wanted in by_place.items():
        kind = tuple(names for _, names in wanted)
        if kind not in alike:  # most of a thousand nodes have the same processes
            alike[kind] = _assign_place(wanted)
        given[place] = iter(alike[kind])
    return [next(given[0 if one_machine else node]) for node, _ in requests]


def _assign_place(requests: Sequence[tuple[int, tuple[str, ...]]]) -> list[dict[str, int]]:
    """Ports of the processes that share one machine."""
    used: set[int] = set()
    following: dict[str, int] = {}
    found = []
    for node, names in requests:
        ports = {}
        for name in names:
            kind = TABLE[name]
            port = following.get(name, kind.base)
            while not used.isdisjoint(range(port, port + kind.width)):
                port += kind.width
            if port + kind.width > END:
                what = f"its processes need more {name} ports than there are from {kind.base} on"
                raise TopologyError([f"node {node}: {what}; use more nodes"])
            used.update(range(port, port + kind.width))
            following[name] = port + kind.width
            ports[name] = port
        found.append(ports)
    return found


def all_ports(plan: Plan) -> dict[int, set[int]]:
    """Ports of a plan before the offset, by the index of the node; nodes without any are left out."""
    found: dict[int, set[int]] = {}
    for planned in plan.tasks:
        if planned.ports:
            found.setdefault(planned.task.node_index, set()).update(planned.ports.values())
    return found


def survey_request(plan: Plan) -> dict[str, Any] | None:
    """What each node is surveyed for: the JSON object of ``survey.json``, or None for nothing.

    A file of its own, for a thousand nodes read it at the same moment; most of them have the same ports, which are
    told once: ``nodes`` has for each node its place in ``ports``.
    """
    on_nodes = all_ports(plan)
    if not on_nodes and plan.network_interface is None:
        return None
    ports = [tuple(sorted(on_nodes.get(node, ()))) for node in range(plan.nodes)]
    places = {kind: place for place, kind in enumerate(dict.fromkeys(ports))}
    return {
        "schema": run_files.RECORD_SCHEMA,
        "network_interface": plan.network_interface,
        "ports": [list(kind) for kind in places],
        "nodes": [places[kind] for kind in ports],
    }


def assigned_ports(plan: Plan, facts: RunFacts) -> dict[str, Any]:
    """The ports that a job has been given, offset included: the JSON object of ``ports.json``."""
    processes = [
        {
            "worker": planned.task.worker,
            "rank": planned.task.rank,
            "node": facts.hosts[planned.task.node_index],
            "address": facts.address(planned.task.node_index),
            "ports": {name: port + facts.port_offset for name, port in planned.ports.items()},
        }
        for planned in plan.tasks
        if planned.ports
    ]
    return {
        "schema": run_files.RECORD_SCHEMA,
        "attempt": facts.attempt,
        "port_offset": facts.port_offset,
        "processes": processes,
    }


def free_offsets(
    ports_of_nodes: Mapping[int, Collection[int]], busy_of_nodes: Mapping[int, Collection[int]], seed: int
) -> tuple[int, ...]:
    """Those of ``OFFSETS`` with which no port is busy on its node, in turn from the one that ``seed`` chooses.

    A seed of their own, as the job id is, leads most jobs that look for ports at the same moment apart. None is left
    out but those with a port that is busy, or beyond those that Linux leaves to servers.
    """
    highest = max((port for ports in ports_of_nodes.values() for port in ports), default=0)
    end = EPHEMERAL if highest < EPHEMERAL else END  # so many virtual nodes that there is no keeping out of it
    first = _digits(seed, len(OFFSETS)) % len(OFFSETS)
    return tuple(
        offset
        for offset in OFFSETS[first:] + OFFSETS[:first]
        if highest + offset < end
        and not any(
            port + offset in busy_of_nodes.get(node, ()) for node, ports in ports_of_nodes.items() for port in ports
        )
    )


def _digits(number: int, base: int) -> int:
    """Sum of the digits of a number, all of which count: ids that differ by ``base`` have another one."""
    total = 0
    while number:
        number, digit = divmod(number, base)
        total += digit
    return total
