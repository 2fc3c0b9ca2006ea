"""Packs: descriptions of the log lines of one program, one file each, and detection of a log's pack.

``exporter/packs/README.md`` describes the files.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.records import NOTHING, JsonObject, Record, RecordError
from exporter.logs.patterns import Pattern, PatternError, PatternKind, compile_pattern
from exporter.logs.search.automata import AutomatonGroup, ShortTexts, build_automata
from exporter.logs.search.literals import RequiredLiterals
from exporter.logs.search.ordinary_text import LINES, WORDS
from exporter.logs.search.pieces import take_sample
from exporter.logs.search.units import SearchUnit

GENERIC = "generic"
LEVELS = (0, 1, 2, 3)  # strength of a pack's evidence: any program, a library, a framework, one program
FULL_READ_BYTES = (
    4 * 1024 * 1024
)  # part of a log that is read in full; the choice is then final, unless it fits any program
# The same of a log whose choice, or lack of one, is that of another log of its role: one chunk of 1 MiB, which ends
# with a whole record.
ALIKE_READ_BYTES = 1000 * 1024
END_BYTES = 16 * 1024  # part read of each further chunk
PART_BYTES = 128 * 1024  # part searched at a time
# Records searched in vain for one kind of evidence, such as a Python file in each line, after which it pays to learn
# what must follow its literals. Building the automata anew takes as long as 7,000 such searches.
MANY_VAIN_SEARCHES = 500
MOST_IN_VAIN = 16  # records that lack a second literal before it is looked for in the whole part
ENOUGH_KINDS, ENOUGH_RECORDS = 2, 3  # kinds of evidence, or records, that make the choice of a program's pack final
SPREAD_BYTES = 64 * 1024  # text after which evidence of a second pack is no longer expected

RECORD_BYTES = 4096  # part of a record that is searched
MOST_RECORDS = 10_000  # records searched for the nearest pack

_MACROS = {
    "@count@": r"\d{1,18}",
    "@number@": r"[-+]?(?:(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,3})?|[nN]a[nN]|inf)",
    # begins the name of a bar that does not count the work, and not that of a metric or a file in it
    "@other_bar@": (
        r"[Vv]al(?:id|[^a-z_=.])|[Ee]val(?![_=.])|[Tt]est(?![_=.])|[Ss]anity|[Ww]arm-?up|"
        r"[Ll]oading|[Dd]ownload|[Ff]etching|[Cc]apturing|[Cc]ompiling|[Aa]dding requests|[Rr]endering|"
        r"[Bb]uilding contexts|[Bb]ootstrapping|[Cc]reating .{1,20}from Arrow|[Ss]aving the dataset"
    ),
}
_KINDS = {
    "position": (PatternKind.POSITION, {"name", "unit", "regex"}, {"epoch_base"}),
    "resume": (PatternKind.RESUME, {"unit", "regex"}, {"name"}),
    "value": (PatternKind.VALUE, {"name", "regex"}, {"sets"}),
    "pairs": (PatternKind.PAIRS, {"name", "line", "keys"}, set[str]()),
    "mark": (PatternKind.MARK, {"name", "regex", "begins"}, set[str]()),
    "error": (PatternKind.ERROR, {"name", "regex", "severity", "error_class"}, set[str]()),
}  # per table of patterns: kind, required keys, optional keys


KnownLiterals = Mapping[str, RequiredLiterals]  # by the text of the pattern


class PackError(ValueError):
    """The first problem of a pack, with its place in the file."""


class PackSample(Record):
    """Records as the program writes them."""

    text: str
    gives: JsonObject  # all that should be found in them, for tests


@dataclass(frozen=True)
class Pack:
    """Description of the log lines of one program."""

    name: str
    title: str
    about: str
    level: int
    patterns: tuple[Pattern, ...]  # positions in order of preference
    detect: tuple[Pattern, ...]  # each is one kind of evidence for this pack
    text: str  # of its file
    also: tuple[str, ...] = ()  # packs of libraries that this program uses, whose lines are in its logs
    also_unit: str | None = None  # unit of those packs' positions here

    @cached_property
    def samples(self) -> tuple[PackSample, ...]:
        """Sample lines, parsed only if wanted: they are two thirds of the time that a pack takes."""
        return tuple(map(PackSample.from_json, tomllib.loads(self.text).get("sample", ())))


class _Table(Record):
    """A table of any kind of patterns; ``_KINDS`` has the keys of each."""

    name: str | None = None
    regex: str = ""
    line: str = ""
    unit: str | None = None
    severity: str | None = None
    error_class: str | None = None
    begins: bool = True
    keys: Mapping[str, str] = NOTHING
    epoch_base: int = 0
    sets: Mapping[str, float] = NOTHING


class _PackFile(Record):
    name: str
    title: str
    about: str
    level: int = LEVELS[-1]
    detect: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    also_unit: str | None = None
    sample: tuple[PackSample, ...] = ()


def parse_pack(text: str, name: str, known: KnownLiterals | None = None) -> Pack:
    """Parse a pack without inherited patterns.

    With ``known`` literals, a pattern is compiled, and so its error raised, on first use: few patterns are ever used.
    Then samples are expected after all else.
    """
    lazy = known is not None
    try:
        content = tomllib.loads(text.partition("\n[[sample]]")[0] if lazy else text)
        tables = {kind: content.pop(kind, []) for kind in _KINDS}
        file = _PackFile.from_json(content)
        for record in (file, *file.sample):
            for key in record.unknown_keys:
                raise RecordError(f"{key}: unknown key")
        patterns = [
            _pattern(kind, table, f"{kind}[{index}]", known)
            for kind in _KINDS
            for index, table in enumerate(tables[kind])
        ]
        detect = [
            _compile("detect", _Table(name=f"detect_{index}", regex=regex), f"detect[{index}]", known)
            for index, regex in enumerate(file.detect)
        ]
    except (tomllib.TOMLDecodeError, RecordError) as error:
        raise PackError(f"{name}.toml: {error}") from error
    head = file.name, file.title, file.about, file.level
    return Pack(*head, tuple(patterns), tuple(detect), text, file.also, file.also_unit)


def _pattern(kind: str, content: Mapping[str, object], place: str, known: KnownLiterals | None) -> Pattern:
    """Parse one table. Tests check its names and groups."""
    _, needed, optional = _KINDS[kind]
    for key in content.keys() - needed - optional:
        raise RecordError(f"{place}.{key}: unknown key")
    for key in needed - content.keys():
        raise RecordError(f"{place}.{key}: is missing")
    return _compile(kind, _Table.from_json(content, place), place, known)


def _compile(kind: str, table: _Table, place: str, known: KnownLiterals | None) -> Pattern:
    regex = table.regex or table.line
    for macro, expression in _MACROS.items():
        regex = regex.replace(macro, expression)
    try:
        return compile_pattern(
            table.name or kind,
            regex,
            table.severity,
            kind=_KINDS[kind][0] if kind in _KINDS else PatternKind.VALUE,
            unit=table.unit,
            error_class=table.error_class,
            begins=table.begins,
            keys=table.keys,
            epoch_base=table.epoch_base,
            sets=table.sets,
            lazy=known is not None,
            known_literals=None if known is None else known.get(regex),
        )
    except PatternError as error:
        raise RecordError(f"{place}: {error}\n{error.caret(regex)}") from error


def resolve_inheritance(packs: Iterable[Pack]) -> tuple[Pack, ...]:
    """Add inherited patterns to each pack; PackError for an unknown pack or a cycle."""
    named = {pack.name: pack for pack in packs}
    return tuple(_with_inherited(pack, named, ()) for pack in named.values())


def _with_inherited(pack: Pack, named: Mapping[str, Pack], parents: tuple[str, ...]) -> Pack:
    patterns, also = list(pack.patterns), list(pack.also)
    own = {pattern.name for pattern in patterns if pattern.kind is not PatternKind.MARK}
    for name in pack.also:
        if name not in named or name in (*parents, pack.name):
            raise PackError(f'{pack.name}.toml: also: "{name}" is unknown or inherits from this pack')
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


def _frequency(literals: Iterable[bytes]) -> int:
    return sum(LINES.count(literal) + WORDS.count(literal) for literal in literals)


class Evidence:
    """Finds the records that indicate a pack, for all packs in one pass."""

    def __init__(self, packs: Sequence[Pack]) -> None:
        self._packs = packs
        self._wanted = 0  # units that do not have enough records in the part being searched
        self.short_texts = ShortTexts()
        self._groups: tuple[AutomatonGroup, ...] = ()  # tuned to the first text that is searched with them
        self._vain_searches = Counter[int]()  # by unit
        self._learned: set[int] = set()  # units whose context has been learned

    @cached_property
    def units(self) -> tuple[tuple[str, SearchUnit], ...]:
        """The pack and the pattern of each kind of evidence."""
        detect = [(pack.name, pattern) for pack in self._packs for pattern in pack.detect]
        found = tuple((name, SearchUnit(number, number, pattern)) for number, (name, pattern) in enumerate(detect))
        for _, unit in found:
            if unit.second_literals and _frequency(unit.second_literals) < _frequency(unit.literals):
                unit.swap_literals()
            unit.forget_context()  # to learn it takes longer than the few records that are searched in vain
        return found

    def count(self, text: bytes, counts: list[int]) -> None:
        """Add the matching records of each unit to its count, up to enough."""
        if not self._groups and self.short_texts.take(len(text)):
            self._count(text, self._search_each(text), counts)
            return
        if not self._groups:
            self._groups = build_automata((unit for _, unit in self.units), take_sample(text, len(text)))
        start = 0
        while start < len(text):  # in parts: most units soon have enough, and are then searched no more
            stop = text.rfind(b"\n", start, start + PART_BYTES) + 1 or text.find(b"\n", start) + 1 or len(text)
            part = text[start:stop]
            self._count(part, self._search(part), counts)
            start = stop
        for number, searches in self._vain_searches.items():
            if searches >= MANY_VAIN_SEARCHES and number not in self._learned:
                self._learned.add(number)
                if self.units[number][1].restore_context():
                    self._groups = ()

    def _count(self, text: bytes, hits: Iterable[tuple[int, int]], counts: list[int]) -> None:
        """Add the matching records among these hits."""
        self._wanted = sum(unit.bit for _, unit in self.units if counts[unit.number] < ENOUGH_RECORDS)
        seen: set[tuple[int, int]] = set()  # unit and start of each matching record
        in_vain: Counter[int] = Counter()  # records without a second literal, by unit
        for mask, place in hits:
            mask &= self._wanted
            if not mask:
                continue
            start, stop = text.rfind(b"\n", 0, place) + 1, text.find(b"\n", place)
            record = text[start : min(len(text) if stop < 0 else stop, start + RECORD_BYTES)]
            while mask:
                unit = self.units[mask.bit_length() - 1][1]
                mask ^= unit.bit
                if unit.second_literals and not any(literal in record for literal in unit.second_literals):
                    in_vain[unit.number] += 1
                    if in_vain[unit.number] == MOST_IN_VAIN and not any(
                        literal in text for literal in unit.second_literals
                    ):
                        self._wanted ^= unit.bit
                elif (unit.number, start) not in seen:
                    if not unit.search(record):
                        self._vain_searches[unit.number] += 1
                        continue
                    seen.add((unit.number, start))
                    counts[unit.number] += 1
                    if counts[unit.number] >= ENOUGH_RECORDS:
                        self._wanted ^= unit.bit

    def _search_each(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Find the places of each unit's literals, one in a record."""
        for _, unit in self.units:
            for literal in unit.literals:
                place = text.find(literal)
                while place >= 0:
                    yield unit.bit, place
                    stop = text.find(b"\n", place)
                    place = text.find(literal, stop) if stop >= 0 else -1

    def _search(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Find the places of literals, and the wanted units that have one there."""
        for group in self._groups:
            if not group.mask & self._wanted:
                continue
            possible, certain, tests, end = group.possible_units, group.certain_units, group.tests, len(text)
            tested = group.tested_units
            for number, place, _ in group.find(text):
                wanted = self._wanted
                if not possible[number] & wanted:
                    continue
                is_sure = certain[number] & wanted
                if (
                    not (is_sure or possible[number] & wanted & ~tested[number])
                    and (test := tests[number]) is not None
                    and test(text, place, end) is None
                ):
                    continue
                mask = group.units_at(text, end, number, place)
                if mask & wanted:
                    yield mask, place
                elif not is_sure:
                    group.record_useless_hit(number, wanted)


class PackDetector:
    """Detects the pack of one log from its first records.

    A program's evidence outweighs that of a framework, and that outweighs a library's, whose lines are in the logs of
    all its users. Then the number of kinds of evidence counts, then that of records. The choice may change until it is
    final, for example if a library's progress bar comes first.
    """

    def __init__(
        self, packs: Sequence[Pack], evidence: Evidence | None = None, confirmed: set[str | None] | None = None
    ) -> None:
        """``evidence`` of these packs is shared by all logs, since it takes a while to prepare.

        ``confirmed`` has the choices of similar logs that were read in full, which confirm those of the others. None is
        that of a log without evidence.
        """
        self._packs = packs
        self._evidence = evidence or Evidence(packs)
        self._confirmed = set[str | None]() if confirmed is None else confirmed
        self._counts: list[int] = []  # records per kind of evidence; counting stops at enough
        self._fed_bytes = 0
        self._least_level = LEVELS[0]  # weaker evidence is not considered
        self.choice: str | None = None  # name of the pack; None without evidence
        self.is_final = False  # whether the choice is final, so that feeding can stop

    def resume(self, choice: str) -> None:
        """Begin with the choice of an earlier detector of this log: only evidence of its level or above replaces it."""
        self.choice = choice
        self._least_level = next((pack.level for pack in self._packs if pack.name == choice), LEVELS[0])

    def feed(self, buffer: bytes | bytearray, end: int | None = None) -> None:
        """Take the next whole records of the log: the first ``end`` bytes of a buffer, or all."""
        if self.is_final:
            return
        enough, before = ALIKE_READ_BYTES if self.choice in self._confirmed else FULL_READ_BYTES, self._fed_bytes
        start, end = 0, len(buffer) if end is None else end
        self._fed_bytes += end
        if before >= enough and end > END_BYTES:
            start = buffer.find(b"\n", end - END_BYTES, end) + 1 or end
        self._counts = self._counts or [0] * len(self._evidence.units)
        self._evidence.count(_plain_text(bytes(memoryview(buffer)[start:end])), self._counts)
        self._choose()
        if self.is_final or self._fed_bytes >= FULL_READ_BYTES:
            self._confirmed.add(self.choice)

    def _choose(self) -> None:
        counts: dict[str, list[int]] = {}
        for name, unit in self._evidence.units:
            if count := self._counts[unit.number]:
                counts.setdefault(name, []).append(count)
        evidence = {
            pack.name: (pack.level, len(counts[pack.name]), sum(counts[pack.name]))
            for pack in self._packs
            if pack.name in counts and pack.level >= self._least_level
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
        words = {
            pack.name: {word for sample in pack.samples for word in _words(sample.text.encode())}
            for pack in self._packs
        }
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
