"""Packs: descriptions of the log lines of one program, one file each, and detection of a log's pack.

``exporter/packs/README.md`` describes the files.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from exporter.logs.patterns import Pattern, PatternError, PatternKind, compile_pattern
from exporter.logs.search.findings import MARKS, UNITS

GENERIC = "generic"
LEVELS = (0, 1, 2, 3)  # strength of a pack's evidence: any program, a library, a framework, one program
FULL_READ_BYTES = (
    4 * 1024 * 1024
)  # part of a log that is read in full; the choice is then final, unless it fits any program
END_BYTES = 16 * 1024  # part read of each further chunk
ENOUGH_KINDS, ENOUGH_RECORDS = 2, 3  # kinds of evidence, or records, that make the choice of a program's pack final
SPREAD_BYTES = 64 * 1024  # text after which evidence of a second pack is no longer expected

RECORD_BYTES = 4096  # part of a record that is searched
MOST_RECORDS = 10_000  # records searched for the nearest pack

_MACROS = {
    "@count@": r"\d{1,18}",
    "@number@": r"[-+]?(?:(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,3})?|[nN]a[nN]|inf)",
}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KINDS = {
    "position": (PatternKind.POSITION, {"name", "unit", "regex"}, {"epoch_base"}),
    "resume": (PatternKind.RESUME, {"unit", "regex"}, {"name"}),
    "value": (PatternKind.VALUE, {"name", "regex"}, {"sets"}),
    "pairs": (PatternKind.PAIRS, {"name", "line", "keys"}, set[str]()),
    "mark": (PatternKind.MARK, {"name", "regex", "begins"}, set[str]()),
    "error": (PatternKind.ERROR, {"name", "regex", "severity", "class"}, set[str]()),
}  # per table of patterns: kind, required keys, optional keys
_HEAD = {"name": str, "title": str, "about": str, "level": int, "detect": list, "also": list, "also_unit": str}
_GROUPS = {
    PatternKind.POSITION: {"done", "total", "epoch", "epochs", "percent", "rank"},
    PatternKind.RESUME: {"done", "total", "epoch", "epochs", "percent", "rank"},
    PatternKind.PAIRS: {"rank", "skip"},
    PatternKind.MARK: set[str](),
    PatternKind.ERROR: set[str](),
}  # allowed named groups; those of a value pattern are names of values
_SEVERITIES = ("critical", "warning", "info")
_POSITION_KEYS = {"pattern", "unit", "done", "total", "epoch", "epochs", "rank", "resumed"}
_GIVES = {"position", "values", "rank", "begins", "ends", "errors"}


class PackError(ValueError):
    """All problems of one pack, one per line, with their place in the file."""


@dataclass(frozen=True)
class PackSample:
    """Records as the program writes them, and all that should be found in them."""

    text: bytes
    positions: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None  # data-parallel rank of these values
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pack:
    """Description of the log lines of one program."""

    name: str
    title: str
    about: str
    level: int
    patterns: tuple[Pattern, ...]  # positions in order of preference
    detect: tuple[Pattern, ...]  # each is one kind of evidence for this pack
    samples: tuple[PackSample, ...]
    also: tuple[str, ...] = ()  # packs of libraries that this program uses, whose lines are in its logs
    also_unit: str | None = None  # unit of those packs' positions here


def parse_pack(text: str, name: str, *, lazy: bool = False) -> Pack:
    """Parse a pack without inherited patterns; PackError lists all problems.

    ``lazy`` postpones compiling a pattern, and so its error, to its first use: few patterns are ever used.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PackError(f"{name}.toml: is not TOML: {error}") from error
    problems: list[str] = []
    for key, given in content.items():
        if key not in _HEAD and key not in _KINDS and key != "sample":
            known = ", ".join([*_HEAD, *_KINDS, "sample"])
            problems.append(f"{key}: unknown key (known: {known})")
        elif key in _HEAD and (not isinstance(given, _HEAD[key]) or isinstance(given, bool)):
            problems.append(f"{key}: must be a {_HEAD[key].__name__}")
    problems += [f"{key}: is missing" for key in ("name", "title", "about") if key not in content]
    if content.get("name", name) != name:
        problems.append(f'name: is "{content["name"]}", but the file is {name}.toml')
    if content.get("level", 3) not in LEVELS:
        problems.append(f"level: must be one of {', '.join(map(str, LEVELS))}")
    if content.get("also_unit", UNITS[0]) not in UNITS:
        problems.append(f"also_unit: unknown unit (known: {', '.join(UNITS)})")
    patterns = [
        pattern
        for kind in _KINDS
        for index, table in enumerate(_tables(content, kind, problems))
        if (pattern := _pattern(kind, table, f"{kind}[{index}]", problems, lazy)) is not None
    ]
    detect = []
    for index, regex in enumerate(content.get("detect", ()) if isinstance(content.get("detect", ()), list) else ()):
        table = {"name": f"detect_{index}", "regex": regex}
        if (pattern := _pattern("value", table, f"detect[{index}]", problems, lazy)) is not None:
            detect.append(pattern)
    samples = [
        _sample(table, f"sample[{index}]", problems) for index, table in enumerate(_tables(content, "sample", problems))
    ]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise PackError("\n".join([f"{name}.toml: {count}", *(f"  {problem}" for problem in problems)]))
    return Pack(
        name=name,
        title=content["title"],
        about=content["about"],
        level=content.get("level", 3),
        patterns=tuple(patterns),
        detect=tuple(detect),
        samples=tuple(samples),
        also=tuple(content.get("also", ())),
        also_unit=content.get("also_unit"),
    )


def _tables(content: Mapping[str, Any], kind: str, problems: list[str]) -> list[dict[str, Any]]:
    given = content.get(kind, [])
    if isinstance(given, list) and all(isinstance(table, dict) for table in given):
        return given
    problems.append(f"{kind}: must be written as [[{kind}]]")
    return []


def _pattern(kind: str, table: Mapping[str, Any], place: str, problems: list[str], lazy: bool) -> Pattern | None:
    """Parse one table; None after adding its problems."""
    found, needed, allowed = _KINDS[kind]
    before = len(problems)
    problems += [
        f"{place}.{key}: unknown key (known: {', '.join(sorted(needed | allowed))})"
        for key in table
        if key not in needed | allowed
    ]
    problems += [f"{place}.{key}: is missing" for key in sorted(needed) if key not in table]
    name, regex = table.get("name", kind), table.get("regex", table.get("line", ""))
    keys = table.get("keys", {})
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append(f"{place}.name: {name!r} is not made of lower-case letters, digits and _")
    if kind == "mark" and name not in MARKS:
        problems.append(f'{place}.name: unknown mark "{name}" (known: {", ".join(MARKS)})')
    if kind == "mark" and not isinstance(table.get("begins", True), bool):
        problems.append(f"{place}.begins: must be true or false")
    if kind == "error" and table.get("severity", _SEVERITIES[0]) not in _SEVERITIES:
        problems.append(f'{place}.severity: is "{table["severity"]}" (known: {", ".join(_SEVERITIES)})')
    if not isinstance(table.get("class", ""), str):
        problems.append(f"{place}.class: must be a string")
    base = table.get("epoch_base", 0)
    if isinstance(base, bool) or base not in (0, 1):
        problems.append(f"{place}.epoch_base: must be 0 or 1")
    if not isinstance(keys, dict) or not all(isinstance(of, str) and _NAME.fullmatch(of) for of in keys.values()):
        problems.append(f"{place}.keys: must map each key in the log to the name of its value")
    sets = table.get("sets", {})
    if not (isinstance(sets, dict) and all(map(_NAME.fullmatch, sets)) and {*map(type, sets.values())} <= {int, float}):
        problems.append(f"{place}.sets: must map names of values to numbers")
    if not isinstance(regex, str):
        problems.append(f"{place}.regex: must be a string")
    if len(problems) > before:
        return None
    for macro, expression in _MACROS.items():
        regex = regex.replace(macro, expression)
    field_name = "line" if kind == "pairs" else "regex"
    try:
        pattern = compile_pattern(
            name,
            regex,
            table.get("severity"),
            kind=found,
            unit=table.get("unit"),
            error_class=table.get("class"),
            begins=table.get("begins", True),
            keys=keys,
            epoch_base=base,
            sets=sets,
            lazy=lazy,
        )
    except PatternError as error:
        problems.append(f"{place}.{field_name}: {error}" + "".join(f"\n    {line}" for line in _caret(error, regex)))
        return None
    if lazy:
        return pattern
    groups = _GROUPS.get(found)
    problems += [
        f'{place}.{field_name}: unknown group "{group}"'
        for group in pattern.regex.groupindex
        if (not _NAME.fullmatch(group) if groups is None else group not in groups)
    ]
    return pattern


def _caret(error: PatternError, regex: str) -> list[str]:
    return [] if error.position is None else error.caret(regex).split("\n")


def _sample(table: Mapping[str, Any], place: str, problems: list[str]) -> PackSample:
    problems += [f"{place}.{key}: unknown key (known: text, gives)" for key in table if key not in ("text", "gives")]
    text, gives = table.get("text"), table.get("gives")
    if not isinstance(text, str) or not isinstance(gives, dict):
        problems.append(f"{place}: needs text and gives; use gives = {{}} if nothing is found in the text")
        return PackSample(b"")
    problems += [
        f"{place}.gives.{key}: unknown key (known: {', '.join(sorted(_GIVES))})" for key in gives if key not in _GIVES
    ]
    given = gives.get("position", [])
    positions = given if isinstance(given, list) else [given]
    lists = [gives.get(key, []) for key in ("begins", "ends", "errors")]
    if not all(isinstance(position, dict) for position in positions):
        problems.append(f"{place}.gives.position: must be a table, or a list of tables")
    elif not isinstance(gives.get("values", {}), dict) or not all(isinstance(names, list) for names in lists):
        problems.append(f"{place}.gives: values must be a table; begins, ends and errors must be lists")
    else:
        problems += [
            f"{place}.gives.position.{key}: unknown key (known: {', '.join(sorted(_POSITION_KEYS))})"
            for position in positions
            for key in position
            if key not in _POSITION_KEYS
        ]
    return PackSample(
        text=text.encode(),
        positions=tuple(positions),
        values=gives.get("values", {}),
        rank=gives.get("rank"),
        begins=tuple(gives.get("begins", ())),
        ends=tuple(gives.get("ends", ())),
        errors=tuple(gives.get("errors", ())),
    )


def resolve_inheritance(packs: Iterable[Pack]) -> tuple[Pack, ...]:
    """Add inherited patterns to each pack; PackError for an unknown pack or a cycle."""
    named = {pack.name: pack for pack in packs}
    return tuple(_with_inherited(pack, named, ()) for pack in named.values())


def _with_inherited(pack: Pack, named: Mapping[str, Pack], parents: tuple[str, ...]) -> Pack:
    patterns, also = list(pack.patterns), list(pack.also)
    own = {pattern.name for pattern in patterns if pattern.kind is not PatternKind.MARK}
    for name in pack.also:
        if name not in named or name in (*parents, pack.name):
            raise PackError(
                f'{pack.name}.toml: 1 problem\n  also: "{name}" is unknown or inherits from this pack; use another pack'
            )
        other = _with_inherited(named[name], named, (*parents, pack.name))
        also += [further for further in other.also if further not in also]
        for pattern in other.patterns:
            if pattern.name in own:
                continue
            counts = pattern.kind in (PatternKind.POSITION, PatternKind.RESUME) and pack.also_unit is not None
            patterns.append(replace(pattern, unit=pack.also_unit) if counts else pattern)
    return replace(pack, patterns=tuple(patterns), also=tuple(also))


# -- detecting the pack of a log ---------------------------------------------------------------------

_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n\r]*(?:\x07|\x1b\\)?)")


def _plain_text(text: bytes) -> bytes:
    """Return records without colours, each ended by a newline."""
    if b"\x1b" in text:
        text = _ESCAPE.sub(b"", text)
    return text.replace(b"\r", b"\n") if b"\r" in text else text


def _matching_records(pattern: Pattern, text: bytes) -> Iterator[int]:
    """Yield the start of each record that the pattern matches."""
    seen: set[int] = set()
    for literal in pattern.literals:
        place = text.find(literal)
        while place >= 0:
            start, stop = text.rfind(b"\n", 0, place) + 1, text.find(b"\n", place)
            stop = len(text) if stop < 0 else stop
            if start not in seen and pattern.regex.search(text[start : min(stop, start + RECORD_BYTES)]):
                seen.add(start)
                yield start
            place = text.find(literal, stop)


class PackDetector:
    """Detects the pack of one log from its first records.

    A program's evidence outweighs that of a framework, and that outweighs a library's, whose lines are in the logs of
    all its users. Then the number of kinds of evidence counts, then that of records. The choice may change until it is
    final, for example if a library's progress bar comes first.
    """

    def __init__(self, packs: Sequence[Pack]) -> None:
        self._packs = packs
        # records per kind of evidence of each pack; counting stops at enough
        self._counts: dict[str, Counter[int]] = {pack.name: Counter() for pack in packs}
        self._fed_bytes = 0
        self.choice: str | None = None  # name of the pack; None without evidence
        self.is_final = False  # whether the choice is final, so that feeding can stop

    def feed(self, text: bytes) -> None:
        """Take the next whole records of the log."""
        if self.is_final:
            return
        if self._fed_bytes >= FULL_READ_BYTES and len(text) > END_BYTES:
            text = text[-END_BYTES:].partition(b"\n")[2]
        self._fed_bytes += len(text)
        text = _plain_text(text)
        for pack in self._packs:
            found = self._counts[pack.name]
            for number, pattern in enumerate(pack.detect):
                wanted = ENOUGH_RECORDS - found[number]
                if wanted > 0:
                    found[number] += sum(1 for _ in islice(_matching_records(pattern, text), wanted))
        self._choose()

    def _choose(self) -> None:
        evidence = {
            pack.name: (pack.level, len(+self._counts[pack.name]), self._counts[pack.name].total())
            for pack in self._packs
            if self._counts[pack.name].total()
        }
        if not evidence:
            return
        best = max(evidence.values())
        self.choice = next(name for name, strength in evidence.items() if strength == best)
        level, kinds, found = best
        others = any(strength[0] == level for name, strength in evidence.items() if name != self.choice)
        sure = level == LEVELS[-1] and not others and (kinds >= ENOUGH_KINDS or found >= ENOUGH_RECORDS)
        self.is_final = (level > LEVELS[0] and self._fed_bytes >= FULL_READ_BYTES) or (
            sure and self._fed_bytes >= SPREAD_BYTES
        )

    def find_nearest(self, text: bytes) -> tuple[str, str] | None:
        """Find the pack whose samples share most words with a log, and those words; None if none shares two."""
        log_words = {
            word
            for record in _plain_text(text).split(b"\n")[:MOST_RECORDS]
            if looks_like_progress(record)
            for word in _words(record)
        }
        words = {pack.name: {word for sample in pack.samples for word in _words(sample.text)} for pack in self._packs}
        spread = Counter(word for of in words.values() for word in of)
        best: tuple[float, str] | None = None
        for name, of in words.items():
            score = sum(1 / spread[word] for word in of & log_words)
            if len(of & log_words) > 1 and name != GENERIC and (best is None or score > best[0]):
                best = (score, name)
        if best is None:
            return None
        common = sorted(words[best[1]] & log_words, key=lambda word: (spread[word], word))[:3]
        return best[1], "shares the words " + ", ".join(f'"{word.decode()}"' for word in common)


_WORD = re.compile(rb"[A-Za-z][A-Za-z_]{3,40}")
_COUNTER = re.compile(
    rb"(?<![\w./:-])\d{1,18}(?:,\d{3}){0,5} {0,3}(?:/|\bof\b) {0,9}\d{1,18}(?:,\d{3}){0,5}(?![\w/:-])"
    rb"|(?<![\w.])\d{1,3}(?:\.\d{1,6})? ?%"
    rb"|(?i:\b(?:steps?|epochs?|iter(?:ation)?s?|batch(?:es)?|rounds?|samples?|items?|requests?|global_step))"
    rb"[\"']?\]?[ \t]{0,8}[:=#\[]?[ \t]{0,8}\d"
    rb"|\d (?:steps?|epochs?|iterations?|batches|samples|items|requests)\b"
    rb"[^\n]{0,40}(?i:done|complete|processed|finished)"
    rb"|(?<![\w.])\d{1,18}(?:\.\d{1,9})? ?(?:it|items|samples|tokens|steps|examples|img|images)/s"
)


def _words(text: bytes) -> Iterator[bytes]:
    return (word.lower() for word in _WORD.findall(text))


def looks_like_progress(record: bytes) -> bool:
    """Whether a record seems to show progress: n of m, a percentage, a numbered step, a rate."""
    return _COUNTER.search(record[:RECORD_BYTES]) is not None
