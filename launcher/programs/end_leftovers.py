"""End leftover processes on this node after the job is over.

    python -I -B -m launcher.programs.end_leftovers RUN_DIR

A sidecar's supervisor runs this last. Normally Slurm's daemon ends leftovers. If it was killed, workers would
run for ever, on GPUs that count as free.
"""

import os
import signal
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from exporter.contract import run_files
from exporter.machine.job_processes import find_job_processes
from exporter.machine.procfs import read_process_stat

TASK_VARIABLE = "GPUJOB_WORKER"  # variable of tasks, unset in a user's shell in the job
RUN_VARIABLES = ("GPUJOB_JOB_ID", "GPUJOB_ATTEMPT")  # variables that identify one attempt of a job
GRACE_S = 8.0  # between SIGTERM and SIGKILL
POLL_INTERVAL_S = 0.1


def end_task_processes(run: dict[str, str], grace_s: float = GRACE_S) -> int:
    """End the tasks of this attempt; return the number of processes.

    Only the topmost get SIGTERM. They are wrappers and forward it; many programs treat a second one as "hurry".
    """
    wanted = {TASK_VARIABLE: None, **run}
    first = tasks = find_job_processes(wanted)
    signal_processes(topmost(tasks), signal.SIGTERM)
    end = time.monotonic() + grace_s
    while tasks and time.monotonic() < end:
        time.sleep(POLL_INTERVAL_S)
        tasks = find_job_processes(wanted)
    signal_processes(tasks, signal.SIGKILL)
    return len(first)


def topmost(pids: Collection[int]) -> list[int]:
    """Those of these processes whose parents are not among them."""
    stats = {pid: read_process_stat(pid) for pid in pids}
    return [pid for pid, stat in stats.items() if stat and stat.parent not in pids]


def signal_processes(pids: Iterable[int], number: int) -> int:
    """Send a signal to those that exist and belong to us; return how many these are."""
    signalled = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            signalled += 1
        except (ProcessLookupError, PermissionError):
            pass
    return signalled


def main(arguments: list[str]) -> int:
    """End leftover processes of this run directory's job if it is over; return the exit status."""
    run = {variable: os.environ.get(variable, "") for variable in RUN_VARIABLES}
    state = run_files.read_json(Path(arguments[0]) / run_files.STATE_FILE) or {}
    if state.get("phase") == "finished" and all(run.values()):
        count = end_task_processes(run)
        if count:
            sys.stderr.write(f"gpujob: ended {count} leftover processes of the finished job\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -I -B -m launcher.programs.end_leftovers RUN_DIR")
    sys.exit(main(sys.argv[1:]))
