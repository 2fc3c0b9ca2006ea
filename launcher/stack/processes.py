"""Processes of the stack: each in a session of its own, known by pid and start time."""

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.contract.process_identity import read_start_ticks
from exporter.machine.procfs import is_zombie
from launcher.registry.own_stack import StackProgram

END_S = 10.0  # from SIGTERM to SIGKILL; Prometheus writes its last samples meanwhile
POLL_S = 0.02


class Start(NamedTuple):
    """How to start a program."""

    command: Sequence[str]
    reads: str  # all that it reads at its start alone; a change needs a new process

    @property
    def digest(self) -> str:
        return hashlib.sha256("\0".join([*self.command, self.reads]).encode("utf-8", "replace")).hexdigest()[:16]


def is_alive(program: StackProgram) -> bool:
    """Whether this very process runs on this machine."""
    return program.is_running_here() and not is_zombie(program.pid)


def start_program(start: Start, log: Path, folder: Path, prepare: Callable[[], None] | None) -> StackProgram:
    """Start a program with a new log. Raises OSError."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as output:
        process = subprocess.Popen(
            start.command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that Ctrl-C and logout do not end it
            preexec_fn=prepare,
        )
    ticks = read_start_ticks(process.pid)
    process.returncode = 0  # it outlives this command, and nobody waits for it here
    return StackProgram(pid=process.pid, start_ticks=ticks, host=socket.gethostname(), digest=start.digest)


def end_programs(programs: Iterable[StackProgram]) -> None:
    """End these processes and their children, and no others. Returns when they are gone."""
    living = [program for program in programs if is_alive(program)]
    for number, limit_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        for program in living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, number)
        end = time.monotonic() + limit_s
        while living and time.monotonic() < end:
            _collect(living)
            living = [program for program in living if is_alive(program)]
            time.sleep(POLL_S)


def _collect(programs: Iterable[StackProgram]) -> None:
    """Take the exit status of those that are children of this process."""
    for program in programs:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(program.pid, os.WNOHANG)


def last_words(log: Path, most: int = 5) -> str:
    """The last lines of a log."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line[:500]}" for line in lines[-most:])


def reload_programs(programs: Mapping[str, StackProgram], names: Iterable[str]) -> None:
    """Let these read their configuration again."""
    for name in names:
        if (program := programs.get(name)) is not None and is_alive(program):
            os.kill(program.pid, signal.SIGHUP)
