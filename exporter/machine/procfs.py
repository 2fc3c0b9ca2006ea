"""Parse and read processes in ``/proc`` (proc(5))."""

import os
from collections.abc import Collection
from typing import NamedTuple

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "disk_sleep",
    "T": "stopped",
    "t": "stopped",
    "Z": "zombie",
    "X": "dead",
    "x": "dead",
    "I": "sleeping",
    "K": "sleeping",
    "W": "sleeping",
    "P": "sleeping",
}
ENDED_STATES = ("zombie", "dead")
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
STAT_BYTES, IO_BYTES = 1024, 512
MOST_ENVIRONMENT_BYTES = 2 << 20


class ProcessStat(NamedTuple):
    """Fields of ``stat`` in the kernel's units; sums are converted once."""

    state: str
    parent: int
    own_ticks: int
    reaped_ticks: int  # CPU of children that it has waited for, and of their children
    threads: int
    start_ticks: int
    rss_pages: int


def parse_process_stat(text: bytes) -> ProcessStat:
    """Parse ``/proc/PID/stat``. The command may contain spaces and parentheses, so search the last ``)``."""
    fields = text[text.rindex(b")") + 2 :].split(None, 22)
    return ProcessStat(
        STATES.get(fields[0].decode("ascii", "replace"), "running"),
        int(fields[1]),
        int(fields[11]) + int(fields[12]),
        int(fields[13]) + int(fields[14]),
        int(fields[17]),
        int(fields[19]),
        int(fields[21]),
    )


def parse_process_io(text: bytes) -> tuple[int, int]:
    """Parse ``read_bytes`` and ``write_bytes`` of ``/proc/PID/io``: bytes that reached the storage layer."""
    fields = text.split(None, 12)
    return int(fields[9]), int(fields[11])


def read_proc_file(path: str, size: int) -> bytes:
    """Read the first ``size`` bytes of a file; raises OSError."""
    fd = os.open(path, READ_FLAGS)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def read_proc_names(folder: str) -> list[str]:
    """List a folder of ``/proc``; empty if its process is gone or of another user."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read_children(pid: int, proc: str = "/proc", *, every_thread: bool = True) -> list[int]:
    """Children of a process; without ``every_thread`` only those of its first thread."""
    children: list[int] = []
    for thread in read_proc_names(f"{proc}/{pid}/task") if every_thread else [str(pid)]:
        try:
            fd = os.open(f"{proc}/{pid}/task/{thread}/children", READ_FLAGS)
        except OSError:
            continue
        try:
            while chunk := os.read(fd, 65536):
                children.extend(map(int, chunk.split()))
        except OSError:
            pass
        finally:
            os.close(fd)
    return children


def read_self_rss_bytes(proc: str = "/proc") -> int:
    """Resident memory of this process."""
    with open(f"{proc}/self/statm", "rb") as source:
        return int(source.read().split()[1]) * PAGE_SIZE


def read_environment(pid: int, names: Collection[str], proc: str = "/proc") -> dict[str, str] | None:
    """Return these variables from the initial environment of a process.

    None if it may not be read, or is empty: a program that is just starting has no variables yet.
    """
    wanted = {os.fsencode(name): name for name in names}
    found: dict[str, str] = {}
    text = b""
    try:
        fd = os.open(f"{proc}/{pid}/environ", READ_FLAGS)
        try:
            while len(text) < MOST_ENVIRONMENT_BYTES and (chunk := os.read(fd, 65536)):
                text += chunk
        finally:
            os.close(fd)
    except OSError:
        return None
    if not text:
        return None
    entries = text.split(b"\0")
    for entry in entries[:-1] if len(text) >= MOST_ENVIRONMENT_BYTES else entries:  # the last one is cut
        name, separator, value = entry.partition(b"=")
        if separator and name in wanted:
            found.setdefault(wanted[name], value.decode("utf-8", "replace"))
    return found


def read_process_stat(pid: int, proc: str = "/proc") -> ProcessStat | None:
    """Read ``stat`` of a process; None if it does not exist."""
    try:
        return parse_process_stat(read_proc_file(f"{proc}/{pid}/stat", STAT_BYTES))
    except (OSError, ValueError):
        return None


def is_zombie(pid: int, proc: str = "/proc") -> bool:
    """Whether a process has ended and was not waited for yet."""
    stat = read_process_stat(pid, proc)
    return stat is not None and stat.state in ENDED_STATES


def read_zombie_status(pid: int, start_ticks: int | None, proc: str = "/proc") -> int | None:
    """Wait status (wait(2)) of a zombie.

    None if the process is no zombie, has other ``start_ticks``, or hides its status: without permission the kernel
    shows 0 (proc(5), field 52), as after a success. The link ``ns/user`` needs the same permission, and unlike other
    guarded files works for zombies.
    """
    try:
        os.readlink(f"{proc}/{pid}/ns/user")
        permitted = True
    except OSError:
        permitted = False
    try:
        text = read_proc_file(f"{proc}/{pid}/stat", STAT_BYTES)
        stat, status = parse_process_stat(text), int(text[text.rindex(b")") + 2 :].split()[49])
    except (OSError, ValueError):
        return None
    if stat.state not in ENDED_STATES or stat.threads > 1 or start_ticks not in (None, stat.start_ticks):
        return None
    return status if status or permitted else None
