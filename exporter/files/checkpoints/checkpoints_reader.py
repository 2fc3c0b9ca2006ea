"""Poll a checkpoint folder: changed entries, the shards that indexes name, and damaged files."""

import contextlib
import heapq
import itertools
import os
import re
import stat
import time
from collections.abc import Generator, Iterator
from dataclasses import field
from typing import Any, NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import DamagedFile
from exporter.files.checkpoints.entries import CheckpointEntry, CheckpointFile, CheckpointIndex
from exporter.files.checkpoints.layouts_reader import MOST_INDEXES, index_ends, index_paths, read_index
from exporter.files.checkpoints.open_files_reader import are_closed
from exporter.files.checkpoints.parts_reader import BESIDE, is_unproven, part_flaw, part_result
from exporter.files.formats import FileCheck
from exporter.files.formats.source import KINDS
from exporter.machine.folders import name_matcher

MOST_LEVELS = 8  # directory levels walked, the checkpoint's own included
MOST_ENTRIES = 20_000  # entries of one checkpoint, and entries read in one poll
HOT_S = 120.0  # a directory is walked at each poll until it has been unchanged this long
REST_RATIO = 20.0  # pause before the next walk, as a multiple of the time that the last one took
LIST_REST_RATIO = 100.0  # the same for listings: a folder may hold a million other files
MTIME_LAG_S, RELIST_S = 2.0, 60.0  # coarsest directory mtime, and the longest time until names are read again
NEWEST_POLLED, OTHERS_POLLED = 16, 256  # settled entries polled each time: of the newest, and of others in turn
MOST_FOLDERS = 16  # subdirectories of a settled entry whose mtimes are compared
SETTLED_S = 10.0  # a file is checked once unchanged for this long and over two polls
RECHECK_S = 10.0  # a file counts as damaged if a second check after this time agrees
SURE_S = 60.0  # or if it has been unchanged for this long
CLOSED_S = 2.0  # or this long and over two polls, if no process can write it any more
_TEXT_FORMATS = ("json", "jsonl", "csv")  # programs close them between records
POLL_S = 0.3  # time for one poll, the next continues; one file on a cold server may take milliseconds
LIST_S, LIST_STEP = 0.2, 256  # of that, time for names, and names read between two looks at the clock
CLOCK_SLACK_S = 60.0  # files this much older than the start may be the job's: a file server's clock may be behind
MOST_CHECKS, CHECK_S = 8, 0.05  # files checked in one poll, and the time for it
MOST_HELD = 8  # settled directories whose files are kept in memory, the newest
MOST_DAMAGED = 20
MOST_PASSED_OVER = 20
MOST_KNOWN_ENTRIES = 20_000  # entries remembered, the newest
EMPTY_DICT: dict[str, Any] = {}  # shared empty dict that saves memory; never written to

_TEMPORARY_ENDING = (
    r"(?:[-_.](?:tmp|temp|part|partial|incomplete|inprogress|in_progress|writing|unfinished)"
    r"|[-.]tmp[-_.]?[A-Za-z0-9]{1,32}|\.orbax-checkpoint-tmp(?:-\d+)?|~)$"
)
_TEMPORARY_MARK = re.compile(rf"^\.|^[._]?tmp[-_.]|{_TEMPORARY_ENDING}", re.IGNORECASE)
# hidden files such as ``.metadata`` and ``.zarray`` are ordinary inside a directory
_TEMPORARY_MARK_INSIDE = re.compile(rf"^[._]?tmp[-_.]|{_TEMPORARY_ENDING}", re.IGNORECASE)
_RANDOM_SUFFIX = re.compile(r"(?:\.\d{1,20}|[.-](?=[a-z0-9_]*\d)(?=[a-z0-9_]*[a-z])[a-z0-9_]{6,16})$", re.IGNORECASE)


class CheckpointReading(NamedTuple):
    """Result of one poll."""

    entries: tuple[CheckpointEntry, ...]  # entries that are new or changed since the last poll
    names: tuple[str, ...] | None  # all names, or None if none came or went
    has_unread_names: bool = False  # whether some names have not been read yet
    # matching names that are not files, with their kind; at most `MOST_PASSED_OVER`
    passed_over: tuple[tuple[str, str], ...] = ()


def bare_name(name: str) -> str:
    """Return a name without the marks of a temporary file.

    >>> bare_name(".checkpoint_12.pt.4711.tmp"), bare_name("100.orbax-checkpoint-tmp-1699"), bare_name("tmp-ckpt-5")
    ('checkpoint_12.pt', '100', 'ckpt-5')
    """
    bare = name
    while (match := _TEMPORARY_MARK.search(bare)) and len(match[0]) < len(bare):
        at_end = match.start() > 0
        bare = bare[: match.start()] + bare[match.end() :]
        if at_end and (extra := _RANDOM_SUFFIX.search(bare)) and "." in bare[: extra.start()]:
            bare = bare[: extra.start()]  # a number or random letters, as tempfile adds
    return bare


@dataclass(slots=True, eq=False)
class _EntryWatch:
    """State of one file or directory in the folder."""

    bare: str
    temporary: bool
    is_directory: bool
    inode: int
    changed_at: float  # last change seen; on the first poll, the time of the last write
    polls_unchanged: int = 0  # polls since then
    last_poll_number: int = 0  # number of the last poll that read it
    was_seen_changing: bool = False  # whether we saw it appear or change
    mtime_ns: int = 0
    entry: CheckpointEntry | None = None
    has_dropped_files: bool = False  # whether its files have been dropped from memory
    folders: tuple[tuple[str, int], ...] = ()  # its subdirectories with their mtimes
    rest_until: float = 0.0
    indexes: dict[str, CheckpointIndex] = field(init=False)  # by path
    checked: dict[str, bool] = field(init=False)  # files with a final check result, and whether they are valid
    suspected: dict[str, float] = field(init=False)  # time of a first check that found damage
    damaged: dict[str, DamagedFile] = field(init=False)  # files that a second check confirmed
    unproven: dict[str, DamagedFile] = field(init=False)  # files whose check was inconclusive

    def __post_init__(self) -> None:
        self.forget_checks()

    def forget_checks(self) -> None:
        """Forget what was found in its files."""
        self.indexes = self.checked = self.suspected = self.damaged = self.unproven = EMPTY_DICT

    @property
    def newest_mtime(self) -> float:
        """Time of the last write."""
        files = self.entry.files if self.entry is not None else ()
        return max((file.mtime for file in files), default=self.mtime_ns / 1e9)


@dataclass(slots=True, eq=False)
class _DirectoryWalk:
    """A walk through a directory that may continue over several polls."""

    name: str
    mtime_ns: int
    files: list[CheckpointFile] = field(default_factory=list)
    folders: list[tuple[str, int]] = field(default_factory=list)
    steps: Generator[None, None, bool] | None = None
    spent_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Listing:
    """A pass over the names that may continue over several polls."""

    key: tuple[int, int, int]  # device, inode and mtime of the folder when it began
    began_at: float
    steps: Generator[None, None, set[str]]
    spent_s: float = 0.0


class CheckpointWatch:
    """Watch one folder for names that match a glob, and all files in matching directories.

    Names also match without their temporary marks. Links are not followed. A missing folder has no checkpoints. Runs
    where I/O may hang; ``poll`` raises OSError if the folder cannot be read.
    """

    def __init__(
        self,
        directory: str,
        pattern: str,
        since: float | None = None,
        *,
        verify: bool = True,
        is_only_node: bool = False,
    ) -> None:
        """Check only files written after ``since`` (epoch seconds), and none without ``verify``.

        With ``is_only_node``, all writers run on this node.
        """
        self._directory = directory
        self._matches = name_matcher(pattern)
        # whether names may carry temporary marks: not if the pattern itself asks for them
        self._may_have_marks = bare_name(pattern) == pattern
        self._since = since
        self._verify, self._is_only_node = verify, is_only_node
        self._entry_watches: dict[str, _EntryWatch] = {}
        self._retired: set[str] = set()
        self._passed_over: dict[str, str] = {}
        self._unread_names: dict[str, None] = {}  # names not read yet
        self._listing: _Listing | None = None
        self._listed_key: tuple[int, int, int] | None = None
        self._listed_at = 0.0
        self._list_rest_until = 0.0
        self._last_poll = 0.0
        self._poll_number = 0  # number of this poll
        self._deadline = 0.0  # when this poll must stop
        self._budget = 0
        self._has_read_all = False  # whether all initial names have been read
        self._current_walk: _DirectoryWalk | None = None
        self._changed_names: dict[str, None] = {}

    def poll(self, now: float) -> CheckpointReading:
        """Return changes since the last poll; ``now`` is in epoch seconds."""
        if now < self._last_poll:
            self._reset_times(now)
        self._last_poll, self._changed_names, self._budget = now, {}, MOST_ENTRIES
        self._poll_number, self._deadline = self._poll_number + 1, time.perf_counter() + POLL_S
        renewed = self._list(now)
        for name in self._due(now):
            renewed |= self._read_entry(name, now)
            if self._budget <= 0 or time.perf_counter() >= self._deadline:
                break
        if self._verify:
            self._check(now)
        self._drop_files(now)
        found = [
            unit.entry
            for name in self._changed_names
            if (unit := self._entry_watches.get(name)) and unit.entry is not None
        ]
        renewed |= self._retire()
        names = tuple(self._entry_watches) if renewed else None
        behind = bool(self._unread_names) or (self._listing is not None and self._listed_key is None)
        self._has_read_all = self._has_read_all or not behind
        return CheckpointReading(tuple(found), names, behind, tuple(self._passed_over.items()))

    def _reset_times(self, now: float) -> None:
        """Adjust all times after the clock was set back."""
        self._listed_key, self._list_rest_until = None, 0.0
        for unit in self._entry_watches.values():
            unit.rest_until, unit.changed_at = 0.0, min(unit.changed_at, now)
            unit.suspected = {path: min(moment, now) for path, moment in unit.suspected.items()}

    # Names

    def _list(self, now: float) -> bool:
        """Read names if the folder has changed; return whether any has gone, which the end of the pass shows."""
        try:
            facts = os.stat(self._directory)
            key = (facts.st_dev, facts.st_ino, facts.st_mtime_ns)
            listing = self._listing
            if listing is None or listing.key[:2] != key[:2]:
                due = key != self._listed_key or now - self._listed_at > RELIST_S
                due = due or self._listed_at - facts.st_mtime_ns / 1e9 < MTIME_LAG_S
                if not due or now < self._list_rest_until:
                    return False
                listing = self._listing = _Listing(key, now, self._read_names())
            names = self._continue_listing(listing)
        except (FileNotFoundError, NotADirectoryError):
            self._listing = self._listed_key = None
            return self._keep_only(set())
        except OSError:
            self._listing = None
            raise
        if names is None:
            return False
        self._listing, self._listed_key, self._listed_at = None, listing.key, listing.began_at
        self._list_rest_until = now + LIST_REST_RATIO * listing.spent_s
        gone = self._keep_only(names)
        self._unread_names.update(dict.fromkeys(sorted(names - self._entry_watches.keys() - self._retired)))
        return gone

    def _continue_listing(self, listing: _Listing) -> set[str] | None:
        """Continue a pass over the names; return them at its end, None if there are more."""
        began, names = time.perf_counter(), None
        while names is None:
            try:
                next(listing.steps)
            except StopIteration as end:
                names = end.value
            spent_s = time.perf_counter() - began
            if names is None and spent_s >= LIST_S:
                break
        listing.spent_s += spent_s
        return names

    def _read_names(self) -> Generator[None, None, set[str]]:
        """Collect the names that match, yielding now and then: a folder may hold a million other files."""
        names = set()
        with os.scandir(self._directory) as entries:
            for number, entry in enumerate(entries, 1):
                if self._is_wanted(entry.name):
                    names.add(entry.name)
                if number % LIST_STEP == 0:
                    yield
        return names

    def _is_wanted(self, name: str) -> bool:
        if self._matches(name):
            return True
        return self._may_have_marks and _TEMPORARY_MARK.search(name) is not None and self._matches(bare_name(name))

    def _keep_only(self, names: set[str]) -> bool:
        self._retired &= names
        gone = [name for name in self._entry_watches if name not in names]
        for known in (self._entry_watches, self._unread_names, self._passed_over):
            for name in [name for name in known if name not in names]:
                del known[name]
        return bool(gone)

    def _retire(self) -> bool:
        """Forget the oldest entries above `MOST_KNOWN_ENTRIES`; return whether there were any."""
        if len(self._entry_watches) <= MOST_KNOWN_ENTRIES:
            return False
        oldest = sorted(self._entry_watches, key=lambda name: self._entry_watches[name].newest_mtime)
        for name in oldest[: len(oldest) - MOST_KNOWN_ENTRIES * 3 // 4]:
            del self._entry_watches[name]
            self._retired.add(name)
        return True

    # Facts

    def _due(self, now: float) -> list[str]:
        """Names to read: waiting and recently changed ones, the newest others, and some of the rest in turn."""
        hot: list[str] = []
        cold: list[str] = []
        for name, unit in self._entry_watches.items():
            (hot if now - unit.changed_at < HOT_S or unit.suspected else cold).append(name)
        if len(cold) > NEWEST_POLLED:
            cold.sort(key=lambda name: self._entry_watches[name].newest_mtime, reverse=True)
        hot.sort(key=lambda name: self._entry_watches[name].last_poll_number)
        others = heapq.nsmallest(
            OTHERS_POLLED, cold[NEWEST_POLLED:], key=lambda name: self._entry_watches[name].last_poll_number
        )
        due = [*self._unread_names, *hot, *cold[:NEWEST_POLLED], *others]
        return due if self._current_walk is None else [self._current_walk.name, *due]

    def _read_entry(self, name: str, now: float) -> bool:
        """Read one entry; return whether it came or went."""
        self._budget -= 1
        first = self._unread_names.pop(name, name) is None
        walking = self._current_walk is not None and self._current_walk.name == name
        try:
            facts = os.lstat(os.path.join(self._directory, name))
        except (OSError, ValueError):
            self._current_walk = None if walking else self._current_walk
            return self._entry_watches.pop(name, None) is not None
        kind, unit = stat.S_IFMT(facts.st_mode), self._entry_watches.get(name)
        directory = kind == stat.S_IFDIR
        if not directory and walking:
            self._current_walk = None
        if not directory and kind != stat.S_IFREG:
            # the target of a link counts on its own, or lies elsewhere
            if kind != stat.S_IFLNK and len(self._passed_over) < MOST_PASSED_OVER:
                self._passed_over[name] = KINDS.get(kind, "no regular file")
            return self._entry_watches.pop(name, None) is not None
        came = unit is None
        if unit is None or unit.is_directory != directory:
            bare = bare_name(name) if self._may_have_marks else name
            unit = _EntryWatch(bare, bare != name, directory, facts.st_ino, now)
            self._entry_watches[name] = unit
        unit.last_poll_number = self._poll_number
        if directory:
            if not self._read_directory(name, unit, facts.st_mtime_ns, now) and (first or unit.entry is None):
                self._unread_names = {name: None, **self._unread_names}
        else:
            unit.inode, unit.mtime_ns = facts.st_ino, facts.st_mtime_ns
            file = CheckpointFile(name, facts.st_size, facts.st_mtime, facts.st_ino)
            self._record_files(name, unit, (file,), now, is_fully_read=True)
        return came

    def _record_files(
        self, name: str, watch: _EntryWatch, files: tuple[CheckpointFile, ...], now: float, *, is_fully_read: bool
    ) -> None:
        """Update an entry with its current files."""
        before = watch.entry
        known = {file.path: file for file in before.files} if before is not None else {}
        files = tuple(old if (old := known.get(file.path)) and file.is_unchanged(old) else file for file in files)
        watch.polls_unchanged += 1
        if (
            before is not None
            and not watch.has_dropped_files
            and (before.files, before.is_fully_read) == (files, is_fully_read)
        ):
            return
        newest = max((file.mtime for file in files), default=now)
        watch.changed_at, watch.polls_unchanged, watch.has_dropped_files = now, 0, False
        watch.was_seen_changing = watch.was_seen_changing or self._has_read_all
        if before is None and newest < now - HOT_S:
            watch.changed_at, watch.polls_unchanged = newest, 1
        same = {file.path for file in files if known.get(file.path) == file}
        if any(path not in same for path in watch.indexes):
            watch.forget_checks()  # the others may be of other lengths now
        for facts in (watch.indexes, watch.checked, watch.suspected, watch.damaged, watch.unproven):
            for path in [path for path in facts if path not in same]:
                del facts[path]
        paths = [file.path for file in files]
        for path in itertools.islice(index_paths(paths), MOST_INDEXES):
            if path not in watch.indexes:
                watch.indexes = {**watch.indexes, path: read_index(self._directory, path, paths)}
        watch.entry = CheckpointEntry(
            name, watch.bare, watch.temporary, watch.is_directory, watch.inode, files, is_fully_read
        )
        self._publish(name, watch)

    def _publish(self, name: str, watch: _EntryWatch) -> None:
        """Report an entry in the result of this poll."""
        if watch.entry is not None:
            watch.entry = watch.entry._replace(
                indexes=tuple(index for _, index in sorted(watch.indexes.items()) if any(index[1:])),
                valid=sum(watch.checked.values()),
                checked=len(watch.checked),
                damaged=tuple(itertools.islice(watch.damaged.values(), MOST_DAMAGED)),
                unproven=tuple(itertools.islice(watch.unproven.values(), MOST_DAMAGED)),
            )
            self._changed_names[name] = None

    def _read_directory(self, name: str, watch: _EntryWatch, mtime_ns: int, now: float) -> bool:
        """Walk a directory that is new, recent or changed; return False if the walk must continue later."""
        walk = self._current_walk
        if walk is None or walk.name != name:
            settled = watch.polls_unchanged > 0 and now - watch.changed_at >= HOT_S
            if settled and mtime_ns == watch.mtime_ns and not self._has_changed_below(watch):
                return True
            if now < watch.rest_until:
                return True
            if walk is not None and walk.steps is not None:
                return False  # one walk at a time
            walk = self._current_walk = _DirectoryWalk(name, mtime_ns)
            walk.steps = self._walk(name, None, 1, walk.files, walk.folders)
        began, whole = time.perf_counter(), None
        while whole is None and walk.steps is not None:
            try:
                next(walk.steps)
            except StopIteration as end:
                whole = bool(end.value)
            if whole is None and time.perf_counter() >= self._deadline:
                walk.spent_s += time.perf_counter() - began
                return False
        self._current_walk = None
        walk.files.sort()
        watch.mtime_ns, watch.folders = walk.mtime_ns, tuple(walk.folders[:MOST_FOLDERS])
        self._record_files(name, watch, tuple(walk.files), now, is_fully_read=bool(whole))
        watch.rest_until = now + REST_RATIO * (walk.spent_s + time.perf_counter() - began)
        return True

    def _has_changed_below(self, watch: _EntryWatch) -> bool:
        for path, mtime_ns in watch.folders:
            try:
                if os.lstat(os.path.join(self._directory, path)).st_mtime_ns != mtime_ns:
                    return True
            except OSError:
                return True
        return False

    def _walk(
        self, path: str, parent_fd: int | None, level: int, files: list[CheckpointFile], folders: list[tuple[str, int]]
    ) -> Generator[None, None, bool]:
        """Collect the regular files of a directory tree, yielding at each entry.

        Returns whether all of them could be read.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if parent_fd is None:
                fd = os.open(os.path.join(self._directory, path), flags)
            else:
                fd = os.open(path.rpartition("/")[2], flags, dir_fd=parent_fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        whole = True
        try:
            folders.append((path, os.fstat(fd).st_mtime_ns))
            with os.scandir(fd) as entries:
                for entry in entries:
                    if len(files) + len(folders) >= MOST_ENTRIES:
                        return False
                    yield
                    self._budget -= 1
                    if entry.name.startswith(".nfs"):
                        continue  # NFS keeps a removed file under this name while it is open
                    place = f"{path}/{entry.name}"
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    except OSError:
                        whole = False
                        continue
                    if stat.S_ISLNK(facts.st_mode):
                        with contextlib.suppress(OSError):  # leads nowhere
                            target = entry.stat()
                            facts = target if stat.S_ISREG(target.st_mode) else facts
                    if stat.S_ISDIR(facts.st_mode):
                        deeper = level < MOST_LEVELS and (yield from self._walk(place, fd, level + 1, files, folders))
                        whole = whole and deeper
                    elif stat.S_ISREG(facts.st_mode):
                        temporary = _TEMPORARY_MARK_INSIDE.search(entry.name) is not None
                        files.append(CheckpointFile(place, facts.st_size, facts.st_mtime, facts.st_ino, temporary))
        except OSError:
            return False
        finally:
            os.close(fd)
        return whole

    def _drop_files(self, now: float) -> None:
        """Drop the files of settled directories from memory, except the newest."""
        held = [
            unit
            for name, unit in self._entry_watches.items()
            if unit.is_directory
            and not unit.has_dropped_files
            and now - unit.changed_at >= HOT_S
            and name not in self._changed_names
        ]
        if len(held) > MOST_HELD:
            for unit in sorted(held, key=lambda unit: unit.newest_mtime)[:-MOST_HELD]:
                if unit.entry is not None:
                    unit.entry, unit.has_dropped_files = unit.entry._replace(files=(), indexes=()), True
                    unit.forget_checks()

    # Validity

    def _check(self, now: float) -> None:
        """Check some settled files, the newest first."""
        end = time.perf_counter() + CHECK_S
        touched: dict[str, _EntryWatch] = {}
        for name, unit, file in itertools.islice(self._unchecked(now), MOST_CHECKS):
            if touched and time.perf_counter() >= end:
                break
            touched[name] = unit
            self._check_file(unit, file, now)
        for name, unit in touched.items():
            self._publish(name, unit)

    def _unchecked(self, now: float) -> Iterator[tuple[str, _EntryWatch, CheckpointFile]]:
        waiting = [
            (name, unit, unit.entry.files)
            for name, unit in self._entry_watches.items()
            if unit.entry is not None
            and len(unit.checked) < len(unit.entry.files)
            and not unit.temporary
            and unit.polls_unchanged > 0
            and now - unit.changed_at >= (CLOSED_S if self._is_only_node else SETTLED_S)
            and (self._since is None or unit.was_seen_changing or unit.newest_mtime >= self._since - CLOCK_SLACK_S)
        ]
        for name, unit, files in sorted(waiting, key=lambda found: found[1].newest_mtime, reverse=True):
            for file in files:
                doubted = unit.suspected.get(file.path)
                if file.path not in unit.checked and (doubted is None or now - doubted >= RECHECK_S):
                    yield name, unit, file

    def _check_file(self, watch: _EntryWatch, file: CheckpointFile, now: float) -> None:
        """Check one file; damage of a file that was written lately counts only when a second check confirms it."""
        ends = index_ends(watch.indexes.values())
        found = part_result(
            self._directory, file.path, inside=watch.is_directory, end=ends.get(file.path)
        ) or FileCheck(BESIDE, None)
        flaw = part_flaw(file.path, found)
        if found.state == "invalid" and not file.temporary:
            is_closed = self._is_only_node and watch.entry is not None and self._is_closed(watch.entry, file, found)
            if is_closed and watch.entry is not None:
                watch.entry = watch.entry._replace(is_closed=True)
            elif now - watch.changed_at < SETTLED_S or (
                file.path not in watch.suspected and now - watch.changed_at < SURE_S
            ):
                watch.suspected = {**watch.suspected, file.path: now}
                return
            watch.damaged = {**watch.damaged, file.path: flaw}
        elif is_unproven(found):
            watch.unproven = {**watch.unproven, file.path: flaw}
        if watch.suspected:
            watch.suspected.pop(file.path, None)
        if watch.checked is EMPTY_DICT:
            watch.checked = {}
        watch.checked[file.path] = found.state == "valid"

    def _is_closed(self, entry: CheckpointEntry, file: CheckpointFile, found: FileCheck) -> bool:
        """Whether a damaged file can no longer become whole: no process has any file of its entry open.

        Only damage that its format proves counts, or a length that an index states which was not written earlier.
        """
        if found.format in _TEXT_FORMATS or not file.size:
            return False
        if found.format is None:
            times = {other.path: other.mtime for other in entry.files}
            naming = [index.path for index in entry.indexes if file.path in dict(index.lengths)]
            if not naming or any(times.get(path, 0.0) < file.mtime for path in naming):
                return False
        if not are_closed(os.path.join(self._directory, other.path) for other in entry.files):
            return False
        facts = os.lstat(os.path.join(self._directory, file.path))
        return (facts.st_size, facts.st_mtime) == (file.size, file.mtime)
