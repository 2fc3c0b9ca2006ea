"""Commands that know nothing of the checkout they are started from."""

import os
import subprocess
from pathlib import Path

NO_INDEX = ("No matching distribution found", "ConnectionError", "NewConnectionError", "Temporary failure in name")


def run(*argv: str | Path, cwd: Path, timeout_s: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command without variables that refer to the checkout."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "GPUJOB"))
    }
    return subprocess.run(
        [str(word) for word in argv], cwd=cwd, env=kept | variables, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
