"""What identifies a process: its pid, the pid namespace, and its start time.

Standard library only and no dataclasses: the wrapper next to every worker uses this too.
"""

import os


def read_start_ticks(pid: int, proc: str = "/proc") -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), field 22); None if it does not exist."""
    try:
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as source:
            text = source.read(1024)
        return int(text[text.rindex(b")") + 2 :].split(None, 20)[19])
    except (OSError, ValueError, IndexError):
        return None


def read_pid_namespace(proc: str = "/proc") -> int | None:
    """Number of this process's pid namespace; pids are valid only inside it."""
    try:
        return os.stat(f"{proc}/self/ns/pid").st_ino
    except OSError:
        return None
