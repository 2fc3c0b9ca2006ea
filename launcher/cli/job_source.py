"""The job of a command: a job file, standard input, or a command line after ``--``, changed by options."""

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import click

from launcher.cli.about.completion import complete_files, complete_keys
from launcher.errors import ConfigError, ConfigErrors, LauncherError

if TYPE_CHECKING:
    from exporter.contract.records import JsonObject, JsonValue
    from launcher.planner.planned_job import JobText

COMMAND_LINE, STANDARD_INPUT = "command line", "standard input"  # names in messages
USAGE = 2  # exit status of wrong input
WORDS = "gpujob.words"  # key of click's context: the words after ``--``
OPTIONS_OF_PLACES = "gpujob.options"  # another: the options that set places, for messages
GIVEN_PLACES = "gpujob.given"  # another: the places that the options of this command set
WORKERS_PLACE = "workers[0]."
GPUS_PER_NODE = "resources.gpus_per_node"
MEMORY_PER_NODE = "resources.memory_per_node"
MOST_NAME = 200  # characters of a name, as in the job file

_SECTIONS = {
    **dict.fromkeys(("name",), "The job"),
    **dict.fromkeys(("workers[0]", "resources"), "Workers and resources"),
    **dict.fromkeys(("slurm",), "Slurm"),
    **dict.fromkeys(("paths", "patterns", "progress"), "Output and progress"),
}  # groups of options in the help, by the section of their keys
_INTERPRETERS = {".py": "python", ".sh": "bash"}  # of programs that somebody gives in place of a job file
_CODE_OPTION = re.compile(r"-[A-Za-z]*c")  # of shells and Python, alone or after other letters, as in `bash -lc`
_YAML_SUFFIXES = (".yaml", ".yml", ".json")
_MONITOR_CONFIG = re.compile(r"(?m)^job:")
_JOB_FILE = re.compile(r"(?m)^(?:name|workers|resources):")


class JobOption(NamedTuple):
    """An option that sets a key of the job file."""

    option: str
    place: str
    metavar: str  # `N` is a number
    help: str

    @property
    def parameter(self) -> str:
        """The name that click gives it."""
        return self.option[2:].replace("-", "_")


OPTIONS = (
    JobOption("--name", "name", "NAME", "Name of the job; by default that of its program."),
    JobOption("--workers", "workers[0].count", "N", "Number of workers that run the command."),
    JobOption("--gpus", "workers[0].gpus", "N", "GPUs of each worker."),
    JobOption("--cpus", "workers[0].cpus", "N", "CPUs of each worker."),
    JobOption("--nodes", "resources.nodes", "N", "Number of nodes."),
    JobOption("--gpus-per-node", GPUS_PER_NODE, "N", "GPUs to ask for on each node."),
    JobOption("--memory", MEMORY_PER_NODE, "SIZE", "Memory to ask Slurm for on each node, as in 64G."),
    JobOption("--time", "slurm.time_limit", "TIME", "Time limit on Slurm, as in 4h, 90m or 1-12:00:00."),
    JobOption("--partition", "slurm.partition", "NAME", "Slurm partition."),
    JobOption("--account", "slurm.account", "NAME", "Slurm account that is charged."),
    JobOption("--qos", "slurm.qos", "NAME", "Slurm quality of service."),
    JobOption("--output", "paths.output_dir", "DIR", "Directory of the output files."),
    JobOption("--output-pattern", "patterns.output", "GLOB", "Names of the output files."),
    JobOption(
        "--log-pattern", "patterns.logs", "GLOB", "Names of log files that the program writes into `paths.log_dir`."
    ),
    JobOption("--checkpoint-pattern", "patterns.checkpoints", "GLOB", "Names of the checkpoints."),
    JobOption("--total", "progress.total_items", "N", "Items of the whole job, as in 1e5."),
)
_PLACES = {option.place: option.option for option in OPTIONS}
_OF_WORKERS = tuple(place for place in _PLACES if place.startswith(WORKERS_PLACE))


class WordsCommand(click.Command):
    """A command that takes the command of a job's workers after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[WORDS], args = tuple(args[at + 1 :]), args[:at]
        return super().parse_args(ctx, args)


class JobCommand(WordsCommand):
    """A command for one job: a job file, or a command after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        ctx.params["job"] = _chosen_file(ctx, ctx.params["job"], ctx.params.pop("file"))
        return left

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_SECTIONS.values(), "Options")}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            place = "name" if param.name in ("file", "sets", "save") else ""
            place = next((option.place for option in OPTIONS if option.option in param.opts), place)
            if record is not None:
                groups[_SECTIONS.get(place.partition(".")[0], "Options")].append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def takes_job(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that make its ``job``, as text, and report errors in the words of these options.

    Its own option for names of nodes, ``hosts``, takes the place of ``--nodes``, and accepts a number too.
    """
    own = {param.name for param in getattr(function, "__click_params__", ())}
    options = tuple(option for option in OPTIONS if not (option.option == "--nodes" and "hosts" in own))

    @functools.wraps(function)
    def command(job: str | None, sets: tuple[str, ...], save: str | None, **rest: object) -> None:
        given = {option.place: rest.pop(option.parameter) for option in options}
        hosts = rest.get("hosts")
        if isinstance(hosts, tuple) and len(hosts) == 1 and hosts[0].isdecimal():
            given["resources.nodes"], rest["hosts"] = hosts[0], ()
        values = {place: _option_value(place, str(text)) for place, text in given.items() if text is not None}
        meta = click.get_current_context().meta
        words = meta.get(WORDS)
        meta[GIVEN_PLACES] = (*values, *(text.partition("=")[0] for text in sets))
        with option_words() as known:
            text = _read_job(job, words, values, sets)
            known.update(text.options)
            meta[OPTIONS_OF_PLACES] = text.options
            if save is not None:
                _save(text, save)
            try:
                function(job=text, **rest)
            except (LauncherError, SystemExit) as error:
                if save is not None and (isinstance(error, LauncherError) or error.code == USAGE):
                    _remove(save)  # of a job that was refused
                raise

    for option in reversed(options):
        kind = click.Path() if option.metavar == "DIR" else None
        command = click.option(option.option, metavar=option.metavar, type=kind, help=option.help)(command)
    command = click.option(
        "--save", metavar="FILE", shell_complete=complete_files, help="Write the job file that these options mean, too."
    )(command)
    command = click.option(
        "--set",
        "sets",
        metavar="KEY=VALUE",
        multiple=True,
        shell_complete=complete_keys,
        help="Set a key of the job file; the value is YAML.",
    )(command)
    command = click.option(
        "-f", "--file", metavar="JOB.YAML", shell_complete=complete_files, help="The job file; - is standard input."
    )(command)
    return click.argument("job", metavar="[JOB.YAML | -- COMMAND...]", nargs=-1, shell_complete=complete_files)(command)


def _chosen_file(ctx: click.Context, job: tuple[str, ...], file: str | None) -> str | None:
    """The job file that is named; None for a command after ``--``."""
    import shlex

    named = [*job, *([file] if file is not None else [])]
    example = f"gpujob {ctx.info_name} -- {shlex.join(job) if len(job) > 1 else 'python train.py'}"
    if len(job) > 1:
        raise click.UsageError(f"{len(job)} job files; a command comes after --, as in {example}", ctx)
    if len(named) > 1:
        raise click.UsageError(f"two job files: {' and '.join(named)}; leave one of them out", ctx)
    if WORDS in ctx.meta and named:
        raise click.UsageError(f"a job file, {named[0]}, and a command after --; leave one of them out", ctx)
    if WORDS not in ctx.meta and not named and not ctx.resilient_parsing:
        raise click.UsageError(f"no job; name a job file or a command, as in {example}", ctx)
    return named[0] if named else None


def _option_value(place: str, text: str) -> "JsonValue":
    """The value of an option: a number where the key has one, as far as it is one. Raises LauncherError."""
    if not text:
        raise LauncherError(f"{_PLACES[place]}: is empty; give a value or leave the option out")
    is_number = any(option.place == place and option.metavar == "N" for option in OPTIONS)
    return int(text) if is_number and re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _read_job(
    file: str | None, words: Sequence[str] | None, values: "Mapping[str, JsonValue]", sets: Sequence[str]
) -> "JobText":
    """The job as text. A file is read once, because it may be a pipe."""
    from launcher.jobfile.yamlfile import read_mapping
    from launcher.planner.planned_job import JobText
    from launcher.rundir.yaml_files import dump_yaml

    settings = dict(_parse_setting(text) for text in sets)
    options = _names_of_settings(settings)
    if file is None:
        if values.get(f"{WORKERS_PLACE}count") == 0:
            raise LauncherError("--workers: 0 must be greater than or equal to 1")
        given = {**values, **settings}
        body = job_of_command(words or (), given, _gpus_of_a_node() if f"{WORKERS_PLACE}gpus" in given else None)
        names = {**_PLACES, f"{WORKERS_PLACE}command": "COMMAND"}
        resources = body.get("resources")
        if GPUS_PER_NODE not in values and isinstance(resources, dict) and "gpus_per_node" in resources:
            names[GPUS_PER_NODE] = "--gpus"
        return JobText(COMMAND_LINE, dump_yaml(body), Path.cwd(), {**names, **options})
    job = _read_file(file)
    source = job.source
    if not values and not settings:
        return job
    found, problems = read_mapping(job.text, source)
    if problems:
        raise ConfigError(source, problems)
    changed: dict[str, JsonValue] = found or {}
    entries = changed.get("workers")
    if (
        isinstance(entries, list)
        and len(entries) > 1
        and (place := next((p for p in values if p in _OF_WORKERS), None))
    ):
        raise LauncherError(
            f"{_PLACES[place]}: {source} has {len(entries)} roles of workers; choose one: --set {place}={values[place]}"
        )
    _assign(changed, {**values, **settings})
    return JobText(source, dump_yaml(changed), job.job_dir, {**{place: _PLACES[place] for place in values}, **options})


def _gpus_of_a_node() -> int | None:
    """GPUs of a node in the cluster file; its problems are reported with the plan."""
    from launcher.jobfile.jobfile import load_cluster

    with suppress(LauncherError):
        return load_cluster(os.environ, Path.cwd()).gpus_per_node
    return None


def job_of_command(
    words: Sequence[str], values: "Mapping[str, JsonValue]", gpus_of_a_node: int | None = None
) -> "dict[str, JsonValue]":
    """The job file that a command and values by place mean. The job asks for the GPUs that its workers need.

    If they exceed ``gpus_of_a_node``, the plan chooses the number of nodes.
    """
    body: dict[str, JsonValue] = {"name": program_name(words), "workers": [{"command": list(words)}]}
    gpus, count, nodes = (
        values.get(place, 1) for place in (f"{WORKERS_PLACE}gpus", f"{WORKERS_PLACE}count", "resources.nodes")
    )
    if f"{WORKERS_PLACE}gpus" in values and isinstance(gpus, int) and isinstance(count, int) and isinstance(nodes, int):
        on_a_node = gpus * -(-count // nodes) if count >= nodes > 0 else -(-gpus * count // max(nodes, 1))
        if "resources.nodes" in values or not gpus_of_a_node or on_a_node <= gpus_of_a_node:
            values = {GPUS_PER_NODE: max(on_a_node, 0), **values}
    if values.get(f"{WORKERS_PLACE}shell") is True and len(words) == 1:
        values = {f"{WORKERS_PLACE}command": words[0], **values}
    _assign(body, values)
    return body


def program_name(words: Sequence[str]) -> str:
    """A name for a job: its script, its module, or else its program. The text after ``-c`` is code, not a name."""
    code = next((after for word, after in itertools.pairwise(words) if _CODE_OPTION.fullmatch(word)), None)
    script = next((Path(word).stem for word in words if word != code and Path(word).suffix in _INTERPRETERS), None)
    module = next((after for word, after in itertools.pairwise(words) if word == "-m"), None)
    return (script or module or (Path(words[0]).name if words else "") or "job")[:MOST_NAME]


def _parse_setting(text: str) -> "tuple[str, JsonValue]":
    """Key and value of ``--set``. Raises LauncherError."""
    from launcher.rundir.yaml_files import load_yaml
    from launcher.sweep.values import format_place, parse_place

    key, equals, value = text.partition("=")
    if not equals or not key or format_place(parse_place(key)) != key:
        raise LauncherError(f"--set {text}: is not KEY=VALUE; write for example --set workers[0].gpus=2")
    return key, cast("JsonValue", load_yaml(value, f"--set {key}"))


def _assign(body: "dict[str, JsonValue]", values: "JsonObject") -> None:
    from launcher.sweep.values import assign_value, index_role, parse_place

    problems = []
    for key, value in values.items():
        path, problem = index_role(parse_place(key), body)
        problem = f"{key}: {problem}" if problem is not None else assign_value(body, path, key, value)
        problems += [problem] if problem is not None else []
    if problems:
        raise ConfigError("--set", problems)


def _names_of_settings(keys: Iterable[str]) -> dict[str, str]:
    """The options that set these places, also by the sections of theirs that the job file does not know."""
    from launcher.jobfile.jobfile import JobSpec

    names = {key: f"--set {key}" for key in keys}
    sections = {re.split(r"[.[]", key)[0]: option for key, option in names.items()}
    return {**{place: option for place, option in sections.items() if place not in JobSpec.model_fields}, **names}


def _read_file(file: str) -> "JobText":
    """Read a job file. Raises LauncherError if it is not a job file."""
    from launcher.planner.planned_job import read_job_text

    this = click.get_current_context().info_name
    path = Path(file)
    if (words := _program_words(path)) is not None:
        raise LauncherError(f"{file} is a program, not a job file; write `gpujob {this} -- {words}`")
    job = read_job_text(Path("/dev/stdin"), STANDARD_INPUT) if file == "-" else read_job_text(path, file)
    if _MONITOR_CONFIG.search(job.text) and not _JOB_FILE.search(job.text):
        raise LauncherError(
            f"{file} describes a job that gpujob does not start, and is not a job file; "
            f"watch that job with `gpujob attach {file}`"
        )
    return job


def _program_words(path: Path) -> str | None:
    """The command for a program in the place of a job file, or None."""
    import shlex

    if path.suffix in _YAML_SUFFIXES:
        return None
    if path.suffix in _INTERPRETERS:
        return f"{_INTERPRETERS[path.suffix]} {shlex.quote(str(path))}"
    if not path.is_file():  # a pipe can be read only once
        return None
    try:
        with path.open("rb") as file:
            is_program = file.read(4).startswith((b"#!", b"\x7fELF"))
    except OSError:
        return None
    return shlex.quote(str(path) if "/" in str(path) else f"./{path}") if is_program else None


def _save(job: "JobText", path: str) -> None:
    """Write the job as a file that has no mistakes. Raises LauncherError if the file exists."""
    from launcher.jobfile.jobfile import parse_job

    if "sweep" not in job.text:
        parse_job(job.text, job.source)
    try:
        with open(path, "x", encoding="utf-8") as out:
            out.write(job.text)
    except FileExistsError as error:
        raise LauncherError(f"--save: {path} already exists; choose another name") from error
    except OSError as error:
        _remove(path)
        raise LauncherError(f"--save: {path} cannot be written: {error.strerror}") from error


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


@contextmanager
def option_words() -> "Iterator[dict[str, str]]":
    """Report problems of files in the words of the options that set their places, as far as there are some."""
    options: dict[str, str] = {}
    try:
        yield options
    except ConfigError as error:
        raise _reworded(error, options) from error
    except ConfigErrors as errors:
        raise ConfigErrors([_reworded(error, options) for error in errors.errors]) from errors


def warn(text: str) -> None:
    """Print a warning, in the words of the options of this command."""
    options = click.get_current_context().meta.get(OPTIONS_OF_PLACES, {})
    click.echo(f"gpujob: warning: {in_option_words(text, options)}", err=True)


def warn_of_options_for_slurm() -> None:
    """Warn that a run on this machine ignores the options of this command that are for Slurm alone.

    A job file may have such keys for its next submission; an option is meant for this run.
    """
    given: tuple[str, ...] = click.get_current_context().meta[GIVEN_PLACES]
    ignored = [place for place in given if place.startswith("slurm.") or place == MEMORY_PER_NODE]
    if not ignored:
        return
    advice = "; `timeout 1h gpujob run ...` stops a job after an hour" if "slurm.time_limit" in given else ""
    are = "is for Slurm and has" if len(ignored) == 1 else "are for Slurm and have"
    warn(f"{', '.join(ignored)} {are} no effect on this machine{advice}")


def _reworded(error: ConfigError, options: Mapping[str, str]) -> ConfigError:
    return ConfigError(error.source, [in_option_words(problem, options) for problem in error.problems])


def in_option_words(text: str, options: Mapping[str, str]) -> str:
    """Name the option instead of the place that it sets: ``--gpus`` for ``workers[0].gpus``."""
    names = dict(options)
    for place, option in options.items():
        names[re.sub(r"^workers\[0\]", "workers (worker)", place)] = option
        if "_" in (key := place.rpartition(".")[2]):  # messages name such a key without its section
            names.setdefault(key, option)
    if not names:
        return text
    longest_first = sorted(names, key=len, reverse=True)
    # a word such as `name` is a key only where a place stands
    words = [re.escape(name) if re.search(r"[._]", name) else rf"(?:^|(?<=: )){name}(?=: )" for name in longest_first]
    place = rf"(?<![\w.{{\]])(?:{'|'.join(words)})(?![\w\[}}])"
    # the keys that a message lists as known, or quotes as unknown, are keys
    return re.sub(rf'\(known: [^)]*\)|unknown key "[^"]*"|{place}', lambda match: names.get(match[0], match[0]), text)
