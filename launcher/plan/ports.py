"""Table of a job's ports, and their assignment to processes. Pure.

A plan takes ports from the table, counting up on each node. At the start, one offset is chosen for the whole job, so
that jobs on a node do not collide and busy ports do no harm. The nodes search for it
(``launcher.run.before.node_facts``); ``ports.json`` records the result.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from exporter.contract import run_files
from exporter.contract.records import JsonValue, to_json
from launcher.errors import TopologyError
from launcher.plan.plan import Plan, RunFacts


class PortKind(NamedTuple):
    """First port of a kind, and how many consecutive ports its program may take."""

    base: int
    width: int
    meaning: str


TABLE: Mapping[str, PortKind] = {
    "public": PortKind(8000, 1, "Requests of clients: the balancer, or the only front end."),
    "internal": PortKind(8180, 1, "A front end behind the balancer."),
    "etcd": PortKind(2379, 1, "etcd, for its clients."),
    "etcd_peer": PortKind(2380, 1, "etcd, for its peers."),
    "nats": PortKind(4222, 1, "NATS."),
    "kv_events": PortKind(5200, 1, "Events of a worker's KV cache."),
    "nixl": PortKind(5400, 8, "Side channels of NIXL, one for each data-parallel rank on the node."),
    "http": PortKind(6100, 32, "The server of a worker."),
    "bootstrap": PortKind(7200, 1, "Where decode workers find a prefill worker."),
    "system": PortKind(7500, 1, "Health and metrics of a process."),
    "dist_init": PortKind(8300, 20, "Rendezvous of a worker's processes, and of their schedulers."),
    "dp_rpc": PortKind(8650, 1, "Calls between data-parallel ranks."),
    "nccl": PortKind(17500, 1, "NCCL of a worker."),
    "vllm": PortKind(20000, 50, "`VLLM_PORT`: ports that vLLM picks itself."),
}  # the bases are those of the engines and srtctl, because people know them by heart

# request to the nodes before the start, and the ports that the job was given
SURVEY_FILE, PORTS_FILE = "survey.json", "ports.json"
FIRST_EPHEMERAL_PORT = 32768  # first port that Linux assigns by itself (ip_local_port_range)
PORT_END = 65536

# Tried in turn. With up to 16 workers on a node, two offsets never assign the same port. Only the further ports that
# a program may take can collide; programs then try the next one.
OFFSETS = (0, 17, 34, 544, 561, 578, 4046, 4063, 4080, 4590, 4607, 4624, 8092, 8109, 8126, 8636)


def assign_ports(requests: Sequence[tuple[int, tuple[str, ...]]], *, is_one_machine: bool) -> list[dict[str, int]]:
    """Assign ports, before the offset, to each process.

    A request is a node and the names of the ports needed there. No port is assigned twice on a node, nor are the
    further ports that the table reserves for its program. With ``is_one_machine``, one machine simulates all nodes.
    Raises TopologyError when a node runs out of ports.
    """
    by_machine: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
    for node, names in requests:
        by_machine.setdefault(0 if is_one_machine else node, []).append((node, names))
    given: dict[int, Iterator[dict[str, int]]] = {}
    alike: dict[tuple[tuple[str, ...], ...], list[dict[str, int]]] = {}
    for machine, wanted in by_machine.items():
        kind = tuple(names for _, names in wanted)
        if kind not in alike:  # most nodes have the same processes
            alike[kind] = _assign_on_machine(wanted)
        given[machine] = iter(alike[kind])
    return [next(given[0 if is_one_machine else node]) for node, _ in requests]


def _assign_on_machine(requests: Sequence[tuple[int, tuple[str, ...]]]) -> list[dict[str, int]]:
    """Assign ports to the processes that share one machine."""
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
            if port + kind.width > PORT_END:
                problem = f"its processes need more {name} ports than are available from {kind.base} on"
                raise TopologyError([f"node {node}: {problem}; use more nodes"])
            used.update(range(port, port + kind.width))
            following[name] = port + kind.width
            ports[name] = port
        found.append(ports)
    return found


def all_ports(plan: Plan) -> dict[int, set[int]]:
    """Ports of a plan before the offset, by node index. Nodes without ports are left out."""
    found: dict[int, set[int]] = {}
    for planned in plan.tasks:
        if planned.ports:
            found.setdefault(planned.task.node_index, set()).update(planned.ports.values())
    return found


def survey_request(plan: Plan) -> dict[str, JsonValue] | None:
    """The JSON object of ``survey.json``, the request of the node survey; None if there is nothing to ask.

    A separate file, because a thousand nodes may read it at the same time. Most have the same ports, so each set is
    stored once: ``nodes`` gives each node's index in ``ports``.
    """
    on_nodes = all_ports(plan)
    if not on_nodes and plan.network_interface is None:
        return None
    ports = [tuple(sorted(on_nodes.get(node, ()))) for node in range(plan.nodes)]
    indices = {kind: index for index, kind in enumerate(dict.fromkeys(ports))}
    return {
        "schema": run_files.RECORD_SCHEMA,
        "network_interface": plan.network_interface,
        "ports": to_json(list(indices)),
        "nodes": to_json([indices[kind] for kind in ports]),
    }


def assigned_ports(plan: Plan, facts: RunFacts) -> dict[str, JsonValue]:
    """The JSON object of ``ports.json``: the ports of each process, with the offset."""
    processes: list[JsonValue] = [
        {
            "worker": planned.task.worker,
            "rank": planned.task.rank,
            "node": facts.hosts[planned.task.node_index],
            "address": facts.address(planned.task.node_index),
            "ports": to_json({name: port + facts.port_offset for name, port in planned.ports.items()}),
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
    ports_by_node: Mapping[int, Collection[int]], busy_by_node: Mapping[int, Collection[int]], seed: int
) -> tuple[int, ...]:
    """The ``OFFSETS`` that hit no busy port on any node, starting from the one that ``seed`` selects.

    Seeding with the job id makes jobs that search at the same time try different offsets first. Offsets that reach
    into Linux's ephemeral ports are left out too.
    """
    highest = max((port for ports in ports_by_node.values() for port in ports), default=0)
    # a plan with many virtual nodes reaches into the ephemeral ports itself
    end = FIRST_EPHEMERAL_PORT if highest < FIRST_EPHEMERAL_PORT else PORT_END
    first = _digit_sum(seed, len(OFFSETS)) % len(OFFSETS)
    return tuple(
        offset
        for offset in OFFSETS[first:] + OFFSETS[:first]
        if highest + offset < end
        and not any(
            port + offset in busy_by_node.get(node, ()) for node, ports in ports_by_node.items() for port in ports
        )
    )


def _digit_sum(number: int, base: int) -> int:
    """Digit sum of a number in ``base``. Every digit counts, so ids that differ by ``base`` differ in it."""
    total = 0
    while number:
        number, digit = divmod(number, base)
        total += digit
    return total
