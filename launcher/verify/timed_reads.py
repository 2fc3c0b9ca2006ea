"""Looks at files that may hang, from the begin to the end of a piece of work, within the time there is."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from exporter.machine.file_host import FileHelperEnded, FileWatch, FileWatchHost, WatchFailed, WatchHandle, WatchHanging
from exporter.machine.mounts import MountPoint
from launcher.verify.files import TRANSIENT

WAIT_S = 0.1  # between two questions whether there is time left
PATIENCE_S = 30.0  # a file system that has not answered for so long, or with errors alone, does not answer
LATE_S = 5.0  # what is waited for longer is told
OVERTIME_S = 1.0  # what is under way when the time is up may take so long
AGAIN_S, MOST_TRIES = 1.0, 4  # the process that looks at files is started again after this, and not more often

Make = Callable[[], FileWatch]
OutOfTime = Callable[[], bool]
ProgressOf = Callable[[int, int, str | None], None]
"""Is told how many files are done of how many, and what is waited for when something does not answer."""


class FileWorkResult(NamedTuple):
    """What has come of one piece of work."""

    facts: Any = None  # what was known in the end, complete or not; None when there was no answer at all
    sums: tuple[tuple[str, str], ...] = ()
    error: str | None = None  # why nothing can be read,
    silent: str | None = None  # or what does not answer,
    unable: str | None = None  # or why nobody could look; None of them where only the time was too short
    mount: MountPoint | None = None  # where the files are, as far as that is known


class _FileWork:
    """One piece of work and what is known of it."""

    def __init__(self, watched: WatchHandle) -> None:
        self.watched = watched
        self.facts: Any = None
        self.sums: list[tuple[str, str]] = []
        self.asked_at: float | None = None
        """When the look that is under way was begun."""
        self.tries = 0
        self.failing: tuple[float, str] | None = None
        """Since when there are errors that may pass, and what the last of them says."""
        self.not_before = 0.0
        self.answer: FileWorkResult | None = None

    def advance(self, *, over: bool) -> None:
        """Ask unless the time is ``over``, and take the answer when it is there."""
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
        """Nobody could look: have all of it done anew."""
        self.asked_at, self.facts = None, None
        self.sums.clear()
        self.tries += 1
        self.not_before = time.monotonic() + AGAIN_S
        if self.tries >= MOST_TRIES:
            self.end(unable=why)

    def _wait_for(self, words: str) -> None:
        """It has failed in a way that may pass: have all of it done anew."""
        now = time.monotonic()
        self.asked_at, self.facts = None, None
        self.sums.clear()
        self.failing = (self.failing[0] if self.failing is not None else now, words)
        self.not_before = now + AGAIN_S
        if now - self.failing[0] >= PATIENCE_S:
            self.end(error=words)

    def end(self, *, error: str | None = None, silent: str | None = None, unable: str | None = None) -> None:
        """Nothing more will come."""
        if self.failing is not None and error is None:
            unable = unable or self.failing[1]
        self.answer = FileWorkResult(self.facts, tuple(self.sums), error, silent, unable, self.watched.filesystem)

    @property
    def waits_for(self) -> str | None:
        """What has not answered for some time."""
        if self.answer is not None or self.asked_at is None or time.monotonic() - self.asked_at < LATE_S:
            return None
        return self.watched.mount or "the file system"


def run_file_work(
    makes: Mapping[str, Make], host: FileWatchHost, out_of_time: OutOfTime, progress: ProgressOf | None = None
) -> dict[str, FileWorkResult]:
    """The answers by name; never later than a few seconds after the time is up, whatever hangs."""
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
