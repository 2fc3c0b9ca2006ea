"""The last error in a log: its decisive line, its place, and its consequence.

Ranks that share a file mark their lines (``[rank3]: ``, ``[default0]:``, ``3: `` of ``srun -l``, ``(Worker pid=7) ``).
Each of these streams is parsed separately.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.lazy_regex import lazy_regex
from exporter.logs.errors.lines import (
    ASIDES,
    CRASH,
    ERROR,
    HINT,
    LINES,
    NOTICED,
    STRONG,
    SUMMARY,
    TIERS,
    TRIGGER,
    LineClassifier,
    plain_line,
    split_prefixes,
)
from exporter.logs.patterns import Pattern
from exporter.logs.redact import redact

MOST_BYTES = 256 * 1024  # searched at the end of the text
LINE_LENGTH = 300  # characters of the decisive line
TRACEBACK_LINES = 60
NEAR_LINES = 30  # lines up to which errors belong to the same failure
_AFTERMATH_LINES = 400  # lines of announcements and consequences that may follow the error they are about
_MESSAGE_LINES = 15  # lines after an exception that may be its message, where nothing else is searched
_CHAIN_LINES = 50  # lines after an exception within which the next of its chain may begin
_INTERLEAVED_LINES = 10  # lines of other streams allowed inside a traceback


@dataclass(frozen=True)
class LogError:
    """One error in a log, without rank marks and secrets."""

    kind: str  # class of the exception (`RuntimeError`), or kind of line: `segmentation_fault`, `nccl_timeout`
    line: str  # decisive line: the first in time of a chain
    traceback: tuple[str, ...]
    led_to: str | None  # consequence: the last exception of its chain, or the crash right after it
    source: str | None  # `train.py:12`, where the program raised it, if the traceback shows it
    offset: int  # byte of the text at which the decisive line begins
    line_index: int  # number of lines before it
    lines_from_end: int  # number of lines after it
    strength: int  # the higher, the more specific; 0 for a line that only mentions an error

    @property
    def certain(self) -> bool:
        """Whether the line is an error, not only a mention of one."""
        return self.strength > 0


_RANKS = {weight: rank for rank, tier in enumerate(TIERS) for weight in tier}


@dataclass
class _ErrorEntry:
    """One exception of a chain, or another error line."""

    kind: str
    text: str
    line_index: int
    source: str | None = None
    weight: str = ERROR

    @property
    def rank(self) -> tuple[int, bool]:
        """How much it explains: an exception without a message explains less than the next of its chain."""
        return _RANKS[self.weight], ":" in self.text


@dataclass
class _Failure:
    """One traceback with its chain, or one error line."""

    weight: str
    stream: str
    first: int
    entries: list[_ErrorEntry] = field(default_factory=list)
    state: str = ""
    indent: int = 0
    in_group: bool = False
    interleaved_lines: int = 0
    lines_since: int = 0
    source: str | None = None
    last_frame: str = ""
    root: list[str] | None = None  # fields of the process that failed first, from torchrun's summary
    head: list[str] = field(default_factory=list)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TRACEBACK_LINES // 2))
    omitted_lines: int = 0

    def add(self, text: str) -> None:
        """Keep the first and the last lines of the traceback."""
        if len(self.head) < TRACEBACK_LINES // 2 - 1:
            self.head.append(text)
        else:
            self.omitted_lines += len(self.tail) == self.tail.maxlen
            self.tail.append(text)

    def traceback(self) -> tuple[str, ...]:
        gap = [f"  ... {self.omitted_lines} lines left out ..."] if self.omitted_lines else []
        return (*self.head, *gap, *self.tail)

    def cause(self) -> _ErrorEntry:
        """Return the first of the entries that explain most; a group comes after the exceptions in it."""
        if self.in_group and len(self.entries) > 1 and "sub-exception" in self.entries[0].text:
            return self.entries[1]
        return max(self.entries, key=lambda entry: entry.rank)

    @property
    def last(self) -> int:
        return self.entries[-1].line_index if self.entries else self.first


_HEADER = "Traceback (most recent call last)"
_FRAME = lazy_regex(r'\s{0,40}File "([^"]{1,1000})", line (\d{1,9})')
_HEADLESS_FRAME = lazy_regex(r'\s{2,40}File "[^"]{1,1000}", line \d{1,9}, in ')
_GROUP_BAR = lazy_regex(r" {0,200}\| ?")
_GROUP_RULE = lazy_regex(r" {0,200}\+[-+ \d.]{0,200}$")
_WEAK = lazy_regex(r"((?:\w{1,80}\.){0,12}[A-Za-z_]\w{0,80})(?:: |:?$)")
_LEVELS = frozenset(
    {"TRACE", "DEBUG", "INFO", "NOTE", "NOTICE", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL", "Node"}
)
_SLURM = lazy_regex(r"(?:slurmstepd|srun)[\w.-]{0,80}: ")
_CHAIN = ("The above exception was the direct cause of", "During handling of the above exception")
_FATAL = lazy_regex(r"Fatal Python error: ")
_STACK_LINE = lazy_regex(r"Current thread |Thread 0x|  File |\s*$|Python runtime state|Extension modules:|  <|Stack \(")
_TERMINATE = lazy_regex(
    r"terminate called (?:after throwing an instance of '([^']{1,200})'|without an active exception)"
)
_WHAT = lazy_regex(r"\s{0,10}what\(\): {0,4}(.{0,2000})")
_NATIVE_LINE = lazy_regex(r"frame #|Exception raised from")
_ROOT_FIELD = lazy_regex(r"\s{0,10}(rank|exitcode|traceback) {0,6}: (.{1,300})")


class _ErrorScanner:
    """Parses the lines of a log once and notes failures; ``errors`` are the patterns of all jobs."""

    def __init__(self, errors: Sequence[Pattern], log: bytes) -> None:
        self._lines = LineClassifier(errors, log)
        self._asides: dict[
            str, tuple[int, str]
        ] = {}  # line that announces a lesser exception and its weight, by stream
        self.found: list[_Failure] = []
        self._open: dict[str, _Failure] = {}

    def feed(self, line_index: int, raw: bytes) -> None:
        """Take the next line."""
        if not self._open and not TRIGGER.search(raw):
            return
        text = plain_line(raw)
        stream, level, text = split_prefixes(text, self._lines.learnt)
        for beginning, weight in ASIDES.items():
            if text.startswith(beginning):
                self._asides[stream] = line_index, weight
        if _HEADER in text:
            self._handle_header(line_index, stream, text)
        elif not self._try_continue(line_index, stream, text):
            self._handle_standalone_line(line_index, stream, text, level)

    def _begin(self, weight: str, stream: str, line_index: int, state: str = "") -> _Failure:
        failure = _Failure(weight, stream, line_index, state=state)
        self.found.append(failure)
        if state:
            self._open[stream] = failure
        else:
            self._open.pop(stream, None)
        return failure

    def _handle_header(self, line_index: int, stream: str, text: str) -> None:
        failure = self._open.get(stream)
        if failure is None or not (failure.state == "chain" or (failure.in_group and failure.state == "after")):
            above, weight = self._asides.get(stream, (-1, ERROR))
            failure = self._begin(weight if above == line_index - 1 else ERROR, stream, line_index, "frames")
        before = text.partition(_HEADER)[0]
        if before.strip() in ("", "traceback :"):
            failure.indent = len(before) - len(before.lstrip()) if not failure.in_group else 0
        failure.in_group = failure.in_group or before.endswith("Exception Group ")
        failure.state, failure.interleaved_lines, failure.source = "frames", 0, None
        failure.add(text[failure.indent :])

    def _try_continue(self, line_index: int, stream: str, text: str) -> bool:
        """Whether the line belongs to an error that began above."""
        failure = self._open.get(stream)
        if failure is None:
            return False
        if failure.in_group and (bar := _GROUP_BAR.match(text)):
            text = text[bar.end() :]
        elif failure.indent and text[: failure.indent].isspace():
            text = text[failure.indent :]
        return self._STATES[failure.state](self, failure, line_index, text)

    def _close(self, failure: _Failure) -> None:
        self._open.pop(failure.stream, None)

    def _in_frames(self, failure: _Failure, line_index: int, text: str) -> bool:
        if not text.strip():
            return True
        if text[0] in " \t\u2502\u256d\u2570":
            failure.add(text)
            if frame := _FRAME.match(text):
                failure.source = f"{frame[1].rpartition('/')[2]}:{frame[2]}"
                failure.last_frame = text.strip()
            return True
        match = STRONG.match(text)
        if match is None and not failure.interleaved_lines:
            match = _WEAK.match(text)
            match = None if match is not None and match[1] in _LEVELS else match
        if match is None:
            failure.interleaved_lines += 1
            if failure.interleaved_lines > _INTERLEAVED_LINES:
                self._close(failure)
            return False
        failure.add(text)
        kind = match[1].rpartition(".")[2]
        failure.entries.append(_ErrorEntry(kind, text, line_index, failure.source))
        if kind == "ChildFailedError":
            failure.root = []
        failure.state, failure.lines_since = "after", 0
        return True

    def _in_after(self, failure: _Failure, line_index: int, text: str) -> bool:
        failure.lines_since += 1
        if text.startswith(_CHAIN):
            failure.add(text)
            failure.state = "chain"
            return True
        if failure.in_group and _GROUP_RULE.match(text):
            failure.add(text)
            failure.lines_since, failure.source = 0, None
            return True
        if failure.in_group and failure.lines_since == 1 and failure.source is None:
            return self._in_frames(failure, line_index, text)  # an exception that was never raised has no frames
        if failure.root is not None:
            if text.startswith("Root Cause"):
                failure.root.clear()
            elif match := _ROOT_FIELD.match(text):
                failure.root.append(f"{match[1]} {match[2]}" if match[1] != "traceback" else match[2])
        if failure.lines_since > _CHAIN_LINES:
            self._close(failure)
            return False
        if failure.lines_since > _MESSAGE_LINES and failure.root is None:
            return False
        # a possible message line is no separate error, but a crash right after it is, and what Slurm says
        return not any(weight == CRASH and pattern.match(text) for weight, _, pattern in LINES) and not (
            _TERMINATE.search(text) or _FATAL.match(text) or _HEADLESS_FRAME.match(text) or _SLURM.match(text)
        )

    def _in_chain(self, failure: _Failure, line_index: int, text: str) -> bool:
        failure.lines_since += 1
        if failure.lines_since > _CHAIN_LINES:
            self._close(failure)
        return not text.strip()

    def _in_stack(self, failure: _Failure, line_index: int, text: str) -> bool:
        if not _STACK_LINE.match(text):
            self._close(failure)
            return False
        if text.strip():
            failure.add(text)
        if failure.entries[0].source is None and (frame := _FRAME.match(text)):
            failure.entries[0].source = f"{frame[1].rpartition('/')[2]}:{frame[2]}"  # most recent call first
        return True

    def _in_native(self, failure: _Failure, line_index: int, text: str) -> bool:
        if what := _WHAT.match(text):
            failure.entries[0].text = f"{failure.entries[0].kind}: {what[1]}"
            failure.add(text)
            return True
        if _NATIVE_LINE.match(text):
            failure.add(text)
            return True
        failure.interleaved_lines += 1
        if failure.interleaved_lines > _INTERLEAVED_LINES:
            self._close(failure)
        return False

    # functions of the class: bound methods in an instance would be a cycle, which only the garbage collector frees
    _STATES: ClassVar = {
        "frames": _in_frames,
        "after": _in_after,
        "chain": _in_chain,
        "stack": _in_stack,
        "native": _in_native,
    }

    def _handle_standalone_line(self, line_index: int, stream: str, text: str, level: str) -> None:
        """Handle a line that belongs to no error above."""
        if _HEADLESS_FRAME.match(text):
            self._begin(ERROR, stream, line_index, "frames")
            self._try_continue(line_index, stream, text)
        elif _FATAL.match(text):
            failure = self._begin(CRASH, stream, line_index, "stack")
            failure.entries.append(_ErrorEntry("fatal_python_error", text, line_index))
            failure.add(text)
        elif match := _TERMINATE.search(text):
            failure = self._begin(CRASH, stream, line_index, "native")
            failure.entries.append(_ErrorEntry(match[1] or "terminate", text, line_index))
            failure.add(text)
        elif (found := self._lines.classify(text, level)) is not None:
            weight, kind = found
            failure = _Failure(weight, stream, line_index, [_ErrorEntry(kind, text, line_index)])
            self.found.append(failure)

    def close(self) -> list[_Failure]:
        """Return the failures in line order; a truncated traceback ends with its last frame."""
        for failure in self.found:
            if not failure.entries and failure.last_frame:
                failure.entries.append(_ErrorEntry("traceback", failure.last_frame, failure.first, failure.source))
            for entry in failure.entries:
                entry.weight = self._lines.weigh(entry.kind, entry.text, failure.weight)
            if failure.entries:
                failure.weight = failure.cause().weight
        return [failure for failure in self.found if failure.entries]


def last_error(text: bytes, errors: Sequence[Pattern]) -> LogError | None:
    """Find the last error at the end of a log; None if there is none.

    The decisive error is the first in time: of a chain of exceptions, before a crash, among several ranks, and before
    the launcher's summary. ``errors`` are the patterns of all jobs; a line that matches a critical one is an error by
    itself.
    """
    skipped = max(0, len(text) - MOST_BYTES)
    lines = text[skipped:].split(b"\n")
    reader = _ErrorScanner(errors, text[skipped:])
    for place, raw in enumerate(lines):
        reader.feed(place, raw)
    found = reader.close()
    chosen, led_to = _choose_failure(found)
    if chosen is None:
        return None
    cause = chosen.cause()
    if chosen.entries[-1] is not cause and led_to is None and not chosen.in_group:
        led_to = chosen.entries[-1].text
    line = cause.text
    if chosen.root:
        line = f"{cause.kind}: {', '.join(chosen.root)}"
    last = len(lines) - (2 if lines[-1] == b"" else 1)
    return LogError(
        kind=cause.kind,
        line=redact(line).strip()[:LINE_LENGTH],
        traceback=tuple(redact("\n".join(chosen.traceback())).split("\n")) if chosen.head else (),
        led_to=None if led_to is None else redact(led_to).strip()[:LINE_LENGTH],
        source=cause.source,
        offset=skipped + sum(len(raw) + 1 for raw in lines[: cause.line_index]),
        line_index=(text.count(b"\n", 0, skipped) if skipped else 0) + cause.line_index,
        lines_from_end=max(0, last - cause.line_index),
        strength=cause.rank[0],
    )


def _choose_failure(found: Sequence[_Failure]) -> tuple[_Failure | None, str | None]:
    """Choose the decisive failure. Return it and its consequence."""
    end = max((failure.last for failure in found if failure.weight != HINT), default=0)
    for weights in reversed(TIERS):
        candidates = [failure for failure in found if failure.weight in weights]
        if candidates and end - candidates[-1].last <= _AFTERMATH_LINES:
            break
    else:
        return (found[-1], None) if found else (None, None)
    if weights == (SUMMARY,):
        return _first_announcement(candidates, found), None
    at, led_to = len(candidates) - 1, None
    seen = {candidates[at].stream}
    while at > 0:
        chosen, before = candidates[at], candidates[at - 1]
        if chosen.first - before.last > NEAR_LINES:
            break
        if chosen.weight == CRASH:
            led_to = chosen.entries[0].text
        elif not (
            (chosen.stream and before.stream and before.stream not in seen)
            or weights == (NOTICED,)
            or (not chosen.head and not before.head and chosen.cause().kind == before.cause().kind)
        ):
            break
        seen.add(before.stream)
        at -= 1
    return candidates[at], led_to


def _first_announcement(candidates: Sequence[_Failure], found: Sequence[_Failure]) -> _Failure:
    """The announcement that says most: torchrun's own, a message above the first one, or the first one itself."""
    at = len(candidates) - 1
    while at > 0 and not candidates[at].root and candidates[at].first - candidates[at - 1].last <= NEAR_LINES:
        at -= 1
    first = candidates[at]
    above = [hint for hint in found if hint.weight == HINT and 0 < first.first - hint.last <= NEAR_LINES]
    messages = [hint for hint in above if hint.entries[0].kind == "message"]
    return messages[-1] if messages and not first.root else first
