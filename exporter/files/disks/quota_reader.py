"""Read quotas with quotactl_fd(2), where the kernel's own quota system has them."""

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

SYS_QUOTACTL_FD = 443  # the same on every architecture
Q_GETQUOTA = 0x800007
KINDS = (("user", 0), ("group", 1), ("project", 2))
LIMIT_UNIT_BYTES = 1024
FS_IOC_FSGETXATTR = 0x801C581F
_DQBLK = struct.Struct("=8QI4x")  # struct if_dqblk
_FSXATTR = struct.Struct("=5I8x")
_HAS_SPACE = 1 | 2  # QIF_BLIMITS, QIF_SPACE

QuotaCall = Callable[[int, int, int], bytes | None]  # descriptor, kind and id to the kernel's record, or None


class QuotaFacts(NamedTuple):
    """One quota with a limit, in bytes."""

    kind: str
    limit_bytes: int
    available_bytes: int  # left below the limit, at least 0


def parse_dqblk(kind: str, record: bytes) -> QuotaFacts | None:
    """Parse ``struct if_dqblk``; None without a limit.

    The hard limit counts, or without one the soft limit, which becomes hard after its grace time.
    """
    hard, soft, used, *_, valid = _DQBLK.unpack_from(record)
    limit = (hard or soft) * LIMIT_UNIT_BYTES
    if not limit or valid & _HAS_SPACE != _HAS_SPACE:
        return None
    return QuotaFacts(kind, limit, max(0, limit - used))


def read_quota(directory: str | os.PathLike[str], call: QuotaCall | None = None) -> QuotaFacts | None:
    """Return the tightest quota on this user's writes to a directory, or None.

    Any user may query their own user and group quotas, but only root a project's. Network file systems report none.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        ids = (os.geteuid(), os.getegid(), _project_id(fd))
        found = []
        for (kind, number), holder in zip(KINDS, ids, strict=True):
            record = None if holder is None else (call or _quotactl)(fd, number, holder)
            facts = None if record is None else parse_dqblk(kind, record)
            if facts is not None:
                found.append(facts)
        return min(found, key=lambda facts: facts.available_bytes, default=None)
    finally:
        os.close(fd)


def _project_id(fd: int) -> int | None:
    """Project of new files in a directory, or None."""
    record = bytearray(_FSXATTR.size)
    try:
        fcntl.ioctl(fd, FS_IOC_FSGETXATTR, record)
    except OSError:
        return None
    number: int = _FSXATTR.unpack(record)[3]
    return number or None


def _quotactl(fd: int, kind: int, owner_id: int) -> bytes | None:
    record = ctypes.create_string_buffer(_DQBLK.size)
    command = ctypes.c_uint((Q_GETQUOTA << 8 | kind) & 0xFFFFFFFF)
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(SYS_QUOTACTL_FD), ctypes.c_uint(fd), command, ctypes.c_uint(owner_id), record
    )
    return None if failed else record.raw
