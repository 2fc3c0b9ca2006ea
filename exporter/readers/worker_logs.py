"""Where the logs of a task are, and how they end."""

import os
from collections.abc import Callable
from pathlib import Path

from exporter.manifest import Manifest, Task
from exporter.readers.files import read_files


def run_suffix(attempt: int, restart: int) -> str:
    """What tells the files of one run from those of the others: ``_a1`` after a requeue, ``_r1`` after a restart."""
    return (f"_a{attempt}" if attempt else "") + (f"_r{restart}" if restart else "")


def log_paths(task: Task, run_dir: Path, node: str, attempt: int, restart: int) -> tuple[Path, ...]:
    """Log files of one run of a task; ``{node}`` and ``{run}`` in the manifest's names are filled in."""
    return tuple(
        run_dir / name.replace("{node}", node).replace("{run}", run_suffix(attempt, restart)) for name in task.logs
    )


def extra_logs(
    manifest: Manifest, rank_of: Callable[[str], int | None], since: float | None = None
) -> dict[int, list[Path]]:
    """Files of the job's own log pattern by the rank that ``rank_of`` finds in their names.

    With ``since`` those alone that were written to after it: others are of an earlier job.
    """
    group = manifest.logs
    found: dict[int, list[Path]] = {}
    if group is None or group.pattern is None:
        return found
    directory = manifest.directory(group)
    for file in read_files(directory, group.pattern):
        rank = rank_of(file.name)
        if rank is not None and (since is None or file.mtime >= since):
            found.setdefault(rank, []).append(directory / file.name)
    return found


def read_end(path: Path, most_bytes: int) -> bytes:
    """The last bytes of a file, or nothing when it cannot be read."""
    try:
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            source.seek(max(0, size - most_bytes))
            return source.read(most_bytes)
    except OSError:
        return b""
