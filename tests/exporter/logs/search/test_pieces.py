"""Pieces that represent literals, and their order in the vector search."""

import random

import ahocorasick_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.logs.search import pieces
from exporter.logs.search.ordinary_text import LINES
from exporter.logs.search.pieces import MOST_PIECES, SAMPLE_BYTES, plan_search, take_sample

LITERALS = st.lists(st.text("abcE ", min_size=1, max_size=12).map(str.encode), max_size=150, unique=True)
SAMPLES = st.text("abcE \n", max_size=300).map(str.encode)


def found_by(order: list[bytes], text: bytes) -> list[tuple[bytes, int, int]]:
    """(Text, start, end) of each hit of an automaton."""
    automaton = ahocorasick_rs.BytesAhoCorasick(order, matchkind=ahocorasick_rs.MatchKind.LeftmostFirst)
    return [(order[number], start, end) for number, start, end in automaton.find_matches_as_indexes(text)]


@given(LITERALS, SAMPLES)
@settings(max_examples=150, deadline=None)
@example([b"E", b"EE", b"EEE", b"EEEE"], b"EEEE")
def test_every_literal_contains_its_piece_at_the_stated_offset(literals: list[bytes], sample: bytes) -> None:
    stood_for = []
    for plan in plan_search(sorted(literals), sample):
        assert set(plan.pieces) <= set(plan.order)
        assert len(plan.order) <= MOST_PIECES + 1
        for piece, members in plan.pieces.items():
            assert len(piece) >= min(min(len(literal) for literal, _ in members), pieces.PIECE_BYTES)
            for literal, place in members:
                assert literal[place : place + len(piece)] == piece
                stood_for.append(literal)
    assert sorted(stood_for) == sorted(literals)


@given(LITERALS, SAMPLES)
@settings(max_examples=100, deadline=None)
def test_filler_pieces_occur_in_no_text(literals: list[bytes], sample: bytes) -> None:
    for plan in plan_search(sorted(literals), sample):
        for text in set(plan.order) - set(plan.pieces):
            assert min(text) >= 0xF0
            with pytest.raises(UnicodeDecodeError):
                text.decode()


@given(LITERALS, SAMPLES)
@settings(max_examples=100, deadline=None)
def test_an_automaton_finds_each_of_its_pieces(literals: list[bytes], sample: bytes) -> None:
    for plan in plan_search(sorted(literals), sample):
        for piece in plan.pieces:
            # a piece that overlaps or is part of it may be found instead
            hits = found_by(plan.order, b"-" + piece + b"-")
            assert hits
            assert all(text in piece for text, _, _ in hits)


def test_no_literals_need_no_automaton() -> None:
    assert plan_search([]) == []


def test_a_common_part_of_many_literals_is_one_piece() -> None:
    (plan,) = plan_search([f"Qxzconnection {number:x} lost".encode() for number in range(16, 96)])
    assert len(plan.pieces) == 1


def test_many_different_literals_are_split_over_groups() -> None:
    source = random.Random(7)
    literals = sorted({"".join(source.choices("bcdfghjklmnpqrstvwxz", k=8)).encode() for _ in range(400)})
    plans = plan_search(literals)
    assert len(plans) > 2
    assert sorted(literal for plan in plans for members in plan.pieces.values() for literal, _ in members) == literals


def test_texts_with_similar_half_bytes_do_not_make_the_automaton_too_large() -> None:
    codes = [0x21, 0x31, 0x41, 0x51, 0x61, 0x71]
    literals = sorted(bytes((a, b, c, 0x7E, d)) for a in codes for b in codes for c in codes for d in (0x30, 0x41))
    for plan in plan_search(literals):
        assert len(plan.order) <= MOST_PIECES + 1


def test_a_frequent_text_is_not_the_piece_of_a_literal_with_rarer_parts() -> None:
    literals = [b"reader failed to zip", b"reader was quit", b"xylo reader", b"jam of readers"]
    (usual, log) = (b"the reader is at row 7\n" * 2000, b"failed quit xylo jam zip was of to\n" * 2000)
    assert all(piece not in usual for plan in plan_search(literals, usual) for piece in plan.pieces)
    assert all(piece in b"reader" for plan in plan_search(literals, log) for piece in plan.pieces)


def count_candidates(order: list[bytes], width: int, text: bytes) -> int:
    """Number of candidate positions of the vector search in a text, counted one by one."""
    buckets: list[list[bytes]] = [[] for _ in range(pieces.SLIM_BUCKETS if len(order) <= 32 else pieces.FAT_BUCKETS)]
    where: dict[bytes, int] = {}
    for number, piece in enumerate(order):
        low = bytes(code & 15 for code in piece[:width])
        buckets[where.setdefault(low, number % len(buckets))].append(piece)
    return sum(
        all(
            any(text[at + place] & 15 == piece[place] & 15 for piece in bucket)
            and any(text[at + place] >> 4 == piece[place] >> 4 for piece in bucket)
            for place in range(width)
        )
        for at in range(len(text) - width + 1)
        for bucket in buckets
        if bucket
    )


@given(st.lists(st.sampled_from("abdehop12 "), min_size=4, max_size=400).map("".join).map(str.encode))
@settings(max_examples=60, deadline=None)
def test_candidates_are_the_positions_that_no_bucket_excludes(text: bytes) -> None:
    sample = pieces._TextSample(text)
    both = pieces._bitwise_or(sample.halves(b"bead", 3), sample.halves(b"hope", 3))
    counted = text + LINES
    alone = sum(
        all(
            counted[at + place] & 15 in (b"bea"[place] & 15, b"hop"[place] & 15)
            and counted[at + place] >> 4 in (b"bea"[place] >> 4, b"hop"[place] >> 4)
            for place in range(3)
        )
        for at in range(len(counted) - 2)
    )
    assert pieces._false_hits(both) == alone


def test_the_order_has_the_planned_number_of_candidates() -> None:
    source = random.Random(3)
    words = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(300)]
    text = " ".join(source.choices(words, k=4000)).encode()
    literals = sorted(f"{first} {second}".encode() for first, second in zip(words[::8], words[1::8], strict=False))
    for plan in plan_search(literals, take_sample(text, len(text))):
        width = min(4, min(map(len, plan.order)))
        if len(plan.order) > 2:
            base = (pieces._SLIM_US if len(plan.order) <= 32 else pieces._FAT_US)[width]
            planned = (plan.cost_us - base) / (pieces._FALSE_HIT_US * (1 << 20))
            assert count_candidates(plan.order, width, text) / len(text) == pytest.approx(planned, abs=0.01)


@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 1 << 20])
def test_a_sample_comes_from_all_over_a_text(size: int) -> None:
    text = bytes(place * 255 // max(1, size) for place in range(size))
    for buffer in (text, bytearray(text), memoryview(text)):
        sample = take_sample(buffer, size)
        assert len(sample) == min(size, SAMPLE_BYTES)
        if size > 1:
            assert sample[0] == text[0]
            assert sample[-1] >= 250
