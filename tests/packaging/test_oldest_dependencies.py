"""The product with the oldest release of each dependency that `pyproject.toml` allows."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NO_INDEX = ("No matching distribution found", "ConnectionError", "NewConnectionError", "Temporary failure in name")
# Tests that meet most of the dependencies, and need no process, server or clock.
ROOMS = ("launcher/jobfile", "launcher/watch", "launcher/cli", "exporter/logs/search", "exporter/gpus/nvidia")


def run(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in argv]
    return subprocess.run(
        words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a virtual environment with the lower bounds."""
    folder = tmp_path_factory.mktemp("oldest")
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", need) for need in needs), needs
    bounds = folder / "bounds.txt"
    bounds.write_text("".join(f"{need.replace('>=', '==')}\n" for need in needs))
    assert run(sys.executable, "-m", "venv", folder / "venv", cwd=folder).returncode == 0
    python = folder / "venv/bin/python"
    tests = ("pytest", "hypothesis", "promql-parser", "hatchling")
    done = run(python, "-m", "pip", "install", "--quiet", "-c", bounds, "-e", ROOT, *tests, cwd=folder)
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
    done = run(oldest / "python", "-m", "pytest", *options, *(f"tests/{room}" for room in ROOMS), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]
