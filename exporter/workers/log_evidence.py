"""Evidence from the ends of a worker's logs about why it ended."""

import re
from collections.abc import Iterable, Sequence

from exporter.logs.errors.last_error import LogError, last_error
from exporter.logs.errors.lines import without_survived
from exporter.logs.lexicon import Lexicon
from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.search.findings import LogPosition
from exporter.logs.search.literals import safe_length
from exporter.workers.exit_reason import LogEvidence

_RECORD_END = re.compile(rb"[\r\n]")


def log_evidence(texts: Sequence[tuple[str, bytes]], lexicon: Lexicon) -> LogEvidence:
    """Find the evidence in ``texts``, the (name, end) of each log.

    Only errors after the last progress count: the worker survived the others. If a log ends with a last error, only the
    text of that error is matched.
    """
    classes: set[str] = set()
    chosen: tuple[int, int, str, LogError] | None = None
    pack = lexicon.choose_pack(*(text for _, text in texts))
    engine, progress = lexicon.engine(pack), lexicon.progress_patterns(pack)
    for name, text in texts:
        moved = _last_progress_offset(engine.scan(text).positions)
        final = text if moved is None else _text_after_position(text, moved, progress)
        error = last_error(final, lexicon.errors)
        words = without_survived(final) if error is None or not error.certain else _block(error)
        found = engine.scan(words).errors
        classes |= set(found)
        if error is not None:
            # An error with a class is more informative; of two equal ones the later log wins, which is the error log.
            rank = (error.strength, len(found), name, error)
            chosen = rank if chosen is None or rank[:2] >= chosen[:2] else chosen
    if chosen is None:
        return LogEvidence(tuple(sorted(classes)))
    _, _, name, error = chosen
    line = error.line if error.led_to is None else f"{error.line}, which led to {error.led_to}"
    return LogEvidence(tuple(sorted(classes)), line, f"{error.source}, in {name}" if error.source else name)


def _last_progress_offset(positions: Iterable[LogPosition]) -> int | None:
    """Offset of the last record with a new position: a progress bar is redrawn when the program closes it."""
    place, known = None, dict[tuple[str, int | None], tuple[int, int | None]]()
    for position in positions:
        key, value = (position.pattern, position.rank), (position.done, position.epoch)
        if known.get(key) != value:
            place, known[key] = position.offset, value
    return place


def _text_after_position(text: bytes, offset: int, progress: Sequence[Pattern]) -> bytes:
    """Text after the position in the record at ``offset``: an error may share the line of a progress bar."""
    ended = _RECORD_END.search(text, offset)
    record = text[offset : len(text) if ended is None else ended.start()]
    end = 0
    for pattern in progress:
        if pattern.kind in (PatternKind.POSITION, PatternKind.RESUME) and len(record) <= safe_length(pattern.regex):
            for match in pattern.regex.finditer(record) if pattern.may_match(record) else ():
                end = max(end, match.end())
    return text[offset + end :]


def _block(error: LogError) -> bytes:
    return "\n".join((*error.traceback, error.line, error.led_to or "")).encode("utf-8", "replace")
