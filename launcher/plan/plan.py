"""The plan of a job as one value, and as JSON for the orchestrator."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter.contract.manifest import Manifest, Task

PLAN_SCHEMA = 1
PLAN_FILE = "plan.json"
DEFAULT_KILL_WAIT_S = 30.0  # Slurm's default for KillWait (slurm.conf(5))

MOST_NAME_BYTES = 100  # of the job name within the run directory's name; file names are limited to 255 bytes

# stages of a job, in starting order
INFRA, WORKERS, FRONTENDS, BALANCER, BENCHMARK = STAGES = ("infra", "workers", "frontends", "balancer", "benchmark")
PREFILL, DECODE = "prefill", "decode"  # roles of disaggregated serving; neither works without the other
COUNTING_KINDS = ("dynamo", "sglang")  # readiness kinds whose answers count the registered workers


@dataclass(frozen=True)
class ReadyRule:
    """How to ask whether one process is ready, or every worker that a front end knows."""

    subject: str  # worker that is asked; empty for the model as a whole
    kind: str  # dynamo, sglang, vllm, http (status 200) or tcp (accepts)
    node: int  # index of the node that is asked
    port: int  # before the job's offset
    path: str = ""
    # workers by role that must have registered; empty if any successful answer will do
    expected: Mapping[str, int] = field(default_factory=dict)
    before: str = "benchmark"  # stage that waits for this rule


@dataclass(frozen=True)
class ReadinessPlan:
    """How the job waits for readiness."""

    rules: tuple[ReadyRule, ...]
    timeout_s: float = 1800.0
    interval_s: float = 5.0


@dataclass(frozen=True)
class ContainerPlan:
    """Container of the tasks that are ``contained``."""

    image: str
    runtime: str
    mounts: tuple[str, ...] = ()  # ``host:container[:flags]`` with placeholders; a later mount wins
    workdir: str | None = None
    python: str = "python3"


@dataclass(frozen=True)
class TaskPlan:
    """One task: command, environment, and handling of failure. ``argv`` may contain placeholders."""

    task: Task
    argv: tuple[str, ...]
    env: Mapping[str, str]
    critical: bool = True
    restart_max: int = 0
    restart_backoff_s: float = 10.0
    stage: str = WORKERS  # starts when every earlier stage is ready
    service: bool = False  # serves until the job ends; ending earlier is a failure, whatever its exit status
    step: str = ""  # Slurm step name; tasks with the same name start together as one step (MPI)
    leader_node: int = 0  # index of its worker's first node
    worker_size: int = 1  # number of its worker's processes
    worker_nodes: int = 1  # number of its worker's nodes
    # by name, before the job's offset; ``{NAME_port}`` in commands
    ports: Mapping[str, int] = field(default_factory=dict)
    narrowed: bool = True  # sees only the GPUs that the plan gives it, not all of its node
    visible: tuple[int, ...] = ()  # GPUs that it sees on its node, if more than its own: all those of its worker
    metrics: str | None = None  # ``NAME_port/path`` of the metrics its program serves, such as ``http_port/metrics``
    contained: bool = False  # runs in the job's container


@dataclass(frozen=True)
class Plan:
    """A job, ready to start."""

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
    run_dir_name: str  # contains `{job_id}`
    target_dir: str | None
    slurm: Mapping[str, Any]
    monitoring: bool
    launch_timeout_s: float
    linger_s: float
    kill_wait_s: float
    python: str
    resolved: Mapping[str, Any]  # the job file as understood, without secrets
    world_size: int = 0  # number of processes of all workers
    readiness: ReadinessPlan | None = None
    # files of the run directory by name; the orchestrator fills in their placeholders
    templates: Mapping[str, str] = field(default_factory=dict)
    container: ContainerPlan | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)  # modules, script and preamble of the batch script
    secrets: tuple[str, ...] = ()  # names of variables whose values are in a file readable only by the owner
    network_interface: str | None = None  # workers reach each other at its addresses; None: at their host names

    def run_dir(self, job_id: str) -> Path:
        return Path(self.logs_dir, self.run_dir_name.replace("{job_id}", job_id, 1))


@dataclass(frozen=True)
class RunFacts:
    """Facts that are known only when the job runs."""

    job_id: str
    run_dir: Path
    hosts: tuple[str, ...]  # host names, in the order of the plan's nodes
    attempt: int = 0
    start: float = 0.0
    addresses: tuple[str, ...] = ()  # addresses at which nodes reach each other; empty if their host names serve
    port_offset: int = 0  # added to every port of the plan, because another job may share the node

    def address(self, node_index: int) -> str:
        """Host name or IP address of a node."""
        return (self.addresses or self.hosts)[node_index]


def safe_file_word(text: str) -> str:
    """Reduce a name to characters that are safe in a file name."""
    word = re.sub(r"[^\w.-]+", "_", text).strip("._")[:64]
    return word.encode("utf-8", "replace")[:MOST_NAME_BYTES].decode("utf-8", "ignore") or "job"


def dump_plan(plan: Plan) -> dict[str, Any]:
    """Render the plan as a JSON object for the orchestrator. The manifest is a separate file."""
    body = {item.name: getattr(plan, item.name) for item in dataclasses.fields(plan)}
    del body["manifest"], body["resolved"]
    # ``asdict`` would copy every value of thousands of tasks
    body["tasks"] = [{**vars(planned), "task": {**vars(planned.task)}} for planned in plan.tasks]
    for name in ("readiness", "container"):
        body[name] = dataclasses.asdict(body[name]) if body[name] is not None else None
    return {"schema": PLAN_SCHEMA, **body}


def parse_plan(body: Mapping[str, Any], manifest: Manifest) -> Plan:
    """Parse the output of ``dump_plan``."""
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
