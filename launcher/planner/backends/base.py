"""What a backend answers about the workers that it runs, and what backends share. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from exporter.contract.manifest import Task
from launcher.jobfile.aliases import model_path
from launcher.jobfile.jobfile import ClusterSpec, JobSpec
from launcher.jobfile.resources import SERVING_ROLES, command_argv
from launcher.jobfile.serving import Arguments, EngineRoleSpec
from launcher.plan.placeholders import escape_placeholders
from launcher.plan.plan import ReadyRule
from launcher.planner.roles import Role

PREFILL, DECODE, AGG = SERVING_ROLES
DISAGGREGATED = (PREFILL, DECODE)
Made = TypeVar("Made")
EVERYWHERE = "0.0.0.0"  # noqa: S104  clients are on other nodes


@dataclass(frozen=True)
class BackendContext:
    """The job as a backend needs it."""

    spec: JobSpec
    cluster: ClusterSpec
    _made: dict[tuple[object, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What is the same for all processes of a role, of which there are thousands."""

    def once(self, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """What ``make`` returns, made once for this key. Nobody may change it."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    @cached_property
    def model_path(self) -> str:
        """What an engine is given as its model; empty without one."""
        return escape_placeholders(model_path(self.spec.model.path, self.cluster)) if self.spec.model else ""

    @cached_property
    def model_name(self) -> str:
        """The name that clients use; empty without a model."""
        if self.spec.model is None:
            return ""
        named = self.spec.model.name
        return escape_placeholders(named) if named else self.model_path.rstrip("/").rpartition("/")[2]

    @cached_property
    def dynamo(self) -> bool:
        """Whether workers register with dynamo instead of being asked by a router."""
        return self.spec.frontend is not None and self.spec.frontend.type == "dynamo"

    def parts(self, role: str) -> tuple[tuple[str, EngineRoleSpec], ...]:
        """What the file says of a role's backend, with the keys where it does: the later one wins."""
        backend = self.spec.backend
        own = [(f"backend.{role}", getattr(backend, role))] if role in SERVING_ROLES else []
        return (("backend", backend), *own)

    def arguments(self, role: str, dash: str = "-") -> dict[str, Any]:
        """Options of the engine for a role by their names, with ``dash`` between the words of a name."""

        def make() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for _, options in self.parts(role):
                found.update(with_dashes(options.args, dash))
            return found

        return dict(self.once(("arguments", role, dash), make))

    def config(self, role: str) -> dict[str, Any]:
        """The engine's configuration for a role."""

        def make() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for _, options in self.parts(role):
                found = merge_configs(found, options.config)
            return found

        return dict(self.once(("config", role), make))

    def key_of(self, role: str, key: str) -> str:
        """The key of the file where this of a role stands, or would stand."""
        index = next((index for index, workers in enumerate(self.spec.workers) if workers.role == role), None)
        return "workers" if index is None else f"workers[{index}].{key}"

    def place_of(self, role: str, *names: str) -> str:
        """The key of the file where the options of a role, or these of them, stand."""
        said = [place for place, options in self.parts(role) if set(with_dashes(options.args, "-")) & set(names)]
        return f"{(said or ['backend'])[-1]}.args"


@dataclass(frozen=True)
class BackendWorker:
    """One worker: its processes, and the ports of the first of them."""

    role: Role
    name: str
    tasks: tuple[Task, ...]
    ports: Mapping[str, int] = field(default_factory=dict)
    """Before the job's offset, by the names of ``launcher.plan.ports``."""
    ports_of: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # the same of each process, by rank

    @property
    def node(self) -> int:
        """Index of its first node."""
        return self.tasks[0].node_index

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Indices of its nodes in order."""
        return tuple(self.places)

    @cached_property
    def places(self) -> Mapping[int, Mapping[int, int]]:
        """By node, in order: the place there of each of its processes, by their ranks in the worker."""
        found: dict[int, dict[int, int]] = {}
        for task in self.tasks:
            here = found.setdefault(task.node_index, {})
            here[task.local_rank] = len(here)
        return found

    def address(self, port: str) -> str:
        """``host:port`` of a port of its first process, whoever reads it."""
        return f"{{host_{self.node}}}:{{port_{self.ports[port]}}}"

    def url(self) -> str:
        """Where its server listens."""
        return f"http://{self.address('http')}"


class Backend:
    """How the workers of one kind are run. What is here fits a program that knows nothing of us."""

    name: str
    service = False  # whether its workers serve until the job is over
    granularity: Literal["node", "gpu"] | None = None
    """Processes of a worker that it needs: one for each node, or for each GPU; None: either."""
    one_step = False  # whether the processes of a worker are started together, as MPI needs it
    sees_worker = False
    """Whether a process sees all GPUs of its worker on the node, and chooses its own by its rank there."""
    dash = "-"  # what stands between the words of an option's name

    def problems(self, setting: BackendContext, role: Role) -> list[str]:
        """What of the job does not fit together, each with place, value and cure."""
        return []

    def ports(self, setting: BackendContext, role: Role, processes: int) -> tuple[str, ...]:
        """Ports that the first process of a worker needs."""
        return ()

    def granularity_problems(self, setting: BackendContext, role: Role) -> list[str]:
        """What is wrong with the processes that the job file asks for."""
        asked = setting.spec.resources.process_granularity
        if asked is None or self.granularity in (None, asked):
            return []
        needs = f"{self.name} needs one process for each {self.granularity} of a worker"
        return [f"resources.process_granularity: {asked}, and {needs}; leave it out"]

    def follower_ports(self, setting: BackendContext, role: Role) -> tuple[str, ...]:
        """Ports that each further process of a worker needs."""
        return ()

    def words(self, setting: BackendContext, worker: BackendWorker, task: Task) -> list[str]:
        """The command of one process with placeholders."""
        return command_argv(worker.role.options)

    def environment(self, setting: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        """Variables of one process with placeholders; those of the job file come after them."""
        return {}

    def rules(self, setting: BackendContext, worker: BackendWorker) -> tuple[ReadyRule, ...]:
        """How to ask one worker whether it is ready."""
        return ()

    def metrics(self, setting: BackendContext, worker: BackendWorker, task: Task) -> str | None:
        """Where a process serves metrics of its own, as ``TaskPlan.metrics``."""
        return None


class LaunchedBackend(Backend):
    """A program of the user, in groups of processes that find each other by the variables of torch.distributed."""

    def problems(self, setting: BackendContext, role: Role) -> list[str]:
        if role.name in SERVING_ROLES:
            wrong = f"{self.name} runs the processes of one program, and {role.name} is a role of serving"
            return [f"backend.type: {wrong}; use sglang, vllm or trtllm, or a role of another name"]
        if not command_argv(role.options):
            return [
                f"{setting.key_of(role.name, 'command')}: {self.name} needs the program of {role.name}; say it here"
            ]
        return []

    def ports(self, setting: BackendContext, role: Role, processes: int) -> tuple[str, ...]:
        return ("dist_init",)


def torch_environment(worker: BackendWorker, task: Task) -> dict[str, str]:
    """Variables by which torch.distributed finds the processes of one worker: ranks are the worker's own."""
    here = worker.places[task.node_index]
    return {
        "MASTER_ADDR": f"{{host_{worker.node}}}",
        "MASTER_PORT": f"{{port_{worker.ports['dist_init']}}}",
        "RANK": "{local_rank}",
        "LOCAL_RANK": str(here[task.local_rank]),
        "WORLD_SIZE": "{worker_size}",
        "LOCAL_WORLD_SIZE": str(len(here)),
    }


def config_name(backend: str, role: str) -> str:
    """Name of the configuration file of a role in the run directory."""
    return f"{backend}_config_{role}.yaml"


def config_path(backend: str, role: str) -> str:
    """Its path with a placeholder."""
    return f"{{run_dir}}/{config_name(backend, role)}"


def with_dashes(args: Mapping[str, Any], dash: str) -> dict[str, Any]:
    """Options by names of one spelling; underscores and dashes mean the same."""
    return {name.replace("_", "-").replace("-", dash): value for name, value in args.items()}


def merge_configs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two configurations as one: the second wins, mappings in both are merged alike."""
    found = dict(first)
    for name, value in second.items():
        old = found.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        found[name] = merge_configs(old, value) if both else value  # type: ignore[arg-type]
    return found


def option_words(args: Arguments) -> list[str]:
    """Options as words: true is one without a value, false and null none, a list several words behind it."""
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


def conflicting_option_problems(setting: BackendContext, role: str, taken: Iterable[str]) -> list[str]:
    """Options that the launcher sets from the plan and the file sets, too."""
    return [
        f"{place}.args.{name}: the launcher sets it from the plan; leave it out"
        for place, options in setting.parts(role)
        for name in options.args
        if name.replace("_", "-") in taken
    ]
