"""Zstandard (RFC 8878): headers of all frames and blocks, up to the end. Nothing is unpacked."""

import struct

from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "zstd"
EXTENSIONS = (".zst", ".zstd")
MAGIC = 0xFD2FB528
OLD_MAGICS = range(0xFD2FB51E, 0xFD2FB528)  # versions before 0.8, with other frames
SKIPPABLE_MAGICS = range(0x184D2A50, 0x184D2A60)  # frames without data, such as an index; LZ4 has them too
FIRST_READ_BYTES = 128 << 10  # read at once from the top
MOST_BLOCK_BYTES = 128 << 10
RAW, REPEATED, COMPRESSED, RESERVED = range(4)


def claims(source: FileSource) -> bool:
    """Whether it begins with a frame."""
    magic = int.from_bytes(source.head(4), "little") if source.size >= 4 else 0
    return magic == MAGIC or magic in OLD_MAGICS or magic in SKIPPABLE_MAGICS


def inspect(source: FileSource) -> ValidFile:
    """Validate that each frame has all blocks and its checksum, and the last ends with the file."""
    place, frames = 0, 0
    source.head(FIRST_READ_BYTES)
    while place < source.size:
        (magic,) = struct.unpack("<I", _read_part(source, place, 4))
        if magic == MAGIC:
            place = frame_end(source, place + 4)
            frames += 1
        elif magic in SKIPPABLE_MAGICS:
            (length,) = struct.unpack("<I", _read_part(source, place + 4, 4))
            place = _require_within(source, place + 8 + length)
        elif magic in OLD_MAGICS:
            raise CheckUndecided("is of a Zstandard version before 0.8")
        elif not frames and not source.name.lower().endswith(EXTENSIONS):
            raise CheckUndecided("begins with a skippable frame, but no Zstandard frame follows")
        else:
            raise FileDamaged(f"has {source.size - place} bytes at byte {place} that are not a frame")
    return ValidFile(NAME)


def _require_within(source: FileSource, offset: int) -> int:
    if offset > source.size:
        raise FileDamaged(f"ends at least {offset - source.size} bytes too early")
    return offset


def _read_part(source: FileSource, offset: int, length: int) -> bytes:
    return source.read(offset, _require_within(source, offset + length) - offset)


def frame_end(source: FileSource, offset: int) -> int:
    """Return the end of the frame whose magic number ends at ``offset``."""
    (flags,) = _read_part(source, offset, 1)
    if flags & 8:
        raise FileDamaged("has a reserved bit set in the header of a frame")
    single, has_checksum = bool(flags & 32), bool(flags & 4)
    dictionary_bytes = (0, 1, 2, 4)[flags & 3]
    size_bytes = (int(single), 2, 4, 8)[flags >> 6]
    offset += 1 + (not single) + dictionary_bytes
    content = int.from_bytes(_read_part(source, offset, size_bytes), "little") + (256 if size_bytes == 2 else 0)
    offset += size_bytes
    least = most = 0  # range of the unpacked size
    is_last = False
    while not is_last:
        header = int.from_bytes(_read_part(source, offset, 3), "little")
        is_last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
        if kind == RESERVED or (length > MOST_BLOCK_BYTES and kind != REPEATED):
            raise FileDamaged(f"the header of the block at byte {offset} is damaged")
        offset = _require_within(source, offset + 3 + (1 if kind == REPEATED else length))
        least += 0 if kind == COMPRESSED else length
        most += MOST_BLOCK_BYTES if kind == COMPRESSED else length
    if size_bytes and not least <= content <= most:
        raise FileDamaged(f"a frame declares {content} bytes, but its blocks give {least} to {most}")
    return _require_within(source, offset + 4 * has_checksum)
