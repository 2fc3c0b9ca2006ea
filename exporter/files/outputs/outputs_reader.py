"""Poll the files that a job writes: number, size, changes, records, and validity.

A watch may run in another process, so its arguments and results must be picklable.
"""

import heapq
import os
import stat
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from exporter.contract.status import DamagedFile
from exporter.files.formats import FileCheck, check_file
from exporter.files.formats.record_count import ArrayItemCounter, LineCounter, RecordKind, record_kind
from exporter.files.formats.source import OPEN_FLAGS, NotRegularFile, open_source, printable
from exporter.files.outputs.csv_reader import is_sidecar_csv
from exporter.files.outputs.folder_reader import NOBODY, FileChange, FileTotals, FolderListener, FolderWatch

SETTLED_S = 10.0  # a file is checked once unchanged for this long
SETTLED_POLLS = 2  # and for this many polls
RECHECK_S = 10.0  # damage is confirmed after this time, since the file may still be being written
MOST_CHECKS, CHECK_S = 8, 0.05  # files checked in one poll, and the time for it
COUNT_BYTES, COUNT_S = 32 << 20, 0.1  # text counted in one poll, and the time for it
PIECE_BYTES = 4 << 20
HOLE_S = 60.0  # wait this long at a NUL byte: network file systems may write later parts first
CLOCK_SLACK_S = 60.0  # a file server's clock may be this far behind, so files this much older than the start count
CHECK_BATCH = 512  # files to check selected at once
MOST_REPORTED_INVALID = 20  # damaged files named in a reading
MOST_INVALID = 1000  # stop checking after this many damaged files
FEW_FILES = 50  # report each complete file only up to this number of files

GROWING_FORMATS = frozenset(
    ("jsonl", "csv")
)  # formats valid after each line: only a rename shows that such a file is complete

# Flags of a file. To do: count its records, check it, wait for its records before giving a sum. Known: written since
# the first poll, renamed into place, reported as complete, text after its last counted line.
TO_COUNT, TO_CHECK, AWAITED, WRITTEN, RENAMED, REPORTED, LACKS_NEWLINE = (1 << place for place in range(7))


@dataclass(frozen=True)
class FileOwnership:
    """Map a file name to the rank of one of our workers, to ``NOBODY``, or to None if another node counts it."""

    rank_of: Callable[[str], int | None]
    our_ranks: frozenset[int]
    other_ranks: frozenset[int]
    owns_unranked: bool  # whether files without a worker's number are ours
    # rank by words that name a worker alone, not a part of the output that any worker may write
    sole_rank_of: Callable[[str], int | None] | None = None
    is_local: bool = False  # whether only this node sees the files, so that all are ours

    def __call__(self, name: str) -> int | None:
        rank = self.rank_of(name)
        if rank is not None and rank in self.our_ranks:
            return rank
        return NOBODY if self.is_local or (self.owns_unranked and rank not in self.other_ranks) else None

    def has_sole_writer(self, name: str) -> bool:
        """Whether a file of one of our workers is written by that worker alone."""
        return self.sole_rank_of is None or self.sole_rank_of(name) == self.rank_of(name)

    def has_unknown_rank(self, name: str) -> bool:
        """Whether a name has a number that no worker has, so that such numbers count something else."""
        rank = self.rank_of(name)
        return rank is not None and rank not in self.our_ranks and rank not in self.other_ranks


class OwnedOutput(NamedTuple):
    """Files of one owner; ``changed_at`` by our own clock, other times by the files', in epoch seconds."""

    files: int
    bytes: int
    newest_mtime: float | None  # last write
    records: int | None  # None if uncountable or not all counted yet
    changed_at: float | None  # when one was last found new or changed after the first poll
    new_bytes: int  # sizes of files that appeared after the first poll, as found
    new_mtime: float | None  # latest of their times
    has_sole_writer: bool  # whether names suggest that the owner writes them alone


class FinishedFile(NamedTuple):
    """A complete file: renamed into place, or valid in a format that is written at once."""

    number: int
    time: float
    file: str
    bytes: int


class OutputReading(NamedTuple):
    """Present files, and changes that one poll found."""

    watch_id: int  # changes when the watch restarts in another process
    complete: bool  # whether every file has been read once
    owners: Mapping[int, OwnedOutput]
    changes: tuple[FileChange, ...]
    first_file: tuple[float, str] | None  # time and name of the first file known to be written since the job started
    valid_files: int  # checked files found valid
    invalid: tuple[DamagedFile, ...]  # damaged files, printable, the latest `MOST_REPORTED_INVALID`
    invalid_files: int
    finished: tuple[FinishedFile, ...]  # the last files that became complete, in order
    # matching names that are not regular files, with their kind; only some if many
    passed_over: tuple[tuple[str, str], ...]
    unreadable: str | None  # why some files could not be read


class _SuspectedDamage(NamedTuple):
    """State of a file when it first looked damaged."""

    time: float
    size: int
    mtime: float


class OutputWatch(FolderListener):
    """Regular files directly in a directory whose names match a glob."""

    def __init__(
        self,
        directory: str,
        pattern: str,
        owner_of: FileOwnership,
        since: float | None = None,
        *,
        gpu_metrics: bool = False,
    ) -> None:
        """Set up the watch without reading anything.

        ``since`` is when the job started, if known; older files are not its own. With ``gpu_metrics``, sidecars write
        ``gpu_metrics.csv`` there, which does not count.
        """
        self._folder = FolderWatch(directory, pattern, self._owner, self)
        self._owner_of = owner_of
        self._gpu_metrics = gpu_metrics
        self._shared_owners: set[int] = set()  # owners with files that other workers may write too
        self._has_unknown_ranks = False  # whether any file has a number that is no worker's
        self._since = since
        self._watch_id = time.monotonic_ns() ^ os.getpid() << 48
        self._flags = bytearray()
        self._records = array("q")  # by slot; -1 if unknown
        self._sums: dict[int, list[int]] = {}  # counted files and their records, by owner
        self._uncounted = 0
        self._awaited = 0
        self._counted_all = False
        self._counts: dict[int, LineCounter | ArrayItemCounter] = {}
        self._holes: dict[int, tuple[int, float]] = {}  # position of a NUL byte where a count waits, and since when
        self._due_counts: dict[int, None] = {}  # files to count first: recently changed ones
        self._count_from = 0  # slot where the search for others continues
        self._to_check: list[int] = []  # settled files to check, the last written at the end
        self._all_checked = False  # whether no more are left to find
        self._suspected: dict[int, _SuspectedDamage] = {}
        self._invalid: dict[int, DamagedFile] = {}
        self._valid_files = 0
        self._finished: deque[FinishedFile] = deque(maxlen=FEW_FILES)
        self._finished_count = 0
        self._first_file: tuple[float, str] | None = None
        self._complete_since: tuple[float, int] | None = None

    def poll(self, now: float) -> OutputReading:
        """Return the present state; raises OSError when the directory cannot be read."""
        folder = self._folder
        folder.poll(now)
        if folder.complete and self._complete_since is None:
            self._prepare_initial_files(now)
        if self._complete_since is not None:
            self._count(now)
            self._check(now)
            if not self._uncounted and not self._awaited:
                self._counted_all = True
        return OutputReading(
            watch_id=self._watch_id,
            complete=folder.complete,
            owners={owner: self._owned_output(owner, totals) for owner, totals in folder.totals.items()},
            changes=tuple(folder.changes),
            first_file=self._first_file,
            valid_files=self._valid_files,
            invalid=tuple(self._invalid.values())[-MOST_REPORTED_INVALID:],
            invalid_files=len(self._invalid),
            finished=tuple(self._finished),
            passed_over=tuple((printable(name), kind) for name, kind in folder.passed_over.items()),
            unreadable=folder.unreadable,
        )

    def _owned_output(self, owner: int, totals: FileTotals) -> OwnedOutput:
        counted, records = self._sums.get(owner, (0, 0))
        return OwnedOutput(
            files=totals.files,
            bytes=totals.bytes,
            newest_mtime=totals.newest_mtime,
            records=records if counted and self._counted_all else None,
            changed_at=totals.changed_at,
            new_bytes=totals.new_bytes,
            new_mtime=totals.new_mtime,
            has_sole_writer=owner != NOBODY and owner not in self._shared_owners and not self._has_unknown_ranks,
        )

    def _owner(self, name: str) -> int | None:
        """Return the owner of a file, and note clues in its name about the owners of others."""
        if self._gpu_metrics and is_sidecar_csv(name):
            return None
        owner = self._owner_of(name)
        if owner is None or owner == NOBODY:
            self._has_unknown_ranks = self._has_unknown_ranks or self._owner_of.has_unknown_rank(name)
        elif owner not in self._shared_owners and not self._owner_of.has_sole_writer(name):
            self._shared_owners.add(owner)
        return owner

    def _prepare_initial_files(self, now: float) -> None:
        """Prepare the work on initial files once all have been read."""
        self._complete_since = (now, self._folder.polls)
        for slot, flags in enumerate(self._flags):
            if not flags & TO_CHECK:
                continue
            if self._record_kind(slot) in ("array", "rows"):
                self._flags[slot] |= AWAITED
                self._awaited += 1
            mtime = self._folder.mtimes[slot]
            if self._since is not None and mtime >= self._since - CLOCK_SLACK_S:
                mtime = max(mtime, self._since)
                if self._first_file is None or mtime < self._first_file[0]:
                    self._first_file = (mtime, printable(self._folder.names[slot] or ""))

    # Notifications from the folder

    def added(self, slot: int) -> None:
        while len(self._flags) <= slot:
            self._flags.append(0)
            self._records.append(-1)
        self._flags[slot] = TO_CHECK
        self._all_checked = False
        self._schedule_line_count(slot)
        self._record_write(slot)

    def changed(self, slot: int) -> None:
        self._end_wait(slot)
        self._flags[slot] = self._flags[slot] & (REPORTED | TO_COUNT) | TO_CHECK
        self._suspected.pop(slot, None)
        self._invalid.pop(slot, None)
        self._schedule_line_count(slot)
        self._record_write(slot)

    def removed(self, slot: int) -> None:
        self._end_wait(slot)
        self._end_count(slot)
        self._set_records(slot, -1)
        self._flags[slot] = 0
        self._counts.pop(slot, None)
        self._holes.pop(slot, None)
        self._suspected.pop(slot, None)
        self._invalid.pop(slot, None)

    def moved(self, old: int, new: int) -> None:
        self._flags[new] |= self._flags[old] & REPORTED
        if self._record_kind(new) == self._record_kind(old):
            count = self._counts.pop(old, None)
            if count is not None:
                self._counts[new] = count
            if old in self._holes:
                self._holes[new] = self._holes.pop(old)
            self._set_records(new, self._records[old])

    def renamed_into_place(self, slot: int) -> None:
        self._flags[slot] |= RENAMED

    def cooled(self, slot: int) -> None:
        self._all_checked = False
        self._due_counts.pop(slot, None)
        if not self._flags[slot] & TO_COUNT and slot not in self._holes:
            self._counts.pop(slot, None)

    def _record_write(self, slot: int) -> None:
        if self._complete_since is None:
            return
        self._flags[slot] |= WRITTEN
        if self._first_file is None:
            mtime = self._folder.mtimes[slot]
            self._first_file = (max(mtime, self._since or mtime), printable(self._folder.names[slot] or ""))

    # Records

    def _record_kind(self, slot: int) -> RecordKind | None:
        return record_kind(self._folder.names[slot] or "")

    def _schedule_line_count(self, slot: int) -> None:
        """Schedule a count of lines; other formats are counted once settled."""
        if self._record_kind(slot) in ("lines", "table"):
            self._schedule_count(slot)
        else:
            self._counts.pop(slot, None)
            self._end_count(slot)

    def _schedule_count(self, slot: int) -> None:
        if not self._flags[slot] & TO_COUNT:
            self._flags[slot] |= TO_COUNT
            self._uncounted += 1
        if self._complete_since is not None:
            self._due_counts[slot] = None

    def _end_count(self, slot: int) -> None:
        if self._flags[slot] & TO_COUNT:
            self._flags[slot] &= ~TO_COUNT
            self._uncounted -= 1
        self._due_counts.pop(slot, None)

    def _set_records(self, slot: int, records: int) -> None:
        sums = self._sums.setdefault(self._folder.owners[slot], [0, 0])
        before = self._records[slot]
        if before >= 0:
            sums[0] -= 1
            sums[1] -= before
        if records >= 0:
            sums[0] += 1
            sums[1] += records
        self._records[slot] = records

    def _end_wait(self, slot: int) -> None:
        if self._flags[slot] & AWAITED:
            self._flags[slot] &= ~AWAITED
            self._awaited -= 1

    def _count(self, now: float) -> None:
        """Continue counting, with recently changed files first."""
        until, left = time.monotonic() + COUNT_S, COUNT_BYTES
        for slot, (_, since) in self._holes.items():
            count = self._counts.get(slot)
            if isinstance(count, LineCounter) and not 0 <= now - since < HOLE_S:
                count.pass_hole(self._folder.sizes[slot])
            self._schedule_count(slot)
        for slot in list(self._due_counts):
            if left <= 0 or time.monotonic() > until:
                return
            left -= self._count_file(slot, left, until, now)
            if self._flags[slot] & TO_COUNT:  # more is left, but others go first
                self._due_counts[slot] = self._due_counts.pop(slot, None)
        for _ in range(len(self._flags) if self._uncounted else 0):
            if not self._uncounted or left <= 0 or time.monotonic() > until:
                return
            if self._count_from >= len(self._flags):
                self._count_from = 0
            if self._flags[self._count_from] & TO_COUNT:
                left -= self._count_file(self._count_from, left, until, now)
            if not self._flags[self._count_from] & TO_COUNT:
                self._count_from += 1

    def _count_file(self, slot: int, most_bytes: int, until: float, now: float) -> int:
        """Continue counting in one file; return the number of bytes read."""
        kind, count = self._record_kind(slot), self._counts.get(slot)
        if count is None:
            count = ArrayItemCounter() if kind == "array" else LineCounter(csv=kind == "table", waits_at_holes=True)
        path, done, more = os.path.join(self._folder.directory, self._folder.names[slot] or ""), 0, True
        try:
            fd = os.open(path, OPEN_FLAGS)
            try:
                facts = os.fstat(fd)
                while stat.S_ISREG(facts.st_mode) and more and done < most_bytes and time.monotonic() <= until:
                    before = count.position
                    more = count.advance(fd, facts.st_size, min(PIECE_BYTES, most_bytes - done))
                    done += count.position - before if count.position > before else count.position
            finally:
                os.close(fd)
        except OSError:
            self._end_count(slot)  # until it changes
            self._holes.pop(slot, None)
            self._set_records(slot, -1)
            return done
        self._record_hole(slot, count, now)
        if more or slot in self._folder.hot or slot in self._holes:
            self._counts[slot] = count
        if not more:
            self._end_count(slot)
        if not more or isinstance(count, LineCounter):
            self._apply_count(slot, count)
        return done

    def _record_hole(self, slot: int, count: LineCounter | ArrayItemCounter, now: float) -> None:
        """Record since when a count has waited at the same NUL byte."""
        if not isinstance(count, LineCounter) or not count.hole:
            self._holes.pop(slot, None)
        elif slot not in self._holes or self._holes[slot][0] != count.position:
            self._holes[slot] = (count.position, now)

    def _apply_count(self, slot: int, count: LineCounter | ArrayItemCounter) -> None:
        if isinstance(count, ArrayItemCounter):
            items = count.items if count.complete else None
            self._set_records(slot, -1 if items is None else items)
            self._counts.pop(slot, None)
            return
        self._set_records(slot, count.records)
        self._flags[slot] &= ~LACKS_NEWLINE
        if count.unfinished:
            self._flags[slot] |= LACKS_NEWLINE

    # Validity

    def _check(self, now: float) -> None:
        """Check some files that are no longer written: suspected damage first, then the last written."""
        until, done = time.monotonic() + CHECK_S, 0
        for slot in list(self._invalid)[-MOST_REPORTED_INVALID:]:
            self._folder.refresh(slot, now)  # it may have been rewritten
        if len(self._invalid) >= MOST_INVALID:
            return
        doubtful = [slot for slot, doubt in self._suspected.items() if not 0 <= now - doubt.time < RECHECK_S]
        for slot in (*doubtful, *self._settled_files(now)):
            if done >= MOST_CHECKS or time.monotonic() > until:
                return
            done += self._check_file(slot, now)
        if self._complete_since is None or not self._is_settled(*self._complete_since, now):
            return
        if not self._to_check and not self._all_checked:
            self._find_to_check()
        while self._to_check and done < MOST_CHECKS and time.monotonic() <= until:
            slot = self._to_check.pop()
            if slot not in self._folder.hot and slot not in self._suspected:
                done += self._check_file(slot, now)

    def _find_to_check(self) -> None:
        """Find the files to check next, the last written first."""
        hot, doubts = self._folder.hot, self._suspected
        left = (
            slot
            for slot, flags in enumerate(self._flags)
            if flags & TO_CHECK and slot not in hot and slot not in doubts
        )
        self._to_check = heapq.nlargest(CHECK_BATCH, left, key=self._folder.mtimes.__getitem__)[::-1]
        self._all_checked = not self._to_check

    def _is_settled(self, since: float, poll_number: int, now: float) -> bool:
        return not 0 <= now - since < SETTLED_S and self._folder.polls - poll_number >= SETTLED_POLLS

    def _settled_files(self, now: float) -> list[int]:
        """Recently written files that seem finished, the last changed first."""
        found = []
        for slot in reversed(self._folder.hot):
            if self._flags[slot] & TO_CHECK and slot not in self._suspected:
                hot = self._folder.hot[slot]
                if self._is_settled(hot.since, hot.poll_number, now):
                    found.append(slot)
                    if len(found) == MOST_CHECKS:
                        break
        return found

    def _check_file(self, slot: int, now: float) -> bool:
        """Check a file; return False if it changed since the last poll or needs no check."""
        folder = self._folder
        if not self._flags[slot] & TO_CHECK or not folder.refresh(slot, now):
            return False
        name, size, mtime = folder.names[slot] or "", folder.sizes[slot], folder.mtimes[slot]
        try:
            with open_source(folder.directory, name) as source:
                result = check_file(source)
        except NotRegularFile as error:
            result = FileCheck("unknown", None, str(error))
        if not folder.refresh(slot, now):
            return True  # written during the check
        if result.state == "invalid":
            doubt = self._suspected.get(slot)
            if doubt is None or (doubt.size, doubt.mtime) != (size, mtime):
                self._suspected[slot] = _SuspectedDamage(now, size, mtime)
                return True
            self._invalid[slot] = DamagedFile(printable(name), result.format, printable(result.reason or "is damaged"))
        self._suspected.pop(slot, None)
        self._end_wait(slot)
        self._flags[slot] &= ~TO_CHECK
        if result.state == "valid":
            self._valid_files += 1
            self._record_valid(slot, result)
        elif self._record_kind(slot) not in ("lines", "table"):
            known = self._record_kind(slot) is not None or self._records[slot] >= 0
            self._set_records(slot, 0 if result.state == "empty" and known else -1)
        return True

    def _record_valid(self, slot: int, verdict: FileCheck) -> None:
        """Record the number of records of a valid file, and that it is complete."""
        kind, flags = self._record_kind(slot), self._flags[slot]
        if kind in ("lines", "table"):
            if flags & LACKS_NEWLINE and not flags & TO_COUNT and self._records[slot] >= 0:
                self._flags[slot] &= ~LACKS_NEWLINE
                found = self._records[slot] + 1 if verdict.records is None else verdict.records
                self._set_records(slot, found)
        elif verdict.records is not None:
            self._set_records(slot, verdict.records)
        elif kind == "array":
            self._schedule_count(slot)
        else:
            self._set_records(slot, -1)
        if flags & REPORTED or not flags & WRITTEN or (verdict.format in GROWING_FORMATS and not flags & RENAMED):
            return
        self._flags[slot] |= REPORTED
        if sum(totals.files for totals in self._folder.totals.values()) <= FEW_FILES:
            self._finished_count += 1
            name = printable(self._folder.names[slot] or "")
            self._finished.append(
                FinishedFile(self._finished_count, self._folder.mtimes[slot], name, self._folder.sizes[slot])
            )
