"""Programs and environment of a plan's roles, as far as they are known before the job runs."""

import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launcher.check.python_modules import InterpreterSilent, missing_modules
from launcher.plan.placeholders import DEFAULT_VARIABLES, fill_placeholders, placeholder_values, task_argv
from launcher.plan.plan import BALANCER, BENCHMARK, FRONTENDS, WORKERS, TaskPlan
from launcher.planner import nginx
from launcher.planner.benchmarks import BENCHMARKS
from launcher.planner.planned_job import PlannedJob

UNLESS_ON_NODES = "unless the nodes have it, "
RUN_PATH_TEXT = "a path in `env` that is known only at run time"


def role_commands(planned_job: PlannedJob) -> Iterator[tuple[str, TaskPlan, list[str]]]:
    """First task of each role: place of its command, the task, and the words of its own program."""
    plan = planned_job.plan
    facts, seen = plan.facts_before_run(), set()
    for planned in plan.tasks:
        if planned.task.role not in seen:
            seen.add(planned.task.role)
            yield (
                f"{job_file_place(planned)}.command",
                planned,
                program_command(planned_job, planned, task_argv(plan, planned, facts)),
            )


def program_command(planned_job: PlannedJob, planned: TaskPlan, argv: Sequence[str]) -> list[str]:
    """Words of a task, without the shell around nginx and some benchmarks."""
    benchmark = planned_job.spec.benchmark
    if planned.stage == BALANCER:
        return list(argv[nginx.SHELL_PREFIX_LENGTH :])
    if planned.stage != BENCHMARK or benchmark is None:
        return list(argv)
    return list(argv[BENCHMARKS[benchmark.type].shell_prefix_length :])


def job_file_place(planned: TaskPlan) -> str:
    """The part of the job file that defines a task."""
    role = planned.task.role
    return {WORKERS: f"workers ({role})", FRONTENDS: "frontend", BENCHMARK: "benchmark"}.get(planned.stage, role)


def is_python(program: str) -> bool:
    """Whether a program's name is that of a Python interpreter."""
    return os.path.basename(program).rstrip("0123456789.") == "python"


def find_program(planned_job: PlannedJob, planned: TaskPlan, program: str) -> str | None:
    """Path of the program that a worker would start, or None."""
    if "/" in program:
        here = Path(planned_job.plan.workdir, program)
        return str(here) if here.is_file() and os.access(here, os.X_OK) else None
    return shutil.which(program, path=environment_of(planned_job, planned).get("PATH", os.defpath))


def environment_of(planned_job: PlannedJob, planned: TaskPlan) -> Mapping[str, str]:
    """Environment of a worker of this role, as far as known here."""
    values = placeholder_values(planned_job.plan, planned, planned_job.plan.facts_before_run())
    given = {name: fill_placeholders(value, values) for name, value in planned.env.items()}
    return {**DEFAULT_VARIABLES, **planned_job.environ, **given}


def may_be_on_nodes(planned_job: PlannedJob, path: str) -> bool:
    """Whether the nodes of a submitted job may have a path that is missing here, such as a disk of their own.

    What shares a file system with the working directory is the same there.
    """
    if planned_job.local or not os.path.isabs(path) or os.path.lexists(path):
        return False
    there, workdir = _existing_part(Path(path)), _existing_part(Path(planned_job.plan.workdir))
    return there == Path("/") or there.stat().st_dev != workdir.stat().st_dev


def _existing_part(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(part for part in (path, *path.parents) if part.exists())


def is_known_only_at_run(planned_job: PlannedJob, planned: TaskPlan, name: str) -> bool:
    """Whether a variable's value, such as ``{run_dir}/bin``, depends on facts of the run."""
    plan, value = planned_job.plan, planned.env.get(name, "")
    one, hosts = plan.facts_before_run(), [f"other{index}" for index in range(plan.nodes)]
    other = dataclasses.replace(plan.facts_before_run("1", hosts), attempt=1, port_offset=1)
    return len({fill_placeholders(value, placeholder_values(plan, planned, facts)) for facts in (one, other)}) > 1


def modules_not_found(
    planned_job: PlannedJob, planned: TaskPlan, program: str, names: Sequence[str], flags: Sequence[str] = ()
) -> list[str]:
    """Modules that a worker's interpreter does not find. Raises InterpreterSilent if only a run can show it."""
    missing = missing_modules(program, names, environment_of(planned_job, planned), planned_job.plan.workdir, flags)
    deciding = ("PATH", *(name for name in planned.env if name.startswith("PYTHON")))
    if missing and any(is_known_only_at_run(planned_job, planned, name) for name in deciding):
        raise InterpreterSilent(f"{', '.join(missing)} may be in {RUN_PATH_TEXT}")
    return missing
