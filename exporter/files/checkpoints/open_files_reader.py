"""Whether a process can still write a file."""

import os
import re
from collections.abc import Iterable

from exporter.machine.procfs import read_proc_file, read_proc_names

_DELETED = " (deleted)"
_SHARED_MAPPING = re.compile(rb"^\S+ .w.s \S+ \S+ \d+ +(.+)$", re.MULTILINE)


def are_closed(paths: Iterable[str], proc: str = "/proc") -> bool:
    """Whether no process of this node can write these files; False if that is unknown.

    Files are compared by name, since a container may see them at another path. It is unknown if another user
    wrote them, or if a process of this user hides its files.
    """
    ours, names = os.geteuid(), set[str]()
    for path in paths:
        try:
            owner = os.lstat(path).st_uid
        except OSError:
            return False
        if ours not in (0, owner):
            return False
        names.add(os.path.basename(path))
    pids = [name for name in read_proc_names(proc) if name.isdecimal() and int(name) != os.getpid()]
    return bool(pids) and all(_cannot_write(f"{proc}/{pid}", names, ours) for pid in pids)


def _cannot_write(process: str, names: set[str], ours: int) -> bool:
    try:
        for fd in os.listdir(f"{process}/fd"):
            if _is_writer(process, fd, names):
                return False
    except PermissionError:
        return not _may_be_worker(process, ours)
    except OSError:
        return True  # it has ended
    try:
        with open(f"{process}/maps", "rb") as source:
            maps = source.read()
    except OSError:
        return True  # it has ended; a kernel that hides mappings alone is no evidence of one
    mapped = {os.fsdecode(path).removesuffix(_DELETED) for path in _SHARED_MAPPING.findall(maps)}
    return not any(os.path.basename(path) in names for path in mapped)


def _is_writer(process: str, fd: str, names: set[str]) -> bool:
    try:
        target = os.readlink(f"{process}/fd/{fd}").removesuffix(_DELETED)
        if os.path.basename(target) not in names:
            return False
        flags = re.search(rb"^flags:\s*([0-7]+)", read_proc_file(f"{process}/fdinfo/{fd}", 4096), re.MULTILINE)
    except FileNotFoundError:
        return False  # closed meanwhile
    return flags is None or int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY


def _may_be_worker(process: str, ours: int) -> bool:
    """Whether it is an ordinary process of this user. Agents that guard secrets belong to root here (proc(5))."""
    try:
        return os.stat(process).st_uid == ours and os.path.basename(process) != "1"
    except OSError:
        return False  # it has ended
