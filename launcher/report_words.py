"""How moments and foreign texts stand in the report for people."""

import time


def clock(moment: object) -> str:
    """A moment on this machine's clock; a dash when it is not known."""
    if not isinstance(moment, int | float):
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def plain(text: object) -> str:
    """One line for a table: user text can hold anything."""
    return " ".join(str(text).replace("|", "\\|").split())
