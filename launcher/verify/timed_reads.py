"""File checks within a time budget, on file systems that may hang."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from exporter.machine.file_host import FileHelperEnded, FileWatch, FileWatchHost, WatchFailed, WatchHandle, WatchHanging
from exporter.machine.mounts import MountPoint
from launcher.verify.files import TRANSIENT

WAIT_S = 0.1  # longest wait for an answer before the time budget is checked again
PATIENCE_S = 30.0  # a file system that hangs, or returns only errors, this long counts as not answering
LATE_S = 5.0  # a slower answer is reported to `ProgressOf`
OVERTIME_S = 1.0  # time allowed for a read that is in progress when the budget ends
AGAIN_S, MOST_TRIES = 1.0, 4  # delay before the file helper restarts, and the starts allowed

Make = Callable[[], FileWatch]
OutOfTime = Callable[[], bool]
# Called with files done, files in all, and the mount that does not answer, if any.
ProgressOf = Callable[[int, int, str | None], None]


class FileWorkResult(NamedTuple):
    """Outcome of one piece of work. Incomplete ``facts`` without an error mean that the time was too short."""

    facts: Any = None  # the last facts, complete or not; None without any answer
    sums: tuple[tuple[str, str], ...] = ()
    error: str | None = None  # why the files cannot be read
    silent: str | None = None  # the mount that does not answer
    unable: str | None = None  # why the file helper could not run
    mount: MountPoint | None = None  # where the files are, if known


class _FileWork:
    def __init__(self, watched: WatchHandle) -> None:
        self.watched = watched
        self.facts: Any = None
        self.sums: list[tuple[str, str]] = []
        self.asked_at: float | None = None  # when the read in progress was requested
        self.tries = 0
        # start of the present transient errors, and the last one
        self.failing: tuple[float, str] | None = None
        self.not_before = 0.0
        self.answer: FileWorkResult | None = None

    def advance(self, *, over: bool) -> None:
        """Request the next read unless the time is ``over``, and take its result if it has arrived."""
        if self.asked_at is None:
            if over:
                self.end()
                return
            if time.monotonic() < self.not_before:
                time.sleep(WAIT_S)
                return
            self.watched.request(time.time())
            self.asked_at = time.monotonic()
        try:
            self._take(self.watched.result(WAIT_S))
        except WatchHanging as hanging:
            if time.monotonic() - self.asked_at >= PATIENCE_S:
                self.end(silent=f"mount {hanging.mount}" if hanging.mount else "its file system")
        except FileHelperEnded as error:
            self._try_again(str(error))
        except WatchFailed as error:
            self.end(unable=str(error))
        except OSError as error:
            words = error.strerror or str(error)
            if error.errno in TRANSIENT:
                self._wait_for(words)
            else:
                self.end(error=words)

    def _take(self, facts: Any) -> None:
        self.facts, self.asked_at, self.failing = facts, None, None
        self.sums += getattr(facts, "sums", ())
        if facts.done:
            self.end()

    def _try_again(self, why: str) -> None:
        """The file helper ended: repeat all the work."""
        self.asked_at, self.facts = None, None
        self.sums.clear()
        self.tries += 1
        self.not_before = time.monotonic() + AGAIN_S
        if self.tries >= MOST_TRIES:
            self.end(unable=why)

    def _wait_for(self, words: str) -> None:
        """A transient error: repeat all the work."""
        now = time.monotonic()
        self.asked_at, self.facts = None, None
        self.sums.clear()
        self.failing = (self.failing[0] if self.failing is not None else now, words)
        self.not_before = now + AGAIN_S
        if now - self.failing[0] >= PATIENCE_S:
            self.end(error=words)

    def end(self, *, error: str | None = None, silent: str | None = None, unable: str | None = None) -> None:
        """Set the answer; no more reads follow."""
        if self.failing is not None and error is None:
            unable = unable or self.failing[1]
        self.answer = FileWorkResult(self.facts, tuple(self.sums), error, silent, unable, self.watched.filesystem)

    @property
    def waits_for(self) -> str | None:
        """The mount that has not answered for `LATE_S` seconds, or None."""
        if self.answer is not None or self.asked_at is None or time.monotonic() - self.asked_at < LATE_S:
            return None
        return self.watched.mount or "the file system"


def run_file_work(
    makes: Mapping[str, Make], host: FileWatchHost, out_of_time: OutOfTime, progress: ProgressOf | None = None
) -> dict[str, FileWorkResult]:
    """Results by name, at most a few seconds after the time is up, whatever hangs."""
    works = {name: _FileWork(host.watch(name, make)) for name, make in makes.items()}
    end = float("inf")
    while waiting := [work for work in works.values() if work.answer is None]:
        if out_of_time():
            end = min(end, time.monotonic() + OVERTIME_S)
        for work in waiting:
            work.advance(over=end < float("inf"))
            if work.answer is None and time.monotonic() >= end:
                work.end()
        if progress is not None:
            known = [work.facts for work in works.values() if work.facts is not None]
            silent = next((name for work in works.values() if (name := work.waits_for)), None)
            progress(sum(facts.looked for facts in known), sum(facts.files for facts in known), silent)
    return {name: work.answer or FileWorkResult() for name, work in works.items()}
