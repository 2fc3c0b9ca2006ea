"""Follow the files of one folder at little cost, however many there are.

Names are read again when the folder changes. Recently written files are read at every poll, all others in turn. An idle
file costs its name and a slot in a few arrays, but no object.
"""

import heapq
import os
import stat
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from exporter.files.formats.source import KINDS
from exporter.machine.folders import name_matcher

MTIME_LAG_S = 2.0  # a folder's mtime may lag this far behind a change, so names are read again after it
RELIST_S = 60.0  # names are read again after this time anyway: a network file system may report an old mtime
REST_RATIO = 20.0  # reading names takes at most one part in this many of the time
MOST_REST_S = 600.0  # longest pause between two passes over the names
SCAN_S = 0.5  # time for names in one poll, including reading new files; the next poll continues
STAT_S = 0.15  # time for reading known files in one poll
CHUNK = 4096
SEARCH_AHEAD = 8  # names to search ahead when the order differs from the last pass

HOT_S = 120.0  # files that changed within this time are read at every poll
HOT_LEAST = 256  # at least this many, the last changed
HOT_MOST = 4096  # at most this many, the last changed
OTHERS_POLLED = 64  # other files read in one poll

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
    """Receives changes of files by slot; after ``removed``, another file may get the slot."""

    def added(self, slot: int) -> None:
        """A file that counts appeared."""

    def changed(self, slot: int) -> None:
        """The file was written."""

    def removed(self, slot: int) -> None:
        """The file is gone; its owner is still known."""

    def moved(self, old: int, new: int) -> None:
        """The file was renamed; called after ``added`` for the new slot and before ``removed`` for the old."""

    def renamed_into_place(self, slot: int) -> None:
        """An added file was renamed from a name that does not count."""

    def cooled(self, slot: int) -> None:
        """The file is no longer read at every poll."""


class NameTable:
    """Hash table in an array, from names to slots.

    It costs a few bytes for each name; a dictionary needs as much memory for a number as for a short name.
    """

    EMPTY, REMOVED = -1, -2

    def __init__(self, names: list[str | None]) -> None:
        """Index ``names`` by slot; the caller owns the list."""
        self._names = names
        self._cells = array("i", [self.EMPTY]) * 64
        self._used = 0  # cells that are not empty
        self.size = 0

    def find(self, name: str) -> int | None:
        """Return the slot of a name, or None."""
        cells, names = self._cells, self._names
        mask = len(cells) - 1
        place = hash(name) & mask
        while (slot := cells[place]) != self.EMPTY:
            if slot >= 0 and names[slot] == name:
                return slot
            place = (place + 1) & mask
        return None

    def add(self, name: str, slot: int) -> None:
        """Add a name that has no slot yet."""
        if self._used * 3 >= len(self._cells) * 2:
            self._rebuild()
        self._put(name, slot)
        self._used += 1
        self.size += 1

    def remove(self, name: str) -> None:
        """Forget a name; it must still be in the names."""
        mask = len(self._cells) - 1
        place = hash(name) & mask
        while self._cells[place] < 0 or self._names[self._cells[place]] != name:
            place = (place + 1) & mask
        self._cells[place] = self.REMOVED
        self.size -= 1

    def _put(self, name: str, slot: int) -> None:
        mask = len(self._cells) - 1
        place = hash(name) & mask
        while self._cells[place] != self.EMPTY:
            place = (place + 1) & mask
        self._cells[place] = slot

    def _rebuild(self) -> None:
        """Rebuild the table with room for twice as many names."""
        slots = [slot for slot in self._cells if slot >= 0]
        cells = 64
        while cells < 3 * len(slots):
            cells *= 2
        self._cells = array("i", [self.EMPTY]) * cells
        self._used = len(slots)
        for slot in slots:
            self._put(self._names[slot] or "", slot)


@dataclass(slots=True, eq=False)
class _NameScan:
    """An unfinished pass over the names."""

    entries: "os._ScandirIterator[str]"
    seen: bytearray  # by slot
    key: tuple[int, int, int]
    started: float
    order: "array[int]" = field(default_factory=lambda: array("I"))  # slots in the order of the names
    position: int = 0  # position in the order of the previous pass
    new_slots: "array[int]" = field(default_factory=lambda: array("I"))  # slots assigned in this pass
    # slots whose names now belong to other files, with the new inodes
    replaced: list[tuple[int, int]] = field(default_factory=list)
    took_s: float = 0.0


class FolderWatch:
    """Watch a folder for regular files whose names match a glob, and for their owners.

    Links are not followed. Other kinds are passed over. Names that start with a dot match only a pattern that does. A
    missing folder has no files. A slot is the index of a name in the arrays.
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
        self.names: list[str | None] = [None]
        self.sizes = array("q", [0])
        self.mtimes = array("d", [0.0])
        self.owners = array("i", [SKIPPED])  # slot 0 stays unused
        self.hot: dict[int, ActiveFile] = {}  # files read at every poll, in the order of their last changes
        self.totals: dict[int, FileTotals] = {}
        self.changes: list[FileChange] = []  # changes found by the last poll
        self.complete = False  # whether every file has been read once
        self.polls = 0
        # matching names that are not regular files, with their kind; at most `MOST_PASSED_OVER`
        self.passed_over: dict[str, str] = {}
        self.unreadable: str | None = None  # why a file could not be read
        self._matches = name_matcher(pattern)
        self._owner_of = owner_of
        self._listener = listener or FolderListener()
        self._table = NameTable(self.names)
        self._order = _padded(array("I"))  # slots in the order of the last pass; mostly the order of the next
        self._inodes = array("Q", [0])
        self._has_stable_inodes = True  # whether inodes are stable: some file systems invent one each time
        self._free = array("I")
        self._scan: _NameScan | None = None
        self._key: tuple[int, int, int] | None = None  # device, inode and mtime of the folder at the last poll
        self._key_since = 0.0  # since when it has had this value
        self._scanned_key: tuple[int, int, int] | None = None  # its value at the last pass over the names
        self._scanned_at = 0.0  # time of that pass
        self._rest_until = 0.0
        self._has_missing_file = False  # whether a file had disappeared when read
        self._stale_owners: set[int] = set()  # owners whose newest file is gone or became older
        self._file_count = 0  # file numbers assigned so far
        self._hot_from = 0
        self._turn_slot = 0
        self._fd = -1

    def poll(self, now: float) -> None:
        """Update everything within the time limits; raises OSError when the folder cannot be read."""
        self.polls += 1
        self.changes = []
        self.unreadable = None
        try:
            self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._drop_all()
            return
        try:
            facts = os.fstat(self._fd)
            self._update_key((facts.st_dev, facts.st_ino, facts.st_mtime_ns), now)
            if self._scan is None and self._is_due(now) and self._key is not None:
                self._scan = _NameScan(os.scandir(self._fd), bytearray(len(self.names)), self._key, now)
            if self._scan is not None:
                self._read_names(self._scan, now)
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

    def refresh(self, slot: int, now: float) -> bool:
        """Read one file again between two polls; return whether it is unchanged."""
        name = self.names[slot]
        if name is None:
            return False
        before = (self.sizes[slot], self.mtimes[slot], self.owners[slot])
        there = self._read(slot, os.path.join(self.directory, name), None, now)
        if self._stale_owners:
            self._find_newest()
        return there and before == (self.sizes[slot], self.mtimes[slot], self.owners[slot])

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
            or self._key != self._scanned_key
            or self._scanned_at < sure_at <= now
            or now - self._scanned_at >= RELIST_S
        )

    def _read_names(self, scan: _NameScan, now: float) -> None:
        """Continue a pass over the names until the time for one poll is used up."""
        started = time.monotonic()
        until = started + SCAN_S
        find, names, inodes, seen, entries = self._table.find, self.names, self._inodes, scan.seen, scan.entries
        before, place, note, tell = self._order, scan.position, scan.order.append, self._has_stable_inodes
        done = False
        while time.monotonic() < until:
            first = next(entries, None)
            if first is None:
                done = True
                break
            for entry in chain((first,), islice(entries, CHUNK)):
                name = entry.name
                slot = before[place]
                if names[slot] == name:
                    place += 1
                else:
                    found = find(name)
                    if found is None:
                        self._add_name(scan, entry, now)
                        if time.monotonic() > until:
                            break
                        continue
                    slot = found
                    for step in range(1, SEARCH_AHEAD):
                        if before[place + step] == slot:  # those in between are gone
                            place += step + 1
                            break
                seen[slot] = 1
                note(slot)
                if tell and inodes[slot] != entry.inode():
                    scan.replaced.append((slot, entry.inode()))
            if len(scan.replaced) > max(1000, self._table.size // 2):
                self._has_stable_inodes = tell = False
                scan.replaced.clear()
        scan.position = place
        scan.took_s += time.monotonic() - started
        if done:
            self._finish_scan(scan, now)

    def _add_name(self, scan: _NameScan, entry: "os.DirEntry[str]", now: float) -> None:
        """Add a new name."""
        name = entry.name
        owner = self._owner(name)
        slot = self._free.pop() if self._free else len(self.names)
        if slot == len(self.names):
            self.names.append(name)
            self.sizes.append(0)
            self.mtimes.append(0.0)
            self.owners.append(SKIPPED)
            self._inodes.append(entry.inode())
            scan.seen.append(1)
        else:
            self.names[slot], self._inodes[slot] = name, entry.inode()
            scan.seen[slot] = 1
        self._table.add(name, slot)
        scan.order.append(slot)
        if owner != SKIPPED:
            self.owners[slot] = PASSED_OVER  # until it is read
            if self.complete:
                scan.new_slots.append(slot)
            self._read(slot, name, self._fd, now)

    def _owner(self, name: str) -> int:
        if not self._matches(name):
            return SKIPPED
        owner = self._owner_of(name)
        return SKIPPED if owner is None else owner

    def _finish_scan(self, scan: _NameScan, now: float) -> None:
        """Handle names that are gone, renamed or reused for other files."""
        self._has_missing_file = False
        gone: list[tuple[str, int]] = []
        if scan.seen.count(1) != self._table.size:
            gone = [(name, slot) for slot, name in enumerate(self.names) if name is not None and not scan.seen[slot]]
        if (gone or scan.replaced) and self._has_stable_inodes:
            old = {self._inodes[slot]: slot for _, slot in gone if self.owners[slot] >= NOBODY}
            old |= {self._inodes[slot]: slot for slot, _ in scan.replaced if self.owners[slot] >= NOBODY}
            for slot in scan.new_slots:
                was = old.pop(self._inodes[slot], None)
                if was is not None and self._may_be_same_file(was, slot):
                    self._move(was, slot, now)
            skipped = {self._inodes[slot]: name for name, slot in gone if self.owners[slot] == SKIPPED}
            for slot in scan.new_slots:
                before = skipped.get(self._inodes[slot])
                stem = (self.names[slot] or "").partition(".")[0]
                if before is not None and stem in before and self.owners[slot] >= NOBODY:
                    self._listener.renamed_into_place(
                        slot
                    )  # one without its name in the old name would be another file
        for name, slot in gone:
            self._remove(name, slot)
        for slot, inode in scan.replaced:
            self._inodes[slot] = inode
            known = self.names[slot]
            if known is not None and self._owner(known) != SKIPPED:
                self._read(slot, known, self._fd, now)
        self._end_scan()
        self._order = _padded(scan.order)
        self._scanned_key, self._scanned_at = scan.key, scan.started
        self._rest_until = now + min(REST_RATIO * scan.took_s, MOST_REST_S)
        if not self.complete:
            self.complete = True
            self._warm_up(now)

    def _may_be_same_file(self, old: int, new: int) -> bool:
        """Whether it may be the same file: the inode of a removed file is soon reused."""
        return (
            self.owners[new] >= NOBODY and self.sizes[new] >= self.sizes[old] and self.mtimes[new] >= self.mtimes[old]
        )

    def _move(self, old: int, new: int, now: float) -> None:
        """Continue a renamed file under its new name; it was not born."""
        totals = self.totals[self.owners[new]]
        totals.new_files -= 1
        totals.new_bytes -= self.sizes[new]
        hot, before = self.hot.pop(old, None), (self.mtimes[old], self.sizes[old])
        if hot is None:
            hot = self._new_active_file(now)
        elif before != (self.mtimes[new], self.sizes[new]):
            hot.since, hot.poll_number = now, self.polls
        if before != (self.mtimes[new], self.sizes[new]):
            self.changes.append(FileChange(hot.number, self.owners[new], self.mtimes[new], self.sizes[new], before))
        self.hot.pop(new, None)
        self.hot[new] = hot
        self._listener.moved(old, new)
        self._drop(old)  # if the old name still exists, it is a new file

    def _remove(self, name: str, slot: int) -> None:
        """Forget a name that is gone."""
        self._drop(slot)
        self.owners[slot] = SKIPPED
        self._table.remove(name)
        self.names[slot] = None
        self._free.append(slot)
        self.passed_over.pop(name, None)

    def _drop(self, slot: int) -> None:
        """Stop counting a file."""
        owner = self.owners[slot]
        if owner < NOBODY:
            return
        totals = self.totals[owner]
        totals.files -= 1
        totals.bytes -= self.sizes[slot]
        if totals.newest_mtime is None or self.mtimes[slot] >= totals.newest_mtime:
            self._stale_owners.add(owner)
        self.hot.pop(slot, None)
        self._listener.removed(slot)
        self.owners[slot] = SKIPPED

    def _end_scan(self) -> None:
        if self._scan is not None:
            self._scan.entries.close()
            self._scan = None

    def _drop_all(self) -> None:
        """Forget all names, since the folder is missing."""
        self._end_scan()
        for slot, name in enumerate(self.names):
            if name is not None:
                self._remove(name, slot)
        self._order = _padded(array("I"))
        self._key = self._scanned_key = None
        self.complete = True
        if self._stale_owners:
            self._find_newest()

    def _read_files(self, now: float) -> None:
        """Read recently written files, and the next of the others."""
        until = time.monotonic() + STAT_S
        hot = list(self.hot)
        start = self._hot_from if self._hot_from < len(hot) else 0
        self._hot_from = 0
        for place, slot in enumerate(chain(hot[start:], hot[:start])):
            self._read(slot, self.names[slot] or "", self._fd, now)
            if not place % 16 and time.monotonic() > until:
                self._hot_from = (start + place + 1) % len(hot)
                break
        looked = 0
        for _ in range(min(len(self.names), CHUNK)):
            if looked >= OTHERS_POLLED or (looked >= OTHERS_POLLED // 8 and time.monotonic() > until):
                break
            self._turn_slot = (self._turn_slot + 1) % len(self.names)
            slot = self._turn_slot
            if self.owners[slot] != SKIPPED and slot not in self.hot:
                looked += 1
                self._read(slot, self.names[slot] or "", self._fd, now)

    def _read(self, slot: int, path: str, fd: int | None, now: float) -> bool:
        """Read one file and record its changes; return whether that succeeded."""
        try:
            facts = os.stat(path, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            self._has_missing_file = True  # the next pass finds out whether it was renamed
            return False
        except OSError as error:
            self.unreadable = error.strerror
            return False
        name = self.names[slot] or ""
        if not stat.S_ISREG(facts.st_mode):
            self._drop(slot)
            if len(self.passed_over) < MOST_PASSED_OVER or name in self.passed_over:
                self.passed_over[name] = KINDS.get(stat.S_IFMT(facts.st_mode), "no file")
            self.owners[slot] = PASSED_OVER
            return True
        if self.owners[slot] < NOBODY:
            self.passed_over.pop(name, None)
            self._add(slot, self._owner(name), facts.st_size, facts.st_mtime, now)
        elif facts.st_size != self.sizes[slot] or facts.st_mtime != self.mtimes[slot]:
            self._change(slot, facts.st_size, facts.st_mtime, now)
        return True

    def _add(self, slot: int, owner: int, size: int, mtime: float, now: float) -> None:
        """Count a file from now on."""
        totals = self.totals.get(owner)
        if totals is None:
            totals = self.totals[owner] = FileTotals()
        self.owners[slot], self.sizes[slot], self.mtimes[slot] = owner, size, mtime
        totals.files += 1
        totals.bytes += size
        if totals.newest_mtime is None or mtime > totals.newest_mtime:
            totals.newest_mtime = mtime
        if self.complete:
            totals.new_files += 1
            totals.new_bytes += size
            if totals.new_mtime is None or mtime > totals.new_mtime:
                totals.new_mtime = mtime
            totals.changed_at = now
            self._heat(slot, self._new_active_file(now))
        self._listener.added(slot)

    def _change(self, slot: int, size: int, mtime: float, now: float) -> None:
        """Record a change of a file."""
        owner, before = self.owners[slot], (self.mtimes[slot], self.sizes[slot])
        totals = self.totals[owner]
        totals.bytes += size - before[1]
        if totals.newest_mtime is None or mtime > totals.newest_mtime:
            totals.newest_mtime = mtime
        elif mtime < before[0] >= totals.newest_mtime:
            self._stale_owners.add(owner)
        self.sizes[slot], self.mtimes[slot] = size, mtime
        totals.changed_at = now
        hot = self.hot.pop(slot, None) or self._new_active_file(now)
        hot.since, hot.poll_number = now, self.polls
        self._heat(slot, hot)
        self.changes.append(FileChange(hot.number, owner, mtime, size, before))
        self._listener.changed(slot)

    def _new_active_file(self, now: float) -> ActiveFile:
        self._file_count += 1
        return ActiveFile(self._file_count, now, self.polls)

    def _heat(self, slot: int, hot: ActiveFile) -> None:
        """Read a file at every poll from now on."""
        self.hot[slot] = hot
        if len(self.hot) > HOT_MOST:
            self._cool_one(next(iter(self.hot)))

    def _warm_up(self, now: float) -> None:
        """Start with the last written files."""
        ours = (slot for slot, owner in enumerate(self.owners) if owner >= NOBODY)
        for slot in reversed(heapq.nlargest(HOT_LEAST, ours, key=self.mtimes.__getitem__)):
            self.hot[slot] = self._new_active_file(now)

    def _cool(self, now: float) -> None:
        """Stop reading files at every poll once long unchanged."""
        while len(self.hot) > HOT_LEAST:
            slot, hot = next(iter(self.hot.items()))
            if 0 <= now - hot.since < HOT_S:
                return
            self._cool_one(slot)

    def _cool_one(self, slot: int) -> None:
        del self.hot[slot]
        self._listener.cooled(slot)

    def _find_newest(self) -> None:
        """Recompute the latest time of stale owners."""
        newest: dict[int, float] = {}
        for owner, mtime in zip(self.owners, self.mtimes, strict=True):
            if owner in self._stale_owners and mtime > newest.get(owner, -1e300):
                newest[owner] = mtime
        for owner in self._stale_owners:
            self.totals[owner].newest_mtime = newest.get(owner)
        self._stale_owners.clear()


def _padded(order: "array[int]") -> "array[int]":
    """Append slot 0, which has no name, to an order."""
    order.extend([0] * SEARCH_AHEAD)
    return order
