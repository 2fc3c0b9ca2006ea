"""Files of a folder, followed over many polls."""

import fnmatch
import itertools
import os
import random
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.files.outputs import folder_reader
from exporter.files.outputs.folder_reader import NOBODY, FolderWatch
from exporter.files.outputs.outputs_reader import FileOwnership
from tests.support.exporter import change_listings

START = 1_700_000_000.0


def rank_of(name: str) -> int | None:
    """The digit after ``rank``."""
    _, found, owns_rest = name.partition("rank")
    return int(owns_rest[0]) if found and owns_rest[:1].isascii() and owns_rest[:1].isdigit() else None


def watch_of(directory: Path, pattern: str = "*", ours: tuple[int, ...] = (), *, owns_rest: bool = True) -> FolderWatch:
    others = frozenset(range(10)) - frozenset(ours)
    return FolderWatch(str(directory), pattern, FileOwnership(rank_of, frozenset(ours), others, owns_rest))


def polled(directory: Path, pattern: str = "*") -> FolderWatch:
    """A watch after its first poll."""
    watch = watch_of(directory, pattern)
    watch.poll(START)
    return watch


def facts_of(watch: FolderWatch) -> dict[int, tuple[int, int, float | None]]:
    """Number, bytes and newest mtime of the files of each owner."""
    return {
        owner: (found.files, found.bytes, found.newest_mtime) for owner, found in watch.totals.items() if found.files
    }


def plain_scan(directory: Path, pattern: str, owner_of: FileOwnership) -> dict[int, tuple[int, int, float | None]]:
    """The same facts from one plain scan."""
    found: dict[int, tuple[int, int, float | None]] = {}
    for name in os.listdir(directory):
        if (name.startswith(".") and not pattern.startswith(".")) or not fnmatch.fnmatchcase(name, pattern):
            continue
        facts, owner = os.lstat(directory / name), owner_of(name)
        if owner is None or not stat.S_ISREG(facts.st_mode):
            continue
        files, size, newest = found.get(owner, (0, 0, None))
        newest = facts.st_mtime if newest is None else max(newest, facts.st_mtime)
        found[owner] = (files + 1, size + facts.st_size, newest)
    return found


def write(path: Path, size: int, mtime: float = START) -> None:
    path.write_bytes(b"x" * size)
    os.utime(path, (mtime, mtime))


def test_files_are_counted_with_size_and_mtime(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 10)
    write(tmp_path / "b.jsonl", 20, START + 5)
    write(tmp_path / "notes.txt", 40, START + 9)
    watch = polled(tmp_path, "*.jsonl")
    assert watch.complete
    assert facts_of(watch) == {NOBODY: (2, 30, START + 5)}
    assert watch.changes == []


def test_files_of_a_folder_that_appears_later_are_new(tmp_path: Path) -> None:
    watch = polled(tmp_path / "out")
    assert (watch.complete, facts_of(watch)) == (True, {})
    (tmp_path / "out").mkdir()
    write(tmp_path / "out" / "a", 10)
    watch.poll(START + 5)
    assert facts_of(watch) == {NOBODY: (1, 10, START)}
    assert (watch.totals[NOBODY].new_files, watch.totals[NOBODY].new_bytes) == (1, 10)
    shutil.rmtree(tmp_path / "out")
    watch.poll(START + 10)
    assert facts_of(watch) == {}


def test_a_file_in_place_of_the_folder_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    watch = polled(tmp_path / "out")
    assert facts_of(watch) == {}


def test_an_unreadable_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(tmp_path)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        watch.poll(START)


def test_entries_that_are_not_regular_files_are_skipped_and_reported(tmp_path: Path) -> None:
    write(tmp_path / "a", 10)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "fifo")
    watch = polled(tmp_path)
    assert facts_of(watch) == {NOBODY: (1, 10, START)}
    assert watch.passed_over == {"folder": "directory", "link": "link", "dangling": "link", "fifo": "FIFO"}


def test_a_fifo_that_becomes_a_file_counts_and_vice_versa(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    write(tmp_path / "b", 10)
    watch = polled(tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "b").unlink()
    write(tmp_path / "a", 7)
    os.mkfifo(tmp_path / "b")
    watch.poll(START + 70)
    assert facts_of(watch) == {NOBODY: (1, 7, START)}
    assert watch.passed_over == {"b": "FIFO"}


def test_only_the_first_names_of_skipped_entries_are_kept(tmp_path: Path) -> None:
    for number in range(folder_reader.MOST_PASSED_OVER + 5):
        (tmp_path / str(number)).mkdir()
    watch = polled(tmp_path)
    assert len(watch.passed_over) == folder_reader.MOST_PASSED_OVER


def test_hard_names_and_names_that_are_not_utf8_count(tmp_path: Path, hard_name: str) -> None:
    write(tmp_path / f"out_{hard_name}", 3)
    write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/out_\xff")), 4)
    watch = polled(tmp_path, "out_*")
    assert facts_of(watch) == {NOBODY: (2, 7, START)}


def test_a_folder_is_rescanned_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", 1)
    scans: list[int] = []
    real = os.scandir

    def scandir(place: int) -> object:
        scans.append(place)
        return real(place)

    monkeypatch.setattr(os, "scandir", scandir)
    watch = polled(tmp_path)
    watch.poll(START + 5)  # names may have appeared at the moment of the first scan
    for number in range(2, 10):
        watch.poll(START + 5 * number)
    assert len(scans) == 2
    write(tmp_path / "b", 1)
    watch.poll(START + 50)
    assert (len(scans), facts_of(watch)[NOBODY][0]) == (3, 2)


def test_a_folder_is_rescanned_after_a_minute_in_any_case(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    os.utime(tmp_path, (START, START))
    watch.poll(START)
    watch.poll(START + 5)
    write(tmp_path / "a", 1)
    os.utime(tmp_path, (START, START))  # as with a stale attribute cache
    watch.poll(START + 10)
    assert facts_of(watch) == {}
    watch.poll(START + 70)
    assert facts_of(watch)[NOBODY][0] == 1


def test_a_change_in_the_same_tick_as_the_scan_is_found_soon(tmp_path: Path) -> None:
    os.utime(tmp_path, (START, START))
    watch = polled(tmp_path)
    write(tmp_path / "a", 1)
    os.utime(tmp_path, (START, START))
    watch.poll(START + 1)
    assert facts_of(watch) == {}
    watch.poll(START + 3)
    assert facts_of(watch)[NOBODY][0] == 1


class CpuClock:
    """A CPU clock that advances between the beginning and the end of each piece of work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
        self.moment, self.step_s, self.is_end = 0.0, step_s, True
        monkeypatch.setattr("exporter.files.outputs.folder_reader.time.thread_time", self.thread_time)

    def thread_time(self) -> float:
        self.is_end = not self.is_end
        self.moment += self.step_s * self.is_end
        return self.moment


def test_names_take_a_small_share_of_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_reader, "MOST_RUN", 4)
    for number in range(200):
        write(tmp_path / f"{number}", 1)
    watch, clock, now = watch_of(tmp_path), CpuClock(monkeypatch, 0.02), START
    while not watch.complete:
        watch.poll(now := now + 1)
    assert clock.moment <= folder_reader.FIRST_SHARE * (now - START) + 2 * folder_reader.MOST_SAVED_S
    started, first = now, clock.moment
    for poll in range(300):
        write(tmp_path / f"{poll % 20}.new", poll)
        watch.poll(now := now + 10)
    assert clock.moment - first <= folder_reader.SHARE * (now - started) + 2 * folder_reader.MOST_SAVED_S
    assert facts_of(watch)[NOBODY][0] == 220


def test_a_change_is_reported_with_the_previous_state(tmp_path: Path) -> None:
    write(tmp_path / "a", 10)
    watch = polled(tmp_path)
    write(tmp_path / "a", 30, START + 7)
    watch.poll(START + 10)
    (change,) = watch.changes
    assert (change.owner, change.mtime, change.size, change.before) == (NOBODY, START + 7, 30, (START, 10))
    assert watch.totals[NOBODY].changed_at == START + 10
    watch.poll(START + 15)
    assert watch.changes == []


def test_a_renamed_file_is_not_new(tmp_path: Path) -> None:
    write(tmp_path / "a", 10)
    watch = polled(tmp_path)
    write(tmp_path / "a", 20, START + 5)
    watch.poll(START + 5)
    number = watch.changes[0].file
    (tmp_path / "a").rename(tmp_path / "b")
    with (tmp_path / "b").open("ab") as out:
        out.write(b"x" * 5)
    os.utime(tmp_path / "b", (START, START + 9))
    watch.poll(START + 10)
    assert facts_of(watch) == {NOBODY: (1, 25, START + 9)}
    assert watch.totals[NOBODY].new_bytes == 0
    assert [(change.file, change.size, change.before) for change in watch.changes] == [(number, 25, (START + 5, 20))]


def test_after_a_rotation_only_the_new_file_is_new(tmp_path: Path) -> None:
    write(tmp_path / "a", 100)
    watch = polled(tmp_path)
    (tmp_path / "a").rename(tmp_path / "a.1")
    write(tmp_path / "a", 3, START + 8)
    watch.poll(START + 10)
    assert facts_of(watch) == {NOBODY: (2, 103, START + 8)}
    assert (watch.totals[NOBODY].new_files, watch.totals[NOBODY].new_bytes) == (1, 3)


def test_a_file_renamed_into_place_is_new_with_all_its_bytes(tmp_path: Path) -> None:
    watch = polled(tmp_path, "*.json")
    write(tmp_path / "a.json.tmp", 50)
    watch.poll(START + 5)
    (tmp_path / "a.json.tmp").rename(tmp_path / "a.json")
    watch.poll(START + 10)
    assert (watch.totals[NOBODY].new_files, watch.totals[NOBODY].new_bytes) == (1, 50)


def test_a_file_that_vanishes_during_a_scan_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2)
    real = os.stat

    def vanished(path: str, **facts: object) -> os.stat_result:
        if path == "b":
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, **facts)  # type: ignore[arg-type]

    watch = watch_of(tmp_path)
    monkeypatch.setattr(os, "stat", vanished)
    watch.poll(START)
    assert facts_of(watch) == {NOBODY: (1, 1, START)}
    monkeypatch.setattr(os, "stat", real)
    watch.poll(START + 5)
    assert facts_of(watch) == {NOBODY: (2, 3, START)}


def test_a_deleted_file_is_noticed_despite_an_old_mtime_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2, START + 9)
    os.utime(tmp_path, (START, START))
    watch = polled(tmp_path)
    watch.poll(START + 5)
    (tmp_path / "b").unlink()
    os.utime(tmp_path, (START, START))
    watch.poll(START + 10)
    watch.poll(START + 15)
    assert facts_of(watch) == {NOBODY: (1, 1, START)}


def test_the_newest_mtime_may_go_back(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2, START + 9)
    watch = polled(tmp_path)
    os.utime(tmp_path / "b", (START, START + 3))
    watch.poll(START + 5)
    assert facts_of(watch) == {NOBODY: (2, 3, START + 3)}


def test_a_file_that_cannot_be_read_is_reported_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2)
    real = os.stat

    def refuse(path: str, **facts: object) -> os.stat_result:
        if path == "b":
            raise PermissionError(13, "Permission denied")
        return real(path, **facts)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refuse)
    watch = polled(tmp_path)
    assert facts_of(watch) == {NOBODY: (1, 1, START)}
    assert watch.unreadable == "Permission denied"


def test_a_first_scan_may_take_several_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        write(tmp_path / str(number), 1)
    monkeypatch.setattr(folder_reader, "MOST_RUN", 4)
    watch, polls = watch_of(tmp_path), 0
    CpuClock(monkeypatch, 0.001)
    monkeypatch.setattr(folder_reader, "MOST_SAVED_S", 0.002)
    while not watch.complete:
        watch.poll(START + polls)
        polls += 1
        assert polls < 100
    assert polls > 5
    assert facts_of(watch) == {NOBODY: (50, 50, START)}
    assert watch.totals[NOBODY].new_files == 0


def test_cold_files_are_polled_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_reader, "HOT_LEAST", 2)
    monkeypatch.setattr(folder_reader, "OTHERS_POLLED", 8)
    for number in range(64):
        write(tmp_path / f"{number:02d}", 1, START + number)
    watch = polled(tmp_path)
    assert sorted(file.name for file in watch.hot.values()) == ["62", "63"]
    write(tmp_path / "05", 100, START + 100)
    for poll in range(1, 10):
        watch.poll(START + 5 * poll)
    assert facts_of(watch) == {NOBODY: (64, 163, START + 100)}
    assert "05" in {file.name for file in watch.hot.values()}
    for poll in range(10, 60):
        watch.poll(START + 5 * poll)
    assert {file.name for file in watch.hot.values()} == {"05", "63"}


def test_the_number_of_hot_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_reader, "HOT_LEAST", 2)
    monkeypatch.setattr(folder_reader, "HOT_MOST", 5)
    watch = polled(tmp_path)
    for number in range(30):
        write(tmp_path / str(number), 1)
    watch.poll(START + 5)
    assert len(watch.hot) == 5
    assert facts_of(watch)[NOBODY][0] == 30


def test_inodes_that_change_with_each_scan_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1200):
        (tmp_path / str(number)).touch()
    inodes = itertools.count()

    class Entry:
        def __init__(self, entry: "os.DirEntry[str]") -> None:
            self.name = entry.name

        def inode(self) -> int:
            return next(inodes)

    change_listings(monkeypatch, lambda entries: map(Entry, entries))
    watch = watch_of(tmp_path)
    for poll in range(4):
        write(tmp_path / f"new{poll}", 1)
        watch.poll(START + 70 * poll)
    assert facts_of(watch)[NOBODY][:2] == (1204, 4)


@pytest.mark.parametrize("keep", [1, 3, 40, 199])
def test_names_are_recognized_in_another_order_and_after_deletions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    for number in range(200):
        write(tmp_path / str(number), 1)
    watch = polled(tmp_path)
    for number in range(200):
        if number % 200 >= keep:
            (tmp_path / str(number)).unlink()
    watch.poll(START + 100)
    assert facts_of(watch)[NOBODY][:2] == (keep, keep)
    for number in range(300, 350):
        write(tmp_path / str(number), 1)
    watch.poll(START + 200)
    change_listings(monkeypatch, lambda entries: random.Random(keep).sample(entries, len(entries)))
    watch.poll(START + 300)
    watch.poll(START + 400)
    assert facts_of(watch)[NOBODY][:2] == (keep + 50, keep + 50)
    assert watch.totals[NOBODY].new_files == 50


NAMES = st.sampled_from(["a", "b", "rank1.x", "rank2.x", "rank3.x", ".hidden", "c.tmp", "z\nz"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), NAMES, st.integers(0, 50)),
        st.tuples(st.just("append"), NAMES, st.integers(1, 50)),
        st.tuples(st.just("truncate"), NAMES, st.integers(0, 20)),
        st.tuples(st.just("rename"), NAMES, NAMES),
        st.tuples(st.just("delete"), NAMES, st.just(0)),
        st.tuples(st.just("directory"), NAMES, st.just(0)),
        st.tuples(st.just("fifo"), NAMES, st.just(0)),
        st.tuples(st.just("link"), NAMES, NAMES),
        st.tuples(st.just("poll"), st.just(""), st.integers(0, 100)),
    ),
    max_size=30,
)


def apply_step(directory: Path, kind: str, name: str, argument: int | str) -> None:
    """Carry out one step, or skip it if it is impossible."""
    path = directory / name
    try:
        if kind == "create":
            path.unlink(missing_ok=True)
            path.write_bytes(b"x" * int(argument))
        elif kind == "append":
            with path.open("r+b") as out:
                out.seek(0, os.SEEK_END)
                out.write(b"y" * int(argument))
        elif kind == "truncate":
            os.truncate(path, int(argument))
        elif kind == "rename":
            path.rename(directory / str(argument))
        elif kind == "delete":
            path.rmdir() if path.is_dir() else path.unlink()
        elif kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(str(argument))
    except OSError:
        pass


SMALLEST: dict[str, Any] = {"BATCH": 2, "RUN_MASK": 1, "MOST_RUN": 2, "HOT_LEAST": 1, "HOT_MOST": 2, "OTHERS_POLLED": 8}
"""Limits at which a few names are as many as a million."""


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from(["*", "*.x", "rank*", ".*", "[ab]*"]), st.booleans(), st.booleans())
def test_totals_equal_those_of_a_plain_scan_after_any_steps(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, str, int | str]],
    pattern: str,
    owns_rest: bool,
    is_small: bool,
) -> None:
    directory = tmp_path_factory.mktemp("out")
    owner_of = FileOwnership(rank_of, frozenset({1, 2}), frozenset({3}), owns_rest)
    watch, now = FolderWatch(str(directory), pattern, owner_of), START
    with mock.patch.multiple(folder_reader, **SMALLEST) if is_small else nullcontext():
        for kind, name, argument in steps:
            if kind == "poll":
                now += float(argument)
                watch.poll(now)
            elif not (kind == "append" and (directory / name).is_fifo()):
                apply_step(directory, kind, name, argument)
        for _ in range(10 if is_small else 1):  # until each file has had its turn
            watch.poll(now := now + 100)
        assert facts_of(watch) == plain_scan(directory, pattern, owner_of)
        assert all(found.new_bytes >= 0 for found in watch.totals.values())
        watch.poll(now + 100)
    assert facts_of(watch) == plain_scan(directory, pattern, owner_of)


def test_a_pass_over_unchanged_names_looks_at_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3000):
        (tmp_path / str(number)).touch()
    monkeypatch.setattr(folder_reader, "SCAN_S", 60.0)
    watch, looked = polled(tmp_path), 0
    assert watch.complete
    real = watch.table.see

    def see(key: int) -> int | None:
        nonlocal looked
        looked += 1
        return real(key)

    monkeypatch.setattr(watch.table, "see", see)
    watch.poll(START + 100)
    assert looked == 0
    write(tmp_path / "new", 1)
    watch.poll(START + 200)
    assert 0 < looked < 3000
    assert facts_of(watch)[NOBODY][0] == 3001
