"""Files of the path groups, over nodes that all see the same file system."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.collectors.base import Status
from exporter.collectors.disk import AVAILABLE, SIZE, DiskCollector
from exporter.collectors.outputs import BYTES, FILES, GROWTH, MTIME, OutputsCollector
from exporter.manifest import Manifest, PathGroup
from tests.exporter.support import FakeClock, make_context, make_manifest, make_task, page_of, samples_of

OUTPUT = 'group="output"'


def fill(run_dir: Path, *names: str, size: int = 10) -> None:
    """Files of these names in the output directory."""
    (run_dir / "out").mkdir(exist_ok=True)
    for name in names:
        (run_dir / "out" / name).write_bytes(b"x" * size)


def collector_of(manifest: Manifest, node_index: int = 0, clock: FakeClock | None = None) -> OutputsCollector:
    return OutputsCollector(make_context(manifest, clock or FakeClock(), node_index=node_index))


def test_files_are_counted_with_size_and_time(tmp_path: Path) -> None:
    fill(tmp_path, "output_1.jsonl", "output_2.jsonl", "notes.txt")
    os.utime(tmp_path / "out" / "output_1.jsonl", (1.0, 1000.0))
    os.utime(tmp_path / "out" / "output_2.jsonl", (1.0, 2000.5))
    collector = collector_of(make_manifest(tmp_path))
    page = page_of(collector, collector.read())
    assert samples_of(page, FILES) == {OUTPUT: 2, 'group="checkpoint"': 0}
    assert samples_of(page, BYTES) == {OUTPUT: 20, 'group="checkpoint"': 0}
    assert samples_of(page, MTIME) == {OUTPUT: 2000.5}
    assert samples_of(page, GROWTH) == {}


def test_growth_is_known_from_the_second_look_on(tmp_path: Path) -> None:
    clock = FakeClock()
    fill(tmp_path, "output_1.jsonl", size=100)
    collector = collector_of(make_manifest(tmp_path), clock=clock)
    collector.read()
    fill(tmp_path, "output_1.jsonl", size=400)
    clock.advance(10)
    assert samples_of(page_of(collector, collector.read()), GROWTH) == {OUTPUT: 30, 'group="checkpoint"': 0}


def test_files_that_are_removed_are_no_growth(tmp_path: Path) -> None:
    clock = FakeClock()
    fill(tmp_path, "output_1.jsonl", "output_2.jsonl")
    collector = collector_of(make_manifest(tmp_path), clock=clock)
    collector.read()
    (tmp_path / "out" / "output_1.jsonl").unlink()
    clock.advance(10)
    page = page_of(collector, collector.read())
    assert OUTPUT not in samples_of(page, GROWTH)
    assert samples_of(page, BYTES)[OUTPUT] == 10


def test_a_group_without_a_pattern_is_watched_for_its_space_alone(tmp_path: Path) -> None:
    fill(tmp_path, "output_1.jsonl")
    manifest = make_manifest(tmp_path, groups=(PathGroup("output", "out", None),))
    assert collector_of(manifest).read() == ()
    disk = DiskCollector(make_context(manifest))
    assert [name for name, _ in disk.read()] == ["output", "run"]


FOUR_NODES = tuple(make_task(rank, node_index=rank // 2) for rank in range(8))
NAMES = st.lists(
    st.one_of(
        st.integers(0, 12).map(lambda number: f"output_worker_{number}.jsonl"),
        st.integers(0, 12).map(lambda number: f"output_rank{number:05d}_a.jsonl"),
        st.sampled_from(["output_summary.jsonl", "output_500.jsonl", "output_.jsonl", "output_workers_9.jsonl"]),
    ),
    unique=True,
    max_size=12,
)


@given(NAMES)
def test_every_file_of_a_shared_directory_is_counted_by_one_node(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    run_dir = tmp_path_factory.mktemp("shared")
    fill(run_dir, *names)
    manifest = make_manifest(run_dir, *FOUR_NODES)
    found = [collector_of(manifest, node).read()[0] for node in range(4)]
    assert sum(group.files for group in found) == len(names)
    assert sum(group.bytes for group in found) == 10 * len(names)


def test_a_node_answers_for_its_own_workers_and_the_first_for_what_is_nobodys(tmp_path: Path) -> None:
    fill(tmp_path, *(f"output_worker_{number}.jsonl" for number in (0, 1, 2, 7, 99)), "output_all.jsonl")
    manifest = make_manifest(tmp_path, *FOUR_NODES)
    assert [collector_of(manifest, node).read()[0].files for node in range(4)] == [4, 1, 0, 1]


def test_checkpoints_of_an_earlier_job_are_none_of_this_one(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, groups=(PathGroup("checkpoint", "out", "*.pt"),))
    fill(tmp_path, "old.pt")
    os.utime(tmp_path / "out" / "old.pt", (1.0, 999.0))
    context = make_context(manifest, start=1000.0)
    collector = OutputsCollector(context)
    assert (collector.read()[0].mtime, context.board.checkpoints) == (999.0, ())
    fill(tmp_path, "new.pt")
    os.utime(tmp_path / "out" / "new.pt", (1.0, 1600.0))
    collector.read()
    assert context.board.checkpoints == (1600.0,)


def test_a_file_in_place_of_the_directory_has_no_files(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file", encoding="ascii")
    assert collector_of(make_manifest(tmp_path)).read()[0].files == 0


def test_the_status_lists_the_groups(tmp_path: Path) -> None:
    fill(tmp_path, "output_1.jsonl")
    collector, status = collector_of(make_manifest(tmp_path)), Status()
    collector.describe(collector.read(), status)
    assert [(entry["group"], entry["files"], entry["bytes"]) for entry in status.outputs] == [
        ("output", 1, 10),
        ("checkpoint", 0, 0),
    ]


def test_space_is_shown_for_each_group_and_the_run_directory(tmp_path: Path) -> None:
    collector, status = DiskCollector(make_context(make_manifest(tmp_path))), Status()
    snapshot = collector.read()
    page, facts = page_of(collector, snapshot), os.statvfs(tmp_path)
    sizes = samples_of(page, SIZE)
    assert list(sizes) == [OUTPUT, 'group="checkpoint"', 'group="run"']
    assert set(sizes.values()) == {facts.f_blocks * facts.f_frsize}
    assert all(0 <= value <= facts.f_blocks * facts.f_frsize for value in samples_of(page, AVAILABLE).values())
    collector.describe(snapshot, status)
    assert [entry["group"] for entry in status.filesystems] == ["output", "checkpoint", "run"]
