"""Outputs, last checkpoint, and logged benchmark results of a job that has ended.

Each is a watch of ``exporter.machine.file_host``. It works in short slices: it may hang with a file server, and can
be abandoned at any time.
"""

import errno
import fnmatch
import hashlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from exporter.contract.worker_names import rank_in_file_name
from exporter.files.checkpoints.checkpoints_reader import CheckpointEntry, CheckpointWatch
from exporter.files.checkpoints.names import parse_name
from exporter.files.checkpoints.sets import Checkpoint
from exporter.files.checkpoints.tracker import CheckpointTracker
from exporter.files.formats import (
    BINARY_FORMATS,
    FileCheck,
    NotRegularFile,
    check_file,
    csv_text,
    json_lines,
    open_source,
)
from exporter.files.formats.record_count import ArrayItemCounter, LineCounter
from exporter.files.formats.source import printable
from exporter.files.outputs.csv_reader import is_sidecar_csv
from launcher.verify.tokens import (
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
MOST_CHECKPOINTS = 16  # checkpoints tried in search of a valid one
SETTLED_S = 1e9  # clock offset at which every checkpoint counts as no longer written
EMPTY_JSON = (b"{}", b"null", b'""')  # JSON texts without records, besides an empty array
OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY

# Errors of a file server that may recover soon.
TRANSIENT = frozenset((
    errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNREFUSED,
    errno.EREMOTEIO, errno.ESHUTDOWN, errno.EAGAIN, errno.EINTR,
))  # fmt: skip
PAUSES, PAUSE_S = 10, 0.1  # pauses before a retry, and their length: 1 s in all
MOST_RETRIES = 20  # retries in all, over all files

FROM_EARLIER_JOB = "left by an earlier job"  # reason for damaged files older than the job
_NOT_OUTPUT = re.compile(
    r"(?:^|[-_.])_?SUCCESS$|\.(?:lock|lck|done|pid|swp|crc|part|partial|incomplete|inprogress)$"
    r"|\.te?mp(?:[-_.][A-Za-z0-9]{1,32})?$|~$",
    re.IGNORECASE,
)  # locks, markers and temporary files that programs write next to their output

Facts = TypeVar("Facts", covariant=True)


class FileFlaw(NamedTuple):
    """A damaged file; its name and the reason are safe to print."""

    file: str
    format: str | None
    reason: str


class VerifiedOutput(NamedTuple):
    """State of the output files, as far as they have been checked."""

    listed: bool  # whether all files are known
    done: bool  # whether all checks are finished
    files: int
    bytes: int
    older: int  # files older than the job, not counted elsewhere unless it resumes
    written: int  # files written since the start of the job
    owners: frozenset[int]  # ranks that file names identify unambiguously
    checked: int  # files checked
    valid: int  # of those, valid
    unknown: int  # of unknown format
    undecided: int  # of a format that does not show damage
    empty: int
    damaged: int  # damaged
    unreadable: int  # files that could not be read
    unreadable_reason: str | None  # error of the first unreadable file
    empty_files: tuple[FileFlaw, ...]
    flaws: tuple[FileFlaw, ...]
    formats: tuple[str, ...]  # formats of the valid files
    records: int
    counted: int  # files whose records were counted
    uncounted: int  # files without countable records
    tokens: TokenCounts  # tokens according to benchmark results in the files
    without_tokens: tuple[FileFlaw, ...]  # results that should have tokens and have none
    hashed: int
    sums: tuple[tuple[str, str], ...]  # name and SHA-256 of the files hashed since the last call


class VerifiedCheckpoint(NamedTuple):
    """The last checkpoint of the job, as far as it has been checked."""

    done: bool
    files: int  # files to check, as far as known
    checked: int  # files checked
    last: Checkpoint | None
    valid: int  # valid files of the last checkpoint
    flaws: tuple[FileFlaw, ...]  # damaged or missing files of the last checkpoint
    damaged: int  # their number
    newest_undamaged: Checkpoint | None  # the newest checkpoint without damage
    uncertain: int = 0  # files of the last checkpoint in doubt, besides those of formats that do not show damage
    uncertain_reason: str | None = None  # why the first of them is in doubt


class VerifiedLogs(NamedTuple):
    """Benchmark results at the end of the logs."""

    done: bool
    files: int
    checked: int
    tokens: TokenCounts
    without_tokens: tuple[FileFlaw, ...]


class _SlicedWork(Generic[Facts]):
    """Work that runs in slices."""

    def __init__(self) -> None:
        self._steps: Iterator[None] | None = None
        self._done = False

    def poll(self, _now: float) -> Facts:
        """Run one slice and return the facts so far.

        Raises OSError if the directory cannot be read; the next call then starts over.
        """
        end = time.monotonic() + SLICE_S
        if self._steps is None:
            self._begin()
            self._steps = self._work()
        try:
            for _ in self._steps:
                if time.monotonic() >= end:
                    return self._facts()
        except OSError:
            self._steps = None
            raise
        self._done = True
        return self._facts()

    def _begin(self) -> None:
        raise NotImplementedError

    def _work(self) -> Iterator[None]:
        """Do the work, and yield wherever it may be interrupted."""
        raise NotImplementedError

    def _facts(self) -> Facts:
        raise NotImplementedError


@dataclass
class _OutputCounts:
    bytes: int = 0
    older: int = 0
    written: int = 0
    checked: int = 0
    valid: int = 0
    unknown: int = 0
    undecided: int = 0
    empty: int = 0
    damaged: int = 0
    records: int = 0
    counted: int = 0
    uncounted: int = 0
    unreadable: int = 0
    unreadable_reason: str | None = None
    removed: int = 0
    hashed: int = 0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    owners: Counter[int] = field(default_factory=Counter)
    empty_files: list[FileFlaw] = field(default_factory=list)
    flaws: list[FileFlaw] = field(default_factory=list)
    without_tokens: list[FileFlaw] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)


def _record_format(name: str, file_check: FileCheck) -> str | None:
    """Whether records are JSON lines or CSV rows: by file name, else by format. None for neither."""
    if name.lower().endswith(json_lines.EXTENSIONS):
        return "jsonl"
    if name.lower().endswith(csv_text.EXTENSIONS):
        return "csv"
    return file_check.format if file_check.format in ("jsonl", "csv") else None


class _OutputFile(NamedTuple):
    mtime: float
    name: str
    size: int
    rank: int | None  # owner by file name, if unambiguous
    is_older: bool


class OutputFiles(_SlicedWork[VerifiedOutput]):
    """Regular files directly in a directory whose names match a glob, newest first.

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
    ) -> None:
        """``since`` is the start of the job in epoch seconds. Older files count only if it ``resumes``.

        ``ranks``, by role and index, identify the owner of a file by its name. With ``has_gpu_metrics`` the sidecars
        wrote ``gpu_metrics.csv`` there; it is not an output.
        """
        super().__init__()
        self._directory, self._pattern, self._since, self._ranks = directory, pattern, since, dict(ranks)
        self._resumes, self._counts_records, self._checksums = resumes, counts_records, checksums
        self._has_gpu_metrics = has_gpu_metrics
        self._begin()

    def _begin(self) -> None:
        self._listed = False
        self._files: list[_OutputFile] = []
        self._found = _OutputCounts()
        self._sums: list[tuple[str, str]] = []
        self._retries_left = MOST_RETRIES

    def _facts(self) -> VerifiedOutput:
        found, sums = self._found, tuple(self._sums)
        self._sums.clear()
        return VerifiedOutput(
            listed=self._listed,
            done=self._done,
            files=len(self._files) - found.removed,
            bytes=found.bytes,
            older=found.older,
            written=found.written,
            owners=frozenset(+found.owners),
            checked=found.checked,
            valid=found.valid,
            unknown=found.unknown,
            undecided=found.undecided,
            empty=found.empty,
            damaged=found.damaged,
            unreadable=found.unreadable,
            unreadable_reason=found.unreadable_reason,
            empty_files=tuple(found.empty_files),
            flaws=tuple(found.flaws),
            formats=tuple(name for name, _ in found.formats.most_common()),
            records=found.records,
            counted=found.counted,
            uncounted=found.uncounted,
            tokens=found.tokens,
            without_tokens=tuple(found.without_tokens),
            hashed=found.hashed,
            sums=sums,
        )

    def _work(self) -> Iterator[None]:
        yield from self._list()
        for file in self._files:
            yield from self._check_file(file)
        for file in self._files if self._checksums else ():
            yield from self._hash_file(file.name)

    def _list(self) -> Iterator[None]:
        hidden = self._pattern.startswith(".")
        matches = re.compile(fnmatch.translate(self._pattern)).match
        leaves_out = None if _NOT_OUTPUT.search(self._pattern) else _NOT_OUTPUT.search
        found = self._found
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    yield
                    name = entry.name
                    if (name.startswith(".") and not hidden) or matches(name) is None:
                        continue
                    if leaves_out is not None and leaves_out(name) is not None:
                        continue
                    if self._has_gpu_metrics and is_sidecar_csv(name):
                        continue
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if not stat.S_ISREG(facts.st_mode):
                        continue
                    older = facts.st_mtime < self._since
                    if older:
                        found.older += 1
                        if not self._resumes:
                            continue
                    else:
                        found.written += 1
                    found.bytes += facts.st_size
                    rank = rank_in_file_name(name, self._ranks, sure=True)
                    if rank is not None:
                        found.owners[rank] += 1
                    self._files.append(_OutputFile(facts.st_mtime, name, facts.st_size, rank, older))
        except (FileNotFoundError, NotADirectoryError):
            pass  # no directory, no files
        self._files.sort(reverse=True, key=lambda file: (file.mtime, file.name))
        self._listed = True

    def _check_file(self, file: _OutputFile) -> Iterator[None]:
        """Check one file, and count its records and tokens."""
        found, name = self._found, file.name
        while True:
            try:
                with open_source(self._directory, name) as source:
                    verdict = check_file(source)
                    text = result_text(source, verdict)
                    whole = len(text) == source.size
                break
            except NotRegularFile as error:
                cause = error.__cause__
                if isinstance(cause, OSError) and cause.errno in TRANSIENT and self._retries_left > 0:
                    self._retries_left -= 1
                    yield from _wait_for_file_server()
                    continue
                if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                    self._record_unreadable(str(error))
                else:
                    self._record_removed(file)  # or replaced by something else
                yield
                return
        found.checked += 1
        yield
        reason = printable(verdict.reason or "")
        if verdict.state == "empty":
            found.empty += 1
            _append_flaw(found.empty_files, FileFlaw(printable(name), None, reason))
        elif verdict.state in ("invalid", "unfinished"):
            found.damaged += 1
            _append_flaw(found.flaws, FileFlaw(printable(name), verdict.format, reason))
        elif verdict.state == "valid":
            found.valid += 1
            found.formats[verdict.format or "?"] += 1
        elif verdict.format is None:
            found.unknown += 1
        else:
            found.undecided += 1
        if text:
            self._record_tokens(name, verdict, text, is_complete=whole)
        if self._counts_records:
            yield from self._count_records(name, verdict, is_empty=whole and text.strip() in EMPTY_JSON)

    def _record_unreadable(self, reason: str) -> None:
        self._found.checked += 1
        self._found.unreadable += 1
        self._found.uncounted += 1
        self._found.unreadable_reason = self._found.unreadable_reason or printable(reason)

    def _record_removed(self, file: _OutputFile) -> None:
        """Uncount a file that was removed or renamed since it was listed."""
        found = self._found
        found.removed += 1
        found.bytes -= file.size
        if file.is_older:
            found.older -= 1
        else:
            found.written -= 1
        if file.rank is not None:
            found.owners[file.rank] -= 1

    def _count_records(self, name: str, file_check: FileCheck, *, is_empty: bool) -> Iterator[None]:
        if file_check.state == "empty" or is_empty:
            records: int | None = 0
        elif file_check.records is None and (kind := _record_format(name, file_check)) is not None:
            lines = LineCounter(csv=kind == "csv")
            read = yield from self._count_to_end(name, lines)
            # a last line without a newline is a record too
            more = lines.unfinished and file_check.state not in ("invalid", "unfinished")
            records = lines.records + more if read else None
        elif file_check.format == "json" and file_check.state == "valid" and file_check.records is None:
            items = ArrayItemCounter()
            read = yield from self._count_to_end(name, items)
            records = items.items if items.complete and read else None
        else:
            records = file_check.records
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

    def _record_tokens(self, name: str, file_check: FileCheck, text: bytes, *, is_complete: bool) -> None:
        found, counts = (
            self._found,
            count_tokens(text, is_json_lines=file_check.format == "jsonl", is_complete=is_complete),
        )
        found.tokens = add_token_counts(found.tokens, counts)
        if counts.failure_text is not None:
            _append_flaw(found.without_tokens, FileFlaw(printable(name), file_check.format, counts.failure_text))

    def _hash_file(self, name: str) -> Iterator[None]:
        digest = hashlib.sha256()
        with _opened(self._directory, name) as fd:
            while fd is not None and (piece := os.read(fd, PIECE_BYTES)):
                digest.update(piece)
                yield
            if fd is not None:
                self._sums.append((name, digest.hexdigest()))
                self._found.hashed += 1
        yield


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


def _append_flaw(flaws: list[FileFlaw], flaw: FileFlaw) -> None:
    if len(flaws) < MOST_FLAWS:
        flaws.append(flaw)


# Logs


class LogResults(_SlicedWork[VerifiedLogs]):
    """Benchmark results printed at the end of logs."""

    def __init__(self, run_dir: str, paths: Collection[str]) -> None:
        """Search these logs; missing files are skipped. ``run_dir`` is the directory that contains them."""
        super().__init__()
        self._paths = tuple(paths)
        self._begin()

    def _begin(self) -> None:
        self._checked = 0
        self._tokens = TokenCounts()
        self._without_tokens: list[FileFlaw] = []

    def _facts(self) -> VerifiedLogs:
        return VerifiedLogs(self._done, len(self._paths), self._checked, self._tokens, tuple(self._without_tokens))

    def _work(self) -> Iterator[None]:
        for path in self._paths:
            folder, name = os.path.split(path)
            text, before = b"", 0
            with _opened(folder, name) as fd:
                if fd is not None and stat.S_ISREG(os.fstat(fd).st_mode):
                    before = max(0, os.fstat(fd).st_size - RESULT_BYTES)
                    text = os.pread(fd, RESULT_BYTES, before)
            self._checked += 1
            counts = count_tokens_in_log(text, is_complete=not before)
            self._tokens = add_token_counts(self._tokens, counts)
            if counts.failure_text is not None:
                _append_flaw(self._without_tokens, FileFlaw(printable(name), None, counts.failure_text))
            yield


# Checkpoints


class LastCheckpoint(_SlicedWork[VerifiedCheckpoint]):
    """The newest checkpoint of the job and, if that is damaged, the newest valid one."""

    def __init__(self, directory: str, pattern: str, since: float) -> None:
        """``since`` is the start of the job in epoch seconds; older checkpoints are ignored."""
        super().__init__()
        self._directory, self._pattern, self._since = directory, pattern, since
        self._begin()

    def _begin(self) -> None:
        self._entries: dict[str, CheckpointEntry] = {}
        self._last: Checkpoint | None = None
        self._newest_undamaged: Checkpoint | None = None
        self._files = self._checked = self._valid = self._damaged = self._uncertain = 0
        self._uncertain_reason: str | None = None
        self._flaws: list[FileFlaw] = []

    def _facts(self) -> VerifiedCheckpoint:
        last, good = self._last, self._newest_undamaged
        flaws, flawed = tuple(self._flaws), self._damaged
        unsure, why = self._uncertain, self._uncertain_reason
        return VerifiedCheckpoint(
            self._done, self._files, self._checked, last, self._valid, flaws, flawed, good, unsure, why
        )

    def _work(self) -> Iterator[None]:
        yield from self._list()
        without: set[str] = set()
        for _ in range(MOST_CHECKPOINTS):
            found = self._newest(without)
            if found is None:
                return
            looked = _CheckedCheckpoint()
            files = [file for entry in self._entries_with_key(found.key) for file in entry.files if not file.temporary]
            # an earlier job may have left it incomplete
            ours = all(file.mtime >= self._since for file in files)
            if found.state == "incomplete" and ours:
                looked.damaged = max(1, found.missing_count)
                looked.flaws += [FileFlaw(printable(name), None, "is missing") for name in found.missing]
            elif found.state == "incomplete":
                looked.add_uncertain(FROM_EARLIER_JOB)
            for file in files if not looked.damaged or self._last is None else ():
                self._check_file(looked, file.path, is_only_file=found.files == 1, is_of_job=file.mtime >= self._since)
                self._checked += 1
                yield
            without.add(found.key)
            if files and looked.removed == len(files):
                continue  # removed meanwhile
            if looked.removed:
                looked.damaged, looked.flaws = 0, []  # being removed
            if self._last is None:
                self._last, self._valid, self._flaws, self._damaged = found, looked.valid, looked.flaws, looked.damaged
                self._uncertain, self._uncertain_reason = looked.uncertain, looked.uncertain_reason
            if not looked.damaged:
                self._newest_undamaged = found
                return

    def _list(self) -> Iterator[None]:
        watch = CheckpointWatch(self._directory, self._pattern, verify=False)
        now, behind = time.time(), True
        while behind:
            snapshot = watch.poll(now)
            self._entries.update((entry.name, entry) for entry in snapshot.entries)
            now, behind = now + 1.0, snapshot.has_unread_names
            yield

    def _newest(self, excluded_keys: Collection[str]) -> Checkpoint | None:
        """The newest checkpoint whose key is not in ``excluded_keys``, treated as one that is no longer written."""
        entries = [entry for entry in self._entries.values() if _checkpoint_key(entry) not in excluded_keys]
        checkpoints = CheckpointTracker(self._since)
        checkpoints.update(entries, {entry.name for entry in entries}, 0.0, time.time() + SETTLED_S)
        found = checkpoints.last
        self._files = self._checked + (0 if found is None else found.files)
        return found

    def _entries_with_key(self, key: str) -> list[CheckpointEntry]:
        return [entry for entry in self._entries.values() if not entry.temporary and _checkpoint_key(entry) == key]

    def _check_file(self, checked: "_CheckedCheckpoint", path: str, *, is_only_file: bool, is_of_job: bool) -> None:
        """Check one file. An empty one is damaged if its format needs content, or it is the ``is_only_file`` file."""
        try:
            with open_source(self._directory, path) as source:
                verdict = check_file(source)
        except NotRegularFile as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                checked.add_uncertain(printable(str(error)))
            else:
                checked.removed += 1
            return
        state, reason = verdict.state, verdict.reason
        binary = any(path.lower().endswith(known.EXTENSIONS) for known in BINARY_FORMATS)
        if state == "empty" and (is_only_file or binary):
            state, reason = "invalid", "is empty"
        checked.valid += state == "valid"
        if state in ("invalid", "unfinished") and not is_of_job:
            checked.add_uncertain(FROM_EARLIER_JOB)
        elif state in ("invalid", "unfinished"):
            checked.damaged += 1
            _append_flaw(checked.flaws, FileFlaw(printable(path), verdict.format, printable(reason or "is damaged")))


@dataclass
class _CheckedCheckpoint:
    valid: int = 0
    damaged: int = 0
    uncertain: int = 0
    uncertain_reason: str | None = None
    removed: int = 0
    flaws: list[FileFlaw] = field(default_factory=list)

    def add_uncertain(self, reason: str) -> None:
        """Count a file whose state is unknown."""
        self.uncertain += 1
        self.uncertain_reason = self.uncertain_reason or reason


def _checkpoint_key(entry: CheckpointEntry) -> str | None:
    name = parse_name(entry.bare, entry.is_directory)
    return None if name is None else name.key
