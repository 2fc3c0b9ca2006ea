"""The plan of a job as one value, and as JSON for the orchestrator."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Manifest, PathGroup, Task
from exporter.contract.records import NOTHING, JsonObject, JsonValue, from_json, to_json

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
    variables: tuple[str, ...] = ()  # of the user's environment, which not every runtime passes on


class RequeueRule(NamedTuple):
    """When the job goes back into the queue."""

    preempted: bool
    time_limit: bool
    max: int  # attempts after the first


class SlurmOptions(NamedTuple):
    """Options for sbatch and srun beyond the resources, named as in the job file."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None
    directives: Mapping[str, str | int | bool | None] = NOTHING  # further options of sbatch
    dependency: str | None = None
    exclusive: bool = False
    segment: int | None = None
    signal: str | None = None  # as in ``USR1@120``
    requeue: RequeueRule | None = None  # None: as the cluster does by default
    mpi: str = "pmix"
    het: tuple[int, int] | None = None  # nodes of the two components of a heterogeneous job


class SetupPart(NamedTuple):
    """Steps of the batch script that one file asks for."""

    modules: tuple[str, ...]
    script: str | None
    preamble: str | None


class SetupPlan(NamedTuple):
    """Steps of the batch script before any part of the job starts: the cluster file's, then the job's."""

    parts: tuple[SetupPart, ...] = ()


NO_SETUP = SetupPlan()


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
    slurm: SlurmOptions
    monitoring: bool
    launch_timeout_s: float
    linger_s: float
    kill_wait_s: float
    python: str
    resolved: JsonObject  # the job file as understood, without secrets
    world_size: int = 0  # number of processes of all workers
    readiness: ReadinessPlan | None = None
    # files of the run directory by name; the orchestrator fills in their placeholders
    templates: Mapping[str, str] = field(default_factory=dict)
    gpu_type: str | None = None  # as Slurm names it; None: any
    container: ContainerPlan | None = None
    setup: SetupPlan = NO_SETUP
    secrets: tuple[str, ...] = ()  # names of variables whose values are in a file readable only by the owner
    network_interface: str | None = None  # workers reach each other at its addresses; None: at their host names
    shared_output: bool = False  # whether other running jobs may write the same files

    def run_dir(self, job_id: str) -> Path:
        return Path(self.logs_dir, self.run_dir_name.replace("{job_id}", job_id, 1))

    def group(self, name: str) -> PathGroup:
        """The files of this kind: ``output`` or ``checkpoint``."""
        return next(group for group in self.manifest.groups if group.name == name)

    def facts_before_run(self, job_id: str = "0", hosts: Sequence[str] = ()) -> "RunFacts":
        """Facts of a run that has not started. Unnamed hosts become node0, node1, ..."""
        names = tuple(hosts[: self.nodes]) or tuple(f"node{index}" for index in range(self.nodes))
        return RunFacts(job_id, self.run_dir(job_id), names)


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
    ip_addresses: tuple[str, ...] = ()  # for people and for what takes no host name; else the job uses ``addresses``
    checkpoint: str = ""  # path of the checkpoint to resume from; empty without one

    @property
    def is_local(self) -> bool:
        """Whether the job runs without Slurm."""
        return self.job_id.startswith("local-")

    def ip_address(self, node_index: int) -> str:
        """IP address of a node, or its host name if it is unknown."""
        return (self.addresses or self.ip_addresses or self.hosts)[node_index]

    def address(self, node_index: int) -> str:
        """Host name or IP address of a node."""
        return (self.addresses or self.hosts)[node_index]


def safe_file_word(text: str) -> str:
    """Reduce a name to characters that are safe in a file name."""
    word = re.sub(r"[^\w.-]+", "_", text).strip("._")[:64]
    return word.encode("utf-8", "replace")[:MOST_NAME_BYTES].decode("utf-8", "ignore") or "job"


def dump_plan(plan: Plan) -> dict[str, JsonValue]:
    """Render the plan as a JSON object for the orchestrator. The manifest is a separate file."""
    body: dict[str, JsonValue] = {"schema": PLAN_SCHEMA}
    for name, value in vars(plan).items():
        if name == "tasks":  # `to_json` would take 13 times as long for thousands of tasks
            body[name] = [{**vars(planned), "task": vars(planned.task)} for planned in plan.tasks]
        elif name not in ("manifest", "resolved"):
            body[name] = to_json(value)
    return body


def parse_plan(body: Mapping[str, Any], manifest: Manifest) -> Plan:
    """Parse the output of ``dump_plan``. Raises RecordError."""
    kinds = get_type_hints(Plan)
    values: dict[str, Any] = {
        name: from_json(kinds[name], value, name) for name, value in body.items() if name in kinds and name != "tasks"
    }
    return Plan(**values, tasks=tuple(map(_parse_task, body["tasks"])), manifest=manifest, resolved={})


def _parse_task(body: Mapping[str, Any]) -> TaskPlan:
    task = {**body["task"], "gpus": tuple(body["task"]["gpus"]), "logs": tuple(body["task"]["logs"])}
    return TaskPlan(**{**body, "task": Task(**task), "argv": tuple(body["argv"]), "visible": tuple(body["visible"])})
