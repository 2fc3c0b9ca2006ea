"""Read files, each watch on its own thread; and the helper process for file systems that may hang.

``file_host`` runs it as ``python -I -B -m exporter.machine.file_helper`` with a socket as standard input. The wire
format is private to the two modules. The process ends with the sidecar. It is separate because a thread that waits for
a dead server survives SIGKILL and holds its process until the server returns.

Imports are few: a message brings whatever its watch needs.
"""

import errno
import os
import pickle
import signal
import struct
import threading
from _queue import SimpleQueue  # `queue` takes more memory than this whole module
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

HEAD = struct.Struct("=IIB")  # message header: length of the body, number of the watch, kind
# kinds: helper is up; resolved directory; result; OSError; other exception
READY, DIRECTORY, ANSWER, ERROR, FAILURE = range(5)
PR_SET_PDEATHSIG = 1

Answer = TypeVar("Answer", covariant=True)
SendMessage = Callable[[int, object], None]  # kind and value


class FileWatch(Protocol[Answer]):
    """A watch, created and read on one thread, which may wait forever."""

    def poll(self, now: float, /) -> Answer:
        """Read the present state at ``now`` (epoch seconds), as a value that can be pickled."""
        ...


MakeWatch = Callable[[], FileWatch[object]]


def watched_directory(make: MakeWatch) -> str | None:
    """Directory of a ``functools.partial``: the first argument that is an absolute path."""
    values = (*getattr(make, "args", ()), *getattr(make, "keywords", {}).values())
    for value in values:
        if isinstance(value, (str, os.PathLike)) and os.path.isabs(value):
            return os.fsdecode(value)
    return None


class WatchThread:
    """One watch on its own thread, started by the first read."""

    def __init__(self, name: str, make: Callable[[], MakeWatch], send: SendMessage) -> None:
        """``make`` returns the maker of the watch; ``send`` is called on the watch's thread."""
        self._name, self._make, self._send = name, make, send
        self._requests: SimpleQueue[float | None] = SimpleQueue()
        self._started = False

    def request(self, now: float) -> None:
        """Start a read. Raises RuntimeError if no thread can be started; the next read tries again."""
        if not self._started:
            threading.Thread(target=self._run, name=f"read-{self._name}", daemon=True).start()
            self._started = True
        self._requests.put(now)

    def end(self) -> None:
        """End the thread when it is idle."""
        self._requests.put(None)

    def _run(self) -> None:
        watch: FileWatch[object] | None = None
        while (now := self._requests.get()) is not None:
            try:
                if watch is None:
                    make = self._make()
                    place = watched_directory(make)
                    if place is not None:
                        self._send(DIRECTORY, os.path.realpath(place))
                    watch = make()
                self._send(ANSWER, watch.poll(now))
            except OSError as error:
                self._send(ERROR, _error_arguments(error))
            except Exception as error:  # noqa: BLE001 - whatever fails in a watch costs that watch alone
                self._send(FAILURE, f"{type(error).__name__}: {error}{_innermost_line(error)}")


def _error_arguments(error: OSError) -> tuple[object, ...]:
    """Arguments to rebuild an OSError, of types that can be pickled."""
    if error.errno is None:
        return tuple(map(str, error.args))
    name = os.fspath(error.filename) if isinstance(error.filename, (str, bytes, os.PathLike)) else None
    return (error.errno, error.strerror or os.strerror(error.errno), name)


def _innermost_line(error: BaseException) -> str:
    """Innermost file and line of an exception's traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"


class _HelperServer:
    """Main loop of the helper process: receives messages, and never blocks on files."""

    def __init__(self, link: int) -> None:
        self._link = link
        self._send_lock = threading.Lock()
        self._threads: dict[int, WatchThread] = {}

    def run(self) -> None:
        """Serve until the other end closes."""
        self._send(READY, 0, b"")
        while (head := read_exactly(self._link, HEAD.size)) is not None:
            length, number, _ = HEAD.unpack(head)
            body = read_exactly(self._link, length)
            if body is None:
                return
            name, now, make = pickle.loads(body)  # noqa: S301 - from the sidecar that started this
            thread = self._threads.get(number)
            if thread is None:
                thread = WatchThread(name, partial(pickle.loads, make), partial(self._send_value, number))
                self._threads[number] = thread
            try:
                thread.request(now)
            except RuntimeError as error:
                self._send_value(number, ERROR, (errno.EAGAIN, str(error), None))

    def _send_value(self, number: int, kind: int, value: object) -> None:
        self._send(kind, number, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def _send(self, kind: int, number: int, body: bytes) -> None:
        with self._send_lock:
            try:
                message = memoryview(HEAD.pack(len(body), number, kind) + body)
                while message:
                    message = message[os.write(self._link, message) :]
            except OSError:
                os.kill(os.getpid(), signal.SIGKILL)  # the sidecar is gone


def read_exactly(link: int, count: int) -> bytes | None:
    """Read ``count`` bytes from a socket; None if the other end closes."""
    found = b""
    while len(found) < count:
        piece = os.read(link, count - len(found))
        if not piece:
            return None
        found = found + piece if found else piece
    return found


def main() -> None:
    """Serve the sidecar at the other end of standard input, and end with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Slurm and terminals signal all processes; the sidecar ends this one
    _end_with_the_parent()
    try:
        _HelperServer(0).run()
    except (OSError, EOFError):
        pass
    os.kill(os.getpid(), signal.SIGKILL)  # a hanging thread must not delay the exit


def _end_with_the_parent() -> None:
    """Let the kernel end this process with its parent thread; the closed socket would do so later."""
    import ctypes  # lazy: the helper alone needs it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
