"""The plan as JSON, for `gpujob plan --json`; ``picture.py`` draws it for people."""

import json
from collections.abc import Iterator, Sequence

from exporter.contract.identity import safe_label
from exporter.contract.records import Record
from exporter.contract.target_files import SCRAPE_JOB
from launcher.plan.container import PYXIS
from launcher.plan.placeholders import task_argv, task_environment
from launcher.plan.plan import STAGES, WORKERS, Plan, RunFacts, TaskPlan
from launcher.run.before.nodes_survey import needs_survey
from launcher.rundir.files import file_names
from launcher.show.records import PlannedProcess, PlannedTarget, PlannedWorker, PlanRecord
from launcher.steps.srun_lines import sidecar_line, survey_line, task_line, tasks_by_step
from launcher.steps.steps import sees_planned_gpus_only, task_gpu_positions

JOB_ID = "{job_id}"  # unknown until the job is submitted; ``{port}`` is a port that is chosen on its node
ENTRIES_PER_CHUNK = 64  # list entries encoded together


def planned_facts(plan: Plan, hosts: Sequence[str] = ()) -> RunFacts:
    """Facts of a run that has not started. Unnamed hosts become node0, node1, ..."""
    return plan.facts_before_run(JOB_ID, hosts)


def describe_plan(plan: Plan, script: str, hosts: Sequence[str] = ()) -> PlanRecord:
    """The plan, without values of variables."""
    facts = planned_facts(plan, hosts)
    steps = sorted(tasks_by_step(plan), key=lambda step: STAGES.index(step[1][0].stage))
    lines = [task_line(plan, name, tasks, facts, 0) for name, tasks in steps]
    commands = {
        tasks[0].task.rank: line[line.index("--") + 1 :]
        for (_, tasks), line in zip(steps, lines, strict=True)
        if _wraps_own_command(plan, tasks[0])
    }
    processes = []
    variables: dict[tuple[object, ...], tuple[str, ...]] = {}
    for planned in plan.tasks:
        task = planned.task
        visible = planned_visible_devices(plan, planned)
        # tasks with the same settings share the list of names
        kind = (planned.stage, task.role, visible is None, *planned.env)
        if kind not in variables:
            own = {"CUDA_VISIBLE_DEVICES"} if visible is not None else set()
            variables[kind] = tuple(sorted({*task_environment(plan, planned, facts, 0), *own}))
        processes.append(
            PlannedProcess(
                worker=task.worker,
                role=task.role,
                worker_index=task.index,
                rank=task.rank,
                local_rank=task.local_rank,
                leader=task.local_rank == 0,
                node=facts.hosts[task.node_index],
                node_index=task.node_index,
                gpus=task.gpus,
                cuda_visible_devices=visible,
                ports=planned.ports,
                command=tuple(commands.get(task.rank) or task_argv(plan, planned, facts)),
                environment=variables[kind],
                stage=planned.stage,
                service=planned.service,
                critical=planned.critical,
            )
        )
    return PlanRecord(
        job_name=plan.job_name,
        sbatch_nodes=plan.nodes,
        gpus_per_node=plan.gpus_per_node,
        cpus_per_node=plan.cpus_per_node,
        workers=_workers(processes),
        processes=tuple(processes),
        run_dir=str(facts.run_dir),
        files=tuple(file_names(plan)),
        targets=planned_targets(plan, facts),
        script=script,
        srun=tuple(map(tuple, (*_system_step_lines(plan, facts), *lines))),
    )


def _workers(processes: Sequence[PlannedProcess]) -> tuple[PlannedWorker, ...]:
    members: dict[str, list[PlannedProcess]] = {}
    for process in processes:
        if process.stage == WORKERS:
            members.setdefault(process.worker, []).append(process)
    workers = []
    for name, parts in members.items():
        gpus: dict[str, tuple[int, ...]] = {}
        for process in parts:
            gpus[process.node] = (*gpus.get(process.node, ()), *process.gpus)
        role, index = parts[0].role, parts[0].worker_index
        workers.append(PlannedWorker(worker=name, role=role, index=index, nodes=tuple(gpus), gpus=gpus))
    return tuple(workers)


def dump_json_chunks(record: Record) -> Iterator[str]:
    """Encode a record in one line, in pieces. Its lists contain flat records and named tuples, or lists of texts.

    The plan of a thousand nodes is 16 MB, and encoding it as one text takes 50% longer.
    """
    encode = json.JSONEncoder(ensure_ascii=False).encode
    yield f'{{"schema": {record.SCHEMA}'
    for name in record.FIELDS:
        value = getattr(record, name)
        yield f", {encode(name)}: "
        if not isinstance(value, tuple):
            yield encode(value)
            continue
        yield "["
        for start in range(0, len(value), ENTRIES_PER_CHUNK):
            entries = value[start : start + ENTRIES_PER_CHUNK]
            yield (", " if start else "") + encode(_plain_entries(entries))[1:-1]
        yield "]"
    yield "}"


def _plain_entries(entries: Sequence[object]) -> Sequence[object]:
    """Entries of one kind as the encoder takes them; ``to_json`` would take much longer for thousands of processes."""
    if isinstance(entries[0], Record):
        return list(map(vars, entries))
    return [entry._asdict() for entry in entries] if hasattr(entries[0], "_asdict") else entries  # type: ignore[attr-defined]


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


def planned_targets(plan: Plan, facts: RunFacts) -> tuple[PlannedTarget, ...]:
    """Planned content of ``planned_targets.json``: one sidecar per node."""
    if not plan.monitoring:
        return ()
    host, _, port = (plan.manifest.listen_address or ":0").rpartition(":")
    manifest, notify = plan.manifest, plan.manifest.notify
    labels = {
        "cluster": safe_label(manifest.cluster) or "slurm",
        "job_id": JOB_ID,
        "job_name": safe_label(manifest.job_name),
        "user": safe_label(manifest.user),
        "partition": safe_label(manifest.partition),
    }
    return tuple(
        PlannedTarget(
            (f"{host or node}:{'{port}' if port == '0' else port}",),
            {**labels, "node": safe_label(node), "job": SCRAPE_JOB, **({"notify": notify} if notify else {})},
        )
        for node in facts.hosts
    )
