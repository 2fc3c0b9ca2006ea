"""Job file and cluster file: what was asked for, checked as a whole.

Every problem of a file is reported at once, with its place and the cure; an
unknown key is an error with the nearest known name. Nothing here touches the
cluster or writes a file.
"""

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from exporter.derive.lexicon import AUTO
from exporter.derive.patterns import Kind, compile_all
from exporter.readers.packs import pack_names
from launcher.errors import ConfigError
from launcher.yamlfile import Spec, parse

CLUSTER_FILE = "gpujob.yaml"
CLUSTER_VARIABLE = "GPUJOB_CONFIG"

EXPORTER_NAMES = {"items_processed": "items", "batch_number": "batch"}
"""Common names of patterns that the exporter has under its own."""
PACKS = (AUTO, *pack_names())

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIRECTIVE = re.compile(r"[a-z][a-z0-9-]*")
_TIME_LIMIT = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?")
_MEMORY = re.compile(r"^\d+[KMGT]?$")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*):([0-9]{1,5})")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def parse_time_limit(text: str) -> float:
    """Seconds of a Slurm time limit: ``minutes``, ``min:sec``, ``h:min:sec``, ``days-h[:min[:sec]]`` (sbatch(1))."""
    match = _TIME_LIMIT.fullmatch(text)
    if not match:
        raise ValueError(f'{text!r} is not a time limit; write for example "04:00:00" or "2-00:00:00"')
    days, second, third = (int(part) if part is not None else None for part in match.group(1, 3, 4))
    first = int(match[2])
    if days is not None:
        hours, minutes, seconds = first, second or 0, third or 0
    elif third is not None:
        hours, minutes, seconds = first, second or 0, third
    else:
        hours, minutes, seconds = 0, first, second or 0
    total = ((days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds
    if total == 0:
        raise ValueError(f"{text!r} is no time at all; a job with it would wait for ever")
    return float(total)


def _time_text(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    if isinstance(value, int):
        # YAML reads an unquoted 04:00:00 as base 60
        raise ValueError(
            f'{value} is a number; write the time limit in quotes, for example "{value}" for minutes or "04:00:00"'
        )
    parse_time_limit(value)
    return value


TimeLimit = Annotated[str, BeforeValidator(_time_text)]


def _seconds(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if abs(value) > 1 << 53:
        raise ValueError("is far too large")
    return float(value)


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, lt=1e9)]
NotNegativeSeconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, lt=1e9)]


def _address(value: object) -> object:
    if isinstance(value, str):
        match = _ADDRESS.fullmatch(value)
        if not match or int(match[1]) > 65535:
            raise ValueError(f'{value!r} is not host:port; write for example ":0" or "127.0.0.1:9410"')
    return value


def _directory(value: object) -> object:
    if isinstance(value, str):
        try:
            Path(value).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{value!r}: {str(error)[:1].lower()}{str(error)[1:]}") from error
    return value


def _url(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
        raise ValueError(f'{value!r} is not the address of a server; write for example "http://prometheus:9090"')
    return value


Address = Annotated[str, BeforeValidator(_address)]
Url = Annotated[str, BeforeValidator(_url)]
Directory = Annotated[str, BeforeValidator(_directory)]


class Resources(_Model):
    """Nodes, and what the job asks for on each of them."""

    nodes: int = Field(1, ge=1, le=100_000, description="Nodes of the job.")
    gpus_per_node: int = Field(0, ge=0, le=64, description="GPUs asked for on each node.")
    cpus_per_node: int | None = Field(
        None, ge=1, description="CPUs asked for on each node; by default those of its workers and one more."
    )
    memory_per_node: str | None = Field(
        None, pattern=_MEMORY.pattern, description='Memory asked for on each node, for example "64G".'
    )


class Restart(_Model):
    """What happens when a worker of the role fails."""

    max: int = Field(0, ge=0, le=1000, description="Times a worker is started again.")
    backoff: NotNegativeSeconds = Field(10.0, description="Seconds before that, growing with each time.")


class Workers(_Model):
    """One role: ``count`` workers that run the same command."""

    role: str = Field("worker", description="Name of the role; its workers are ROLE_w0, ROLE_w1, ...")
    count: int = Field(1, ge=1, le=100_000)
    gpus: int = Field(0, ge=0, description="GPUs of one worker; more than a node has means whole nodes.")
    cpus: int = Field(1, ge=1, description="CPUs that one worker counts for.")
    command: str | list[str] = Field(
        description="Words as a list, or one text that is split into words like a shell does, without a shell."
    )
    shell: bool = Field(False, description="Run the command, a text, by `bash -c`.")
    env: dict[str, str] = Field({}, description="Environment of the worker, after that of the job.")
    critical: bool = Field(True, description="Whether the failure of one ends the job.")
    restart: Restart = Restart()

    @field_validator("role")
    @classmethod
    def _role(cls, role: str) -> str:
        if not _ROLE.fullmatch(role):
            raise ValueError(f"{role!r} is not a role; use a letter and then letters, digits, - or _, 32 at most")
        return role

    @model_validator(mode="after")
    def _words(self) -> "Workers":
        if self.shell and not isinstance(self.command, str):
            raise ValueError("command: with `shell: true` the command is one text, not a list")
        try:
            words = words_of(self)
        except ValueError as error:
            raise ValueError(f'command: "{self.command}" cannot be split into words: {error}') from error
        if not words or not words[0] or not "".join(words[-1:] if self.shell else words).strip():
            raise ValueError("command: the command is empty")
        return self

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        return _check_environment(env)


def _check_environment(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not _ENVIRONMENT_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for an environment variable")
    return env


Directives = dict[str, str | int | bool | None]

_TAKEN = {
    "output": "the run directory",
    "error": "the run directory",
    "array": "nobody yet: submit the points one by one",
    "nodes": "resources.nodes",
    "gpus-per-node": "resources.gpus_per_node",
    "gres": "resources.gpus_per_node",
    "job-name": "name",
    "chdir": "workdir",
    "time": "slurm.time_limit",
    "partition": "slurm.partition",
    "account": "slurm.account",
}


def _check_directives(directives: Directives) -> Directives:
    for name in directives:
        if not _DIRECTIVE.fullmatch(name):
            raise ValueError(f"{name!r} is not a long option of sbatch; write it without --")
        if name in _TAKEN:
            raise ValueError(f"{name!r} is given by {_TAKEN[name]}; leave it out here")
    return directives


class Slurm(_Model):
    """What sbatch is asked for, beyond the resources."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: TimeLimit | None = Field(None, description='For example "04:00:00".')
    directives: Directives = Field(
        {},
        description="Further options of sbatch by their long names; true or null for an option without a value.",
    )

    @field_validator("directives")
    @classmethod
    def _directives(cls, directives: Directives) -> Directives:
        return _check_directives(directives)


class Paths(_Model):
    """Where the job writes; null is the run directory. Relative paths count from the working directory."""

    output_dir: Directory | None = None
    log_dir: Directory | None = None
    checkpoint_dir: Directory | None = None


class Patterns(_Model):
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


def _parts_wrong(problems: Sequence[tuple[tuple[str | int, ...], str]], given: object) -> ValidationError:
    """One error that says what is wrong within a value: each problem with its place."""
    details: list[InitErrorDetails] = [
        {"type": PydanticCustomError("value_error", "{message}", {"message": message}), "loc": place, "input": given}
        for place, message in problems
    ]
    return ValidationError.from_exception_data("patterns", details)


def _pattern_problems(name: str, text: str, kind: Kind | None = None) -> list[str]:
    """What is wrong with one pattern."""
    return [problem.removeprefix(f"{name}: ") for problem in compile_all([(name, text)], kind)]


class ProgressOptions(_Model):
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
            raise _parts_wrong(problems, patterns)
        return patterns


class ErrorOptions(_Model):
    """One more error to look for in the logs."""

    pattern: str
    severity: Literal["critical", "warning", "info"] = "warning"
    name: str | None = Field(None, description="Label of the pattern; made from the pattern by default.")


class Monitoring(_Model):
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
    return _seconds(value)


def _per_item(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < 1e9:
        raise ValueError(f"{value} is not above 0 and below 1e9; write null where records are not to be counted")
    return _seconds(value)


Share = Annotated[float, BeforeValidator(_share), Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})]
PerItem = Annotated[
    float, BeforeValidator(_per_item), Field(json_schema_extra={"exclusiveMinimum": 0, "exclusiveMaximum": 1e9})
]


class Verify(_Model):
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


class Environment(_Model):
    """What the workers need around them, for `gpujob check`."""

    packages: list[str] = Field([], description="Python modules that the interpreter of the workers must find.")
    required: list[str] = Field([], description="Environment variables that must be set.")

    @field_validator("packages")
    @classmethod
    def _modules(cls, packages: list[str]) -> list[str]:
        for name in packages:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is not the name of a module; write it as `import` does, without a version")
        return packages

    @field_validator("required")
    @classmethod
    def _variables(cls, required: list[str]) -> list[str]:
        _check_environment(dict.fromkeys(required, ""))
        return required


class JobSpec(_Model):
    """A job file."""

    name: str = Field(min_length=1, max_length=200)
    workdir: Directory | None = Field(
        None, description="Where the workers run; by default where the command was given."
    )
    resources: Resources = Resources()
    workers: list[Workers] = Field(min_length=1)
    env: dict[str, str] = Field({}, description="Environment of every worker.")
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

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        return _check_environment(env)

    @field_validator("errors")
    @classmethod
    def _usable(cls, errors: list[ErrorOptions]) -> list[ErrorOptions]:
        problems: list[tuple[tuple[str | int, ...], str]] = []
        names: set[str] = set()
        for index, error in enumerate(errors):
            name = error.name or error.pattern
            if name in names:
                message = f"the pattern {name!r} is there more than once; give each a name of its own"
                problems.append(((index,), message))
            names.add(name)
            problems += [
                ((index, "pattern"), problem) for problem in _pattern_problems(name, error.pattern, Kind.ERROR)
            ]
        if problems:
            raise _parts_wrong(problems, errors)
        return errors

    @model_validator(mode="after")
    def _roles(self) -> "JobSpec":
        roles = [workers.role for workers in self.workers]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"workers: the role {role!r} is there more than once; give each entry its own role")
        return self


class ClusterSpec(_Model):
    """A cluster file: defaults of a site or a user."""

    cluster: str | None = Field(None, description="Name of the cluster in labels.")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: TimeLimit | None = None
    directives: Directives = {}
    logs_dir: Directory | None = Field(None, description="Where run directories are made; by default ./logs.")
    target_dir: Directory | None = Field(None, description="Directory that Prometheus watches for targets of jobs.")
    listen_address: Address | None = None
    prometheus_url: Url | None = Field(None, description="Prometheus of the site, for `gpujob check`.")
    alertmanager_url: Url | None = Field(None, description="Alertmanager of the site, for `gpujob check`.")

    @field_validator("directives")
    @classmethod
    def _directives(cls, directives: Directives) -> Directives:
        return _check_directives(directives)


def load_job(path: Path) -> JobSpec:
    """The job file at ``path``; raises ConfigError with every problem."""
    return _load(path, JobSpec)


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
    return ClusterSpec() if path is None else _load(path, ClusterSpec)


def _load(path: Path, model: type[Spec]) -> Spec:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"is not UTF-8 at byte {error.start}"]) from error
    return parse(text, str(path), model)


_SECRET = re.compile(r"(?i)(token|secret|passw|passphrase|credential|cookie|auth|api_?key|(?:^|_)key(?:_|$))")


def is_secret(name: str) -> bool:
    """Whether a value under this name is kept out of files that others read."""
    return bool(_SECRET.search(name))


def redacted(spec: JobSpec) -> dict[str, Any]:
    """The job as it was resolved, with the values of secret-looking variables left out."""
    body = spec.model_dump(mode="json")
    for place in (body, *body["workers"]):
        place["env"] = {name: "<redacted>" if is_secret(name) else value for name, value in place["env"].items()}
    return body


def words_of(workers: Workers) -> list[str]:
    """The command as words, before placeholders are filled in."""
    if isinstance(workers.command, list):
        return list(workers.command)
    return ["bash", "-c", workers.command] if workers.shell else shlex.split(workers.command)


def resolve_directory(text: str | None, workdir: Path) -> str | None:
    """An absolute directory, ``~`` expanded; None stays None."""
    return None if text is None else os.path.normpath(workdir / Path(text).expanduser())
