"""A planned job: job file, cluster file, and the plan made from both."""

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from exporter.contract.lazy_dataclass import dataclass
from launcher.errors import ConfigError, ConfigErrors, TopologyError
from launcher.jobfile.jobfile import ClusterSpec, JobSpec, load_cluster, parse_job
from launcher.plan.plan import Plan
from launcher.planner.planner import Invocation, make_plan
from launcher.planner.slurm_options import sbatch_defaults
from launcher.registry.own_stack import read_own_stack
from launcher.rundir.rundir import user_name
from launcher.rundir.yaml_files import read_yaml_text


@dataclass(frozen=True)
class PlannedJob:
    """Everything that is checked before a launch."""

    spec: JobSpec
    cluster: ClusterSpec
    plan: Plan
    local: bool
    environ: Mapping[str, str]


@dataclass(frozen=True)
class JobText:
    """The text of a job file, and what a command changes in it."""

    source: str  # its name in messages
    text: str
    job_dir: Path  # directory of the file
    options: Mapping[str, str] = field(default_factory=dict)  # option of the command that sets a place, by place


def read_job_text(path: Path, source: str | None = None) -> JobText:
    """Read a job file, once: it may be a pipe. Raises ConfigError."""
    text = read_yaml_text(path)
    return JobText(source or str(path), text, path.resolve().parent if path.is_file() else Path.cwd())


def make_invocation(
    job_dir: Path, workdir: Path | None = None, *, local: bool, available: int | None = None
) -> Invocation:
    """Describe a command given here and now for this job; ``available`` is the number of nodes, if known."""
    stack = read_own_stack(os.environ)
    return Invocation(
        job_dir=job_dir,
        workdir=workdir or Path.cwd(),
        user=re.sub(r"\s", "_", user_name()),
        timestamp=time.strftime("%Y%m%d_%H%M%S"),
        python=sys.executable,
        local=local,
        available=available,
        own_targets=None if stack is None else stack.targets,
        sbatch_defaults={} if local else sbatch_defaults(os.environ),
    )


def read_planned_job(job: JobText, *, local: bool, available: int | None = None) -> PlannedJob:
    """Plan a job for this machine or for Slurm. Raises ConfigErrors with every problem.

    ``available`` is the number of nodes, if known.
    """
    invocation = make_invocation(job.job_dir, local=local, available=available)
    problems: list[ConfigError] = []
    spec = cluster = None
    try:
        cluster = load_cluster(os.environ, invocation.workdir)
    except ConfigError as error:
        problems.append(error)
    try:
        spec = parse_job(job.text, job.source)
    except ConfigError as error:
        problems.append(error)
    if spec is None or cluster is None:
        raise ConfigErrors(problems)
    try:
        return plan_job(spec, cluster, invocation)
    except TopologyError as error:
        raise ConfigErrors([ConfigError(job.source, error.problems)]) from error


def plan_job(spec: JobSpec, cluster: ClusterSpec, invocation: Invocation) -> PlannedJob:
    """Plan a job for this machine or for Slurm. Raises TopologyError if it does not fit."""
    plan = make_plan(spec, cluster, invocation)
    return PlannedJob(spec, cluster, plan, invocation.local, dict(os.environ))
