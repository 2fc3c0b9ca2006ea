"""Lines for ``log.out``, the log of the orchestrator."""

import os
import time


def say(message: str) -> None:
    """A line with the time."""
    show(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}")


def show(line: str) -> None:
    """A line as it is. A full disk under the log costs the line, not the job."""
    try:
        os.write(1, f"{line}\n".encode("utf-8", "surrogateescape"))
    except (OSError, UnicodeError):
        pass
