"""Workers onto nodes and GPUs. Pure: a job in, tasks out, or what is missing.

Roles in the order of the file, workers by index, nodes in order. A worker of a
node's GPUs or more takes whole nodes, one task on each; a smaller one is packed
on the present node and never spans two. Workers without GPUs are dealt out over
the nodes in even blocks.
"""

from exporter.manifest import Task
from launcher.config import JobSpec, Workers
from launcher.errors import TopologyError


def place(spec: JobSpec) -> tuple[Task, ...]:
    """The tasks of a job; raises TopologyError with all that does not fit."""
    problems = [
        problem for index, workers in enumerate(spec.workers) for problem in _size_problems(spec, index, workers)
    ]
    if problems:
        raise TopologyError(problems)
    needed = _nodes_needed(spec)
    if needed > spec.resources.nodes:
        raise TopologyError([_capacity_problem(spec, needed)])
    tasks: list[Task] = []
    node, offset = 0, 0
    per_node = spec.resources.gpus_per_node
    for workers in spec.workers:
        for index in range(workers.count):
            if workers.gpus == 0:
                tasks.append(_task(workers, index, len(tasks), 0, index * spec.resources.nodes // workers.count, ()))
            elif workers.gpus >= per_node:
                if offset:
                    node, offset = node + 1, 0
                for local in range(workers.gpus // per_node):
                    tasks.append(_task(workers, index, len(tasks), local, node, tuple(range(per_node))))
                    node += 1
            else:
                if offset + workers.gpus > per_node:
                    node, offset = node + 1, 0
                gpus = tuple(range(offset, offset + workers.gpus))
                tasks.append(_task(workers, index, len(tasks), 0, node, gpus))
                offset += workers.gpus
    _prove(tasks, spec)
    return tuple(tasks)


def _nodes_needed(spec: JobSpec) -> int:
    """Nodes that the workers fill, by arithmetic: a slip of the finger must not make millions of tasks first."""
    full, offset, per_node = 0, 0, spec.resources.gpus_per_node
    for workers in spec.workers:
        if workers.gpus == 0:
            continue
        if workers.gpus >= per_node:
            full += (offset > 0) + workers.count * (workers.gpus // per_node)
            offset = 0
            continue
        here = min(workers.count, (per_node - offset) // workers.gpus)
        offset += here * workers.gpus
        left = workers.count - here
        if left:
            each = per_node // workers.gpus
            full += 1 + (left - 1) // each
            offset = ((left - 1) % each + 1) * workers.gpus
    return max(1, full + (offset > 0))


def _task(workers: Workers, index: int, rank: int, local: int, node: int, gpus: tuple[int, ...]) -> Task:
    name = f"{workers.role}_w{index}"
    logs = tuple(f"{{node}}_{name}{{run}}.{stream}" for stream in ("out", "err"))
    return Task(name, workers.role, index, rank, local, node, gpus, logs, workers.critical)


def _size_problems(spec: JobSpec, index: int, workers: Workers) -> list[str]:
    place, per_node = f"workers[{index}].gpus", spec.resources.gpus_per_node
    if workers.gpus == 0:
        return []
    if per_node == 0:
        problem = f"{place}: a {workers.role} needs {workers.gpus} GPUs and resources.gpus_per_node is 0; "
        return [problem + "set gpus_per_node to what a node has"]
    if workers.gpus > per_node and workers.gpus % per_node:
        below = workers.gpus // per_node * per_node
        problem = f"{place}: {workers.gpus} is neither at most gpus_per_node = {per_node} nor a multiple of it; "
        return [problem + f"use {below} or {below + per_node}"]
    return []


def _capacity_problem(spec: JobSpec, needed: int) -> str:
    wanted = ", ".join(f"{workers.count} {workers.role} x {workers.gpus} GPUs" for workers in spec.workers)
    have = spec.resources
    return (
        f"resources.nodes: {wanted} need {needed} nodes of {have.gpus_per_node} GPUs and the job has {have.nodes}; "
        f"set nodes: {needed}, or fewer or smaller workers"
    )


def _prove(tasks: list[Task], spec: JobSpec) -> None:
    """What must hold of every plan, whatever made it: no GPU twice, none beyond the node."""
    used: set[tuple[int, int]] = set()
    for task in tasks:
        for gpu in task.gpus:
            if gpu >= spec.resources.gpus_per_node or (task.node_index, gpu) in used:
                raise TopologyError([f"GPU {gpu} of node {task.node_index} is given away twice or is not there"])
            used.add((task.node_index, gpu))
