"""Meaning and example of every key, and `gpujob explain`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from launcher.cli.main import commands
from launcher.jobfile.jobfile import parse_cluster, parse_job
from launcher.jobfile.keys import (
    File,
    Key,
    as_yaml,
    cluster_keys,
    file_fields,
    file_schema,
    find_keys,
    job_keys,
    nested,
    read_descriptions,
)
from tests.docs.pages import JOB

REQUIRED_KEYS: dict[str, dict[str, Any]] = {
    "errors": {"errors": [{"pattern": "broken"}]},
    "model": {"model": {"path": "/models/a"}},
    "container": {"container": {"image": "a.sif"}},
    "frontend": {"frontend": {"type": "custom", "command": "python3 router.py"}},
    "benchmark": {"benchmark": {"type": "sa-bench", "command": "bench", "isl": 1, "osl": 1, "concurrencies": [1]}},
}
"""Keys that a job needs in addition to an example, by the top-level key of the example."""


def merged(below: Any, above: Any) -> Any:
    """Two values of a file merged. Keys of ``above`` have precedence."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{name: merged(below.get(name), value) for name, value in above.items()}}
    if isinstance(below, list) and isinstance(above, list) and below and above:
        return [merged(below[0], above[0]), *above[1:]]
    return above


def explain(*arguments: str, columns: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(commands, ["explain", *arguments])


@pytest.mark.parametrize("file", ["job", "cluster"])
def test_exactly_the_existing_keys_are_described(file: File) -> None:
    described = read_descriptions()[file]
    fields = list(file_fields(file_schema(file)))
    assert set(described) == {field.path for field in fields}
    assert not [path for path, entry in described.items() if not entry.meaning.endswith(".")]
    assert not [path for path, entry in described.items() if entry.example is None]
    assert all(field.schema["description"] == described[field.path].meaning for field in fields)


@pytest.mark.parametrize("key", job_keys(), ids=lambda key: key.path)
def test_the_example_is_valid_in_a_job(key: Key) -> None:
    body = merged({**JOB, **REQUIRED_KEYS.get(key.top_level_key, {})}, nested(key.path, key.example))
    parse_job(as_yaml(body), key.path)


@pytest.mark.parametrize("key", cluster_keys(), ids=lambda key: key.path)
def test_the_example_is_valid_in_a_cluster_file(key: Key) -> None:
    """With the keys of the example of its section, of which some are required."""
    sections = {each.path: each for each in cluster_keys()}
    section = sections.get(key.path.rpartition(".")[0])
    around = {} if section is None else nested(section.path, section.example)
    parse_cluster(as_yaml(merged(around, nested(key.path, key.example))), key.path)


@pytest.mark.parametrize("key", [*job_keys(), *cluster_keys()], ids=lambda key: key.path)
def test_an_example_survives_yaml(key: Key) -> None:
    assert yaml.safe_load(as_yaml(nested(key.path, key.example))) == nested(key.path, key.example)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("workers[].restart.max", ["workers[].restart.max"]),
        ("workers.restart.max", ["workers[].restart.max"]),
        ("workers[0].restart.max", ["workers[].restart.max"]),
        ("restart.max", ["workers[].restart.max"]),
        ("max", ["workers[].restart.max", "slurm.requeue.max"]),
        ("env", ["env"]),
        ("ax", []),
        ("", []),
    ],
)
def test_a_key_is_found_by_path_or_last_part(text: str, paths: list[str]) -> None:
    assert [key.path for key in find_keys(text, job_keys())] == paths


def test_an_explanation_fits_a_narrow_terminal() -> None:
    assert max(map(len, explain("stall_timeout", columns=60).output.splitlines())) <= 60


@pytest.mark.parametrize("arguments", ["alerts", "name", "workers[].restart", "progress.pack", "max"])
def test_explain_matches_the_golden_page(arguments: str, golden: Callable[[str, str], Path]) -> None:
    result = explain(arguments)
    assert result.exit_code == 0
    golden(f"docs/explain-{arguments.replace('[]', '')}.txt", result.output)


def test_explain_lists_every_key() -> None:
    lines = explain().output.splitlines()
    assert [line.split()[0] for line in lines] == [key.path for key in job_keys()]
    assert lines[0].endswith("Name of the job in labels, in Slurm and in the name of the run directory.")
    lines = explain("--cluster").output.splitlines()
    assert [line.split()[0] for line in lines] == [key.path for key in cluster_keys()]


def test_explain_gives_json() -> None:
    assert json.loads(explain("--json", "workdir").output) == {
        "schema": 1,
        "keys": [
            {
                "path": "workdir",
                "type": "text or null",
                "default": "null",
                "required": False,
                "meaning": read_descriptions()["job"]["workdir"].meaning,
                "example": "/scratch/ada/embed",
            }
        ],
    }
    assert len(json.loads(explain("--json").output)["keys"]) == len(job_keys())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["paralel"], 'unknown key "paralel"; did you mean max_parallel or preamble?'),
        (["worker.restart.max"], 'unknown key "worker.restart.max"; did you mean workers[].restart.max'),
        (["memory"], 'unknown key "memory"; did you mean memory_per_node or host_memory?'),
        (["zzz"], 'unknown key "zzz"; `gpujob explain` lists all keys'),
        ([""], 'unknown key ""; `gpujob explain` lists all keys'),
        (["--cluster", "zzz"], 'unknown key "zzz"; `gpujob explain --cluster` lists all keys'),
        (["target_dir"], '"target_dir" is a key of the cluster file; try `gpujob explain --cluster target_dir`'),
        (["--cluster", "resources"], '"resources" is a key of the job file; try `gpujob explain resources`'),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_names(arguments: list[str], error: str) -> None:
    result = explain(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith(f"gpujob: {error}")
