"""Watches for tests, at module level so that the file helper can create them."""

import os
import signal
import time


class Echo:
    """Returns its argument, its number of polls, the time and its pid."""

    def __init__(self, directory: str, label: str = "") -> None:
        self._label, self._count = label, 0

    def poll(self, now: float) -> tuple[str, int, float, int]:
        self._count += 1
        return self._label, self._count, now, os.getpid()


class Listing:
    """Names in a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def poll(self, now: float) -> list[str]:
        return sorted(os.listdir(self._directory))


class Slow:
    """Waits in each poll until a file exists."""

    def __init__(self, directory: str, gate: str) -> None:
        self._gate, self._count = gate, 0

    def poll(self, now: float) -> int:
        while not os.path.exists(self._gate):
            time.sleep(0.005)
        self._count += 1
        return self._count


class Failing:
    """Fails in the given way."""

    def __init__(self, directory: str, failure: str) -> None:
        self._failure = failure

    def poll(self, now: float) -> object:
        if self._failure == "value":
            raise ValueError("not a number")
        if self._failure == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(10)
        if self._failure == "answer":
            return lambda: None
        raise PermissionError(13, "Permission denied", self._failure)


class FailingConstructor:
    """Fails in its constructor."""

    def __init__(self, directory: str) -> None:
        raise NotADirectoryError(20, "Not a directory", directory)

    def poll(self, now: float) -> None:
        """Never called."""
