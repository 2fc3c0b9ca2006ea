"""A shell at a worker: its command line, and on the worker's machine the program that becomes the shell.

    python -I -B -m launcher.steps.connect RUN_DIR STEM [COMMAND...]

STEM is the beginning of the worker's start records. COMMAND starts the shell in the worker's container.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from exporter.contract import run_files
from exporter.contract.manifest import Manifest, Task
from launcher.errors import LauncherError
from launcher.plan.container import PYXIS, container_runtime, container_worker_argv, pyxis_options
from launcher.plan.plan import PLAN_FILE, RunFacts, parse_plan
from launcher.programs.environment import original_environment
from launcher.rundir.job_ids import job_id_of
from launcher.rundir.job_records import OrchestratorRecord, ProcessRecord
from launcher.rundir.rundir import submitted_cluster
from launcher.steps.batch_script import component_index
from launcher.steps.slurm_steps import cluster_option
from launcher.steps.steps import PYTHON_FLAGS

SHELL_IN_CONTAINER = "sh"  # the only one that every image has
KEPT_VARIABLES = (b"TERM", b"COLORTERM", b"LANG", b"LC_ALL")  # of the terminal


def connect_argv(manifest: Manifest, task: Task, orchestrator: OrchestratorRecord) -> list[str]:
    """Command that opens a shell at this task, in its container if it has one.

    Raises LauncherError if that is only possible on another machine.
    """
    run_dir, job_id = manifest.run_dir, job_id_of(manifest.run_dir)
    if manifest.attached:
        slurm_job = manifest.search.slurm_job_id if manifest.search is not None else None
    else:
        slurm_job = None if orchestrator.local else job_id
    python, runtime, inside, options = sys.executable, None, list[str](), list[str]()
    if (body := run_files.read_json(run_dir / PLAN_FILE)) is not None:
        plan = parse_plan(body, manifest)
        planned = next(one for one in plan.tasks if one.task.rank == task.rank)
        facts = RunFacts(job_id, run_dir, orchestrator.hosts, orchestrator.attempt)
        python, runtime = plan.python, container_runtime(plan, planned)
        options = [f"--het-group={component_index(plan, task.node_index)}"] if plan.slurm.het else []
        options += pyxis_options(plan, planned, facts)
        inside = container_worker_argv(plan, planned, facts, [SHELL_IN_CONTAINER] if runtime else [])
    stem = run_files.record_name(task.worker, task.rank, 0, 0).removesuffix("a0_r0")
    shell = [python, *PYTHON_FLAGS, __name__, str(run_dir), stem, *inside]
    if slurm_job is None:
        if orchestrator.is_elsewhere():
            raise LauncherError(f"{task.worker} runs on {orchestrator.place}; run this command there")
        return shell
    srun = ["srun", *cluster_option(submitted_cluster(run_dir)), f"--jobid={slurm_job}"]
    srun += [f"--nodelist={orchestrator.hosts[task.node_index]}", "--nodes=1", "--ntasks=1", "--overlap", "--pty"]
    return [*srun, *options, *(inside if runtime == PYXIS else shell)]


def become_shell(run_dir: str, stem: str, *command: str) -> NoReturn:
    """Become a shell with the environment and the working directory of the worker. Raises LauncherError."""
    records = map(ProcessRecord.read_valid, Path(run_dir, run_files.WORKERS_DIR).glob(f"{stem}*.start.json"))
    process = next((record for record in records if record is not None and record.is_running_here()), None)
    if process is None:
        raise LauncherError(f"{stem.partition('_rank')[0]} does not run now; see `gpujob logs`")
    kept = {name: os.environb[name] for name in KEPT_VARIABLES if name in os.environb}
    argv = command or (os.environ.get("SHELL") or "/bin/sh",)
    try:
        os.chdir(f"/proc/{process.pid}/cwd")
        os.execvpe(argv[0], argv, original_environment(f"/proc/{process.pid}/environ") | kept)  # noqa: S606 - no shell
    except OSError as error:
        raise LauncherError(f"{argv[0]} cannot be started there: {error.strerror}") from error


if __name__ == "__main__":
    try:
        become_shell(*sys.argv[1:])
    except LauncherError as problem:
        sys.stderr.write(f"gpujob: {problem}\n")
        sys.exit(2)
