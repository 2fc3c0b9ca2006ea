"""Literals of regular expressions, and which of them are safe to search with."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.logs.search.literals import (
    find_literals,
    literal_context,
    needs_line_end,
    safe_length,
)
from exporter.logs.search.regex_tree import alternatives


def literals(pattern: str) -> set[str]:
    return {text.decode("latin-1") for text in find_literals(re.compile(pattern.encode(), re.MULTILINE)).texts}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("out of memory|OOM", {"out of memory", "OOM"}),
        (r"Processed (\d+)/(\d+) items", {"Processed "}),
        (r"Epoch:? (\d+)", {"Epoch"}),
        (r"(?P<n>\d+)% done", {"% done"}),
        (r"\bXY[ZW]\b", {"XYZ", "XYW"}),
        (r"(?:Decode|Prefill) batch", {"Decode batch", "Prefill batch"}),
        (r"Zab{2,}c", {"Zabb"}),
        (r"(?>QUEUE|STACK) \d", {"QUEUE ", "STACK "}),
        (r"Q++XYZ", {"QXYZ"}),
        (r"\d+(?=QUEUE)", {"QUEUE"}),
        (r"(?<=QUEUE)\d+", {"QUEUE"}),
        (r"\d+(?!QUEUE)", set()),
        (r"(?:QUEUE)?\d+", set()),
        (r"(?:QUEUE)*\d+", set()),
        (r"QUEUE|\d+", set()),
        (r"(\d+)/(\d+)", set()),
        (r".*", set()),
        ("", set()),
        (r"(QUEUE)?(?(1)abcde|vwxyz)", set()),
        (r"(?i)q7#", {"q7#", "Q7#"}),
        (r"(?i:Q)UE7#", {"QUE7#", "qUE7#"}),
        (r"[^x]Z9\sZ99", {"Z99"}),
        ("a\nXYZ", {"XYZ"}),
        ("für", {"f\xc3\xbcr"}),
    ],
)
def test_literals_of_known_patterns(pattern: str, expected: set[str]) -> None:
    assert literals(pattern) == expected


def test_a_case_insensitive_text_is_found_in_every_spelling() -> None:
    texts = find_literals(re.compile(rb"(?i)cuda error")).texts
    assert texts
    for line in (b"CUDA error", b"cuda error", b"CUDA ERROR", b"cUdA eRrOr"):
        assert any(text in line for text in texts)


@pytest.mark.parametrize(
    ("pattern", "only"),
    [
        ("out of memory|OOM", True),
        ("[Cc]onnection (?:refused|reset)", True),
        ("parse errors?", True),
        (r"\bOOM", False),
        ("^OOM", False),
        (r"OOM \d", False),
        ("OOM(?= now)", False),
        ("(?>OO|OOM)X|OOMY", False),
        ("(?:OO|OOM)++X", False),
        (r"(O)\1M", False),
        ("XYZ\nXYZ", False),
        ("(?i)out of memory", False),
        ("O", False),
    ],
)
def test_literals_alone_decide_only_without_further_conditions(pattern: str, only: bool) -> None:
    assert find_literals(re.compile(pattern.encode(), re.MULTILINE)).is_sufficient == only


def test_a_second_text_distinguishes_patterns_with_the_same_beginning() -> None:
    found = find_literals(re.compile(rb"ERROR: .{0,80}(?:disk full|quota)"))
    assert found.texts == (b"ERROR: ",)
    assert set(found.second_texts) == {b"disk full", b"quota"}


LETTERS = st.sampled_from("aAbBxyZ09 =%#")
# Hypothesis checks a strategy at its first use, so these are made once: it would take longer than to draw from them.
TEXTS, CLASSES = st.text(LETTERS, min_size=1, max_size=5), st.lists(LETTERS, min_size=1, max_size=5, unique=True)
LENGTHS, REPEATS, MORE, CHOICES = st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.integers(0, 1)
LEAVES = ["text", "text", "class", "any", "digits"]
LEAF, KIND = st.sampled_from(LEAVES), st.sampled_from([*LEAVES, "group", "either", "repeat", "case"])
ANY = st.sampled_from([(".", "q"), (r"\w", "b"), (r"[^q]", "A"), (r"\S", "%")])
DIGITS, GROUPS = st.sampled_from(["0", "90"]), st.sampled_from(["", "?:"])
MOST, LAZY = st.sampled_from([0, None, 2]), st.sampled_from(["", "?"])


@st.composite
def sequences(draw: st.DrawFn, depth: int = 3) -> tuple[str, str]:
    """A regular expression and a text that it matches."""
    parts = [draw(PIECES[depth]) for _ in range(draw(LENGTHS))]
    return "".join(regex for regex, _ in parts), "".join(text for _, text in parts)


@st.composite
def pieces(draw: st.DrawFn, depth: int) -> tuple[str, str]:
    kind = draw(KIND if depth else LEAF)
    if kind == "text":
        text = draw(TEXTS)
        return re.escape(text), text
    if kind == "class":
        chars = draw(CLASSES)
        return f"[{re.escape(''.join(chars))}]", draw(st.sampled_from(chars))
    if kind == "any":
        return draw(ANY)
    if kind == "digits":
        return r"\d+", draw(DIGITS)
    regex, text = draw(SEQUENCES[depth - 1])
    if kind == "group":
        return f"({draw(GROUPS)}{regex})", text
    if kind == "case":
        return f"(?i:{regex})", (text, text.swapcase(), text.upper())[draw(MORE)]
    if kind == "either":
        other, other_text = draw(SEQUENCES[depth - 1])
        return f"(?:{regex}|{other})", (text, other_text)[draw(CHOICES)]
    least, more = draw(REPEATS), draw(MOST)
    most = "" if more is None else str(least + more)
    return f"(?:{regex}){{{least},{most}}}{draw(LAZY)}", text * (least + (draw(MORE) if more != 0 else 0))


PIECES, SEQUENCES = [pieces(depth) for depth in range(4)], [sequences(depth) for depth in range(4)]


@given(sequences(), st.text(LETTERS, max_size=3))
@settings(max_examples=700, deadline=None)
@example(("(?:ab){2,}%%", "abab%%"), "")
def test_every_match_contains_one_of_the_literals(drawn: tuple[str, str], before: str) -> None:
    pattern, sample = drawn
    regex = re.compile(pattern.encode(), re.MULTILINE)
    match = regex.search((before + sample).encode())
    assert match is not None
    found = find_literals(regex)
    for texts in (found.texts, found.second_texts):
        assert not texts or any(text in match[0] for text in texts)
        assert all(texts)
    if found.is_sufficient:
        assert all(regex.search(text) for text in found.texts)


@pytest.mark.parametrize(
    "pattern",
    [
        r"Processed (\d+)/(\d+) items",
        r"(\d+)/(\d+) items",
        r"(?:\w{1,80}\.){0,12}\w{1,80}Error",
        r"loss[:=]\s*(\d+\.?\d*)",
        r"^\[rank\d{1,6}\]: Traceback",
        r"[^|]*\| (\d+)",
        r"a++b",
        r"(?>a+)b",
    ],
)
def test_a_plain_pattern_is_not_costly(pattern: str) -> None:
    assert safe_length(re.compile(pattern.encode())) > 0


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(x+x+)+y",
        r"(a|aa)+$",
        r"(?:\w+\s?)*done",
        r"(.*)(.*)(.*)x",
        r"(\w+)\1",
        r"(?:a{0,40}){40}b",
        r"(?:[a-z]+-)*(\d+)$",
        r"(?=(a+)+$)b",
        r"b|(a*)*c",
    ],
)
def test_a_pattern_with_catastrophic_backtracking_is_costly(pattern: str) -> None:
    assert safe_length(re.compile(pattern.encode())) == 0


def test_backtracking_over_digits_is_safe_only_in_short_records() -> None:
    once, again = re.compile(rb"Processed (\d+)/"), re.compile(rb"(\d+)/(\d+) items")
    assert 1 << 10 <= safe_length(again) < 1 << 14 < safe_length(once)


@pytest.mark.parametrize(
    ("pattern", "needs"),
    [
        ("a\nb", True),
        (r"a(?:\r|\n)", True),
        (r"a(?=\n)", True),
        (r"(?:a\n)+", True),
        (r"a\n?", False),
        (r"a(?:\n|b)", False),
        (r"a\s", False),
        (r"a$", False),
        (r"[^x]", False),
        (r"(?:a\n)*", False),
    ],
)
def test_a_pattern_across_a_line_end_is_recognized(pattern: str, needs: bool) -> None:
    assert needs_line_end(re.compile(pattern.encode(), re.MULTILINE)) == needs


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (
            r"\bstep(?<!eval step)(?::| |: ) {0,3}(\d{1,9})/(\d+)$",
            [b" 7/9", b":  12/9", b": 1/2\nx"],
            [b" 7 loss", b"s 7/9"],
        ),
        (r"Epoch:? (\d{1,18})(?!\d)", [b": 7", b" 7"], [b" x", b":7", b""]),
        (r"(?:iter|iteration) \d{1,9}+/", [b" 7/", b"ation 7/"], [b"able 7/", b" 7 /"]),
        (r"QUEUE [^\n]{0,4}(?i:done|end) now", [b"x  DONE now", b"end now"], [b"x\ndone", b"stop now"]),
    ],
)
def test_what_follows_a_literal_in_a_match_is_known(pattern: str, yes: list[bytes], no: list[bytes]) -> None:
    regex = re.compile(pattern.encode(), re.MULTILINE)
    (text,) = find_literals(regex).texts
    behind = literal_context(regex).after[text]
    tails = {tail: behind.match(text + tail, len(text)) is not None for tail in (*yes, *no)}
    assert tails == {**dict.fromkeys(yes, True), **dict.fromkeys(no, False)}


@pytest.mark.parametrize(("text", "expected"), [(b"loss=", True), (b" loss=", True), (b"train_loss=", False)])
def test_a_literal_at_the_begin_of_a_word_is_not_looked_for_inside_one(text: bytes, expected: bool) -> None:
    behind = literal_context(re.compile(rb"\bloss=(\d)")).after[b"loss="]
    assert (behind.match(text + b"1", len(text)) is not None) == expected


@pytest.mark.parametrize(
    "pattern", ["QUEUE", r"QUEUE.*x", r"(\d+)/", r"QUEUE|STACK \d", r"Q\d+U", r"QUEUE(?=\d)", r"(?:QUEUE)+"]
)
def test_a_literal_with_an_uncertain_successor_has_no_condition(pattern: str) -> None:
    assert not literal_context(re.compile(pattern.encode())).after


PARTS = st.sampled_from(
    [
        "QUE",
        "que",
        r"\d",
        r"\d{1,3}",
        r"\s?",
        "[a-c]*",
        "[^x]{0,2}",
        "(?:ab|b)?",
        "(?:QU|U)",
        "(?:QUE|xQUEab)",
        "^",
        "$",
        r"\b",
        "(?!a)",
        "/",
        "a?+",
        "(?i:e)",
        "(U+)",
        "x{2,}",
    ]
)
RECORDS = st.lists(
    st.sampled_from(["QUE", "que", "QU", "U", "7", "12", " ", "ab", "b", "x", "xx", "/", "E", "\n"]), max_size=12
)


@given(st.lists(PARTS, min_size=1, max_size=7).map("".join), RECORDS.map("".join))
@settings(max_examples=600, deadline=None)
def test_the_condition_after_a_literal_holds_in_every_match(pattern: str, text: str) -> None:
    regex, log = re.compile(pattern.encode(), re.MULTILINE), text.encode()
    behind, texts = literal_context(regex).after, find_literals(regex).texts
    for record in re.finditer(rb"[^\n]+", log) if texts else ():
        if regex.search(record[0]):
            places = [
                (literal, place.end())
                for literal in texts
                for place in re.finditer(b"(?=%s)" % re.escape(literal), log[: record.end()])
                if place.start() >= record.start() and log.startswith(literal, place.start(), record.end())
            ]
            assert any(
                literal not in behind or behind[literal].match(log, place + len(literal)) for literal, place in places
            )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\d{1,3}%\|[^|]*\| (\d+)/(\d+)", b"0123456789"),
        (r"[2-9]+?\b%\|", b"23456789"),
        (r"[\s]%\|", b"\t\x0b\x0c "),  # a record contains no line end
        (r"x%\|\d", b""),  # part of the literal
        (r"\d*%\|", b""),
        (r"%\|", b""),
        (r"\w%\|", b""),
        (r"(?:a\d)+%\|", b""),
        (r"\d(?:Z9#|QUEUE)", b""),
    ],
)
def test_the_byte_before_a_literal_is_known_if_it_is_one_of_a_few(pattern: str, expected: bytes) -> None:
    assert literal_context(re.compile(pattern.encode())).previous == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"(\d{1,18}\.?\d{0,18}) docs?/s", b".0123456789"),
        (r"\b(?:\d+|nan) docs/s", b"0123456789an"),
        (r"Encoded .* documents", b""),
        (r"[\w ]* docs/s", b""),
        (r" docs/s (\d+)", b""),
    ],
)
def test_the_text_before_a_literal_is_known_if_it_consists_of_few_bytes(pattern: str, expected: bytes) -> None:
    assert literal_context(re.compile(pattern.encode())).before == expected


@settings(max_examples=300)
@given(
    st.sampled_from(
        (r"(\d{1,3}\.?\d{0,3}) docs?/s", r"(?<![.\d])([-+]?\d+|nan|n) docs?/s", r"(?:^|\b)[.sd/ oc1]*? docs/s")
    ),
    st.lists(st.sampled_from(("1", "23.4", ".", "-", "nan", " ", " doc/s", " docs/s", "docs", "x", "\n"))).map("".join),
)
def test_a_search_from_before_the_first_literal_finds_the_same(pattern: str, text: str) -> None:
    regex, record = re.compile(pattern.encode(), re.MULTILINE), text.encode()
    before = literal_context(regex).before
    assert before
    places = [place for literal in find_literals(regex).texts if (place := record.find(literal)) >= 0]
    if places:
        found = regex.search(record, len(record[: min(places)].rstrip(before)))
        whole = regex.search(record)
        assert (found and found.span()) == (whole and whole.span())


def test_a_quantifier_at_the_end_of_a_pattern_costs_no_backtracking() -> None:
    prefix = rb"Engine stats: .{0,80}?running: (\d{1,9}).{0,80}?tokens/s: (\d{1,9}"
    ends, continues = re.compile(prefix + rb"\.?\d{0,9})"), re.compile(prefix + rb"\.?\d{0,9})x")
    assert safe_length(continues) < safe_length(ends) == 1 << 8


@pytest.mark.parametrize(
    ("pattern", "split"),
    [
        (r"QUEUE|(STACK|HEAP) \||[|)(]\d", ["QUEUE", r"(STACK|HEAP) \|", r"[|)(]\d"]),
        (r"[]|]A|[^]|]B|[\]|]C", ["[]|]A", "[^]|]B", r"[\]|]C"]),
        (r"(QUEUE|STACK)", [r"(QUEUE|STACK)"]),
        (r"(A)\1|(B)\1", [r"(A)\1|(B)\1"]),  # the second \1 is of the first group
        ("(?x)QUEUE # or |\n|STACK", ["(?x)QUEUE # or |\n|STACK"]),
    ],
)
def test_a_regular_expression_is_split_into_its_alternatives(pattern: str, split: list[str]) -> None:
    assert [found.pattern.decode() for found in alternatives(re.compile(pattern.encode()))] == split
