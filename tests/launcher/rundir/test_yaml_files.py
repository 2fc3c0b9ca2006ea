"""Limits of YAML files, and files that once made a command hang or fail with a traceback."""

import copy
import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.contract.bounded_yaml import MOST_BYTES
from launcher.errors import ConfigError
from launcher.jobfile.jobfile import load_job
from launcher.jobfile.monitor_config import load_monitor_config
from launcher.jobfile.yamlfile import read_mapping
from launcher.rundir.cluster_file import find_logs_dir
from launcher.rundir.yaml_files import dump_yaml, load_yaml, read_yaml_text
from tests.support.launcher import gpujob

JOB = "name: x\nworkers: [{command: a}]\n"


def laughs(first: str, entry: str, around: str) -> str:
    """Ten levels of ten aliases each."""
    lines = [f"a0: &a0 {first}"]
    for level in range(1, 11):
        entries = ", ".join(entry.format(number=number, alias=f"*a{level - 1}") for number in range(10))
        lines.append(f"a{level}: &a{level} {around.format(entries)}")
    return "\n".join(lines) + "\n"


LISTS = laughs("[x]", "{alias}", "[{}]")
MANY, DEEP = "more than 40,000 keys and values", "nested more than 64 levels deep"
BOMBS = {
    "lists": (JOB + LISTS, MANY),
    "mappings": (JOB + laughs("{k: v}", "k{number}: {alias}", "{{{}}}"), MANY),
    "merges": (JOB + laughs("{k: v}", "{alias}", "{{<<: [{}]}}"), MANY),
    "in a config": (JOB + "backend:\n  config:\n    " + LISTS.strip().replace("\n", "\n    "), MANY),
    "in a sweep": (JOB + "sweep:\n  list:\n  - {" + LISTS.strip().replace("\n", "}\n  - {") + "}\n", MANY),
    "many values": (JOB + "secrets: [" + "a," * 100_000 + "]", MANY),
    "nested mappings": (JOB + "env: " + "{a: " * 5_000 + "}" * 5_000, DEEP),
    "nested lists": (JOB + "env: " + "[" * 20_000 + "]" * 20_000, DEEP),
    "nested by aliases": (
        JOB + "b0: &b0 1\n" + "".join(f"b{n}: &b{n} {'[' * 9}*b{n - 1}{']' * 9}\n" for n in range(1, 20)),
        "line 11, column 18: lists and mappings are " + DEEP,
    ),
    "an alias inside of its value": (JOB + "env: &e {a: *e}\n", "line 3, column 13: *e is inside of what it stands"),
    "a long word": (
        JOB.replace("command: a", "command: " + "x" * 300_000),
        "line 2, column 21: a text of 300,000 bytes; Linux passes at most 131,071 in one argument or variable",
    ),
    "a number": (
        JOB + "resources: {nodes: 0x" + "f" * 100_000 + "}",
        "line 3, column 20: a number of 100,002 characte",
    ),
    "a number in base 60": (JOB + "resources: {nodes: 1" + ":1" * 30_000 + "}", "a number of 60,001 characters"),
    "a large file": (JOB + "#" * MOST_BYTES, "has more than 1,048,576 bytes, the limit; is it the right file?"),
    "a NUL": (JOB + "env: {A: a\0b}", "line 3, column 11: not YAML: the character U+0000 is not allowed"),
    "an escaped NUL": (JOB + 'env: {A: "a\\0b"}', "env.A: a text cannot contain a NUL character"),
    "half a character": (JOB + 'env: {A: "\\ud800"}', "env.A: a text cannot contain half a character"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_beyond_a_limit_is_refused_at_once_with_its_place(name: str, tmp_path: Path) -> None:
    text, problem = BOMBS[name]
    path = tmp_path / "job.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert problem in str(caught.value)
    assert time.process_time() - began < 3  # a second on an idle machine; without the limits, minutes
    if "line" in problem or problem in (MANY, DEEP):
        with pytest.raises(ConfigError, match=r"line \d+, column \d+: "):
            load_monitor_config(str(path), {})
        with pytest.raises(ConfigError, match=r"line \d+, column \d+: "):
            find_logs_dir({"GPUJOB_CONFIG": str(path)}, tmp_path)


@pytest.mark.parametrize("text", ["0022", "12:30:00", "0x1F", "1_000", "3.10", ".5", "1.0e+3", "-.inf", "7", "1.5"])
def test_a_number_is_the_one_that_yaml_reads_and_is_written_as_it_was(text: str) -> None:
    values = {"a": [yaml.safe_load(text)]}
    assert load_yaml(f"a: [{text}]", "") == values
    again = copy.deepcopy(load_yaml(f"a: [{text}]", ""))
    assert dump_yaml(again) == f"a:\n- {text}\n"
    assert json.loads(json.dumps(again)) == values


@pytest.mark.parametrize("name", ["in a sweep", "nested lists", "nested mappings"])
@pytest.mark.parametrize("command", ["plan", "check"])
def test_commands_refuse_it_with_exit_status_2(command: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(BOMBS[name][0])
    done = gpujob(command, "job.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "job.yaml: " in done.stdout + done.stderr
    assert BOMBS[name][1] in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_with_thousands_of_mistakes_reports_the_first_hundred(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "secrets: [" + "no," * 15_000 + "]")
    with pytest.raises(ConfigError) as caught:
        load_job(tmp_path / "job.yaml")
    assert caught.value.problems[0] == 'secrets[0]: no is not a text; write it in quotes: "no"'
    assert len(caught.value.problems) == 101
    assert caught.value.problems[-1] == "and 14,900 more; is it the right file?"


def test_ordinary_anchors_and_merges_work() -> None:
    body, twice = read_mapping("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n", "job.yaml")
    assert body == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": [{"x": 1, "y": 2}] * 2}
    assert twice == []


PARTS = st.sampled_from(
    [
        *("a:", "b:", "<<:", "<<: *a", "? ", ": ", "- ", "{", "}", "[", "]", ",", "&a ", "&b ", "*a", "*b", "[*a, *a]"),
        *("!!int ", "!!float ", "!!set ", "!!omap ", "!!binary ", "!!str ", "'", '"', "x", "1", "1:30", "0x1F", "~"),
        *("2001-12-14", "true", ".inf", "=", "|", ">", "---", "...", "\n", "\n  ", "\n    ", " ", "# c", "\\", "\t"),
    ]
)


def value_of(text: str, *, bounded: bool) -> str | None:
    """How a loader reads a text, or None if it refuses it."""
    try:
        return repr(load_yaml(text, "") if bounded else yaml.safe_load(text))
    except (ConfigError, yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError):
        return None


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40) | st.lists(PARTS, max_size=25).map("".join))
@example("a: &a {x: 1}\nb: {<<: *a, y: [*a, *a]}")
@example("- &a [1]\n- {? *a : 1}")
@example("a: &a 1\n---\nb: *a")
def test_the_limits_change_no_other_file(text: str) -> None:
    plain = value_of(text, bounded=False)
    if plain is None or ("[...]" not in plain and "{...}" not in plain):  # a value that contains itself
        assert value_of(text, bounded=True) == plain


def test_a_file_is_read_as_utf_8_with_or_without_a_mark(tmp_path: Path) -> None:
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa: \xc3\xa9\n")
    assert read_yaml_text(tmp_path / "marked") == "a: é\n"
