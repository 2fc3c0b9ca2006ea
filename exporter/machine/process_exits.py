"""Detect ends of processes immediately, by pidfd (pidfd_open(2), ioctl_pidfd(2))."""

import ctypes
import errno
import fcntl
import os
import select
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from exporter.contract.clock import Clock
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.process_identity import read_start_ticks
from exporter.machine.procfs import read_zombie_status

PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info), 64 bytes in its first version
PIDFD_INFO_EXIT = 1 << 3
SYS_PIDFD_OPEN = 434  # on every architecture

# pidfd_open errors for a pid that does not exist, is not positive, or is a thread
_GONE = (errno.ESRCH, errno.EINVAL, errno.ENOENT)


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of one process."""

    pid: int
    start_ticks: int | None  # as passed to `watch`
    time: float
    status: int | None  # wait status for `os.waitstatus_to_exitcode`; None while unknown
    source: Literal["pidfd", "zombie"] | None


@dataclass(slots=True)
class _WatchedExit:
    fd: int
    start_ticks: int
    end: ProcessEnd | None = None


_Key = tuple[int, int | None]


class ProcessExitWatch:
    """Reports ends of processes that need not be our children.

    A pidfd becomes readable when its process ends, and never refers to another process. The status is in ``/proc``
    until the parent waits for it; then Linux 6.15 and later report it through the pidfd. If ``/proc`` is denied, it is
    unknown until then, on older kernels for ever.

    An event loop waits until ``fileno`` is readable and calls ``dispatch``. All methods are thread-safe.
    """

    def __init__(self, clock: Clock, proc: str = "/proc") -> None:
        self.on_exit: Callable[[ProcessEnd], None] | None = None  # called by `dispatch` for each end, in its thread
        self._clock = clock
        self._proc = proc
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._watched: dict[_Key, _WatchedExit] = {}
        self._keys: dict[int, _Key] = {}  # by descriptor, of processes that have not ended

    def fileno(self) -> int:
        """Descriptor that is readable when ``dispatch`` has an end to report."""
        return self._epoll.fileno()

    def watch(self, pid: int, start_ticks: int | None) -> bool:
        """Watch a process; False if the caller must poll instead.

        That happens on old kernels, in some sandboxes, and without free descriptors. A zombie can be watched. Raises
        ProcessLookupError if the process does not exist, or has other ``start_ticks``.
        """
        key = (pid, start_ticks)
        with self._lock:
            if key in self._watched:
                return True
            try:
                fd = _open_pidfd(pid)
            except OSError as error:
                if error.errno in _GONE:
                    raise ProcessLookupError(f"process {pid} does not exist") from error
                return False
            try:
                # read after opening the pidfd, so that it is the start of the pidfd's process
                found = read_start_ticks(pid, self._proc)
                if found is None and not _has_ended(fd):
                    os.close(fd)
                    return False  # no free descriptor to read it, or it is hidden
                if found is None:
                    raise ProcessLookupError(f"process {pid} does not exist")
                if start_ticks not in (None, found):
                    raise ProcessLookupError(f"pid {pid} now belongs to another process")
                self._epoll.register(fd, select.EPOLLIN)
            except ProcessLookupError:
                os.close(fd)
                raise
            except OSError:
                os.close(fd)
                return False  # the user's limit of epoll watches is reached
            self._watched[key] = _WatchedExit(fd, found)
            self._keys[fd] = key
            return True

    def dispatch(self) -> tuple[ProcessEnd, ...]:
        """Report the ends since the last call, without waiting; after very many ends, the next call has the rest."""
        endings = []
        with self._lock:  # held while polling too: a descriptor closed meanwhile could be reused
            for fd, _ in self._epoll.poll(0):
                self._epoll.unregister(fd)
                key = self._keys.pop(fd)
                watched = self._watched[key]
                watched.end = ProcessEnd(*key, self._clock.time(), None, None)
                self._add_status(watched)
                endings.append(watched.end)
        if self.on_exit is not None:
            for ending in endings:
                self.on_exit(ending)
        return tuple(endings)

    def find_end(self, pid: int, start_ticks: int | None) -> ProcessEnd | None:
        """Return the end of a watched process that ``dispatch`` has reported; None before."""
        with self._lock:
            watched = self._watched.get((pid, start_ticks))
            if watched is None or watched.end is None:
                return None
            self._add_status(watched)
            return watched.end

    def status(self, pid: int, start_ticks: int | None) -> int | None:
        """Wait status of an ended process, read again while it is unknown.

        For an unwatched process, only the status in ``/proc`` before it is waited for.
        """
        with self._lock:
            watched = self._watched.get((pid, start_ticks))
            if watched is not None:
                if watched.end is None:
                    return _read_wait_status(pid, watched, self._proc)[0]
                self._add_status(watched)
                return watched.end.status
        return None if start_ticks is None else read_zombie_status(pid, start_ticks, self._proc)

    def drop(self, pid: int, start_ticks: int | None) -> None:
        """Stop watching a process and forget its end."""
        with self._lock:
            watched = self._watched.pop((pid, start_ticks), None)
            if watched is not None:
                self._close(watched)

    def close(self) -> None:
        """Close all descriptors."""
        with self._lock:
            for watched in self._watched.values():
                self._close(watched)
            self._watched = {}
            self._epoll.close()

    def _close(self, watched: _WatchedExit) -> None:
        if watched.fd >= 0:
            if self._keys.pop(watched.fd, None) is not None:
                # closing is not enough while a child between fork and exec holds it too
                self._epoll.unregister(watched.fd)
            os.close(watched.fd)
            watched.fd = -1

    def _add_status(self, watched: _WatchedExit) -> None:
        """Add the status to an end, and close the descriptor when it is known."""
        if watched.end is not None and watched.end.status is None:
            status, source = _read_wait_status(watched.end.pid, watched, self._proc)
            if status is not None:
                watched.end = replace(watched.end, status=status, source=source)
                self._close(watched)


def _read_wait_status(
    pid: int, watched: _WatchedExit, proc: str
) -> tuple[int | None, Literal["pidfd", "zombie"] | None]:
    """Return the wait status of a process and its source."""
    status = _exit_status(watched.fd)
    if status is not None:
        return status, "pidfd"
    status = read_zombie_status(pid, watched.start_ticks, proc)
    if status is not None:
        return status, "zombie"
    status = _exit_status(watched.fd)  # its parent may have waited for it meanwhile
    return status, None if status is None else "pidfd"


def _open_pidfd(pid: int) -> int:
    """Call ``os.pidfd_open``, which is missing in interpreters built on old systems."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    fd: int = ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_OPEN, pid, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _has_ended(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _exit_status(fd: int) -> int | None:
    """Wait status from the pidfd; None before the process is waited for, and on kernels before 6.15."""
    info = bytearray(64)
    struct.pack_into("=Q", info, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(fd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask: int = struct.unpack_from("=Q", info)[0]
    status: int = struct.unpack_from("=i", info, 60)[0]
    return status if mask & PIDFD_INFO_EXIT else None
