"""Search units: patterns, and single keys of patterns of pairs."""

import re
import sys
from collections.abc import Callable, Container, Mapping
from functools import cached_property
from typing import NamedTuple, TypeAlias

from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.search.extraction import PAIR, NumberExtractor, RegexMatch, extractor_of
from exporter.logs.search.literals import LiteralContext, find_literals, literal_context, safe_length
from exporter.logs.search.regex_tree import alternatives

Search: TypeAlias = Callable[..., RegexMatch | None]  # of a compiled regular expression


class Alternative(NamedTuple):
    """One alternative of a pattern for errors."""

    texts: tuple[bytes, ...]  # of which a match contains one, unless there are none
    second_texts: tuple[bytes, ...]  # and one of these, unless there are none
    search: Search | None  # None if containing a text is sufficient

    def may_match(self, present: Container[bytes]) -> bool:
        """Whether a record that contains only these of the texts may match."""
        return all(not texts or any(map(present.__contains__, texts)) for texts in (self.texts, self.second_texts))


class SearchUnit:
    """A pattern, or one key of a pattern of pairs.

    Its expression is compiled and analyzed on first use: the logs of a job contain few of the patterns' literals.
    """

    def __init__(self, number: int, order: int, pattern: Pattern, key: int | None = None) -> None:
        self.bit = 1 << number
        self.number = number
        self.order = order
        self.pattern = pattern
        self.key = key
        self.literals = pattern.literals if key is None else (pattern.keys[key][0],)
        self.name = pattern.name
        # A match contains one of these too; empty if unknown
        self.second_literals = pattern.required.second_texts if key is None else pattern.literals
        self.is_error = pattern.kind is PatternKind.ERROR
        self.is_mark = pattern.kind is PatternKind.MARK
        self.is_value = pattern.kind in (PatternKind.VALUE, PatternKind.PAIRS)
        self.has_history = pattern.kind in (PatternKind.POSITION, PatternKind.MARK)
        # Whether containing a literal is sufficient, so that a match only needs counting
        self.is_counted = self.is_error and pattern.required.is_sufficient

    def swap_literals(self) -> None:
        """Exchange the sets of literals; what is known around the first does not hold around the second."""
        self.literals, self.second_literals = self.second_literals, self.literals
        self.forget_context()

    def forget_context(self) -> None:
        """Do without what must be around a literal."""
        self.after_literal, self.previous_bytes, self.prefix_bytes = {}, b"", b""

    def restore_context(self) -> bool:
        """Search for the first set of literals, with what must follow each of them; whether that is known."""
        required, context = self.pattern.required, literal_context(self.pattern.regex)
        if not all(text in context.after for text in required.texts):
            return False
        self.literals, self.second_literals = required.texts, required.second_texts
        self.after_literal = context.after
        return True

    @cached_property
    def search(self) -> Search:
        return self.pattern.regex.search

    @cached_property
    def extractor(self) -> NumberExtractor:
        return extractor_of(self.pattern)

    @cached_property
    def wanted_findings(self) -> int:
        """Findings after which nothing earlier counts."""
        return 1 if self.key is not None or self.has_history else max(1, len({*self.extractor.names}))

    @cached_property
    def _context(self) -> LiteralContext:
        if self.key is not None or self.is_error:
            return LiteralContext({}, b"", b"")
        return literal_context(self.pattern.regex)

    @cached_property
    def after_literal(self) -> Mapping[bytes, re.Pattern[bytes]]:
        """Pattern for the text after a literal, where known."""
        return self._context.after if self.key is None else {self.pattern.keys[self.key][0]: PAIR}

    @cached_property
    def previous_bytes(self) -> bytes:
        """Bytes of which one precedes the literal in every match; empty if unknown."""
        return self._context.previous if self.is_value or self.has_history else b""

    @cached_property
    def prefix_bytes(self) -> bytes:
        """Bytes, such as digits, of which all text before the literal consists; empty if unknown."""
        return self._context.before if self.is_value else b""

    @cached_property
    def safe_bytes(self) -> int:
        """Bytes of a record up to which any search ends soon."""
        return safe_length(self.pattern.regex)

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Alternatives of a pattern for errors: less is needed to reject one, or to be sure of it."""
        required = [(regex, find_literals(regex)) for regex in alternatives(self.pattern.regex)]
        return tuple(
            Alternative(of.texts, of.second_texts, None if of.is_sufficient else regex.search) for regex, of in required
        )

    def disable(self) -> None:
        """Match nothing from now on."""
        self.search, self.alternatives = _match_nothing, ()
        self.safe_bytes = sys.maxsize


def _match_nothing(_: bytes | bytearray, begin: int = 0) -> None:
    return None
