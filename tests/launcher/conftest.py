"""Fixtures of the launcher's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.support import HARD_NAMES

Golden = Callable[[str, str], Path]


@pytest.fixture(params=HARD_NAMES, ids=ascii)
def hard_name(request: pytest.FixtureRequest) -> str:
    """A name of a job or a folder that breaks careless code; those that a shell would act upon among them."""
    return str(request.param)
