"""Roles of a job, merged from the counts in `resources` and the entries of `workers`. Pure."""

from collections.abc import Iterator, Mapping

from exporter.contract.lazy_dataclass import dataclass
from launcher.errors import TopologyError
from launcher.jobfile.jobfile import JobSpec
from launcher.jobfile.resources import SERVING_ROLES, ResourcesSpec, RoleSpec


@dataclass(frozen=True)
class Role:
    """One role, however the job file specifies it."""

    name: str
    count: int
    gpus: int  # per worker
    options: RoleSpec
    gpus_key: str  # key of the job file that sets ``gpus``, for errors
    nodes: int | None = None  # nodes that the file gives to the role; 0: decode shares those of prefill

    @property
    def nodes_key(self) -> str:
        """Key of the job file for ``nodes``."""
        return f"resources.{self.name}_nodes"


def merge_roles(spec: JobSpec) -> tuple[Role, ...]:
    """Roles in the order of placement: prefill, decode, agg, then as in the file.

    Raises TopologyError with every contradiction.
    """
    problems: list[str] = []
    entries = {workers.role: (index, workers) for index, workers in enumerate(spec.workers)}
    inputs = {name: _RoleInput(spec.resources, name, *entries.pop(name, (0, None))) for name in SERVING_ROLES}
    found: dict[str, Role] = {}
    for name in SERVING_ROLES:
        role = _serving_role(inputs[name], inputs, found.get("prefill"), problems)
        if role is not None:
            found[name] = role
    for name, (index, workers) in entries.items():
        count = 1 if workers.count is None else workers.count
        if count:
            found[name] = Role(name, count, workers.gpus or 0, workers, f"workers[{index}].gpus")
    if not (found or problems):
        cause = (
            "all counts are 0"
            if spec.workers or any(part.count == 0 for part in inputs.values())
            else "the job has none"
        )
        problems.append(f"workers: {cause}; set resources.agg_workers: 1, or name a role under `workers`")
    if problems:
        raise TopologyError(list(dict.fromkeys(problems)))
    return tuple(found.values())


class _RoleInput:
    """Input for prefill, decode or agg, from `resources` and from an entry of `workers`."""

    def __init__(self, resources: ResourcesSpec, name: str, index: int, workers: RoleSpec | None) -> None:
        self.resources, self.name, self.workers = resources, name, workers
        self.stated_count: int | None = getattr(resources, f"{name}_workers")
        self.nodes: int | None = getattr(resources, f"{name}_nodes")
        size: int | None = getattr(resources, f"gpus_per_{name}")
        count, gpus = (None, None) if workers is None else (workers.count, workers.gpus)
        self._counts = [(f"resources.{name}_workers", self.stated_count), (f"workers[{index}].count", count)]
        self._sizes = [(f"resources.gpus_per_{name}", size), (f"workers[{index}].gpus", gpus)]
        # None: the job file does not mention the role
        self.count = next((value for _, value in self._counts if value is not None), None if workers is None else 1)
        self.key, self.gpus = next(((key, value) for key, value in self._sizes if value is not None), self._sizes[0])

    def problems(self) -> Iterator[str]:
        """Contradictions within this input."""
        yield from _conflict(self._counts)
        if self.count:
            yield from _conflict(self._sizes)
        if self.nodes and not self.count:
            yield (
                f"resources.{self.name}_nodes: {self.nodes} nodes and no {self.name} worker on them; "
                f"set {self.name}_workers, or leave {self.name}_nodes out"
            )
        if self.count and self.gpus == 0 and self.key.startswith("resources."):
            yield (
                f"{self.key}: 0 GPUs for {self.count} {self.name} workers; "
                f"set it to 1 or more, or resources.{self.name}_workers: 0"
            )


def _serving_role(
    role_input: _RoleInput, others: Mapping[str, _RoleInput], prefill: Role | None, problems: list[str]
) -> Role | None:
    """Make the prefill, decode or agg role, or None if the job has no such worker."""
    name, count, nodes, workers = role_input.name, role_input.count, role_input.nodes, role_input.workers
    problems += role_input.problems()
    if not count:
        return None
    if nodes == 0 and (name != "decode" or prefill is None):
        problems.append(
            f"resources.{name}_nodes: 0 nodes for {count} {name} workers"
            + ("; " if name != "decode" else ", and no prefill nodes that they could share; ")
            + f"set {name}_nodes: 1 or more, or leave it out"
        )
        return None
    counted = workers is None or role_input.stated_count is not None or nodes is not None
    if counted and "gpus_per_node" not in role_input.resources.model_fields_set:
        problems.append(
            "resources.gpus_per_node: is missing, and the workers counted in `resources` use GPUs; set it to the "
            "GPUs of a node, here or in the cluster file, or to 0 for workers without GPUs"
        )
        return None
    gpus = role_input.gpus
    if gpus is None and counted:
        gpus = _implied_gpus(role_input, others["decode"], prefill, problems)
    return Role(name, count, gpus or 0, workers or RoleSpec(role=name), role_input.key, nodes)


def _conflict(settings: list[tuple[str, int | None]]) -> Iterator[str]:
    (one, first), (two, second) = settings
    if first is not None and second is not None and first != second:
        yield f"{two}: {second}, and {one} is {first}; leave one of them out, or make them equal"


def _implied_gpus(role_input: _RoleInput, decode: _RoleInput, prefill: Role | None, problems: list[str]) -> int:
    """GPUs per worker if the file sets none: an equal share of the role's nodes, else one node's.

    If decode shares the nodes of prefill, workers of both get the same size, unless the file sets that of decode.
    """
    name, nodes, per_node = role_input.name, role_input.nodes, role_input.resources.gpus_per_node
    if nodes is None or per_node == 0:
        return per_node
    if nodes == 0:
        return prefill.gpus if prefill is not None else 0
    sharers = (decode.count or 0) if name == "prefill" and decode.nodes == 0 else 0
    if sharers and decode.gpus is not None:
        alone = per_node if role_input.resources.spread_workers else 0
        return _prefill_size_with_decode(role_input, sharers * max(decode.gpus, alone), problems)
    count = (role_input.count or 0) + sharers
    counts = _even_counts(nodes, per_node, role_input.resources.spread_workers)
    if count in counts:
        return nodes * per_node // count
    least = 2 if sharers else 1
    near = [max((n for n in counts if least <= n < count), default=0), min((n for n in counts if n > count), default=0)]
    size = _largest_size(nodes, per_node, count, role_input.resources.spread_workers)
    both = f", which {role_input.count} prefill and {sharers} decode workers share," if sharers else ""
    use = f"use {' or '.join(str(n) for n in near if n)} workers{' in all' if sharers else ''}" if any(near) else ""
    fixes = [fix for fix in (use, f"set gpus_per_{name}: {size}" if size else "") if fix]
    problems.append(
        f"resources.{name}_workers: the {nodes * per_node} GPUs of {name}_nodes: {nodes}{both} cannot be "
        f"divided into {count} equal workers of whole nodes or parts of one; "
        f"{', or '.join(fixes) or f'set {name}_nodes: {count}'}"
    )
    return 0


def _prefill_size_with_decode(role_input: _RoleInput, decode_gpus: int, problems: list[str]) -> int:
    """GPUs of each prefill worker when decode takes ``decode_gpus`` GPUs of its nodes."""
    count, nodes, per_node = role_input.count or 1, role_input.nodes or 0, role_input.resources.gpus_per_node
    left = nodes * per_node - decode_gpus
    size, even = max(0, left) // count, left % count == 0
    if size and even and (size <= per_node or size % per_node == 0):
        return size
    problem = (
        f"the {max(0, left)} GPUs that decode leaves of prefill_nodes: {nodes} cannot be divided into {count} equal"
    )
    fitting = max((each for each in range(1, min(size, per_node) + 1) if per_node % each == 0), default=0)
    if size >= per_node:
        fitting = size // per_node * per_node
    fix = f"set it to {fitting}" if fitting else f"set prefill_nodes: {-(-(decode_gpus + count) // per_node)} or more"
    problems.append(
        f"resources.gpus_per_prefill: is missing, and {problem} workers of whole nodes or parts of one; {fix}"
    )
    return 0


def _even_counts(nodes: int, per_node: int, is_spread: bool) -> set[int]:
    """Worker counts that use up these nodes: each takes whole nodes, or an equal part of one."""
    whole = {nodes // each for each in range(1, nodes + 1) if nodes % each == 0}
    if is_spread:
        return whole
    return whole | {nodes * each for each in range(1, per_node + 1) if per_node % each == 0}


def _largest_size(nodes: int, per_node: int, count: int, is_spread: bool) -> int:
    """Most GPUs that each of ``count`` workers can have on these nodes; 0 if there are too many workers."""
    if count <= nodes:
        return nodes // count * per_node
    return 0 if is_spread else per_node // -(-count // nodes)
