"""What a node shows of the checkpoints of its job."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from exporter.collectors.base import Context, Status
from exporter.collectors.checkpoints import (
    INTERVAL,
    LAST,
    LAST_BYTES,
    MISSING,
    TOTAL,
    VALID,
    WRITING,
    CheckpointsCollector,
)
from exporter.families import Family
from exporter.manifest import Manifest, PathGroup
from exporter.readers.checkpoint_files import CheckpointSight, CheckpointWatch
from tests.exporter.checkpoint_trees import safetensors_bytes, torch_bytes
from tests.exporter.support import FakeClock, make_context, make_manifest, make_task, page_of, samples_of, until


class Node:
    """A collector on one node with its clock and its checkpoint folder."""

    def __init__(self, run_dir: Path, manifest: Manifest | None = None, **identity: Any) -> None:
        self.clock = FakeClock()
        self.clock.advance(1000)
        self.folder = run_dir / "ckpt"
        self.folder.mkdir(exist_ok=True)
        self.context: Context = make_context(manifest or make_manifest(run_dir), self.clock, **identity)
        self.collector = CheckpointsCollector(self.context)
        self.watched = self.collector._watched
        self.snapshot = self.collector.read()

    def write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.write_bytes(content)
        for place in (path, self.folder):
            os.utime(place, (self.clock.now, self.clock.now))

    def reads(self, seconds: float) -> None:
        for _ in range(int(seconds // 5)):
            self.clock.advance(5)
            self.snapshot = self.collector.read()

    def value(self, family: Family) -> float | None:
        return samples_of(page_of(self.collector, self.snapshot), family).get("")

    def status(self) -> Status:
        status = Status()
        if self.snapshot is not None:
            self.collector.describe(self.snapshot, status)
        return status


def test_a_job_without_checkpoints_has_none(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert (node.value(TOTAL), node.value(WRITING)) == (0, 0)
    assert [node.value(family) for family in (LAST, LAST_BYTES, VALID, MISSING, INTERVAL)] == [None] * 5
    assert node.status().checkpoints["last"] is None


def test_checkpoints_are_counted_sized_and_looked_into(tmp_path: Path) -> None:
    node = Node(tmp_path)
    content = torch_bytes(1000)
    for step in range(3):
        written = node.clock.now
        node.write(f"checkpoint_{step}.pt", content)
        node.reads(5)
        assert node.value(WRITING) == 1
        node.reads(595)
    assert (node.value(TOTAL), node.value(WRITING), node.value(VALID), node.value(MISSING)) == (3, 0, 1, 0)
    assert (node.value(LAST), node.value(LAST_BYTES), node.value(INTERVAL)) == (written, len(content), 600)
    assert node.context.board.checkpoints == (written - 1200, written - 600, written)
    found = node.status().checkpoints
    assert (found["count"], found["interval_s"], found["next_expected"]) == (3, 600, written + 600)
    assert (found["last"]["name"], found["last"]["state"], found["last"]["step"]) == ("checkpoint_2.pt", "complete", 2)


def test_events_tell_what_was_saved_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    saved = node.clock.now
    node.write("checkpoint_1\n.pt", torch_bytes()[:-30])
    node.reads(60)
    events = node.status().events
    assert [(event["event"], event["level"]) for event in events] == [
        ("checkpoint saved", "info"),
        ("checkpoint damaged", "critical"),
    ]
    assert events[0]["time"] == saved
    assert events[0]["detail"].startswith(r"checkpoint_1\n.pt: ")
    assert (node.value(VALID), node.value(TOTAL)) == (0, 1)
    json.dumps(node.status().checkpoints, ensure_ascii=False).encode()


def test_nothing_is_said_to_be_whole_while_one_of_its_files_is_in_doubt(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write("ckpt_step5_rank0.pt", torch_bytes())
    node.write("ckpt_step5_rank1.pt", torch_bytes()[:-30])
    said = []
    for _ in range(12):
        node.reads(5)
        said.append(node.value(VALID))
    assert said[0] is None
    assert said[-1] == 0
    assert set(said) == {None, 0}


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, groups=(PathGroup("checkpoint", "ckpt", "step*"),))
    node = Node(tmp_path, manifest)
    for number in (1, 4):
        node.write(f"step5-{number:05}-of-00004.safetensors", safetensors_bytes())
    node.reads(60)
    assert (node.value(MISSING), node.value(TOTAL), node.value(LAST)) == (2, 0, None)
    (event,) = node.status().events
    assert (event["event"], event["level"]) == ("checkpoint incomplete", "warning")
    assert len(node.status().checkpoints["last"]["missing_files"]) == 2


def test_the_interval_of_the_job_file_counts(tmp_path: Path) -> None:
    node = Node(tmp_path, make_manifest(tmp_path, checkpoint_interval_s=1800.0))
    assert node.value(INTERVAL) == 1800


def test_other_nodes_know_the_rhythm_and_show_nothing(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, make_task(0), make_task(1, node_index=1))
    node = Node(tmp_path, manifest, node_index=1)
    node.write("checkpoint_1.pt", torch_bytes())
    node.reads(60)
    assert node.snapshot is None
    assert page_of(node.collector, node.snapshot) == ""
    assert len(node.context.board.checkpoints) == 1


@pytest.mark.parametrize("groups", [(), (PathGroup("checkpoint", "ckpt", None),)])
def test_without_a_pattern_nothing_is_a_checkpoint(tmp_path: Path, groups: tuple[PathGroup, ...]) -> None:
    node = Node(tmp_path, make_manifest(tmp_path, groups=groups))
    assert node.snapshot is None
    assert node.status() == Status()


def test_files_of_an_earlier_job_are_no_rhythm(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    old = tmp_path / "ckpt" / "checkpoint_1.pt"
    old.write_bytes(torch_bytes())
    os.utime(old, (999.0, 999.0))
    node = Node(tmp_path)
    node.reads(60)
    assert (node.value(TOTAL), node.value(LAST), node.context.board.checkpoints) == (0, None, ())


def test_a_folder_that_hangs_costs_its_series_and_nothing_is_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.write("checkpoint_1.pt", torch_bytes())
    node.reads(60)
    assert node.value(TOTAL) == 1
    gone, real = threading.Event(), CheckpointWatch.look

    def hang(self: CheckpointWatch, now: float) -> CheckpointSight:
        gone.wait(30)
        return real(self, now)

    monkeypatch.setattr(CheckpointWatch, "look", hang)
    node.reads(10)
    assert page_of(node.collector, node.snapshot) == ""
    assert [event["event"] for event in node.status().events] == ["checkpoint saved"]
    node.write("checkpoint_2.pt", torch_bytes())
    gone.set()
    monkeypatch.undo()
    until(lambda: node.watched is not None and node.watched.responding, "the folder to answer")
    node.reads(60)
    assert node.value(TOTAL) == 2
    assert [event["event"] for event in node.status().events] == ["checkpoint saved"] * 2
