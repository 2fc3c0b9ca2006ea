"""Search units: patterns, and single keys of patterns of pairs."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import cached_property

from exporter.logs.patterns import Pattern, PatternKind
from exporter.logs.search.extraction import PAIR, NumberExtractor, RegexMatch
from exporter.logs.search.literals import find_literals, literal_context, safe_length


class SearchUnit:
    """A pattern, or one key of a pattern of pairs."""

    def __init__(
        self, number: int, order: int, pattern: Pattern, extractor: NumberExtractor, key: int | None = None
    ) -> None:
        self.bit = 1 << number
        self.number = number
        self.order = order
        self.pattern = pattern
        self.extractor = extractor
        self.key = key
        self.literals = pattern.literals if key is None else (pattern.keys[key][0],)
        self.name = pattern.name
        self.search: Callable[..., RegexMatch | None] = pattern.regex.search
        # A match contains one of these too; empty if unknown
        self.second_literals = find_literals(pattern.regex).second_texts if key is None else pattern.literals
        self.is_error = pattern.kind is PatternKind.ERROR
        self.is_mark = pattern.kind is PatternKind.MARK
        self.is_value = pattern.kind in (PatternKind.VALUE, PatternKind.PAIRS)
        self.has_history = pattern.kind in (PatternKind.POSITION, PatternKind.MARK)
        self.after_literal: Mapping[bytes, re.Pattern[bytes]] = {}  # pattern for the text after a literal, where known
        # `previous_bytes`: one of these bytes precedes the literal in every match. `prefix_bytes`: all text before it
        # consists of these, such as digits. Empty if unknown.
        self.previous_bytes = self.prefix_bytes = b""
        if key is not None:
            self.after_literal = {pattern.keys[key][0]: PAIR}
        elif not self.is_error:
            self.after_literal, previous, prefix = literal_context(pattern.regex)
            if self.is_value or self.has_history:
                self.previous_bytes = previous
            if self.is_value:
                self.prefix_bytes = prefix
        # Whether containing a literal is sufficient, so that a match only needs counting
        self.is_counted = self.is_error and find_literals(pattern.regex).is_sufficient
        # findings after which nothing earlier counts
        self.wanted_findings = 1 if key is not None or self.has_history else max(1, len({*extractor.names}))

    def swap_literals(self) -> None:
        """Exchange the sets of literals; what is known around the first does not hold around the second."""
        self.literals, self.second_literals = self.second_literals, self.literals
        self.after_literal, self.previous_bytes, self.prefix_bytes = {}, b"", b""

    @cached_property
    def safe_bytes(self) -> int:
        """Bytes of a record up to which any search ends soon."""
        return safe_length(self.pattern.regex)

    def disable(self) -> None:
        """Match nothing from now on."""
        self.search = _match_nothing
        self.safe_bytes = sys.maxsize


def _match_nothing(_: bytes | bytearray, begin: int = 0) -> None:
    return None
