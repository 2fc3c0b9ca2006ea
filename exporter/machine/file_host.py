"""Run file watches on their own threads, in a helper process if any mount is remote.

A read from a dead server may never return, and then not even SIGKILL ends the waiting thread or its process. With a
helper, a hanging read costs only its own watch, and the sidecar can always exit.
"""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from exporter.contract.clock import Clock, Deadline
from exporter.contract.python_flags import ISOLATED
from exporter.machine.file_helper import (
    ANSWER,
    DIRECTORY,
    ERROR,
    HEAD,
    READY,
    FileWatch,
    MakeWatch,
    WatchThread,
    read_exactly,
    watched_directory,
)
from exporter.machine.mounts import MountPoint, has_remote_mount, mount_of, mount_table
from exporter.machine.procfs import ENDED_STATES, STAT_BYTES, parse_process_stat, read_proc_file

POLL_WAIT_S = 1.0  # time that a collector waits for all of its watches together
HANG_REPORT_S = 4.0  # a read without an answer for this long is reported; disks are read every 5 s
START_S = 5.0  # time for the helper to start before reads fail
LEAST_DELAY_S, MOST_DELAY_S = 1.0, 60.0  # before the helper is restarted; doubled each time it ends soon
SOON_S = 60.0

Answer = TypeVar("Answer", covariant=True)
T = TypeVar("T")

log = logging.getLogger("gpujob.files")


class WatchHanging(Exception):
    """A read has not returned: since when (monotonic), and on which mount if known."""

    def __init__(self, since: float, mount: str | None) -> None:
        super().__init__(f"no answer from {mount or 'the file system'}")
        self.since, self.mount = since, mount


class WatchFailed(Exception):
    """A read raised an exception other than OSError."""


class FileHelperEnded(OSError):
    """The file helper has ended or is not running."""


class WatchHandle(Generic[Answer]):
    """One watch with at most one read in progress; made by ``FileWatchHost.watch``.

    Only one thread at a time may request. A result stays until it is taken, so that nothing is lost.
    """

    def __init__(self, name: str, directory: str | None, host: "FileWatchHost") -> None:
        self.name = name
        self._directory = directory
        self._host = host
        self._changed = threading.Condition()
        self._requested_at: float | None = None
        self.generation = 0  # number of the last requested read
        self._message: tuple[int, object] | None = None
        self._is_overdue = False
        self._resolved_directory: str | None = None

    def request(self, now: float) -> None:
        """Start a read, unless one is in progress or its result was not taken; ``now`` in epoch seconds.

        Only the first call waits, for the helper to start.
        """
        with self._changed:
            if self._requested_at is not None:
                return
            self._requested_at = self._host.clock.monotonic()
            self.generation += 1
        try:
            self._host.readers.start_read(self, now)
        except RuntimeError as error:  # no thread can be started at this moment
            self.receive(READY, str(error))

    def result(self, wait_s: float) -> Answer:
        """Return the result of the requested read.

        Raises WatchHanging if there is none after ``wait_s``, the OSError of the read, FileHelperEnded without a
        helper, and WatchFailed for any other exception of the read.
        """
        with self._changed:
            if self._requested_at is None:
                raise RuntimeError(f"{self.name}: no read was requested")
            begun, deadline = self._requested_at, Deadline(wait_s)
            while self._message is None and (left_s := deadline.left_s()) > 0:
                self._changed.wait(left_s)
            message, self._message = self._message, None
            self._is_overdue = message is None
            if message is not None:
                self._requested_at = None
        if message is None:
            self._host.readers.check_alive()
            raise WatchHanging(begun, self.mount)
        kind, value = message
        if isinstance(value, bytes):
            value = pickle.loads(value)  # noqa: S301 - from the process that this one has started
        if kind == ANSWER:
            return cast(Answer, value)
        if kind == ERROR:
            raise OSError(*cast(tuple[object, ...], value))
        if kind == READY:
            raise FileHelperEnded(value)
        raise WatchFailed(f"{self.name}: {value}")

    @property
    def responding(self) -> bool:
        """False while a read is in progress that a caller has waited for in vain."""
        return not self._is_overdue

    @property
    def filesystem(self) -> MountPoint | None:
        """Mount of the directory, with links followed if a read has resolved them; touches no file."""
        place = self._resolved_directory or self._directory
        return None if place is None else mount_of(place, self._host.mounts.current())

    @property
    def mount(self) -> str | None:
        """Mount point of that file system."""
        found = self.filesystem
        return None if found is None else found.point

    def receive(self, kind: int, value: object, generation: int | None = None) -> None:
        """Take a message of a watch thread or the helper, on their thread; ignore one of an earlier read."""
        if kind == DIRECTORY:
            self._resolved_directory = str(pickle.loads(value) if isinstance(value, bytes) else value)  # noqa: S301 - see above
            return
        with self._changed:
            is_it = generation is None or generation == self.generation
            if is_it and self._requested_at is not None and self._message is None:
                self._message, self._is_overdue = (kind, value), False
                self._changed.notify_all()


class FileWatchHost:
    """Watches of one sidecar, for several collectors with their own threads."""

    def __init__(self, clock: Clock, use_helper: bool | None = None, proc: str = "/proc") -> None:
        """``use_helper``: whether to use a helper process. None: if any mount is remote or mounts are unknown."""
        self.clock = clock
        self.mounts = mount_table(proc)
        if use_helper is None:
            mounts = self.mounts.current()
            use_helper = has_remote_mount(mounts) or not mounts
        self.readers: _ThreadHost | _ProcessHost = _ProcessHost(clock) if use_helper else _ThreadHost()

    @property
    def pid(self) -> int | None:
        """Pid of the helper while it runs."""
        return self.readers.pid if isinstance(self.readers, _ProcessHost) else None

    def watch(self, name: str, make: Callable[[], FileWatch[T]]) -> WatchHandle[T]:
        """Create a watch; ``make`` runs on its own thread at the first read.

        ``make`` is a ``functools.partial`` of a module-level class with arguments that can be pickled. The first
        absolute path among them is the watch's directory.
        """
        watched: WatchHandle[T] = WatchHandle(name, watched_directory(make), self)
        self.readers.add(watched, make)
        return watched

    def poll(
        self, watches: Sequence[WatchHandle[T]], now: float, wait_s: float = POLL_WAIT_S
    ) -> list[T | WatchHanging | WatchFailed | OSError]:
        """Read all watches within ``wait_s`` in total. Return for each its result, or the exception of ``result``.

        A watch that was already hanging is not waited for.
        """
        for watched in watches:
            watched.request(now)
        deadline = Deadline(wait_s)
        found: list[T | WatchHanging | WatchFailed | OSError] = []
        for watched in watches:
            try:
                found.append(watched.result(deadline.left_s() if watched.responding else 0.0))
            except (WatchHanging, WatchFailed, OSError) as error:
                found.append(error)
        return found

    def close(self) -> None:
        """End all readers without waiting."""
        self.readers.close()
        self.mounts.close()


class _ThreadHost:
    """Reads on threads of this process."""

    def __init__(self) -> None:
        self._threads: dict[WatchHandle[object], WatchThread] = {}

    def add(self, watched: WatchHandle[object], make: MakeWatch) -> None:
        self._threads[watched] = WatchThread(watched.name, lambda: make, watched.receive)

    def start_read(self, watched: WatchHandle[object], now: float) -> None:
        self._threads[watched].request(now)

    def check_alive(self) -> None:
        """Do nothing: threads do not end."""

    def close(self) -> None:
        for looker in self._threads.values():
            looker.end()


class _ProcessHost:
    """Reads in a helper process, started for the first read and restarted when it ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers: dict[WatchHandle[object], int] = {}
        self._makers: dict[WatchHandle[object], bytes] = {}
        self._helper: _HelperProcess | None = None
        self._closed = False
        self._delay_s = LEAST_DELAY_S
        self._next_start_at = float("-inf")

    @property
    def pid(self) -> int | None:
        helper = self._helper
        return None if helper is None or helper.process is None else helper.process.pid

    def add(self, watched: WatchHandle[object], make: MakeWatch) -> None:
        body = pickle.dumps(make)
        with self._lock:
            self._numbers[watched] = len(self._numbers) + 1
            self._makers[watched] = body

    def start_read(self, watched: WatchHandle[object], now: float) -> None:
        helper = self._running_helper()
        if helper is None or not helper.is_up():
            watched.receive(READY, "the process that reads files is not running")
            return
        number = self._numbers[watched]
        known = helper.last_reads.get(number)
        helper.last_reads[number] = (watched, watched.generation)
        body = pickle.dumps((watched.name, now, None if known else self._makers[watched]))
        if not helper.send(HEAD.pack(len(body), number, ANSWER) + body):
            self._drop_helper(helper)
            watched.receive(READY, "the process that reads files has ended")

    def _running_helper(self) -> "_HelperProcess | None":
        with self._lock:
            if self._helper is None and not self._closed and self._clock.monotonic() >= self._next_start_at:
                self._helper = _HelperProcess(self._clock.monotonic(), self._drop_helper)
            return self._helper

    def check_alive(self) -> None:
        """Detect a killed helper: if one of its threads hangs, it is a zombie that keeps its socket open."""
        helper = self._helper
        if helper is not None and helper.has_ended():
            self._drop_helper(helper)

    def _drop_helper(self, helper: "_HelperProcess") -> None:
        """Drop a helper, so that the next one makes all watches again."""
        with self._lock:
            if self._helper is not helper:
                return
            self._helper = None
            now = self._clock.monotonic()
            soon = now - helper.started_at < SOON_S
            if not soon:
                self._delay_s = LEAST_DELAY_S
            again, self._next_start_at = soon and self._delay_s > LEAST_DELAY_S, now + self._delay_s
            self._delay_s = min(2 * self._delay_s, MOST_DELAY_S)
        helper.end()
        log.log(
            logging.DEBUG if again else logging.WARNING,
            "the process that reads files has ended (%s): it is restarted",
            helper.end_text(),
        )
        for watched, generation in list(helper.last_reads.values()):
            watched.receive(READY, "the process that reads files has ended", generation)

    def close(self) -> None:
        with self._lock:
            helper, self._helper, self._closed = self._helper, None, True
        if helper is not None:
            helper.end()


class _HelperProcess:
    """One run of the helper, and the thread that starts it and receives its messages.

    The thread must live as long as the process: the kernel ends the process with the thread that started it.
    """

    def __init__(self, started_at: float, on_end: Callable[["_HelperProcess"], None]) -> None:
        self.started_at = started_at
        self.last_reads: dict[
            int, tuple[WatchHandle[object], int]
        ] = {}  # by number: the watch, and its last requested read
        self.process: subprocess.Popen[bytes] | None = None
        self._on_end = on_end
        self._error_text = ""
        self._link, self._child_link = socket.socketpair()
        self._send_lock = threading.Lock()
        self._up = False
        self._start_finished = threading.Event()  # set when it is up, or will never be
        self._start_deadline = time.monotonic() + START_S
        threading.Thread(target=self._run, name="file-helper", daemon=True).start()

    def is_up(self) -> bool:
        """Whether it accepts reads; waits while it is starting."""
        self._start_finished.wait(max(0.0, self._start_deadline - time.monotonic()))
        return self._up

    def send(self, message: bytes) -> bool:
        """Send a message without waiting; False if that fails."""
        with self._send_lock:
            try:
                return self._link.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(message)
            except OSError:
                return False

    def has_ended(self) -> bool:
        """Whether its main thread has ended, even if others hang."""
        if self.process is None:
            return False
        try:
            text = read_proc_file(f"/proc/{self.process.pid}/stat", STAT_BYTES)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        return parse_process_stat(text).state in ENDED_STATES

    def end_text(self) -> str:
        """Text for the log."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return self._error_text or "while one of its reads hangs"
        return f"signal {-status}" if status < 0 else f"status {status}"

    def end(self) -> None:
        """Kill it and wake the receiving thread, without waiting for hanging threads."""
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGKILL)
        try:
            self._link.shutdown(socket.SHUT_RDWR)  # merely closing it would leave the thread waiting
        except OSError:
            pass  # closed at the other end

    def _run(self) -> None:
        try:
            self.process = subprocess.Popen(
                [sys.executable, *ISOLATED, "-B", "-m", "exporter.machine.file_helper"],
                stdin=self._child_link.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a reader of the sidecar's stderr would wait for a hanging helper
                cwd="/",
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
            self._child_link.close()
            while (head := read_exactly(self._link.fileno(), HEAD.size)) is not None:
                length, number, kind = HEAD.unpack(head)
                body = read_exactly(self._link.fileno(), length)
                if body is None:
                    break
                if kind == READY:
                    self._up = True
                    self._start_finished.set()
                elif (known := self.last_reads.get(number)) is not None:
                    watched, generation = known
                    watched.receive(kind, body, generation)
        except OSError as error:
            self._error_text = str(error)
        self._child_link.close()
        self._up = False
        self._start_finished.set()
        if self.process is not None:
            try:
                self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass  # one of its threads hangs
        self._on_end(self)
        self._link.close()
