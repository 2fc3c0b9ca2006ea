"""The search engine against a plain search of each pattern in each record."""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.logs import records
from exporter.logs.patterns import Pattern, PatternKind, compile_pattern
from exporter.logs.records import LogChunk, record_ends
from exporter.logs.search import automata, engine, time_budget
from exporter.logs.search.engine import SearchEngine
from exporter.logs.search.extraction import NumberExtractor
from exporter.logs.search.findings import ActivityMark, LogFindings, LogPosition, LogValue
from exporter.logs.search.matches import Key, MatchResults
from exporter.logs.search.units import SearchUnit

COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


class DigitTimestamps:
    """Takes the first digits of a record as its timestamp."""

    def read(self, head: bytes) -> float | None:
        assert len(head) <= 80
        assert b"\x1b" not in head
        match = re.match(rb"T(\d+)", head)
        return float(match[1]) if match else None


def expected(patterns: Sequence[Pattern], text: bytes, offset: int = 0) -> LogFindings:
    """The findings of a plain search of each pattern in each record."""
    found = LogFindings()
    offsets = [0, *(match.end() for match in re.finditer(rb"[\r\n]", text)), len(text) + 1]
    for start, behind in itertools.pairwise(offsets):
        record = COLOUR.sub(b"", text[start : behind - 1])
        for pattern in patterns if record else ():
            match, stamp, extractor = (
                pattern.regex.search(record),
                DigitTimestamps().read(record[:80]),
                NumberExtractor(pattern),
            )
            if match is None:
                continue
            rank = extractor.rank(match)
            if pattern.kind is PatternKind.ERROR:
                found.errors[pattern.name] = found.errors.get(pattern.name, 0) + 1
            elif pattern.kind is PatternKind.MARK:
                found.marks.append(ActivityMark(pattern.name, pattern.begins, offset + start, stamp))
            elif pattern.kind in (PatternKind.VALUE, PatternKind.PAIRS):
                for name, number in extractor.values(match, record):
                    ranks = found.values.setdefault(name, {})
                    if rank not in ranks or ranks[rank].offset < offset + start:
                        ranks[rank] = LogValue(number, offset + start, stamp)
            elif (counts := extractor.counts(match)) is not None:
                position = (pattern.name, str(pattern.unit), offset + start, *counts, rank)
                found.positions.append(LogPosition(*position, resumed=pattern.kind is PatternKind.RESUME, stamp=stamp))
    return found


def findings_of(search_engine: SearchEngine, text: bytes, cuts: Iterable[int] = (), offset: int = 0) -> LogFindings:
    """The findings of one scan, fed the text in parts that end with a record, in a reused buffer."""
    scan = search_engine.begin_file(DigitTimestamps())
    offsets = sorted(
        {0, len(text), *(position for position in cuts if text[position - 1 : position] in (b"\n", b"\r"))}
    )
    buffer = bytearray(b"oom error: 1/2 Loss=4\n" * 20)
    for start, end in itertools.pairwise(offsets):
        part = text[start:end]
        if len(buffer) < len(part):
            buffer.extend(bytes(len(part)))
        buffer[: len(part)] = part
        scan.feed(buffer, len(part), offset + start)
    return scan.finish(lambda position, size: text[position - offset : position - offset + size])


def pattern(name: str, text: str, kind: PatternKind, **fields: object) -> Pattern:
    return compile_pattern(name, text, kind=kind, **fields)  # type: ignore[arg-type]


MIXED = (
    pattern("ab", "ab", PatternKind.ERROR),
    pattern("abc", "abc|bcd", PatternKind.ERROR),
    pattern("bc", "bc", PatternKind.ERROR),
    pattern("cab", "c+ab(?!d)", PatternKind.ERROR),
    pattern("dca", "(?i)dca", PatternKind.ERROR),
    pattern("begin", "^ab.{0,3}$", PatternKind.ERROR),
    pattern("either", "(?<!d)bcd|cab|aab/.?1|1b2.{0,2}(?:cab|bcd)(?!a)|b=[12]", PatternKind.ERROR),
    pattern("bare", "[abc] [abc]|^d?$", PatternKind.ERROR),
    pattern("items", r"ab(\d+)/(\d+)", PatternKind.POSITION),
    pattern("ranked", r"(?P<rank>\d)bc(?P<done>\d+)", PatternKind.POSITION, unit="steps"),
    pattern("resume", r"ca(\d)", PatternKind.RESUME),
    pattern("loss", r"(?P<loss>\d)?bb(?P<rate>\d)", PatternKind.VALUE),
    pattern("by rank", r"(?P<rank>\d)b(?P<size>\d)", PatternKind.VALUE),
    pattern("digit", r"(\d)", PatternKind.VALUE),
    pattern("pairs", "aa(?P<skip>d)?", PatternKind.PAIRS, keys={"ab": "ab", "b": "b"}),
    pattern("loading", "bbb|dd", PatternKind.MARK),
    pattern("loading", "ddd", PatternKind.MARK, begins=False),
)
SHORT_TEXTS = SearchEngine(MIXED)
SHORT_TEXTS.short_texts.left_bytes = 1 << 60
ENGINE = SearchEngine(MIXED)
ENGINE.short_texts.left_bytes = 0


@pytest.fixture(autouse=True)
def automata_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts are searched like long ones."""
    monkeypatch.setattr(automata, "ENOUGH_BYTES", 0)


PIECES = (
    *("a", "b", "c", "d", "ab", "bc", "abc", "bcd", "cab", "dca", "aab/", "1/2", "ca1", "bb2", "3bc4", "1b2", "b=1"),
    *("ab:2", "A", "C", "\n", "\n", "\r", "\r\n", " ", "\x1b[1m", "\x1b[0;32m", "T7", "\0", "\xff", "aa b: 3"),
)
TEXTS = st.lists(st.sampled_from([part.encode("latin-1") for part in PIECES]), max_size=60).map(b"".join)


@given(TEXTS, st.lists(st.integers(1, 150), max_size=5), st.integers(0, 1000))
@settings(max_examples=300, deadline=None)
@example(b"a\x1b[1mbc\nab", [5], 0)
@example(b"abcd\rcabcd\n", [], 3)
@example(b"\n\n\r\n", [1], 0)
def test_a_small_scan_finds_what_a_search_of_each_record_finds(text: bytes, cuts: list[int], offset: int) -> None:
    cuts = [position for position in cuts if position < len(text)]
    assert findings_of(ENGINE, text, cuts, offset) == expected(MIXED, text, offset)
    assert ENGINE.scan(text, DigitTimestamps()) == expected(MIXED, text)
    assert SHORT_TEXTS.scan(text, DigitTimestamps()) == expected(MIXED, text)


def test_automata_are_built_once_many_short_texts_or_a_long_one_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bytes] = []

    def build_automata(_units: object, sample: bytes) -> tuple[()]:
        built.append(sample)
        return ()

    monkeypatch.setattr(engine, "build_automata", build_automata)
    monkeypatch.setattr(automata, "ENOUGH_BYTES", 1000 * automata.SEARCH_BYTES)
    searched = SearchEngine(MIXED)
    for _ in range(900):
        searched.scan(b"abc\n")
    assert not built
    SearchEngine(MIXED).scan(bytes(automata.SHORT_BYTES + 1))
    assert len(built) == 1
    searched.short_texts.left_bytes = 1
    searched.scan(b"abc\n")
    assert len(built) == 1
    searched.scan(b"abc\n")
    assert len(built) == 2


WORDS = st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=8, unique=True)


@given(WORDS, st.data())
@settings(max_examples=250, deadline=None)
def test_overlapping_literals_hide_no_match(words: list[str], data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*words, "a", "b", " ", "\n"]), max_size=12)))
    patterns = [pattern(word, re.escape(word), PatternKind.ERROR) for word in words]
    patterns += [pattern(f"{word}$", f"{re.escape(word)}$", PatternKind.ERROR) for word in words]
    assert ENGINE.forward_units
    search_engine = SearchEngine(patterns)
    assert search_engine.scan(text.encode()) == expected(patterns, text.encode())
    scan = search_engine.begin_file()
    scan._search_backlog_chunk(records.LogChunk(text.encode(), len(text), 0), len(text))
    assert scan.finish(lambda position, size: text.encode()[position : position + size]) == expected(
        patterns, text.encode()
    )


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_backlog_loses_no_error_no_resume_and_no_last_value(data: st.DataObject) -> None:
    text = data.draw(TEXTS) + b"\n" + data.draw(TEXTS)
    window, tries = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    cuts = [match.end() for match in re.finditer(rb"[\r\n]", text) if data.draw(st.booleans())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "SMALL_BYTES", data.draw(st.sampled_from([0, 20])))
        patch.setattr(engine, "WINDOW_BYTES", window)
        patch.setattr(engine, "MOST_TRIES", tries)
        patch.setattr(engine, "FLOOD_BYTES", data.draw(st.sampled_from([0, 1 << 40])))
        patch.setattr(engine, "FLOOD_PART_BYTES", data.draw(st.integers(1, 60)))
        patch.setattr(engine, "MANY_RECORDS", data.draw(st.integers(1, 3)))
        patch.setattr(records, "NEAR_BYTES", data.draw(st.integers(1, 8)))
        found, whole = findings_of(ENGINE, text, cuts), expected(MIXED, text)
    assert found.errors == whole.errors
    assert [position for position in found.positions if position.resumed] == [
        position for position in whole.positions if position.resumed
    ]
    assert not [position for position in found.positions if position not in whole.positions]
    assert len(set(found.positions)) == len(found.positions)
    assert not [mark for mark in found.marks if mark not in whole.marks]
    assert found.positions == sorted(found.positions, key=lambda position: position.offset)
    for name in ("items", "ranked"):
        assert last(found.positions, name) == last(whole.positions, name)
    for begins in (True, False):
        assert [m for m in found.marks if m.begins == begins][-1:] == [m for m in whole.marks if m.begins == begins][
            -1:
        ]
    for name in ("rate", "digit", "ab", "b"):
        assert found.values.get(name) == whole.values.get(name)


def last(positions: list[LogPosition], name: str) -> LogPosition | None:
    return next((position for position in reversed(positions) if position.pattern == name), None)


@pytest.mark.parametrize("most", [0, engine.SMALL_BYTES])
def test_colour_codes_hide_no_match_and_shift_no_offset(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(engine, "SMALL_BYTES", most)
    lines = [
        b"\x1b[32mplain\x1b[0m\n",
        b"\x1b[1mProc\x1b[31messed \x1b[0m7\x1b[0m/9\n",
        b"\x1b]0;title\x07CUDA \x1b[1;31merr\x1b[0mor\r\n",
        b"Processed 8/9\r",
    ]
    items = pattern("items", r"Processed (\d+)/(\d+)", PatternKind.POSITION)
    oom = pattern("oom", "CUDA error", PatternKind.ERROR)
    last_of = pattern("last", r"(\d)/", PatternKind.VALUE)
    found = findings_of(SearchEngine([items, oom, last_of]), b"".join(lines), [], 1000)
    offsets = [(position.done, position.offset) for position in found.positions]
    third = 1000 + len(lines[0] + lines[1] + lines[2])
    assert offsets[-1] == (8, third)
    assert offsets[:-1] in ([], [(7, 1000 + len(lines[0]))])
    assert found.errors == {"oom": 1}
    assert found.values["last"][None].offset == third


def backlog_findings(chunks: Sequence[bytes], patterns: Sequence[Pattern]) -> tuple[LogFindings, list[tuple[int, int]]]:
    """The findings in chunks of a backlog, and the parts of it that were reread."""
    scan, offset, rereads = SearchEngine(patterns).begin_file(), 0, list[tuple[int, int]]()
    for chunk in chunks:
        scan.feed(chunk, len(chunk), offset)
        offset += len(chunk)

    def reread(start: int, size: int) -> bytes:
        rereads.append((start, size))
        return b"".join(chunks)[start : start + size]

    return scan.finish(reread), rereads


LONG_WORDS = st.lists(
    st.lists(st.sampled_from(["ab", "bab", "Xa", "aab", "b"]), min_size=2, max_size=6)
    .map("".join)
    .filter(lambda word: len(word) >= 4),
    min_size=1,
    max_size=40,
    unique=True,
)


@given(LONG_WORDS, st.data())
@settings(max_examples=250, deadline=None)
def test_literals_that_share_pieces_are_distinguished(words: list[str], data: st.DataObject) -> None:
    parts = st.sampled_from([*words, "ab", "b", "Xa", " ", "\n", "\r", "7", "7/8"])
    text = "".join(data.draw(st.lists(parts, max_size=25))).encode()
    patterns = [pattern(word, re.escape(word), PatternKind.ERROR) for word in words[::2]]
    patterns += [pattern(f"{word}$", f"^.?{re.escape(word)}", PatternKind.ERROR) for word in words[1::2]]
    patterns += [
        pattern(f"{word}#", rf"{re.escape(word)}(?:a|b ?)?(\d)(?:/(\d)|$)", PatternKind.POSITION) for word in words[:9]
    ]
    search_engine = SearchEngine(patterns)
    found, whole = search_engine.scan(text), expected(patterns, text)
    assert (found.errors, found.positions) == (
        whole.errors,
        [position._replace(stamp=None) for position in whole.positions],
    )
    scan = search_engine.begin_file()
    scan._search_backlog_chunk(records.LogChunk(text, len(text), 0), len(text))
    assert scan.finish(lambda position, size: text[position : position + size]).errors == whole.errors


@given(LONG_WORDS, st.data())
@settings(max_examples=200, deadline=None)
def test_a_piece_with_many_useless_hits_still_finds_its_literals(words: list[str], data: st.DataObject) -> None:
    parts = st.sampled_from([*words, *(word[1:] for word in words), "ab", "b", "Xa", " ", "\n", "\r", "7", "7/8"])
    text = "".join(data.draw(st.lists(parts, max_size=40))).encode()
    patterns = [pattern(word, f"{re.escape(word)}(?!7)", PatternKind.ERROR) for word in words[::2]]
    patterns += [
        pattern(f"{word}#", rf"{re.escape(word)}(?:a|b ?)?(\d)(?:/(\d)|$)", PatternKind.POSITION) for word in words
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automata, "MANY_USELESS_HITS", 1)
        search_engine, whole = SearchEngine(patterns), expected(patterns, text)
        for _ in range(2):
            found = search_engine.scan(text)
            assert found.errors == whole.errors
            assert found.positions == [position._replace(stamp=None) for position in whole.positions]


@given(st.lists(TEXTS, min_size=2, max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_log_that_changes_gets_new_automata_and_loses_nothing(parts: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "SMALL_BYTES", 0)
        patch.setattr(engine, "WINDOW_BYTES", 1)
        patch.setattr(engine, "BUILD_US", 0.1)
        search_engine = SearchEngine(MIXED)
        scan, text = search_engine.begin_file(DigitTimestamps()), b""
        for part in parts:
            scan.feed(part + b"\n", len(part) + 1, len(text))
            text += part + b"\n"
        found, whole = scan.finish(lambda position, size: text[position : position + size]), expected(MIXED, text)
    assert found.errors == whole.errors
    assert [position for position in found.positions if position.resumed] == [
        position for position in whole.positions if position.resumed
    ]
    for name in ("items", "ranked"):
        assert last(found.positions, name) == last(whole.positions, name)
    for name in ("rate", "digit", "ab", "b"):
        assert found.values.get(name) == whole.values.get(name)


def test_automata_for_a_backlog_are_built_once_while_the_log_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    built = list[list[str]]()

    def record_and_build(units: Sequence[SearchUnit], sample: bytes) -> tuple[automata.AutomatonGroup, ...]:
        built.append([unit.name for unit in units])
        return automata.build_automata(units, sample)

    monkeypatch.setattr(engine, "build_automata", record_and_build)
    search_engine = SearchEngine(
        [
            pattern("oom", "out of memory", PatternKind.ERROR),
            pattern("absent", r"never (\d+)", PatternKind.VALUE),
            pattern("items", r"Done (\d+) of (\d+)", PatternKind.POSITION),
        ]
    )
    scan = search_engine.begin_file()
    for part in range(6):
        chunk = FILLER + b"Done %d of 9\n" % part
        scan.feed(chunk, len(chunk), part * len(chunk))
    assert scan.finish(lambda position, size: b"").positions[-1].done == 5
    assert built == [["oom", "absent"]]


@pytest.mark.parametrize("others", [0, 40, 200])
def test_each_of_any_number_of_literals_is_found(others: int) -> None:
    words = [
        "No space left",
        "corrupt data",
        "bad file",
        *(f"word {number * 7919:x} is here" for number in range(others)),
    ]
    patterns = [pattern(word, f"{word}(?! at all)", PatternKind.ERROR) for word in words]
    text = b"".join(b"x %s y\n%s at all\n%s" % (word[1:].encode(), word.encode(), word.encode()) for word in words)
    found, _ = backlog_findings([FILLER, FILLER + text], patterns)
    assert found.errors == SearchEngine(patterns).scan(text).errors == expected(patterns, text).errors


def test_frequent_words_without_a_match_do_not_hide_the_last_match() -> None:
    mentions = b"step 7 loss 1\nstep 8\n" * 20_000
    steps = pattern(
        "step", r"(?:step|Step)(?::| |: ) {0,3}(\d{1,9})/(\d{1,9})(?!\d)", PatternKind.POSITION, unit="steps"
    )
    found, rereads = backlog_findings([FILLER, b"step 3/9\n" + mentions, mentions, mentions], [steps])
    assert [(position.done, position.offset) for position in found.positions] == [(3, len(FILLER))]
    assert rereads == []


def test_the_last_position_is_found_without_the_optional_rank() -> None:
    steps = pattern(
        "step", r"(?:\[(?P<rank>\d)\] )?step (?P<done>\d+)/(?P<total>\d+)", PatternKind.POSITION, unit="steps"
    )
    text = b"".join(b"step %d/900\n" % step for step in range(900))
    found, _ = backlog_findings([FILLER, FILLER + text], [steps])
    assert max(position.done for position in found.positions) == 899


FILLER = b"nothing to see here\n" * 20_000


def test_a_value_logged_once_is_kept_without_rereading() -> None:
    found, rereads = backlog_findings(
        [FILLER, b"seed=42\n" + FILLER, FILLER, FILLER], [pattern("seed", r"seed=(\d+)", PatternKind.VALUE)]
    )
    assert found.values["seed"][None] == LogValue(42.0, len(FILLER))
    assert rereads == []


def test_a_value_among_frequent_similar_lines_is_found_by_rereading_backwards() -> None:
    mentions = b"loss of nothing\n" * 20_000
    chunks = [b"loss 1\n", mentions, b"loss 2\n" + mentions, mentions, mentions]
    found, rereads = backlog_findings([FILLER, *chunks], [pattern("loss", r"loss (\d)", PatternKind.VALUE)])
    assert found.values["loss"][None] == LogValue(2.0, len(FILLER) + len(chunks[0] + chunks[1]))
    starts = [len(FILLER) + sum(map(len, chunks[:number])) for number in (4, 3, 2)]
    assert [start for start, _ in rereads[1:]] == starts  # the first reread is the end of the last chunk
    assert sum(size for _, size in rereads) <= sum(map(len, chunks[2:])) + len(b"loss of nothing\n")


def test_of_two_texts_that_a_match_needs_the_rarer_one_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = compile_pattern("bars", "it/s, [a-z]", kind=PatternKind.PAIRS, keys={"loss": "loss", "lr": "rate"})
    mentions, tried = b"step 7 loss=1 lr=2\n" * 20_000, list[str]()
    chunks = [FILLER, b"3it/s, loss=5 lr=6\n" + FILLER, mentions, mentions, mentions]
    evaluate = MatchResults.evaluate

    def count(self: MatchResults, unit: SearchUnit, chunk: LogChunk, start: int, stop: int) -> set[Key]:
        tried.append(unit.name)
        return evaluate(self, unit, chunk, start, stop)

    monkeypatch.setattr(MatchResults, "evaluate", count)
    found, _ = backlog_findings(chunks, [bars])
    assert {name: of[None].number for name, of in found.values.items()} == {"loss": 5.0, "rate": 6.0}
    assert len(tried) < 1000


def test_the_rarer_text_is_chosen_before_automata_are_built_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[set[bytes]] = []

    def build_automata(units: Iterable[SearchUnit], sample: bytes) -> tuple[automata.AutomatonGroup, ...]:
        units = list(units)
        built.append({literal for unit in units for literal in unit.literals})
        return automata.build_automata(units, sample)

    monkeypatch.setattr(engine, "build_automata", build_automata)
    bars = compile_pattern("bars", "it/s, [a-z]", kind=PatternKind.PAIRS, keys={"loss": "loss", "lr": "rate"})
    backlog_findings([b"step 7 loss=1 lr=2\n" * 20_000 + FILLER], [bars])
    assert built == [{b"it/s, "}]


def test_nothing_is_reread_if_a_later_chunk_has_the_value() -> None:
    mentions = b"loss of nothing\n" * 20_000
    found, rereads = backlog_findings(
        [mentions, mentions + b"loss 3\n"], [pattern("loss", r"loss (\d)", PatternKind.VALUE)]
    )
    assert found.values["loss"][None] == LogValue(3.0, 2 * len(mentions))
    assert rereads == []


def test_only_the_end_of_the_last_chunk_is_reread_if_it_has_the_value() -> None:
    chunk = FILLER + b"loss 1\n" + FILLER + b"loss 2\n"
    found, rereads = backlog_findings([chunk, chunk, chunk], [pattern("loss", r"loss (\d)", PatternKind.VALUE)])
    assert found.values["loss"][None].number == 2.0
    assert rereads == [(3 * len(chunk) - engine.WINDOW_BYTES, engine.WINDOW_BYTES)]


def test_only_the_end_of_the_chunk_before_a_short_last_one_is_reread() -> None:
    chunk, last = FILLER + b"loss 1\n" + FILLER + b"loss 2\n", b"the end\n"
    found, rereads = backlog_findings([chunk, chunk, last], [pattern("loss", r"loss (\d)", PatternKind.VALUE)])
    assert found.values["loss"][None].number == 2.0
    assert rereads == [
        (2 * len(chunk), len(last)),
        (2 * len(chunk) - engine.WINDOW_BYTES, engine.WINDOW_BYTES),
    ]


def test_names_and_ranks_are_found_in_all_of_the_last_chunk() -> None:
    first = FILLER + b"step: speed=1\nstep: size=1\nrank 0: load=1\nrank 1: load=1\n"
    last = b"step: size=2\nrank 1: load=2\n" + FILLER + b"step: speed=3\nrank 0: load=3\n"
    patterns = [
        pattern("step", r"step: (?:speed=(?P<speed>\d)|size=(?P<size>\d))", PatternKind.VALUE),
        pattern("load", r"rank (?P<rank>\d): load=(?P<load>\d)", PatternKind.VALUE),
    ]
    found, rereads = backlog_findings([first, last], patterns)
    numbers = {(name, rank): value.number for name, ranks in found.values.items() for rank, value in ranks.items()}
    assert numbers == {("speed", None): 3.0, ("size", None): 2.0, ("load", 0): 3.0, ("load", 1): 2.0}
    assert min(rereads) == (len(first), sum(size for _, size in rereads) - engine.WINDOW_BYTES)


def test_the_last_of_several_spellings_counts() -> None:
    text = b"rate=1\n" + FILLER + b"#=2\n" + FILLER
    found, _ = backlog_findings([FILLER, text], [pattern("rate", r"(?:rate|#)=(\d)", PatternKind.VALUE)])
    assert found.values["rate"][None].number == 2.0


def test_a_timestamp_is_read_only_at_the_head_of_a_record() -> None:
    text = b"".join(b"T7 " + b"word " * 40 + end for end in (b"1 of 2\n", b"loss 3\n", b"pausing\n"))
    patterns = [
        pattern("items", r"(\d+) of (\d+)", PatternKind.POSITION),
        pattern("loss", r"loss (\d)", PatternKind.VALUE),
        pattern("loading", "pausing", PatternKind.MARK),
    ]
    found = SearchEngine(patterns).scan(text, DigitTimestamps())
    assert [found.positions[0].stamp, found.values["loss"][None].stamp, found.marks[0].stamp] == [7.0, 7.0, 7.0]


def test_a_pattern_without_a_literal_is_found_in_a_backlog() -> None:
    found, _ = backlog_findings(
        [b"12/40\n" + FILLER, FILLER], [pattern("items", r"^(\d+)/(\d+)$", PatternKind.POSITION)]
    )
    assert [(position.done, position.offset) for position in found.positions] == [(12, 0)]


def test_a_part_of_the_file_that_is_gone_yields_nothing() -> None:
    scan = SearchEngine([pattern("items", r"^(\d+)/(\d+)$", PatternKind.POSITION)]).begin_file()
    scan.feed(FILLER, len(FILLER), 0)
    assert scan.finish(lambda offset, size: b"") == LogFindings()


def test_a_backlog_yields_a_position_of_each_chunk_and_all_resumes() -> None:
    chunks = [b"Done %d of 99\n" % (10 * part) + FILLER + b"Done %d of 99\n" % (10 * part + 1) for part in range(4)]
    chunks[1] = b"Resumed at 5\n" + chunks[1] + b"Resumed at 6\n"
    patterns = [
        pattern("items", r"Done (\d+) of (\d+)", PatternKind.POSITION),
        pattern("resume", r"Resumed at (\d+)", PatternKind.RESUME),
    ]
    found, _ = backlog_findings(chunks, patterns)
    assert [position.done for position in found.positions if position.resumed] == [5, 6]
    assert {1, 11, 21, 31} <= {position.done for position in found.positions if not position.resumed}
    assert [position.offset for position in found.positions] == sorted(position.offset for position in found.positions)


def test_each_rank_of_a_shared_log_has_its_last_position() -> None:
    lines = b"".join(b"[%d] step %d/900\n" % (rank, step) for step in range(400) for rank in range(8))
    steps = pattern("step", r"\[(?P<rank>\d+)\] step (?P<done>\d+)/(?P<total>\d+)", PatternKind.POSITION, unit="steps")
    found, _ = backlog_findings([FILLER, FILLER + lines], [steps])
    assert {position.rank: position.done for position in found.positions} == dict.fromkeys(range(8), 399)


def test_an_error_counts_once_a_record_whatever_its_literals() -> None:
    words = [f"word{chr(97 + first)}{chr(97 + second)}" for first in range(9) for second in range(9)]
    many = pattern("many", "|".join(words[:60]), PatternKind.ERROR)
    patterns = [
        many,
        *(pattern(word, word, PatternKind.ERROR) for word in words[30:]),
        pattern("short", "#|wordaa", PatternKind.ERROR),
    ]
    text = b"wordaa wordgd wordaa #\n" * 3 + b"worddd wordaa\n#\n"
    assert SearchEngine(patterns).scan(text) == expected(patterns, text)
    found, _ = backlog_findings([FILLER, FILLER + text], patterns)
    assert found.errors == expected(patterns, text).errors


def test_errors_that_begin_with_the_same_word_are_distinguished() -> None:
    patterns = [
        pattern("net", "ERROR.{0,40}(?:refused|timed out)", PatternKind.ERROR),
        pattern("disk", "ERROR.{0,40}(?:disk full|quota)", PatternKind.ERROR),
        pattern("other", r"ERROR \d+", PatternKind.ERROR),
    ]
    text = b"ERROR 7 timed out, disk full\nERROR no\nquota\nERROR: refused\nrefused ERROR 8\nERROR quota\n" * 3
    found, _ = backlog_findings([FILLER, FILLER + text], patterns)
    assert found.errors == SearchEngine(patterns).scan(text).errors == expected(patterns, text).errors


def test_text_beyond_the_filled_part_of_a_buffer_is_not_searched() -> None:
    oom = pattern("oom", "OOM(?:ED)?!", PatternKind.ERROR)
    for most in (0, engine.SMALL_BYTES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "SMALL_BYTES", most)
            for buffer in (bytearray(b"OOM!\nOOM!\n"), memoryview(bytearray(b"OOM!\nOOM!\n"))):
                scan = SearchEngine([oom, pattern("o", "OOMED", PatternKind.ERROR)]).begin_file()
                scan.feed(buffer, 8, 0)
                assert scan.finish(lambda offset, size: b"").errors == {"oom": 1}
            scan = SearchEngine(
                [pattern("first", "AOOM", PatternKind.ERROR), pattern("second", "OMED!!", PatternKind.ERROR)]
            ).begin_file()
            scan.feed(bytearray(b"AOOMED!!"), 6, 0)
            assert scan.finish(lambda offset, size: b"").errors == {"first": 1}


def test_a_buffer_can_be_reused_after_it_was_fed() -> None:
    buffer = bytearray(FILLER)
    scan = SearchEngine([pattern("oom", "out of memory", PatternKind.ERROR)]).begin_file()
    scan.feed(buffer, len(buffer), 0)
    buffer.clear()
    assert scan.finish(lambda offset, size: b"") == LogFindings()


def test_a_record_of_many_mebibytes_is_searched() -> None:
    text = b"9" * (5 << 20) + b" Processed 3/9 items\0\xff " + b"9" * (5 << 20)
    patterns = [
        pattern("items", r"Processed (\d+)/(\d+) items", PatternKind.POSITION),
        pattern("any", r"(\d+)/(\d+) things", PatternKind.POSITION, is_user_defined=True),
        pattern("oom", "OOM", PatternKind.ERROR),
    ]
    search_engine = SearchEngine(patterns)
    found, _ = backlog_findings([text + b"\n", b"x OOM\n"], patterns)
    assert [(position.done, position.total) for position in found.positions] == [(3, 9)]
    assert found.errors == {"oom": 1}
    assert [position.done for position in search_engine.scan(text).positions] == [3]


def test_a_pattern_that_backtracks_forever_times_out_without_harm_to_others() -> None:
    patterns = [
        pattern("bad", "(a|aa)+$", PatternKind.ERROR, is_user_defined=True),
        pattern("oom", "OOM", PatternKind.ERROR),
    ]
    search_engine = SearchEngine(patterns)
    text = b"".join(b"a" * 60 + b"b OOM\n" for _ in range(20))
    assert search_engine.scan(b"aa\n" + text).errors == {"bad": 1, "oom": 20}
    assert search_engine.timeouts == {"bad": 20}
    assert search_engine.scan(b"aaa\n").errors == {"bad": 1}


def test_the_time_of_many_slow_searches_adds_up() -> None:
    clock = itertools.count(0.0, 0.2)
    search_engine = SearchEngine(
        [pattern("slow", "(a|aa)+$", PatternKind.ERROR, is_user_defined=True)], lambda: next(clock)
    )
    assert search_engine.scan(b"aa\n" * 10).errors == {"slow": 3}
    assert search_engine.timeouts == {"slow": 7}


class StepClock:
    """A clock that advances by `step` at each reading, and with each search."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def time_out_searches(monkeypatch: pytest.MonkeyPatch, clock: StepClock) -> list[float]:
    """Make each search that may be slow time out; return the times at which they started."""
    starts: list[float] = []

    class NeverMatching:
        def search(self, record: bytes, timeout: float, concurrent: bool) -> None:
            starts.append(clock.now)
            clock.now += timeout
            raise TimeoutError

    monkeypatch.setattr(time_budget.TimeBudget, "compile_with_timeout", lambda *_: NeverMatching())
    return starts


def test_the_time_of_slow_searches_is_bounded_over_all_patterns_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(0.0)
    starts = time_out_searches(monkeypatch, clock)
    search_engine = SearchEngine(
        [pattern(f"slow{i}", f"(a|aa)+{i}", PatternKind.ERROR, is_user_defined=True) for i in range(8)], clock
    )
    text = b"".join(b"aa%d\n" % i for i in range(8)) * 2
    for _ in range(16):
        search_engine.scan(text)
    assert len(starts) == 5
    assert sum(search_engine.timeouts.values()) == 16 * 16
    clock.now += time_budget.WINDOW_S
    search_engine.scan(text)
    assert len(starts) == 10


@given(st.lists(st.floats(0.0, 3.0), max_size=40))
def test_slow_searches_stay_near_their_time_budget_in_every_window(pauses: list[float]) -> None:
    clock = StepClock(0.0)
    with pytest.MonkeyPatch.context() as patch:
        starts = time_out_searches(patch, clock)
        search_engine = SearchEngine(
            [pattern(f"slow{i}", f"(a|aa)+{i}", PatternKind.ERROR, is_user_defined=True) for i in range(3)], clock
        )
        for pause in pauses:
            clock.now += pause
            search_engine.scan(b"aa0\naa1\naa2\n" * 4)
    most = time_budget.READ_TIMEOUT_S + 2 * time_budget.RECORD_TIMEOUT_S
    for start in starts:
        inside = [moment for moment in starts if start <= moment < start + time_budget.WINDOW_S - time_budget.SLOT_S]
        assert len(inside) * time_budget.RECORD_TIMEOUT_S <= most


def test_each_scan_has_its_own_time_budget_without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = time_out_searches(monkeypatch, StepClock(0.0))
    search_engine = SearchEngine([pattern("slow", "(a|aa)+$", PatternKind.ERROR, is_user_defined=True)])
    for _ in range(3):
        search_engine.scan(b"aa\n" * 10)
    assert len(starts) == 15


@pytest.mark.parametrize("kind", [PatternKind.ERROR, PatternKind.VALUE, PatternKind.POSITION, PatternKind.PAIRS])
@pytest.mark.parametrize("is_backlog", [False, True])
def test_a_pattern_that_keeps_timing_out_is_dropped_with_a_note(
    monkeypatch: pytest.MonkeyPatch, kind: PatternKind, is_backlog: bool
) -> None:
    starts = time_out_searches(monkeypatch, StepClock(0.0))
    keys = {"keys": (("a", "a"),)} if kind is PatternKind.PAIRS else {}
    slow = pattern("slow", r"(?P<done>(?:\d|\d\d)+)/(?P<total>\d+)", kind, is_user_defined=True, **keys)
    search_engine = SearchEngine([slow, pattern("oom", "OOM", PatternKind.ERROR)])
    before, text = search_engine.notes, b"1/2 a=1 OOM\n" * 40
    if is_backlog:
        monkeypatch.setattr(engine, "SMALL_BYTES", 0)
    for _ in range(10):
        scan = search_engine.begin_file()
        scan.feed(text, len(text), 0)
        assert scan.finish(lambda offset, size: text[offset : offset + size]) == LogFindings(errors={"oom": 40})
    assert len(starts) == time_budget.MOST_TIMEOUTS
    assert search_engine.notes[: len(before)] == before
    assert [
        note
        for note in search_engine.notes[len(before) :]
        if 'pattern "slow" is no longer searched: 20 of its searches' in note
    ] == [search_engine.notes[-1]]
    counted = dict(search_engine.timeouts)
    search_engine.scan(text)
    assert search_engine.timeouts == counted


def test_skipped_searches_drop_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(0.0)
    starts = time_out_searches(monkeypatch, clock)
    search_engine = SearchEngine([pattern("slow", "(a|aa)+$", PatternKind.ERROR, is_user_defined=True)], clock)
    notes = search_engine.notes
    search_engine.scan(b"aa\n" * 100)
    assert (len(starts), search_engine.timeouts, search_engine.notes) == (5, {"slow": 100}, notes)


def test_costly_patterns_get_a_note() -> None:
    search_engine = SearchEngine(
        [
            pattern("bare", r"(\d+)/(\d+)", PatternKind.POSITION, is_user_defined=True),
            pattern("wild", r"(?:\w+\s?)*done (\d+)", PatternKind.VALUE, is_user_defined=True),
            pattern("good", r"step (\d+)", PatternKind.VALUE, is_user_defined=True),
            pattern("ours", r"(\d+) (\d+)", PatternKind.VALUE),
        ]
    )
    assert [note.split('"')[1] for note in search_engine.notes] == ["bare", "wild"]


@pytest.mark.parametrize(
    ("text", "count"),
    [(b"", 0), (b"a", 0), (b"a\n", 1), (b"a\rb\n", 2), (b"a\r\nb\r\n", 2), (b"\n\n\r\r\n", 4), (b"\x0b\x85", 0)],
)
def test_record_ends_are_counted(text: bytes, count: int) -> None:
    assert record_ends(text, len(text)) == (text.count(b"\n"), count)
    assert record_ends(bytearray(text + b"\n\r"), len(text))[1] == count


@given(st.text("a\r\n", max_size=40), st.integers(1, 7))
def test_counting_record_ends_in_parts_gives_the_same_count(text: str, part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "PART_BYTES", part)
        assert record_ends(text.encode(), len(text))[1] == len(re.findall("\r\n|\r|\n", text))
    long = text + "a" * len(text) * records.FAR_BYTES  # few returns, each of which is visited
    assert record_ends(long.encode(), len(long))[1] == len(re.findall("\r\n|\r|\n", text))


def test_safe_patterns_do_not_load_the_regex_package() -> None:
    program = (
        "import sys; from exporter.logs.lexicon_reader import build_lexicon;"
        "build_lexicon('generic').engine('generic').scan(b'Processed 1/2 items\\nCUDA error: x\\n');"
        "print('regex' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "False"


def test_a_short_literal_is_identified_by_the_byte_before_it() -> None:
    bar = compile_pattern("bar", r"\d{1,3}%\|[^|]{0,40}\| (\d+)/(\d+)", kind=PatternKind.POSITION)
    others = [
        compile_pattern(word, rf"{word} (\d+)", kind=PatternKind.VALUE)
        for word in ("queue", "depth", "wakeup", "jumbo")
    ]
    search_engine = SearchEngine([bar, *others])
    text = b"%| 3\n 10%|#| 1/9\rx%|#| 2/9\n%|5%|#| 3/9 depth 8\n100%|#| 9/9"
    assert findings_of(search_engine, text) == expected([bar, *others], text)
    (group,) = search_engine.groups(search_engine.every_mask, records.LogChunk(text, len(text), 0))
    assert len(group.find(text)) == 4, "one pass finds both, and nothing without a digit before it"
