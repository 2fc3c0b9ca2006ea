"""Outputs, last checkpoint, and logged benchmark results of a job that has ended.

Each is a watch of ``exporter.machine.file_host``. It works in short slices: it may hang with a file server, and can
be abandoned at any time.
"""

import copy
import errno
import hashlib
import heapq
import operator
import os
import re
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import field
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.status import DamagedFile
from exporter.contract.worker_names import rank_in_file_name
from exporter.files.checkpoints.checkpoints_reader import CheckpointWatch
from exporter.files.checkpoints.entries import CheckpointEntry, CheckpointFile
from exporter.files.checkpoints.names import is_sharded, original_key, parse_name
from exporter.files.checkpoints.parts_reader import check_entry
from exporter.files.checkpoints.sets import Checkpoint, save_times
from exporter.files.checkpoints.tracker import CheckpointTracker
from exporter.files.formats import FileCheck, check_file
from exporter.files.formats.record_count import ArrayItemCounter, LineCounter, RecordKind, record_kind
from exporter.files.formats.source import OPEN_FLAGS, NotRegularFile, open_source, printable
from exporter.files.outputs.csv_reader import is_sidecar_csv
from exporter.machine.folders import name_matcher
from launcher.verify.tokens import (
    NO_TOKENS,
    RESULT_BYTES,
    TokenCounts,
    add_token_counts,
    count_tokens,
    count_tokens_in_log,
    result_text,
)

SLICE_S = 0.3  # length of one slice
MOST_FLAWS = 1000  # damaged files kept by name
PIECE_BYTES = 4 << 20  # bytes counted or hashed between two pauses
MOST_HELD = 8192  # files kept in memory besides the telling ones, the newest; another pass brings the others
TELLING = 64  # newest, largest and smallest files that are read before the others
MOST_KINDS = 4096  # so are the newest of each worker and extension, up to this many
MOST_CHECKPOINTS = 16  # checkpoints tried in search of a valid one
KINDS_BY_FORMAT: Mapping[str | None, RecordKind] = {"jsonl": "lines", "csv": "table", "json": "array"}
EMPTY_JSON = (b"{}", b"null", b'""')  # JSON texts without records, besides an empty array

# Errors of a file server that may recover soon.
TRANSIENT = frozenset((
    errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNREFUSED,
    errno.EREMOTEIO, errno.ESHUTDOWN, errno.EAGAIN, errno.EINTR,
))  # fmt: skip
PAUSES, PAUSE_S = 10, 0.1  # pauses before a retry, and their length: 1 s in all
MOST_RETRIES = 20  # retries in all, over all files

_NOT_OUTPUT = re.compile(
    r"(?:^|[-_.])_?SUCCESS$|\.(?:lock|lck|done|pid|swp|crc|part|partial|incomplete|inprogress)$"
    r"|\.te?mp(?:[-_.][A-Za-z0-9]{1,32})?$|~$",
    re.IGNORECASE,
)  # locks, markers and temporary files that programs write next to their output


@dataclass
class VerifiedFiles:
    """What has been found so far in the files of one kind."""

    done: bool = False  # whether all checks are finished
    files: int = 0  # files to check, as far as known
    checked: int = 0  # files checked


class _OutputFile(NamedTuple):
    mtime: float
    name: str
    size: int
    rank: int | None  # owner by file name, if unambiguous
    is_older: bool


@dataclass
class VerifiedOutput(VerifiedFiles):
    """State of the output files."""

    listed: bool = False  # whether all files are known
    bytes: int = 0
    older: int = 0  # files older than the job, not counted elsewhere unless it resumes
    written: int = 0  # files written since the start of the job
    owners: Counter[int] = field(default_factory=Counter)  # files by rank, where names identify it unambiguously
    valid: int = 0
    unknown: int = 0  # of unknown format
    undecided: int = 0  # of a format that does not show damage
    empty: int = 0
    damaged: int = 0
    unreadable: int = 0
    unreadable_reason: str | None = None  # error of the first unreadable file
    empty_files: list[DamagedFile] = field(default_factory=list)
    flaws: list[DamagedFile] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)  # of the valid files
    records: int = 0
    counted: int = 0  # files whose records were counted
    uncounted: int = 0  # files without countable records
    tokens: TokenCounts = NO_TOKENS  # tokens according to benchmark results in the files
    without_tokens: list[DamagedFile] = field(default_factory=list)  # results that should have tokens and have none
    sums: list[tuple[str, str]] = field(default_factory=list)  # name and SHA-256 of files hashed since the last call

    def count(self, file: _OutputFile, times: int = 1) -> None:
        """Count one file, or uncount it with -1."""
        self.files += times
        self.bytes += times * file.size
        if file.is_older:
            self.older += times
        else:
            self.written += times
        if file.rank is not None:
            self.owners[file.rank] += times

    def take_counts(self, other: "VerifiedOutput") -> None:
        """Take over what another pass has counted."""
        self.files, self.bytes, self.older, self.written = other.files, other.bytes, other.older, other.written
        self.owners = other.owners


class CheckedCheckpoint(NamedTuple):
    """One checkpoint with the judgement of all its files."""

    checkpoint: Checkpoint
    entries: tuple[CheckpointEntry, ...]

    @property
    def flaws(self) -> list[DamagedFile]:
        """What is damaged or missing."""
        missing = [DamagedFile(printable(name), None, "is missing") for name in self.checkpoint.missing]
        return [*missing, *chain.from_iterable(entry.damaged for entry in self.entries)]

    @property
    def is_damaged(self) -> bool:
        """Whether it is surely not whole."""
        return self.checkpoint.state in ("incomplete", "invalid")


@dataclass
class VerifiedCheckpoint(VerifiedFiles):
    """The last checkpoint of the job."""

    last: CheckedCheckpoint | None = None
    undamaged: CheckedCheckpoint | None = None  # the newest that is not damaged
    # The newest that is whole, if it was searched for; otherwise ``undamaged``, or one before it that lacks no files.
    resume: CheckedCheckpoint | None = None


@dataclass
class VerifiedLogs(VerifiedFiles):
    """Benchmark results at the end of the logs."""

    tokens: TokenCounts = NO_TOKENS
    without_tokens: list[DamagedFile] = field(default_factory=list)


Facts = TypeVar("Facts", bound=VerifiedFiles)


class SlicedWork(Generic[Facts]):
    """Work that runs in slices, and notes what it finds in ``_found``."""

    def __init__(self, kind: type[Facts]) -> None:
        self._kind = kind
        self._found = kind()
        self._steps: Iterator[None] | None = None

    def poll(self, _now: float) -> Facts:
        """Run one slice and return the facts so far.

        Raises OSError if the directory cannot be read; the next call then starts over.
        """
        end = time.monotonic() + SLICE_S
        if self._steps is None:
            self._found = self._kind()
            self._steps = self._work()
        try:
            for _ in self._steps:
                if time.monotonic() >= end:
                    return self._snapshot()
        except OSError:
            self._steps = None
            raise
        self._found.done = True
        return self._snapshot()

    def _snapshot(self) -> Facts:
        """Return a copy, since the work may go on while it is read."""
        taken = copy.copy(self._found)
        for name, value in vars(taken).items():
            if isinstance(value, list | Counter):
                setattr(taken, name, value.copy())
        return taken

    def _work(self) -> Iterator[None]:
        """Do the work, and yield wherever it may be interrupted."""
        raise NotImplementedError


class OutputFiles(SlicedWork[VerifiedOutput]):
    """Regular files directly in a directory whose names match a glob, the most telling first, then the newest.

    Locks, markers and temporary files are left out, unless the glob asks for such names.
    """

    def __init__(
        self,
        directory: str,
        pattern: str,
        since: float,
        ranks: Mapping[tuple[str, int], int],
        *,
        resumes: bool = False,
        counts_records: bool = True,
        checksums: bool = False,
        has_gpu_metrics: bool = False,
        suspected: Collection[str] = (),
        called: str | None = None,
    ) -> None:
        """``since`` is the start of the job in epoch seconds. Older files count only if it ``resumes``.

        Files that a sidecar has ``suspected`` of damage are read first; their names are printable.

        ``ranks``, by role and index, identify the owner of a file by its name. With ``has_gpu_metrics`` the sidecars
        wrote ``gpu_metrics.csv`` there; it is not an output. A file that is ``called`` otherwise has the format of that
        name.
        """
        super().__init__(VerifiedOutput)
        self._directory, self._since, self._ranks = directory, since, dict(ranks)
        self._matches, self._wants_markers = name_matcher(pattern), _NOT_OUTPUT.search(pattern) is not None
        self._resumes, self._counts_records, self._checksums = resumes, counts_records, checksums
        self._has_gpu_metrics, self._called = has_gpu_metrics, called
        self._suspected = frozenset(suspected)
        self._retries_left = MOST_RETRIES
        self._recounted = VerifiedOutput()  # files in the order of their reading, as far as they still exist

    def poll(self, now: float) -> VerifiedOutput:
        """Run one slice. Each checksum is given once: there may be many."""
        facts = super().poll(now)
        self._found.sums.clear()
        return facts

    def _work(self) -> Iterator[None]:
        self._retries_left, self._recounted = MOST_RETRIES, VerifiedOutput()
        held: list[_OutputFile] = []
        for file in self._list(self._found):
            yield
            if file is not None:
                held.append(file)
                if len(held) >= 4 * MOST_HELD:
                    held = _most_telling(held, self._suspected)
        held = _most_telling(held, self._suspected)
        self._found.listed = True
        has_others = len(held) < self._found.files
        for file in held:
            self._recounted.count(file)
        for file in held:
            yield from self._check_file(file)
        known = frozenset(file.name for file in held) if has_others else frozenset()
        if has_others:
            for file in self._list(self._recounted, known):
                yield
                if file is not None:
                    yield from self._check_file(file)
            self._found.take_counts(self._recounted)  # files may have come and gone since the first pass
        if self._checksums:
            others = self._list(VerifiedOutput(), known) if has_others else ()
            for file in chain(held, others):
                yield
                if file is not None:
                    yield from self._hash_file(file.name)

    def _list(self, found: VerifiedOutput, known: Collection[str] = ()) -> Iterator[_OutputFile | None]:
        """Yield every name of the directory, as a file that counts in ``found`` or None, without ``known`` names."""
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    is_new = self._is_output(entry.name) and entry.name not in known
                    yield self._read_entry(entry, found) if is_new else None
        except (FileNotFoundError, NotADirectoryError):
            return  # no directory, no files

    def _is_output(self, name: str) -> bool:
        """Whether a name matches the glob, and not as a file that programs write next to their output."""
        if not self._matches(name) or (self._has_gpu_metrics and is_sidecar_csv(name)):
            return False
        return self._wants_markers or _NOT_OUTPUT.search(name) is None

    def _read_entry(self, entry: "os.DirEntry[str]", found: VerifiedOutput) -> _OutputFile | None:
        """Count one file; None if it does not count."""
        try:
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(facts.st_mode):
            return None
        is_older = facts.st_mtime < self._since
        if is_older and not self._resumes:
            found.older += 1
            return None
        rank = rank_in_file_name(entry.name, self._ranks, sure=True)
        file = _OutputFile(facts.st_mtime, entry.name, facts.st_size, rank, is_older)
        found.count(file)
        return file

    def _check_file(self, file: _OutputFile) -> Iterator[None]:
        """Check one file, and count its records and tokens."""
        found, name = self._found, file.name
        while True:
            try:
                with open_source(self._directory, name) as source:
                    source.name = self._called or name
                    verdict = check_file(source)
                    text = result_text(source, verdict)
                    whole = len(text) == source.size
                break
            except NotRegularFile as error:
                if not error.is_unreadable:
                    self._record_removed(file)  # or replaced by something else
                elif error.errno in TRANSIENT and self._retries_left > 0:
                    self._retries_left -= 1
                    yield from _wait_for_file_server()
                    continue
                else:
                    self._record_unreadable(str(error))
                yield
                return
        found.checked += 1
        yield
        flaw = DamagedFile(printable(name), verdict.format, printable(verdict.reason or ""))
        if verdict.state == "empty":
            found.empty += 1
            _append_flaw(found.empty_files, flaw)
        elif verdict.state in ("invalid", "unfinished"):
            found.damaged += 1
            _append_flaw(found.flaws, flaw)
        elif verdict.state == "valid":
            found.valid += 1
            found.formats[verdict.format or "?"] += 1
        elif verdict.format is None:
            found.unknown += 1
        else:
            found.undecided += 1
        if text:
            counts = count_tokens(text, is_json_lines=verdict.format == "jsonl", is_complete=whole)
            _record_tokens(found, counts, name, verdict.format)
        if self._counts_records:
            yield from self._count_records(name, verdict, is_empty=whole and text.strip() in EMPTY_JSON)

    def _record_unreadable(self, reason: str) -> None:
        self._found.checked += 1
        self._found.unreadable += 1
        self._found.uncounted += 1
        self._found.unreadable_reason = self._found.unreadable_reason or printable(reason)

    def _record_removed(self, file: _OutputFile) -> None:
        """Uncount a file that was removed or renamed since it was listed."""
        for found in (self._found, self._recounted):
            found.count(file, -1)

    def _count_records(self, name: str, file_check: FileCheck, *, is_empty: bool) -> Iterator[None]:
        kind, records = record_kind(self._called or name), file_check.records
        if kind not in ("lines", "table"):
            kind = KINDS_BY_FORMAT.get(file_check.format)
        if file_check.state == "empty" or is_empty:
            records = 0
        elif records is None and kind in ("lines", "table"):
            lines = LineCounter(csv=kind == "table")
            if (yield from self._count_to_end(name, lines)):
                # a last line without a newline is a record too
                more = lines.unfinished and file_check.state not in ("invalid", "unfinished")
                records = lines.records + more
        elif records is None and kind == "array" and file_check.state == "valid":
            items = ArrayItemCounter()
            if (yield from self._count_to_end(name, items)) and items.complete:
                records = items.items
        if records is None:
            self._found.uncounted += 1
        else:
            self._found.counted += 1
            self._found.records += records

    def _count_to_end(self, name: str, counter: LineCounter | ArrayItemCounter) -> Generator[None, None, bool]:
        """Count to the end of a file. Returns whether all of it could be read."""
        with _opened(self._directory, name) as fd:
            if fd is not None:
                while counter.advance(fd, os.fstat(fd).st_size, PIECE_BYTES):
                    yield
                return True
        return False

    def _hash_file(self, name: str) -> Iterator[None]:
        digest = hashlib.sha256()
        with _opened(self._directory, name) as fd:
            while fd is not None and (piece := os.read(fd, PIECE_BYTES)):
                digest.update(piece)
                yield
            if fd is not None:
                self._found.sums.append((name, digest.hexdigest()))
        yield


def _telling_files(files: Sequence[_OutputFile], suspected: Collection[str]) -> dict[_OutputFile, None]:
    """Files that show best whether something is wrong, in order; ``files`` has the newest first."""
    suspects = [file for file in files if printable(file.name) in suspected] if suspected else []
    kinds: dict[tuple[int | None, str], _OutputFile] = {}
    for file in files:
        kinds.setdefault((file.rank, os.path.splitext(file.name)[1]), file)
        if len(kinds) >= MOST_KINDS:
            break
    of_size = operator.attrgetter("size")
    extremes = (*heapq.nlargest(TELLING, files, key=of_size), *heapq.nsmallest(TELLING, files, key=of_size))
    return dict.fromkeys((*suspects, *kinds.values(), *files[:TELLING], *extremes))


def _most_telling(files: list[_OutputFile], suspected: Collection[str]) -> list[_OutputFile]:
    """The most telling files, and of the others the newest `MOST_HELD`, in the order in which they are read."""
    files.sort(reverse=True, key=lambda file: (file.mtime, file.name))
    telling = _telling_files(files, suspected)
    return [*telling, *islice((file for file in files if file not in telling), MOST_HELD)]


@contextmanager
def _opened(directory: str, name: str) -> Iterator[int | None]:
    """Open a file as a descriptor, or None if that fails; a failed read ends the context."""
    try:
        fd = os.open(os.path.join(directory, name), OPEN_FLAGS)
    except OSError:
        yield None
        return
    try:
        yield fd
    except OSError:
        pass
    finally:
        os.close(fd)


def _wait_for_file_server() -> Iterator[None]:
    """Wait for a file server to recover."""
    for _ in range(PAUSES):
        time.sleep(PAUSE_S)
        yield


def _append_flaw(flaws: list[DamagedFile], flaw: DamagedFile) -> None:
    if len(flaws) < MOST_FLAWS:
        flaws.append(flaw)


def _record_tokens(
    found: VerifiedOutput | VerifiedLogs, counts: TokenCounts, name: str, file_format: str | None
) -> None:
    """Add the tokens that one file reports."""
    found.tokens = add_token_counts(found.tokens, counts)
    if counts.failure_text is not None:
        _append_flaw(found.without_tokens, DamagedFile(printable(name), file_format, counts.failure_text))


# Logs


class LogResults(SlicedWork[VerifiedLogs]):
    """Benchmark results printed at the end of logs."""

    def __init__(self, run_dir: str, paths: Collection[str]) -> None:
        """Search these logs; missing files are skipped. ``run_dir`` is the directory that contains them."""
        super().__init__(VerifiedLogs)
        self._paths = tuple(paths)

    def _work(self) -> Iterator[None]:
        self._found.files = len(self._paths)
        for path in self._paths:
            folder, name = os.path.split(path)
            text, before = b"", 0
            with _opened(folder, name) as fd:
                if fd is not None and stat.S_ISREG(os.fstat(fd).st_mode):
                    before = max(0, os.fstat(fd).st_size - RESULT_BYTES)
                    text = os.pread(fd, RESULT_BYTES, before)
            self._found.checked += 1
            _record_tokens(self._found, count_tokens_in_log(text, is_complete=not before), name, None)
            yield


# Checkpoints


class LastCheckpoint(SlicedWork[VerifiedCheckpoint]):
    """The newest checkpoint of the job and, if that is damaged, the newest one that is not."""

    def __init__(
        self,
        directory: str,
        pattern: str,
        since: float,
        *,
        name: str | None = None,
        wants_whole: bool = False,
        without: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        """``since`` is the start of the job in epoch seconds; older checkpoints are ignored.

        ``name`` is a file or directory of the checkpoint to judge instead of the newest one. With ``wants_whole``, a
        checkpoint about which nobody can tell does not end the search. Those of the entries ``without`` are left out.
        Entries of the names ``ignored`` belong to none.
        """
        super().__init__(VerifiedCheckpoint)
        self._directory, self._pattern, self._since = directory, pattern, since
        self._name, self._wants_whole, self._without, self._ignored = name, wants_whole, without, ignored
        self._entries: dict[str, CheckpointEntry] = {}
        self._keys: Mapping[str, str] = {}  # the key of the checkpoint of each entry

    def _work(self) -> Iterator[None]:
        yield from self._list()
        self._keys = self._track(self._entries.values()).keys
        result, without = self._found, {key for name, key in self._keys.items() if name in self._without}
        without |= self._newer_keys()
        for _ in range(MOST_CHECKPOINTS):
            newest = self._newest(without)
            if newest is None:
                return
            found = yield from self._judge(newest, without)
            without.add(newest.key)
            if found is None:
                continue
            result.last = result.last or found
            if not found.is_damaged:
                result.undamaged = result.undamaged or found
                best = result.resume
                if best is None or found.checkpoint.valid or (best.checkpoint.odd and not found.checkpoint.odd):
                    result.resume = found
                if found.checkpoint.valid or not self._wants_whole:
                    return

    def _list(self) -> Iterator[None]:
        watch = CheckpointWatch(self._directory, self._pattern, verify=False)
        self._entries, now, behind = {}, time.time(), True
        while behind:
            snapshot = watch.poll(now)
            for entry in (each for each in snapshot.entries if each.name not in self._ignored):
                is_unnamed = entry.name == self._name and parse_name(entry.bare, entry.is_directory) is None
                self._entries[entry.name] = entry._replace(bare="checkpoint") if is_unnamed else entry
            now, behind = now + 1.0, snapshot.has_unread_names
            yield

    def _newer_keys(self) -> set[str]:
        """Keys of checkpoints that are newer than the one to judge.

        A copy is judged without its original and other copies, and a directory without others of the same number.
        """
        named = self._entries.get(self._name or "")
        if named is None:
            return set()
        own = self._keys.get(named.name, "")
        original = original_key(own)
        family = {key for key in self._keys.values() if original and original in (key, original_key(key))}
        left_out = family - {own}
        if named.is_directory and not is_sharded(named.bare):
            left_out.add(own)
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if entry is named or self._keys.get(name) not in left_out
        }
        self._keys = self._track(self._entries.values()).keys
        own = self._keys.get(named.name, "")
        files: defaultdict[str, list[CheckpointFile]] = defaultdict(list)
        for entry in self._entries.values():
            if (key := self._keys.get(entry.name)) is not None:
                files[key] += entry.files
        saved = save_times(files[own])
        return {key for key, others in files.items() if key != own and others and save_times(others) >= saved}

    def _judge(self, newest: Checkpoint, without: AbstractSet[str]) -> Generator[None, None, CheckedCheckpoint | None]:
        """Check all files of a checkpoint; None if it is being removed."""
        entries = [
            entry
            for entry in self._entries.values()
            if not entry.temporary and self._keys.get(entry.name) == newest.key
        ]
        checked: list[CheckpointEntry] = []
        for entry in entries:
            steps = check_entry(self._directory, entry, self._since)
            while len(checked) < len(entries):
                try:
                    next(steps)
                except StopIteration as end:
                    checked.append(end.value)
                    break
                self._found.checked += 1
                yield
        lost = any(
            len(after.files) < sum(not file.temporary for file in before.files)
            for before, after in zip(entries, checked, strict=True)
        )  # it is being removed
        self._entries.update((entry.name, entry) for entry in checked)
        judged = None if lost else self._newest(without)
        return None if judged is None or judged.key != newest.key else CheckedCheckpoint(judged, tuple(checked))

    def _newest(self, excluded_keys: AbstractSet[str]) -> Checkpoint | None:
        """The newest checkpoint that is neither in ``excluded_keys`` nor a copy of one, as if it had been finished."""
        entries = [
            entry
            for entry in self._entries.values()
            if excluded_keys.isdisjoint((key := self._keys.get(entry.name, ""), original_key(key)))
        ]
        found = self._track(entries).last
        self._found.files = self._found.checked + (0 if found is None else found.files)
        return found

    def _track(self, entries: Collection[CheckpointEntry]) -> CheckpointTracker:
        checkpoints = CheckpointTracker(self._since)
        checkpoints.update(entries, {entry.name for entry in entries}, 0.0, time.time(), workers_ended=True)
        return checkpoints
