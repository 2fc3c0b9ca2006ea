"""Every block of the documentation is what it says: files are valid, commands and their options exist."""

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
MOST_LINES = 150  # of the README: everything else has a page of its own
PROGRAMS = ("gpujob", "gpujob-exporter")
ENDS_A_COMMAND = ("&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "<<<")


def tagged(*tags: str) -> list[Any]:
    """The blocks with these tags, as parameters of a test."""
    return [pytest.param(fence, id=str(fence)) for fence in all_fences() if fence.tag in tags]


@pytest.fixture(autouse=True)
def _no_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Examples do not depend on whose machine this is; a plan switches the garbage collector off."""
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
def test_a_whole_job_can_be_planned(fence: Fence) -> None:
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


def typed(text: str) -> list[str]:
    """The command lines of a console, continued ones joined."""
    joined = re.sub(r"\\\n", " ", text)
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def split(line: str) -> list[list[str]]:
    """The simple commands of a command line, without redirections and the files of these."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in ENDS_A_COMMAND:
            found.append(["", word] if ">" in word or "<" in word else [])
        else:
            found[-1].append(word)
    return [words for words in found if words and words[0]]


def wrong_command(words: list[str]) -> str | None:
    """What is wrong with one command, or None; commands of others are not ours to judge."""
    while words and (words[0] in ("sudo", "exec", "srun") or re.match(r"[A-Za-z_]\w*=", words[0])):
        words = words[1:]
    name = Path(words[0]).name if words else ""
    if name not in PROGRAMS:
        return None
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            if name == "gpujob":
                _parse_click(words[1:])
            else:
                parser: argparse.ArgumentParser = exporter_cli._parser()
                parser.parse_args(words[1:])
    except click.UsageError as error:
        return error.format_message()
    except SystemExit as end:
        return errors.getvalue() if end.code else None
    return None


def _parse_click(words: list[str]) -> None:
    """Raise unless click takes the words; nothing is carried out."""
    command: click.Command = commands
    if words and not words[0].startswith("-"):
        name, *words = words
        if name not in commands.commands:
            raise click.UsageError(f"No such command {name!r}.")
        command = commands.commands[name]
    with contextlib.suppress(click.exceptions.Exit):  # --help
        command.make_context(command.name, words)


@pytest.mark.parametrize("fence", tagged("console"))
def test_commands_and_options_exist(fence: Fence) -> None:
    lines = typed(fence.text)
    assert lines, "a console begins its commands with `$ `"
    assert fence.text.startswith("$ "), "output before any command"
    wrong = [f"{line}: {problem}" for line in lines for words in split(line) if (problem := wrong_command(words))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("gpujob plan job.yaml --explain", None),
        ("A=1 .venv/bin/gpujob run job.yaml && gpujob schema > out.json", None),
        ("gpujob --version", None),
        ("gpujob plann job.yaml", "No such command"),
        ("cd x; gpujob plan job.yaml --exlain", "No such option"),
        ("gpujob plan", "Missing argument"),
        ("gpujob-exporter check-config manifest.json", None),
        ("gpujob-exporter sidecar --rundir x", "unrecognized arguments"),
        ("ls --whatever", None),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, problem: str | None) -> None:
    found = [wrong for words in split(line) if (wrong := wrong_command(words))]
    assert bool(found) == bool(problem), found
    assert not problem or problem in found[0]


def test_the_readme_is_short() -> None:
    assert len(read(pages()[0]).splitlines()) <= MOST_LINES
