"""The wheel that the tests of installations share."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.packaging.programs import NO_INDEX, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    done = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", folder, ROOT, cwd=folder)
    if done.returncode and any(text in done.stderr for text in NO_INDEX):
        pytest.skip("hatchling is not installed and no package index answers")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("gpujob-*.whl")
    return path
