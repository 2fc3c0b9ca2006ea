"""Job file and cluster file: what was asked for, checked as a whole.

Every problem of a file is reported at once, with its place and the cure; an
unknown key is an error with the nearest known name. Nothing here touches the
cluster or writes a file.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from exporter.derive.lexicon import AUTO
from exporter.derive.patterns import Kind, compile_all
from exporter.readers.packs import pack_names
from launcher.errors import ConfigError
from launcher.spec_resources import SERVING_ROLES, Resources, Workers
from launcher.spec_serving import BackendSpec, BenchmarkSpec, FrontendSpec, ModelSpec, ReadinessSpec
from launcher.spec_slurm import (
    Container,
    Directives,
    Setup,
    Slurm,
    check_directives,
    check_modules,
    check_mounts,
)
from launcher.spec_sweep import SweepSpec
from launcher.spec_types import (
    Address,
    Directory,
    Model,
    NotNegativeSeconds,
    Seconds,
    TimeLimit,
    Url,
    Variables,
    as_float,
    check_each,
    parts_wrong,
    variable_problem,
)
from launcher.yamlfile import parse, read_mapping, validate

CLUSTER_FILE = "gpujob.yaml"
CLUSTER_VARIABLE = "GPUJOB_CONFIG"

EXPORTER_NAMES = {"items_processed": "items", "batch_number": "batch"}
"""Common names of patterns that the exporter has under its own."""
PACKS = (AUTO, *pack_names())


class Paths(Model):
    """Where the job writes; null is the run directory. Relative paths count from the working directory."""

    output_dir: Directory | None = None
    log_dir: Directory | None = None
    checkpoint_dir: Directory | None = None


class Patterns(Model):
    """Globs of file names."""

    output: str | None = "output_worker_*.json*"
    logs: str | None = "worker_*.log"
    checkpoints: str | None = "checkpoint_*"

    @field_validator("output", "logs", "checkpoints")
    @classmethod
    def _plain(cls, pattern: str | None) -> str | None:
        if pattern is not None and ("/" in pattern or not pattern):
            raise ValueError(f"{pattern!r} is not a pattern of file names; directories go into `paths`")
        return pattern


def _pack(name: object) -> object:
    if isinstance(name, str) and name not in PACKS:
        near = difflib.get_close_matches(name, PACKS, 1, 0.5)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'unknown pack "{name}"{hint} (known: {", ".join(PACKS)})')
    return name


PackName = Annotated[str, BeforeValidator(_pack), Field(json_schema_extra={"enum": list(PACKS)})]


def _pattern_problems(name: str, text: str, kind: Kind | None = None) -> list[str]:
    """What is wrong with one pattern."""
    return [problem.removeprefix(f"{name}: ") for problem in compile_all([(name, text)], kind)]


class ProgressOptions(Model):
    """How progress is read from the logs."""

    total_items: int | None = Field(None, ge=1, description="Items of the whole job.")
    total_epochs: int | None = Field(None, ge=1, description="Epochs of each worker, where its log does not say.")
    total_steps: int | None = Field(None, ge=1, description="Steps of each worker, where its log does not say.")
    pack: PackName = Field(AUTO, description="Whose lines the logs hold; `auto` finds it out from them.")
    patterns: dict[str, str] = Field({}, description="Regular expressions by name, over those of the pack.")
    sample: str | list[str] | None = Field(
        None, description="A line of the log, some lines, or a file of them, in which a position must be found."
    )

    @field_validator("patterns")
    @classmethod
    def _usable(cls, patterns: dict[str, str]) -> dict[str, str]:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        names: dict[str, str] = {}
        for name, text in patterns.items():
            meant = EXPORTER_NAMES.get(name, name)
            if (other := names.setdefault(meant, name)) != name:
                problems.append(((name,), f'is another word for "{other}", which is there too; leave one of them out'))
            problems += [((name,), problem) for problem in _pattern_problems(meant, text)]
        if problems:
            raise parts_wrong(problems, patterns)
        return patterns


class ErrorOptions(Model):
    """One more error to look for in the logs."""

    pattern: str
    severity: Literal["critical", "warning", "info"] = "warning"
    name: str | None = Field(None, description="Label of the pattern; made from the pattern by default.")

    @field_validator("pattern")
    @classmethod
    def _usable(cls, pattern: str) -> str:
        if problems := _pattern_problems("pattern", pattern, Kind.ERROR):
            raise parts_wrong([((), problem) for problem in problems], pattern)
        return pattern


class Monitoring(Model):
    """How the job is watched. Times in seconds."""

    enabled: bool = Field(True, description="Whether sidecars are started at all.")
    check_interval: Seconds = 5.0
    launch_timeout: Seconds = 60.0
    stall_timeout: Seconds = 300.0
    checkpoint_interval: Seconds | None = Field(
        None, description="Seconds between two checkpoints; learned from the files by default."
    )
    linger: NotNegativeSeconds = Field(
        30.0, description="How long a sidecar that is being scraped waits for the scrape of its final values."
    )
    gpu_metrics: bool = Field(
        False,
        description="Whether utilization, memory, power and temperature of the GPUs are also written to "
        "gpu_metrics.csv in the output directory.",
    )
    listen_address: Address | None = Field(None, description="host:port of the sidecars; port 0 picks a free one.")


def _share(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value <= 1:
        percent = f"; for {value:g} % write {value / 100:g}" if 1 < value <= 100 else ""
        raise ValueError(f"{value} is no share: it is above 0 and at most 1{percent}")
    return as_float(value)


def _per_item(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < 1e9:
        raise ValueError(f"{value} is not above 0 and below 1e9; write null where records are not to be counted")
    return as_float(value)


Share = Annotated[float, BeforeValidator(_share), Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})]
PerItem = Annotated[
    float, BeforeValidator(_per_item), Field(json_schema_extra={"exclusiveMinimum": 0, "exclusiveMaximum": 1e9})
]


class Verify(Model):
    """What the work must come to: a job that has ended well with less of it is no success."""

    complete_share: Share = Field(0.99, description="Share of progress.total_items that is enough.")
    outputs: int | None = Field(
        None,
        ge=1,
        description="Files of patterns.output at least; by default one of each worker, where names tell whose it is.",
    )
    records_per_item: PerItem | None = Field(
        1.0, description="Records in the output files for each item; null when they are not to be counted."
    )
    checksums: bool = Field(
        False, description="Whether SHA-256 sums of the output files are written to checksums.txt in the run directory."
    )


class Environment(Model):
    """What the workers need around them, for `gpujob check`."""

    packages: list[str] = Field([], description="Python modules that the interpreter of the workers must find.")
    required: list[str] = Field([], description="Environment variables that must be set.")

    @field_validator("packages")
    @classmethod
    def _modules(cls, packages: list[str]) -> list[str]:
        wrong = "is not the name of a module; write it as `import` does, without a version"
        return check_each(
            packages,
            lambda name: None if all(part.isidentifier() for part in name.split(".")) else f"{name!r} {wrong}",
        )

    @field_validator("required")
    @classmethod
    def _variables(cls, required: list[str]) -> list[str]:
        return check_each(required, variable_problem)


class JobSpec(Model):
    """A job file."""

    name: str = Field(min_length=1, max_length=200)
    workdir: Directory | None = Field(
        None, description="Where the workers run; by default where the command was given."
    )
    resources: Resources = Resources()
    workers: list[Workers] = Field([], description="Roles; those of `resources.*_workers` need no entry here.")
    model: ModelSpec | None = Field(None, description="The model that the backend serves.")
    backend: BackendSpec = BackendSpec()
    frontend: FrontendSpec | None = Field(None, description="What stands before the workers of a serving job.")
    benchmark: BenchmarkSpec | None = Field(None, description="What the job does once its workers are ready.")
    readiness: ReadinessSpec = ReadinessSpec()
    container: Container | None = Field(None, description="Container in which workers run.")
    setup: Setup = Setup()
    secrets: list[str] = Field([], description="Variables of the submitting environment that workers need, by name.")
    sweep: SweepSpec | None = None
    env: Variables = Field({}, description="Environment of every worker.")
    environment: Environment = Environment()
    inputs: list[str] = Field(
        [], description="Files and globs that the job reads, from the working directory; {rank} names one per worker."
    )
    resume: bool = Field(False, description="Whether the job goes on where files in its output directory end.")
    slurm: Slurm = Slurm()
    paths: Paths = Paths()
    patterns: Patterns = Patterns()
    progress: ProgressOptions = ProgressOptions()
    errors: list[ErrorOptions] = []
    verify: Verify = Verify()
    monitoring: Monitoring = Monitoring()

    @field_validator("secrets")
    @classmethod
    def _secrets(cls, secrets: list[str]) -> list[str]:
        return check_each(secrets, variable_problem)

    @field_validator("errors")
    @classmethod
    def _named_once(cls, errors: list[ErrorOptions]) -> list[ErrorOptions]:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        names: set[str] = set()
        for index, error in enumerate(errors):
            name = error.name or error.pattern
            if name in names:
                message = f"the pattern {name!r} is there more than once; give each a name of its own"
                problems.append(((index,), message))
            names.add(name)
        if problems:
            raise parts_wrong(problems, errors)
        return errors

    @model_validator(mode="after")
    def _roles(self) -> "JobSpec":
        roles = [workers.role for workers in self.workers]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"workers: the role {role!r} is there more than once; give each entry its own role")
        return self

    @model_validator(mode="after")
    def _secrets_have_no_value(self) -> "JobSpec":
        places = {"env": self.env, **{f"workers[{index}].env": entry.env for index, entry in enumerate(self.workers)}}
        twice = [
            f"{name} has a value in {place}; take it away there"
            for name in self.secrets
            for place, env in places.items()
            if name in env
        ]
        if twice:
            raise parts_wrong([(("secrets",), message) for message in twice], self.secrets)
        return self


class ClusterSpec(Model):
    """A cluster file: defaults of a site or a user."""

    cluster: str | None = Field(None, description="Name of the cluster in labels.")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: TimeLimit | None = None
    directives: Directives = {}
    gpus_per_node: int | None = Field(
        None, ge=0, le=64, description="GPUs of a node, where resources.gpus_per_node is left out."
    )
    network_interface: str | None = Field(
        None,
        min_length=1,
        description="Interface whose addresses the workers use for each other; host names without one.",
    )
    models: dict[str, str] = Field({}, description="Aliases of models: a directory, or hf:ORGANIZATION/NAME.")
    containers: dict[str, str] = Field({}, description="Aliases of container images: a file, or what a registry has.")
    mounts: list[str] = Field([], description="Mounts of every container, before those of the job.")
    modules: list[str] = Field([], description="Environment modules of every job, before those of the job.")
    preamble: str | None = Field(None, description="Lines of shell in every batch script, before those of the job.")
    logs_dir: Directory | None = Field(None, description="Where run directories are made; by default ./logs.")
    target_dir: Directory | None = Field(None, description="Directory that Prometheus watches for targets of jobs.")
    listen_address: Address | None = None
    prometheus_url: Url | None = Field(None, description="Prometheus of the site, for `gpujob check`.")
    alertmanager_url: Url | None = Field(None, description="Alertmanager of the site, for `gpujob check`.")

    @field_validator("directives")
    @classmethod
    def _directives(cls, directives: Directives) -> Directives:
        return check_directives(directives)

    @field_validator("modules")
    @classmethod
    def _modules(cls, modules: list[str]) -> list[str]:
        return check_modules(modules)

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, mounts: list[str]) -> list[str]:
        return check_mounts(mounts)


def load_job(path: Path) -> JobSpec:
    """The job file at ``path``; raises ConfigError with every problem."""
    return parse_job(_read(path), str(path))


def parse_job(text: str, source: str) -> JobSpec:
    """The job file ``text``; raises ConfigError with every problem."""
    return parse(text, source, JobSpec, _no_commands)


def read_job(path: Path) -> dict[str, Any]:
    """The job file at ``path`` as its YAML says it, not yet checked; raises ConfigError."""
    body, twice = read_mapping(_read(path), str(path))
    if twice:
        raise ConfigError(str(path), twice)
    return body or {}


def check_job(body: dict[str, Any], source: str) -> JobSpec:
    """The job that a mapping of a job file's keys stands for; raises ConfigError with every problem."""
    return validate(body, source, JobSpec, _no_commands)


ENGINES = ("sglang", "vllm", "trtllm")
"""Backends that bring the command of their workers."""


def _no_commands(body: Mapping[str, Any]) -> list[str]:
    """Workers that have no command, where no backend gives them one, and a job without any."""
    backend, resources, workers = body.get("backend"), body.get("resources"), body.get("workers", [])
    if isinstance(backend, dict) and backend.get("type") in ENGINES:
        workers = [{"command": "", **entry} if isinstance(entry, dict) else entry for entry in workers or ()]
    by_role = isinstance(resources, dict) and any(resources.get(f"{role}_workers") for role in SERVING_ROLES)
    if not workers and not by_role:
        given = resources if isinstance(resources, dict) else {}
        if placed := [role for role in SERVING_ROLES if given.get(f"{role}_nodes")]:
            return [
                f"resources.{role}_workers: is missing beside {role}_nodes: {given[f'{role}_nodes']}; "
                "say how many workers run on them"
                for role in placed
            ]
        return ["workers: is missing; name a role with its command, or say resources.agg_workers"]
    entries = enumerate(workers) if isinstance(workers, list) else ()
    return [
        f"workers[{index}].command: is missing"
        for index, entry in entries
        if isinstance(entry, dict) and entry.get("command") is None
    ]


def find_cluster_file(environ: Mapping[str, str], workdir: Path) -> Path | None:
    """The cluster file that counts: the one in ``GPUJOB_CONFIG``, in or above the working directory, the user's."""
    if named := environ.get(CLUSTER_VARIABLE):
        return Path(named)
    places = [folder / CLUSTER_FILE for folder in (workdir, *workdir.parents)]
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else None)
    if home:
        places.append(Path(home, "gpujob", "config.yaml"))
    return next((place for place in places if _is_file(place)), None)


def _is_file(path: Path) -> bool:
    """Whether there is a file; somebody else's directory that may not be looked into has none for us."""
    try:
        return path.is_file()
    except OSError:
        return False


def load_cluster(environ: Mapping[str, str], workdir: Path) -> ClusterSpec:
    """The cluster file, or its defaults when there is none."""
    path = find_cluster_file(environ, workdir)
    return ClusterSpec() if path is None else parse_cluster(_read(path), str(path))


def parse_cluster(text: str, source: str) -> ClusterSpec:
    """The cluster file ``text``; raises ConfigError with every problem."""
    return parse(text, source, ClusterSpec)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"is not UTF-8 at byte {error.start}"]) from error


_SECRET = re.compile(r"(?i)(token(?!iz)|secret|passw|passphrase|credential|cookie|auth|api_?key|(?:^|_)key(?:_|$))")
_SECRET_OPTION = re.compile(r"(?i)(?:^|[-_.])(token|secret|passw\w*|passphrase|credentials?|cookie|auth|key)$")
"""Options count tokens and name tokenizers, so only their last word tells."""
_HARMLESS = re.compile(r"(?i)|true|false|yes|no|on|off|none|[-+.\d]+|[/~].*")
REDACTED = "<redacted>"


def is_secret(name: str) -> bool:
    """Whether a value under this name is kept out of files that others read."""
    return bool(_SECRET.search(name))


def is_harmless(value: str) -> bool:
    """Whether a value is no secret, whatever it is called: ``TOKENIZERS_PARALLELISM=false``, a number, a path."""
    return bool(_HARMLESS.fullmatch(value))


def redacted(spec: JobSpec) -> dict[str, Any]:
    """The job as it was resolved, with the values of secret-looking variables and options left out."""
    body: dict[str, Any] = _redacted(spec.model_dump(mode="json"))
    return body


def _redacted(value: Any, within: str = "") -> Any:
    """``value`` without what is secret by its name in an ``env``, ``args``, ``config`` or a sweep."""
    if isinstance(value, list):
        return [_redacted(inner, within) for inner in value]
    if not isinstance(value, dict):
        return value
    body: dict[str, Any] = {}
    for name, inner in value.items():
        last = name.rpartition(".")[2]
        variable = within == "env" or f".{name}".endswith(f".env.{last}")
        hidden = is_secret(last) if variable else bool(_SECRET_OPTION.search(last))
        if within and hidden and isinstance(inner, str | list):
            body[name] = REDACTED
        else:
            kept = within if within in ("config", "sweep") else ""
            body[name] = _redacted(inner, name if name in ("env", "args", "config", "sweep") else kept)
    return body


def with_cluster(spec: JobSpec, cluster: ClusterSpec) -> JobSpec:
    """The job with what the cluster file says of nodes. A job without GPUs is given none of them."""
    if not (cluster.gpus_per_node and gpus_are_defaulted(spec)):
        return spec
    resources = spec.resources.model_copy(update={"gpus_per_node": cluster.gpus_per_node})
    return spec.model_copy(update={"resources": resources})


def gpus_are_defaulted(spec: JobSpec) -> bool:
    """Whether a job uses GPUs and leaves it to the cluster file how many a node has."""
    resources = spec.resources
    used = (
        spec.backend.type in ENGINES
        or any(workers.gpus for workers in spec.workers)
        or any(getattr(resources, f"{role}_workers") for role in SERVING_ROLES)
    )
    return used and "gpus_per_node" not in resources.model_fields_set


def resolve_directory(text: str | None, workdir: Path) -> str | None:
    """An absolute directory, ``~`` expanded; None stays None."""
    return None if text is None else os.path.normpath(workdir / Path(text).expanduser())
