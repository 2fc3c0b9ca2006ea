"""A real Slurm cluster and a real Prometheus for the end-to-end tests."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.endtoend.fake_gpus import GPUS, uuid_of
from tests.endtoend.jobs import JobSpace, user_for
from tests.fakenvml import Scenario, compiler, library, profiles
from tests.realstack.cluster import Cluster, slurm_unavailable
from tests.realstack.stack import Stack, prometheus_unavailable


@pytest.fixture(scope="session")
def space_dir() -> Iterator[Path]:
    """A directory for all users. Those of pytest are private."""
    directory = Path(tempfile.mkdtemp(prefix="gpujob-e2e-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    if not os.environ.get("GPUJOB_KEEP"):
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(space_dir: Path) -> Iterator[Cluster]:
    """Four nodes with accounting."""
    if reason := slurm_unavailable():
        pytest.skip(reason)
    with Cluster(space_dir / "cluster", prefix=os.environ.get("GPUJOB_TEST_NODES", "node")) as instance:
        yield instance


@pytest.fixture(scope="session")
def stack(space_dir: Path, cluster: Cluster) -> Iterator[Stack]:
    """Prometheus and Alertmanager on the head of the cluster, with the project's rules."""
    if reason := prometheus_unavailable():
        pytest.skip(reason)
    targets = space_dir / "targets"
    targets.mkdir(exist_ok=True)
    targets.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    with Stack(space_dir / "stack", cluster, targets_dir=targets) as instance:
        yield instance


@pytest.fixture
def jobs(space_dir: Path, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[JobSpace]:
    """A working directory for the jobs of one test. Jobs that still run at its end are cancelled."""
    directory = Path(tempfile.mkdtemp(prefix="job-", dir=space_dir))
    space = JobSpace(cluster, directory, user_for(cluster), space_dir / "targets")
    yield space
    space.close()


@pytest.fixture
def fake_gpus(jobs: JobSpace, cluster: Cluster) -> dict[str, str]:
    """The environment with which processes find four fake GPUs per node.

    As NVIDIA's driver does, the library shows only GPUs whose device file can be opened. Slurm denies the others.
    """
    if compiler() is None:
        pytest.skip("no C compiler")
    directory = jobs.directory / "gpus"
    directory.mkdir()
    for index, name in enumerate(cluster.node_names):
        scenario = profiles.h200(GPUS)
        for number, gpu in enumerate(scenario.gpus):
            gpu.uuid = uuid_of(index, number)
        scenario.write(directory / f"{name}.scenario")
        (directory / f"{name}.processes").mkdir(mode=0o777)
    jobs.own(directory)
    return {
        "LD_LIBRARY_PATH": str(library(Scenario().without)),
        "FAKENVML_SCENARIO": f"{directory}/%h.scenario",
        "FAKENVML_PROCESSES": f"{directory}/%h.processes",
        "FAKENVML_VISIBLE": str(cluster.directory / "dev"),
    }
