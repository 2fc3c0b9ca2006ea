"""Everything that an engine finds, against a search of each pattern in each record."""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.logs.search import automata, time_budget, engine as scanning
from exporter.logs import records as chunks
from exporter.logs.search.extraction import NumberExtractor
from exporter.logs.search.findings import LogFindings, ActivityMark, LogPosition, LogValue
from exporter.logs.patterns import PatternKind, Pattern, compile_pattern
from exporter.logs.records import record_ends
from exporter.logs.search.engine import SearchEngine
from exporter.logs.search.units import SearchUnit

COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


class Heads:
    """Reads the first digits of a record as its time."""

    def read(self, head: bytes) -> float | None:
        assert len(head) <= 80
        assert b"\x1b" not in head
        match = re.match(rb"T(\d+)", head)
        return float(match[1]) if match else None


def expected(patterns: Sequence[Pattern], text: bytes, offset: int = 0) -> LogFindings:
    """What a plain search of each pattern in each record gives."""
    found = LogFindings()
    places = [0, *(match.end() for match in re.finditer(rb"[\r\n]", text)), len(text) + 1]
    for start, behind in itertools.pairwise(places):
        record = COLOUR.sub(b"", text[start : behind - 1])
        for pattern in patterns if record else ():
            match, stamp, extractor = pattern.regex.search(record), Heads().read(record[:80]), NumberExtractor(pattern)
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
                place = (pattern.name, str(pattern.unit), offset + start, *counts, rank)
                found.positions.append(LogPosition(*place, resumed=pattern.kind is PatternKind.RESUME, stamp=stamp))
    return found


def fed(engine: SearchEngine, text: bytes, cuts: Iterable[int] = (), offset: int = 0) -> LogFindings:
    """What a look gives that is fed the text in pieces that end with a record each, in a buffer used again."""
    scan = engine.begin_file(Heads())
    places = sorted({0, len(text), *(place for place in cuts if text[place - 1 : place] in (b"\n", b"\r"))})
    buffer = bytearray(b"oom error: 1/2 Loss=4\n" * 20)
    for start, end in itertools.pairwise(places):
        piece = text[start:end]
        if len(buffer) < len(piece):
            buffer.extend(bytes(len(piece)))
        buffer[: len(piece)] = piece
        scan.feed(buffer, len(piece), offset + start)
    return scan.finish(lambda place, size: text[place - offset : place - offset + size])


def pattern(name: str, text: str, kind: PatternKind, **fields: object) -> Pattern:
    return compile_pattern(name, text, kind=kind, **fields)  # type: ignore[arg-type]


MIXED = (
    pattern("ab", "ab", PatternKind.ERROR),
    pattern("abc", "abc|bcd", PatternKind.ERROR),
    pattern("bc", "bc", PatternKind.ERROR),
    pattern("cab", "c+ab(?!d)", PatternKind.ERROR),
    pattern("dca", "(?i)dca", PatternKind.ERROR),
    pattern("begin", "^ab.{0,3}$", PatternKind.ERROR),
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
ENGINE = SearchEngine(MIXED)
PIECES = (
    *("a", "b", "c", "d", "ab", "bc", "abc", "bcd", "cab", "dca", "aab/", "1/2", "ca1", "bb2", "3bc4", "1b2", "b=1"),
    *("ab:2", "A", "C", "\n", "\n", "\r", "\r\n", " ", "\x1b[1m", "\x1b[0;32m", "T7", "\0", "\xff", "aa b: 3"),
)
TEXTS = st.lists(st.sampled_from([piece.encode("latin-1") for piece in PIECES]), max_size=60).map(b"".join)


@given(TEXTS, st.lists(st.integers(1, 150), max_size=5), st.integers(0, 1000))
@settings(max_examples=300, deadline=None)
@example(b"a\x1b[1mbc\nab", [5], 0)
@example(b"abcd\rcabcd\n", [], 3)
@example(b"\n\n\r\n", [1], 0)
def test_a_small_look_finds_what_a_search_of_each_record_does(text: bytes, cuts: list[int], offset: int) -> None:
    cuts = [place for place in cuts if place < len(text)]
    assert fed(ENGINE, text, cuts, offset) == expected(MIXED, text, offset)
    assert ENGINE.scan(text, Heads()) == expected(MIXED, text)


WORDS = st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=8, unique=True)


@given(WORDS, st.data())
@settings(max_examples=250, deadline=None)
def test_literals_that_overlap_hide_nothing(words: list[str], data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*words, "a", "b", " ", "\n"]), max_size=12)))
    patterns = [pattern(word, re.escape(word), PatternKind.ERROR) for word in words]
    patterns += [pattern(f"{word}$", f"{re.escape(word)}$", PatternKind.ERROR) for word in words]
    assert ENGINE.forward_units
    engine = SearchEngine(patterns)
    assert engine.scan(text.encode()) == expected(patterns, text.encode())
    scan = engine.begin_file()
    scan._search_backlog_chunk(chunks.LogChunk(text.encode(), len(text), 0), len(text))
    assert scan.finish(lambda place, size: text.encode()[place : place + size]) == expected(patterns, text.encode())


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_backlog_loses_no_error_no_resume_and_no_last_word(data: st.DataObject) -> None:
    text = data.draw(TEXTS) + b"\n" + data.draw(TEXTS)
    window, tries = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    cuts = [match.end() for match in re.finditer(rb"[\r\n]", text) if data.draw(st.booleans())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "SMALL_BYTES", data.draw(st.sampled_from([0, 20])))
        patch.setattr(scanning, "WINDOW_BYTES", window)
        patch.setattr(scanning, "MOST_TRIES", tries)
        patch.setattr(chunks, "NEAR_BYTES", data.draw(st.integers(1, 8)))
        found, whole = fed(ENGINE, text, cuts), expected(MIXED, text)
    assert found.errors == whole.errors
    assert [place for place in found.positions if place.resumed] == [
        place for place in whole.positions if place.resumed
    ]
    assert not [place for place in found.positions if place not in whole.positions]
    assert len(set(found.positions)) == len(found.positions)
    assert not [mark for mark in found.marks if mark not in whole.marks]
    assert found.positions == sorted(found.positions, key=lambda place: place.offset)
    for name in ("items", "ranked"):
        assert last(found.positions, name) == last(whole.positions, name)
    for begins in (True, False):
        assert [m for m in found.marks if m.begins == begins][-1:] == [m for m in whole.marks if m.begins == begins][
            -1:
        ]
    for name in ("rate", "digit", "ab", "b"):
        assert found.values.get(name) == whole.values.get(name)


def last(positions: list[LogPosition], name: str) -> LogPosition | None:
    return next((place for place in reversed(positions) if place.pattern == name), None)


@pytest.mark.parametrize("most", [0, scanning.SMALL_BYTES])
def test_colours_hide_nothing_and_move_no_offset(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(scanning, "SMALL_BYTES", most)
    lines = [
        b"\x1b[32mplain\x1b[0m\n",
        b"\x1b[1mProc\x1b[31messed \x1b[0m7\x1b[0m/9\n",
        b"\x1b]0;title\x07CUDA \x1b[1;31merr\x1b[0mor\r\n",
        b"Processed 8/9\r",
    ]
    items = pattern("items", r"Processed (\d+)/(\d+)", PatternKind.POSITION)
    oom = pattern("oom", "CUDA error", PatternKind.ERROR)
    last_of = pattern("last", r"(\d)/", PatternKind.VALUE)
    found = fed(SearchEngine([items, oom, last_of]), b"".join(lines), [], 1000)
    places = [(place.done, place.offset) for place in found.positions]
    third = 1000 + len(lines[0] + lines[1] + lines[2])
    assert places[-1] == (8, third)
    assert places[:-1] in ([], [(7, 1000 + len(lines[0]))])
    assert found.errors == {"oom": 1}
    assert found.values["last"][None].offset == third


def backlog(chunks: Sequence[bytes], patterns: Sequence[Pattern]) -> tuple[LogFindings, list[tuple[int, int]]]:
    """What chunks say that are too many for a small look, and which parts of them were read again."""
    scan, offset, again = SearchEngine(patterns).begin_file(), 0, list[tuple[int, int]]()
    for chunk in chunks:
        scan.feed(chunk, len(chunk), offset)
        offset += len(chunk)

    def reread(start: int, size: int) -> bytes:
        again.append((start, size))
        return b"".join(chunks)[start : start + size]

    return scan.finish(reread), again


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
def test_literals_that_share_their_pieces_are_told_apart(words: list[str], data: st.DataObject) -> None:
    parts = st.sampled_from([*words, "ab", "b", "Xa", " ", "\n", "\r", "7", "7/8"])
    text = "".join(data.draw(st.lists(parts, max_size=25))).encode()
    patterns = [pattern(word, re.escape(word), PatternKind.ERROR) for word in words[::2]]
    patterns += [pattern(f"{word}$", f"^.?{re.escape(word)}", PatternKind.ERROR) for word in words[1::2]]
    patterns += [
        pattern(f"{word}#", rf"{re.escape(word)}(?:a|b ?)?(\d)(?:/(\d)|$)", PatternKind.POSITION) for word in words[:9]
    ]
    engine = SearchEngine(patterns)
    found, whole = engine.scan(text), expected(patterns, text)
    assert (found.errors, found.positions) == (whole.errors, [place._replace(stamp=None) for place in whole.positions])
    scan = engine.begin_file()
    scan._search_backlog_chunk(chunks.LogChunk(text, len(text), 0), len(text))
    assert scan.finish(lambda place, size: text[place : place + size]).errors == whole.errors


@given(LONG_WORDS, st.data())
@settings(max_examples=200, deadline=None)
def test_a_piece_that_is_often_found_in_vain_still_finds_its_literals(words: list[str], data: st.DataObject) -> None:
    parts = st.sampled_from([*words, *(word[1:] for word in words), "ab", "b", "Xa", " ", "\n", "\r", "7", "7/8"])
    text = "".join(data.draw(st.lists(parts, max_size=40))).encode()
    patterns = [pattern(word, f"{re.escape(word)}(?!7)", PatternKind.ERROR) for word in words[::2]]
    patterns += [pattern(f"{word}#", rf"{re.escape(word)}(?:a|b ?)?(\d)(?:/(\d)|$)", PatternKind.POSITION) for word in words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automata, "MANY_USELESS_HITS", 1)
        engine, whole = SearchEngine(patterns), expected(patterns, text)
        for _ in range(2):
            found = engine.scan(text)
            assert found.errors == whole.errors
            assert found.positions == [place._replace(stamp=None) for place in whole.positions]


@given(st.lists(TEXTS, min_size=2, max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_log_that_changes_has_other_automata_and_loses_nothing(parts: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "SMALL_BYTES", 0)
        patch.setattr(scanning, "WINDOW_BYTES", 1)
        patch.setattr(scanning, "BUILD_US", 0.1)
        engine = SearchEngine(MIXED)
        scan, text = engine.begin_file(Heads()), b""
        for part in parts:
            scan.feed(part + b"\n", len(part) + 1, len(text))
            text += part + b"\n"
        found, whole = scan.finish(lambda place, size: text[place : place + size]), expected(MIXED, text)
    assert found.errors == whole.errors
    assert [place for place in found.positions if place.resumed] == [
        place for place in whole.positions if place.resumed
    ]
    for name in ("items", "ranked"):
        assert last(found.positions, name) == last(whole.positions, name)
    for name in ("rate", "digit", "ab", "b"):
        assert found.values.get(name) == whole.values.get(name)


def test_automata_for_a_backlog_are_made_once_while_the_log_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[list[str]]()

    def groups_of(units: Sequence[SearchUnit], sample: bytes) -> tuple[automata.AutomatonGroup, ...]:
        made.append([unit.name for unit in units])
        return automata.build_automata(units, sample)

    monkeypatch.setattr(scanning, "build_automata", groups_of)
    engine = SearchEngine(
        [
            pattern("oom", "out of memory", PatternKind.ERROR),
            pattern("absent", r"never (\d+)", PatternKind.VALUE),
            pattern("items", r"Done (\d+) of (\d+)", PatternKind.POSITION),
        ]
    )
    scan = engine.begin_file()
    for part in range(6):
        chunk = FILLER + b"Done %d of 9\n" % part
        scan.feed(chunk, len(chunk), part * len(chunk))
    assert scan.finish(lambda place, size: b"").positions[-1].done == 5
    assert made == [["oom", "absent"]]


@pytest.mark.parametrize("others", [0, 40, 200])
def test_however_many_literals_there_are_each_is_found(others: int) -> None:
    words = [
        "No space left",
        "corrupt data",
        "bad file",
        *(f"word {number * 7919:x} is here" for number in range(others)),
    ]
    patterns = [pattern(word, f"{word}(?! at all)", PatternKind.ERROR) for word in words]
    text = b"".join(b"x %s y\n%s at all\n%s" % (word[1:].encode(), word.encode(), word.encode()) for word in words)
    found, _ = backlog([FILLER, FILLER + text], patterns)
    assert found.errors == SearchEngine(patterns).scan(text).errors == expected(patterns, text).errors


def test_a_word_that_stands_everywhere_but_never_as_the_pattern_has_it_hides_no_last_match() -> None:
    mentions = b"step 7 loss 1\nstep 8\n" * 20_000
    steps = pattern("step", r"(?:step|Step)(?::| |: ) {0,3}(\d{1,9})/(\d{1,9})(?!\d)", PatternKind.POSITION, unit="steps")
    found, again = backlog([FILLER, b"step 3/9\n" + mentions, mentions, mentions], [steps])
    assert [(place.done, place.offset) for place in found.positions] == [(3, len(FILLER))]
    assert again == []


def test_a_log_without_ranks_has_its_last_position_where_a_pattern_may_name_them() -> None:
    steps = pattern("step", r"(?:\[(?P<rank>\d)\] )?step (?P<done>\d+)/(?P<total>\d+)", PatternKind.POSITION, unit="steps")
    text = b"".join(b"step %d/900\n" % step for step in range(900))
    found, _ = backlog([FILLER, FILLER + text], [steps])
    assert max(place.done for place in found.positions) == 899


FILLER = b"nothing to see here\n" * 20_000


def test_a_value_logged_once_is_kept_without_reading_again() -> None:
    found, again = backlog(
        [FILLER, b"seed=42\n" + FILLER, FILLER, FILLER], [pattern("seed", r"seed=(\d+)", PatternKind.VALUE)]
    )
    assert found.values["seed"][None] == LogValue(42.0, len(FILLER))
    assert again == []


def test_a_value_whose_words_stand_everywhere_is_found_by_reading_back_to_it() -> None:
    mentions = b"loss of nothing\n" * 20_000
    chunks = [b"loss 1\n", mentions, b"loss 2\n" + mentions, mentions, mentions]
    found, again = backlog([FILLER, *chunks], [pattern("loss", r"loss (\d)", PatternKind.VALUE)])
    assert found.values["loss"][None] == LogValue(2.0, len(FILLER) + len(chunks[0] + chunks[1]))
    starts = [len(FILLER) + sum(map(len, chunks[:number])) for number in (4, 3, 2)]
    assert [start for start, _ in again[1:]] == starts  # the first one is the end of the last chunk
    assert sum(size for _, size in again) <= sum(map(len, chunks[2:])) + len(b"loss of nothing\n")


def test_nothing_is_read_again_where_a_later_chunk_has_the_value() -> None:
    mentions = b"loss of nothing\n" * 20_000
    found, again = backlog([mentions, mentions + b"loss 3\n"], [pattern("loss", r"loss (\d)", PatternKind.VALUE)])
    assert found.values["loss"][None] == LogValue(3.0, 2 * len(mentions))
    assert again == []


def test_of_a_last_chunk_with_the_value_near_its_end_no_more_is_read() -> None:
    chunk = FILLER + b"loss 1\n" + FILLER + b"loss 2\n"
    found, again = backlog([chunk, chunk, chunk], [pattern("loss", r"loss (\d)", PatternKind.VALUE)])
    assert found.values["loss"][None].number == 2.0
    assert again == [(3 * len(chunk) - scanning.WINDOW_BYTES, scanning.WINDOW_BYTES)]


def test_names_and_ranks_that_are_not_near_the_end_of_the_last_chunk_are_found_in_the_rest_of_it() -> None:
    first = FILLER + b"step: speed=1\nstep: size=1\nrank 0: load=1\nrank 1: load=1\n"
    last = b"step: size=2\nrank 1: load=2\n" + FILLER + b"step: speed=3\nrank 0: load=3\n"
    patterns = [
        pattern("step", r"step: (?:speed=(?P<speed>\d)|size=(?P<size>\d))", PatternKind.VALUE),
        pattern("load", r"rank (?P<rank>\d): load=(?P<load>\d)", PatternKind.VALUE),
    ]
    found, again = backlog([first, last], patterns)
    numbers = {(name, rank): value.number for name, ranks in found.values.items() for rank, value in ranks.items()}
    assert numbers == {("speed", None): 3.0, ("size", None): 2.0, ("load", 0): 3.0, ("load", 1): 2.0}
    assert min(again) == (len(first), sum(size for _, size in again) - scanning.WINDOW_BYTES)


def test_the_last_of_several_spellings_counts() -> None:
    text = b"rate=1\n" + FILLER + b"#=2\n" + FILLER
    found, _ = backlog([FILLER, text], [pattern("rate", r"(?:rate|#)=(\d)", PatternKind.VALUE)])
    assert found.values["rate"][None].number == 2.0


def test_a_time_is_looked_for_at_the_head_of_a_record_alone() -> None:
    text = b"".join(b"T7 " + b"word " * 40 + end for end in (b"1 of 2\n", b"loss 3\n", b"pausing\n"))
    patterns = [
        pattern("items", r"(\d+) of (\d+)", PatternKind.POSITION),
        pattern("loss", r"loss (\d)", PatternKind.VALUE),
        pattern("loading", "pausing", PatternKind.MARK),
    ]
    found = SearchEngine(patterns).scan(text, Heads())
    assert [found.positions[0].stamp, found.values["loss"][None].stamp, found.marks[0].stamp] == [7.0, 7.0, 7.0]


def test_a_value_without_any_fixed_text_is_found_in_a_backlog() -> None:
    found, _ = backlog([b"12/40\n" + FILLER, FILLER], [pattern("items", r"^(\d+)/(\d+)$", PatternKind.POSITION)])
    assert [(place.done, place.offset) for place in found.positions] == [(12, 0)]


def test_a_part_of_the_file_that_is_gone_says_nothing() -> None:
    scan = SearchEngine([pattern("items", r"^(\d+)/(\d+)$", PatternKind.POSITION)]).begin_file()
    scan.feed(FILLER, len(FILLER), 0)
    assert scan.finish(lambda offset, size: b"") == LogFindings()


def test_a_backlog_keeps_a_position_of_each_chunk_and_all_resumes() -> None:
    chunks = [b"Done %d of 99\n" % (10 * part) + FILLER + b"Done %d of 99\n" % (10 * part + 1) for part in range(4)]
    chunks[1] = b"Resumed at 5\n" + chunks[1] + b"Resumed at 6\n"
    patterns = [
        pattern("items", r"Done (\d+) of (\d+)", PatternKind.POSITION),
        pattern("resume", r"Resumed at (\d+)", PatternKind.RESUME),
    ]
    found, _ = backlog(chunks, patterns)
    assert [place.done for place in found.positions if place.resumed] == [5, 6]
    assert {1, 11, 21, 31} <= {place.done for place in found.positions if not place.resumed}
    assert [place.offset for place in found.positions] == sorted(place.offset for place in found.positions)


def test_each_rank_of_a_shared_log_has_its_last_position() -> None:
    lines = b"".join(b"[%d] step %d/900\n" % (rank, step) for step in range(400) for rank in range(8))
    steps = pattern("step", r"\[(?P<rank>\d+)\] step (?P<done>\d+)/(?P<total>\d+)", PatternKind.POSITION, unit="steps")
    found, _ = backlog([FILLER, FILLER + lines], [steps])
    assert {place.rank: place.done for place in found.positions} == dict.fromkeys(range(8), 399)


def test_an_error_counts_once_a_record_however_its_literals_are_spread() -> None:
    words = [f"word{chr(97 + first)}{chr(97 + second)}" for first in range(9) for second in range(9)]
    many = pattern("many", "|".join(words[:60]), PatternKind.ERROR)
    patterns = [
        many,
        *(pattern(word, word, PatternKind.ERROR) for word in words[30:]),
        pattern("short", "#|wordaa", PatternKind.ERROR),
    ]
    text = b"wordaa wordgd wordaa #\n" * 3 + b"worddd wordaa\n#\n"
    assert SearchEngine(patterns).scan(text) == expected(patterns, text)
    found, _ = backlog([FILLER, FILLER + text], patterns)
    assert found.errors == expected(patterns, text).errors


def test_errors_that_begin_with_the_same_word_are_told_apart() -> None:
    patterns = [
        pattern("net", "ERROR.{0,40}(?:refused|timed out)", PatternKind.ERROR),
        pattern("disk", "ERROR.{0,40}(?:disk full|quota)", PatternKind.ERROR),
        pattern("other", r"ERROR \d+", PatternKind.ERROR),
    ]
    text = b"ERROR 7 timed out, disk full\nERROR no\nquota\nERROR: refused\nrefused ERROR 8\nERROR quota\n" * 3
    found, _ = backlog([FILLER, FILLER + text], patterns)
    assert found.errors == SearchEngine(patterns).scan(text).errors == expected(patterns, text).errors


def test_what_lies_behind_the_end_of_a_buffer_is_not_looked_at() -> None:
    oom = pattern("oom", "OOM(?:ED)?!", PatternKind.ERROR)
    for most in (0, scanning.SMALL_BYTES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scanning, "SMALL_BYTES", most)
            for buffer in (bytearray(b"OOM!\nOOM!\n"), memoryview(bytearray(b"OOM!\nOOM!\n"))):
                scan = SearchEngine([oom, pattern("o", "OOMED", PatternKind.ERROR)]).begin_file()
                scan.feed(buffer, 8, 0)
                assert scan.finish(lambda offset, size: b"").errors == {"oom": 1}
            scan = SearchEngine([pattern("first", "AOOM", PatternKind.ERROR), pattern("second", "OMED!!", PatternKind.ERROR)]).begin_file()
            scan.feed(bytearray(b"AOOMED!!"), 6, 0)
            assert scan.finish(lambda offset, size: b"").errors == {"first": 1}


def test_a_buffer_is_free_again_after_it_was_fed() -> None:
    buffer = bytearray(FILLER)
    scan = SearchEngine([pattern("oom", "out of memory", PatternKind.ERROR)]).begin_file()
    scan.feed(buffer, len(buffer), 0)
    buffer.clear()
    assert scan.finish(lambda offset, size: b"") == LogFindings()


def test_a_record_of_many_mebibytes_is_searched() -> None:
    text = b"9" * (5 << 20) + b" Processed 3/9 items\0\xff " + b"9" * (5 << 20)
    patterns = [
        pattern("items", r"Processed (\d+)/(\d+) items", PatternKind.POSITION),
        pattern("any", r"(\d+)/(\d+) things", PatternKind.POSITION, own=True),
        pattern("oom", "OOM", PatternKind.ERROR),
    ]
    engine = SearchEngine(patterns)
    found, _ = backlog([text + b"\n", b"x OOM\n"], patterns)
    assert [(place.done, place.total) for place in found.positions] == [(3, 9)]
    assert found.errors == {"oom": 1}
    assert [place.done for place in engine.scan(text).positions] == [3]


def test_a_pattern_that_would_search_for_ever_is_stopped_and_harms_no_other() -> None:
    patterns = [
        pattern("bad", "(a|aa)+$", PatternKind.ERROR, own=True),
        pattern("oom", "OOM", PatternKind.ERROR),
    ]
    engine = SearchEngine(patterns)
    text = b"".join(b"a" * 60 + b"b OOM\n" for _ in range(20))
    assert engine.scan(b"aa\n" + text).errors == {"bad": 1, "oom": 20}
    assert engine.timeouts == {"bad": 20}
    assert engine.scan(b"aaa\n").errors == {"bad": 1}


def test_the_time_of_many_slow_searches_adds_up() -> None:
    clock = itertools.count(0.0, 0.2)
    engine = SearchEngine([pattern("slow", "(a|aa)+$", PatternKind.ERROR, own=True)], lambda: next(clock))
    assert engine.scan(b"aa\n" * 10).errors == {"slow": 3}
    assert engine.timeouts == {"slow": 7}


class Watch:
    """A clock that a search moves on: each reading is so many seconds after the one before."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def stopped(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> list[float]:
    """When each search that may be slow was begun; every one of them is given up."""
    begun: list[float] = []

    class Never:
        def search(self, record: bytes, timeout: float, concurrent: bool) -> None:
            begun.append(watch.now)
            watch.now += timeout
            raise TimeoutError

    monkeypatch.setattr(SearchEngine, "compile_with_timeout", lambda *_: Never())
    return begun


def test_the_time_of_slow_searches_is_bounded_over_all_patterns_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(0.0)
    begun = stopped(monkeypatch, watch)
    engine = SearchEngine([pattern(f"slow{i}", f"(a|aa)+{i}", PatternKind.ERROR, own=True) for i in range(8)], watch)
    text = b"".join(b"aa%d\n" % i for i in range(8)) * 2
    for _ in range(16):
        engine.scan(text)
    assert len(begun) == 5
    assert sum(engine.timeouts.values()) == 16 * 16
    watch.now += time_budget.WINDOW_S
    engine.scan(text)
    assert len(begun) == 10


@given(st.lists(st.floats(0.0, 3.0), max_size=40))
def test_in_no_window_do_slow_searches_take_much_longer_than_they_may(pauses: list[float]) -> None:
    watch = Watch(0.0)
    with pytest.MonkeyPatch.context() as patch:
        begun = stopped(patch, watch)
        engine = SearchEngine([pattern(f"slow{i}", f"(a|aa)+{i}", PatternKind.ERROR, own=True) for i in range(3)], watch)
        for pause in pauses:
            watch.now += pause
            engine.scan(b"aa0\naa1\naa2\n" * 4)
    most = time_budget.READ_TIMEOUT_S + 2 * time_budget.RECORD_TIMEOUT_S
    for start in begun:
        inside = [moment for moment in begun if start <= moment < start + time_budget.WINDOW_S - time_budget.SLOT_S]
        assert len(inside) * time_budget.RECORD_TIMEOUT_S <= most


def test_without_a_clock_each_look_has_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = stopped(monkeypatch, Watch(0.0))
    engine = SearchEngine([pattern("slow", "(a|aa)+$", PatternKind.ERROR, own=True)])
    for _ in range(3):
        engine.scan(b"aa\n" * 10)
    assert len(begun) == 15


@pytest.mark.parametrize("kind", [PatternKind.ERROR, PatternKind.VALUE, PatternKind.POSITION, PatternKind.PAIRS])
@pytest.mark.parametrize("is_backlog", [False, True])
def test_a_pattern_that_is_given_up_again_and_again_is_left_out_and_the_user_told(
    monkeypatch: pytest.MonkeyPatch, kind: PatternKind, is_backlog: bool
) -> None:
    begun = stopped(monkeypatch, Watch(0.0))
    keys = {"keys": (("a", "a"),)} if kind is PatternKind.PAIRS else {}
    slow = pattern("slow", r"(?P<done>(?:\d|\d\d)+)/(?P<total>\d+)", kind, own=True, **keys)
    engine = SearchEngine([slow, pattern("oom", "OOM", PatternKind.ERROR)])
    before, text = engine.notes, b"1/2 a=1 OOM\n" * 40
    if is_backlog:
        monkeypatch.setattr(scanning, "SMALL_BYTES", 0)
    for _ in range(10):
        scan = engine.begin_file()
        scan.feed(text, len(text), 0)
        assert scan.finish(lambda offset, size: text[offset : offset + size]) == LogFindings(errors={"oom": 40})
    assert len(begun) == time_budget.MOST_TIMEOUTS
    assert engine.notes[: len(before)] == before
    assert [note for note in engine.notes[len(before) :] if 'pattern "slow" was given up 20 times' in note] == [
        engine.notes[-1]
    ]
    counted = dict(engine.timeouts)
    engine.scan(text)
    assert engine.timeouts == counted


def test_skipped_searches_leave_no_pattern_out(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(0.0)
    begun = stopped(monkeypatch, watch)
    engine = SearchEngine([pattern("slow", "(a|aa)+$", PatternKind.ERROR, own=True)], watch)
    notes = engine.notes
    engine.scan(b"aa\n" * 100)
    assert (len(begun), engine.timeouts, engine.notes) == (5, {"slow": 100}, notes)


def test_the_user_is_told_of_patterns_that_cost_much() -> None:
    engine = SearchEngine(
        [
            pattern("bare", r"(\d+)/(\d+)", PatternKind.POSITION, own=True),
            pattern("wild", r"(?:\w+\s?)*done (\d+)", PatternKind.VALUE, own=True),
            pattern("good", r"step (\d+)", PatternKind.VALUE, own=True),
            pattern("ours", r"(\d+) (\d+)", PatternKind.VALUE),
        ]
    )
    assert [note.split('"')[1] for note in engine.notes] == ["bare", "wild"]


@pytest.mark.parametrize(
    ("text", "count"),
    [(b"", 0), (b"a", 0), (b"a\n", 1), (b"a\rb\n", 2), (b"a\r\nb\r\n", 2), (b"\n\n\r\r\n", 4), (b"\x0b\x85", 0)],
)
def test_record_ends_are_counted(text: bytes, count: int) -> None:
    assert record_ends(text, len(text)) == count
    assert record_ends(bytearray(text + b"\n\r"), len(text)) == count


@given(st.text("a\r\n", max_size=40), st.integers(1, 7))
def test_record_ends_are_counted_in_parts_as_in_the_whole(text: str, part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "PART_BYTES", part)
        assert record_ends(text.encode(), len(text)) == len(re.findall("\r\n|\r|\n", text))


def test_patterns_that_are_safe_load_no_second_engine_of_expressions() -> None:
    program = (
        "import sys; from exporter.logs.lexicon_reader import build_lexicon;"
        "build_lexicon('generic').engine('generic').scan(b'Processed 1/2 items\\nCUDA error: x\\n');"
        "print('regex' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "False"


def test_a_short_literal_is_told_by_the_byte_before_it() -> None:
    bar = compile_pattern("bar", r"\d{1,3}%\|[^|]{0,40}\| (\d+)/(\d+)", kind=PatternKind.POSITION)
    others = [
        compile_pattern(word, rf"{word} (\d+)", kind=PatternKind.VALUE) for word in ("queue", "depth", "wakeup", "jumbo")
    ]
    engine = SearchEngine([bar, *others])
    text = b"%| 3\n 10%|#| 1/9\rx%|#| 2/9\n%|5%|#| 3/9 depth 8\n100%|#| 9/9"
    assert fed(engine, text) == expected([bar, *others], text)
    (group,) = engine.groups(engine.every_mask, chunks.LogChunk(text, len(text), 0))
    assert len(group.find(text)) == 4, "one pass finds both, and not what has no digit before it"
