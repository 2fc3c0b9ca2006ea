"""Facts about very many files, in some thirty bytes each.

A file is identified by the hash of its name, its *key*. Names cost more than all facts together, so they are not kept.
Two of a million names have the same 64-bit hash once in thirty million folders.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from struct import Struct
from struct import error as StructError  # noqa: N812 -- an exception
from typing import NamedTuple

MOST_ROWS = 512  # rows of one block: inserting moves the later rows of its block
SEEN = 0x80  # flag of the table itself: whether a row was seen or written since `start_marking`
_UNSEEN = bytes(flags & ~SEEN for flags in range(256))
LARGE = -0x8000  # stands for the owner of a file whose row is in `_large`

_ROW = Struct("<dIIhHB")  # mtime, size, inode, owner, records + 1, flags
_INODE, _FLAGS = Struct("<I"), _ROW.size - 1
_INODE_PLACE = 12


class FileRow(NamedTuple):
    """One file; ``flags`` belong to the user of the table, up to 0x7f."""

    mtime: float
    size: int
    inode: int  # see `folded_inode`
    owner: int
    records: int = -1
    flags: int = 0


def folded_inode(inode: int) -> int:
    """An inode number in 32 bits."""
    return (inode ^ inode >> 32) & 0xFFFFFFFF


class _Block:
    """Rows of neighbouring keys."""

    __slots__ = ("keys", "rows")

    def __init__(self, keys: "array[int]", rows: bytearray) -> None:
        self.keys, self.rows = keys, rows


class FileTable:
    """Rows by key, in sorted blocks."""

    def __init__(self) -> None:
        self._blocks = [_Block(array("q"), bytearray())]
        self._starts = [-(1 << 63)]  # lowest key that each block may hold
        self._large: dict[int, FileRow] = {}  # rows with a number too large for a packed row
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def _place(self, key: int) -> tuple[_Block, int]:
        """Block for a key, and its place there."""
        block = self._blocks[bisect_right(self._starts, key) - 1]
        return block, bisect_left(block.keys, key)

    def get(self, key: int) -> FileRow | None:
        """Return the row of a key, or None."""
        block, place = self._place(key)
        if place == len(block.keys) or block.keys[place] != key:
            return None
        mtime, size, inode, owner, records, flags = _ROW.unpack_from(block.rows, place * _ROW.size)
        if owner == LARGE:
            return self._large[key]
        return FileRow(mtime, size, inode, owner, records - 1, flags & ~SEEN)

    def __getitem__(self, key: int) -> FileRow:
        row = self.get(key)
        if row is None:
            raise KeyError(key)
        return row

    def put(self, key: int, row: FileRow) -> None:
        """Add a row, or replace it."""
        mtime, size, inode, owner, records, flags = row
        if self._large:
            self._large.pop(key, None)
        try:
            packed = _ROW.pack(mtime, size, inode, owner, records + 1, flags | SEEN)
        except StructError:
            packed = _ROW.pack(mtime, 0, inode, LARGE, 0, flags | SEEN)
            self._large[key] = row
        block, place = self._place(key)
        at = place * _ROW.size
        if place < len(block.keys) and block.keys[place] == key:
            block.rows[at : at + _ROW.size] = packed
            return
        block.keys.insert(place, key)
        block.rows[at:at] = packed
        self._size += 1
        if len(block.keys) > MOST_ROWS:
            self._split(block)

    def _split(self, block: _Block) -> None:
        index, half = bisect_right(self._starts, block.keys[0]) - 1, len(block.keys) // 2
        upper = _Block(block.keys[half:], block.rows[half * _ROW.size :])
        block.keys, block.rows = block.keys[:half], block.rows[: half * _ROW.size]
        self._blocks.insert(index + 1, upper)
        self._starts.insert(index + 1, upper.keys[0])

    def remove(self, key: int) -> None:
        """Remove an existing row."""
        block, place = self._place(key)
        del block.keys[place]
        del block.rows[place * _ROW.size : (place + 1) * _ROW.size]
        self._large.pop(key, None)
        self._size -= 1

    def clear(self) -> None:
        """Remove all rows."""
        empty = FileTable()
        self._blocks, self._starts, self._large, self._size = empty._blocks, empty._starts, {}, 0

    def rows(self) -> Iterator[tuple[int, FileRow]]:
        """All rows; they may be replaced meanwhile, but none added or removed."""
        for block in self._blocks:
            for key, facts in zip(block.keys, _ROW.iter_unpack(bytes(block.rows)), strict=True):
                mtime, size, inode, owner, records, flags = facts
                if owner == LARGE:
                    yield key, self._large[key]
                else:
                    yield key, FileRow(mtime, size, inode, owner, records - 1, flags & ~SEEN)

    # Which rows are still needed

    def start_marking(self) -> None:
        """Take all rows as unseen."""
        for block in self._blocks:
            block.rows[_FLAGS :: _ROW.size] = block.rows[_FLAGS :: _ROW.size].translate(_UNSEEN)

    def see(self, key: int) -> int | None:
        """Mark a row as seen and return its inode, or None without a row."""
        block, place = self._place(key)
        if place == len(block.keys) or block.keys[place] != key:
            return None
        at = place * _ROW.size
        block.rows[at + _FLAGS] |= SEEN
        inode: int = _INODE.unpack_from(block.rows, at + _INODE_PLACE)[0]
        return inode

    def unseen(self) -> list[int]:
        """Keys of rows that were neither seen nor written since `start_marking`."""
        return [
            key
            for block in self._blocks
            for key, flags in zip(block.keys, block.rows[_FLAGS :: _ROW.size], strict=True)
            if not flags & SEEN
        ]
