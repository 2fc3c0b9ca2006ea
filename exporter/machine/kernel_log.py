"""OOM kills and GPU errors from the kernel log (``/dev/kmsg``).

An additional source, readable by root, or by all if ``kernel.dmesg_restrict`` is 0. It is used only in the host's pid
namespace, since its pids are the host's. Only lines of the kernel count; those of processes have another facility.
"""

import errno
import os
import re
import threading

from exporter.contract.clock import Clock
from exporter.contract.lazy_dataclass import dataclass

FIRST_PID_NAMESPACE = 0xEFFFFFFC  # inode of the host's pid namespace (the kernel's PROC_PID_INIT_INO)
LARGEST_RECORD = 8192
RECORDS_PER_READ = 10_000
MOST_EVENTS = 1000

_LINE = re.compile(rb"(\d+),\d+,(\d+),[^;]*;([^\n]*)")
_OOM_KILL = re.compile(r"oom-kill:constraint=.*,task_memcg=(.*),task=.*,pid=(\d+),uid=\d+")
_KILLED = re.compile(r"(?:.*: )?Killed process (\d+) \(")
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]+)(?: GPU-I:(?P<instance>\d+))?(?: GPU-CI:\d+)?\): (?P<code>\d+)"
    r"(?:, pid='?(?P<pid>\d+))?"
)
_MARKS = (b"oom-kill:", b"Killed process ", b"NVRM: Xid ")  # every relevant line contains one of these


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line of the kernel."""

    uptime_s: float
    text: str


@dataclass(frozen=True, slots=True)
class OomVictim:
    """A process killed by the OOM killer; its memory cgroup as the host names it, if known."""

    pid: int
    cgroup: str | None = None


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An error that the NVIDIA driver reported for a GPU."""

    pci: str
    code: int
    pid: int | None = None
    gpu_instance: int | None = None  # MIG instance with the error, if the GPU is divided


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """An event and its time in epoch seconds."""

    time: float
    detail: OomVictim | KernelXid


def parse_line(record: bytes) -> KernelLine | None:
    """Parse a ``/dev/kmsg`` record, ``priority,sequence,microseconds,flags;text``; None if not from the kernel.

    Continuation lines, which begin with a space and name a device, are dropped.
    """
    match = _LINE.match(record)
    if match is None or int(match[1]) >= 8:  # the facility is above the three bits of the level
        return None
    return KernelLine(int(match[2]) / 1e6, match[3].decode("utf-8", "replace"))


def parse_event(text: str) -> OomVictim | KernelXid | None:
    """Parse a line about an OOM kill or a GPU error; None for all others.

    A kill has up to two lines: one with the cgroup (since Linux 5.0), and one that confirms it.
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
    """Events of the kernel log, as long as it is readable.

    ``since`` is in epoch seconds; None skips present lines. After a flood, the next reads catch up. Lines that the
    kernel has overwritten meanwhile are lost.
    """

    def __init__(self, clock: Clock, since: float | None, path: str = "/dev/kmsg", proc: str = "/proc") -> None:
        self._clock = clock
        self._since = since
        self._fd = -1
        self._last_read_at: float | None = None
        self._lock = threading.Lock()
        self.events: tuple[KernelEvent, ...] = ()  # the latest ones, oldest first
        self.unavailable_reason: str | None = None  # why it cannot be read; None if it can
        try:
            if os.stat(f"{proc}/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:
                self.unavailable_reason = "running in a separate pid namespace"
                return
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if since is None:
                os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            self.unavailable_reason = str(error.strerror)

    def read(self) -> None:
        """Add new events of the kernel. Thread-safe."""
        with self._lock:
            if self._fd >= 0:
                self._read()

    def _read(self) -> None:
        now, uptime_s = self._clock.time(), self._clock.monotonic()
        for _ in range(RECORDS_PER_READ):
            try:
                record = os.read(self._fd, LARGEST_RECORD)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # the next record was overwritten; continue after the gap
                self.unavailable_reason = str(error.strerror)
                self._close()
                return
            if not record:
                break
            if any(mark in record for mark in _MARKS):
                self._add_event(record, now - uptime_s, now)
        else:
            return  # not at the end yet: the next lines may be older than this read
        self._last_read_at = now

    def _add_event(self, record: bytes, boot_time: float, now: float) -> None:
        line = parse_line(record)
        event = None if line is None else parse_event(line.text)
        if line is None or event is None:
            return
        # The log's clock drifts from the uptime. A line that is new since the last read is later than that read,
        # whatever its own time.
        moment = min(boot_time + line.uptime_s, now)
        if self._last_read_at is not None:
            moment = max(moment, self._last_read_at)
        elif self._since is not None and moment < self._since:
            return
        self.events = (*self.events, KernelEvent(moment, event))[-MOST_EVENTS:]

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1
