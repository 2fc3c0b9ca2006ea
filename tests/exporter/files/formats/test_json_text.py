"""JSON texts: whole ones by parsing, large ones by their ends."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.formats import FileCheck
from exporter.files.formats.source import MOST_BYTES
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

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
def test_complete_texts_are_valid(text: bytes, records: int | None) -> None:
    assert check_bytes(text, "a.json") == FileCheck("valid", "json", None, records)


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=9,
    )
)
def test_output_of_the_json_module_is_valid(value: object) -> None:
    records = len(value) if isinstance(value, list) else None
    assert check_bytes(json.dumps(value).encode(), "a.json") == FileCheck("valid", "json", None, records)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1', "ends in the middle of a value"),
        (b'{"a": "wor', "ends in the middle of a value"),
        (b"[1,\n", "ends in the middle of a value"),
        (b"[1,]", "is not JSON at line 1, column 4: Expecting value"),
        (b'{"a": 1}\n}', "is not JSON at line 2, column 1: Extra data"),
        (b"<html>", "is not JSON at line 1, column 1: Expecting value"),
        (b" \n ", "contains only white space"),
        (b'{"a": \0\0\0}', "has 3 NUL bytes: what was written there is lost"),
        (bytes(40), "has 40 NUL bytes: what was written there is lost"),
        (b'{"a": "\xff"}', "byte 7 (0xff) is not UTF-8"),
        ('{"a": "é"}'.encode()[:8], "byte 7 (0xc3) is not UTF-8"),
    ],
)
def test_invalid_texts_give_the_expected_reason(text: bytes, reason: str) -> None:
    assert check_bytes(text, "a.json") == FileCheck("invalid", "json", reason)


def test_every_truncation_is_detected() -> None:
    assert states(truncated(SMALL), "a.json") == {"invalid"}
    pretty = json.dumps(ROWS[:100], indent=1).encode()
    assert states(truncated(pretty), "a.json") == {"invalid"}


def test_flipped_bytes_never_raise_an_error() -> None:
    assert states(flipped(SMALL, 40), "a.json") <= {"valid", "invalid"}
    assert states(flipped(SMALL, 1), "a.json") == {"invalid"}


@pytest.mark.parametrize("indent", [None, 2])
def test_both_ends_of_a_large_text_are_checked(indent: int | None) -> None:
    for value in (ROWS, {"rows": ROWS}):
        text = json.dumps(value, indent=indent).encode()
        assert len(text) > MOST_BYTES
        for end in (b"", b"\n", b"  \n\n"):
            assert check_bytes(text + end, "a.json") == FileCheck("valid", "json", PART)
        assert states((cut for cut in truncated(text) if len(cut) > MOST_BYTES), "a.json") <= {"invalid", "unknown"}


def test_the_reason_names_the_defect_of_a_large_text() -> None:
    text = json.dumps(ROWS).encode()
    assert check_bytes(text[:-1], "a.json").reason == "begins with [ but does not end with ]"
    assert (
        check_bytes(text + bytes(70_000), "a.json").reason
        == "has 65536 NUL bytes near its end: what was written there is lost"
    )
    assert check_bytes(b"word " * 300_000, "a.json").reason == "is large, but does not begin with a bracket"
    assert check_bytes(b"[]\n" + text, "a.json").reason == "has text after its first value"
    for white in (b" " * MOST_BYTES + text, text + b" " * MOST_BYTES):
        assert check_bytes(white, "a.json").state == "unknown"
    assert check_bytes(json.dumps(ROWS).encode("utf-16"), "a.json").state == "unknown"
    inner = json.dumps({"rows": ROWS}).encode()
    inner_end = inner[: inner.rindex(b"}", 0, -1) + 1]
    assert check_bytes(inner_end, "a.json").reason == "ends with a bracket that closes an inner value"
    nested = json.dumps({"all": {"rows": ROWS}}, indent=1).encode()
    assert check_bytes(nested[: nested.rindex(b"}", 0, -1) + 1], "a.json").state == "unknown"


@pytest.mark.parametrize("text", ['"}', "{[", '\\"]}', "\\\\", '\\\\"', 'a\\\\\\"[{'])
def test_brackets_in_strings_do_not_matter_at_the_end(text: str) -> None:
    for length in range(20):
        rows = ["x" * 1000] * 1100 + ["y" * length, *([text] * 9000)]
        data = json.dumps({"rows": [rows, {"a": text}]}).encode()
        assert check_bytes(data, "a.json") == FileCheck("valid", "json", PART)
        assert check_bytes(data[: data.rindex(b"}", 0, -1) + 1], "a.json").state == "invalid"


def test_a_text_exactly_as_large_as_the_bound_is_parsed() -> None:
    text = b"[1, 2" + b" " * (MOST_BYTES - 6) + b"]"
    assert check_bytes(text, "a.json") == FileCheck("valid", "json", None, 2)
    assert check_bytes(text + b" ", "a.json") == FileCheck("valid", "json", PART)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 5000 + b"]" * 5000])
def test_a_deep_text_is_undecided(text: bytes) -> None:
    assert check_bytes(text, "a.json") == FileCheck("unknown", "json", "is nested too deeply to be checked")


def test_json_lines_in_a_file_named_json_are_recognized() -> None:
    lines = b'{"a": 1}\n{"a": 2}\n'
    assert check_bytes(lines, "a.json") == FileCheck("valid", "jsonl", None, 2)
    assert check_bytes(lines + b'{"a"', "a.json").state == "unfinished"
    many = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    assert check_bytes(many, "a.json").format == "jsonl"
    assert check_bytes(many[:-5], "a.json").state == "unfinished"


@given(st.binary(max_size=60) | st.text('[]{}":,1 \\', max_size=30).map(str.encode))
def test_any_bytes_can_be_checked(data: bytes) -> None:
    found = check_bytes(data or b"0", "a.json")
    try:
        json.loads(data or b"0")
    except (ValueError, UnicodeDecodeError):
        assert found.format != "json" or found.state == "invalid"
    else:
        assert (found.state, found.format) == ("valid", "json")
