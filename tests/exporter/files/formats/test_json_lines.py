"""JSON Lines: every whole line is a value; a last one may be half-written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.formats import FileCheck, json_text
from exporter.files.formats.json_lines import PARTIAL_REASON
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

SMALL = b'{"a": 1, "text": "\\u00e9 \xc3\xa9"}\n[1, 2]\n\n17\n'
LARGE = b"".join(json.dumps({"id": number, "text": "word " * 9}).encode() + b"\n" for number in range(5000))
HALF = "its last line is half-written"


@pytest.fixture
def little_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MOST_BYTES", 2 * json_text.WINDOW_BYTES)


def lines(data: bytes) -> FileCheck:
    return check_bytes(data, "a.jsonl")


@pytest.mark.parametrize(
    ("text", "records"),
    [
        (SMALL, 3),
        (SMALL.replace(b"\n", b"\r\n"), 3),
        (SMALL + b'{"b": 2}', 4),
        (b"\n", 0),
        (b"{}", 1),
        (b"\xef\xbb\xbf{}\n{}\n", 2),
        (b"9" * 5000 + b"\n", 1),
    ],
)
def test_complete_lines_are_valid(text: bytes, records: int) -> None:
    assert lines(text) == FileCheck("valid", "jsonl", None, records)


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers())), st.booleans())
def test_lines_written_by_the_json_module_are_valid(values: list[object], ascii_only: bool) -> None:
    text = "".join(json.dumps(value, ensure_ascii=ascii_only) + "\n" for value in values) or "\n"
    assert lines(text.encode("utf-8", "surrogatepass")) == FileCheck("valid", "jsonl", None, len(values))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{}\n{"a":\n{}\n', "line 2 is not JSON: Expecting value"),
        (b"{}\n{}{}\n", "line 2 is not JSON: Extra data"),
        (b"{}\n{} {}", "its last line is not JSON: Extra data"),
        (b"{}\n\xff\n", "line 2 is not UTF-8 text"),
        (b'{}\n{"\xff', "its last line is not UTF-8 text"),
        (b"{}\n" + bytes(9) + b"{}\n", "has 9 NUL bytes: what was written there is lost"),
        (b"{}\n" + bytes(9), "has 9 NUL bytes: what was written there is lost"),
    ],
)
def test_invalid_lines_are_reported(text: bytes, reason: str) -> None:
    assert lines(text) == FileCheck("invalid", "jsonl", reason)


def test_a_truncated_file_ends_with_a_half_written_line_or_a_whole_one() -> None:
    for text in truncated(SMALL):
        last = text[text.rfind(b"\n") + 1 :]
        try:
            whole = not last.strip() or bool(json.loads(last))
        except ValueError:
            whole = False
        count = sum(bool(line.strip()) for line in text.split(b"\n")) - (not whole)
        expected = FileCheck("valid", "jsonl", None, count) if whole else FileCheck("unfinished", "jsonl", HALF, count)
        assert lines(text) == expected


def test_flipped_bytes_never_raise_an_error() -> None:
    assert states(flipped(SMALL, 60), "a.jsonl") <= {"valid", "invalid", "unfinished"}
    assert states(flipped(SMALL, 1), "a.jsonl") == {"invalid"}


@pytest.mark.usefixtures("little_is_read_whole")
def test_both_ends_of_a_large_file_are_checked() -> None:
    assert lines(LARGE) == FileCheck("valid", "jsonl", PARTIAL_REASON)
    assert lines(LARGE[:-1]) == FileCheck("valid", "jsonl", PARTIAL_REASON)
    assert lines(LARGE[:-2]) == FileCheck("unfinished", "jsonl", HALF)
    assert lines(LARGE.replace(b"\n", b"}\n", 1)).reason == "line 1 is not JSON: Extra data"
    assert lines(LARGE[:-1] + b"}\n").reason == "a line near its end is not JSON: Extra data"
    assert lines(LARGE + bytes(10)).reason == "has 10 NUL bytes near its end: what was written there is lost"
    middle = LARGE.index(b"\n", len(LARGE) // 2)
    assert lines(LARGE[:middle] + b"}" + LARGE[middle:]) == FileCheck("valid", "jsonl", PARTIAL_REASON)


@pytest.mark.usefixtures("little_is_read_whole")
def test_lines_longer_than_the_checked_part_are_undecided() -> None:
    line = json.dumps("x" * 200_000).encode()
    assert lines(line + b"\n" + line + b"\n").state == "unknown"
    assert lines(LARGE + line).reason == "its last line is longer than the part that was checked"
    assert lines(LARGE + line + b"\n") == FileCheck("valid", "jsonl", PARTIAL_REASON)


def test_one_json_text_over_many_lines_is_recognized() -> None:
    assert lines(json.dumps([1, 2], indent=1).encode()) == FileCheck("valid", "json", None, 2)


def test_utf16_is_not_checked() -> None:
    assert lines("{}\n{}\n".encode("utf-16")).reason == "is UTF-16 text"


def test_a_deep_line_is_undecided() -> None:
    assert lines(b"{}\n" + b"[" * 9000 + b"]" * 9000 + b"\n").state == "unknown"


@given(st.binary(max_size=60) | st.text('[]{}":,1 \\\n', max_size=30).map(str.encode))
def test_any_bytes_can_be_checked(data: bytes) -> None:
    found = lines(data or b"\n")
    assert found.state != "unknown" or data[:2] in (b"\xff\xfe", b"\xfe\xff", b"BZ") or found.format is None
