"""File checks within a time budget, on file systems that may hang."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from exporter.machine.file_host import FileHelperEnded, FileWatch, FileWatchHost, WatchFailed, WatchHandle, WatchHanging
from exporter.machine.mounts import MountPoint
from launcher.verify.files import TRANSIENT

WAIT_S = 0.1  # longest wait for an answer before the time budget is checked again
HANG_LIMIT_S = 30.0  # a file system that hangs, or returns only errors, this long counts as not answering
LATE_S = 5.0  # a slower answer is reported to `ReportProgress`
OVERTIME_S = 1.0  # time allowed for a read that is in progress when the budget ends
RETRY_DELAY_S, MOST_TRIES = 1.0, 4  # delay before the file helper restarts, and the starts allowed

WatchFactory = Callable[[], FileWatch]
OutOfTime = Callable[[], bool]
# Called with files done, files in all, and the mount that does not answer, if any.
ReportProgress = Callable[[int, int, str | None], None]


class FileWorkResult(NamedTuple):
    """Outcome of one piece of work. Incomplete ``facts`` without an error mean that the time was too short."""

    facts: Any = None  # the last facts, complete or not; None without any answer
    sums: tuple[tuple[str, str], ...] = ()
    error: str | None = None  # why the files cannot be read
    silent_mount: str | None = None  # the mount that does not answer
    unread_reason: str | None = None  # why the file helper could not run
    mount: MountPoint | None = None  # where the files are, if known


class _FileWork:
    def __init__(self, handle: WatchHandle) -> None:
        self.handle = handle
        self.facts: Any = None
        self.sums: list[tuple[str, str]] = []
        self.requested_at: float | None = None  # when the read in progress was requested
        self.tries = 0
        # start of the present transient errors, and the last one
        self.transient_error: tuple[float, str] | None = None
        self.retry_at = 0.0
        self.result: FileWorkResult | None = None

    def advance(self, *, is_time_up: bool) -> None:
        """Request the next read unless the time is ``is_time_up``, and take its result if it has arrived."""
        if self.requested_at is None:
            if is_time_up:
                self.finish()
                return
            if time.monotonic() < self.retry_at:
                time.sleep(WAIT_S)
                return
            self.handle.request(time.time())
            self.requested_at = time.monotonic()
        try:
            self._apply(self.handle.result(WAIT_S))
        except WatchHanging as hanging:
            if time.monotonic() - self.requested_at >= HANG_LIMIT_S:
                self.finish(silent_mount=f"mount {hanging.mount}" if hanging.mount else "its file system")
        except FileHelperEnded as error:
            self._handle_helper_end(str(error))
        except WatchFailed as error:
            self.finish(unread_reason=str(error))
        except OSError as error:
            text = error.strerror or str(error)
            if error.errno in TRANSIENT:
                self._handle_transient_error(text)
            else:
                self.finish(error=text)

    def _apply(self, facts: Any) -> None:
        self.facts, self.requested_at, self.transient_error = facts, None, None
        self.sums += getattr(facts, "sums", ())
        if facts.done:
            self.finish()

    def _handle_helper_end(self, reason: str) -> None:
        """The file helper ended: repeat all the work."""
        self.requested_at, self.facts = None, None
        self.sums.clear()
        self.tries += 1
        self.retry_at = time.monotonic() + RETRY_DELAY_S
        if self.tries >= MOST_TRIES:
            self.finish(unread_reason=reason)

    def _handle_transient_error(self, error_text: str) -> None:
        """A transient error: repeat all the work."""
        now = time.monotonic()
        self.requested_at, self.facts = None, None
        self.sums.clear()
        self.transient_error = (self.transient_error[0] if self.transient_error is not None else now, error_text)
        self.retry_at = now + RETRY_DELAY_S
        if now - self.transient_error[0] >= HANG_LIMIT_S:
            self.finish(error=error_text)

    def finish(
        self, *, error: str | None = None, silent_mount: str | None = None, unread_reason: str | None = None
    ) -> None:
        """Set the answer; no more reads follow."""
        if self.transient_error is not None and error is None:
            unread_reason = unread_reason or self.transient_error[1]
        self.result = FileWorkResult(
            self.facts, tuple(self.sums), error, silent_mount, unread_reason, self.handle.filesystem
        )

    @property
    def late_mount(self) -> str | None:
        """The mount that has not answered for `LATE_S` seconds, or None."""
        if self.result is not None or self.requested_at is None or time.monotonic() - self.requested_at < LATE_S:
            return None
        return self.handle.mount or "the file system"


def run_file_work(
    factories: Mapping[str, WatchFactory],
    host: FileWatchHost,
    out_of_time: OutOfTime,
    progress: ReportProgress | None = None,
) -> dict[str, FileWorkResult]:
    """Results by name, at most a few seconds after the time is up, whatever hangs."""
    works = {name: _FileWork(host.watch(name, make)) for name, make in factories.items()}
    end = float("inf")
    while waiting := [work for work in works.values() if work.result is None]:
        if out_of_time():
            end = min(end, time.monotonic() + OVERTIME_S)
        for work in waiting:
            work.advance(is_time_up=end < float("inf"))
            if work.result is None and time.monotonic() >= end:
                work.finish()
        if progress is not None:
            known = [work.facts for work in works.values() if work.facts is not None]
            silent = next((name for work in works.values() if (name := work.late_mount)), None)
            progress(sum(facts.checked for facts in known), sum(facts.files for facts in known), silent)
    return {name: work.result or FileWorkResult() for name, work in works.items()}
