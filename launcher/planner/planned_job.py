"""A planned job: job file, cluster file, and the plan made from both."""

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ConfigError, ConfigErrors, TopologyError
from launcher.jobfile.jobfile import ClusterSpec, JobSpec, load_cluster, load_job
from launcher.plan.plan import Plan
from launcher.planner.planner import Invocation, make_plan
from launcher.rundir.rundir import user_name


@dataclass(frozen=True)
class PlannedJob:
    """Everything that is checked before a launch."""

    spec: JobSpec
    cluster: ClusterSpec
    plan: Plan
    local: bool
    environ: Mapping[str, str]


def make_invocation(
    job: str | Path, workdir: Path | None = None, *, local: bool, available: int | None = None
) -> Invocation:
    """Describe a command given here and now for this job file; ``available`` is the number of nodes, if known."""
    return Invocation(
        job_dir=Path(job).resolve().parent,
        workdir=workdir or Path.cwd(),
        user=re.sub(r"\s", "_", user_name()),
        timestamp=time.strftime("%Y%m%d_%H%M%S"),
        python=sys.executable,
        local=local,
        available=available,
    )


def read_planned_job(job: str, *, local: bool, available: int | None = None) -> PlannedJob:
    """Read and plan a job for this machine or for Slurm. Raises ConfigErrors with every problem.

    ``available`` is the number of nodes, if known.
    """
    invocation = make_invocation(job, local=local, available=available)
    problems: list[ConfigError] = []
    spec = cluster = None
    try:
        cluster = load_cluster(os.environ, invocation.workdir)
    except ConfigError as error:
        problems.append(error)
    try:
        spec = load_job(Path(job))
    except ConfigError as error:
        problems.append(error)
    if spec is None or cluster is None:
        raise ConfigErrors(problems)
    try:
        return plan_job(spec, cluster, invocation)
    except TopologyError as error:
        raise ConfigErrors([ConfigError(job, error.problems)]) from error


def plan_job(spec: JobSpec, cluster: ClusterSpec, invocation: Invocation) -> PlannedJob:
    """Plan a job for this machine or for Slurm. Raises TopologyError if it does not fit."""
    plan = make_plan(spec, cluster, invocation)
    return PlannedJob(spec, cluster, plan, invocation.local, dict(os.environ))
