"""The product with the oldest release of each dependency that `pyproject.toml` allows."""

import importlib.metadata
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.packaging.programs import NO_INDEX, run

ROOT = Path(__file__).resolve().parents[2]
# Tests that meet most of the dependencies, and need no process, server or clock.
ROOMS = ("launcher/jobfile", "launcher/watch", "launcher/cli", "exporter/logs/search", "exporter/gpus/nvidia")
TESTS_NEED = ("pytest", "hypothesis", "promql-parser")
# The product itself, what pydantic has its own version of, and tools that these tests do not use.
NOT_COPIED = {"gpujob", "pydantic_core", "grafana-foundation-sdk", "mypy", "pip", "py-spy", "ruff", "setuptools"}


def copy_others(site: Path, bounded: set[str]) -> None:
    """Copy what else the tests need from this environment, so that pip need not search for it again."""
    for found in importlib.metadata.distributions():
        if not {found.name.lower()} & (bounded | NOT_COPIED):
            for file in found.files or ():
                if ".." not in file.parts and (source := Path(str(found.locate_file(file)))).exists():
                    target = site / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, target)


@pytest.fixture(scope="module")
def oldest(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a virtual environment with the lower bounds."""
    folder = tmp_path_factory.mktemp("oldest")
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", need) for need in needs), needs
    bounds = folder / "bounds.txt"
    bounds.write_text("".join(f"{need.replace('>=', '==')}\n" for need in needs))
    assert run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder).returncode == 0
    python = folder / "venv/bin/python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    copy_others(Path(site), {need.partition(">")[0] for need in needs})
    pip = (sys.executable, "-m", "pip", "--python", python)
    done = run(*pip, "install", "--quiet", "--no-compile", "-c", bounds, wheel, *TESTS_NEED, cwd=folder, timeout_s=300)
    if done.returncode and any(text in done.stderr for text in NO_INDEX):
        pytest.skip("no package index answers")
    assert done.returncode == 0, done.stderr
    return python.parent


def test_a_job_runs_with_the_oldest_dependencies(oldest: Path, tmp_path: Path) -> None:
    job = {"name": "job", "workers": [{"command": "sh -c 'echo Processed 5/5 items'"}], "monitoring": {"linger": 0}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = run(oldest / "gpujob", "run", "job.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["state"], report["items"]) == ("COMPLETED", 5)
    assert report["monitoring"]["nodes_without"] == []


def test_the_rooms_that_use_most_dependencies_work_with_the_oldest(oldest: Path) -> None:
    options = ("-q", "-m", "quick", "-p", "no:cacheprovider")
    done = run(
        oldest / "python", "-m", "pytest", *options, *(f"tests/{room}" for room in ROOMS), cwd=ROOT, timeout_s=300
    )
    assert done.returncode == 0, done.stdout[-4000:]
