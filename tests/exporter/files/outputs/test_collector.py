"""Output files of the path groups, on nodes that share a file system."""

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.collecting.collector import CollectorContext
from exporter.collecting.published import WorkerProcesses
from exporter.contract import run_files
from exporter.contract.clock import SystemClock
from exporter.contract.manifest import Manifest, PathGroup
from exporter.contract.records import to_json
from exporter.contract.status import IgnoredFile
from exporter.contract.worker_names import rank_in_file_name
from exporter.files.outputs import folder_reader
from exporter.files.outputs.collector import (
    BYTES,
    FILES,
    GROWTH,
    INVALID,
    MTIME,
    RECORDS,
    STALLED,
    VALID,
    WORKER_BYTES,
    WORKER_MTIME,
    WORKER_RECORDS,
    WORKER_STALLED,
    OutputsCollector,
)
from exporter.files.outputs.outputs_reader import FileOwnership, OutputWatch
from exporter.machine.file_host import FileWatchHost, WatchHanging
from exporter.machine.mounts import is_node_local, mount_of, parse_mountinfo
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
from tests.support.statuses import described

OUTPUT = 'group="output"'
START = 1_700_000_000.0  # of the job and of the fake clock
TIMEOUT_S = 300.0
DAMAGED = gzip.compress(b"some text" * 100)[:-20]


def fill(run_dir: Path, *names: str, size: int = 10) -> None:
    """Files of these names in the output directory."""
    (run_dir / "out").mkdir(exist_ok=True)
    for name in names:
        (run_dir / "out" / name).write_bytes(b"x" * size)


def write(run_dir: Path, name: str, content: int | str | bytes, mtime: float) -> None:
    """Write an output file, or one of this size, with this mtime."""
    (run_dir / "out").mkdir(exist_ok=True)
    text = b"x" * content if isinstance(content, int) else content.encode() if isinstance(content, str) else content
    (run_dir / "out" / name).write_bytes(text)
    os.utime(run_dir / "out" / name, (mtime, mtime))


def make_collector(context: CollectorContext) -> OutputsCollector:
    """A collector while no worker is known to run."""
    return OutputsCollector(context, publisher(WorkerProcesses()))


def collector_of(manifest: Manifest, node_index: int = 0, clock: FakeClock | None = None) -> OutputsCollector:
    return make_collector(make_context(manifest, clock or FakeClock(), node_index=node_index))


def test_files_are_counted_with_size_and_mtime(tmp_path: Path) -> None:
    fill(tmp_path, "output_1.jsonl", "output_2.jsonl", "notes.txt")
    os.utime(tmp_path / "out" / "output_1.jsonl", (1.0, 1000.0))
    os.utime(tmp_path / "out" / "output_2.jsonl", (1.0, 2000.5))
    collector = collector_of(make_manifest(tmp_path))
    page = page_of(collector, collector.read())
    assert samples_of(page, FILES) == {OUTPUT: 2, 'group="checkpoint"': 0}
    assert samples_of(page, BYTES) == {OUTPUT: 20, 'group="checkpoint"': 0}
    assert samples_of(page, MTIME) == {OUTPUT: 2000.5}
    assert samples_of(page, GROWTH) == {}


def test_growth_is_known_from_the_second_poll(tmp_path: Path) -> None:
    clock = FakeClock()
    write(tmp_path, "output_1.jsonl", 100, START)
    collector = collector_of(make_manifest(tmp_path), clock=clock)
    collector.read()
    write(tmp_path, "output_1.jsonl", 400, START + 10)
    clock.advance(12)
    assert samples_of(page_of(collector, collector.read()), GROWTH) == {OUTPUT: 30, 'group="checkpoint"': 0}


def test_files_that_appear_complete_are_growth(tmp_path: Path) -> None:
    clock = FakeClock()
    collector = collector_of(make_manifest(tmp_path), clock=clock)
    for number in range(4):
        collector.read()
        clock.advance(10)
        write(tmp_path, f"output_{number}.jsonl", 500, START + 10 * number)
    assert samples_of(page_of(collector, collector.read()), GROWTH)[OUTPUT] == 50


def test_files_that_are_removed_are_no_growth(tmp_path: Path) -> None:
    clock = FakeClock()
    fill(tmp_path, "output_1.jsonl", "output_2.jsonl")
    collector = collector_of(make_manifest(tmp_path), clock=clock)
    collector.read()
    (tmp_path / "out" / "output_1.jsonl").unlink()
    clock.advance(10)
    page = page_of(collector, collector.read())
    assert samples_of(page, GROWTH)[OUTPUT] == 0
    assert samples_of(page, BYTES)[OUTPUT] == 10


def test_a_group_without_a_pattern_is_only_watched_for_disk_space(tmp_path: Path) -> None:
    fill(tmp_path, "output_1.jsonl")
    manifest = make_manifest(tmp_path, groups=(PathGroup("output", "out", None),))
    assert collector_of(manifest).read().groups == ()


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
    found = [collector_of(manifest, node).read().groups[0] for node in range(4)]
    assert sum(group.files for group in found) == len(names)
    assert sum(group.bytes for group in found) == 10 * len(names)


def test_each_node_counts_its_workers_files_and_the_first_the_unranked_ones(tmp_path: Path) -> None:
    fill(tmp_path, *(f"output_worker_{number}.jsonl" for number in (0, 1, 2, 7, 99)), "output_all.jsonl")
    manifest = make_manifest(tmp_path, *FOUR_NODES)
    assert [collector_of(manifest, node).read().groups[0].files for node in range(4)] == [4, 1, 0, 1]


def test_the_status_lists_the_groups(tmp_path: Path) -> None:
    fill(tmp_path, "output_1.jsonl")
    collector = collector_of(make_manifest(tmp_path))
    groups = described(collector, collector.read()).outputs
    assert [(group.group, group.files, group.bytes) for group in groups] == [
        ("output", 1, 10),
        ("checkpoint", 0, 0),
    ]


class Job:
    """A collector of a job with two workers, with its clock and events."""

    def __init__(self, run_dir: Path, **changes: Any) -> None:
        self.run_dir = run_dir
        self.clock = FakeClock()
        (run_dir / "out").mkdir(exist_ok=True)
        manifest = make_manifest(run_dir, make_task(0), make_task(1), stall_timeout_s=TIMEOUT_S, **changes)
        self.processes = publisher(WorkerProcesses(running=frozenset({0, 1})))
        self.context = make_context(manifest, self.clock)
        self.collector = OutputsCollector(self.context, self.processes)
        self.snapshot = self.collector.read()

    def poll(self, after_s: float = 5.0) -> str:
        """The page after this many seconds."""
        self.clock.advance(after_s)
        self.snapshot = self.collector.read()
        return page_of(self.collector, self.snapshot)

    def after(self, seconds: float) -> str:
        """The page after this many seconds of polls."""
        for _ in range(int(seconds / 5) - 1):
            self.poll()
        return self.poll()

    def write(self, name: str, content: int | str | bytes = 10) -> None:
        """Write a file now."""
        write(self.run_dir, name, content, self.clock.time())

    def events(self, kind: str) -> list[str]:
        """Details of the events of a kind."""
        return [event.detail for event in self.snapshot.events if event.event == kind]


WORKER_0 = 'worker="worker_w0",role="worker",rank="0",group="output"'
WORKER_1 = 'worker="worker_w1",role="worker",rank="1",group="output"'


def test_files_of_a_worker_have_their_own_series(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write("output_rank0.jsonl", "{}\n{}\n")
    job.write("output_rank1.jsonl", "{}\n")
    job.write("output_all.jsonl", "{}\n")
    page = job.poll()
    assert samples_of(page, WORKER_BYTES) == {WORKER_0: 6, WORKER_1: 3}
    assert samples_of(page, WORKER_RECORDS) == {WORKER_0: 2, WORKER_1: 1}
    assert samples_of(page, WORKER_MTIME) == {WORKER_0: START, WORKER_1: START}
    assert samples_of(page, RECORDS) == {OUTPUT: 4}
    assert samples_of(page, BYTES)[OUTPUT] == 12


def test_checkpoint_groups_have_no_worker_series_stalls_or_events(tmp_path: Path) -> None:
    job = Job(tmp_path, groups=(PathGroup("checkpoint", "out", "*"),))
    job.write("model_rank0.gz", DAMAGED)
    page = job.after(2 * TIMEOUT_S)
    assert samples_of(page, WORKER_BYTES) == samples_of(page, STALLED) == samples_of(page, WORKER_STALLED) == {}
    assert samples_of(page, INVALID) == {'group="checkpoint"': 1}
    assert job.snapshot.events == ()


def test_output_is_stalled_when_nothing_is_written_while_workers_run(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert samples_of(job.poll(), STALLED) == {}
    job.write("output_rank0.jsonl")
    job.write("output_rank1.jsonl")
    assert samples_of(job.poll(), STALLED) == {OUTPUT: 0}
    assert samples_of(job.after(TIMEOUT_S - 5), STALLED) == {OUTPUT: 0}
    page = job.poll()
    assert samples_of(page, STALLED) == {OUTPUT: 1}
    assert samples_of(page, WORKER_STALLED) == {WORKER_0: 1, WORKER_1: 1}
    assert job.events("output stalled") == ["nothing written for 300 s"]
    job.write("output_rank0.jsonl", 20)
    page = job.poll()
    assert samples_of(page, STALLED) == {OUTPUT: 0}
    assert samples_of(page, WORKER_STALLED) == {WORKER_0: 0, WORKER_1: 1}
    assert "writing has resumed" in job.events("output resumed")


def test_the_time_of_a_suspended_job_is_no_silence_of_its_output(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write("output_rank0.jsonl")
    job.poll()
    job.after(TIMEOUT_S - 100)
    page = job.poll(7200)
    assert samples_of(page, STALLED) == {OUTPUT: 0}
    assert samples_of(page, WORKER_STALLED) == {WORKER_0: 0}
    assert samples_of(job.after(90), STALLED) == {OUTPUT: 0}
    assert samples_of(job.poll(), STALLED) == {OUTPUT: 1}, "its silence before the suspension counts"
    assert samples_of(job.poll(7200), STALLED) == {OUTPUT: 1}
    assert (len(job.events("output stalled")), job.events("output resumed")) == (1, [])


def test_output_of_a_worker_that_was_ended_while_it_was_stalled_does_not_go_on(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write("output_rank0.jsonl")
    job.write("output_rank1.jsonl")
    job.after(TIMEOUT_S)
    job.processes.publish(WorkerProcesses())
    assert samples_of(job.poll(), STALLED) == {OUTPUT: 0}
    assert job.events("output resumed") == []


def test_one_worker_alone_may_stall(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write("output_rank1.jsonl", "{}\n")
    for number in range(1, 70):
        job.write("output_rank0.jsonl", "{}\n" * number)
        page = job.poll()
    assert samples_of(page, STALLED) == {OUTPUT: 0}
    assert samples_of(page, WORKER_STALLED) == {WORKER_0: 0, WORKER_1: 1}
    assert [(event.event, event.rank) for event in job.snapshot.events] == [
        ("first output", None),
        ("output stalled", 1),
    ]


@pytest.mark.parametrize("prefix", ["part_", "shard", "gpu"])
def test_numbered_parts_are_not_stalled_workers(tmp_path: Path, prefix: str) -> None:
    job = Job(tmp_path)
    for number in range(10):
        job.write(f"output_{prefix}{number:05}.jsonl", "{}\n")
        page = job.after(100)
        assert 1 not in samples_of(page, WORKER_STALLED).values()
    assert samples_of(page, STALLED) == {OUTPUT: 0}
    assert samples_of(job.after(TIMEOUT_S), STALLED) == {OUTPUT: 1}
    assert [event.rank for event in job.snapshot.events if event.event == "output stalled"] == [None]


def test_numbers_beyond_the_number_of_ranks_are_no_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for number in range(10):
        job.write(f"output_worker{number}.jsonl", "{}\n")
        page = job.after(100)
    assert samples_of(page, WORKER_STALLED) == {}
    assert samples_of(page, WORKER_RECORDS) == {WORKER_0: 1, WORKER_1: 1}
    assert [event.event for event in job.snapshot.events] == ["first output"]


def test_new_files_are_output_whatever_the_clock_of_the_file_server(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.poll(600)
    for number in range(1, 70):
        write(tmp_path, "output_rank0.jsonl", number, START - 180 + job.clock.time() - START - 600)
        page = job.poll()
        assert samples_of(page, STALLED) == {OUTPUT: 0}
    assert samples_of(job.after(TIMEOUT_S), STALLED) == {OUTPUT: 1}


MOUNTS = """\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:30 / /home rw - nfs4 server:/home rw
23 21 0:31 / /scratch rw - lustre server:/scratch rw
24 21 8:2 / /local rw - xfs /dev/nvme0n1 rw
"""


@pytest.mark.parametrize(
    ("directory", "run_dir", "expected"),
    [
        ("/tmp/out", "/home/ada/run", True),
        ("/local/out", "/home/ada/run", True),
        ("/home/ada/run/out", "/home/ada/run", False),
        ("/scratch/out", "/home/ada/run", False),
        ("/tmp/out", "/tmp/run", False),
        ("/local/out", "/tmp/run", False),
    ],
)
def test_a_local_directory_is_node_local_if_the_run_directory_is_remote(
    directory: str, run_dir: str, expected: bool
) -> None:
    mounts = parse_mountinfo(MOUNTS)
    assert is_node_local(mount_of(directory, mounts), mount_of(run_dir, mounts)) is expected
    assert not is_node_local(None, mount_of(run_dir, mounts))
    assert not is_node_local(mount_of(directory, mounts), None)


def test_a_node_counts_all_files_of_a_node_local_directory(tmp_path: Path) -> None:
    fill(tmp_path, "output_all.jsonl", "output_worker_0.jsonl", "output_worker_2.jsonl")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    mounts = f"21 1 8:1 / / rw - nfs4 server:/ rw\n22 21 8:2 / {tmp_path}/out rw - xfs /dev/nvme0n1 rw\n"
    (tmp_path / "proc" / "self" / "mountinfo").write_text(mounts, encoding="ascii")
    host = FileWatchHost(SystemClock(), use_helper=False, proc=str(tmp_path / "proc"))
    try:
        for tasks, found in ((FOUR_NODES, [3, 3, 3, 3]), (FOUR_NODES[:2], [3])):
            manifest = make_manifest(tmp_path, *tasks)
            contexts = [replace(make_context(manifest, node_index=node), files=host) for node in range(len(found))]
            assert [make_collector(context).read().groups[0].files for context in contexts] == found
    finally:
        host.close()


def test_output_of_workers_that_do_not_run_is_not_stalled(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write("output_rank0.jsonl")
    job.poll()
    job.processes.publish(WorkerProcesses(running=frozenset()))
    page = job.after(2 * TIMEOUT_S)
    assert samples_of(page, STALLED) == {OUTPUT: 0}
    assert samples_of(page, WORKER_STALLED) == {WORKER_0: 0}
    job.processes.publish(WorkerProcesses(running=frozenset({0})))
    assert samples_of(job.poll(), STALLED) == {OUTPUT: 0}
    assert samples_of(job.after(TIMEOUT_S), STALLED) == {OUTPUT: 1}


def test_files_of_an_earlier_job_cause_no_stall(tmp_path: Path) -> None:
    write(tmp_path, "output_rank0.jsonl", 10, START - 1000)
    job = Job(tmp_path)
    page = job.after(2 * TIMEOUT_S)
    assert samples_of(page, STALLED) == samples_of(page, WORKER_STALLED) == {}
    assert samples_of(page, FILES)[OUTPUT] == 1


def test_a_sidecar_that_starts_late_tells_of_the_first_output(tmp_path: Path) -> None:
    write(tmp_path, "output_rank0.jsonl", 10, START + 1)
    assert Job(tmp_path).events("first output") == ["output_rank0.jsonl"]


def test_a_restarted_sidecar_recognizes_output_by_mtime(tmp_path: Path) -> None:
    write(tmp_path, "output_rank0.jsonl", 10, START + 1)
    status = tmp_path / run_files.STATUS_DIR / f"{Job(tmp_path).context.identity.node}.json"
    status.parent.mkdir()
    status.touch()
    job = Job(tmp_path)
    assert samples_of(job.poll(), STALLED) == {OUTPUT: 0}
    assert samples_of(job.after(TIMEOUT_S), STALLED) == {OUTPUT: 1}
    assert job.events("first output") == []


def test_the_clock_of_the_file_server_may_be_a_little_behind(tmp_path: Path) -> None:
    write(tmp_path, "output_rank0.jsonl", 10, START - 30)
    job = Job(tmp_path)
    assert samples_of(job.poll(), STALLED) == {OUTPUT: 0}
    assert samples_of(job.after(TIMEOUT_S), STALLED) == {OUTPUT: 1}


def test_damaged_files_are_counted_and_reported_once(tmp_path: Path) -> None:
    job = Job(tmp_path, groups=(PathGroup("output", "out", "*.gz"),))
    job.write("a.gz", gzip.compress(b"text"))
    page = job.after(30)
    assert (samples_of(page, VALID), samples_of(page, INVALID)) == ({OUTPUT: 1}, {OUTPUT: 0})
    job.write("b.gz", DAMAGED)
    page = job.after(60)
    assert (samples_of(page, VALID), samples_of(page, INVALID)) == ({OUTPUT: 0}, {OUTPUT: 1})
    (detail,) = job.events("output damaged")
    assert detail.startswith("b.gz ")
    assert [(file.file, file.format) for file in job.snapshot.groups[0].invalid] == [("b.gz", "gzip")]
    (tmp_path / "out" / "b.gz").unlink()
    assert samples_of(job.poll(), VALID) == {OUTPUT: 1}


def test_files_of_unknown_format_have_no_validity(tmp_path: Path) -> None:
    job = Job(tmp_path, groups=(PathGroup("output", "out", "*"),))
    job.write("notes", "some words")
    page = job.after(60)
    assert samples_of(page, VALID) == samples_of(page, INVALID) == samples_of(page, RECORDS) == {}


def test_the_first_output_and_completed_files_are_events(tmp_path: Path) -> None:
    write(tmp_path, "output_old.gz", gzip.compress(b"text"), START - 1000)
    job = Job(tmp_path, groups=(PathGroup("output", "out", "output_*"),))
    job.write("output_rank0.gz", gzip.compress(b"text"))
    job.after(60)
    assert job.events("first output") == ["output_rank0.gz"]
    assert job.events("output complete") == ["output_rank0.gz, 24 bytes"]
    assert [event.time for event in job.snapshot.events] == [START, START]
    parts = described(job.collector, job.snapshot)
    assert parts.outputs[0].first_output == START
    assert [event.event for event in parts.events] == ["first output", "output complete"]


def test_events_are_bounded(tmp_path: Path) -> None:
    job = Job(tmp_path, groups=(PathGroup("output", "out", "*"),))
    for number in range(80):
        job.write(f"{number}.gz", DAMAGED)
    job.after(200)
    assert len(job.snapshot.events) == 50


def test_the_status_is_valid_json_whatever_the_names(tmp_path: Path, hard_name: str) -> None:
    job = Job(tmp_path, groups=(PathGroup("output", "out", "*"),))
    job.write(f"{hard_name}.gz", DAMAGED)
    job.write("out_\udcff_rank0.gz", DAMAGED)
    os.mkfifo(tmp_path / "out" / "fifo")
    job.after(60)
    text = json.dumps([to_json(job.snapshot.groups), to_json(job.snapshot.events)], ensure_ascii=False)
    text.encode()
    assert job.snapshot.groups[0].passed_over == (IgnoredFile(file="fifo", kind="FIFO"),)
    assert list(json.loads(text)[0][0]["workers"]) == ["0"]


class FakeHost(FileWatchHost):
    """A watch host that gives the answer of the test, if there is one."""

    answer: Exception | None = None

    def poll(self, watches: Any, now: float, wait_s: float = 0.0) -> list[Any]:
        found = super().poll(watches, now)
        return found if self.answer is None else [self.answer for _ in found]


@pytest.fixture
def collector_and_host(tmp_path: Path) -> Iterator[tuple[OutputsCollector, FakeHost]]:
    write(tmp_path, "output_rank0.jsonl", 10, START)
    host = FakeHost(SystemClock(), use_helper=False)
    context = replace(make_context(make_manifest(tmp_path), FakeClock()), files=host)
    yield make_collector(context), host
    host.close()


def test_a_hanging_group_has_no_series_until_it_responds(collector_and_host: tuple[OutputsCollector, FakeHost]) -> None:
    collector, host = collector_and_host
    assert [group.files for group in collector.read().groups] == [1, 0]
    host.answer = WatchHanging(host.clock.monotonic() - 1, "/mnt")
    assert [group.files for group in collector.read().groups] == [1, 0]  # slow
    host.answer = WatchHanging(host.clock.monotonic() - 60, "/mnt")
    assert collector.read().groups == ()
    host.answer = None
    snapshot = collector.read()
    assert [group.files for group in snapshot.groups] == [1, 0]
    assert [event.event for event in snapshot.events] == ["first output"]


def test_an_unreadable_group_is_reported_once(collector_and_host: tuple[OutputsCollector, FakeHost]) -> None:
    collector, host = collector_and_host
    collector.read()
    host.answer = PermissionError(13, "Permission denied")
    collector.read()
    snapshot = collector.read()
    assert snapshot.groups == ()
    assert [event.detail for event in snapshot.events] == [
        "output_rank0.jsonl",
        "Permission denied",
        "checkpoint: Permission denied",
    ]


def test_polls_in_a_helper_process_give_the_same_figures(tmp_path: Path) -> None:
    write(tmp_path, "output_rank0.jsonl", "{}\n{}\n", START)
    host = FileWatchHost(SystemClock(), use_helper=True)
    try:
        collector = make_collector(replace(make_context(make_manifest(tmp_path), FakeClock()), files=host))
        group = until(lambda: next(iter(collector.read().groups), None), "a poll")
        assert (group.files, group.bytes, group.records) == (1, 6, 2)
    finally:
        host.close()


def test_a_restarted_watch_shows_no_growth(tmp_path: Path) -> None:
    job = Job(tmp_path, groups=(PathGroup("output", "out", "*"),))
    group = job.collector._groups[0]
    for number in range(1, 4):
        job.write("a.bin", 1000 * number)
        job.poll(10)
    owner_of = FileOwnership(partial(rank_in_file_name, ranks={}), frozenset(), frozenset(), owns_unranked=True)
    make = partial(OutputWatch, str(tmp_path / "out"), "b.bin", owner_of, START)
    group.handle = job.context.files.watch(
        "again", make
    )  # as after a restart of the helper: its first file is number 1
    job.write("b.bin", 50_000)
    assert samples_of(job.poll(10), GROWTH) == {}
    for number in range(1, 4):
        job.write("b.bin", 50_000 + 100 * number)
        page = job.poll(10)
    assert samples_of(page, GROWTH) == {OUTPUT: 10}


def test_a_group_is_not_on_the_page_until_all_its_files_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_reader, "MOST_RUN", 4)
    monkeypatch.setattr(folder_reader, "MOST_SAVED_S", 1e-9)
    fill(tmp_path, *(f"output_rank0_{number}.jsonl" for number in range(50)))
    clock = FakeClock()
    collector = collector_of(make_manifest(tmp_path), clock=clock)
    snapshot = collector.read()
    group = described(collector, snapshot).outputs[0]
    assert group.counting
    assert (0 < group.files <= 4, group.bytes) == (True, 10 * group.files)
    assert OUTPUT not in page_of(collector, snapshot)
    monkeypatch.setattr(folder_reader, "MOST_SAVED_S", 0.5)
    monkeypatch.setattr(folder_reader, "FIRST_SHARE", 1.0)
    clock.advance(5)
    snapshot = collector.read()
    group = snapshot.groups[0]
    assert (group.counting, group.files, group.files_checked) == (False, 50, 0)
    assert samples_of(page_of(collector, snapshot), FILES)[OUTPUT] == 50
