"""Choose short pieces to search for instead of many literals, and arrange them for the automaton.

The automaton's vector search (Teddy) is fast for at most 64 texts. It compares their first two to four bytes (as many
as the shortest has) by halves, many texts at once, and verifies possible matches. So we choose few pieces such that
each literal contains one, and such that they and their lookalikes are rare in a sample of the log. Where a piece
occurs, its literals are compared in place.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import and_, itemgetter, or_
from struct import iter_unpack

from exporter.contract.lazy_dataclass import dataclass
from exporter.logs.search.ordinary_text import LINES, WORDS

PIECE_BYTES = 4  # minimum bytes of a piece, unless its literal is shorter
# Most pieces in one automaton; up to the first number it has half of the buckets and is nearly twice as fast
SLIM_PIECES, MOST_PIECES = 31, 63
SLIM_BUCKETS, FAT_BUCKETS = 8, 16
SAMPLE_BYTES, SLICE_BYTES = 16 << 10, 512  # size of the sample of a log, and of the slices it consists of
_MEBIBYTE = float(1 << 20)
# cost of a pass over 1 MiB by width (bytes compared)
_SLIM_US, _FAT_US = {2: 31.0, 3: 49.0, 4: 67.0}, {2: 53.0, 3: 79.0, 4: 109.0}
_ALONE_US = 20.0  # cost of a search for a single text
_HIT_US, _FALSE_HIT_US = 0.35, 0.02  # cost of a hit, and of verifying a possible match
WIDTH = 3  # usual number of bytes compared
_WIDEN_US = 25.0  # cost of verifications from which comparing one byte more is tried
_FEW = 16  # pieces up to which comparing one byte less is tried
_WORTH = (10.0, 40.0, 150.0)  # values tried for saving one piece
_NEARLY_SLIM = 40  # up to this number, allowing more frequent pieces may reach the faster search
# Least texts in one automaton: for two or three it would search only their first bytes. Padding is text that no log
# contains.
_LEAST_TEXTS = 6
_MOST_CHOICES = 4  # candidate pieces tried for the same literals
# Approximate hits in 1 MiB of log per occurrence in the ordinary lines and words, and their weight if a log sample
# exists
_LINE_HITS, _WORD_HITS, _ORDINARY_SHARE = 60.0, 40.0, 0.1
_ROUNDS = 3  # times that each piece may move to a better bucket
_FALSE_HIT_SLICE = 256  # part of each slice of a sample in which lookalikes are counted

Pieces = dict[bytes, list[tuple[bytes, int]]]  # pieces, each with its literals and its place in them
# Bit masks of the sample positions that have the lower and the upper half of each of a piece's first bytes
_Halves = tuple[int, ...]
_NOWHERE: _Halves = (0,) * 8


def take_sample(text: bytes | bytearray | memoryview, end: int) -> bytes:
    """Take slices from all over a text."""
    slices = SAMPLE_BYTES // SLICE_BYTES
    if end <= SAMPLE_BYTES:
        return bytes(text[:end])
    step = (end - SLICE_BYTES) // (slices - 1)
    return b"".join(bytes(text[start : start + SLICE_BYTES]) for start in range(0, step * slices, step))


class _TextSample:
    """Text in which pieces and their lookalikes are counted."""

    def __init__(self, text: bytes) -> None:
        short = b"".join(text[start : start + _FALSE_HIT_SLICE] for start in range(0, len(text), SLICE_BYTES))
        short = short if len(text) > SAMPLE_BYTES // 4 else text + LINES
        self._lows = [_bit_positions(short, table) for table in _LOWS]
        self._highs = [_bit_positions(short, table) for table in _HIGHS]
        self.false_hit_us = _FALSE_HIT_US * _MEBIBYTE / len(short)  # cost per MiB of one lookalike in the sample
        self._text = text
        self.is_large = len(text) >= SAMPLE_BYTES  # whether the sample is large enough to justify a closer choice

    def prices(self, texts: Iterable[bytes]) -> dict[bytes, float]:
        """Approximate cost per MiB of each text of at most ``PIECE_BYTES`` bytes: its hits and those of its head."""
        usual = _ORDINARY_SHARE if self._text else 1.0
        counts = dict.fromkeys(texts, 0.0)
        heads = dict.fromkeys((text[:WIDTH] for text in counts), 0.0)
        short = [text for text in counts if len(text) < PIECE_BYTES]
        for text, quads, weight in (
            (self._text, _count_quads(self._text), _MEBIBYTE / max(1, len(self._text))),
            (LINES, _ordinary_quads(LINES), usual * _LINE_HITS),
            (WORDS, _ordinary_quads(WORDS), usual * _WORD_HITS),
        ):
            for quad, count in quads.items():
                if (head := quad[:WIDTH]) in heads:
                    heads[head] += weight * count
                    if quad in counts:
                        counts[quad] += weight * count
            for piece in short:
                counts[piece] += weight * text.count(piece)
        return {text: _HIT_US * count + _FALSE_HIT_US * heads[text[:WIDTH]] for text, count in counts.items()}

    def halves(self, piece: bytes, width: int) -> _Halves:
        """Sample positions where a piece may begin, by each half byte of its first ``width`` bytes."""
        found = [-1] * 8
        for place, code in enumerate(piece[:width]):
            # shift, because the last byte of the text is the lowest bit
            found[2 * place : 2 * place + 2] = self._lows[code & 15] << place, self._highs[code >> 4] << place
        return tuple(found)


def _count_quads(text: bytes) -> dict[bytes, int]:
    """How often each ``PIECE_BYTES`` bytes occur in a text."""
    found = Counter[bytes]()
    for start in range(PIECE_BYTES):
        whole = (len(text) - start) // PIECE_BYTES * PIECE_BYTES
        found.update(map(itemgetter(0), iter_unpack(f"{PIECE_BYTES}s", text[start : start + whole])))
    return found


_ordinary_quads = lru_cache(_count_quads)


_LOWS = [bytes(b"01"[code & 15 == half] for code in range(256)) for half in range(16)]
_HIGHS = [bytes(b"01"[code >> 4 == half] for code in range(256)) for half in range(16)]


_LOWER_HALF = bytes(code & 15 for code in range(256))


def _bit_positions(text: bytes, table: bytes) -> int:
    """One bit per byte of a text that ``table`` maps to 1."""
    return int(text.translate(table), 2)


def _bitwise_or(one: _Halves, other: _Halves) -> _Halves:
    return tuple(map(or_, one, other))


def _false_hits(one: _Halves, other: _Halves = _NOWHERE) -> int:
    """Count sample positions that match a bucket with both."""
    both: int = reduce(and_, map(or_, one, other))
    return both.bit_count()


@dataclass(frozen=True)
class SearchPlan:
    """Texts of one automaton in their order, and their literals."""

    order: list[bytes]
    pieces: Pieces
    cost_us: float  # approximate microseconds per MiB, without hits


def plan_search(literals: Sequence[bytes], text: bytes = b"") -> list[SearchPlan]:
    """Plan a few automata that find all these literals; ``text`` is a sample of the log.

    Every literal belongs to one piece. Some pieces come twice in the order, and some texts in it are padding that no
    log contains.
    """
    if len(literals) <= 2:
        return [_search_alone(literal, [literal]) for literal in literals]
    sample = _TextSample(text)
    places: dict[bytes, dict[int, int]] = {}
    for number, literal in enumerate(literals):
        for place in range(len(literal) - PIECE_BYTES + 1):
            places.setdefault(literal[place : place + PIECE_BYTES], {}).setdefault(number, place)
    for short in (literal for literal in literals if len(literal) < PIECE_BYTES):
        places[short] = {number: literal.find(short) for number, literal in enumerate(literals) if short in literal}
    prices = sample.prices(places)
    chosen: dict[bytes, list[int]] = {}
    least = 0.0
    for worth in _WORTH:
        found = _choose_pieces(places, prices, worth)
        cost = _pass_cost_us(len(found)) + sum(map(prices.__getitem__, found))
        if not chosen or cost < least:
            chosen, least = found, cost
        if len(found) <= SLIM_PIECES or _NEARLY_SLIM < len(found) <= MOST_PIECES:
            break
    names = sorted(chosen)
    members = {name: [literals[number] for number in chosen[name]] for name in names}
    plans: list[SearchPlan] = []
    for start in range(0, len(names), MOST_PIECES):
        plans += _cheapest_plans({name: members[name] for name in names[start : start + MOST_PIECES]}, sample, prices)
    return plans


def _pass_cost_us(pieces: int) -> float:
    """Cost of this number of pieces without any hit."""
    full, rest = divmod(pieces, MOST_PIECES)
    return full * _FAT_US[WIDTH] + (0 if not rest else _SLIM_US[WIDTH] if rest <= SLIM_PIECES else _FAT_US[WIDTH])


def _cheapest_plans(
    members: Mapping[bytes, Sequence[bytes]], sample: _TextSample, prices: Mapping[bytes, float]
) -> list[SearchPlan]:
    """Find the cheapest automaton for these pieces, with separate ones for pieces that would slow it down."""
    best: list[SearchPlan] = []
    widths = [WIDTH]
    for width in widths:
        plans = [_search_alone(piece, of) for piece, of in members.items() if len(piece) < width]
        others = [of for piece, of in members.items() if len(piece) >= width]
        if len(others) * _ALONE_US <= _SLIM_US[width]:
            plans += [
                _search_alone(_extend_piece(piece, of), of) for piece, of in members.items() if len(piece) >= width
            ]
        elif others:
            plans.append(_arrange(others, sample, prices, width))
            if width == WIDTH:
                plain_us = (_SLIM_US if len(others) <= SLIM_PIECES else _FAT_US)[width]
                widths += [width - 1] if len(members) <= _FEW else []
                widths += [width + 1] if sample.is_large and plans[-1].cost_us > plain_us + _WIDEN_US else []
        if not best or sum(plan.cost_us for plan in plans) < sum(plan.cost_us for plan in best):
            best = plans
    return best


def _search_alone(piece: bytes, literals: Sequence[bytes]) -> SearchPlan:
    return SearchPlan([piece], {piece: [(literal, literal.index(piece)) for literal in literals]}, _ALONE_US)


def _choose_pieces(
    places: Mapping[bytes, Mapping[int, int]], prices: Mapping[bytes, float], worth: float
) -> dict[bytes, list[int]]:
    """Choose pieces that cover all literals, greedily by cost per uncovered literal."""
    waiting = [((prices[piece] + worth) / len(of), piece) for piece, of in places.items()]
    heapq.heapify(waiting)
    done: set[int] = set()
    found: dict[bytes, list[int]] = {}
    while waiting:
        score, piece = waiting[0]
        of = [number for number in places[piece] if number not in done]
        now = (prices[piece] + worth) / len(of) if of else score
        if now > score:  # fewer literals are left for it than before
            heapq.heapreplace(waiting, (now, piece))
            continue
        heapq.heappop(waiting)
        if of:
            done.update(of)
            found[piece] = of
    holders: dict[int, list[bytes]] = {}  # pieces that each literal has
    for piece in found:
        for number in places[piece]:
            holders.setdefault(number, []).append(piece)
    for piece in sorted(found, key=lambda piece: (len(found[piece]), -prices[piece])):
        others = {
            number: other for number in found[piece] for other in holders[number] if other != piece and other in found
        }
        if len(others) == len(found[piece]):  # later choices made this one redundant
            del found[piece]
            for number, other in others.items():
                found[other].append(number)
    return found


class _LookalikeBucket:
    """Pieces that the vector search cannot distinguish, by number."""

    def __init__(self) -> None:
        self.pieces: dict[int, _PieceCandidate] = {}
        self.halves = _NOWHERE
        self.false_hits = 0

    def add(self, number: int, choice: "_PieceCandidate") -> None:
        self.pieces[number] = choice
        self.halves = _bitwise_or(self.halves, choice.halves)
        self.false_hits = _false_hits(self.halves)

    def remove(self, number: int) -> None:
        del self.pieces[number]
        self.halves = _NOWHERE
        for choice in self.pieces.values():
            self.halves = _bitwise_or(self.halves, choice.halves)
        self.false_hits = _false_hits(self.halves)


class _PieceCandidate:
    """A candidate for the piece of some literals."""

    def __init__(self, start: bytes, literals: Sequence[bytes], halves: _Halves, width: int, price: float) -> None:
        self.text = _extend_piece(start, literals)
        self.halves = halves
        self.lower_halves = start[:width].translate(_LOWER_HALF)
        self.cost_us = price


def _extend_piece(start: bytes, literals: Sequence[bytes]) -> bytes:
    """Extend a piece as long as all its literals agree: longer pieces have fewer hits."""
    text, *others = (literal[literal.index(start) :] for literal in literals)
    for other in others:
        while not other.startswith(text):
            text = text[:-1]
    return text


def _piece_candidates(
    literals: Sequence[bytes], sample: _TextSample, prices: Mapping[bytes, float], width: int
) -> list[_PieceCandidate]:
    """Rarest texts common to these literals, each as long as possible."""
    shortest = min(literals, key=len)
    size = min(PIECE_BYTES, len(shortest))
    starts = {shortest[place : place + size] for place in range(len(shortest) - size + 1)}
    common = [start for start in starts if all(start in literal for literal in literals)]
    common.sort(key=lambda start: (prices[start], start))
    return [
        _PieceCandidate(start, literals, sample.halves(start, width), width, prices[start])
        for start in common[:_MOST_CHOICES]
    ]


def _arrange(
    members: Sequence[Sequence[bytes]], sample: _TextSample, prices: Mapping[bytes, float], width: int
) -> SearchPlan:
    """Choose a piece for each set of literals, and the order that costs the vector search least.

    The automaton puts text number n into bucket n modulo their count, and verifies positions that fit a bucket by half
    bytes. So similar texts belong in one bucket.
    """
    is_slim = len(members) <= SLIM_PIECES
    buckets = [_LookalikeBucket() for _ in range(SLIM_BUCKETS if is_slim else FAT_BUCKETS)]
    most = (SLIM_PIECES if is_slim else MOST_PIECES) // len(buckets) + 1
    choices = [_piece_candidates(literals, sample, prices, width) for literals in members]
    where: list[_LookalikeBucket | None] = [None] * len(members)
    # bucket by the lower halves of its pieces: Teddy groups equal ones, whatever their order
    homes: dict[bytes, _LookalikeBucket] = {}
    numbers = sorted(range(len(members)), key=lambda number: -_false_hits(choices[number][0].halves))
    for _ in range(_ROUNDS):
        moved = False
        for number in numbers:
            old = where[number]
            if old is not None:
                was = old.false_hits
                held = old.pieces[number]
                old.remove(number)
                if all(choice.lower_halves != held.lower_halves for choice in old.pieces.values()):
                    del homes[held.lower_halves]
                if was == old.false_hits and held is choices[number][0]:
                    old.add(number, held)  # it costs nothing where it is
                    homes[held.lower_halves] = old
                    continue
            best: tuple[float, int, _LookalikeBucket, _PieceCandidate] | None = None
            is_new = False
            for bucket in buckets:
                if is_new and not bucket.pieces:
                    continue
                is_new = is_new or not bucket.pieces
                lows = {choice.lower_halves for choice in bucket.pieces.values()}
                for choice in choices[number]:
                    if best is not None and choice.cost_us > best[0]:
                        break  # a more frequent one cannot be better either
                    if homes.get(choice.lower_halves, bucket) is not bucket or (
                        len(lows) == most and choice.lower_halves not in lows
                    ):
                        continue
                    more = _false_hits(bucket.halves, choice.halves) - bucket.false_hits
                    cost = choice.cost_us + more * sample.false_hit_us
                    if best is None or (cost, len(bucket.pieces)) < best[:2]:
                        best = (cost, len(bucket.pieces), bucket, choice)
            if best is None:  # impossible: there are more places than pieces
                raise AssertionError(members[number])
            _, _, home, held = best
            home.add(number, held)
            homes[held.lower_halves] = home
            moved = moved or home is not old
            where[number] = home
        if not moved:
            break
    found: Pieces = {}
    columns: list[list[bytes]] = []
    us = (_SLIM_US if is_slim else _FAT_US)[width]
    for bucket in buckets:
        columns.append([choice.text for choice in bucket.pieces.values()])
        us += bucket.false_hits * sample.false_hit_us
        for number, choice in bucket.pieces.items():
            found.setdefault(choice.text, []).extend((text, text.index(choice.text)) for text in members[number])
    return SearchPlan(_bucket_order(columns, width), found, us)


def _bucket_order(columns: Sequence[Sequence[bytes]], width: int) -> list[bytes]:
    """Order texts so that each column goes into one bucket."""
    texts = [text for column in reversed(columns) for text in column]
    if len(texts) < _LEAST_TEXTS:
        return [*texts, *(bytes((0xF8 | number,)) * width for number in range(len(columns) - len(texts)))]
    # the first text with certain lower halves pulls all others into its bucket, wherever they are
    first: list[list[bytes]] = []
    others: list[bytes] = []
    for column in reversed(columns):
        alike: dict[bytes, list[bytes]] = {}
        for text in column:
            alike.setdefault(text[:width].translate(_LOWER_HALF), []).append(text)
        lists = sorted(alike.values(), key=len, reverse=True)
        first.append([those[0] for those in lists])
        others += [text for those in lists for text in those[1:]]
    if min(map(len, texts)) > width:
        # the shortest text decides how many bytes are compared
        others.append(bytes(0xF0 | code & 15 for code in texts[0][:width]))
    order: list[bytes] = []
    free: list[int] = []
    for row in range(max(map(len, first))):
        for column in first:
            if row >= len(column):
                free.append(len(order))
            order.append(column[row] if row < len(column) else texts[0])
    free = [place for place in free if place >= len(columns)]
    for other in others:
        if free:
            order[free.pop(0)] = other
        else:
            order.append(other)
    least = 0 if len(columns) == SLIM_BUCKETS else SLIM_PIECES + 2
    while free and free[-1] == len(order) - 1 > least:
        order.pop()
        free.pop()
    return order if len(order) <= (SLIM_PIECES if least == 0 else MOST_PIECES) + 1 else [*texts, *others[-1:]]
