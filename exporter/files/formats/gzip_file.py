"""gzip (RFC 1952): small files are unpacked to verify checksums, of large ones only the first part."""

import zlib

from exporter.files.formats.source import MOST_BYTES, CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "gzip"
EXTENSIONS = (".gz", ".gzip", ".tgz")
MAGIC = b"\x1f\x8b"
GZIP_WINDOW = 31  # for zlib: the largest window, with gzip header and checksum
FIRST_BYTES = 64 << 10  # unpacked of a file too large to read whole
PIECE_BYTES = 16 << 10
MOST_UNPACKED_BYTES = 64 << 20


def claims(source: FileSource) -> bool:
    """Whether it begins like a gzip file."""
    return source.head(len(MAGIC)) == MAGIC


def inspect(source: FileSource) -> ValidFile:
    """Validate that every member unpacks and matches its checksum and length."""
    whole = source.size <= MOST_BYTES
    data = memoryview(source.head(source.size if whole else FIRST_BYTES))
    place = unpacked = 0
    while place < len(data):
        if place and not data[place] and not data[place:].tobytes().strip(b"\0"):
            break  # padding, as on tape
        if data[place : place + 2] != MAGIC[: len(data) - place]:
            raise FileDamaged(f"has {source.size - place} bytes after its end that are not gzip data")
        used, made = _unpack(data[place:], MOST_UNPACKED_BYTES - unpacked, whole)
        place, unpacked = place + used, unpacked + made
    if not whole:
        raise CheckUndecided(f"only its first {FIRST_BYTES >> 10} KiB were checked")
    return ValidFile(NAME)


def _unpack(data: memoryview, most_bytes: int, has_all_data: bool) -> tuple[int, int]:
    """Unpack one member; return its packed and unpacked size."""
    engine = zlib.decompressobj(GZIP_WINDOW)
    taken = made = 0
    waiting = b""
    try:
        while not engine.eof:
            piece = waiting or data[taken : taken + PIECE_BYTES]
            taken += 0 if waiting else len(piece)
            out = len(engine.decompress(piece, PIECE_BYTES))
            made, waiting = made + out, engine.unconsumed_tail
            if made > most_bytes:
                raise CheckUndecided(f"is more than {MOST_UNPACKED_BYTES >> 20} MiB when unpacked")
            if not piece and not out and not engine.eof:
                if has_all_data:
                    raise FileDamaged("ends in the middle of its data")
                return taken, made
    except zlib.error as error:
        raise FileDamaged(f"cannot be unpacked: {str(error).rpartition(': ')[2]}") from error
    return taken - len(engine.unused_data), made
