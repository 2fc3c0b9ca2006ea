"""Parquet: a footer whose columns lie before it."""

import struct
from collections.abc import Mapping, Sequence

import pytest

from exporter.files.formats import FileCheck
from tests.exporter.files.formats.sample_files import sample
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

SAMPLE = sample("rows.parquet")

Value = int | bytes | Sequence["Value"] | Mapping[int, "Value"]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def encoded(value: Value) -> tuple[int, bytes]:
    """Type and bytes of a value in Thrift's compact protocol: numbers, texts, lists of one type, structs."""
    if isinstance(value, int):
        return 6, varint(value << 1 ^ value >> 63)
    if isinstance(value, bytes):
        return 8, varint(len(value)) + value
    if isinstance(value, Mapping):
        out, last = b"", 0
        for field, of_field in value.items():
            kind, text = encoded(of_field)
            short = 0 < field - last < 16
            out += (bytes((field - last << 4 | kind,)) if short else bytes((kind,)) + varint(field << 1)) + text
            last = field
        return 12, out + b"\0"
    items = [encoded(item) for item in value]
    kind = items[0][0] if items else 12
    count = bytes((len(items) << 4 | kind,)) if len(items) < 15 else bytes((0xF0 | kind,)) + varint(len(items))
    return 9, count + b"".join(text for _, text in items)


def parquet(footer: Value | bytes, data: bytes = bytes(100), magic: bytes = b"PAR1") -> bytes:
    text = footer if isinstance(footer, bytes) else encoded(footer)[1]
    return magic + data + text + struct.pack("<L", len(text)) + magic


def column(begin: int, size: int, dictionary: int | None = None) -> dict[int, Value]:
    data: dict[int, Value] = {1: 1, 3: [b"name"], 7: size, 9: begin}
    return {2: 0, 3: data if dictionary is None else {**data, 11: dictionary}}


def metadata(rows: int, *groups: Value) -> dict[int, Value]:
    return {1: 2, 2: [{4: b"schema"}, {4: b"name", 40: 1}], 3: rows, 4: list(groups), 6: b"by hand"}


def group(rows: int, *columns: Value) -> Value:
    return {1: list(columns), 2: 10, 3: rows}


WHOLE = metadata(12, group(5, column(4, 50)), group(7, column(60, 30, 54)))


def test_the_sample_is_valid_but_no_part_of_it() -> None:
    assert check_bytes(SAMPLE) == check_bytes(SAMPLE, "a.pt") == FileCheck("valid", "parquet", None, 10)
    assert states(truncated(SAMPLE, 2000), "a.parquet") == {"invalid"}
    reason = "has no footer: it was not completely written, or its end is lost"
    assert check_bytes(SAMPLE[:-1]) == FileCheck("invalid", "parquet", reason)
    assert states(flipped(SAMPLE, 4), "a.parquet") == {"invalid"}
    assert states(flipped(SAMPLE[::-1], 4), "a.parquet") == {"invalid"}
    ends = (SAMPLE[:-8] + text + SAMPLE[-4:] for text in flipped(SAMPLE[-8:-4], 4))
    assert states(ends, "a.parquet") == {"invalid"}


def test_the_footer_gives_the_number_of_rows() -> None:
    assert check_bytes(parquet(WHOLE)) == FileCheck("valid", "parquet", None, 12)
    assert check_bytes(parquet(metadata(0))) == FileCheck("valid", "parquet", None, 0)
    many = metadata(40, *[group(2, column(4, 96))] * 20)
    assert check_bytes(parquet(many)) == FileCheck("valid", "parquet", None, 40)
    elsewhere = {1: b"other.parquet", **column(4, 5000)}
    assert check_bytes(parquet(metadata(2, group(2, elsewhere)))) == FileCheck("valid", "parquet", None, 2)
    encrypted: Value = {2: 0, 8: {1: {}}, 9: b"secret"}
    assert check_bytes(parquet(metadata(2, group(2, encrypted)))) == FileCheck("valid", "parquet", None, 2)
    signed = encoded(WHOLE)[1] + bytes(range(28))
    assert check_bytes(parquet(signed)) == FileCheck("valid", "parquet", None, 12)


@pytest.mark.parametrize(
    ("data", "state", "reason"),
    [
        (parquet(WHOLE, magic=b"PARE"), "unknown", "has an encrypted footer"),
        (parquet(WHOLE)[:-4] + b"PARE", "invalid", "has no footer: it was not completely written"),
        (b"PAR1" + struct.pack("<L", 1) + b"PAR1", "invalid", "has a footer length that does not fit the file"),
        (b"PAR1PAR1", "invalid", "has no footer: it was not completely written"),
        (b"PAR1\0\0\0\0PAR1", "invalid", "has a footer that ends too early"),
        (parquet({1: 2}), "invalid", "has a footer without schema and rows"),
        (parquet({1: 2, 2: [{4: b"schema"}]}), "invalid", "has a footer without schema and rows"),
        (parquet(metadata(-1)), "invalid", "has a footer without schema and rows"),
        (parquet(metadata(3, group(2, column(4, 9)))), "unknown", "has 2 rows, but its footer says 3"),
        (parquet(metadata(2, group(2, column(4, 101)))), "invalid", "has a column that ends after the footer begins"),
        (parquet(metadata(2, group(2, column(-4, 1)))), "invalid", "has a column that ends after the footer begins"),
        (parquet(metadata(2, group(2, {3: {7: 3}}))), "invalid", "has a column without an offset"),
        (parquet(metadata(2, {3: 2})), "invalid", "has no columns in row group 1"),
        (parquet(encoded(WHOLE)[1][:-1]), "invalid", "has a footer that ends too early"),
        (parquet(b"\x1d"), "invalid", "has a footer with a value of unknown type"),
        (parquet(b"\x16" + b"\xff" * 11), "invalid", "has a footer with a number that is too long"),
        (parquet(b"\x1c" * 5000), "invalid", "has a footer with structs nested too deeply"),
        (parquet(b"\x19" + b"\x19" * 5000), "invalid", "has a footer with structs nested too deeply"),
        (parquet(b"\x19\xf1" + varint(1 << 60)), "invalid", "has a footer that ends too early"),
        (parquet(b"\x18" + varint(1 << 60)), "invalid", "has a footer that ends too early"),
    ],
)
def test_other_files_give_the_expected_state(data: bytes, state: str, reason: str) -> None:
    found = check_bytes(data, "a.parquet")
    assert (found.state, (found.reason or "")[: len(reason)]) == (state, reason)


def test_only_the_first_part_of_a_long_footer_is_checked() -> None:
    long = metadata(40_000, *[group(2, column(4, 96))] * 20_000)
    expected = FileCheck("valid", "parquet", "only 256 KiB of its footer were checked", 40_000)
    assert check_bytes(parquet(long)) == expected
    wrong = metadata(40_000, group(2, column(4, 101)), *[group(2, column(4, 96))] * 19_999)
    assert check_bytes(parquet(wrong)).state == "invalid"
    noise = bytes((0x18,)) + varint(1 << 19) + bytes(1 << 19)
    assert check_bytes(parquet(noise)) == FileCheck("unknown", "parquet", f"has a footer of {len(noise)} bytes")
