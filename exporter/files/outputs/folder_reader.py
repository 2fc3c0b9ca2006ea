"""Follow the files of one folder at little cost, however many there are.

Names are read again when the folder changes. Recently written files are read at every poll, all others in turn. An idle
file costs a row of `FileTable`, but neither its name nor an object.

A pass over the names cuts them into *runs* that end at names chosen by hash. A run whose names and inodes hash to the
same as in the last pass needs no more work, and a new name changes one run only.
"""

import heapq
import os
import stat
import time
from collections.abc import Callable
from dataclasses import field
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.files.formats.source import KINDS
from exporter.files.outputs.file_table import FileRow, FileTable, folded_inode
from exporter.machine.folders import name_matcher

MTIME_LAG_S = 2.0  # a folder's mtime may lag this far behind a change, so names are read again after it
RELIST_S = 60.0  # names are read again after this time anyway: a network file system may report an old mtime
REST_RATIO = 20.0  # pause after a pass over the names, as a multiple of its duration
MOST_REST_S = 600.0  # longest pause between two passes over the names
FIRST_SHARE = 0.05  # of a core, until all names are known
SHARE = 0.02  # of a core later, for names and for what a listener does with files in turn
MOST_SAVED_S = 0.5  # CPU time saved up at most, and at first: an ordinary folder is read in one poll
SCAN_S = 0.5  # time for names in one poll, including reading new files; the next poll continues
STAT_S = 0.15  # time for reading known files in one poll
RUN_MASK = 0xFF  # a run ends at every 256th name on average
MOST_RUN = 4096

HOT_S = 120.0  # files that changed within this time are read at every poll
HOT_LEAST = 256  # at least this many, the last changed
HOT_MOST = 4096  # at most this many, the last changed
OTHERS_POLLED = 64  # other files read in one poll
BATCH = 4096  # other files whose names are in memory; the next pass over the names brings the next ones
MOST_SKIPPED = 1024  # names that do not match kept for recognizing renames, the last found

NOBODY = -1  # owner of files that count but belong to no worker
SKIPPED = -2  # owner of files that do not count
PASSED_OVER = -3  # owner of matching names that are not regular files
MOST_PASSED_OVER = 20  # of these, names kept


class FileChange(NamedTuple):
    """A change found in a known file; times in epoch seconds, sizes in bytes."""

    file: int  # number that the file keeps while it is read at every poll, even if renamed
    owner: int
    mtime: float
    size: int
    before: tuple[float, int]  # time and size at the previous poll


@dataclass(slots=True, eq=False)
class ActiveFile:
    """A file that is read at every poll."""

    name: str
    mtime: float
    size: int
    number: int
    since: float  # when last found changed, or first read
    poll_number: int  # number of that poll


@dataclass(slots=True, eq=False)
class FileTotals:
    """Totals of one owner's files; new files appeared after the first poll."""

    files: int = 0
    bytes: int = 0
    newest_mtime: float | None = None  # latest time of any file
    changed_at: float | None = None  # when one was last found new or changed, after the first poll
    new_files: int = 0
    new_bytes: int = 0  # their sizes when found
    new_mtime: float | None = None  # latest of their times


class FolderListener:
    """Receives changes of files by key, which is the hash of the name."""

    def added(self, key: int, name: str) -> None:
        """A file that counts appeared."""

    def changed(self, key: int, name: str) -> None:
        """The file was written."""

    def removed(self, key: int) -> None:
        """The file is gone; its row is still in the table."""

    def moved(self, old: int, new: int, old_name: str | None, name: str) -> None:
        """The file was renamed; called after ``added`` for the new key and before ``removed`` for the old."""

    def renamed_into_place(self, key: int) -> None:
        """An added file was renamed from a name that does not count."""

    def cooled(self, key: int, name: str) -> None:
        """The file is no longer read at every poll."""


@dataclass(slots=True, eq=False)
class _NameScan:
    """An unfinished pass over the names."""

    entries: "os._ScandirIterator[str]"
    key: tuple[int, int, int] | None
    started: float
    is_marking: bool = False  # whether to look at each name, to find those that are gone
    batch: "dict[int, str] | None" = None  # names to keep, if the previous ones are no longer needed
    run: "list[os.DirEntry[str]]" = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)  # of names and inodes in the run
    runs: dict[int, int] = field(default_factory=dict)  # rows in each run, by its hash
    found: int = 0  # rows in all runs
    new: list[tuple[int, str]] = field(default_factory=list)  # keys and names added after the first pass
    # keys whose names now belong to other files, with names and new inodes
    replaced: list[tuple[int, str, int]] = field(default_factory=list)
    took_s: float = 0.0


class FolderWatch:
    """Watch a folder for regular files whose names match a glob, and for their owners.

    Links are not followed. Other kinds are passed over. Names that start with a dot match only a pattern that does. A
    missing folder has no files.
    """

    def __init__(
        self,
        directory: str,
        pattern: str,
        owner_of: Callable[[str], int | None],
        listener: FolderListener | None = None,
    ) -> None:
        """Map names with ``owner_of``: a number from 0, ``NOBODY``, or None for a file that does not count."""
        self.directory = directory
        self.table = FileTable()
        self.hot: dict[int, ActiveFile] = {}  # files read at every poll, in the order of their last changes
        self.batch: dict[int, str] = {}  # names of the files whose turn it is; all if there are few
        self.totals: dict[int, FileTotals] = {}
        self.changes: list[FileChange] = []  # changes found by the last poll
        self.complete = False  # whether every file has been read once
        self.polls = 0
        self.allowance_s = MOST_SAVED_S  # CPU time that may be used now
        # matching names that are not regular files, with their kind; at most `MOST_PASSED_OVER`
        self.passed_over: dict[str, str] = {}
        self.unreadable: str | None = None  # why a file could not be read
        self._matches = name_matcher(pattern)
        self._owner_of = owner_of
        self._listener = listener or FolderListener()
        self._newest: list[tuple[float, int, str]] = []  # heap of the newest files of the first pass
        self._skipped: dict[int, str] = {}  # names that do not match, by inode
        self._has_stable_inodes = True  # whether inodes are stable: some file systems invent one each time
        self._scan: _NameScan | None = None
        self._runs: dict[int, int] = {}  # those of the last pass
        self._key: tuple[int, int, int] | None = None  # device, inode and mtime of the folder at the last poll
        self._key_since = 0.0  # since when it has had this value
        self._scanned_key: tuple[int, int, int] | None = None  # its value at the last pass over the names
        self._scanned_at = 0.0  # time of that pass
        self._rest_until = 0.0
        self._has_missing_file = False  # whether a file had disappeared when read
        self._stale_owners: set[int] = set()  # owners whose newest file is gone or became older
        self._file_count = 0  # file numbers assigned so far
        self._hot_from = 0
        self._turn: list[tuple[int, str]] = []  # files of the batch still to read in turn, the last first
        self._batch_from = 0  # number of rows before the batch, in the order of the names
        self._wants_batch = False
        self._polled_at: float | None = None
        self._fd = -1

    def poll(self, now: float) -> None:
        """Update everything within the time limits; raises OSError when the folder cannot be read."""
        self.polls += 1
        self.changes = []
        self.unreadable = None
        elapsed_s = max(0.0, now - self._polled_at) if self._polled_at is not None else 0.0
        self.allowance_s = min(MOST_SAVED_S, self.allowance_s + (SHARE if self.complete else FIRST_SHARE) * elapsed_s)
        self._polled_at = now
        try:
            self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._drop_all()
            return
        try:
            facts = os.fstat(self._fd)
            self._update_key((facts.st_dev, facts.st_ino, facts.st_mtime_ns), now)
            if self._scan is None and self._is_due(now):
                self._scan = self._new_scan(now)
            if self._scan is not None:
                self._read_names(now)
            self._read_files(now)
        except OSError:
            self._end_scan()
            raise
        finally:
            os.close(self._fd)
            self._fd = -1
        self._cool(now)
        if self._stale_owners:
            self._find_newest()

    def refresh(self, key: int, name: str, now: float) -> FileRow | None:
        """Read one file again between two polls; return its row if it is unchanged."""
        before = self.table.get(key)
        if before is None or before.owner < NOBODY:
            return None
        there = self._read(key, name, os.path.join(self.directory, name), None, now)
        if self._stale_owners:
            self._find_newest()
        after = self.table.get(key)
        return after if there and after is not None and after[:4] == before[:4] else None

    def want_batch(self) -> None:
        """Keep the names of other files soon."""
        self._wants_batch = len(self.batch) < len(self.table)

    def _update_key(self, key: tuple[int, int, int], now: float) -> None:
        if key != self._key or now < self._key_since:
            self._key, self._key_since = key, now

    def _is_due(self, now: float) -> bool:
        """Whether to read the names again."""
        if self._scanned_key is None or now < self._scanned_at:
            return True
        if now < self._rest_until:
            return False
        sure_at = self._key_since + MTIME_LAG_S
        return (
            self._has_missing_file
            or self._wants_batch
            or self._key != self._scanned_key
            or self._scanned_at < sure_at <= now
            or now - self._scanned_at >= RELIST_S
        )

    def _new_scan(self, now: float) -> _NameScan:
        needs_batch = self._wants_batch or not self._turn or len(self.table) <= BATCH
        return _NameScan(os.scandir(self._fd), self._key, now, batch={} if needs_batch else None)

    def _read_names(self, now: float) -> None:
        """Continue a pass over the names until the time for one poll is used up."""
        until = time.monotonic() + SCAN_S
        while (scan := self._scan) is not None and self.allowance_s > 0 and time.monotonic() <= until:
            started = time.thread_time()
            is_last = self._read_run(scan, now)
            took_s = time.thread_time() - started
            scan.took_s += took_s
            self.allowance_s -= took_s
            if is_last:
                self._finish_scan(scan, now)

    def _read_run(self, scan: _NameScan, now: float) -> bool:
        """Read the names of the next run; return whether it was the last."""
        run, hashes, has_inodes = scan.run, scan.hashes, self._has_stable_inodes
        is_last = True
        for entry in scan.entries:
            code = hash((entry.name, entry.inode())) if has_inodes else hash(entry.name)
            run.append(entry)
            hashes.append(code)
            if not code & RUN_MASK or len(run) == MOST_RUN:
                is_last = False
                break
        code = hash(tuple(hashes))
        known = None if scan.is_marking else self._runs.get(code)
        if known is None:
            known = self._read_entries(scan, now)
        if scan.batch is not None and known and scan.found + known > self._batch_from and len(scan.batch) < BATCH:
            scan.batch.update({hash(entry.name): entry.name for entry in run if self._matches(entry.name)})
        scan.runs[code] = known
        scan.found += known
        run.clear()
        hashes.clear()
        return is_last

    def _read_entries(self, scan: _NameScan, now: float) -> int:
        """Look at each name of a run; return how many have a row."""
        found = 0
        for entry in scan.run:
            name, inode = entry.name, folded_inode(entry.inode())
            key = hash(name)
            known = self.table.see(key)
            if known is None:
                if not self._matches(name):
                    self._skip(inode, name)
                    continue
                self._add_name(scan, key, name, inode, now)
            elif known != inode and self._has_stable_inodes:
                scan.replaced.append((key, name, inode))
            found += 1
        if len(scan.replaced) > max(1000, len(self.table) // 2):
            self._has_stable_inodes = False
            scan.replaced.clear()
        return found

    def _skip(self, inode: int, name: str) -> None:
        """Note a name that does not match, in case the file is renamed."""
        if self._skipped.get(inode) == name:
            return  # a new text in each pass would scatter these over the memory
        self._skipped[inode] = name
        if len(self._skipped) > MOST_SKIPPED:
            del self._skipped[next(iter(self._skipped))]

    def _add_name(self, scan: _NameScan, key: int, name: str, inode: int, now: float) -> None:
        """Add a new name."""
        owner = self._owner(name)
        row = FileRow(0.0, 0, inode, owner)
        if owner == SKIPPED or not self._read(key, name, name, self._fd, now, row):
            self.table.put(key, row._replace(owner=min(owner, PASSED_OVER)) if owner != SKIPPED else row)
        if self.complete and owner != SKIPPED:
            scan.new.append((key, name))

    def _owner(self, name: str) -> int:
        owner = self._owner_of(name)
        return SKIPPED if owner is None else owner

    def _finish_scan(self, scan: _NameScan, now: float) -> None:
        """Handle names that are gone, renamed or reused for other files."""
        self._end_scan()
        if scan.found < len(self.table) and not scan.is_marking:
            self.table.start_marking()
            self._scan = again = self._new_scan(now)
            again.is_marking, again.new, again.replaced, again.took_s = True, scan.new, scan.replaced, scan.took_s
            return
        self._has_missing_file = False
        gone = self.table.unseen() if scan.is_marking else []
        rows = {key: row for key in (*gone, *(key for key, *_ in scan.replaced)) if (row := self.table.get(key))}
        if self._has_stable_inodes:
            old = {row.inode: key for key, row in rows.items() if row.owner >= NOBODY}
            for key, name in scan.new:
                row = self.table.get(key)
                if row is None or row.owner < NOBODY:
                    continue
                was = old.pop(row.inode, None)
                # the inode of a removed file is soon reused, but a file that goes on neither shrinks nor gets older
                if was is not None and row.size >= rows[was].size and row.mtime >= rows[was].mtime:
                    self._move(was, key, name, now)
                # a file without its name in the old name is another one
                if name.partition(".")[0] in self._skipped.pop(row.inode, "\0"):
                    self._listener.renamed_into_place(key)
        for key in gone:
            self._drop(key)
            self.table.remove(key)
        for key, name, inode in scan.replaced:
            row = self.table.get(key)
            if row is not None:
                self.table.put(key, row._replace(inode=inode))
                if row.owner != SKIPPED:
                    self._read(key, name, name, self._fd, now)
        self._finish_batch(scan)
        for name in [name for name in self.passed_over if self.table.get(hash(name)) is None]:
            del self.passed_over[name]
        self._runs = scan.runs
        self._scanned_key, self._scanned_at = scan.key, scan.started
        self._rest_until = now + min(REST_RATIO * scan.took_s, MOST_REST_S)
        if not self.complete:
            self.complete = True
            self._warm_up(now)

    def _finish_batch(self, scan: _NameScan) -> None:
        """Take over the names that a pass has kept, and choose those of the next."""
        if scan.batch is None:
            return
        self.batch, self._turn = scan.batch, list(scan.batch.items())[::-1]
        end = self._batch_from + len(scan.batch)
        self._wants_batch = not scan.batch and self._batch_from > 0
        self._batch_from = end if scan.batch and end < len(self.table) else 0

    def _move(self, old: int, new: int, name: str, now: float) -> None:
        """Continue a renamed file under its new name; it was not born."""
        row, was = self.table[new], self.table[old]
        totals = self.totals[row.owner]
        totals.new_files -= 1
        totals.new_bytes -= row.size
        hot, before = self.hot.pop(old, None), (was.mtime, was.size)
        old_name = hot.name if hot is not None else self.batch.get(old)
        if hot is None:
            hot = self._new_active_file(name, row, now)
        elif before != (row.mtime, row.size):
            hot.since, hot.poll_number = now, self.polls
        hot.name, hot.mtime, hot.size = name, row.mtime, row.size
        if before != (row.mtime, row.size):
            self.changes.append(FileChange(hot.number, row.owner, row.mtime, row.size, before))
        self.hot.pop(new, None)
        self.hot[new] = hot
        self._listener.moved(old, new, old_name, name)
        self._drop(old)  # if the old name still exists, it is a new file

    def _drop(self, key: int) -> None:
        """Stop counting a file."""
        row = self.table.get(key)
        if row is None or row.owner < NOBODY:
            return
        totals = self.totals[row.owner]
        totals.files -= 1
        totals.bytes -= row.size
        if totals.newest_mtime is None or row.mtime >= totals.newest_mtime:
            self._stale_owners.add(row.owner)
        self.hot.pop(key, None)
        self._listener.removed(key)
        self.table.put(key, FileRow(0.0, 0, row.inode, PASSED_OVER))

    def _end_scan(self) -> None:
        if self._scan is not None:
            self._scan.entries.close()
            self._scan = None

    def _drop_all(self) -> None:
        """Forget all names, since the folder is missing."""
        self._end_scan()
        for key in [key for key, _ in self.table.rows()]:
            self._drop(key)
        self.table.clear()
        self._runs, self.batch, self._turn = {}, {}, []
        self.passed_over.clear()
        self._key = self._scanned_key = None
        self.complete = True
        if self._stale_owners:
            self._find_newest()

    def _read_files(self, now: float) -> None:
        """Read recently written files, and the next of the others."""
        until, fd = time.monotonic() + STAT_S, self._fd
        hot = list(self.hot.items())
        start = self._hot_from if self._hot_from < len(hot) else 0
        self._hot_from = 0
        for place, (key, file) in enumerate((*hot[start:], *hot[:start])):
            self._read(key, file.name, file.name, fd, now)
            if not place % 16 and time.monotonic() > until:
                self._hot_from = (start + place + 1) % len(hot)
                break
        if not self._turn and len(self.batch) >= len(self.table):
            self._turn = list(self.batch.items())[::-1]
        read = 0
        while self._turn and (read < OTHERS_POLLED // 8 or (read < OTHERS_POLLED and time.monotonic() <= until)):
            key, name = self._turn.pop()
            if key not in self.hot and (row := self.table.get(key)) is not None and row.owner != SKIPPED:
                read += 1
                self._read(key, name, name, fd, now)

    def _read(self, key: int, name: str, path: str, fd: int | None, now: float, new: FileRow | None = None) -> bool:
        """Read one file and record its changes; return whether that succeeded.

        ``new`` is the row of a file that has none yet, with its owner; only a regular file gets it.
        """
        try:
            facts = os.stat(path, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            self._has_missing_file = True  # the next pass finds out whether it was renamed
            return False
        except OSError as error:
            self.unreadable = error.strerror
            return False
        hot = self.hot.get(key)
        is_regular = stat.S_ISREG(facts.st_mode)
        if hot is not None and is_regular and facts.st_mtime == hot.mtime and facts.st_size == hot.size:
            return True
        if not is_regular:
            self._drop(key)
            if len(self.passed_over) < MOST_PASSED_OVER or name in self.passed_over:
                self.passed_over[name] = KINDS.get(stat.S_IFMT(facts.st_mode), "no file")
            return new is None
        row = new or self.table[key]
        if new is not None or row.owner < NOBODY:
            self.passed_over.pop(name, None)
            owner = row.owner if new is not None else self._owner(name)
            self._add(key, name, FileRow(facts.st_mtime, facts.st_size, row.inode, owner), now)
        elif facts.st_size != row.size or facts.st_mtime != row.mtime:
            self._change(key, name, row, row._replace(mtime=facts.st_mtime, size=facts.st_size), now)
        return True

    def _add(self, key: int, name: str, row: FileRow, now: float) -> None:
        """Count a file from now on."""
        self.table.put(key, row)
        totals = self.totals.get(row.owner)
        if totals is None:
            totals = self.totals[row.owner] = FileTotals()
        totals.files += 1
        totals.bytes += row.size
        if totals.newest_mtime is None or row.mtime > totals.newest_mtime:
            totals.newest_mtime = row.mtime
        if self.complete:
            totals.new_files += 1
            totals.new_bytes += row.size
            if totals.new_mtime is None or row.mtime > totals.new_mtime:
                totals.new_mtime = row.mtime
            totals.changed_at = now
            self._heat(key, self._new_active_file(name, row, now))
        elif len(self._newest) < HOT_LEAST:
            heapq.heappush(self._newest, (row.mtime, key, name))
        else:
            heapq.heappushpop(self._newest, (row.mtime, key, name))
        self._listener.added(key, name)

    def _change(self, key: int, name: str, before: FileRow, row: FileRow, now: float) -> None:
        """Record a change of a file."""
        self.table.put(key, row)
        totals = self.totals[row.owner]
        totals.bytes += row.size - before.size
        if totals.newest_mtime is None or row.mtime > totals.newest_mtime:
            totals.newest_mtime = row.mtime
        elif row.mtime < before.mtime >= totals.newest_mtime:
            self._stale_owners.add(row.owner)
        totals.changed_at = now
        hot = self.hot.pop(key, None) or self._new_active_file(name, row, now)
        hot.mtime, hot.size, hot.since, hot.poll_number = row.mtime, row.size, now, self.polls
        self._heat(key, hot)
        self.changes.append(FileChange(hot.number, row.owner, row.mtime, row.size, (before.mtime, before.size)))
        self._listener.changed(key, name)

    def _new_active_file(self, name: str, row: FileRow, now: float) -> ActiveFile:
        self._file_count += 1
        return ActiveFile(name, row.mtime, row.size, self._file_count, now, self.polls)

    def _heat(self, key: int, hot: ActiveFile) -> None:
        """Read a file at every poll from now on."""
        self.hot[key] = hot
        if len(self.hot) > HOT_MOST:
            self._cool_one(next(iter(self.hot)))

    def _warm_up(self, now: float) -> None:
        """Start with the last written files."""
        for _, key, name in sorted(self._newest):
            row = self.table.get(key)
            if row is not None and row.owner >= NOBODY and key not in self.hot:
                self.hot[key] = self._new_active_file(name, row, now)
        self._newest.clear()

    def _cool(self, now: float) -> None:
        """Stop reading files at every poll once long unchanged."""
        while len(self.hot) > HOT_LEAST:
            key, hot = next(iter(self.hot.items()))
            if 0 <= now - hot.since < HOT_S:
                return
            self._cool_one(key)

    def _cool_one(self, key: int) -> None:
        self._listener.cooled(key, self.hot.pop(key).name)

    def _find_newest(self) -> None:
        """Recompute the latest time of stale owners."""
        newest: dict[int, float] = {}
        for _, row in self.table.rows():
            if row.owner in self._stale_owners and row.mtime > newest.get(row.owner, -1e300):
                newest[row.owner] = row.mtime
        for owner in self._stale_owners:
            self.totals[owner].newest_mtime = newest.get(owner)
        self._stale_owners.clear()
