"""Make the plan of a job file. Pure: the same files give the same plan.

Values known only at run time (job id, host names, attempt, free ports) remain placeholders, which the orchestrator
fills in.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from exporter.contract.manifest import NORMAL, OPEN, Manifest, PathGroup, Task, Verification
from launcher.jobfile.alerts.thresholds import alert_thresholds
from launcher.jobfile.jobfile import ClusterSpec, JobSpec, cpus_of_full_nodes, with_cluster
from launcher.jobfile.monitoring import error_patterns, progress_patterns
from launcher.jobfile.redaction import redacted_job
from launcher.jobfile.value_types import parse_time_limit
from launcher.plan.plan import DEFAULT_KILL_WAIT_S, Plan
from launcher.plan.trackers import tracker_environment
from launcher.planner.assembly import assemble_tasks
from launcher.planner.slurm_options import (
    container_plan,
    mark_contained,
    run_dir_name,
    setup_steps,
    slurm_options,
    with_dependency,
)
from launcher.planner.topology import Topology, place_workers
from launcher.rundir.cluster_file import LOGS_DIR, resolve_directory


class Invocation(NamedTuple):
    """Who plans a job, where and when."""

    job_dir: Path  # directory of the job file
    workdir: Path  # where the command was given
    user: str
    timestamp: str  # YYYYMMDD_HHMMSS
    python: str  # interpreter for our own processes
    local: bool = False  # for this machine, not for Slurm
    available: int | None = None  # number of nodes, if known
    own_targets: str | None = None  # target directory of the user's own stack
    sbatch_defaults: Mapping[str, str] = MappingProxyType({})  # by option: those of the variables SBATCH_*
    kill_wait_s: float = DEFAULT_KILL_WAIT_S


def make_plan(spec: JobSpec, cluster: ClusterSpec, invocation: Invocation) -> Plan:
    """Make the plan of a job. Raises TopologyError if its workers do not fit its nodes."""
    spec = with_cluster(spec, cluster)
    layout = place_workers(spec, invocation.available, spec.backend.granularity)
    assembly = assemble_tasks(spec, cluster, layout, local=invocation.local)
    tasks = tuple(planned.task for planned in assembly.tasks)
    workdir = _workdir(spec, invocation)
    own_name = run_dir_name(spec, layout, invocation.timestamp)
    tracking = tracker_environment(spec.on_end, own_name)
    planned = tuple(dataclasses.replace(each, env={**tracking, **each.env}) for each in assembly.tasks)
    cpus_of = {role.name: role.options.cpus for role in layout.roles}
    cpus = Counter[int]()
    for task in tasks:
        cpus[task.node_index] += cpus_of.get(task.role) or max(1, len(task.gpus))
    of_workers = max(cpus.values())
    # one more for the sidecar, the wrappers and the job steps, unless a node has no more
    least_cpus = of_workers + (of_workers != cluster.cpus_per_node)
    return Plan(
        job_name=spec.name,
        nodes=layout.nodes,
        gpus_per_node=spec.resources.gpus_per_node,
        gpu_type=spec.resources.gpu_type or cluster.gpu_type,
        cpus_per_node=spec.resources.cpus_per_node or max(least_cpus, cpus_of_full_nodes(spec, cluster) or 0),
        memory_per_node=spec.resources.memory_per_node,
        tasks=mark_contained(planned, spec),
        manifest=_manifest(spec, cluster, invocation, layout, tasks),
        job_dir=str(invocation.job_dir),
        workdir=str(workdir),
        logs_dir=resolve_directory(cluster.logs_dir, workdir) or str(workdir / LOGS_DIR),
        run_dir_name=own_name,
        target_dir=_target_dir(cluster, invocation, workdir),
        slurm=slurm_options(spec, cluster, layout, invocation.sbatch_defaults),
        monitoring=spec.monitoring.enabled,
        launch_timeout_s=spec.monitoring.launch_timeout,
        linger_s=spec.monitoring.linger,
        kill_wait_s=invocation.kill_wait_s,
        python=invocation.python,
        resolved=redacted_job(spec),
        world_size=len(layout.tasks),
        readiness=assembly.readiness,
        templates=assembly.templates,
        container=container_plan(spec, cluster, workdir),
        setup=setup_steps(spec, cluster, workdir),
        secrets=tuple(spec.secrets),
        network_interface=cluster.network_interface,
        shared_output=spec.paths.shared_output,
    )


def adapt_plan(plan: Plan, kill_wait_s: float, dependency: str | None) -> Plan:
    """The plan with the cluster's KillWait and, unless None, another dependency."""
    manifest = dataclasses.replace(plan.manifest, kill_wait_s=kill_wait_s)
    plan = dataclasses.replace(plan, manifest=manifest, kill_wait_s=kill_wait_s)
    return plan if dependency is None else with_dependency(plan, dependency)


def _target_dir(cluster: ClusterSpec, invocation: Invocation, workdir: Path) -> str | None:
    return resolve_directory(cluster.target_dir, workdir) or invocation.own_targets


def _workdir(spec: JobSpec, invocation: Invocation) -> Path:
    return Path(resolve_directory(spec.workdir, invocation.workdir) or invocation.workdir)


def _manifest(
    spec: JobSpec, cluster: ClusterSpec, invocation: Invocation, layout: Topology, tasks: tuple[Task, ...]
) -> Manifest:
    local, workdir = invocation.local, _workdir(spec, invocation)
    # nobody enforces a limit here; that of a Slurm allocation is in its environment (SLURM_JOB_END_TIME)
    time_limit = None if local else spec.slurm.time_limit or cluster.time_limit
    output = resolve_directory(spec.paths.output_dir, workdir) or "."
    checkpoint = resolve_directory(spec.paths.checkpoint_dir, workdir) or output
    log = resolve_directory(spec.paths.log_dir, workdir) or "."
    patterns, monitoring = spec.patterns, spec.monitoring
    return Manifest(
        job_name=spec.name,
        user=invocation.user,
        cluster=cluster.cluster or ("local" if local else ""),
        partition=(spec.slurm.partition or cluster.partition or "") if not local else "local",
        nodes=layout.nodes,
        tasks=tasks,
        groups=(
            PathGroup("output", output, patterns.output),
            PathGroup("checkpoint", checkpoint, patterns.checkpoints),
        ),
        logs=PathGroup("log", log, patterns.logs),
        pack=spec.progress.pack,
        progress=progress_patterns(spec.progress.patterns),
        errors=error_patterns(spec.errors),
        total_items=spec.progress.total_items,
        resumes=spec.resume,
        verify=Verification(**spec.verify.model_dump()),
        total_epochs=spec.progress.total_epochs,
        total_steps=spec.progress.total_steps,
        time_limit_s=parse_time_limit(time_limit) if time_limit else None,
        requeues=spec.slurm.requeue.max if spec.slurm.requeue.time_limit and not local else 0,
        check_interval_s=monitoring.check_interval,
        launch_timeout_s=monitoring.launch_timeout,
        stall_timeout_s=monitoring.stall_timeout,
        checkpoint_interval_s=monitoring.checkpoint_interval,
        linger_s=monitoring.linger,
        kill_wait_s=invocation.kill_wait_s,
        gpu_metrics=monitoring.gpu_metrics,
        announced=_target_dir(cluster, invocation, workdir) is not None,
        listen_address=monitoring.listen_address or cluster.listen_address or ("127.0.0.1:0" if local else None),
        web_config_file=resolve_directory(cluster.web_config_file, workdir),
        metrics_access=cluster.metrics_access or OPEN,
        detail=monitoring.detail or cluster.detail or NORMAL,
        alert_thresholds=alert_thresholds(spec.alerts, cluster.alerts),
        notify=spec.alerts.notify or "",
    )
