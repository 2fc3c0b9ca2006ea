"""The roles of a job, from both ways to say them: counts in `resources`, and entries of `workers`. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config import JobSpec
from launcher.errors import TopologyError
from launcher.spec_resources import SERVING_ROLES, Resources, Workers


@dataclass(frozen=True)
class Role:
    """One role as it was meant, whichever way the file says it."""

    name: str
    count: int
    gpus: int
    """GPUs of one worker."""
    options: Workers
    gpus_key: str
    """Key of the file that says how many GPUs a worker has, for errors."""
    nodes: int | None = None
    """Nodes that the file gives to the role; 0: it shares those of prefill."""

    @property
    def nodes_key(self) -> str:
        """Key of the file for ``nodes``."""
        return f"resources.{self.name}_nodes"


def roles_of(spec: JobSpec) -> tuple[Role, ...]:
    """The roles in the order in which they are placed: prefill, decode, agg, then as in the file.

    Raises TopologyError with every contradiction.
    """
    problems: list[str] = []
    entries = {workers.role: (index, workers) for index, workers in enumerate(spec.workers)}
    found: dict[str, Role] = {}
    for name in SERVING_ROLES:
        role = _serving_role(spec.resources, name, entries.pop(name, None), found.get("prefill"), problems)
        if role is not None:
            found[name] = role
    for name, (index, workers) in entries.items():
        found[name] = Role(name, workers.count or 1, workers.gpus or 0, workers, f"workers[{index}].gpus")
    apart = [name for name in ("prefill", "decode") if name in found]
    if apart and "agg" in found:
        others = " and ".join(f"{found[name].count} {name}" for name in apart)
        problems.append(
            f"resources.agg_workers: {found['agg'].count} agg beside {others}; an agg worker does the work of both: "
            f"leave agg out, or {' and '.join(apart)}"
        )
    if not (found or problems):
        problems.append("workers: there is none; set resources.agg_workers: 1, or name a role under `workers`")
    if problems:
        raise TopologyError(list(dict.fromkeys(problems)))
    return tuple(found.values())


def _serving_role(
    resources: Resources, name: str, entry: tuple[int, Workers] | None, prefill: Role | None, problems: list[str]
) -> Role | None:
    """prefill, decode or agg, or None when the job has no such worker."""
    index, workers = entry or (0, None)
    named, size = getattr(resources, f"{name}_workers"), getattr(resources, f"gpus_per_{name}")
    nodes: int | None = getattr(resources, f"{name}_nodes")
    given = [(f"resources.{name}_workers", named), (f"workers[{index}].count", workers and workers.count)]
    sizes = [(f"resources.gpus_per_{name}", size), (f"workers[{index}].gpus", workers and workers.gpus)]
    problems += [*_different(given), *_different(sizes)]
    count = next((value for _, value in given if value is not None), 0 if workers is None else 1)
    if not count:
        if nodes:
            problems.append(
                f"resources.{name}_nodes: {nodes} nodes and no {name} worker on them; "
                f"set {name}_workers, or leave {name}_nodes out"
            )
        return None
    if nodes == 0 and (name != "decode" or prefill is None):
        problems.append(
            f"resources.{name}_nodes: 0 nodes for {count} {name} workers; "
            + (f"set {name}_nodes: 1 or more, or leave it out" if name != "decode" else "there is no prefill to share")
        )
        return None
    key, gpus = next(((key, value) for key, value in sizes if value is not None), (sizes[0][0], None))
    counted = workers is None or named is not None or nodes is not None
    if counted and "gpus_per_node" not in resources.model_fields_set:
        problems.append(
            "resources.gpus_per_node: is missing, and what `resources` counts are workers with GPUs; set it to the "
            "GPUs of a node, here or in the cluster file, or to 0 for workers without GPUs"
        )
        return None
    if gpus is None and counted:
        gpus = _implied_gpus(resources, name, count, nodes, prefill, problems)
    return Role(name, count, gpus or 0, workers or Workers(role=name), key, nodes)


def _different(given: list[tuple[str, int | None]]) -> Iterator[str]:
    (one, first), (two, second) = given
    if first is not None and second is not None and first != second:
        yield f"{two}: {second}, and {one} is {first}; leave one of them out, or make them equal"


def _implied_gpus(
    resources: Resources, name: str, count: int, nodes: int | None, prefill: Role | None, problems: list[str]
) -> int:
    """GPUs of a worker whose size the file leaves out: an equal share of the role's nodes, else one node's."""
    per_node = resources.gpus_per_node
    if nodes is None or per_node == 0:
        return per_node
    if nodes == 0:
        return prefill.gpus if prefill is not None else 0
    counts = _even_counts(nodes, per_node, resources.spread_workers)
    if count in counts:
        return nodes * per_node // count
    near = [max((n for n in counts if n < count), default=None), min((n for n in counts if n > count), default=None)]
    size = _largest_size(nodes, per_node, count, resources.spread_workers)
    problems.append(
        f"resources.{name}_workers: the {nodes * per_node} GPUs of {name}_nodes: {nodes} are not {count} equal shares "
        f"of whole nodes or of parts of one; use {' or '.join(str(n) for n in near if n is not None)} workers"
        + (f", or set gpus_per_{name}: {size}" if size else "")
    )
    return 0


def _even_counts(nodes: int, per_node: int, spread: bool) -> set[int]:
    """Numbers of workers that use up these nodes: several whole nodes each, one, or an equal part of one."""
    whole = {nodes // each for each in range(1, nodes + 1) if nodes % each == 0}
    if spread:
        return whole
    return whole | {nodes * each for each in range(1, per_node + 1) if per_node % each == 0}


def _largest_size(nodes: int, per_node: int, count: int, spread: bool) -> int:
    """GPUs that each of ``count`` workers can have at most on these nodes; 0 when there are too many workers."""
    if count <= nodes:
        return nodes // count * per_node
    return 0 if spread else per_node // -(-count // nodes)
