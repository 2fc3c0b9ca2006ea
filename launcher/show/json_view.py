"""The plan as JSON, for `gpujob plan --json`; ``picture.py`` draws it for people."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from exporter.contract.identity import safe_label
from launcher.plan.container import PYXIS
from launcher.plan.placeholders import task_argv, task_environment
from launcher.plan.plan import PLAN_SCHEMA, STAGES, WORKERS, Plan, RunFacts, TaskPlan
from launcher.run.before.nodes_survey import needs_survey
from launcher.rundir.files import file_names
from launcher.rundir.targets import SCRAPE_JOB
from launcher.steps.srun_lines import sidecar_line, survey_line, task_line, tasks_by_step
from launcher.steps.steps import sees_planned_gpus_only, task_gpu_positions

JOB_ID = "{job_id}"  # unknown until the job is submitted; ``{port}`` is a port that is chosen on its node
ENTRIES_PER_CHUNK = 64  # list entries encoded together


def planned_facts(plan: Plan, hosts: Sequence[str] = ()) -> RunFacts:
    """Facts of a run that has not started. Unnamed hosts become node0, node1, ..."""
    names = tuple(hosts[: plan.nodes]) or tuple(f"node{index}" for index in range(plan.nodes))
    return RunFacts(JOB_ID, plan.run_dir(JOB_ID), names)


def describe_plan(plan: Plan, script: str, hosts: Sequence[str] = ()) -> dict[str, Any]:
    """The plan as a JSON object, without values of variables."""
    facts = planned_facts(plan, hosts)
    steps = sorted(tasks_by_step(plan), key=lambda step: STAGES.index(step[1][0].stage))
    lines = [task_line(plan, name, tasks, facts, 0) for name, tasks in steps]
    commands = {
        tasks[0].task.rank: line[line.index("--") + 1 :]
        for (_, tasks), line in zip(steps, lines, strict=True)
        if _wraps_own_command(plan, tasks[0])
    }
    workers: dict[str, dict[str, Any]] = {}
    processes = []
    variables: dict[tuple[object, ...], list[str]] = {}
    for planned in plan.tasks:
        task = planned.task
        node = facts.hosts[task.node_index]
        if planned.stage == WORKERS:
            entry = workers.setdefault(
                task.worker,
                {"worker": task.worker, "role": task.role, "index": task.index, "nodes": [], "gpus": {}},
            )
            if node not in entry["gpus"]:
                entry["nodes"].append(node)
            entry["gpus"].setdefault(node, []).extend(task.gpus)
        visible = planned_visible_devices(plan, planned)
        # tasks with the same settings share the list of names
        kind = (planned.stage, task.role, visible is None, *planned.env)
        if kind not in variables:
            own = {"CUDA_VISIBLE_DEVICES"} if visible is not None else set()
            variables[kind] = sorted({*task_environment(plan, planned, facts, 0), *own})
        processes.append(
            {
                "worker": task.worker,
                "role": task.role,
                "worker_index": task.index,
                "rank": task.rank,
                "local_rank": task.local_rank,
                "leader": task.local_rank == 0,
                "node": node,
                "node_index": task.node_index,
                "gpus": list(task.gpus),
                "cuda_visible_devices": visible,
                "ports": dict(planned.ports),
                "command": commands[task.rank] if task.rank in commands else task_argv(plan, planned, facts),
                "environment": variables[kind],
                "stage": planned.stage,
                "service": planned.service,
                "critical": planned.critical,
            }
        )
    return {
        "schema": PLAN_SCHEMA,
        "job_name": plan.job_name,
        "sbatch_nodes": plan.nodes,
        "gpus_per_node": plan.gpus_per_node,
        "cpus_per_node": plan.cpus_per_node,
        "workers": list(workers.values()),
        "processes": processes,
        "run_dir": str(facts.run_dir),
        "files": file_names(plan),
        "targets": planned_targets(plan, facts),
        "script": script,
        "srun": [*_system_step_lines(plan, facts), *lines],
    }


def dump_json_chunks(body: Mapping[str, Any]) -> Iterator[str]:
    """Encode a JSON object in one line, in pieces.

    The plan of a thousand nodes is 16 MB, and encoding it as one text takes 50% longer.
    """
    encode = json.JSONEncoder(ensure_ascii=False).encode
    before = "{"
    for name, value in body.items():
        yield f"{before}{encode(name)}: "
        before = ", "
        if not isinstance(value, list):
            yield encode(value)
            continue
        yield "["
        for start in range(0, len(value), ENTRIES_PER_CHUNK):
            yield (", " if start else "") + encode(value[start : start + ENTRIES_PER_CHUNK])[1:-1]
        yield "]"
    yield "}"


def planned_visible_devices(plan: Plan, planned: TaskPlan) -> str | None:
    """The planned ``CUDA_VISIBLE_DEVICES`` of a task; None if Slurm's value is kept."""
    return task_gpu_positions(planned) if plan.gpus_per_node and sees_planned_gpus_only(planned) else None


def _wraps_own_command(plan: Plan, planned: TaskPlan) -> bool:
    """Whether the wrapper starts the task's own command, not a container runtime."""
    return not planned.contained or plan.container is None or plan.container.runtime == PYXIS


def _system_step_lines(plan: Plan, facts: RunFacts) -> Iterator[list[str]]:
    """The srun commands before the first task."""
    if needs_survey(plan):
        yield survey_line(plan, facts)
    if plan.monitoring:
        yield sidecar_line(plan, facts)


def planned_targets(plan: Plan, facts: RunFacts) -> list[dict[str, Any]]:
    """Planned content of ``planned_targets.json``: one sidecar per node."""
    if not plan.monitoring:
        return []
    host, _, port = plan.manifest.listen_address.rpartition(":")
    manifest = plan.manifest
    labels = {
        "cluster": safe_label(manifest.cluster) or "slurm",
        "job_id": JOB_ID,
        "job_name": safe_label(manifest.job_name),
        "user": safe_label(manifest.user),
        "partition": safe_label(manifest.partition),
    }
    return [
        {
            "targets": [f"{host or node}:{'{port}' if port == '0' else port}"],
            "labels": {**labels, "node": safe_label(node), "job": SCRAPE_JOB},
        }
        for node in facts.hosts
    ]
