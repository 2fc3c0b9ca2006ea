"""Files of a job at its end: its outputs, its last checkpoint, and benchmark results in its logs.

Each is a watch of ``exporter.readers.file_host`` and does a small part of its work at each look: so it can live where a
file server that is gone holds nobody up, can be given up at any moment, and tells how far it has come.
"""

import fnmatch
import hashlib
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from exporter.derive.checkpoint_names import parse_name
from exporter.derive.checkpoints import Checkpoint, Checkpoints
from exporter.derive.workers import worker_rank
from exporter.readers.checkpoint_files import CheckpointEntry, CheckpointWatch
from exporter.readers.formats import BINARY, NoFile, Verdict, check, csv_text, json_lines, open_source
from exporter.readers.formats.source import Damaged, Source, Undecided, shown
from exporter.readers.record_count import ArrayCount, LineCount

SLICE_S = 0.3
"""A look works for so long."""
MOST_TOLD = 1000
"""Damaged files that are kept by name."""
NAMES_AT_ONCE = 256
PIECE_BYTES = 4 << 20
"""Of a file whose records are counted or that is summed up, without a pause."""
RESULT_BYTES = 64 << 10
"""Of the beginning of a large file, and of the end of a log, in which results of benchmarks are looked for."""
MOST_TRIED = 16
"""Checkpoints that are looked into for one that is whole."""
SETTLED_S = 1e9
"""As long as this after its end nobody writes to a checkpoint any more."""
NOTHING = (b"{}", b"null", b'""')
"""JSON texts without any result in them, beside an empty array."""
OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY

TOTALS = ("total_output_tokens", "total_generated_tokens", "total_completion_tokens")
"""What a benchmark calls the tokens of all its requests,"""
EACH = ("output_tokens", "generated_tokens", "completion_tokens")
"""and what is told of one request."""
AVERAGES = ("output_token_throughput", "output_sequence_length", "request_count")
"""Of AIPerf: objects with their average."""
OF_A_BENCHMARK = ("num_prompts", "request_throughput", "output_throughput", "total_input_tokens")
"""Beside one of these, ``completed`` is a number of requests."""

_TOTAL_IN_TEXT = re.compile(rb'(?<!\\)"(%b)"\s{0,8}:\s{0,8}(\d{1,20})(?![\d.])' % "|".join(TOTALS).encode())
_TOTAL_IN_LOG = re.compile(
    rb"\b(Total generated tokens|Successful requests): {1,60}([\d,]{1,24})(?:\.0{1,9})?(?=\s|\Z)"
)

Facts = TypeVar("Facts", covariant=True)


class Flaw(NamedTuple):
    """A file that something is wrong with; its name and the reason as text that can be shown."""

    file: str
    format: str | None
    reason: str


class OutputFacts(NamedTuple):
    """Output files of the job, as far as they have been looked at."""

    listed: bool
    """Whether all of them are known,"""
    done: bool
    """and all has been done with them."""
    files: int
    bytes: int
    older: int
    """Files from before the job, which are not counted in anything else."""
    written: int
    """Files that were written since its start."""
    owners: frozenset[int]
    """Ranks whose numbers their names carry."""
    looked: int
    """Files that were looked into,"""
    valid: int
    """that are whole,"""
    unknown: int
    """of no known format,"""
    undecided: int
    """of a format that does not tell,"""
    empty: int
    flawed: int
    """and damaged."""
    empties: tuple[Flaw, ...]
    flaws: tuple[Flaw, ...]
    formats: tuple[str, ...]
    """Of those that are whole."""
    records: int
    counted: int
    """Files whose records were counted,"""
    uncounted: int
    """and that hold none which can be."""
    results: int
    """Results of benchmarks in them,"""
    without_tokens: tuple[Flaw, ...]
    """those without any token,"""
    requests: int
    """requests in them that tell their tokens,"""
    requests_with_tokens: int
    """and those that have some, or may have."""
    summed: int
    sums: tuple[tuple[str, str], ...]
    """Name and SHA-256 of files that were summed up since the last look."""


class CheckpointFacts(NamedTuple):
    """The last checkpoint of the job, as far as it has been looked at."""

    done: bool
    files: int
    """Files to look into, as far as is known,"""
    looked: int
    """and those that were."""
    last: Checkpoint | None
    valid: int
    """Files of it that are whole."""
    flaws: tuple[Flaw, ...]
    """What is wrong with it,"""
    flawed: int
    """in so many files."""
    good: Checkpoint | None
    """The newest one that nothing is wrong with."""


class LogFacts(NamedTuple):
    """Results of benchmarks at the ends of logs."""

    done: bool
    files: int
    looked: int
    results: int
    without_tokens: tuple[Flaw, ...]


class _Slices(Generic[Facts]):
    """A piece of work that is done in slices."""

    def __init__(self) -> None:
        self._steps: Iterator[None] | None = None
        self._done = False

    def look(self, _now: float) -> Facts:
        """Go on for a while; what is known by then. Raises OSError when the directory cannot be read."""
        end = time.monotonic() + SLICE_S
        if self._steps is None:
            self._steps = self._work()
        for _ in self._steps:
            if time.monotonic() >= end:
                return self._facts()
        self._done = True
        return self._facts()

    def _work(self) -> Iterator[None]:
        """The work, with a pause wherever it may be given up."""
        raise NotImplementedError

    def _facts(self) -> Facts:
        raise NotImplementedError


@dataclass
class _Counts:
    """What has been found out about output files."""

    bytes: int = 0
    older: int = 0
    written: int = 0
    looked: int = 0
    valid: int = 0
    unknown: int = 0
    undecided: int = 0
    empty: int = 0
    flawed: int = 0
    records: int = 0
    counted: int = 0
    uncounted: int = 0
    results: int = 0
    requests: int = 0
    requests_with_tokens: int = 0
    summed: int = 0
    owners: set[int] = field(default_factory=set)
    empties: list[Flaw] = field(default_factory=list)
    flaws: list[Flaw] = field(default_factory=list)
    without_tokens: list[Flaw] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)


def _kind(name: str, verdict: Verdict) -> str | None:
    """Whether the records of a file are lines or rows of a table: by its name, and else by its format."""
    if name.lower().endswith(json_lines.EXTENSIONS):
        return "jsonl"
    if name.lower().endswith(csv_text.EXTENSIONS):
        return "csv"
    return verdict.format if verdict.format in ("jsonl", "csv") else None


class OutputFiles(_Slices[OutputFacts]):
    """Regular files directly in a directory whose names match a glob, those that were written last first."""

    def __init__(
        self,
        directory: str,
        pattern: str,
        since: float,
        ranks: Mapping[tuple[str, int], int],
        *,
        resumes: bool = False,
        counts: bool = True,
        checksums: bool = False,
    ) -> None:
        """``since``: when the job started, in epoch seconds; older files count only where it ``resumes``.

        ``ranks`` by role and index tell whose a file is, by its name.
        """
        super().__init__()
        self._directory, self._pattern, self._since, self._ranks = directory, pattern, since, dict(ranks)
        self._resumes, self._counts, self._checksums = resumes, counts, checksums
        self._listed = False
        self._files: list[tuple[float, str, int]] = []
        self._found = _Counts()
        self._sums: list[tuple[str, str]] = []

    def _facts(self) -> OutputFacts:
        found, sums = self._found, tuple(self._sums)
        self._sums.clear()
        return OutputFacts(
            listed=self._listed,
            done=self._done,
            files=len(self._files),
            bytes=found.bytes,
            older=found.older,
            written=found.written,
            owners=frozenset(found.owners),
            looked=found.looked,
            valid=found.valid,
            unknown=found.unknown,
            undecided=found.undecided,
            empty=found.empty,
            flawed=found.flawed,
            empties=tuple(found.empties),
            flaws=tuple(found.flaws),
            formats=tuple(name for name, _ in found.formats.most_common()),
            records=found.records,
            counted=found.counted,
            uncounted=found.uncounted,
            results=found.results,
            without_tokens=tuple(found.without_tokens),
            requests=found.requests,
            requests_with_tokens=found.requests_with_tokens,
            summed=found.summed,
            sums=sums,
        )

    def _work(self) -> Iterator[None]:
        yield from self._list()
        for _, name, _ in self._files:
            yield from self._look_into(name)
        for _, name, _ in self._files if self._checksums else ():
            yield from self._sum_up(name)

    def _list(self) -> Iterator[None]:
        hidden = self._pattern.startswith(".")
        matches = re.compile(fnmatch.translate(self._pattern)).match
        found = self._found
        try:
            with os.scandir(self._directory) as entries:
                for number, entry in enumerate(entries):
                    if not number % NAMES_AT_ONCE:
                        yield
                    name = entry.name
                    if (name.startswith(".") and not hidden) or matches(name) is None:
                        continue
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue  # it has gone
                    if not stat.S_ISREG(facts.st_mode):
                        continue
                    if facts.st_mtime < self._since:
                        found.older += 1
                        if not self._resumes:
                            continue
                    else:
                        found.written += 1
                    found.bytes += facts.st_size
                    rank = worker_rank(name, self._ranks)
                    if rank is not None:
                        found.owners.add(rank)
                    self._files.append((facts.st_mtime, name, facts.st_size))
        except (FileNotFoundError, NotADirectoryError):
            pass  # nobody has made it
        self._files.sort(reverse=True)
        self._listed = True

    def _look_into(self, name: str) -> Iterator[None]:
        """Whether a file is whole, the records in it and what it tells of tokens."""
        found = self._found
        try:
            with open_source(self._directory, name) as source:
                verdict = check(source)
                text = result_text(source, verdict)
                whole = len(text) == source.size
        except NoFile as error:
            verdict, text, whole = Verdict("invalid", None, f"cannot be read: {error}"), b"", False
        found.looked += 1
        yield
        reason = shown(verdict.reason or "")
        if verdict.state == "empty":
            found.empty += 1
            _keep(found.empties, Flaw(shown(name), None, reason))
        elif verdict.state in ("invalid", "unfinished"):
            found.flawed += 1
            _keep(found.flaws, Flaw(shown(name), verdict.format, reason))
        elif verdict.state == "valid":
            found.valid += 1
            found.formats[verdict.format or "?"] += 1
        elif verdict.format is None:
            found.unknown += 1
        else:
            found.undecided += 1
        if text:
            self._note_tokens(name, verdict, text, whole=whole)
        if self._counts:
            yield from self._count(name, verdict, nothing=whole and text.strip() in NOTHING)

    def _count(self, name: str, verdict: Verdict, *, nothing: bool) -> Iterator[None]:
        """Count the records of a file."""
        if verdict.state == "empty" or nothing:
            records: int | None = 0
        elif verdict.records is None and (kind := _kind(name, verdict)) is not None:
            lines = LineCount(csv=kind == "csv")
            yield from self._advance(name, lines)
            # a last line that only lacks its newline is a record too
            records = lines.records + (lines.unfinished and verdict.state not in ("invalid", "unfinished"))
        elif verdict.format == "json" and verdict.state == "valid" and verdict.records is None:
            items = ArrayCount()
            yield from self._advance(name, items)
            records = items.items if items.complete else None
        else:
            records = verdict.records
        if records is None:
            self._found.uncounted += 1
        else:
            self._found.counted += 1
            self._found.records += records

    def _advance(self, name: str, count: LineCount | ArrayCount) -> Iterator[None]:
        with _opened(self._directory, name) as fd:
            if fd is not None:
                while count.advance(fd, os.fstat(fd).st_size, PIECE_BYTES):
                    yield

    def _note_tokens(self, name: str, verdict: Verdict, text: bytes, *, whole: bool) -> None:
        found, told = self._found, tokens_in(text, lines=verdict.format == "jsonl", whole=whole)
        found.results += told.results
        found.requests += told.requests
        found.requests_with_tokens += told.requests_with_tokens
        if told.empty is not None:
            _keep(found.without_tokens, Flaw(shown(name), verdict.format, told.empty))

    def _sum_up(self, name: str) -> Iterator[None]:
        digest = hashlib.sha256()
        with _opened(self._directory, name) as fd:
            while fd is not None and (piece := os.read(fd, PIECE_BYTES)):
                digest.update(piece)
                yield
            if fd is not None:
                self._sums.append((name, digest.hexdigest()))
                self._found.summed += 1
        yield


@contextmanager
def _opened(directory: str, name: str) -> Iterator[int | None]:
    """The descriptor of a file, or None where it cannot be opened; a read that fails ends the context."""
    try:
        fd = os.open(os.path.join(directory, name), OPEN)
    except OSError:
        yield None
        return
    try:
        yield fd
    except OSError:
        pass
    finally:
        os.close(fd)


def _keep(flaws: list[Flaw], flaw: Flaw) -> None:
    if len(flaws) < MOST_TOLD:
        flaws.append(flaw)


# Results of benchmarks


class Tokens(NamedTuple):
    """What a text tells of tokens."""

    results: int = 0
    """Results of whole benchmarks,"""
    empty: str | None = None
    """what one without any token says,"""
    requests: int = 0
    """requests that tell their tokens,"""
    requests_with_tokens: int = 0
    """and those that have some."""


def result_text(source: Source, verdict: Verdict) -> bytes:
    """The part of a JSON file in which the result of a benchmark would stand; nothing of another file."""
    if verdict.format not in ("json", "jsonl") or verdict.state not in ("valid", "unfinished", "unknown"):
        return b""
    small = (1 << 20) if verdict.format == "json" else 2 * RESULT_BYTES
    try:
        return source.head(source.size if source.size <= small else RESULT_BYTES)
    except (Damaged, Undecided, OSError):
        return b""


def tokens_in(text: bytes, *, lines: bool, whole: bool = True) -> Tokens:
    """What JSON or JSON ``lines`` tell of tokens; of a text that is not ``whole``, its beginning."""
    values: list[Any] = []
    partial = not whole
    for part in text.splitlines() if lines else (text,):
        try:
            value = json.loads(part.removeprefix(b"\xef\xbb\xbf")) if part.strip() else None
        except (ValueError, RecursionError):
            partial = True
            continue
        values += value if isinstance(value, list) else [value]
    told = [_tokens_of(value) for value in values if isinstance(value, dict)]
    if partial and not lines:
        totals = [(key.decode(), int(number)) for key, number in _TOTAL_IN_TEXT.findall(text)]
        empty = next((f"{key} is 0" for key, number in totals if not number), None)
        return Tokens(len(totals), empty)
    requests = sum(entry.requests for entry in told)
    with_tokens = sum(entry.requests_with_tokens for entry in told)
    if partial and requests:
        with_tokens += 1  # what was not looked at may have some
    return Tokens(
        sum(entry.results for entry in told),
        next((entry.empty for entry in told if entry.empty is not None), None),
        requests,
        with_tokens,
    )


def _tokens_of(body: Mapping[str, Any]) -> Tokens:
    for key in TOTALS:
        if _is_number(body.get(key)):
            return Tokens(1, None if body[key] else f"{key} is 0")
    if _is_number(body.get("completed")) and any(key in body for key in OF_A_BENCHMARK):
        return Tokens(1, None if body["completed"] else "completed is 0")
    averages = {key: body[key]["avg"] for key in AVERAGES if isinstance(body.get(key), dict) and "avg" in body[key]}
    if any(_is_number(average) for average in averages.values()):
        return Tokens(1, next((f"{key} is 0" for key, value in averages.items() if value == 0), None))
    for key in EACH:
        if _is_number(body.get(key)):
            return Tokens(requests=1, requests_with_tokens=int(body[key] != 0))
    return Tokens()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class LogResults(_Slices[LogFacts]):
    """Results of benchmarks that are printed at the ends of logs."""

    def __init__(self, run_dir: str, paths: Collection[str]) -> None:
        """``run_dir`` is where the logs are; those that are not there are passed over."""
        super().__init__()
        self._paths = tuple(paths)
        self._looked = self._results = 0
        self._without: list[Flaw] = []

    def _facts(self) -> LogFacts:
        return LogFacts(self._done, len(self._paths), self._looked, self._results, tuple(self._without))

    def _work(self) -> Iterator[None]:
        for path in self._paths:
            folder, name = os.path.split(path)
            text = b""
            with _opened(folder, name) as fd:
                if fd is not None and stat.S_ISREG(os.fstat(fd).st_mode):
                    text = os.pread(fd, RESULT_BYTES, max(0, os.fstat(fd).st_size - RESULT_BYTES))
            self._looked += 1
            told = [(key.decode(), int(number.replace(b",", b"") or 0)) for key, number in _TOTAL_IN_LOG.findall(text)]
            self._results += len(told)
            without = next((key for key, number in told if not number), None)
            if without is not None:
                _keep(self._without, Flaw(shown(name), None, f"{without}: 0"))
            yield


# Checkpoints


class LastCheckpoint(_Slices[CheckpointFacts]):
    """The newest checkpoint of the job, and where something is wrong with that the newest one that is whole."""

    def __init__(self, directory: str, pattern: str, since: float) -> None:
        """``since``: when the job started, in epoch seconds; older checkpoints are none of it."""
        super().__init__()
        self._directory, self._pattern, self._since = directory, pattern, since
        self._entries: dict[str, CheckpointEntry] = {}
        self._last: Checkpoint | None = None
        self._good: Checkpoint | None = None
        self._files = self._looked = self._valid = self._flawed = 0
        self._flaws: list[Flaw] = []

    def _facts(self) -> CheckpointFacts:
        last, good = self._last, self._good
        flaws, flawed = tuple(self._flaws), self._flawed
        return CheckpointFacts(self._done, self._files, self._looked, last, self._valid, flaws, flawed, good)

    def _work(self) -> Iterator[None]:
        yield from self._list()
        without: set[str] = set()
        for _ in range(MOST_TRIED):
            found = self._newest(without)
            if found is None:
                return
            valid, flaws, flawed = 0, list[Flaw](), 0
            if found.state == "incomplete":
                flawed = max(1, found.missing_count)
                flaws += [Flaw(shown(name), None, "is missing") for name in found.missing]
            for entry in self._of(found.key):
                for file in entry.files if not flawed or self._last is None else ():
                    if file.temporary:
                        continue
                    verdict = self._check(file.path, only=found.files == 1)
                    self._looked += 1
                    valid += verdict.state == "valid"
                    if verdict.state in ("invalid", "unfinished"):
                        flawed += 1
                        _keep(flaws, Flaw(shown(file.path), verdict.format, shown(verdict.reason or "is damaged")))
                    yield
            if self._last is None:
                self._last, self._valid, self._flaws, self._flawed = found, valid, flaws, flawed
            if not flawed:
                self._good = found
                return
            without.add(found.key)

    def _list(self) -> Iterator[None]:
        """All that is there."""
        watch = CheckpointWatch(self._directory, self._pattern, verify=False)
        now, behind = time.time(), True
        while behind:
            sight = watch.look(now)
            self._entries.update((entry.name, entry) for entry in sight.entries)
            now, behind = now + 1.0, sight.behind
            yield

    def _newest(self, without: Collection[str]) -> Checkpoint | None:
        """The newest one besides those with these keys, as it is once nobody writes any more."""
        entries = [entry for entry in self._entries.values() if _key(entry) not in without]
        checkpoints = Checkpoints(self._since)
        checkpoints.update(entries, {entry.name for entry in entries}, 0.0, time.time() + SETTLED_S)
        found = checkpoints.last
        self._files = self._looked + (0 if found is None else found.files)
        return found

    def _of(self, key: str) -> list[CheckpointEntry]:
        return [entry for entry in self._entries.values() if not entry.temporary and _key(entry) == key]

    def _check(self, path: str, *, only: bool) -> Verdict:
        """What the format of a file tells; an empty one is damaged where it should hold something."""
        try:
            with open_source(self._directory, path) as source:
                verdict = check(source)
        except NoFile as error:
            return Verdict("invalid", None, f"cannot be read: {error}")
        binary = any(path.lower().endswith(known.EXTENSIONS) for known in BINARY)
        if verdict.state == "empty" and (only or binary):
            return Verdict("invalid", None, "is empty")
        return verdict


def _key(entry: CheckpointEntry) -> str | None:
    name = parse_name(entry.bare, entry.directory)
    return None if name is None else name.key
