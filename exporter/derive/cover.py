"""Which short texts to look for instead of many literals, and in which order to give them to the automaton.

The vector search of the automaton (Teddy) is fast for at most 64 texts, and the faster the fewer and rarer
their first four bytes are. So a few pieces are chosen such that each literal holds one of them: where a piece
stands, its literals are compared in place.
"""

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

PIECE = 4
"""Bytes by which the vector search tells texts apart."""
SLIM_PIECES, MOST_PIECES = 32, 64
"""In one automaton; up to the lower number it has half of the buckets, and twice the speed."""
SLIM_BUCKETS, FAT_BUCKETS = 8, 16
_ENOUGH_SLIM, _ENOUGH = 28, 60
"""With fewer than the most there is a choice of buckets."""
_MEBIBYTE = float(1 << 20)
_HIT_US, _DOUBT_US, _SLIM_US, _FAT_US = 0.3, 0.1, 77.0, 120.0
"""What a hit, a place that must be looked at closer, and a pass over a mebibyte cost."""
_WORTH = (5.0, 60.0)
"""Hits in a mebibyte that one piece less is worth: what is tried."""
_MOST_CHOICES = 8
"""Pieces that are tried for the same literals."""

_WORDS = (
    b" and for the from with not was are has have this that when will into over than all its of to in is on at by "
    b"as or info debug warning trace notice error errors failed failure exception using found loaded loading load "
    b"model models weights checkpoint checkpoints saved saving save file files path directory step steps epoch "
    b"batch size iteration iter loss train training validation valid eval evaluation test data dataset dataloader "
    b"loader worker workers rank local global world node nodes host port address server client service request "
    b"requests response running waiting queue pending started starting start finished completed complete done "
    b"total number count time times seconds elapsed remaining throughput tokens token sequence length samples "
    b"items input output prompt generation decode prefill cache memory allocated reserved device devices driver "
    b"process processes group groups backend initialized initialize initializing communicator channel ring tree "
    b"via socket network connection connected connect timeout retry retrying attempt version python torch module "
    b"lib site packages line call function return config configuration default parameter parameters value values "
    b"type name none null true false layer layers attention nccl cuda gpu cpu it hidden norm grad gradient "
    b"learning rate optimizer scheduler scale bytes read write open close stream thread task tasks job user state "
    b"status available enabled disabled set get post http https CUDA NCCL INFO WARNING DEBUG ERROR GPU CPU POST "
    b"GET HTTP Loading Loaded Saving Saved Starting Started Using Epoch Batch Step Train Test Validation Running "
    b"Finished Processed Error Warning Time Total Memory Process Worker Rank Model File Failed Connection "
    b"completions shard shards fetched store flush buffer page pages row rows segment metrics progress update "
    b"gateway proxy router endpoint keep alive reader readers writer writers slot slots index key keys table "
    b"tables column query schema record records event events message messages handler handle handles calls called "
    b"install installed installing removed added known unknown exit exited kill killed allocating allocation "
    b"corresponding following across back able enable reset invalid missing detected required supported optional "
    b"target source result results summary report average mean max min best score "
)
"""Words that ordinary logs are full of."""
_LITTLE_WORDS = (
    b" and for the from with not was are has have this that when will into over than all its of to in is on at by "
    b"as or if no it be an a error info "
)
"""Those of every text, and of every log."""
_WORD_HITS, _LITTLE_WORD_HITS = 40.0, 500.0
"""How often each stands in a mebibyte, about."""


def _frequencies() -> list[float]:
    """Share of each byte in ordinary logs, about."""
    shares = [1e-5] * 256
    for text, share in (
        (_WORDS.replace(b" ", b""), 0.62),
        (b"0123456789", 0.17),
        (b" ", 0.1),
        (b".,:-_/=[]()\"'", 0.1),
        (b"\n", 0.01),
    ):
        for code in text:
            shares[code] += share / len(text)
    return shares


_SHARES = _frequencies()


@lru_cache(maxsize=8192)
def _hits(piece: bytes) -> float:
    """Places in a mebibyte of an ordinary log at which a piece stands, about."""
    share = _MEBIBYTE * 4  # neighbours are no strangers
    for code in piece:
        share *= _SHARES[code]
    return share + _WORD_HITS * _WORDS.count(piece) + _LITTLE_WORD_HITS * _LITTLE_WORDS.count(piece)


Pieces = dict[bytes, list[tuple[bytes, int]]]
"""Pieces, each with the literals that it stands for and its place in them."""
_Half = tuple[int, int]
_Sets = tuple[_Half, _Half, _Half, _Half]
"""Of each of the first bytes, the lower and upper halves that a bucket has."""
_NO_SETS: _Sets = ((0, 0), (0, 0), (0, 0), (0, 0))


def choose(literals: Sequence[bytes]) -> list[tuple[list[bytes], Pieces]]:
    """For each of a few automata: its texts in the order in which it is to have them, and what they stand for.

    Every literal, of ``PIECE`` bytes at least, belongs to one piece; some pieces come twice in the order.
    """
    if not literals:
        return []
    if len(literals) <= _ENOUGH_SLIM:
        pieces: Pieces = {literal: [(literal, 0)] for literal in literals}
    else:
        pieces = min((_chosen(literals, worth) for worth in _WORTH), key=_cost)
    count = 1 if len(pieces) <= _ENOUGH else -(-len(pieces) // _ENOUGH_SLIM)
    sizes = [len(pieces) * part // count for part in range(count + 1)]
    names = sorted(pieces)
    return [_arranged({name: pieces[name] for name in names[sizes[part] : sizes[part + 1]]}) for part in range(count)]


def _cost(pieces: Pieces) -> float:
    """Microseconds for a mebibyte, about."""
    count = -(-len(pieces) // _ENOUGH_SLIM)
    passes = _FAT_US if count > 1 and len(pieces) <= _ENOUGH else _SLIM_US * count
    return passes + _HIT_US * sum(map(_hits, pieces))


def _chosen(literals: Sequence[bytes], worth: float) -> Pieces:
    """Pieces such that each literal has one: always the one that is cheapest for each literal that has none."""
    places: dict[bytes, dict[int, int]] = {}
    for number, literal in enumerate(literals):
        for place in range(len(literal) - PIECE + 1):
            places.setdefault(literal[place : place + PIECE], {}).setdefault(number, place)
        places.setdefault(literal, {})[number] = 0
    waiting = [((_hits(piece) + worth) / len(of), piece) for piece, of in places.items()]
    heapq.heapify(waiting)
    open_ = set(range(len(literals)))
    found: dict[bytes, list[int]] = {}
    while open_:
        score, piece = waiting[0]
        of = [number for number in places[piece] if number in open_]
        if not of:
            heapq.heappop(waiting)
            continue
        now = (_hits(piece) + worth) / len(of)
        if now > score:  # fewer literals wait for it than before
            heapq.heapreplace(waiting, (now, piece))
            continue
        heapq.heappop(waiting)
        open_.difference_update(of)
        found[piece] = of
    for piece in sorted(found, key=lambda piece: (len(found[piece]), -_hits(piece))):
        others = {
            number: other for number in found[piece] for other in found if other != piece and number in places[other]
        }
        if len(others) == len(found[piece]):  # later choices have made this one needless
            del found[piece]
            for number, other in others.items():
                found[other].append(number)
    members = {
        piece: [(literals[number], places[piece][number]) for number in numbers] for piece, numbers in found.items()
    }
    return {_longest(piece, of): of for piece, of in members.items()}


def _longest(piece: bytes, members: Sequence[tuple[bytes, int]]) -> bytes:
    """The piece and what follows it in all of its literals: the longer, the fewer hits."""
    first, place = members[0]
    for end in range(place + len(piece), len(first)):
        if any(literal[at + end - place : at + end - place + 1] != first[end : end + 1] for literal, at in members):
            return first[place:end]
    return first[place:]


def _arranged(pieces: Pieces) -> tuple[list[bytes], Pieces]:
    """The pieces in the order in which the vector search has least to do, and with what they stand for.

    It puts the text with the number n into the bucket n modulo their count, and looks closer wherever a
    place could, by halves of bytes, be one of a bucket: so what is alike belongs together. A piece may be
    any other that its literals have in common, to be more like its bucket.
    """
    if len(pieces) <= 2:
        return sorted(pieces), pieces
    count = SLIM_BUCKETS if len(pieces) <= SLIM_PIECES else FAT_BUCKETS
    most = (SLIM_PIECES if count == SLIM_BUCKETS else MOST_PIECES) // count
    sets = [_NO_SETS] * count
    shares = [0.0] * count
    buckets: list[list[bytes]] = [[] for _ in range(count)]
    found: Pieces = {}
    alone = {piece: _doubts(_with(_NO_SETS, piece)) for piece in pieces}
    for piece in sorted(pieces, key=lambda piece: (len(pieces[piece]) == 1, -alone[piece], piece)):
        members = pieces[piece]
        best = (math.inf, piece, 0, _NO_SETS, 0.0)
        for text in _choices(members):
            hits = _hits(text) * _HIT_US
            is_new = False
            for number in range(count):
                if len(buckets[number]) == most or (is_new and not buckets[number]):
                    continue
                is_new = is_new or not buckets[number]
                wider = _with(sets[number], text)
                share = _doubts(wider)
                cost = hits + (share - shares[number]) * _MEBIBYTE * _DOUBT_US
                if cost < best[0]:
                    best = (cost, text, number, wider, share)
        _, text, number, sets[number], shares[number] = best
        buckets[number].append(text)
        found.setdefault(text, []).extend((literal, literal.index(text)) for literal, _ in members)
    filler = next(bucket[0] for bucket in buckets if bucket)
    rows = max(map(len, buckets))
    order = [
        bucket[row] if row < len(bucket) else bucket[0] if bucket else filler
        for row in range(rows)
        for bucket in reversed(buckets)
    ]
    least = max(len(pieces), 0 if count == SLIM_BUCKETS else SLIM_PIECES + 1)
    while len(order) > least and order.count(order[-1]) > 1:
        order.pop()
    return order, found


def _choices(members: Sequence[tuple[bytes, int]]) -> list[bytes]:
    """The rarest texts that all of some literals hold, each as long as it goes on in all of them."""
    first, *others = (literal for literal, _ in members)
    starts = {first[place : place + PIECE] for place in range(len(first) - PIECE + 1)}
    common = sorted(start for start in starts if all(start in other for other in others))
    return [
        _longest(start, [(literal, literal.index(start)) for literal, _ in members])
        for start in sorted(common, key=_hits)[:_MOST_CHOICES]
    ]


def _with(sets: _Sets, piece: bytes) -> _Sets:
    (l0, h0), (l1, h1), (l2, h2), (l3, h3) = sets
    a, b, c, d = piece[:PIECE]
    return (
        (l0 | 1 << (a & 15), h0 | 1 << (a >> 4)),
        (l1 | 1 << (b & 15), h1 | 1 << (b >> 4)),
        (l2 | 1 << (c & 15), h2 | 1 << (c >> 4)),
        (l3 | 1 << (d & 15), h3 | 1 << (d >> 4)),
    )


def _doubts(sets: _Sets) -> float:
    """Share of places that a bucket cannot tell from its own."""
    share = 1.0
    for low, high in sets:
        share *= _share(low, high)
    return share


@lru_cache(maxsize=16384)
def _share(low: int, high: int) -> float:
    """Share of bytes of which both halves are in a set."""
    lows = [half for half in range(16) if low >> half & 1]
    return sum(_SHARES[upper << 4 | half] for upper in range(16) if high >> upper & 1 for half in lows)
