"""The line of `gpujob --version`: what somebody who helps needs to know."""

import platform
import re
import subprocess
from pathlib import Path

import click

from exporter import __version__

SLURM_TIMEOUT_S = 2.0  # it only prints its version
NVIDIA_FILE, AMD_FILE = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")


def print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """Print the line and exit."""
    if wanted and not context.resilient_parsing:
        parts = (f"Python {platform.python_version()}", _slurm_text(), driver_text(NVIDIA_FILE, AMD_FILE))
        click.echo(f"gpujob {__version__} ({', '.join(parts)})")
        context.exit()


def _slurm_text() -> str:
    try:
        done = subprocess.run(
            ["sinfo", "--version"], capture_output=True, text=True, timeout=SLURM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "no Slurm"
    found = re.search(r"\d+\.\d+[\w.-]*", done.stdout)
    return f"Slurm {found[0]}" if found else "no Slurm"


def driver_text(nvidia: Path, amd: Path) -> str:
    """The driver of the GPUs by the files that its kernel module shows."""
    for name, path in (("NVIDIA", nvidia), ("AMD", amd)):
        try:
            found = re.search(r"\b\d+\.\d+[\d.]*", path.read_text(encoding="utf-8"))
        except OSError:
            continue
        if found:
            return f"{name} driver {found[0]}"
    return "no GPU driver"
