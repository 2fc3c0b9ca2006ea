"""The import of aiohttp's server without its client."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LATER_RELEASE = """
import importlib
def fail(name):
    raise ImportError(name)
importlib.import_module = fail
"""


@pytest.mark.parametrize(("before", "client"), [("", False), (LATER_RELEASE, True)])
def test_the_client_is_imported_only_if_wanted_or_if_the_server_needs_it(before: str, client: bool) -> None:
    program = f"""{before}
import sys
from exporter.web.aiohttp_server import web
assert ("aiohttp.client" in sys.modules) is {client}
import aiohttp
assert aiohttp.web is web
assert aiohttp.ClientSession.__module__ == "aiohttp.client" and aiohttp.__version__
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)
