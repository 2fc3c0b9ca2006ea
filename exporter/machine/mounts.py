"""The mounts of this process, and which of them are remote (proc_pid_mountinfo(5))."""

import os
import re
import select
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

# file systems served by another machine or process, like all of type `fuse.NAME`
NETWORK_FILE_SYSTEMS = frozenset((
    "9p", "acfs", "afs", "autofs", "beegfs", "ceph", "cifs", "coda", "cvfs", "davfs", "dvs", "fuse", "fuseblk", "gfs",
    "gfs2", "gpfs", "kafs", "lustre", "mmfs", "ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs",
    "pvfs2", "quobyte", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs", "yas",
))  # fmt: skip
_KERNEL_DIRECTORIES = ("/proc/", "/sys/", "/dev/")  # below these no job stores files

_ESCAPED = re.compile(r"\\([0-7]{3})")


class MountPoint(NamedTuple):
    """One mount; ``source`` is the device, the server's export or whatever the type defines."""

    point: str
    fstype: str
    source: str

    @property
    def remote(self) -> bool:
        """Whether its reads may hang although this machine is healthy."""
        return self.fstype in NETWORK_FILE_SYSTEMS or self.fstype.startswith("fuse.")


def parse_mountinfo(text: str) -> tuple[MountPoint, ...]:
    """Parse ``/proc/PID/mountinfo``, keeping the order; invalid lines are skipped."""
    found = []
    for line in text.split("\n"):
        fields = line.split(" ")
        try:
            after = fields.index("-", 6)
            point, fstype, source = fields[4], fields[after + 1], fields[after + 2]
        except (ValueError, IndexError):
            continue
        found.append(MountPoint(_unescape(point), _unescape(fstype), _unescape(source)))
    return tuple(found)


def _unescape(field: str) -> str:
    """Decode the octal escapes of space, tab, newline, backslash and number sign."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), field) if "\\" in field else field


def mount_of(path: str, mounts: Sequence[MountPoint]) -> MountPoint | None:
    """Find the mount of an absolute path from the text alone, without touching any file.

    The longest matching mount point wins; of several at one point the last covers the others.
    """
    place = os.path.normpath(path)
    best: MountPoint | None = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        leads = place == point or place.startswith(f"{point}/")
        if leads and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def has_remote_mount(mounts: Sequence[MountPoint]) -> bool:
    """Whether any file system that a job could write to is remote."""
    return any(mount.remote and not f"{mount.point}/".startswith(_KERNEL_DIRECTORIES) for mount in mounts)


def is_node_local(mount: MountPoint | None, shared: MountPoint | None) -> bool:
    """Whether a directory on ``mount`` exists only on this node.

    ``shared`` is the mount of the run directory, which all nodes see. If it is not remote, as when one machine plays
    several nodes, mount types do not show what nodes share.
    """
    return mount is not None and shared is not None and shared.remote and not mount.remote


class MountTable:
    """The present mounts, reread only when the kernel reports a change. Thread-safe."""

    def __init__(self, proc: str = "/proc") -> None:
        self._path = os.path.join(proc, "self", "mountinfo")
        self._lock = threading.Lock()
        self._fd = -1
        self._mounts: tuple[MountPoint, ...] = ()

    def current(self) -> tuple[MountPoint, ...]:
        """All mounts; the last known ones if they cannot be read."""
        with self._lock:
            try:
                if self._fd < 0:
                    self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                elif not self._changed():
                    return self._mounts
                self._mounts = parse_mountinfo(self._read_text())
            except OSError:
                pass
            return self._mounts

    def _changed(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLPRI)  # POLLERR needs no request
        return any(events & (select.POLLPRI | select.POLLERR) for _, events in poll.poll(0))

    def _read_text(self) -> str:
        pieces, offset = [], 0
        while piece := os.pread(self._fd, 1 << 16, offset):
            pieces.append(piece)
            offset += len(piece)
        return os.fsdecode(b"".join(pieces))

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


@lru_cache(maxsize=8)
def mount_table(proc: str = "/proc") -> MountTable:
    """The table of this process, sharing one descriptor."""
    return MountTable(proc)
