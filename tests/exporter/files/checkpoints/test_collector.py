"""Checkpoint series, events and status of a node."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family
from exporter.collecting.published import Publisher
from exporter.contract import run_files
from exporter.contract.manifest import Manifest, PathGroup
from exporter.contract.status import Checkpoints
from exporter.files.checkpoints import checkpoints_reader, collector
from exporter.files.checkpoints.checkpoints_reader import CheckpointReading, CheckpointWatch
from exporter.files.checkpoints.collector import (
    INTERVAL,
    LAST,
    LAST_BYTES,
    MISSING,
    STOPPED,
    TOTAL,
    VALID,
    WRITING,
    CheckpointsCollector,
)
from tests.exporter.files.checkpoints.checkpoint_trees import START, safetensors_bytes, torch_bytes
from tests.support.exporter import (
    FakeClock,
    make_context,
    make_manifest,
    make_task,
    page_of,
    publisher,
    samples_of,
    until,
)


class Node:
    """A collector on one node with its clock and its checkpoint folder."""

    def __init__(self, run_dir: Path, manifest: Manifest | None = None, **identity: Any) -> None:
        self.clock = FakeClock()
        self.clock.advance(1000)
        self.folder = run_dir / "ckpt"
        self.folder.mkdir(exist_ok=True)
        self.context: CollectorContext = make_context(manifest or make_manifest(run_dir), self.clock, **identity)
        self.times: Publisher[tuple[float, ...]] = publisher(())
        self.collector = CheckpointsCollector(self.context, self.times)
        self.watched = self.collector._handle
        self.snapshot = self.collector.read()

    def write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.write_bytes(content)
        for place in (path, self.folder):
            os.utime(place, (self.clock.now, self.clock.now))

    def reads(self, seconds: float, every: float = 5.0) -> None:
        for _ in range(int(seconds // every)):
            self.clock.advance(every)
            self.snapshot = self.collector.read()

    def value(self, family: Family) -> float | None:
        return samples_of(page_of(self.collector, self.snapshot), family).get("")

    def status(self) -> StatusParts:
        status = StatusParts()
        if self.snapshot is not None:
            self.collector.describe(self.snapshot, status)
        return status

    def checkpoints(self) -> Checkpoints:
        found = self.status().checkpoints
        assert found is not None
        return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node without checkpoints so far."""
    return Node(tmp_path)


def test_a_job_without_checkpoints_has_none(node: Node) -> None:
    assert (node.value(TOTAL), node.value(WRITING)) == (0, 0)
    assert [node.value(family) for family in (LAST, LAST_BYTES, VALID, MISSING, INTERVAL)] == [None] * 5
    assert node.checkpoints().last is None


def test_checkpoints_are_counted_measured_and_checked(node: Node) -> None:
    content = torch_bytes(1000)
    for step in range(3):
        written = node.clock.now
        node.write(f"checkpoint_{step}.pt", content)
        node.reads(5)
        assert node.value(WRITING) == 1
        node.reads(595)
    assert (node.value(TOTAL), node.value(WRITING), node.value(VALID), node.value(MISSING)) == (3, 0, 1, 0)
    assert (node.value(LAST), node.value(LAST_BYTES), node.value(INTERVAL)) == (written, len(content), 600)
    assert node.times.value == (written - 1200, written - 600, written)
    found = node.checkpoints()
    assert (found.count, found.interval_s, found.next_expected) == (3, 600, written + 600)
    assert found.last is not None
    assert (found.last.name, found.last.state, found.last.step) == ("checkpoint_2.pt", "complete", 2)


def test_events_report_saved_and_damaged_checkpoints(node: Node) -> None:
    saved = node.clock.now
    node.write("checkpoint_1\n.pt", torch_bytes()[:-30])
    node.reads(90)
    events = node.status().events
    assert [(event.event, event.level) for event in events] == [
        ("checkpoint saved", "info"),
        ("checkpoint damaged", "critical"),
    ]
    assert events[0].time == saved
    assert events[0].detail.startswith(r"checkpoint_1\n.pt: ")
    assert (node.value(VALID), node.value(TOTAL)) == (0, 1)
    json.dumps(node.checkpoints().to_json(), ensure_ascii=False).encode()


def test_validity_is_unknown_while_a_file_is_in_doubt(node: Node) -> None:
    node.write("ckpt_step5_rank0.pt", torch_bytes())
    node.write("ckpt_step5_rank1.pt", torch_bytes()[:-30])
    validity = []
    for _ in range(24):
        node.reads(5)
        validity.append(node.value(VALID))
    assert validity[0] is None
    assert validity[-1] == 0
    assert set(validity) == {None, 0}


def test_checkpoints_are_complete_at_once_after_all_workers_ended(tmp_path: Path, node: Node) -> None:
    node.write("checkpoint_1.pt", torch_bytes())
    node.write("checkpoint_2.pt.tmp", torch_bytes()[:-30])
    node.reads(5)
    assert (node.value(TOTAL), node.value(WRITING)) == (0, 1)
    run_files.write_job_state(str(tmp_path), "completing", workers_ended=True)
    node.reads(5)
    assert (node.value(TOTAL), node.value(WRITING)) == (1, 0)


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, groups=(PathGroup("checkpoint", "ckpt", "step*"),))
    node = Node(tmp_path, manifest)
    for number in (1, 4):
        node.write(f"step5-{number:05}-of-00004.safetensors", safetensors_bytes())
    node.reads(90)
    assert (node.value(MISSING), node.value(TOTAL), node.value(LAST)) == (2, 0, None)
    (event,) = node.status().events
    assert (event.event, event.level) == ("checkpoint incomplete", "warning")
    last = node.checkpoints().last
    assert last is not None
    assert len(last.missing_files) == 2


def test_the_interval_of_the_job_file_is_used(tmp_path: Path) -> None:
    node = Node(tmp_path, make_manifest(tmp_path, checkpoint_interval_s=1800.0))
    assert node.value(INTERVAL) == 1800


def test_other_nodes_know_the_rhythm_but_publish_no_series(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, make_task(0), make_task(1, node_index=1))
    node = Node(tmp_path, manifest, node_index=1)
    node.write("checkpoint_1.pt", torch_bytes())
    node.reads(60)
    assert node.snapshot is None
    assert page_of(node.collector, node.snapshot) == ""
    assert len(node.times.value) == 1


@pytest.mark.parametrize("groups", [(), (PathGroup("checkpoint", "ckpt", None),)])
def test_there_are_no_checkpoints_without_a_pattern(tmp_path: Path, groups: tuple[PathGroup, ...]) -> None:
    node = Node(tmp_path, make_manifest(tmp_path, groups=groups))
    assert node.snapshot is None
    assert node.status() == StatusParts()


def test_files_of_an_earlier_job_do_not_affect_the_rhythm(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    old = tmp_path / "ckpt" / "checkpoint_1.pt"
    old.write_bytes(torch_bytes())
    os.utime(old, (START - 900.0, START - 900.0))
    node = Node(tmp_path)
    node.reads(60)
    assert (node.value(TOTAL), node.value(LAST), node.times.value) == (0, None, ())


def test_a_hanging_folder_has_no_series_and_nothing_counts_twice(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("checkpoint_1.pt", torch_bytes())
    node.reads(60)
    assert node.value(TOTAL) == 1
    gone, real = threading.Event(), CheckpointWatch.poll

    def hang(self: CheckpointWatch, now: float) -> CheckpointReading:
        gone.wait(30)
        return real(self, now)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWatch, "poll", hang)
        patch.setattr(collector, "POLL_WAIT_S", 0.1)
        node.reads(10)
    assert page_of(node.collector, node.snapshot) == ""
    assert [event.event for event in node.status().events] == ["checkpoint saved"]
    node.write("checkpoint_2.pt", torch_bytes())
    gone.set()
    until(lambda: node.watched is not None and node.watched.responding, "the folder to answer")
    node.reads(60)
    assert node.value(TOTAL) == 2
    assert [event.event for event in node.status().events] == ["checkpoint saved"] * 2


def test_the_last_checkpoint_is_awaited_when_the_workers_have_ended(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, real = threading.Event(), CheckpointWatch.poll

    def hang(self: CheckpointWatch, now: float) -> CheckpointReading:
        gone.wait(30)
        return real(self, now)

    monkeypatch.setattr(CheckpointWatch, "poll", hang)
    monkeypatch.setattr(collector, "POLL_WAIT_S", 0.1)
    monkeypatch.setattr(collector, "LAST_WAIT_S", 30.0)
    node.write("checkpoint_1.pt", torch_bytes())
    node.reads(10)
    assert page_of(node.collector, node.snapshot) == ""
    run_files.write_job_state(str(node.context.manifest.run_dir), "completing", workers_ended=True)
    threading.Timer(0.3, gone.set).start()
    node.reads(5)
    assert node.value(TOTAL) == 1
    assert [event.event for event in node.status().events] == ["checkpoint saved"]


def test_a_long_first_scan_is_finished_within_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_reader, "POLL_S", 0.0)
    (tmp_path / "ckpt").mkdir()
    for step in range(6):
        path = tmp_path / "ckpt" / f"checkpoint_{step}.pt"
        path.write_bytes(torch_bytes())
        os.utime(path, (START + step, START + step))
    node = Node(tmp_path)
    assert node.value(TOTAL) == 0
    node.reads(5)
    assert node.value(TOTAL) == 6
    assert node.status().events == []


def test_a_checkpoint_from_just_before_the_start_counts_without_warnings(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    old = tmp_path / "ckpt" / "checkpoint_1.pt"
    old.write_bytes(torch_bytes()[:-30])
    probe = make_context(make_manifest(tmp_path), FakeClock())
    assert probe.identity.start is not None
    os.utime(old, (probe.identity.start - 30.0, probe.identity.start - 30.0))
    node = Node(tmp_path)
    node.reads(200)
    assert (node.value(TOTAL), node.value(VALID), node.status().events) == (1, None, [])


def write_and_keep_two(node: Node, *steps: int) -> None:
    """Write checkpoints, and keep the last two."""
    for step in steps:
        node.write(f"checkpoint_{step}.pt", torch_bytes())
        (node.folder / f"checkpoint_{step - 2}.pt").unlink(missing_ok=True)
        os.utime(node.folder, (node.clock.now, node.clock.now))
        node.reads(60)


def restart_sidecar(node: Node, run_dir: Path, **identity: Any) -> Node:
    """The node after a restart of its sidecar."""
    clock = node.clock
    new = Node.__new__(Node)
    new.times = publisher(())
    new.clock, new.folder = clock, node.folder
    new.context = make_context(make_manifest(run_dir), clock, **identity)
    new.collector = CheckpointsCollector(new.context, new.times)
    new.watched, new.snapshot = new.collector._handle, new.collector.read()
    return new


def test_the_count_does_not_fall_with_a_new_sidecar(tmp_path: Path, node: Node) -> None:
    write_and_keep_two(node, *range(1, 7))
    assert node.value(TOTAL) == 6
    new = restart_sidecar(node, tmp_path)
    assert (new.value(TOTAL), new.value(INTERVAL)) == (6, 60)
    assert new.times.value == node.times.value
    write_and_keep_two(new, 7)
    assert (new.value(TOTAL), new.value(INTERVAL)) == (7, 60)
    assert [event.event for event in new.status().events] == ["checkpoint saved"]
    new.reads(60)
    assert restart_sidecar(new, tmp_path).value(TOTAL) == 7


def test_a_stop_of_the_job_does_not_count_for_the_rhythm(tmp_path: Path, node: Node) -> None:
    write_and_keep_two(node, 1, 2)
    node.clock.advance(3600)
    node.snapshot = node.collector.read()
    saved = node.checkpoints().last_complete
    assert saved is not None
    assert node.value(STOPPED) == pytest.approx(3600, abs=5)
    assert node.value(LAST) == saved.time  # a moment remains true
    write_and_keep_two(node, 3)
    assert node.value(STOPPED) == 0
    assert node.value(INTERVAL) == pytest.approx(60, abs=5)
    node.clock.advance(3600)
    node.reads(60)
    assert restart_sidecar(node, tmp_path).checkpoints().next_expected == pytest.approx(node.clock.now - 60, abs=10)


def test_a_stop_before_the_first_checkpoint_counts_from_the_start(node: Node) -> None:
    node.clock.advance(3600)
    node.reads(5)
    assert node.value(TOTAL) == 0
    assert node.value(STOPPED) == pytest.approx(3600, abs=10)


@pytest.mark.parametrize("change", [{"total": None}, {"beats": 3}, {"counted": None}])
def test_an_unusable_saved_state_is_ignored(tmp_path: Path, node: Node, change: dict[str, object]) -> None:
    write_and_keep_two(node, *range(1, 7))
    path = tmp_path / "state" / f"{node.context.identity.node}.checkpoints.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"checkpoints": body["checkpoints"] | change}))
    assert restart_sidecar(node, tmp_path).value(TOTAL) == 2
    for text in ("", "[1]", "{", "[" * 100_000, json.dumps(body | {"schema": 2}), json.dumps(body | {"job_id": "x"})):
        path.write_text(text)
        assert restart_sidecar(node, tmp_path).value(TOTAL) == 2


def test_the_state_is_saved_only_after_a_new_checkpoint(tmp_path: Path, node: Node) -> None:
    path = tmp_path / "state" / f"{node.context.identity.node}.checkpoints.json"
    node.reads(60)
    assert not path.exists()
    write_and_keep_two(node, 1)
    before = path.stat()
    node.reads(300)
    assert path.stat() == before
    node.write("checkpoint_2.pt", torch_bytes())
    node.reads(15)
    node.write("checkpoint_3.pt", torch_bytes())
    node.reads(15)
    assert json.loads(path.read_text())["checkpoints"]["total"] == 2
    node.reads(30)
    assert json.loads(path.read_text())["checkpoints"]["total"] == 3


def test_a_read_only_run_directory_affects_nothing_else(
    tmp_path: Path, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("")
    write_and_keep_two(node, 1, 2)
    assert node.value(TOTAL) == 2
    assert sum("is not saved" in record.getMessage() for record in caplog.records) == 1


def test_unusual_files_are_only_a_hint(node: Node) -> None:
    for step, count in ((1, 4), (2, 2)):
        for rank in range(count):
            node.write(f"checkpoint_{step}_rank{rank}.pt", torch_bytes())
        node.reads(120)
    assert (node.value(MISSING), node.value(TOTAL)) == (0, 2)
    assert [(event.event, event.level) for event in node.status().events] == [
        ("checkpoint saved", "info"),
        ("checkpoint saved", "info"),
        ("checkpoint unusual", "info"),
    ]
    last = node.checkpoints().last
    assert last is not None
    assert "2 files" in (last.odd or "")


def write_earlier(folder: Path, name: str, content: bytes, when: float) -> None:
    """Write a file from before the first sidecar of this job."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    os.utime(folder / name, (when, when))


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_checkpoint_from_just_before_a_second_attempt_is_not_new(tmp_path: Path, attempt: int) -> None:
    """A resume is attempt 0 in a new run directory, a requeue is attempt 1. Neither wrote the file."""
    began = FakeClock().now + 998.0
    write_earlier(tmp_path / "ckpt", "checkpoint_140.pt", torch_bytes(), began - 1.0)
    node = Node(tmp_path, attempt=attempt, start=began)
    node.reads(120)
    assert (node.value(TOTAL), node.value(LAST), node.status().events) == (0, None, [])
    node.write("checkpoint_160.pt", torch_bytes())
    node.reads(60)
    assert node.value(TOTAL) == 1
    assert [event.detail.partition(":")[0] for event in node.status().events] == ["checkpoint_160.pt"]


def test_a_late_sidecar_of_a_second_attempt_ignores_checkpoints_of_the_first(tmp_path: Path) -> None:
    began = FakeClock().now + 500.0
    write_earlier(tmp_path / "ckpt", "checkpoint_140.pt", torch_bytes(), began - 1.0)
    assert Node(tmp_path, attempt=1, start=began).value(TOTAL) == 0
    assert Node(tmp_path, attempt=0, start=began).value(TOTAL) == 1, "the clock of its file server may be behind"


def test_an_unfinished_file_of_a_killed_attempt_is_not_being_written(tmp_path: Path) -> None:
    began = FakeClock().now + 998.0
    write_earlier(tmp_path / "ckpt", "checkpoint_140.pt.tmp", b"half", began - 1.0)
    node = Node(tmp_path, attempt=1, start=began)
    assert node.value(WRITING) == 0


def touch_workers_dir(node: Node, run_dir: Path) -> None:
    """Mark that a worker of the job started or ended."""
    (run_dir / run_files.WORKERS_DIR).mkdir(exist_ok=True)
    os.utime(run_dir / run_files.WORKERS_DIR, (node.clock.now, node.clock.now))


def save(node: Node, step: int, *ranks: int, seconds: float = 60) -> None:
    for rank in ranks:
        node.write(f"checkpoint_worker_{rank}_step_{step}.pt", torch_bytes())
    node.reads(seconds)


def unusual(node: Node) -> list[str]:
    events = node.status().events
    return [event.detail for event in events if event.event == "checkpoint unusual" or event.level != "info"]


def test_other_steps_of_a_restarted_worker_are_not_unusual(tmp_path: Path, node: Node) -> None:
    for step in (100, 200, 300, 400):
        save(node, step, 0, 1, 2)
    touch_workers_dir(node, tmp_path)  # rank 2 is killed
    save(node, 500, 0, 1)
    touch_workers_dir(node, tmp_path)  # and resumes from 400
    save(node, 600, 0, 1, seconds=30)
    save(node, 520, 2, seconds=30)
    save(node, 700, 0, 1, seconds=30)
    save(node, 620, 2)
    assert node.value(TOTAL) == 9
    assert unusual(node) == []


def test_missing_ranks_at_the_end_of_a_failed_job_are_not_unusual(tmp_path: Path, node: Node) -> None:
    for step in (100, 200, 300):
        save(node, step, 0, 1, 2)
    touch_workers_dir(node, tmp_path)  # rank 1 is killed, and the others save during the teardown
    run_files.write_job_state(str(tmp_path), "completing", workers_ended=True)
    for rank, step in ((0, 354), (2, 353)):
        save(node, step, rank, seconds=5)
    assert node.value(TOTAL) == 5
    assert unusual(node) == []


def test_missing_ranks_are_reported_again_once_there_are_checkpoints_to_compare(tmp_path: Path, node: Node) -> None:
    save(node, 100, 0, 1)
    touch_workers_dir(node, tmp_path)
    for step in (200, 300, 400):
        save(node, step, 0, 1)
    save(node, 500, 0, seconds=120)
    assert unusual(node) == [
        "checkpoint_worker_0_step_500.pt: has no checkpoint_worker_1_step_#.pt, unlike earlier checkpoints"
    ]


def test_a_size_is_compared_with_checkpoints_of_the_same_ranks(tmp_path: Path, node: Node) -> None:
    for step in (1, 2, 3):
        save(node, step, 0, 1, 2)
    touch_workers_dir(node, tmp_path)  # a worker was restarted: the ranks may be out of step
    save(node, 4, 0)
    assert [event.level for event in node.status().events if event.event == "checkpoint saved"] == ["info"] * 4
    node.write("checkpoint_worker_0_step_5.pt", torch_bytes(4096))
    node.write("checkpoint_worker_1_step_5.pt", torch_bytes(4096))
    node.write("checkpoint_worker_2_step_5.pt", torch_bytes(4096))
    node.reads(60)
    (detail,) = [event.detail for event in node.status().events if event.level == "warning"]
    assert "times the usual size" in detail


def odd_sizes(node: Node) -> list[str]:
    """Checkpoints with an event for an unusual size."""
    events = node.status().events
    return [event.detail.partition(":")[0] for event in events if "times the usual size" in event.detail]


def test_a_lone_shard_is_odd_if_no_worker_started_or_ended(tmp_path: Path) -> None:
    touch_workers_dir(node := Node(tmp_path), tmp_path)
    for step in (1, 2, 3):
        save(node, step, *range(8))
    save(node, 4, 0)
    save(node, 5, 0, 8)  # an additional new rank is no reason for it
    assert odd_sizes(node) == ["checkpoint_worker_0_step_4.pt", "checkpoint_worker_*_step_5.pt"]


def test_a_lone_shard_after_a_restart_is_odd_after_three_complete_checkpoints(tmp_path: Path, node: Node) -> None:
    for step in (1, 2, 3):
        save(node, step, *range(8))
    touch_workers_dir(node, tmp_path)
    save(node, 4, 0)  # it may be out of step
    for step in (5, 6, 7):
        assert odd_sizes(node) == []
        save(node, step, *range(8))
    save(node, 8, 0)
    save(node, 9, 3)
    assert odd_sizes(node) == ["checkpoint_worker_0_step_8.pt", "checkpoint_worker_3_step_9.pt"]


def test_a_rank_out_of_step_after_a_restart_is_not_odd(tmp_path: Path, node: Node) -> None:
    for step in (1, 2, 3):
        save(node, step, *range(8))
    touch_workers_dir(node, tmp_path)
    for step in range(4, 10):
        save(node, 10 * step, *range(7), seconds=30)
        save(node, 10 * step + 5, 7, seconds=30)
    assert odd_sizes(node) == []


@pytest.mark.parametrize("poll_s", [1.0, 5.0])
@pytest.mark.parametrize("late_s", [0.0, 0.3, 1.3, 3.0])
def test_ranks_out_of_step_after_a_restart_are_not_unusual(tmp_path: Path, late_s: float, poll_s: float) -> None:
    """Three ranks each keep their last two checkpoints. Rank 1 is killed and restarts some seconds later."""
    node = Node(tmp_path)
    began, kept = node.clock.now, {rank: [0, 0] for rank in range(3)}
    done: list[tuple[float, int | None, int]]
    done = [(3.3 * n + 0.02 * rank, rank, 100 * n) for rank in (0, 2) for n in range(1, 11)]
    done += [(3.3 * n + 0.01, 1, 100 * n) for n in range(1, 5)]
    done += [(17.0 + late_s + 3.3 * (n - 4), 1, 100 * n) for n in range(5, 11)]
    done += [(14.7 + late_s, None, 0), (16.8 + late_s, None, 0)]  # its end and its start
    for moment, rank, step in sorted(done, key=lambda entry: entry[0]):
        while began + moment - node.clock.now > poll_s:
            node.reads(poll_s, every=poll_s)
        before, node.clock.now = node.clock.now, began + moment
        if rank is None:
            touch_workers_dir(node, tmp_path)
            node.clock.now = before
            continue
        node.write(f"checkpoint_worker_{rank}_step_{step}.pt", torch_bytes())
        kept[rank].append(step)
        (node.folder / f"checkpoint_worker_{rank}_step_{kept[rank][-3]}.pt").unlink(missing_ok=True)
        os.utime(node.folder, (node.clock.now, node.clock.now))
        node.clock.now = before
    node.reads(120)
    assert (node.value(TOTAL) or 0) >= 10
    assert unusual(node) == []


def test_a_truncated_checkpoint_is_shown_within_two_check_intervals_of_a_minute(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write("checkpoint_2.pt", torch_bytes()[:-40])
    for _ in range(2):
        node.clock.advance(60)
        node.snapshot = node.collector.read()
    assert node.snapshot is not None
    assert node.snapshot.last is not None
    assert node.snapshot.last.state == "invalid"
