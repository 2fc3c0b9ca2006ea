"""End leftover processes on this node after the job is over.

    python -I -B -m launcher.programs.end_leftovers RUN_DIR

A sidecar's supervisor runs this last. Normally Slurm's daemon ends leftovers. If it was killed, workers would
run for ever, on GPUs that count as free.
"""

import os
import signal
import sys
import time
from pathlib import Path

from exporter.contract import run_files
from exporter.machine.procfs import ENDED_STATES, STAT_BYTES, parse_process_stat, read_environment, read_proc_file

TASK_VARIABLE = "GPUJOB_WORKER"  # variable of tasks, unset in a user's shell in the job
RUN_VARIABLES = ("GPUJOB_JOB_ID", "GPUJOB_ATTEMPT")  # variables that identify one attempt of a job
GRACE_S = 8.0  # between SIGTERM and SIGKILL
POLL_INTERVAL_S = 0.1


def find_task_processes(run: dict[str, str], proc: str = "/proc") -> dict[int, int]:
    """Task processes of this attempt on this machine, with the parent of each."""
    found = {}
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        environment = read_environment(int(name), (TASK_VARIABLE, *RUN_VARIABLES), proc) or {}
        if TASK_VARIABLE not in environment or any(
            environment.get(variable) != value for variable, value in run.items()
        ):
            continue
        try:
            stat = parse_process_stat(read_proc_file(f"{proc}/{name}/stat", STAT_BYTES))
        except (OSError, ValueError):
            continue  # it has just ended
        if stat.state not in ENDED_STATES:
            found[int(name)] = stat.parent
    return found


def end_task_processes(run: dict[str, str], grace_s: float = GRACE_S) -> int:
    """End the tasks of this attempt; return the number of processes.

    Only the topmost get SIGTERM. They are wrappers and forward it; many programs treat a second one as "hurry".
    """
    first = tasks = find_task_processes(run)
    signal_processes([pid for pid, parent in tasks.items() if parent not in tasks], signal.SIGTERM)
    end = time.monotonic() + grace_s
    while tasks and time.monotonic() < end:
        time.sleep(POLL_INTERVAL_S)
        tasks = find_task_processes(run)
    signal_processes(list(tasks), signal.SIGKILL)
    return len(first)


def signal_processes(pids: list[int], number: int) -> None:
    """Send a signal to those that exist and belong to us."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


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
