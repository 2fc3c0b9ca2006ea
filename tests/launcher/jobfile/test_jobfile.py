"""Job file and cluster file: accepted values and the message for each mistake."""

import math
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
from launcher.rundir.yaml_files import dump_yaml, load_yaml
from launcher.steps.batch_script import render_sbatch
from tests.launcher.conftest import Golden
from tests.support.launcher import HARD_NAMES, job_spec, plan_of

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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty; `gpujob init` writes a job file"),
        ("\tname: x", "line 1, column 1: not YAML: found character '\\t' that cannot start any token"),
        ("a: \x07", "line 1, column 4: not YAML: the character U+0007 is not allowed"),
        (MINIMAL + "name: y\n", "line 3, column 1: not YAML: the key 'name' is duplicated"),
        (MINIMAL + 'slurm: {time_limit: "04:00:00\\n"}', "is not a time limit"),
        (MINIMAL + "monitoring: {check_interval: 301}", "check_interval: 301 must be less than or equal to 300"),
        (MINIMAL + "resources: {gpu_type: 'h100:4'}", "resources.gpu_type: 'h100:4' is not a type of GPU; write it as"),
    ],
)
def test_a_file_that_is_not_a_job_is_reported(text: str, problem: str) -> None:
    (found,) = problems_of(text)
    assert problem in found


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


@pytest.mark.parametrize("pattern", [r"(\d+)/(\d+)", "größer (?P<n>x)", "[а-я]+", r"\bloss=([0-9.]+)"])
def test_a_pattern_may_be_any_regular_expression(pattern: str) -> None:
    assert job_spec(errors=[{"pattern": pattern}]).errors[0].pattern == pattern


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
    body: Any = redacted_job(job_spec(env=env, workers=[{"command": "a", "env": {"client_secret": "s5", "B": "b"}}]))
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


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("4h", "04:00:00"),
        ("90m", "01:30:00"),
        ("1d", "1-00:00:00"),
        ("1d12h", "1-12:00:00"),
        ("86399s", "23:59:59"),
        ("36h", "1-12:00:00"),
        ("4:00", "4:00"),
    ],
)
def test_a_time_limit_with_units_is_written_as_slurm_takes_it(written: str, text: str) -> None:
    job = MINIMAL + f"slurm: {{time_limit: {written!r}}}"
    assert parse_job(job, "j").slurm.time_limit == text


@pytest.mark.parametrize("text", ["h", "4x", "1h1d", "0h", "1.5h", "-4h"])
def test_a_time_limit_with_wrong_units_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.time_limit: .* time limit"):
        parse_job(MINIMAL + f"slurm: {{time_limit: {text!r}}}", "j")


@pytest.mark.parametrize("text", ["1e5", "1.0e5", "1.0e+5", "1E5", "100_000", "100000.0"])
def test_a_total_may_be_a_power_of_ten(text: str) -> None:
    assert parse_job(MINIMAL + f"progress: {{total_items: {text}}}", "j").progress.total_items == 100_000


@pytest.mark.parametrize(("text", "shown"), [("1.5", "1.5"), ("1.23e1", '"1.23e1"'), (".inf", ".inf"), ("1k", '"1k"')])
def test_a_total_that_is_no_whole_number_is_refused(text: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=r"progress\.total_items: ") as caught:
        parse_job(MINIMAL + f"progress: {{total_items: {text}}}", "j")
    assert caught.value.problems == (f"progress.total_items: {shown} is not a whole number",)


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


@pytest.mark.parametrize(
    "name", ["output", "nodes", "cpus-per-gpu", "tres-per-node", "test-only", "a b", '"x\\ntouch pwned"']
)
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


@pytest.mark.parametrize("changed", [False, True])  # by options of a command, which write the file anew
def test_options_of_other_programs_get_numbers_as_the_file_writes_them(changed: bool) -> None:
    text = (
        "name: x\nworkers: [{command: a}]\n"
        "slurm: {directives: {time-min: 12:00:00, begin: 16:00, reservation: 0123, nice: 0x10, priority: 1_000}}\n"
        "backend: {type: torchrun, args: {a: 12:30:00, b: 3.10, c: [0.90, 08, 7], d: 1.0e+3, e: .inf, f: 2.5}}\n"
    )
    spec = parse_job(dump_yaml(load_yaml(text, "")) if changed else text, "job.yaml")
    times = {"time-min": "12:00:00", "begin": "16:00"}
    assert spec.slurm.directives == {**times, "reservation": "0123", "nice": 16, "priority": 1000}
    expected = {"a": "12:30:00", "b": "3.10", "c": ["0.90", "08", 7], "d": 1000.0, "e": math.inf, "f": 2.5}
    assert spec.backend.args == expected
    assert "#SBATCH --time-min=12:00:00\n" in render_sbatch(plan_of(spec))
