"""Who stands behind a pid that a GPU's driver tells."""

import os
from typing import NamedTuple

from exporter.machine.procfs import read_environment, read_proc_file


class GpuProcessInfo(NamedTuple):
    """A process on a GPU, as far as it can be looked at."""

    name: str
    uid: int
    job_id: str | None = None
    rank: int | None = None  # of the worker that it belongs to, as its environment says


def read_gpu_process(pid: int, proc: str = "/proc") -> GpuProcessInfo | None:
    """The process with this pid; None when there is none here, as for one of another pid namespace."""
    try:
        uid = os.stat(f"{proc}/{pid}").st_uid
        name = read_proc_file(f"{proc}/{pid}/comm", 64).decode("utf-8", "replace").rstrip("\n")
    except OSError:
        return None
    told = read_environment(pid, ("GPUJOB_JOB_ID", "GPUJOB_RANK"), proc) or {}
    rank = told.get("GPUJOB_RANK", "")
    return GpuProcessInfo(
        name, uid, told.get("GPUJOB_JOB_ID"), int(rank) if rank.isascii() and rank.isdigit() else None
    )


def read_namespace_pids(pid: int, proc: str = "/proc") -> tuple[int, ...]:
    """The pids of a process from this pid namespace inwards (``NSpid``); one where it is in this one."""
    try:
        text = read_proc_file(f"{proc}/{pid}/status", 8192)
    except OSError:
        return ()
    for line in text.splitlines():
        if line.startswith(b"NSpid:"):
            return tuple(map(int, line.split()[1:]))
    return ()
