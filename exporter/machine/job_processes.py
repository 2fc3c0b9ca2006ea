"""Processes of a job, recognized by the variables that they were started with."""

import os
import re
from collections.abc import Mapping

from exporter.machine.procfs import read_environment, read_proc_file

WRAPPER = b"launcher.programs.wrapper"  # a word of the command line of each wrapper
SLURM_JOB = "SLURM_JOB_ID"
_SLURM_JOB_IDS = re.compile(r"SLURM_JOB_ID(_HET_GROUP_\d+)?")  # variables with ids of our own Slurm job's components


def find_job_processes(wanted: Mapping[str, str | None], proc: str = "/proc") -> set[int]:
    """Find other processes that have these variables; None is any value.

    Those of another Slurm job do not count: sbatch passes the variables of a worker on to the job that it submits.
    An ended process has none, and those of another user are not readable. Scans all of ``/proc``, so use it rarely.
    """
    own_jobs = {None, *(value for name, value in os.environ.items() if _SLURM_JOB_IDS.fullmatch(name))}
    found = set()
    for pid in map(int, filter(str.isdigit, os.listdir(proc))):
        known = read_environment(pid, {*wanted, SLURM_JOB}, proc) or {}
        if known.pop(SLURM_JOB, None) not in own_jobs:
            continue
        if known.keys() == wanted.keys() and all(wanted[name] in (None, known[name]) for name in wanted):
            found.add(pid)
    return found - {os.getpid()}


def find_leftover_processes(job_id: str, rank: int, proc: str = "/proc") -> set[int]:
    """Find what is left of a worker, without wrappers, even if it went into the background before the first read."""
    found = find_job_processes({"GPUJOB_JOB_ID": job_id, "GPUJOB_RANK": str(rank)}, proc)
    return {pid for pid in found if _is_running_program(pid, proc)}


def _is_running_program(pid: int, proc: str) -> bool:
    """Whether a process is no wrapper and has not ended meanwhile."""
    words = _command_line(pid, proc)
    return words != [b""] and WRAPPER not in words


def is_wrapper(pid: int, proc: str = "/proc") -> bool:
    """Whether a process is the wrapper of a worker."""
    return WRAPPER in _command_line(pid, proc)


def _command_line(pid: int, proc: str) -> list[bytes]:
    """Words of a process; one empty word if it has ended."""
    try:
        return read_proc_file(f"{proc}/{pid}/cmdline", 4096).split(b"\0")
    except OSError:
        return [b""]
