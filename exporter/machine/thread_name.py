"""Thread names in the kernel, so that `top -H` shows the cost of each collector."""

import threading
from pathlib import Path

MOST_CHARACTERS = 15  # the kernel's limit (PR_SET_NAME)


def name_thread(name: str) -> None:
    """Name the present thread; only the first 15 characters are used."""
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name[:MOST_CHARACTERS])
    except OSError:
        pass  # names are optional
