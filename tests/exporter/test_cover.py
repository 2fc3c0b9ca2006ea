"""Pieces that stand for literals, and the order in which the vector search has them."""

import ahocorasick_rs
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.derive.cover import MOST_PIECES, PIECE, choose

LITERALS = st.lists(st.text("abcE ", min_size=PIECE, max_size=12).map(str.encode), max_size=150, unique=True)


@given(LITERALS)
@settings(max_examples=150, deadline=None)
def test_every_literal_has_one_piece_and_holds_it_there(literals: list[bytes]) -> None:
    stood_for = []
    for order, pieces in choose(sorted(literals)):
        assert set(order) == set(pieces)
        assert len(order) <= MOST_PIECES
        for piece, members in pieces.items():
            assert len(piece) >= PIECE
            for literal, place in members:
                assert literal[place : place + len(piece)] == piece
                stood_for.append(literal)
    assert sorted(stood_for) == sorted(literals)


def test_nothing_to_look_for_needs_no_automaton() -> None:
    assert choose([]) == []


def test_what_many_literals_have_in_common_is_looked_for_once() -> None:
    (order, pieces), *others = choose([f"Qxzconnection {number:x} lost".encode() for number in range(16, 96)])
    assert not others
    assert len(pieces) == len(set(order)) == 1


def test_an_automaton_finds_each_of_its_pieces() -> None:
    words = [f"{first}{second}{third}#{first}".encode() for first in "abc" for second in "xyz" for third in "123456"]
    for order, pieces in choose(words):
        automaton = ahocorasick_rs.BytesAhoCorasick(order, matchkind=ahocorasick_rs.MatchKind.LeftmostFirst)
        for piece in pieces:
            number, *place = automaton.find_matches_as_indexes(b"-" + piece + b"-")[0]
            assert (order[number], place) == (piece, [1, 1 + len(piece)])
