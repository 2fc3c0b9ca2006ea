"""Processes that the OOM killer took, and errors of GPUs, from the kernel's log (``/dev/kmsg``).

A second source where it may be read at all: by root, or by everybody where ``kernel.dmesg_restrict``
is 0. It is read in the first pid namespace alone, since its pids are those of the host. Only lines of the kernel itself
count: what processes write there bears another facility, whatever it says.
"""

import errno
import os
import re
import threading
from dataclasses import dataclass

from exporter.contract.clock import Clock

FIRST_PID_NAMESPACE = 0xEFFFFFFC  # inode of the host's pid namespace (PROC_PID_INIT_INO of the kernel)
LARGEST_RECORD = 8192
RECORDS_PER_LOOK = 10_000
KEPT = 1000

_LINE = re.compile(rb"(\d+),\d+,(\d+),[^;]*;([^\n]*)")
_OOM_KILL = re.compile(r"oom-kill:constraint=.*,task_memcg=(.*),task=.*,pid=(\d+),uid=\d+")
_KILLED = re.compile(r"(?:.*: )?Killed process (\d+) \(")
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]+)(?: GPU-I:(?P<instance>\d+))?(?: GPU-CI:\d+)?\): (?P<code>\d+)"
    r"(?:, pid='?(?P<pid>\d+))?"
)
_MARKS = (b"oom-kill:", b"Killed process ", b"NVRM: Xid ")  # Literals, one of which is in every line of interest


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line of the kernel."""

    uptime_s: float
    text: str


@dataclass(frozen=True, slots=True)
class OomVictim:
    """A process that the OOM killer took; its memory cgroup as the host names it, where that is told."""

    pid: int
    cgroup: str | None = None


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An error that the NVIDIA driver reported for a GPU."""

    pci: str
    code: int
    pid: int | None = None
    gpu_instance: int | None = None  # of a GPU that is divided (MIG) the part that has the error


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """What happened, and when in epoch seconds."""

    time: float
    what: OomVictim | KernelXid


def parse_line(record: bytes) -> KernelLine | None:
    """A record of ``/dev/kmsg``, ``priority,sequence,microseconds,flags;text``; None when the kernel did not write it.

    The lines after it that begin with a space, which name a device, are left out.
    """
    match = _LINE.match(record)
    if match is None or int(match[1]) >= 8:  # the facility is what is above the three bits of the level
        return None
    return KernelLine(int(match[2]) / 1e6, match[3].decode("utf-8", "replace"))


def parse_event(text: str) -> OomVictim | KernelXid | None:
    """What a line says of a process killed for memory or of a GPU's error; None for all others.

    A kill has up to two lines: one with the cgroup (since Linux 5.0), and one that says that it was done.
    """
    if match := _OOM_KILL.match(text):
        return OomVictim(int(match[2]), match[1])
    if match := _KILLED.match(text):
        return OomVictim(int(match[1]))
    if match := _XID.match(text):
        pid, instance = (None if match[name] is None else int(match[name]) for name in ("pid", "instance"))
        return KernelXid(match["pci"], int(match["code"]), pid, instance)
    return None


class KernelLog:
    """Events of the kernel's log since a moment, as long as it may be read.

    ``since`` is in epoch seconds; None leaves out what is there already. Only so many records are read at one look;
    after a flood the next looks catch up. What the kernel has overwritten meanwhile is lost.
    """

    def __init__(self, clock: Clock, since: float | None, path: str = "/dev/kmsg", proc: str = "/proc") -> None:
        self._clock = clock
        self._since = since
        self._fd = -1
        self._last_look: float | None = None
        self._lock = threading.Lock()
        self.events: tuple[KernelEvent, ...] = ()
        """The last of them, oldest first."""
        self.unavailable: str | None = None
        """Why it cannot be read; None when it can."""
        try:
            if os.stat(f"{proc}/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:
                self.unavailable = "this is a pid namespace of its own"
                return
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if since is None:
                os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self.unavailable = str(error.strerror)

    def read(self) -> None:
        """Add what the kernel has said since the last look; any thread may ask."""
        with self._lock:
            if self._fd >= 0:
                self._read()

    def _read(self) -> None:
        now, uptime_s = self._clock.time(), self._clock.monotonic()
        for _ in range(RECORDS_PER_LOOK):
            try:
                record = os.read(self._fd, LARGEST_RECORD)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # the next record was overwritten; the one after those comes now
                self.unavailable = str(error.strerror)
                self._close()
                return
            if not record:
                break
            if any(mark in record for mark in _MARKS):
                self._note(record, now - uptime_s, now)
        else:
            return  # not at the end yet: what comes next may be older than this look
        self._last_look = now

    def _note(self, record: bytes, boot: float, now: float) -> None:
        line = parse_line(record)
        event = None if line is None else parse_event(line.text)
        if line is None or event is None:
            return
        # The log's clock is near that of the uptime but drifts from it; a line that was not there at the
        # last look is younger than that, whatever it says.
        moment = min(boot + line.uptime_s, now)
        if self._last_look is not None:
            moment = max(moment, self._last_look)
        elif self._since is not None and moment < self._since:
            return
        self.events = (*self.events, KernelEvent(moment, event))[-KEPT:]

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1
