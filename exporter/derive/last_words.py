"""What the ends of a worker's logs say about why it ended."""

from collections.abc import Sequence

from exporter.derive.exits import LastWords
from exporter.derive.log_errors import LogError, last_error
from exporter.derive.patterns import Scanner

_SCANNER = Scanner()


def last_words(texts: Sequence[tuple[str, bytes]]) -> LastWords:
    """The words of a worker whose logs end with ``texts``, (name, text) each.

    Only what nothing has followed counts: an error that the work went on after has been got over.
    Where a log ends with a last error, its own words count, not those of errors before it.
    """
    classes: set[str] = set()
    chosen: tuple[bool, int, str, LogError] | None = None
    for name, text in texts:
        final = _SCANNER.after_progress(text)
        error = last_error(final)
        words = final if error is None or not error.certain else _block(error)
        found = _SCANNER.scan(words).errors
        classes |= set(found)
        if error is not None:
            # one that also has a class is the more telling; of two alike the later log, which is that of errors
            rank = (error.certain, len(found), name, error)
            chosen = rank if chosen is None or rank[:2] >= chosen[:2] else chosen
    if chosen is None:
        return LastWords(tuple(sorted(classes)))
    _, _, name, error = chosen
    line = error.line if error.led_to is None else f"{error.line}, which led to {error.led_to}"
    return LastWords(tuple(sorted(classes)), line, f"{error.source}, in {name}" if error.source else name)


def _block(error: LogError) -> bytes:
    return "\n".join((*error.traceback, error.line, error.led_to or "")).encode("utf-8", "replace")
