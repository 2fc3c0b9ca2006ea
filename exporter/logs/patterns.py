"""What the lines of a log say: progress, values and errors.

Of each pattern the literals are known, one of which each of its matches holds: the regular
expression then runs only where one of them stands.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from exporter.logs.search.findings import UNITS
from exporter.logs.search.literals import needs_line_end, required_literals


class PatternKind(StrEnum):
    """What a match says."""

    POSITION = "position"
    RESUME = "resume"
    VALUE = "value"
    PAIRS = "pairs"
    MARK = "mark"
    ERROR = "error"


class PatternError(ValueError):
    """Why a pattern cannot be used."""

    def __init__(self, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position
        """Character of the pattern at which the fault stands, if it stands at one."""

    def caret(self, text: str) -> str:
        """The pattern and, in a line below it, a caret under the fault."""
        if self.position is None:
            return text
        start = text.rfind("\n", 0, self.position) + 1
        end = text.find("\n", start)
        line = text[start:] if end < 0 else text[start:end]
        return f"{line}\n{' ' * (self.position - start)}^"


@dataclass(frozen=True)
class Pattern:
    """One pattern: searched in the bytes of one record, without its end and its colours."""

    name: str
    kind: PatternKind
    text: bytes  # the regular expression
    unit: str | None = None  # of a position or a resume: one of `findings.UNITS`
    severity: str | None = None  # of an error: critical, warning or info
    error_class: str | None = None  # of an error: its coarse class, such as `cuda_oom` or `network`
    begins: bool = True  # of a mark: whether that which it names begins or ends
    keys: tuple[tuple[bytes, str], ...] = ()  # of pairs: each key as the log has it, and the name of its value
    epoch_base: int = 0  # of a position: the number that the log gives to the first epoch
    sets: tuple[tuple[str, float], ...] = ()  # of a value: those that a match means whatever its groups hold, by name
    own: bool = False  # whether the user gave it: nobody has seen what it costs

    @cached_property
    def regex(self) -> re.Pattern[bytes]:
        """Compiled when it is first asked for; PatternError when it is no regular expression."""
        return _compile(self.text)

    @cached_property
    def literals(self) -> tuple[bytes, ...]:
        """Each match holds at least one of them; () where none could be found."""
        return required_literals(self.regex)

    def may_match(self, text: bytes) -> bool:
        """Whether a match is possible at all."""
        return not self.literals or any(literal in text for literal in self.literals)


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
    own: bool = False,
    later: bool = False,
) -> Pattern:
    """A pattern over UTF-8 bytes; raises PatternError when it is not a regular expression.

    With ``later`` it is compiled, and a fault of it told, when it is first used.
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
        own=own,
    )
    if not later:
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
            warnings.simplefilter("ignore", FutureWarning)  # of a class like "[[": it means what it says
            return re.compile(encoded, re.MULTILINE)
    except re.error as error:
        place = None if error.pos is None else len(encoded[: error.pos].decode("utf-8", "replace"))
        raise PatternError(error.msg if place is None else f"{error.msg} at position {place}", place) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise PatternError(str(error)) from error


def pattern_problems(patterns: Iterable[tuple[str, str]], kind: PatternKind | None = None) -> list[str]:
    """What is wrong with a user's patterns, (name, regular expression) each; all of it at once.

    Without a kind they are of progress, and each has to hold a number.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for name, text in patterns:
        if name in seen:
            problems.append(
                f"{name}: there are two patterns of this name, and only one would count; rename one of them"
            )
        seen.add(name)
        try:
            pattern = compile_pattern(name, text, kind=kind or PatternKind.VALUE, own=True)
        except PatternError as error:
            shown = "".join(f"\n    {line}" for line in error.caret(text).split("\n"))
            problems.append(
                f"{name}: is not a regular expression: {error}; to find such a character as it is, "
                f"write a backslash before it{shown}"
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
        yield f"{shown} goes over the end of a line and so never matches; describe what stands in one line"
    elif pattern.regex.search(b"") is not None:
        yield f"{shown} matches the empty text and so every line; add a text that the right lines hold, or use + for *"
