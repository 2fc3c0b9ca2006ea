"""Looks at files, each watch on a thread of its own; and the process that does so where files may hang.

Run as ``python -I -B -m exporter.machine.file_helper`` by ``file_host`` with a socket as its standard input. The wire
format is private to the two. A thread that waits for a server that is gone cannot be ended, not even by SIGKILL, and
holds its process until the server is back: so that process is not the sidecar. It ends when the sidecar does.

It imports little: what a watch needs comes with the watch.
"""

import os
import pickle
import signal
import struct
import threading
from _queue import SimpleQueue  # `queue` around it costs more memory than this whole module
from collections.abc import Callable
from typing import Any, Protocol

HEAD = struct.Struct("=IIB")  # before each message: length of what follows, number of the watch, kind
READY, PLACE, ANSWER, ERROR, FAILURE = range(5)
"""Kinds: the helper is up; where the directory really is; the answer of a look; an OSError; another exception."""
PR_SET_PDEATHSIG = 1

Tell = Callable[[int, Any], None]


class FileWatch(Protocol):
    """What is looked at: made and asked on one thread alone, which may wait for ever."""

    def look(self, now: float, /) -> Any:
        """What there is at this moment in epoch seconds, as a value that can be pickled."""
        ...


def watched_directory(make: Callable[[], FileWatch]) -> str | None:
    """The directory that a ``functools.partial`` is about: the first of its arguments that is an absolute path."""
    values = (*getattr(make, "args", ()), *getattr(make, "keywords", {}).values())
    for value in values:
        if isinstance(value, (str, os.PathLike)) and os.path.isabs(value):
            return os.fsdecode(value)
    return None


class WatchThread:
    """One watch on its thread, which begins with the first look."""

    def __init__(self, name: str, make: Callable[[], Callable[[], FileWatch]], tell: Tell) -> None:
        """``make`` gives the maker of the watch; ``tell`` is called on the watch's thread."""
        self._name, self._make, self._tell = name, make, tell
        self._asked: SimpleQueue[float | None] = SimpleQueue()
        self._started = False

    def look(self, now: float) -> None:
        """Begin a look."""
        self._asked.put(now)
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name=f"look-{self._name}", daemon=True).start()

    def end(self) -> None:
        """Let the thread end once it is idle."""
        self._asked.put(None)

    def _run(self) -> None:
        watch: FileWatch | None = None
        while (now := self._asked.get()) is not None:
            try:
                if watch is None:
                    make = self._make()
                    place = watched_directory(make)
                    if place is not None:
                        self._tell(PLACE, os.path.realpath(place))
                    watch = make()
                self._tell(ANSWER, watch.look(now))
            except OSError as error:
                self._tell(ERROR, _plain(error))
            except Exception as error:  # noqa: BLE001 - whatever fails in a watch costs that watch alone
                self._tell(FAILURE, f"{type(error).__name__}: {error}{_innermost_line(error)}")


def _plain(error: OSError) -> tuple[Any, ...]:
    """What an OSError is made from, and of such types that it can be pickled."""
    if error.errno is None:
        return tuple(str(word) for word in error.args)
    name = None if error.filename is None else os.fspath(error.filename) if _is_path(error.filename) else None
    return (error.errno, error.strerror or os.strerror(error.errno), name)


def _is_path(value: object) -> bool:
    return isinstance(value, (str, bytes, os.PathLike))


def _innermost_line(error: BaseException) -> str:
    """The innermost line of an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"


class _HelperServer:
    """The process: takes messages from its socket, and never does anything that could hang on this thread."""

    def __init__(self, link: int) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._lookers: dict[int, WatchThread] = {}

    def run(self) -> None:
        """Until the other end is closed."""
        self._send(READY, 0, b"")
        while (head := read_exactly(self._link, HEAD.size)) is not None:
            length, number, _ = HEAD.unpack(head)
            body = read_exactly(self._link, length)
            if body is None:
                return
            name, now, make = pickle.loads(body)  # noqa: S301 - from the sidecar that started this
            looker = self._lookers.get(number)
            if looker is None:
                looker = self._lookers[number] = WatchThread(name, _unpickled(make), self._teller(number))
            looker.look(now)

    def _teller(self, number: int) -> Tell:
        def tell(kind: int, value: Any) -> None:
            self._send(kind, number, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

        return tell

    def _send(self, kind: int, number: int, body: bytes) -> None:
        with self._sending:
            try:
                message = memoryview(HEAD.pack(len(body), number, kind) + body)
                while message:
                    message = message[os.write(self._link, message) :]
            except OSError:
                os.kill(os.getpid(), signal.SIGKILL)  # nobody is there any more


def _unpickled(make: bytes) -> Callable[[], Callable[[], FileWatch]]:
    def loaded() -> Callable[[], FileWatch]:
        found: Callable[[], FileWatch] = pickle.loads(make)  # noqa: S301 - see above
        return found

    return loaded


def read_exactly(link: int, count: int) -> bytes | None:
    """So many bytes of a socket, or None once the other end is closed."""
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
        signal.signal(number, signal.SIG_IGN)  # Slurm and terminals signal all processes: the sidecar ends this one
    _end_with_the_parent()
    try:
        _HelperServer(0).run()
    except (OSError, EOFError):
        pass
    os.kill(os.getpid(), signal.SIGKILL)  # a thread that hangs must not hold the others up


def _end_with_the_parent() -> None:
    """Have the kernel end this process with the thread that started it; the closed socket does so too, later."""
    import ctypes  # lazy: the helper alone needs it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
