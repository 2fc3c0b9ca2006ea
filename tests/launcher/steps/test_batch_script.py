"""The batch script and the srun commands of its steps."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.placeholders import task_environment
from launcher.plan.plan import Plan
from launcher.steps.batch_script import (
    SrunStep,
    allocated_nodes,
    component_ids,
    component_index,
    job_directives,
    render_sbatch,
    sbatch_arguments,
    scrub_environment,
    srun_argv,
    without_outer_components,
)
from launcher.steps.steps import survey_environment
from tests.launcher.conftest import Golden
from tests.support.launcher import clean_environment, facts_of, job_spec, plan_of

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
            resources={
                "nodes": 4,
                "gpus_per_node": 8,
                "gpu_type": "h100",
                "cpus_per_node": 32,
                "memory_per_node": "64G",
            },
            workers=[{"count": 32, "gpus": 1, "command": "python embed.py --shard {rank}"}],
            slurm={
                "partition": "gpu",
                "account": "nlp",
                "time_limit": "04:00:00",
                "directives": {
                    "requeue": True,
                    "exclusive": None,
                    "reboot": False,
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
    "setup": plan_of(
        job_spec(
            slurm={
                "time_limit": "04:00:00",
                "dependency": "afterok:4459:4460_3",
                "signal": "SIGUSR1@120",
                "requeue": {"preempted": True},
                "exclusive": True,
                "segment": 1,
            },
            setup={"modules": ["openmpi/4.1"], "script": "env's.sh", "preamble": "#SBATCH --hold\nexport A=1\n"},
        ),
        {"modules": ["cuda/12.4", "gcc"], "preamble": "ulimit -n 65536", "directives": {"requeue": True}},
    ),
    "het": plan_of(
        job_spec(
            resources={
                "gpus_per_node": 8,
                "prefill_workers": 2,
                "prefill_nodes": 2,
                "decode_workers": 1,
                "decode_nodes": 1,
                "infra_node": True,
            },
            workers=[{"role": "prefill", "command": "serve"}, {"role": "decode", "command": "serve"}],
            slurm={"het": True, "time_limit": "01:00:00", "partition": "gpu", "requeue": {}, "directives": {"nice": 5}},
        )
    ),
    "several-lines": plan_of(
        job_spec(name="two\nlines", slurm={"directives": {"comment": "a\nb"}}), workdir="/home/ana/two\n#SBATCH --hold"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_script_matches_the_golden_file(case: str, golden: Golden) -> None:
    golden(f"launcher/{case}.sh", render_sbatch(CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_valid_shell(case: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=render_sbatch(CASES[case]), capture_output=True, text=True, check=False, timeout=10
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("gpus", "asked", "default", "gres"),
    [
        (8, {}, {}, "gpu:8"),
        (8, {}, {"gpu_type": "h100"}, "gpu:h100:8"),
        (2, {"gpu_type": "1g.10gb"}, {"gpu_type": "h100"}, "gpu:1g.10gb:2"),
        (0, {}, {"gpu_type": "h100"}, None),
    ],
)
def test_the_type_of_the_gpus_is_that_of_the_job_or_of_the_cluster(
    gpus: int, asked: dict[str, str], default: dict[str, object], gres: str | None
) -> None:
    plan = plan_of(job_spec(resources={"gpus_per_node": gpus, **asked}), default)
    assert dict(job_directives(plan)).get("gres") == gres


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
    assert (argv[0], argv[-3:]) == ("-I", ["-m", "launcher.guard", str(plan.run_dir("4459"))])


def test_the_orchestrator_replaces_the_shell(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    plan = Plan(**{**plan_of().__dict__, "python": str(python)})
    script = tmp_path / "script.sh"
    script.write_text(render_sbatch(plan))
    with subprocess.Popen(["bash", script], stdout=subprocess.PIPE, env=clean_environment(SLURM_JOB_ID="1")) as shell:
        assert shell.stdout is not None
        result = json.loads(shell.stdout.read())
    assert shell.returncode == 0
    assert result["parent"] != shell.pid  # it replaced the shell


def options_of(script: str) -> Iterator[str]:
    """Options as sbatch parses them: quotes group, and a backslash escapes, also in quotes."""
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


def test_sbatch_parses_each_value_unchanged(hard_name: str) -> None:
    spec = job_spec(name=hard_name, slurm={"account": hard_name, "directives": {"comment": hard_name, "requeue": True}})
    plan = plan_of(spec, workdir=f"/data/{hard_name}")
    expected = [f"--{name}" + ("" if value is None else f"={value}") for name, value in job_directives(plan)]
    on_command_line = sbatch_arguments(plan)
    found = list(options_of(render_sbatch(plan)))
    assert sorted(found + on_command_line) == sorted(expected)
    assert all("\n" in option for option in on_command_line)
    assert "--requeue" in found


def test_only_the_job_id_is_a_percent_replacement() -> None:
    found = dict(job_directives(plan_of(workdir="/home/ana/100%j")))
    assert found["output"] == "/home/ana/100%%j/logs/%j_job_20251122_041341/log.out"
    assert found["chdir"] == "/home/ana/100%j"


def test_a_folder_may_have_the_name_of_the_job_id_placeholder(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    plan = plan_of(workdir="/data/{job_id}")
    plan = Plan(**{**plan.__dict__, "python": str(python)})
    assert run_script(plan, tmp_path)[-1] == "/data/{job_id}/logs/4459_job_20251122_041341"
    assert dict(job_directives(plan))["output"] == "/data/{job_id}/logs/%j_job_20251122_041341/log.out"
    assert plan.run_dir("4459") == Path("/data/{job_id}/logs/4459_job_20251122_041341")


def test_a_job_name_is_reduced_to_safe_characters(hard_name: str) -> None:
    name = dict(job_directives(plan_of(job_spec(name=hard_name))))["job-name"]
    assert name is not None
    assert not set(name) & set("\n \"'$`*?[]{}()<>|&;\\#%,/")


def lines_of(words: list[str]) -> str:
    """One argument per line, as JSON."""
    return "".join(f"{json.dumps(word, ensure_ascii=False)}\n" for word in words)


def test_a_task_step_matches_the_golden_file(golden: Golden) -> None:
    plan = CASES["options"]
    out, err = Path("/scratch/logs/4459_x/cn01_worker_w0.out"), Path("/scratch/logs/4459_x/cn01_worker_w0.err")
    argv = srun_argv(plan, SrunStep("worker_w0", ["cn01"], out, err, ["/py", "-I", "a b"]))
    golden("launcher/srun-task.txt", lines_of(argv))


def test_a_step_on_all_nodes_has_one_task_on_each(golden: Golden) -> None:
    log = Path("/home/ana/100%/4459 'x'/sidecars.log")
    argv = srun_argv(CASES["hostile"], SrunStep("sidecar", ["cn01", "cn02"], log, log, ["/py"]))
    golden("launcher/srun-sidecar.txt", lines_of(argv))


def test_the_nodes_of_the_largest_machines_fit_into_words_and_variables() -> None:
    """Linux takes 128 KiB of each, and srun does not start with more."""
    hosts = [f"frontier{number:05}" for number in range(1, 9403)]
    argv = srun_argv(plan_of(), SrunStep("sidecar", hosts, Path("/x.log"), Path("/x.log"), ["a"]))
    assert "--nodelist=frontier[00001-09402]" in argv
    plan = plan_of()
    facts = dataclasses.replace(facts_of(plan), hosts=tuple(hosts))
    for environment in (task_environment(plan, plan.tasks[0], facts, 0), survey_environment(facts, (0,), 0)):
        subprocess.run(["true"], env={**os.environ, **environment}, check=True, timeout=60)
    assert "GPUJOB_NODES" in survey_environment(dataclasses.replace(facts, hosts=tuple(hosts[:8000])), (0,), 0)


def test_a_step_of_several_tasks_has_their_number_and_mpi_type() -> None:
    log = Path("/x.log")
    step = SrunStep("w", ["cn01", "cn02"], log, log, ["a"], 4, "pmix", ["--container-image=i"], wait_s=0)
    argv = srun_argv(plan_of(), step)
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--mpi=pmix", "--wait=0"} <= set(argv)
    assert argv[-2:] == ["--container-image=i", "a"]


@pytest.mark.parametrize(
    ("first", "hosts", "groups"),
    [
        (0, ["cn00"], {"0": "cn00"}),
        (2, ["cn02"], {"0": "cn02"}),
        (3, ["cn03"], {"1": "cn03"}),
        (1, ["cn01", "cn02"], {"0": "cn01,cn02"}),
        (0, ["cn00", "cn01", "cn02", "cn03"], {"0": "cn00,cn01,cn02", "1": "cn03"}),
    ],
)
def test_a_step_names_the_components_of_its_hosts(first: int, hosts: list[str], groups: dict[str, str]) -> None:
    """The plan has three nodes for infra and prefill, and one for decode."""
    log = Path("/x.log")
    argv = srun_argv(CASES["het"], SrunStep("w", hosts, log, log, ["a", "b"], first_node=first))
    assert argv[0] == "srun"
    parts = " ".join(argv[1:]).split(" : ")
    found = {}
    for part in parts:
        words = part.split()
        assert words[-2:] == ["a", "b"]
        options = dict(word.removeprefix("--").partition("=")[::2] for word in words[:-2])
        assert int(options["nodes"]) == options["nodelist"].count(",") + 1
        found[options["het-group"]] = options["nodelist"]
    assert found == groups


def test_hosts_of_a_heterogeneous_job_are_in_order_of_components() -> None:
    het = {"SLURM_JOB_NODELIST_HET_GROUP_1": "d[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_0": "p1"}
    assert allocated_nodes({**het, "SLURM_JOB_NODELIST": "p1"}) == "p1,d[1-2]"
    assert allocated_nodes({"SLURM_JOB_NODELIST": "cn[01-03]"}) == "cn[01-03]"
    assert allocated_nodes({}) is None


def test_a_step_is_addressed_in_the_component_of_its_nodes() -> None:
    ids = {"SLURM_JOB_ID": "7", "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_ID_HET_GROUP_1": "8"}
    assert component_ids(ids, "7") == ("7", "8")
    assert component_ids({"SLURM_JOB_ID": "7"}, "7") == ("7",)
    inherited = {**ids, "SLURM_JOB_ID": "9", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_PACK_GROUP_1": "d1"}
    assert without_outer_components(inherited, het=True) == inherited
    assert without_outer_components(inherited, het=False) == {"SLURM_JOB_ID": "9"}, (
        "of the job from which it was submitted"
    )
    heterogeneous = plan_of(
        job_spec(
            workers=[{"role": role, "command": "serve"} for role in ("prefill", "decode")],
            resources={"gpus_per_node": 2, "prefill_workers": 2, "decode_workers": 1, "gpus_per_prefill": 2}
            | {"gpus_per_decode": 2},
            slurm={"het": True},
        )
    )
    assert [component_index(heterogeneous, index) for index in range(3)] == [0, 0, 1]
    assert component_index(plan_of(), 0) == 0


# Setup in the batch script


def run_setup(folder: Path, tools: str = "", **spec: Any) -> subprocess.CompletedProcess[str]:
    """Run the batch script of a job with an interpreter that prints its environment, after the shell code ``tools``."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    cluster = spec.pop("cluster", {})
    plan = Plan(**{**plan_of(job_spec(**spec), cluster, workdir=str(folder)).__dict__, "python": str(python)})
    return subprocess.run(
        ["bash", "-c", tools + render_sbatch(plan)],
        cwd=folder,
        env=clean_environment(SLURM_JOB_ID="4459"),
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )


MODULE = 'module() { [ "$2" != bad ] && LOADED="$LOADED $2" && export LOADED; }\n'


def test_setup_of_the_cluster_runs_before_setup_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text('export ORDER="$ORDER script"; export SEEN="$LOADED"; false\n')
    done = run_setup(
        tmp_path,
        MODULE,
        cluster={"modules": ["a"], "preamble": 'export ORDER="cluster$LOADED"'},
        setup={"modules": ["b"], "script": "env.sh", "preamble": 'export ORDER="$ORDER job"'},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"LOADED= a b", "SEEN= a b", "ORDER=cluster a script job"} <= set(done.stdout.splitlines())


def test_the_module_command_is_found_where_the_submitting_shell_has_it(tmp_path: Path) -> None:
    home = tmp_path / "lmod 8"
    (home / "init").mkdir(parents=True)
    (home / "init/bash").write_text(MODULE)
    done = run_setup(tmp_path, f"export MODULESHOME='{home}'\n", setup={"modules": ["a"]})
    assert (done.returncode, done.stderr) == (0, "")
    assert "LOADED= a" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("tools", "setup", "message"),
    [
        (MODULE, {"modules": ["a", "bad", "c"]}, "gpujob: the module bad cannot be loaded; nothing was started"),
        ("", {"modules": ["a"]}, "gpujob: the module a cannot be loaded; nothing was started"),
        ("", {"script": "none's.sh"}, "none's.sh cannot be read; nothing was started"),
    ],
)
def test_a_failed_setup_ends_the_job_before_it_starts(
    tools: str, setup: dict[str, Any], message: str, tmp_path: Path
) -> None:
    done = run_setup(tmp_path, tools, setup=setup)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].endswith(message)


def test_the_path_of_a_setup_script_is_data(hard_name: str, tmp_path: Path) -> None:
    folder = tmp_path / f"x{hard_name}"
    folder.mkdir()
    (folder / "env.sh").write_text("export SEEN=yes\n")
    done = run_setup(tmp_path, setup={"script": f"x{hard_name}/env.sh"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "SEEN=yes" in done.stdout.splitlines()
    assert not list(tmp_path.rglob("pwned"))


def test_variables_of_the_batch_step_are_not_passed_to_steps() -> None:
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
    assert set(scrub_environment(dict.fromkeys(leaking | kept, "x"))) == kept
