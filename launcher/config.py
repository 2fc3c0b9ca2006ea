"""Job file and cluster file: what was asked for, checked as a whole.

Every problem of a file is reported at once, with its place and the cure; an
unknown key is an error with the nearest known name. Nothing here touches the
cluster or writes a file.
"""

import difflib
import os
import re
import shlex
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from launcher.errors import ConfigError

CLUSTER_FILE = "gpujob.yaml"
CLUSTER_VARIABLE = "GPUJOB_CONFIG"

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIRECTIVE = re.compile(r"[a-z][a-z0-9-]*")
_TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_MEMORY = re.compile(r"\d+[KMGT]?")


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
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, lt=1e9)]
NotNegativeSeconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, lt=1e9)]


def _regex(value: object) -> object:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
    return value


Regex = Annotated[str, BeforeValidator(_regex)]


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

    @field_validator("command")
    @classmethod
    def _command(cls, command: str | list[str]) -> str | list[str]:
        try:
            words = shlex.split(command) if isinstance(command, str) else command
        except ValueError as error:
            raise ValueError(f"{command!r} cannot be split into words: {error}") from error
        if not words or not words[0]:
            raise ValueError("the command is empty")
        if any("\0" in word for word in words):
            raise ValueError("a command cannot hold a NUL character")
        return command

    @model_validator(mode="after")
    def _shell_text(self) -> "Workers":
        if self.shell and not isinstance(self.command, str):
            raise ValueError("with `shell: true` the command is one text, not a list")
        return self

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        return _check_environment(env)


def _check_environment(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _ENVIRONMENT_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a NUL character")
    return env


class Slurm(_Model):
    """What sbatch is asked for, beyond the resources."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: TimeLimit | None = Field(None, description='For example "04:00:00".')
    directives: dict[str, str | int | bool | None] = Field(
        {},
        description="Further options of sbatch by their long names; true or null for an option without a value.",
    )

    @field_validator("directives")
    @classmethod
    def _directives(cls, directives: dict[str, str | int | bool | None]) -> dict[str, str | int | bool | None]:
        taken = {
            "output": "the run directory",
            "error": "the run directory",
            "nodes": "resources.nodes",
            "gpus-per-node": "resources.gpus_per_node",
            "job-name": "name",
            "chdir": "workdir",
            "time": "slurm.time_limit",
            "partition": "slurm.partition",
            "account": "slurm.account",
        }
        for name in directives:
            if not _DIRECTIVE.fullmatch(name):
                raise ValueError(f"{name!r} is not a long option of sbatch; write it without --")
            if name in taken:
                raise ValueError(f"{name!r} is given by {taken[name]}; leave it out here")
        return directives


class Paths(_Model):
    """Where the job writes; null is the run directory. Relative paths count from the working directory."""

    output_dir: str | None = None
    log_dir: str | None = None
    checkpoint_dir: str | None = None


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


class ProgressOptions(_Model):
    """How progress is read from the logs."""

    total_items: int | None = Field(None, ge=1, description="Items of the whole job.")
    pack: Literal["auto", "generic"] = "auto"
    patterns: dict[str, Regex] = Field({}, description="Regular expressions by name, over those of the pack.")


class ErrorOptions(_Model):
    """One more error to look for in the logs."""

    pattern: Regex
    severity: Literal["critical", "warning", "info"] = "warning"
    name: str | None = Field(None, description="Label of the pattern; made from the pattern by default.")


class Monitoring(_Model):
    """How the job is watched. Times in seconds."""

    enabled: bool = Field(True, description="Whether sidecars are started at all.")
    check_interval: Seconds = 5.0
    launch_timeout: Seconds = 60.0
    stall_timeout: Seconds = 300.0
    linger: NotNegativeSeconds = Field(
        30.0, description="How long a sidecar that is being scraped waits for the scrape of its final values."
    )
    listen_address: str | None = Field(None, description="host:port of the sidecars; port 0 picks a free one.")


class JobSpec(_Model):
    """A job file."""

    name: str = Field(min_length=1, max_length=200)
    workdir: str | None = Field(None, description="Where the workers run; by default where the command was given.")
    resources: Resources = Resources()
    workers: list[Workers] = Field(min_length=1)
    env: dict[str, str] = Field({}, description="Environment of every worker.")
    slurm: Slurm = Slurm()
    paths: Paths = Paths()
    patterns: Patterns = Patterns()
    progress: ProgressOptions = ProgressOptions()
    errors: list[ErrorOptions] = []
    monitoring: Monitoring = Monitoring()

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        return _check_environment(env)

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if "\0" in name:
            raise ValueError("a name cannot hold a NUL character")
        return name

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
    directives: dict[str, str | int | bool | None] = {}
    logs_dir: str | None = Field(None, description="Where run directories are made; by default ./logs.")
    target_dir: str | None = Field(None, description="Directory that Prometheus watches for targets of jobs.")
    listen_address: str | None = None


def load_job(path: Path) -> JobSpec:
    """The job file at ``path``; raises ConfigError with every problem."""
    return _load(path, JobSpec)


def find_cluster_file(environ: Mapping[str, str], workdir: Path) -> Path | None:
    """The cluster file that counts: the one in ``GPUJOB_CONFIG``, in or above the working directory, the user's."""
    if named := environ.get(CLUSTER_VARIABLE):
        return Path(named)
    for folder in (workdir, *workdir.parents):
        if (folder / CLUSTER_FILE).is_file():
            return folder / CLUSTER_FILE
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else None)
    if home and Path(home, "gpujob", "config.yaml").is_file():
        return Path(home, "gpujob", "config.yaml")
    return None


def load_cluster(environ: Mapping[str, str], workdir: Path) -> ClusterSpec:
    """The cluster file, or its defaults when there is none."""
    path = find_cluster_file(environ, workdir)
    return ClusterSpec() if path is None else _load(path, ClusterSpec)


Spec = typing.TypeVar("Spec", bound=_Model)


def _load(path: Path, model: type[Spec]) -> Spec:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"is not UTF-8 at byte {error.start}"]) from error
    return parse(text, str(path), model)


def parse(text: str, source: str, model: type[Spec]) -> Spec:
    """The YAML ``text`` as a ``model``; raises ConfigError with every problem."""
    try:
        body = yaml.load(text, Loader=_UniqueKeys)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(source, [f"{place}not YAML: {getattr(error, 'problem', None) or error}"]) from error
    if body is None:
        body = {}
    if not isinstance(body, dict):
        raise ConfigError(source, [f"holds a {type(body).__name__}, not a mapping of keys to values"])
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise ConfigError(source, [_problem(dict(entry), model) for entry in error.errors()]) from error


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings say a key once: of two, the library would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _problem(error: dict[str, Any], model: type[BaseModel]) -> str:
    location = [part for part in error["loc"] if part not in ("str", "list[str]", "int", "bool")]
    place, kind, value = _place(location), error["type"], error.get("input")
    if kind == "extra_forbidden":
        known = _known_names(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, 1, 0.5)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        return f'{place}: unknown key "{location[-1]}"{hint} (known: {", ".join(sorted(known))})'
    if kind == "missing":
        return f"{place}: is missing"
    if kind in _EXPECTED:
        cure = ""
        if kind == "string_type" and not isinstance(value, dict | list):
            cure = f'; write it in quotes: "{_yaml_word(value)}"'
        return f"{place}: {_shown(value)} is not {_EXPECTED[kind]}{cure}"
    if kind == "literal_error":
        expected = str(error["ctx"]["expected"]).replace("'", '"')
        return f"{place}: {_shown(value)} is not one of {expected}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if kind == "value_error":
        return f"{place}: {message}" if place else message
    return f"{place}: {_shown(value)}: {message[:1].lower()}{message[1:]}"


def _yaml_word(value: object) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )


def _shown(value: object) -> str:
    text = (
        f'"{value}"' if isinstance(value, str) else _yaml_word(value) if isinstance(value, bool | None) else repr(value)
    )
    return text if len(text) <= 80 else f"{text[:77]}..."


def _place(location: Sequence[int | str]) -> str:
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return place


def _known_names(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    kind: Any = model
    for part in location:
        if isinstance(part, int):
            kind = typing.get_args(kind)[0]
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[part].annotation
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


_SECRET = re.compile(r"(?i)(token|secret|passw|credential|api_?key|private_?key|auth)")


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
