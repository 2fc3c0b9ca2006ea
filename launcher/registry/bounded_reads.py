"""Reads of many directories at once, within a bounded time: they may be on a file system that hangs."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from exporter.contract.errors import ExporterError
from launcher.errors import LauncherError

DEADLINE_S = 2.0  # for all of them; a mount that hangs costs no more
READERS = 8  # threads
T = TypeVar("T")
V = TypeVar("V")


def read_some(
    items: Iterable[T], read: Callable[[T], V], deadline_s: float = DEADLINE_S, *, most: int | None = None
) -> tuple[list[tuple[T, V]], list[T]]:
    """Read the first items in parallel. Return what is known at the deadline, in order, and the items not read by then.

    What cannot be read is in neither list. Threads that wait for a mount end with the process. ``most`` is None for all
    items.
    """
    waiting: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()
    first = list(items)[:most]
    found: dict[int, V] = {}
    done: set[int] = set()

    def work() -> None:
        while (entry := waiting.get()) is not None:
            try:
                found[entry[0]] = read(entry[1])
            except (OSError, LauncherError, ExporterError):
                pass  # of another version, or being removed
            done.add(entry[0])

    for entry in enumerate(first):
        waiting.put(entry)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(READERS, len(first)))]
    end = time.monotonic() + deadline_s
    for thread in threads:
        waiting.put(None)
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = [item for index, item in enumerate(first) if index not in done.copy()]
    return [(first[index], value) for index, value in sorted(found.copy().items(), key=lambda pair: pair[0])], late
