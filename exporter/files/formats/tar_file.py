"""tar, as in NeMo's ``.nemo``: headers with checksums, walked from member to member up to the end mark."""

from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "tar"
EXTENSIONS = (".tar", ".nemo")
BLOCK_BYTES = 512
END_BYTES = 2 * BLOCK_BYTES  # of zeros
RECORD_BYTES = 20 * BLOCK_BYTES  # tar and Python fill an archive with zeros up to a multiple of this
MOST_END_BYTES = 64 << 10  # of the zeros behind the end mark that are read
CHECKSUM = slice(148, 156)
SIZE = slice(124, 136)
WITHOUT_DATA = b"123456"  # types of links, devices, directories and FIFOs
SPARSE = b"S"


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
    place = 0
    while place < source.size:
        header = source.read(place, BLOCK_BYTES)
        if not any(header):
            return _inspect_end(source, place)
        size = _data_bytes(header) if _has_checksum(header) else None
        if size is None:
            raise FileDamaged("has other data where a member should begin")
        if header[156:157] == SPARSE:
            raise CheckUndecided("has a sparse member, which is not checked")
        source.require(place + BLOCK_BYTES + size, "a member")
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
