"""Job file and cluster file: accepted values and the message for each mistake."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.jobfile.jobfile import (
    ClusterSpec,
    JobSpec,
    load_cluster,
    load_job,
    parse_job,
)
from launcher.jobfile.redaction import is_secret_name, redacted_job
from launcher.jobfile.resources import command_argv
from launcher.jobfile.value_types import parse_time_limit
from launcher.jobfile.yamlfile import parse_yaml_model
from launcher.rundir.cluster_file import find_cluster_file, find_logs_dir, resolve_directory
from tests.launcher.conftest import Golden
from tests.support.launcher import HARD_NAMES, job_spec

MINIMAL = "name: x\nworkers: [{command: a}]\n"  # a minimal valid job file, to which mistakes are added

MISTAKES = """\
name: 12
workdri: /tmp
resources: {nodes: 0, gpus_per_node: "8"}
workers:
  - {role: 1st, count: 1.5, command: "python 'x", restart: {max: -1}}
  - {role: b, comand: x, gpus: true, env: {A: 5}}
slurm: {time_limit: 14400}
patterns: {output: a/b}
progress: {pack: tqmd, patterns: {items: "("}}
errors: [{pattern: x, severity: fatal}]
monitoring: {stall_timeout: soon}
"""
CLUSTER = ClusterSpec(
    models={"dsr1": "/models/DSR1", "qwen": "hf:Qwen/Qwen3-32B", "mine": "~/m"},
    containers={"sgl": "/images/sgl.sqsh", "own": "~/own.sif"},
)


def problems_of(text: str, model: type[JobSpec] | type[ClusterSpec] = JobSpec) -> tuple[str, ...]:
    """Problems of a file."""
    with pytest.raises(ConfigError) as caught:
        parse_job(text, "job.yaml") if model is JobSpec else parse_yaml_model(text, "job.yaml", model)
    return caught.value.problems


def test_all_mistakes_are_reported_with_key_value_and_fix(golden: Golden) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(MISTAKES, "job.yaml")
    golden("launcher/config-mistakes.txt", f"{caught.value}\n")


LISTS = """name: a
workers: [{command: "true"}]
container: {image: i, mounts: [a, "/b:/b", "c:d", "/e:/f:zz", "/g:/h,i"]}
setup: {modules: [x y, ok, "; rm"]}
secrets: [a b, OK, c-d, BOTH, TWO]
environment: {packages: [a-b, os, c-d], required: [1a, OK, 2b]}
slurm: {directives: {--foo: 1, output: x, mem: 4, comment: hi}}
env: {BOTH: x, TWO: x}
"""


def test_all_invalid_entries_of_a_list_are_reported() -> None:
    starts = [
        *("container.mounts[0]: 'a'", "container.mounts[2]: 'c:d'", "container.mounts[3]: '/e:/f:zz'"),
        *("container.mounts[4]: '/g:/h,i'", "setup.modules[0]: 'x y'", "setup.modules[2]: '; rm'"),
        *("secrets[0]: 'a b'", "secrets[2]: 'c-d'"),
        *("environment.packages[0]: 'a-b'", "environment.packages[2]: 'c-d'"),
        *("environment.required[0]: '1a'", "environment.required[2]: '2b'"),
        *("slurm.directives: '--foo'", "slurm.directives: 'output'", "slurm.directives: 'mem'"),
    ]
    problems = problems_of(LISTS)
    assert len(problems) == len(starts)
    assert [start for start in starts if not any(problem.startswith(start) for problem in problems)] == []
    valid = "name: a\nworkers: [{command: x}]\n"
    assert problems_of(f"{valid}secrets: [BOTH, TWO]\nenv: {{BOTH: x, TWO: x}}\n") == (
        "secrets: BOTH has a value in env; remove it there",
        "secrets: TWO has a value in env; remove it there",
    )


def test_an_entry_that_is_not_text_does_not_hide_other_mistakes() -> None:
    lists = "environment: {required: [5, A-B, OK], packages: [a b, null]}\nsecrets: [c-d, 1.5]\n"
    container = "container: {image: i, mounts: [a, 3]}\nsetup: {modules: [1, x y]}\n"
    assert {
        problem.partition(":")[0] for problem in problems_of(f"name: a\nworkers: [{{command: x}}]\n{lists}{container}")
    } == {
        *("environment.required[0]", "environment.required[1]"),
        *("environment.packages[0]", "environment.packages[1]"),
        *("secrets[0]", "secrets[1]", "container.mounts[0]", "container.mounts[1]"),
        *("setup.modules[0]", "setup.modules[1]"),
    }


def test_a_bad_name_and_a_bad_value_of_a_variable_are_both_reported() -> None:
    assert problems_of("name: a\nworkers: [{command: x}]\nenv: {A B: 1, C: x}\n") == (
        "env: 'A B' is not a name for an environment variable",
        'env.A B: 1 is not a text; write it in quotes: "1"',
    )


def test_nodes_of_a_role_without_workers_are_reported_by_key() -> None:
    assert problems_of("name: a\nresources: {gpus_per_node: 4, prefill_nodes: 1, decode_nodes: 2}\n") == (
        "resources.prefill_workers: is missing, and prefill_nodes is 1; set how many workers run on them",
        "resources.decode_workers: is missing, and decode_nodes is 2; set how many workers run on them",
    )


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ("wokdir: a", 'wokdir: unknown key "wokdir"; did you mean "workdir"?'),
        ("zzz: a", 'zzz: unknown key "zzz" (known: backend, benchmark, container, env, '),
        ("monitoring: {check_intervall: 3}", 'monitoring.check_intervall: unknown key "check_intervall"; did you mean'),
        (
            "slurm: {parition: gpu}",
            'did you mean "partition"? (known: account, dependency, directives, exclusive, ',
        ),
        ("monitoring: {enabled: 'yes'}", 'monitoring.enabled: "yes" is not true or false'),
        ("resources: {nodes: '2'}", 'resources.nodes: "2" is not a whole number'),
        ("resources: {nodes: 1.5}", "resources.nodes: 1.5 is not a whole number"),
        ("resources: 4", "resources: 4 is not a mapping"),
        ("resources: {memory_per_node: 64}", 'resources.memory_per_node: 64 is not a text; write it in quotes: "64"'),
        ("workdir: no", 'workdir: no is not a text; write it in quotes: "no"'),
        ("container: {image: On}", 'container.image: On is not a text; write it in quotes: "On"'),
        ("env: {A: 5}", 'env.A: 5 is not a text; write it in quotes: "5"'),
        ("env: {A: true}", 'env.A: true is not a text; write it in quotes: "true"'),
        ("env: {A: null}", "env.A: null is not a text; leave the key out"),
        ("env: {A=B: x}", "env: 'A=B' is not a name for an environment variable"),
        ('env: {A: "a\\0b"}', "cannot contain a NUL character"),
        ("slurm: {time_limit: 10:00:00}", "slurm.time_limit: 36000 is a number; write the time limit in quotes"),
        ("slurm: {time_limit: soon}", "slurm.time_limit: 'soon' is not a time limit; write for example \"04:00:00\""),
        (
            "slurm: {time_limit: '0'}",
            "slurm.time_limit: '0' is a time limit of zero, with which a job would wait forever; use a longer one",
        ),
        ("slurm: {directives: {nodes: 2}}", "slurm.directives: 'nodes' is set by resources.nodes; leave it out here"),
        ("slurm: {directives: {--requeue: true}}", "'--requeue' is not a long option of sbatch; write it without --"),
        ("patterns: {output: a/b}", "patterns.output: 'a/b' is not a pattern of file names; directories go into"),
        (
            "progress: {patterns: {items: 'a ('}}",
            (
                "progress.patterns.items: is not a regular expression: missing ), unterminated subpattern at position "
                "2; to match such a character literally, put a backslash before it\n    a (\n      ^"
            ),
        ),
        ("progress: {patterns: {loss: loss}}", "has no group for the number; put parentheses around it"),
        ("progress: {patterns: {a.b: '(x*)'}}", "matches empty text and so every line"),
        ("progress: {patterns: {a: 5}}", "progress.patterns.a: 5 is not a text"),
        (
            "progress: {patterns: {items: 'a (\\d)', items_processed: '(b)'}}",
            'progress.patterns.items_processed: means the same as "items"; remove one of them',
        ),
        ("errors: [{pattern: ok}, {pattern: '[a'}]", "errors[1].pattern: is not a regular expression: unterminated"),
        (
            "errors: [{pattern: x}, {pattern: y, name: x}]",
            "errors[1]: the pattern 'x' is listed twice; give each its own name",
        ),
        (
            "verify: {complete_share: 99}",
            "verify.complete_share: 99 is not a share; use a number above 0 and at most 1; for 99 %",
        ),
        ("verify: {complete_share: 0}", "verify.complete_share: 0 is not a share; use a number above 0 and at most 1"),
        ("verify: {complete_share: .nan}", "verify.complete_share: nan is not a share"),
        ("verify: {complete_share: most}", 'verify.complete_share: "most" is not a number'),
        ("verify: {outputs: 0}", "verify.outputs: 0 must be greater than or equal to 1"),
        ("verify: {outputs: all}", 'verify.outputs: "all" is not a whole number'),
        ("verify: {records_per_item: 0}", "0 is not above 0 and below 1e9; write null to count no records"),
        ("verify: {checksums: 1}", "verify.checksums: 1 is not true or false"),
        ("verify: {checksum: true}", 'verify.checksum: unknown key "checksum"; did you mean "checksums"? (known: chec'),
        ("progress: {total_items: 0}", "progress.total_items: 0 must be greater than or equal to 1"),
        ("progress: {total_epochs: 0}", "progress.total_epochs: 0 must be greater than or equal to 1"),
        ("progress: {total_steps: 1e3}", 'progress.total_steps: "1e3" is not a whole number'),
        ("progress: {total_step: 5}", 'progress.total_step: unknown key "total_step"; did you mean "total_steps"?'),
        ("progress: {pack: tqmd}", 'progress.pack: unknown pack "tqmd"; did you mean "tqdm"? (known: auto, '),
        ("progress: {pack: [tqdm]}", "progress.pack: ['tqdm'] is not a text"),
        ("errors: [{severity: info}]", "errors[0].pattern: is missing"),
        ("monitoring: {check_interval: 0}", "monitoring.check_interval: 0 must be greater than 0"),
        ("monitoring: {check_interval: .inf}", "monitoring.check_interval: inf must be "),
        ("monitoring: {check_interval: .nan}", "monitoring.check_interval: nan must be "),
        (
            "environment: {packages: ['torch>=2']}",
            "environment.packages[0]: 'torch>=2' is not the name of a module; write",
        ),
        ("environment: {required: [A-B]}", "environment.required[0]: 'A-B' is not a name for an environment variable"),
        ("inputs: in/*.json", 'inputs: "in/*.json" is not a list'),
        ("resume: yes please", 'resume: "yes please" is not true or false'),
        ("progress: {sample: {a: b}}", "progress.sample: {'a': 'b'} is not a text or a list"),
        ("monitoring: {linger: -1}", "monitoring.linger: -1 must be greater than or equal to 0"),
        ("monitoring: {gpu_metrics: 1}", "monitoring.gpu_metrics: 1 is not true or false"),
        ("monitoring: {gpu_metrics: out.csv}", 'monitoring.gpu_metrics: "out.csv" is not true or false'),
        (
            "monitoring: {gpu_metric: true}",
            'monitoring.gpu_metric: unknown key "gpu_metric"; did you mean "gpu_metrics"?',
        ),
    ],
)
def test_a_mistake_is_reported_with_its_key(added: str, problem: str) -> None:
    (found,) = problems_of(MINIMAL + added)
    assert problem in found


@pytest.mark.parametrize(
    ("worker", "problem"),
    [
        ("{}", "workers[0].command: is missing"),
        ("{command: ''}", "workers[0].command: the command is empty"),
        ("{command: []}", "workers[0].command: the command is empty"),
        ("{command: ['']}", "workers[0].command: the command is empty"),
        ('{command: "a \'b"}', 'workers[0].command: "a \'b" cannot be split into words: No closing quotation'),
        ('{command: ["a\\0"]}', "a NUL character"),
        (
            "{command: [x], shell: true}",
            "workers[0].command: with `shell: true` the command must be one text, not a list",
        ),
        (
            "{command: x, role: 'a b'}",
            "workers[0].role: 'a b' is not a role name; use a letter and then letters, digits,",
        ),
        ("{command: x, role: ''}", "workers[0].role: '' is not a role"),
        ("{command: x, role: ../x}", "workers[0].role: '../x' is not a role"),
        ("{command: x, gpus: -1}", "workers[0].gpus: -1 must be greater than or equal to 0"),
        ("{comand: x}", 'workers[0].comand: unknown key "comand"; did you mean "command"?'),
        ("{command: x, comand: y}", 'workers[0].comand: unknown key "comand"; did you mean "command"?'),
        ("{command: x, restart: {maxx: 2}}", 'workers[0].restart.maxx: unknown key "maxx"; did you mean "max"?'),
    ],
)
def test_a_mistake_in_a_worker_is_reported_with_its_key(worker: str, problem: str) -> None:
    (found,) = problems_of(f"name: x\nworkers: [{worker}]\n")
    assert problem in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nme: x\nworkers: [{command: a}]\n", 'nme: unknown key "nme"; did you mean "name"?'),
        ("name: x\nworker: [{command: a}]\n", 'worker: unknown key "worker"; did you mean "workers"?'),
        (MINIMAL + "model: {pth: /m}\n", 'model.pth: unknown key "pth"; did you mean "path"?'),
        (MINIMAL + "errors: [{patern: a}]\n", 'errors[0].patern: unknown key "patern"; did you mean "pattern"?'),
    ],
)
def test_a_misspelled_key_is_not_reported_as_missing_too(text: str, problem: str) -> None:
    (found,) = problems_of(text)
    assert found.startswith(problem)


def test_a_key_without_a_misspelled_variant_is_missing() -> None:
    found = problems_of("name: x\nworkers: [{qqq: x}, {comand: x, role: b}]\n")
    assert [problem.partition(" (known")[0] for problem in found] == [
        'workers[0].qqq: unknown key "qqq"',
        'workers[1].comand: unknown key "comand"; did you mean "command"?',
        "workers[0].command: is missing",
    ]


def test_all_mistakes_of_one_error_pattern_are_reported() -> None:
    pattern, severity = problems_of(MINIMAL + "errors: [{pattern: '(', severity: bad}]\n")
    assert pattern.startswith("errors[0].pattern: is not a regular expression: missing ), unterminated subpattern")
    assert severity == 'errors[0].severity: "bad" is not one of "critical", "warning" or "info"'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty; `gpujob init` writes a job file"),
        ("# nothing\n", "is empty; `gpujob init` writes a job file"),
        ("- a\n", "contains a list, not a mapping of keys to values"),
        ("name: x\nworkers: []\n", "workers: is missing"),
        ("name: ''\nworkers: [{command: a}]\n", "name: is empty"),
        ("name: x\nname: y\nworkers: [{command: a}]\n", "line 2, column 1: not YAML: the key 'name' is duplicated"),
        (MINIMAL + "env: {A: a, A: b}\n", "line 3, column 13: not YAML: the key 'A' is duplicated"),
        ("a: b: c", "line 1, column 5: not YAML: mapping values are not allowed here"),
        ("a: [", "line 1, column 5: not YAML: expected the node content, but found '<stream end>'"),
        ("\tname: x", "line 1, column 1: not YAML: found character '\\t' that cannot start any token"),
        ("a: *x", "line 1, column 4: not YAML: found undefined alias 'x'"),
        ("---\na: 1\n---\nb: 1", "line 3, column 1: not YAML: but found another document"),
        ("a: \x07", "not YAML: unacceptable character #x0007"),
        (
            "a: !!python/object/apply:os.system ['touch pwned']",
            "not YAML: could not determine a constructor for the tag",
        ),
        (
            "name: x\nworkers: [{command: a}, {command: b}]",
            "the role 'worker' is listed twice; give each entry",
        ),
    ],
)
def test_a_file_that_is_not_a_job_is_reported(text: str, problem: str) -> None:
    assert any(problem in found for found in problems_of(text)), problems_of(text)


def test_a_duplicate_key_does_not_hide_other_mistakes() -> None:
    job = "name: 5\nworkers: [{command: a, gpus: x, gpus: y}]\nenv: {A: a, A: b, A: c}\nnames: a\n"
    assert [problem.partition("; ")[0].partition(" (")[0] for problem in problems_of(job)] == [
        "line 2, column 33: not YAML: the key 'gpus' is duplicated",
        "line 3, column 13: not YAML: the key 'A' is duplicated",
        "line 3, column 19: not YAML: the key 'A' is duplicated",
        "name: 5 is not a text",
        'workers[0].gpus: "y" is not a whole number',
        'names: unknown key "names"',
    ]
    assert len(problems_of(MINIMAL + "name: y\n")) == 1, "a file without other mistakes is refused, too"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("? [a]\n: b\n", "key"),
        ("a: " + "[" * 2000, "nested"),
        (MINIMAL + "progress: {total_items: 2001-99-99}", "2001-99-99"),
        (MINIMAL + 'env: {A: !!int ""}', "int"),
        (MINIMAL + "env: {A: !!bool x}", "bool"),
        (MINIMAL + f"monitoring: {{check_interval: {'9' * 400}}}", "monitoring.check_interval"),
        (MINIMAL + f"slurm: {{time_limit: '{'9' * 400}'}}", "slurm.time_limit"),
        (MINIMAL + "errors: [{pattern: 'a{99999999999}'}]", "errors[0].pattern"),
    ],
    ids=["list as key", "deep nesting", "no such day", "empty int", "odd bool", "huge", "huge limit", "repetition"],
)
def test_odd_yaml_is_an_ordinary_mistake(text: str, place: str) -> None:
    assert any(place in problem for problem in problems_of(text))


_YAML_PARTS = st.sampled_from(
    [
        *("name:", "workers:", "command:", "env:", "resources:", "nodes:", "slurm:", "time_limit:", "monitoring:"),
        *("linger:", "progress:", "patterns:", "errors:", "pattern:", "restart:", "<<:", "? ", ": ", "- ", "{", "}"),
        *("[", "]", ",", "&a ", "*a", "!!int ", "!!float ", "!!timestamp ", "!!set ", "!!binary ", "!!omap ", "'", '"'),
        *("x", "1", "-1", "0x1F", "1e999", ".inf", "010", "1:30:00", "2001-12-14", "~", "true", "=", "|", ">", "---"),
        *("\n", "\n  ", "\n    ", " ", "# c", "\\", "\t", "\x00", "\ufeff", "\u2028", "é", "%YAML 1.1"),
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*JobSpec.model_fields, "command", "max", "int"]) | st.text(max_size=3), inner
        )
    ),
    max_leaves=8,
)


def is_accepted_or_refused(text: str, model: type[JobSpec] | type[ClusterSpec]) -> bool:
    """Whether the file is accepted, or refused with problems. Any other error is raised."""
    try:
        parse_yaml_model(text, "job.yaml", model)
    except ConfigError as error:
        return bool(error.problems)
    return True


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60) | st.lists(_YAML_PARTS, max_size=30).map("".join))
@example("? [a]\n: b\n")
@example("a: " + "[" * 2000)
@example("a: 2001-99-99")
def test_any_text_raises_only_config_errors(text: str) -> None:
    assert is_accepted_or_refused(text, JobSpec)
    assert is_accepted_or_refused(text, ClusterSpec)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(list(JobSpec.model_fields)), _VALUES))
@example({"monitoring": {"linger": -1}})
def test_any_values_raise_only_config_errors(values: dict[str, Any]) -> None:
    assert is_accepted_or_refused(yaml.safe_dump({"name": "x", "workers": [{"command": "a"}], **values}), JobSpec)


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: 1 problem\n  is not UTF-8 at byte 9$"):
        load_job(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: 1 problem\n  cannot be read: No such file or directory$"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory$"):
        load_job(tmp_path)


def test_hard_names_are_accepted(hard_name: str) -> None:
    text = yaml.safe_dump({"name": hard_name, "workers": [{"command": [hard_name]}], "env": {"A": hard_name}})
    spec = parse_yaml_model(text, "job.yaml", JobSpec)
    assert (spec.name, spec.workers[0].command, spec.env["A"]) == (hard_name, [hard_name], hard_name)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: x\nworkers: [{command: 5}]", 'workers[0].command: 5 is not a text; write it in quotes: "5"'),
        ("name: x\nworkers: [{command: [a, 5]}]", 'workers[0].command[1]: 5 is not a text; write it in quotes: "5"'),
        (MINIMAL + "slurm: {directives: {x: [1]}}", "slurm.directives.x: [1] is not a text, a whole number or true"),
    ],
)
def test_one_mistake_is_one_problem(text: str, problem: str) -> None:
    (found,) = problems_of(text)
    assert problem in found


def test_a_problem_names_a_key_called_like_a_type() -> None:
    assert problems_of(MINIMAL + "env: {int: 5}") == ('env.int: 5 is not a text; write it in quotes: "5"',)


def test_yaml_merges_may_be_nested() -> None:
    text = """\
name: x
workers:
  - {role: a, command: x, env: &a {A: "1"}}
  - {role: b, command: x, env: &b {<<: *a, A: "2"}}
env: {<<: *b, C: "3"}
"""
    spec = parse_yaml_model(text, "job.yaml", JobSpec)
    assert (spec.workers[1].env, spec.env) == ({"A": "2"}, {"A": "2", "C": "3"})


@pytest.mark.parametrize("memory", ["64G", "512M", "1T", "2048"])
def test_memory_has_the_units_of_slurm(memory: str) -> None:
    assert job_spec(resources={"memory_per_node": memory}).resources.memory_per_node == memory


@pytest.mark.parametrize("memory", ["64GB", "about 64G", "-1", "64 G"])
def test_memory_in_another_form_is_a_mistake(memory: str) -> None:
    (problem,) = problems_of(MINIMAL + f"resources: {{memory_per_node: '{memory}'}}")
    assert problem.startswith("resources.memory_per_node: ")


@pytest.mark.parametrize("address", ["nonsense", "host:port", ":70000", "a b:9410", ""])
def test_an_invalid_listen_address_is_a_mistake(address: str) -> None:
    (problem,) = problems_of(MINIMAL + f"monitoring: {{listen_address: '{address}'}}")
    assert problem.startswith("monitoring.listen_address: ")


@pytest.mark.parametrize("pattern", [r"(\d+)/(\d+)", "größer (?P<n>x)", "[а-я]+", r"\bloss=([0-9.]+)"])
def test_a_pattern_may_be_any_regular_expression(pattern: str) -> None:
    assert job_spec(errors=[{"pattern": pattern}]).errors[0].pattern == pattern


@pytest.mark.parametrize("pattern", [r"\u20ac", r"\N{EURO SIGN}", "(?u)x"])
def test_a_pattern_that_the_sidecar_cannot_use_is_a_mistake(pattern: str) -> None:
    assert problems_of(yaml.safe_dump({"name": "x", "workers": [{"command": "a"}], "errors": [{"pattern": pattern}]}))


@pytest.mark.parametrize(
    "added",
    [
        'paths: {output_dir: "a\\0b"}',
        'workdir: "a\\0b"',
        'paths: {output_dir: "\\ud800"}',
        'env: {A: "\\ud800"}',
        'patterns: {output: "a\\0"}',
        'slurm: {account: "a\\0"}',
    ],
)
def test_a_text_that_no_program_can_receive_is_a_mistake(added: str) -> None:
    (problem,) = problems_of(MINIMAL + added)
    assert problem.startswith(added.partition(":")[0])


EXAMPLE = """
name: embed-v2
resources: {nodes: 4, gpus_per_node: 8}
workers:
  - {role: worker, count: 32, gpus: 1, command: "python embed.py --shard {rank}", critical: true, restart: {max: 2, backoff: 10}}
slurm: {partition: gpu, account: nlp, time_limit: "04:00:00", directives: {}}
paths: {output_dir: out, log_dir: null, checkpoint_dir: ckpt}
patterns: {output: "output_worker_*.json", logs: "worker_*.log", checkpoints: "checkpoint_*.pt"}
progress: {total_items: 100000, pack: auto, patterns: {}}
errors: [{pattern: "(out of memory|OOM)", severity: critical}]
monitoring: {check_interval: 5, launch_timeout: 60, stall_timeout: 300, linger: 30}
"""  # noqa: E501


def test_the_example_of_the_design_is_a_valid_job() -> None:
    spec = parse_yaml_model(EXAMPLE, "job.yaml", JobSpec)
    assert (spec.resources.nodes, spec.resources.gpus_per_node) == (4, 8)
    assert (spec.workers[0].restart.max, spec.workers[0].restart.backoff) == (2, 10.0)
    assert spec.slurm.time_limit == "04:00:00"
    assert (spec.paths.output_dir, spec.paths.log_dir) == ("out", None)
    assert spec.progress.total_items == 100000
    assert spec.errors[0].severity == "critical"
    assert spec.monitoring.stall_timeout == 300.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),  # minutes
        ("1:30", 90),  # minutes:seconds
        ("90:00", 5400),
        ("04:00:00", 14400),  # hours:minutes:seconds
        ("100:00:00", 360000),
        ("2-0", 172800),  # days-hours
        ("2-12", 216000),
        ("1-02:03", 93780),  # days-hours:minutes
        ("1-02:03:04", 93784),  # days-hours:minutes:seconds
        ("0-00:00:01", 1),
    ],
)
def test_a_time_limit_has_the_forms_of_sbatch(text: str, seconds: float) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "x", "1:2:3:4", "1-", "-1", "1.5", "1-1:1:1:1", "1h", "04:00:00\n", "1 00:00", "0:0"]
)
def test_an_invalid_time_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time limit|is a time limit of zero"):
        parse_time_limit(text)


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_time_limit_counts_days_hours_minutes_and_seconds(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    for text in (f"{days}-{hours:02}:{minutes:02}:{seconds:02}", f"{days * 24 + hours}:{minutes:02}:{seconds:02}"):
        if total:
            assert parse_time_limit(text) == total
        else:
            with pytest.raises(ValueError, match="a time limit of zero"):
                parse_time_limit(text)


def test_a_command_is_split_like_in_a_shell() -> None:
    job = job_spec(workers=[{"command": "python x.py --name 'a b' $HOME *.txt \"it's\""}])
    assert command_argv(job.workers[0]) == ["python", "x.py", "--name", "a b", "$HOME", "*.txt", "it's"]
    assert command_argv(job_spec(workers=[{"command": "a | b", "shell": True}]).workers[0]) == ["bash", "-c", "a | b"]
    assert command_argv(job_spec(workers=[{"command": ["a b", ""]}]).workers[0]) == ["a b", ""]


@pytest.mark.parametrize("text", ["echo a # don't", "echo $'it\\'s'", "cat <<END\nit's\nEND\n"])
def test_a_shell_command_is_not_split(text: str) -> None:
    assert command_argv(job_spec(workers=[{"command": text, "shell": True}]).workers[0]) == ["bash", "-c", text]


def test_values_of_secret_names_are_redacted_in_the_resolved_job() -> None:
    env = {"HF_TOKEN": "s1", "WANDB_API_KEY": "s2", "PGPASSWORD": "s3", "AWS_SECRET_ACCESS_KEY": "s4", "PATH": "/bin"}
    body = redacted_job(job_spec(env=env, workers=[{"command": "a", "env": {"client_secret": "s5", "B": "b"}}]))
    assert body["env"] == dict.fromkeys(list(env)[:4], "<redacted>") | {"PATH": "/bin"}
    assert body["workers"][0]["env"] == {"client_secret": "<redacted>", "B": "b"}
    assert not re.search(r"\bs[1-5]\b", str(body))


@pytest.mark.parametrize("name", ["NGC_API_KEY", "apikey", "MY_AUTH", "PRIVATE_KEY", "DB_PASSWD", "GOOGLE_CREDENTIALS"])
def test_typical_secret_names_are_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["SSH_PASSPHRASE", "ENCRYPTION_KEY", "AWS_ACCESS_KEY_ID", "SESSION_COOKIE"])
def test_less_typical_secret_names_are_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "TOKENIZER", "OMP_NUM_THREADS", "MONKEY", "KEYBOARD", "PWD", "OLDPWD"]
)
def test_ordinary_names_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_a_relative_directory_is_relative_to_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    work = Path("/data")
    assert resolve_directory("out", work) == "/data/out"
    assert resolve_directory("../out/./x", work) == "/out/x"
    assert resolve_directory("/abs", work) == "/abs"
    assert resolve_directory("~/out", work) == "/home/ana/out"
    assert resolve_directory(None, work) is None


def test_the_home_of_an_unknown_user_is_a_mistake() -> None:
    (problem,) = problems_of(MINIMAL + "workdir: ~nobody-of-that-name/x")
    assert problem.startswith("workdir: ")


# The cluster file


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A home with a cluster file, and a working directory two levels below one."""
    home = tmp_path / "home/.config/gpujob"
    home.mkdir(parents=True)
    (home / "config.yaml").write_text("cluster: of-the-user\n")
    (tmp_path / "project/a/b").mkdir(parents=True)
    return tmp_path


def test_the_cluster_file_is_searched_in_order(tree: Path) -> None:
    environ, work = {"HOME": str(tree / "home")}, tree / "project/a/b"

    def cluster() -> str | None:
        return load_cluster(environ, work).cluster

    assert cluster() == "of-the-user"
    (tree / "project/gpujob.yaml").write_text("cluster: above\n")
    assert cluster() == "above"
    (work / "gpujob.yaml").write_text("cluster: here\n")
    assert cluster() == "here"
    (tree / "named.yaml").write_text("cluster: named\n")
    environ["GPUJOB_CONFIG"] = str(tree / "named.yaml")
    assert cluster() == "named"


def test_xdg_config_home_has_precedence_over_the_home_directory(tree: Path) -> None:
    (tree / "xdg/gpujob").mkdir(parents=True)
    (tree / "xdg/gpujob/config.yaml").write_text("cluster: xdg\n")
    environ = {"HOME": str(tree / "home"), "XDG_CONFIG_HOME": str(tree / "xdg")}
    assert load_cluster(environ, tree / "project").cluster == "xdg"


def test_defaults_are_used_without_a_cluster_file(tmp_path: Path) -> None:
    assert find_cluster_file({}, tmp_path) is None
    assert find_cluster_file({"HOME": "", "GPUJOB_CONFIG": ""}, tmp_path) is None
    assert load_cluster({}, tmp_path) == ClusterSpec()


def test_a_missing_named_cluster_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: 1 problem\n  cannot be read: No such file"):
        load_cluster({"GPUJOB_CONFIG": str(tmp_path / "none.yaml")}, tmp_path)


def test_an_unknown_key_of_the_cluster_file_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "gpujob.yaml").write_text("partitions: gpu\ntime_limit: 60\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster({}, tmp_path)
    assert str(tmp_path / "gpujob.yaml") in str(caught.value)
    assert any('unknown key "partitions"; did you mean "partition"?' in problem for problem in caught.value.problems)
    assert any("time_limit: 60 is a number" in problem for problem in caught.value.problems)


@pytest.mark.parametrize("address", ["localhost:9090", "ftp://host", "http://", "http://a b"])
def test_a_server_of_the_site_is_named_by_a_url(address: str) -> None:
    for key in ("prometheus_url", "alertmanager_url"):
        (problem,) = problems_of(f"{key}: {address!r}", ClusterSpec)
        assert problem.startswith(f"{key}: {address!r} is not the address of a server; write for example ")
    assert parse_yaml_model(
        "prometheus_url: https://ana:x@mon.example/prom/", "gpujob.yaml", ClusterSpec
    ).prometheus_url


@pytest.mark.parametrize("name", ["output", "nodes", "a b", '"x\\ntouch pwned"'])
def test_the_cluster_file_cannot_set_options_of_the_launcher(name: str) -> None:
    assert problems_of(f"directives: {{{name}: x}}", ClusterSpec)


def test_an_unreadable_home_has_no_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/home/ana/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert find_cluster_file({"HOME": "/home/ana"}, tmp_path) is None


def test_the_logs_directory_is_found_in_an_otherwise_invalid_cluster_file(tmp_path: Path) -> None:
    assert find_logs_dir({}, tmp_path) == tmp_path / "logs"
    (tmp_path / "gpujob.yaml").write_text("logs_dir: runs/../all\nunknown: 1\n")
    assert find_logs_dir({}, tmp_path) == tmp_path / "all"
    for text, problem in (("logs_dir: [a]", "is not a directory"), ("logs_dir: 'a", "not YAML")):
        (tmp_path / "gpujob.yaml").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            find_logs_dir({}, tmp_path)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("dsr1", "/models/DSR1"),
        ("qwen", "Qwen/Qwen3-32B"),
        ("mine", os.path.expanduser("~/m")),
        ("hf:a/b", "a/b"),
        ("/x/y", "/x/y"),
        ("other", "other"),
        *((name, name) for name in HARD_NAMES),
    ],
)
def test_a_model_alias_is_replaced_by_its_path(text: str, path: str) -> None:
    assert CLUSTER.path_of_model(text) == path


@pytest.mark.parametrize(
    ("text", "found"),
    [("sgl", "/images/sgl.sqsh"), ("own", os.path.expanduser("~/own.sif")), ("nvcr.io#a/b:1", "nvcr.io#a/b:1")],
)
def test_an_image_alias_is_replaced_by_its_image(text: str, found: str) -> None:
    assert CLUSTER.resolve_image(text) == found
