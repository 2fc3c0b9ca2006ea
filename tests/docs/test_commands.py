"""Commands and keys that pages and runbooks tell a reader to use exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import pytest
import yaml

from launcher.cli.main import commands
from launcher.jobfile.jobfile import parse_job
from launcher.jobfile.keys import job_keys, nested
from tests.docs.pages import JOB, ROOT, pages, read

_OWN_OPTIONS = ("alerts receive",)  # takes the options of gpujob-exporter receive-alerts
_COMMAND = re.compile(r"(?<![\w/.-])gpujob (?P<words>[a-z][^`|;&<>\"')\n]*)")
_OPTION = re.compile(r"(?<=\s)--?[a-z][\w.-]*")
_INLINE = re.compile(r"(?<!`)`(?P<key>[a-z_]+(?:\[\])?(?:\.[a-z_]+)*): (?P<value>[^`]+)`")
TOP_KEYS = {key.path.partition(".")[0].partition("[")[0] for key in job_keys()}
TEXTS = [*pages(), *sorted((ROOT / "alertmanager" / "rules").glob("*.yml"))]


def _command(words: list[str]) -> click.Command | None:
    """The command, or its subcommand, that the words name; None for prose."""
    command = commands.get_command(click.Context(commands), words[0])
    if isinstance(command, click.Group):
        name = words[1] if len(words) > 1 else ""
        return command.get_command(click.Context(command), name) or command.get_command(click.Context(command), "list")
    return command


def _unknown_options(page: Path) -> Iterator[str]:
    for found in _COMMAND.finditer(read(page)):
        text = re.split(r" -- |  #|\\$", found["words"])[0]
        command = _command(text.split())
        if command is None or text.startswith(_OWN_OPTIONS):
            continue
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"-h", "--help"}
        for option in _OPTION.findall(text):
            name = option.rstrip(".")
            if name not in known and name[:2] not in known:
                yield f"gpujob {text.strip()}: {name}"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_only_options_that_exist(page: Path) -> None:
    assert list(_unknown_options(page)) == []


@pytest.mark.parametrize("page", sorted((ROOT / "alertmanager" / "runbooks").glob("*.md")), ids=lambda page: page.stem)
def test_keys_that_a_runbook_recommends_are_accepted(page: Path) -> None:
    for found in _INLINE.finditer(read(page)):
        if found["key"].partition(".")[0].partition("[")[0] not in TOP_KEYS:
            continue
        part: Any = nested(found["key"], yaml.safe_load(found["value"].replace("NODE", "gn1")))
        if "workers" in part:
            (worker,) = cast("list[dict[str, Any]]", JOB["workers"])
            part["workers"] = [{**worker, **part["workers"][0]}]
        parse_job(yaml.safe_dump({**JOB, **part}), page.name)


def test_a_runbook_reads_the_status_where_no_token_is_needed() -> None:
    asked = [page.name for page in (ROOT / "alertmanager" / "runbooks").glob("*.md") if ":PORT/status" in read(page)]
    assert asked == [], "/status of a sidecar answers 401 without the job's token: read RUN_DIR/status/NODE.json"
