"""A shell at a worker has its environment, directory and container."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.manifest import read_manifest
from launcher.rundir.job_records import OrchestratorRecord
from launcher.steps.connect import connect_argv
from tests.support.builders import orchestrator_record
from tests.support.launcher import GPUJOB, LocalJob, clean_environment, gpujob, settled_run_dir

WAITS = {
    "name": "waits",
    "workers": [{"command": "sleep 60", "count": 2, "env": {"WHO": "worker {rank}"}}],
    "patterns": {"output": None},
    "monitoring": {"linger": 0},
}


def slurm_argv(tmp_path: Path, **over: Any) -> list[str]:
    spec = {"name": "job", "workers": [{"command": "true", "count": 2}], **over}
    run_dir = settled_run_dir(tmp_path, spec, job_id="4459")
    record = OrchestratorRecord.from_json(orchestrator_record(hosts=["cn01"], local=False, job_id="4459"))
    manifest = read_manifest(run_dir)
    argv = connect_argv(manifest, manifest.tasks[1], record)
    return [word.replace(str(run_dir), "RUN_DIR").replace(sys.executable, "PYTHON") for word in argv]


SRUN = ["srun", "--jobid=4459", "--nodelist=cn01", "--nodes=1", "--ntasks=1", "--overlap", "--pty"]
SHELL = ["PYTHON", "-I", "-B", "-m", "launcher.steps.connect", "RUN_DIR", "worker_w1_rank1_"]


def test_on_slurm_it_is_a_step_on_the_node_of_the_worker(tmp_path: Path) -> None:
    assert slurm_argv(tmp_path) == [*SRUN, *SHELL]


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "enroot"])
def test_a_worker_in_a_container_gets_a_shell_in_it(tmp_path: Path, runtime: str) -> None:
    argv = slurm_argv(tmp_path, container={"image": "/images/x.sif", "runtime": runtime})
    assert argv[: len(SRUN)] == SRUN
    assert argv[-1] == "sh"
    if runtime == "pyxis":
        assert "--container-image=/images/x.sif" in argv
    else:
        assert argv[len(SRUN) : len(SRUN) + len(SHELL)] == SHELL
        assert argv[len(SRUN) + len(SHELL)] == runtime


def test_a_shell_at_a_local_worker_has_its_environment_and_directory(tmp_path: Path) -> None:
    with LocalJob(tmp_path / "work", WAITS, "--quiet") as job:
        job.worker(1)
        job.phase("running")
        typed = 'echo "$WHO|$GPUJOB_RANK|$PWD|$TERM"\n'
        for argv in (
            [str(GPUJOB), "connect", str(job.run_dir), "worker_w1"],
            shlex.split(gpujob("connect", job.run_dir, "1", "--print", cwd=tmp_path).stdout),
        ):
            env = clean_environment(SHELL="/bin/sh", TERM="vt100")
            done = subprocess.run(argv, input=typed, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
            assert (done.returncode, done.stdout, done.stderr) == (0, f"worker 1|1|{job.folder}|vt100\n", "")
        job.process.terminate()
        job.wait()
        ended = gpujob("connect", job.run_dir, cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (
            2,
            f"gpujob: {job.run_dir} has ended: CANCELLED; see `gpujob logs`\n",
        )


def test_a_worker_of_another_machine_is_named_with_it(tmp_path: Path) -> None:
    run_dir = settled_run_dir(tmp_path, WAITS)
    record = orchestrator_record(hosts=["elsewhere"], host="elsewhere", local=True)
    (run_dir / "orchestrator.json").write_text(json.dumps(record))
    done = gpujob("connect", run_dir, "--print", cwd=tmp_path)
    message = "gpujob: worker_w0 runs on elsewhere; run this command there\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
