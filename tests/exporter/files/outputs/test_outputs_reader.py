"""What a watch over the output files of a job gives."""

import gzip
import json
import os
import pickle
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.contract.worker_names import rank_in_file_name
from exporter.files.formats import FileCheck, FileSource, check_file
from exporter.files.outputs import outputs_reader
from exporter.files.outputs.folder_reader import NOBODY
from exporter.files.outputs.outputs_reader import FileOwnership, OutputReading, OutputWatch

START = 1_700_000_000.0
EVERYTHING = FileOwnership(
    partial(rank_in_file_name, ranks={}), frozenset({0, 1}), frozenset({2, 3}), owns_unranked=True
)


class Looks:
    """A watch over a folder, and the clock by which it looks."""

    def __init__(self, directory: Path, pattern: str = "*", since: float | None = START) -> None:
        self.watch = OutputWatch(str(directory), pattern, EVERYTHING, since)
        self.now = START

    def look(self, after_s: float = 5.0) -> OutputReading:
        """A look so many seconds later."""
        self.now += after_s
        return self.watch.poll(self.now)

    def after(self, seconds: float) -> OutputReading:
        """The last of the looks of so much time."""
        for _ in range(int(seconds / 5) - 1):
            self.look()
        return self.look()


def records_of(look: OutputReading) -> int | None:
    found = [owned.records for owned in look.owners.values() if owned.records is not None]
    return sum(found) if found else None


def write(path: Path, text: str | bytes, mtime: float | None = None) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    if mtime is not None:
        os.utime(path, (mtime, mtime))
    return path


DAMAGED = gzip.compress(b"some text" * 100)[:-20]
WHOLE = gzip.compress(b"some text" * 100)


def test_a_name_tells_whose_a_file_is() -> None:
    rank_of = partial(rank_in_file_name, ranks={("worker", 0): 0, ("worker", 1): 1})
    first = FileOwnership(rank_of, frozenset({0}), frozenset({1}), owns_unranked=True)
    second = FileOwnership(rank_of, frozenset({1}), frozenset({0}), owns_unranked=False)
    names = ["out_worker_0", "out_worker_1", "out_worker_7", "summary"]
    assert [first(name) for name in names] == [0, None, NOBODY, NOBODY]
    assert [second(name) for name in names] == [None, 1, None, None]


@pytest.mark.parametrize("pattern", ["*", "*.csv", "gpu_*", "*.csv*"])
def test_gpu_metrics_of_sidecars_are_none_of_the_jobs_files(pattern: str, tmp_path: Path) -> None:
    for name in ("gpu_metrics.csv", "gpu_metrics_gn02.csv", "gpu_metrics.csv.1", "gpu_table.csv"):
        write(tmp_path / name, "time,node\n1,a\n")
    ours = OutputWatch(str(tmp_path), pattern, EVERYTHING, START, gpu_metrics=True)
    theirs = OutputWatch(str(tmp_path), pattern, EVERYTHING, START)
    counted = sum(owned.files for owned in ours.poll(START + 5).owners.values())
    assert counted == 1  # gpu_table.csv
    assert sum(owned.files for owned in theirs.poll(START + 5).owners.values()) == (3 if pattern == "*.csv" else 4)
    (tmp_path / "gpu_table.csv").unlink()
    write(tmp_path / "gpu_metrics_gn03.csv", "time,node\n")  # neither is one that comes later
    for step in range(4):
        look = ours.poll(START + 10 + 5 * step)
    assert sum(owned.files for owned in look.owners.values()) == 0


def test_what_a_watch_is_made_from_and_gives_can_be_pickled(tmp_path: Path) -> None:
    write(tmp_path / "out_rank0.jsonl", '{"a": 1}\n')
    make = pickle.loads(pickle.dumps(partial(OutputWatch, str(tmp_path), "*", EVERYTHING, START)))  # noqa: S301
    watch = make()
    watch.poll(START)
    write(tmp_path / "out_rank0.jsonl", '{"a": 1}\n{"a": 2}\n')
    look = watch.poll(START + 5)
    assert pickle.loads(pickle.dumps(look)) == look  # noqa: S301
    assert len(look.changes) == 1


def test_files_are_counted_by_owner(tmp_path: Path) -> None:
    write(tmp_path / "out_rank0.jsonl", "{}\n" * 3, START + 1)
    write(tmp_path / "out_rank1.jsonl", "{}\n" * 5, START + 2)
    write(tmp_path / "out_rank2.jsonl", "{}\n" * 100)
    write(tmp_path / "all.jsonl", "{}\n", START + 3)
    look = Looks(tmp_path).look()
    assert look.complete
    assert {
        owner: (found.files, found.bytes, found.newest_mtime, found.records) for owner, found in look.owners.items()
    } == {
        0: (1, 9, START + 1, 3),
        1: (1, 15, START + 2, 5),
        NOBODY: (1, 3, START + 3, 1),
    }


def test_records_follow_files_that_grow_move_shrink_and_go(tmp_path: Path) -> None:
    path, looks = tmp_path / "a.jsonl", Looks(tmp_path)
    write(path, "{}\n" * 3)
    assert records_of(looks.look()) == 3
    with path.open("a") as out:
        out.write("{}\n{}")
    assert records_of(looks.look()) == 4
    path.rename(tmp_path / "b.jsonl")
    assert records_of(looks.look()) == 4
    write(tmp_path / "b.jsonl", "{}\n")
    assert records_of(looks.look()) == 1
    write(tmp_path / "t.csv", "a,b\n1,2\n3,4\n")
    assert records_of(looks.look()) == 3
    (tmp_path / "b.jsonl").unlink()
    assert records_of(looks.look()) == 2


def test_a_last_line_that_only_lacks_its_newline_counts_once_the_file_is_done(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    looks.look()
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}')
    assert records_of(looks.look()) == 1
    assert records_of(looks.after(20)) == 2
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n{"a"')
    assert records_of(looks.after(40)) == 2


def test_records_are_unknown_until_all_have_been_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_reader, "COUNT_BYTES", 100)
    for number in range(5):
        write(tmp_path / f"{number}.jsonl", "{}\n" * 50)
    looks, unknown = Looks(tmp_path), 0
    while (found := records_of(looks.look())) is None:
        unknown += 1
    assert found == 250
    assert unknown == 7  # 750 bytes, 100 at each look
    write(tmp_path / "9.jsonl", "{}\n" * 50)
    assert records_of(looks.look()) == 250 + 33
    assert records_of(looks.look()) == 300


def test_one_large_file_does_not_keep_the_others_from_being_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(tmp_path)
    looks.look()
    monkeypatch.setattr(outputs_reader, "COUNT_BYTES", 100)
    write(tmp_path / "large.jsonl", "{}\n" * 5000)
    looks.look()
    write(tmp_path / "small.jsonl", "{}\n")
    looks.look()
    looks.look()
    assert looks.watch._records[2] == 1


def test_items_of_an_array_are_counted_once_the_file_is_done(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    looks.look()
    write(tmp_path / "a.json", json.dumps([{"x": "y" * 100}] * 20_000))
    write(tmp_path / "b.json", "[1, 2, 3]")
    write(tmp_path / "c.json", '{"a": [1, 2]}')
    assert records_of(looks.look()) is None
    assert records_of(looks.after(30)) == 20_003


def test_records_wait_for_arrays_that_were_there_before(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "[1, 2, 3]")
    write(tmp_path / "b.jsonl", "{}\n")
    looks = Looks(tmp_path)
    assert records_of(looks.look()) is None
    assert records_of(looks.after(20)) == 4


def test_files_that_hold_no_records_leave_them_unknown(tmp_path: Path) -> None:
    write(tmp_path / "model.bin", b"\x01\x02" * 100)
    assert records_of(Looks(tmp_path).after(30)) is None
    assert Looks(tmp_path / "later").look().owners == {}


def test_a_file_that_cannot_be_opened_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", "{}\n")
    write(tmp_path / "b.jsonl", "{}\n{}\n")
    real = os.open

    def refuse(path: str, flags: int, *more: object) -> int:
        if path.endswith("b.jsonl"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    assert records_of(Looks(tmp_path).look()) == 1


def test_records_of_a_file_that_holds_none_any_more_are_forgotten(tmp_path: Path) -> None:
    path, looks = write(tmp_path / "out.json", json.dumps([1] * 100)), Looks(tmp_path)
    assert records_of(looks.after(30)) == 100
    write(path, "")
    assert records_of(looks.after(40)) == 0
    write(path, "[1, 2]")
    assert records_of(looks.after(40)) == 2
    write(path, "[1, 2")
    assert records_of(looks.after(60)) is None


def test_records_that_only_the_text_tells_are_forgotten_with_it(tmp_path: Path) -> None:
    path, looks = write(tmp_path / "rows.1", "[1, 2, 3]"), Looks(tmp_path)
    assert records_of(looks.after(30)) == 3
    write(path, "words")
    assert records_of(looks.after(60)) is None
    write(path, "[1]")
    assert records_of(looks.after(60)) == 1
    write(path, '{"a": 1}')
    assert records_of(looks.after(60)) is None


def test_a_hole_is_counted_once_it_is_filled(tmp_path: Path) -> None:
    line = b'{"number": 1}\n'
    whole, looks = line * 2000, Looks(tmp_path)
    looks.look()
    path = write(tmp_path / "a.jsonl", whole[:8192] + bytes(4096) + whole[12288:])
    facts = path.stat()
    assert records_of(looks.after(30)) == 8192 // len(line)
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(whole[8192:12288])
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # as some servers leave it
    assert records_of(looks.look()) == 2000


def test_a_hole_that_stays_is_passed_after_a_while(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    looks.look()
    path = write(tmp_path / "a.jsonl", b"{}\n" * 100 + bytes(4096) + b"\n" + b"{}\n" * 50)
    assert records_of(looks.look()) == 100
    for _ in range(10):
        with path.open("ab") as file:
            file.write(b"{}\n")
        assert records_of(looks.look()) == 100
    assert records_of(looks.after(15)) == 161


def test_a_header_without_a_newline_is_no_record(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "name,score")
    write(tmp_path / "b.csv", "name,score\na,1\nb,2")
    assert records_of(Looks(tmp_path).after(40)) == 2


def test_files_seen_to_appear_are_of_this_job_whatever_their_times(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    looks.look()
    write(tmp_path / "new", "x", START - 200)
    assert looks.look().first_file == (START, "new")


def test_the_clock_of_a_server_may_be_a_little_behind(tmp_path: Path) -> None:
    write(tmp_path / "a", "x", START - 30)
    assert Looks(tmp_path).look().first_file == (START, "a")


def test_files_of_a_worker_are_those_that_no_other_writes(tmp_path: Path) -> None:
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


def test_of_a_directory_of_its_own_a_node_answers_for_all() -> None:
    rank_of = partial(rank_in_file_name, ranks={("worker", 0): 0, ("worker", 1): 1})
    second = FileOwnership(rank_of, frozenset({1}), frozenset({0}), owns_unranked=False, is_local=True)
    assert [second(name) for name in ("out_worker_0", "out_worker_1", "out_worker_7", "summary")] == [
        *(NOBODY, 1, NOBODY, NOBODY)
    ]


def test_a_damaged_file_is_said_after_a_second_look_into_it(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    looks.look()
    write(tmp_path / "a.gz", DAMAGED)
    write(tmp_path / "b.gz", WHOLE)
    found = {seconds: looks.look().invalid_files for seconds in range(5, 45, 5)}
    assert found == {5: 0, 10: 0, 15: 0, 20: 0, 25: 1, 30: 1, 35: 1, 40: 1}
    look = looks.look()
    assert [(file.file, file.format) for file in look.invalid] == [("a.gz", "gzip")]
    assert look.valid_files == 1


def test_a_file_that_was_written_in_between_is_not_said_to_be_damaged(tmp_path: Path) -> None:
    path, looks = write(tmp_path / "a.gz", DAMAGED), Looks(tmp_path)
    for number in range(10):
        assert looks.after(15).invalid_files == 0
        write(path, DAMAGED[: -number - 1])
    write(path, WHOLE)
    look = looks.after(60)
    assert (look.invalid_files, look.valid_files) == (0, 1)


def test_what_was_written_during_a_look_into_it_is_looked_into_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looked = write(tmp_path / "a.gz", DAMAGED), 0

    def check_meanwhile(source: FileSource) -> FileCheck:
        nonlocal looked
        looked += 1
        verdict = check_file(source)
        if looked == 2:
            path.write_bytes(DAMAGED[:-1])
        return verdict

    monkeypatch.setattr(outputs_reader, "check_file", check_meanwhile)
    looks = Looks(tmp_path)
    while looked < 2:
        assert looks.look().invalid_files == 0
    assert looks.look().invalid_files == 0
    assert looks.after(60).invalid_files == 1


def test_a_damaged_file_that_is_written_again_or_goes_is_so_no_longer(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz", "c.gz"):
        write(tmp_path / name, DAMAGED)
    looks = Looks(tmp_path)
    assert looks.after(60).invalid_files == 3
    write(tmp_path / "a.gz", WHOLE)
    (tmp_path / "b.gz").unlink()
    assert looks.look().invalid_files == 1
    assert looks.after(60).invalid_files == 1


def test_a_growing_file_with_a_half_written_last_line_is_fine(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": ')
    look = Looks(tmp_path).after(60)
    assert look.invalid_files == 0


def test_no_more_files_are_looked_into_at_once_than_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.files.outputs.folder_reader.HOT_LEAST", 4)
    monkeypatch.setattr(outputs_reader, "CHECK_S", 60.0)
    for number in range(30):
        write(tmp_path / f"{number:02d}.gz", WHOLE, START + number)
    looks = Looks(tmp_path)
    counts = [looks.look().valid_files for _ in range(8)]
    assert counts == [0, 0, 8, 16, 24, 30, 30, 30]


def test_those_that_were_written_last_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.files.outputs.folder_reader.HOT_LEAST", 4)
    monkeypatch.setattr(outputs_reader, "CHECK_S", 60.0)
    for number in range(30):
        write(tmp_path / f"{number * 7 % 30:02d}.gz", DAMAGED, START + number * 7 % 30)
    looks = Looks(tmp_path)
    looks.after(15)
    looked_into = {looks.watch._folder.names[slot] for slot in looks.watch._suspected}
    assert looked_into == {f"{number:02d}.gz" for number in range(22, 30)}


def test_only_some_damaged_files_are_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_reader, "MOST_CHECKS", 1000)
    monkeypatch.setattr(outputs_reader, "CHECK_S", 60.0)
    for number in range(30):
        write(tmp_path / f"{number}.gz", DAMAGED)
    look = Looks(tmp_path).after(60)
    assert (look.invalid_files, len(look.invalid)) == (30, outputs_reader.MOST_REPORTED_INVALID)


def test_names_are_told_as_text_that_can_be_shown(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\nb.gz"))
    write(path, DAMAGED)
    look = Looks(tmp_path).after(60)
    assert [file.file for file in look.invalid] == ["a\\udcff\\nb.gz"]


def test_the_first_output_is_that_of_this_job(tmp_path: Path) -> None:
    write(tmp_path / "old", "x", START - 100)
    looks = Looks(tmp_path)
    assert looks.look().first_file is None
    write(tmp_path / "new", "x", START + 7)
    assert looks.look().first_file == (START + 7, "new")
    write(tmp_path / "newer", "x", START + 8)
    assert looks.look().first_file == (START + 7, "new")


def test_a_watch_that_begins_late_knows_the_first_output_by_its_time(tmp_path: Path) -> None:
    write(tmp_path / "old", "x", START - 100)
    write(tmp_path / "b", "x", START + 20)
    write(tmp_path / "a", "x", START + 10)
    assert Looks(tmp_path).look().first_file == (START + 10, "a")
    assert Looks(tmp_path, since=None).look().first_file is None


def test_a_file_that_is_whole_or_renamed_into_place_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "before.gz", WHOLE)
    looks = Looks(tmp_path, "*[!p]")
    looks.look()
    write(tmp_path / "a.gz", WHOLE)
    write(tmp_path / "growing.jsonl", '{"a": 1}\n')
    write(tmp_path / "b.jsonl.tmp", '{"a": 1}\n')
    looks.look()
    (tmp_path / "b.jsonl.tmp").rename(tmp_path / "b.jsonl")
    look = looks.after(60)
    assert sorted((file.file, file.bytes) for file in look.finished) == [("a.gz", len(WHOLE)), ("b.jsonl", 9)]
    assert [file.number for file in look.finished] == [1, 2]
    write(tmp_path / "a.gz", WHOLE + WHOLE)
    assert looks.after(60).finished == look.finished
    (tmp_path / "a.gz").rename(tmp_path / "c.gz")
    assert looks.after(60).finished == look.finished


def test_of_many_files_it_is_not_told_that_they_are_complete(tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    looks.look()
    for number in range(outputs_reader.FEW_FILES + 1):
        write(tmp_path / f"{number}.gz", WHOLE)
    assert looks.after(120).finished == ()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "half", "rename", "delete", "replace", "look"]),
        st.sampled_from(["a.jsonl", "b_rank0.jsonl", "c_rank1.jsonl", "d.tmp"]),
        st.sampled_from(["a.jsonl", "b_rank0.jsonl", "c_rank1.jsonl", "d.tmp"]),
    ),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_records_are_those_in_the_files_after_anything(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, str]]
) -> None:
    directory = tmp_path_factory.mktemp("out")
    looks = Looks(directory, "*.jsonl")
    looks.look()
    for kind, name, other in steps:
        path = directory / name
        if kind == "look":
            looks.look(20)
        elif kind == "rename" and path.exists():
            path.rename(directory / other)
        elif kind == "delete":
            path.unlink(missing_ok=True)
        elif kind == "replace":
            write(path, f'{{"name": "{other}"}}\n')
        elif kind in ("append", "half"):
            with path.open("a") as out:
                out.write(f'{{"name": "{other}"}}\n' if kind == "append" else "{")
    looks.look(100)
    look = looks.look(100)
    texts = {path.name: path.read_text() for path in directory.glob("*.jsonl")}
    assert {owner: found.files for owner, found in look.owners.items() if found.files} == {
        EVERYTHING(name): 1 for name in texts
    }
    assert records_of(look) == (sum(text.count("\n") for text in texts.values()) if texts else None)
