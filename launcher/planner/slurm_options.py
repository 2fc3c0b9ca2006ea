"""Slurm options, setup and container of a job: the job file overrides the cluster file. Pure."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from exporter.contract.manifest import Task
from launcher.errors import TopologyError
from launcher.jobfile.jobfile import ClusterSpec, JobSpec
from launcher.plan.container import is_image_file
from launcher.plan.placeholders import escape_placeholders
from launcher.plan.plan import (
    BENCHMARK,
    DECODE,
    FRONTENDS,
    PREFILL,
    WORKERS,
    ContainerPlan,
    Plan,
    RequeueRule,
    SetupPart,
    SetupPlan,
    SlurmOptions,
    TaskPlan,
    safe_file_word,
)
from launcher.planner.topology import Topology
from launcher.rundir.cluster_file import resolve_directory

SBATCH = "SBATCH_"
SBATCH_DEFAULTS = ("account", "partition", "qos", "reservation")
CONTAINED_STAGES = (WORKERS, FRONTENDS, BENCHMARK)  # the other services (etcd, nats, nginx) run on the node itself


def sbatch_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Options of the user's variables that say who pays and where; others would change what the script asks for."""
    variables = {option: environ.get(f"{SBATCH}{option.upper()}") for option in SBATCH_DEFAULTS}
    return {option: value for option, value in variables.items() if value}


def slurm_options(
    spec: JobSpec, cluster: ClusterSpec, topology: Topology, defaults: Mapping[str, str] = MappingProxyType({})
) -> SlurmOptions:
    """Options for sbatch beyond the resources. Raises TopologyError if the job cannot be split into components.

    ``defaults`` are those of ``sbatch_defaults``.
    """
    asked, requeue = spec.slurm, spec.slurm.requeue
    reservation = {name: value for name, value in defaults.items() if name == "reservation"}
    return SlurmOptions(
        partition=asked.partition or cluster.partition or defaults.get("partition"),
        account=asked.account or cluster.account or defaults.get("account"),
        qos=asked.qos or cluster.qos or defaults.get("qos"),
        time_limit=asked.time_limit or cluster.time_limit,
        directives={**reservation, **cluster.directives, **asked.directives},
        dependency=asked.dependency,
        exclusive=asked.exclusive,
        segment=asked.segment,
        signal=asked.signal,
        requeue=RequeueRule(requeue.preempted, requeue.time_limit, requeue.max)
        if "requeue" in asked.model_fields_set
        else None,
        mpi=spec.backend.mpi,
        het=het_components(topology.tasks, topology.nodes) if asked.het else None,
    )


def het_components(tasks: Sequence[Task], nodes: int) -> tuple[int, int]:
    """Node counts of the two components of a heterogeneous job: prefill, then decode.

    Raises TopologyError unless prefill comes first and no node serves both.
    """
    others = sorted({task.role for task in tasks} - {PREFILL, DECODE})
    prefill = [task.node_index for task in tasks if task.role == PREFILL]
    decode = [task.node_index for task in tasks if task.role == DECODE]
    if others or not prefill or not decode:
        has = f"this job has {', '.join(others)}" if others else "this job does not have both"
        raise TopologyError(
            [f"slurm.het: a heterogeneous job consists of prefill and decode, and {has}; leave het out"]
        )
    first = min(decode)
    if max(prefill) >= first:
        problem = (
            f"slurm.het: prefill goes up to node {max(prefill)} and decode starts at node {first}, so they "
            "share a node and cannot be two components; give each whole nodes, or leave het out"
        )
        raise TopologyError([problem])
    return first, nodes - first


def setup_steps(spec: JobSpec, cluster: ClusterSpec, workdir: Path) -> SetupPlan:
    """Setup of the batch script."""
    script = resolve_directory(spec.setup.script, workdir)
    parts = (
        SetupPart(tuple(cluster.modules), None, cluster.preamble),
        SetupPart(tuple(spec.setup.modules), script, spec.setup.preamble),
    )
    return SetupPlan(tuple(part for part in parts if any(part)))


def run_dir_name(spec: JobSpec, topology: Topology, timestamp: str) -> str:
    """Name of the run directory, with ``{job_id}``.

    A prefill and decode job is named by its worker counts.
    """
    counts = {role.name: role.count for role in topology.roles}
    served = PREFILL in counts or DECODE in counts
    word = f"{counts.get(PREFILL, 0)}P_{counts.get(DECODE, 0)}D" if served else safe_file_word(spec.name)
    return f"{{job_id}}_{word}_{timestamp}"


def container_plan(spec: JobSpec, cluster: ClusterSpec, workdir: Path) -> ContainerPlan | None:
    """Container of a job, with its image's alias resolved. The cluster file's mounts come before the job's.

    The path of an image file becomes absolute: pyxis takes others for names in a registry.
    """
    asked = spec.container
    if asked is None:
        return None
    model = cluster.path_of_model(spec.model.path) if spec.model is not None else ""
    own = [f"{escape_placeholders(model)}:{escape_placeholders(model)}:ro"] if model.startswith("/") else []
    image = cluster.resolve_image(asked.image)
    return ContainerPlan(
        str(workdir / image) if is_image_file(image) else image,
        asked.runtime,
        (*own, *cluster.mounts, *asked.mounts),
        asked.workdir,
        asked.python,
        tuple(spec.environment.required),
    )


def mark_contained(tasks: Iterable[TaskPlan], spec: JobSpec) -> tuple[TaskPlan, ...]:
    """Mark the tasks that run in the job's container."""
    if spec.container is None:
        return tuple(tasks)
    outside = {workers.role for workers in spec.workers if not workers.container}
    return tuple(
        dataclasses.replace(planned, contained=planned.stage in CONTAINED_STAGES and planned.task.role not in outside)
        for planned in tasks
    )


def with_dependency(plan: Plan, dependency: str) -> Plan:
    """The plan with this dependency instead of the job file's."""
    slurm = plan.resolved["slurm"]
    changed = {**slurm, "dependency": dependency} if isinstance(slurm, dict) else slurm
    resolved = {**plan.resolved, "slurm": changed}
    return dataclasses.replace(plan, slurm=plan.slurm._replace(dependency=dependency), resolved=resolved)
