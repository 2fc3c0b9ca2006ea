"""safetensors: a header that locates the tensors, and their bytes.

Follows the README of huggingface/safetensors and its ``SafeTensors::read_metadata``. Eight bytes hold the length of the
header, which is JSON. The tensors follow without gaps up to the end of the file.

``{"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}``
"""

import json
import math
from typing import NamedTuple, TypeGuard

from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "safetensors"
EXTENSIONS = (".safetensors",)

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000  # limit of the library
MOST_DIMENSIONS = 64
ITEM_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class TensorEntry(NamedTuple):
    """Place of a tensor, counted from the end of the header."""

    begin: int
    end: int
    name: str


def claims(source: FileSource) -> bool:
    """Whether a plausible length is followed by the opening brace of a header."""
    top = source.head(LENGTH_BYTES + 1)
    return top[LENGTH_BYTES:] == b"{" and 2 <= int.from_bytes(top[:LENGTH_BYTES], "little") <= MOST_HEADER_BYTES


def inspect(source: FileSource) -> ValidFile:
    """Validate that tensors match their types and shapes, and fill the file without gaps."""
    end = 0
    for tensor in sorted(read_tensors(source)):
        if tensor.begin != end:
            raise FileDamaged(f"its tensor {tensor.name[:80]!r} does not begin where the previous one ends")
        end = tensor.end
    begin = LENGTH_BYTES + int.from_bytes(source.head(LENGTH_BYTES), "little")
    source.require(begin + end, "its last tensor")
    if begin + end < source.size:
        raise FileDamaged(f"continues for {source.size - begin - end} bytes after its last tensor")
    return ValidFile(NAME)


def read_tensors(source: FileSource) -> list[TensorEntry]:
    """Return all tensors of the file."""
    return parse_tensor_header(_read_header(source))


def read_names(source: FileSource) -> set[str]:
    """Return the names of all tensors, also of those that share the bytes of another, as tied embeddings do.

    Of these, programs that save a model leave only a note in the metadata: ``{"lm_head.weight": "embed.weight"}``.
    """
    header = _read_header(source)
    notes = _parse_fields(header).get("__metadata__")
    return {tensor.name for tensor in parse_tensor_header(header)} | (set(notes) if isinstance(notes, dict) else set())


def _read_header(source: FileSource) -> bytes:
    length = int.from_bytes(source.read(0, LENGTH_BYTES), "little")
    if length > MOST_HEADER_BYTES:
        raise FileDamaged("begins with an impossible header length")
    source.require(LENGTH_BYTES + length, "its header")
    return source.read(LENGTH_BYTES, length)


def parse_tensor_header(header: bytes) -> list[TensorEntry]:
    """Return all tensors that a header describes."""
    return [_parse_tensor(name, field) for name, field in _parse_fields(header).items() if name != "__metadata__"]


def _parse_fields(header: bytes) -> dict[str, object]:
    try:
        fields = json.loads(header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileDamaged("has a header that is not JSON") from error
    if not isinstance(fields, dict):
        raise FileDamaged("has a header that is not a JSON object")
    return fields


def _parse_tensor(name: str, field: object) -> TensorEntry:
    if not isinstance(field, dict):
        raise FileDamaged(f"its tensor {name[:80]!r} is not described by an object")
    dtype, shape, offsets = field.get("dtype"), field.get("shape"), field.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise FileDamaged(f"its tensor {name[:80]!r} has no valid type, shape and offsets")
    if dtype not in ITEM_BITS:
        raise CheckUndecided(f"has a tensor of type {dtype[:80]!r}, whose item size is unknown")
    if len(shape) > MOST_DIMENSIONS:
        raise CheckUndecided(f"has a tensor of {len(shape)} dimensions")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * ITEM_BITS[dtype]:
        raise FileDamaged(f"its tensor {name[:80]!r} does not have the length that its type and shape require")
    return TensorEntry(begin, end, name)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(count) is int and 0 <= count < 1 << 63 for count in value)
