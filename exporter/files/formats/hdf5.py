"""HDF5: whether the file reaches the end given in its superblock, and the rows of its datasets.

Follows the HDF5 File Format Specification (sections by number). A superblock (II.A) holds the end of the file and the
root group. It is at the top, or after a user block of 512, 1024, 2048, ... bytes. It is written on close or flush, so
data written after a flush lies beyond that end.
"""

import struct
from typing import NamedTuple

from exporter.files.formats.hdf5_objects import DRIVER_INFO, ObjectHeaders, UnsupportedLayout, lookup3, parse_address
from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "hdf5"
EXTENSIONS = (".h5", ".hdf5", ".he5", ".h5ad", ".loom")

SIGNATURE = b"\x89HDF\r\n\x1a\n"
USER_BLOCK_BYTES = 512
MOST_USER_BLOCKS = 32
SUPERBLOCK_BYTES = 128  # enough for each version
OPEN_FOR_WRITING = 1 | 4  # consistency flags of a file that its writer has not closed


class Superblock(NamedTuple):
    """Contents of a superblock."""

    base: int  # byte of the file from which addresses count
    end: int  # size of the whole file, including a user block
    root: int | None  # address of the root group
    address_bytes: int
    length_bytes: int
    is_open: bool  # whether it is marked as open for writing
    several_files: bool  # whether it describes a file spread over several
    extension: int | None


def claims(source: FileSource) -> bool:
    """Whether there is a signature at a permitted place."""
    return _find_signature(source) is not None


def inspect(source: FileSource) -> ValidFile:
    """Validate that the file ends where its superblock says, and that its root group is readable."""
    place = _find_signature(source)
    if place is None:
        raise FileDamaged("does not begin like an HDF5 file")
    block = parse_superblock(source.read(place, min(SUPERBLOCK_BYTES, source.size - place)), place)
    objects = ObjectHeaders(source, block.base, block.address_bytes, block.length_bytes)
    if block.is_open:
        return ValidFile(NAME, None, "is not closed: its superblock says that it is open for writing", unfinished=True)
    if block.several_files or _has_driver(objects, block.extension):
        raise CheckUndecided("is one of several files that belong together")
    if source.size < block.end:
        raise FileDamaged(f"ends {block.end - source.size} bytes too early")
    if source.size > block.end:
        raise CheckUndecided(
            f"continues for {source.size - block.end} bytes after its end: its writer has not closed it"
        )
    if block.root is None:
        raise FileDamaged("has no root group")
    try:
        return ValidFile(NAME, objects.rows(block.root))
    except (struct.error, IndexError) as error:
        raise FileDamaged("has a root group with a damaged object") from error
    except (UnsupportedLayout, CheckUndecided):
        return ValidFile(NAME)


def _has_driver(objects: ObjectHeaders, extension: int | None) -> bool:
    """Whether a superblock's extension (II.C) says that the file is spread over several (IV.A.2.u)."""
    try:
        return extension is not None and any(each.kind == DRIVER_INFO for each in objects.messages(extension))
    except (UnsupportedLayout, FileDamaged, CheckUndecided, struct.error, IndexError):
        return False


def _find_signature(source: FileSource) -> int | None:
    """Find the superblock; beyond the top, search only files with an HDF5 extension."""
    if source.head(len(SIGNATURE)) == SIGNATURE:
        return 0
    if source.name.lower().endswith(EXTENSIONS):
        for doubling in range(MOST_USER_BLOCKS):
            place = USER_BLOCK_BYTES << doubling
            if place + len(SIGNATURE) > source.size:
                break
            if source.read(place, len(SIGNATURE)) == SIGNATURE:
                return place
    return None


def parse_superblock(text: bytes, offset: int) -> Superblock:
    """Parse the superblock at this place of the file (II.A)."""
    if len(text) < 20:
        raise FileDamaged("ends within its superblock")
    version = text[8]
    if version > 3:
        raise CheckUndecided(f"has a superblock of unknown version {version}")
    old = version < 2
    size, length_bytes = (text[13], text[14]) if old else (text[9], text[10])
    if size not in (2, 4, 8) or length_bytes not in (2, 4, 8):
        raise FileDamaged("has a superblock with impossible lengths")
    # base, free space or extension, end of file, driver or root; old versions add name and address of the root
    begin, count = {0: (24, 6), 1: (28, 6)}.get(version, (12, 4))
    end = begin + count * size
    if len(text) < end + 4:
        raise FileDamaged("ends within its superblock")
    if old and (text[9] or text[10] or text[12] or not all(struct.unpack_from("<2H", text, 16))):
        raise FileDamaged("has a superblock with impossible version numbers")
    if not old and lookup3(text[:end]) != int.from_bytes(text[end : end + 4], "little"):
        raise FileDamaged("has a superblock with a wrong checksum")
    addresses = [parse_address(text[at : at + size], size) for at in range(begin, end, size)]
    base, second, eof, fourth = addresses[:4]
    if base is None or eof is None:
        raise FileDamaged("has a superblock without an end-of-file address")
    return Superblock(
        base=offset,
        end=eof - base + offset,  # like the library, in case a user block was prepended
        root=addresses[-1],
        address_bytes=size,
        length_bytes=length_bytes,
        is_open=version == 3 and bool(text[11] & OPEN_FOR_WRITING),
        several_files=old and fourth is not None,
        extension=None if old else second,
    )
