"""Threads of this process: their names in the kernel, and how much address space they reserve."""

import ctypes
import threading
from pathlib import Path

MOST_CHARACTERS = 15  # the kernel's limit (PR_SET_NAME)
STACK_BYTES = 1024 * 1024  # JSON and literals nested beyond the interpreter's limits need less than half of it
LARGE_BYTES = 64 * 1024
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
