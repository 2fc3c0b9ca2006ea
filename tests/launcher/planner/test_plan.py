"""The plan: placeholders, environment, description, files."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.manifest import parse_manifest, render_manifest
from launcher.plan.placeholders import fill_placeholders, task_argv, task_environment
from launcher.plan.plan import dump_plan, parse_plan, safe_file_word
from launcher.rundir.files import json_lines, plan_files
from launcher.steps.batch_script import render_sbatch
from tests.support.launcher import clean_environment, facts_of, job_spec, plan_of

VALUES = {"rank": "3", "output_dir": "/data/{rank} out", "role": "{world_size}"}


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{rank}", "3"),
        ("--shard={rank}/{rank}", "--shard=3/3"),
        ("plain", "plain"),
        ("", ""),
        # other braces stay
        ("{unknown}", "{unknown}"),
        ("{}", "{}"),
        ("{0}", "{0}"),
        ("{Rank}", "{Rank}"),
        ("{rank", "{rank"),
        ("rank}", "rank}"),
        ("{ rank }", "{ rank }"),
        ("${rank}", "$3"),
        ("awk '{print $1}'", "awk '{print $1}'"),
        ("x{a,b}", "x{a,b}"),
        # a name in double braces is literal
        ("{{rank}}", "{rank}"),
        ("{{rank}}={rank}", "{rank}=3"),
        ("{{unknown}}", "{unknown}"),
        ("{{}}", "{{}}"),
        # JSON
        ('{"a": {"b": [1, 2]}}', '{"a": {"b": [1, 2]}}'),
        ('{"shard": {rank}}', '{"shard": 3}'),
        ('{"a":{"shard":{rank}}}', '{"a":{"shard":3}}'),
        # a value is data: placeholders in it are not replaced
        ("{output_dir}", "/data/{rank} out"),
        ("{role}{rank}", "{world_size}3"),
    ],
)
def test_placeholders_are_filled(word: str, filled: str) -> None:
    assert fill_placeholders(word, VALUES) == filled


@given(st.text(alphabet='{}abk"\n %r', max_size=20), st.text(max_size=10))
@example("{{a}}", "")
@example("{a}{{a}}{a}", "{a}")
def test_text_other_than_placeholders_is_unchanged(word: str, value: str) -> None:
    assert fill_placeholders(word.replace("{", "["), {"a": value}) == word.replace("{", "[")
    assert fill_placeholders(f"{word.replace('{', '[')}{{ark}}", {"ark": value}) == word.replace("{", "[") + value


def argv_and_environment(worker: dict[str, Any], **over: Any) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of the only worker of a job."""
    plan = plan_of(job_spec(workers=[worker], **over))
    facts = facts_of(plan)
    return task_argv(plan, plan.tasks[0], facts), task_environment(plan, plan.tasks[0], facts, 0)


def argv_of(worker: dict[str, Any], **over: Any) -> list[str]:
    """Arguments of the only worker of a job."""
    return argv_and_environment(worker, **over)[0]


def test_any_value_is_one_argument(hard_name: str) -> None:
    argv = argv_of({"command": "train --out {output_dir} --x={output_dir}"}, paths={"output_dir": f"/data/{hard_name}"})
    assert argv == ["train", "--out", f"/data/{hard_name}", f"--x=/data/{hard_name}"]


def test_an_argument_of_the_command_is_unchanged(hard_name: str) -> None:
    argv = argv_of({"command": ["echo", hard_name.replace("{rank}", "{{rank}}"), '{"a": {"b": 1}}']})
    assert argv == ["echo", hard_name, '{"a": {"b": 1}}']


def shell_arguments(worker: dict[str, Any], directory: str, cwd: Path) -> list[str]:
    """Arguments that a program gets from the shell command of a worker, run by a real shell."""
    argv, variables = argv_and_environment(worker, paths={"output_dir": directory})
    done = subprocess.run(
        argv, cwd=cwd, env=clean_environment(**variables), capture_output=True, text=True, check=False, timeout=20
    )
    assert not (cwd / "pwned").exists()
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def test_a_value_in_a_shell_command_is_one_argument(hard_name: str, tmp_path: Path) -> None:
    worker = {"command": "printf '%s\\0' {output_dir} --out={output_dir} a | cat", "shell": True}
    directory = f"/data/{hard_name}"
    assert shell_arguments(worker, directory, tmp_path) == [directory, f"--out={directory}", "a"]


def test_a_value_inside_shell_quotes_is_data(tmp_path: Path) -> None:
    directory = "/data/a 'b' \"c\" $(touch pwned) `touch pwned`"
    command = (
        "printf '%s\\0' \"{output_dir}/x\" '{output_dir}'\" y\" \"$(echo \"{output_dir}\")\" {{rank}} 'it'\\''s {rank}'"
    )
    assert shell_arguments({"command": command, "shell": True}, directory, tmp_path) == [
        f"{directory}/x",
        f"{directory} y",
        directory,
        "{rank}",
        "it's 0",
    ]


@pytest.mark.parametrize("shell", ["bash -lc", "bash -euo pipefail -c", "/bin/bash -c", "sh -c", "env A=1 sh -c"])
def test_a_value_in_a_command_of_any_shell_is_data(shell: str, tmp_path: Path) -> None:
    worker = {"command": [*shell.split(), "printf '%s\\0' {output_dir}"]}
    assert shell_arguments(worker, "/data/$(touch pwned) x", tmp_path) == ["/data/$(touch pwned) x"]


ODD_PLACES = {
    "after a comment with an apostrophe": "# don't\nprintf %s {output_dir}",
    "after a comment in backticks": "printf %s `# don't` {output_dir}",
    "after a sign that begins no comment": "x='a #b'; : \"${x%% #*}\" ${x#a #} $# a#'b'; echo {output_dir}",
    "after a sign in a word": "printf '%s\\0' $(echo a)#{output_dir} | tail -c +3",
    "after a sign behind an escape": "printf '%s\\0' \\ #{output_dir} | tail -c +3",
    "after a comment behind a bracket": "(true)# don't\nprintf %s {output_dir}",
    "after a comment behind a joined line": ": \\\n# don't\nprintf %s {output_dir}",
    "after a quote of another kind": "printf '%s\\0' $'it\\'s' {output_dir} | tail -z -n 1",
    "in a quote of another kind": "printf %s $'\\'{output_dir}' | tail -c +2",
    "after an escaped quote": "printf '%s\\0' it\\'s {output_dir} | tail -z -n 1",
    "in a substitution": 'echo "$(echo {output_dir})"',
    "in single quotes of a substitution": "echo \"$(echo '{output_dir}')\"",
    "in double quotes of a substitution": 'echo "$(echo "{output_dir}")"',
    "in a substitution with a closing bracket": 'echo "$(case "x y" in x*) echo {output_dir} ;; esac)"',
    "after a closing bracket in a substitution": "echo \"$(case x in (x) ;; esac; grep case /dev/null)\"'{output_dir}'",
    "in backticks": "printf '%s\\0' \"`printf %s {output_dir}`\"",
    "in a here document": "cat <<EOF\n{output_dir}\nEOF",
    "in a here document with an apostrophe": "cat <<-EOF | tail -n 1\nit's \"\n{output_dir}\n\tEOF\n",
    "after a here document": "cat <<A >&2 <<'B'\nit's\nA\n it's\nB\nprintf %s {output_dir}",
    "after the id of the shell": "echo \"$${output_dir}\" | sed 's/^[0-9]*//'",
    "after a shift of bits": "echo $((1 << 2)) | tail -c 0\nn=1; : $((1<<n))\necho {output_dir}",
    "after a default with quotes": "printf '%s\\0' \"${NOTHING:-'a b'}\" ${NOTHING:-'\"'} {output_dir} | tail -z -n 1",
    "in a default": 'echo "${NOTHING:-{output_dir}}"',
    "in an assignment": "x={output_dir}; printf '%s\\0' \"$x\"",
    "in a function": "f() { printf '%s\\0' \"$1\"; }; f {output_dir}",
}


@pytest.mark.parametrize("place", ODD_PLACES)
def test_a_value_anywhere_in_a_shell_command_arrives_and_is_never_code(place: str, tmp_path: Path) -> None:
    directory = "/data/$(touch pwned);touch pwned;`touch  pwned`'\"$(touch pwned)"
    worker = {"command": ["bash", "-c", ODD_PLACES[place]]}
    argv, variables = argv_and_environment(worker, paths={"output_dir": directory})
    done = subprocess.run(
        argv, cwd=tmp_path, env=clean_environment(**variables), capture_output=True, text=True, check=False, timeout=20
    )
    assert not (tmp_path / "pwned").exists()
    assert done.stdout.strip("\0\n") == directory


@pytest.mark.parametrize("shell", ["sh", "bash"])  # sh is often dash, which takes no quotes in arithmetic
def test_a_shell_can_calculate_with_a_value(shell: str) -> None:
    text = 'echo "$((9000 + {rank}))" $(( ({job_id} + 1) * {world_size} ))'
    argv, variables = argv_and_environment({"command": [shell, "-c", text]})
    done = subprocess.run(
        argv, env=clean_environment(**variables), capture_output=True, text=True, check=False, timeout=20
    )
    assert (done.stdout, done.stderr) == ("9000 4460\n", "")


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("rank=a; echo ${rank} \"${rank}/b\" '${rank}'", "a a/b ${rank}\n"),
        ('for output_dir in x y; do echo "${output_dir}.json"; done', "x.json\ny.json\n"),
        ('rank=a; export rank; bash -c "echo \\${rank}-{rank} $rank"', "a-0 a\n"),
        ("echo '${{rank}}' \"{{rank}}\"", "${rank} {rank}\n"),
        ("cat <<'EOF'\n{rank} ${rank} {{rank}}\nEOF", "{rank} ${rank} {rank}\n"),
    ],
)
def test_a_variable_of_the_shell_itself_is_kept(command: str, printed: str) -> None:
    argv, variables = argv_and_environment({"command": command, "shell": True})
    done = subprocess.run(
        argv, env=clean_environment(**variables), capture_output=True, text=True, check=False, timeout=20
    )
    assert (done.stdout, done.stderr) == (printed, "")


def test_the_environment_names_the_worker_and_its_directories() -> None:
    spec = job_spec(
        name="my job",
        resources={"nodes": 2, "gpus_per_node": 2},
        workers=[{"role": "pre", "count": 1, "gpus": 4, "command": "x"}],
        paths={"output_dir": "out", "checkpoint_dir": "/ckpt"},
    )
    plan = plan_of(spec)
    environment = task_environment(plan, plan.tasks[1], facts_of(plan, "n1", "n2"), restart=2)
    expected = {
        "PYTHONUNBUFFERED": "1",
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "8300",
        "GPUJOB_JOB_ID": "4459",
        "GPUJOB_JOB_NAME": "my job",
        "GPUJOB_WORKER": "pre_w0",
        "GPUJOB_ROLE": "pre",
        "GPUJOB_WORKER_INDEX": "0",
        "GPUJOB_NODE": "n2",
        "GPUJOB_NODE_INDEX": "1",
        "GPUJOB_NODES": "n1,n2",
        "GPUJOB_ATTEMPT": "0",
        "GPUJOB_RESTART": "2",
        "GPUJOB_PROGRESS_FILE": "/home/ana/work/logs/4459_my_job_20251122_041341/progress/n2_pre_w0_r2.jsonl",
        "GPUJOB_RUN_DIR": "/home/ana/work/logs/4459_my_job_20251122_041341",
        "GPUJOB_OUTPUT_DIR": "/home/ana/work/out",
        "GPUJOB_CHECKPOINT_DIR": "/ckpt",
        "GPUJOB_LOG_DIR": "/home/ana/work/logs/4459_my_job_20251122_041341",
    }
    assert {name: environment[name] for name in expected} == expected
    assert all(name in expected or name.startswith("GPUJOB_") for name in environment)


def test_variables_of_the_role_have_precedence_over_those_of_the_job() -> None:
    spec = job_spec(
        env={"A": "job", "B": "job {rank}", "RANK": "mine"}, workers=[{"command": "x", "env": {"A": "role {worker}"}}]
    )
    plan = plan_of(spec)
    environment = task_environment(plan, plan.tasks[0], facts_of(plan), 0)
    assert [environment[name] for name in ("A", "B", "RANK")] == ["role worker_w0", "job 0", "mine"]


def test_each_task_and_run_has_its_own_progress_file() -> None:
    spec = job_spec(
        resources={"nodes": 3, "gpus_per_node": 2},
        workers=[{"role": "pre", "gpus": 4, "command": "x"}, {"role": "post", "count": 2, "gpus": 1, "command": "x"}],
    )
    plan = plan_of(spec)
    runs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    files = {
        task_environment(plan, planned, dataclasses.replace(facts_of(plan), attempt=attempt), restart)[
            "GPUJOB_PROGRESS_FILE"
        ]
        for planned in plan.tasks
        for attempt, restart in runs
    }
    assert len(files) == len(plan.tasks) * len(runs)


def test_a_progress_file_of_the_job_file_is_kept() -> None:
    plan = plan_of(job_spec(env={"GPUJOB_PROGRESS_FILE": "/scratch/{rank}.jsonl"}))
    assert task_environment(plan, plan.tasks[0], facts_of(plan), 0)["GPUJOB_PROGRESS_FILE"] == "/scratch/0.jsonl"


def test_checkpoints_are_in_the_output_directory_by_default() -> None:
    plan = plan_of(job_spec(paths={"output_dir": "out"}))
    directories = {group.name: group.directory for group in plan.manifest.groups}
    assert directories == {"output": "/home/ana/work/out", "checkpoint": "/home/ana/work/out"}
    plan = plan_of(job_spec())
    assert {group.directory for group in plan.manifest.groups} == {"."}


def test_the_job_file_has_precedence_over_the_cluster_file() -> None:
    cluster = {"partition": "batch", "account": "acc", "qos": "low", "time_limit": "10", "directives": {"a": 1, "b": 2}}
    plan = plan_of(job_spec(slurm={"partition": "gpu", "directives": {"b": 3}}), cluster)
    options = {name: getattr(plan.slurm, name) for name in ("partition", "account", "qos", "time_limit", "directives")}
    assert options == {
        "partition": "gpu",
        "account": "acc",
        "qos": "low",
        "time_limit": "10",
        "directives": {"a": 1, "b": 3},
    }
    assert plan.manifest.time_limit_s == 600
    assert plan.manifest.partition == "gpu"


def test_a_local_job_has_no_time_limit_that_nobody_enforces() -> None:
    cluster = {"time_limit": "10"}
    for spec in (job_spec(slurm={"time_limit": "5"}), job_spec()):
        assert plan_of(spec, cluster, local=True).manifest.time_limit_s is None


def test_cpus_are_those_of_the_fullest_node_plus_one() -> None:
    workers = [
        {"role": "a", "count": 3, "cpus": 4, "command": "x"},
        {"role": "b", "count": 1, "cpus": 2, "command": "x"},
    ]
    spec = job_spec(resources={"nodes": 2}, workers=workers)
    assert plan_of(spec).cpus_per_node == 2 * 4 + 2 + 1
    assert plan_of(job_spec(resources={"cpus_per_node": 6})).cpus_per_node == 6


@pytest.mark.parametrize(
    ("workers", "gpus_per_node", "of_node", "cpus"),
    [
        ({"count": 8, "gpus": 1, "cpus": 8}, 8, 64, 64),
        ({"count": 64}, 0, 64, 64),
        ({"count": 63}, 0, 64, 64),
        ({"count": 62}, 0, 64, 63),
        ({"count": 65}, 0, 64, 66),
        ({"count": 64}, 0, None, 65),
    ],
)
def test_no_cpu_is_added_where_the_workers_have_all_of_a_node(
    workers: dict[str, Any], gpus_per_node: int, of_node: int | None, cpus: int
) -> None:
    cluster = {"gpus_per_node": 8, "cpus_per_node": of_node}
    spec = job_spec(resources={"nodes": 1, "gpus_per_node": gpus_per_node}, workers=[{"command": "x", **workers}])
    assert plan_of(spec, cluster).cpus_per_node == cpus


@pytest.mark.parametrize(
    ("resources", "slurm", "cluster", "cpus"),
    [
        ({}, {}, {"gpus_per_node": 8, "cpus_per_node": 96}, 96),
        ({"gpus_per_node": 8}, {}, {"gpus_per_node": 8, "cpus_per_node": 96}, 96),
        ({"gpus_per_node": 8, "cpus_per_node": 10}, {}, {"gpus_per_node": 8, "cpus_per_node": 96}, 10),
        ({"gpus_per_node": 8}, {}, {"gpus_per_node": 16, "cpus_per_node": 96}, 9),
        ({"gpus_per_node": 8}, {}, {"cpus_per_node": 96}, 9),
        ({"gpus_per_node": 8}, {}, {"gpus_per_node": 8}, 9),
        ({"gpus_per_node": 8}, {}, {"gpus_per_node": 8, "cpus_per_node": 4}, 9),
        ({"gpus_per_node": 8}, {"exclusive": True}, {"gpus_per_node": 8, "cpus_per_node": 96}, 9),
    ],
)
def test_a_job_with_all_gpus_of_its_nodes_requests_all_cpus(
    resources: dict[str, Any], slurm: dict[str, Any], cluster: dict[str, Any], cpus: int
) -> None:
    spec = job_spec(resources=resources, slurm=slurm, workers=[{"gpus": 8, "command": "x"}])
    assert plan_of(spec, cluster).cpus_per_node == cpus


def test_a_job_without_gpus_requests_no_whole_node() -> None:
    assert plan_of(job_spec(), {"gpus_per_node": 8, "cpus_per_node": 96}).cpus_per_node == 2


def test_a_local_plan_listens_on_loopback() -> None:
    assert plan_of(local=True).manifest.listen_address == "127.0.0.1:0"
    assert plan_of().manifest.listen_address is None
    named = plan_of(job_spec(monitoring={"listen_address": ":9410"}), {"listen_address": ":9999"}, local=True)
    assert named.manifest.listen_address == ":9410"


def test_the_job_file_enables_gpu_metrics() -> None:
    assert plan_of().manifest.gpu_metrics is False
    assert plan_of(job_spec(monitoring={"gpu_metrics": True})).manifest.gpu_metrics is True


def test_patterns_of_the_job_file_get_exporter_names() -> None:
    spec = job_spec(
        progress={"patterns": {"items_processed": "a(.)", "batch_number": "b(.)", "loss": "c(.)"}},
        errors=[{"pattern": "(out of memory|OOM)", "severity": "critical"}, {"pattern": "x", "name": "mine"}],
    )
    manifest = plan_of(spec).manifest
    assert [pattern.name for pattern in manifest.progress] == ["items", "batch", "loss"]
    assert [(pattern.name, pattern.severity) for pattern in manifest.errors] == [
        ("out_of_memory_OOM", "critical"),
        ("mine", "warning"),
    ]


@given(st.text(max_size=200))
@example("..")
@example("/")
@example("日本" * 50)
def test_a_file_word_is_short_without_slash_or_leading_dot(text: str) -> None:
    word = safe_file_word(text)
    assert 1 <= len(word) <= 64
    assert not word.startswith((".", "_"))
    assert not set(word) & set("/\0\n \"'$`*?[]{}()<>|&;\\")


def test_the_name_of_the_run_directory_fits_a_file_system(tmp_path: Path) -> None:
    plan = plan_of(job_spec(name="𝔤𝔭𝔲" * 30), workdir=str(tmp_path))
    plan.run_dir("local-01234567").mkdir(parents=True)


def test_a_plan_survives_writing_and_reading(hard_name: str) -> None:
    spec = job_spec(
        name=hard_name,
        resources={"nodes": 2, "gpus_per_node": 4, "memory_per_node": "64G"},
        workers=[
            {"role": "a", "count": 3, "gpus": 2, "command": ["x", hard_name], "restart": {"max": 2, "backoff": 1}},
            {"role": "b", "command": "y", "critical": False, "env": {"A": hard_name}},
        ],
        slurm={"time_limit": "1-00", "directives": {"requeue": True, "comment": hard_name}},
        paths={"output_dir": hard_name},
        progress={"total_items": 5, "total_epochs": 3, "total_steps": 7, "patterns": {"items": r"(\d+)"}},
    )
    plan = plan_of(spec, {"target_dir": "/srv/targets", "cluster": hard_name}, workdir=f"/data/{hard_name}")
    manifest = parse_manifest(json.dumps(render_manifest(plan.manifest)), Path("/run"))
    assert (manifest.total_items, manifest.total_epochs, manifest.total_steps) == (5, 3, 7)
    assert [task.restarts for task in manifest.tasks] == [2, 2, 2, 0]
    read = parse_plan(json.loads(json.dumps(dump_plan(plan))), manifest)
    assert read == dataclasses.replace(
        plan, resolved={}, manifest=dataclasses.replace(plan.manifest, run_dir=Path("/run"))
    )


def test_a_written_task_has_all_its_fields() -> None:
    plan = plan_of(
        job_spec(workers=[{"command": "true {rank}", "count": 2, "gpus": 1}], resources={"gpus_per_node": 2})
    )
    assert dump_plan(plan)["tasks"] == [dataclasses.asdict(planned) for planned in plan.tasks]


def test_json_has_one_line_per_key_and_list_entry(hard_name: str) -> None:
    body = {"schema": 1, "none": [], "tasks": [{"rank": 0, "gpus": [0, 1]}, {"rank": 1, "worker": hard_name}]}
    text = json_lines(body)
    assert json.loads(text) == body
    assert text.splitlines()[:4] == ["{", '"schema": 1,', '"none": [],', '"tasks": [']
    assert text.splitlines()[4] == ' {"rank": 0, "gpus": [0, 1]},'
    assert text.splitlines()[-2:] == ["]", "}"]


def test_only_the_plan_file_contains_secrets() -> None:
    plan = plan_of(job_spec(env={"HF_TOKEN": "hunter2", "A": "ä"}, slurm={"time_limit": "04:00:00"}))
    files = plan_files(plan, render_sbatch(plan))
    assert [name for name, text in files.items() if "hunter2" in text] == ["plan.json"]
    config = yaml.safe_load(files["config.yaml"])
    assert config["env"] == {"HF_TOKEN": "<redacted>", "A": "ä"}
    assert config["slurm"]["time_limit"] == "04:00:00"
    assert os.fspath(plan.run_dir("1")) not in files["manifest.json"]
