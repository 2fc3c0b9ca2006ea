"""Parquet: a footer at the end of the file that locates the columns of each row group.

Follows apache/parquet-format (README.md, parquet.thrift). The file starts and ends with ``PAR1``. Before the last one
come the footer and its length in four bytes. The footer is a ``FileMetaData`` in Thrift's compact protocol: a struct is
a list of fields and a zero byte. Each field is a byte with its type and number increment, then its value.
"""

from collections.abc import Iterator, Mapping

from exporter.files.formats.source import NO_FOOTER, CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "parquet"
EXTENSIONS = (".parquet", ".parq", ".pq")

MAGIC, ENCRYPTED_MAGIC = b"PAR1", b"PARE"
TAIL_BYTES = 8
FOOTER_BYTES = 1 << 18  # bytes of the footer read

VERSION, SCHEMA, ROWS, ROW_GROUPS = 1, 2, 3, 4  # fields of FileMetaData
GROUP_COLUMNS, GROUP_ROWS = 1, 3  # fields of RowGroup
CHUNK_FILE, CHUNK_DATA = 1, 3  # fields of ColumnChunk: its file if another one, and its ColumnMetaData
PACKED_BYTES, DATA_BEGIN, DICTIONARY_BEGIN = 7, 9, 11  # fields of ColumnMetaData
# fields of a struct to keep, with the fields of nested structs; None for a number or a text
Wanted = Mapping[int, "Wanted | None"]
ROW_GROUP_FIELDS: Wanted = {
    GROUP_COLUMNS: {CHUNK_FILE: None, CHUNK_DATA: dict.fromkeys((PACKED_BYTES, DATA_BEGIN, DICTIONARY_BEGIN))},
    GROUP_ROWS: None,
}

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
MOST_DEPTH = 16


class ThriftEnded(Exception):
    """The text ends within a value."""


def claims(source: FileSource) -> bool:
    """Whether it begins like a Parquet file."""
    return source.head(4) in (MAGIC, ENCRYPTED_MAGIC)


def inspect(source: FileSource) -> ValidFile:
    """Validate the footer, and that all columns end before it."""
    if source.size < len(MAGIC) + TAIL_BYTES:
        raise FileDamaged("has no footer: it was not completely written")
    tail = source.tail(TAIL_BYTES)
    magic = source.head(4)
    if tail[4:] != magic:
        raise FileDamaged(NO_FOOTER)
    if magic == ENCRYPTED_MAGIC:
        raise CheckUndecided("has an encrypted footer")
    length = int.from_bytes(tail[:4], "little")
    begin = source.size - TAIL_BYTES - length
    if begin < len(MAGIC):
        raise FileDamaged("has a footer length that does not fit the file")
    footer = ThriftCompact(source.read(begin, min(length, FOOTER_BYTES)))
    rows, groups, reason = None, 0, None
    seen = set()
    rows_of_groups = 0
    try:
        for field, kind in footer.fields():
            seen.add(field)
            if field == ROWS and kind in (I32, I64):
                rows = footer.number()
            elif field == ROW_GROUPS and kind == LIST:
                for group in footer.items(ROW_GROUP_FIELDS):
                    groups += 1
                    rows_of_groups += _check_group(group, begin, groups)
            else:
                footer.skip(kind)
    except ThriftEnded as error:
        if length <= FOOTER_BYTES:
            raise FileDamaged("has a footer that ends too early") from error
        if not {VERSION, SCHEMA} <= seen:
            raise CheckUndecided(f"has a footer of {length} bytes") from error
        reason = f"only {FOOTER_BYTES >> 10} KiB of its footer were checked"
    if (rows is None and reason is None) or not {VERSION, SCHEMA} <= seen or (rows or 0) < 0:
        raise FileDamaged("has a footer without schema and rows")
    if reason is None and rows != rows_of_groups:
        raise CheckUndecided(f"has {rows_of_groups} rows, but its footer says {rows}")
    return ValidFile(NAME, rows, reason)


def _check_group(group: object, footer: int, number: int) -> int:
    """Return the rows of a row group, after checking that its columns end before the footer."""
    columns = group.get(GROUP_COLUMNS) if isinstance(group, dict) else None
    rows = group.get(GROUP_ROWS) if isinstance(group, dict) else None
    if not isinstance(columns, list) or not isinstance(rows, int):
        raise FileDamaged(f"has no columns in row group {number}")
    for column in columns:
        data = column.get(CHUNK_DATA) if isinstance(column, dict) else None
        if not isinstance(data, dict) or CHUNK_FILE in column:
            continue  # encrypted, or in another file
        begins = [data.get(DATA_BEGIN), data.get(DICTIONARY_BEGIN) or None]
        begin = min((place for place in begins if isinstance(place, int)), default=None)
        packed = data.get(PACKED_BYTES)
        if begin is None or not isinstance(packed, int):
            raise FileDamaged(f"has a column without an offset in row group {number}")
        if begin < 0 or packed < 0 or begin + packed > footer:
            raise FileDamaged(f"has a column that ends after the footer begins, in row group {number}")
    return rows


class ThriftCompact:
    """Successive values in Thrift's compact protocol; raises ThriftEnded if the text ends within one."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._offset = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct; the caller reads or skips each value."""
        field = 0
        while top := self._byte():
            field = field + (top >> 4) if top >> 4 else self.number()
            yield field, top & 15

    def items(self, wanted: "Wanted | None", depth: int = 0) -> Iterator[object]:
        """Yield the values of a list: type and length, in one byte if short, then the items."""
        top = self._byte()
        count = top >> 4 if top >> 4 < 15 else self._varint()
        for _ in range(count):
            if top & 15 in (TRUE, FALSE):
                self._advance(1)
                yield None
            else:
                yield self.value(top & 15, wanted, depth + 1)

    def value(self, kind: int, wanted: "Wanted | None", depth: int = 0) -> object:
        """Return a number, a list, or the wanted fields of a struct; None for others."""
        if depth > MOST_DEPTH:
            raise FileDamaged("has a footer with structs nested too deeply")
        if kind in (I16, I32, I64):
            return self.number()
        if kind == LIST:
            return list(self.items(wanted, depth))
        if kind == STRUCT and wanted is not None:
            kept: dict[int, object] = {}
            for field, of_field in self.fields():
                if field in wanted:
                    kept[field] = self.value(of_field, wanted[field], depth + 1)
                else:
                    self.skip(of_field, depth + 1)
            return kept
        self.skip(kind, depth)
        return None

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skip a value."""
        if depth > MOST_DEPTH:
            raise FileDamaged("has a footer with structs nested too deeply")
        if kind in (I16, I32, I64):
            self._varint()
        elif kind in (BYTE, DOUBLE, BINARY):
            self._advance({BYTE: 1, DOUBLE: 8}.get(kind) or self._varint())
        elif kind in (LIST, SET):
            for _ in self.items(None, depth):
                pass
        elif kind == MAP:
            self._skip_map(depth)
        elif kind == STRUCT:
            for _, of_field in self.fields():
                self.skip(of_field, depth + 1)
        elif kind not in (TRUE, FALSE):  # booleans have no further bytes
            raise FileDamaged("has a footer with a value of unknown type")

    def _skip_map(self, depth: int) -> None:
        count = self._varint()
        kinds = self._byte() if count else 0
        for _ in range(count):
            for kind in (kinds >> 4, kinds & 15):
                if kind in (TRUE, FALSE):
                    self._advance(1)
                else:
                    self.skip(kind, depth + 1)

    def number(self) -> int:
        """Return a signed number in zigzag encoding: 0, -1, 1, -2, 2."""
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        """Return a number with seven bits per byte, lowest first; the highest bit means that more follow."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise FileDamaged("has a footer with a number that is too long")

    def _byte(self) -> int:
        at = self._offset
        self._advance(1)
        return self._text[at]

    def _advance(self, count: int) -> None:
        self._offset += count
        if self._offset > len(self._text):
            raise ThriftEnded
