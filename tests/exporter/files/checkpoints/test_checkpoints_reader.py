"""Polls of checkpoint folders on disk: what is reported, skipped and bounded."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.checkpoints import checkpoints_reader
from exporter.files.checkpoints.checkpoints_reader import CheckpointReading, CheckpointWatch, bare_name
from exporter.files.checkpoints.entries import CheckpointFile
from exporter.files.checkpoints.layouts_reader import parse_array, parse_index
from tests.exporter.files.checkpoints.checkpoint_trees import START, Folder, safetensors_bytes, torch_bytes
from tests.support.exporter import SOON_S, without_rights

NOW = START + 1000.0


class _StorageInfo:
    """Where an item of a PyTorch distributed checkpoint is."""

    def __init__(self, name: str, length: int) -> None:
        self.relative_path, self.offset, self.length = name, 0, length


def distcp_index(lengths: dict[str, int]) -> bytes:
    return pickle.dumps([_StorageInfo(name, length) for name, length in lengths.items()])


def names_of(reading: CheckpointReading) -> list[str]:
    return sorted(entry.name for entry in reading.entries)


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("checkpoint_12.pt.tmp", "checkpoint_12.pt"),
        (".checkpoint_12.pt.tmp", "checkpoint_12.pt"),
        (".checkpoint_12.pt.4711.tmp", "checkpoint_12.pt"),
        ("tmp-checkpoint-500", "checkpoint-500"),
        ("checkpoint_12.pt.part", "checkpoint_12.pt"),
        ("checkpoint_12.pt.tmp-4711", "checkpoint_12.pt"),
        ("100.orbax-checkpoint-tmp-1699999999", "100"),
        ("step_5-tmp", "step_5"),
        ("step=5.ckpt-unfinished", "step=5.ckpt"),
        ("checkpoint_12.pt", "checkpoint_12.pt"),
        ("ckpt_part_3.pt", "ckpt_part_3.pt"),
        ("model_temp_0.7.pt", "model_temp_0.7.pt"),
        ("attempt-5", "attempt-5"),
        (".", "."),
        (".tmp", "tmp"),
        ("model.ckpt-1000000.tmp", "model.ckpt-1000000"),
        ("checkpoint_12.pt.k3j2h1.tmp", "checkpoint_12.pt"),
    ],
)
def test_marks_of_temporary_files_are_stripped(name: str, bare: str) -> None:
    assert bare_name(name) == bare


@given(st.text(min_size=1, max_size=60))
def test_a_bare_name_is_never_empty_and_has_no_marks_left(name: str) -> None:
    bare = bare_name(name)
    assert bare
    assert bare_name(bare) == bare


def test_an_index_names_its_shards() -> None:
    assert parse_index(json.dumps({"weight_map": {"a": "2.bin", "b": "1.bin", "c": "1.bin"}})) == ("1.bin", "2.bin")
    for text in ("", "[]", "{", '{"weight_map": 3}', "[" * 100_000, "\0", '{"weight_map": {"a": 1}, "b": "\\ud800"}'):
        assert not parse_index(text)


def test_only_changes_are_reported(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write_all(["a_1.pt", "b_2/x.pt", "b_2/y/z.pt"])
    first = folder.watch.poll(NOW)
    assert names_of(first) == ["a_1.pt", "b_2"]
    assert [file.path for file in first.entries[1].files] == ["b_2/x.pt", "b_2/y/z.pt"]
    assert set(first.names or ()) == {"a_1.pt", "b_2"}
    assert folder.watch.poll(NOW + 5) == CheckpointReading((), None)
    folder.now += 6
    folder.write("b_2/y/z.pt", b"more")
    assert names_of(folder.watch.poll(NOW + 10)) == ["b_2"]
    folder.remove("a_1.pt")
    assert folder.watch.poll(NOW + 15).names == ("b_2",)


def test_a_reading_can_be_pickled(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", verify=True)
    folder.write("b_2/x.pt")
    reading = folder.watch.poll(NOW)
    assert pickle.loads(pickle.dumps(reading)) == reading  # noqa: S301 - its own


def test_a_pattern_is_matched_without_the_mark_of_a_temporary_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "checkpoint_*.pt")
    folder.write_all([".checkpoint_1.pt.tmp", "checkpoint_2.pt", "checkpoint_2.json", ".checkpoint_3.pt", "x.tmp"])
    entries = {entry.name: (entry.bare, entry.temporary) for entry in folder.watch.poll(NOW).entries}
    assert entries == {
        ".checkpoint_1.pt.tmp": ("checkpoint_1.pt", True),
        ".checkpoint_3.pt": ("checkpoint_3.pt", True),
        "checkpoint_2.pt": ("checkpoint_2.pt", False),
    }


def test_a_pattern_for_temporary_names_matches_them_unchanged(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "*.part")
    folder.write("a_1.part")
    assert [entry.temporary for entry in folder.watch.poll(NOW).entries] == [False]


def test_hidden_files_in_a_directory_are_not_temporary(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write_all(["s_1/.metadata", "s_1/.zarray", "s_1/x.pt.tmp", "s_1/.nfs000012"])
    (entry,) = folder.watch.poll(NOW).entries
    assert {file.path: file.temporary for file in entry.files} == {
        "s_1/.metadata": False,
        "s_1/.zarray": False,
        "s_1/x.pt.tmp": True,
    }


def test_entries_that_are_not_regular_files_are_skipped(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    outside = tmp_path / "outside.pt"
    outside.write_bytes(b"secret")
    (tmp_path / "outside").mkdir()
    os.mkfifo(folder.path / "checkpoint_1.pt")
    os.symlink(outside, folder.path / "checkpoint_2.pt")
    os.symlink(tmp_path / "outside", folder.path / "checkpoint_3")
    os.symlink("checkpoint_4.pt", folder.path / "checkpoint_4.pt")
    folder.write("checkpoint_6/x.pt")
    os.mkfifo(folder.path / "checkpoint_6" / "fifo.pt")
    os.symlink("/", folder.path / "checkpoint_6" / "root")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder.path / "checkpoint_5.pt"))
    began = time.monotonic()
    for seconds in (0, 15, 30, 45):
        reading = folder.watch.poll(NOW + seconds)
    assert time.monotonic() - began < SOON_S
    assert dict(reading.passed_over) == {"checkpoint_1.pt": "FIFO", "checkpoint_5.pt": "socket"}
    folder.restart()
    (entry,) = folder.watch.poll(NOW + 60).entries
    assert [file.path for file in entry.files] == ["checkpoint_6/x.pt"]


def test_a_link_replaced_by_a_file_is_reported(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    os.symlink("nowhere", folder.path / "last.ckpt")
    assert folder.watch.poll(NOW).entries == ()
    (folder.path / "last.ckpt").unlink()
    folder.write("last.ckpt")
    os.utime(folder.path, (NOW + 3, NOW + 3))
    assert names_of(folder.watch.poll(NOW + 5)) == ["last.ckpt"]


def test_an_absent_folder_has_no_entries(tmp_path: Path) -> None:
    assert CheckpointWatch(str(tmp_path / "no"), "*").poll(NOW) == CheckpointReading((), None)
    (tmp_path / "file").write_bytes(b"")
    assert CheckpointWatch(str(tmp_path / "file"), "*").poll(NOW).entries == ()


def test_an_unreadable_folder_is_an_error_and_an_unreadable_part_makes_it_incomplete() -> None:
    with without_rights() as place:
        folder = Folder(place / "ckpt")
        folder.write("s_1/x/y.pt")
        (folder.path / "s_1" / "x").chmod(0)
        try:
            (entry,) = folder.watch.poll(NOW).entries
            assert not entry.is_fully_read
            folder.path.chmod(0)
            folder.restart()
            with pytest.raises(PermissionError):
                folder.watch.poll(NOW)
        finally:
            folder.path.chmod(0o700)
            (folder.path / "s_1" / "x").chmod(0o700)


def test_hard_names_survive(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", verify=True)
    hard = ["a\n1.pt", " 2 .pt", "\udcff_3.pt", '"4".pt', "-of-5.pt", "step_\u0663.pt", "a) b (6.pt"]
    folder.write_all(hard, torch_bytes())
    folder.write_all(f"d\n{name}/{name}" for name in hard)
    folder.poll_for(60)
    assert folder.watch.poll(folder.now + 5) == CheckpointReading((), None)
    assert set(folder.watch._entry_watches) == {*hard, *(f"d\n{name}" for name in hard)}


def test_a_walk_is_bounded_in_depth_and_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write_all(["a_1/b/c/d/e/f/g/h/in.pt", "a_1/b/c/d/e/f/g/h/i/out.pt"])
    (entry,) = folder.watch.poll(NOW).entries
    assert ([file.path for file in entry.files], entry.is_fully_read) == (["a_1/b/c/d/e/f/g/h/in.pt"], False)
    monkeypatch.setattr(checkpoints_reader, "MOST_ENTRIES", 5)
    folder.write_all(f"s_2/{number}.pt" for number in range(20))
    folder.restart()
    found = {entry.name: entry for _ in range(3) for entry in folder.watch.poll(NOW).entries}
    assert len(found["s_2"].files) <= 5
    assert not found["s_2"].is_fully_read
    assert folder.poll() == []


def test_a_first_scan_of_many_files_takes_several_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_reader, "MOST_ENTRIES", 10)
    folder = Folder(tmp_path / "ckpt")
    for step in range(25):
        folder.write(f"checkpoint_{step}.pt", mtime=START + step)
    assert folder.watch.poll(NOW).has_unread_names
    folder.restart()
    assert [folder.poll(), folder.history.total, folder.poll(), folder.history.total] == [[], 0, [], 0]
    assert [folder.poll(), folder.history.total] == [[], 25]


def test_a_settled_directory_is_not_walked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write("s_1/x.pt")
    folder.poll_for(200)
    monkeypatch.setattr(CheckpointWatch, "_walk", None)
    folder.poll_for(200)
    monkeypatch.undo()
    folder.write("s_1/y.pt")
    assert [file.path for entry in folder.watch.poll(folder.now + 5).entries for file in entry.files] == [
        "s_1/x.pt",
        "s_1/y.pt",
    ]


def test_files_of_old_directories_are_not_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    for step in range(20):
        folder.write_all(f"s_{step}/{number}.pt" for number in range(3))
        folder.poll_for(150)
    held = [name for name, unit in folder.watch._entry_watches.items() if unit.entry is not None and unit.entry.files]
    assert len(held) <= checkpoints_reader.MOST_HELD + 1
    assert "s_19" in held
    assert folder.history.total == 20
    folder.write_all(f"s_3/{number}.pt" for number in range(3))
    assert folder.poll_for(60) == ["saved s_3"]


def test_very_many_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_reader, "MOST_KNOWN_ENTRIES", 40)
    folder = Folder(tmp_path / "ckpt")
    folder.poll()
    for step in range(100):
        folder.write(f"checkpoint_{step}.pt")
        folder.poll(15)
        assert len(folder.watch._entry_watches) <= 40
    folder.poll_for(30)
    assert folder.history.total == 100


def test_a_directory_that_replaces_a_file_is_the_checkpoint(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write("model.ckpt")
    assert folder.poll_for(30) == ["saved model.ckpt"]
    folder.remove("model.ckpt")
    folder.write("model.ckpt/x.pt")
    assert folder.poll_for(60) == ["saved model.ckpt"]
    assert list(folder.checkpoints._keys_by_name) == ["model.ckpt"]


def test_inodes_that_change_at_each_read_are_no_change(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("step_1/x.pt")
    folder.write("checkpoint_2.pt")
    real, numbers = CheckpointWatch._record_files, iter(range(10_000))

    def record_and_call(
        self: CheckpointWatch, name: str, unit: Any, files: Any, now: float, *, is_fully_read: bool
    ) -> None:
        real(
            self,
            name,
            unit,
            tuple(file._replace(inode=next(numbers)) for file in files),
            now,
            is_fully_read=is_fully_read,
        )

    monkeypatch.setattr(CheckpointWatch, "_record_files", record_and_call)
    assert folder.poll_for(60) == ["saved checkpoint_2.pt", "saved step_1"]
    assert folder.watch.poll(folder.now + 5).entries == ()


def test_a_long_type_of_an_array_is_searched_quickly() -> None:
    array = {"zarr_format": 2, "chunks": [1], "shape": [1], "compressor": None, "filters": None}
    began = time.process_time()
    for dtype, length in (("<f4", 4), ("1" * 100_000 + "x", None), ("1" * 100_000, None)):
        found = parse_array(json.dumps({**array, "dtype": dtype}).encode())
        assert found is not None
        assert found.chunk_bytes == length
    assert time.process_time() - began < 1.0


def test_a_huge_sparse_file_is_checked_quickly(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", verify=True)
    path = folder.write("checkpoint_1.pt", torch_bytes())
    os.truncate(path, 1 << 40)
    folder.touch(path)
    began = time.monotonic()
    folder.poll_for(60)
    assert time.monotonic() - began < SOON_S
    assert folder.last.bytes == 1 << 40
    assert folder.last.state == "invalid"


# Validity


def test_whole_files_make_a_valid_checkpoint(verified: Folder) -> None:
    verified.write("checkpoint-1/model.safetensors", safetensors_bytes())
    verified.write("checkpoint-1/optimizer.pt", torch_bytes())
    assert verified.poll_for(60) == ["saved checkpoint-1"]
    last = verified.last_complete
    assert (last.state, last.valid, last.reason) == ("complete", True, None)


def test_one_part_that_nobody_can_vouch_for_leaves_a_checkpoint_undecided(verified: Folder) -> None:
    verified.write("checkpoint-1/model.safetensors", safetensors_bytes())
    verified.write("checkpoint-1/unknown.dat", b"\x00\x01\x02")
    verified.poll_for(60)
    last = verified.last_complete
    assert (last.state, last.valid) == ("complete", None)
    assert last.reason == "checkpoint-1/unknown.dat: has an unknown format"


def test_a_checkpoint_of_unknown_files_is_neither_valid_nor_invalid(verified: Folder) -> None:
    verified.write("checkpoint_1.dat", b"\x00\x01\x02")
    verified.poll_for(60)
    assert (verified.last.state, verified.last.valid) == ("complete", None)


@pytest.mark.parametrize("content", [torch_bytes()[:-30], b"", torch_bytes()[:40]], ids=["cut", "empty", "top"])
def test_a_damaged_shard_is_reported_once_after_two_checks(verified: Folder, content: bytes) -> None:
    verified.write("step_1/a.pt", torch_bytes())
    verified.write("step_1/b.pt", content)
    happened = []
    for _ in range(24):
        happened += [(verified.now - START - 1000, text) for text in verified.poll()]
    assert [text for _, text in happened] == ["saved step_1", "damaged step_1"]
    assert happened[1][0] - happened[0][0] >= checkpoints_reader.RECHECK_S
    last = verified.last_complete
    assert (last.state, last.valid, verified.history.total) == ("invalid", False, 1)
    assert last.reason is not None
    assert last.reason.startswith("step_1/b.pt: ")


def test_a_damaged_file_that_is_rewritten_is_whole(verified: Folder) -> None:
    verified.write("checkpoint.pt", torch_bytes()[:-30])
    verified.poll_for(90)
    verified.write("checkpoint.pt", torch_bytes())
    verified.poll_for(60)
    last = verified.last_complete
    assert (last.state, last.valid, verified.history.total) == ("complete", True, 2)
    assert [event.kind for event in verified.happened] == ["saved", "damaged", "saved"]


def test_a_file_that_is_whole_at_the_second_check_is_not_damaged(verified: Folder) -> None:
    verified.write("checkpoint_1.pt", torch_bytes()[:-30])
    verified.poll_for(20)
    verified.write("checkpoint_1.pt", torch_bytes())
    verified.poll_for(60)
    assert {event.kind for event in verified.happened} == {"saved"}


def test_a_good_file_written_with_pauses_is_never_damaged(verified: Folder) -> None:
    for step in (1, 2, 3, 4):
        content = torch_bytes(step)
        for end in range(200, len(content), 100):
            verified.write(f"checkpoint_{step}.pt", content[:end])
            verified.poll_for(35)
        verified.write(f"checkpoint_{step}.pt", content)
        verified.poll_for(200)
    assert [event.kind for event in verified.happened] == ["saved"] * 4
    last = verified.last_complete
    assert (verified.history.total, last.valid) == (4, True)


def test_a_truncated_file_is_damaged_as_soon_as_the_next_is_written(verified: Folder) -> None:
    verified.write("checkpoint_1.pt", torch_bytes()[:-30])
    assert verified.poll_for(30) == ["saved checkpoint_1.pt"]
    verified.write("checkpoint_2.pt", torch_bytes())
    assert verified.poll_for(30) == ["damaged checkpoint_1.pt", "saved checkpoint_2.pt"]


@pytest.mark.parametrize("name", ["checkpoint_1.pt", "step_1/a.pt"])
def test_on_one_node_a_truncated_file_is_damaged_at_the_second_poll(lone: Folder, name: str) -> None:
    lone.write(name, torch_bytes()[:-30])
    saved = name.partition("/")[0]
    assert lone.poll_for(10) == [f"saved {saved}", f"damaged {saved}"]
    assert (lone.last.state, lone.poll_for(120)) == ("invalid", [])


def test_on_one_node_a_truncated_file_that_is_open_may_become_whole(lone: Folder) -> None:
    content = torch_bytes()
    path = lone.write("step_1/a.pt", content[:-30])
    code = "import sys; f = open(sys.argv[1], 'r+b'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=PIPE, stdout=PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert lone.poll_for(55) == ["saved step_1"]
    lone.write("step_1/a.pt", content)
    lone.poll_for(120)
    assert (lone.last.state, [event.kind for event in lone.happened]) == ("complete", ["saved"])


@pytest.mark.parametrize("pause_s", [5, 10, 30, 55])
def test_on_one_node_shards_written_slowly_are_never_damaged(lone: Folder, pause_s: float) -> None:
    for step in (1, 2):
        for rank in range(4):
            lone.write(f"step_{step}/mp_rank_0{rank}_model_states.pt", b"")
            lone.poll_for(pause_s)
            lone.write(f"step_{step}/mp_rank_0{rank}_model_states.pt", torch_bytes(rank))
            lone.poll_for(pause_s)
        lone.write(f"step_{step}/state.json", "[1,")
        lone.poll_for(pause_s)
    lone.poll_for(200)
    assert {event.kind for event in lone.happened} == {"saved"}


def test_on_one_node_shards_replaced_before_their_index_are_not_damaged(lone: Folder) -> None:
    for size in (8, 4):
        for rank in range(2):
            lone.write(f"step_1/__{rank}_0.distcp", os.urandom(size))
            lone.poll_for(30)
        lone.write("step_1/.metadata", distcp_index({f"__{rank}_0.distcp": size for rank in range(2)}))
        lone.poll_for(120)
    assert {event.kind for event in lone.happened} == {"saved"}
    for rank in range(2):
        lone.write(f"step_2/__{rank}_0.distcp", os.urandom(3 + rank))
    lone.poll()
    lone.write("step_2/.metadata", distcp_index({f"__{rank}_0.distcp": 4 for rank in range(2)}))
    assert lone.poll_for(10) == ["saved step_2", "damaged step_2"]


def test_damage_of_a_file_that_was_renamed_into_place_needs_only_a_second_check(verified: Folder) -> None:
    verified.write("checkpoint_1.pt.tmp", torch_bytes()[:-30])
    verified.poll()
    verified.rename("checkpoint_1.pt.tmp", "checkpoint_1.pt")
    assert verified.poll_for(30) == ["saved checkpoint_1.pt", "damaged checkpoint_1.pt"]


@pytest.mark.parametrize("name", ["a.ckpt", "a.bin", "a.pt", "a.safetensors"])
@pytest.mark.parametrize("size", [1, 5000])
def test_a_file_of_zeros_is_damaged(verified: Folder, name: str, size: int) -> None:
    verified.write(f"step_1/{name}", bytes(size))
    verified.poll_for(120)
    assert [event.kind for event in verified.happened] == ["saved", "damaged"]


def test_numbers_that_begin_with_zeros_are_not_damaged(verified: Folder) -> None:
    verified.write("step_1/weights.bin", bytes(5000) + b"\1\2\3\4")
    verified.write("step_1/weights.dat", bytes(5000))
    verified.poll_for(120)
    assert [event.kind for event in verified.happened] == ["saved"]


def test_half_written_text_files_do_not_damage_a_checkpoint(verified: Folder) -> None:
    verified.write("step_1/model.pt", torch_bytes())
    for name, text in (("a.jsonl", '{"a": 1}\n{"b"'), ("b.json", '{"a": '), ("c.csv", 'a,b\n1,"'), ("d.txt", "x")):
        verified.write(f"step_1/{name}", text)
    verified.poll_for(200)
    last = verified.last_complete
    assert (last.state, last.valid) == ("complete", True)
    verified.write("step_2/model.pt", torch_bytes())
    verified.write("step_2/model.safetensors.index.json", '{"weight_map": ')
    verified.poll_for(200)
    assert verified.last_complete.state == "invalid"


def test_a_file_seen_to_appear_is_checked_despite_an_old_mtime(verified: Folder) -> None:
    verified.write("checkpoint_1.pt", torch_bytes()[:-30], mtime=START - 600)
    verified.poll_for(120)
    assert [event.kind for event in verified.happened] == ["saved", "damaged"]


def test_a_poll_ends_in_time_and_the_next_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "ckpt")
    for step in range(60):
        folder.write(f"checkpoint_{step}.pt", mtime=START + step)
    real, now = os.lstat, 0.0

    def slow(path: str) -> os.stat_result:
        nonlocal now
        now += 0.01
        return real(path)

    monkeypatch.setattr(checkpoints_reader, "POLL_S", 0.1)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(os, "lstat", slow)
    durations = []
    while not folder.history.total:
        began = now
        assert folder.poll() == []
        durations.append(now - began)
    assert len(durations) >= 6
    assert max(durations) < 0.2
    assert folder.history.total == 60


def test_a_slow_listing_or_walk_is_not_repeated_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, now, read = os.scandir, 0.0, []

    def slow(path: Any) -> Any:
        nonlocal now
        now += 0.1
        read.append("folder" if path == str(folder.path) else "checkpoint")
        return real(path)

    folder = Folder(tmp_path / "ckpt")
    folder.write("checkpoint_1/a.pt")
    monkeypatch.setattr(checkpoints_reader, "LIST_REST_RATIO", 100.0)
    monkeypatch.setattr(checkpoints_reader, "REST_RATIO", 200.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(os, "scandir", slow)
    for _ in range(5):
        folder.write("checkpoint_1/a.pt")
        folder.poll(5.0)
    assert (read.count("folder"), read.count("checkpoint")) == (3, 2)


def test_names_are_read_in_several_polls_and_files_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_reader, "LIST_S", 0.0)
    monkeypatch.setattr(checkpoints_reader, "LIST_STEP", 1)
    folder = Folder(tmp_path / "ckpt", "checkpoint_*")
    folder.write_all([*(f"other_{number}" for number in range(8)), "checkpoint_1.pt", "checkpoint_2.pt"])
    readings = [folder.watch.poll(NOW + number) for number in range(11)]
    assert [reading.has_unread_names for reading in readings] == [True] * 10 + [False]
    assert [names_of(reading) for reading in readings] == [[]] * 10 + [["checkpoint_1.pt", "checkpoint_2.pt"]]
    folder.remove("checkpoint_1.pt")
    folder.write("checkpoint_2.pt", b"more")
    folder.write("checkpoint_3.pt")
    readings = [folder.watch.poll(NOW + 1000 + number) for number in range(11)]
    assert [names_of(reading) for reading in readings] == [["checkpoint_2.pt"], *[[]] * 9, ["checkpoint_3.pt"]]
    assert not any(reading.has_unread_names for reading in readings)
    assert sorted(readings[-1].names or ()) == ["checkpoint_2.pt", "checkpoint_3.pt"]


def test_a_folder_that_is_replaced_or_fails_while_its_names_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_reader, "LIST_S", 0.0)
    monkeypatch.setattr(checkpoints_reader, "LIST_STEP", 1)
    folder = Folder(tmp_path / "ckpt")
    folder.write_all(f"checkpoint_{number}.pt" for number in range(5))
    folder.watch.poll(NOW)
    folder.path.rename(tmp_path / "moved")
    assert not folder.watch.poll(NOW + 1).has_unread_names
    folder.write("checkpoint_9.pt")
    folder.watch.poll(NOW + 2)
    (tmp_path / "moved").rename(folder.path.rename(tmp_path / "other").with_name("ckpt"))
    assert folder.watch.poll(NOW + 3).has_unread_names
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWatch, "_is_wanted", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.raises(OSError, match="I/O"):
            folder.watch.poll(NOW + 4)
    found = {name for number in range(9) for name in names_of(folder.watch.poll(NOW + 5 + number))}
    assert found == {f"checkpoint_{number}.pt" for number in range(5)}


def test_a_walk_continues_at_the_next_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write_all(f"checkpoint_{step}/{sub}/rank{rank}.pt" for step in (1, 2) for sub in "ab" for rank in range(3))
    monkeypatch.setattr(checkpoints_reader, "POLL_S", 0.0)
    before = len(os.listdir("/proc/self/fd"))
    readings = [folder.watch.poll(NOW + number) for number in range(60)]
    assert [reading.has_unread_names for reading in readings].index(False) > 12
    complete_at = next(number for number, reading in enumerate(readings) if not reading.has_unread_names)
    entries = [entry for reading in readings for entry in reading.entries]
    assert [(entry.name, len(entry.files), entry.is_fully_read) for entry in entries] == [
        ("checkpoint_1", 6, True),
        ("checkpoint_2", 6, True),
    ]
    assert readings[complete_at].entries[0].name == "checkpoint_2"
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_a_directory_deleted_during_a_walk_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write_all(f"checkpoint_{step}/rank{rank}.pt" for step in (1, 2) for rank in range(5))
    monkeypatch.setattr(checkpoints_reader, "POLL_S", 0.0)
    folder.watch.poll(NOW)
    folder.watch.poll(NOW + 1)
    shutil.rmtree(folder.path / "checkpoint_1")
    folder.write("checkpoint_1")
    found = {entry.name: len(entry.files) for number in range(30) for entry in folder.watch.poll(NOW + number).entries}
    assert found == {"checkpoint_1": 1, "checkpoint_2": 5}


def test_a_few_files_are_checked_in_each_poll_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real = CheckpointWatch._check_file

    def record_and_call(self: CheckpointWatch, unit: object, file: CheckpointFile, now: float) -> None:
        checked.append(file.path)
        real(self, unit, file, now)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointWatch, "_check_file", record_and_call)
    folder = Folder(tmp_path / "ckpt", verify=True)
    for step in range(20):
        folder.write(f"checkpoint_{step:02}.pt", torch_bytes(), mtime=START + step)
    folder.write("checkpoint_99.pt", torch_bytes(), mtime=START - 500)
    folder.watch.poll(NOW)
    assert checked == [f"checkpoint_{step}.pt" for step in range(19, 11, -1)]
    folder.watch.poll(NOW + 5)
    folder.watch.poll(NOW + 10)
    folder.watch.poll(NOW + 15)
    assert len(checked) == len(set(checked)) == 20
    assert "checkpoint_99.pt" not in checked


def test_a_file_that_vanishes_during_a_poll_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "ckpt", verify=True)
    folder.write_all(["checkpoint_1.pt", "checkpoint_2.pt"], torch_bytes())
    real = os.lstat

    def vanish(path: str) -> os.stat_result:
        if str(path).endswith("_1.pt"):
            Path(path).unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(os, "lstat", vanish)
    assert names_of(folder.watch.poll(NOW)) == ["checkpoint_2.pt"]
    monkeypatch.undo()
    monkeypatch.setattr(CheckpointWatch, "_list", lambda *_: False)
    (folder.path / "checkpoint_2.pt").unlink()
    assert folder.watch.poll(NOW + 5).names == ()


def test_a_clock_that_is_set_back_does_not_stop_the_watch(verified: Folder) -> None:
    verified.now -= 900.0
    verified.write("checkpoint_1.pt", torch_bytes())
    assert verified.poll_for(60) == ["saved checkpoint_1.pt"]
