"""Unmatched records that look like progress, and suggested patterns for them."""

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.errors.lines import plain_line
from exporter.logs.lexicon import UNIT_BY_NAME, compile_job_pattern
from exporter.logs.packs import looks_like_progress
from exporter.logs.patterns import PatternError, PatternKind
from exporter.logs.search.findings import UNITS

MOST_SHOWN = 5
MOST_TRIED = 200  # distinct forms of records tried; a log may have a new one per line
MOST_LINE = 400

_DIGITS = re.compile(rb"\d+")
_COUNT = r"\d{1,18}(?:[,_]\d{3}){0,5}"
# up to three words right before a number, which name what it counts
_WORDS = r"(?:[^\W\d]+[ \t:=#>\[(-]{1,9}){1,3}"
_FORMS = tuple(
    re.compile(f"(?P<before>{_WORDS})?{form}")
    for form in (
        rf"(?<![\w./:-])(?P<done>{_COUNT})(?P<between> {{0,3}}(?:/|\bof\b) {{0,9}})(?P<total>{_COUNT})(?![\w/:-])",
        rf"(?<![\w.])(?P<done>{_COUNT})(?![\w.%])",
        r"(?<![\w.])(?P<percent>\d{1,3})(?:\.\d{1,6})?(?P<behind> ?%)",
    )
)  # forms of progress, the most reliable first
_NAME_BY_WORD = {word: word for word in UNIT_BY_NAME} | {"iter": "step", "iteration": "step", "iterations": "steps"}
# Words that make a number a count even without a total.
_COUNTED_WORDS = {
    *_NAME_BY_WORD,
    "round",
    "rounds",
    "sample",
    "samples",
    "example",
    "examples",
    "document",
    "documents",
}
# words in lines where a percentage means progress
_PROGRESS_WORDS = re.compile(r"(?i)progress|complete|done|finished|processed|\|")
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_WORD_AFTER = re.compile(r"[ \t]{0,2}[^\W\d]{2,30}")


@dataclass(frozen=True)
class ProgressCandidate:
    raw: bytes
    offset: int


def progress_lines(
    candidates: Iterable[ProgressCandidate], has_findings: Callable[[bytes], bool], names: Iterable[str] = ()
) -> Iterator[tuple[ProgressCandidate, tuple[str, str] | None]]:
    """The first unmatched records that look like progress, one per form, with a suggested pattern.

    Suggested names are unique and not in ``names``.
    """
    seen, rejected, shown, taken = set[bytes](), set[bytes](), 0, set(names)
    for candidate in candidates:
        # digits all count the same, so few records of a log differ
        zeros = candidate.raw.translate(_ZEROS)
        if zeros in rejected or not looks_like_progress(candidate.raw):
            rejected.add(zeros)
            continue
        form = _DIGITS.sub(b"0", candidate.raw[:MOST_LINE])
        if form in seen:
            continue
        seen.add(form)
        if not has_findings(candidate.raw):
            suggested = suggest_pattern(candidate.raw, taken)
            taken |= {suggested[0]} if suggested is not None else set()
            yield candidate, suggested
            shown += 1
        if shown >= MOST_SHOWN or len(seen) >= MOST_TRIED:
            return


def suggest_pattern(raw: bytes, taken: Collection[str] = ()) -> tuple[str, str] | None:
    """Suggest the name and regular expression of a pattern for a record's position.

    None if no number looks like a position, or all names for its unit are taken.
    """
    line = plain_line(raw, MOST_LINE)
    for form in _FORMS:
        for match in form.finditer(line):
            if (found := _suggest_from_match(line, match, taken)) is not None:
                return found
    return None


def _suggest_from_match(line: str, match: re.Match[str], taken: Collection[str]) -> tuple[str, str] | None:
    part = match.groupdict()
    before = part["before"] or ""
    after = _WORD_AFTER.match(line, match.end())
    if "percent" in part and not _PROGRESS_WORDS.search(line):
        return None  # most percentages are of memory, caches or peak rates
    if not before and after is None:
        return None  # without words the number cannot be identified
    words = [word.lower() for word in re.findall(r"[^\W\d_]+", f"{before} {after[0] if after is not None else ''}")]
    if part.keys().isdisjoint(("total", "percent")) and _COUNTED_WORDS.isdisjoint(words):
        return None
    name = next((_NAME_BY_WORD[word] for word in reversed(words) if word in _NAME_BY_WORD), "items")
    if "percent" in part or UNIT_BY_NAME[name] == "items":
        name = "items"
    free = _free_name(name, taken)
    if free is None:
        return None
    done, total = ("?P<done>", "?P<total>") if free not in UNIT_BY_NAME else ("", "")
    if "percent" in part:
        numbers = r"(?P<percent>\d+)" + (r"(?:\.\d+)?" if "." in match[0][len(before) :] else "") + part["behind"]
    elif "total" in part:
        numbers = f"{_group(part['done'], done)}{_escaped(part['between'])}{_group(part['total'], total)}"
    else:
        numbers = _group(part["done"], "?P<done>") + (r"(?![\d.])" if not after else "")
    text = _escaped(before) + numbers + (_escaped(after[0]) if after is not None and not before else "")
    try:
        pattern = compile_job_pattern(free, text)
    except PatternError:
        return None
    found = pattern.regex.search(line.encode("utf-8", "replace"))
    return (free, text) if pattern.kind is PatternKind.POSITION and found is not None else None


def _free_name(name: str, taken: Collection[str]) -> str | None:
    """A name for the same unit that is not taken, or None. Items never run out of names."""
    unit = UNIT_BY_NAME[name]
    words = (name, unit, "batch" if unit == "batches" else unit.removesuffix("s"))
    more = (f"items_{number}" for number in itertools.count(2)) if unit == UNITS[0] else ()
    return next((word for word in itertools.chain(words, more) if word not in taken), None)


def _group(number: str, name: str) -> str:
    digits = r"[\d,_]+" if re.search(r"[,_]", number) else r"\d+"
    return f"({name}{digits})"


def _escaped(text: str) -> str:
    """Escape a text as a regular expression with flexible spaces."""
    return re.sub(r"[ \t]{2,}|\t", r"\\s+", re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text))
