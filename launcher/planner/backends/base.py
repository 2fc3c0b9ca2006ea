"""Interface of a backend, and helpers that backends share. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import cached_property
from typing import Literal, TypeVar, cast

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from launcher.jobfile.jobfile import ClusterSpec, JobSpec
from launcher.jobfile.resources import SERVING_ROLES, command_argv
from launcher.jobfile.serving import Arguments, EngineRoleSpec
from launcher.plan.placeholders import escape_placeholders
from launcher.plan.plan import ReadyRule
from launcher.planner.roles import Role

PREFILL, DECODE, AGG = SERVING_ROLES
DISAGGREGATED = (PREFILL, DECODE)
Made = TypeVar("Made")
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104  clients are on other nodes


@dataclass(frozen=True)
class BackendContext:
    """The job, as backends see it."""

    spec: JobSpec
    cluster: ClusterSpec
    # values that are the same for all of a role's processes, which may be thousands
    _cache: dict[tuple[object, ...], object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """Return what ``make`` returns, called once for each key. Callers must not change the value."""
        if key not in self._cache:
            self._cache[key] = make()
        return cast(Made, self._cache[key])

    @cached_property
    def model_path(self) -> str:
        """The model, as an engine takes it; empty without one."""
        return escape_placeholders(self.cluster.path_of_model(self.spec.model.path)) if self.spec.model else ""

    @cached_property
    def model_name(self) -> str:
        """The model's name for clients; empty without a model."""
        if self.spec.model is None:
            return ""
        named = self.spec.model.name
        return escape_placeholders(named) if named else self.model_path.rstrip("/").rpartition("/")[2]

    @cached_property
    def uses_dynamo(self) -> bool:
        """Whether workers register with dynamo; otherwise a router polls them."""
        return self.spec.frontend is not None and self.spec.frontend.type == "dynamo"

    def role_options(self, role: str) -> tuple[tuple[str, EngineRoleSpec], ...]:
        """Backend options of a role with their keys in the job file. A later entry overrides."""
        backend = self.spec.backend
        own = [(f"backend.{role}", getattr(backend, role))] if role in SERVING_ROLES else []
        return (("backend", backend), *own)

    def arguments(self, role: str, separator: str = "-") -> Arguments:
        """Engine options of a role by name, with ``separator`` between the words of a name."""

        def make() -> Arguments:
            found: Arguments = {}
            for _, options in self.role_options(role):
                found.update(spell_options(options.args, separator))
            return found

        return dict(self.cached(("arguments", role, separator), make))

    def config(self, role: str) -> dict[str, object]:
        """Engine configuration of a role."""

        def make() -> dict[str, object]:
            found: dict[str, object] = {}
            for _, options in self.role_options(role):
                found = merge_configs(found, options.config)
            return found

        return dict(self.cached(("config", role), make))

    def role_key(self, role: str, key: str) -> str:
        """Key of the job file for this setting of a role, or where it belongs."""
        index = next((index for index, workers in enumerate(self.spec.workers) if workers.role == role), None)
        return "workers" if index is None else f"workers[{index}].{key}"

    def args_key(self, role: str, *names: str) -> str:
        """Key of the job file for a role's options, or for those with these names."""
        places = [
            place for place, options in self.role_options(role) if set(spell_options(options.args, "-")) & set(names)
        ]
        return f"{(places or ['backend'])[-1]}.args"


@dataclass(frozen=True)
class BackendWorker:
    """One worker: its processes, and the ports of the first one."""

    role: Role
    name: str
    tasks: tuple[Task, ...]
    # before the job's offset, by name in ``launcher.plan.ports``
    ports: Mapping[str, int] = field(default_factory=dict)
    ports_by_rank: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # by rank, for each process

    @property
    def node(self) -> int:
        return self.tasks[0].node_index

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Indexes of its nodes, in order."""
        return tuple(self.local_indexes)

    @cached_property
    def local_indexes(self) -> Mapping[int, Mapping[int, int]]:
        """For each node, in order: the local index of each process there, by rank."""
        found: dict[int, dict[int, int]] = {}
        for task in self.tasks:
            here = found.setdefault(task.node_index, {})
            here[task.rank] = len(here)
        return found

    @property
    def host(self) -> str:
        """Host of its first process, as a placeholder that is valid in any task's text."""
        return f"{{host_{self.node}}}"

    def port(self, name: str) -> str:
        """Port of its first process, as a placeholder that is valid in any task's text."""
        return f"{{port_{self.ports[name]}}}"

    def address(self, port: str) -> str:
        return f"{self.host}:{self.port(port)}"

    def url(self) -> str:
        return f"http://{self.address('http')}"


class Backend:
    """How to run the workers of one kind. The defaults suit a program that knows nothing of gpujob."""

    name: str
    is_service = False  # workers serve until the job ends
    # one process for each node of a worker, or for each GPU; None: either
    granularity: Literal["node", "gpu"] | None = None
    is_one_step = False  # processes of a worker start together in one step (MPI)
    sees_worker_gpus = False  # each process sees all its worker's GPUs on the node, and selects its own by local rank

    def problems(self, context: BackendContext, role: Role) -> list[str]:
        """Contradictions in the job, each with place, value and fix."""
        return []

    def ports(self, context: BackendContext, role: Role, processes: int) -> tuple[str, ...]:
        """Ports that the first process of a worker needs."""
        return ()

    def granularity_problems(self, context: BackendContext, role: Role) -> list[str]:
        asked = context.spec.resources.process_granularity
        if asked is None or self.granularity in (None, asked):
            return []
        needs = f"{self.name} needs one process for each {self.granularity} of a worker"
        return [f"resources.process_granularity: {asked}, and {needs}; leave it out"]

    def follower_ports(self, context: BackendContext, role: Role) -> tuple[str, ...]:
        """Ports that each further process of a worker needs."""
        return ()

    def argv(self, context: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        """Command of one process, with placeholders."""
        return command_argv(worker.role.options)

    def config(self, context: BackendContext, role: Role) -> dict[str, object]:
        """Content of a role's configuration file."""
        return context.config(role.name)

    def environment(self, context: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        """Variables of one process, with placeholders. Those of the job file override them."""
        return {}

    def ready_rules(self, context: BackendContext, worker: BackendWorker) -> tuple[ReadyRule, ...]:
        """Readiness rules of one worker."""
        return ()

    def metrics(self, context: BackendContext, worker: BackendWorker, task: Task) -> str | None:
        """Location of a process's own metrics, as in ``TaskPlan.metrics``."""
        return None


def torch_environment(group: BackendWorker, task: Task) -> dict[str, str]:
    """Variables by which torch.distributed connects the processes of a worker or role; ranks count within it."""
    here = group.local_indexes[task.node_index]
    return {
        "MASTER_ADDR": group.host,
        "MASTER_PORT": group.port("dist_init"),
        "RANK": str(task.rank - group.tasks[0].rank),
        "LOCAL_RANK": str(here[task.rank]),
        "WORLD_SIZE": str(len(group.tasks)),
        "LOCAL_WORLD_SIZE": str(len(here)),
    }


def config_name(backend: str, role: str) -> str:
    """Name of a role's configuration file in the run directory."""
    return f"{backend}_config_{role}.yaml"


def config_path(backend: str, role: str) -> str:
    return f"{{run_dir}}/{config_name(backend, role)}"


def spell_options(args: Mapping[str, Made], separator: str) -> dict[str, Made]:
    """Options with their names in one spelling; underscores and dashes mean the same."""
    return {name.replace("_", "-").replace("-", separator): value for name, value in args.items()}


def merge_configs(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """Merge two configurations. The second wins; mappings in both are merged recursively."""
    found = dict(first)
    for name, value in second.items():
        old = found.get(name)
        found[name] = merge_configs(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def option_argv(args: Arguments) -> list[str]:
    """Options as words: true gives the bare option, false and null nothing, a list several values."""
    words: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words


def conflicting_option_problems(context: BackendContext, role: str, reserved: Iterable[str]) -> list[str]:
    """Report options of the job file that the launcher sets from the plan."""
    return [
        problem
        for place, options in context.role_options(role)
        for problem in reserved_option_problems(place, options.args, reserved)
    ]


def reserved_option_problems(place: str, args: Iterable[str], reserved: Iterable[str]) -> list[str]:
    return [
        f"{place}.args.{name}: the launcher sets it from the plan; leave it out"
        for name in args
        if name.replace("_", "-") in reserved
    ]


def unused_option_problems(context: BackendContext, role: str) -> list[str]:
    """Report options for a backend that has no program to take them."""
    kind = context.spec.backend.type
    return [
        f"{place}.args: type {kind} starts no program of its own that accepts options; put them into the command"
        for place, options in context.role_options(role)
        if options.args
    ]
