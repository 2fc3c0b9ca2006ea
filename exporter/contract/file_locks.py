"""Locks on files (flock(2)). A lock ends with its process, however that ends, and works across the nodes of NFS."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping

from exporter.contract import run_files
from exporter.contract.errors import ExporterError

MOST_BYTES = 4096  # of a record of a holder


class FileLockedError(ExporterError):
    """Another process has the lock. ``holder`` is what it wrote about itself, and may be empty."""

    def __init__(self, path: str, holder: Mapping[str, object]) -> None:
        self.path, self.holder = path, holder
        since = holder.get("since")
        moment = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since)) if isinstance(since, float) else ""
        super().__init__(f"process {holder.get('pid', '?')} on {holder.get('host', 'another host')}{moment}")


def lock_file(path: str | os.PathLike[str], facts: Mapping[str, object] | None = None, *, shared: bool = False) -> int:
    """Lock a file for this process, and write into it who holds it, with these facts. Return the descriptor.

    Shared locks exclude only others. Returns -1 without a lock if the file system has none. Raises FileLockedError,
    and OSError if the file cannot be opened. If there is no room for the holder, the lock holds all the same.
    """
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, run_files.FILE_MODE)
        with contextlib.ExitStack() as unused:
            unused.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FileLockedError(os.fspath(path), _parse_holder(os.pread(descriptor, MOST_BYTES, 0))) from error
            except OSError:
                return -1
            if os.fstat(descriptor).st_nlink:  # else its last holder has just removed it
                unused.pop_all()
                break
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "since": time.time(), **(facts or {})}
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(holder)}\n".encode(), 0)
    return descriptor


def _parse_holder(text: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}  # it is about to write it
    return value if isinstance(value, dict) else {}
