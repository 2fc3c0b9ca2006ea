"""Whether a checkpoint is being written, complete or of an earlier job, in the layouts of real frameworks."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.files.checkpoints.entries import CheckpointEntry, CheckpointFile
from exporter.files.checkpoints.history import MOST_REMEMBERED
from exporter.files.checkpoints.sets import Checkpoint
from exporter.files.checkpoints.tracker import CheckpointTracker
from tests.exporter.files.checkpoints.checkpoint_entries import entries
from tests.exporter.files.checkpoints.checkpoint_layouts import LAYOUTS, Write, ranks
from tests.exporter.files.checkpoints.checkpoint_trees import START, Folder


@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS)
def test_each_save_is_one_checkpoint_in_every_layout(folder: Folder, write: Write) -> None:
    for step in (10, 20, 30, 40):
        began = folder.now
        write(folder, step)
        assert len(folder.poll_for(100)) == 1
        last = folder.last
        assert (last.state, last.end, last.missing_count) == ("complete", began, 0)
        assert step in (last.step, last.epoch)
    assert folder.history.total == 4
    assert folder.history.interval_s == 100.0
    assert folder.history.next_expected == folder.history.save_times[-1] + 100.0
    assert not folder.checkpoints.writing


@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS)
def test_a_new_sidecar_finds_the_same_checkpoints_without_events(tmp_path: Path, write: Write) -> None:
    folder = Folder(tmp_path / "ckpt")
    for step in (10, 20, 30, 40):
        write(folder, step)
        folder.poll_for(100)
    before = (folder.history.total, folder.history.save_times, folder.last)
    folder.restart()
    assert folder.poll() == []
    assert (folder.history.total, folder.history.save_times) == before[:2]
    assert folder.last._replace(seconds=None) == before[2]._replace(seconds=None)


@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS)
def test_checkpoints_of_an_earlier_job_do_not_count(tmp_path: Path, write: Write) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.now = START - 500.0
    write(folder, 10)
    folder.now = START + 100.0
    folder.poll_for(50)
    assert (folder.history.total, folder.checkpoints.last, folder.history.save_times) == (0, None, ())
    assert not folder.checkpoints.writing
    write(folder, 20)
    folder.poll_for(100)
    assert folder.history.total == 1


def test_a_file_that_grows_is_being_written_until_it_has_settled(folder: Folder) -> None:
    for size in range(100, 700, 100):
        folder.write("checkpoint_1.pt", size)
        assert folder.poll() == []
        assert folder.checkpoints.writing
        assert folder.last.state == "writing"
    assert folder.poll() == []
    assert folder.poll() == ["saved checkpoint_1.pt"]
    assert not folder.checkpoints.writing
    last = folder.last
    assert (last.state, last.bytes, last.seconds) == ("complete", 600, 25.0)


def test_a_file_renamed_into_place_is_complete_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "*.pt")
    folder.poll()
    folder.write("checkpoint_1.pt.tmp", 100)
    assert folder.poll() == []
    assert folder.checkpoints.writing
    assert folder.checkpoints.last is None
    folder.rename("checkpoint_1.pt.tmp", "checkpoint_1.pt")
    assert folder.poll() == ["saved checkpoint_1.pt"]
    assert not folder.checkpoints.writing


def test_a_directory_renamed_into_place_is_complete_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "[0-9]*")
    folder.poll()
    folder.write("100.orbax-checkpoint-tmp-1699/state/d/abc")
    folder.poll()
    assert folder.checkpoints.writing
    folder.rename("100.orbax-checkpoint-tmp-1699", "100")
    assert folder.poll() == ["saved 100"]


def test_a_temporary_file_next_to_a_checkpoint_means_that_it_is_unfinished(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "*.ckpt")
    folder.poll()
    folder.write("step=5.ckpt-unfinished", b"")
    folder.write("step=5.ckpt/shard.pt")
    assert folder.poll_for(60) == []
    assert folder.checkpoints.writing
    folder.remove("step=5.ckpt-unfinished")
    assert folder.poll() == ["saved step=5.ckpt"]


def test_an_abandoned_temporary_file_stops_counting_as_writing(folder: Folder) -> None:
    folder.write("checkpoint_1.pt.tmp")
    folder.poll_for(300)
    assert folder.checkpoints.writing
    folder.poll_for(600)
    assert not folder.checkpoints.writing
    assert folder.history.total == 0


def test_the_removal_of_old_checkpoints_is_no_event(folder: Folder) -> None:
    for step in range(1, 8):
        ranks(folder, step)
        folder.poll_for(50)
        if step > 2:
            for rank in range(8):
                folder.remove(f"ckpt_step{step - 2}_rank{rank}.pt")
                folder.poll(1)
        assert folder.history.total == step
        assert not folder.checkpoints.writing
    assert {one.kind for one in folder.happened} == {"saved"}


BESIDE = ("checkpoint_log.txt", "checkpoint_state.json", "checkpoint_metrics.csv", "checkpoint_config.yaml")


def test_text_files_next_to_checkpoints_are_not_checkpoints(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "checkpoint_*")
    folder.poll()
    for step in (100, 200, 300, 400):
        folder.write(f"checkpoint_{step}.pt")
        for minute in range(10):
            folder.write_all((*BESIDE, "checkpoint_state_20240512.json"), f"{step} {minute}")
            folder.poll_for(60)
    last = folder.last
    assert (last.name, folder.history.total) == ("checkpoint_400.pt", 4)
    assert folder.history.interval_s == 600


def test_text_files_alone_or_with_a_step_are_checkpoints(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "checkpoint_*")
    folder.poll()
    folder.write("checkpoint_worker_3.json")
    assert folder.poll_for(60) == ["saved checkpoint_worker_3.json"]
    folder.write("checkpoint_worker_3_step_200.json")
    assert folder.poll_for(60) == ["saved checkpoint_worker_3_step_200.json"]


def test_a_checkpoint_seen_to_appear_counts_despite_an_old_mtime(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write("checkpoint_1.pt", mtime=START - 650)
    folder.write("step_7/x.pt", mtime=START - 650)
    assert folder.poll_for(30) == []
    folder.write("checkpoint_2.pt", mtime=START - 600)
    assert folder.poll_for(60) == ["saved checkpoint_2.pt"]
    folder.write("checkpoint_1.pt", b"anew", mtime=START - 500)
    assert folder.poll_for(60) == ["saved checkpoint_1.pt"]
    folder.write("checkpoint_3.pt", mtime=START - 90_000)  # a copy that keeps the mtime of an old one
    assert folder.poll_for(60) == []
    assert folder.history.total == 2


def test_old_checkpoints_that_disappear_briefly_or_lose_files_stay_old(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt")
    folder.write_all(f"step_7/{number}.pt" for number in range(3))
    folder.write("checkpoint_1.pt", mtime=START - 650)
    for number in range(3):
        folder.touch(folder.path / f"step_7/{number}.pt", START - 600 + number)
    folder.poll()
    (tmp_path / "ckpt").rename(tmp_path / "away")
    folder.poll()
    (tmp_path / "away").rename(tmp_path / "ckpt")
    folder.poll_for(60)
    folder.remove("step_7/2.pt")
    folder.poll_for(60)
    assert (folder.history.total, folder.happened) == (0, [])


def test_nothing_is_decided_while_names_are_unread(folder: Folder) -> None:
    ranks(folder, 1)
    found = {entry.name: entry for entry in folder.watch.poll(folder.now + 5).entries}
    some = [found[f"ckpt_step1_rank{rank}.pt"] for rank in (0, 1, 3)]
    for seconds in range(5, 200, 5):
        now = folder.now + seconds
        assert folder.checkpoints.update(some, tuple(found), now, now, has_unread_names=True) == []
    now += 5
    happened = folder.checkpoints.update(tuple(found.values()), None, now, now)
    assert happened == []
    assert [one.kind for one in folder.checkpoints.update((), None, now + 20, now + 20)] == ["saved"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(entries(), max_size=5), st.booleans(), st.floats(0, 100)), max_size=12))
def test_the_count_never_falls_whatever_the_folder_contains(
    readings: list[tuple[list[CheckpointEntry], bool, float]],
) -> None:
    checkpoints, now, there = CheckpointTracker(START), START + 10.0, dict[str, CheckpointEntry]()
    for found, forget, seconds in readings:
        now += seconds
        there = {} if forget else there
        there.update((entry.name, entry) for entry in found)
        before = checkpoints.history.total
        happened = checkpoints.update(found, tuple(there), now, now)
        assert before <= checkpoints.history.total
        assert all(isinstance(one.checkpoint, Checkpoint) for one in happened)
        assert sum(one.kind == "saved" for one in happened) in (checkpoints.history.total - before, 0)
        assert list(checkpoints.history.save_times) == sorted(checkpoints.history.save_times)
        assert checkpoints.history.interval_s is None or checkpoints.history.interval_s > 0


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(12)), st.integers(0, 11))
def test_the_order_of_files_does_not_change_the_checkpoints(order: list[int], cut: int) -> None:
    names = [f"ckpt_step{number // 4}_rank{number % 4}.pt" for number in range(12)]
    found = [
        CheckpointEntry(names[n], names[n], False, False, n, (CheckpointFile(names[n], 10, START + 100 * (n // 4), n),))
        for n in order
    ]
    checkpoints = CheckpointTracker(START)
    checkpoints.update(found[:cut], None, START + 500, START + 500, has_unread_names=True)
    checkpoints.update(found[cut:], names, START + 500, START + 500)
    assert (checkpoints.history.total, checkpoints.history.save_times) == (3, (START, START + 100, START + 200))


def test_checkpoints_that_come_and_go_leave_nothing_behind() -> None:
    tracker = CheckpointTracker(START)

    def save(steps: range) -> None:
        for step in steps:
            name, when = f"checkpoint_{step}.pt", START + step
            file = CheckpointFile(name, 100, when, step)
            entry = CheckpointEntry(name, name, False, False, step, (file,), True)
            tracker.update([entry], {f"checkpoint_{step - back}.pt" for back in range(3)}, when, when)

    save(range(2 * MOST_REMEMBERED))
    tracemalloc.start()
    try:
        save(range(2 * MOST_REMEMBERED, 3 * MOST_REMEMBERED))  # replaces what was remembered before the trace began
        before = tracemalloc.get_traced_memory()[0]
        save(range(3 * MOST_REMEMBERED, 5 * MOST_REMEMBERED))
        assert tracemalloc.get_traced_memory()[0] - before < 150_000  # the names alone were 700,000
    finally:
        tracemalloc.stop()
    assert tracker.history.total > 4 * MOST_REMEMBERED
