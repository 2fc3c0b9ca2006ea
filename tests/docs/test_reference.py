"""Pages generated from the code. ``--update-golden`` writes them; otherwise they are compared."""

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click
import pytest
import yaml

from exporter import cli as exporter_cli
from exporter.alerts.receiver import FAMILIES as RECEIVER_FAMILIES
from exporter.collecting.families import Family
from exporter.hub.page.series import FAMILIES as HUB_FAMILIES
from exporter.launch.checks import LEVELS
from exporter.logs.packs_reader import read_packs
from exporter.workers.exit_reason import REASONS
from launcher.cli.main import commands
from launcher.jobfile.keys import Key, as_yaml, cluster_keys, job_keys
from launcher.plan.placeholders import VARIABLES
from tests.docs.man_page import man_page
from tests.docs.pages import REFERENCE, ROOT
from tests.docs.redaction_page import redaction_page
from tests.support.exporter import declared_families
from tests.support.record_schema import PUBLISHED, problems, published_schema

UPDATE = "pytest tests/docs/test_reference.py --update-golden"
GENERATED = f"<!-- Written by `{UPDATE}`: change the code or that test, not this page. -->\n"
BEGIN, END = "<!-- generated: packs -->\n", "<!-- end -->\n"
LEVEL_OF_A_PACK = ("any program", "a library", "a framework", "one program")

JOB_FILE = """\
# Job file

A job file is a YAML file that describes one job. Only `name` and the workers are required.
`gpujob init` writes a first job file that runs as it is, and `gpujob check` tests yours. An unknown key is an error.

`gpujob explain KEY` prints an entry of this page in the terminal.
`gpujob schema` prints the JSON Schema of the file for your editor.

- `[]` in a key stands for each entry of a list.
- Sections have no default of their own: each of their keys has one.
- Each example is a part of a job file.
- Relative paths are relative to the current directory, or to `workdir` if it is set.
- Defaults for all jobs of a site belong in the [cluster file](cluster-file.md).
- Limits of the file: 1 MiB, 40,000 keys and values (those of an anchor count for each alias), 64 levels, and 128 KiB
  for a text, which is what Linux passes to a program in one argument or variable.

"""
PLACEHOLDERS = """\
## Placeholders

Each process has these values as placeholders and as environment variables. `{{rank}}` gives the text `{rank}`.

- [Topology](topology.md#placeholders-of-hosts) explains them, and lists the placeholders of hosts.
- [Ports](ports.md#placeholders) lists the placeholders of ports.
- All other variables are under [topology](topology.md#variables) and [serving](serving.md#variables).

"""
CLUSTER_FILE = """\
# Cluster file

A cluster file is a YAML file with the defaults of a site or of a user. All keys are optional, and so is the file.

gpujob takes the first file that it finds:

1. the file that the environment variable `GPUJOB_CONFIG` names
2. `gpujob.yaml` in the working directory or in a directory above it
3. `gpujob/config.yaml` in `$XDG_CONFIG_HOME`, by default `~/.config/gpujob/config.yaml`
4. `/etc/gpujob/config.yaml`, the file of the system

`gpujob plan`, `check`, `submit` and `run` print which one counts, and why.

A file that gpujob finds must belong to you, to root or to one of `trusted_owners`, and so must its directory.
If anybody else can write one of them, gpujob stops before it does anything. `/tmp` is such a directory.
Write access of a group counts too, unless it is the owner's own group with the owner's name and no other members.
The same rules hold for `setup.script` and for the job file of a sweep that is resumed.
A job file must belong to one of these owners too, who alone may be able to write it; its directory does not count.
The file that `GPUJOB_CONFIG` names may belong to any user, but only that user and root may be able to write it.
Its directory must belong to that user, to you or to root, and likewise be writable by nobody else.

Files are not merged. An unknown key is an error.
[Administration](../admin.md) says how to give all users the same file.

`gpujob explain --cluster KEY` prints a row of this page in the terminal.
`gpujob schema --cluster` prints the JSON Schema of the file for your editor.

"""
COMMANDS = """\
# Commands

`gpujob` launches jobs and shows them. `gpujob-exporter` is the sidecar, which gpujob starts on each node.
You start it yourself to [watch a running job](../how-to/watch-a-running-job.md).

`-h` or `--help` after any command prints its part of this page.
What a command returns is under [exit status](exit-status.md).

"""
METRICS = """\
# Metrics

Each sidecar serves these series at `/metrics`. All of them carry the labels of the job:
`cluster`, `job_id`, `job_name`, `user`, `partition` and `node`.
To collect the series, see [connect Prometheus](../how-to/connect-prometheus.md).
For alerts on them, see [alerts](alerts.md).

- A value that is unknown has no sample. No series uses 0, -1 or NaN in its place.
- A worker, GPU or file that is gone leaves no series behind.
- Units are in the names: seconds, bytes, ratios from 0 to 1, watts, joules and degrees Celsius.
- `_total` only rises, `_info` is always 1, and `_timestamp_seconds` is a moment in Unix time.

## How many series a page has

`monitoring.detail` in the [job file](job-file.md) sets it for a job, `detail` in the
[cluster file](cluster-file.md) for a site, and `--detail` for a job that gpujob did not launch.

| Detail | Families | Series with 8 workers on 8 GPUs |
|---|---|---|
| `essential` | those that the alert rules read | 150 |
| `normal` (default) | also those of the dashboard, and figures of the job | 380 |
| `full` | all | 1,160 |

A *late* series begins when its value is first other than 0, and then it stays. Before that, its absence means 0 or
unknown. With `full`, it begins at once.

A late counter begins with its first value, which `rate()` and `increase()` do not see.
To count events in a range, add that value, as the dashboard does. Or compare timestamps, as the rules on exits do:

```text
increase(gpujob_worker_exits_total[1h])
or min without (instance) (min_over_time(gpujob_worker_exits_total[1h]))
  unless ignoring (instance) gpujob_worker_exits_total offset 1h
```

## Series

"""
HUB_METRICS = """
## Series of the hub

`gpujob-exporter hub` serves these series. All of them carry the label `cluster`.
A series of a job goes 30 minutes after the end of the job, or after the hub learned of it.
See [run the hub](../how-to/run-the-hub.md).

"""
RECEIVER_METRICS = """
## Series of the receiver of alerts

`gpujob alerts receive` serves these series. See [get alerts](../how-to/get-alerts.md).

"""
SCHEMAS = """\
# Schemas

These are the JSON Schemas (draft 2020-12) of what gpujob prints and writes for other programs.

- The last part of `$id` is the version. It rises when a key is removed or gets another meaning.
- A new version of gpujob may add keys, so programs must ignore those that they do not know.
- A value that is unknown is null.
- Times are seconds since 1970 (Unix time). Units are in the names.

"""
ARGUMENTS = {
    "DIR": "directory that gets the files",
    "[LOGS_DIR...]": "directories with run directories, for `--rebuild`",
    "[JOB.YAML | -- COMMAND...]": "job file (`-` is standard input), or the command of the workers, word by word",
    "JOB": "id or name of a job",
    "[OPTIONS]...": "options of `gpujob-exporter receive-alerts`",
    "[JOB]": "id, beginning of a local id, name or directory of a job; by default the newest. "
    "`watch`, `report` and `stop` take a sweep or pipeline too",
    "[JOB-ID]": "id or name of a job; by default the alerts of all your jobs, and those of no job",
    "[JOB]...": "ids, tasks of arrays, names or directories; by default all your jobs in Slurm's queue",
    "[PID... | CONFIG.YAML]": "process ids of the workers, or a `monitor_config.yaml`",
    "[WORKER]": "name, role or rank of a worker",
    "SWEEP": "id, name or directory of a sweep",
    "[FILE] [-- COMMAND...]": "file to write, by default `job.yaml`, and the command of its worker",
    "[KEY]": "path of a key, or its last part",
    "LOG...": "log files",
    "PIPELINE.YAML": "file that names the job files, and which of them waits for which",
    "PATH...": "files, checkpoints, and folders of either",
    "SHELL": "`bash`, `zsh` or `fish`",
    "STACK_DIR": "folder of the stack, with `gate.json`",
    "TARGET_DIR": "target directory of the site",
    "FILE": "`manifest.json`, its run directory, or a `monitor_config.yaml`",
}
"""Meaning of each argument, by the name that its usage line has."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |").replace("| --- ", "|---")


def job_file_page() -> str:
    """``job-file.md``."""
    parts = [GENERATED, JOB_FILE]
    for top in dict.fromkeys(key.top_level_key for key in job_keys()):
        keys = [key for key in job_keys() if key.top_level_key == top]
        parts += [f"## `{top}`\n\n", key_table(keys), f"\n```yaml job-part\n{as_yaml({top: keys[0].example})}```\n\n"]
    rows = [(f"`{{{name}}}`", f"`{variable}`") for name, variable in VARIABLES.items()]
    return "".join([*parts, PLACEHOLDERS, table(("Placeholder", "Variable"), rows)])


def cluster_file_page() -> str:
    """``cluster-file.md``."""
    example = as_yaml({key.path: key.example for key in cluster_keys() if key.path == key.top_level_key})
    keys = key_table(cluster_keys())
    return f"{GENERATED}{CLUSTER_FILE}{keys}\nAn example with every key:\n\n```yaml cluster\n{example}```\n"


def key_table(keys: Iterable[Key]) -> str:
    """Keys with type, default and meaning."""

    def default(key: Key) -> str:
        return "required" if key.required else f"`{key.default_text}`" if key.default_text else ""

    rows = ((f"`{key.path}`", key.type_text, default(key), key.meaning) for key in keys)
    return table(("Key", "Type", "Default", "Meaning"), rows)


def metrics_page() -> str:
    """``metrics.md``."""
    rows = (
        (*_start_of_row(each), f"{each.detail}{', late' * each.begins_late}", each.help) for each in declared_families()
    )
    sidecar = table(("Series", "Type", "Labels", "Detail", "Meaning"), rows)
    hub = table(("Series", "Type", "Labels", "Meaning"), ((*_start_of_row(each), each.help) for each in HUB_FAMILIES))
    receiver = table(
        ("Series", "Type", "Labels", "Meaning"), ((*_start_of_row(each), each.help) for each in RECEIVER_FAMILIES)
    )
    return f"{GENERATED}{METRICS}{sidecar}{HUB_METRICS}{hub}{RECEIVER_METRICS}{receiver}"


def _start_of_row(family: Family) -> tuple[str, str, str]:
    return f"`{family.full_name}`", family.kind, ", ".join(f"`{label}`" for label in family.labels)


def commands_page() -> str:
    """``commands.md``."""
    return f"{GENERATED}{COMMANDS}{''.join(gpujob_commands())}{''.join(exporter_commands())}".rstrip() + "\n"


def gpujob_commands() -> Iterator[str]:
    """Every command of ``gpujob``."""
    with commands.make_context("gpujob", [], resilient_parsing=True) as context:
        yield click_command("gpujob", commands, context)
        for name, command in commands.all_commands().items():
            if not command.hidden:
                inner = click.Context(command, context, name)
                yield click_command(f"gpujob {name}", command, inner)
                for part, below in command.commands.items() if isinstance(command, click.Group) else ():
                    yield click_command(f"gpujob {name} {part}", below, click.Context(below, inner, part))


def click_command(name: str, command: click.Command, context: click.Context) -> str:
    """The section of one command."""
    usage = [name, *(piece for piece in command.collect_usage_pieces(context))]
    arguments = [
        param.make_metavar(context) if _takes_a_context(param) else param.make_metavar()  # type: ignore[call-arg]
        for param in command.params
        if isinstance(param, click.Argument)
    ]
    records = [
        record
        for param in command.get_params(context)
        if isinstance(param, click.Option) and "--help" not in param.opts and (record := param.get_help_record(context))
    ]
    options = {"": records} if records else {}
    return section(name, command.help or "", " ".join(usage), arguments, options, command.epilog or "")


def _takes_a_context(param: click.Parameter) -> bool:
    """Whether this is click 8.2 or newer."""
    return param.make_metavar.__code__.co_argcount > 1


def exporter_commands() -> Iterator[str]:
    """Every command of ``gpujob-exporter``."""
    parser: argparse.ArgumentParser = exporter_cli._parser()
    yield argparse_command(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield argparse_command(inner)


def argparse_command(parser: argparse.ArgumentParser) -> str:
    """The section of one command."""
    groups: dict[str, list[tuple[str, str]]] = {}
    arguments, commands_below = [], False
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or action.dest == "help":
                continue
            if isinstance(action, argparse._SubParsersAction):
                commands_below = True
            elif action.option_strings:
                names_text = ", ".join(action.option_strings) + (f" {value}" if (value := _value_of(action)) else "")
                title = group.title if group.title not in ("options", None) else ""
                groups.setdefault(str(title), []).append((names_text, action.help or ""))
            else:
                arguments.append(str(action.metavar or action.dest))
    usage = f"{parser.prog} [OPTIONS] {' '.join([*arguments, *(['COMMAND ...'] if commands_below else [])])}".rstrip()
    return section(parser.prog, parser.description or "", usage, arguments, groups, parser.epilog or "")


def _value_of(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return f"[{'|'.join(map(str, action.choices))}]"
    name = str(action.metavar or "")
    return f"[{name} ...]" if action.nargs == "*" else name


def section(
    name: str,
    about: str,
    usage: str,
    arguments: Sequence[str],
    options: dict[str, list[tuple[str, str]]],
    examples: str,
) -> str:
    """The section of one command on the page."""
    paragraphs = [" ".join(part.split()) for part in textwrap.dedent(about).split("\n\n")]
    parts = [f"## {name}", *paragraphs, f"```text\n{usage}\n```"]
    if arguments:
        rows = [(f"`{argument}`", ARGUMENTS[argument]) for argument in arguments]
        parts.append(table(("Argument", "Meaning"), rows).rstrip())
    for title, records in options.items():
        if title:
            parts.append(f"Options for {title}:")
        parts.append(
            table(("Option", "Meaning"), [(f"`{names_text}`", sentence(text)) for names_text, text in records]).rstrip()
        )
    lines = re.sub(r"^examples?: ", "", " ".join(examples.split())).split("; ") if examples else []
    if lines:
        parts.append("\n".join(["```console", *(f"$ {line}" for line in lines), "```"]))
    return "\n\n".join(part for part in parts if part) + "\n\n"


def sentence(text: str) -> str:
    """A help text with a capital letter and a full stop."""
    text = " ".join(text.split())
    ends = not text or text.endswith((".", "]"))
    first = text[:1].upper() if re.match(r"[a-z]+[ ,]", text) else text[:1]
    return f"{first}{text[1:]}{'' if ends else '.'}"


def packs_page() -> str:
    """``log-packs.md`` with its list of packs."""
    page = (REFERENCE / "log-packs.md").read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"log-packs.md has no {BEGIN}"
    assert end, f"log-packs.md has no {END}"
    rows = [
        (
            f"`{pack.name}`",
            pack.title,
            LEVEL_OF_A_PACK[pack.level],
            ", ".join(f"`{name}`" for name in pack.also),
            pack.about,
        )
        for pack in read_packs()
    ]
    return f"{before}{begin}{table(('Pack', 'Logs of', 'Evidence of', 'Also takes', 'Notes'), rows)}{end}{after}"


def schemas_page() -> str:
    """``schemas.md``."""
    rows = ((f"[{name}.schema.json](schemas/{name}.schema.json)", text) for name, (_, text) in PUBLISHED.items())
    return f"{GENERATED}{SCHEMAS}{table(('Schema', 'Describes'), rows)}"


def schema_file(name: str) -> str:
    """A file in ``schemas/``."""
    return json.dumps(published_schema(name), indent=2, ensure_ascii=False) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "job-file.md": job_file_page,
    "cluster-file.md": cluster_file_page,
    "commands.md": commands_page,
    "../man/gpujob.1": lambda: man_page(commands_page()),
    "metrics.md": metrics_page,
    "log-packs.md": packs_page,
    "schemas.md": schemas_page,
    "redaction.md": lambda: GENERATED + redaction_page(),
    **{f"schemas/{name}.schema.json": partial(schema_file, name) for name in PUBLISHED},
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_matches_the_code(name: str, request: pytest.FixtureRequest) -> None:
    page = REFERENCE / name
    text = PAGES[name]()
    if request.config.getoption("--update-golden"):
        page.write_text(text, encoding="utf-8")
    assert page.exists(), f"write it with {UPDATE}"
    assert page.read_text(encoding="utf-8") == text, f"{name} differs from the code; {UPDATE} writes it anew"


def test_a_schema_finds_what_is_wrong() -> None:
    schema = published_schema("status")
    status = {"schema": 1, "node": {"name": "n"}, "workers": [{"worker": "w", "rank": 0, "eta": None}]}
    assert not list(problems(status, schema))
    status |= {"schema": 2, "node": {}, "workers": [{"worker": "w", "rank": "0", "values": {"loss": "x"}}]}
    assert list(problems(status | {"outputs": {}}, schema)) == [
        "$.schema: 2 is not 1",
        "$.node: name is missing",
        "$.workers[0].rank: '0' is not of type integer",
        "$.workers[0].values.loss: 'x' is not of type number",
        "$.outputs: {} is not of type array",
    ]


def missing(page: str, names: Iterable[str]) -> list[str]:
    """Names that are neither code nor link text on a page."""
    named = set(re.findall(r"`([^`\n]+)`|\[(\w+)\]\(", (REFERENCE / page).read_text(encoding="utf-8")))
    return sorted(set(names) - {name for both in named for name in both})


def test_every_exit_reason_is_described() -> None:
    assert not missing("exit-reasons.md", REASONS)


def test_every_alert_is_described() -> None:
    rules = [
        rule["alert"]
        for path in sorted((ROOT / "alertmanager" / "rules").glob("*.yml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert rules
    assert not missing("alerts.md", rules)


def test_every_launch_check_is_described() -> None:
    codes = set(finding_codes(ROOT / "launcher" / "check"))
    assert codes
    assert not missing("launch-checks.md", [*LEVELS, *codes])


def finding_codes(folder: Path) -> Iterator[str]:
    """Codes of findings that are literals in the calls."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.match(r"finding\.\w+$|level$", ast.unparse(node.func)):
                for inner in ast.walk(node.args[0]):
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                        yield inner.value
