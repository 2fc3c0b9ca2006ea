"""The kernel's word that nothing has happened to a file since it was last looked at (inotify(7)).

It is asked about files of this machine alone: of what another one writes to a network file system it knows nothing.
Nor does it tell of what is written through a memory map, and of a directory above the file that is renamed or mounted
over: so whoever trusts a watch looks at the file itself now and then.
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

LOCAL = frozenset(("btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"))
"""Types of file systems to which nobody writes but through this kernel."""
MOST_WATCHES = 1024  # of one follower: the kernel allows each user so many thousands of them

IN_MODIFY, IN_ATTRIB, IN_DELETE_SELF, IN_MOVE_SELF = 0x2, 0x4, 0x400, 0x800
IN_Q_OVERFLOW, IN_DONT_FOLLOW, IN_ONESHOT = 0x4000, 0x0200_0000, 0x8000_0000
CHANGES = IN_MODIFY | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF
"""A name that is taken away from a file that is open, or given to another file, is a change of its attributes."""
_EVENT = struct.Struct("=iIII")
_EVENTS_BYTES = 4096

log = logging.getLogger("gpujob.wakeups")


class InotifyWatch:
    """One file, as one reader of it sees it."""

    __slots__ = ("number", "quiet")

    def __init__(self, number: int) -> None:
        self.quiet = True
        """Whether nothing had happened to the file when ``drain`` was last called; once it is False it stays so."""
        self.number = number
        """That of the kernel: readers of the same file share it."""


class InotifyWatches:
    """The watches of one follower of logs, all of one thread.

    Each is for one change: a file that is written to costs its writer one event, however often that is.
    """

    def __init__(self, mounts: Callable[[], Sequence[MountPoint]] | None = None) -> None:
        self._mounts = mounts or mount_table().current
        self._fd = -1
        self._failed = False
        self._others: set[int] = set()
        """Devices to which others write as well."""
        self._watches: dict[int, list[InotifyWatch]] = {}

    def __del__(self) -> None:
        self.close()  # a user may have 128 of them

    def watch(self, path: str, device: int) -> InotifyWatch | None:
        """Watch the file at an absolute path, last seen on this device (``st_dev``); None where it cannot be watched.

        What the caller knew of the file before is to be asked again after this: it may have changed in between.
        """
        if self._failed or device in self._others or len(self._watches) >= MOST_WATCHES:
            return None
        if not sees_all_writes(path, device, self._mounts()):
            self._others.add(device)
            return None
        if os.path.realpath(path) != path:
            return None  # a link can be turned, and no event tells of that
        try:
            if self._fd < 0:
                self._fd = _call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
            number = _call("inotify_add_watch", self._fd, os.fsencode(path), CHANGES | IN_ONESHOT | IN_DONT_FOLLOW)
        except (OSError, AttributeError) as error:
            if self._fd < 0 or getattr(error, "errno", None) == errno.ENOSPC:
                log.debug("logs are asked for changes one by one: %s", error)
                self._failed = True
            return None
        watch = InotifyWatch(number)
        self._watches.setdefault(number, []).append(watch)
        return watch

    def drain(self) -> None:
        """Take in what has happened up to now."""
        while self._watches:
            try:
                events = os.read(self._fd, _EVENTS_BYTES)
            except OSError:
                return  # there are no more
            self._take(events)

    def _take(self, events: bytes) -> None:
        place = 0
        while place < len(events):
            number, mask, _, more = _EVENT.unpack_from(events, place)
            place += _EVENT.size + more
            if mask & IN_Q_OVERFLOW:
                self.close()  # of whatever was lost
                return
            for watch in self._watches.pop(number, ()):
                watch.quiet = False

    def drop(self, watch: InotifyWatch) -> None:
        """Watch no longer."""
        if not watch.quiet:
            return  # it has ended by itself
        watch.quiet = False
        others = self._watches[watch.number]
        others.remove(watch)
        if not others:
            del self._watches[watch.number]
            with contextlib.suppress(OSError):  # the event that ends it is on its way
                _call("inotify_rm_watch", self._fd, watch.number)

    def close(self) -> None:
        """Give all watches up, and the descriptor back; the next watch begins anew."""
        for watches in self._watches.values():
            for watch in watches:
                watch.quiet = False
        self._watches.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sees_all_writes(path: str, device: int, mounts: Sequence[MountPoint]) -> bool:
    """Whether the kernel knows of all that is written to this file; decided by the table of mounts alone."""
    types = {mount.fstype for mount in mounts if mount.device == device}
    if types:
        return types <= LOCAL
    # a subvolume has a device of its own, which no mount shows
    mount = mount_of(path, mounts)
    return mount is not None and mount.fstype == "btrfs"


def _call(name: str, *arguments: Any) -> int:
    """Result of a function of the C library; raises OSError where it fails, AttributeError where it is missing."""
    found: int = getattr(_library(), name)(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
