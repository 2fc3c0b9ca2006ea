"""Read objects of HDF5 files: the messages of an object header, and the objects of a group.

Follows the HDF5 File Format Specification (sections by number). An object header (IV.A.1) is a list of messages in one
or more blocks. A group has a symbol table, which is a B-tree of nodes with entries (III.A to III.C), or one message per
link. A dataset has messages for its dataspace and its layout, among others.
"""

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from exporter.files.formats.source import FileDamaged, FileSource

NIL, DATASPACE, LINK_INFO, LINK, LAYOUT = 0x00, 0x01, 0x02, 0x06, 0x08
CONTINUATION, SYMBOL_TABLE, DRIVER_INFO = 0x10, 0x11, 0x14
SHARED = 2  # flag of a message stored elsewhere

MOST_BLOCKS = 16  # blocks of one object header
MOST_HEADER_BYTES = 1 << 16
MOST_NODES = 64
MOST_OBJECTS = 256  # objects of the root group; with more, rows are unknown


class UnsupportedLayout(Exception):
    """A valid layout that we do not follow, so rows are unknown."""


class ObjectMessage(NamedTuple):
    """One message of an object header."""

    kind: int
    flags: int
    body: bytes


class ObjectHeaders:
    """Object headers and groups of one file.

    Addresses count from byte ``base``. Addresses and lengths are ``address_bytes`` and ``length_bytes`` wide.
    """

    def __init__(self, source: FileSource, base: int, address_bytes: int, length_bytes: int) -> None:
        self._source = source
        self._base = base
        self._address_bytes = address_bytes
        self._length_bytes = length_bytes

    def messages(self, address: int) -> list[ObjectMessage]:
        """Return all messages of an object header and its continuation blocks (IV.A.1)."""
        top = self._read(address, 16)
        if top.startswith(b"OHDR"):
            return self._messages_v2(address)
        if top[0] != 1:
            raise FileDamaged("has other data where an object should be")
        _, _, _, length = struct.unpack_from("<BxHLL", top)
        return self._parse_messages(self._read(address + 16, length), struct.Struct("<HHB3x"), b"")

    def rows(self, group: int) -> int | None:
        """Longest first dimension of the datasets in a group; None without a dataset.

        Raises FileDamaged when an object is missing, UnsupportedLayout when not all can be read.
        """
        longest = None
        for count, address in enumerate(self._children(group)):
            if count >= MOST_OBJECTS:
                raise UnsupportedLayout
            messages = self.messages(address)
            if any(message.kind == LAYOUT for message in messages):
                for message in messages:
                    if message.kind == DATASPACE:
                        length = self._first_dimension(message)
                        longest = length if longest is None else max(longest, length or 0)
        return longest

    def _first_dimension(self, message: ObjectMessage) -> int | None:
        """First dimension of a dataspace, version 1 or 2 (IV.A.2.b); None for a single value."""
        if message.flags & SHARED or message.body[0] not in (1, 2):
            raise UnsupportedLayout
        begin = 8 if message.body[0] == 1 else 4
        if not message.body[1]:
            return None
        length = message.body[begin : begin + self._length_bytes]
        if len(length) < self._length_bytes:
            raise UnsupportedLayout
        return int.from_bytes(length, "little")

    def _children(self, group: int) -> Iterator[int]:
        """Addresses of the objects in a group of either kind."""
        size = self._address_bytes
        for kind, _, body in self.messages(group):
            if kind == SYMBOL_TABLE:
                tree = parse_address(body[:size], size)
                if tree is not None:
                    yield from self._group_entries(tree)
            elif kind == LINK:
                address = self._link_target(body)
                if address is not None:
                    yield address
            elif kind == LINK_INFO:
                at = 2 + 8 * (body[1] & 1)
                if parse_address(body[at : at + size], size) is not None:
                    raise UnsupportedLayout  # its links are in a heap

    def _link_target(self, body: bytes) -> int | None:
        """Target of a hard link (IV.A.2.g); None for other links."""
        flags = body[1]
        at = 2
        if flags & 8:
            if body[at]:
                return None
            at += 1
        at += 8 * (flags >> 2 & 1) + (flags >> 4 & 1)
        width = 1 << (flags & 3)
        at += width + int.from_bytes(body[at : at + width], "little")
        size = self._address_bytes
        address = body[at : at + size]
        return parse_address(address, size) if len(address) == size else None

    def _group_entries(self, tree: int) -> Iterator[int]:
        """Object headers of the entries in a group's B-tree (III.A.1, III.B, III.C)."""
        size, lengths = self._address_bytes, self._length_bytes
        nodes, seen = [tree], 0
        while nodes:
            seen += 1
            if seen > MOST_NODES:
                raise UnsupportedLayout
            node = nodes.pop()
            top = self._read(node, 8)
            used = int.from_bytes(top[6:8], "little")
            if top.startswith(b"TREE") and top[4] == 0:
                keys_and_nodes = self._read(node + 8 + 2 * size, used * (lengths + size))
                begins = range(lengths, len(keys_and_nodes), lengths + size)
                nodes += [int.from_bytes(keys_and_nodes[at : at + size], "little") for at in begins]
            elif top.startswith(b"SNOD"):
                entries = self._read(node + 8, used * (2 * size + 24))
                for at in range(0, len(entries), 2 * size + 24):
                    is_soft_link = entries[at + 2 * size] == 2
                    if not is_soft_link:
                        yield int.from_bytes(entries[at + size : at + 2 * size], "little")
            else:
                raise FileDamaged("has other data where its list of objects should be")

    def _messages_v2(self, address: int) -> list[ObjectMessage]:
        """Messages of an object header of version 2, which has a checksum."""
        version, flags = self._read(address + 4, 2)
        if version != 2:
            raise FileDamaged("has other data where an object should be")
        width = 1 << (flags & 3)
        begin = 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1) + width
        length = int.from_bytes(self._read(address + begin - width, width), "little")
        header = self._read_checked(address, begin + length + 4)
        form = struct.Struct("<BHB2x" if flags & 4 else "<BHB")
        return self._parse_messages(header[begin:], form, b"OCHK")

    def _parse_messages(self, block: bytes, form: struct.Struct, mark: bytes) -> list[ObjectMessage]:
        """Messages of a block and its continuations, each after a header of this form."""
        messages: list[ObjectMessage] = []
        blocks = [block]
        for count, text in enumerate(blocks):
            if count >= MOST_BLOCKS:
                raise UnsupportedLayout
            at = 0
            while at + form.size <= len(text):
                kind, length, flags = form.unpack_from(text, at)
                body = text[at + form.size : at + form.size + length]
                at += form.size + length
                if at > len(text):
                    raise FileDamaged("has a message that does not fit into its object")
                if kind == CONTINUATION:
                    size, lengths = self._address_bytes, self._length_bytes
                    place = int.from_bytes(body[:size], "little")
                    more = int.from_bytes(body[size : size + lengths], "little")
                    if not mark:
                        blocks.append(self._read(place, more))
                    elif self._read(place, 4) != mark:
                        raise FileDamaged("has other data where an object should continue")
                    else:
                        blocks.append(self._read_checked(place, more)[4:])
                elif kind != NIL:
                    messages.append(ObjectMessage(kind, flags, body))
        return messages

    def _read_checked(self, address: int, length: int) -> bytes:
        """Return a block without the checksum at its end, after verifying it."""
        block = self._read(address, length)
        if lookup3(block[:-4]) != int.from_bytes(block[-4:], "little"):
            raise FileDamaged("has an object with a wrong checksum")
        return block[:-4]

    def _read(self, address: int, length: int) -> bytes:
        if length > MOST_HEADER_BYTES:
            raise UnsupportedLayout
        return self._source.read(self._base + address, length)


def parse_address(text: bytes, length: int) -> int | None:
    """Parse an address of ``length`` bytes; None if all bits are set."""
    address = int.from_bytes(text, "little")
    return None if address == (1 << 8 * length) - 1 else address


def lookup3(data: bytes) -> int:
    """Bob Jenkins' hash, the checksum of superblocks and object headers (``hashlittle`` of lookup3.c)."""
    a = b = c = 0xDEADBEEF + len(data) & 0xFFFFFFFF

    def turned(value: int, by: int) -> int:
        return (value << by | value >> 32 - by) & 0xFFFFFFFF

    blocks = max(0, math.ceil(len(data) / 12) - 1)  # the last block, full or not, is mixed in differently
    padded = data + bytes(-len(data) % 12)
    for x, y, z in struct.iter_unpack("<3L", padded[: 12 * blocks]):
        a, b, c = a + x & 0xFFFFFFFF, b + y & 0xFFFFFFFF, c + z & 0xFFFFFFFF
        a, c = (a - c & 0xFFFFFFFF) ^ turned(c, 4), c + b & 0xFFFFFFFF
        b, a = (b - a & 0xFFFFFFFF) ^ turned(a, 6), a + c & 0xFFFFFFFF
        c, b = (c - b & 0xFFFFFFFF) ^ turned(b, 8), b + a & 0xFFFFFFFF
        a, c = (a - c & 0xFFFFFFFF) ^ turned(c, 16), c + b & 0xFFFFFFFF
        b, a = (b - a & 0xFFFFFFFF) ^ turned(a, 19), a + c & 0xFFFFFFFF
        c, b = (c - b & 0xFFFFFFFF) ^ turned(b, 4), b + a & 0xFFFFFFFF
    if not data:
        return c
    x, y, z = struct.unpack_from("<3L", padded, 12 * blocks)
    a, b, c = a + x & 0xFFFFFFFF, b + y & 0xFFFFFFFF, c + z & 0xFFFFFFFF
    c = (c ^ b) - turned(b, 14) & 0xFFFFFFFF
    a = (a ^ c) - turned(c, 11) & 0xFFFFFFFF
    b = (b ^ a) - turned(a, 25) & 0xFFFFFFFF
    c = (c ^ b) - turned(b, 16) & 0xFFFFFFFF
    a = (a ^ c) - turned(c, 4) & 0xFFFFFFFF
    b = (b ^ a) - turned(a, 14) & 0xFFFFFFFF
    return int((c ^ b) - turned(b, 24) & 0xFFFFFFFF)
