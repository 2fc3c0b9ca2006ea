"""Numbers in the match of a pattern."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.logs.patterns import Pattern, PatternKind, compile_pattern
from exporter.logs.search.extraction import NumberExtractor, parse_count, parse_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"7", 7),
        (b"0012", 12),
        (b"1,234,567", 1_234_567),
        (b"1_000", 1000),
        (b"1.9", 1),
        (b" 8 ", 8),
        (b"9" * 18, 10**18 - 1),
        (b"9" * 19, None),
        (b"1,2", None),
        (b"12k", None),
        (b"-3", None),
        (b"", None),
        (None, None),
    ],
)
def test_a_count_is_digits_in_groups_of_three_or_in_none(text: bytes | None, expected: int | None) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1e5", 100_000.0),
        (b"-.5", -0.5),
        (b"1,234.5", 1234.5),
        (b"inf", math.inf),
        (b"1,2", None),
        (b"1.2.3", None),
        (b"two", None),
        (b"", None),
        (b"9" * 500, None),
        (None, None),
    ],
)
def test_numbers_are_parsed_as_programs_print_them(text: bytes | None, expected: float | None) -> None:
    assert parse_number(text) == expected


def test_not_a_number_is_a_number() -> None:
    found = parse_number(b"nan")
    assert found is not None
    assert math.isnan(found)


@given(st.floats(allow_nan=False))
def test_a_printed_number_is_read_back(written: float) -> None:
    assert parse_number(repr(written).encode()) == written


def counts(pattern: Pattern, record: bytes) -> tuple[int, int | None, int | None, int | None] | None:
    match = pattern.regex.search(record)
    assert match is not None
    return NumberExtractor(pattern).counts(match)


@pytest.mark.parametrize(
    ("regex", "unit", "record", "expected"),
    [
        (r"(\d+)/(\d+)", "items", b"3/9", (3, 9, None, None)),
        (r"(\d+)(?:/(\d+))?", "items", b"3", (3, None, None, None)),
        (r"(?P<total>\d+)<(?P<done>\d+)", "items", b"9<3", (3, 9, None, None)),
        (r"\[(?P<rank>\d)\] (\d+)/(\d+)", "items", b"[7] 3/9", (3, 9, None, None)),
        (r"(?P<percent>\d+\.\d)%", "items", b"41.9%", (41, 100, None, None)),
        (r"(?P<percent>\d+)% (?P<done>\d+) (?P<total>\d+)", "items", b"41% 41 99", (41, 99, None, None)),
        (r"e (?P<epoch>\d+)/(?P<epochs>\d+) (?P<done>\d+)", "steps", b"e 2/5 7", (7, None, 2, 5)),
        (r"e (?P<epoch>\d+)/(?P<epochs>\d+)", "epochs", b"e 2/5", (2, 5, 2, 5)),
        (r"epoch (?P<done>[\d.]+)", "epochs", b"epoch 1.97", (1, None, None, None)),
        (r"(\S+) of (\d+)", "items", b"three of 9", None),
        (r"\d+", "items", b"3", None),
        (r"e (?P<epoch>\d+)", "steps", b"e 2", None),
    ],
)
def test_a_position_comes_from_named_or_numbered_groups(
    regex: str, unit: str, record: bytes, expected: tuple[int, int | None, int | None, int | None] | None
) -> None:
    assert counts(compile_pattern("p", regex, kind=PatternKind.POSITION, unit=unit), record) == expected


def values(pattern: Pattern, record: bytes) -> dict[str, float]:
    match = pattern.regex.search(record)
    assert match is not None
    return dict(NumberExtractor(pattern).values(match, record))


@pytest.mark.parametrize(
    ("regex", "record", "expected"),
    [
        (r"lr=(\S+)", b"lr=1e-4", {"lr": 1e-4}),
        (r"(?P<a>\d)(?P<b>\d)?", b"7", {"a": 7.0}),
        (r"(?P<rank>\d) (?P<a>\d)", b"0 7", {"a": 7.0}),
        (r"(?P<rank>\d) (\d)", b"0 7", {"lr": 7.0}),
        (r"lr=(\S+)", b"lr=high", {}),
        (r"lr", b"lr", {}),
    ],
)
def test_a_value_has_the_name_of_its_group_or_of_its_pattern(
    regex: str, record: bytes, expected: dict[str, float]
) -> None:
    assert values(compile_pattern("lr", regex, kind=PatternKind.VALUE), record) == expected


PAIRS = compile_pattern(
    "train",
    "iteration|(?P<skip>TP[1-9])",
    kind=PatternKind.PAIRS,
    keys={"loss": "loss", "learning rate": "lr", "'grad'": "grad", "mem": "mem", "%": "share"},
)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (b"iteration loss: 1.5 | learning rate = 1.0E-04", {"loss": 1.5, "lr": 1e-4}),
        (b"iteration learning rate:3,loss=2", {"lr": 3.0, "loss": 2.0}),
        (b"iteration {'grad': 0.25, \"loss\": 1}", {"grad": 0.25, "loss": 1.0}),
        (b"iteration mem: 71GB loss=80%", {"mem": 71.0, "loss": 80.0}),
        (b"iteration mem=1,024.5MiB", {"mem": 1024.5}),
        (b"iteration val_loss=1 gloss: 2 lossless: 3 loss 4", {}),
        (b"iteration loss=1.2.3 mem: 12:30:05", {}),
        (b"iteration loss: nan mem=-inf", {"loss": math.nan, "mem": -math.inf}),
        (b"iteration loss: nanometre mem: 3.", {"mem": 3.0}),
        (b"iteration % = 4", {"share": 4.0}),
        (b"TP1 loss: 1.5", {}),
    ],
)
def test_pairs_are_keys_with_numbers_in_any_order(record: bytes, expected: dict[str, float]) -> None:
    assert repr(sorted(values(PAIRS, record).items())) == repr(sorted(expected.items()))
