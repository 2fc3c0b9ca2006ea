"""Text of reports: times, durations, untrusted text, and ends of workers."""

import time
from collections.abc import Sequence

from exporter.contract.report import EndCause, WorkerName


def clock_text(moment: object) -> str:
    """Local date and time; a dash if unknown."""
    if not isinstance(moment, int | float):
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def plain_text(text: object) -> str:
    """User text as one line of a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def duration_text(seconds: float | None) -> str:
    """``2h 34m``, ``1m 05s``, ``12s``; a dash if unknown."""
    if seconds is None:
        return "-"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    minutes, left = divmod(total, 60)
    if minutes < 60:
        return f"{minutes}m {left:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours < 24 else f"{hours // 24}d {hours % 24:02d}h"


def names_text(names: Sequence[str], most: int, total: int | None = None) -> str:
    """``a, b and 3 more``."""
    more = (len(names) if total is None else total) - min(most, len(names))
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def worker_text(entry: EndCause | WorkerName) -> str:
    """``decode_w0 (rank 2) on cn01``."""
    rank = f" (rank {entry.rank})" if entry.rank is not None else ""
    return f"{entry.worker}{rank} on {entry.node}"


def end_line(end: EndCause) -> str:
    """The end of a worker: who, when and why."""
    run = f", run {end.run}," if end.run is not None else ""
    return f"{worker_text(end)}{run} ended by {end.reason} at {clock_text(end.time)}: {'; '.join(end.evidence)}"
