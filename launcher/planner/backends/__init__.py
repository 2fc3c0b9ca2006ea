"""Programs that workers run, one module for each backend. Pure."""

from importlib import import_module

from launcher.jobfile.backend_kinds import BACKEND_KINDS
from launcher.planner.backends.base import Backend

BACKENDS: dict[str, Backend] = {kind: import_module(f"{__name__}.{kind}").BACKEND for kind in BACKEND_KINDS}
