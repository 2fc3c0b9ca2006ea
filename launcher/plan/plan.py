"""The plan: everything that `submit` and `run` carry out, as one value, and as JSON for the orchestrator."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter.contract.manifest import Manifest, Task

PLAN_SCHEMA = 1
PLAN_FILE = "plan.json"
DEFAULT_KILL_WAIT_S = 30.0  # Slurm's own default of KillWait

MOST_NAME_BYTES = 100  # of a job's name in the name of its run directory, which has 255 in all

INFRA, WORKERS, FRONTENDS, BALANCER, BENCHMARK = STAGES = ("infra", "workers", "frontends", "balancer", "benchmark")
"""Stages of a job, in the order in which they start."""
PREFILL, DECODE = "prefill", "decode"  # roles of disaggregated serving: each is of no use without the other
COUNTING = ("dynamo", "sglang")  # kinds of readiness whose answers count the registered workers


@dataclass(frozen=True)
class ReadyRule:
    """How to ask whether a process, or all that a front end knows of, is ready."""

    subject: str  # the worker that is asked for; empty for the model as a whole
    kind: str  # dynamo, sglang, vllm, http (status 200) or tcp (accepts)
    node: int  # index of the node that is asked
    port: int  # before the job's offset
    path: str = ""
    expected: Mapping[str, int] = field(default_factory=dict)
    """Workers by role that must have registered; empty when the answer alone counts."""
    before: str = "benchmark"  # stage that does not begin before it holds


@dataclass(frozen=True)
class ReadinessPlan:
    """How readiness is waited for."""

    rules: tuple[ReadyRule, ...]
    timeout_s: float = 1800.0
    interval_s: float = 5.0


@dataclass(frozen=True)
class ContainerPlan:
    """The container of the tasks that are ``contained``."""

    image: str
    runtime: str
    mounts: tuple[str, ...] = ()
    """``host:container[:flags]`` with placeholders, in the order of precedence, the last one wins."""
    workdir: str | None = None
    python: str = "python3"


@dataclass(frozen=True)
class TaskPlan:
    """One task with what it runs and what happens when it fails. ``argv`` holds placeholders."""

    task: Task
    argv: tuple[str, ...]
    env: Mapping[str, str]
    critical: bool = True
    restart_max: int = 0
    restart_backoff_s: float = 10.0
    stage: str = WORKERS  # when it is started: a stage begins once all of the one before it are ready
    service: bool = False  # whether it serves until the job is over: an end of its own is a failure, whatever its code
    step: str = ""  # name of its Slurm step; tasks of one name are started together as one step (MPI)
    leader_node: int = 0  # index of the first node of its worker
    worker_size: int = 1  # processes of its worker
    worker_nodes: int = 1  # nodes of its worker
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports by what they are for, before the job's offset; ``{NAME_port}`` in commands."""
    narrowed: bool = True  # whether it sees the GPUs of the plan alone; else all of its node
    visible: tuple[int, ...] = ()
    """GPUs of its node that it sees where they are more than its own: all of its worker there."""
    metrics: str | None = None
    """``NAME_port/path`` where its program serves metrics of its own, as in ``http_port/metrics``."""
    contained: bool = False  # whether it runs in the job's container


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
    run_dir_name: str  # name of the run directory with `{job_id}` in it
    target_dir: str | None
    slurm: Mapping[str, Any]
    monitoring: bool
    launch_timeout_s: float
    linger_s: float
    kill_wait_s: float
    python: str
    resolved: Mapping[str, Any]  # the job file as it was understood, secrets left out
    world_size: int = 0  # processes of the workers
    readiness: ReadinessPlan | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    """Files of the run directory by name, with placeholders that only the orchestrator can fill."""
    container: ContainerPlan | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)  # Modules, script and preamble of the batch script
    secrets: tuple[str, ...] = ()  # names of variables whose values are in a file of their own, for the owner alone
    network_interface: str | None = None
    """Interface whose addresses the workers use for each other; host names without one."""

    def run_dir(self, job_id: str) -> Path:
        """The run directory of this job."""
        return Path(self.logs_dir, self.run_dir_name.replace("{job_id}", job_id, 1))


@dataclass(frozen=True)
class RunFacts:
    """What is known of a job once it runs."""

    job_id: str
    run_dir: Path
    hosts: tuple[str, ...]  # host names in the order of the plan's nodes
    attempt: int = 0
    start: float = 0.0
    addresses: tuple[str, ...] = ()  # by which the nodes reach each other, where that is not by their host names
    port_offset: int = 0  # added to every port of the plan: another job may be on the same node

    def address(self, node_index: int) -> str:
        """Host name or IP address of a node."""
        return (self.addresses or self.hosts)[node_index]


def safe_file_word(text: str) -> str:
    """A name reduced to what is safe and pleasant in a file name."""
    word = re.sub(r"[^\w.-]+", "_", text).strip("._")[:64]
    return word.encode("utf-8", "replace")[:MOST_NAME_BYTES].decode("utf-8", "ignore") or "job"


def dump_plan(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object for the orchestrator; without the manifest, which is a file of its own."""
    body = {item.name: getattr(plan, item.name) for item in dataclasses.fields(plan)}
    del body["manifest"], body["resolved"]
    # not by ``asdict``, which copies every value of thousands of tasks
    body["tasks"] = [{**vars(planned), "task": {**vars(planned.task)}} for planned in plan.tasks]
    for name in ("readiness", "container"):
        body[name] = dataclasses.asdict(body[name]) if body[name] is not None else None
    return {"schema": PLAN_SCHEMA, **body}


def parse_plan(body: Mapping[str, Any], manifest: Manifest) -> Plan:
    """The plan that ``dump_plan`` wrote."""
    values = {item.name: body[item.name] for item in dataclasses.fields(Plan) if item.name in body}
    values["tasks"] = tuple(_parse_task(planned) for planned in body["tasks"])
    values["secrets"] = tuple(values["secrets"])
    if values["readiness"] is not None:
        rules = tuple(ReadyRule(**rule) for rule in values["readiness"]["rules"])
        values["readiness"] = ReadinessPlan(**{**values["readiness"], "rules": rules})
    if values["container"] is not None:
        mounts = tuple(values["container"]["mounts"])
        values["container"] = ContainerPlan(**{**values["container"], "mounts": mounts})
    return Plan(**values, manifest=manifest, resolved={})


def _parse_task(body: Mapping[str, Any]) -> TaskPlan:
    task = {**body["task"], "gpus": tuple(body["task"]["gpus"]), "logs": tuple(body["task"]["logs"])}
    return TaskPlan(**{**body, "task": Task(**task), "argv": tuple(body["argv"]), "visible": tuple(body["visible"])})
