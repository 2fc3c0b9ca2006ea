"""Fixtures that start a client of a scenario."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakenvml import compiler
from tests.fakenvml.client import Client, StartClient


@pytest.fixture(autouse=True)
def needs_compiler() -> None:
    """Skip all tests here without a C compiler."""
    if compiler() is None:
        pytest.skip("no C compiler")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the scenario file."""
    return tmp_path / "scenario"


@pytest.fixture
def start_client(path: Path) -> Iterator[StartClient]:
    """Starts a client of a scenario."""
    with ExitStack() as stack:
        yield lambda scenario, **more: stack.enter_context(Client(scenario, path, **more))
