"""Search of whole logs with the patterns of a job, to write and measure patterns."""

import os
import re
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from operator import itemgetter

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.errors.lines import plain_line
from exporter.logs.lexicon import GENERIC, Lexicon
from exporter.logs.packs import END_BYTES, FULL_READ_BYTES, Pack, PackDetector
from exporter.logs.packs_reader import read_packs
from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.records import record_ends
from exporter.logs.search.engine import RECORD_TIMEOUT_S, SMALL_BYTES, SearchEngine
from exporter.logs.search.extraction import NumberExtractor
from exporter.logs.search.findings import LogFindings
from exporter.logs.search.literals import safe_length
from exporter.logs.tail_reader import CHUNK_BYTES, LogTail
from exporter.logs.timestamps import TimestampReader
from launcher.scan.log_file import (
    PROBE_BYTES,
    ReadRange,
    UnreadableLog,
    non_text_reason,
    os_error_text,
    read_chunks,
    split_records,
    unreadable_reason,
)
from launcher.scan.position import ExpectedTotals, PositionFollower, WorkPosition
from launcher.scan.suggestions import ProgressCandidate, progress_lines

COUNT_ALL_BYTES = 4 << 20  # up to this size all matches are counted, above it only those of errors
SEGMENT_BYTES = 64 << 20  # bytes per search: bounds the findings kept in memory for a long log
EDGE_BYTES = 256 << 10  # start and end of a log in which unmatched progress is searched
MOST_TEXT = 200  # characters shown of a record or group
NO_TOTALS = ExpectedTotals()
NEWLINE, RETURN = b"\n\r"
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
    is_pack_detected: bool = False  # whether the pack was detected, not given
    pack_evidence: ScanRecord | None = None  # first record that indicates the detected pack
    position: WorkPosition | None = None  # position, without an unfinished last record
    # last record without an end: a sidecar ignores it until it, or its worker, ends
    unfinished: ScanRecord | None = None
    pattern_results: list[PatternResult] = field(default_factory=list)
    unmatched: list[UnmatchedRecord] = field(default_factory=list)
    nearest_pack: tuple[str, str] | None = None  # if nothing was found: the nearest pack, and why
    notes: tuple[str, ...] = ()
    timeouts: dict[str, int] = field(default_factory=dict)  # records per pattern whose search timed out
    search_cpu_s: float = 0.0  # reading, searching, and counting records, as in a sidecar
    detect_cpu_s: float = 0.0  # detecting the pack
    count_cpu_s: float = 0.0  # counting matches, and locating the last ones

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes searched per second of CPU time; None if the log is too small to measure."""
        return self.size / self.search_cpu_s if self.search_cpu_s > 0 and self.size else None

    @property
    def has_no_match(self) -> bool:
        return not any(
            found.last for found in self.pattern_results if found.kind not in (PatternKind.ERROR, PatternKind.MARK)
        )


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
    if (problem := unreadable_reason(path)) is not None:
        raise UnreadableLog(path, problem)
    try:
        with open(path, "rb", buffering=0) as source:
            facts = os.fstat(source.fileno())
            report = LogScan(path, facts.st_size, pack=lexicon.pack)
            report.problem = non_text_reason(source.read(PROBE_BYTES))
            if report.problem is None:
                read: ReadRange = lambda offset, count: os.pread(source.fileno(), count, offset)  # noqa: E731
                scanner = _LogScanner(report, lexicon, totals, read, facts.st_mtime)
                scanner.run(count_all or facts.st_size <= COUNT_ALL_BYTES)
            return report
    except OSError as error:
        raise UnreadableLog(path, os_error_text(error)) from error


def _finding_keys(pattern: Pattern) -> set[tuple[str, str]]:
    """Keys of the findings that a pattern can produce."""
    if pattern.kind is PatternKind.VALUE or pattern.kind is PatternKind.PAIRS:
        return {("value", name) for name in NumberExtractor(pattern).names}
    return {(f"{pattern.kind} {pattern.begins}", pattern.name)}


def _group_without_shared_keys(patterns: Mapping[int, Pattern]) -> list[list[int]]:
    """Group patterns so that within a group no two share a key."""
    layers: list[tuple[list[int], set[tuple[str, str]]]] = []
    for index, pattern in patterns.items():
        keys = _finding_keys(pattern)
        for members, taken in layers:
            if not keys & taken:
                members.append(index)
                taken |= keys
                break
        else:
            layers.append(([index], keys))
    return [members for members, _ in layers]


class _LogScanner:
    def __init__(
        self, report: LogScan, lexicon: Lexicon, totals: ExpectedTotals, read: ReadRange, written_at: float
    ) -> None:
        """``written_at``: time of the last record, to complete timestamps without a date."""
        self._report = report
        self._lexicon = lexicon
        self._totals = totals
        self._read = read
        self._timestamps = TimestampReader(written_at)
        self._follower: PositionFollower  # new for each search, with its pack
        # Middle of a long log, where the search keeps only some positions: enough to follow it. The start, which shows
        # how the log counts, and the end are followed record by record.
        self._middle: Span = 0, 0
        self._earlier_timeouts: dict[str, int] = {}  # counts of the engine before the search, by pattern
        self._patterns: tuple[Pattern, ...] = ()
        self._ambiguous_patterns: set[int] = set()  # patterns that share a key with another
        self._lines_before: list[tuple[int, int]] = []  # offset of each part read, and the lines before it
        self._found_values: set[str] = set()  # names of all values found
        self._searched_spans: list[Span] = []  # parts of the log searched one by one
        self._last_match_spans: dict[int, Span] = {}  # part with the last match, by pattern, if known
        self._last_match_offsets: dict[
            int, dict[str, int]
        ] = {}  # record offset of the last match, by pattern and value name

    def run(self, count_all: bool) -> None:
        report, lexicon = self._report, self._lexicon
        auto = lexicon.new_detector()
        if auto is not None:
            report.is_pack_detected, report.pack = True, self._detect_pack(auto)
        engine = lexicon.engine(report.pack)
        while (late := self._search(engine, auto)) is not None:
            report.pack, engine = late, lexicon.engine(late)
        report.notes = engine.notes
        started = time.process_time()
        if count_all:
            self._count_matches()
        self._locate_last_matches()
        self._show_last_matches(engine)
        report.timeouts = {
            name: count - self._earlier_timeouts.get(name, 0)
            for name, count in engine.timeouts.items()
            if count > self._earlier_timeouts.get(name, 0)
        }
        self._track_position(engine, self._middle[1], self._complete_end)
        report.position = self._follower.position
        self._check_edges(engine)
        if report.is_pack_detected and report.pack != GENERIC:
            report.pack_evidence = self._find_pack_evidence(
                next(pack for pack in read_packs() if pack.name == report.pack)
            )
        self._number_lines()
        report.count_cpu_s = time.process_time() - started

    # -- pack detection --------------------------------------------------------------------------

    def _detect_pack(self, auto: PackDetector) -> str:
        started = time.process_time()
        for text, _ in read_chunks(self._read, 0, min(self._report.size, FULL_READ_BYTES)):
            auto.feed(text)
            if auto.is_final:
                break
        self._report.detect_cpu_s = time.process_time() - started
        return auto.choice or GENERIC

    def _find_pack_evidence(self, pack: Pack) -> ScanRecord | None:
        for text, offset in read_chunks(self._read, 0, self._report.size):
            if any(pattern.may_match(text) for pattern in pack.detect):
                for start, raw in split_records(text):
                    plain = plain_line(raw, None).encode("utf-8", "replace")
                    if any(pattern.may_match(plain) and pattern.regex.search(plain) for pattern in pack.detect):
                        return self._make_record(raw, offset + start)
        return None

    # -- searching -------------------------------------------------------------------------------

    def _search(self, engine: SearchEngine, auto: PackDetector | None) -> str | None:
        """Search the log as a sidecar does. Returns another pack's name if the log turns out to be of that pack."""
        report = self._report
        self._patterns = (*self._lexicon.progress_patterns(report.pack), *self._lexicon.errors)
        self._searched_spans, self._last_match_spans, self._last_match_offsets = [], {}, {}
        self._follower = PositionFollower(report.path, self._lexicon, report.pack, self._totals)
        self._lines_before, report.lines, report.records, report.unfinished = [], 0, 0, None
        self._found_values = set()
        self._middle = self._find_edges()
        self._earlier_timeouts = dict(engine.timeouts)
        report.pattern_results = [_empty_result(pattern) for pattern in self._patterns]
        tail, started, detect_s = LogTail(report.path), time.process_time(), 0.0
        try:
            scan, begin, end = engine.begin_file(self._timestamps), 0, 0
            after_return = False
            for piece in tail.read_chunks(max(report.size, 1)):
                self._lines_before.append((piece.offset, report.lines))
                lines, records = record_ends(piece.buffer, piece.end)
                report.lines += lines
                report.records += records - (after_return and piece.buffer[0] == NEWLINE)
                after_return = piece.buffer[piece.end - 1] == RETURN
                if auto is not None and not auto.is_final and piece.offset >= FULL_READ_BYTES - CHUNK_BYTES:
                    before = time.process_time()
                    auto.feed(bytes(piece.buffer[max(0, piece.end - END_BYTES - 1) : piece.end]))
                    detect_s += time.process_time() - before
                    if auto.choice not in (None, report.pack):
                        return auto.choice
                scan.feed(piece.buffer, piece.end, piece.offset)
                end = piece.offset + piece.end
                if end - begin >= SEGMENT_BYTES:
                    self._add_findings(engine, scan.finish(tail.reread), (begin, end))
                    scan, begin = engine.begin_file(self._timestamps), end
            offset = max(end, tail.position().offset)
            is_bar_state = bool(tail.read_bar_state())
            if rest := tail.pop_unfinished_record():
                self._lines_before.append((offset, report.lines))
                scan.feed(rest, len(rest), offset)
                end = offset + len(rest)
                if not is_bar_state and (text := _shown_text(rest)):
                    report.unfinished = ScanRecord(offset, text, unfinished=True)
            self._add_findings(engine, scan.finish(tail.reread), (begin, end))
            if tail.problem is not None:
                raise UnreadableLog(report.path, tail.problem)
            report.size = end
            last = self._read(end - 1, 1) if end else b"\n"
            report.lines += last != b"\n"
            report.records += last not in (b"\n", b"\r")
            return None
        finally:
            tail.close()
            report.detect_cpu_s += detect_s
            report.search_cpu_s += time.process_time() - started - detect_s

    def _add_findings(self, engine: SearchEngine, findings: LogFindings, span: Span) -> None:
        """Merge the findings of one part into the results."""
        if not self._searched_spans:
            self._track_position(engine, 0, self._middle[0])
        self._searched_spans.append(span)
        self._follower.add(findings, self._middle[0], min(self._middle[1], self._complete_end))
        owners: dict[tuple[str, str], list[int]] = {}
        for index, pattern in enumerate(self._patterns):
            if pattern.kind is PatternKind.ERROR:
                found = self._report.pattern_results[index]
                if count := findings.errors.get(pattern.name, 0):
                    self._last_match_spans[index] = span
                found.matches = (found.matches or 0) + count
            else:
                for key in _finding_keys(pattern):
                    owners.setdefault(key, []).append(index)
        self._ambiguous_patterns = {index for of in owners.values() if len(of) > 1 for index in of}
        self._found_values |= findings.values.keys()
        self._assign(findings, {key: of[0] for key, of in owners.items() if of[0] not in self._ambiguous_patterns})

    def _assign(self, findings: LogFindings, owners: Mapping[tuple[str, str], int]) -> None:
        """Assign each finding to its pattern, unless that has a later one."""
        for position in findings.positions:
            kind = PatternKind.RESUME if position.resumed else PatternKind.POSITION
            index = owners.get((f"{kind} True", position.pattern))
            if index is not None and self._record_if_later(index, position.pattern, position.offset):
                found = self._report.pattern_results[index]
                found.done, found.total, found.rank = position.done, position.total, position.rank
                found.epoch, found.epochs = position.epoch, position.epochs
        for mark in findings.marks:
            index = owners.get((f"{PatternKind.MARK} {mark.begins}", mark.name))
            if index is not None:
                self._record_if_later(index, mark.name, mark.offset)
        for name, of_ranks in findings.values.items():
            rank, value = max(of_ranks.items(), key=lambda entry: entry[1].offset)
            index = owners.get(("value", name))
            if index is not None and self._record_if_later(index, name, value.offset):
                self._report.pattern_results[index].values[name] = value.number
                self._report.pattern_results[index].rank = rank

    def _record_if_later(self, index: int, name: str, offset: int) -> bool:
        """Record the offset of a finding; False if a later one is known."""
        offsets = self._last_match_offsets.setdefault(index, {})
        if offset < offsets.get(name, 0):
            return False
        offsets[name] = offset
        return True

    # -- counts and last matches -----------------------------------------------------------------

    def _count_matches(self) -> None:
        """Count the matches of patterns other than errors: the engine reports only their last one."""
        counted = {
            index: pattern for index, pattern in enumerate(self._patterns) if pattern.kind is not PatternKind.ERROR
        }
        engine = SearchEngine(
            [replace(p, name=str(index), kind=PatternKind.ERROR, keys=()) for index, p in counted.items()]
        )
        for span in self._searched_spans:
            errors = self._search_span(engine, span).errors
            for index in counted:
                found, count = self._report.pattern_results[index], errors.get(str(index), 0)
                found.matches = (found.matches or 0) + count
                if count:
                    self._last_match_spans[index] = span

    def _locate_last_matches(self) -> None:
        """Find the last matches of errors, and of patterns that share a key."""
        alone = dict[int, Pattern]()
        for index, pattern in enumerate(self._patterns):
            if self._report.pattern_results[index].matches == 0:
                continue
            if pattern.kind is PatternKind.ERROR:
                alone[index] = replace(pattern, name=str(index), kind=PatternKind.MARK)
            elif index in self._ambiguous_patterns and self._may_have_values(pattern):
                # values are found by pattern name
                alone[index] = pattern if pattern.kind is PatternKind.VALUE else replace(pattern, name=str(index))
        pieces = [*pairwise((*(offset for offset, _ in self._lines_before), self._report.size))]
        for layer in _group_without_shared_keys(alone):
            left = {index: len(_finding_keys(alone[index])) for index in layer}
            engine = SearchEngine([alone[index] for index in layer])
            for piece in reversed(pieces):
                now = [index for index in layer if self._may_contain(piece, index, left[index])]
                if now:
                    owners = {key: index for index in now for key in _finding_keys(alone[index])}
                    self._assign(self._search_span(engine, piece), owners)
                    for index in now:
                        left[index] = len(_finding_keys(alone[index])) - len(self._last_match_offsets.get(index, ()))

    def _may_have_values(self, pattern: Pattern) -> bool:
        """Whether the pattern may have a match: none of its values was found if it has none."""
        names = {name for kind, name in _finding_keys(pattern) if kind == "value"}
        return not names or not names.isdisjoint(self._found_values)

    def _may_contain(self, piece: Span, index: int, left: int) -> bool:
        """Whether a piece of the log may contain findings still missing for a pattern."""
        begin, end = self._last_match_spans.get(index, (0, self._report.size))
        return left > 0 and piece[0] < end and (piece[0] >= begin or index in self._last_match_offsets)

    def _search_span(self, engine: SearchEngine, span: Span) -> LogFindings:
        scan = engine.begin_file()
        for text, offset in read_chunks(self._read, *span):
            scan.feed(text, len(text), offset)
        return scan.finish(self._read)

    def _find_edges(self) -> Span:
        """End of the log's start, and start of its end, in whole records; (0, 0) for a short log."""
        last = self._report.size - SMALL_BYTES
        if last <= 0:
            return 0, 0
        ended = _RECORD_END.search(self._read(last, SMALL_BYTES))
        last = last if ended is None else last + ended.end()
        text = self._read(0, SMALL_BYTES)
        return min(last, max(text.rfind(b"\n"), text.rfind(b"\r")) + 1), last

    def _track_position(self, engine: SearchEngine, begin: int, end: int) -> None:
        """Follow the position through every record of a part of the log."""
        text = self._read(begin, max(0, end - begin))
        scan = engine.begin_file(self._timestamps)
        scan.feed(text, len(text), begin)
        self._follower.add(scan.finish(self._read), begin, end)

    @property
    def _complete_end(self) -> int:
        """Offset of the unfinished last record, else the end of the log."""
        unfinished = self._report.unfinished
        return self._report.size if unfinished is None else unfinished.offset

    def _make_record(self, raw: bytes, offset: int) -> ScanRecord:
        return ScanRecord(offset, _shown_text(raw), unfinished=offset >= self._complete_end)

    def _show_last_matches(self, engine: SearchEngine) -> None:
        """Fill in the records and groups of the last matches."""
        for index, offsets in self._last_match_offsets.items():
            found, pattern, offset = self._report.pattern_results[index], self._patterns[index], max(offsets.values())
            text = self._read(offset, CHUNK_BYTES)
            ended = _RECORD_END.search(text)
            raw = text if ended is None else text[: ended.start()]
            found.last = self._make_record(raw, offset)
            found.groups = _match_groups(engine, pattern, plain_line(raw, None).encode("utf-8", "replace"))

    def _check_edges(self, engine: SearchEngine) -> None:
        """Find unmatched records that look like progress; without any finding, also the nearest pack."""
        report, size = self._report, self._report.size
        has_position = any(found.last and found.kind is PatternKind.POSITION for found in report.pattern_results)

        def has_findings(record: bytes) -> bool:
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
            for start, raw in split_records(text)
            if offset + start < self._complete_end
        )
        # a suggestion of the same name would hide the pattern
        names = [found.name for found in report.pattern_results if found.own or found.last]
        for candidate, suggestion in progress_lines(lines, has_findings, names):
            report.unmatched.append(UnmatchedRecord(self._make_record(candidate.raw, candidate.offset), suggestion))
        if report.has_no_match:
            report.nearest_pack = PackDetector(read_packs()).find_nearest(b"\n".join(text for text, _ in texts))

    def _number_lines(self) -> None:
        """Set the line numbers of the records shown."""
        report = self._report
        shown = [found.last for found in report.pattern_results if found.last is not None]
        shown += [unmatched.record for unmatched in report.unmatched]
        shown += [record for record in (report.pack_evidence, report.unfinished) if record is not None]
        offset, line = 0, 1
        for record in sorted(shown, key=lambda record: record.offset):
            place = bisect_right(self._lines_before, record.offset, key=itemgetter(0)) - 1
            if place >= 0 and self._lines_before[place][0] > offset:
                offset, line = self._lines_before[place][0], self._lines_before[place][1] + 1
            for text, _ in read_chunks(self._read, offset, record.offset):
                line += text.count(b"\n")
            offset, record.line = record.offset, line


def _empty_result(pattern: Pattern) -> PatternResult:
    return PatternResult(
        pattern.name,
        pattern.kind,
        pattern.is_user_defined,
        unit=pattern.unit,
        severity=pattern.severity,
        begins=pattern.begins if pattern.kind is PatternKind.MARK else None,
    )


def _shown_text(raw: bytes) -> str:
    return plain_line(raw, MOST_TEXT).strip()


def _match_groups(engine: SearchEngine, pattern: Pattern, record: bytes) -> dict[str, str | None]:
    """Groups of a pattern's match in a record; empty if the search times out."""
    if len(record) <= safe_length(pattern.regex):
        match = pattern.regex.search(record)
    else:
        expression = engine.time_budget.compile_with_timeout(pattern)
        try:
            match = None if expression is None else expression.search(record, timeout=RECORD_TIMEOUT_S, concurrent=True)
        except TimeoutError:
            match = None
    if match is None:
        return {}
    names = {number: name for name, number in pattern.regex.groupindex.items()}
    return {
        names.get(number, str(number)): None if text is None else plain_line(text, MOST_TEXT)
        for number, text in enumerate(match.groups(), 1)
    }
