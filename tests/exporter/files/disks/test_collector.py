"""Disk space of each path group, when it will be full, and file systems that do not respond."""

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exporter.collecting.collector import CollectorContext
from exporter.contract.clock import SystemClock
from exporter.contract.manifest import PathGroup
from exporter.contract.status import FileSystem
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
from exporter.machine.file_host import POLL_WAIT_S, FileWatchHost, WatchHanging
from tests.exporter.machine.fuse_server import FuseMount
from tests.support.exporter import FakeClock, make_context, make_manifest, page_of, samples_of, until
from tests.support.statuses import described

OUTPUT, CHECKPOINT, RUN = 'group="output"', 'group="checkpoint"', 'group="run"'
SetSpace = Callable[..., None]


@pytest.fixture
def set_space(monkeypatch: pytest.MonkeyPatch) -> SetSpace:
    """Set the space that file systems report, in GB, or an error number with which they fail."""

    def set_statvfs(free: float = 50, size: float = 2000, *, fails: int | None = None, files: int = 1000) -> None:
        def statvfs(path: str) -> os.statvfs_result:
            if fails is not None:
                raise OSError(fails, os.strerror(fails), path)
            blocks = [int(amount * 1e9) // 1000 for amount in (size, free, free)]
            return os.statvfs_result((1000, 1000, *blocks, 2000, files, files, 0, 255))

        monkeypatch.setattr(os, "statvfs", statvfs)

    set_statvfs()
    return set_statvfs


@pytest.fixture
def context(tmp_path: Path) -> Iterator[CollectorContext]:
    """The context of a node with a fake clock."""
    context = make_context(make_manifest(tmp_path), FakeClock())
    yield context
    context.files.close()


@pytest.fixture
def collector(context: CollectorContext) -> DiskCollector:
    return DiskCollector(context)


def events(snapshot: DiskSnapshot, group: str = "output") -> list[str]:
    """The events of a group."""
    return [event.event for event in snapshot.events if event.group == group]


def entries(collector: DiskCollector, snapshot: DiskSnapshot) -> dict[str, FileSystem]:
    """File systems of the status by group."""
    return {entry.group: entry for entry in described(collector, snapshot).filesystems}


def test_space_is_reported_for_each_group_and_the_run_directory(collector: DiskCollector, tmp_path: Path) -> None:
    snapshot = collector.read()
    page, facts = page_of(collector, snapshot), os.statvfs(tmp_path)
    sizes = samples_of(page, SIZE)
    assert list(sizes) == [OUTPUT, CHECKPOINT, RUN]
    assert set(sizes.values()) == {facts.f_blocks * facts.f_frsize}
    assert all(0 <= value <= facts.f_blocks * facts.f_frsize for value in samples_of(page, AVAILABLE).values())
    assert set(samples_of(page, INODES).values()) <= {facts.f_files}
    assert samples_of(page, RESPONDING) == {OUTPUT: 1, CHECKPOINT: 1, RUN: 1}
    entry = entries(collector, snapshot)
    assert list(entry) == ["output", "checkpoint", "run"]
    assert entry["run"].responding is True
    assert os.stat(entry["run"].mount or "").st_dev == os.stat(tmp_path).st_dev


def test_a_group_without_a_pattern_has_space_too(tmp_path: Path) -> None:
    context = make_context(make_manifest(tmp_path, groups=(PathGroup("scratch", "/", None),)))
    assert [facts.group for facts in DiskCollector(context).read().groups] == ["scratch", "run"]
    context.files.close()


def test_low_space_is_reported_once(collector: DiskCollector, set_space: SetSpace) -> None:
    assert samples_of(page_of(collector, collector.read()), LOW)[OUTPUT] == 1  # 50 of 2000 GB
    snapshot = collector.read()
    assert events(snapshot) == ["disk low"]
    assert "has 50.0 GB of 2.0 TB left" in snapshot.events[0].detail
    set_space(500)
    assert samples_of(page_of(collector, collector.read()), LOW)[OUTPUT] == 0
    set_space(9)
    assert events(collector.read()) == ["disk low", "disk low"]


def run_down(
    collector: DiskCollector, clock: Any, set_space: SetSpace, **changes: Callable[[float], float]
) -> DiskSnapshot:
    """Two minutes of readings."""
    for step in range(25):
        set_space(**{name: value(5.0 * step) for name, value in changes.items()})
        snapshot = collector.read()
        clock.advance(5)
    return snapshot


def test_a_disk_that_fills_up_reports_when_it_will_be_full(context: CollectorContext, set_space: SetSpace) -> None:
    collector, start = DiskCollector(context), context.clock.time()
    snapshot = run_down(collector, context.clock, set_space, free=lambda t: 900 - t)
    assert samples_of(page_of(collector, snapshot), FULL)[OUTPUT] == pytest.approx(start + 900, abs=5)
    assert entries(collector, snapshot)["output"].full_at == pytest.approx(start + 900, abs=5)
    assert events(snapshot) == ["disk full expected"]
    (event,) = (event for event in snapshot.events if event.group == "output")
    assert event.level == "warning"
    assert "will be full in 15 minutes at the current rate" in event.detail


def test_inodes_fill_a_disk_as_well(context: CollectorContext, set_space: SetSpace) -> None:
    collector, start = DiskCollector(context), context.clock.time()
    snapshot = run_down(collector, context.clock, set_space, files=lambda t: int(1000 - 2 * t))
    page = page_of(collector, snapshot)
    assert samples_of(page, FULL)[OUTPUT] == pytest.approx(start + 500, abs=5)
    assert samples_of(page, INODES)[OUTPUT] == 2000
    assert samples_of(page, INODES_AVAILABLE)[OUTPUT] == 760
    assert entries(collector, snapshot)["output"].lacks == "inodes"
    detail = next(event.detail for event in snapshot.events if event.event == "disk full expected")
    assert detail.endswith("will be out of inodes in 8 minutes at the current rate: 950 of 2000 left")


def test_a_disk_that_fills_up_only_after_the_job_is_no_event(
    context: CollectorContext, collector: DiskCollector, set_space: SetSpace
) -> None:
    snapshot = run_down(collector, context.clock, set_space, free=lambda t: 2000 - 0.3 * t, size=lambda _: 2000)
    assert OUTPUT in samples_of(page_of(collector, snapshot), FULL)
    assert events(snapshot) == []
    longer = replace(context, identity=replace(context.identity, end=context.clock.time() + 86400))
    snapshot = run_down(
        DiskCollector(longer), context.clock, set_space, free=lambda t: 2000 - 0.3 * t, size=lambda _: 2000
    )
    assert events(snapshot) == ["disk full expected"]


def test_a_quota_is_reported_and_may_be_used_up_first(
    context: CollectorContext, set_space: SetSpace, monkeypatch: pytest.MonkeyPatch
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
    assert entries(collector, snapshot)["output"].to_json()["quota"] == {
        "kind": "user",
        "limit_bytes": 20_000_000_000,
        "available_bytes": left[0],
    }
    assert entries(collector, snapshot)["output"].lacks == "quota"
    detail = next(event.detail for event in snapshot.events if event.event == "disk full expected")
    assert detail.endswith(
        "will be out of quota in 16 minutes at the current rate: 9.8 GB of 20.0 GB left of the user quota"
    )


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.EIO])
def test_a_file_system_without_its_server_does_not_respond(
    context: CollectorContext, set_space: SetSpace, number: int
) -> None:
    collector, start = DiskCollector(context), context.clock.time()
    set_space(fails=number)
    collector.read()
    context.clock.advance(60)  # type: ignore[attr-defined]
    snapshot = collector.read()
    page = page_of(collector, snapshot)
    assert samples_of(page, RESPONDING)[OUTPUT] == 0
    assert samples_of(page, AVAILABLE) == {}
    entry = entries(collector, snapshot)["output"]
    assert (entry.responding, entry.since, entry.error) == (False, start, os.strerror(number))
    assert events(snapshot) == ["file system hangs"]
    set_space(500)
    snapshot = collector.read()
    assert events(snapshot) == ["file system hangs", "file system answers again"]
    assert samples_of(page_of(collector, snapshot), RESPONDING)[OUTPUT] == 1
    assert entries(collector, snapshot)["output"].since is None


def test_an_inaccessible_directory_has_no_space_but_responds(collector: DiskCollector, set_space: SetSpace) -> None:
    set_space(fails=errno.EACCES)
    snapshot = collector.read()
    page = page_of(collector, snapshot)
    assert samples_of(page, RESPONDING)[OUTPUT] == 1
    assert samples_of(page, AVAILABLE) == samples_of(page, LOW) == {}
    assert entries(collector, snapshot)["output"].error == "Permission denied"


def test_events_are_bounded(collector: DiskCollector, set_space: SetSpace) -> None:
    for number in range(200):
        set_space(5 if number % 2 else 1500)
        snapshot = collector.read()
    assert len(snapshot.events) == 50


def test_a_first_poll_in_vain_is_no_event_however_long_it_took(
    collector: DiskCollector, context: CollectorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poll(_: object, watches: Sequence[object], now: float) -> list[WatchHanging]:
        return [WatchHanging(time.monotonic() - 60, None) for _ in watches]

    monkeypatch.setattr(FileWatchHost, "poll", poll)
    start, snapshot = context.clock.time(), collector.read()
    assert [(facts.responding, facts.silent_since) for facts in snapshot.groups] == [(False, start)] * 3
    assert events(snapshot) == []
    context.clock.advance(collector.interval_s)  # type: ignore[attr-defined]
    assert events(collector.read()) == ["file system hangs"]


def test_a_hanging_file_system_is_reported_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

        def read_until_responding(*responding: int) -> DiskSnapshot:
            def read() -> DiskSnapshot | None:
                found = collector.read()
                return found if [facts.responding for facts in found.groups] == list(responding) else None

            found: DiskSnapshot = until(read, "the answers")
            return found

        size = samples_of(page_of(collector, read_until_responding(1, 1, 1, 1)), SIZE)
        assert size[OUTPUT] == size[CHECKPOINT] == 204_800_000_000 != size['group="local"']
        mount.say("swallow")
        monkeypatch.setattr(FileWatchHost.poll, "__defaults__", (POLL_WAIT_S,))
        snapshot = read_until_responding(0, 0, 1, 1)
        page = page_of(collector, snapshot)
        assert samples_of(page, RESPONDING) == {OUTPUT: 0, CHECKPOINT: 0, 'group="local"': 1, RUN: 1}
        assert samples_of(page, AVAILABLE).keys() == {'group="local"', RUN}
        entry = entries(collector, snapshot)["checkpoint"]
        assert (entry.mount, entry.fstype, entry.responding) == (str(mount.point), "fuse.gpujob_test", False)
        assert entry.since == clock.time()
        assert entry.available_bytes is None
        clock.advance(10)
        until(lambda: events(collector.read()), "the event")
        mount.say("answer")
        assert events(read_until_responding(1, 1, 1, 1)) == ["file system hangs", "file system answers again"]
    finally:
        files.close()
        mount.close()
