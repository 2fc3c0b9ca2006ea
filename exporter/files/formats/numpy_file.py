"""NumPy files: one or more arrays (NPY), and archives of them from ``numpy.savez`` (NPZ).

Follows numpy.lib.format. An array is the magic, two bytes of version, the header's length, the header and the items.
The length has two bytes, or four from version 2 on. The header is the text of a Python dictionary; its type and shape
give the size of the items.
"""

import ast
import math
import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

from exporter.files.formats import zip_file
from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "npy"
EXTENSIONS = (".npy", ".npz")

MAGIC = b"\x93NUMPY"
VERSIONS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # bytes of the header length, by version
MOST_HEADER_BYTES = 1 << 18
MOST_DIMENSIONS = 64
MOST_FIELDS_DEPTH = 8
MOST_ARRAYS = 256  # headers read in one archive
MOST_BYTES_OF_ANY_FILE = 1 << 63

STRING = r"""[ub]?(?:'(?:[^'\\]|\\E)*+'|"(?:[^"\\]|\\E)*+")""".replace("E", r"""(?:[\\'"nrt]|x\w\w|u\w{4}|U\w{8})""")
# tokens of a header: no operator and no name, so it evaluates flat; matches without backtracking
LITERAL = re.compile(rf"(?:{STRING}|True|False|None|\d++|[\s{{}}()\[\],:]++)*+", re.ASCII)
PYTHON_2_LONG = re.compile(r"(?<=\d)L\b")
TYPE = re.compile(r"[<>|=]?(?:O\d*|([biufcmMSaUV])(\d+)(\[[^\]]*\])?)", re.ASCII)


class ArrayHeader(NamedTuple):
    """Parsed header of an array."""

    length: int  # bytes before its items
    shape: tuple[int, ...]
    item_bytes: int | None  # None for Python objects, whose length is unknown

    @property
    def end(self) -> int | None:
        """Size of the whole array in bytes."""
        if self.item_bytes is None:
            return None
        end = self.length + self.item_bytes * math.prod(self.shape)
        if end >= MOST_BYTES_OF_ANY_FILE:
            raise FileDamaged("describes an array that is larger than any file")
        return end


def claims(source: FileSource) -> bool:
    """Whether it begins like an array, or is an archive named NPZ or starting with an array."""
    if source.head(4) in (zip_file.LOCAL_MARK, zip_file.END_MARK):
        return source.name.lower().endswith(".npz") or zip_file.first_name(source).endswith(".npy")
    return source.head(len(MAGIC)) == MAGIC


def inspect(source: FileSource) -> ValidFile:
    """Validate that each array, in the file or archive, is as long as its type and shape say."""
    return _check_arrays(source) if source.head(len(MAGIC)) == MAGIC else _check_archive(source)


def _check_arrays(source: FileSource) -> ValidFile:
    """Check successive arrays: ``numpy.save`` may be called several times on one open file."""
    begin = 0
    records: int | None = None
    while begin < source.size:
        left = source.size - begin
        if begin and source.read(begin, min(left, len(MAGIC))) != MAGIC[:left]:
            raise CheckUndecided(f"continues for {left} bytes after its array")
        header = read_array_header(_reader(source, begin), left)
        if header.end is None:
            raise CheckUndecided("contains Python objects of unknown length")
        source.require(begin + header.end, "its array")
        records = header.shape[0] if header.shape and not begin else None
        begin += header.end
    return ValidFile(NAME, records)


def _reader(source: FileSource, begin: int) -> Callable[[int, int], bytes]:
    return lambda offset, length: source.read(begin + offset, length)


def _check_archive(source: FileSource) -> ValidFile:
    """Check an archive with one array per member; records are the rows of the longest."""
    directory = zip_file.read_directory(source)
    members = [member for member in directory.members if member.name.endswith(".npy")]
    if directory.members and not members:
        return ValidFile(zip_file.NAME, None, "contains no array")
    zip_file.require_end(directory)
    headers = [
        header for member in members[:MOST_ARRAYS] if (header := _read_member_header(source, member)) is not None
    ]
    reason = directory.reason
    if reason is None and len(headers) < len(members):
        reason = f"only {len(headers)} of its {len(members)} arrays were checked"
    records = max((header.shape[0] for header in headers if header.shape), default=None)
    return ValidFile("npz", None if reason else records, reason)


def _read_member_header(source: FileSource, member: zip_file.ZipMember) -> ArrayHeader | None:
    """Return the header of an array in an archive; None if its compression is unsupported or its header too long."""
    begin = zip_file.data_offset(source, member)
    if member.method == 0:
        if member.packed != member.size:
            raise FileDamaged(f"its member {member.name[:80]!r} is stored with two lengths")
        top = source.read(begin, min(member.packed, 256))
    elif member.method == 8:
        try:
            top = zlib.decompressobj(-zlib.MAX_WBITS).decompress(source.read(begin, min(member.packed, 1024)), 1024)
        except zlib.error as error:
            raise FileDamaged(f"its member {member.name[:80]!r} cannot be unpacked") from error
    else:
        return None

    def read(offset: int, length: int) -> bytes:
        if offset + length <= len(top):
            return top[offset : offset + length]
        if member.method:
            raise CheckUndecided("has a long header")
        return source.read(begin + offset, length)

    try:
        header = read_array_header(read, member.size)
        if header.end is not None and header.end != member.size:
            raise FileDamaged(f"describes {header.end} bytes, but has {member.size}")
    except FileDamaged as error:
        raise FileDamaged(f"its member {member.name[:80]!r} {error}") from error
    except CheckUndecided:
        return None
    return header


def read_array_header(read: Callable[[int, int], bytes], size: int) -> ArrayHeader:
    """Read the header at the top of an array of ``size`` bytes."""
    if size < len(MAGIC) + 4:
        raise FileDamaged("ends within its header")
    top = read(0, len(MAGIC) + 2)
    if not top.startswith(MAGIC):
        raise FileDamaged("does not begin like an array")
    width = VERSIONS.get((top[-2], top[-1]))
    if width is None:
        raise CheckUndecided(f"has unknown format version {top[-2]}.{top[-1]}")
    if size < len(top) + width:
        raise FileDamaged("ends within its header")
    length = int.from_bytes(read(len(top), width), "little")
    begin = len(top) + width
    if begin + length > size:
        raise FileDamaged("ends within its header")
    if length > MOST_HEADER_BYTES:
        raise CheckUndecided(f"has a header of {length} bytes")
    shape, item_bytes = parse_array_header(read(begin, length))
    return ArrayHeader(begin + length, shape, item_bytes)


def parse_array_header(header: bytes) -> tuple[tuple[int, ...], int | None]:
    """Return shape and item size from a header: ``{'descr': '<f4', 'fortran_order': False, ...}``."""
    try:
        text = PYTHON_2_LONG.sub("", header.decode("utf-8"))
    except UnicodeDecodeError:
        text = PYTHON_2_LONG.sub("", header.decode("latin-1"))  # versions 1 and 2
    if LITERAL.fullmatch(text) is None:
        raise FileDamaged("has a header that is not a dictionary")
    try:
        fields = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise FileDamaged("has a header that is not a dictionary") from error
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise FileDamaged("has a header without type, order and shape")
    shape = fields["shape"]
    if not isinstance(fields["fortran_order"], bool) or not _is_shape(shape):
        raise FileDamaged("has a header with an invalid order or shape")
    return shape, _item_bytes(fields["descr"], 0)


def _is_shape(shape: object) -> bool:
    whole = isinstance(shape, tuple) and all(type(length) is int and length >= 0 for length in shape)
    return whole and isinstance(shape, tuple) and len(shape) <= MOST_DIMENSIONS


def _item_bytes(descr: object, depth: int) -> int | None:
    """Bytes of one item: of ``'<f4'``, of fields ``[('x', '<f4'), ('y', '<i8', (2,))]``, or of ``('<f4', (3,))``."""
    if depth > MOST_FIELDS_DEPTH:
        raise CheckUndecided("has fields nested too deeply")
    if isinstance(descr, str):
        match = TYPE.fullmatch(descr)
        if match is None:
            raise CheckUndecided("has items of an unknown type")
        kind, length = match[1], match[2]
        return None if kind is None else int(length[:20]) * (4 if kind == "U" else 1)
    if isinstance(descr, tuple) and len(descr) == 2 and _is_shape(descr[1]):
        size = _item_bytes(descr[0], depth + 1)
        return None if size is None else size * math.prod(descr[1])
    if not isinstance(descr, list):
        raise CheckUndecided("has items of an unknown type")
    sizes = []
    for field in descr:
        if not isinstance(field, tuple) or len(field) not in (2, 3):
            raise FileDamaged("has a header with an invalid type")
        sizes.append(_item_bytes(field[1] if len(field) == 2 else (field[1], field[2]), depth + 1))
    return None if None in sizes else sum(size for size in sizes if size is not None)
