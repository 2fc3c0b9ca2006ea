"""File systems that the job writes to: whether they answer, free space, and when they will be full."""

import errno
import operator
from collections import deque
from dataclasses import replace
from functools import partial

from exporter.collecting.collector import CollectorContext, StatusParts
from exporter.collecting.families import Family, Samples
from exporter.contract.events import Event
from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import FileSystem, Quota
from exporter.files.disks.forecast import DiskForecast, is_space_low
from exporter.files.disks.quota_reader import QuotaFacts
from exporter.files.disks.space_reader import SpaceFacts, SpaceReading, SpaceWatch
from exporter.machine.file_host import HANG_REPORT_S, FileHelperEnded, WatchHandle, WatchHanging

AVAILABLE = Family(
    "filesystem_avail_bytes",
    "Bytes that an ordinary user can still write to the file system of the path group.",
    labels=("group",),
)
SIZE = Family("filesystem_size_bytes", "Size of the file system.", labels=("group",))
INODES_AVAILABLE = Family(
    "filesystem_inodes_avail", "Files that can still be created on the file system.", labels=("group",)
)
INODES = Family("filesystem_inodes", "Largest possible number of files on the file system.", labels=("group",))
RESPONDING = Family("filesystem_responding", "Whether the file system answers within a second.", labels=("group",))
LOW = Family(
    "filesystem_low",
    "Whether less than 10 GB is free, or less than both 1 TB and a tenth of the file system.",
    labels=("group",),
)
FULL = Family(
    "filesystem_full_timestamp_seconds",
    "When the file system runs out of bytes or files, or this user's quota is used up, at the current rate; absent "
    "while none of them is filling up.",
    labels=("group",),
)
QUOTA_AVAILABLE = Family(
    "filesystem_quota_avail_bytes", "Bytes that this user can still write under the tightest quota.", labels=("group",)
)
QUOTA_LIMIT = Family("filesystem_quota_limit_bytes", "Limit of the tightest quota.", labels=("group",))

RUN_GROUP = "run"  # group of the run directory
# errors of a file system whose server is gone
UNREACHABLE_ERRNOS = frozenset((
    errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNREFUSED,
    errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.ESHUTDOWN,
))  # fmt: skip
FULL_SOON_S = 3600.0  # a disk full this soon, or before the job's time limit, is an event
REPEAT_INTERVAL_S = 600.0  # that event is not repeated within this time
MOST_EVENTS = 50
NO_SPACE, NO_INODES, NO_QUOTA = None, "inodes", "quota"  # what is used up


@dataclass(frozen=True)
class GroupSpace:
    """One group in one poll; times in epoch seconds."""

    group: str
    responding: bool | None = None  # None if the poll was not possible
    space: SpaceFacts | None = None
    quota: QuotaFacts | None = None
    full_at: float | None = None
    lacks: str | None = None  # what is used up then if not the space
    mount: str | None = None
    fstype: str | None = None
    silent_since: float | None = None  # since when it has not answered
    error: str | None = None

    @property
    def low(self) -> bool | None:
        """Whether space is low; None if unknown."""
        return None if self.space is None else is_space_low(self.space.available_bytes, self.space.size_bytes)


@dataclass(frozen=True)
class DiskSnapshot:
    """All groups, and recent events."""

    groups: tuple[GroupSpace, ...]
    events: tuple[Event, ...] = ()


class _SpaceGroupWatch:
    """One group with its watch and its forecasts."""

    def __init__(self, name: str, handle: WatchHandle[SpaceReading]) -> None:
        self.name = name
        self.handle = handle
        self._forecasts = {kind: DiskForecast() for kind in (NO_SPACE, NO_INODES, NO_QUOTA)}
        self.silent_since: float | None = None
        self.hang_reported = False
        self.low_reported = False
        self.full_report_time: float | None = None

    def first_full(self, reading: SpaceReading) -> tuple[float | None, str | None]:
        """When space, inodes or the quota run out, whichever is first, and which of them."""
        space, quota = reading.space, reading.quota
        left = (
            space.available_bytes if space is not None else None,
            space.inodes_available if space is not None else None,
            quota.available_bytes if quota is not None else None,
        )
        times = []
        for (kind, forecast), free in zip(self._forecasts.items(), left, strict=True):
            if free is not None:
                forecast.update(reading.time, free)
                if (at := forecast.full_at(reading.time)) is not None:
                    times.append((at, kind))
        return min(times, key=operator.itemgetter(0), default=(None, None))


class DiskCollector:
    """Space of each path group and of the run directory."""

    name = "disk"
    families = (AVAILABLE, SIZE, INODES_AVAILABLE, INODES, RESPONDING, LOW, FULL, QUOTA_AVAILABLE, QUOTA_LIMIT)

    def __init__(self, context: CollectorContext) -> None:
        self.interval_s = max(5.0, context.manifest.check_interval_s)
        self._context, self._clock, self._files = context, context.clock, context.files
        manifest = context.manifest
        directories = [(group.name, manifest.directory(group)) for group in manifest.groups]
        self._groups = [
            _SpaceGroupWatch(name, context.files.watch(f"space-{name}", partial(SpaceWatch, str(directory))))
            for name, directory in (*directories, (RUN_GROUP, manifest.run_dir))
        ]
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)

    def read(self) -> DiskSnapshot:
        now = self._clock.time()
        answers = self._files.poll([group.handle for group in self._groups], now)
        found = tuple(self._facts(group, answer, now) for group, answer in zip(self._groups, answers, strict=True))
        for group, facts in zip(self._groups, found, strict=True):
            self._log_events(group, facts, now)
        return DiskSnapshot(found, tuple(self._events))

    def _facts(self, group: _SpaceGroupWatch, answer: SpaceReading | Exception, now: float) -> GroupSpace:
        mount = group.handle.filesystem
        unseen = GroupSpace(
            group.name, mount=None if mount is None else mount.point, fstype=None if mount is None else mount.fstype
        )
        if isinstance(answer, FileHelperEnded):
            return replace(unseen, error=str(answer))
        if isinstance(answer, WatchHanging) or (isinstance(answer, OSError) and answer.errno in UNREACHABLE_ERRNOS):
            group.silent_since = group.silent_since or now
            error = answer.strerror if isinstance(answer, OSError) else None
            return replace(unseen, responding=False, silent_since=group.silent_since, error=error)
        group.silent_since = None
        if isinstance(answer, OSError):
            return replace(unseen, responding=True, error=answer.strerror or str(answer))
        if isinstance(answer, Exception):
            raise answer
        at, kind = group.first_full(answer)
        return replace(unseen, responding=True, space=answer.space, quota=answer.quota, full_at=at, lacks=kind)

    def _log_events(self, group: _SpaceGroupWatch, facts: GroupSpace, now: float) -> None:
        """Emit events for changes."""
        where = f"{group.name}: {facts.mount or 'its file system'}"
        if (
            facts.responding is False
            and not group.hang_reported
            and (facts.error or now - (facts.silent_since or now) >= HANG_REPORT_S)
        ):
            group.hang_reported = True
            self._event(
                facts.silent_since or now, "critical", "file system hangs", group.name, f"{where} {facts.error or ''}"
            )
        if facts.responding and group.hang_reported:
            group.hang_reported = False
            self._event(now, "info", "file system answers again", group.name, where)
        if facts.space is None:
            return
        if facts.low and not group.low_reported:
            text = f"{where} has {_size_left(facts.space.available_bytes, facts.space.size_bytes)}"
            self._event(now, "warning", "disk low", group.name, text)
        group.low_reported = bool(facts.low)
        before = max(now + FULL_SOON_S, self._context.limit_end or now)
        if facts.full_at is not None and facts.full_at < before:
            if group.full_report_time is None or now - group.full_report_time > REPEAT_INTERVAL_S:
                in_s = facts.full_at - now
                soon = f"{in_s / 60:.0f} minutes" if in_s >= 120 else f"{in_s:.0f} seconds"
                word = f"out of {facts.lacks}" if facts.lacks else "full"
                state = f"will be {word} in {soon} at the current rate" if in_s > 0 else f"is {word} now"
                detail = f"{where} {state}: {_left_text(facts, facts.space)}"
                self._event(now, "warning", "disk full expected", group.name, detail)
            group.full_report_time = now

    def _event(self, time: float, level: str, kind: str, group: str, detail: str) -> None:
        self._events.append(Event(time=time, level=level, event=kind, group=group, detail=detail.rstrip()))

    def render(self, snapshot: DiskSnapshot, out: Samples) -> None:
        for facts in snapshot.groups:
            row = out.row(group=facts.group)
            row.add(RESPONDING, facts.responding)
            if facts.space is not None:
                row.add(AVAILABLE, facts.space.available_bytes)
                row.add(SIZE, facts.space.size_bytes)
                row.add(INODES_AVAILABLE, facts.space.inodes_available)
                row.add(INODES, facts.space.inodes)
                row.add(LOW, facts.low)
            row.add(FULL, facts.full_at)
            if facts.quota is not None:
                row.add(QUOTA_AVAILABLE, facts.quota.available_bytes)
                row.add(QUOTA_LIMIT, facts.quota.limit_bytes)

    def describe(self, snapshot: DiskSnapshot, parts: StatusParts) -> None:
        parts.filesystems = tuple(_file_system(facts) for facts in snapshot.groups)
        parts.events += snapshot.events


def _file_system(facts: GroupSpace) -> FileSystem:
    """One group as it is in the status."""
    space, quota = facts.space, facts.quota
    return FileSystem(
        group=facts.group,
        mount=facts.mount,
        fstype=facts.fstype,
        responding=facts.responding,
        since=facts.silent_since,
        error=facts.error,
        available_bytes=None if space is None else space.available_bytes,
        size_bytes=None if space is None else space.size_bytes,
        inodes_available=None if space is None else space.inodes_available,
        inodes=None if space is None else space.inodes,
        low=facts.low,
        full_at=facts.full_at,
        lacks=facts.lacks,
        quota=None if quota is None else Quota(*quota),
    )


def _left_text(facts: GroupSpace, space: SpaceFacts) -> str:
    """What is left of that which is used up first."""
    if facts.lacks == NO_INODES and space.inodes_available is not None:
        return f"{space.inodes_available} of {space.inodes} left"
    if facts.lacks == NO_QUOTA and facts.quota is not None:
        return f"{_size_left(facts.quota.available_bytes, facts.quota.limit_bytes)} of the {facts.quota.kind} quota"
    return _size_left(space.available_bytes, space.size_bytes)


def _size_left(available_bytes: float, size_bytes: float) -> str:
    return f"{_decimal_size(available_bytes)} of {_decimal_size(size_bytes)} left"


def _decimal_size(count: float) -> str:
    """Bytes for people, in decimal units like the limits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e6:.1f} MB"
