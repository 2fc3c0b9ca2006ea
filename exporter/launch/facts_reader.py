"""Facts about a launch beyond processes and logs: opened GPUs, writable directories."""

import os
import re
from pathlib import Path

from exporter.machine.procfs import read_children

MOST_PROCESSES = 256  # of one worker whose open files are read

_GPU = re.compile(r"/dev/nvidia\d+|/dev/dri/renderD\d+")  # AMD's are the second


def read_open_gpus(pid: int, proc: str = "/proc") -> int | None:
    """Number of GPU devices that a process and its descendants have open; None without permission."""
    devices: set[str] = set()
    seen, pending, pids = False, [pid], 0
    while pending and pids < MOST_PROCESSES:
        current = pending.pop()
        pids += 1
        pending += read_children(current, proc)
        try:
            names = os.listdir(f"{proc}/{current}/fd")
        except OSError:
            continue  # it has ended, or belongs to another user
        seen = True
        for name in names:
            try:
                target = os.readlink(f"{proc}/{current}/fd/{name}")
            except OSError:
                continue
            if _GPU.fullmatch(target):
                devices.add(target)
    return len(devices) if seen else None


class WriteWatch:
    """File watch that checks whether a directory is writable."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def poll(self, now: float) -> str | None:
        """Why the current user cannot write into it, or None."""
        return why_not_writable(self._directory)


def why_not_writable(directory: Path) -> str | None:
    """Why the current user cannot write into a directory, or None."""
    try:
        if not directory.is_dir():
            return f"{directory} is not a directory" if directory.exists() else f"{directory} does not exist"
        space = os.statvfs(directory)
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    if space.f_flag & os.ST_RDONLY:
        return f"{directory} is on a file system that is mounted read-only"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} cannot be written to"
    return None if space.f_bavail else f"{directory} is on a file system that is full"


def read_file_size(path: str | os.PathLike[str]) -> int | None:
    """Size of a file in bytes; None if it does not exist."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None
