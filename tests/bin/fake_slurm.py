"""What the fake Slurm commands beside this file share.

``FAKE_SLURM`` names a folder: each command appends a line to ``calls.jsonl`` there,
and answers as the files in it say (``sbatch.out``, ``sbatch.err``, ``sbatch.status``,
``sbatch.sleep`` and so on). Without the folder the commands refuse to work.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("FAKE_SLURM") or sys.exit("FAKE_SLURM is not set"))
NAME = Path(sys.argv[0]).name


def note(**facts: Any) -> None:
    """Append this call to the list."""
    slurm = {name: value for name, value in os.environ.items() if name.startswith(("SBATCH", "SQUEUE", "SLURM", "LC_"))}
    line = json.dumps({"command": NAME, "argv": sys.argv[1:], "env": slurm, **facts})
    with (FOLDER / "calls.jsonl").open("a") as out:
        out.write(line + "\n")


def told(what: str, default: str = "") -> str:
    """Text of the file that says how to answer, for example ``sbatch.out``."""
    path = FOLDER / f"{NAME}.{what}"
    return path.read_text() if path.exists() else default


def answer(default: str = "") -> None:
    """Print and end as the files say."""
    time.sleep(float(told("sleep", "0")))
    delimiter = next((word.partition("=")[2] for word in sys.argv if word.startswith("--delimiter=")), "|")
    sys.stdout.write(told("out", default).replace("|", delimiter))
    sys.stderr.write(told("err"))
    sys.exit(int(told("status", "0")))
