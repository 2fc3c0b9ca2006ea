"""What the lines of a log say: progress, values and errors.

A pattern may name literals, one of which each of its matches holds: the regular
expression then runs only where one of them stands.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

POSITION = "items"
"""Name of the pattern that gives the position: group 1 items done, group 2, if any, items in all."""
RESUME = "resume"
"""Name of the pattern that says where the work goes on: a position that is not work done."""


@dataclass(frozen=True)
class Pattern:
    """One compiled pattern over bytes."""

    name: str
    regex: re.Pattern[bytes]
    literals: tuple[bytes, ...] = ()
    severity: str | None = None

    def may_match(self, text: bytes) -> bool:
        """Whether a match is possible at all."""
        return not self.literals or any(literal in text for literal in self.literals)


def compile_pattern(name: str, pattern: str, severity: str | None = None, literals: Iterable[str] = ()) -> Pattern:
    """A pattern over UTF-8 bytes; raises ``re.error`` when it is not a regular expression."""
    regex = re.compile(pattern.encode("utf-8", "surrogateescape"), re.MULTILINE)
    return Pattern(name, regex, tuple(literal.encode() for literal in literals), severity)


MOST_DIGITS = 18
_COUNT = rf"\d{{1,{MOST_DIGITS}}}"
"""Bounded, as all repetitions here: a record can hold a million digits, and no count does."""
_NUMBER = r"(?<![\d.])[-+]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,3})?"

PROGRESS: tuple[Pattern, ...] = (
    compile_pattern(POSITION, rf"Processed ({_COUNT})/({_COUNT}) items", literals=("Processed ",)),
    compile_pattern(RESUME, rf"[Rr]esum(?:ing|ed) (?:at|from) ({_COUNT})/({_COUNT})", literals=("Resum", "resum")),
    compile_pattern("batch", rf"Batch ({_COUNT})/({_COUNT})", literals=("Batch ",)),
    compile_pattern("epoch", rf"Epoch:? ({_COUNT})", literals=("Epoch",)),
    compile_pattern("throughput", rf"({_NUMBER}) items?/s", literals=(" item",)),
    compile_pattern("loss", rf"\bloss[ \t]{{0,8}}[:=][ \t]{{0,8}}({_NUMBER})", literals=("loss",)),
)
"""Progress patterns of every job, unless its file gives others under the same names."""

ERRORS: tuple[Pattern, ...] = (
    compile_pattern(
        "cuda_oom",
        r"CUDA out of memory|CUDA error: out of memory|cuda\.OutOfMemoryError",
        "critical",
        ("out of memory", "OutOfMemoryError"),
    ),
    compile_pattern("cuda_error", r"CUDA error: (?!out of memory)", "critical", ("CUDA error: ",)),
    compile_pattern(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout"
        r"|NCCL[^\n]{0,80}(?:timed out|timeout (?:at|after|reached|exceeded))",
        "critical",
        ("collective operation timeout", "NCCL"),
    ),
    compile_pattern(
        "disk_full",
        r"No space left on device|Disk quota exceeded",
        "critical",
        ("No space left", "quota exceeded"),
    ),
    compile_pattern(
        "host_oom",
        r"[Oo]ut of memory: Killed process|oom-kill:|oom[-_]kill event",
        "critical",
        ("of memory: K", "oom-kill", "oom_kill event"),
    ),
    compile_pattern(
        "connection",
        r"[Cc]onnection (?:refused|reset|timed out)|[Nn]etwork is unreachable",
        "warning",
        ("onnection ", "is unreachable"),
    ),
    compile_pattern(
        "peer_lost",
        r"Connection (?:closed|reset) by (?:remote )?peer|remote process exited or there was a network error"
        r"|ncclRemoteError|Broken pipe",
        "warning",
        ("by peer", "by remote peer", "remote process exited", "ncclRemoteError", "Broken pipe"),
    ),
    compile_pattern(
        "data_error",
        r"corrupt(?:ed)? (?:data|file|record)|parse error",
        "warning",
        ("corrupt", "parse error"),
    ),
    compile_pattern(
        "python_traceback",
        r"^(?:\[rank\d{1,6}\]: ?)?Traceback \(most recent call last\):",
        "warning",
        ("Traceback (most",),
    ),
)
"""Error patterns of every job; the bare word "timeout" is in every configuration dump and so is none of them."""


@dataclass
class Scan:
    """What one piece of log says, in the order of its lines."""

    positions: list[tuple[bool, int, int | None]] = field(default_factory=list)
    """(whether it is a resume, done, total) for each position."""
    values: dict[str, float] = field(default_factory=dict)
    """Last value of each other progress pattern."""
    errors: dict[str, int] = field(default_factory=dict)
    """Matches of each error pattern, at most one per line."""


class Scanner:
    """Finds progress and errors in pieces of whole lines."""

    def __init__(self, progress: Sequence[Pattern] = PROGRESS, errors: Sequence[Pattern] = ERRORS) -> None:
        self._positions = [pattern for pattern in progress if pattern.name in (POSITION, RESUME)]
        self._values = [pattern for pattern in progress if pattern.name not in (POSITION, RESUME)]
        self.errors = tuple(errors)

    def scan(self, text: bytes) -> Scan:
        """Everything that the patterns find in ``text``. A return ends a record as a newline does."""
        found = Scan()
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        places: list[tuple[int, bool, int, int | None]] = []
        for pattern in self._positions:
            if pattern.may_match(text):
                for match in pattern.regex.finditer(text):
                    done, total = _two_numbers(match)
                    if done is not None:
                        places.append((match.start(), pattern.name == RESUME, done, total))
        found.positions = [entry[1:] for entry in sorted(places, key=lambda entry: entry[0])]
        for pattern in self._values:
            if pattern.may_match(text):
                last = deque(pattern.regex.finditer(text), maxlen=1)
                if last and (value := _number(last[0])) is not None:
                    found.values[pattern.name] = value
        for pattern in self.errors:
            if pattern.may_match(text) and (count := _matching_lines(pattern.regex, text)):
                found.errors[pattern.name] = count
        return found

    def after_progress(self, text: bytes) -> bytes:
        """What follows the last position in ``text``: an error before it has been got over."""
        last = 0
        for pattern in self._positions:
            if pattern.may_match(text):
                for match in pattern.regex.finditer(text):
                    last = max(last, match.end())
        return text[last:]


def _matching_lines(regex: re.Pattern[bytes], text: bytes) -> int:
    """Lines that hold at least one match."""
    count, place = 0, 0
    while match := regex.search(text, place):
        count += 1
        place = text.find(b"\n", match.end())
        if place < 0:
            break
        place += 1
    return count


def _two_numbers(match: re.Match[bytes]) -> tuple[int | None, int | None]:
    groups = match.groups()
    if any(group is not None and len(group) > MOST_DIGITS for group in groups[:2]):
        return None, None
    try:
        done = int(groups[0]) if groups and groups[0] else None
        total = int(groups[1]) if len(groups) > 1 and groups[1] else None
    except ValueError:
        return None, None
    return done, total


def _number(match: re.Match[bytes]) -> float | None:
    groups = match.groups()
    try:
        return float(groups[0]) if groups and groups[0] else None
    except ValueError:
        return None


def merge(standard: Sequence[Pattern], own: Iterable[Pattern]) -> tuple[Pattern, ...]:
    """The standard patterns, with those of a job in place of or after them, by name."""
    patterns = {pattern.name: pattern for pattern in standard}
    for pattern in own:
        patterns[pattern.name] = pattern
    return tuple(patterns.values())
