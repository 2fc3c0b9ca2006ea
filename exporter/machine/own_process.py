"""This process: names of its threads in the kernel, its memory, its open files, and files in memory."""

import ctypes
import gc
import os
import resource
import threading
import time
from pathlib import Path

MOST_CHARACTERS = 15  # the kernel's limit (PR_SET_NAME)
STACK_BYTES = 1024 * 1024  # JSON and literals nested beyond the interpreter's limits need less than half of it
LARGE_BYTES = 64 * 1024
SETTLE_S = 60.0  # from the start until everything read once is loaded
COLLECT_S = 15.0  # between two collections of garbage
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - for files that lose their random name at once
MOST_DESCRIPTORS = 65536  # more than the files and processes of the largest jobs; some sites allow a billion
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # mallopt(3)


def name_thread(name: str) -> None:
    """Name the present thread, for `top -H`; only the first 15 characters are used."""
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:MOST_CHARACTERS])
    except OSError:
        pass  # names are optional


def limit_reserved_memory() -> None:
    """Let new threads reserve 1 MiB of stack instead of 8, and no heap of 64 MiB each: sites limit `ulimit -v`.

    Large buffers, such as pages and statuses, go back to the kernel when freed. glibc would soon take them from the
    heap, where small objects between them keep the holes resident.
    """
    threading.stack_size(STACK_BYTES)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def open_memory_file(name: str) -> int:
    """Return the descriptor of a new file without a path, in memory, so that no disk can fill up or hang.

    Interpreters built on old systems, such as those of conda, have no ``os.memfd_create``.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile  # lazy: most interpreters do not need it

    fd, path = tempfile.mkstemp(prefix=name, dir=SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None)
    os.unlink(path)
    return fd


def allow_many_descriptors() -> int:
    """Raise the soft limit of open files, usually 1024, as far as the hard limit allows. Returns that limit."""
    try:
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(now, MOST_DESCRIPTORS)), most))
    except (OSError, ValueError):
        pass  # the old limit stays
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class GarbageCollection:
    """Full collections at a fixed interval, of about a millisecond each, so that memory does not grow over hours.

    Python keeps freed tuples for reuse, up to 2,000 of each length, and gives them back only with a full collection,
    which it makes when its objects have grown by a quarter. Until then other small objects need new memory, which
    long-lived objects then keep resident. What exists after ``SETTLE_S`` is not searched again.
    """

    def __init__(self) -> None:
        self._next_at = time.monotonic() + SETTLE_S
        self._has_settled = False

    def poll(self) -> None:
        """Collect if the interval is over."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + COLLECT_S
        gc.collect()
        if not self._has_settled:
            self._has_settled = True
            gc.freeze()
