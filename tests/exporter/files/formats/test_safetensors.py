"""Tensors with a header: contiguous, of the stated length, up to the end of the file."""

import json
import struct
from typing import Any

import pytest

from exporter.files.formats import FileCheck
from exporter.files.formats.safetensors import ITEM_BITS
from tests.exporter.files.formats.sample_files import sample
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

SAMPLE = sample("tensors.safetensors")
NAMED = "model-00001-of-00002.safetensors"
VALID = FileCheck("valid", "safetensors")


def tensors(header: object, data: bytes = b"", padding: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += padding
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_sample_is_valid_but_no_part_of_it() -> None:
    assert check_bytes(SAMPLE) == check_bytes(SAMPLE, NAMED) == VALID
    assert states(truncated(SAMPLE, 1000), NAMED) == {"invalid"}
    assert check_bytes(SAMPLE[:-1], NAMED).reason == "ends 1 bytes before the end of its last tensor"
    assert states(flipped(SAMPLE, 9), NAMED) == {"invalid"}
    assert states(flipped(SAMPLE, len(SAMPLE)), NAMED) <= {"valid", "invalid", "unknown"}


@pytest.mark.parametrize("dtype", ITEM_BITS)
def test_each_type_has_its_item_size(dtype: str) -> None:
    size = 8 * ITEM_BITS[dtype] // 8
    assert check_bytes(tensors({"a": entry(dtype, [2, 4], 0, size)}, bytes(size))) == VALID
    assert check_bytes(tensors({"a": entry(dtype, [2, 4], 0, size + 1)}, bytes(size + 1)), NAMED).state == "invalid"


def test_order_blanks_and_empty_tensors_do_not_matter() -> None:
    header = {
        "z": entry("U8", [3], 0, 3),
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [], 3, 7),
        "none": entry("F32", [5, 0], 3, 3),
    }
    assert check_bytes(tensors(header, bytes(7), b"   ")) == VALID
    assert check_bytes(tensors({})) == VALID


@pytest.mark.parametrize(
    ("header", "length", "state", "reason"),
    [
        ({"a": entry("U8", [3], 0, 3)}, 4, "invalid", "continues for 1 bytes after its last tensor"),
        ({"a": entry("U8", [3], 1, 4)}, 4, "invalid", "its tensor 'a' does not begin where the previous one ends"),
        ({"a": entry("U8", [3], 0, 3), "b": entry("U8", [3], 2, 5)}, 5, "invalid", "its tensor 'b' does not begin"),
        ({"a": entry("U8", [3], 0, 3), "b": entry("U8", [3], 4, 7)}, 7, "invalid", "its tensor 'b' does not begin"),
        (
            {"a": entry("U8", [4], 0, 3)},
            3,
            "invalid",
            "its tensor 'a' does not have the length that its type and shape require",
        ),
        (
            {"a": entry("F4", [3], 0, 1)},
            1,
            "invalid",
            "its tensor 'a' does not have the length that its type and shape require",
        ),
        ({"a": entry("U8", [-3, -1], 0, 3)}, 3, "invalid", "its tensor 'a' has no valid type, shape and offsets"),
        ({"a": entry("U8", [3.0], 0, 3)}, 3, "invalid", "its tensor 'a' has no valid type, shape and offsets"),
        ({"a": entry("U8", [True], False, True)}, 1, "invalid", "its tensor 'a' has no valid type, shape and offsets"),
        ({"a": entry("U8", [1 << 70, 0], 0, 0)}, 0, "invalid", "its tensor 'a' has no valid type, shape and offsets"),
        ({"a": {"dtype": "U8"}}, 0, "invalid", "its tensor 'a' has no valid type, shape and offsets"),
        ({"a": 5}, 0, "invalid", "its tensor 'a' is not described by an object"),
        ({"a": entry("U9", [3], 0, 3)}, 3, "unknown", "has a tensor of type 'U9', whose item"),
        ({"a": entry("U8", [1] * 65, 0, 1)}, 1, "unknown", "has a tensor of 65 dimensions"),
        (b'{"a": ', 0, "invalid", "has a header that is not JSON"),
        (b'{"a": "\xff"}', 0, "invalid", "has a header that is not JSON"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 0, "invalid", "has a header that is not JSON"),
        (b'{"a": ' + b"9" * 100_000 + b"}", 0, "invalid", "has a header that is not JSON"),
        (b"{".ljust(2 << 20), 0, "unknown", "cannot be checked by reading"),
    ],
)
def test_the_reason_names_the_defect(header: object, length: int, state: str, reason: str) -> None:
    found = check_bytes(tensors(header, bytes(length)), NAMED)
    assert (found.state, (found.reason or "")[: len(reason)]) == (state, reason)


def test_a_header_longer_than_the_file_or_the_limit_is_damage() -> None:
    reason = "ends 98 bytes before the end of its header"
    assert check_bytes(struct.pack("<Q", 100) + b"{}", NAMED) == FileCheck("invalid", "safetensors", reason)
    for length in (1 << 40, (1 << 64) - 1):
        assert check_bytes(struct.pack("<Q", length) + b"{}", NAMED).state == "invalid"
