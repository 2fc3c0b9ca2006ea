"""Tasks in containers: arguments of srun and the runtimes, and a wrapper for the interpreter of an image."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.container import (
    PACKAGES_IN_CONTAINER,
    ContainerMount,
    container_mounts,
    container_worker_argv,
    container_wrapper_argv,
    pyxis_options,
)
from launcher.plan.plan import Plan
from launcher.steps.steps import run_environment
from tests.launcher.conftest import Golden
from tests.launcher.steps.test_batch_script import lines_of
from tests.support.launcher import clean_environment, facts_of, job_spec, plan_of, read_json

CLUSTER = {"containers": {"sgl": "/images/sglang.sqsh"}, "mounts": ["/data:/data:ro", "/scratch:/scratch"]}
PACKAGES = Path("/opt/gpujob/lib")


def plan_with_container(cluster: dict[str, Any] | None = None, **container: Any) -> Plan:
    options = {"image": "sgl", "mounts": ["/data2:/data", "{job_dir}/assets:/assets:ro"], **container}
    spec = job_spec(
        container=options,
        resources={"gpus_per_node": 8},
        workers=[{"gpus": 8, "command": ["serve", "a b"]}, {"role": "out", "command": "x", "container": False}],
        paths={"output_dir": "/results/{odd}"},
    )
    return plan_of(spec, CLUSTER if cluster is None else cluster)


def worker_argv(plan: Plan) -> list[str]:
    """Arguments that the wrapper of the first task starts."""
    return container_worker_argv(plan, plan.tasks[0], facts_of(plan), ["serve", "a b"])


def test_a_pyxis_step_runs_wholly_in_the_container(golden: Golden) -> None:
    plan = plan_with_container()
    task = plan.tasks[0]
    options = pyxis_options(plan, task, facts_of(plan), PACKAGES)
    golden("launcher/srun-pyxis.txt", lines_of([*options, *container_wrapper_argv(plan, task), *worker_argv(plan)]))


@pytest.mark.parametrize("runtime", ["apptainer", "enroot"])
def test_other_runtimes_are_started_by_the_wrapper(runtime: str, golden: Golden) -> None:
    plan = plan_with_container(runtime=runtime)
    assert pyxis_options(plan, plan.tasks[0], facts_of(plan)) == []
    assert container_wrapper_argv(plan, plan.tasks[0]) == []
    golden(f"launcher/{runtime}.txt", lines_of(worker_argv(plan)))


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "enroot"])
def test_a_role_may_stay_outside(runtime: str) -> None:
    plan = plan_with_container(runtime=runtime)
    inside, outside = plan.tasks
    assert (inside.contained, outside.contained) == (True, False)
    assert pyxis_options(plan, outside, facts_of(plan)) == []
    assert container_wrapper_argv(plan, outside) == []
    assert container_worker_argv(plan, outside, facts_of(plan), ["x"]) == ["x"]


def test_without_a_container_nothing_is_contained() -> None:
    plan = plan_of()
    assert plan.container is None
    assert not plan.tasks[0].contained
    assert worker_argv(plan) == ["serve", "a b"]


def test_a_mount_of_the_job_has_precedence_over_others_with_its_target() -> None:
    found = container_mounts(
        plan_with_container(), plan_with_container().tasks[0], facts_of(plan_with_container()), PACKAGES
    )
    targets = [mount.target for mount in found]
    assert len(set(targets)) == len(targets)
    assert ContainerMount("/data2", "/data") in found
    assert ContainerMount("/scratch", "/scratch") in found
    assert ContainerMount("/home/ana/jobs/assets", "/assets", "ro") in found
    plan = plan_with_container(mounts=["/mine:/home/ana/work/"])
    assert ContainerMount("/mine", "/home/ana/work/") in container_mounts(plan, plan.tasks[0], facts_of(plan))
    assert ContainerMount("/home/ana/work", "/home/ana/work") not in container_mounts(
        plan, plan.tasks[0], facts_of(plan)
    )


def test_directories_of_the_job_are_mounted_at_their_own_path(tmp_path: Path) -> None:
    plan = plan_with_container()
    sources = {
        mount.source for mount in container_mounts(plan, plan.tasks[0], facts_of(plan)) if mount.source == mount.target
    }
    assert {"/home/ana/work", "/home/ana/jobs", "/results/{odd}"} <= sources
    for cluster in ({"logs_dir": "/elsewhere"}, {"mounts": ["/mine:/home/ana/work", "/x:/home/ana/work/logs"]}):
        plan = plan_of(job_spec(container={"image": "i"}), cluster)
        last = container_mounts(plan, plan.tasks[0], facts_of(plan))[-1]
        assert last == ContainerMount(str(plan.run_dir("4459")), str(plan.run_dir("4459")))


def test_a_folder_inside_another_mount_is_not_mounted_again() -> None:
    plan = plan_of(job_spec(container={"image": "i"}, paths={"output_dir": "out"}), job_dir="/home/ana/work/jobs")
    targets = [
        mount.target
        for mount in container_mounts(plan, plan.tasks[0], facts_of(plan))
        if PACKAGES_IN_CONTAINER not in mount.target
    ]
    assert targets == ["/home/ana/work", str(plan.run_dir("4459"))]


def test_a_model_is_mounted_read_only() -> None:
    spec = job_spec(model={"path": "dsr1"}, container={"image": "i"})
    plan = plan_of(spec, {"models": {"dsr1": "/models/{rank} DSR1"}})
    assert ContainerMount("/models/{rank} DSR1", "/models/{rank} DSR1", "ro") in container_mounts(
        plan, plan.tasks[0], facts_of(plan)
    )
    plan = plan_of(job_spec(model={"path": "hf:org/name"}, container={"image": "i"}))
    assert not [mount for mount in container_mounts(plan, plan.tasks[0], facts_of(plan)) if "org/name" in mount.source]


def test_values_of_variables_are_not_in_the_arguments_of_a_runtime() -> None:
    spec = job_spec(
        container={"image": "i", "runtime": "enroot"},
        env={"PLAIN": "hunter2"},
        secrets=["HF_TOKEN"],
        environment={"required": ["HF_HOME"]},
    )
    plan = plan_of(spec)
    argv = worker_argv(plan)
    passed = [argv[at + 1] for at, word in enumerate(argv) if word == "--env"]
    assert {"PLAIN", "HF_TOKEN", "HF_HOME", "GPUJOB_RANK", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} <= set(passed)
    assert "hunter2" not in " ".join(argv)


FAKE_ENROOT = """\
#!/bin/sh
# enroot start OPTIONS IMAGE COMMAND...: prints the names of variables that it would pass on
shift
while :; do
  case "$1" in --mount) shift 2 ;; --env) echo "$2"; shift 2 ;; *) break ;; esac
done
echo "image: $1"
"""


@pytest.mark.parametrize("step", ["", "solve_w0"])
def test_enroot_passes_mpi_variables_to_ranks_of_a_step(step: str, tmp_path: Path) -> None:
    (tmp_path / "enroot").write_text(FAKE_ENROOT)
    (tmp_path / "enroot").chmod(0o755)
    plan = plan_with_container(runtime="enroot", image="i")
    planned = dataclasses.replace(plan.tasks[0], step=step)
    argv = container_worker_argv(plan, planned, facts_of(plan), ["serve"])
    of_mpi = {"SLURM_PROCID": "3", "PMIX_RANK": "3", "PMI_FD": "9", "PMIX_SERVER_URI2": "a\nb c"}
    environment = clean_environment(PATH=f"{tmp_path}:{os.environ['PATH']}", MINE="1", **of_mpi)
    passed_variables = subprocess.run(
        argv, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert passed_variables[-1] == "image: i"
    assert {"GPUJOB_RANK", "GPUJOB_FOM_URL"} <= set(passed_variables)
    assert set(of_mpi) & set(passed_variables) == (set(of_mpi) if step else set())
    assert "MINE" not in passed_variables


def test_enroot_passes_the_resume_variable() -> None:
    plan = plan_with_container(runtime="enroot")
    facts = facts_of(plan)
    for attempt in (0, 1):
        argv = container_worker_argv(plan, plan.tasks[0], dataclasses.replace(facts, attempt=attempt), ["serve"])
        assert ("GPUJOB_RESUME" in argv) == bool(attempt)


SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
FAKE_APPTAINER = """\
#!/bin/sh
# apptainer exec OPTIONS IMAGE COMMAND...: runs the command without a container
shift
while :; do
  case "$1" in --bind|--pwd) shift 2 ;; --*) shift ;; *) break ;; esac
done
echo "image: $1"
shift
exec "$@"
"""


APPTAINER = """\
#!{python} -I
# apptainer exec OPTIONS IMAGE COMMAND...: runs the command with the variables that Apptainer 1.1 gives it
import os, sys
words = sys.argv[2:]
while words[0].startswith("--"):
    del words[: 2 if words[0] in ("--bind", "--pwd") else 1]
host = {{name: value for name, value in os.environ.items() if name not in ("PATH", "LD_LIBRARY_PATH")}}
image = {{"MINE": "image", "PATH": "/image", "LD_LIBRARY_PATH": "/image/lib"}}
given = {{name.removeprefix("APPTAINERENV_"): host.pop(name) for name in [*host] if name.startswith("APPTAINERENV_")}}
if not host.pop("APPTAINER_NO_EVAL", ""):
    given = {{name: os.path.expandvars(value) for name, value in given.items()}}
os.execve(words[1], words[1:], {{**host, **image, **given}})
"""


@pytest.mark.parametrize("odd", ["plain", "a $HOME `x` \\ \"'"])
def test_variables_of_the_job_override_those_of_an_apptainer_image(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apptainer").write_text(APPTAINER.format(python=sys.executable))
    (tmp_path / "apptainer").chmod(0o755)
    (tmp_path / "secrets.json").write_text('{"MY_TOKEN": "hunter2"}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    given = {"MINE": "job {rank}", "PATH": "/job", "LD_LIBRARY_PATH": "/job/lib", "ODD": odd}
    container = {"image": "i", "runtime": "apptainer"}
    spec = job_spec(env={**given, "HOME": "/job"}, secrets=["MY_TOKEN"], container=container)
    plan = plan_of(spec, workdir="/")
    facts = dataclasses.replace(facts_of(plan), run_dir=tmp_path)
    variables = run_environment(plan, plan.tasks[0], facts, 0)
    argv = container_worker_argv(plan, plan.tasks[0], facts, [sys.executable, "-c", SHOW_ENVIRONMENT])
    done = subprocess.run(argv, env=clean_environment(**variables), capture_output=True, text=True, check=True)
    environment = json.loads(done.stdout)
    expected = {**given, "MINE": "job 0", "MY_TOKEN": "hunter2", "GPUJOB_RANK": "0"}
    assert {name: environment.get(name) for name in expected} == expected
    assert "hunter2" not in " ".join(argv)
    assert ("APPTAINER_NO_EVAL" in variables) == (odd != "plain")
    assert "APPTAINERENV_HOME" not in variables  # it would only warn, in every log


def test_arguments_reach_a_command_in_a_container_unchanged(hard_name: str, tmp_path: Path) -> None:
    (tmp_path / "apptainer").write_text(FAKE_APPTAINER)
    (tmp_path / "apptainer").chmod(0o755)
    plan = plan_with_container(runtime="apptainer", image=f"/x{hard_name}")
    argv = container_worker_argv(plan, plan.tasks[0], facts_of(plan), ["printf", "%s", hard_name])
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(argv, env={"PATH": path}, capture_output=True, text=True, check=True, timeout=10, cwd="/")
    assert done.stdout == f"image: /x{hard_name}\n{hard_name}"


def test_each_container_option_of_a_step_is_one_argument(hard_name: str) -> None:
    plan = plan_with_container(image=f"/x{hard_name}", workdir=f"/w{hard_name}", python=f"/p{hard_name}", mounts=[])
    task = plan.tasks[0]
    image, mounts, home, workdir = pyxis_options(plan, task, facts_of(plan), PACKAGES)
    assert (image, workdir) == (f"--container-image=/x{hard_name}", f"--container-workdir=/w{hard_name}")
    assert (mounts.partition("=")[0], home) == ("--container-mounts", "--no-container-mount-home")
    assert container_wrapper_argv(plan, task)[0] == f"/p{hard_name}"


def test_another_interpreter_without_our_packages_starts_the_wrapper(tmp_path: Path) -> None:
    """As in an image: our packages only as mounts, no site directory, another interpreter."""
    plan = plan_with_container(python="/usr/bin/python3")
    program = container_wrapper_argv(plan, plan.tasks[0])
    sources_by_target = {mount.target: mount.source for mount in container_mounts(plan, plan.tasks[0], facts_of(plan))}
    mounts = tmp_path / "image"
    mounts.mkdir()
    for name in ("exporter", "launcher"):
        (mounts / name).symlink_to(sources_by_target[f"{PACKAGES_IN_CONTAINER}/{name}"])
    program = [word.replace(PACKAGES_IN_CONTAINER, str(mounts)) for word in program]
    run_dir = tmp_path / "run"
    (run_dir / "workers").mkdir(parents=True)
    options = ["--run-dir", str(run_dir), "--worker", "w_w0", "--rank", "0", "--gpus", "1"]
    worker = ["/bin/sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"; exit 7']
    done = subprocess.run(
        [*program, *options, "--", *worker],
        cwd="/",
        env=clean_environment(PYTHONPATH="/nowhere"),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "1\n", "")
    assert read_json(run_dir / "workers/w_w0_rank0_a0_r0.exit.json")["code"] == 7
    assert json.loads((run_dir / "workers/w_w0_rank0_a0_r0.start.json").read_text())["pid"]
