"""Render the batch script and srun commands."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.contract.identity import safe_label
from exporter.contract.python_flags import ISOLATED
from launcher.plan.placeholders import MOST_WORD_BYTES
from launcher.plan.plan import Plan, SetupPart
from launcher.steps.hostlist import fold_hostlist

DROPPED_PREFIXES = (
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
)  # prefixes of variables from the batch step that srun would read as its own options
# variables that describe the components of a heterogeneous job
_COMPONENT_VARIABLE = re.compile(r"_(HET|PACK)_GROUP_\d+$|^SLURM_(HET|PACK)_SIZE$")
KEPT_VARIABLES = ("GPUJOB_HISTORY_DIR",)  # exceptions from `DROPPED_PREFIXES`: the user's own, read by sidecars


MODULE_LINES = (
    "# A batch shell is not a login shell: it may not know the module command yet.",
    "# Lmod and Environment Modules set MODULESHOME in every shell, whatever a site calls its profile script.",
    'for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh "${MODULESHOME:+$MODULESHOME/init/bash}"; do',
    '  type module >/dev/null 2>&1 || { [ -r "$init" ] && . "$init"; }',
    "done",
)

RUN_IDS = {
    "{job_id}": ("%j", "SLURM_JOB_ID"),
    "{array_job_id}": ("%A", "SLURM_ARRAY_JOB_ID"),
    "{array_task_id}": ("%a", "SLURM_ARRAY_TASK_ID"),
}  # placeholders in run directory names, with Slurm's pattern (sbatch(1)) and variable for each


def fits_directive_line(text: str) -> bool:
    """Whether the text fits into one ``#SBATCH`` line."""
    return "\n" not in text and "\r" not in text


def quote_directive(value: str) -> str:
    """Quote a value for an ``#SBATCH`` line as in a shell, but with backslashes doubled."""
    return shlex.quote(value).replace("\\", "\\\\")


def output_pattern(path: str) -> str:
    """Escape ``%`` in a path for Slurm's file name patterns (sbatch(1), filename pattern)."""
    return path.replace("%", "%%")


def job_directives(plan: Plan) -> list[tuple[str, str | None]]:
    """Options for sbatch in a fixed order, with None for an option without a value.

    For a heterogeneous job, they belong to its first component. The second has ``component_directives``.
    """
    name = output_pattern(plan.run_dir_name)
    for placeholder, (pattern, _) in RUN_IDS.items():
        name = name.replace(placeholder, pattern)
    run_dir = f"{output_pattern(plan.logs_dir)}/{name}"
    het = plan.slurm.het
    found: list[tuple[str, str | None]] = [
        ("job-name", safe_label(plan.job_name)),
        *component_directives(plan, het[0] if het else plan.nodes),
        ("chdir", plan.workdir),
        ("output", f"{run_dir}/log.out"),
        ("error", f"{run_dir}/log.err"),
        ("open-mode", "append"),
    ]
    if plan.slurm.dependency:
        found.append(("dependency", plan.slurm.dependency))
    if plan.slurm.signal:
        found.append(("signal", f"B:{plan.slurm.signal}"))  # to the orchestrator, which signals the workers
    if (requeue := plan.slurm.requeue) is not None:
        found.append(("requeue" if requeue.preempted or requeue.time_limit else "no-requeue", None))
    return [*found, *_other_options(plan)]


def component_directives(plan: Plan, nodes: int) -> list[tuple[str, str | None]]:
    """Options of one component with this number of nodes."""
    found: list[tuple[str, str | None]] = [
        ("nodes", str(nodes)),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", str(plan.cpus_per_node)),
    ]
    if plan.memory_per_node:
        found.append(("mem", plan.memory_per_node))
    if plan.gpus_per_node:
        found.append(("gres", ":".join(filter(None, ("gpu", plan.gpu_type, str(plan.gpus_per_node))))))
    if plan.slurm.exclusive:
        found.append(("exclusive", None))
    if plan.slurm.segment:
        found.append(("segment", str(plan.slurm.segment)))
    for option, key in (
        ("time", "time_limit"),
        ("partition", "partition"),
        ("account", "account"),
        ("qos", "qos"),
    ):
        if getattr(plan.slurm, key):
            found.append((option, str(getattr(plan.slurm, key))))
    return found


def _other_options(plan: Plan) -> list[tuple[str, str | None]]:
    """Options from ``directives``, without those that a key of the job file sets."""
    ours = {"exclusive"} if plan.slurm.exclusive else set()
    ours |= {"requeue", "no-requeue"} if plan.slurm.requeue is not None else set()
    return [
        (name, None if value is None or value is True else str(value))
        for name, value in sorted(plan.slurm.directives.items())
        if value is not False and name not in ours
    ]


def sbatch_arguments(plan: Plan) -> list[str]:
    """Directives with several lines, which no ``#SBATCH`` line can hold."""
    return [
        f"--{name}={value}"
        for name, value in job_directives(plan)
        if value is not None and not fits_directive_line(value)
    ]


def render_sbatch(plan: Plan) -> str:
    """Render the batch script: directives, setup, then the guard in place of the shell."""
    lines = ["#!/bin/bash", *_directive_lines(job_directives(plan))]
    if het := plan.slurm.het:
        lines += ["#SBATCH hetjob", *_directive_lines([*component_directives(plan, het[1]), *_other_options(plan)])]
    lines += [
        "",
        *_setup_lines(plan.setup.parts),
        "# The guard of the orchestrator takes the place of this shell, so that Slurm's signals reach it.",
        f"run_dir={_run_dir_text(plan)}",
        f'exec {shlex.quote(plan.python)} {" ".join(ISOLATED)} -B -m launcher.guard "$run_dir"',
    ]
    return "\n".join(lines) + "\n"


def _run_dir_text(plan: Plan) -> str:
    """Shell expression for the run directory, with ids from Slurm's variables."""
    first, *rest = re.split(f"({'|'.join(map(re.escape, RUN_IDS))})", plan.run_dir_name)
    parts = (f'"${RUN_IDS[part][1]}"' if part in RUN_IDS else shlex.quote(part) for part in rest if part)
    return shlex.quote(f"{plan.logs_dir}/{first}") + "".join(parts)


def _directive_lines(options: Sequence[tuple[str, str | None]]) -> list[str]:
    return [
        f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={quote_directive(value)}"
        for name, value in options
        if value is None or fits_directive_line(value)
    ]


def _setup_lines(parts: Sequence[SetupPart]) -> list[str]:
    """Shell lines that load modules, source a script and run the preamble, part by part.

    If a module or script cannot be loaded, the job ends before anything starts, with a line in its error log.
    """
    lines: list[str] = []
    if parts:
        lines.append(": # from here on nothing is a directive")
    if any(part.modules for part in parts):
        lines += MODULE_LINES
    for part in parts:
        for name in part.modules:
            lines.append(f"module load {shlex.quote(name)} || {_abort_command(f'the module {name} cannot be loaded')}")
        if part.script is not None:
            script = shlex.quote(part.script)
            lines += [
                f"[ -r {script} ] || {_abort_command('the setup script ' + part.script + ' cannot be read')}",
                f". {script}",
            ]
        if part.preamble is not None:
            lines.append(part.preamble.rstrip("\n"))
    return [*lines, ""] if lines else []


def _abort_command(problem: str) -> str:
    return f"{{ printf '%s\\n' {shlex.quote(f'gpujob: {problem}; nothing was started')} >&2; exit 1; }}"


def scrub_environment(environ: dict[str, str]) -> dict[str, str]:
    """Drop the variables that the batch step's options would pass on to srun."""
    return {
        name: value
        for name, value in environ.items()
        if name in KEPT_VARIABLES or not name.startswith(DROPPED_PREFIXES)
    }


def without_outer_components(environ: Mapping[str, str], *, het: bool) -> dict[str, str]:
    """Drop the components of another job, if this job was submitted from its batch step.

    sbatch passes those variables on (seen with 22.05). A heterogeneous job sets its own.
    """
    return {name: value for name, value in environ.items() if het or not _COMPONENT_VARIABLE.search(name)}


class SrunStep(NamedTuple):
    """A step with tasks on each of its hosts, which shares the job's resources with other steps."""

    name: str
    hosts: Sequence[str]
    output: str | Path
    error: str | Path
    command: Sequence[str]
    tasks_per_node: int = 1
    mpi: str = "none"
    options: Sequence[str] = ()
    wait_s: int | None = None  # how long the other tasks may run after the first has ended; None: as the site says
    first_node: int = 0  # the plan's index of the first host, which selects the component of a heterogeneous job
    ends_with_a_failure: bool = True  # whether a failed task ends the others


def srun_argv(plan: Plan, step: SrunStep) -> list[str]:
    """Command for a step.

    A step in both components of a heterogeneous job has two parts separated by a colon (srun(1), heterogeneous jobs).
    """
    argv = ["srun"]
    for group, part in _hosts_by_component(plan, step.hosts, step.first_node):
        argv += [":"] if len(argv) > 1 else []
        argv += [
            *([f"--het-group={group}"] if group is not None else []),
            "--overlap",
            f"--nodes={len(part)}",
            f"--ntasks={len(part) * step.tasks_per_node}",
            f"--ntasks-per-node={step.tasks_per_node}",
            f"--nodelist={_nodelist(part)}",
            "--mem=0",
            "--cpu-bind=none",
            f"--mpi={step.mpi}",
            "--input=none",
            f"--kill-on-bad-exit={int(step.ends_with_a_failure)}",
            *([f"--wait={step.wait_s}"] if step.wait_s is not None else []),
            "--open-mode=append",
            f"--job-name={step.name}",
            f"--chdir={plan.workdir}",
            f"--output={output_pattern(str(step.output))}",
            f"--error={output_pattern(str(step.error))}",
            *([f"--gres=gpu:{plan.gpus_per_node}"] if plan.gpus_per_node else []),
            *step.options,
            *step.command,
        ]
    return argv


def _nodelist(hosts: Sequence[str]) -> str:
    """The names as they are, or folded if one word of a command could not hold them."""
    text = ",".join(hosts)
    return text if len(text) <= MOST_WORD_BYTES else fold_hostlist(hosts)


def _hosts_by_component(plan: Plan, hosts: Sequence[str], first_node: int) -> list[tuple[int | None, Sequence[str]]]:
    """Group hosts by component of the job; None for a job without components."""
    het = plan.slurm.het
    if not het:
        return [(None, hosts)]
    here = max(0, min(len(hosts), het[0] - first_node))
    return [(group, part) for group, part in ((0, hosts[:here]), (1, hosts[here:])) if part]


def component_index(plan: Plan, node_index: int) -> int:
    """Component of the job that contains a node of the plan, 0 or 1."""
    het = plan.slurm.het
    return 1 if het and node_index >= het[0] else 0


def allocated_nodes(environ: Mapping[str, str]) -> str | None:
    """Host list of the job, in the order of its components; None outside a job."""
    groups = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}") for group in (0, 1)]
    lists = [text for text in groups if text]
    return ",".join(lists) if lists else environ.get("SLURM_JOB_NODELIST")


def component_ids(environ: Mapping[str, str], job_id: str) -> tuple[str, ...]:
    """Slurm's id of each component of the job, or just the job id."""
    ids = (environ.get(f"SLURM_JOB_ID_HET_GROUP_{group}") for group in (0, 1))
    return tuple(found for found in ids if found) or (job_id,)
