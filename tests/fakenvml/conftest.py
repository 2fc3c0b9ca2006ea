"""A process that reads a scenario, and names that its tests share."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakenvml import compiler
from tests.fakenvml.client import Begin, Client


@pytest.fixture(autouse=True)
def needs_compiler() -> None:
    """Nothing here can be tried without one."""
    if compiler() is None:
        pytest.skip("no C compiler")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the scenario is."""
    return tmp_path / "scenario"


@pytest.fixture
def begin(path: Path) -> Iterator[Begin]:
    """Starts a process that reads this scenario."""
    with ExitStack() as stack:
        yield lambda scenario, **more: stack.enter_context(Client(scenario, path, **more))
