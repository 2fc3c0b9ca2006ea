"""The number of checkpoints, their rhythm and usual size, also over a restart of the sidecar."""

import json
from pathlib import Path

import pytest

from exporter.files.checkpoints import history
from exporter.files.checkpoints.history import SavedCheckpoints
from exporter.files.checkpoints.tracker import CheckpointTracker
from tests.exporter.files.checkpoints.checkpoint_layouts import hugging_face, one_file, ranks
from tests.exporter.files.checkpoints.checkpoint_trees import Folder


def test_checkpoints_deleted_before_they_settle_count(folder: Folder) -> None:
    for step in range(1, 11):
        one_file(folder, step)
        if step > 1:
            folder.remove(f"checkpoint_{step - 1}.pt")
        folder.poll(3)
    folder.poll_for(30)
    assert folder.history.total == 10
    assert folder.history.interval_s == 3.0


def test_text_files_from_before_the_first_checkpoint_leave_no_interval(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "ckpt", "checkpoint_*")
    folder.poll()
    for minute in range(5):
        folder.write("checkpoint_state.json", str(minute))
        folder.poll_for(60)
    assert folder.history.interval_s == 60
    folder.write("checkpoint_100.pt")
    folder.poll_for(60)
    assert folder.history.interval_s is None
    assert folder.last.name == "checkpoint_100.pt"


def test_the_count_continues_after_old_checkpoints_were_removed(folder: Folder) -> None:
    for step in range(1, 7):
        one_file(folder, step)
        if step > 2:
            folder.remove(f"checkpoint_{step - 2}.pt")
        folder.poll_for(60)
    before = (folder.history.total, folder.history.save_times)
    state = SavedCheckpoints.from_json(json.loads(json.dumps(folder.history.state().to_json())))
    folder.restart()
    folder.history.restore(state)
    assert folder.poll_for(30) == []
    assert (folder.history.total, folder.history.save_times) == before
    assert folder.history.state() == state
    one_file(folder, 7)
    assert folder.poll_for(60) == ["saved checkpoint_7.pt"]
    assert (folder.history.total, folder.history.interval_s) == (7, 60)


def test_more_checkpoints_than_are_remembered_are_counted_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_REMEMBERED", 3)
    for step in range(1, 7):
        one_file(folder, step)
        folder.poll_for(60)
    for step in (7, 8):  # one while no sidecar ran
        state = folder.history.state()
        folder.restart()
        folder.history.restore(state)
        one_file(folder, step)
        folder.poll_for(60)
        assert folder.history.total == step


def test_a_checkpoint_extended_later_is_not_counted_again_by_a_new_sidecar(folder: Folder) -> None:
    hugging_face(folder, 1)
    folder.poll_for(60)
    folder.write("checkpoint-1/README.md")
    folder.poll_for(60)
    state = folder.history.state()
    folder.restart()
    folder.history.restore(state)
    folder.poll_for(60)
    assert folder.history.total == 1


def test_a_different_size_is_reported_once_three_are_known(folder: Folder) -> None:
    odd = []
    for step, size in enumerate((1000, 100, 1000, 1100, 400, 2500, 1000)):
        folder.write(f"checkpoint_{step}.pt", size)
        folder.poll_for(30)
        odd.append(folder.last.odd_size)
    assert odd == [None, None, None, None, 0.4, 2.5, None]


def test_a_configured_interval_is_used_unchanged() -> None:
    assert CheckpointTracker(interval_s=600.0).history.interval_s == 600.0
    assert CheckpointTracker(interval_s=600.0).history.next_expected is None


def test_one_late_checkpoint_does_not_change_the_rhythm(folder: Folder) -> None:
    for step, pause in enumerate((60, 60, 600, 60, 60)):
        folder.write(f"checkpoint_{step * 50}.pt")
        folder.poll_for(pause)
    assert (folder.history.interval_s, folder.history.interval_steps) == (60.0, 50)


def test_a_folder_that_disappears_briefly_is_not_counted_again(tmp_path: Path, folder: Folder) -> None:
    for step in (1, 2):
        ranks(folder, step)
        folder.poll_for(50)
    (tmp_path / "ckpt").rename(tmp_path / "away")
    folder.poll()
    (tmp_path / "away").rename(tmp_path / "ckpt")
    assert folder.poll_for(60) == []
    assert folder.history.total == 2
