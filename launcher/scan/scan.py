"""Search of whole logs with the patterns of a job, to write and measure patterns."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from exporter.logs.last_error import plain_line
from exporter.logs.lexicon import GENERIC, Lexicon
from exporter.logs.packs import END_BYTES, LOOK_BYTES, Pack, PackDetector
from exporter.logs.packs_reader import read_packs
from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.search.engine import RECORD_TIMEOUT_S, SMALL_BYTES, SearchEngine
from exporter.logs.search.extraction import NumberExtractor
from exporter.logs.search.findings import LogFindings
from exporter.logs.search.literals import safe_length
from exporter.logs.tail_reader import CHUNK_BYTES, LogTail
from exporter.logs.timestamps import TimestampReader
from launcher.scan.log_file import (
    PROBE_BYTES,
    Read,
    UnreadableLog,
    read_chunks,
    records_of,
    refusal_text,
    why_not_readable,
    why_not_text,
)
from launcher.scan.position import ExpectedTotals, PositionFollower, WorkPosition
from launcher.scan.suggestions import ProgressCandidate, progress_lines

COUNT_ALL_BYTES = 64 << 20  # up to this size all matches are counted, above it only those of errors
SEGMENT_BYTES = 64 << 20  # bytes per search: bounds the findings kept in memory for a long log
EDGE_BYTES = 256 << 10  # start and end of a log in which unmatched progress is searched
MOST_TEXT = 200  # characters shown of a record or group
NO_TOTALS = ExpectedTotals()
_RECORD_END = re.compile(rb"[\r\n]")

Span = tuple[int, int]


@dataclass
class ScanRecord:
    offset: int
    text: str  # as a terminal shows it, shortened
    line: int = 0  # from 1; the states of a progress bar share one line
    unfinished: bool = False  # without a record end, so possibly half written


@dataclass
class PatternResult:
    """Matches of one pattern in one log."""

    name: str
    kind: PatternKind
    own: bool
    unit: str | None = None
    severity: str | None = None
    begins: bool | None = None
    matches: int | None = None  # matching records; None if not counted
    done: int | None = None
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    rank: int | None = None
    values: dict[str, float] = field(default_factory=dict)  # last number by name
    groups: dict[str, str | None] = field(default_factory=dict)  # of the last match, by name or number
    last: ScanRecord | None = None  # record of the last match


@dataclass
class UnmatchedRecord:
    """A record that looks like progress but gives no position."""

    record: ScanRecord
    suggestion: tuple[str, str] | None  # name and regular expression of a pattern for it


@dataclass
class LogScan:
    """The results for one log. CPU times are seconds of this process."""

    path: str
    size: int
    problem: str | None = None  # why it was not searched
    records: int = 0
    lines: int = 0
    pack: str = GENERIC
    chosen: bool = False  # whether the pack was detected, not given
    evidence: ScanRecord | None = None  # first record that indicates the detected pack
    position: WorkPosition | None = None  # position, without an unfinished last record
    # last record without an end: a sidecar ignores it until it, or its worker, ends
    unfinished: ScanRecord | None = None
    found: list[PatternResult] = field(default_factory=list)
    unmatched: list[UnmatchedRecord] = field(default_factory=list)
    nearest: tuple[str, str] | None = None  # if nothing was found: the nearest pack, and why
    notes: tuple[str, ...] = ()
    timeouts: dict[str, int] = field(default_factory=dict)  # records per pattern whose search was aborted for time
    search_cpu_s: float = 0.0  # reading and searching, as in a sidecar
    choose_cpu_s: float = 0.0  # detecting the pack
    count_cpu_s: float = 0.0  # counting records and matches, and locating the last matches

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes searched per second of CPU time; None if the log is too small to measure."""
        return self.size / self.search_cpu_s if self.search_cpu_s > 0 and self.size else None

    @property
    def found_nothing(self) -> bool:
        return not any(found.last for found in self.found if found.kind not in (PatternKind.ERROR, PatternKind.MARK))


def scan_logs(
    paths: Sequence[str], lexicon: Lexicon, totals: ExpectedTotals = NO_TOTALS, *, count_all: bool = False
) -> tuple[list[LogScan], list[UnreadableLog]]:
    """Scan several logs. Returns the results, and the logs that cannot be read."""
    reports: list[LogScan] = []
    unreadable: list[UnreadableLog] = []
    for path in paths:
        try:
            reports.append(scan_log(path, lexicon, totals, count_all=count_all))
        except UnreadableLog as error:
            unreadable.append(error)
    return reports, unreadable


def scan_log(path: str, lexicon: Lexicon, totals: ExpectedTotals = NO_TOTALS, *, count_all: bool = False) -> LogScan:
    """Scan one log up to its present end. Raises UnreadableLog."""
    if (problem := why_not_readable(path)) is not None:
        raise UnreadableLog(path, problem)
    try:
        with open(path, "rb", buffering=0) as source:
            facts = os.fstat(source.fileno())
            report = LogScan(path, facts.st_size, pack=lexicon.pack)
            report.problem = why_not_text(source.read(PROBE_BYTES))
            if report.problem is None:
                read: Read = lambda offset, count: os.pread(source.fileno(), count, offset)  # noqa: E731
                look = _LogScanner(report, lexicon, totals, read, facts.st_mtime)
                look.run(count_all or facts.st_size <= COUNT_ALL_BYTES)
            return report
    except OSError as error:
        raise UnreadableLog(path, refusal_text(error)) from error


def _keys(pattern: Pattern) -> set[tuple[str, str]]:
    """Keys of the findings that a pattern can produce."""
    if pattern.kind is PatternKind.VALUE or pattern.kind is PatternKind.PAIRS:
        return {("value", name) for name in NumberExtractor(pattern).names}
    return {(f"{pattern.kind} {pattern.begins}", pattern.name)}


def _layers(patterns: Mapping[int, Pattern]) -> list[list[int]]:
    """Group patterns so that within a group no two share a key."""
    layers: list[tuple[list[int], set[tuple[str, str]]]] = []
    for index, pattern in patterns.items():
        keys = _keys(pattern)
        for members, taken in layers:
            if not keys & taken:
                members.append(index)
                taken |= keys
                break
        else:
            layers.append(([index], keys))
    return [members for members, _ in layers]


class _LogScanner:
    def __init__(self, report: LogScan, lexicon: Lexicon, totals: ExpectedTotals, read: Read, written: float) -> None:
        """``written``: time of the last record, to complete timestamps without a date."""
        self._report = report
        self._lexicon = lexicon
        self._totals = totals
        self._read = read
        self._stamps = TimestampReader(written)
        self._follower: PositionFollower  # made anew for each search, with its pack
        # Middle of a long log, where the search keeps only some positions: enough to follow it. The start, which shows
        # how the log counts, and the end are followed record by record.
        self._between: Span = 0, 0
        self._timeouts: dict[str, int] = {}  # counts of the engine before the search, by pattern
        self._patterns: tuple[Pattern, ...] = ()
        self._shared: set[int] = set()  # patterns that share a key with another
        self._spans: list[Span] = []  # parts of the log searched one by one
        self._ends: dict[int, Span] = {}  # part with the last match, by pattern, if known
        self._offsets: dict[int, dict[str, int]] = {}  # record offset of the last match, by pattern and value name

    def run(self, count_all: bool) -> None:
        report, lexicon = self._report, self._lexicon
        auto = lexicon.auto()
        if auto is not None:
            report.chosen, report.pack = True, self._choose(auto)
        engine = lexicon.engine(report.pack)
        while (late := self._search(engine, auto)) is not None:
            report.pack, engine = late, lexicon.engine(late)
        report.notes = engine.notes
        begun = time.process_time()
        if count_all:
            self._count()
        self._locate()
        self._show(engine)
        report.timeouts = {
            name: count - self._timeouts.get(name, 0)
            for name, count in engine.timeouts.items()
            if count > self._timeouts.get(name, 0)
        }
        self._follow(engine, self._between[1], self._finished)
        report.position = self._follower.standing
        self._look_at_edges(engine)
        if report.chosen and report.pack != GENERIC:
            report.evidence = self._evidence(next(pack for pack in read_packs() if pack.name == report.pack))
        self._count_records()
        report.count_cpu_s = time.process_time() - begun

    # -- pack detection --------------------------------------------------------------------------

    def _choose(self, auto: PackDetector) -> str:
        begun = time.process_time()
        for text, _ in read_chunks(self._read, 0, min(self._report.size, LOOK_BYTES)):
            auto.feed(text)
            if auto.settled:
                break
        self._report.choose_cpu_s = time.process_time() - begun
        return auto.choice or GENERIC

    def _evidence(self, pack: Pack) -> ScanRecord | None:
        for text, offset in read_chunks(self._read, 0, self._report.size):
            if any(pattern.may_match(text) for pattern in pack.detect):
                for start, raw in records_of(text):
                    plain = plain_line(raw, None).encode("utf-8", "replace")
                    if any(pattern.may_match(plain) and pattern.regex.search(plain) for pattern in pack.detect):
                        return self._record(raw, offset + start)
        return None

    # -- searching -------------------------------------------------------------------------------

    def _search(self, engine: SearchEngine, auto: PackDetector | None) -> str | None:
        """Search the log as a sidecar does. Returns another pack's name if the log turns out to be of that pack."""
        report = self._report
        self._patterns = (*self._lexicon.progress(report.pack), *self._lexicon.errors)
        self._spans, self._ends, self._offsets = [], {}, {}
        self._follower, report.unfinished = (
            PositionFollower(report.path, self._lexicon, report.pack, self._totals),
            None,
        )
        self._between = self._edges()
        self._follow(engine, 0, self._between[0])
        self._timeouts = dict(engine.timeouts)
        report.found = [_blank(pattern) for pattern in self._patterns]
        tail, begun, aside = LogTail(report.path), time.process_time(), 0.0
        try:
            scan, begin, end = engine.begin(self._stamps), 0, 0
            for piece in tail.pieces(max(report.size, 1)):
                if auto is not None and not auto.settled and piece.offset >= LOOK_BYTES - CHUNK_BYTES:
                    before = time.process_time()
                    auto.feed(bytes(piece.buffer[max(0, piece.end - END_BYTES - 1) : piece.end]))
                    aside += time.process_time() - before
                    if auto.choice not in (None, report.pack):
                        return auto.choice
                scan.feed(piece.buffer, piece.end, piece.offset)
                end = piece.offset + piece.end
                if end - begin >= SEGMENT_BYTES:
                    self._take(scan.finish(tail.reread), (begin, end))
                    scan, begin = engine.begin(self._stamps), end
            offset = max(end, int(tail.state()["offset"]))
            if rest := tail.rest():
                scan.feed(rest, len(rest), offset)
                end = offset + len(rest)
                if text := _shown(rest):
                    report.unfinished = ScanRecord(offset, text, unfinished=True)
            self._take(scan.finish(tail.reread), (begin, end))
            if tail.problem is not None:
                raise UnreadableLog(report.path, tail.problem)
            report.size = end
            return None
        finally:
            tail.close()
            report.choose_cpu_s += aside
            report.search_cpu_s += time.process_time() - begun - aside

    def _take(self, findings: LogFindings, span: Span) -> None:
        """Merge the findings of one part into the results."""
        self._spans.append(span)
        self._follower.take(findings, self._between[0], min(self._between[1], self._finished))
        owners: dict[tuple[str, str], list[int]] = {}
        for index, pattern in enumerate(self._patterns):
            if pattern.kind is PatternKind.ERROR:
                found = self._report.found[index]
                if count := findings.errors.get(pattern.name, 0):
                    self._ends[index] = span
                found.matches = (found.matches or 0) + count
            else:
                for key in _keys(pattern):
                    owners.setdefault(key, []).append(index)
        self._shared = {index for of in owners.values() if len(of) > 1 for index in of}
        self._assign(findings, {key: of[0] for key, of in owners.items() if of[0] not in self._shared})

    def _assign(self, findings: LogFindings, owners: Mapping[tuple[str, str], int]) -> None:
        """Assign each finding to its pattern, unless that has a later one."""
        for position in findings.positions:
            kind = PatternKind.RESUME if position.resumed else PatternKind.POSITION
            index = owners.get((f"{kind} True", position.pattern))
            if index is not None and self._is_later(index, position.pattern, position.offset):
                found = self._report.found[index]
                found.done, found.total, found.rank = position.done, position.total, position.rank
                found.epoch, found.epochs = position.epoch, position.epochs
        for mark in findings.marks:
            index = owners.get((f"{PatternKind.MARK} {mark.begins}", mark.name))
            if index is not None:
                self._is_later(index, mark.name, mark.offset)
        for name, of_ranks in findings.values.items():
            rank, value = max(of_ranks.items(), key=lambda entry: entry[1].offset)
            index = owners.get(("value", name))
            if index is not None and self._is_later(index, name, value.offset):
                self._report.found[index].values[name] = value.number
                self._report.found[index].rank = rank

    def _is_later(self, index: int, name: str, offset: int) -> bool:
        """Record the offset of a finding; False if a later one is known."""
        offsets = self._offsets.setdefault(index, {})
        if offset < offsets.get(name, 0):
            return False
        offsets[name] = offset
        return True

    # -- counts and last matches -----------------------------------------------------------------

    def _count(self) -> None:
        """Count the matches of patterns other than errors: the engine reports only their last one."""
        counted = {
            index: pattern for index, pattern in enumerate(self._patterns) if pattern.kind is not PatternKind.ERROR
        }
        engine = SearchEngine(
            [replace(p, name=str(index), kind=PatternKind.ERROR, keys=()) for index, p in counted.items()]
        )
        for span in self._spans:
            errors = self._findings(engine, span).errors
            for index in counted:
                found, count = self._report.found[index], errors.get(str(index), 0)
                found.matches = (found.matches or 0) + count
                if count:
                    self._ends[index] = span

    def _locate(self) -> None:
        """Find the last matches of errors, and of patterns that share a key."""
        alone = dict[int, Pattern]()
        for index, pattern in enumerate(self._patterns):
            if self._report.found[index].matches == 0:
                continue
            if pattern.kind is PatternKind.ERROR:
                alone[index] = replace(pattern, name=str(index), kind=PatternKind.MARK)
            elif index in self._shared:
                # values are found by pattern name
                alone[index] = pattern if pattern.kind is PatternKind.VALUE else replace(pattern, name=str(index))
        for layer in _layers(alone):
            left = {index: len(_keys(alone[index])) for index in layer}
            for span in reversed(self._spans):
                now = [index for index in layer if self._may_be_in(span, index, left[index])]
                if now:
                    owners = {key: index for index in now for key in _keys(alone[index])}
                    self._assign(self._findings(SearchEngine([alone[index] for index in now]), span), owners)
                    for index in now:
                        left[index] = len(_keys(alone[index])) - len(self._offsets.get(index, ()))

    def _may_be_in(self, span: Span, index: int, left: int) -> bool:
        """Whether a part of the log may contain findings still missing for a pattern."""
        known = self._ends.get(index, span)
        return left > 0 and (known == span or (index in self._offsets and span < known))

    def _findings(self, engine: SearchEngine, span: Span) -> LogFindings:
        scan = engine.begin()
        for text, offset in read_chunks(self._read, *span):
            scan.feed(text, len(text), offset)
        return scan.finish(self._read)

    def _edges(self) -> Span:
        """End of the log's start, and start of its end, in whole records; (0, 0) for a short log."""
        last = self._report.size - SMALL_BYTES
        if last <= 0:
            return 0, 0
        ended = _RECORD_END.search(self._read(last, SMALL_BYTES))
        last = last if ended is None else last + ended.end()
        text = self._read(0, SMALL_BYTES)
        return min(last, max(text.rfind(b"\n"), text.rfind(b"\r")) + 1), last

    def _follow(self, engine: SearchEngine, begin: int, end: int) -> None:
        """Follow the position through every record of a part of the log."""
        text = self._read(begin, max(0, end - begin))
        scan = engine.begin(self._stamps)
        scan.feed(text, len(text), begin)
        self._follower.take(scan.finish(self._read), begin, end)

    @property
    def _finished(self) -> int:
        """Offset of the unfinished last record, else the end of the log."""
        unfinished = self._report.unfinished
        return self._report.size if unfinished is None else unfinished.offset

    def _record(self, raw: bytes, offset: int) -> ScanRecord:
        return ScanRecord(offset, _shown(raw), unfinished=offset >= self._finished)

    def _show(self, engine: SearchEngine) -> None:
        """Fill in the records and groups of the last matches."""
        for index, offsets in self._offsets.items():
            found, pattern, offset = self._report.found[index], self._patterns[index], max(offsets.values())
            text = self._read(offset, CHUNK_BYTES)
            ended = _RECORD_END.search(text)
            raw = text if ended is None else text[: ended.start()]
            found.last = self._record(raw, offset)
            found.groups = _groups(engine, pattern, plain_line(raw, None).encode("utf-8", "replace"))

    def _look_at_edges(self, engine: SearchEngine) -> None:
        """Find unmatched records that look like progress; without any finding, also the nearest pack."""
        report, size = self._report, self._report.size
        has_position = any(found.last and found.kind is PatternKind.POSITION for found in report.found)

        def says_something(record: bytes) -> bool:
            found = engine.scan(record)
            return bool(found.positions or (has_position and (found.values or found.marks)))

        edges = [(0, size)] if size <= 2 * EDGE_BYTES else [(0, EDGE_BYTES), (size - EDGE_BYTES, size)]
        texts = [(self._read(begin, end - begin), begin) for begin, end in edges]
        if len(texts) > 1:
            first = _RECORD_END.search(texts[1][0])
            cut = len(texts[1][0]) if first is None else first.end()
            texts[1] = texts[1][0][cut:], texts[1][1] + cut
            texts[0] = texts[0][0][: max(texts[0][0].rfind(b"\n"), texts[0][0].rfind(b"\r")) + 1], 0
        lines = (
            ProgressCandidate(raw, offset + start)
            for text, offset in texts
            for start, raw in records_of(text)
            if offset + start < self._finished
        )
        # a suggestion of the same name would hide the pattern
        names = [found.name for found in report.found if found.own or found.last]
        for candidate, suggestion in progress_lines(lines, says_something, names):
            report.unmatched.append(UnmatchedRecord(self._record(candidate.raw, candidate.offset), suggestion))
        if report.found_nothing:
            report.nearest = PackDetector(read_packs()).nearest(b"\n".join(text for text, _ in texts))

    def _count_records(self) -> None:
        """Count records and lines, and set the line numbers of the records shown."""
        report = self._report
        shown = [found.last for found in report.found if found.last is not None]
        shown += [unmatched.record for unmatched in report.unmatched]
        shown += [record for record in (report.evidence, report.unfinished) if record is not None]
        shown.sort(key=lambda record: -record.offset)
        text = b""
        for text, offset in read_chunks(self._read, 0, report.size):
            while shown and shown[-1].offset < offset + len(text):
                record = shown.pop()
                record.line = report.lines + text.count(b"\n", 0, record.offset - offset) + 1
            # replacing is several times faster than count()
            newlines = len(text) - len(text.replace(b"\n", b""))
            report.lines += newlines
            report.records += newlines
            if b"\r" in text:
                report.records += len(text) - len(text.replace(b"\r", b"")) - text.count(b"\r\n")
        report.lines += bool(text) and not text.endswith(b"\n")
        report.records += bool(text) and not text.endswith((b"\n", b"\r"))


def _blank(pattern: Pattern) -> PatternResult:
    return PatternResult(
        pattern.name,
        pattern.kind,
        pattern.own,
        unit=pattern.unit,
        severity=pattern.severity,
        begins=pattern.begins if pattern.kind is PatternKind.MARK else None,
    )


def _shown(raw: bytes) -> str:
    return plain_line(raw, MOST_TEXT).strip()


def _groups(engine: SearchEngine, pattern: Pattern, record: bytes) -> dict[str, str | None]:
    """Groups of a pattern's match in a record; empty if the search times out."""
    if len(record) <= safe_length(pattern.regex):
        match = pattern.regex.search(record)
    else:
        expression = engine.careful(pattern)
        try:
            match = None if expression is None else expression.search(record, timeout=RECORD_TIMEOUT_S)
        except TimeoutError:
            match = None
    if match is None:
        return {}
    names = {number: name for name, number in pattern.regex.groupindex.items()}
    return {
        names.get(number, str(number)): None if text is None else plain_line(text, MOST_TEXT)
        for number, text in enumerate(match.groups(), 1)
    }
