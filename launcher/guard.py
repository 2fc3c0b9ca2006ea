"""The parent of the orchestrator: passes signals on, and sees to the end of a job whose orchestrator was killed.

    python -I -B -m launcher.guard RUN_DIR [--local]

It ends as the orchestrator ended. One that is gone without having finished is followed by
``launcher.run.lost_orchestrator``, a fresh process that ends what still runs and writes the report.
When this process is killed, the orchestrator gets SIGTERM and ends the job in order.

Standard library alone and few imports: nothing here can fail that the orchestrator could.
"""

import os
import signal
import sys
import time

from exporter.contract import run_files
from launcher.programs.environment import original_environment
from launcher.programs.wrapper import FORWARDED, end_like, wait_forwarding

ANSWERED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the orchestrator begins with blocked: until it can answer them in order, they wait."""
PYTHON = ("-I", "-B", "-m")


def guard(arguments: list[str]) -> None:
    """Start the orchestrator, wait for it, and end this process as the job has ended."""
    run_dir, began = arguments[0], time.time()
    waited = {int(number) for number in (*FORWARDED, signal.SIGCHLD)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    words = ["launcher.run.orchestrator", *arguments, "--guard", str(os.getpid())]
    pid = start(words, mask | set(ANSWERED))
    status = wait(pid, waited)
    if is_finished(run_dir, began) or not (os.WIFSIGNALED(status) or has_begun(run_dir, pid)):
        end_like(status)
    # what asks for the end of the job comes too late to hurry it
    words = ["launcher.run.lost_orchestrator", *arguments, "--status", str(status), "--since", repr(began)]
    after = wait(start(words, mask | set(ANSWERED)), waited)
    end_like(after)


def start(words: list[str], mask: set[int]) -> int:
    """Pid of a program of ours."""
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *PYTHON, *words],
        original_environment(),
        setsigmask=mask,
        setsigdef=[signal.SIGPIPE],
    )


def wait(pid: int, waited: set[int]) -> int:
    """Wait status of a child; signals of other processes go on to it."""
    return wait_forwarding(pid, waited, [])[0]


def has_begun(run_dir: str, pid: int) -> bool:
    """Whether this orchestrator has got as far as to say that it is there."""
    return (run_files.read_json(os.path.join(run_dir, run_files.ORCHESTRATOR_FILE)) or {}).get("pid") == pid


def is_finished(run_dir: str, began: float) -> bool:
    """Whether the job has come to its end in this attempt."""
    state = run_files.read_json(os.path.join(run_dir, run_files.STATE_FILE)) or {}
    moment = state.get("time")
    return state.get("phase") == "finished" and isinstance(moment, float | int) and moment >= began


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -I -B -m launcher.guard RUN_DIR [--local]")
    guard(sys.argv[1:])
