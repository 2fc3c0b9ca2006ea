"""Specifications of the job file and the cluster file, and their checks.

The meaning of each key is in ``keys.yaml``. Every problem of a file is reported together, with its place and a fix.
An unknown key is an error that suggests the nearest known key. Nothing here contacts the cluster or writes a file.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from exporter.contract.records import JsonValue
from launcher.errors import ConfigError
from launcher.jobfile.alerts.notify import NotifySpec
from launcher.jobfile.alerts.thresholds import AlertsSpec, AlertThresholds
from launcher.jobfile.backend_kinds import ENGINES
from launcher.jobfile.monitoring import (
    Detail,
    ErrorSpec,
    MonitoringSpec,
    PatternsSpec,
    ProgressSpec,
    StackSpec,
    VerifySpec,
)
from launcher.jobfile.resources import SERVING_ROLES, GpuType, ResourcesSpec, RoleSpec
from launcher.jobfile.serving import BackendSpec, BenchmarkSpec, EngineRoleSpec, FrontendSpec, ModelSpec, ReadinessSpec
from launcher.jobfile.slurm import (
    ContainerSpec,
    Directives,
    EnvironmentModule,
    Mount,
    SetupSpec,
    SlurmSpec,
)
from launcher.jobfile.sweep import SweepSpec
from launcher.jobfile.value_types import (
    Address,
    Directory,
    FileModel,
    TimeLimit,
    Url,
    VariableName,
    Variables,
    check_entry,
    combine_problems,
    known_name,
)
from launcher.jobfile.yamlfile import parse_yaml_model, read_mapping, validate_model
from launcher.plan.trackers import TRACKERS
from launcher.rundir.cluster_file import SYSTEM_FILE, find_cluster_file
from launcher.rundir.yaml_files import read_yaml_text

HUB = "hf:"  # prefix of a model that the engine fetches from a hub, such as ``hf:Qwen/Qwen3-32B``


class PathsSpec(FileModel):
    """Where the job writes; null is the run directory. Relative paths start at the working directory."""

    output_dir: Directory | None = None
    log_dir: Directory | None = None
    checkpoint_dir: Directory | None = None
    shared_output: bool = False


def _import_problem(name: str) -> str | None:
    if all(part.isidentifier() for part in name.split(".")):
        return None
    return f"{name!r} is not the name of a module; write it as `import` does, without a version"


ImportName = Annotated[str, check_entry(_import_problem)]


class EnvironmentSpec(FileModel):
    """Requirements on the workers' environment, checked by `gpujob check`."""

    packages: list[ImportName] = []
    required: list[VariableName] = []


class BudgetSpec(FileModel):
    """What a job may take before an alert, or a user within 30 days."""

    gpu_hours: float | None = Field(None, gt=0, allow_inf_nan=False)
    cost: float | None = Field(None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_a_limit(self) -> "BudgetSpec":
        if self.gpu_hours is None and self.cost is None:
            raise ValueError("it has no limit; set gpu_hours, cost or both")
        return self


TrackerName = Annotated[str, known_name("tracker", TRACKERS), Field(json_schema_extra={"enum": list(TRACKERS)})]


class JobSpec(FileModel):
    """A job file."""

    name: str = Field(min_length=1, max_length=200)
    workdir: Directory | None = None
    resources: ResourcesSpec = ResourcesSpec()
    workers: list[RoleSpec] = []
    model: ModelSpec | None = None
    backend: BackendSpec = BackendSpec()
    frontend: FrontendSpec | None = None
    benchmark: BenchmarkSpec | None = None
    readiness: ReadinessSpec = ReadinessSpec()
    container: ContainerSpec | None = None
    setup: SetupSpec = SetupSpec()
    secrets: list[VariableName] = []
    sweep: SweepSpec | None = None
    env: Variables = {}
    environment: EnvironmentSpec = EnvironmentSpec()
    inputs: list[str] = []
    resume: bool = False
    slurm: SlurmSpec = SlurmSpec()
    paths: PathsSpec = PathsSpec()
    patterns: PatternsSpec = PatternsSpec()
    progress: ProgressSpec = ProgressSpec()
    errors: list[ErrorSpec] = []
    verify: VerifySpec = VerifySpec()
    monitoring: MonitoringSpec = MonitoringSpec()
    alerts: AlertsSpec = AlertsSpec()
    budget: BudgetSpec | None = None
    on_end: list[TrackerName] = []

    @field_validator("errors")
    @classmethod
    def _named_once(cls, errors: list[ErrorSpec]) -> list[ErrorSpec]:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        names: set[str] = set()
        for index, error in enumerate(errors):
            name = error.name or error.pattern
            if name in names:
                message = f"the pattern {name!r} is listed twice; give each its own name"
                problems.append(((index,), message))
            names.add(name)
        if problems:
            raise combine_problems(problems, errors)
        return errors

    @model_validator(mode="after")
    def _roles(self) -> "JobSpec":
        roles = [workers.role for workers in self.workers]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"workers: the role {role!r} is listed twice; give each entry its own role")
        return self

    @model_validator(mode="after")
    def _secrets_have_no_value(self) -> "JobSpec":
        places = {"env": self.env, **{f"workers[{index}].env": entry.env for index, entry in enumerate(self.workers)}}
        twice = [
            f"{name} has a value in {place}; remove it there"
            for name in self.secrets
            for place, env in places.items()
            if name in env
        ]
        if twice:
            raise combine_problems([(("secrets",), message) for message in twice], self.secrets)
        return self

    def processes(self) -> Iterator[tuple[str, EngineRoleSpec]]:
        """Parts with options of programs, by key: the backend, its roles, front end and benchmark."""
        yield "backend", self.backend
        for role in SERVING_ROLES:
            yield f"backend.{role}", getattr(self.backend, role)
        for key, part in (("frontend", self.frontend), ("benchmark", self.benchmark)):
            if part is not None:
                yield key, part


class PricesSpec(FileModel):
    """List prices of a site."""

    currency: str = Field("", max_length=8)
    gpu_hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}


class ClusterSpec(FileModel):
    """A cluster file: defaults of a site or a user."""

    cluster: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: TimeLimit | None = None
    directives: Directives = {}
    gpus_per_node: int | None = Field(None, ge=0, le=64)
    gpu_type: GpuType | None = None
    cpus_per_node: int | None = Field(None, ge=1)
    network_interface: str | None = Field(None, min_length=1)
    models: dict[str, str] = {}
    containers: dict[str, str] = {}
    mounts: list[Mount] = []
    modules: list[EnvironmentModule] = []
    preamble: str | None = None
    logs_dir: Directory | None = None
    target_dir: Directory | None = None
    registry_dir: Directory | None = None
    listen_address: Address | None = None
    web_config_file: Directory | None = None
    metrics_access: Literal["open", "authenticated"] | None = None
    detail: Detail | None = None
    alerts: AlertThresholds = AlertThresholds()
    notify: NotifySpec = NotifySpec()
    prometheus_url: Url | None = None
    alertmanager_url: Url | None = None
    stack: StackSpec = StackSpec()
    prices: PricesSpec | None = None
    budgets: dict[str, BudgetSpec] = {}
    trusted_owners: list[str] = []

    def resolve_model(self, text: str) -> str:
        """Resolve an alias of a model; return any other text unchanged."""
        return self.models.get(text, text)

    def path_of_model(self, text: str) -> str:
        """The model as an engine takes it: a directory, or its bare name on a hub."""
        found = self.resolve_model(text)
        return found.removeprefix(HUB) if found.startswith(HUB) else os.path.expanduser(found)

    def resolve_image(self, text: str) -> str:
        """The image as a runtime takes it: a file, or a name in a registry."""
        return os.path.expanduser(self.containers.get(text, text))


def load_job(path: Path) -> JobSpec:
    """Load a job file. Raises ConfigError with every problem."""
    return parse_job(read_yaml_text(path), str(path))


def parse_job(text: str, source: str) -> JobSpec:
    """Parse the text of a job file. Raises ConfigError with every problem."""
    return parse_yaml_model(text, source, JobSpec, _missing_commands)


def read_job(path: Path) -> dict[str, JsonValue]:
    """Read a job file's YAML without checking its keys. Raises ConfigError."""
    body, twice = read_mapping(read_yaml_text(path), str(path))
    if twice:
        raise ConfigError(str(path), twice)
    return body or {}


def validate_job(body: Mapping[str, object], source: str) -> JobSpec:
    """Check the mapping of a job file. Raises ConfigError with every problem."""
    return validate_model(body, source, JobSpec, _missing_commands)


def _missing_commands(body: Mapping[str, object]) -> list[str]:
    """Report workers without a command, unless an engine supplies it, and a job without workers."""
    backend, resources, workers = body.get("backend"), body.get("resources"), body.get("workers")
    given = resources if isinstance(resources, dict) else {}
    if not workers and not any(given.get(f"{role}_workers") for role in SERVING_ROLES):
        if placed := [role for role in SERVING_ROLES if given.get(f"{role}_nodes")]:
            return [
                f"resources.{role}_workers: is missing, and {role}_nodes is {given[f'{role}_nodes']}; "
                "set how many workers run on them"
                for role in placed
            ]
        return ["workers: is missing; name a role with its command, or set resources.agg_workers"]
    is_engine = isinstance(backend, dict) and backend.get("type") in ENGINES
    return [
        f"workers[{index}].command: is missing"
        for index, entry in enumerate(workers if isinstance(workers, list) else ())
        if isinstance(entry, dict) and entry.get("command", "" if is_engine else None) is None
    ]


def load_cluster(environ: Mapping[str, str], workdir: Path) -> ClusterSpec:
    """Load the cluster file, or the defaults if there is none."""
    found = find_cluster_file(environ, workdir)
    if found is None:
        return ClusterSpec()
    cluster = parse_cluster(read_yaml_text(found.path), str(found.path))
    if cluster.trusted_owners and found.path != SYSTEM_FILE:
        raise ConfigError(str(found.path), [f"trusted_owners: only {SYSTEM_FILE} may have this key; leave it out"])
    return cluster


def parse_cluster(text: str, source: str) -> ClusterSpec:
    """Parse the text of a cluster file. Raises ConfigError with every problem."""
    return parse_yaml_model(text, source, ClusterSpec)


def with_cluster(spec: JobSpec, cluster: ClusterSpec) -> JobSpec:
    """The job with the cluster file's GPUs per node. A job without GPUs gets none."""
    if not (cluster.gpus_per_node and gpus_are_defaulted(spec)):
        return spec
    resources = spec.resources.model_copy(update={"gpus_per_node": cluster.gpus_per_node})
    return spec.model_copy(update={"resources": resources})


def gpus_are_defaulted(spec: JobSpec) -> bool:
    """Whether a job uses GPUs and leaves their number per node to the cluster file."""
    resources = spec.resources
    used = (
        spec.backend.type in ENGINES
        or any(workers.gpus for workers in spec.workers)
        or any(getattr(resources, f"{role}_workers") for role in SERVING_ROLES)
    )
    return used and "gpus_per_node" not in resources.model_fields_set


def cpus_of_full_nodes(spec: JobSpec, cluster: ClusterSpec) -> int | None:
    """All CPUs of a node, if the job sets none and takes all GPUs: no other job could use the rest.

    None otherwise. For exclusive nodes (``slurm.exclusive``), Slurm itself gives all CPUs.
    """
    resources = with_cluster(spec, cluster).resources
    whole = cluster.gpus_per_node and resources.gpus_per_node == cluster.gpus_per_node and not spec.slurm.exclusive
    return cluster.cpus_per_node if whole and resources.cpus_per_node is None else None
