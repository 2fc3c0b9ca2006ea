"""Extract numbers from a match of a pattern."""

import re
from functools import lru_cache
from typing import Protocol

from exporter.logs.patterns import Pattern, PatternKind

MOST_DIGITS = 18  # no count is longer; a record could contain a million digits
_COUNT = re.compile(rb"[ \t]{0,8}\+?(\d{1,3}(?:[,_]\d{3}){1,6}|\d{1,18})(?:\.\d{0,30})?[ \t]{0,8}")
_MOST_CHARACTERS = 400
_THOUSANDS = re.compile(rb"[-+]?\d{1,3}(?:,\d{3}){1,6}(?:\.\d{0,60})?(?:[eE][-+]?\d{1,4})?")
_PAIR = (
    rb"""["']?[ \t]{0,16}[:=][ \t]{0,16}["']?"""
    rb"([-+]?(?:(?:\d{1,3}(?:,\d{3}){1,6}|\d{1,30}(?:_\d{3}){0,6})(?:\.\d{0,60})?|\.\d{1,60})(?:[eE][-+]?\d{1,4})?"
    rb"|[-+]?(?:[nN][aA][nN]|[iI][nN][fF](?:inity)?)(?![A-Za-z0-9_]))(?!\d|[.:]\d|_\d)"
)
PAIR = re.compile(_PAIR)  # text after the key of a pair


class RegexMatch(Protocol):
    """The part of ``re`` and ``regex`` matches that is used."""

    def group(self, group: int, /) -> bytes | None:
        """Text of a group."""


def parse_count(text: bytes | None) -> int | None:
    """Parse a count, dropping any fraction. None if the text is not a count or has more than ``MOST_DIGITS`` digits."""
    if text is None:
        return None
    if text.isdigit():
        return int(text) if len(text) <= MOST_DIGITS else None
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    digits = match[1].replace(b",", b"").replace(b"_", b"")
    return int(digits) if len(digits) <= MOST_DIGITS else None


def parse_number(text: bytes | None) -> float | None:
    """Parse a number as programs write it, including NaN and infinities; None if it is not one."""
    if text is None or len(text) > _MOST_CHARACTERS:
        return None
    try:
        return float(text)
    except ValueError:
        return float(text.replace(b",", b"")) if _THOUSANDS.fullmatch(text.strip()) else None


class NumberExtractor:
    """Extracts the numbers from matches of one pattern."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self._is_pairs = pattern.kind is PatternKind.PAIRS
        named = pattern.regex.groupindex
        free = [group for group in range(1, pattern.regex.groups + 1) if group not in named.values()]
        by_name = any(name in named for name in ("done", "total", "percent"))
        first, second = (0, 0) if by_name else (*free, 0, 0)[:2]
        self._done, self._total = named.get("done", first), named.get("total", second)
        self._percent = named.get("percent", 0)
        self._epoch, self._epochs = named.get("epoch", 0), named.get("epochs", 0)
        self._only_done_and_total = self._done > 0 < self._total and not (self._percent or self._epoch or self._epochs)
        self._rank, self._skip = named.get("rank", 0), named.get("skip", 0)
        self._values = [(name, group) for name, group in named.items() if name not in ("rank", "skip")]
        if not self._values and free:
            self._values = [(pattern.name, free[0])]
        self._sets = list(pattern.sets)
        self._pairs = [
            (
                name,
                key,
                re.compile(
                    (rb"(?<![A-Za-z0-9_])" if key[:1].isalnum() or key[:1] == b"_" else b"") + re.escape(key) + _PAIR
                ),
            )
            for key, name in pattern.keys
        ]
        self.has_ranks = self._rank > 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values that the pattern may give."""
        return tuple(each[0] for each in (*(self._pairs if self._is_pairs else self._values), *self._sets))

    def rank(self, match: RegexMatch) -> int | None:
        """Data-parallel rank in the match."""
        return parse_count(match.group(self._rank)) if self._rank else None

    def counts(self, match: RegexMatch) -> tuple[int, int | None, int | None, int | None] | None:
        """Extract (done, total, epoch, epochs) of a position; None without a done count."""
        if self._only_done_and_total:
            done, total = parse_count(match.group(self._done)), parse_count(match.group(self._total))
            return None if done is None else (done, total, None, None)
        done = parse_count(match.group(self._done)) if self._done else None
        total = parse_count(match.group(self._total)) if self._total else None
        if done is None and self._percent:
            done, total = parse_count(match.group(self._percent)), 100
        epoch = parse_count(match.group(self._epoch)) if self._epoch else None
        epochs = parse_count(match.group(self._epochs)) if self._epochs else None
        if done is None and not self._done and self.pattern.unit == "epochs":
            done, total = epoch, epochs
        return None if done is None else (done, total, epoch, epochs)

    def values(self, match: RegexMatch, record: bytes, only_key: int | None = None) -> list[tuple[str, float]]:
        """Extract each value of a record, or only that of key number ``only_key``."""
        values: list[tuple[str, float]] = []
        if not self._is_pairs:
            values += self._sets
            for name, group in self._values:
                found = parse_number(match.group(group))
                if found is not None:
                    values.append((name, found))
            return values
        if self._skip and match.group(self._skip) is not None:
            return values
        for name, key, regex in self._pairs if only_key is None else self._pairs[only_key : only_key + 1]:
            # a search that begins at the key is several times faster, and most keys are in no record
            if (place := record.find(key)) >= 0 and (pair := regex.search(record, place)) is not None:
                found = parse_number(pair[1])
                if found is not None:
                    values.append((name, found))
        return values


@lru_cache(maxsize=1024)
def extractor_of(pattern: Pattern) -> NumberExtractor:
    """Return the extractor of a pattern, which all its units share."""
    return NumberExtractor(pattern)
