"""What processes of a job on this machine alone are started with."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.plan.plan import RunFacts
from launcher.steps.local_steps import LocalSteps, local_hosts
from tests.support.launcher import job_spec, plan_of

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def as_before() -> Iterator[None]:
    """This process does not go on to be the parent of orphans."""
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("resources", "told"),
    [({"nodes": 2, "gpus_per_node": 4}, ["0", "4"]), ({"nodes": 2}, ["0", "0"]), ({"gpus_per_node": 4}, ["0"])],
)
def test_each_sidecar_knows_where_the_gpus_of_its_node_begin(
    resources: dict[str, int], told: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$GPUJOB_FIRST_GPU"\n')
    python.chmod(0o755)
    plan = replace(plan_of(job_spec(resources=resources), local=True), python=str(python))
    hosts = local_hosts(plan, "here")
    for sidecar in LocalSteps(plan, RunFacts("local-1", tmp_path, hosts)).start_sidecars():
        assert sidecar.wait(60) == 0
    assert [(tmp_path / f"{host}_sidecar.log").read_text().strip() for host in hosts] == told
