"""File checks within a time budget, on file systems that may hang."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from exporter.machine.file_helper import FileWatch
from exporter.machine.file_host import FileHelperEnded, FileWatchHost, WatchFailed, WatchHandle, WatchHanging
from exporter.machine.mounts import MountPoint
from launcher.verify.files import TRANSIENT, VerifiedFiles, VerifiedOutput

WAIT_S = 0.1  # longest wait for an answer before the time budget is checked again
HANG_LIMIT_S = 30.0  # a file system that hangs, or returns only errors, this long counts as not answering
LATE_S = 5.0  # a slower answer is reported to `ReportProgress`
OVERTIME_S = 1.0  # time allowed for a read that is in progress when the budget ends
RETRY_DELAY_S, MOST_TRIES = 1.0, 4  # delay before the file helper restarts, and the starts allowed

WatchFactory = Callable[[], FileWatch[VerifiedFiles]]
OutOfTime = Callable[[], bool]
# Called with files done, files in all, and the mount that does not answer, if any.
ReportProgress = Callable[[int, int, str | None], None]


class FileWorkResult(NamedTuple):
    """Outcome of one piece of work. Incomplete ``facts`` without an error mean that the time was too short."""

    facts: VerifiedFiles | None = None  # the last facts, complete or not; None without any answer
    sums: tuple[tuple[str, str], ...] = ()
    error: str | None = None  # why the files cannot be read
    silent_mount: str | None = None  # the mount that does not answer
    unread_reason: str | None = None  # why the file helper could not run
    mount: MountPoint | None = None  # where the files are, if known


class _FileWork:
    def __init__(self, handle: WatchHandle[VerifiedFiles]) -> None:
        self.handle = handle
        self.facts: VerifiedFiles | None = None
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
            self._repeat_later()
            self.tries += 1
            if self.tries >= MOST_TRIES:
                self.finish(unread_reason=str(error))
        except WatchFailed as error:
            self.finish(unread_reason=str(error))
        except OSError as error:
            self._handle_error(error.strerror or str(error), is_transient=error.errno in TRANSIENT)

    def _apply(self, facts: VerifiedFiles) -> None:
        self.facts, self.requested_at, self.transient_error = facts, None, None
        if isinstance(facts, VerifiedOutput):
            self.sums += facts.sums
        if facts.done:
            self.finish()

    def _repeat_later(self) -> None:
        """Repeat all the work after a while."""
        self.requested_at, self.facts = None, None
        self.sums.clear()
        self.retry_at = time.monotonic() + RETRY_DELAY_S

    def _handle_error(self, text: str, *, is_transient: bool) -> None:
        """Repeat the work after a transient error, for some time."""
        if not is_transient:
            self.finish(error=text)
            return
        now = time.monotonic()
        self._repeat_later()
        self.transient_error = (self.transient_error[0] if self.transient_error is not None else now, text)
        if now - self.transient_error[0] >= HANG_LIMIT_S:
            self.finish(error=text)

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
