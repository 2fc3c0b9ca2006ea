"""A temporary directory that other users can enter."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory for all users. The one of pytest is closed to others again whenever another run of pytest begins."""
    with tempfile.TemporaryDirectory(prefix="gpujob-cli-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)
