"""Patterns for progress, values and errors in log lines.

Each pattern's required literals are known. Its regular expression runs only where one of them occurs.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.search.findings import UNITS
from exporter.logs.search.literals import RequiredLiterals, find_literals, needs_line_end


class PatternKind(StrEnum):
    POSITION = "position"
    RESUME = "resume"
    VALUE = "value"
    PAIRS = "pairs"
    MARK = "mark"
    ERROR = "error"


class PatternError(ValueError):
    """Reason why a pattern cannot be used."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position  # character of the pattern with the fault, if known

    def caret(self, text: str) -> str:
        """Return the faulty line of the pattern with a caret below the fault."""
        if self.position is None:
            return text
        start = text.rfind("\n", 0, self.position) + 1
        end = text.find("\n", start)
        line = text[start:] if end < 0 else text[start:end]
        return f"{line}\n{' ' * (self.position - start)}^"


@dataclass(frozen=True)
class Pattern:
    """One pattern, searched in the bytes of a record without line end and colours."""

    name: str
    kind: PatternKind
    text: bytes  # regular expression
    unit: str | None = None  # of a position or resume: one of `findings.UNITS`
    severity: str | None = None  # of an error: critical, warning or info
    error_class: str | None = None  # of an error: coarse class, such as `cuda_oom` or `network`
    begins: bool = True  # of a mark: whether the activity begins or ends
    keys: tuple[tuple[bytes, str], ...] = ()  # of pairs: each key in the log, and the name of its value
    epoch_base: int = 0  # of a position: the log's number for the first epoch
    sets: tuple[tuple[str, float], ...] = ()  # of a value: fixed numbers that any match implies, by name
    is_user_defined: bool = False  # whether the user gave it, so that its cost is unknown
    known_literals: RequiredLiterals | None = None  # found earlier, which saves compiling it

    @cached_property
    def regex(self) -> re.Pattern[bytes]:
        """Compile on first use; raise PatternError if it is not a regular expression."""
        return _compile(self.text)

    @cached_property
    def required(self) -> RequiredLiterals:
        """Texts of which every match contains at least one."""
        return self.known_literals or find_literals(self.regex)

    @property
    def literals(self) -> tuple[bytes, ...]:
        """These texts; () if none were found."""
        return self.required.texts

    def may_match(self, text: bytes) -> bool:
        """Whether a match is possible at all."""
        for literal in self.literals:  # a loop takes half the time of any()
            if literal in text:
                return True
        return not self.literals


def compile_pattern(
    name: str,
    pattern: str,
    severity: str | None = None,
    *,
    kind: PatternKind,
    unit: str | None = None,
    error_class: str | None = None,
    begins: bool = True,
    keys: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    epoch_base: int = 0,
    sets: Mapping[str, float] | None = None,
    is_user_defined: bool = False,
    lazy: bool = False,
    known_literals: RequiredLiterals | None = None,
) -> Pattern:
    """Make a pattern over UTF-8 bytes; raise PatternError if it is not a regular expression.

    ``lazy`` postpones compilation, and so the error, to the first use.
    """
    if kind in (PatternKind.POSITION, PatternKind.RESUME):
        unit = unit or UNITS[0]
        if unit not in UNITS:
            raise PatternError(f'unknown unit "{unit}" (known: {", ".join(UNITS)})')
    pairs = list(keys.items() if isinstance(keys, Mapping) else keys)
    if not all(key for key, _ in pairs):
        raise PatternError("has an empty key; give the word before the number")
    found = Pattern(
        name=name,
        kind=kind,
        text=_encoded(pattern),
        unit=unit,
        severity=severity,
        error_class=error_class,
        begins=begins,
        keys=tuple((key.encode("utf-8", "surrogateescape"), value) for key, value in pairs),
        epoch_base=epoch_base,
        sets=tuple((sets or {}).items()),
        is_user_defined=is_user_defined,
        known_literals=known_literals,
    )
    if not lazy:
        _ = found.regex
    return found


def _encoded(pattern: str) -> bytes:
    try:
        return pattern.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise PatternError(f"{error.reason} at position {error.start}", error.start) from error


def _compile(encoded: bytes) -> re.Pattern[bytes]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # for classes like "[[", which are meant literally
            return re.compile(encoded, re.MULTILINE)
    except re.error as error:
        place = None if error.pos is None else len(encoded[: error.pos].decode("utf-8", "replace"))
        raise PatternError(error.msg if place is None else f"{error.msg} at position {place}", place) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise PatternError(str(error)) from error


def pattern_problems(patterns: Iterable[tuple[str, str]], kind: PatternKind | None = None) -> list[str]:
    """List all problems of a user's patterns, each a name and a regular expression.

    Without a kind they are progress patterns, and each needs a group for a number.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for name, text in patterns:
        if name in seen:
            problems.append(f"{name}: two patterns have this name, and only one would count; rename one of them")
        seen.add(name)
        try:
            pattern = compile_pattern(name, text, kind=kind or PatternKind.VALUE, is_user_defined=True)
        except PatternError as error:
            shown = "".join(f"\n    {line}" for line in error.caret(text).split("\n"))
            problems.append(
                f"{name}: is not a regular expression: {error}; to match such a character literally, "
                f"put a backslash before it{shown}"
            )
            continue
        problems += [f"{name}: {problem}" for problem in _problems(pattern, text)]
    return problems


def _problems(pattern: Pattern, text: str) -> Iterator[str]:
    named = pattern.regex.groupindex
    numbers = pattern.regex.groups - sum(name in named for name in ("rank", "skip"))
    shown = '"' + text.replace("\n", "\\n").replace("\r", "\\r") + '"'
    if pattern.kind in (PatternKind.POSITION, PatternKind.RESUME, PatternKind.VALUE) and numbers < 1:
        yield f"{shown} has no group for the number; put parentheses around it, as in Epoch (\\d+)"
    if needs_line_end(pattern.regex):
        yield f"{shown} spans the end of a line and so never matches; describe text within one line"
    elif pattern.regex.search(b"") is not None:
        yield (
            f"{shown} matches empty text and so every line; "
            "add text that the intended lines contain, or use + instead of *"
        )
