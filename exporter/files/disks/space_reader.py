"""Read space, inodes and quota of the file system that holds a directory."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from exporter.files.disks.quota_reader import QuotaFacts, read_quota


class SpaceFacts(NamedTuple):
    """Space of one file system; the available values are what an ordinary user can still use."""

    available_bytes: int
    size_bytes: int
    inodes_available: int | None = None  # None if the file system has no fixed number of inodes
    inodes: int | None = None


class SpaceReading(NamedTuple):
    """One reading at ``time`` in epoch seconds; ``space`` is None if the file system reports none."""

    time: float
    space: SpaceFacts | None
    quota: QuotaFacts | None


def read_space(directory: str | os.PathLike[str]) -> SpaceFacts | None:
    """Space of the file system that holds ``directory`` or its nearest existing parent.

    None if the file system reports no space or no part of the path exists. Raises OSError if statvfs(3) fails.
    """
    found = _nearest_existing(directory)
    return None if found is None else _parse_statvfs(found[1])


def _nearest_existing(directory: str | os.PathLike[str]) -> tuple[str, os.statvfs_result] | None:
    """Return the directory or its nearest existing parent, with its statvfs(3)."""
    for place in _parents(os.fspath(directory)):
        try:
            return place, os.statvfs(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return None


def _parents(path: str) -> Iterator[str]:
    while True:
        yield path
        parent = os.path.dirname(path.rstrip("/")) or (os.sep if path.startswith(os.sep) else os.curdir)
        if path in (os.sep, os.curdir):
            return
        path = parent


def _parse_statvfs(result: os.statvfs_result) -> SpaceFacts | None:
    if result.f_blocks == 0:
        return None
    inodes = (result.f_favail, result.f_files) if result.f_files else (None, None)
    return SpaceFacts(result.f_bavail * result.f_frsize, result.f_blocks * result.f_frsize, *inodes)


class SpaceWatch:
    """Poll the space of one directory, which may not exist yet."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def poll(self, now: float) -> SpaceReading:
        """Return a reading at ``now``."""
        found = _nearest_existing(self._directory)
        if found is None:
            return SpaceReading(now, None, None)
        place, facts = found
        return SpaceReading(now, _parse_statvfs(facts), read_quota(place))
