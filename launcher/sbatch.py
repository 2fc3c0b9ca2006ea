"""The batch script and the lines that start its steps, as text. Pure."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from exporter.identity import safe_label
from launcher.plan import Plan

LEAKING = (
    "GPUJOB_",
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_",
    "SRUN_CPUS_PER_",
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
    "SLURM_GPU",
    "SLURM_GTIDS",
    "SLURM_LOCALID",
    "SLURM_MEM_",
    "SLURM_NODEID",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_SRUN_",
    "SLURM_STEP",
    "SLURM_TASK",
    "SLURM_THREADS_PER_CORE",
    "SLURM_TRES_PER_TASK",
    "SLURM_UMASK",
    "SBATCH_",
)
"""Beginnings of variables of the batch step that an inner srun would take for its own options."""
KEPT = ("GPUJOB_HISTORY_DIR",)
"""Variables that begin so and are the user's: the sidecars read them too."""


def one_line(text: str) -> bool:
    """Whether the text fits into an #SBATCH line."""
    return "\n" not in text and "\r" not in text


def quoted(value: str) -> str:
    """A value for an #SBATCH line. Its quotes are a shell's, but a backslash escapes even inside them."""
    return shlex.quote(value).replace("\\", "\\\\")


def output_pattern(path: str) -> str:
    """A path as Slurm's file name pattern: ``%`` would begin a replacement (sbatch(1), filename pattern)."""
    return path.replace("%", "%%")


def directives(plan: Plan) -> list[tuple[str, str | None]]:
    """Options of sbatch in a fixed order; None for one without a value."""
    name = output_pattern(plan.run_dir_name).replace("{job_id}", "%j", 1)
    run_dir = f"{output_pattern(plan.logs_dir)}/{name}"
    found: list[tuple[str, str | None]] = [
        ("job-name", safe_label(plan.job_name)),
        ("nodes", str(plan.nodes)),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", str(plan.cpus_per_node)),
    ]
    if plan.memory_per_node:
        found.append(("mem", plan.memory_per_node))
    if plan.gpus_per_node:
        found.append(("gres", f"gpu:{plan.gpus_per_node}"))
    for option, key in (
        ("time", "time_limit"),
        ("partition", "partition"),
        ("account", "account"),
        ("qos", "qos"),
    ):
        if plan.slurm.get(key):
            found.append((option, str(plan.slurm[key])))
    found += [
        ("chdir", plan.workdir),
        ("output", f"{run_dir}/log.out"),
        ("error", f"{run_dir}/log.err"),
        ("open-mode", "append"),
    ]
    for name, value in sorted(plan.slurm.get("directives", {}).items()):
        if value is False:
            continue
        found.append((name, None if value is None or value is True else str(value)))
    return found


def sbatch_arguments(plan: Plan) -> list[str]:
    """Directives that no #SBATCH line can hold, since their values have more than one line."""
    return [f"--{name}={value}" for name, value in directives(plan) if value is not None and not one_line(value)]


def render_sbatch(plan: Plan) -> str:
    """The batch script: one directive per line, each value quoted, then the orchestrator in place of the shell."""
    lines = ["#!/bin/bash"]
    for name, value in directives(plan):
        if value is None:
            lines.append(f"#SBATCH --{name}")
        elif one_line(value):
            lines.append(f"#SBATCH --{name}={quoted(value)}")
    before, _, after = plan.run_dir_name.partition("{job_id}")
    before = f"{plan.logs_dir}/{before}"
    lines += [
        "",
        "# The orchestrator takes the place of this shell, so that Slurm's signals reach it.",
        f'run_dir={shlex.quote(before)}"$SLURM_JOB_ID"{shlex.quote(after)}',
        f'exec {shlex.quote(plan.python)} -I -B -m launcher.orchestrate "$run_dir"',
    ]
    return "\n".join(lines) + "\n"


def scrub(environ: dict[str, str]) -> dict[str, str]:
    """An environment for srun without what the batch step's own options left in it."""
    return {name: value for name, value in environ.items() if name in KEPT or not name.startswith(LEAKING)}


def srun_argv(
    plan: Plan, *, name: str, hosts: Sequence[str], output: Path, error: Path, command: Sequence[str]
) -> list[str]:
    """A step with one task on each of ``hosts``, which shares the job's resources with the other steps."""
    argv = [
        "srun",
        "--overlap",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(hosts)}",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--input=none",
        "--kill-on-bad-exit=1",
        "--open-mode=append",
        f"--job-name={name}",
        f"--chdir={plan.workdir}",
        f"--output={output_pattern(str(output))}",
        f"--error={output_pattern(str(error))}",
    ]
    if plan.gpus_per_node:
        argv.append(f"--gres=gpu:{plan.gpus_per_node}")
    return [*argv, *command]
