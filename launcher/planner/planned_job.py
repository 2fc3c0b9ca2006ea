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
from launcher.planner.planner import make_plan
from launcher.rundir.rundir import user_name


@dataclass(frozen=True)
class PlannedJob:
    """Everything that is checked before a launch."""

    spec: JobSpec
    cluster: ClusterSpec
    plan: Plan
    local: bool
    environ: Mapping[str, str]


def read_planned_job(job: str, *, local: bool, available: int | None = None) -> PlannedJob:
    """Read and plan a job for this machine or for Slurm. Raises ConfigErrors with every problem.

    ``available`` is the number of nodes, if known.
    """
    workdir = Path.cwd()
    problems: list[ConfigError] = []
    spec = cluster = None
    try:
        cluster = load_cluster(os.environ, workdir)
    except ConfigError as error:
        problems.append(error)
    try:
        spec = load_job(Path(job))
    except ConfigError as error:
        problems.append(error)
    if spec is None or cluster is None:
        raise ConfigErrors(problems)
    try:
        return plan_job(
            spec,
            cluster,
            job_dir=Path(job).resolve().parent,
            workdir=workdir,
            timestamp=time.strftime("%Y%m%d_%H%M%S"),
            local=local,
            available=available,
        )
    except TopologyError as error:
        raise ConfigErrors([ConfigError(job, error.problems)]) from error


def plan_job(
    spec: JobSpec,
    cluster: ClusterSpec,
    *,
    job_dir: Path,
    workdir: Path,
    timestamp: str,
    local: bool,
    available: int | None = None,
) -> PlannedJob:
    """Plan a job for this machine or for Slurm. Raises TopologyError if it does not fit."""
    plan = make_plan(
        spec,
        cluster,
        job_dir=job_dir,
        workdir=workdir,
        user=re.sub(r"\s", "_", user_name()),
        timestamp=timestamp,
        python=sys.executable,
        local=local,
        available=available,
    )
    return PlannedJob(spec, cluster, plan, local, dict(os.environ))
