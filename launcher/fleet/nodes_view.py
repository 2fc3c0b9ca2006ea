"""Nodes of the cluster: the table and the JSON of `gpujob fleet`."""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from exporter.contract.records import JsonValue
from exporter.gpus.analysis.node_health import HEALTHS
from exporter.slurm.nodes import NodeRow
from exporter.slurm.prices import Prices
from exporter.slurm.queue import QueueRow
from launcher.errors import SlurmError
from launcher.fleet.columns import render_table
from launcher.fleet.own_runs import NodeHealth, RunProgress
from launcher.steps.hostlist import parse_hostlist
from launcher.watch.text import printable_line, size_text
from launcher.words import count_text, duration_text

HEAD = ("FLEET", "INSTANCE", "BACKEND", "RESOURCES", "STATUS", "PRICE", "JOBS")
MORE = ("CPUS", "REASON")  # with -v
LEFT_OUT = ("BACKEND", "PRICE", "RESOURCES")  # in a narrow window
WORKING = ("allocated", "mixed", "completing")
FRESH_S = 60.0  # a younger report of a sidecar is shown without its age
TRUSTED_S = 24 * 3600.0  # an older one says nothing about a node
MIB = 1024**2


class Node(NamedTuple):
    """A node, with what is known about it besides Slurm's words."""

    row: NodeRow
    jobs: tuple[str, ...] | None = None  # that run there; None if Slurm does not tell
    health: NodeHealth | None = None  # of its GPUs, as a sidecar has reported it

    def status(self, now: float) -> str:
        """``idle``, ``busy 6/8`` GPUs, or Slurm's word, with the health of the GPUs if a sidecar found it bad."""
        return self.use() + (f" ({self.health_text(now)})" if self.is_unhealthy else "")

    def use(self) -> str:
        row = self.row
        if not row.responds:
            return "down"
        if row.state not in WORKING:
            return row.state
        if row.gpus:
            return "busy" if row.gpus_used is None else f"busy {row.gpus_used}/{sum(row.gpus.values())}"
        return "busy" if row.cpus_used is None else f"busy {row.cpus_used}/{row.cpus} CPUs"

    @property
    def is_unhealthy(self) -> bool:
        return self.health is not None and self.health.health != HEALTHS[0]

    def health_text(self, now: float) -> str:
        if self.health is None:
            return ""
        age = now - self.health.time
        return self.health.health if age < FRESH_S else f"seen {duration_text(age)} ago: {self.health.health}"

    def reason(self) -> str | None:
        """Slurm's reason, else that of the sidecar."""
        if self.row.reason is not None or self.health is None or not self.is_unhealthy:
            return self.row.reason
        return "; ".join(
            f"GPU {reason.gpu}: {reason.words}" if reason.gpu is not None else reason.words
            for reason in self.health.reasons
        )

    def command(self) -> str | None:
        """The command with which an administrator takes a node with bad GPUs out of service, or back into it."""
        if self.row.is_out_of_service:
            return f"scontrol update NodeName={self.row.node} State=RESUME"
        if not self.is_unhealthy:
            return None
        reason = shlex.quote(f"gpujob: {printable_line(self.reason() or self.health_text(0.0))}")
        return f"scontrol update NodeName={self.row.node} State=DRAIN Reason={reason}"


def known_nodes(
    rows: Iterable[NodeRow], queue: Iterable[QueueRow] | None, runs: Iterable[RunProgress], now: float
) -> list[Node]:
    """The nodes with the jobs of the queue, None if it is unknown, and the worst health of the last day."""
    jobs: dict[str, list[str]] = {}
    for row in queue or ():
        if row.snapshot.started is not None and row.snapshot.ended is None:
            for name in _hosts(row.nodes):
                jobs.setdefault(name, []).append(row.job_id)
    health: dict[str, NodeHealth] = {}
    for node, found in ((node, found) for run in runs for node, found in run.health.items()):
        best = health.get(node)
        is_worse = best is None or _rank(found) > _rank(best)
        if now - found.time < TRUSTED_S and found.health in HEALTHS and is_worse:
            health[node] = found
    return [Node(row, None if queue is None else tuple(jobs.get(row.node, ())), health.get(row.node)) for row in rows]


def _rank(found: NodeHealth) -> tuple[int, float]:
    return [*HEALTHS].index(found.health) if found.health in HEALTHS else -1, found.time


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return parse_hostlist(text)
    except SlurmError:
        return ()  # "(null)" and other words


def render_nodes(
    nodes: Sequence[Node], now: float, *, verbose: bool, prices: Prices | None = None, width: int | None = None
) -> list[str]:
    """A line for each node below the head, and the sums; with ``verbose`` also what administrators can do."""
    head = (*HEAD, *(MORE if verbose else ()))
    rows: list[tuple[str, ...]] = []
    fleet = ""
    for node in nodes:
        first, fleet = node.row.partition != fleet, node.row.partition
        rows.append(_cells(node, first, now, prices, verbose))
    optional = ("PRICE", *(("REASON",) if verbose else ()))
    lines = render_table(head, rows, optional=optional, width=None if verbose else width, left_out=LEFT_OUT)
    lines += ["", _sums_text(nodes)]
    commands = dict.fromkeys(found for node in nodes if (found := node.command()) is not None) if verbose else {}
    if commands:
        lines += ["", "An administrator takes nodes out of service and back with:", *(f"  {each}" for each in commands)]
    return lines


def _cells(node: Node, first: bool, now: float, prices: Prices | None, verbose: bool) -> tuple[str, ...]:
    row = node.row
    price = None if prices is None else prices.of_gpus(row.gpus)
    cells: tuple[str, ...] = (
        row.partition if first else "",
        row.node,
        "slurm",
        _resources_text(row),
        node.status(now),
        "-" if price is None or prices is None else f"{prices.text(price)}/h",
        "-" if node.jobs is None else str(len(node.jobs)),
    )
    if verbose:
        cpus = "-" if row.cpus is None or row.cpus_used is None else f"{row.cpus_used}/{row.cpus}"
        cells += (cpus, node.reason() or "-")
    return tuple(map(printable_line, cells))


def _resources_text(row: NodeRow) -> str:
    gpus = [f"{name}:{count}" if name else f"GPU:{count}" for name, count in row.gpus.items()]
    cpus = [] if row.cpus is None else [count_text(row.cpus, "CPU")]
    memory = [] if row.memory_mib is None else [size_text(row.memory_mib * MIB)]
    return ", ".join([*gpus, *cpus, *memory]) or "-"


def _sums_text(nodes: Iterable[Node]) -> str:
    """``3 nodes: 2 busy, 1 down; 12 of 16 GPUs in use``; a node of several partitions counts once."""
    single = {node.row.node: node for node in nodes}.values()
    words = Counter(node.use().partition(" ")[0] for node in single)
    counts = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
    with_gpus = [node.row for node in single if node.row.gpus and node.row.gpus_used is not None]
    total, used = sum(sum(row.gpus.values()) for row in with_gpus), sum(row.gpus_used or 0 for row in with_gpus)
    gpus = f"; {used} of {total} GPUs in use" if total else ""
    return f"{count_text(len(single), 'node')}: {counts or 'none'}{gpus}"


def nodes_json(nodes: Iterable[Node], now: float, prices: Prices | None = None) -> dict[str, JsonValue]:
    """The nodes as a JSON object."""
    return {"schema": 1, "instances": [_node_json(node, now, prices) for node in nodes]}


def _node_json(node: Node, now: float, prices: Prices | None) -> JsonValue:
    row = node.row
    price = None if prices is None else prices.of_gpus(row.gpus)
    return {
        "fleet": row.partition,
        "instance": row.node,
        "backend": "slurm",
        "status": node.status(now),
        "state": row.state,
        "responds": row.responds,
        "health": None if node.health is None else node.health.health,
        "health_time": None if node.health is None else node.health.time,
        "reason": node.reason(),
        "resources": {
            "gpus": [{"name": name or None, "count": count} for name, count in row.gpus.items()],
            "gpus_used": row.gpus_used,
            "cpus": row.cpus,
            "cpus_used": row.cpus_used,
            "memory_mib": row.memory_mib,
        },
        "price_per_hour": None if price is None or prices is None else _amount(price, prices),
        "jobs": None if node.jobs is None else list(node.jobs),
    }


def _amount(price: float, prices: Prices) -> JsonValue:
    return {"amount": round(price, 4), "currency": prices.currency}
