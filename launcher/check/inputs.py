"""Checks of the job's input files: present, one per worker, and in the format that their names indicate."""

import codecs
import csv
import glob
import json
import os
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml

from exporter.contract.lazy_dataclass import dataclass
from exporter.files.formats.record_count import TOP_BYTES, read_csv_layout
from launcher.check import finding
from launcher.check.finding import CheckFinding
from launcher.plan.placeholders import fill_placeholders, fill_template, placeholder_values
from launcher.plan.plan import WORKERS, Plan, TaskPlan
from launcher.words import names_text

MOST_FILES = 200  # files of one entry whose contents are checked
MOST_BYTES = 1 << 20  # read from one file, and of its unpacked text
TAIL_BYTES = 64 * 1024  # read from the end of one file
MOST_ROWS = 20  # rows of a table whose fields are counted
MOST_NAMES = 3  # files named in one message

_GZIP = b"\x1f\x8b"
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class InputEntry:
    """One entry of ``inputs`` with the paths it matches."""

    place: str
    pattern: str
    per_worker: bool  # whether it has a placeholder of a process, such as ``{rank}``
    paths: tuple[Path, ...]
    missing: tuple[str, ...]  # paths or globs that match nothing


def find_inputs(plan: Plan, patterns: Sequence[str]) -> list[InputEntry]:
    facts, found = plan.facts_before_run(), []
    for number, pattern in enumerate(patterns):
        filled = [fill_placeholders(pattern, placeholder_values(plan, planned, facts)) for planned in _workers(plan)]
        per_worker = filled[0] != fill_template(plan, pattern, facts)
        matched = {name: _match_paths(str(Path(plan.workdir, os.path.expanduser(name)))) for name in filled}
        paths = dict.fromkeys(path for here in matched.values() for path in here)
        missing = tuple(name for name, here in matched.items() if not here)
        found.append(InputEntry(f"inputs[{number}]", pattern, per_worker, tuple(paths), missing))
    return found


def _workers(plan: Plan) -> list[TaskPlan]:
    """Processes that read the inputs: front ends and benchmarks do not."""
    return [planned for planned in plan.tasks if planned.stage == WORKERS]


def _match_paths(name: str) -> list[Path]:
    """Files that a path or glob matches. An existing path is taken literally, whatever characters it contains."""
    if os.path.lexists(name):
        return [Path(name)]
    return [Path(path) for path in sorted(glob.glob(name, recursive=True))] if glob.has_magic(name) else []


def check_inputs(plan: Plan, patterns: Sequence[str], *, check_contents: bool) -> Iterator[CheckFinding]:
    """One finding for each entry, or for each kind of problem with its files."""
    if not patterns:
        message = "the job file names none; for example `inputs: [data/part_{rank}.jsonl]`"
        yield finding.not_checked("inputs", "inputs", message)
    workers = len(_workers(plan))
    for entry in find_inputs(plan, patterns):
        found = [*_presence(entry), *_split(entry, workers), *_content(entry, check_contents=check_contents)]
        yield from found
        if not found:
            size = sum(_size(path) for path in entry.paths)
            each = f", one for each of {workers} workers" if entry.per_worker else ""
            word = "file" if len(entry.paths) == 1 else "files"
            message = f"{entry.pattern}: {len(entry.paths)} {word}{each}, {size} bytes"
            yield finding.ok("inputs", entry.place, message)


def _presence(entry: InputEntry) -> Iterator[CheckFinding]:
    if entry.missing:
        what = "names no file" if len(entry.missing) == 1 else "name no file"
        message = f"{_names_text(entry.missing)} {what}; check the path, which is relative to the working directory"
        yield finding.error("no-input", entry.place, message)


def _split(entry: InputEntry, workers: int) -> Iterator[CheckFinding]:
    """Warn if there are fewer files with a worker's number than workers."""
    if entry.per_worker and not entry.missing and len(entry.paths) < workers:
        what = f"{entry.pattern}: {len(entry.paths)} files for {workers} workers, so some read the same"
        yield finding.warning("split", entry.place, f"{what}; use {{rank}}, which is different for each")


def _content(entry: InputEntry, *, check_contents: bool) -> Iterator[CheckFinding]:
    problems: dict[tuple[str, str], list[str]] = {}
    for path in entry.paths[:MOST_FILES]:
        if (problem := _file_problem(path, check_contents=check_contents)) is not None:
            problems.setdefault(problem, []).append(str(path))
    for (code, what), names in problems.items():
        yield finding.error(code, entry.place, f"{_names_text(names)}: {what}")
    if check_contents and len(entry.paths) > MOST_FILES and not problems:
        message = f"{entry.pattern}: only the first {MOST_FILES} of {len(entry.paths)} files were checked"
        yield finding.ok("inputs", entry.place, message)


def _names_text(names: Sequence[str]) -> str:
    return names_text([f'"{name}"' for name in names[:MOST_NAMES]], MOST_NAMES, len(names))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _file_problem(path: Path, *, check_contents: bool) -> tuple[str, str] | None:
    """Problem with one file, as a code and a message with the fix, or None."""
    try:
        facts = path.stat()
        if stat.S_ISDIR(facts.st_mode):
            empty = next(os.scandir(path), None) is None
            return ("empty-input", "the directory is empty; has its data been copied?") if empty else None
        if not os.access(path, os.R_OK):
            return "unreadable-input", "no permission to read it; ask its owner, or run `chmod +r`"
        if stat.S_ISREG(facts.st_mode) and facts.st_size == 0:
            return "empty-input", "the file is empty; has the program that writes it finished?"
        wrong = _content_problem(path) if check_contents and stat.S_ISREG(facts.st_mode) else None
    except OSError as error:
        return "unreadable-input", f"it cannot be read ({error.strerror}); is its file system mounted?"
    return ("bad-input", wrong) if wrong is not None else None


def _content_problem(path: Path) -> str | None:
    """Problem with the content that is read, or None. Unknown formats have none."""
    with path.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        head = source.read(MOST_BYTES)
        source.seek(max(0, size - TAIL_BYTES))
        tail: bytes | None = source.read(TAIL_BYTES)
    whole = size <= MOST_BYTES
    name = path.name.lower()
    if head.startswith(_GZIP):
        try:
            unpacker = zlib.decompressobj(31)
            head = unpacker.decompress(head, MOST_BYTES)
        except zlib.error as error:
            return f"it cannot be unpacked ({error}); fetch it again"
        if whole and not unpacker.eof and not unpacker.unconsumed_tail:
            return "the compressed file is truncated; fetch it again"
        whole = whole and unpacker.eof and not unpacker.unused_data
        tail = head[-TAIL_BYTES:] if whole else None
    elif name.endswith(".gz"):
        return "its name ends in .gz and it is not gzip data; rename it, or fetch it again"
    parse = PARSERS.get(Path(name.removesuffix(".gz")).suffix)
    if parse is None:
        return None
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=whole)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 at byte {error.start}; convert it with iconv"
    last = tail.decode("utf-8", "replace") if tail is not None else None
    return parse(text, last, whole)


def json_problem(text: str, tail: str | None, is_complete: bool) -> str | None:
    """Problem with a JSON document. In one too large to read, only the first character is checked."""
    if not is_complete:
        wrong = text.lstrip()[:1] not in "{["
        return "it is not JSON: it does not begin with { or [" if wrong else None
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.strip().count("\n") and lines_problem(text, tail, is_complete) is None:
            return None  # JSON Lines under the name of JSON
        return f"it is not JSON: {error}"
    return None


def lines_problem(text: str, tail: str | None, is_complete: bool) -> str | None:
    """Problem with the first or the last record of JSON Lines."""
    records = _complete_lines(text, is_complete)
    if not records:
        return None
    found = _record_problem(records[0], "the first record")
    if found is None and tail is not None:
        *_, last = [line for line in tail.split("\n") if line.strip()] or [""]
        found = _record_problem(last, "the last record") if last and len(last) < TAIL_BYTES // 2 else None
    return found


def _complete_lines(text: str, is_complete: bool) -> list[str]:
    *lines, rest = text.split("\n")  # not splitlines, because a record may contain other Unicode line ends
    return [f"{line}\n" for line in [*lines, *([rest] if is_complete else [])] if line.strip()]


def _record_problem(line: str, which: str) -> str | None:
    try:
        json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"{which} is not JSON ({error}); is the file truncated?"
    return None


def table_problem(text: str, tail: str | None, is_complete: bool) -> str | None:
    """Problem with the first rows of a table, such as unequal numbers of fields.

    Where tabs separate the fields, quotes may be ordinary characters.
    """
    data = text.encode()
    layout = read_csv_layout(data[:TOP_BYTES])
    lines, delimiter = _complete_lines(data[layout.begin :].decode(), is_complete), layout.delimiter.decode()
    problem = _rows_problem(csv.reader(lines, delimiter=delimiter))
    if delimiter != "\t" or problem is None:
        return problem
    return problem if _rows_problem(csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE)) else None


def _rows_problem(reader: Iterator[list[str]]) -> str | None:
    try:
        rows = [row for row, _ in zip(reader, range(MOST_ROWS), strict=False)]
    except csv.Error as error:
        return f"it is not a table: {error}"
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            return f"row {number} has {len(row)} fields and the first has {len(rows[0])}; fix the row, or its quotes"
    return None


def yaml_problem(text: str, tail: str | None, is_complete: bool) -> str | None:
    """Problem with a YAML file, if it was read completely."""
    if not is_complete:
        return None
    try:
        deque(yaml.parse(text, Loader=_YAML), maxlen=0)  # reads to the end
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        return f"it is not YAML{place}: {getattr(error, 'problem', None) or error}"
    return None


PARSERS: dict[str, Callable[[str, str | None, bool], str | None]] = {
    ".json": json_problem,
    ".jsonl": lines_problem,
    ".ndjson": lines_problem,
    ".csv": table_problem,
    ".tsv": table_problem,
    ".yaml": yaml_problem,
    ".yml": yaml_problem,
}  # by suffix; arguments: text, last part of the file, whether the text is complete
