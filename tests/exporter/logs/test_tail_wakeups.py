"""A log tail that goes by watches sees what one sees that always asks the file itself."""

import errno
import logging
import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.logs import tail_reader as tail_module
from exporter.logs import inotify_reader as module
from exporter.logs.tail_reader import IDLE_READS, TRUSTED_READS, LogTail
from exporter.logs.inotify_reader import IN_ATTRIB, InotifyWatches, InotifyWatch


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
def test_where_the_kernel_refuses_it_is_said_once_and_logs_are_read_all_the_same(
    resting_log: Path, call: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, ask = list[str](), module._call

    def refuse(name: str, *arguments: object) -> int:
        calls.append(name)
        if name == call:
            raise error
        return ask(name, *arguments)

    monkeypatch.setattr(module, "_call", refuse)
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
    assert [record.getMessage() for record in caplog.records] == [f"inotify is not available, logs are polled instead: {error}"]
    tail.close()
    wakeups.close()


def rested(resting_log: Path, wakeups: InotifyWatches) -> LogTail:
    """A tail of a log to which nothing has been written for so long that it goes by its watch."""
    tail = LogTail(str(resting_log), wakeups)
    for _ in range(IDLE_READS + 3):
        wakeups.drain()
        list(tail.read())
    assert tail._trusted_reads_left
    return tail


def test_a_log_at_rest_is_not_asked_but_now_and_then(
    resting_log: Path, wakeups: InotifyWatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, asked, ask = rested(resting_log, wakeups), list[bytes](), os.stat

    def stat_of(name: bytes) -> os.stat_result:
        asked.append(name)
        return ask(name)

    monkeypatch.setattr(os, "stat", stat_of)
    for _ in range(10 * (TRUSTED_READS + 1)):
        wakeups.drain()
        assert list(tail.read()) == []
    monkeypatch.undo()
    assert asked == [os.fsencode(resting_log)] * 10
    append(resting_log, b"two\n")
    wakeups.drain()
    assert list(tail.read()) == [b"two\n"]


def test_what_makes_no_event_is_seen_after_some_looks(resting_log: Path, wakeups: InotifyWatches) -> None:
    tail = rested(resting_log, wakeups)
    directory = resting_log.parent
    directory.rename(directory.with_name("moved"))
    directory.mkdir()
    resting_log.write_bytes(b"two\n")
    found = list[bytes]()
    for _ in range(TRUSTED_READS + 1):
        wakeups.drain()
        found += tail.read()
    assert found == [b"two\n"]


@pytest.mark.parametrize("again", [False, True])
def test_what_is_written_while_the_watch_is_begun_is_seen_by_the_next_look(
    resting_log: Path, wakeups: InotifyWatches, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    tail = rested(resting_log, wakeups) if again else LogTail(str(resting_log), wakeups)
    if again:  # something has happened that changes nothing
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
    assert found.endswith(b"two\n") if again else found == b"one\ntwo\n"
    tail.close()


def test_a_log_that_is_written_to_now_and_then_is_not_watched(resting_log: Path, wakeups: InotifyWatches) -> None:
    tail = LogTail(str(resting_log), wakeups)
    for number in range(20):
        for _ in range(IDLE_READS + 1):
            wakeups.drain()
            list(tail.read())
        append(resting_log, b"more\n")
        os.utime(resting_log, (number, number))
        assert wakeups._fd == -1
    tail.close()


def test_a_tail_that_is_closed_has_no_watch(resting_log: Path, wakeups: InotifyWatches) -> None:
    tail = rested(resting_log, wakeups)
    assert wakeups._watches
    tail.close()
    assert not wakeups._watches


def test_a_tail_that_was_restored_goes_by_its_watch_too(resting_log: Path, wakeups: InotifyWatches) -> None:
    before = LogTail(str(resting_log))
    list(before.read())
    tail = LogTail.restore(str(resting_log), before.state(), wakeups)
    for _ in range(IDLE_READS + 3):
        list(tail.read())
    assert wakeups._watches
    before.close()
    tail.close()


class Log:
    """A log at one resting_log and what can happen to it."""

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
        """A record whose end comes later, or never."""
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
        """As an editor does it: the same text, and more, in another file."""
        if self.path.exists():
            other = self.folder / "other"
            other.write_bytes(self.path.read_bytes() + self._record())
            other.replace(self.path)

    def chmod(self) -> None:
        if self.path.exists():
            self.path.chmod(0o600 if self.number % 2 else 0o644)
            self.number += 1

    def settle(self) -> None:
        """Long ago written to, as far as its time tells."""
        if self.path.exists():
            os.utime(self.path, (1, 1))

    def link(self) -> None:
        """Written to by another name."""
        if self.path.exists():
            other = self.folder / "linked"
            other.unlink(missing_ok=True)
            os.link(self.path, other)
            append(other, self._record())
            os.utime(other, (1, 1))

    def swap(self) -> None:
        """Another file is at the resting_log for a while."""
        if self.path.exists():
            self.path.rename(self.folder / "aside")
            self.append()
            (self.folder / "aside").replace(self.path)

    def nothing(self) -> None:
        """So it is mostly."""


HAPPENINGS = ("append", "begin", "truncate", "outgrow", "rename", "rotate", "unlink", "replace", "copy", "chmod")
QUIET = ("nothing", "settle", "link", "swap", "close")


def told(tail: LogTail) -> tuple[object, ...]:
    """What a look tells."""
    found = [bytes(buffer[:end]) for buffer, end, _ in tail.read_chunks()]
    return found, tail.size, tail.generation, tail.lag_bytes, tail.mtime, tail.has_more, tail.bytes_read, tail.problem


@given(
    steps=st.lists(st.tuples(st.sampled_from(HAPPENINGS + 2 * QUIET), st.integers(0, 9)), max_size=12),
    passed_over=st.booleans(),
)
@example(steps=[("settle", 5), ("append", 5), ("settle", 5), ("link", 5), ("swap", 5)], passed_over=False)
@example(steps=[("settle", 5), ("unlink", 5), ("append", 5), ("settle", 5), ("replace", 5)], passed_over=False)
@example(steps=[("settle", 6), ("rename", 2), ("append", 2), ("settle", 6), ("outgrow", 2)], passed_over=True)
@example(
    steps=[("settle", 6), ("copy", 1), ("settle", 6), ("rotate", 1), ("settle", 6), ("truncate", 1)], passed_over=False
)
def test_look_by_look_a_tail_sees_the_same_with_and_without_wakeups(
    local_root: Path, steps: list[tuple[str, int]], passed_over: bool
) -> None:
    log, wakeups = Log(Path(tempfile.mkdtemp(dir=local_root))), InotifyWatches()
    plain, woken = LogTail(str(log.path)), LogTail(str(log.path), wakeups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "IDLE_READS", 1)  # what is watched soon is watched often
        patch.setattr(tail_module, "TRUSTED_READS", 3)
        woken._reads_until_watch = 1
        if passed_over:
            log.settle()
            plain.start_at_end()
            woken.start_at_end()
        for step, looks in steps:
            if step == "close":
                plain.close()
                woken.close()
            else:
                getattr(log, step)()
            for _ in range(looks):
                wakeups.drain()
                assert told(woken) == told(plain)
    plain.close()
    woken.close()
    assert not wakeups._watches
    wakeups.close()
