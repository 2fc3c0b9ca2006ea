"""Parent of the orchestrator: forwards signals, and ends the job if the orchestrator is lost.

    python -I -B -m launcher.guard RUN_DIR [--local]

It ends like the orchestrator. If that is lost before the job has finished, the new process
``launcher.run.lost_orchestrator`` ends remaining tasks and writes the report. If the guard is killed, the
orchestrator gets SIGTERM and ends the job in order.

It uses few imports, all from gpujob or the standard library, so that little can fail here.
"""

import os
import signal
import sys
import time

from exporter.contract import run_files
from launcher.programs.environment import original_environment
from launcher.programs.wrapper import FORWARDED_SIGNALS, end_with_status, wait_forwarding

# blocked at the start of the orchestrator, until it can handle them
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PYTHON_FLAGS = ("-I", "-B", "-m")


def guard(arguments: list[str]) -> None:
    """Start the orchestrator, wait for it, and end with the status of the job."""
    run_dir, began = arguments[0], time.time()
    waited = {int(number) for number in (*FORWARDED_SIGNALS, signal.SIGCHLD)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    argv = ["launcher.run.orchestrator", *arguments, "--guard", str(os.getpid())]
    pid = start_program(argv, mask | set(HANDLED_SIGNALS))
    status = wait_program(pid, waited)
    if is_finished(run_dir, began) or not (os.WIFSIGNALED(status) or has_started(run_dir, pid)):
        end_with_status(status)
    # later signals cannot speed up the end of the job
    argv = ["launcher.run.lost_orchestrator", *arguments, "--status", str(status), "--since", repr(began)]
    status = wait_program(start_program(argv, mask | set(HANDLED_SIGNALS)), waited)
    end_with_status(status)


def start_program(argv: list[str], mask: set[int]) -> int:
    """Start a gpujob program; return its pid."""
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *PYTHON_FLAGS, *argv],
        original_environment(),
        setsigmask=mask,
        setsigdef=[signal.SIGPIPE],
    )


def wait_program(pid: int, signals: set[int]) -> int:
    """Wait for a child and forward signals to it; return its wait status."""
    return wait_forwarding(pid, signals, [])[0]


def has_started(run_dir: str, pid: int) -> bool:
    """Whether this orchestrator has written its record."""
    return (run_files.read_json(os.path.join(run_dir, run_files.ORCHESTRATOR_FILE)) or {}).get("pid") == pid


def is_finished(run_dir: str, started: float) -> bool:
    """Whether the job has finished in this attempt."""
    state = run_files.read_json(os.path.join(run_dir, run_files.STATE_FILE)) or {}
    moment = state.get("time")
    return state.get("phase") == "finished" and isinstance(moment, float | int) and moment >= started


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -I -B -m launcher.guard RUN_DIR [--local]")
    guard(sys.argv[1:])
