"""Files of a folder, followed from look to look."""

import fnmatch
import os
import random
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.files.outputs import folder_reader as folder_module
from exporter.files.outputs.folder_reader import NOBODY, FolderWatch, NameTable
from exporter.files.outputs.outputs_reader import FileOwnership

START = 1_700_000_000.0


def rank_of(name: str) -> int | None:
    """The digit behind ``rank``."""
    _, found, rest = name.partition("rank")
    return int(rest[0]) if found and rest[:1].isascii() and rest[:1].isdigit() else None


def watch_of(directory: Path, pattern: str = "*", ours: tuple[int, ...] = (), *, rest: bool = True) -> FolderWatch:
    others = frozenset(range(10)) - frozenset(ours)
    return FolderWatch(str(directory), pattern, FileOwnership(rank_of, frozenset(ours), others, rest))


def facts_of(watch: FolderWatch) -> dict[int, tuple[int, int, float | None]]:
    """Files, bytes and newest of each owner that has files."""
    return {
        owner: (found.files, found.bytes, found.newest_mtime) for owner, found in watch.totals.items() if found.files
    }


def plain_scan(directory: Path, pattern: str, owner_of: FileOwnership) -> dict[int, tuple[int, int, float | None]]:
    """The same from one pass over everything."""
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


def test_files_are_counted_with_size_and_time(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 10)
    write(tmp_path / "b.jsonl", 20, START + 5)
    write(tmp_path / "notes.txt", 40, START + 9)
    watch = watch_of(tmp_path, "*.jsonl")
    watch.poll(START)
    assert watch.complete
    assert facts_of(watch) == {NOBODY: (2, 30, START + 5)}
    assert watch.changes == []


def test_a_folder_that_comes_later_has_files_that_are_born(tmp_path: Path) -> None:
    watch = watch_of(tmp_path / "out")
    watch.poll(START)
    assert (watch.complete, facts_of(watch)) == (True, {})
    (tmp_path / "out").mkdir()
    write(tmp_path / "out" / "a", 10)
    watch.poll(START + 5)
    assert facts_of(watch) == {NOBODY: (1, 10, START)}
    assert (watch.totals[NOBODY].new_files, watch.totals[NOBODY].new_bytes) == (1, 10)
    shutil.rmtree(tmp_path / "out")
    watch.poll(START + 10)
    assert facts_of(watch) == {}


def test_a_file_in_place_of_the_folder_has_no_files(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    watch = watch_of(tmp_path / "out")
    watch.poll(START)
    assert facts_of(watch) == {}


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(tmp_path)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        watch.poll(START)


def test_other_kinds_of_file_are_passed_over_and_told(tmp_path: Path) -> None:
    write(tmp_path / "a", 10)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "fifo")
    watch = watch_of(tmp_path)
    watch.poll(START)
    assert facts_of(watch) == {NOBODY: (1, 10, START)}
    assert watch.passed_over == {"folder": "directory", "link": "link", "dangling": "link", "fifo": "FIFO"}


def test_a_fifo_that_becomes_a_file_counts_and_the_other_way_round(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    write(tmp_path / "b", 10)
    watch = watch_of(tmp_path)
    watch.poll(START)
    (tmp_path / "a").unlink()
    (tmp_path / "b").unlink()
    write(tmp_path / "a", 7)
    os.mkfifo(tmp_path / "b")
    watch.poll(START + 70)
    assert facts_of(watch) == {NOBODY: (1, 7, START)}
    assert watch.passed_over == {"b": "FIFO"}


def test_only_the_first_names_of_other_kinds_are_kept(tmp_path: Path) -> None:
    for number in range(folder_module.MOST_PASSED_OVER + 5):
        (tmp_path / str(number)).mkdir()
    watch = watch_of(tmp_path)
    watch.poll(START)
    assert len(watch.passed_over) == folder_module.MOST_PASSED_OVER


def test_hidden_names_match_only_a_pattern_that_begins_with_a_dot(tmp_path: Path) -> None:
    write(tmp_path / ".a.tmp", 1)
    write(tmp_path / "a", 2)
    for pattern, size in (("*", 2), (".*", 1)):
        watch = watch_of(tmp_path, pattern)
        watch.poll(START)
        assert facts_of(watch)[NOBODY][1] == size


def test_hard_names_and_names_that_are_not_utf8_count(tmp_path: Path, hard_name: str) -> None:
    write(tmp_path / f"out_{hard_name}", 3)
    write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/out_\xff")), 4)
    watch = watch_of(tmp_path, "out_*")
    watch.poll(START)
    assert facts_of(watch) == {NOBODY: (2, 7, START)}


def test_names_are_read_again_only_when_the_folder_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", 1)
    passes: list[int] = []
    real = os.scandir

    def scandir(place: int) -> object:
        passes.append(place)
        return real(place)

    monkeypatch.setattr(os, "scandir", scandir)
    watch = watch_of(tmp_path)
    watch.poll(START)
    watch.poll(START + 5)  # names may have come at the very moment of the first pass
    for number in range(2, 10):
        watch.poll(START + 5 * number)
    assert len(passes) == 2
    write(tmp_path / "b", 1)
    watch.poll(START + 50)
    assert (len(passes), facts_of(watch)[NOBODY][0]) == (3, 2)


def test_names_are_read_again_after_a_minute_in_any_case(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    os.utime(tmp_path, (START, START))
    watch.poll(START)
    watch.poll(START + 5)
    write(tmp_path / "a", 1)
    os.utime(tmp_path, (START, START))  # as an attribute cache shows it
    watch.poll(START + 10)
    assert facts_of(watch) == {}
    watch.poll(START + 70)
    assert facts_of(watch)[NOBODY][0] == 1


def test_a_change_in_the_same_tick_as_the_pass_is_found_soon(tmp_path: Path) -> None:
    os.utime(tmp_path, (START, START))
    watch = watch_of(tmp_path)
    watch.poll(START)
    write(tmp_path / "a", 1)
    os.utime(tmp_path, (START, START))
    watch.poll(START + 1)
    assert facts_of(watch) == {}
    watch.poll(START + 3)
    assert facts_of(watch)[NOBODY][0] == 1


def test_reading_names_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, moment = watch_of(tmp_path), [0.0]

    def monotonic() -> float:
        moment[0] += 0.25
        return moment[0]

    monkeypatch.setattr("exporter.files.outputs.folder_reader.SCAN_S", 1e9)
    monkeypatch.setattr("exporter.files.outputs.folder_reader.time.monotonic", monotonic)
    watch.poll(START)
    write(tmp_path / "a", 1)
    watch.poll(START + 4)
    assert facts_of(watch) == {}
    watch.poll(START + 60)
    assert facts_of(watch)[NOBODY][0] == 1


def test_a_change_is_told_with_what_was_before(tmp_path: Path) -> None:
    write(tmp_path / "a", 10)
    watch = watch_of(tmp_path)
    watch.poll(START)
    write(tmp_path / "a", 30, START + 7)
    watch.poll(START + 10)
    (change,) = watch.changes
    assert (change.owner, change.mtime, change.size, change.before) == (NOBODY, START + 7, 30, (START, 10))
    assert watch.totals[NOBODY].changed_at == START + 10
    watch.poll(START + 15)
    assert watch.changes == []


def test_a_file_with_another_name_goes_on_and_is_not_born(tmp_path: Path) -> None:
    write(tmp_path / "a", 10)
    watch = watch_of(tmp_path)
    watch.poll(START)
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


def test_a_file_that_is_rotated_goes_on_and_a_new_one_is_born(tmp_path: Path) -> None:
    write(tmp_path / "a", 100)
    watch = watch_of(tmp_path)
    watch.poll(START)
    (tmp_path / "a").rename(tmp_path / "a.1")
    write(tmp_path / "a", 3, START + 8)
    watch.poll(START + 10)
    assert facts_of(watch) == {NOBODY: (2, 103, START + 8)}
    assert (watch.totals[NOBODY].new_files, watch.totals[NOBODY].new_bytes) == (1, 3)


def test_a_file_that_is_renamed_into_place_is_born_whole(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, "*.json")
    watch.poll(START)
    write(tmp_path / "a.json.tmp", 50)
    watch.poll(START + 5)
    (tmp_path / "a.json.tmp").rename(tmp_path / "a.json")
    watch.poll(START + 10)
    assert (watch.totals[NOBODY].new_files, watch.totals[NOBODY].new_bytes) == (1, 50)


def test_a_file_that_vanishes_while_it_is_met_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_that_is_gone_is_noticed_though_the_folder_shows_an_old_time(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2, START + 9)
    os.utime(tmp_path, (START, START))
    watch = watch_of(tmp_path)
    watch.poll(START)
    watch.poll(START + 5)
    (tmp_path / "b").unlink()
    os.utime(tmp_path, (START, START))
    watch.poll(START + 10)
    watch.poll(START + 15)
    assert facts_of(watch) == {NOBODY: (1, 1, START)}


def test_the_newest_file_may_become_older(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2, START + 9)
    watch = watch_of(tmp_path)
    watch.poll(START)
    os.utime(tmp_path / "b", (START, START + 3))
    watch.poll(START + 5)
    assert facts_of(watch) == {NOBODY: (2, 3, START + 3)}


def test_facts_that_may_not_be_read_are_told_and_the_others_count(
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
    watch = watch_of(tmp_path)
    watch.poll(START)
    assert facts_of(watch) == {NOBODY: (1, 1, START)}
    assert watch.unreadable == "Permission denied"


def test_a_first_look_goes_on_at_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        write(tmp_path / str(number), 1)
    monkeypatch.setattr(folder_module, "SCAN_S", 0.0)
    watch, looks = watch_of(tmp_path), 0
    monkeypatch.setattr(folder_module, "CHUNK", 10)
    moment = [0.0]

    def monotonic() -> float:
        moment[0] += 0.001
        return moment[0]

    monkeypatch.setattr("exporter.files.outputs.folder_reader.SCAN_S", 0.0055)
    monkeypatch.setattr("exporter.files.outputs.folder_reader.time.monotonic", monotonic)
    while not watch.complete:
        watch.poll(START + looks)
        looks += 1
        assert looks < 100
    assert looks > 5
    assert facts_of(watch) == {NOBODY: (50, 50, START)}
    assert watch.totals[NOBODY].new_files == 0


def test_cold_files_are_looked_at_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "HOT_LEAST", 2)
    monkeypatch.setattr(folder_module, "OTHERS_POLLED", 8)
    for number in range(64):
        write(tmp_path / f"{number:02d}", 1, START + number)
    watch = watch_of(tmp_path)
    watch.poll(START)
    assert sorted(watch.names[slot] or "" for slot in watch.hot) == ["62", "63"]
    write(tmp_path / "05", 100, START + 100)
    for look in range(1, 10):
        watch.poll(START + 5 * look)
    assert facts_of(watch) == {NOBODY: (64, 163, START + 100)}
    assert "05" in {watch.names[slot] for slot in watch.hot}
    for look in range(10, 60):
        watch.poll(START + 5 * look)
    assert {watch.names[slot] for slot in watch.hot} == {"05", "63"}


def test_no_more_files_are_hot_than_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "HOT_LEAST", 2)
    monkeypatch.setattr(folder_module, "HOT_MOST", 5)
    watch = watch_of(tmp_path)
    watch.poll(START)
    for number in range(30):
        write(tmp_path / str(number), 1)
    watch.poll(START + 5)
    assert len(watch.hot) == 5
    assert facts_of(watch)[NOBODY][0] == 30


def test_inodes_that_are_made_up_each_time_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1200):
        (tmp_path / str(number)).touch()
    real, made_up = os.scandir, [0]

    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

        def inode(self) -> int:
            made_up[0] += 1
            return made_up[0]

    class Entries:
        def __init__(self, place: int) -> None:
            with real(place) as found:
                self._names = iter([Entry(entry.name) for entry in found])

        def __next__(self) -> Entry:
            return next(self._names)

        def __iter__(self) -> "Entries":
            return self

        def close(self) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Entries)
    watch = watch_of(tmp_path)
    for look in range(4):
        write(tmp_path / f"new{look}", 1)
        watch.poll(START + 70 * look)
    assert facts_of(watch)[NOBODY][:2] == (1204, 4)


@pytest.mark.parametrize("keep", [1, 3, 40, 199])
def test_names_that_come_in_another_order_or_have_gone_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    for number in range(200):
        write(tmp_path / str(number), 1)
    real, dice = os.scandir, random.Random(keep)

    class Entries:
        def __init__(self, place: int) -> None:
            with real(place) as found:
                entries = list(found)
            dice.shuffle(entries)
            self._entries = iter(entries)

        def __next__(self) -> "os.DirEntry[str]":
            return next(self._entries)

        def __iter__(self) -> "Entries":
            return self

        def close(self) -> None:
            pass

    watch = watch_of(tmp_path)
    watch.poll(START)
    for number in range(200):
        if number % 200 >= keep:
            (tmp_path / str(number)).unlink()
    watch.poll(START + 100)
    assert facts_of(watch)[NOBODY][:2] == (keep, keep)
    for number in range(300, 350):
        write(tmp_path / str(number), 1)
    watch.poll(START + 200)
    monkeypatch.setattr(os, "scandir", Entries)
    watch.poll(START + 300)
    watch.poll(START + 400)
    assert facts_of(watch)[NOBODY][:2] == (keep + 50, keep + 50)
    assert watch.totals[NOBODY].new_files == 50


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=400), st.integers(1, 7))
def test_a_table_of_names_is_like_a_dictionary(steps: list[tuple[bool, int]], spread: int) -> None:
    names: list[str | None] = [None]
    table, expected = NameTable(names), dict[str, int]()
    for add, number in steps:
        name = f"{number * spread}"
        if add and name not in expected:
            names.append(name)
            table.add(name, len(names) - 1)
            expected[name] = len(names) - 1
        elif not add and name in expected:
            table.remove(name)
            names[expected.pop(name)] = None
    assert table.size == len(expected)
    assert {name: table.find(name) for name in expected} == expected
    assert table.find("another") is None


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
        st.tuples(st.just("look"), st.just(""), st.integers(0, 100)),
    ),
    max_size=30,
)


def carry_out(directory: Path, kind: str, name: str, what: int | str) -> None:
    """One step; what cannot be done is left out."""
    path = directory / name
    try:
        if kind == "create":
            path.unlink(missing_ok=True)
            path.write_bytes(b"x" * int(what))
        elif kind == "append":
            with path.open("r+b") as out:
                out.seek(0, os.SEEK_END)
                out.write(b"y" * int(what))
        elif kind == "truncate":
            os.truncate(path, int(what))
        elif kind == "rename":
            path.rename(directory / str(what))
        elif kind == "delete":
            path.rmdir() if path.is_dir() else path.unlink()
        elif kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(str(what))
    except OSError:
        pass


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from(["*", "*.x", "rank*", ".*", "[ab]*"]), st.booleans())
def test_sums_are_those_of_a_plain_scan_after_anything(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int | str]], pattern: str, rest: bool
) -> None:
    directory = tmp_path_factory.mktemp("out")
    owner_of = FileOwnership(rank_of, frozenset({1, 2}), frozenset({3}), rest)
    watch, now = FolderWatch(str(directory), pattern, owner_of), START
    for kind, name, what in steps:
        if kind == "look":
            now += float(what)
            watch.poll(now)
        elif not (kind == "append" and (directory / name).is_fifo()):
            carry_out(directory, kind, name, what)
    watch.poll(now + 100)
    assert facts_of(watch) == plain_scan(directory, pattern, owner_of)
    assert all(found.new_bytes >= 0 for found in watch.totals.values())
    watch.poll(now + 200)
    assert facts_of(watch) == plain_scan(directory, pattern, owner_of)
