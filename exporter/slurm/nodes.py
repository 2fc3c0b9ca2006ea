"""Nodes of the cluster and their GPUs, from the text of sinfo."""

import re
from collections.abc import Iterable
from typing import NamedTuple

# the last one is an administrator's text and may contain `|`
FIELDS = ("NodeList", "StateLong", "Partition", "Gres", "GresUsed", "CPUsState", "Memory", "Reason")
FORMAT = ",".join(f"{field}:|" for field in FIELDS)
STATE_FLAGS = "*~#!%$@^-+"  # behind a state: not responding, powered down, planned and so on
OUT_OF_SERVICE = ("down", "drained", "draining", "drain", "fail", "failing", "error", "unknown")
_NO_REASON = ("", "none", "(null)")
_COUNT = re.compile(r"gpu(?::(?:\(null\)|(?P<type>[^:(,]+)))?:(?P<count>\d+)")


class NodeRow(NamedTuple):
    """One node in one of its partitions."""

    node: str
    state: str  # Slurm's word, without flags
    responds: bool
    partition: str
    gpus: dict[str, int]  # by type; a type that Slurm does not tell is empty
    gpus_used: int | None  # None where Slurm does not tell
    cpus: int | None
    cpus_used: int | None
    memory_mib: int | None
    reason: str | None  # why it is out of service

    @property
    def is_out_of_service(self) -> bool:
        return not self.responds or self.state in OUT_OF_SERVICE


def parse_nodes(text: str) -> tuple[NodeRow, ...]:
    """Parse ``sinfo -h -N -a -O FORMAT``, in its order. Lines that are none are skipped."""
    found = []
    for line in text.split("\n"):
        parts = line.split("|", len(FIELDS) - 1)
        if len(parts) == len(FIELDS) and parts[0]:
            found.append(_parse_node(*parts))
    return tuple(found)


def most_cpus(nodes: Iterable[NodeRow]) -> dict[str, int]:
    """CPUs of the largest node of each partition, of which all are known."""
    found, unknown = dict[str, int](), set[str]()
    for row in nodes:
        found[row.partition] = max(found.get(row.partition, 0), row.cpus or 0)
        unknown |= {row.partition} if row.cpus is None else set()
    return {partition: cpus for partition, cpus in found.items() if partition not in unknown}


def _parse_node(
    node: str, state: str, partition: str, gres: str, used: str, cpus: str, memory: str, reason: str
) -> NodeRow:
    allocated, _, rest = cpus.partition("/")
    total = rest.rpartition("/")[2]
    reason = reason.removesuffix("|")
    gpus = _gpus(gres)
    return NodeRow(
        node,
        state.rstrip(STATE_FLAGS).lower(),
        "*" not in state,
        partition.removesuffix("*"),  # marks the default
        gpus,
        sum(_gpus(used).values()) if gpus and "gpu" in used else None,
        int(total) if total.isdecimal() else None,
        int(allocated) if allocated.isdecimal() else None,
        int(memory) if memory.isdecimal() else None,
        None if reason.lower() in _NO_REASON else reason,
    )


def _gpus(text: str) -> dict[str, int]:
    """GPUs by type in ``gpu:h100:8(S:0-1),shard:16``, ``gpu:4`` or ``gpu:(null):3(IDX:0-2)``."""
    counts: dict[str, int] = {}
    for part in re.split(r",(?![^(]*\))", text):
        if match := _COUNT.match(part):
            name = match["type"] or ""
            counts[name] = counts.get(name, 0) + int(match["count"])
    return counts
