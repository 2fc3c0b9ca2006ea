"""Arrow's files and streams: messages, footer and ends."""

import struct

import pytest

from exporter.files.formats import FileCheck
from tests.exporter.files.formats.sample_files import sample
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

FILES = {name: sample(name) for name in ("rows.arrow", "rows.feather")}
FILE, STREAM = FILES["rows.arrow"], sample("rows-stream.arrow")
END = b"\xff\xff\xff\xff\0\0\0\0"


def older(stream: bytes) -> bytes:
    """A stream as before version 0.15: each message begins with only its length."""
    out, at = b"", 0
    while at < len(stream):
        length = struct.unpack_from("<i", stream, at + 4)[0]
        body = 0 if length == 0 else bodies(stream[at + 8 : at + 8 + length])
        out += stream[at + 4 : at + 8 + length + body]
        at += 8 + length + body
    return out


def bodies(metadata: bytes) -> int:
    """The field with the length of the body, the last field in all these messages."""
    table = struct.unpack_from("<I", metadata)[0]
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    size = struct.unpack_from("<H", metadata, fields)[0]
    at = struct.unpack_from("<H", metadata, fields + 10)[0] if size > 10 else 0
    return int(struct.unpack_from("<q", metadata, table + at)[0]) if at else 0


def messages(stream: bytes) -> list[int]:
    """Offsets of the messages of a stream."""
    return [at for at in range(len(stream)) if stream.startswith(b"\xff\xff\xff\xff", at)]


@pytest.mark.parametrize("name", FILES)
def test_files_are_valid_and_truncated_ones_are_not(name: str) -> None:
    assert check_bytes(FILES[name]) == check_bytes(FILES[name], name) == FileCheck("valid", "arrow", None, 10)
    assert states(truncated(FILES[name], 2000), name) == {"invalid"}
    reason = "has no footer: it was not completely written, or its end is lost"
    assert check_bytes(FILES[name][:-1]) == FileCheck("invalid", "arrow", reason)
    assert states(flipped(FILES[name], 6), name) <= {"invalid", "unknown"}
    ends = (FILES[name][:-10] + text for text in flipped(FILES[name][-10:], 10))
    assert states(ends, name) == {"invalid"}


def test_a_stream_is_valid_and_truncated_ones_are_not() -> None:
    assert check_bytes(STREAM) == check_bytes(STREAM, "a.arrow") == FileCheck("valid", "arrow-stream", None, 10)
    begins = messages(STREAM)
    assert len(begins) == 5
    for end in range(1, len(STREAM)):
        found = check_bytes(STREAM[:end], "a.arrow")
        if end in begins:
            assert found == FileCheck("unknown", "arrow", "ends after a message, without an end-of-stream marker")
        else:
            assert found.state == "invalid"
    assert check_bytes(STREAM + b"more").reason == "continues for 4 bytes after the end of its stream"
    assert check_bytes(STREAM + STREAM).state == "unknown"


def test_the_older_stream_format_is_recognized_by_extension() -> None:
    stream = older(STREAM)
    assert len(stream) == len(STREAM) - 4 * 5
    assert check_bytes(stream, "a.arrow") == FileCheck("valid", "arrow-stream", None, 10)
    assert check_bytes(stream).state == "unknown"
    assert states(truncated(stream, 1000), "a.arrow") <= {"invalid", "unknown"}


@pytest.mark.parametrize(
    ("data", "state", "reason"),
    [
        (END, "invalid", "is a stream without a schema"),
        (STREAM[messages(STREAM)[1] :], "invalid", "has no schema at its beginning, or another one later"),
        (STREAM[:-8] + STREAM, "invalid", "has no schema at its beginning, or another one later"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff", "invalid", "has other data where a message should be"),
        (b"\xff\xff\xff\xff\x08\0\0\0" + bytes(8), "invalid", "has other data where a message should be"),
        (b"\xff\xff\xff\xff\x08\0\0\0" + b"\xff" * 8, "invalid", "has other data where a message should be"),
        (b"\xff\xff\xff\xff\xf0\0\0\0" + bytes(8), "invalid", "ends 232 bytes before the end of a message"),
        (b"\xff\xff\xff\xff\xf0", "invalid", "ends within a message"),
        (b"FEA1" + bytes(50) + b"FEA1", "unknown", "is Feather version 1, which is not checked"),
        (b"FEA1" + bytes(50), "invalid", "has no footer"),
        (b"ARROW1\0\0" + struct.pack("<i", 1) + b"ARROW1", "invalid", "has a footer length that does not fit the file"),
        (
            b"ARROW1\0\0" + struct.pack("<i", -1) + b"ARROW1",
            "invalid",
            "has a footer length that does not fit the file",
        ),
        (b"ARROW1\0\0    " + struct.pack("<i", 4) + b"ARROW1", "invalid", "has a damaged footer"),
        (b"ARROW1ARROW1", "invalid", "has no footer"),
    ],
)
def test_other_files_give_the_expected_state(data: bytes, state: str, reason: str) -> None:
    found = check_bytes(data, "a.arrow")
    assert (found.state, (found.reason or "")[: len(reason)]) == (state, reason)


def test_a_batch_that_is_not_where_the_footer_says_is_damage() -> None:
    first = FILE.index(b"\xff\xff\xff\xff", FILE.index(b"\xff\xff\xff\xff") + 4)
    hole = FILE[:first] + bytes(32) + FILE[first + 32 :]
    assert check_bytes(hole) == FileCheck("invalid", "arrow", "has other data where its batch 0 should be")
    footer = FILE.rindex(struct.pack("<q", first))
    beyond = FILE[:footer] + struct.pack("<q", len(FILE)) + FILE[footer + 8 :]
    assert check_bytes(beyond).reason == "its batch 0 does not fit before the footer"


def test_a_stream_with_too_many_batches_to_read_is_undecided() -> None:
    begins = messages(STREAM)
    batch = STREAM[begins[1] : begins[2]]
    few, many = (STREAM[: begins[1]] + batch * count + END for count in (1000, 5000))
    assert check_bytes(few) == FileCheck("valid", "arrow-stream", None, 4000)
    assert check_bytes(many).state == "unknown"
