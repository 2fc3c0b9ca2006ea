"""Text of reports: times, durations, untrusted text, and ends of workers."""

import re
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exporter.contract.report import EndCause, WorkerName


def clock_text(moment: object) -> str:
    """Local date and time; a dash if unknown."""
    if not isinstance(moment, int | float):
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OSError, OverflowError, ValueError):
        return "-"  # out of range


# what ends a table cell, and what begins code, a tag, an autolink, or the destination of a link or image
_MARKUP = r"(\\*)([|`]|<(?=[A-Za-z/!?])|(?<=\])[(:])"
_BLOCK = r"^(?:(?=[#>~*+\[-])|\d+(?=[.)]))"  # what begins a heading, quote, list, fence or definition


def plain_text(text: object) -> str:
    """User text as one line of Markdown that has no markup: no table cell, code, HTML, link or image."""
    line = " ".join(str(text).split())
    return re.sub(_MARKUP, lambda found: found[1] * 2 + "\\" + found[2], line)


def plain_item(text: object) -> str:
    """User text that begins a list item."""
    return re.sub(_BLOCK, lambda found: found[0] + "\\", plain_text(text))


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


def percent_text(done: float, total: float) -> str:
    """``34.5%``; ``100.0%`` only if all is done."""
    percent = 100 * done / total
    return f"{percent if done >= total else min(percent, 99.9):.1f}%"


def text_width(text: str) -> int:
    """Cells of a terminal that a text takes: Chinese, Japanese and Korean letters take two."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


def _character_width(character: str) -> int:
    from unicodedata import combining, east_asian_width  # lazy: nearly all text is ASCII

    return 0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1


def padded_text(text: str, width: int) -> str:
    """The text with blanks up to ``width`` cells."""
    return text + " " * (width - text_width(text))


def cut_text(text: str, most: int | None) -> str:
    """The text, or its beginning and ``...`` if it takes more than ``most`` cells."""
    if most is None or text_width(text) <= most:
        return text
    ends = accumulate(map(_character_width, text))
    return f"{text[: sum(end <= most - len('...') for end in ends)].rstrip()}..."


def count_text(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def names_text(names: Sequence[str], most: int, total: int | None = None) -> str:
    """``a, b and 3 more``."""
    more = (len(names) if total is None else total) - min(most, len(names))
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def worker_text(entry: "EndCause | WorkerName") -> str:
    """``decode_w0 (rank 2) on cn01``."""
    rank = f" (rank {entry.rank})" if entry.rank is not None else ""
    return f"{entry.worker}{rank} on {entry.node}"


def end_line(end: "EndCause") -> str:
    """The end of a worker: who, when and why."""
    run = f", run {end.run}," if end.run is not None else ""
    return f"{worker_text(end)}{run} ended by {end.reason} at {clock_text(end.time)}: {'; '.join(end.evidence)}"
