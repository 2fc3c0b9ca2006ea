"""Checkpoint folders that were empty at the first poll."""

from pathlib import Path

import pytest

from tests.exporter.files.checkpoints.checkpoint_trees import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder whose files are not checked."""
    found = Folder(tmp_path / "ckpt")
    found.poll()
    return found


@pytest.fixture
def verified(tmp_path: Path) -> Folder:
    """A folder whose files are checked."""
    found = Folder(tmp_path / "ckpt", verify=True)
    found.poll()
    return found


@pytest.fixture
def lone(tmp_path: Path) -> Folder:
    """The same for a job on one node."""
    found = Folder(tmp_path / "ckpt", verify=True, is_only_node=True)
    found.poll()
    return found
