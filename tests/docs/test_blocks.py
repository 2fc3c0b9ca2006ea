"""Code blocks of the documentation: files are valid, commands and options exist."""

import argparse
import contextlib
import gc
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from exporter import cli as exporter_cli
from exporter.logs.packs import parse_pack
from launcher.cli.main import commands
from launcher.jobfile.jobfile import parse_cluster, parse_job
from tests.docs.pages import JOB, Fence, all_fences, pages, read

TAGS = ("yaml job", "yaml job-part", "yaml cluster", "yaml", "toml pack", "python", "console", "text")
MOST_LINES = 150  # of the README: other topics have their own pages
PROGRAMS = ("gpujob", "gpujob-exporter")
ENDS_A_COMMAND = ("&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "<<<")


def tagged(*tags: str) -> list[Any]:
    """The blocks with these tags, as parameters of a test."""
    return [pytest.param(fence, id=str(fence)) for fence in all_fences() if fence.tag in tags]


@pytest.fixture(autouse=True)
def _no_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples do not depend on the machine. A plan disables the garbage collector, so enable it again."""
    for name in ("GPUJOB_CONFIG", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    gc.enable()


def test_every_block_has_a_known_tag() -> None:
    wrong = [f"{fence}: {fence.tag or 'without a tag'}" for fence in all_fences() if fence.tag not in TAGS]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("fence", tagged("yaml job"))
def test_a_complete_job_can_be_planned(fence: Fence) -> None:
    Path("job.yaml").write_text(fence.text, encoding="utf-8")
    result = CliRunner().invoke(commands, ["plan", "--local", "job.yaml"])
    assert result.exit_code == 0, result.exception or result.output


@pytest.mark.parametrize("fence", tagged("yaml job-part"))
def test_a_part_of_a_job_is_valid_in_a_job(fence: Fence) -> None:
    body = {**JOB, **yaml.safe_load(fence.text)}
    parse_job(yaml.safe_dump(body), str(fence))


@pytest.mark.parametrize("fence", tagged("yaml cluster"))
def test_a_cluster_file_is_valid(fence: Fence) -> None:
    parse_cluster(fence.text, str(fence))


@pytest.mark.parametrize("fence", tagged("yaml"))
def test_other_yaml_can_be_parsed(fence: Fence) -> None:
    assert list(yaml.safe_load_all(fence.text))


@pytest.mark.parametrize("fence", tagged("toml pack"))
def test_a_pack_can_be_loaded(fence: Fence) -> None:
    match = re.search(r'^name = "([^"]+)"', fence.text, re.MULTILINE)
    assert match, "the pack has no name"
    parse_pack(fence.text, match[1])


@pytest.mark.parametrize("fence", tagged("python"))
def test_python_compiles(fence: Fence) -> None:
    compile(fence.text, str(fence), "exec")


def command_lines(text: str) -> list[str]:
    """The command lines of a console, continued ones joined."""
    joined = re.sub(r"\\\n", " ", text)
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def simple_commands(line: str) -> list[list[str]]:
    """The simple commands of a command line, without redirections and their files."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for part in lexer:
        if part in ENDS_A_COMMAND:
            found.append(["", part] if ">" in part or "<" in part else [])
        else:
            found[-1].append(part)
    return [argv for argv in found if argv and argv[0]]


def command_problem(argv: list[str]) -> str | None:
    """Problem of one command, or None. Commands of other programs are not checked."""
    while argv and (argv[0] in ("sudo", "exec", "srun") or re.match(r"[A-Za-z_]\w*=", argv[0])):
        argv = argv[1:]
    name = Path(argv[0]).name if argv else ""
    if name not in PROGRAMS:
        return None
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            if name == "gpujob":
                _parse_click(argv[1:])
            else:
                parser: argparse.ArgumentParser = exporter_cli._parser()
                parser.parse_args(argv[1:])
    except click.UsageError as error:
        return error.format_message()
    except SystemExit as end:
        return errors.getvalue() if end.code else None
    return None


def _parse_click(argv: list[str]) -> None:
    """Raise unless click accepts the arguments. Nothing is executed."""
    command: click.Command = commands
    if argv and not argv[0].startswith("-"):
        name, *argv = argv
        if name not in commands.all_commands():
            raise click.UsageError(f"No such command {name!r}.")
        command = commands.all_commands()[name]
    with contextlib.suppress(click.exceptions.Exit):  # --help
        command.make_context(command.name, argv).close()


@pytest.mark.parametrize("fence", tagged("console"))
def test_commands_and_options_exist(fence: Fence) -> None:
    lines = command_lines(fence.text)
    assert lines, "a console begins its commands with `$ `"
    assert fence.text.startswith("$ "), "output before any command"
    wrong = [
        f"{line}: {problem}" for line in lines for argv in simple_commands(line) if (problem := command_problem(argv))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("gpujob plan job.yaml --explain", None),
        ("A=1 .venv/bin/gpujob run job.yaml && gpujob schema > out.json", None),
        ("gpujob --version", None),
        ("gpujob plann job.yaml", "No such command"),
        ("cd x; gpujob plan job.yaml --exlain", "No such option"),
        ("gpujob plan", "no job"),
        ("gpujob-exporter check-config manifest.json", None),
        ("gpujob-exporter sidecar --rundir x", "unrecognized arguments"),
        ("ls --whatever", None),
    ],
)
def test_an_unknown_command_is_found(line: str, problem: str | None) -> None:
    found = [wrong for argv in simple_commands(line) if (wrong := command_problem(argv))]
    assert bool(found) == bool(problem), found
    assert not problem or problem in found[0]


def test_the_readme_is_short() -> None:
    assert len(read(pages()[0]).splitlines()) <= MOST_LINES
