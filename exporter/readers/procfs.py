"""Processes from ``/proc`` on kept descriptors (proc(5)).

``pread`` on an open ``stat`` costs a tenth of what psutil needs, and an open
descriptor also settles pid reuse: it stays bound to the process it was opened
for and fails with ESRCH once that process is gone.
"""

import os
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """Facts of one process from its ``stat``."""

    state: str
    parent: int
    cpu_s: float
    rss_bytes: int
    threads: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class TreeSample:
    """One look at a worker and all its descendants. IO is None where the kernel denies it."""

    state: str
    cpu_s: float
    rss_bytes: int
    threads: int
    children: int
    io_read_bytes: int | None
    io_write_bytes: int | None


def parse_stat(text: bytes) -> ProcessStat:
    """Facts from ``/proc/PID/stat``; the command may hold spaces and parentheses, so the last ``)`` counts."""
    fields = text[text.rindex(b")") + 2 :].split(None, 22)
    return ProcessStat(
        state=STATES.get(fields[0].decode("ascii", "replace"), "running"),
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / CLOCK_TICKS,
        rss_bytes=int(fields[21]) * PAGE_SIZE,
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def parse_io(text: bytes) -> tuple[int, int]:
    """``read_bytes`` and ``write_bytes`` of ``/proc/PID/io``: what reached the storage layer."""
    fields = text.split()
    return int(fields[9]), int(fields[11])


class _Watched:
    """Open descriptors of one process, and the last sums it gave."""

    __slots__ = ("io_fd", "io_read", "io_write", "last_cpu_s", "parent", "pid", "stat_fd")

    def __init__(self, pid: int, proc: str) -> None:
        self.pid = pid
        self.stat_fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.io_fd = os.open(f"{proc}/{pid}/io", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.io_fd = -1
        self.parent = 0
        self.last_cpu_s = 0.0
        self.io_read = 0
        self.io_write = 0

    def close(self) -> None:
        os.close(self.stat_fd)
        if self.io_fd >= 0:
            os.close(self.io_fd)


class ProcessTree:
    """A worker and its descendants, looked at again and again.

    CPU seconds and IO bytes never fall: what a descendant had used when it was last seen stays
    in the sums after its end. Raises ProcessLookupError when the worker is not there, or is
    another process than the one with these ``start_ticks``.
    """

    WHOLE_TREE_EVERY = 5
    """Looks between two that follow every thread of every descendant; the others read the worker's own list."""

    def __init__(self, pid: int, start_ticks: int | None = None, proc: str = "/proc") -> None:
        self._proc = proc
        self.pid = pid
        self._processes: dict[int, _Watched] = {}
        try:
            self._processes[pid] = _Watched(pid, proc)
            self.start_ticks = parse_stat(os.pread(self._processes[pid].stat_fd, 1024, 0)).start_ticks
        except OSError as error:
            self.close()
            raise ProcessLookupError(f"process {pid} is not there") from error
        if start_ticks is not None and start_ticks != self.start_ticks:
            self.close()
            raise ProcessLookupError(f"process {pid} is another one now")
        self._gone_cpu_s = 0.0
        self._gone_read = 0
        self._gone_write = 0
        self._most_read = 0
        self._most_write = 0
        self._looks = 0

    def close(self) -> None:
        """Close all descriptors."""
        for watched in self._processes.values():
            watched.close()
        self._processes = {}

    def read(self) -> TreeSample | None:
        """One look, or None when the worker has ended and been reaped."""
        self._find_descendants()
        root: ProcessStat | None = None
        cpu_s, rss, threads = self._gone_cpu_s, 0, 0
        read, write, io_known = self._gone_read, self._gone_write, False
        for pid, watched in list(self._processes.items()):
            try:
                stat = parse_stat(os.pread(watched.stat_fd, 1024, 0))
            except OSError:
                if pid == self.pid:
                    return None
                self._forget(pid)
                cpu_s += watched.last_cpu_s
                if watched.parent not in self._processes:
                    read += watched.io_read
                    write += watched.io_write
                continue
            if pid == self.pid:
                root = stat
            watched.last_cpu_s, watched.parent = stat.cpu_s, stat.parent
            cpu_s += stat.cpu_s
            rss += stat.rss_bytes
            threads += stat.threads
            if watched.io_fd >= 0:
                try:
                    watched.io_read, watched.io_write = parse_io(os.pread(watched.io_fd, 512, 0))
                    io_known = True
                except (OSError, IndexError):
                    pass  # a zombie has no io; its last sums stay
            read += watched.io_read
            write += watched.io_write
        if root is None:
            return None
        # a child that was reaped after its parent was looked at is missing in this look alone
        self._most_read = read = max(read, self._most_read)
        self._most_write = write = max(write, self._most_write)
        return TreeSample(
            state=root.state,
            cpu_s=cpu_s,
            rss_bytes=rss,
            threads=threads,
            children=len(self._processes) - 1,
            io_read_bytes=read if io_known or read else None,
            io_write_bytes=write if io_known or write else None,
        )

    def _forget(self, pid: int) -> None:
        """Keep what a process that is gone has used; its bytes the kernel has added to its parent's."""
        watched = self._processes.pop(pid)
        self._gone_cpu_s += watched.last_cpu_s
        if watched.parent not in self._processes:
            self._gone_read += watched.io_read
            self._gone_write += watched.io_write
        watched.close()

    def _find_descendants(self) -> None:
        """Follow the children lists down from the worker; a reparented orphan stays watched until its end."""
        whole = self._looks % self.WHOLE_TREE_EVERY == 0
        self._looks += 1
        pending = list(self._processes) if whole else [self.pid]
        while pending:
            pid = pending.pop()
            for child in read_children(pid, self._proc, every_thread=whole):
                if child not in self._processes:
                    try:
                        self._processes[child] = _Watched(child, self._proc)
                    except OSError:
                        continue
                    pending.append(child)


def read_children(pid: int, proc: str = "/proc", *, every_thread: bool = True) -> list[int]:
    """Children of a process; those started by its first thread alone when ``every_thread`` is false."""
    if every_thread:
        try:
            threads = os.listdir(f"{proc}/{pid}/task")
        except OSError:
            return []
    else:
        threads = [str(pid)]
    children: list[int] = []
    for thread in threads:
        try:
            fd = os.open(f"{proc}/{pid}/task/{thread}/children", os.O_RDONLY | os.O_CLOEXEC)
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
