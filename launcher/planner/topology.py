"""Placement of workers on nodes and GPUs. Pure.

Roles are placed in the order of ``merge_roles``, workers by index, nodes in order. A worker that needs at least a
node's GPUs takes whole nodes. A smaller one is packed on the current node and never spans two. decode begins on a
fresh node if prefill left one partly used and another is available. Workers without GPUs are spread over the nodes in
even blocks.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from launcher.errors import TopologyError
from launcher.jobfile.jobfile import JobSpec
from launcher.jobfile.resources import ResourcesSpec
from launcher.planner.roles import Role, merge_roles
from launcher.words import count_text

Granularity = Literal["node", "gpu"]

MOST_NODES = 100_000  # per job; a larger number is a typing error


@dataclass(frozen=True)
class Topology:
    """Where each part of a job runs. Nodes are indexes into the allocation."""

    nodes: int  # requested from Slurm
    roles: tuple[Role, ...]
    tasks: tuple[Task, ...]  # processes of the workers, by rank
    infra_node: int = 0
    frontend_nodes: tuple[int, ...] = (0,)  # in order of use; the balancer is on the first
    client_node: int = 0


def place_workers(spec: JobSpec, available: int | None = None, granularity: Granularity | None = None) -> Topology:
    """Place the workers of a job. Raises TopologyError with every problem.

    ``available`` is the number of nodes, if the file does not set it. ``granularity`` is the backend's default: one
    process for a worker's share of a node, or one for each GPU.
    """
    roles, resources = merge_roles(spec), spec.resources
    problems = [problem for role in roles for problem in _size_problems(role, resources)]
    if not problems:
        problems = [problem for role in roles for problem in _nodes_problems(role, resources)]
    if problems:
        raise TopologyError(problems)
    nodes = _nodes_of_job(roles, resources, available)
    front = resources.infra_node + resources.frontend_node
    pool = range(front, nodes - resources.client_node)
    tasks: list[Task] = []
    by_gpu = (resources.process_granularity or granularity) == "gpu"
    for role, index, shares in _worker_shares(roles, resources, pool, _decode_shares_node(roles, resources, len(pool))):
        tasks += _worker_tasks(role, index, len(tasks), shares, by_gpu)
    frontends = (front - 1,) if resources.frontend_node else tuple(pool)
    return Topology(
        nodes,
        roles,
        tuple(tasks),
        infra_node=0 if resources.infra_node else frontends[0],
        frontend_nodes=frontends,
        client_node=nodes - 1 if resources.client_node else frontends[0],
    )


Share = tuple[int, range]  # a node, and a worker's GPUs on it


def _worker_shares(
    roles: Sequence[Role], resources: ResourcesSpec, pool: range, decode_shares_node: bool
) -> Iterator[tuple[Role, int, list[Share]]]:
    """Each worker with its nodes and GPUs, in rank order.

    With ``decode_shares_node``, decode begins on the last node of prefill.
    """
    per_node = resources.gpus_per_node
    node, offset = pool.start, 0
    for role in roles:
        if role.name == "decode" and role.gpus and offset and node + 1 in pool and not decode_shares_node:
            node, offset = node + 1, 0
        for index in range(role.count):
            if role.gpus == 0:
                yield role, index, [(pool[index * len(pool) // role.count], range(0))]
                continue
            if offset and offset + role.gpus > per_node:
                node, offset = node + 1, 0
            if role.gpus >= per_node:
                whole = role.gpus // per_node
                yield role, index, [(node + part, range(per_node)) for part in range(whole)]
                node += whole
                continue
            yield role, index, [(node, range(offset, offset + role.gpus))]
            offset += role.gpus
            if offset == per_node or resources.spread_workers:
                node, offset = node + 1, 0


def _may_decode_share(roles: Sequence[Role], resources: ResourcesSpec) -> bool:
    """Whether the file allows decode to use a node that prefill left partly used, although another is available."""
    return resources.colocate_prefill_decode or any(role.name == "decode" and role.nodes == 0 for role in roles)


def _decode_shares_node(roles: Sequence[Role], resources: ResourcesSpec, nodes: int) -> bool:
    """Whether decode uses such a node; with ``decode_nodes: 0`` only if it must."""
    if resources.colocate_prefill_decode:
        return True
    return (
        _may_decode_share(roles, resources)
        and _count_filled_nodes(roles, resources, starts_decode_apart=True)[0] > nodes
    )


def _worker_tasks(role: Role, index: int, rank: int, shares: list[Share], by_gpu: bool) -> Iterator[Task]:
    """One process for each node of a worker, or for each GPU."""
    name, parts = f"{role.name}_w{index}", shares
    if by_gpu:
        parts = [(node, range(gpu, gpu + 1)) for node, gpus in shares for gpu in gpus] or shares
    for local, (node, gpus) in enumerate(parts):
        # processes of one worker on one node need separate logs
        stem = f"{{node}}_{name}_p{local}" if len(parts) > len(shares) else f"{{node}}_{name}"
        logs = (f"{stem}{{run}}.out", f"{stem}{{run}}.err")
        options, place = role.options, (index, rank + local, local, node, tuple(gpus))
        yield Task(name, role.name, *place, logs, options.critical, restarts=options.restart.max)


def _size_problems(role: Role, resources: ResourcesSpec) -> list[str]:
    key, per_node = role.gpus_key, resources.gpus_per_node
    if role.gpus == 0:
        return []
    if per_node == 0:
        problem = f"{key}: {role.gpus} GPUs for each {role.name} and resources.gpus_per_node is 0; "
        return [problem + "set gpus_per_node to the GPUs of a node"]
    if role.gpus > per_node and role.gpus % per_node:
        below = role.gpus // per_node * per_node
        problem = f"{key}: {role.gpus} is neither at most gpus_per_node = {per_node} nor a multiple of it; "
        return [problem + f"use {below} or {below + per_node}"]
    return []


def _nodes_problems(role: Role, resources: ResourcesSpec) -> list[str]:
    """Report a role that needs more nodes than the file gives it; skipped if decode may share nodes."""
    if not role.nodes or (role.name == "decode" and resources.colocate_prefill_decode):
        return []
    needed = min_nodes([role], resources)
    if needed <= role.nodes:
        return []
    key = f"{role.name}_nodes"
    problem = f"{role.nodes_key}: {role.count} {role.name} x {role.gpus} GPUs need {count_text(needed, 'node')} of "
    problem += f"{resources.gpus_per_node} GPUs and {key} is {role.nodes}; "
    return [f"{problem}set {key}: {needed}, or fewer or smaller workers"]


def _nodes_of_job(roles: Sequence[Role], resources: ResourcesSpec, available: int | None) -> int:
    """Number of nodes: as the file says, else all that are available, else as few as needed."""
    reserved = [name for name in ("infra", "frontend", "client") if getattr(resources, f"{name}_node")]
    needed = min_nodes(roles, resources) + len(reserved)
    given = _stated_nodes(roles)
    if given:
        given += len(reserved)
    if resources.colocate_prefill_decode:
        given = min(given, needed)  # shared nodes count once
    nodes = resources.nodes or given or available or needed
    problems = []
    if given > nodes:
        least = max(given, needed)
        keys = " + ".join(f"{role.name}_nodes" for role in roles if role.nodes)
        kept = f", and {_reserved_text(reserved)}," if reserved else ""
        problems.append(f"resources.nodes: {nodes}, and {keys}{kept} are {given}; set nodes: {least}, or leave it out")
    elif needed > nodes:
        problems.append(_capacity_problem(roles, resources, reserved, needed, nodes, available))
    elif available is not None and nodes > available:
        source = "resources.nodes" if resources.nodes else " + ".join(role.nodes_key for role in roles if role.nodes)
        kept = f" and {_reserved_text(reserved)}" if reserved and not resources.nodes else ""
        problems.append(
            f"{source}: {nodes - (len(reserved) if kept else 0)} nodes{kept} for {_roles_text(roles)}, and there are "
            f"{available}; name {nodes - available} more, or ask for fewer"
        )
    elif nodes > MOST_NODES:
        problems.append(f"resources.nodes: the workers need {nodes} nodes; a job has at most {MOST_NODES}")
    if problems:
        raise TopologyError(problems)
    return nodes


def _stated_nodes(roles: Sequence[Role]) -> int:
    """Sum of ``prefill_nodes`` and the like, or 0 if a role with GPUs has none."""
    if all(role.nodes is not None or role.gpus == 0 for role in roles):
        return sum(role.nodes or 0 for role in roles)
    return 0


def min_nodes(roles: Sequence[Role], resources: ResourcesSpec) -> int:
    """Fewest nodes on which the roles fit, at least 1.

    Calculated, because a typing error must not create millions of tasks first.
    """
    together, before = _count_filled_nodes(roles, resources, starts_decode_apart=False)
    if together == before or _may_decode_share(roles, resources):
        return max(1, together)
    return max(1, _count_filled_nodes(roles, resources, starts_decode_apart=True)[0])


def _count_filled_nodes(
    roles: Sequence[Role], resources: ResourcesSpec, *, starts_decode_apart: bool
) -> tuple[int, int]:
    """Nodes used in all, and by the roles before decode; ``starts_decode_apart``: decode begins on a fresh node."""
    node = offset = before = 0
    for role in roles:
        if role.name == "decode":
            before = node + (offset > 0)
            if starts_decode_apart and role.gpus and offset:
                node, offset = node + 1, 0
        node, offset = _used_after_role(role, node, offset, resources)
    return node + (offset > 0), before


def _used_after_role(role: Role, node: int, offset: int, resources: ResourcesSpec) -> tuple[int, int]:
    """Next node, and the GPUs used on it, after all workers of a role are placed."""
    per_node = resources.gpus_per_node
    if role.gpus == 0:
        return node, offset
    if role.gpus >= per_node or resources.spread_workers:
        return node + (offset > 0) + role.count * max(1, role.gpus // per_node), 0
    here = min(role.count, (per_node - offset) // role.gpus)
    offset += here * role.gpus
    if left := role.count - here:
        each = per_node // role.gpus
        node, offset = node + 1 + (left - 1) // each, ((left - 1) % each + 1) * role.gpus
    return node, offset


def _reserved_text(reserved: Sequence[str]) -> str:
    return f"{len(reserved)} for {' and '.join(reserved)} alone"


def _roles_text(roles: Sequence[Role]) -> str:
    return ", ".join(f"{role.count} {role.name}" + (f" x {role.gpus} GPUs" if role.gpus else "") for role in roles)


def _capacity_problem(
    roles: Sequence[Role],
    resources: ResourcesSpec,
    reserved: Sequence[str],
    needed: int,
    nodes: int,
    available: int | None,
) -> str:
    kept = f" and {_reserved_text(reserved)}" if reserved else ""
    problem = (
        f"resources.nodes: {_roles_text(roles)} need {count_text(needed - len(reserved), 'node')} of "
        f"{resources.gpus_per_node} GPUs{kept} and the job has {nodes}; "
    )
    if needed > MOST_NODES:
        return f"{problem}a job has at most {MOST_NODES} nodes: use fewer or smaller workers"
    by_file = resources.nodes or _stated_nodes(roles)
    fix = f"set nodes: {needed}" if by_file or available is None else f"name {needed - nodes} more"
    if _count_filled_nodes(roles, resources, starts_decode_apart=False)[0] + len(reserved) <= nodes:
        fix += ", or colocate_prefill_decode: true"
    return f"{problem}{fix}, or fewer or smaller workers"
