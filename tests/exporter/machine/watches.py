"""Watches for tests: at the top of a module, so that another process can make them."""

import os
import signal
import time


class Told:
    """Answers with what it was made with, how often it was asked, and where it runs."""

    def __init__(self, directory: str, word: str = "") -> None:
        self._word, self._count = word, 0

    def poll(self, now: float) -> tuple[str, int, float, int]:
        self._count += 1
        return self._word, self._count, now, os.getpid()


class Listing:
    """Names in a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def poll(self, now: float) -> list[str]:
        return sorted(os.listdir(self._directory))


class Slow:
    """Takes its time: until a file is there."""

    def __init__(self, directory: str, gate: str) -> None:
        self._gate, self._count = gate, 0

    def poll(self, now: float) -> int:
        while not os.path.exists(self._gate):
            time.sleep(0.005)
        self._count += 1
        return self._count


class Failing:
    """Raises what it is told to."""

    def __init__(self, directory: str, what: str) -> None:
        self._what = what

    def poll(self, now: float) -> object:
        if self._what == "value":
            raise ValueError("not a number")
        if self._what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(10)
        if self._what == "answer":
            return lambda: None
        raise PermissionError(13, "Permission denied", self._what)


class Unmakeable:
    """Cannot be made."""

    def __init__(self, directory: str) -> None:
        raise NotADirectoryError(20, "Not a directory", directory)

    def poll(self, now: float) -> None:
        """Never asked."""
