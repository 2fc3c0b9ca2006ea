"""Files of ``torch.save`` and ``torch.jit.save``: a ZIP archive, or pickles in a row before version 1.6.

No pickle is loaded: ``pickletools`` walks its opcodes, and no name in it is resolved or called. Follows
torch/serialization.py. An archive has one folder with ``data.pkl`` (the object, with references to storages),
``data/<key>`` (the bytes of each storage) and, written last, ``version``. The older format pickles a magic number, a
protocol version, facts of the machine, the object, and a list of storage keys. The storages follow in that order, each
an item count of eight bytes and the items.
"""

import io
import re
from collections.abc import Iterable

from exporter.files.formats import zip_file
from exporter.files.formats.pickles import PICKLE_ERRORS, PickleContents, walk_pickle
from exporter.files.formats.source import CheckUndecided, FileDamaged, FileSource, ValidFile

NAME = "torch"
EXTENSIONS = (".pt", ".pth", ".ckpt", ".bin")
LEGACY_NAME = "torch-legacy"

FIRST_MEMBER = re.compile(r"[^/]+/(data\.pkl|constants\.pkl|version|byteorder|\.data/.*|\.format_version|data/\d+)")
MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_BYTES = b"\x8a\x0a" + MAGIC.to_bytes(10, "little")  # the magic number as protocols 2 and above write it
PROTOCOL_VERSION = 1001
PICKLES_BYTES = (1 << 16, 1 << 19)  # bytes read for the pickles of one object: first try, second try
COUNT_BYTES = 8
# members of torch.package and torch.export archives, which torch writes in the same way
OTHER_ARCHIVES = (".data/extern_modules", "archive_format")

ITEM_BYTES = {
    **dict.fromkeys(("ByteStorage", "CharStorage", "BoolStorage", "UntypedStorage"), 1),
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    **dict.fromkeys(("ComplexDoubleStorage",), 16),
}


def claims(source: FileSource) -> bool:
    """Whether it begins like either format; the name decides for an ambiguous archive."""
    if source.head(4) == zip_file.LOCAL_MARK:
        known = FIRST_MEMBER.fullmatch(zip_file.first_name(source)) is not None
        return known or source.name.lower().endswith(EXTENSIONS)
    return _is_legacy(source.head(64))


def inspect(source: FileSource) -> ValidFile:
    """Validate an archive with all members that torch needs, or an object with all its storages."""
    return _check_archive(source) if source.head(4) == zip_file.LOCAL_MARK else _check_legacy(source)


def _is_legacy(top: bytes) -> bool:
    return top.startswith(b"\x80") and MAGIC_BYTES in top[:32]


def _check_archive(source: FileSource) -> ValidFile:
    directory = zip_file.read_directory(source)
    if source.name.lower().endswith(".distcp"):
        raise CheckUndecided("is part of a distributed checkpoint, whose file .metadata has its expected length")
    members = {member.name: member for member in directory.members}
    folder = directory.members[0].name.partition("/")[0] if directory.members else ""
    has_version = not members.keys().isdisjoint({f"{folder}/version", f"{folder}/.data/version"})
    if f"{folder}/data.pkl" not in members:
        if has_version and members.keys().isdisjoint({f"{folder}/{name}" for name in OTHER_ARCHIVES}):
            raise FileDamaged("has no data.pkl: torch.save failed before it wrote one")
        return ValidFile(zip_file.NAME, None, "is an archive that torch.save did not write")
    zip_file.require_end(directory)
    if directory.reason is not None:
        return ValidFile(NAME, None, directory.reason)
    if not has_version:
        raise FileDamaged("has no version member, which torch.save writes last")
    return ValidFile(NAME, None, _check_storages(source, members, folder))


def read_object(source: FileSource) -> PickleContents:
    """Return what an archive's object holds. Raises CheckUndecided if that cannot be read."""
    for member in zip_file.read_directory(source).members:
        if member.name.endswith("/data.pkl") and (walked := _walk_object(source, member)) is not None:
            return walked
    raise CheckUndecided("has no object that can be read")


def _walk_object(source: FileSource, pickled: zip_file.ZipMember) -> PickleContents | None:
    """Walk the object of an archive; None if it is too long."""
    if pickled.method or pickled.packed > PICKLES_BYTES[-1]:
        return None
    try:
        return walk_pickle(io.BytesIO(source.read(zip_file.data_offset(source, pickled), pickled.packed)))
    except PICKLE_ERRORS as error:
        raise FileDamaged("has a data.pkl that is not a pickle") from error


def _check_storages(source: FileSource, members: dict[str, zip_file.ZipMember], folder: str) -> str | None:
    """Raise FileDamaged if a storage is missing: torch closes the archive properly even when it fails.

    Returns the part that was not checked, or None.
    """
    walked = _walk_object(source, members[f"{folder}/data.pkl"])
    if walked is None:
        return "its required storages were not checked"
    for key, (kind, items) in _parse_storages(walked.persistent).items():
        member = members.get(f"{folder}/data/{key}")
        if member is None:
            raise FileDamaged(f"has no storage {key[:80]!r}: torch.save failed before it wrote it")
        if kind in ITEM_BYTES and member.size != items * ITEM_BYTES[kind]:
            raise FileDamaged(
                f"its storage {key[:80]!r} has {member.size} bytes, but its object has {items} items of {kind}"
            )
    return None


def _check_legacy(source: FileSource) -> ValidFile:
    """Check one or more objects with their storages: ``torch.save`` may be called again on an open file."""
    begin = 0
    while begin < source.size:
        left = source.size - begin
        if begin and not _is_legacy(source.read(begin, min(left, 64))):
            raise CheckUndecided(f"continues for {left} bytes after its last storage")
        begin = _object_end(source, begin)
    return ValidFile(LEGACY_NAME)


def _object_end(source: FileSource, begin: int) -> int:
    """Return where the last storage of the object at ``begin`` ends."""
    storages, keys, offset = _read_pickles(source, begin)
    for key in keys:
        if key not in storages:
            raise FileDamaged("lists a storage that its object does not have")
        kind, items = storages[key]
        if kind not in ITEM_BYTES:
            raise CheckUndecided(f"has a {kind}, whose item size is unknown")
        if offset + COUNT_BYTES > source.size:
            raise FileDamaged("ends before its last storage")
        count = int.from_bytes(source.read(offset, COUNT_BYTES), "little", signed=True)
        if count != items:
            raise FileDamaged(f"has a storage of {count} items, but its object has one of {items}")
        offset += COUNT_BYTES + count * ITEM_BYTES[kind]
        source.require(offset, "a storage")
    return offset


def _read_pickles(source: FileSource, begin: int) -> tuple[dict[str, tuple[str, int]], list[str], int]:
    """Return type and items of each storage by key, their keys in file order, and the start of the first."""
    left = source.size - begin
    for most in PICKLES_BYTES:
        text = source.read(begin, min(left, most))
        stream = io.BytesIO(text)
        try:
            magic, version, _, of_object, keys = (walk_pickle(stream) for _ in range(5))
        except PICKLE_ERRORS as error:
            if stream.tell() < len(text):
                raise FileDamaged("has other data where a pickle should be") from error
            if len(text) == left:
                raise FileDamaged("ends within its pickled object") from error
            continue  # it may be longer
        if magic.value != MAGIC or version.value != PROTOCOL_VERSION:
            raise FileDamaged("does not begin with the magic number and version of torch.save")
        return _parse_storages(of_object.persistent), _parse_keys(keys.value), begin + stream.tell()
    raise CheckUndecided(f"has a pickled object of more than {PICKLES_BYTES[-1] >> 10} KiB")


def _parse_storages(persistent: Iterable[object]) -> dict[str, tuple[str, int]]:
    """Parse ``('storage', type, key, location, items)``, with a sixth item in the older format; skip modules."""
    storages: dict[str, tuple[str, int]] = {}
    for found in persistent:
        if not isinstance(found, tuple) or not found:
            raise FileDamaged("has an object with an empty reference")
        if found[0] == "storage":
            kind, key, items = (found[1], found[2], found[4]) if len(found) in (5, 6) else (None, None, None)
            if not (isinstance(kind, str) and isinstance(key, str) and isinstance(items, int)):
                raise FileDamaged("has an object whose storages are unknown")
            storages.setdefault(key, (kind.rpartition(" ")[2], items))  # the first reference defines the type
    return storages


def _parse_keys(value: object) -> list[str]:
    keys = [key for key in value if isinstance(key, str)] if isinstance(value, list) else []
    if not isinstance(value, list) or len(keys) != len(value):
        raise FileDamaged("has no list of its storages")
    return keys
