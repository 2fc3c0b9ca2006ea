"""Poll the files that a job writes: number, size, changes, records, and validity.

A watch may run in another process, so its arguments and results must be picklable.
"""

import heapq
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import DamagedFile
from exporter.files.formats import FileCheck, check_file
from exporter.files.formats.record_count import ArrayItemCounter, LineCounter, record_kind
from exporter.files.formats.source import OPEN_FLAGS, NotRegularFile, open_source, printable
from exporter.files.outputs.csv_reader import is_sidecar_csv
from exporter.files.outputs.file_table import FileRow
from exporter.files.outputs.folder_reader import BATCH, NOBODY, FileChange, FileTotals, FolderListener, FolderWatch

SETTLED_S = 10.0  # a file is checked once unchanged for this long
SETTLED_POLLS = 2  # and for this many polls
RECHECK_S = 10.0  # damage is confirmed after this time, since the file may still be being written
LEAST_CHECKS, CHECK_S = 8, 0.1  # files that may be checked in one poll whatever they cost, and the time for all
COUNT_BYTES, COUNT_S = 32 << 20, 0.1  # text counted in one poll, and the time for it
PIECE_BYTES = 4 << 20
HOLE_S = 60.0  # wait this long at a NUL byte: network file systems may write later parts first
CLOCK_SLACK_S = 60.0  # a file server's clock may be this far behind, so files this much older than the start count
TELLING = 64  # largest files of the first pass that are checked early
MOST_KINDS = 1024  # so is one file of each owner and extension, up to this many
MOST_WAITING = 8192  # files that wait for their check by name; the others wait for their turn
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
    checked_files: int  # files whose present contents were checked
    valid_files: int  # checks that found a file valid
    invalid: tuple[DamagedFile, ...]  # damaged files, printable, the latest `MOST_REPORTED_INVALID`
    invalid_files: int
    finished: tuple[FinishedFile, ...]  # the last files that became complete, in order
    # matching names that are not regular files, with their kind; only some if many
    passed_over: tuple[tuple[str, str], ...]
    unreadable: str | None  # why some files could not be read


class _SuspectedDamage(NamedTuple):
    """State of a file when it first looked damaged."""

    name: str
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
        self._table = self._folder.table
        self._owner_of = owner_of
        self._gpu_metrics = gpu_metrics
        self._shared_owners: set[int] = set()  # owners with files that other workers may write too
        self._has_unknown_ranks = False  # whether any file has a number that is no worker's
        self._since = since
        self._watch_id = time.monotonic_ns() ^ os.getpid() << 48
        self._sums: dict[int, list[int]] = {}  # counted files and their records, by owner
        self._left = dict.fromkeys((TO_COUNT, TO_CHECK, AWAITED), 0)  # number of files with each of these flags
        self._counted_all = False
        self._counts: dict[int, LineCounter | ArrayItemCounter] = {}
        # name, position of a NUL byte where a count waits, and since when
        self._holes: dict[int, tuple[str, int, float]] = {}
        self._due_counts: dict[int, str] = {}  # names of files to count first: recently changed ones
        self._unchecked_hot: dict[int, None] = {}  # in the order of their last changes
        self._telling = _TellingFiles()
        self._searched: dict[int, dict[int, str]] = {TO_COUNT: {}, TO_CHECK: {}}  # batches searched for such files
        self._to_count: list[tuple[int, str]] = []  # other files to count, the next at the end
        self._to_check: list[tuple[int, str]] = []  # settled files to check, the next at the end
        self._suspected: dict[int, _SuspectedDamage] = {}
        self._invalid: dict[int, tuple[str, DamagedFile]] = {}  # with the name as it is
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
            self._complete_since = (now, folder.polls)
            if len(self._table) > BATCH:  # else the newest are found first
                self._to_check = self._telling.files()
            self._unchecked_hot = dict.fromkeys(folder.hot)
        if self._complete_since is not None:
            self._count(now)
            self._check(now)
            if not self._left[TO_COUNT] and not self._left[AWAITED]:
                self._counted_all = True
        files = sum(totals.files for totals in folder.totals.values())
        return OutputReading(
            watch_id=self._watch_id,
            complete=folder.complete,
            owners={owner: self._owned_output(owner, totals) for owner, totals in folder.totals.items()},
            changes=tuple(folder.changes),
            first_file=self._first_file and (self._first_file[0], printable(self._first_file[1])),
            checked_files=files - self._left[TO_CHECK],
            valid_files=self._valid_files,
            invalid=tuple(flaw for _, flaw in self._invalid.values())[-MOST_REPORTED_INVALID:],
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

    # Notifications from the folder

    def added(self, key: int, name: str) -> None:
        if self._folder.complete:
            self._put_flags(key, TO_CHECK)
            self._schedule_line_count(key, name)
            self._unchecked_hot[key] = None
            self._record_write(key, name)
            return
        kind = record_kind(name)
        self._put_flags(key, TO_CHECK | (kind is not None and (TO_COUNT if kind in ("lines", "table") else AWAITED)))
        row = self._table[key]
        self._telling.add(key, name, row)
        if self._since is not None and row.mtime >= self._since - CLOCK_SLACK_S:
            mtime = max(row.mtime, self._since)
            if self._first_file is None or mtime < self._first_file[0]:
                self._first_file = (mtime, name)

    def changed(self, key: int, name: str) -> None:
        self._put_flags(key, self._table[key].flags & (REPORTED | TO_COUNT) | TO_CHECK)
        self._suspected.pop(key, None)
        self._invalid.pop(key, None)
        self._unchecked_hot.pop(key, None)
        self._unchecked_hot[key] = None
        self._schedule_line_count(key, name)
        self._record_write(key, name)

    def removed(self, key: int) -> None:
        self._unchecked_hot.pop(key, None)
        self._end_count(key)
        self._set_records(key, -1)
        self._put_flags(key, 0)
        self._counts.pop(key, None)
        self._holes.pop(key, None)
        self._suspected.pop(key, None)
        self._invalid.pop(key, None)

    def moved(self, old: int, new: int, old_name: str | None, name: str) -> None:
        before = self._table[old]
        self._put_flags(new, self._table[new].flags | before.flags & REPORTED)
        if old_name is not None and record_kind(name) == record_kind(old_name):
            count, hole = self._counts.pop(old, None), self._holes.pop(old, None)
            if count is not None:
                self._counts[new] = count
            if hole is not None:
                self._holes[new] = (name, *hole[1:])
            self._set_records(new, before.records)

    def renamed_into_place(self, key: int) -> None:
        self._put_flags(key, self._table[key].flags | RENAMED)

    def cooled(self, key: int, name: str) -> None:
        self._due_counts.pop(key, None)
        self._unchecked_hot.pop(key, None)
        flags = self._table[key].flags
        if not flags & TO_COUNT and key not in self._holes:
            self._counts.pop(key, None)
        for flag, waiting in ((TO_COUNT, self._to_count), (TO_CHECK, self._to_check)):
            if flags & flag and len(waiting) < MOST_WAITING:
                waiting.append((key, name))

    def _record_write(self, key: int, name: str) -> None:
        if self._complete_since is None:
            return
        row = self._table[key]
        self._put_flags(key, row.flags | WRITTEN)
        if self._first_file is None:
            self._first_file = (max(row.mtime, self._since or row.mtime), name)

    # Rows

    def _put_flags(self, key: int, flags: int) -> None:
        row = self._table[key]
        if flags != row.flags:
            for flag in self._left:
                self._left[flag] += bool(flags & flag) - bool(row.flags & flag)
            self._table.put(key, row._replace(flags=flags))

    def _set_records(self, key: int, records: int) -> None:
        row = self._table[key]
        if records == row.records:
            return
        sums = self._sums.setdefault(row.owner, [0, 0])
        if row.records >= 0:
            sums[0] -= 1
            sums[1] -= row.records
        if records >= 0:
            sums[0] += 1
            sums[1] += records
        self._table.put(key, row._replace(records=records))

    def _find_work(self, flag: int, others: int) -> list[tuple[int, str]]:
        """Files of the present batch with a flag, the last written at the end, besides ``others`` found otherwise.

        Each batch is searched once. Asks for the next if that is not enough.
        """
        folder = self._folder
        if self._left[flag] <= others:
            return []
        if self._searched[flag] is folder.batch:
            folder.want_batch()
            return []
        self._searched[flag] = folder.batch
        rows = ((key, name, self._table.get(key)) for key, name in folder.batch.items())
        return [
            (key, name)
            for _, key, name in sorted(
                (row.mtime, key, name) for key, name, row in rows if row is not None and row.flags & flag
            )
        ]

    # Records

    def _schedule_line_count(self, key: int, name: str) -> None:
        """Schedule a count of lines; other formats are counted once settled."""
        if record_kind(name) in ("lines", "table"):
            self._schedule_count(key, name)
        else:
            self._counts.pop(key, None)
            self._end_count(key)

    def _schedule_count(self, key: int, name: str) -> None:
        self._put_flags(key, self._table[key].flags | TO_COUNT)
        if self._complete_since is not None:
            self._due_counts[key] = name

    def _end_count(self, key: int) -> None:
        self._put_flags(key, self._table[key].flags & ~TO_COUNT)
        self._due_counts.pop(key, None)

    def _count(self, now: float) -> None:
        """Continue counting, with recently changed files first."""
        until, left = time.monotonic() + COUNT_S, COUNT_BYTES
        for key, (name, _, since) in list(self._holes.items()):
            count = self._counts.get(key)
            if isinstance(count, LineCounter) and not 0 <= now - since < HOLE_S:
                count.pass_hole(self._table[key].size)
            self._schedule_count(key, name)
        for key, name in list(self._due_counts.items()):
            if left <= 0 or time.monotonic() > until:
                return
            left -= self._count_file(key, name, left, until, now)
            if key in self._due_counts:  # more is left, but others go first
                self._due_counts[key] = self._due_counts.pop(key)
        self._to_count = self._to_count or self._find_work(TO_COUNT, len(self._due_counts))
        started, allowed_s = time.thread_time(), self._folder.allowance_s
        while self._to_count and left > 0 and time.monotonic() <= until:
            if time.thread_time() - started >= allowed_s:
                break
            key, name = self._to_count[-1]
            row = self._table.get(key)
            if row is not None and row.flags & TO_COUNT:
                left -= self._count_file(key, name, left, until, now)
                row = self._table.get(key)
            if row is None or not row.flags & TO_COUNT:
                self._to_count.pop()
        self._folder.allowance_s -= time.thread_time() - started

    def _count_file(self, key: int, name: str, most_bytes: int, until: float, now: float) -> int:
        """Continue counting in one file; return the number of bytes read."""
        kind, count = record_kind(name), self._counts.get(key)
        if count is None:
            count = ArrayItemCounter() if kind == "array" else LineCounter(csv=kind == "table", waits_at_holes=True)
        path, done, more = os.path.join(self._folder.directory, name), 0, True
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
            self._end_count(key)  # until it changes
            self._holes.pop(key, None)
            self._set_records(key, -1)
            return done
        self._record_hole(key, name, count, now)
        if more or key in self._folder.hot or key in self._holes:
            self._counts[key] = count
        if not more:
            self._end_count(key)
        if not more or isinstance(count, LineCounter):
            self._apply_count(key, count)
        return done

    def _record_hole(self, key: int, name: str, count: LineCounter | ArrayItemCounter, now: float) -> None:
        """Record since when a count has waited at the same NUL byte."""
        if not isinstance(count, LineCounter) or not count.hole:
            self._holes.pop(key, None)
        elif key not in self._holes or self._holes[key][1] != count.position:
            self._holes[key] = (name, count.position, now)

    def _apply_count(self, key: int, count: LineCounter | ArrayItemCounter) -> None:
        if isinstance(count, ArrayItemCounter):
            items = count.items if count.complete else None
            self._set_records(key, -1 if items is None else items)
            self._counts.pop(key, None)
            return
        self._set_records(key, count.records)
        flags = self._table[key].flags & ~LACKS_NEWLINE
        self._put_flags(key, flags | LACKS_NEWLINE if count.unfinished else flags)

    # Validity

    def _check(self, now: float) -> None:
        """Check some files that are no longer written: suspected damage first, then the most telling ones."""
        until, done, folder = time.monotonic() + CHECK_S, 0, self._folder
        for key, (name, _) in list(self._invalid.items())[-MOST_REPORTED_INVALID:]:
            folder.refresh(key, name, now)  # it may have been rewritten
        if len(self._invalid) >= MOST_INVALID:
            return
        doubtful = [
            (key, doubt.name) for key, doubt in self._suspected.items() if not 0 <= now - doubt.time < RECHECK_S
        ]
        started, allowed_s, known = time.thread_time(), folder.allowance_s, len(self._invalid)
        for key, name in chain(doubtful, self._settled_files(now), self._settled_others(now)):
            done += self._check_file(key, name, now)
            if time.monotonic() > until or (done >= LEAST_CHECKS and time.thread_time() - started >= allowed_s):
                break
            if len(self._invalid) >= known + MOST_REPORTED_INVALID:
                break  # each is named in a reading
        folder.allowance_s -= time.thread_time() - started

    def _is_settled(self, since: float, poll_number: int, now: float) -> bool:
        return not 0 <= now - since < SETTLED_S and self._folder.polls - poll_number >= SETTLED_POLLS

    def _settled_files(self, now: float) -> list[tuple[int, str]]:
        """Recently written files that seem finished, the last changed first."""
        found = []
        for key in reversed(self._unchecked_hot):
            hot = self._folder.hot[key]
            if key not in self._suspected and self._is_settled(hot.since, hot.poll_number, now):
                found.append((key, hot.name))
        return found

    def _settled_others(self, now: float) -> Iterator[tuple[int, str]]:
        """Files that are not read at every poll, each once, the most telling first."""
        if self._complete_since is None or not self._is_settled(*self._complete_since, now):
            return
        others = len(self._unchecked_hot) + len(self._suspected)
        self._to_check = self._to_check or self._find_work(TO_CHECK, others)
        while self._to_check:
            key, name = self._to_check.pop()
            if key not in self._folder.hot and key not in self._suspected:
                yield key, name

    def _check_file(self, key: int, name: str, now: float) -> bool:
        """Check a file; return False if it changed since the last poll or needs no check."""
        folder = self._folder
        row = folder.refresh(key, name, now)
        if row is None or not row.flags & TO_CHECK:
            return False
        try:
            with open_source(folder.directory, name) as source:
                result = check_file(source)
        except NotRegularFile as error:
            result = FileCheck("unknown", None, str(error))
        if folder.refresh(key, name, now) is None:
            return True  # written during the check
        if result.state == "invalid":
            doubt = self._suspected.get(key)
            if doubt is None or (doubt.size, doubt.mtime) != (row.size, row.mtime):
                self._suspected[key] = _SuspectedDamage(name, now, row.size, row.mtime)
                return True
            flaw = DamagedFile(printable(name), result.format, printable(result.reason or "is damaged"))
            self._invalid[key] = (name, flaw)
        self._suspected.pop(key, None)
        self._unchecked_hot.pop(key, None)
        self._put_flags(key, row.flags & ~(AWAITED | TO_CHECK))
        if result.state == "valid":
            self._valid_files += 1
            self._record_valid(key, name, result)
        elif record_kind(name) not in ("lines", "table"):
            known = record_kind(name) is not None or row.records >= 0
            self._set_records(key, 0 if result.state == "empty" and known else -1)
        return True

    def _record_valid(self, key: int, name: str, verdict: FileCheck) -> None:
        """Record the number of records of a valid file, and that it is complete."""
        kind, row = record_kind(name), self._table[key]
        flags = row.flags
        if kind in ("lines", "table"):
            if flags & LACKS_NEWLINE and not flags & TO_COUNT and row.records >= 0:
                self._put_flags(key, flags & ~LACKS_NEWLINE)
                found = row.records + 1 if verdict.records is None else verdict.records
                self._set_records(key, found)
        elif verdict.records is not None:
            self._set_records(key, verdict.records)
        elif kind == "array":
            self._schedule_count(key, name)
        else:
            self._set_records(key, -1)
        if flags & REPORTED or not flags & WRITTEN or (verdict.format in GROWING_FORMATS and not flags & RENAMED):
            return
        self._put_flags(key, self._table[key].flags | REPORTED)
        if sum(totals.files for totals in self._folder.totals.values()) <= FEW_FILES:
            self._finished_count += 1
            self._finished.append(FinishedFile(self._finished_count, row.mtime, printable(name), row.size))


class _TellingFiles:
    """Files of the first pass that show best whether something is wrong: large ones, and one of each owner and kind.

    The newest files are read at every poll, and checked before these.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, str], tuple[int, str]] = {}
        self._largest: list[tuple[int, int, str]] = []  # heap

    def add(self, key: int, name: str, row: FileRow) -> None:
        kind = (row.owner, os.path.splitext(name)[1])
        if kind not in self._kinds and len(self._kinds) < MOST_KINDS:
            self._kinds[kind] = (key, name)
        entry = (row.size, key, name)
        if len(self._largest) < TELLING:
            heapq.heappush(self._largest, entry)
        elif entry > self._largest[0]:
            heapq.heapreplace(self._largest, entry)

    def files(self) -> list[tuple[int, str]]:
        """Keys and names, the most telling at the end."""
        return [*((key, name) for _, key, name in sorted(self._largest)), *self._kinds.values()]
