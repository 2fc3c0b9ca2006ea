"""Before anything is written or submitted: findings about a plan on this machine."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.plan import Plan, RunFacts, task_argv

INTERPRETERS = ("python", "python3", "bash", "sh")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or doubtful: where, what, and the cure."""

    code: str
    level: Literal["error", "warning"]
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


def check_plan(plan: Plan, *, local: bool) -> list[Finding]:
    """Findings about directories, programs and tools. Nothing is changed."""
    findings = [*_directories(plan, local=local), *_commands(plan, local=local)]
    if not local and shutil.which("sbatch") is None:
        findings.append(
            Finding(
                "no-slurm",
                "error",
                "sbatch",
                "is not on PATH: there is no Slurm here; load its module, or use `gpujob run` for this machine",
            )
        )
    if local and plan.gpus_per_node:
        here = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
        needed = plan.gpus_per_node * plan.nodes
        if here < needed:
            findings.append(
                Finding(
                    "few-gpus",
                    "warning",
                    "resources.gpus_per_node",
                    f"the plan gives away {needed} GPUs and this machine has {here}; workers will not find theirs",
                )
            )
    return findings


def _directories(plan: Plan, *, local: bool) -> list[Finding]:
    findings = []
    if not Path(plan.workdir).is_dir():
        findings.append(
            Finding(
                "no-workdir", "error", "workdir", f'"{plan.workdir}" is not a directory; create it or leave workdir out'
            )
        )
    for place, directory in _written(plan):
        problem = _why_not_writable(Path(directory))
        if problem:
            findings.append(Finding("not-writable", "error", place, problem))
    if not local and "\\" in plan.logs_dir:
        problem = (
            f'"{plan.logs_dir}" holds a backslash, which Slurm\'s file name patterns cannot express; use another one'
        )
        findings.append(Finding("backslash", "error", "logs_dir", problem))
    if plan.target_dir and not os.access(plan.target_dir, os.W_OK | os.X_OK):
        findings.append(
            Finding(
                "target-dir",
                "warning",
                "target_dir",
                f'"{plan.target_dir}" is not a directory you can write to; Prometheus will not find this job there',
            )
        )
    return findings


def _written(plan: Plan) -> list[tuple[str, str]]:
    """Absolute directories that the job writes to, with the key that names each."""
    places = [("logs_dir", plan.logs_dir)]
    keys = {"output": "paths.output_dir", "checkpoint": "paths.checkpoint_dir"}
    places += [(keys[group.name], group.directory) for group in plan.manifest.groups if group.name in keys]
    if plan.manifest.logs is not None:
        places.append(("paths.log_dir", plan.manifest.logs.directory))
    seen: dict[str, str] = {}
    for place, directory in places:
        if os.path.isabs(directory):
            seen.setdefault(directory, place)
    return [(place, directory) for directory, place in seen.items()]


def _why_not_writable(directory: Path) -> str | None:
    for place in (directory, *directory.parents):
        if place.is_dir():
            if os.access(place, os.W_OK | os.X_OK):
                return None
            made = "" if place == directory else f', so "{directory}" cannot be made'
            return f'no permission to write to "{place}"{made}; choose another directory'
        if place.exists():
            return f'"{place}" is not a directory; choose another one'
    return f'"{directory}" has no parent directory'


def _commands(plan: Plan, *, local: bool) -> list[Finding]:
    """A program or a script that is not there, once for each role."""
    findings, seen = [], set()
    facts = RunFacts("0", plan.run_dir("0"), tuple(f"node{index}" for index in range(plan.nodes)))
    for planned in plan.tasks:
        if planned.task.role in seen:
            continue
        seen.add(planned.task.role)
        place = f"workers ({planned.task.role}).command"
        argv = task_argv(plan, planned, facts)
        path = planned.env.get("PATH", os.environ.get("PATH", os.defpath))
        program = argv[0]
        if "/" in program:
            here = Path(plan.workdir, program)
            missing = not (here.is_file() and os.access(here, os.X_OK))
        else:
            missing = shutil.which(program, path=path) is None
        if missing:
            findings.append(
                Finding(
                    "no-program",
                    "error" if local or "/" in program else "warning",
                    place,
                    f'"{program}" is not a program on this machine; check its spelling, or give its full path',
                )
            )
        script = _script(argv)
        if script is not None and not Path(plan.workdir, script).exists():
            findings.append(
                Finding(
                    "no-script",
                    "error",
                    place,
                    f'"{script}" does not exist in {plan.workdir}; give its path from there, or use {{job_dir}}',
                )
            )
    return findings


def _script(argv: list[str]) -> str | None:
    """The script that an interpreter is given, or None."""
    name = os.path.basename(argv[0]).rstrip("0123456789.")
    if name not in INTERPRETERS:
        return None
    for word in argv[1:]:
        if word in ("-c", "-m"):
            return None
        if not word.startswith("-"):
            return word if word.endswith((".py", ".sh")) else None
    return None
