"""The batch script and the lines that start its steps."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.plan import Plan
from launcher.sbatch import directives, render_sbatch, sbatch_arguments, scrub, srun_argv
from tests.launcher.conftest import Golden
from tests.launcher.support import clean_environment, job_spec, plan_of

FAKE_PYTHON = f"""\
#!{os.path.realpath(sys.executable)}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "parent": os.getppid()}}))
"""

CASES: dict[str, Plan] = {
    "plain": plan_of(),
    "options": plan_of(
        job_spec(
            name="embed-v2",
            resources={"nodes": 4, "gpus_per_node": 8, "cpus_per_node": 32, "memory_per_node": "64G"},
            workers=[{"count": 32, "gpus": 1, "command": "python embed.py --shard {rank}"}],
            slurm={
                "partition": "gpu",
                "account": "nlp",
                "time_limit": "04:00:00",
                "directives": {
                    "requeue": True,
                    "exclusive": None,
                    "wait": False,
                    "constraint": "h100&nvlink",
                    "nice": 5,
                },
            },
        ),
        {"qos": "normal", "directives": {"mail-type": "END", "nice": 1}, "logs_dir": "/scratch/logs"},
    ),
    "hostile": plan_of(
        job_spec(name="$(touch pwned) 'a' \"b\"\nÜ `c`", slurm={"directives": {"comment": "it's $HOME; `x` # y"}}),
        workdir="/home/ana/50% of $(touch pwned) 'a' \"b\" `c` node[01-03,7] Ü",
    ),
    "several-lines": plan_of(
        job_spec(name="two\nlines", slurm={"directives": {"comment": "a\nb"}}), workdir="/home/ana/two\n#SBATCH --hold"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_the_golden_one(case: str, golden: Golden) -> None:
    golden(f"launcher/{case}.sh", render_sbatch(CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_a_shell_can_read_the_script(case: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=render_sbatch(CASES[case]), capture_output=True, text=True, check=False, timeout=10
    )
    assert (done.returncode, done.stderr) == (0, "")


def run_script(plan: Plan, folder: Path) -> list[str]:
    """Arguments that the interpreter gets when the script runs as job 4459."""
    done = subprocess.run(
        ["bash", "-c", render_sbatch(plan)],
        cwd=folder,
        env=clean_environment(SLURM_JOB_ID="4459"),
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "pwned").exists()
    return list(json.loads(done.stdout)["argv"])


def test_the_run_directory_reaches_the_orchestrator_as_data(hard_name: str, tmp_path: Path) -> None:
    folder = tmp_path / hard_name
    folder.mkdir()
    python = folder / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    plan = plan_of(job_spec(name=hard_name), workdir=str(folder))
    plan = Plan(**{**plan.__dict__, "python": str(python)})
    argv = run_script(plan, tmp_path)
    assert (argv[0], argv[-3:]) == ("-I", ["-m", "launcher.orchestrate", str(plan.run_dir("4459"))])


def test_the_orchestrator_takes_the_place_of_the_shell(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    plan = Plan(**{**plan_of().__dict__, "python": str(python)})
    script = tmp_path / "script.sh"
    script.write_text(render_sbatch(plan))
    with subprocess.Popen(["bash", script], stdout=subprocess.PIPE, env=clean_environment(SLURM_JOB_ID="1")) as shell:
        assert shell.stdout is not None
        told = json.loads(shell.stdout.read())
    assert shell.returncode == 0
    assert told["parent"] != shell.pid  # it is the shell's own process, a child of this one


def options_of(script: str) -> Iterator[str]:
    """Options as sbatch takes them from a script: quotes group, and a backslash escapes, in quotes as well."""
    for line in script.split("\n"):
        if not line.startswith("#"):
            if line.strip():
                return
            continue
        if not line.startswith("#SBATCH"):
            continue
        word, quote, escaped, begun = "", "", False, False
        for character in line.removeprefix("#SBATCH"):
            if escaped:
                word, escaped = word + character, False
            elif character == "\\":
                escaped = begun = True
            elif quote:
                word, quote = (word, "") if character == quote else (word + character, quote)
            elif character in "'\"":
                quote, begun = character, True
            elif character == "#":
                break
            elif character.isspace():
                if begun:
                    yield word
                word, begun = "", False
            else:
                word, begun = word + character, True
        if begun:
            yield word


def test_sbatch_reads_each_value_as_it_was_meant(hard_name: str) -> None:
    spec = job_spec(name=hard_name, slurm={"account": hard_name, "directives": {"comment": hard_name, "requeue": True}})
    plan = plan_of(spec, workdir=f"/data/{hard_name}")
    expected = [f"--{name}" + ("" if value is None else f"={value}") for name, value in directives(plan)]
    on_command_line = sbatch_arguments(plan)
    found = list(options_of(render_sbatch(plan)))
    assert sorted(found + on_command_line) == sorted(expected)
    assert all("\n" in option for option in on_command_line)
    assert "--requeue" in found


def test_a_percent_sign_begins_no_replacement_but_that_of_the_job_id() -> None:
    found = dict(directives(plan_of(workdir="/home/ana/100%j")))
    assert found["output"] == "/home/ana/100%%j/logs/%j_job_20251122_041341/log.out"
    assert found["chdir"] == "/home/ana/100%j"


def test_a_folder_may_be_called_like_the_placeholder_of_the_job_id(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    plan = plan_of(workdir="/data/{job_id}")
    plan = Plan(**{**plan.__dict__, "python": str(python)})
    assert run_script(plan, tmp_path)[-1] == "/data/{job_id}/logs/4459_job_20251122_041341"
    assert dict(directives(plan))["output"] == "/data/{job_id}/logs/%j_job_20251122_041341/log.out"
    assert plan.run_dir("4459") == Path("/data/{job_id}/logs/4459_job_20251122_041341")


def test_a_job_name_is_reduced_to_what_is_safe(hard_name: str) -> None:
    name = dict(directives(plan_of(job_spec(name=hard_name))))["job-name"]
    assert name is not None
    assert not set(name) & set("\n \"'$`*?[]{}()<>|&;\\#%,/")


def lines_of(words: list[str]) -> str:
    """One word on each line, quoted where it needs to be seen."""
    return "".join(f"{json.dumps(word, ensure_ascii=False)}\n" for word in words)


def test_a_step_shares_the_job_and_is_named(golden: Golden) -> None:
    plan = CASES["options"]
    out, err = Path("/scratch/logs/4459_x/cn01_worker_w0.out"), Path("/scratch/logs/4459_x/cn01_worker_w0.err")
    argv = srun_argv(plan, name="worker_w0", hosts=["cn01"], output=out, error=err, command=["/py", "-I", "a b"])
    golden("launcher/srun-task.txt", lines_of(argv))


def test_a_step_on_all_nodes_has_one_task_on_each(golden: Golden) -> None:
    log = Path("/home/ana/100%/4459 'x'/sidecars.log")
    argv = srun_argv(CASES["hostile"], name="sidecar", hosts=["cn01", "cn02"], output=log, error=log, command=["/py"])
    golden("launcher/srun-sidecar.txt", lines_of(argv))


def test_a_step_gets_nothing_that_the_batch_step_was_given_for_itself() -> None:
    leaking = {
        *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_NODE"),
        *("SLURM_GPUS", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
        *("SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID", "SLURM_STEPID"),
        *("SLURM_TASKS_PER_NODE", "SLURM_TASK_PID", "SLURM_TRES_PER_TASK", "SLURM_THREADS_PER_CORE", "SLURM_UMASK"),
        *("SLURM_EXPORT_ENV", "SLURM_DISTRIBUTION", "SLURM_GTIDS", "SBATCH_EXPORT", "SBATCH_PARTITION"),
        *("GPUJOB_RANK", "GPUJOB_FOM_URL", "GPUJOB_PROGRESS_FILE"),
    }
    kept = {
        *(
            "SLURM_JOB_ID",
            "SLURM_JOBID",
            "SLURM_JOB_NODELIST",
            "SLURM_CONF",
            "SLURM_CLUSTER_NAME",
            "SLURM_RESTART_COUNT",
        ),
        *("SLURM_JOB_END_TIME", "SLURM_JOB_NUM_NODES", "PATH", "HOME", "CUDA_VISIBLE_DEVICES", "MY_SLURM_NTASKS"),
        "GPUJOB_HISTORY_DIR",
    }
    assert set(scrub(dict.fromkeys(leaking | kept, "x"))) == kept
