"""ZIP archives, checked by their central directory. Nothing is unpacked.

Follows PKWARE's APPNOTE.TXT. Each member is a local header (4.3.7) and its bytes. The central directory (4.3.12)
follows, with one entry per member. The end record (4.3.16) comes last and locates the directory, so an archive whose
writer died lacks it. Archives above 4 GiB or 65535 members keep their numbers in a zip64 end record (4.3.14, 4.3.15)
and in an extra field of each entry (4.5.3).
"""

import re
import struct
from typing import NamedTuple

from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "zip"
EXTENSIONS = (".zip",)

LOCAL = struct.Struct("<4s5H3L2H")
ENTRY = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
LOCATOR = struct.Struct("<4sLQL")
WIDE_END = struct.Struct("<4sQ2H2L4Q")
LOCAL_MARK, ENTRY_MARK, END_MARK = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
LOCATOR_MARK, WIDE_END_MARK = b"PK\x06\x07", b"PK\x06\x06"
MOST_COMMENT_BYTES = 0xFFFF
WIDE = 0xFFFFFFFF  # placeholder for a number in the extra field
WIDE_FIELD = 1
SIZES_FOLLOW = 8  # flag of a local header whose sizes follow the member's bytes

SEVERAL_REASON = "contains several archives, or has other data before its directory"

DIRECTORY_BYTES = 1 << 19  # bytes of the central directory read: some 5000 members
LOCAL_HEADERS = 8  # local headers compared with the directory, including the first and the last


class ZipMember(NamedTuple):
    """One entry of the central directory."""

    name: str
    method: int  # 0 for stored bytes, 8 for deflate
    packed: int  # bytes in the archive
    size: int  # bytes when unpacked
    offset: int  # of its local header


class ZipDirectory(NamedTuple):
    """The central directory, or the first part of a very long one."""

    members: list[ZipMember]
    begin: int  # its start; each member ends before it
    reason: str | None  # which part was not read
    extra_bytes: int = 0  # after the end record and its comment


def claims(source: FileSource) -> bool:
    """Whether it begins with a member, or is an empty archive."""
    return source.head(4) in (LOCAL_MARK, END_MARK)


def inspect(source: FileSource) -> ValidFile:
    """Validate that directory and local headers agree."""
    directory = read_directory(source)
    reason = directory.reason
    if reason is None and directory.extra_bytes:
        reason = f"continues for {directory.extra_bytes} bytes after its end"
    return ValidFile(NAME, len(directory.members) if directory.reason is None else None, reason)


def first_name(source: FileSource) -> str:
    """Name of the first member, even if the directory is lost; empty without one."""
    top = source.head(LOCAL.size + 256)
    if not top.startswith(LOCAL_MARK) or len(top) < LOCAL.size:
        return ""
    length = LOCAL.unpack_from(top)[-2]
    return top[LOCAL.size : LOCAL.size + length].decode("utf-8", "replace")


def read_directory(source: FileSource) -> ZipDirectory:
    """Read all members, or the first of very many. Raises FileDamaged if one is misplaced."""
    count, size, begin, extra_bytes = _read_end(source)
    text = source.read(begin, min(size, DIRECTORY_BYTES))
    members: list[ZipMember] = []
    at = 0
    while at < len(text):
        found = _parse_entry(text, at)
        if found is None:
            break
        member, at = found
        if member.offset + LOCAL.size + member.packed > begin:
            raise FileDamaged(f"its member {member.name[:80]!r} does not fit before its directory")
        members.append(member)
    reason = None
    if len(text) < size:
        reason = f"only {len(members)} of its {count} members were checked"
    elif at != size or len(members) & 0xFFFF != count & 0xFFFF:  # writers without zip64 let the count overflow
        raise FileDamaged(f"has {len(members)} members in its directory, but its end record says {count}")
    step = max(1, (len(members) - 1) // (LOCAL_HEADERS - 1))
    for member in [*members[::step][:LOCAL_HEADERS], *members[-1:]]:
        if data_offset(source, member) + member.packed > begin:
            raise FileDamaged(f"its member {member.name[:80]!r} does not fit before its directory")
    return ZipDirectory(members, begin, reason, extra_bytes)


def require_end(directory: ZipDirectory) -> None:
    """Raise FileDamaged if anything follows the archive, which no library that writes arrays adds."""
    if directory.extra_bytes:
        raise FileDamaged(f"continues for {directory.extra_bytes} bytes after its end")


def data_offset(source: FileSource, member: ZipMember) -> int:
    """Start of a member's bytes. Raises FileDamaged if its local header belongs to another (4.3.7)."""
    mark, _, flags, _, _, _, _, packed, size, name_length, extra_length = LOCAL.unpack(
        source.read(member.offset, LOCAL.size)
    )
    if mark != LOCAL_MARK:
        raise FileDamaged(f"its member {member.name[:80]!r} is not where its directory says")
    name = source.read(member.offset + LOCAL.size, name_length)
    if _text(name) != member.name:
        raise FileDamaged(f"has {_text(name)[:80]!r} where its directory says {member.name[:80]!r}")
    if not flags & SIZES_FOLLOW and (packed not in (member.packed, WIDE) or size not in (member.size, WIDE)):
        raise FileDamaged(f"its member {member.name[:80]!r} does not have the length that its directory states")
    return int(member.offset + LOCAL.size + name_length + extra_length)


def _read_end(source: FileSource) -> tuple[int, int, int, int]:
    """Number of members, length and start of the central directory (4.3.14 to 4.3.16), and bytes after the archive."""
    place = source.size - END.size
    if not (source.tail(END.size).startswith(END_MARK) and source.tail(2) == b"\0\0"):
        place = _find_commented_end(source)
    disk, first_disk, _, count, size, begin, comment = END.unpack(source.read(place, END.size))[1:]
    directory_end = place
    wide_end = place - LOCATOR.size - WIDE_END.size
    if wide_end >= 0 and source.read(place - LOCATOR.size, 4) == LOCATOR_MARK:
        wide_place = LOCATOR.unpack(source.read(place - LOCATOR.size, LOCATOR.size))[2]
        if wide_place < wide_end and source.read(wide_end, 4) == WIDE_END_MARK:
            raise CheckUndecided(SEVERAL_REASON)
        found = WIDE_END.unpack(source.read(wide_place, WIDE_END.size))
        if found[0] != WIDE_END_MARK:
            raise FileDamaged("has no zip64 end record where its locator says")
        disk, first_disk, _, count, size, begin = found[4:]
        directory_end = wide_place
    if disk or first_disk:
        raise CheckUndecided("is one part of a multi-file archive")
    if begin + size > directory_end:
        raise FileDamaged("its directory does not fit before its end record")
    if begin + size < directory_end:
        raise CheckUndecided(SEVERAL_REASON)
    return count, size, begin, source.size - place - END.size - comment


def _find_commented_end(source: FileSource) -> int:
    """Find the end record, which a comment of up to 64 KiB may follow."""
    tail = source.tail(END.size + MOST_COMMENT_BYTES)
    at = tail.rfind(END_MARK)
    while at >= 0:
        comment_end = at + END.size
        if comment_end <= len(tail) and comment_end + int.from_bytes(tail[comment_end - 2 : comment_end], "little") <= (
            len(tail)
        ):
            return source.size - len(tail) + at
        at = tail.rfind(END_MARK, 0, at)
    raise FileDamaged("has no end record: it was not completely written, or its end is lost")


def _parse_entry(text: bytes, at: int) -> tuple[ZipMember, int] | None:
    """Return an entry of the directory (4.3.12) and the start of the next; None if the text ends before."""
    if at + ENTRY.size > len(text):
        return None
    fields = ENTRY.unpack_from(text, at)
    if fields[0] != ENTRY_MARK:
        raise FileDamaged("its directory has other data where an entry should begin")
    method, packed, size, name_length, extra_length, comment_length, offset = (
        *(fields[4], fields[8], fields[9]),
        *(fields[10], fields[11], fields[12], fields[16]),
    )
    begin = at + ENTRY.size
    extra = begin + name_length
    end = extra + extra_length + comment_length
    if end > len(text):
        return None
    name = _text(text[begin:extra])
    if WIDE in (size, packed, offset):
        size, packed, offset = _resolve_wide(text[extra : extra + extra_length], size, packed, offset)
    return ZipMember(name, method, packed, size, offset), end


def _resolve_wide(extra: bytes, *numbers: int) -> list[int]:
    """Replace numbers that did not fit by those in the extra field, in this order (4.5.3)."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == WIDE_FIELD:
            values = iter(re.findall(rb"(?s).{8}", extra[at + 4 : at + 4 + length]))
            missing = FileDamaged("its directory has a large member without its size")
            wide = []
            for number in numbers:
                value = next(values, None) if number == WIDE else number.to_bytes(8, "little")
                if value is None:
                    raise missing
                wide.append(int.from_bytes(value, "little"))
            return wide
        at += 4 + length
    return list(numbers)  # exactly 0xFFFFFFFF bytes


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")
