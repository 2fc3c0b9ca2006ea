"""Planned jobs for the tests of preflight checks."""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher.check.finding import CheckFinding
from launcher.jobfile.jobfile import ClusterSpec, JobSpec
from launcher.planner.planned_job import PlannedJob
from launcher.planner.planner import make_plan
from tests.support.launcher import invocation_in

ENVIRON = {"PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin", "HOME": "/home/ana"}


def planned_job(
    folder: Path,
    *,
    local: bool = True,
    cluster: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **spec: Any,
) -> PlannedJob:
    """A planned job with one worker, with these keys of the job file."""
    job = JobSpec.model_validate({"name": "job", "workers": [{"command": "true"}], **spec})
    site = ClusterSpec.model_validate(cluster or {})
    plan = make_plan(job, site, invocation_in(folder, local=local))
    return PlannedJob(job, site, plan, local, {**ENVIRON, **(environ or {})})


def summaries(findings: Iterable[CheckFinding], status: str = "") -> list[tuple[str, str, str]]:
    """Code, status and place of each finding, or of those with one status."""
    return [(finding.code, finding.status, finding.place) for finding in findings if status in ("", finding.status)]
