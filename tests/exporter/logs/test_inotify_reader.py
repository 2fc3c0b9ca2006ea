"""Inotify watches that report whether a file is unchanged."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from exporter.logs import inotify_reader
from exporter.logs.inotify_reader import IN_Q_OVERFLOW, InotifyWatch, InotifyWatches, sees_all_writes
from exporter.machine.mounts import MountPoint


def start_watch(wakeups: InotifyWatches, resting_log: Path) -> InotifyWatch:
    watch = wakeups.watch(str(resting_log), resting_log.stat().st_dev)
    assert watch is not None
    return watch


def append(resting_log: Path, text: bytes) -> None:
    with resting_log.open("ab") as out:
        out.write(text)


def replace(resting_log: Path) -> None:
    other = resting_log.with_name("other")
    other.write_bytes(b"two\n")
    other.replace(resting_log)


def write_by_another_name(resting_log: Path) -> None:
    other = resting_log.with_name("linked")
    os.link(resting_log, other)
    append(other, b"more\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "append": lambda log: append(log, b"two\n"),
    "truncate": lambda log: os.truncate(log, 0),
    "rename": lambda log: log.rename(log.with_name("worker.log.1")),
    "rename, create": lambda log: (
        log.rename(log.with_name("worker.log.1")),
        log.write_bytes(b"new\n"),
    ),
    "unlink": lambda log: log.unlink(),
    "replace": replace,
    "touch": lambda log: os.utime(log, (2, 2)),
    "chmod": lambda log: log.chmod(0o600),
    "write by another name": write_by_another_name,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_open", [False, True])
def test_the_next_drain_reports_a_change(
    wakeups: InotifyWatches, resting_log: Path, change: Callable[[Path], object], is_open: bool
) -> None:
    descriptor = os.open(resting_log, os.O_RDONLY) if is_open else -1
    watch = start_watch(wakeups, resting_log)
    wakeups.drain()
    assert watch.is_unchanged
    change(resting_log)
    assert watch.is_unchanged, "a round uses the state from its start"
    wakeups.drain()
    assert not watch.is_unchanged
    if is_open:
        os.close(descriptor)


def test_reading_is_no_change(wakeups: InotifyWatches, resting_log: Path) -> None:
    watch = start_watch(wakeups, resting_log)
    resting_log.read_bytes()
    list(resting_log.parent.iterdir())
    append(resting_log.with_name("another.log"), b"two\n")
    wakeups.drain()
    assert watch.is_unchanged


def test_all_watches_of_one_file_report_a_change(wakeups: InotifyWatches, resting_log: Path) -> None:
    linked = resting_log.with_name("linked")
    os.link(resting_log, linked)
    first, second, third = (
        start_watch(wakeups, resting_log),
        start_watch(wakeups, linked),
        start_watch(wakeups, resting_log),
    )
    wakeups.drop(first)
    append(resting_log, b"two\n")
    wakeups.drain()
    assert (first.is_unchanged, second.is_unchanged, third.is_unchanged) == (False, False, False)
    again = start_watch(wakeups, resting_log)
    wakeups.drain()
    assert again.is_unchanged, "leftover events of earlier watches do not count"
    append(linked, b"three\n")
    wakeups.drain()
    assert not again.is_unchanged


def test_a_dropped_watch_never_reports_unchanged(wakeups: InotifyWatches, resting_log: Path) -> None:
    watch = start_watch(wakeups, resting_log)
    wakeups.drop(watch)
    wakeups.drop(watch)
    again = start_watch(wakeups, resting_log)
    append(resting_log, b"two\n")
    wakeups.drop(again)  # its event is still queued
    kept = start_watch(wakeups, resting_log)
    wakeups.drain()
    assert (watch.is_unchanged, again.is_unchanged, kept.is_unchanged) == (False, False, True)


def test_many_simultaneous_changes_are_all_reported(wakeups: InotifyWatches, resting_log: Path) -> None:
    logs = [resting_log.with_name(f"{number}.log") for number in range(600)]
    for log in logs:
        log.touch()
    watches = [start_watch(wakeups, log) for log in logs]
    for log in logs[::2]:
        append(log, b"x\n")
    wakeups.drain()
    assert [watch.is_unchanged for watch in watches] == [False, True] * 300


def test_a_writer_causes_only_one_event(resting_log: Path, wakeups: InotifyWatches) -> None:
    start_watch(wakeups, resting_log)
    for _ in range(100):
        append(resting_log, b"x\n")
    events = os.read(wakeups._fd, 1 << 16)
    assert len(events) == 2 * 16, "the change, and the removal of the watch"


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_a_path_through_a_link_is_not_watched(wakeups: InotifyWatches, resting_log: Path, linked: str) -> None:
    link = resting_log.parent / "link"
    link.symlink_to(resting_log if linked == "file" else resting_log.parent)
    reached = link if linked == "file" else link / resting_log.name
    assert wakeups.watch(str(reached), resting_log.stat().st_dev) is None
    assert wakeups.watch(os.path.relpath(resting_log), resting_log.stat().st_dev) is None


def test_an_absent_file_is_not_watched(wakeups: InotifyWatches, resting_log: Path) -> None:
    device = resting_log.stat().st_dev
    resting_log.unlink()
    assert wakeups.watch(str(resting_log), device) is None
    resting_log.touch()
    assert start_watch(wakeups, resting_log).is_unchanged, "other files are, and this one once it exists"


MOUNTS = (
    MountPoint("/", "ext4", "/dev/vda1", 1),
    MountPoint("/scratch", "lustre", "10.0.0.1@o2ib:/scratch", 2),
    MountPoint("/home", "nfs4", "server:/home", 3),
    MountPoint("/container", "overlay", "overlay", 4),
    MountPoint("/data", "btrfs", "/dev/vdb", 5),
    MountPoint("/hidden/local", "btrfs", "/dev/vdc", 6),
    MountPoint("/hidden", "nfs4", "server:/hidden", 7),
    MountPoint("/dev/shm", "tmpfs", "tmpfs", 8),
    MountPoint("/mnt", "fuse.sshfs", "host:/", 9),
    MountPoint("/bound", "ext4", "/dev/vda1", 1),
)


@pytest.mark.parametrize(
    ("path", "device", "expected"),
    [
        ("/var/x.log", 1, True),
        ("/bound/x.log", 1, True),
        ("/dev/shm/x.log", 8, True),
        ("/scratch/x.log", 2, False),
        ("/home/x.log", 3, False),
        ("/container/x.log", 4, False),
        ("/mnt/x.log", 9, False),
        ("/data/subvolume/x.log", 51, True),
        ("/hidden/local/x.log", 7, False),
        ("/var/x.log", 52, False),
    ],
)
def test_only_local_file_systems_report_all_writes(path: str, device: int, expected: bool) -> None:
    assert sees_all_writes(path, device, MOUNTS) is expected


def test_a_file_on_a_network_file_system_is_not_touched(resting_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = resting_log.stat().st_dev
    touched, mount_reads = list[str](), list[str]()

    def mounts() -> list[MountPoint]:
        mount_reads.append("mounts")
        return [MountPoint("/", "nfs4", "server:/", device)]

    wakeups = InotifyWatches(mounts)
    monkeypatch.setattr(inotify_reader, "_call", lambda name, *_: touched.append(name))
    monkeypatch.setattr(os.path, "realpath", lambda name: touched.append(name))
    assert [wakeups.watch(str(resting_log), device) for _ in range(2)] == [None, None]
    monkeypatch.undo()
    assert (touched, mount_reads) == ([], ["mounts"]), "its mount is looked up once"


def test_the_number_of_watches_is_bounded(
    resting_log: Path, wakeups: InotifyWatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify_reader, "MOST_WATCHES", 1)
    watch = start_watch(wakeups, resting_log)
    other = resting_log.with_name("other.log")
    other.touch()
    assert wakeups.watch(str(other), other.stat().st_dev) is None
    wakeups.drop(watch)
    assert start_watch(wakeups, other).is_unchanged


def test_no_watch_reports_unchanged_after_a_queue_overflow(resting_log: Path, wakeups: InotifyWatches) -> None:
    watch = start_watch(wakeups, resting_log)
    wakeups._apply_events(struct.pack("=iIII", -1, IN_Q_OVERFLOW, 0, 0))
    assert not watch.is_unchanged
    assert start_watch(wakeups, resting_log).is_unchanged


def test_closing_releases_the_descriptor(resting_log: Path, wakeups: InotifyWatches) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = start_watch(wakeups, resting_log)
    assert not os.get_inheritable(wakeups._fd)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    wakeups.close()
    assert (watch.is_unchanged, len(os.listdir("/proc/self/fd"))) == (False, before)
    wakeups.drain()
    wakeups.drop(watch)
