"""The plan: everything that `submit` and `run` carry out, as one value.

``make_plan`` is pure. What is known only at run time (job id, host names,
attempt) stands as a placeholder until the orchestrator fills it in.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.manifest import LogPattern, Manifest, PathGroup, Task, Verification, render_manifest
from exporter.readers.worker_logs import progress_path
from launcher.config import (
    EXPORTER_NAMES,
    ClusterSpec,
    JobSpec,
    parse_time_limit,
    redacted,
    resolve_directory,
    words_of,
)
from launcher.topology import place

PLAN_SCHEMA = 1
PLAN_FILE = "plan.json"
DEFAULT_KILL_WAIT_S = 30.0
"""Slurm's own default of KillWait."""

SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
MOST_NAME_BYTES = 100
"""Of a job's name in the name of its run directory, which has 255 in all."""

VARIABLES = {
    "rank": "GPUJOB_RANK",
    "world_size": "GPUJOB_WORLD_SIZE",
    "local_rank": "GPUJOB_LOCAL_RANK",
    "index": "GPUJOB_WORKER_INDEX",
    "role": "GPUJOB_ROLE",
    "worker": "GPUJOB_WORKER",
    "node_index": "GPUJOB_NODE_INDEX",
    "nodes": "GPUJOB_NODE_COUNT",
    "gpus": "GPUJOB_GPUS",
    "job_id": "GPUJOB_JOB_ID",
    "job_dir": "GPUJOB_JOB_DIR",
    "run_dir": "GPUJOB_RUN_DIR",
    "output_dir": "GPUJOB_OUTPUT_DIR",
    "checkpoint_dir": "GPUJOB_CHECKPOINT_DIR",
    "log_dir": "GPUJOB_LOG_DIR",
}
"""Variable of a task that holds the value of each placeholder."""

_PLACEHOLDER = re.compile(r"\{\{(?P<literal>[a-z_]+)\}\}|\{(?P<name>[a-z_]+)\}")


@dataclass(frozen=True)
class TaskPlan:
    """One task with what it runs and what happens when it fails. ``argv`` holds placeholders."""

    task: Task
    argv: tuple[str, ...]
    env: Mapping[str, str]
    critical: bool = True
    restart_max: int = 0
    restart_backoff_s: float = 10.0


@dataclass(frozen=True)
class Plan:
    """A job, ready to be carried out."""

    job_name: str
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    memory_per_node: str | None
    tasks: tuple[TaskPlan, ...]
    manifest: Manifest
    job_dir: str
    workdir: str
    logs_dir: str
    run_dir_name: str
    """Name of the run directory with ``{job_id}`` in it."""
    target_dir: str | None
    slurm: Mapping[str, Any]
    monitoring: bool
    launch_timeout_s: float
    linger_s: float
    kill_wait_s: float
    python: str
    resolved: Mapping[str, Any]
    """The job file as it was understood, secrets left out."""

    def run_dir(self, job_id: str) -> Path:
        """The run directory of this job."""
        return Path(self.logs_dir, self.run_dir_name.replace("{job_id}", job_id, 1))


def file_word(text: str) -> str:
    """A name reduced to what is safe and pleasant in a file name."""
    word = re.sub(r"[^\w.-]+", "_", text).strip("._")[:64]
    return word.encode("utf-8", "replace")[:MOST_NAME_BYTES].decode("utf-8", "ignore") or "job"


def make_plan(
    spec: JobSpec,
    cluster: ClusterSpec,
    *,
    job_dir: Path,
    workdir: Path,
    user: str,
    timestamp: str,
    python: str,
    local: bool = False,
    kill_wait_s: float = DEFAULT_KILL_WAIT_S,
) -> Plan:
    """The plan of a job; raises TopologyError when its workers do not fit its nodes.

    ``timestamp`` is ``YYYYMMDD_HHMMSS``, ``python`` the interpreter that runs our parts of the job.
    """
    tasks = place(spec)
    workdir = Path(resolve_directory(spec.workdir, workdir) or workdir)
    by_role = {workers.role: workers for workers in spec.workers}
    planned = tuple(
        TaskPlan(
            task,
            tuple(words_of(by_role[task.role])),
            {**spec.env, **by_role[task.role].env},
            by_role[task.role].critical,
            by_role[task.role].restart.max,
            by_role[task.role].restart.backoff,
        )
        for task in tasks
    )
    cpus = [
        sum(by_role[task.role].cpus for task in tasks if task.node_index == node)
        for node in range(spec.resources.nodes)
    ]
    slurm: dict[str, Any] = {
        "partition": spec.slurm.partition or cluster.partition,
        "account": spec.slurm.account or cluster.account,
        "qos": spec.slurm.qos or cluster.qos,
        "time_limit": spec.slurm.time_limit or cluster.time_limit,
        "directives": {**cluster.directives, **spec.slurm.directives},
    }
    return Plan(
        job_name=spec.name,
        nodes=spec.resources.nodes,
        gpus_per_node=spec.resources.gpus_per_node,
        # one more than the workers': for the sidecar, the wrappers and the job steps themselves
        cpus_per_node=spec.resources.cpus_per_node or max(cpus) + 1,
        memory_per_node=spec.resources.memory_per_node,
        tasks=planned,
        manifest=_manifest(spec, cluster, tasks, workdir, user, slurm["time_limit"], local, kill_wait_s),
        job_dir=str(job_dir),
        workdir=str(workdir),
        logs_dir=resolve_directory(cluster.logs_dir, workdir) or str(workdir / "logs"),
        run_dir_name=f"{{job_id}}_{file_word(spec.name)}_{timestamp}",
        target_dir=resolve_directory(cluster.target_dir, workdir),
        slurm=slurm,
        monitoring=spec.monitoring.enabled,
        launch_timeout_s=spec.monitoring.launch_timeout,
        linger_s=spec.monitoring.linger,
        kill_wait_s=kill_wait_s,
        python=python,
        resolved=redacted(spec),
    )


def _manifest(
    spec: JobSpec,
    cluster: ClusterSpec,
    tasks: tuple[Task, ...],
    workdir: Path,
    user: str,
    time_limit: str | None,
    local: bool,
    kill_wait_s: float,
) -> Manifest:
    output = resolve_directory(spec.paths.output_dir, workdir) or "."
    checkpoint = resolve_directory(spec.paths.checkpoint_dir, workdir) or output
    log = resolve_directory(spec.paths.log_dir, workdir) or "."
    patterns, monitoring = spec.patterns, spec.monitoring
    return Manifest(
        job_name=spec.name,
        user=user,
        cluster=cluster.cluster or ("local" if local else ""),
        partition=(spec.slurm.partition or cluster.partition or "") if not local else "local",
        nodes=spec.resources.nodes,
        tasks=tasks,
        groups=(
            PathGroup("output", output, patterns.output),
            PathGroup("checkpoint", checkpoint, patterns.checkpoints),
        ),
        logs=PathGroup("log", log, patterns.logs),
        pack=spec.progress.pack,
        progress=progress_patterns(spec),
        errors=error_patterns(spec),
        total_items=spec.progress.total_items,
        resumes=spec.resume,
        verify=Verification(**spec.verify.model_dump()),
        total_epochs=spec.progress.total_epochs,
        total_steps=spec.progress.total_steps,
        time_limit_s=parse_time_limit(time_limit) if time_limit else None,
        check_interval_s=monitoring.check_interval,
        launch_timeout_s=monitoring.launch_timeout,
        stall_timeout_s=monitoring.stall_timeout,
        checkpoint_interval_s=monitoring.checkpoint_interval,
        linger_s=monitoring.linger,
        kill_wait_s=kill_wait_s,
        gpu_metrics=monitoring.gpu_metrics,
        announced=cluster.target_dir is not None,
        listen_address=monitoring.listen_address or cluster.listen_address or ("127.0.0.1:0" if local else ":0"),
    )


def progress_patterns(spec: JobSpec) -> tuple[LogPattern, ...]:
    """The job's own patterns for progress, by the names that they have in the exporter."""
    return tuple(LogPattern(EXPORTER_NAMES.get(name, name), text) for name, text in spec.progress.patterns.items())


def error_patterns(spec: JobSpec) -> tuple[LogPattern, ...]:
    """The job's own patterns for errors; one without a name has its own text for it."""
    return tuple(
        LogPattern(error.name or file_word(error.pattern), error.pattern, error.severity) for error in spec.errors
    )


def plan_files(plan: Plan, script: str) -> dict[str, str]:
    """Files of the run directory that are there before the job can start, by name."""
    import yaml

    return {
        "config.yaml": yaml.safe_dump(dict(plan.resolved), sort_keys=False, allow_unicode=True),
        "manifest.json": json.dumps(render_manifest(plan.manifest), ensure_ascii=False, indent=1) + "\n",
        "sbatch_script.sh": script,
        PLAN_FILE: json.dumps(dump_plan(plan), ensure_ascii=False, indent=1) + "\n",
    }


def dump_plan(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object for the orchestrator; without the manifest, which is a file of its own."""
    body = {item.name: getattr(plan, item.name) for item in dataclasses.fields(plan)}
    del body["manifest"], body["resolved"]
    body["tasks"] = [dataclasses.asdict(planned) for planned in plan.tasks]
    return {"schema": PLAN_SCHEMA, **body}


def parse_plan(body: Mapping[str, Any], manifest: Manifest) -> Plan:
    """The plan that ``dump_plan`` wrote."""
    values = {item.name: body[item.name] for item in dataclasses.fields(Plan) if item.name in body}
    values["tasks"] = tuple(
        TaskPlan(
            **{
                **planned,
                "task": Task(
                    **{
                        **planned["task"],
                        "gpus": tuple(planned["task"]["gpus"]),
                        "logs": tuple(planned["task"]["logs"]),
                    }
                ),
                "argv": tuple(planned["argv"]),
            }
        )
        for planned in body["tasks"]
    )
    return Plan(**values, manifest=manifest, resolved={})


@dataclass(frozen=True)
class RunFacts:
    """What is known of a job once it runs."""

    job_id: str
    run_dir: Path
    hosts: tuple[str, ...]
    """Host names in the order of the plan's nodes."""
    attempt: int = 0
    start: float = 0.0


def task_argv(plan: Plan, planned: TaskPlan, facts: RunFacts) -> list[str]:
    """The words that start one task. A placeholder's value is data: it is never split or evaluated.

    In the text of ``bash -c`` it becomes the variable that holds the value: a shell never takes for
    code what comes out of a variable, whatever quotes, comments or here documents are around it.
    Braces that are no placeholder stay.
    """
    values = placeholders(plan, planned, facts)
    text = shell_text_index(planned.argv)
    return [fill_shell_text(word) if index == text else fill(word, values) for index, word in enumerate(planned.argv)]


def shell_text_index(words: Sequence[str]) -> int | None:
    """Index of the word that a shell will read as a program, as in ``bash -c TEXT``, or None."""
    for start, word in enumerate(words):
        if word.rpartition("/")[2] in SHELLS:
            for index in range(start + 1, len(words) - 1):
                if re.fullmatch(r"-[A-Za-z]*c[A-Za-z]*", words[index]):
                    return index + 1
                if not words[index].startswith(("-", "+")) and not re.fullmatch(r"-[A-Za-z]*o", words[index - 1]):
                    return None  # a script, not a text
    return None


def fill(word: str, values: Mapping[str, str]) -> str:
    """``word`` with ``{name}`` replaced for the names in ``values``; ``{{name}}`` gives a literal ``{name}``."""

    def part(match: re.Match[str]) -> str:
        if match["literal"]:
            return f"{{{match['literal']}}}"
        return values.get(match["name"], match[0])

    return _PLACEHOLDER.sub(part, word)


def fill_shell_text(text: str) -> str:
    """``text`` with each placeholder replaced by its variable in double quotes, so that it stays one word."""
    quote = ""

    def part(match: re.Match[str]) -> str:
        nonlocal quote
        token = match[0]
        if token[-1] in "'\"" and (len(token) == 1 or quote == "'"):  # a backslash means nothing in single quotes
            quote = token[-1] if not quote else "" if quote == token[-1] else quote
        if match["literal"]:
            return f"{{{match['literal']}}}"
        if match["name"] not in VARIABLES:
            return token
        variable = f"${{{VARIABLES[match['name']]}}}"
        return {"": f'"{variable}"', '"': variable, "'": f"'\"{variable}\"'"}[quote]

    return re.sub(rf"\\.|['\"]|{_PLACEHOLDER.pattern}", part, text, flags=re.DOTALL)


def placeholders(plan: Plan, planned: TaskPlan, facts: RunFacts) -> dict[str, str]:
    """Values of the placeholders of a command."""
    task, manifest = planned.task, dataclasses.replace(plan.manifest, run_dir=facts.run_dir)
    groups = {group.name: str(manifest.directory(group)) for group in manifest.groups}
    return {
        "rank": str(task.rank),
        "world_size": str(len(plan.tasks)),
        "local_rank": str(task.local_rank),
        "index": str(task.index),
        "role": task.role,
        "worker": task.worker,
        "node_index": str(task.node_index),
        "nodes": str(plan.nodes),
        "gpus": ",".join(map(str, task.gpus)),
        "job_id": facts.job_id,
        "job_dir": plan.job_dir,
        "run_dir": str(facts.run_dir),
        "output_dir": groups["output"],
        "checkpoint_dir": groups["checkpoint"],
        "log_dir": str(manifest.directory(manifest.logs)) if manifest.logs else str(facts.run_dir),
    }


def task_environment(plan: Plan, planned: TaskPlan, facts: RunFacts, restart: int) -> dict[str, str]:
    """Variables that one task gets beside the user's own environment."""
    values = placeholders(plan, planned, facts)
    hosts, node = facts.hosts, facts.hosts[planned.task.node_index]
    progress = progress_path(planned.task, facts.run_dir, node, facts.attempt, restart)
    return {
        "RANK": values["rank"],
        "LOCAL_RANK": values["local_rank"],
        "WORLD_SIZE": values["world_size"],
        "GPUJOB_JOB_NAME": plan.job_name,
        "GPUJOB_NODE": node,
        "GPUJOB_NODES": ",".join(hosts),
        "GPUJOB_ATTEMPT": str(facts.attempt),
        "GPUJOB_RESTART": str(restart),
        "GPUJOB_PROGRESS_FILE": str(progress),
        **{name: fill(value, values) for name, value in planned.env.items()},
        **{variable: values[name] for name, variable in VARIABLES.items()},
    }


def describe_plan(plan: Plan, script: str, hosts: Sequence[str] = ()) -> dict[str, Any]:
    """The plan for people and programs: what `gpujob plan --json` prints."""
    names = tuple(hosts) or tuple(f"node{index}" for index in range(plan.nodes))
    facts = RunFacts("{job_id}", plan.run_dir("{job_id}"), names)
    workers: dict[str, dict[str, Any]] = {}
    processes = []
    for planned in plan.tasks:
        task = planned.task
        node = names[task.node_index]
        entry = workers.setdefault(
            task.worker,
            {"worker": task.worker, "role": task.role, "index": task.index, "nodes": [], "gpus": {}},
        )
        entry["nodes"].append(node)
        entry["gpus"][node] = list(task.gpus)
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
                "cuda_visible_devices": ",".join(map(str, task.gpus)) if task.gpus else None,
                "command": task_argv(plan, planned, facts),
                "environment": sorted(task_environment(plan, planned, facts, 0)),
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
        "files": sorted(plan_files(plan, script)),
        "script": script,
    }
