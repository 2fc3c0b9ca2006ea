"""Results of a scan as text and JSON."""

import math
from collections.abc import Iterator, Sequence

from exporter.logs.errors.lines import plain_line
from exporter.logs.patterns import PatternKind
from launcher.scan.log_file import UnreadableLog
from launcher.scan.position import WorkPosition
from launcher.scan.records import (
    ErrorMatches,
    MarkMatches,
    MatchedRecord,
    NearestPack,
    PositionMatches,
    ScannedLog,
    ScanResults,
    SuggestedPattern,
    UnmatchedLine,
    UnreadableLogRecord,
    ValueMatches,
)
from launcher.scan.scan import LogScan, PatternResult, ScanRecord, UnmatchedRecord

RECORD_CELLS = 100  # characters of a record in the table
LEAST_BYTES = 1 << 20  # minimum size to show a log's throughput: smaller ones measure the warm-up


def scan_results(reports: Sequence[LogScan], unreadable: Sequence[UnreadableLog] = ()) -> ScanResults:
    """The results as a record. Numbers that JSON lacks become null; their text is in the groups."""
    errors = tuple(UnreadableLogRecord(error.path, error.problem) for error in unreadable)
    return ScanResults(logs=tuple(map(_scanned_log, reports)), errors=errors)


def _scanned_log(report: LogScan) -> ScannedLog:
    return ScannedLog(
        path=report.path,
        bytes=report.size,
        problem=report.problem,
        records=report.records,
        lines=report.lines,
        pack=report.pack,
        pack_chosen=report.is_pack_detected,
        pack_evidence=_matched_record(report.pack_evidence),
        position=report.position,
        unfinished=_matched_record(report.unfinished),
        nearest_pack=None if report.nearest_pack is None else NearestPack(*report.nearest_pack),
        cpu_seconds=report.search_cpu_s,
        bytes_per_cpu_second=report.bytes_per_s,
        choose_cpu_seconds=report.detect_cpu_s,
        count_cpu_seconds=report.count_cpu_s,
        patterns=tuple(map(_matches, report.pattern_results)),
        unmatched=tuple(map(_unmatched_line, report.unmatched)),
        notes=report.notes,
        timeouts=report.timeouts,
    )


def _matched_record(record: ScanRecord | None) -> MatchedRecord | None:
    return None if record is None else MatchedRecord(record.line, record.offset, record.text, record.unfinished)


def _matches(found: PatternResult) -> PositionMatches | ValueMatches | MarkMatches | ErrorMatches:
    head = found.name, found.kind.value, found.own, found.matches
    tail = found.groups, _matched_record(found.last)
    if found.kind in (PatternKind.POSITION, PatternKind.RESUME):
        return PositionMatches(*head, found.unit, found.done, found.total, found.epoch, found.epochs, found.rank, *tail)
    if found.kind in (PatternKind.VALUE, PatternKind.PAIRS):
        numbers = {name: number if math.isfinite(number) else None for name, number in found.values.items()}
        return ValueMatches(*head, numbers, found.rank, *tail)
    if found.kind is PatternKind.MARK:
        return MarkMatches(*head, found.begins, *tail)
    return ErrorMatches(*head, found.severity, *tail)


def _unmatched_line(unmatched: UnmatchedRecord) -> UnmatchedLine:
    record, suggested = unmatched.record, unmatched.suggestion
    suggestion = None if suggested is None else SuggestedPattern(*suggested)
    return UnmatchedLine(record.line, record.offset, record.text, record.unfinished, suggestion)


def render_scan(reports: Sequence[LogScan]) -> list[str]:
    lines: list[str] = []
    for report in reports:
        lines += [*([""] if lines else []), *_log_lines(report)]
    return lines


def _log_lines(report: LogScan) -> Iterator[str]:
    path = printable_text(report.path)
    if report.problem is not None:
        yield f"{path}: {report.problem}"
        return
    if not report.size:
        yield f"{path}: is empty"
        return
    speed = report.bytes_per_s
    shown = f" ({speed / 1e6:,.0f} MB/s)" if speed is not None and report.size >= LEAST_BYTES else ""
    yield (
        f"{path}: {report.size:,} bytes, {report.records:,} record{'' if report.records == 1 else 's'}; "
        f"searched in {report.search_cpu_s:.3f} s of CPU time{shown}, counted in {report.count_cpu_s:.3f} s"
    )
    yield f"  pack {report.pack}{_pack_reason(report)}"
    if report.position is not None:
        yield f"  position {_position_text(report.position)}"
    table = [found for found in report.pattern_results if found.last is not None or found.matches or found.own]
    if table:
        yield from _table_lines(table)
    else:
        yield "  no pattern matches anything in it"
    if report.nearest_pack is not None:
        yield f"  nearest pack: {report.nearest_pack[0]}, which {report.nearest_pack[1]}"
    if report.unmatched:
        yield "  these lines resemble progress, but no position was found in them:"
    for unmatched in report.unmatched:
        yield f"    line {unmatched.record.line}: {unmatched.record.text[:RECORD_CELLS]}"
        if unmatched.suggestion is not None:
            name, pattern = unmatched.suggestion
            quoted = pattern.replace("'", "''")
            yield f"      progress.patterns: {name}: '{quoted}'"
    if report.unfinished is not None:
        yield (
            f"  note: line {report.unfinished.line} ends in an unfinished record, which the position leaves out; "
            "a sidecar reads it when it is complete or its worker has ended"
        )
    for note in report.notes:
        yield f"  note: {printable_text(note)}"
    for name, count in report.timeouts.items():
        records = "1 record" if count == 1 else f"{count:,} records"
        yield f'  note: the search for pattern "{name}" took too long in {records} and was stopped'


def _pack_reason(report: LogScan) -> str:
    if not report.is_pack_detected:
        return ", as requested"
    if report.pack_evidence is None:
        return ": no line indicates another one"
    return f", detected from line {report.pack_evidence.line}: {report.pack_evidence.text[:RECORD_CELLS]}"


def _position_text(position: WorkPosition) -> str:
    text = f"{_count_text(position.done)} {position.unit}"
    if position.total is not None:
        text = f"{_count_text(position.done)}/{_count_text(position.total)} {position.unit}"
    if position.epoch is not None and position.unit != "epochs":
        text += f", in epoch {position.epoch}" + ("" if position.epochs is None else f"/{position.epochs}")
    text += f", by {printable_text(position.pattern)}" if position.pattern is not None else ", where the work resumes"
    return text + (", and another counter advanced after it" if position.aside else "")


def _count_text(number: float) -> str:
    return f"{number:.12g}"


def _table_lines(table: Sequence[PatternResult]) -> Iterator[str]:
    head = ("PATTERN", "KIND", "MATCHES", "LAST", "LINE", "BYTE", "RECORD")
    rows = [head, *(_cells(found) for found in table)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    for row in rows:
        cells = [
            cell.rjust(width) if name in ("MATCHES", "LINE", "BYTE") else cell.ljust(width)
            for name, cell, width in zip(head[:-1], row[:-1], widths, strict=True)
        ]
        yield f"  {'  '.join(cells)}  {row[-1]}".rstrip()


def _cells(found: PatternResult) -> tuple[str, ...]:
    kind = found.kind.value
    if found.kind in (PatternKind.POSITION, PatternKind.RESUME):
        kind = f"{kind} of {found.unit}"
    elif found.kind is PatternKind.MARK:
        kind = "begins" if found.begins else "ends"
    elif found.kind is PatternKind.ERROR:
        kind = f"error, {found.severity}"
    last = found.last
    return (
        printable_text(found.name),
        kind,
        "-" if found.matches is None else f"{found.matches:,}",
        _match_text(found),
        "" if last is None else str(last.line),
        "" if last is None else str(last.offset),
        "" if last is None else last.text[:RECORD_CELLS] + (" (unfinished)" if last.unfinished else ""),
    )


def _match_text(found: PatternResult) -> str:
    """The last match as text: a position, named numbers, or the groups."""
    if found.done is not None:
        text = str(found.done) if found.total is None else f"{found.done}/{found.total}"
        if found.epoch is not None:
            text += f" in epoch {found.epoch}" + ("" if found.epochs is None else f"/{found.epochs}")
        return text
    if found.values:
        if list(found.values) == [found.name]:
            return f"{found.values[found.name]:.12g}"
        return _shorten(", ".join(f"{name} {number:.12g}" for name, number in found.values.items()))
    return _shorten(", ".join(text for text in found.groups.values() if text))


def _shorten(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable_text(text: str) -> str:
    """Escape untrusted text for a terminal."""
    return plain_line(text.encode("utf-8", "surrogateescape"))
