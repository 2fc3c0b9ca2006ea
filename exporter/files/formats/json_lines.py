"""JSON Lines: each line is a JSON text. Small files are read whole, of large ones the first and last lines."""

import json

from exporter.files.formats import json_text
from exporter.files.formats.json_text import BYTE_ORDER_MARK, WHITE_SPACE, read_ends
from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "jsonl"
EXTENSIONS = (".jsonl", ".ndjson")
PARTIAL_REASON = "only its first and last lines were checked"


def claims(source: FileSource) -> bool:
    """Whether the text begins with a bracket."""
    return json_text.claims(source)


def inspect(source: FileSource) -> ValidFile:
    """Count the lines that are not blank, if all were read.

    A last line without a newline may be half-written; in any other line that is damage.
    """
    head, tail = read_ends(source)
    *first, last = head.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    if not tail:
        records = _check(first, "line {}")
        state = _classify_last_line(last)
        return ValidFile(NAME, records + (state == "whole"), *_unfinished_fields(state))
    _, *lines = tail.split(b"\n")
    if not lines:
        raise CheckUndecided("its last line is longer than the part that was checked")
    records = _check(first, "line {}") + _check(lines[:-1], "a line near its end")
    state = _classify_last_line(lines[-1])
    if not records and state != "whole":
        raise CheckUndecided("its lines are longer than the part that was checked")
    return ValidFile(NAME, None, *(_unfinished_fields(state) or (PARTIAL_REASON,)))


def _check(lines: list[bytes], place: str) -> int:
    """Count the lines that are not blank, each of which must be a value."""
    records = 0
    for number, line in enumerate(lines, 1):
        if not line.strip(WHITE_SPACE):
            continue
        try:
            json_text.parse_json(line.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise FileDamaged(f"{place.format(number)} is not UTF-8 text") from error
        except FileDamaged as error:
            raise FileDamaged(f"{place.format(number)} {_line_problem(error)}") from error
        records += 1
    return records


def _line_problem(error: FileDamaged) -> str:
    cause = error.__cause__
    return f"is not JSON: {cause.msg}" if isinstance(cause, json.JSONDecodeError) else str(error)


def _classify_last_line(line: bytes) -> str:
    """Classify the text after the last newline as "none", "whole" or "half"."""
    if not line.strip(WHITE_SPACE):
        return "none"
    try:
        json_text.parse_json(line.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            raise FileDamaged("its last line is not UTF-8 text") from error
        return "half"
    except FileDamaged as error:
        cause = error.__cause__
        if isinstance(cause, json.JSONDecodeError) and not json_text.is_truncated(cause):
            raise FileDamaged(f"its last line is not JSON: {cause.msg}") from error
        return "half"
    return "whole"


def _unfinished_fields(state: str) -> tuple[str, bool] | tuple[()]:
    return ("its last line is half-written", True) if state == "half" else ()
