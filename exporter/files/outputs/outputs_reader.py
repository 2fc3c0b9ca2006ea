"""Files that a job writes: how many, how large, how they change, the records in them, and whether they are whole.

A watch may live in another process: what it is made from and what it gives can be pickled.
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

from exporter.files.formats import FileCheck, NotRegularFile, check_file, open_source
from exporter.files.formats.record_count import ArrayItemCounter, LineCounter
from exporter.files.formats.source import printable
from exporter.files.outputs.csv_reader import is_sidecar_csv
from exporter.files.outputs.folder_reader import NOBODY, FileChange, FileTotals, FolderListener, FolderWatch

SETTLED_S = 10.0  # a file that is unchanged for so long,
SETTLED_LOOKS = 2  # and at so many looks, is looked into
AGAIN_S = 10.0
"""A damaged one is looked into again after so long before it is said: it may be in the middle of being written."""
CHECKS, CHECK_S = 8, 0.05  # files looked into at one look, and time for them
COUNT_BYTES, COUNT_S = 32 << 20, 0.1  # text in which records are counted at one look, and time for that
PIECE_BYTES = 4 << 20
HOLE_S = 60.0  # so long lines are not counted beyond a NUL byte: network file systems may write what comes later first
CLOCK_SLACK_S = 60.0
"""The clock of a file server may be so far behind ours: what was written so long before the job's start is its own."""
FOUND = 512
INVALID_TOLD = 20
MOST_INVALID = 1000  # damaged files after which no others are looked for
FEW_FILES = 50  # up to so many files it is told of each that it is complete

LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
ARRAYS = (".json",)
ROWS = (".parquet", ".arrow", ".feather", ".ipc", ".h5", ".hdf5", ".npy")
"""Files whose headers and footers tell how many records there are."""
GROWING = frozenset(("jsonl", "csv"))
"""Formats of files that are whole after each line: only a name that it gets in the end tells that one is complete."""

TO_COUNT, TO_CHECK, AWAITED, NEWS, PLACED, SAID, LACKS_NEWLINE = (1 << place for place in range(7))
"""What is to be done with a file: count in it, look into it, which the number of all records waits for; and what is
known of it: that it was written since we look, that it was renamed into place, that it was said to be complete, that
text follows its last counted line."""
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


@dataclass(frozen=True)
class FileOwnership:
    """Whose a file is by its name: the rank of one of our workers, ``NOBODY``, or None when we do not answer for it."""

    rank_of: Callable[[str], int | None]
    ours: frozenset[int]
    others: frozenset[int]
    rest: bool  # whether we answer for files that carry no worker's number
    own_rank_of: Callable[[str], int | None] | None = None
    """The rank by such words alone as name a worker, and no part of the output that any of them may write."""
    local: bool = False  # whether nobody else sees the files: then we answer for all

    def __call__(self, name: str) -> int | None:
        rank = self.rank_of(name)
        if rank is not None and rank in self.ours:
            return rank
        return NOBODY if self.local or (self.rest and rank not in self.others) else None

    def names_worker(self, name: str) -> bool:
        """Whether a file of one of our workers is written by nobody but that one."""
        return self.own_rank_of is None or self.own_rank_of(name) == self.rank_of(name)

    def is_beyond(self, name: str) -> bool:
        """Whether a name has the number of a worker that there is not: such numbers count something else."""
        rank = self.rank_of(name)
        return rank is not None and rank not in self.ours and rank not in self.others


class OwnedOutput(NamedTuple):
    """Files of one owner; times in epoch seconds, ``changed_at`` by our own clock, the others by the files'."""

    files: int
    bytes: int
    newest: float | None  # when the last of them was written
    records: int | None  # none where none can be counted, or not all have been yet
    changed_at: float | None
    """When one was last found new or changed; None when that has not happened since the first look."""
    born_bytes: int  # sizes of the files that have appeared since the first look, as they were found,
    born_mtime: float | None  # and the latest of their times
    of_worker: bool  # whether it is the one who writes them all, as far as names tell


class InvalidFile(NamedTuple):
    """A damaged file; its name and the reason as text that can be shown."""

    file: str
    format: str | None
    reason: str


class FinishedFile(NamedTuple):
    """A file that is complete: renamed into place, or whole in a format that is written at once."""

    number: int
    time: float
    file: str
    bytes: int


class OutputReading(NamedTuple):
    """What there is, and what one look has found."""

    watch: int  # another number when it begins anew, in another process
    complete: bool  # whether every file has been looked at once
    owners: Mapping[int, OwnedOutput]
    changes: tuple[FileChange, ...]
    first: tuple[float, str] | None
    """When the first file since the start of the job was written, as far as is known, and its name."""
    valid: int  # files that have been looked into and found whole
    invalid: tuple[InvalidFile, ...]  # damaged ones, the latest; of many some
    invalid_files: int
    finished: tuple[FinishedFile, ...]  # the last files that have become complete, in order
    passed_over: tuple[tuple[str, str], ...]
    """Names like those of the files that are of something else, and what that is; of many some."""
    unreadable: str | None  # why facts of some files are not known


class _SuspectedDamage(NamedTuple):
    """A file that looked damaged."""

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
        """``since``: when the job started, where that is known; files that were written before are not its own.

        ``gpu_metrics``: whether sidecars write ``gpu_metrics.csv`` there, which is none of the job's files.
        """
        self._folder = FolderWatch(directory, pattern, self._owner, self)
        self._owner_of = owner_of
        self._gpu_metrics = gpu_metrics
        self._parts: set[int] = set()
        """Owners who have files that others may write as well."""
        self._beyond = False
        """Whether any file has a number that is no worker's."""
        self._since = since
        self._watch = time.monotonic_ns() ^ os.getpid() << 48
        self._flags = bytearray()
        self._records = array("q")
        """By slot; -1 where they are not known."""
        self._sums: dict[int, list[int]] = {}
        """Files that are counted and records in them, by owner."""
        self._uncounted = 0
        self._awaited = 0
        self._counted_all = False
        self._counts: dict[int, LineCounter | ArrayItemCounter] = {}
        self._holes: dict[int, tuple[int, float]] = {}
        """Where the count of a file has stopped before a NUL byte, and since when."""
        self._due: dict[int, None] = {}
        """Files to count next: those that have just changed."""
        self._count_from = 0
        """Where to look for others."""
        self._to_check: list[int] = []
        """Some files to look into that are not looked at each time, those that were written last at the end."""
        self._all_checked = False
        """Whether there are no others."""
        self._doubts: dict[int, _SuspectedDamage] = {}
        self._invalid: dict[int, InvalidFile] = {}
        self._valid = 0
        self._finished: deque[FinishedFile] = deque(maxlen=FEW_FILES)
        self._numbers = 0
        self._first: tuple[float, str] | None = None
        self._complete_since: tuple[float, int] | None = None

    def look(self, now: float) -> OutputReading:
        """What there is now; raises OSError when the directory cannot be read."""
        folder = self._folder
        folder.look(now)
        if folder.complete and self._complete_since is None:
            self._begin(now)
        if self._complete_since is not None:
            self._count(now)
            self._check(now)
            if not self._uncounted and not self._awaited:
                self._counted_all = True
        return OutputReading(
            watch=self._watch,
            complete=folder.complete,
            owners={owner: self._owned(owner, totals) for owner, totals in folder.totals.items()},
            changes=tuple(folder.changes),
            first=self._first,
            valid=self._valid,
            invalid=tuple(self._invalid.values())[-INVALID_TOLD:],
            invalid_files=len(self._invalid),
            finished=tuple(self._finished),
            passed_over=tuple((printable(name), kind) for name, kind in folder.passed_over.items()),
            unreadable=folder.unreadable,
        )

    def _owned(self, owner: int, totals: FileTotals) -> OwnedOutput:
        counted, records = self._sums.get(owner, (0, 0))
        return OwnedOutput(
            files=totals.files,
            bytes=totals.bytes,
            newest=totals.newest,
            records=records if counted and self._counted_all else None,
            changed_at=totals.changed_at,
            born_bytes=totals.born_bytes,
            born_mtime=totals.born_mtime,
            of_worker=owner != NOBODY and owner not in self._parts and not self._beyond,
        )

    def _owner(self, name: str) -> int | None:
        """Whose a file is; notes what its name tells of the others."""
        if self._gpu_metrics and is_sidecar_csv(name):
            return None
        owner = self._owner_of(name)
        if owner is None or owner == NOBODY:
            self._beyond = self._beyond or self._owner_of.is_beyond(name)
        elif owner not in self._parts and not self._owner_of.names_worker(name):
            self._parts.add(owner)
        return owner

    def _begin(self, now: float) -> None:
        """Everything has been looked at once: note what is to be done with what was there."""
        self._complete_since = (now, self._folder.looks)
        for slot, flags in enumerate(self._flags):
            if not flags & TO_CHECK:
                continue
            if self._kind(slot) in ("array", "rows"):
                self._flags[slot] |= AWAITED
                self._awaited += 1
            mtime = self._folder.mtimes[slot]
            if self._since is not None and mtime >= self._since - CLOCK_SLACK_S:
                mtime = max(mtime, self._since)
                if self._first is None or mtime < self._first[0]:
                    self._first = (mtime, printable(self._folder.names[slot] or ""))

    # What the folder tells.

    def added(self, slot: int) -> None:
        while len(self._flags) <= slot:
            self._flags.append(0)
            self._records.append(-1)
        self._flags[slot] = TO_CHECK
        self._all_checked = False
        self._want_count(slot)
        self._note_news(slot)

    def changed(self, slot: int) -> None:
        self._end_wait(slot)
        self._flags[slot] = self._flags[slot] & (SAID | TO_COUNT) | TO_CHECK
        self._doubts.pop(slot, None)
        self._invalid.pop(slot, None)
        self._want_count(slot)
        self._note_news(slot)

    def removed(self, slot: int) -> None:
        self._end_wait(slot)
        self._done_counting(slot)
        self._set_records(slot, -1)
        self._flags[slot] = 0
        self._counts.pop(slot, None)
        self._holes.pop(slot, None)
        self._doubts.pop(slot, None)
        self._invalid.pop(slot, None)

    def moved(self, old: int, new: int) -> None:
        self._flags[new] |= self._flags[old] & SAID
        if self._kind(new) == self._kind(old):
            count = self._counts.pop(old, None)
            if count is not None:
                self._counts[new] = count
            if old in self._holes:
                self._holes[new] = self._holes.pop(old)
            self._set_records(new, self._records[old])

    def placed(self, slot: int) -> None:
        self._flags[slot] |= PLACED

    def cooled(self, slot: int) -> None:
        self._all_checked = False
        self._due.pop(slot, None)
        if not self._flags[slot] & TO_COUNT and slot not in self._holes:
            self._counts.pop(slot, None)

    def _note_news(self, slot: int) -> None:
        if self._complete_since is None:
            return
        self._flags[slot] |= NEWS
        if self._first is None:
            mtime = self._folder.mtimes[slot]
            self._first = (max(mtime, self._since or mtime), printable(self._folder.names[slot] or ""))

    # Records.

    def _kind(self, slot: int) -> str | None:
        """How records of a file are counted, by its name."""
        name = (self._folder.names[slot] or "").lower()
        if name.endswith(LINES):
            return "lines"
        if name.endswith(TABLES):
            return "table"
        if name.endswith(ARRAYS):
            return "array"
        return "rows" if name.endswith(ROWS) else None

    def _want_count(self, slot: int) -> None:
        """Count a file of lines soon; others are counted once they are settled."""
        if self._kind(slot) in ("lines", "table"):
            self._need_count(slot)
        else:
            self._counts.pop(slot, None)
            self._done_counting(slot)

    def _need_count(self, slot: int) -> None:
        if not self._flags[slot] & TO_COUNT:
            self._flags[slot] |= TO_COUNT
            self._uncounted += 1
        if self._complete_since is not None:
            self._due[slot] = None

    def _done_counting(self, slot: int) -> None:
        if self._flags[slot] & TO_COUNT:
            self._flags[slot] &= ~TO_COUNT
            self._uncounted -= 1
        self._due.pop(slot, None)

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
        """Count on, those first that have just changed."""
        until, left = time.monotonic() + COUNT_S, COUNT_BYTES
        for slot, (_, since) in self._holes.items():
            count = self._counts.get(slot)
            if isinstance(count, LineCounter) and not 0 <= now - since < HOLE_S:
                count.pass_hole(self._folder.sizes[slot])
            self._need_count(slot)
        for slot in list(self._due):
            if left <= 0 or time.monotonic() > until:
                return
            left -= self._count_on(slot, left, until, now)
            if self._flags[slot] & TO_COUNT:  # there is more: the others have their turn first
                self._due[slot] = self._due.pop(slot, None)
        for _ in range(len(self._flags) if self._uncounted else 0):
            if not self._uncounted or left <= 0 or time.monotonic() > until:
                return
            if self._count_from >= len(self._flags):
                self._count_from = 0
            if self._flags[self._count_from] & TO_COUNT:
                left -= self._count_on(self._count_from, left, until, now)
            if not self._flags[self._count_from] & TO_COUNT:
                self._count_from += 1

    def _count_on(self, slot: int, most_bytes: int, until: float, now: float) -> int:
        """Count on in one file; how many bytes that was."""
        kind, count = self._kind(slot), self._counts.get(slot)
        if count is None:
            count = ArrayItemCounter() if kind == "array" else LineCounter(csv=kind == "table", waits=True)
        path, done, more = os.path.join(self._folder.directory, self._folder.names[slot] or ""), 0, True
        try:
            fd = os.open(path, OPEN)
            try:
                facts = os.fstat(fd)
                while stat.S_ISREG(facts.st_mode) and more and done < most_bytes and time.monotonic() <= until:
                    before = count.position
                    more = count.advance(fd, facts.st_size, min(PIECE_BYTES, most_bytes - done))
                    done += count.position - before if count.position > before else count.position
            finally:
                os.close(fd)
        except OSError:
            self._done_counting(slot)  # until it changes
            self._holes.pop(slot, None)
            self._set_records(slot, -1)
            return done
        self._note_hole(slot, count, now)
        if more or slot in self._folder.hot or slot in self._holes:
            self._counts[slot] = count
        if not more:
            self._done_counting(slot)
        if not more or isinstance(count, LineCounter):
            self._counted(slot, count)
        return done

    def _note_hole(self, slot: int, count: LineCounter | ArrayItemCounter, now: float) -> None:
        """Note since when a count has stood before the same NUL byte."""
        if not isinstance(count, LineCounter) or not count.hole:
            self._holes.pop(slot, None)
        elif slot not in self._holes or self._holes[slot][0] != count.position:
            self._holes[slot] = (count.position, now)

    def _counted(self, slot: int, count: LineCounter | ArrayItemCounter) -> None:
        if isinstance(count, ArrayItemCounter):
            items = count.items if count.complete else None
            self._set_records(slot, -1 if items is None else items)
            self._counts.pop(slot, None)
            return
        self._set_records(slot, count.records)
        self._flags[slot] &= ~LACKS_NEWLINE
        if count.unfinished:
            self._flags[slot] |= LACKS_NEWLINE

    # Whether files are whole.

    def _check(self, now: float) -> None:
        """Look into some files that nobody seems to write to: doubtful ones, then those that were written last."""
        until, done = time.monotonic() + CHECK_S, 0
        for slot in list(self._invalid)[-INVALID_TOLD:]:
            self._folder.refresh(slot, now)  # it may have been written again
        if len(self._invalid) >= MOST_INVALID:
            return
        doubtful = [slot for slot, doubt in self._doubts.items() if not 0 <= now - doubt.time < AGAIN_S]
        for slot in (*doubtful, *self._settled(now)):
            if done >= CHECKS or time.monotonic() > until:
                return
            done += self._look_into(slot, now)
        if self._complete_since is None or not self._is_settled(*self._complete_since, now):
            return
        if not self._to_check and not self._all_checked:
            self._find_to_check()
        while self._to_check and done < CHECKS and time.monotonic() <= until:
            slot = self._to_check.pop()
            if slot not in self._folder.hot and slot not in self._doubts:
                done += self._look_into(slot, now)

    def _find_to_check(self) -> None:
        """Find the files to look into next, those that were written last."""
        hot, doubts = self._folder.hot, self._doubts
        left = (
            slot
            for slot, flags in enumerate(self._flags)
            if flags & TO_CHECK and slot not in hot and slot not in doubts
        )
        self._to_check = heapq.nlargest(FOUND, left, key=self._folder.mtimes.__getitem__)[::-1]
        self._all_checked = not self._to_check

    def _is_settled(self, since: float, look: int, now: float) -> bool:
        return not 0 <= now - since < SETTLED_S and self._folder.looks - look >= SETTLED_LOOKS

    def _settled(self, now: float) -> list[int]:
        """Files that were lately written and seem to be done, those that changed last first."""
        found = []
        for slot in reversed(self._folder.hot):
            if self._flags[slot] & TO_CHECK and slot not in self._doubts:
                hot = self._folder.hot[slot]
                if self._is_settled(hot.since, hot.look, now):
                    found.append(slot)
                    if len(found) == CHECKS:
                        break
        return found

    def _look_into(self, slot: int, now: float) -> bool:
        """Whether a file was looked into: one that has changed meanwhile, or was done already, was not."""
        folder = self._folder
        if not self._flags[slot] & TO_CHECK or not folder.refresh(slot, now):
            return False
        name, size, mtime = folder.names[slot] or "", folder.sizes[slot], folder.mtimes[slot]
        try:
            with open_source(folder.directory, name) as source:
                verdict = check_file(source)
        except NotRegularFile as error:
            verdict = FileCheck("unknown", None, str(error))
        if not folder.refresh(slot, now):
            return True  # it was written while we looked
        if verdict.state == "invalid":
            doubt = self._doubts.get(slot)
            if doubt is None or (doubt.size, doubt.mtime) != (size, mtime):
                self._doubts[slot] = _SuspectedDamage(now, size, mtime)
                return True
            self._invalid[slot] = InvalidFile(
                printable(name), verdict.format, printable(verdict.reason or "is damaged")
            )
        self._doubts.pop(slot, None)
        self._end_wait(slot)
        self._flags[slot] &= ~TO_CHECK
        if verdict.state == "valid":
            self._valid += 1
            self._note_valid(slot, verdict)
        elif self._kind(slot) not in ("lines", "table"):
            known = self._kind(slot) is not None or self._records[slot] >= 0
            self._set_records(slot, 0 if verdict.state == "empty" and known else -1)
        return True

    def _note_valid(self, slot: int, verdict: FileCheck) -> None:
        """What a whole file tells besides: its records, and that it is complete."""
        kind, flags = self._kind(slot), self._flags[slot]
        if kind in ("lines", "table"):
            if flags & LACKS_NEWLINE and not flags & TO_COUNT and self._records[slot] >= 0:
                self._flags[slot] &= ~LACKS_NEWLINE
                found = self._records[slot] + 1 if verdict.records is None else verdict.records
                self._set_records(slot, found)
        elif verdict.records is not None:
            self._set_records(slot, verdict.records)
        elif kind == "array":
            self._need_count(slot)
        else:
            self._set_records(slot, -1)
        if flags & SAID or not flags & NEWS or (verdict.format in GROWING and not flags & PLACED):
            return
        self._flags[slot] |= SAID
        if sum(totals.files for totals in self._folder.totals.values()) <= FEW_FILES:
            self._numbers += 1
            name = printable(self._folder.names[slot] or "")
            self._finished.append(
                FinishedFile(self._numbers, self._folder.mtimes[slot], name, self._folder.sizes[slot])
            )
