"""Reads of directories on a thread for each mount, so that a mount that hangs costs only its own answers."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from exporter.machine.mounts import MountPoint, mount_of
from exporter.machine.own_process import name_thread

PATIENCE_S = 5.0  # for one read; a server under load answers in less
WAIT_S = 2.0  # for all mounts together; slower ones have answered by the next time

log = logging.getLogger("gpujob.hub")


class Read(NamedTuple):
    """A read, and the path that decides about its mount."""

    path: str
    call: Callable[[], None]


class MountReader:
    """Runs reads; a mount with an unfinished one gets no more, and keeps one thread at most."""

    def __init__(
        self, mounts: Callable[[], Iterable[MountPoint]], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._mounts, self._monotonic = mounts, monotonic
        self._of_mount: dict[str, _MountThread] = {}

    def read(self, reads: Iterable[Read]) -> None:
        """Run reads on all mounts that answer, and wait for the answers a bounded time."""
        mounts, groups = tuple(self._mounts()), dict[str, list[Callable[[], None]]]()
        for each in reads:
            mount = mount_of(each.path, mounts)
            groups.setdefault(mount.point if mount is not None else "/", []).append(each.call)
        begun = list[_MountThread]()
        for point, calls in groups.items():
            thread = self._of_mount.get(point)
            if thread is None:
                thread = self._of_mount[point] = _MountThread(point, self._monotonic)
            if thread.begin(calls):
                begun.append(thread)
        end = self._monotonic() + WAIT_S
        for thread in begun:
            thread.idle.wait(max(0.0, end - self._monotonic()))

    def hanging(self) -> Mapping[str, float]:
        """Mounts that do not answer, and for how many seconds."""
        times = {point: thread.unanswered_s() for point, thread in self._of_mount.items()}
        return {point: seconds for point, seconds in times.items() if seconds > PATIENCE_S}

    def known(self) -> frozenset[str]:
        """Mounts from which something was read."""
        return frozenset(self._of_mount)


class _MountThread:
    """The thread of one mount."""

    def __init__(self, point: str, monotonic: Callable[[], float]) -> None:
        self.idle = threading.Event()
        self.idle.set()
        self._monotonic, self._since = monotonic, 0.0  # when the present read began
        self._calls: queue.SimpleQueue[list[Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"mount {point}"[:15], daemon=True).start()

    def begin(self, calls: list[Callable[[], None]]) -> bool:
        """Begin these calls, unless earlier ones go on."""
        if not self.idle.is_set():
            return False
        self._since = self._monotonic()
        self.idle.clear()
        self._calls.put(calls)
        return True

    def unanswered_s(self) -> float:
        return 0.0 if self.idle.is_set() else self._monotonic() - self._since

    def _run(self) -> None:
        name_thread("mount")
        while True:
            for call in self._calls.get():
                self._since = self._monotonic()
                try:
                    call()
                except Exception:  # otherwise nothing on this mount would ever be read again
                    log.exception("a fault of the hub; it reads what else there is")
            self.idle.set()
