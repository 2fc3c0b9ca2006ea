"""Secrets of a job: taken from the submitting environment, kept in one file that only the owner can read.

The file is removed when the job has ended. It stays if Slurm may run the job again, which then reads it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.contract import run_files
from launcher.errors import LauncherError

SECRETS_FILE = "secrets.json"


def write_secrets(run_dir: Path, names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Write the values of these variables to a private file; do nothing without names.

    Raises LauncherError if one is not set.
    """
    if not names:
        return
    if missing := [name for name in names if name not in environ]:
        raise LauncherError(f"secrets: {', '.join(missing)} is not set here; export it, or leave it out")

    def private(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_EXCL, 0o600)

    with open(run_dir / SECRETS_FILE, "w", encoding="ascii", opener=private) as out:
        json.dump({name: environ[name] for name in names}, out)


def remove_secrets(run_dir: Path) -> None:
    """Remove the values of a job that has ended."""
    (run_dir / SECRETS_FILE).unlink(missing_ok=True)


def read_secrets(run_dir: Path, names: Sequence[str]) -> dict[str, str]:
    """Values by name, for the environment of the tasks. Raises LauncherError if the file does not have them."""
    if not names:
        return {}
    found = run_files.read_json(run_dir / SECRETS_FILE) or {}
    if missing := [name for name in names if not isinstance(found.get(name), str)]:
        raise LauncherError(
            f"{run_dir / SECRETS_FILE} is missing or does not contain {', '.join(missing)}; submit the job again"
        )
    return {name: str(found[name]) for name in names}
