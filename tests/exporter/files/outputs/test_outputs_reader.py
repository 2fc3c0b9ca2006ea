"""Readings of a watch over the output files of a job."""

import gzip
import json
import os
import pickle
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.contract.worker_names import rank_in_file_name
from exporter.files.formats import FileCheck, check_file
from exporter.files.formats.source import FileSource
from exporter.files.outputs import folder_reader, outputs_reader
from exporter.files.outputs.folder_reader import NOBODY
from exporter.files.outputs.outputs_reader import FileOwnership, OutputReading, OutputWatch
from tests.exporter.files.outputs.test_folder_reader import SMALLEST

START = 1_700_000_000.0
EVERYTHING = FileOwnership(
    partial(rank_in_file_name, ranks={}), frozenset({0, 1}), frozenset({2, 3}), owns_unranked=True
)


class PolledWatch:
    """A watch over a folder with its own clock."""

    def __init__(self, directory: Path, pattern: str = "*", since: float | None = START) -> None:
        self.watch = OutputWatch(str(directory), pattern, EVERYTHING, since)
        self.now = START

    def poll(self, after_s: float = 5.0) -> OutputReading:
        """The reading after this many seconds."""
        self.now += after_s
        return self.watch.poll(self.now)

    def after(self, seconds: float) -> OutputReading:
        """The last reading after this many seconds of polls."""
        for _ in range(int(seconds / 5) - 1):
            self.poll()
        return self.poll()


@pytest.fixture
def polled(tmp_path: Path) -> PolledWatch:
    """A watch whose folder was empty at the first poll."""
    watch = PolledWatch(tmp_path)
    watch.poll()
    return watch


def records_of(poll: OutputReading) -> int | None:
    found = [owned.records for owned in poll.owners.values() if owned.records is not None]
    return sum(found) if found else None


def write(path: Path, text: str | bytes, mtime: float | None = None) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    if mtime is not None:
        os.utime(path, (mtime, mtime))
    return path


DAMAGED = gzip.compress(b"some text" * 100)[:-20]
WHOLE = gzip.compress(b"some text" * 100)


def test_a_file_name_shows_its_owner() -> None:
    rank_of = partial(rank_in_file_name, ranks={("worker", 0): 0, ("worker", 1): 1})
    first = FileOwnership(rank_of, frozenset({0}), frozenset({1}), owns_unranked=True)
    second = FileOwnership(rank_of, frozenset({1}), frozenset({0}), owns_unranked=False)
    names = ["out_worker_0", "out_worker_1", "out_worker_7", "summary"]
    assert [first(name) for name in names] == [0, None, NOBODY, NOBODY]
    assert [second(name) for name in names] == [None, 1, None, None]


@pytest.mark.parametrize("pattern", ["*", "*.csv", "gpu_*", "*.csv*"])
def test_gpu_metrics_of_sidecars_are_not_counted_as_output(pattern: str, tmp_path: Path) -> None:
    for name in ("gpu_metrics.csv", "gpu_metrics_gn02.csv", "gpu_metrics.csv.1", "gpu_table.csv"):
        write(tmp_path / name, "time,node\n1,a\n")
    ours = OutputWatch(str(tmp_path), pattern, EVERYTHING, START, gpu_metrics=True)
    theirs = OutputWatch(str(tmp_path), pattern, EVERYTHING, START)
    counted = sum(owned.files for owned in ours.poll(START + 5).owners.values())
    assert counted == 1  # gpu_table.csv
    assert sum(owned.files for owned in theirs.poll(START + 5).owners.values()) == (3 if pattern == "*.csv" else 4)
    (tmp_path / "gpu_table.csv").unlink()
    write(tmp_path / "gpu_metrics_gn03.csv", "time,node\n")  # nor is a file that appears later
    for step in range(4):
        poll = ours.poll(START + 10 + 5 * step)
    assert sum(owned.files for owned in poll.owners.values()) == 0


def test_a_watch_and_its_readings_can_be_pickled(tmp_path: Path) -> None:
    write(tmp_path / "out_rank0.jsonl", '{"a": 1}\n')
    make = pickle.loads(pickle.dumps(partial(OutputWatch, str(tmp_path), "*", EVERYTHING, START)))  # noqa: S301
    watch = make()
    watch.poll(START)
    write(tmp_path / "out_rank0.jsonl", '{"a": 1}\n{"a": 2}\n')
    poll = watch.poll(START + 5)
    assert pickle.loads(pickle.dumps(poll)) == poll  # noqa: S301
    assert len(poll.changes) == 1


def test_files_are_counted_by_owner(tmp_path: Path) -> None:
    write(tmp_path / "out_rank0.jsonl", "{}\n" * 3, START + 1)
    write(tmp_path / "out_rank1.jsonl", "{}\n" * 5, START + 2)
    write(tmp_path / "out_rank2.jsonl", "{}\n" * 100)
    write(tmp_path / "all.jsonl", "{}\n", START + 3)
    poll = PolledWatch(tmp_path).poll()
    assert poll.complete
    assert {
        owner: (found.files, found.bytes, found.newest_mtime, found.records) for owner, found in poll.owners.items()
    } == {0: (1, 9, START + 1, 3), 1: (1, 15, START + 2, 5), NOBODY: (1, 3, START + 3, 1)}


def test_records_follow_files_that_grow_move_shrink_and_vanish(tmp_path: Path) -> None:
    path, polled = tmp_path / "a.jsonl", PolledWatch(tmp_path)
    write(path, "{}\n" * 3)
    assert records_of(polled.poll()) == 3
    with path.open("a") as out:
        out.write("{}\n{}")
    assert records_of(polled.poll()) == 4
    path.rename(tmp_path / "b.jsonl")
    assert records_of(polled.poll()) == 4
    write(tmp_path / "b.jsonl", "{}\n")
    assert records_of(polled.poll()) == 1
    write(tmp_path / "t.csv", "a,b\n1,2\n3,4\n")
    assert records_of(polled.poll()) == 3
    (tmp_path / "b.jsonl").unlink()
    assert records_of(polled.poll()) == 2


def test_a_last_line_without_newline_counts_once_the_file_is_done(tmp_path: Path, polled: PolledWatch) -> None:
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}')
    assert records_of(polled.poll()) == 1
    assert records_of(polled.after(20)) == 2
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n{"a"')
    assert records_of(polled.after(40)) == 2


def test_records_are_unknown_until_all_have_been_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_reader, "COUNT_BYTES", 100)
    for number in range(5):
        write(tmp_path / f"{number}.jsonl", "{}\n" * 50)
    polled, unknown = PolledWatch(tmp_path), 0
    while (found := records_of(polled.poll())) is None:
        unknown += 1
    assert found == 250
    assert unknown == 7  # 750 bytes, 100 at each poll
    write(tmp_path / "9.jsonl", "{}\n" * 50)
    assert records_of(polled.poll()) == 250 + 33
    assert records_of(polled.poll()) == 300


def test_one_large_file_does_not_keep_the_others_from_being_counted(
    tmp_path: Path, polled: PolledWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs_reader, "COUNT_BYTES", 100)
    write(tmp_path / "large.jsonl", "{}\n" * 5000)
    polled.poll()
    write(tmp_path / "small.jsonl", "{}\n")
    polled.poll()
    polled.poll()
    assert polled.watch._table[hash("small.jsonl")].records == 1


def test_items_of_an_array_are_counted_once_the_file_is_done(tmp_path: Path, polled: PolledWatch) -> None:
    write(tmp_path / "a.json", json.dumps([{"x": "y" * 100}] * 20_000))
    write(tmp_path / "b.json", "[1, 2, 3]")
    write(tmp_path / "c.json", '{"a": [1, 2]}')
    assert records_of(polled.poll()) is None
    assert records_of(polled.after(30)) == 20_003


def test_records_are_unknown_until_earlier_arrays_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "[1, 2, 3]")
    write(tmp_path / "b.jsonl", "{}\n")
    polled = PolledWatch(tmp_path)
    assert records_of(polled.poll()) is None
    assert records_of(polled.after(20)) == 4


def test_records_are_unknown_if_no_file_has_any(tmp_path: Path) -> None:
    write(tmp_path / "model.bin", b"\x01\x02" * 100)
    assert records_of(PolledWatch(tmp_path).after(30)) is None
    assert PolledWatch(tmp_path / "later").poll().owners == {}


def test_a_file_that_cannot_be_opened_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", "{}\n")
    write(tmp_path / "b.jsonl", "{}\n{}\n")
    real = os.open

    def refuse(path: str, flags: int, *more: object) -> int:
        if path.endswith("b.jsonl"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    assert records_of(PolledWatch(tmp_path).poll()) == 1


def test_records_of_a_file_that_no_longer_has_any_are_dropped(tmp_path: Path) -> None:
    path, polled = write(tmp_path / "out.json", json.dumps([1] * 100)), PolledWatch(tmp_path)
    assert records_of(polled.after(30)) == 100
    write(path, "")
    assert records_of(polled.after(40)) == 0
    write(path, "[1, 2]")
    assert records_of(polled.after(40)) == 2
    write(path, "[1, 2")
    assert records_of(polled.after(60)) is None


def test_records_known_only_from_the_content_are_dropped_with_it(tmp_path: Path) -> None:
    path, polled = write(tmp_path / "rows.1", "[1, 2, 3]"), PolledWatch(tmp_path)
    assert records_of(polled.after(30)) == 3
    write(path, "words")
    assert records_of(polled.after(60)) is None
    write(path, "[1]")
    assert records_of(polled.after(60)) == 1
    write(path, '{"a": 1}')
    assert records_of(polled.after(60)) is None


def test_a_hole_is_counted_once_it_is_filled(tmp_path: Path) -> None:
    line = b'{"number": 1}\n'
    whole, polled = line * 2000, PolledWatch(tmp_path)
    polled.poll()
    path = write(tmp_path / "a.jsonl", whole[:8192] + bytes(4096) + whole[12288:])
    facts = path.stat()
    assert records_of(polled.after(30)) == 8192 // len(line)
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(whole[8192:12288])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # as some file servers leave it
    assert records_of(polled.poll()) == 2000


def test_a_hole_that_stays_is_skipped_after_a_while(tmp_path: Path, polled: PolledWatch) -> None:
    path = write(tmp_path / "a.jsonl", b"{}\n" * 100 + bytes(4096) + b"\n" + b"{}\n" * 50)
    assert records_of(polled.poll()) == 100
    for _ in range(10):
        with path.open("ab") as file:
            file.write(b"{}\n")
        assert records_of(polled.poll()) == 100
    assert records_of(polled.after(15)) == 161


def test_a_header_without_a_newline_is_no_record(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "name,score")
    write(tmp_path / "b.csv", "name,score\na,1\nb,2")
    assert records_of(PolledWatch(tmp_path).after(40)) == 2


def test_files_seen_to_appear_belong_to_this_job_whatever_their_mtimes(tmp_path: Path, polled: PolledWatch) -> None:
    write(tmp_path / "new", "x", START - 200)
    assert polled.poll().first_file == (START, "new")


def test_the_clock_of_a_server_may_be_a_little_behind(tmp_path: Path) -> None:
    write(tmp_path / "a", "x", START - 30)
    assert PolledWatch(tmp_path).poll().first_file == (START, "a")


def test_files_have_a_sole_writer_if_no_other_worker_can_write_them(tmp_path: Path) -> None:
    own = {"a_rank0": 0, "a_rank1": 1, "a_rank2": 2, "a_rank9": 9}
    owner_of = FileOwnership(
        partial(rank_in_file_name, ranks={}),
        frozenset({0, 1}),
        frozenset({2}),
        owns_unranked=True,
        sole_rank_of=own.get,
    )
    watch = OutputWatch(str(tmp_path), "*", owner_of, START)
    for name in ("a_rank0", "a_rank1", "a_rank2", "b_part_1", "all"):
        write(tmp_path / name, "x")
    found = watch.poll(START).owners
    assert {owner: owned.has_sole_writer for owner, owned in found.items()} == {0: True, 1: False, NOBODY: False}
    write(tmp_path / "a_rank9", "x")
    found = watch.poll(START + 5).owners
    assert {owner: owned.has_sole_writer for owner, owned in found.items()} == {0: False, 1: False, NOBODY: False}


def test_a_node_counts_all_files_of_a_local_directory() -> None:
    rank_of = partial(rank_in_file_name, ranks={("worker", 0): 0, ("worker", 1): 1})
    second = FileOwnership(rank_of, frozenset({1}), frozenset({0}), owns_unranked=False, is_local=True)
    assert [second(name) for name in ("out_worker_0", "out_worker_1", "out_worker_7", "summary")] == [
        *(NOBODY, 1, NOBODY, NOBODY)
    ]


def test_a_damaged_file_is_reported_after_a_second_check(tmp_path: Path, polled: PolledWatch) -> None:
    write(tmp_path / "a.gz", DAMAGED)
    write(tmp_path / "b.gz", WHOLE)
    found = {seconds: polled.poll().invalid_files for seconds in range(5, 45, 5)}
    assert found == {5: 0, 10: 0, 15: 0, 20: 0, 25: 1, 30: 1, 35: 1, 40: 1}
    poll = polled.poll()
    assert [(file.file, file.format) for file in poll.invalid] == [("a.gz", "gzip")]
    assert poll.valid_files == 1


def test_a_file_written_between_two_checks_is_not_reported(tmp_path: Path) -> None:
    path, polled = write(tmp_path / "a.gz", DAMAGED), PolledWatch(tmp_path)
    for number in range(10):
        assert polled.after(15).invalid_files == 0
        write(path, DAMAGED[: -number - 1])
    write(path, WHOLE)
    poll = polled.after(60)
    assert (poll.invalid_files, poll.valid_files) == (0, 1)


def test_a_file_written_during_a_check_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, checks = write(tmp_path / "a.gz", DAMAGED), 0

    def check_meanwhile(source: FileSource) -> FileCheck:
        nonlocal checks
        checks += 1
        verdict = check_file(source)
        if checks == 2:
            path.write_bytes(DAMAGED[:-1])
        return verdict

    monkeypatch.setattr(outputs_reader, "check_file", check_meanwhile)
    polled = PolledWatch(tmp_path)
    while checks < 2:
        assert polled.poll().invalid_files == 0
    assert polled.poll().invalid_files == 0
    assert polled.after(60).invalid_files == 1


def test_a_damaged_file_that_is_rewritten_or_deleted_no_longer_counts(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz", "c.gz"):
        write(tmp_path / name, DAMAGED)
    polled = PolledWatch(tmp_path)
    assert polled.after(60).invalid_files == 3
    write(tmp_path / "a.gz", WHOLE)
    (tmp_path / "b.gz").unlink()
    assert polled.poll().invalid_files == 1
    assert polled.after(60).invalid_files == 1


def test_a_growing_file_with_a_half_written_last_line_is_fine(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": ')
    poll = PolledWatch(tmp_path).after(60)
    assert poll.invalid_files == 0


def test_the_number_of_files_checked_in_one_poll_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.files.outputs.folder_reader.HOT_LEAST", 4)
    monkeypatch.setattr(outputs_reader, "CHECK_S", 60.0)
    for number in range(30):
        write(tmp_path / f"{number:02d}.gz", WHOLE, START + number)
    polled = PolledWatch(tmp_path)
    polled.poll()
    polled.watch._folder.allowance_s = -1000.0
    counts = [0] + [polled.poll().valid_files for _ in range(7)]
    assert counts == [0, 0, 8, 16, 24, 30, 30, 30]


def test_the_newest_files_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.files.outputs.folder_reader.HOT_LEAST", 4)
    monkeypatch.setattr(outputs_reader, "CHECK_S", 60.0)
    for number in range(30):
        write(tmp_path / f"{number * 7 % 30:02d}.gz", DAMAGED, START + number * 7 % 30)
    polled = PolledWatch(tmp_path)
    polled.poll()
    polled.watch._folder.allowance_s = -1000.0
    polled.after(10)
    looked_into = {doubt.name for doubt in polled.watch._suspected.values()}
    assert looked_into == {f"{number:02d}.gz" for number in range(22, 30)}


def test_only_some_damaged_files_are_reported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_reader, "CHECK_S", 60.0)
    for number in range(30):
        write(tmp_path / f"{number}.gz", DAMAGED)
    poll = PolledWatch(tmp_path).after(60)
    assert (poll.invalid_files, len(poll.invalid)) == (30, outputs_reader.MOST_REPORTED_INVALID)


def test_names_are_reported_as_printable_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\nb.gz"))
    write(path, DAMAGED)
    poll = PolledWatch(tmp_path).after(60)
    assert [file.file for file in poll.invalid] == ["a\\udcff\\nb.gz"]


def test_the_first_output_is_the_first_of_this_job(tmp_path: Path) -> None:
    write(tmp_path / "old", "x", START - 100)
    polled = PolledWatch(tmp_path)
    assert polled.poll().first_file is None
    write(tmp_path / "new", "x", START + 7)
    assert polled.poll().first_file == (START + 7, "new")
    write(tmp_path / "newer", "x", START + 8)
    assert polled.poll().first_file == (START + 7, "new")


def test_a_watch_that_starts_late_finds_the_first_output_by_mtime(tmp_path: Path) -> None:
    write(tmp_path / "old", "x", START - 100)
    write(tmp_path / "b", "x", START + 20)
    write(tmp_path / "a", "x", START + 10)
    assert PolledWatch(tmp_path).poll().first_file == (START + 10, "a")
    assert PolledWatch(tmp_path, since=None).poll().first_file is None


def test_a_file_that_is_valid_or_renamed_into_place_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "before.gz", WHOLE)
    polled = PolledWatch(tmp_path, "*[!p]")
    polled.poll()
    write(tmp_path / "a.gz", WHOLE)
    write(tmp_path / "growing.jsonl", '{"a": 1}\n')
    write(tmp_path / "b.jsonl.tmp", '{"a": 1}\n')
    polled.poll()
    (tmp_path / "b.jsonl.tmp").rename(tmp_path / "b.jsonl")
    poll = polled.after(60)
    assert sorted((file.file, file.bytes) for file in poll.finished) == [("a.gz", len(WHOLE)), ("b.jsonl", 9)]
    assert [file.number for file in poll.finished] == [1, 2]
    write(tmp_path / "a.gz", WHOLE + WHOLE)
    assert polled.after(60).finished == poll.finished
    (tmp_path / "a.gz").rename(tmp_path / "c.gz")
    assert polled.after(60).finished == poll.finished


def test_completion_is_not_reported_for_many_files(tmp_path: Path, polled: PolledWatch) -> None:
    for number in range(outputs_reader.FEW_FILES + 1):
        write(tmp_path / f"{number}.gz", WHOLE)
    assert polled.after(120).finished == ()


@pytest.mark.parametrize("is_small", [False, True])
def test_every_file_is_checked_and_counted_in_time(is_small: bool, tmp_path: Path) -> None:
    for number in range(40):
        write(tmp_path / f"{number}.jsonl", "{}\n")
        write(tmp_path / f"{number}.gz", DAMAGED if number == 17 else WHOLE, START - number)
    with mock.patch.multiple(folder_reader, **SMALLEST) if is_small else nullcontext():
        polled = PolledWatch(tmp_path)
        assert polled.poll().checked_files == 0
        poll = polled.after(1500)
        assert (poll.checked_files, poll.valid_files, poll.invalid_files, records_of(poll)) == (80, 79, 1, 40)
        write(tmp_path / "17.gz", WHOLE)
        poll = polled.after(1500)
    assert (poll.checked_files, poll.invalid_files) == (80, 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "half", "rename", "delete", "replace", "poll"]),
        st.sampled_from(["a.jsonl", "b_rank0.jsonl", "c_rank1.jsonl", "d.tmp"]),
        st.sampled_from(["a.jsonl", "b_rank0.jsonl", "c_rank1.jsonl", "d.tmp"]),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.booleans())
def test_records_equal_those_in_the_files_after_any_steps(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, str]], is_small: bool
) -> None:
    with mock.patch.multiple(folder_reader, **SMALLEST) if is_small else nullcontext():
        check_records_after(tmp_path_factory, steps)


def check_records_after(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, str]]) -> None:
    directory = tmp_path_factory.mktemp("out")
    polled = PolledWatch(directory, "*.jsonl")
    polled.poll()
    for kind, name, other in steps:
        path = directory / name
        if kind == "poll":
            polled.poll(20)
        elif kind == "rename" and path.exists():
            path.rename(directory / other)
        elif kind == "delete":
            path.unlink(missing_ok=True)
        elif kind == "replace":
            write(path, f'{{"name": "{other}"}}\n')
        elif kind in ("append", "half"):
            with path.open("a") as out:
                out.write(f'{{"name": "{other}"}}\n' if kind == "append" else "{")
    for _ in range(8):
        poll = polled.poll(100)
    texts = {path.name: path.read_text() for path in directory.glob("*.jsonl")}
    assert {owner: found.files for owner, found in poll.owners.items() if found.files} == {
        EVERYTHING(name): 1 for name in texts
    }
    assert records_of(poll) == (sum(text.count("\n") for text in texts.values()) if texts else None)
