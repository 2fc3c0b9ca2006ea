"""Searching logs: our engine beside reading alone and a plain loop over the lines, in CPU time of one run."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from bench.clock import Figures, spread
from bench.log_corpus import FLOOD, SHARES, Truth, write_log
from exporter.logs.lexicon import GENERIC, Lexicon
from exporter.logs.packs_reader import read_error_patterns, read_packs
from exporter.logs.patterns import Pattern, PatternKind, compile_pattern
from exporter.logs.search.engine import SearchEngine
from exporter.logs.search.findings import LogFindings

BYTES = 64 << 20  # of the log of each profile
SIZES = {FLOOD: 16 << 20}  # of those that are of another size
PLAIN_BYTES = 4 << 20  # that much of it is given to the plain loop
T = TypeVar("T")

REAL = "with all patterns"  # of the names of the rows for what a sidecar searches for
CHUNK = 1 << 20
ROUNDS = 5
FILES, LOOKS, LINES = 32, 40, 25
"""Of a live job: logs, looks at each, and lines that a look finds: 100 lines a second, four looks a second."""

PATTERNS: tuple[Pattern, ...] = (
    compile_pattern("documents", r"Encoded (\d+) of (\d+) documents", kind=PatternKind.POSITION, unit="items"),
    compile_pattern("step", r"Step (\d+)/(\d+)", kind=PatternKind.POSITION, unit="steps"),
    compile_pattern(
        "bar", r"\d{1,3}%\|[^|]{0,400}\| (\d{1,18})/(\d{1,18}) \[", kind=PatternKind.POSITION, unit="items"
    ),
    compile_pattern("rate", r"(\d{1,18}\.?\d{0,18}) docs?/s", kind=PatternKind.VALUE),
    compile_pattern("round", r"Round (\d+)", kind=PatternKind.VALUE),
    compile_pattern("loss", r"train_loss=\s*(\d+\.?\d*)", kind=PatternKind.VALUE),
    compile_pattern(
        "stats",
        r"Engine stats: .{0,80}?running: (?P<running>\d{1,9}).{0,80}?tokens/s: (?P<speed>\d{1,9}\.?\d{0,9})",
        kind=PatternKind.VALUE,
    ),
    compile_pattern("oom", r"out of memory|OOM|CUDA failure", kind=PatternKind.ERROR),
    compile_pattern("net", r"connection refused|timed out|network is down", kind=PatternKind.ERROR),
    compile_pattern("data", r"corrupt|bad checksum|parse error", kind=PatternKind.ERROR),
)
SEARCHED: tuple[Pattern, ...] = (
    *PATTERNS[:7],
    compile_pattern("oom", r"ERROR.{0,80}(?:out of memory|OOM|CUDA failure)", kind=PatternKind.ERROR),
    compile_pattern("net", r"ERROR.{0,80}(?:connection refused|timed out|network is down)", kind=PatternKind.ERROR),
    compile_pattern("data", r"ERROR.{0,80}(?:corrupt|bad checksum|parse error)", kind=PatternKind.ERROR),
)  # the same, with errors that the literals alone do not decide


def measure() -> Figures:
    """Megabytes a second of CPU time for each profile, microseconds a look at a live log, and whether goals are met."""
    with tempfile.TemporaryDirectory() as folder:
        logs = {profile: Path(folder, f"{profile}.log") for profile in (*SHARES, FLOOD)}
        truths = {profile: write_log(path, profile, SIZES.get(profile, BYTES)) for profile, path in logs.items()}
        runs = [_Run(profile, logs[profile], truths[profile], PATTERNS) for profile in logs]
        runs.append(_Run("searched flood", logs[FLOOD], truths[FLOOD], SEARCHED))
        runs += [_Run(f"{name} {REAL}", logs[name], truths[name], _real()) for name in SHARES]
        for _ in range(ROUNDS):
            # both go round all logs, so that the memory caches help neither
            for run in runs:
                run.search()
            for run in runs:
                run.only_read()
        found: Figures = {run.name: run.figures() for run in runs}
        found["live"] = _live(logs["typical"], PATTERNS)
        found[f"live {REAL}"] = _live(logs["typical"], _real())
    goals = {
        "backlog: 3 GB/s of a typical log": found["typical"]["engine_mb_s"]["median"] >= 3000,
        "backlog: 2 GB/s of a dense log": found["dense"]["engine_mb_s"]["median"] >= 2000,
        "backlog: 3 GB/s of a sparse log": found["sparse"]["engine_mb_s"]["median"] >= 3000,
        "backlog: a quarter of reading alone": all(found[name]["of_reading"]["median"] >= 0.25 for name in SHARES),
        "flood: 100 MB/s where literals decide": found[FLOOD]["engine_mb_s"]["median"] >= 100,
        "flood: 3 times a plain loop otherwise": found["searched flood"]["of_plain"] >= 3,
        "live: half a percent of a core": found["live"]["core_percent"]["median"] <= 0.5,
        f"backlog: 3 GB/s of a typical log {REAL}": found[f"typical {REAL}"]["engine_mb_s"]["median"] >= 3000,
        f"backlog: 2 GB/s of a dense log {REAL}": found[f"dense {REAL}"]["engine_mb_s"]["median"] >= 2000,
        f"backlog: 3 GB/s of a sparse log {REAL}": found[f"sparse {REAL}"]["engine_mb_s"]["median"] >= 3000,
        f"live: half a percent of a core {REAL}": found[f"live {REAL}"]["core_percent"]["median"] <= 0.5,
    }
    return {"bytes": BYTES, "rounds": ROUNDS, **found, "goals": goals}


def _real() -> tuple[Pattern, ...]:
    """What a sidecar searches for: the ten patterns as those of a job, those of any program, and all errors."""
    lexicon = Lexicon(read_packs(), read_error_patterns(), PATTERNS, GENERIC)
    return (*lexicon.progress_patterns(GENERIC), *lexicon.errors)


class _Run:
    """One log with one set of patterns, and megabytes a second of CPU time in each round."""

    def __init__(self, name: str, path: Path, truth: Truth, patterns: Sequence[Pattern]) -> None:
        self.name, self.path, self.truth, self.patterns = name, path, truth, patterns
        self.engine, self.size = SearchEngine(patterns), path.stat().st_size
        self.ours: list[float] = []
        self.reading: list[float] = []

    def search(self) -> None:
        """One look at the whole log; stops when it finds anything but what was written."""
        seconds, found = _cpu(lambda: _search(self.path, self.engine))
        _check(found, self.truth)
        self.ours.append(self.size / seconds / 1e6)

    def only_read(self) -> None:
        """The least that anyone can do: read the log and find the last record end of each chunk."""
        self.reading.append(self.size / _cpu(lambda: sum(end for _, end, _ in _chunks(self.path)))[0] / 1e6)

    def figures(self) -> Figures:
        """Of all rounds, beside a plain loop over the lines."""
        text = self.path.read_bytes()[:PLAIN_BYTES]
        plain = len(text) / _cpu(lambda: _plain(text, self.patterns))[0] / 1e6
        return {
            "engine_mb_s": spread(self.ours),
            "reading_mb_s": spread(self.reading),
            "of_reading": spread([a / b for a, b in zip(self.ours, self.reading, strict=True)]),
            "plain_mb_s": round(plain, 1),
            "of_plain": round(spread(self.ours)["median"] / plain, 1),
        }


def _cpu(work: Callable[[], T]) -> tuple[float, T]:
    begun = time.process_time()
    result = work()
    return time.process_time() - begun, result


def _chunks(path: Path) -> Iterator[tuple[bytearray, int, int]]:
    """(Buffer, end of its last record, offset) of each chunk; the buffer is used again."""
    buffer, held, offset = bytearray(CHUNK + (64 << 10)), 0, 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with memoryview(buffer) as view:
            while read := os.readv(descriptor, [view[held : held + CHUNK]]):
                top = held + read
                end = max(buffer.rfind(b"\n", held, top), buffer.rfind(b"\r", held, top)) + 1
                yield buffer, end, offset
                view[: top - end] = bytes(view[end:top])
                held, offset = top - end, offset + end
    finally:
        os.close(descriptor)


def _search(path: Path, engine: SearchEngine) -> LogFindings:
    scan = engine.begin_file()
    for buffer, end, offset in _chunks(path):
        scan.feed(buffer, end, offset)
    with path.open("rb") as log:
        return scan.finish(lambda offset, size: os.pread(log.fileno(), size, offset))


def _check(found: LogFindings, truth: Truth) -> None:
    """Stop when anything differs from what was written."""
    positions = {p.pattern: (p.done, p.total) for p in found.positions if p.pattern in truth.positions}
    values = {name: ranks[None].number for name, ranks in found.values.items() if name in truth.values}
    errors = {name: found.errors.get(name, 0) for name in truth.errors}
    if (positions, values, errors) != (truth.positions, truth.values, truth.errors):
        raise AssertionError(f"{positions} {values} {errors} instead of {truth}")


def _plain(text: bytes, patterns: Sequence[Pattern]) -> tuple[dict[str, int], Figures]:
    """Each pattern in each line, as one would write it first."""
    counts, last = dict[str, int](), Figures()
    searches = [(pattern.name, pattern.kind is PatternKind.ERROR, pattern.regex.search) for pattern in patterns]
    for line in re.split(rb"[\r\n]", text):
        for name, is_error, search in searches:
            if match := search(line):
                if is_error:
                    counts[name] = counts.get(name, 0) + 1
                else:
                    last[name] = match.groups()
    return counts, last


def _live(path: Path, patterns: Sequence[Pattern]) -> Figures:
    """What following the logs of a busy node costs: a few lines at each look."""
    lines = path.read_bytes()[: 8 << 20].splitlines(keepends=True)
    pieces = [b"".join(lines[start : start + LINES]) for start in range(0, LINES * FILES * LOOKS, LINES)]
    engine, costs = SearchEngine(patterns), list[float]()
    engine.scan(pieces[0])  # automata are made when they are first needed
    for _ in range(ROUNDS):
        begun = time.process_time()
        for piece in pieces:
            scan = engine.begin_file()
            scan.feed(piece, len(piece), 0)
            scan.finish(lambda offset, size: b"")
        costs.append((time.process_time() - begun) / len(pieces))
    return {
        "look_us": spread([cost * 1e6 for cost in costs]),
        "core_percent": spread([cost * FILES * 4 * 100 for cost in costs]),
    }
