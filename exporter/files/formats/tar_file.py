"""tar, as in NeMo's ``.nemo``: headers with checksums, walked from member to member up to the end mark."""

import re

from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "tar"
EXTENSIONS = (".tar", ".nemo")
BLOCK_BYTES = 512
END_BYTES = 2 * BLOCK_BYTES  # of zeros
RECORD_BYTES = 20 * BLOCK_BYTES  # tar and Python fill an archive with zeros up to a multiple of this
MOST_END_BYTES = 64 << 10  # of the zeros behind the end mark that are read
CHECKSUM = slice(148, 156)
SIZE = slice(124, 136)
_PAX_SIZE = re.compile(rb"(?:\A|\n)\d+ size=(\d{1,20})\n")
WITHOUT_DATA = b"123456"  # types of links, devices, directories and FIFOs
SPARSE = b"S"
OF_NEXT = b"x"  # what its header has no room for, such as a size above 8 GiB
OF_OTHERS = b"gLK"  # of all members, or a long name of the next
MOST_OF_NEXT_BYTES = 64 << 10  # read of it; paths are at most 4 KiB


def _octal(field: bytes) -> int | None:
    text = field.strip(b" \0")
    return int(text, 8) if text and not text.strip(b"01234567") else None


def _has_checksum(header: bytes) -> bool:
    return _octal(header[CHECKSUM]) == sum(header) - sum(header[CHECKSUM]) + 8 * ord(" ")


def _data_bytes(header: bytes) -> int | None:
    """Bytes of a member behind its header; None if the header says none."""
    if header[156:157] in WITHOUT_DATA and header[156]:
        return 0
    field = header[SIZE]
    return int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)


def claims(source: FileSource) -> bool:
    """Whether the first block is a header with a correct checksum."""
    header = source.head(BLOCK_BYTES)
    return len(header) == BLOCK_BYTES and any(header) and _has_checksum(header)


def inspect(source: FileSource) -> ValidFile:
    """Walk the headers. The contents of members have no checksums."""
    place, next_size = 0, None
    while place < source.size:
        header = source.read(place, BLOCK_BYTES)
        if not any(header):
            return _inspect_end(source, place)
        size = _data_bytes(header) if _has_checksum(header) else None
        if size is None:
            raise FileDamaged("has other data where a member should begin")
        if header[156:157] == SPARSE:
            raise CheckUndecided("has a sparse member, which is not checked")
        kind = header[156:157]
        if kind not in OF_NEXT + OF_OTHERS:
            size, next_size = size if next_size is None else next_size, None
        source.require(place + BLOCK_BYTES + size, "a member")
        if kind == OF_NEXT:
            found = _PAX_SIZE.search(source.read(place + BLOCK_BYTES, min(size, MOST_OF_NEXT_BYTES)))
            next_size = next_size if found is None else int(found[1])
        place += BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES
    if place > source.size:
        raise FileDamaged(f"ends {place - source.size} bytes before the end of a member")
    return ValidFile(NAME, None, "has no end mark: more members may follow", unfinished=True)


def _inspect_end(source: FileSource, place: int) -> ValidFile:
    source.require(place + END_BYTES, "its end mark")
    if any(source.read(place, min(source.size - place, MOST_END_BYTES))):
        raise FileDamaged("has other data behind its end")
    if source.size - place > MOST_END_BYTES:
        return ValidFile(NAME, None, f"only {MOST_END_BYTES >> 10} KiB behind its end were read")
    if source.size % RECORD_BYTES:
        return ValidFile(NAME, None, "is not filled up with zeros: its writer leaves them out, or its end is lost")
    return ValidFile(NAME)
