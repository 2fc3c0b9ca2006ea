"""Forms of the lines of a log that show an error, and how much each explains.

Ranks that share a file mark their lines (``[rank3]: ``, ``[default0]:``, ``3: `` of ``srun -l``, ``(Worker pid=7) ``).
"""

import re
from collections.abc import Sequence

from exporter.contract.lazy_regex import lazy_regex
from exporter.logs.patterns import Pattern

MOST_LINE_LENGTH = 2048
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
    text = plain_text(raw)
    return text if most is None else text[:most]


def plain_text(raw: bytes) -> str:
    """Return text without colours and control characters, newlines included."""
    text = raw.decode("utf-8", "replace")
    return text if text.isprintable() else _ESCAPE.sub("", text).translate(_DROPPED)


ERROR, CRASH, HINT = "error", "crash", "hint"
NOTICED = "noticed"  # the program noticed what happened elsewhere: to a peer, or in a library below
SUMMARY = "summary"  # announces that something failed, and often that the cause is above
_AFTERMATH = "aftermath"  # how programs end when another one has gone
TIERS = ((HINT,), (_AFTERMATH,), (SUMMARY,), (NOTICED,), (ERROR, CRASH))  # weights, the most specific ones last
_AFTERMATH_KINDS = {"EOFError", "CancelledError", "KeyboardInterrupt", "SignalException", "SystemExit"}
# Names of error patterns: of what was noticed, of announcements, and of the last words of a crash.
_NOTICED_PATTERNS, _SUMMARY_PATTERN = ("peer_lost", "nccl_error"), "worker_failed"
_CRASH_PATTERNS = ("crash", "segfault", "bus_error")

_PREFIX = lazy_regex(
    r"(?P<mark>\[default\d{1,6}\]:|\[(?:rank|Rank |RANK )?\d{1,6}\]:? ?| {0,5}\d{1,6}: |\([^()]{1,80}\) "
    r"|\[\d{1,6},\d{1,6}\]<std(?:out|err)>: ?|[\w.-]{1,60} {1,20}\| )"  # of mpirun, and the name of a container
    r"|\[?(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
    r"(?: [A-Z]{2}\d{1,5}){0,4}(?:\]|:|) "  # the ranks of SGLang
    r"|(?P<level>TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL) "
    r"(?:\d\d-\d\d \d\d:\d\d:\d\d|\d{1,9}) \[?[^\] ]{1,80}\] ?"
)


_MARKED_HEADER = lazy_regex(r"^(.{1,200}?)(?:Traceback \(most|terminate called)", re.MULTILINE)
_MARKED_FRAME = lazy_regex(r'^(.{1,120}?)  (?:(?:  )?File "|what\(\): )', re.MULTILINE)
_CLOCK = r"(?:\d{1,4}[-/T ]){0,3}\d{1,2}:\d\d:\d\d(?:[.,]\d{1,9})?"
_MOST_LEARNT = 64  # marks of nodes in one log


def learn_prefixes(text: str) -> re.Pattern[str] | None:
    """Learn what collectors without a known form write before each line, as ``gn01: `` of pdsh, from tracebacks."""
    headers = {re.sub(_CLOCK, "\0", header) for header in _MARKED_HEADER.findall(text)}
    # what is left without known marks and the bars of an exception group
    unknown = (mark for mark in _MARKED_FRAME.findall(text) if split_prefixes(mark)[2].strip(" |"))
    marks = {re.sub(_CLOCK, "\0", mark) for mark in unknown}
    found = [mark for mark in sorted(marks)[:_MOST_LEARNT] if any(header.startswith(mark) for header in headers)]
    found.sort(key=len, reverse=True)  # `gn01: app: ` before `gn01: `
    return re.compile("|".join(re.escape(mark).replace("\0", _CLOCK) for mark in found)) if found else None


def split_prefixes(text: str, learnt: re.Pattern[str] | None = None) -> tuple[str, str, str]:
    """Split what ranks and log collectors write before a line: its stream, its level and the rest.

    Time stamps are dropped: only some lines of a stream have them.
    """
    stream = level = ""
    if learnt is not None and (prefix := learnt.match(text)):
        stream, text = re.sub(_CLOCK, "", prefix[0]).strip(), text[prefix.end() :]
    while prefix := _PREFIX.match(text):
        stream += (prefix["mark"] or "").strip()
        level = prefix["level"] or level
        text = text[prefix.end() :]
    return stream, level, text


# How the line begins that is right above the traceback of a destructor or callback, or of a task of asyncio.
ASIDES = {"Exception ignored ": HINT, "Error in atexit._run_exitfuncs:": HINT, "future: <": NOTICED}
_SUFFIXES = "Error|Exception|Interrupt|Exit|Timeout|Failure|Fault|Abort|Iteration|Warning|Group"
STRONG = lazy_regex(rf"((?:\w{{1,80}}\.){{0,12}}\w{{1,80}}(?:{_SUFFIXES}))(?::(?: |$)|$)")
_FIGURE = lazy_regex(r"[-+.\de]{1,20}%?")  # a metric such as `MeanSquaredError: 0.31`
_MENTION = lazy_regex(r"(?:^|[\s:(])((?:\w{1,80}\.){0,12}[A-Z]\w{0,80}(?:Error|Exception)): ")
LINES: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    (CRASH, "segmentation_fault", lazy_regex(r"\bSegmentation fault\b")),
    (CRASH, "bus_error", lazy_regex(r"\bBus error\b")),
    (CRASH, "illegal_instruction", lazy_regex(r"(?:.{0,200}[: ]\d+:?\s+)?Illegal instruction\b")),
    (CRASH, "floating_point_exception", lazy_regex(r"(?:.{0,200}[: ]\d+:?\s+)?Floating point exception\b")),
    (CRASH, "aborted", lazy_regex(r"(?:.{0,200}[: ]\d+\s+)?Aborted(?: +\(core dumped\).{0,500})?$")),
    (SUMMARY, "killed", lazy_regex(r"(?:.{0,200}: (?:line \d+: +\d+|tasks? [\d,-]+:) +Killed\b|Killed$)")),
    (
        CRASH,
        "heap_corruption",
        lazy_regex(
            r"(?:\*\*\* Error in .{0,200}: )?(?:double free or corruption|corrupted (?:size|double)|"
            r"(?:free|malloc|malloc_consolidate|realloc|munmap_chunk)\(\): |Fatal glibc error: |"
            r"\*\*\* (?:stack smashing|buffer overflow))"
        ),
    ),
    (NOTICED, "assertion", lazy_regex(r".{0,500}\bCheck failed: .{0,200}Synchronize")),  # of work that failed before
    (ERROR, "assertion", lazy_regex(r".{1,500}: Assertion [`'].{1,1000}' failed\.?|.{0,500}\bCheck failed: ")),
    (ERROR, "panic", lazy_regex(r"thread '.{0,100}' (?:\(\d+\) )?panicked at ")),
    (
        SUMMARY,
        "mpi_abort",
        lazy_regex(
            r"MPI_ABORT was invoked|.{0,100}application called MPI_Abort|Fatal error in P?MPI_"
            r"|(?:internal_)?Abort\(\d+\) on node|It looks like \w{1,40} failed for some reason"
            r"|.{0,100}(?:mpirun|mpiexec|prterun)\S{0,40} (?:noticed|has exited|detected)"
        ),
    ),
    (SUMMARY, "process_failed", lazy_regex(r".{0,300}failed \(exitcode: -?\d+\) local_rank: \d+")),
)
_HINTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "message",
        lazy_regex(
            r"\b(?:ERROR|FATAL|CRITICAL)\b|\b(?:error|Error|fatal|Fatal): (?!(?:null|None|[\d.]{1,20})$)"
            r"|^Error in |^OMP: Error |^g?make\S{0,20}: \*{3} |^\*{3} |\[E\] |^\[?[EF]\d{4} "
        ),
    ),
    (
        "message",
        lazy_regex(
            r"[:\]] (?:command not found|No such file or directory|Permission denied|not found|Exec format error)$"
            r"|' not found \(required by |: No module named |\b[Ll]oss is (?:nan|NaN|inf)\b"
        ),
    ),
)
TRIGGER = lazy_regex(
    b'Traceback|File "|rror|Exception|Interrupt|Exit|Timeout|Failure|Fault|Abort|Iteration|Fatal|terminate called'
    b"|Segmentation|Illegal|Floating point|Killed|corruption|corrupted|free\\(|alloc\\(|chunk\\(|smashing"
    b"|overflow|Assertion|panicked|MPI|mpi|prterun|exitcode|ERROR|FATAL|CRITICAL|fatal|\\*\\*\\*|not found"
    b"|No such file|Permission denied|of memory|looks like|enough memory|memory pressure|OutOfMem|NCCL"
    b"|too large|limit exceeded|collective operation|No space|quota|oom|NVRM|fallen off the bus|imed out|dog timeout"
    b"|heartbeat|died|dead|crashed|\\[E\\]|E\\d{4} |F\\d{4} |sigquit|exits with|exit status|exit code|abruptly"
    b"|TERMINATION|fault by GPU|closed by|pair closure|Check failed|mismatch|FAILED|exited with|file handle|Read-only"
    b"|endpoint|bad_alloc|CUDA-capable|insufficient|NVIDIA driver|GPU is lost|retry count|monitoredBarrier|oss is "
    b"|No module"
)  # each alternative begins with a letter of its own, which lets the search skip quickly

# Words of a line that quotes an error which the program outlived.
_SURVIVED = lazy_regex(
    r"\b(?:[Rr]etrying|[Rr]etry \d|[Ss]ucceeded|[Rr]ecovered|(?<!not )[Hh]andled|[Ss]kipp(?:ed|ing))\b"
)
# Words of a line that quotes an error which did not happen, unless an exception begins it: a warning, or a count of 0.
_HYPOTHETICAL = lazy_regex(
    r"\b(?:[Ii]f you (?:see|get)|(?:may|can|could) cause)\b"
    r"|(?:\b(?:count|events?|retries)[:=]|\w_\w{1,30}(?<!rank)(?<!_id)=) ?0$"
)


def without_survived(text: bytes) -> bytes:
    """Return the text without lines about errors that the program outlived."""
    return b"\n".join(line for line in text.split(b"\n") if not _is_survived(line.decode("utf-8", "replace")))


def _is_survived(text: str) -> bool:
    return _SURVIVED.search(text) is not None or (STRONG.match(text) is None and _HYPOTHETICAL.search(text) is not None)


# Without one of these a line fits neither `LINES` nor an exception: most lines that mention an error have none.
DECISIVE = lazy_regex(
    r"Error|Exception|Segm|Bus|Illegal|Floating|Abort|ABORT|Killed|corrupt|\(\)|chunk|smash|overflow|Assert"
    r"|Check failed|panicked|MPI|mpi|prterun|exitcode|looks like|glibc"
)


class LineClassifier:
    """Classifies the lines of a log by their form and by the error patterns of all jobs."""

    def __init__(self, errors: Sequence[Pattern], log: bytes) -> None:
        self._noticed = [pattern for pattern in errors if pattern.name in _NOTICED_PATTERNS]
        self._summary = [pattern for pattern in errors if pattern.name == _SUMMARY_PATTERN]
        plain = plain_text(log).encode("utf-8", "replace")
        self.learnt = learn_prefixes(_ESCAPE.sub("", log.decode("utf-8", "replace")))
        critical = [pattern for pattern in errors if pattern.severity == "critical"]
        # each line would ask 25 patterns, of which few can match anywhere
        self._possible = [
            pattern for pattern in (*critical, *self._noticed, *self._summary) if pattern.may_match(plain)
        ]

    def classify(self, text: str, level: str) -> tuple[str, str] | None:
        """Weight and kind of a line that shows an error by itself."""
        is_decisive = DECISIVE.search(text) is not None
        survived = _is_survived(text)
        if is_decisive and not survived:
            for weight, kind, pattern in LINES:
                if pattern.match(text) or (
                    weight == CRASH and kind.endswith(("fault", "error")) and pattern.search(text)
                ):
                    return weight, kind
            match = STRONG.match(text)
            if match and match[1].endswith(("Error", "Exception")) and match[1] not in ("Error", "Exception"):
                is_figure = match[1] != "KeyError" and _FIGURE.fullmatch(text, match.end())
                return None if is_figure else (ERROR, match[1].rpartition(".")[2])
        if self._possible and not survived and (name := _first_match(self._possible, text)) is not None:
            return CRASH if name in _CRASH_PATTERNS else ERROR, name
        if is_decisive and (match := _MENTION.search(text)):
            return HINT, match[1].rpartition(".")[2]
        return next(((HINT, kind) for kind, pattern in _HINTS if pattern.search(f"{level} {text}".lstrip())), None)

    def weigh(self, kind: str, text: str, weight: str) -> str:
        """Weight of an entry according to its words, for one that is an error by its form."""
        if weight not in (ERROR, CRASH):
            return weight
        if kind in _AFTERMATH_KINDS or kind == "traceback":
            return _AFTERMATH
        if _first_match(self._summary, text):
            return SUMMARY
        return NOTICED if _first_match(self._noticed, text) else weight


def _first_match(patterns: Sequence[Pattern], text: str) -> str | None:
    """Name of the first pattern that matches."""
    encoded = text.encode("utf-8", "replace")
    return next((p.name for p in patterns if p.may_match(encoded) and p.regex.search(encoded)), None)
