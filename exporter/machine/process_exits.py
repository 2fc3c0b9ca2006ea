"""Ends of processes at the moment they happen, by pidfd (pidfd_open(2), ioctl_pidfd(2))."""

import ctypes
import errno
import fcntl
import os
import select
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from exporter.contract.clock import Clock
from exporter.machine.procfs import read_start_ticks, read_zombie_status

PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info), 64 bytes in its first version
PIDFD_INFO_EXIT = 1 << 3
SYS_PIDFD_OPEN = 434  # on every architecture

_GONE = (errno.ESRCH, errno.EINVAL, errno.ENOENT)
"""What pidfd_open says of a pid that is no process: not there, not positive, or the thread of another one."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of one process."""

    pid: int
    start_ticks: int | None  # as it was given to `watch`
    moment: float
    status: int | None  # wait status as `os.waitstatus_to_exitcode` takes it; None while nobody tells
    source: Literal["pidfd", "zombie"] | None


@dataclass(slots=True)
class _WatchedExit:
    fd: int
    start_ticks: int
    ending: ProcessEnd | None = None


_Key = tuple[int, int | None]


class ProcessExitWatch:
    """Tells of the ends of processes that need not be our children.

    A pidfd is readable once its process has ended, and never means another process. The status stands in ``/proc``
    until the parent has waited for it; from then on Linux 6.15 and later tell it by the pidfd. So it may be unknown
    for a while where the first is denied, or for ever with an older kernel.

    An event loop waits for ``fileno`` to be readable and calls ``dispatch``; all methods may be called by any thread.
    """

    def __init__(self, clock: Clock, proc: str = "/proc") -> None:
        self.on_exit: Callable[[ProcessEnd], None] | None = None
        """Called by ``dispatch`` for each end, in its thread."""
        self._clock = clock
        self._proc = proc
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._watched: dict[_Key, _WatchedExit] = {}
        self._keys: dict[int, _Key] = {}
        """By descriptor, of those that have not ended."""

    def fileno(self) -> int:
        """Readable when a process has ended that ``dispatch`` has not told of."""
        return self._epoll.fileno()

    def watch(self, pid: int, start_ticks: int | None) -> bool:
        """Ask to be told of the end of a process; False where the caller has to look by itself.

        That is so on old kernels, in some sandboxes, and when no descriptor is free. A process that has ended and
        was not waited for counts as there. Raises ProcessLookupError when it is not there, or is another one than
        the one with these ``start_ticks``.
        """
        key = (pid, start_ticks)
        with self._lock:
            if key in self._watched:
                return True
            try:
                fd = _open(pid)
            except OSError as error:
                if error.errno in _GONE:
                    raise ProcessLookupError(f"process {pid} is not there") from error
                return False
            try:
                # asked for after the pidfd was opened: what has this start now is what the pidfd was opened for
                found = read_start_ticks(pid, self._proc)
                if found is None and not _has_ended(fd):
                    os.close(fd)
                    return False  # no descriptor is free to read it, or it is hidden
                if found is None or start_ticks not in (None, found):
                    raise ProcessLookupError(f"process {pid} is {'not there' if found is None else 'another one now'}")
                self._epoll.register(fd, select.EPOLLIN)
            except ProcessLookupError:
                os.close(fd)
                raise
            except OSError:
                os.close(fd)
                return False  # the user's limit of watches is reached
            self._watched[key] = _WatchedExit(fd, found)
            self._keys[fd] = key
            return True

    def dispatch(self) -> tuple[ProcessEnd, ...]:
        """The ends since the last call, without waiting; where there are very many, the next call has the rest."""
        endings = []
        with self._lock:  # also while asking: a descriptor that is closed meanwhile could be another's by then
            for fd, _ in self._epoll.poll(0):
                self._epoll.unregister(fd)
                key = self._keys.pop(fd)
                watched = self._watched[key]
                watched.ending = ProcessEnd(*key, self._clock.time(), None, None)
                self._complete(watched)
                endings.append(watched.ending)
        if self.on_exit is not None:
            for ending in endings:
                self.on_exit(ending)
        return tuple(endings)

    def ended(self, pid: int, start_ticks: int | None) -> ProcessEnd | None:
        """The end of a watched process that ``dispatch`` has told of."""
        with self._lock:
            watched = self._watched.get((pid, start_ticks))
            if watched is None or watched.ending is None:
                return None
            self._complete(watched)
            return watched.ending

    def status(self, pid: int, start_ticks: int | None) -> int | None:
        """Wait status of a process that has ended, asked for again as long as nobody has told it.

        Of one that is not watched, only what ``/proc`` says before it is waited for.
        """
        with self._lock:
            watched = self._watched.get((pid, start_ticks))
            if watched is not None:
                if watched.ending is None:
                    return _read_wait_status(pid, watched, self._proc)[0]
                self._complete(watched)
                return watched.ending.status
        return None if start_ticks is None else read_zombie_status(pid, start_ticks, self._proc)

    def forget(self, pid: int, start_ticks: int | None) -> None:
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
                # closing would not do while a child between fork and exec holds it too
                self._epoll.unregister(watched.fd)
            os.close(watched.fd)
            watched.fd = -1

    def _complete(self, watched: _WatchedExit) -> None:
        """Add the status to an ending, and give the descriptor back that is of no more use then."""
        if watched.ending is not None and watched.ending.status is None:
            status, source = _read_wait_status(watched.ending.pid, watched, self._proc)
            if status is not None:
                watched.ending = replace(watched.ending, status=status, source=source)
                self._close(watched)


def _read_wait_status(
    pid: int, watched: _WatchedExit, proc: str
) -> tuple[int | None, Literal["pidfd", "zombie"] | None]:
    """Wait status of a process and who tells it."""
    status = _exit_status(watched.fd)
    if status is not None:
        return status, "pidfd"
    status = read_zombie_status(pid, watched.start_ticks, proc)
    if status is not None:
        return status, "zombie"
    status = _exit_status(watched.fd)  # it may have been waited for in between
    return status, None if status is None else "pidfd"


def _open(pid: int) -> int:
    """``os.pidfd_open``, which interpreters that were built on an old system lack."""
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
    """Wait status by the pidfd itself; None until the process has been waited for, and with kernels before 6.15."""
    info = bytearray(64)
    struct.pack_into("=Q", info, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(fd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    told: int = struct.unpack_from("=Q", info)[0]
    status: int = struct.unpack_from("=i", info, 60)[0]
    return status if told & PIDFD_INFO_EXIT else None
