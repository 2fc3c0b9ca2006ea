"""Jobs of commands: command lines after ``--``, standard input, and options over a job file."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.cli.job_source import in_option_words, job_of_command, program_name
from launcher.jobfile.jobfile import parse_job, validate_job
from launcher.plan.placeholders import task_argv
from launcher.rundir.yaml_files import dump_yaml
from tests.support.launcher import GPUJOB, HARD_NAMES, clean_environment, facts_of, gpujob, plan_of, read_json

JOB = {"name": "job", "workers": [{"command": "true"}], "progress": {"total_items": 10}}
HARD_WORDS = [name for name in HARD_NAMES if name != "{rank}"]  # a placeholder, as in a job file
SWEEP: dict[str, Any] = {
    "name": "s",
    "workers": [{"command": "true {lr}"}],
    "sweep": {"grid": {"lr": [1, 2]}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a job file and a program."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    return tmp_path


def plan_json(folder: Path, *arguments: str) -> dict[str, Any]:
    """The plan of this command line, without the time in the names of run directories."""
    done = gpujob("plan", "--json", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    body = json.loads(re.sub(r"\d{8}_\d{6}", "TIME", done.stdout))
    assert isinstance(body, dict)
    return body


words = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=4)
values = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(HARD_NAMES),
        "workers[0].count": st.integers(1, 8),
        "workers[0].gpus": st.integers(0, 8),
        "resources.nodes": st.integers(1, 4),
        "slurm.time_limit": st.sampled_from(["4h", "30", "1-0"]),
        "paths.output_dir": st.sampled_from(["out", "/a b/c"]),
        "progress.total_items": st.sampled_from([1, "1e5"]),
    },
)


@example(["true", "\x85 \u2028"], {})
@given(words, values)
def test_a_saved_job_file_means_what_the_command_line_means(words: list[str], values: dict[str, Any]) -> None:
    words[0] = words[0].strip() or "true"
    body = job_of_command(words, values)
    spec = validate_job(body, "command line")
    assert parse_job(dump_yaml(body), "job.yaml") == spec
    assert spec.workers[0].command == words


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"workers[0].gpus": 2}, 2),
        ({"workers[0].gpus": 1, "workers[0].count": 8}, 8),
        ({"workers[0].gpus": 1, "workers[0].count": 5, "resources.nodes": 2}, 3),
        ({"workers[0].gpus": 16, "resources.nodes": 2}, 8),
        ({"workers[0].gpus": 1, "resources.gpus_per_node": 8}, 8),
        ({}, None),
    ],
)
def test_the_job_asks_for_the_gpus_that_its_workers_need(given: dict[str, Any], expected: int | None) -> None:
    body = job_of_command(["true"], given)
    assert body.get("resources", {}).get("gpus_per_node") == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "nodes", "gpus"),
    [
        (("--gpus", "1", "--workers", "16"), 2, 8),
        (("--gpus", "8", "--workers", "2"), 2, 8),
        (("--gpus", "16"), 2, 8),
        (("--gpus", "1", "--workers", "4"), 1, 4),
        (("--gpus", "1", "--workers", "16", "--nodes", "4"), 4, 4),
        (("--gpus", "1", "--workers", "16", "--gpus-per-node", "16"), 1, 16),
    ],
)
def test_no_node_has_more_gpus_than_the_cluster_file_says(
    folder: Path, options: tuple[str, ...], nodes: int, gpus: int
) -> None:
    (folder / "gpujob.yaml").write_text("gpus_per_node: 8\n")
    plan = plan_json(folder, *options, "--", "true")
    assert (plan["sbatch_nodes"], plan["gpus_per_node"]) == (nodes, gpus)


def test_a_size_that_fits_no_nodes_of_the_cluster_file_is_an_error_of_the_option(folder: Path) -> None:
    (folder / "gpujob.yaml").write_text("gpus_per_node: 8\n")
    done = gpujob("plan", "--gpus", "12", "--", "true", cwd=folder)
    assert "--gpus: 12 is neither at most --gpus-per-node = 8 nor a multiple of it; use 8 or 16" in done.stderr


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "src/train.py", "--lr", "1"], "train"),
        (["python", "-m", "my.pkg", "x"], "my.pkg"),
        (["torchrun", "--nproc-per-node", "4", "train.py"], "train"),
        (["bash", "run.sh"], "run"),
        (["bash", "-lc", "ulimit -v 1000; exec python train.py"], "bash"),
        (["python", "-c", "import runpy; runpy.run_path('a.py')"], "python"),
        (["./bin/solver", "-v"], "solver"),
        ([""], "job"),
    ],
)
def test_a_job_is_named_after_its_program(command: list[str], name: str) -> None:
    assert program_name(command) == name


def test_the_words_of_a_command_reach_the_program_unchanged(folder: Path) -> None:
    done = gpujob("run", "--quiet", "--", sys.executable, "train.py", *HARD_WORDS, "--", "-f", cwd=folder)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (folder / "logs").iterdir()
    assert read_json(run_dir / "manifest.json")["job_name"] == "train"
    (output,) = run_dir.glob("*_worker_w0.out")
    assert output.read_text().strip() == str([*HARD_WORDS, "--", "-f"])


def test_a_placeholder_in_a_word_is_filled_in() -> None:
    body = job_of_command(["true", "--shard={rank}"], {"workers[0].count": 2})
    plan = plan_of(validate_job(body, "command line"))
    assert [task_argv(plan, task, facts_of(plan))[1] for task in plan.tasks] == ["--shard=0", "--shard=1"]


def test_a_saved_job_file_gives_the_same_plan(folder: Path) -> None:
    options = ("--gpus", "2", "--workers", "4", "--nodes", "2", "--time", "4h", "--total", "1e5", "--set", "env.A=5")
    direct = plan_json(folder, *options, "--save", "saved.yaml", "--", "python3", "train.py", "a b")
    assert plan_json(folder, "saved.yaml") == direct
    again = gpujob("plan", "--save", "saved.yaml", "job.yaml", cwd=folder)
    assert (again.returncode, again.stderr) == (2, "gpujob: --save: saved.yaml already exists; choose another name\n")


def test_a_job_file_with_mistakes_is_not_saved(folder: Path) -> None:
    when_planned = ("--gpus", "12", "--gpus-per-node", "8")
    for options in (("--gpus", "x"), when_planned):
        assert gpujob("plan", "--save", "saved.yaml", *options, "--", "true", cwd=folder).returncode == 2
        assert not (folder / "saved.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "x", "--", "true"], 'command line: 1 problem\n  --gpus: "x" is not a whole number'),
        (["--output", "", "--", "true"], "gpujob: --output: is empty; give a value or leave the option out"),
        (["--nodes", "0", "--", "true"], "  --nodes: 0 must be greater than or equal to 1"),
        (["--time", "4x", "--", "true"], "  --time: '4x' is not a time limit; write for example 4h"),
        (
            ["--gpus", "12", "--gpus-per-node", "8", "--", "true"],
            "  --gpus: 12 is neither at most --gpus-per-node = 8 nor a multiple of it; use 8 or 16",
        ),
        (["--"], "  COMMAND: the command is empty"),
        ([], "no job; name a job file or a command, as in gpujob plan -- python train.py"),
        (["python", "train.py"], "2 job files; a command comes after --, as in gpujob plan -- python train.py"),
        (["job.yaml", "--", "true"], "a job file, job.yaml, and a command after --; leave one of them out"),
        (["job.yaml", "-f", "b.yaml"], "two job files: job.yaml and b.yaml; leave one of them out"),
        (["job.yaml", "--set", "gpus"], "--set gpus: is not KEY=VALUE; write for example --set workers[0].gpus=2"),
        (["job.yaml", "--set", "a..b=1"], "--set a..b=1: is not KEY=VALUE"),
        (
            ["job.yaml", "--set", "progres.total_items=1"],
            '--set progres.total_items: unknown key "progres"; did you mean "progress"?',
        ),
        (
            ["--set", "monitoring.stall_timout=1", "--", "true"],
            '--set monitoring.stall_timout: unknown key "stall_timout"; did you mean "stall_timeout"?',
        ),
        (["job.yaml", "--set", "workers.w.gpus=1"], 'workers.w.gpus: workers has no role "w" (known: worker)'),
        (["job.yaml", "--set", "workers[1].gpus=1"], "workers[1].gpus: workers has 1 entry, counted from 0"),
        (["job.yaml", "--set", "slurm.partition=3"], '--set slurm.partition: 3 is not a text; write it in quotes: "3"'),
        (["job.yaml", "--set", "slurm.account=0123"], 'slurm.account: 0123 is not a text; write it in quotes: "0123"'),
        (["job.yaml", "--set", "env=[1"], "--set env: 1 problem\n  line 1, column 3: not YAML"),
        (["two.yaml", "--gpus", "1"], "--gpus: two.yaml has 2 roles of workers; choose one: --set workers[0].gpus=1"),
        (["train.py"], "train.py is a program, not a job file; write `gpujob plan -- python train.py`"),
        (["a b.sh"], "write `gpujob plan -- bash 'a b.sh'`"),
        (["solver"], "solver is a program, not a job file; write `gpujob plan -- ./solver`"),
        (
            ["monitor_config.yaml"],
            "watch that job with `gpujob attach monitor_config.yaml`",
        ),
    ],
)
def test_a_mistake_is_reported_in_the_words_of_the_command(arguments: list[str], message: str, folder: Path) -> None:
    (folder / "two.yaml").write_text("name: j\nworkers: [{command: x}, {role: b, command: y}]\n")
    (folder / "solver").write_bytes(b"\x7fELF\x02")
    (folder / "monitor_config.yaml").write_text("job: {name: x, num_workers: 4}\npaths: {output_dir: o, log_dir: l}\n")
    before = sorted(folder.iterdir())
    done = gpujob("plan", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert sorted(folder.iterdir()) == before


def test_a_run_on_this_machine_warns_of_options_for_slurm(folder: Path) -> None:
    (folder / "job.yaml").write_text("name: j\nworkers: [{command: 'true'}]\nslurm: {time_limit: 1h, qos: high}\n")
    options = ("--time", "1h", "--memory", "1G", "--set", "slurm.qos=low")
    for job in (["job.yaml", *options], [*options, "--", "true"]):
        done = gpujob("run", "--quiet", *job, cwd=folder)
        assert done.stderr == (
            "gpujob: warning: --memory, --time, --set slurm.qos are for Slurm and have no effect on this machine; "
            "`timeout 1h gpujob run ...` stops a job after an hour\n"
        )
    assert gpujob("run", "--quiet", "job.yaml", cwd=folder).stderr == ""


def test_a_shell_command_is_one_word(folder: Path) -> None:
    done = gpujob("plan", "--set", "workers[0].shell=true", "--", "echo hi | cat", cwd=folder)
    assert "\n  bash -c 'echo hi | cat'\n" in done.stdout


def test_check_names_options(folder: Path) -> None:
    done = gpujob("check", "--local", "--", "no-such-program", cwd=folder)
    assert done.returncode == 2
    assert 'ERROR   COMMAND: "no-such-program"' in done.stdout


@pytest.mark.parametrize("file", [["-"], ["-f", "-"]])
def test_a_job_file_comes_from_standard_input(file: list[str], folder: Path) -> None:
    done = subprocess.run(
        [GPUJOB, "plan", *file, "--explain", "--json"],
        input=yaml.safe_dump(JOB | {"slurm": {"partition": "gpu"}}),
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"source": "standard input: slurm.partition"' in done.stdout


def test_a_job_file_of_a_process_substitution_is_read_once(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    for name, text in (("job.yaml", "true"), ("sweep.yaml", "2 points")):
        shell = f"exec {GPUJOB} plan --local <(cat {name})"
        done = subprocess.run(
            ["bash", "-c", shell], cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert text in done.stdout


def test_a_sweep_keeps_the_job_file_that_it_ran(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    done = gpujob("run", "sweep.yaml", "--set", "sweep.grid.lr=[7]", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    (home,) = (folder / "logs").iterdir()
    assert yaml.safe_load((home / "job.yaml").read_text())["sweep"] == {"grid": {"lr": [7]}}


def test_explain_names_the_option_that_sets_a_value(folder: Path) -> None:
    arguments = ("job.yaml", "--partition", "a", "--set", "slurm.account=b", "--set", "env={A: x}", "--explain")
    rows = plan_json(folder, *arguments)["explain"]
    sources = {row["key"]: row["source"] for row in rows}
    assert {key: sources[key] for key in ("slurm.partition", "slurm.account", "env.A", "slurm.qos")} == {
        "slurm.partition": "--partition",
        "slurm.account": "--set slurm.account",
        "env.A": "--set env",
        "slurm.qos": "default",
    }


def test_explain_names_the_option_that_sets_a_sweep(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    done = gpujob("plan", "sweep.yaml", "--set", "sweep.grid.lr=[7]", "--explain", cwd=folder)
    assert re.search(r"(?m)^\{lr\} +7 +--set sweep\.grid\.lr$", done.stdout)


def test_a_setting_replaces_adds_and_removes(folder: Path) -> None:
    settings = ("--set", "progress.total_items=null", "--set", "workers.worker.count=3", "--set", "monitoring.linger=0")
    gpujob("plan", "job.yaml", *settings, "--save", "saved.yaml", cwd=folder)
    assert yaml.safe_load((folder / "saved.yaml").read_text()) == {
        "name": "job",
        "workers": [{"command": "true", "count": 3}],
        "progress": {},
        "monitoring": {"linger": 0},
    }


def test_only_places_are_replaced_by_options() -> None:
    options = {"name": "--name", "paths.output_dir": "--output", "workers[0].gpus": "--gpus"}
    for text, expected in (
        ("name: 7 is not the name of a module: name it", "--name: 7 is not the name of a module: name it"),
        ("workers (worker).gpus: see {output_dir} and output_dir", "--gpus: see {output_dir} and --output"),
        ("mypaths.output_dir workers[0].gpus_x", "mypaths.output_dir workers[0].gpus_x"),
    ):
        assert in_option_words(text, options) == expected
