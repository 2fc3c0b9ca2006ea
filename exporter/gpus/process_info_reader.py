"""Process behind a pid that a GPU driver reports."""

import os
from typing import NamedTuple

from exporter.machine.procfs import read_environment, read_proc_file


class GpuProcessInfo(NamedTuple):
    """A process on a GPU, as far as it can be read."""

    name: str
    uid: int
    job_id: str | None = None
    rank: int | None = None  # rank of its worker, from its environment


def read_gpu_process(pid: int, proc: str = "/proc") -> GpuProcessInfo | None:
    """Read the process with this pid; None if it is not visible, such as one in another pid namespace."""
    try:
        uid = os.stat(f"{proc}/{pid}").st_uid
        name = read_proc_file(f"{proc}/{pid}/comm", 64).decode("utf-8", "replace").rstrip("\n")
    except OSError:
        return None
    environment = read_environment(pid, ("GPUJOB_JOB_ID", "GPUJOB_RANK"), proc) or {}
    rank = environment.get("GPUJOB_RANK", "")
    return GpuProcessInfo(
        name, uid, environment.get("GPUJOB_JOB_ID"), int(rank) if rank.isascii() and rank.isdigit() else None
    )


def read_namespace_pids(pid: int, proc: str = "/proc") -> tuple[int, ...]:
    """Pids of a process from this pid namespace inwards (``NSpid``); a single one if it is in this namespace."""
    try:
        text = read_proc_file(f"{proc}/{pid}/status", 8192)
    except OSError:
        return ()
    for line in text.splitlines():
        if line.startswith(b"NSpid:"):
            return tuple(map(int, line.split()[1:]))
    return ()
