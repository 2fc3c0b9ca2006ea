"""Arrow files, including Feather version 2, and streams, checked by the messages that frame the data.

Follows the Arrow Columnar Format, "Serialization and Interprocess Communication". A stream is messages up to an empty
one. A message is ``FF FF FF FF``, the length of its metadata, the metadata and the body. The metadata is a flatbuffer
that includes the body's length. A file is ``ARROW1``, a stream, a footer, its length, and ``ARROW1``. The footer is a
flatbuffer with the place of each batch of rows. Before version 0.15, messages began with the length.
"""

import struct
from typing import NamedTuple

from exporter.files.formats.source import NO_FOOTER, CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "arrow"
EXTENSIONS = (".arrow", ".arrows", ".feather")
STREAM_NAME = "arrow-stream"

MAGIC, OLD_FEATHER = b"ARROW1", b"FEA1"
FILE_BEGIN = 8
CONTINUATION = b"\xff\xff\xff\xff"
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
KINDS = range(1, 6)  # kinds of messages, including tensors, which are written one by one without a stream
PEEK_BYTES = 128  # first read of a message; usually enough of its metadata
BLOCK = struct.Struct("<qi4xq")
FOOTER_BYTES = 1 << 18
MOST_BATCHES = 2000  # batches read in one file
PARSE_ERRORS = (struct.error, IndexError)


class FlatbufferTable:
    """A table of a flatbuffer, with fields by number, found through its vtable."""

    def __init__(self, text: bytes, offset: int) -> None:
        self._text = text
        self._offset = offset
        self._fields = offset - self._unpack("<i", offset)

    @classmethod
    def root(cls, text: bytes) -> "FlatbufferTable":
        """Return the root table of a flatbuffer."""
        return cls(text, struct.unpack_from("<I", text)[0])

    def number(self, field: int, form: str) -> int:
        """Return a number in the table; 0 if omitted."""
        at = self._field_offset(field)
        return self._unpack(form, at) if at else 0

    def table(self, field: int) -> "FlatbufferTable | None":
        """Return another table that a field refers to."""
        at = self._field_offset(field)
        return FlatbufferTable(self._text, at + self._unpack("<I", at)) if at else None

    def blocks(self, field: int) -> list[tuple[int, int, int]]:
        """Return a vector of structs ``Block``: place, metadata length and body length of a message."""
        at = self._field_offset(field)
        if not at:
            return []
        begin = at + self._unpack("<I", at)
        count = self._unpack("<I", begin)
        if begin + 4 + count * BLOCK.size > len(self._text):
            raise IndexError
        return list(BLOCK.iter_unpack(self._text[begin + 4 : begin + 4 + count * BLOCK.size]))

    def _field_offset(self, field: int) -> int:
        at = 4 + 2 * field
        if at + 2 > self._unpack("<H", self._fields):
            return 0
        offset = self._unpack("<H", self._fields + at)
        return self._offset + offset if offset else 0

    def _unpack(self, form: str, offset: int) -> int:
        if offset < 0:
            raise IndexError
        return int(struct.unpack_from(form, self._text, offset)[0])


class ArrowMessage(NamedTuple):
    """A message that frames data."""

    kind: int
    end: int  # start of the next message
    rows: int


def claims(source: FileSource) -> bool:
    """Whether it begins like a file, or its first message describes columns."""
    if source.head(len(MAGIC)) == MAGIC or source.head(4) == OLD_FEATHER:
        return True
    named, marked = source.name.lower().endswith(EXTENSIONS), source.head(4) == CONTINUATION
    if named == marked:
        return marked
    try:
        first = read_message(source, 0)
    except (FileDamaged, CheckUndecided):
        return False
    return first is not None and first.kind == SCHEMA


def inspect(source: FileSource) -> ValidFile:
    """Validate a file whose batches lie before its footer, or a stream up to its end."""
    if source.head(4) == OLD_FEATHER:
        if source.tail(4) != OLD_FEATHER:
            raise FileDamaged(NO_FOOTER)
        raise CheckUndecided("is Feather version 1, which is not checked")
    return _check_file(source) if source.head(len(MAGIC)) == MAGIC else _check_stream(source)


def _check_file(source: FileSource) -> ValidFile:
    tail = source.tail(4 + len(MAGIC))
    if source.size < FILE_BEGIN + len(tail) or not tail.endswith(MAGIC):
        raise FileDamaged(NO_FOOTER)
    length = int.from_bytes(tail[:4], "little", signed=True)
    begin = source.size - len(tail) - length
    if length <= 0 or begin < FILE_BEGIN:
        raise FileDamaged("has a footer length that does not fit the file")
    if length > FOOTER_BYTES:
        raise CheckUndecided(f"has a footer of {length} bytes")
    try:
        footer = FlatbufferTable.root(source.read(begin, length))
        schema, dictionaries, batches = footer.table(1), footer.blocks(2), footer.blocks(3)
    except PARSE_ERRORS as error:
        raise FileDamaged("has a damaged footer") from error
    if schema is None:
        raise FileDamaged("has a footer without schema")
    for number, (offset, metadata, body) in enumerate(dictionaries + batches):
        if offset < FILE_BEGIN or metadata <= 0 or body < 0 or offset + metadata + body > begin:
            raise FileDamaged(f"its batch {number} does not fit before the footer")
    rows = 0
    for number, (offset, _, _) in enumerate(batches):
        if number == MOST_BATCHES:
            return ValidFile(NAME, None, f"only {number} of its {len(batches)} batches were checked")
        message = read_message(source, offset)
        if message is None or message.kind != BATCH or message.end > begin:
            raise FileDamaged(f"has other data where its batch {number} should be")
        rows += message.rows
    return ValidFile(NAME, rows)


def _check_stream(source: FileSource) -> ValidFile:
    rows = 0
    offset = 0
    first = True
    while offset < source.size:
        message = read_message(source, offset)
        if message is None:
            return _end_stream(source, offset, rows)
        if first != (message.kind == SCHEMA):
            raise FileDamaged("has no schema at its beginning, or another one later")
        first = False
        rows += message.rows
        offset = message.end
        source.require(offset, "a message")
    raise CheckUndecided("ends after a message, without an end-of-stream marker")


def _end_stream(source: FileSource, offset: int, rows: int) -> ValidFile:
    end = offset + (8 if source.read(offset, 4) == CONTINUATION else 4)
    if not offset:
        raise FileDamaged("is a stream without a schema")
    if end < source.size:
        raise CheckUndecided(f"continues for {source.size - end} bytes after the end of its stream")
    return ValidFile(STREAM_NAME, rows)


def read_message(source: FileSource, offset: int) -> ArrowMessage | None:
    """Read the message at this offset; None for the empty one that ends a stream."""
    top = source.read(offset, min(source.size - offset, PEEK_BYTES))
    begin = 8 if top[:4] == CONTINUATION else 4
    if len(top) < begin:
        raise FileDamaged("ends within a message")
    length = int.from_bytes(top[begin - 4 : begin], "little", signed=True)
    if length == 0:
        return None
    if length < 0:
        raise FileDamaged("has other data where a message should be")
    body = offset + begin + length
    source.require(body, "a message")
    try:
        return _parse(top[begin : begin + length], body)
    except PARSE_ERRORS:
        pass  # the metadata is longer, or damaged
    try:
        return _parse(source.read(offset + begin, length), body)
    except PARSE_ERRORS as error:
        raise FileDamaged("has other data where a message should be") from error


def _parse(metadata: bytes, body: int) -> ArrowMessage:
    """Parse the flatbuffer ``Message``: version, kind of header, header, length of the body."""
    table = FlatbufferTable.root(metadata)
    kind, header, length = table.number(1, "<B"), table.table(2), table.number(3, "<q")
    if kind not in KINDS or header is None or length < 0:
        raise IndexError
    rows = header.number(0, "<q") if kind == BATCH else 0
    if rows < 0:
        raise IndexError
    return ArrowMessage(kind, body + length, rows)
