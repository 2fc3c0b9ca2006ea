"""Stacks of running Python processes, by ``py-spy`` where it is installed.

``--nonblocking`` reads the memory of a process without stopping it: frames may be inconsistent, but the worker loses no
time. Nothing here raises; failures are returned as text.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from exporter.machine.procfs import read_children

MOST_BYTES = 32 * 1024
MOST_PARALLEL = 4
MOST_DESCENDANTS = 200


def find_py_spy() -> str | None:
    """Path of ``py-spy``: from PATH, or next to the running interpreter."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return shutil.which("py-spy") or (beside if os.access(beside, os.X_OK) else None)


def python_processes(pid: int, most: int, proc: str = "/proc") -> list[int]:
    """First ``most`` Python processes among a process and its descendants, from the top."""
    found: list[int] = []
    pending, seen = [pid], 0
    while pending and len(found) < most and seen < MOST_DESCENDANTS:
        at = pending.pop(0)
        seen += 1
        try:
            program = os.path.basename(os.readlink(f"{proc}/{at}/exe"))
        except OSError:
            continue
        if "python" in program:
            found.append(at)
        pending += read_children(at, proc)
    return found


def read_stacks(pids: Sequence[int], timeout_s: float = 2.0, most: int = 8) -> dict[int, str]:
    """Output of ``py-spy`` for the first ``most`` processes, or the reason why it is missing; at most ``timeout_s``
    each.
    """
    wanted = list(dict.fromkeys(pids))[:most]
    program = find_py_spy()
    if program is None:
        return dict.fromkeys(wanted, "no stack: py-spy is not installed")
    if not wanted:
        return {}
    with ThreadPoolExecutor(min(MOST_PARALLEL, len(wanted))) as pool:
        return dict(zip(wanted, pool.map(lambda pid: _dump(program, pid, timeout_s), wanted), strict=True))


def _dump(program: str, pid: int, timeout_s: float) -> str:
    argv = [program, "dump", "--pid", str(pid), "--nonblocking"]
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing)
    except (OSError, ValueError) as error:
        os.close(reading)
        return f"no stack: {program} cannot be started: {getattr(error, 'strerror', None) or error}"
    finally:
        os.close(writing)
    deadline = time.monotonic() + timeout_s
    text, ended = _output(reading, deadline)
    os.close(reading)
    status = _end(process, deadline if ended else time.monotonic())
    if status is None:
        return f"no stack: process {process.pid} of py-spy hangs in the kernel"
    shown = text.decode("utf-8", "replace").strip()
    if not ended or status == -signal.SIGKILL:
        why = (
            f"cut off after {MOST_BYTES} bytes"
            if len(text) >= MOST_BYTES
            else f"py-spy did not finish in {timeout_s:g} s"
        )
        return f"{shown}\n... ({why})" if shown else f"no stack: no answer from py-spy in {timeout_s:g} s"
    if status:
        return _failure_text(shown, status)
    return shown or "no stack: no answer from py-spy"


def _output(fd: int, deadline: float) -> tuple[bytes, bool]:
    """Read a pipe until its end, the deadline or ``MOST_BYTES``. Return the text, and whether the end was reached."""
    text = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    while len(text) < MOST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return text, False
        piece = os.read(fd, MOST_BYTES - len(text))
        if not piece:
            return text, True
        text += piece
    return text, False


def _end(process: "subprocess.Popen[bytes]", deadline: float) -> int | None:
    """Wait for a process, killing it at the deadline. Return its status; None if even that does not end it."""
    for end in (deadline, deadline + 1.0):
        try:
            return process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return None


def _failure_text(output: str, status: int) -> str:
    """Explain a missing stack; ``output`` is the output of py-spy."""
    if "ermission" in output or "EPERM" in output or "not permitted" in output:
        return (
            "no stack: the kernel does not let this process read others of its user "
            "(kernel.yama.ptrace_scope, or a container without SYS_PTRACE)"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"no stack: py-spy ended with {status}: {'; '.join(lines[:3])[:300]}"
