"""Parts shared by the engines, whose workers divide their GPUs among kinds of parallelism. Pure."""

from collections.abc import Mapping

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from launcher.jobfile.serving import Arguments
from launcher.plan.plan import ReadyRule
from launcher.planner.backends.base import (
    Backend,
    BackendContext,
    BackendWorker,
    conflicting_option_problems,
    spell_options,
)
from launcher.planner.roles import Role


@dataclass(frozen=True)
class ParallelSizes:
    """Division of one worker's GPUs among kinds of parallelism."""

    tensor: int
    pipeline: int
    data: int
    expert: int | None


SIZE_OPTIONS = {
    "tensor": ("tp-size", "tensor-parallel-size", "tp"),
    "pipeline": ("pp-size", "pipeline-parallel-size", "pp"),
    "data": ("dp-size", "data-parallel-size", "dp"),
    "expert": ("ep-size", "expert-parallel-size", "ep", "moe-expert-parallel-size"),
}  # engine options for each kind of parallelism
SIZE_OPTION_NAMES = tuple(name for names in SIZE_OPTIONS.values() for name in names)


class EngineBackend(Backend):
    """A model server: the engine itself, or dynamo's worker around it behind a dynamo front end.

    https://docs.nvidia.com/dynamo (discovery through etcd and NATS, a status server in each worker)
    """

    is_service = True
    reserved_options: tuple[str, ...]  # options that the launcher sets from the plan

    def problems(self, context: BackendContext, role: Role) -> list[str]:
        found = conflicting_option_problems(context, role.name, self.reserved_options)
        if context.spec.model is None:
            found.append(f"model: is missing; {self.name} serves one, for example model: {{path: hf:Qwen/Qwen3-32B}}")
        return found + self.size_problems(context, role)

    def size_problems(self, context: BackendContext, role: Role) -> list[str]:
        return self._divide_gpus(context, role)[1]

    def sizes(self, context: BackendContext, role: Role) -> ParallelSizes:
        return self._divide_gpus(context, role)[0]

    def _divide_gpus(self, context: BackendContext, role: Role) -> tuple[ParallelSizes, list[str]]:
        return context.cached(
            ("sizes", role.name), lambda: divide_gpus(context, role, shares_gpus=self.shares_gpus(context, role))
        )

    def size_argv(self, context: BackendContext, role: Role, names: Mapping[str, str]) -> list[str]:
        """Options of these names for the sizes: always that of tensor parallelism, the others only above 1."""
        sizes = vars(self.sizes(context, role))
        return [
            word
            for kind, name in names.items()
            if kind == "tensor" or (sizes[kind] or 1) > 1
            for word in (f"--{name}", str(sizes[kind]))
        ]

    def shares_gpus(self, context: BackendContext, role: Role) -> bool:
        """Whether data parallelism shares the GPUs of tensor parallelism instead of using more."""
        return False

    def dynamo_ports(self, context: BackendContext) -> tuple[str, ...]:
        """The port of the status server of each process, if it registers with dynamo."""
        return ("system",) if context.uses_dynamo else ()

    def environment(self, context: BackendContext, worker: BackendWorker, task: Task) -> dict[str, str]:
        port = {"DYN_SYSTEM_ENABLED": "true", "DYN_SYSTEM_PORT": "{system_port}"}
        return port if context.uses_dynamo else {}

    def ready_rules(self, context: BackendContext, worker: BackendWorker) -> tuple[ReadyRule, ...]:
        if context.uses_dynamo:  # whether it has registered is known to the front end
            return (ReadyRule(worker.name, "tcp", worker.node, worker.ports["system"]),)
        return (ReadyRule(worker.name, "http", worker.node, worker.ports["http"], "/health"),)

    def metrics(self, context: BackendContext, worker: BackendWorker, task: Task) -> str | None:
        if context.uses_dynamo:
            return "system_port/metrics"
        return "http_port/metrics" if task.local_rank == 0 else None


def other_arguments(context: BackendContext, role: str) -> Arguments:
    """Engine options other than the sizes."""
    return {name: value for name, value in context.arguments(role).items() if name not in SIZE_OPTION_NAMES}


def nodes_of_worker(context: BackendContext, role: Role) -> int:
    """Number of nodes of each worker of a role."""
    return max(1, -(-role.gpus // max(1, context.spec.resources.gpus_per_node)))


def divide_gpus(context: BackendContext, role: Role, *, shares_gpus: bool) -> tuple[ParallelSizes, list[str]]:
    """Divide a worker's GPUs; also returns the problems found.

    If the job file sets no tensor size, it is the rest.
    """
    settings = {**spell_options(context.config(role.name), "-"), **context.arguments(role.name)}
    problems, found = [], {}
    for kind, names in SIZE_OPTIONS.items():
        value = next((settings[name] for name in names if settings.get(name) is not None), None)
        number = int(value) if isinstance(value, int | str) and str(value).isdigit() else 0
        if value is not None and (isinstance(value, bool) or number < 1):
            problems.append(f"{context.args_key(role.name, *names)}: {value!r} is not a size; use a number above 0")
        elif value is not None:
            found[kind] = number
    gpus = max(role.gpus, 1)
    pipeline, data = found.get("pipeline", 1), found.get("data", 1)
    others = pipeline * (1 if shares_gpus else data)
    result = ParallelSizes(found.get("tensor", gpus // others or 1), pipeline, data, found.get("expert"))
    if role.gpus == 0 or problems:
        return result, problems
    sizes_text = " x ".join(
        f"{kind} parallel {number}"
        for kind, number in (("tensor", result.tensor), ("pipeline", pipeline), ("data", 1 if shares_gpus else data))
        if number > 1 or kind == "tensor"
    )
    place = context.args_key(role.name, *SIZE_OPTION_NAMES)
    if result.tensor * others != gpus:
        fix = f"set tensor parallel to {gpus // others}" if gpus % others == 0 else "use sizes that multiply to it"
        problems.append(
            f"{place}: {sizes_text} is {result.tensor * others} GPUs and each {role.name} worker has {gpus}; {fix}, "
            f"or give it {result.tensor * others} GPUs"
        )
    if shares_gpus and result.tensor % data:
        problems.append(
            f"{place}: data parallel {data} does not divide tensor parallel {result.tensor}, on whose GPUs it runs; "
            f"use {divisors_text(result.tensor)}"
        )
    whole = result.tensor * (1 if shares_gpus else data)
    if result.expert is not None and whole % result.expert:
        problems.append(
            f"{place}: expert parallel {result.expert} does not divide {whole} GPUs; use {divisors_text(whole)}"
        )
    return result, problems


def divisors_text(number: int) -> str:
    """The divisors of a number, as text."""
    found = [str(part) for part in range(1, number + 1) if number % part == 0]
    return " or ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else found[0]
