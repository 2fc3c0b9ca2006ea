"""Commands that start no job: messages, exit statuses, JSON."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from launcher.cli.init import TEMPLATE
from launcher.cli.main import commands
from launcher.jobfile.jobfile import JobSpec
from launcher.jobfile.yamlfile import parse_yaml_model
from tests.support.launcher import GPUJOB, HARD_NAMES, clean_environment, gpujob

JOB = {"name": "job", "workers": [{"command": "true"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a valid job file."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", sorted(commands.all_commands()))
def test_the_help_of_a_command_shows_an_example(name: str) -> None:
    result = CliRunner().invoke(commands, [name, "--help"])
    assert result.exit_code == 0
    assert re.search(r"example: gpujob \w+", result.output)


def test_init_writes_a_first_job_file(tmp_path: Path) -> None:
    done = gpujob("init", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "job.yaml").read_text() == TEMPLATE
    assert parse_yaml_model(TEMPLATE, "job.yaml", JobSpec).name == "my-job"
    done = gpujob("check", "job.yaml", "--local", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "1 Environment"
    assert done.stdout.endswith("\njob.yaml: 4 worker tasks on 1 node, 0 GPUs and 5 CPUs per node: ok\n")
    assert files_in(tmp_path) == ["job.yaml"]


def test_the_first_job_file_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(TEMPLATE.replace("sleep 0.2", "sleep 0.01"))
    done = gpujob("run", "job.yaml", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "- items: 400 of 400" in done.stdout


def test_a_dumb_terminal_gets_lines(tmp_path: Path) -> None:
    """It cannot show a picture again, and rich shows it nothing."""
    terminal, side = os.openpty()
    environment = clean_environment(TERM="dumb")
    subprocess.run([GPUJOB, "run", "--", "true"], cwd=tmp_path, env=environment, stdout=side, timeout=60, check=True)
    os.close(side)
    assert b" starting | workers 1 planned" in os.read(terminal, 65536)
    os.close(terminal)


@pytest.mark.parametrize("word", HARD_NAMES)
def test_init_writes_a_job_file_for_a_command(word: str, tmp_path: Path) -> None:
    done = gpujob("init", "--", "echo", word, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "job.yaml").read_text()
    spec = parse_yaml_model(text, "job.yaml", JobSpec)
    assert (spec.name, spec.workers[0].command, spec.workers[0].count) == ("echo", ["echo", word], 1)
    assert spec.progress.total_items is None
    assert text.count("\n") == TEMPLATE.count("\n") - 1


def test_init_names_the_file_that_it_writes(tmp_path: Path) -> None:
    done = gpujob("init", "my job.yaml", cwd=tmp_path)
    text = (tmp_path / "my job.yaml").read_text()
    for shown in (done.stdout, text):
        assert "`gpujob run 'my job.yaml'`" in shown
        assert " job.yaml`" not in shown.replace("'my job.yaml'", "")


def test_init_replaces_a_file_only_with_force(folder: Path) -> None:
    done = gpujob("init", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpujob: job.yaml already exists; choose another name, or use --force to replace it\n"
    assert yaml.safe_load((folder / "job.yaml").read_text()) == JOB
    assert gpujob("init", "--force", cwd=folder).returncode == 0
    assert (folder / "job.yaml").read_text() == TEMPLATE
    assert "cannot be written: No such file" in gpujob("init", "no/such/job.yaml", cwd=folder).stderr


def test_plan_writes_nothing(folder: Path) -> None:
    before = files_in(folder)
    result = gpujob("plan", "job.yaml", cwd=folder)
    assert result.returncode == 0
    assert "#SBATCH --job-name=job" in result.stdout
    view = json.loads(gpujob("plan", "job.yaml", "--json", "--nodes", "cn[07-08]", cwd=folder).stdout)
    assert [process["node"] for process in view["processes"]] == ["cn07"]
    assert gpujob("plan", "job.yaml", "--local", cwd=folder).returncode == 0
    assert files_in(folder) == before


def test_a_local_plan_has_processes_and_no_script(folder: Path) -> None:
    worker = {
        "count": 2,
        "gpus": 1,
        "command": "true --port {http_port} --head {head}",
        "env": {"MY_TOKEN": "hunter2"},
    }
    job = {**JOB, "resources": {"gpus_per_node": 2}, "workers": [worker]}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    body = json.loads(gpujob("plan", "job.yaml", "--local", "--json", cwd=folder).stdout)
    assert (body["script"], body["srun"]) == (None, [])
    result = gpujob("plan", "job.yaml", "--local", cwd=folder)
    advice = "its value is in the job file; remove it and add `secrets: [MY_TOKEN]`, which reads it from this shell"
    assert (result.returncode, result.stderr) == (0, f"gpujob: warning: workers[0].env.MY_TOKEN: {advice}\n")
    for word in ("sbatch_script", "#SBATCH", "srun", "hunter2"):
        assert word not in result.stdout.replace("sbatch_script.sh", "")
    for process in body["processes"]:
        assert process["command"][-1] == "127.0.0.1"
        assert f"  {' '.join(process['command'])}\n" in result.stdout
        ports = ", ".join(f"{name} port {number}" for name, number in process["ports"].items())
        about = f"rank {process['rank']}, on {process['node']}, GPUs {process['rank']}, {ports}"
        assert f"{process['worker']}: {about}\n" in result.stdout
        assert f"variables in addition to the user's own: {' '.join(process['environment'])}" in re.sub(
            r"\n  (?=[A-Z])", " ", result.stdout
        )
        assert {"MY_TOKEN", "CUDA_VISIBLE_DEVICES"} <= set(process["environment"])


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        (
            "a",
            (
                "job.yaml: 1 problem\n"
                "  resources.nodes: 2 nodes for 1 worker, and there are 1; name 1 more, or ask for fewer"
            ),
        ),
        ("a[1", "--nodes: host list 'a[1': a bracket is not closed"),
        ("a,b,a", "--nodes: a is listed twice; name each node once"),
        (" , ", "--nodes: contains no host; write for example cn[01-04]"),
        ("", "--nodes: contains no host; write for example cn[01-04]"),
    ],
)
def test_plan_refuses_hosts_that_do_not_fit(nodes: str, problem: str, folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "resources": {"nodes": 2}}))
    done = gpujob("plan", "job.yaml", "--nodes", nodes, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"gpujob: {problem}\n")


def test_plan_warns_about_an_unknown_alias(folder: Path) -> None:
    (folder / "gpujob.yaml").write_text("models: {dsr1: /models/DSR1}\n")
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "model": {"path": "dsr2"}}))
    done = gpujob("plan", "job.yaml", cwd=folder)
    assert done.returncode == 0
    assert 'gpujob: warning: model.path: "dsr2" is neither a directory nor an alias' in done.stderr


@pytest.mark.parametrize("options", [[], ["--json"], ["--explain"], ["--local"]])
def test_plan_warns_about_problems_for_which_a_start_is_refused(options: list[str], folder: Path) -> None:
    worker = {"role": "w", "command": "python3 none.py {rnak}"}
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "workers": [worker]}))
    done = gpujob("plan", "job.yaml", *options, cwd=folder)
    assert done.returncode == 0
    refused = "run refuses it" if options == ["--local"] else "submit and run refuse it"
    where = f"{folder}; give its path from there, or use {{job_dir}}"
    problems = [
        f'workers (w).command: "none.py" does not exist in {where}',
        'workers (w).command: {rnak} is not a placeholder; did you mean "{rank}"?; to keep the braces write {{rnak}}',
    ]
    assert done.stderr.splitlines() == [f"gpujob: warning: {problem}; {refused}" for problem in problems]
    assert done.stdout
    if options == ["--json"]:
        assert json.loads(done.stdout)["job_name"] == "job"
    for command in ("submit", "run"):
        refused_start = gpujob(command, "job.yaml", cwd=folder)
        assert refused_start.returncode == 2
        assert set(problems) <= {line.strip() for line in refused_start.stderr.splitlines()}


def test_plan_shows_the_warnings_of_a_start(folder: Path) -> None:
    command = ("--set", "slurm.time_limit=1h", "--local", "--", "echo", "$LR")
    planned = gpujob("plan", *command, cwd=folder).stderr
    assert planned.startswith("gpujob: warning: COMMAND: $LR is not expanded, since no shell is involved")
    assert planned.count("\n") == 1


def test_plan_warns_about_problems_that_only_submit_refuses(folder: Path) -> None:
    slurm = {"time_limit": "00:01:00", "signal": "USR1@120"}
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "slurm": slurm}))
    done = gpujob("plan", "job.yaml", cwd=folder)
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpujob: warning: slurm.signal: 120 s before a time limit of 60 s")
    assert line.endswith("; submit refuses it")
    assert gpujob("plan", "job.yaml", "--local", cwd=folder).stderr == ""


@pytest.mark.parametrize("command", ["check", "plan", "submit", "run"])
def test_an_invalid_job_file_is_refused_before_any_action(command: str, folder: Path) -> None:
    (folder / "job.yaml").write_text("name: 5\nwokers: []\n")
    done = gpujob(command, "job.yaml", cwd=folder)
    assert done.returncode == 2
    output = done.stdout + done.stderr
    assert "name: 5 is not a text" in output
    assert 'did you mean "workers"?' in output
    assert "Traceback" not in output
    assert files_in(folder) == ["job.yaml"]


def test_mistakes_of_both_files_are_reported_together(folder: Path) -> None:
    (folder / "job.yaml").write_text("name: 5\n")
    (folder / "gpujob.yaml").write_text("partitions: gpu\n")
    done = gpujob("plan", "job.yaml", cwd=folder)
    assert done.returncode == 2
    assert "gpujob.yaml: 1 problem" in done.stderr
    assert "job.yaml: 2 problems" in done.stderr


def test_workers_that_do_not_fit_are_a_mistake_of_the_job_file(folder: Path) -> None:
    job = {**JOB, "resources": {"gpus_per_node": 8}, "workers": [{"command": "true", "gpus": 12}]}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    done = gpujob("plan", "job.yaml", cwd=folder)
    problem = "workers[0].gpus: 12 is neither at most gpus_per_node = 8 nor a multiple of it; use 8 or 16"
    assert (done.returncode, done.stderr) == (2, f"gpujob: job.yaml: 1 problem\n  {problem}\n")


@pytest.mark.parametrize("name", ["none.yaml", "folder"])
def test_a_missing_job_file_is_reported(name: str, folder: Path) -> None:
    (folder / "folder").mkdir()
    done = gpujob("run", name, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpujob: {name}: 1 problem\n  cannot be read: ")


def findings_of(folder: Path, job: Any, *options: str) -> dict[str, Any]:
    """Output of ``check --json`` for a job file."""
    (folder / "job.yaml").write_text(job if isinstance(job, str) else yaml.safe_dump(job))
    done = gpujob("check", "job.yaml", "--json", *options, cwd=folder)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 2)
    return found


def test_check_reports_all_errors_and_refuses(folder: Path) -> None:
    (folder / "file").write_text("")
    job = {**JOB, "workers": [{"command": "no-such-program"}], "paths": {"output_dir": "file/out"}, "inputs": ["none"]}
    found = findings_of(folder, job, "--local")
    assert (found["schema"], found["ok"]) == (1, False)
    assert [(finding["code"], finding["level"], finding["place"]) for finding in found["findings"]] == [
        ("no-program", "error", "workers (worker).command"),
        ("no-input", "error", "inputs[0]"),
        ("not-writable", "error", "paths.output_dir"),
    ]
    done = gpujob("check", "job.yaml", "--local", cwd=folder)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.count("\n  ERROR   ") == 3
    assert done.stdout.endswith(": not ready: 3 errors\n")
    assert files_in(folder) == ["file", "job.yaml"]


def test_check_has_six_sections_and_writes_nothing(folder: Path) -> None:
    found = findings_of(folder, JOB, "--local")
    names = ["Environment", "Resources", "Input data", "Output", "Job", "Monitoring"]
    assert (found["ok"], [section["name"] for section in found["sections"]]) == (True, names)
    assert all(section["items"] for section in found["sections"])
    assert files_in(folder) == ["job.yaml"]


def test_check_reports_warnings_and_accepts_the_job(folder: Path) -> None:
    (folder / "gpujob.yaml").write_text("target_dir: /no/such/targets\n")
    job = {**JOB, "resources": {"gpus_per_node": 64}, "workers": [{"command": "true", "gpus": 64}]}
    found = findings_of(folder, job, "--local")
    assert found["ok"] is True
    levels = {finding["code"]: finding["level"] for finding in found["findings"]}
    assert levels.items() >= {"target-dir": "warning", "few-gpus": "warning"}.items()


def test_run_refuses_errors_and_only_prints_warnings(folder: Path) -> None:
    job = {**JOB, "monitoring": {"enabled": False}, "paths": {"output_dir": "out"}}
    (folder / "out").mkdir()
    (folder / "out/output_worker_0.json").write_text("{}")
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    done = gpujob("run", "job.yaml", "--quiet", cwd=folder)
    assert done.returncode in (0, 8)
    assert done.stderr.startswith(f'gpujob: warning: paths.output_dir: "{folder}/out" already contains 1 file')
    before = files_in(folder)
    (folder / "job.yaml").write_text(yaml.safe_dump({**job, "environment": {"required": ["NO_SUCH_VARIABLE"]}}))
    done = gpujob("run", "job.yaml", "--quiet", cwd=folder)
    assert (done.returncode, files_in(folder)) == (2, before)
    assert "environment.required: NO_SUCH_VARIABLE is not set for worker" in done.stderr


def test_json_is_without_warnings_and_standard_error_has_them(folder: Path) -> None:
    done = gpujob("run", "--json", "--gpus", "64", "--", "true", cwd=folder)
    assert done.stderr.startswith("gpujob: warning: --gpus: the plan uses 64 GPUs and this machine has ")
    assert json.loads(done.stdout)["state"] == "COMPLETED"


@pytest.mark.parametrize("job", ["name: 5\n", "a: [", {**JOB, "name": ""}])
def test_check_prints_json_for_an_invalid_file(job: Any, folder: Path) -> None:
    found = findings_of(folder, job)
    assert found["ok"] is False
    assert found["findings"][0]["place"] == "job.yaml"


def test_the_schema_describes_the_job_file(tmp_path: Path) -> None:
    schema = json.loads(gpujob("schema", cwd=tmp_path).stdout)
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    assert schema["additionalProperties"] is False
    assert "cluster" in json.loads(gpujob("schema", "--cluster", cwd=tmp_path).stdout)["properties"]


@pytest.mark.parametrize("command", ["watch", "report", "stop"])
def test_an_unknown_job_is_reported(command: str, tmp_path: Path) -> None:
    done = gpujob(command, "4459", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpujob: '4459' is neither a run directory nor the id or name of a job in ")
    assert "give the run directory that `gpujob submit` or `gpujob run` printed" in done.stderr


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_an_unusable_manifest_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "logs/4459_x").mkdir(parents=True)
    (tmp_path / "logs/4459_x/manifest.json").write_text(text)
    done = gpujob("watch", "4459", "--once", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpujob: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["sumbit", "job.yaml"], ["run"], ["run", "job.yaml", "--quite"], ["watch", "1", "--until", "x"]]
)
def test_invalid_arguments_are_refused(arguments: list[str], folder: Path) -> None:
    done = gpujob(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: gpujob" in done.stderr


@pytest.mark.parametrize("variables", [{}, {"HOME": ""}, {"HOME": "/proc"}, {"HOME": "/no/such/home"}, {"LC_ALL": "C"}])
def test_any_home_and_locale_work(variables: dict[str, str], folder: Path) -> None:
    done = gpujob("check", "job.yaml", "--local", cwd=folder, env={"PATH": os.environ["PATH"], **variables})
    assert (done.returncode, done.stderr) == (0, "")


def test_hard_folder_and_job_names_are_shown_unchanged(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*HARD_NAMES)
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "name": "".join(HARD_NAMES)}))
    view = json.loads(gpujob("plan", "job.yaml", "--json", cwd=folder).stdout)
    assert view["job_name"] == "".join(HARD_NAMES)
    assert view["run_dir"].startswith(f"{folder}/logs/")
    assert gpujob("plan", "job.yaml", cwd=folder).returncode == 0
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_folder_name_that_is_not_unicode_is_accepted(options: list[str], tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    done = gpujob("plan", "job.yaml", *options, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_removed_working_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD"; exec "$0" plan job.yaml', str(GPUJOB)], cwd=tmp_path / "gone",
        env=clean_environment(), capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_user_packages_with_our_names_are_not_imported(folder: Path) -> None:
    for name in ("launcher", "exporter", "yaml"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    done = gpujob("check", "job.yaml", "--local", cwd=folder, env=clean_environment(PYTHONPATH=str(folder)))
    assert (done.returncode, done.stderr) == (0, "")
