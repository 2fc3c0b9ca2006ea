"""A log tail that relies on inotify reads the same as one that always polls the file."""

import errno
import logging
import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.logs import inotify_reader, tail_reader
from exporter.logs.inotify_reader import IN_ATTRIB, InotifyWatch, InotifyWatches
from exporter.logs.tail_reader import IDLE_READS, TRUSTED_READS, LogTail


def append(resting_log: Path, text: bytes) -> None:
    with resting_log.open("ab") as out:
        out.write(text)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("inotify_init1", OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
        ("inotify_init1", OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))),
        ("inotify_init1", AttributeError("inotify_init1")),
        ("inotify_add_watch", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    ],
)
def test_without_inotify_one_message_is_logged_and_logs_are_still_read(
    resting_log: Path, call: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, original = list[str](), inotify_reader._call

    def refuse(name: str, *arguments: object) -> int:
        calls.append(name)
        if name == call:
            raise error
        return original(name, *arguments)

    monkeypatch.setattr(inotify_reader, "_call", refuse)
    caplog.set_level(logging.DEBUG)
    wakeups = InotifyWatches()
    tail, found = LogTail(str(resting_log), wakeups), list[bytes]()
    for number in range(3 * TRUSTED_READS):
        wakeups.drain()
        found += tail.read()
        if number == 2 * TRUSTED_READS:
            append(resting_log, b"two\n")
            os.utime(resting_log, (2, 2))
    assert found == [b"one\n", b"two\n"]
    assert calls.count(call) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"inotify is not available, logs are polled instead: {error}"
    ]
    tail.close()
    wakeups.close()


def idle_tail(resting_log: Path, wakeups: InotifyWatches) -> LogTail:
    """A tail of a log that was idle for so long that the tail relies on its watch."""
    tail = LogTail(str(resting_log), wakeups)
    for _ in range(IDLE_READS + 3):
        wakeups.drain()
        list(tail.read())
    assert tail._trusted_reads_left
    return tail


def test_an_idle_log_is_rarely_checked(
    resting_log: Path, wakeups: InotifyWatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, paths, original = idle_tail(resting_log, wakeups), list[bytes](), os.stat

    def stat_of(name: bytes) -> os.stat_result:
        paths.append(name)
        return original(name)

    monkeypatch.setattr(os, "stat", stat_of)
    for _ in range(10 * (TRUSTED_READS + 1)):
        wakeups.drain()
        assert list(tail.read()) == []
    monkeypatch.undo()
    assert paths == [os.fsencode(resting_log)] * 10
    append(resting_log, b"two\n")
    wakeups.drain()
    assert list(tail.read()) == [b"two\n"]


def test_a_change_without_an_event_is_noticed_after_some_reads(resting_log: Path, wakeups: InotifyWatches) -> None:
    tail = idle_tail(resting_log, wakeups)
    directory = resting_log.parent
    directory.rename(directory.with_name("moved"))
    directory.mkdir()
    resting_log.write_bytes(b"two\n")
    found = list[bytes]()
    for _ in range(TRUSTED_READS + 1):
        wakeups.drain()
        found += tail.read()
    assert found == [b"two\n"]


@pytest.mark.parametrize("repeated", [False, True])
def test_a_write_during_the_start_of_a_watch_is_seen_by_the_next_read(
    resting_log: Path, wakeups: InotifyWatches, monkeypatch: pytest.MonkeyPatch, repeated: bool
) -> None:
    tail = idle_tail(resting_log, wakeups) if repeated else LogTail(str(resting_log), wakeups)
    if repeated:  # something has happened that changes nothing
        (number,) = wakeups._watches
        wakeups._apply_events(struct.pack("=iIII", number, IN_ATTRIB, 0, 0))
    begin = wakeups.watch

    def watch(name: str, device: int) -> InotifyWatch | None:
        append(resting_log, b"two\n")
        return begin(name, device)

    monkeypatch.setattr(wakeups, "watch", watch)
    found = b""
    while not resting_log.read_bytes().endswith(b"two\n"):
        wakeups.drain()
        found += b"".join(tail.read())
    wakeups.drain()
    found += b"".join(tail.read())
    assert found.endswith(b"two\n") if repeated else found == b"one\ntwo\n"
    tail.close()


def test_a_log_that_is_written_occasionally_is_not_watched(resting_log: Path, wakeups: InotifyWatches) -> None:
    tail = LogTail(str(resting_log), wakeups)
    for number in range(20):
        for _ in range(IDLE_READS + 1):
            wakeups.drain()
            list(tail.read())
        append(resting_log, b"more\n")
        os.utime(resting_log, (number, number))
        assert wakeups._fd == -1
    tail.close()


def test_a_closed_tail_has_no_watch(resting_log: Path, wakeups: InotifyWatches) -> None:
    tail = idle_tail(resting_log, wakeups)
    assert wakeups._watches
    tail.close()
    assert not wakeups._watches


def test_a_restored_tail_relies_on_its_watch_too(resting_log: Path, wakeups: InotifyWatches) -> None:
    before = LogTail(str(resting_log))
    list(before.read())
    tail = LogTail.restore(str(resting_log), before.state(), wakeups)
    for _ in range(IDLE_READS + 3):
        list(tail.read())
    assert wakeups._watches
    before.close()
    tail.close()


class Log:
    """A log and everything that can happen to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "worker.log"
        self.folder, self.number = folder, 0
        self.append()

    def _record(self) -> bytes:
        self.number += 1
        return b"record %05d of this log, which is like no other\n" % self.number

    def append(self) -> None:
        append(self.path, self._record())

    def begin(self) -> None:
        """Write an unfinished record."""
        append(self.path, self._record()[:20])

    def truncate(self) -> None:
        self.path.write_bytes(b"")

    def outgrow(self) -> None:
        self.path.write_bytes(b"".join(self._record() for _ in range(self.number + 3)))

    def rename(self) -> None:
        if self.path.exists():
            self.path.rename(self.folder / f"worker.log.{1000 - self.number}")

    def rotate(self) -> None:
        self.rename()
        self.append()

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)

    def replace(self) -> None:
        other = self.folder / "other"
        other.write_bytes(self._record())
        other.replace(self.path)

    def copy(self) -> None:
        """Replace the file by a longer copy, as editors do."""
        if self.path.exists():
            other = self.folder / "other"
            other.write_bytes(self.path.read_bytes() + self._record())
            other.replace(self.path)

    def chmod(self) -> None:
        if self.path.exists():
            self.path.chmod(0o600 if self.number % 2 else 0o644)
            self.number += 1

    def settle(self) -> None:
        """Set an old mtime."""
        if self.path.exists():
            os.utime(self.path, (1, 1))

    def link(self) -> None:
        """Write through another hard link."""
        if self.path.exists():
            other = self.folder / "linked"
            other.unlink(missing_ok=True)
            os.link(self.path, other)
            append(other, self._record())
            os.utime(other, (1, 1))

    def swap(self) -> None:
        """Put another file at the path for a while."""
        if self.path.exists():
            self.path.rename(self.folder / "aside")
            self.append()
            (self.folder / "aside").replace(self.path)

    def nothing(self) -> None:
        """No change, the most frequent case."""


CHANGES = ("append", "begin", "truncate", "outgrow", "rename", "rotate", "unlink", "replace", "copy", "chmod")
QUIET = ("nothing", "settle", "link", "swap", "close")


def read_state(tail: LogTail) -> tuple[object, ...]:
    """Everything that one read reports."""
    found = [bytes(buffer[:end]) for buffer, end, _ in tail.read_chunks()]
    return found, tail.size, tail.generation, tail.lag_bytes, tail.mtime, tail.has_more, tail.bytes_read, tail.problem


@given(
    steps=st.lists(st.tuples(st.sampled_from(CHANGES + 2 * QUIET), st.integers(0, 9)), max_size=12),
    skipped=st.booleans(),
)
@example(steps=[("settle", 5), ("append", 5), ("settle", 5), ("link", 5), ("swap", 5)], skipped=False)
@example(steps=[("settle", 5), ("unlink", 5), ("append", 5), ("settle", 5), ("replace", 5)], skipped=False)
@example(steps=[("settle", 6), ("rename", 2), ("append", 2), ("settle", 6), ("outgrow", 2)], skipped=True)
@example(
    steps=[("settle", 6), ("copy", 1), ("settle", 6), ("rotate", 1), ("settle", 6), ("truncate", 1)], skipped=False
)
def test_each_read_is_the_same_with_and_without_inotify(
    local_root: Path, steps: list[tuple[str, int]], skipped: bool
) -> None:
    log, wakeups = Log(Path(tempfile.mkdtemp(dir=local_root))), InotifyWatches()
    polling, with_inotify = LogTail(str(log.path)), LogTail(str(log.path), wakeups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_reader, "IDLE_READS", 1)  # watched after few reads, so that most steps use a watch
        patch.setattr(tail_reader, "TRUSTED_READS", 3)
        with_inotify._reads_until_watch = 1
        if skipped:
            log.settle()
            polling.start_at_end()
            with_inotify.start_at_end()
        for step, reads in steps:
            if step == "close":
                polling.close()
                with_inotify.close()
            else:
                getattr(log, step)()
            for _ in range(reads):
                wakeups.drain()
                assert read_state(with_inotify) == read_state(polling)
    polling.close()
    with_inotify.close()
    assert not wakeups._watches
    wakeups.close()
