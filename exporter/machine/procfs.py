"""Processes from ``/proc`` (proc(5)): parsing, and what is asked now and then."""

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
ENDED = ("zombie", "dead")
READ = os.O_RDONLY | os.O_CLOEXEC
STAT_BYTES, IO_BYTES = 1024, 512
MOST_ENVIRONMENT_BYTES = 2 << 20


class ProcessStat(NamedTuple):
    """Facts of one process from its ``stat``, in the kernel's units: they are added up first and converted once."""

    state: str
    parent: int
    own_ticks: int
    reaped_ticks: int  # CPU of the children that it has waited for, and of theirs
    threads: int
    start_ticks: int
    rss_pages: int


def parse_process_stat(text: bytes) -> ProcessStat:
    """Facts from ``/proc/PID/stat``; the command may hold spaces and parentheses, so the last ``)`` counts."""
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
    """``read_bytes`` and ``write_bytes`` of ``/proc/PID/io``: what reached the storage layer."""
    fields = text.split(None, 12)
    return int(fields[9]), int(fields[11])


def read_proc_file(path: str, size: int) -> bytes:
    """The first ``size`` bytes of a file; raises OSError."""
    fd = os.open(path, READ)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def read_proc_names(folder: str) -> list[str]:
    """Names in a folder of ``/proc``; none when its process is gone or somebody else's."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read_children(pid: int, proc: str = "/proc", *, every_thread: bool = True) -> list[int]:
    """Children of a process; those started by its first thread alone when ``every_thread`` is false."""
    children: list[int] = []
    for thread in read_proc_names(f"{proc}/{pid}/task") if every_thread else [str(pid)]:
        try:
            fd = os.open(f"{proc}/{pid}/task/{thread}/children", READ)
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


def read_start_ticks(pid: int, proc: str = "/proc") -> int | None:
    """When a process was started, in clock ticks since the machine was; None when it is not there."""
    try:
        return parse_process_stat(read_proc_file(f"{proc}/{pid}/stat", STAT_BYTES)).start_ticks
    except (OSError, ValueError):
        return None


def read_pid_namespace(proc: str = "/proc") -> int | None:
    """Number of this process's pid namespace: a pid means something only to readers in the same one."""
    try:
        return os.stat(f"{proc}/self/ns/pid").st_ino
    except OSError:
        return None


def read_self_rss_bytes(proc: str = "/proc") -> int:
    """Resident memory of this process."""
    with open(f"{proc}/self/statm", "rb") as source:
        return int(source.read().split()[1]) * PAGE_SIZE


def read_environment(pid: int, names: Collection[str], proc: str = "/proc") -> dict[str, str] | None:
    """These variables of a process, as it was started with them, and no others.

    None where they may not be read, and as long as there are none at all: a program that is being started has none yet.
    """
    wanted = {os.fsencode(name): name for name in names}
    found: dict[str, str] = {}
    text = b""
    try:
        fd = os.open(f"{proc}/{pid}/environ", READ)
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


def is_zombie(pid: int, proc: str = "/proc") -> bool:
    """Whether a process has ended and nobody has waited for it yet."""
    try:
        return parse_process_stat(read_proc_file(f"{proc}/{pid}/stat", STAT_BYTES)).state in ENDED
    except (OSError, ValueError):
        return False


def read_zombie_status(pid: int, start_ticks: int | None, proc: str = "/proc") -> int | None:
    """Wait status (wait(2)) of a process that has ended and that its parent has not waited for yet.

    None when it is not in this state, is another process than the one with these ``start_ticks``, or may not be
    asked: the kernel then shows 0 (proc(5), field 52), as it does after a success. The link ``ns/user`` is guarded by
    the very same check, and unlike the other guarded fields says of a zombie too whether that was passed.
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
    if stat.state not in ENDED or stat.threads > 1 or start_ticks not in (None, stat.start_ticks):
        return None
    return status if status or permitted else None
