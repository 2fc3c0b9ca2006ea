"""NumPy arrays and archives: their length must match type and shape."""

import io
import struct
import zipfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.files.formats import FileCheck
from exporter.files.formats.numpy_file import parse_array_header
from exporter.files.formats.source import CheckUndecided, FileDamaged
from tests.exporter.files.formats.sample_files import sample
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

ARRAY = sample("array.npy")
ARCHIVES = ("arrays.npz", "arrays-compressed.npz")


def array(descr: str, shape: str, data: bytes, version: int = 1, order: str = "False") -> bytes:
    """An array with these header fields."""
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + struct.pack("<BBH" if version == 1 else "<BBL", version, 0, len(header)) + header + data


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive_file:
        for name, data in members.items():
            archive_file.writestr(name, data)
    return out.getvalue()


def test_samples_are_valid_and_have_their_rows() -> None:
    assert check_bytes(ARRAY) == check_bytes(ARRAY, "a.pt") == FileCheck("valid", "npy", None, 4)
    for name in ARCHIVES:
        assert check_bytes(sample(name)) == check_bytes(sample(name), name) == FileCheck("valid", "npz", None, 7)


def test_no_truncated_array_or_archive_is_valid() -> None:
    assert states(truncated(ARRAY), "a.npy") == {"invalid"}
    for name in ARCHIVES:
        assert states(truncated(sample(name), 1000), name) == {"invalid"}
    assert check_bytes(ARRAY[:-5], "a.npy").reason == "ends 5 bytes before the end of its array"


@pytest.mark.parametrize(
    ("descr", "shape", "item_bytes", "rows"),
    [
        ("'<f4'", "(3, 2)", 24, 3),
        ("'|b1'", "(3,)", 3, 3),
        ("'>c16'", "(1, 5)", 80, 1),
        ("'<U5'", "(2,)", 40, 2),
        ("'|S7'", "(2,)", 14, 2),
        ("'<M8[25s]'", "(2,)", 16, 2),
        ("'<f8'", "()", 8, None),
        ("'<f8'", "(0, 9)", 0, 0),
        ("[('x', '<f4'), (('title', 'y'), '<i8', (2, 3)), ('', '|V3')]", "(2,)", 110, 2),
        ("[('inner', [('x', '|u1'), ('it\\'s \\\\', '<i2')])]", "(5,)", 15, 5),
        ("('<f4', (3,))", "(2,)", 24, 2),
        ("u'<f4'", "(3L,)", 12, 3),
    ],
)
def test_each_type_has_its_item_size(descr: str, shape: str, item_bytes: int, rows: int | None) -> None:
    for version in (1, 2, 3):
        whole = array(descr, shape, bytes(item_bytes), version)
        assert check_bytes(whole) == FileCheck("valid", "npy", None, rows)
        assert check_bytes(whole[:-1]).state == "invalid"
        assert check_bytes(whole + b"\0") == FileCheck("unknown", "npy", "continues for 1 bytes after its array")


def test_several_arrays_may_follow_one_another() -> None:
    assert check_bytes(ARRAY * 3) == FileCheck("valid", "npy")
    assert check_bytes((ARRAY * 3)[:-1]).state == "invalid"
    assert check_bytes(ARRAY + ARRAY[:9]).state == "invalid"


@pytest.mark.parametrize(
    ("data", "state"),
    [
        (array("'|O'", "(3,)", b"\x80\x05."), "unknown"),
        (array("[('x', '|O8')]", "(3,)", b"\x80\x05."), "unknown"),
        (array("'<q9x'", "(3,)", bytes(24)), "unknown"),
        (array("'<f4'", "(3, -1)", b""), "invalid"),
        (array("'<f4'", "(-3, -1)", bytes(12)), "invalid"),
        (array("'<f4'", "(True,)", bytes(4)), "invalid"),
        (array("'<f4'", "[1]", bytes(4)), "invalid"),
        (array("'<f4'", "(1,)", bytes(4), order="0"), "invalid"),
        (array("'<f4'", f"({'9' * 4000}, {'9' * 4000})", b""), "invalid"),
        (array("'<f4'", f"({'9' * 5000},)", b""), "invalid"),
        (array("'<f4'", f"({'1,' * 65})", bytes(4)), "invalid"),
        (array("'<f4'", "(__import__('os').getpid(),)", bytes(4)), "invalid"),
        (array("'<f4'", f"({'-' * 50_000}1,)", bytes(4)), "invalid"),
        (array("'<f4'", "(" * 50_000, bytes(4)), "invalid"),
        (array(f"{'[' * 150}{']' * 150}", "(1,)", bytes(4)), "invalid"),
        (array(f"{'(' * 60}'<f4'{', (1,))' * 60}", "(1,)", bytes(4)), "unknown"),
        (array("'<f4', {}: 1", "(1,)", bytes(4)), "invalid"),
        (array("'<f4', 'more': 1", "(1,)", bytes(4)), "invalid"),
        (b"\x93NUMPY\x09\x00\x06\x00{}   \n", "unknown"),
        (b"\x93NUMPY\x01\x00\xff\xff{}", "invalid"),
        (b"\x93NUMPY\x02\x00\x00\x00\x08\x00" + bytes(1 << 19), "unknown"),
        (b"\x93NUMPY\x02\x00" + struct.pack("<L", 100_001) + b"1" * 100_000 + b"!", "invalid"),  # at once
    ],
)
def test_unusual_headers_give_the_expected_state(data: bytes, state: str) -> None:
    assert check_bytes(data, "a.npy").state == state


def test_each_byte_of_a_header_is_checked() -> None:
    assert states(flipped(ARRAY, 10), "a.npy") == {"invalid", "unknown"}
    found = [check_bytes(text, "a.npy") for text in flipped(ARRAY, 128)]
    assert {each.state for each in found} == {"valid", "invalid", "unknown"}
    assert all(each.format == "npy" for each in found)
    # what stays valid: another kind of number of the same length, the order, blanks, and lengths with the same product
    assert all(each.records is not None for each in found if each.state == "valid")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_each_array_of_an_archive_must_have_its_stated_length(method: int) -> None:
    whole = {"a.npy": ARRAY, "b.npy": array("'|u1'", "(6,)", bytes(6)), "o.npy": array("'|O'", "(9,)", b"N.")}
    reason = "only 0 of its 3 arrays were checked" if method == zipfile.ZIP_BZIP2 else None
    assert check_bytes(archive(whole, method)) == FileCheck("valid", "npz", reason, None if reason else 9)
    if reason is None:
        short = archive({**whole, "b.npy": whole["b.npy"][:-1]}, method)
        size = len(whole["b.npy"])
        expected = f"its member 'b.npy' describes {size} bytes, but has {size - 1}"
        assert check_bytes(short) == FileCheck("invalid", "npy", expected)
        assert check_bytes(archive({"a.npy": b"text"}, method), "a.npz").state == "invalid"


def test_an_archive_without_arrays_is_valid() -> None:
    assert check_bytes(archive({}), "a.npz") == FileCheck("valid", "npz")
    assert check_bytes(archive({"a.txt": b"a"}), "a.npz") == FileCheck("valid", "zip", "contains no array")


def test_only_some_of_many_arrays_are_checked() -> None:
    many = archive({f"{number}.npy": ARRAY for number in range(300)})
    assert check_bytes(many) == FileCheck("valid", "npz", "only 256 of its 300 arrays were checked")


def test_a_compressed_array_that_would_be_huge_is_not_unpacked() -> None:
    bomb = archive({"a.npy": array("'|u1'", f"({1 << 26},)", bytes(1 << 26))}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 100_000
    assert check_bytes(bomb) == FileCheck("valid", "npz", None, 1 << 26)


@given(text=st.binary(max_size=300) | st.text("()[]{}',: 0123456789TrueFalsenL'\\\"<fi").map(str.encode))
@example(text=b"{'descr': '<f4', 'fortran_order': False, 'shape': (1_0,)}")
@example(text=b"{'descr': '\\d', 'fortran_order': False, 'shape': (1if 1else 2,)}")
def test_a_header_is_parsed_damaged_or_unknown(text: bytes) -> None:
    try:
        shape, item_bytes = parse_array_header(text)
    except (FileDamaged, CheckUndecided):
        return
    assert isinstance(shape, tuple)
    assert item_bytes is None or item_bytes >= 0
