"""TFRecord: records framed by a length and CRC-32C checksums, walked from the top and checked at the end."""

import struct

from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "tfrecord"
EXTENSIONS = (".tfrecord", ".tfrecords")
HEADER_BYTES = 12
FOOTER_BYTES = 4
WINDOW_BYTES = 32 << 10
WALKED_BYTES = 512 << 10  # read from the top; the end gets the rest of the limit
WALKED_READS = 1024
TAIL_BYTES = 128 << 10
CHECKED_BYTES = 64 << 10  # data compared with its checksums
UPPER_HALF = b"\0\0\0\0"  # upper half of every record length below 4 GiB
CASTAGNOLI = 0x82F63B78
MASK_DELTA = 0xA282EAD8


def _table() -> tuple[int, ...]:
    values = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (CASTAGNOLI if value & 1 else 0)
        values.append(value)
    return tuple(values)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C checksum."""
    crc = 0xFFFFFFFF
    for code in data:
        crc = _TABLE[(crc ^ code) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the checksum as TFRecord stores it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


def _parse_length(header: bytes) -> int | None:
    """Parse the length from a header; None if its checksum is wrong."""
    length, checksum = struct.unpack("<QI", header)
    return length if masked_crc32c(header[:8]) == checksum else None


def claims(source: FileSource) -> bool:
    """Whether the first length has a correct checksum, which occurs by chance in one of 2^32 files."""
    return source.size >= HEADER_BYTES and _parse_length(source.head(HEADER_BYTES)) is not None


def inspect(source: FileSource) -> ValidFile:
    """Count the records, if all can be walked."""
    walk = RecordWalk(source)
    if source.size <= WALKED_BYTES:
        source.head(source.size)
    while walk.offset < source.size and source.bytes_read <= WALKED_BYTES and source.reads <= WALKED_READS:
        walk.step()
    if walk.offset == source.size:
        return ValidFile(NAME, walk.records)
    _check_end(source)
    return ValidFile(NAME, None, f"only its first {walk.records} records and its last ones were checked")


class RecordWalk:
    """Walk from record to record."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self._window = b""
        self._start = 0  # of the window
        self._checked = 0
        self._has_small_records = True
        self.offset = 0
        self.records = 0

    def step(self) -> None:
        """Walk over one record. Raises FileDamaged when it is not whole."""
        source, number = self._source, self.records + 1
        if source.size - self.offset < HEADER_BYTES:
            raise FileDamaged(f"ends in the middle of the header of record {number}")
        length = _parse_length(self._read(self.offset, HEADER_BYTES))
        if length is None:
            raise FileDamaged(f"the length of record {number} does not match its checksum")
        data, end = self.offset + HEADER_BYTES, self.offset + HEADER_BYTES + length + FOOTER_BYTES
        source.require(end, f"record {number}")
        self._has_small_records = length < WINDOW_BYTES // 8
        if self._checked + length <= CHECKED_BYTES:
            self._checked += length
            text = self._read(data, length + FOOTER_BYTES)
            if masked_crc32c(text[:length]) != int.from_bytes(text[length:], "little"):
                raise FileDamaged(f"the data of record {number} does not match its checksum")
        self.offset, self.records = end, number

    def _read(self, offset: int, length: int) -> bytes:
        start = offset - self._start
        if start < 0 or start + length > len(self._window):
            most = max(length, WINDOW_BYTES if self._has_small_records else 0)
            self._window = self._source.read(offset, min(most, self._source.size - offset))
            self._start, start = offset, 0
        return self._window[start : start + length]


def _check_end(source: FileSource) -> None:
    """Find a record in the last bytes from which a chain leads exactly to the end of the file."""
    tail = source.tail(TAIL_BYTES)
    cut_by = place = 0
    while (upper := tail.find(UPPER_HALF, place + 4)) >= 0:
        place = upper - 4
        end, records = _follow_chain(tail, place)
        if records and end == len(tail):
            return
        if records > 1 and end + HEADER_BYTES > len(tail):
            cut_by = max(end - len(tail), 1)
        # no chain starts within one that was already followed
        place = end if records > 1 else place + 1
    if cut_by:
        raise FileDamaged(f"ends at least {cut_by} bytes before the end of its last record")
    raise CheckUndecided("its last record is longer than the part that was checked")


def _follow_chain(tail: bytes, offset: int) -> tuple[int, int]:
    """Return where the chain of records from here ends, and its length."""
    records = 0
    while offset + HEADER_BYTES <= len(tail):
        length = _parse_length(tail[offset : offset + HEADER_BYTES])
        if length is None:
            break
        offset, records = offset + HEADER_BYTES + length + FOOTER_BYTES, records + 1
    return offset, records
