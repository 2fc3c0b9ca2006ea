"""Space for each path group, what is left of it and until when, and file systems that do not answer."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import CollectorContext, NodeStatus
from exporter.contract.clock import SystemClock
from exporter.contract.manifest import PathGroup
from exporter.files.disks import space_reader
from exporter.files.disks.collector import (
    AVAILABLE,
    FULL,
    INODES,
    INODES_AVAILABLE,
    LOW,
    QUOTA_AVAILABLE,
    QUOTA_LIMIT,
    RESPONDING,
    SIZE,
    DiskCollector,
    DiskSnapshot,
)
from exporter.files.disks.quota_reader import QuotaFacts
from exporter.machine.file_host import FileWatchHost
from tests.exporter.machine.fuse_server import FuseMount
from tests.support.exporter import FakeClock, make_context, make_manifest, page_of, samples_of, until

OUTPUT, CHECKPOINT, RUN = 'group="output"', 'group="checkpoint"', 'group="run"'
Tell = Callable[..., None]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Lets file systems say what a test likes, in GB, or fail with an error number."""

    def tell(free: float = 50, size: float = 2000, *, fails: int | None = None, files: int = 1000) -> None:
        def statvfs(path: str) -> os.statvfs_result:
            if fails is not None:
                raise OSError(fails, os.strerror(fails), path)
            blocks = [int(amount * 1e9) // 1000 for amount in (size, free, free)]
            return os.statvfs_result((1000, 1000, *blocks, 2000, files, files, 0, 255))

        monkeypatch.setattr(os, "statvfs", statvfs)

    tell()
    return tell


@pytest.fixture
def context(tmp_path: Path) -> Iterator[CollectorContext]:
    """Of a node whose clock moves when told to; a file system may take its time."""
    made = make_context(make_manifest(tmp_path), FakeClock())
    yield made
    made.files.close()


def events(snapshot: DiskSnapshot, group: str = "output") -> list[str]:
    """What has happened to a group."""
    return [event["event"] for event in snapshot.events if event["group"] == group]


def entries(collector: DiskCollector, snapshot: DiskSnapshot) -> dict[str, dict[str, Any]]:
    """The status page by group."""
    status = NodeStatus()
    collector.describe(snapshot, status)
    return {entry["group"]: entry for entry in status.filesystems}


def test_space_is_shown_for_each_group_and_the_run_directory(context: CollectorContext, tmp_path: Path) -> None:
    collector = DiskCollector(context)
    snapshot = collector.read()
    page, facts = page_of(collector, snapshot), os.statvfs(tmp_path)
    sizes = samples_of(page, SIZE)
    assert list(sizes) == [OUTPUT, CHECKPOINT, RUN]
    assert set(sizes.values()) == {facts.f_blocks * facts.f_frsize}
    assert all(0 <= value <= facts.f_blocks * facts.f_frsize for value in samples_of(page, AVAILABLE).values())
    assert set(samples_of(page, INODES).values()) <= {facts.f_files}
    assert samples_of(page, RESPONDING) == {OUTPUT: 1, CHECKPOINT: 1, RUN: 1}
    shown = entries(collector, snapshot)
    assert list(shown) == ["output", "checkpoint", "run"]
    assert shown["run"]["responding"] is True
    assert os.stat(shown["run"]["mount"]).st_dev == os.stat(tmp_path).st_dev
    assert {"available_bytes", "size_bytes", "since", "low", "full_at", "quota", "fstype"} <= shown["run"].keys()


def test_a_group_without_a_pattern_has_space_too(tmp_path: Path) -> None:
    context = make_context(make_manifest(tmp_path, groups=(PathGroup("scratch", "/", None),)))
    assert [facts.group for facts in DiskCollector(context).read().groups] == ["scratch", "run"]
    context.files.close()


def test_little_space_is_low_and_told_once(context: CollectorContext, told: Tell) -> None:
    collector = DiskCollector(context)
    assert samples_of(page_of(collector, collector.read()), LOW)[OUTPUT] == 1  # 50 of 2000 GB
    snapshot = collector.read()
    assert events(snapshot) == ["disk low"]
    assert "has 50.0 GB of 2.0 TB left" in snapshot.events[0]["detail"]
    told(500)
    assert samples_of(page_of(collector, collector.read()), LOW)[OUTPUT] == 0
    told(9)
    assert events(collector.read()) == ["disk low", "disk low"]


def run_down(collector: DiskCollector, clock: Any, told: Tell, **course: Callable[[float], float]) -> DiskSnapshot:
    """Two minutes of looks."""
    for step in range(25):
        told(**{name: value(5.0 * step) for name, value in course.items()})
        snapshot = collector.read()
        clock.advance(5)
    return snapshot


def test_a_disk_that_fills_up_says_when_it_is_full(context: CollectorContext, told: Tell) -> None:
    collector, start = DiskCollector(context), context.clock.time()
    snapshot = run_down(collector, context.clock, told, free=lambda t: 900 - t)
    assert samples_of(page_of(collector, snapshot), FULL)[OUTPUT] == pytest.approx(start + 900, abs=5)
    assert entries(collector, snapshot)["output"]["full_at"] == pytest.approx(start + 900, abs=5)
    assert events(snapshot) == ["disk full expected"]
    (event,) = (event for event in snapshot.events if event["group"] == "output")
    assert event["level"] == "warning"
    assert "is full in 15 minutes at the current rate" in event["detail"]


def test_inodes_fill_a_disk_as_well(context: CollectorContext, told: Tell) -> None:
    collector, start = DiskCollector(context), context.clock.time()
    snapshot = run_down(collector, context.clock, told, files=lambda t: int(1000 - 2 * t))
    page = page_of(collector, snapshot)
    assert samples_of(page, FULL)[OUTPUT] == pytest.approx(start + 500, abs=5)
    assert samples_of(page, INODES)[OUTPUT] == 2000
    assert samples_of(page, INODES_AVAILABLE)[OUTPUT] == 760


def test_a_disk_that_is_full_after_the_job_is_no_event(context: CollectorContext, told: Tell) -> None:
    collector = DiskCollector(context)
    snapshot = run_down(collector, context.clock, told, free=lambda t: 2000 - 0.3 * t, size=lambda _: 2000)
    assert OUTPUT in samples_of(page_of(collector, snapshot), FULL)
    assert events(snapshot) == []
    longer = replace(context, identity=replace(context.identity, end=context.clock.time() + 86400))
    snapshot = run_down(DiskCollector(longer), context.clock, told, free=lambda t: 2000 - 0.3 * t, size=lambda _: 2000)
    assert events(snapshot) == ["disk full expected"]


def test_a_quota_is_shown_and_may_be_used_up_first(
    context: CollectorContext, told: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [10_000_000_000]

    def read_quota(_: str) -> QuotaFacts:
        return QuotaFacts("user", 20_000_000_000, left[0])

    monkeypatch.setattr(space_reader, "read_quota", read_quota)
    collector, start = DiskCollector(context), context.clock.time()
    for step in range(20):
        left[0] = 10_000_000_000 - 50_000_000 * step
        snapshot = collector.read()
        context.clock.advance(5)  # type: ignore[attr-defined]
    page = page_of(collector, snapshot)
    assert samples_of(page, QUOTA_LIMIT)[OUTPUT] == 20e9
    assert samples_of(page, QUOTA_AVAILABLE)[OUTPUT] == left[0]
    assert samples_of(page, FULL)[OUTPUT] == pytest.approx(start + 1000, abs=5)
    assert entries(collector, snapshot)["output"]["quota"] == {
        "kind": "user",
        "limit_bytes": 20_000_000_000,
        "available_bytes": left[0],
    }


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.EIO])
def test_a_file_system_whose_server_is_gone_does_not_respond(
    context: CollectorContext, told: Tell, number: int
) -> None:
    collector, start = DiskCollector(context), context.clock.time()
    told(fails=number)
    collector.read()
    context.clock.advance(60)  # type: ignore[attr-defined]
    snapshot = collector.read()
    page = page_of(collector, snapshot)
    assert samples_of(page, RESPONDING)[OUTPUT] == 0
    assert samples_of(page, AVAILABLE) == {}
    shown = entries(collector, snapshot)["output"]
    assert (shown["responding"], shown["since"], shown["error"]) == (False, start, os.strerror(number))
    assert events(snapshot) == ["file system hangs"]
    told(500)
    snapshot = collector.read()
    assert events(snapshot) == ["file system hangs", "file system answers again"]
    assert samples_of(page_of(collector, snapshot), RESPONDING)[OUTPUT] == 1
    assert entries(collector, snapshot)["output"]["since"] is None


def test_a_directory_that_may_not_be_looked_at_has_no_space_and_responds(context: CollectorContext, told: Tell) -> None:
    collector = DiskCollector(context)
    told(fails=errno.EACCES)
    snapshot = collector.read()
    page = page_of(collector, snapshot)
    assert samples_of(page, RESPONDING)[OUTPUT] == 1
    assert samples_of(page, AVAILABLE) == samples_of(page, LOW) == {}
    assert entries(collector, snapshot)["output"]["error"] == "Permission denied"


def test_events_are_bounded(context: CollectorContext, told: Tell) -> None:
    collector = DiskCollector(context)
    for number in range(200):
        told(5 if number % 2 else 1500)
        snapshot = collector.read()
    assert len(snapshot.events) == 50


def test_a_hanging_file_system_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    mount = FuseMount(tmp_path)
    groups = (
        PathGroup("output", str(mount.point), None),
        PathGroup("checkpoint", str(mount.point / "ckpt"), None),
        PathGroup("local", str(tmp_path), None),
    )
    clock, files = FakeClock(), FileWatchHost(SystemClock())
    context = replace(make_context(make_manifest(tmp_path, groups=groups), clock), files=files)
    try:
        collector = DiskCollector(context)
        until(lambda: all(facts.responding for facts in collector.read().groups), "the helper")
        size = samples_of(page_of(collector, collector.read()), SIZE)
        assert size[OUTPUT] == size[CHECKPOINT] == 204_800_000_000 != size['group="local"']
        mount.say("swallow")
        snapshot = collector.read()
        page = page_of(collector, snapshot)
        assert samples_of(page, RESPONDING) == {OUTPUT: 0, CHECKPOINT: 0, 'group="local"': 1, RUN: 1}
        assert samples_of(page, AVAILABLE).keys() == {'group="local"', RUN}
        shown = entries(collector, snapshot)["checkpoint"]
        assert (shown["mount"], shown["fstype"], shown["responding"]) == (str(mount.point), "fuse.gpujob_test", False)
        assert clock.time() - 5 < shown["since"] <= clock.time()
        assert shown["available_bytes"] is None
        clock.advance(10)
        until(lambda: events(collector.read()), "the event")
        mount.say("answer")
        answered = until(
            lambda: (found := collector.read()).groups[0].responding and found.groups[1].responding and found, "it"
        )
        assert events(answered) == ["file system hangs", "file system answers again"]
    finally:
        files.close()
        mount.close()
