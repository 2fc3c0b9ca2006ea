"""Where the logs of a task are, and how they end."""

import os
from pathlib import Path

from exporter.manifest import Task


def run_suffix(attempt: int, restart: int) -> str:
    """What tells the files of one run from those of the others: ``_a1`` after a requeue, ``_r1`` after a restart."""
    return (f"_a{attempt}" if attempt else "") + (f"_r{restart}" if restart else "")


def log_paths(task: Task, run_dir: Path, node: str, attempt: int, restart: int) -> tuple[Path, ...]:
    """Log files of one run of a task; ``{node}`` and ``{run}`` in the manifest's names are filled in."""
    return tuple(
        run_dir / name.replace("{node}", node).replace("{run}", run_suffix(attempt, restart)) for name in task.logs
    )


def read_end(path: Path, most_bytes: int) -> bytes:
    """The last bytes of a file, or nothing when it cannot be read."""
    try:
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            source.seek(max(0, size - most_bytes))
            return source.read(most_bytes)
    except OSError:
        return b""
