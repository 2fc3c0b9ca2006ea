"""Waits for a condition with a deadline and reports the last value."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")

_SHOWN = 1000  # characters of the last value in a message


def wait_for(
    predicate: Callable[[], T | None],
    timeout: float,
    what: str,
    *,
    logs: Path | None = None,
    interval: float = 0.1,
    retry: tuple[type[Exception], ...] = (),
) -> T:
    """The first true value of `predicate`, or TimeoutError after `timeout` seconds.

    Exceptions named in `retry` mean "not yet"; all others are passed on at once.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            value = predicate()
            if value:
                return value
            seen = f"last value: {value!r}"
        except retry as error:
            seen = f"last error: {error}"
        if time.monotonic() >= end:
            where = f"; logs: {logs}" if logs else ""
            shown = seen if len(seen) <= _SHOWN else seen[:_SHOWN] + "..."
            raise TimeoutError(f"waited {timeout:g} s for {what}; {shown}{where}")
        time.sleep(interval)


def readable(stream: FileDescriptorLike, timeout: float) -> bool:
    """Whether data or end of file is available in time. select(2) does not support large descriptors."""
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    return bool(poller.poll(1000 * max(0.0, timeout)))
