"""Leftover processes of a worker that went into the background before the first read."""

import os

from exporter.machine.procfs import read_environment

_NAMES = ("GPUJOB_JOB_ID", "GPUJOB_RANK")


def find_leftover_processes(job_id: str, rank: int, proc: str = "/proc") -> set[int]:
    """Find this user's processes whose environment names this worker, except wrappers.

    Scans all of ``/proc``, so use it rarely.
    """
    found, own = set(), os.getuid()
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"{proc}/{name}").st_uid != own:
                continue
            with open(f"{proc}/{name}/cmdline", "rb") as source:
                words = source.read(4096).split(b"\0")
        except OSError:
            continue
        if b"launcher.programs.wrapper" in words or words == [b""]:
            continue
        environment = read_environment(int(name), _NAMES, proc)
        if environment == {"GPUJOB_JOB_ID": job_id, "GPUJOB_RANK": str(rank)}:
            found.add(int(name))
    return found
