"""Watches that show a file unchanged since the last read (inotify(7)).

Only for local files: inotify misses writes of other machines. It also misses writes through a memory map, and renames
of or mounts over a parent directory. So callers must check the file itself now and then.
"""

import contextlib
import ctypes
import errno
import logging
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from exporter.machine.mounts import MountPoint, mount_of, mount_table

# file systems that change only through this kernel
LOCAL_FILE_SYSTEMS = frozenset(("btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"))
MOST_WATCHES = 1024  # per instance: the kernel allows a user only some thousands

IN_MODIFY, IN_ATTRIB, IN_DELETE_SELF, IN_MOVE_SELF = 0x2, 0x4, 0x400, 0x800
IN_Q_OVERFLOW, IN_DONT_FOLLOW, IN_ONESHOT = 0x4000, 0x0200_0000, 0x8000_0000
# unlinking an open file, or renaming another over it, changes its attributes
CHANGES = IN_MODIFY | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF
_EVENT = struct.Struct("=iIII")
_EVENTS_BYTES = 4096

log = logging.getLogger("gpujob.wakeups")


class InotifyWatch:
    """Watch on one file for one reader."""

    __slots__ = ("is_unchanged", "number")

    def __init__(self, number: int) -> None:
        self.is_unchanged = True  # whether nothing had happened at the last `drain`; stays False
        self.number = number  # the kernel's number, shared by readers of one file


class InotifyWatches:
    """All watches of one thread that follows logs.

    Each ends at the first change, so its writer pays for one event at most.
    """

    def __init__(self, mounts: Callable[[], Sequence[MountPoint]] | None = None) -> None:
        self._mounts = mounts or mount_table().current
        self._fd = -1
        self._failed = False
        self._shared_devices: set[int] = set()  # devices that other machines write to as well
        self._watches: dict[int, list[InotifyWatch]] = {}

    def __del__(self) -> None:
        self.close()  # a user may have only 128 instances

    def watch(self, path: str, device: int) -> InotifyWatch | None:
        """Watch the file at an absolute path on this device (``st_dev``); None if that is not possible.

        Check the file again after this call: it may have changed in between.
        """
        if self._failed or device in self._shared_devices or len(self._watches) >= MOST_WATCHES:
            return None
        if not sees_all_writes(path, device, self._mounts()):
            self._shared_devices.add(device)
            return None
        if os.path.realpath(path) != path:
            return None  # a link can be changed without an event
        try:
            if self._fd < 0:
                self._fd = _call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
            number = _call("inotify_add_watch", self._fd, os.fsencode(path), CHANGES | IN_ONESHOT | IN_DONT_FOLLOW)
        except (OSError, AttributeError) as error:
            if self._fd < 0 or getattr(error, "errno", None) == errno.ENOSPC:
                log.debug("inotify is not available, logs are polled instead: %s", error)
                self._failed = True
            return None
        watch = InotifyWatch(number)
        self._watches.setdefault(number, []).append(watch)
        return watch

    def drain(self) -> None:
        """Process all pending events."""
        while self._watches:
            try:
                events = os.read(self._fd, _EVENTS_BYTES)
            except OSError:
                return  # no more events
            self._apply_events(events)

    def _apply_events(self, events: bytes) -> None:
        place = 0
        while place < len(events):
            number, mask, _, more = _EVENT.unpack_from(events, place)
            place += _EVENT.size + more
            if mask & IN_Q_OVERFLOW:
                self.close()  # events of any file may be lost
                return
            for watch in self._watches.pop(number, ()):
                watch.is_unchanged = False

    def drop(self, watch: InotifyWatch) -> None:
        """Remove a watch."""
        if not watch.is_unchanged:
            return  # it ended by itself
        watch.is_unchanged = False
        others = self._watches[watch.number]
        others.remove(watch)
        if not others:
            del self._watches[watch.number]
            with contextlib.suppress(OSError):  # its last event is already queued
                _call("inotify_rm_watch", self._fd, watch.number)

    def close(self) -> None:
        """Drop all watches and close the descriptor; the next watch reopens it."""
        for watches in self._watches.values():
            for watch in watches:
                watch.is_unchanged = False
        self._watches.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sees_all_writes(path: str, device: int, mounts: Sequence[MountPoint]) -> bool:
    """Whether this kernel sees every write to the file, according to the mount table alone."""
    types = {mount.fstype for mount in mounts if mount.device == device}
    if types:
        return types <= LOCAL_FILE_SYSTEMS
    # a subvolume has its own device, which no mount shows
    mount = mount_of(path, mounts)
    return mount is not None and mount.fstype == "btrfs"


def _call(name: str, *arguments: Any) -> int:
    """Call a function of the C library. Raise OSError if it fails, AttributeError if it is missing."""
    found: int = getattr(_library(), name)(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
