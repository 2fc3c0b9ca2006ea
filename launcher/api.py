"""Functions for other programs. These names stay while the modules behind them may move."""

from launcher.errors import LauncherError
from launcher.verify.paths import PathVerdict, verify_path

__all__ = ["LauncherError", "PathVerdict", "verify_path"]
