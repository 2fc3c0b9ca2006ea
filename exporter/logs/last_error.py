"""The last error in a log: its decisive line, its place, and its consequence.

Ranks that share a file mark their lines (``[rank3]: ``, ``[default0]:``, ``3: `` of ``srun -l``, ``(Worker pid=7) ``).
Each of these streams is parsed separately.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.lazy_regex import lazy_regex
from exporter.logs.patterns import Pattern
from exporter.logs.redact import redact

MOST_BYTES = 256 * 1024  # searched at the end of the text
LINE_LENGTH = 300  # characters of the decisive line
TRACEBACK_LINES = 60
MOST_LINE_LENGTH = 2048
NEAR_LINES = 30  # lines up to which errors belong to the same failure
_MESSAGE_LINES = 15  # lines after an exception that may be its message, where nothing else is searched
_CHAIN_LINES = 50  # lines after an exception within which the next of its chain may begin
_INTERLEAVED_LINES = 10  # lines of other streams allowed inside a traceback

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[0-Z\\^_`-~])|\x9b[0-?]*[ -/]*[@-~]"
)
_DROPPED = dict.fromkeys(
    (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
)
_DROPPED |= {0x2028: " ", 0x2029: " ", 0x0A: " "}


def plain_line(raw: bytes, most: int | None = MOST_LINE_LENGTH) -> str:
    """Return a line as a terminal finally shows it, without colours and control characters.

    A progress bar redraws its line after each return: only its last state is kept.
    """
    if b"\r" in raw:
        states = [state for state in raw.split(b"\r") if state.strip()]
        raw = states[-1] if states else b""
    if most is not None:
        raw = raw[: 4 * most]
    text = _plain_text(raw)
    return text if most is None else text[:most]


def _plain_text(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return text if text.isprintable() else _ESCAPE.sub("", text).translate(_DROPPED)


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
    certain: bool  # false for a line that only mentions an error, used if there is nothing better


_ERROR, _CRASH, _SUMMARY, _HINT = "error", "crash", "summary", "hint"


@dataclass
class _ErrorEntry:
    """One exception of a chain, or another error line."""

    kind: str
    text: str
    line_index: int
    source: str | None = None


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
        """Return the first entry in time; a group comes after the exceptions in it."""
        if self.in_group and len(self.entries) > 1 and "sub-exception" in self.entries[0].text:
            return self.entries[1]
        return self.entries[0]

    @property
    def last(self) -> int:
        return self.entries[-1].line_index if self.entries else self.first


_MARK = lazy_regex(r"\[default\d{1,6}\]:|\[(?:rank|Rank |RANK )?\d{1,6}\]:? ?| {0,5}\d{1,6}: |\([^()]{1,80}\) ")
_LOG_PREFIX = lazy_regex(
    r"(?:TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]{1,80}\] ?"
)
_HEADER = "Traceback (most recent call last)"
_FRAME = lazy_regex(r'\s{0,40}File "([^"]{1,1000})", line (\d{1,9})')
_HEADLESS_FRAME = lazy_regex(r'\s{2,40}File "[^"]{1,1000}", line \d{1,9}, in ')
_GROUP_BAR = lazy_regex(r" {0,200}\| ?")
_GROUP_RULE = lazy_regex(r" {0,200}\+[-+ \d.]{0,200}$")
_SUFFIXES = "Error|Exception|Interrupt|Exit|Timeout|Failure|Fault|Abort|Iteration|Warning|Group"
_STRONG = lazy_regex(rf"((?:\w{{1,80}}\.){{0,12}}\w{{1,80}}(?:{_SUFFIXES}))(?::(?: |$)|$)")
_WEAK = lazy_regex(r"((?:\w{1,80}\.){0,12}[A-Za-z_]\w{0,80})(?:: |:?$)")
_LEVELS = frozenset({"TRACE", "DEBUG", "INFO", "NOTE", "NOTICE", "WARN", "WARNING", "ERROR", "CRITICAL", "FATAL"})
_MENTION = lazy_regex(r"(?:^|[\s:(])((?:\w{1,80}\.){0,12}[A-Z]\w{0,80}(?:Error|Exception)): ")
_CHAIN = ("The above exception was the direct cause of", "During handling of the above exception")
_FATAL = lazy_regex(r"Fatal Python error: ")
_STACK_LINE = lazy_regex(r"Current thread |Thread 0x|  File |\s*$|Python runtime state|Extension modules:|  <|Stack \(")
_TERMINATE = lazy_regex(
    r"terminate called (?:after throwing an instance of '([^']{1,200})'|without an active exception)"
)
_WHAT = lazy_regex(r"\s{0,10}what\(\): {0,4}(.{0,2000})")
_NATIVE_LINE = lazy_regex(r"frame #|Exception raised from")
_ROOT_FIELD = lazy_regex(r"\s{0,10}(rank|exitcode|traceback) {0,6}: (.{1,300})")

_LINES: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    (_CRASH, "segmentation_fault", lazy_regex(r"\bSegmentation fault\b")),
    (_CRASH, "bus_error", lazy_regex(r"\bBus error\b")),
    (_CRASH, "illegal_instruction", lazy_regex(r"\bIllegal instruction\b")),
    (_CRASH, "floating_point_exception", lazy_regex(r"\bFloating point exception\b")),
    (_CRASH, "aborted", lazy_regex(r"(?:.{0,200}[: ]\d+\s+)?Aborted(?: +\(core dumped\).{0,500})?$")),
    (_CRASH, "killed", lazy_regex(r"(?:.{0,200}: (?:line \d+: +\d+|tasks? [\d,-]+:) +Killed\b|Killed$)")),
    (
        _CRASH,
        "heap_corruption",
        lazy_regex(
            r"(?:\*\*\* Error in .{0,200}: )?(?:double free or corruption|corrupted (?:size|double)|"
            r"free\(\): |malloc\(\): |realloc\(\): |munmap_chunk\(\): |\*\*\* (?:stack smashing|buffer overflow))"
        ),
    ),
    (_ERROR, "assertion", lazy_regex(r".{1,500}: Assertion [`'].{1,1000}' failed\.?")),
    (_ERROR, "panic", lazy_regex(r"thread '.{0,100}' (?:\(\d+\) )?panicked at ")),
    (
        _SUMMARY,
        "mpi_abort",
        lazy_regex(
            r"MPI_ABORT was invoked|.{0,100}application called MPI_Abort|Fatal error in P?MPI_"
            r"|(?:internal_)?Abort\(\d+\) on node"
            r"|.{0,100}(?:mpirun|mpiexec|prterun)\S{0,40} (?:noticed|has exited|detected)"
        ),
    ),
    (_SUMMARY, "process_failed", lazy_regex(r".{0,300}failed \(exitcode: -?\d+\) local_rank: \d+")),
)
_HINTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("message", lazy_regex(r"\b(?:ERROR|FATAL|CRITICAL)\b|\b(?:error|Error|fatal|Fatal): |^\*{3} ")),
    ("message", lazy_regex(r"[:\]] (?:command not found|No such file or directory|Permission denied|not found)$")),
)
_TRIGGER = lazy_regex(
    b'Traceback|File "|Error|Exception|Interrupt|Exit|Timeout|Failure|Fault|Abort|Iteration|Fatal|terminate called'
    b"|Segmentation|Bus error|Illegal|Floating point|Killed|corruption|corrupted|free\\(|alloc\\(|chunk\\(|smashing"
    b"|overflow|Assertion|panicked|MPI|mpi|prterun|exitcode|ERROR|FATAL|CRITICAL|error|fatal|\\*\\*\\*|not found"
    b"|No such file|Permission denied|out of memory|of memory|NCCL|collective operation|No space|quota|oom"
    b"|NVRM|fallen off the bus"
)

# Without one of these a line fits neither `_LINES` nor an exception: most lines that mention an error have none
_DECISIVE = lazy_regex(
    r"Error|Exception|Segm|Bus|Illegal|Floating|Abort|ABORT|Killed|corrupt|\(\)|chunk|smash|overflow|Assert"
    r"|panicked|MPI|mpi|prterun|exitcode"
)


class _ErrorScanner:
    """Parses the lines of a log once and notes failures; ``critical`` are patterns for errors that it may contain."""

    def __init__(self, critical: Sequence[Pattern]) -> None:
        self._critical = critical
        self.found: list[_Failure] = []
        self._open: dict[str, _Failure] = {}

    def feed(self, line_index: int, raw: bytes) -> None:
        """Take the next line."""
        if not self._open and not _TRIGGER.search(raw):
            return
        text = plain_line(raw)
        stream = ""
        while mark := _MARK.match(text):
            stream += mark[0].strip()
            text = text[mark.end() :]
        if prefix := _LOG_PREFIX.match(text):
            text = text[prefix.end() :]
        if _HEADER in text:
            self._handle_header(line_index, stream, text)
        elif not self._try_continue(line_index, stream, text):
            self._handle_standalone_line(line_index, stream, text)

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
            failure = self._begin(_ERROR, stream, line_index, "frames")
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
        match = _STRONG.match(text)
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
            failure.weight = _SUMMARY
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
        if failure.weight == _SUMMARY:
            if text.startswith("Root Cause"):
                failure.root = []
            elif failure.root is not None and (match := _ROOT_FIELD.match(text)):
                failure.root.append(f"{match[1]} {match[2]}" if match[1] != "traceback" else match[2])
        if failure.lines_since > _CHAIN_LINES:
            self._close(failure)
            return False
        if failure.lines_since > _MESSAGE_LINES and failure.weight != _SUMMARY:
            return False
        # a possible message line is no separate error, but a crash right after it is
        return not any(weight == _CRASH and pattern.match(text) for weight, _, pattern in _LINES) and not (
            _TERMINATE.search(text) or _FATAL.match(text) or _HEADLESS_FRAME.match(text)
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

    def _handle_standalone_line(self, line_index: int, stream: str, text: str) -> None:
        """Handle a line that belongs to no error above."""
        if _HEADLESS_FRAME.match(text):
            self._begin(_ERROR, stream, line_index, "frames")
            self._try_continue(line_index, stream, text)
        elif _FATAL.match(text):
            failure = self._begin(_CRASH, stream, line_index, "stack")
            failure.entries.append(_ErrorEntry("fatal_python_error", text, line_index))
            failure.add(text)
        elif match := _TERMINATE.search(text):
            failure = self._begin(_CRASH, stream, line_index, "native")
            failure.entries.append(_ErrorEntry(match[1] or "terminate", text, line_index))
            failure.add(text)
        elif (found := self._classify_line(text)) is not None:
            weight, kind = found
            failure = _Failure(weight, stream, line_index, [_ErrorEntry(kind, text, line_index)])
            self.found.append(failure)

    def _classify_line(self, text: str) -> tuple[str, str] | None:
        """Weight and kind of a line that shows an error by itself."""
        if is_decisive := _DECISIVE.search(text) is not None:
            for weight, kind, pattern in _LINES:
                if pattern.match(text) or (
                    weight == _CRASH and kind.endswith(("fault", "error")) and pattern.search(text)
                ):
                    return weight, kind
            match = _STRONG.match(text)
            if match and match[1].endswith(("Error", "Exception")) and match[1] not in ("Error", "Exception"):
                return _ERROR, match[1].rpartition(".")[2]
        if self._critical:
            encoded = text.encode("utf-8", "replace")
            for known in self._critical:
                if known.may_match(encoded) and known.regex.search(encoded):
                    return _ERROR, known.name
        if is_decisive and (match := _MENTION.search(text)):
            return _HINT, match[1].rpartition(".")[2]
        return next(((_HINT, kind) for kind, pattern in _HINTS if pattern.search(text)), None)

    def close(self) -> list[_Failure]:
        """Return the failures in line order; a truncated traceback ends with its last frame."""
        for failure in self.found:
            if not failure.entries and failure.last_frame:
                failure.entries.append(_ErrorEntry("traceback", failure.last_frame, failure.first, failure.source))
        return [failure for failure in self.found if failure.entries]


def last_error(text: bytes, errors: Sequence[Pattern]) -> LogError | None:
    """Find the last error at the end of a log; None if there is none.

    The decisive error is the first in time: of a chain of exceptions, before a crash, among several ranks, and before
    the launcher's summary. ``errors`` are the patterns of all jobs; a line that matches a critical one is an error by
    itself.
    """
    skipped = max(0, len(text) - MOST_BYTES)
    lines = text[skipped:].split(b"\n")
    plain = _plain_text(text[skipped:]).encode("utf-8", "replace")
    critical = [pattern for pattern in errors if pattern.severity == "critical" and pattern.may_match(plain)]
    reader = _ErrorScanner(critical)
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
        certain=chosen.weight != _HINT,
    )


def _choose_failure(found: Sequence[_Failure]) -> tuple[_Failure | None, str | None]:
    """Choose the decisive failure. Return it and its consequence."""
    for weights in ((_ERROR, _CRASH), (_SUMMARY,), (_HINT,)):
        candidates = [failure for failure in found if failure.weight in weights]
        if candidates:
            break
    else:
        return None, None
    at, led_to = len(candidates) - 1, None
    seen = {candidates[at].stream}
    while at > 0:
        chosen, before = candidates[at], candidates[at - 1]
        if chosen.first - before.last > NEAR_LINES:
            break
        if chosen.weight == _CRASH:
            led_to = chosen.entries[0].text
        elif not (chosen.stream and before.stream and before.stream not in seen):
            break
        seen.add(before.stream)
        at -= 1
    return candidates[at], led_to
