"""Ends what still runs of a job on this node although the job is over.

    python -I -B -m launcher.programs.end_leftovers RUN_DIR

The last act of the supervisor of a sidecar. Slurm ends what a job leaves, by its daemon on the node: where that has
been killed, workers would go on for ever, on GPUs that nobody counts as taken.
"""

import os
import signal
import sys
import time
from pathlib import Path

from exporter.contract import run_files
from exporter.machine.procfs import ENDED, STAT_BYTES, parse_process_stat, read_environment, read_proc_file

TASK = "GPUJOB_WORKER"  # variable that each task has, and a shell that somebody has opened in the job has not
RUN = ("GPUJOB_JOB_ID", "GPUJOB_ATTEMPT")  # variables that tell one attempt of a job from all others
END_S = 8.0  # between SIGTERM and SIGKILL
LOOK_S = 0.1


def find_task_processes(run: dict[str, str], proc: str = "/proc") -> dict[int, int]:
    """Processes of the tasks of this attempt on this machine, with their parents."""
    found = {}
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        told = read_environment(int(name), (TASK, *RUN), proc) or {}
        if TASK not in told or any(told.get(variable) != value for variable, value in run.items()):
            continue
        try:
            stat = parse_process_stat(read_proc_file(f"{proc}/{name}/stat", STAT_BYTES))
        except (OSError, ValueError):
            continue  # it has just ended
        if stat.state not in ENDED:
            found[int(name)] = stat.parent
    return found


def end_task_processes(run: dict[str, str], end_s: float = END_S) -> int:
    """End the tasks of this attempt; how many processes there were.

    SIGTERM goes to the topmost alone, which are wrappers and pass it on: a second one is "hurry" to many programs.
    """
    first = tasks = find_task_processes(run)
    signal_processes([pid for pid, parent in tasks.items() if parent not in tasks], signal.SIGTERM)
    end = time.monotonic() + end_s
    while tasks and time.monotonic() < end:
        time.sleep(LOOK_S)
        tasks = find_task_processes(run)
    signal_processes(list(tasks), signal.SIGKILL)
    return len(first)


def signal_processes(pids: list[int], number: int) -> None:
    """A signal to each, as far as they are there and ours."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def main(arguments: list[str]) -> int:
    """End what the job of this run directory has left on this node, if it is over; the exit status."""
    run = {variable: os.environ.get(variable, "") for variable in RUN}
    state = run_files.read_json(Path(arguments[0]) / run_files.STATE_FILE) or {}
    if state.get("phase") == "finished" and all(run.values()):
        count = end_task_processes(run)
        if count:
            sys.stderr.write(f"gpujob: the job is over, and {count} processes of it were left here; they were ended\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -I -B -m launcher.programs.end_leftovers RUN_DIR")
    sys.exit(main(sys.argv[1:]))
