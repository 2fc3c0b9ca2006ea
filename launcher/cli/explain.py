"""The command `gpujob explain`: meaning, type, default and example of a key."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from launcher.cli.about.completion import complete_key_names
from launcher.cli.parts import JSON, fail, print_json

if TYPE_CHECKING:
    from launcher.jobfile.keys import Key

WIDTH = 100  # columns of a line of text: longer ones are hard to read


@click.command(epilog="example: gpujob explain progress.total_items")
@click.argument("key", required=False, shell_complete=complete_key_names)
@click.option("--cluster", is_flag=True, help="Keys of the cluster file instead of the job file.")
@JSON
def explain(key: str | None, cluster: bool, as_json: bool) -> None:
    """Explain a key of the job file: meaning, type, default and an example. Without KEY, list all keys.

    KEY is a path such as workers[].restart.max, or its last part.
    """
    from launcher.jobfile.keys import cluster_keys, find_keys, job_keys

    keys, others = (cluster_keys(), job_keys()) if cluster else (job_keys(), cluster_keys())
    found = find_keys(key, keys) if key is not None else keys
    if not found:
        fail(_unknown_key_text(str(key), keys, others, cluster=cluster))
    if as_json:
        print_json({"schema": 1, "keys": [_to_json(entry) for entry in found]})
    elif key is None:
        _print_keys(found)
    else:
        width = min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)
        click.echo("\n\n".join(describe_key(entry, keys, width) for entry in found))


def _unknown_key_text(text: str, keys: "Sequence[Key]", others: "Sequence[Key]", *, cluster: bool) -> str:
    """The error for a key that does not exist."""
    from launcher.jobfile.keys import find_keys, nearest_keys

    if find_keys(text, others):
        file, option = ("job file", "") if cluster else ("cluster file", " --cluster")
        return f'"{text}" is a key of the {file}; try `gpujob explain{option} {text}`'
    near = nearest_keys(text, keys)
    option = " --cluster" if cluster else ""
    hint = f"did you mean {' or '.join(near)}?" if near else f"`gpujob explain{option}` lists all keys"
    return f'unknown key "{text}"; {hint}'


def _to_json(key: "Key") -> dict[str, object]:
    facts = {"path": key.path, "type": key.type_text, "default": key.default_text or None}
    return {**facts, "required": key.required, "meaning": key.meaning, "example": key.example}


def _print_keys(keys: "Sequence[Key]") -> None:
    width = max(len(key.path) for key in keys)
    click.echo("\n".join(f"{key.path:{width}}  {key.first_sentence}" for key in keys))


def _threshold_lines() -> list[str]:
    """Every threshold with its unit, default and an example."""
    from exporter.contract.alert_thresholds import THRESHOLDS
    from launcher.jobfile.alerts.thresholds import default_text

    rows = [("THRESHOLD", "UNIT", "DEFAULT", "EXAMPLE", "FIRES")]
    for name, known in THRESHOLDS.items():
        side = "above" if known.fires_above else "below"
        rows.append((name, known.unit, default_text(known), known.example, f"{side}: {known.meaning}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)] + [0]
    return ["  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def describe_key(key: "Key", keys: "Sequence[Key]", width: int) -> str:
    """Everything known about a key, as text."""
    from launcher.jobfile.keys import as_yaml, nested

    lines = [key.path, *textwrap.wrap(key.meaning, width, initial_indent="  ", subsequent_indent="  "), ""]
    facts = {"Type": key.type_text, "Default": "none; the key is required" if key.required else key.default_text}
    for name, fact in facts.items():
        if fact:
            lines += textwrap.wrap(f"{name + ':':9}{fact}", width, initial_indent="  ", subsequent_indent=" " * 11)
    inner = [entry.path for entry in keys if entry.path.startswith((f"{key.path}.", f"{key.path}[]."))]
    if inner:
        lines += textwrap.wrap(f"{'Keys:':9}{', '.join(inner)}", width, initial_indent="  ", subsequent_indent=" " * 11)
    if key.path == "alerts":
        lines += ["", *_threshold_lines(), ""]
    lines += ["  Example:", textwrap.indent(as_yaml(nested(key.path, key.example)).rstrip(), "    ")]
    return "\n".join(lines)
