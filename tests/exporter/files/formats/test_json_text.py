"""JSON texts: whole ones by parsing, large ones by their ends."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.formats import FileCheck
from exporter.files.formats.source import MOST_BYTES
from tests.exporter.files.formats.support import flipped, states, truncated, verdict

SMALL = json.dumps({"rows": [1, 2.5, None, True], "text": 'a "quote", \\ and \n', "é": [{}]}).encode()
ROWS = [{"id": number, "text": "word " * 9} for number in range(20_000)]
PART = "only its beginning and end were checked"


@pytest.mark.parametrize(
    ("text", "records"),
    [
        (b"[]", 0),
        (b" [1, 2, 3]\n", 3),
        (b"{}", None),
        (SMALL, None),
        (b'"text"', None),
        (b"17", None),
        (b"NaN", None),
        (b"[" + b"9" * 9000 + b"]", 1),
        (b"\xef\xbb\xbf[1]", 1),
        ("[1]".encode("utf-16"), 1),
        ("[1]".encode("utf-16-le"), 1),
        (json.dumps(["é\ud800"], ensure_ascii=False).encode("utf-8", "surrogatepass"), 1),
        (b"[" * 400 + b"]" * 400, 1),
    ],
    ids=range(13),
)
def test_whole_texts_are_valid(text: bytes, records: int | None) -> None:
    assert verdict(text, "a.json") == FileCheck("valid", "json", None, records)


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=9,
    )
)
def test_what_json_writes_is_valid(value: object) -> None:
    records = len(value) if isinstance(value, list) else None
    assert verdict(json.dumps(value).encode(), "a.json") == FileCheck("valid", "json", None, records)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1', "ends in the middle of a value"),
        (b'{"a": "wor', "ends in the middle of a value"),
        (b"[1,\n", "ends in the middle of a value"),
        (b"[1,]", "is no JSON at line 1, column 4: Expecting value"),
        (b'{"a": 1}\n}', "is no JSON at line 2, column 1: Extra data"),
        (b"<html>", "is no JSON at line 1, column 1: Expecting value"),
        (b" \n ", "holds nothing but white space"),
        (b'{"a": \0\0\0}', "has 3 NUL bytes: what was written there is lost"),
        (bytes(40), "has 40 NUL bytes: what was written there is lost"),
        (b'{"a": "\xff"}', "byte 7 (0xff) is not UTF-8"),
        ('{"a": "é"}'.encode()[:8], "byte 7 (0xc3) is not UTF-8"),
    ],
)
def test_broken_texts_are_told_apart(text: bytes, reason: str) -> None:
    assert verdict(text, "a.json") == FileCheck("invalid", "json", reason)


def test_every_truncation_is_seen() -> None:
    assert states(truncated(SMALL), "a.json") == {"invalid"}
    pretty = json.dumps(ROWS[:100], indent=1).encode()
    assert states(truncated(pretty), "a.json") == {"invalid"}


def test_flipped_bytes_never_raise() -> None:
    assert states(flipped(SMALL, 40), "a.json") <= {"valid", "invalid"}
    assert states(flipped(SMALL, 1), "a.json") == {"invalid"}


@pytest.mark.parametrize("indent", [None, 2])
def test_of_a_large_text_both_ends_are_looked_at(indent: int | None) -> None:
    for value in (ROWS, {"rows": ROWS}):
        text = json.dumps(value, indent=indent).encode()
        assert len(text) > MOST_BYTES
        for end in (b"", b"\n", b"  \n\n"):
            assert verdict(text + end, "a.json") == FileCheck("valid", "json", PART)
        assert states((cut for cut in truncated(text) if len(cut) > MOST_BYTES), "a.json") <= {"invalid", "unknown"}


def test_what_is_wrong_with_a_large_text_is_told() -> None:
    text = json.dumps(ROWS).encode()
    assert verdict(text[:-1], "a.json").reason == "begins with [ and does not end with ]"
    assert (
        verdict(text + bytes(70_000), "a.json").reason
        == "has 65536 NUL bytes near its end: what was written there is lost"
    )
    assert verdict(b"word " * 300_000, "a.json").reason == "begins with no bracket, though it is long"
    assert verdict(b"[]\n" + text, "a.json").reason == "has text behind its first value"
    for white in (b" " * MOST_BYTES + text, text + b" " * MOST_BYTES):
        assert verdict(white, "a.json").state == "unknown"
    assert verdict(json.dumps(ROWS).encode("utf-16"), "a.json").state == "unknown"
    inner = json.dumps({"rows": ROWS}).encode()
    inner_end = inner[: inner.rindex(b"}", 0, -1) + 1]
    assert verdict(inner_end, "a.json").reason == "ends with a bracket that closes an inner value"
    nested = json.dumps({"all": {"rows": ROWS}}, indent=1).encode()
    assert verdict(nested[: nested.rindex(b"}", 0, -1) + 1], "a.json").state == "unknown"


@pytest.mark.parametrize("text", ['"}', "{[", '\\"]}', "\\\\", '\\\\"', 'a\\\\\\"[{'])
def test_brackets_in_strings_do_not_matter_at_the_end(text: str) -> None:
    for length in range(20):
        rows = ["x" * 1000] * 1100 + ["y" * length, *([text] * 9000)]
        data = json.dumps({"rows": [rows, {"a": text}]}).encode()
        assert verdict(data, "a.json") == FileCheck("valid", "json", PART)
        assert verdict(data[: data.rindex(b"}", 0, -1) + 1], "a.json").state == "invalid"


def test_a_text_exactly_as_large_as_the_bound_is_parsed() -> None:
    text = b"[1, 2" + b" " * (MOST_BYTES - 6) + b"]"
    assert verdict(text, "a.json") == FileCheck("valid", "json", None, 2)
    assert verdict(text + b" ", "a.json") == FileCheck("valid", "json", PART)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 5000 + b"]" * 5000])
def test_a_deep_text_is_undecided(text: bytes) -> None:
    assert verdict(text, "a.json") == FileCheck("unknown", "json", "is nested too deeply to be checked")


def test_lines_in_a_file_named_json_are_read_as_such() -> None:
    lines = b'{"a": 1}\n{"a": 2}\n'
    assert verdict(lines, "a.json") == FileCheck("valid", "jsonl", None, 2)
    assert verdict(lines + b'{"a"', "a.json").state == "unfinished"
    many = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    assert verdict(many, "a.json").format == "jsonl"
    assert verdict(many[:-5], "a.json").state == "unfinished"


@given(st.binary(max_size=60) | st.text('[]{}":,1 \\', max_size=30).map(str.encode))
def test_any_bytes_are_looked_at(data: bytes) -> None:
    found = verdict(data or b"0", "a.json")
    try:
        json.loads(data or b"0")
    except (ValueError, UnicodeDecodeError):
        assert found.format != "json" or found.state == "invalid"
    else:
        assert (found.state, found.format) == ("valid", "json")
