"""Whether each file of a checkpoint is whole: by its own format, and by what others state about it."""

import os
import re
import struct
from collections.abc import Generator

from exporter.contract.status import DamagedFile
from exporter.files.checkpoints.entries import FROM_EARLIER_JOB, CheckpointEntry, CheckpointFile
from exporter.files.checkpoints.layouts_reader import (
    DISTCP_INDEX,
    MOST_INDEX_BYTES,
    TENSOR_INDEXES,
    ends_with_checksum,
    index_ends,
    index_paths,
    parse_distcp_metadata,
    parse_shard_index,
    parse_tensor_index,
    read_text,
    tensor_names,
)
from exporter.files.checkpoints.names import FORMLESS, NEEDED_TEXT, is_marker, is_part
from exporter.files.formats import FileCheck, check_file, hdf5, json_text
from exporter.files.formats.pickles import PICKLE_ERRORS
from exporter.files.formats.source import (
    CheckUndecided,
    FileDamaged,
    FileSource,
    NotRegularFile,
    open_source,
    printable,
)
from exporter.files.formats.tfrecord import crc32c
from exporter.files.formats.zstd_file import MAGIC as ZSTD_MAGIC
from exporter.files.formats.zstd_file import frame_end

BESIDE = "beside"  # state of a file that no layout demands, such as a log or a note

_BINARY = (
    *(".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".npz", ".npy", ".h5", ".hdf5", ".msgpack", ".zarr"),
    *(".pkl", ".gguf", ".onnx", ".keras", ".model", ".pb", ".pdparams", ".ubj"),
)
_MAY_BE_RAW = ".bin"  # numbers without a header; the first may be zeros
_CHUNK = re.compile(r"(?:^|/)(?:c|(?:c[/.])?\d+(?:[/.]\d+)*)$")
_BTREE = re.compile(r"(?:^|/)(?:manifest\.ocdbt|d/[0-9a-f]{32})$")
_BTREE_MAGICS = (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde", b"\x0c\xdb\x12\x34")  # manifest, node, versions
ZEROS_BYTES = 4096
_NO_CHUNK = (1 << 64) - 1  # length of a chunk that a Zarr shard leaves out
BTREE = "ocdbt"


def check_part(folder: str, path: str, *, inside: bool, end: int | None = None) -> FileCheck:
    """Check one file of a checkpoint; ``inside`` means in its directory, and ``end`` is its length according to others.

    Raises NotRegularFile if it is gone or cannot be read.
    """
    if inside and not is_part(path):
        return FileCheck(BESIDE, None)  # it may be written to forever
    with open_source(folder, path) as source:
        if not source.size and is_marker(path) and not path.endswith(DISTCP_INDEX):
            return FileCheck(BESIDE, None)
        found = _check(source, path, end, folder)
        if found.state == "unfinished" and found.format == hdf5.NAME:
            return found._replace(state="unknown")  # its writer may be active
        is_unread_index = source.size > MOST_INDEX_BYTES and any(index_paths((path,)))
        if (found.state, found.format) == ("valid", json_text.NAME) and not is_unread_index:
            found = found._replace(reason=None)  # the ends of a long text prove as much as a header does for weights
        is_lost = found.state == "unfinished" or (
            found.state == "empty" and (not inside or end is not None or _needs_content(path))
        )
        return found._replace(state="invalid") if is_lost else found


def part_result(folder: str, path: str, *, inside: bool, end: int | None = None) -> FileCheck | None:
    """The same as ``check_part``, but None if the file is gone, and unknown if it cannot be read."""
    try:
        return check_part(folder, path, inside=inside, end=end)
    except NotRegularFile as error:
        return FileCheck("unknown", None, printable(str(error))) if error.is_unreadable else None


def is_unproven(found: FileCheck) -> bool:
    """Whether the check did not prove the whole part valid."""
    return found.state in ("unknown", "empty") or (found.state == "valid" and found.reason is not None)


def part_flaw(path: str, found: FileCheck) -> DamagedFile:
    """The part and its defect."""
    return DamagedFile(printable(path), found.format, printable(found.reason or ""))


def _needs_content(path: str) -> bool:
    return path.lower().endswith(_BINARY) or any(
        pattern.search(path)
        for pattern in (NEEDED_TEXT, _CHUNK, _BTREE, re.compile(r"/\.metadata$|\.data-\d{5}-of-\d{5}$"))
    )


def _check(source: FileSource, path: str, end: int | None, folder: str) -> FileCheck:
    if NEEDED_TEXT.search(path) and not path.endswith(".json"):
        source.name = f"{path}.json"  # the content is, whatever the name says
    if end is not None and source.size and source.size < end:
        return FileCheck("invalid", None, f"ends {end - source.size} bytes too early")
    try:
        if source.size and path.endswith(f"/{DISTCP_INDEX}"):
            return _check_distcp_index(source)
        if source.size and path.endswith(TENSOR_INDEXES):
            return _check_tensor_index(source, folder, path)
        if source.size and _BTREE.search(path):
            return _check_btree(source)
        if source.size and end is None and (chunk := _CHUNK.search(path)):
            array = _read_array(folder, os.path.join(path[: chunk.start()], "zarr.json"))
            if length := parse_shard_index(array):
                return _check_zarr_shard(source, length)
            if ends_with_checksum(array):
                return _check_zarr_checksum(source)
            if source.head(2) == b"\2\1" and source.size >= 16:
                return _check_blosc(source)
            if source.head(4) == ZSTD_MAGIC.to_bytes(4, "little") and (after := source.size - frame_end(source, 4)):
                raise FileDamaged(f"continues for {after} bytes after its values")
        found = check_file(source)
        if found.state == "unknown" and _is_erased(source):
            return FileCheck("invalid", None, "contains only zeros, as if it was never written")
        if found.state == "unknown" and FORMLESS.search(path) and any(source.head(ZEROS_BYTES)):
            return FileCheck(BESIDE, None)
    except FileDamaged as damage:
        return FileCheck("invalid", None, str(damage))
    except (CheckUndecided, OSError) as doubt:
        return FileCheck("unknown", None, str(doubt))
    if found.state == "unknown" and end is not None and (found.format or not path.endswith(".distcp")):
        if source.size == end:
            return FileCheck("valid", found.format or "raw")
        return found._replace(reason=f"continues for {source.size - end} bytes after its last item")
    return found


def _check_tensor_index(source: FileSource, folder: str, path: str) -> FileCheck:
    """Check an index of Hugging Face, and whether each shard has the tensors that it is said to have."""
    found = check_file(source)
    if found.state != "valid":
        return found
    try:
        tensors = parse_tensor_index(read_text(folder, path))
    except (NotRegularFile, CheckUndecided):
        return found  # too long
    if not tensors:
        raise FileDamaged("names no tensor")
    doubt = None
    for shard, expected in tensors.items():
        try:
            with open_source(folder, os.path.join(os.path.dirname(path), shard)) as part:
                held = tensor_names(part) or expected
        except (NotRegularFile, FileDamaged, CheckUndecided, OSError, *PICKLE_ERRORS):
            continue  # its own check says so
        if expected <= held:
            continue
        text = f"names the tensor {min(expected - held)[:80]!r} in {shard}, which has none of this name"
        if held - expected:
            raise FileDamaged(text)  # the shard of another number or model
        doubt = doubt or text  # one that shares the memory of another may have been left out
    if doubt is not None:
        raise CheckUndecided(doubt)
    return found


def _is_erased(source: FileSource) -> bool:
    """Whether a binary file begins with zeros, as when its blocks never reached the disk."""
    name = source.name.lower()
    if not source.size or not name.endswith(_BINARY) or any(source.head(ZEROS_BYTES)):
        return False
    return not (name.endswith(_MAY_BE_RAW) and any(source.tail(ZEROS_BYTES)))


def _check_distcp_index(source: FileSource) -> FileCheck:
    if source.head(1) != b"\x80":
        raise FileDamaged("does not begin like a pickle")
    if source.tail(1) != b".":
        raise FileDamaged("has no end: it was not completely written, or its end is lost")
    if parse_distcp_metadata(source.read(0, source.size)) is None:
        raise FileDamaged("is not a pickle of one object")
    return FileCheck("valid", "pickle")


def _read_array(folder: str, path: str) -> bytes:
    try:
        return read_text(folder, path)
    except (NotRegularFile, OSError):
        return b""  # chunks of Zarr 2


def _check_zarr_shard(source: FileSource, length: int) -> FileCheck:
    """Check the index at the end of a shard: offset and length of each chunk, and a checksum."""
    if source.size < length:
        raise FileDamaged(f"ends {length - source.size} bytes too early")
    index = source.tail(length)
    if crc32c(index[:-4]) != int.from_bytes(index[-4:], "little"):
        raise FileDamaged("has an index of chunks whose checksum is wrong")
    numbers = struct.unpack(f"<{length // 8}Q", index[:-4])
    ends = [begin + size for begin, size in zip(numbers[::2], numbers[1::2], strict=True) if size != _NO_CHUNK]
    if (end := max(ends, default=0)) > source.size - length:
        raise FileDamaged("has an index of chunks that lie behind its end")
    if end < source.size - length:
        raise CheckUndecided(f"has {source.size - length - end} bytes that belong to no chunk")
    return FileCheck("valid", "zarr shard")


def _check_zarr_checksum(source: FileSource) -> FileCheck:
    """Check a chunk that ends with the checksum of all its bytes before, whatever they are."""
    if crc32c(source.read(0, max(0, source.size - 4))) != int.from_bytes(source.tail(4), "little"):
        raise FileDamaged("has a wrong checksum")
    return FileCheck("valid", "zarr chunk")


def _check_blosc(source: FileSource) -> FileCheck:
    packed = int.from_bytes(source.head(16)[12:], "little")
    if packed != source.size:
        raise FileDamaged(f"has {source.size} bytes, but its header says {packed}")
    return FileCheck("valid", "blosc")


def _check_btree(source: FileSource) -> FileCheck:
    """Check a file of TensorStore's OCDBT: nodes with length and checksum, between them values that Zarr packed."""
    place = 0
    while place < source.size:
        left = source.size - place
        magic = source.read(place, min(4, left))
        if magic in _BTREE_MAGICS:
            length = int.from_bytes(source.read(place + 4, 8), "little")
            if length < 16:
                raise FileDamaged("has a node of an impossible length")
            source.require(place + length, "a node")
            body = source.read(place, length)
            if crc32c(body[:-4]) != int.from_bytes(body[-4:], "little"):
                raise FileDamaged("has a node whose checksum is wrong")
            place += length
        elif magic == ZSTD_MAGIC.to_bytes(4, "little"):
            place = frame_end(source, place + 4)
        elif source.name.endswith("manifest.ocdbt") or left < 4:
            raise FileDamaged("has other data where a node should be")
        else:
            raise CheckUndecided("has values in a form that is not checked")
    if source.name.endswith("manifest.ocdbt"):
        return FileCheck("unknown", BTREE, "lists in a compressed form which data files there must be")
    return FileCheck("valid", BTREE)


def check_entry(folder: str, entry: CheckpointEntry, since: float = 0.0) -> Generator[None, None, CheckpointEntry]:
    """Check all files of an entry that is no longer written, yielding after each.

    Damage in a file older than ``since`` (epoch seconds) is only a doubt: an earlier job left it.
    """
    ends = index_ends(entry.indexes)
    files: list[CheckpointFile] = []
    damaged, unproven, valid = list[DamagedFile](), list[DamagedFile](), 0
    for file in entry.files:
        yield
        found = (
            None
            if file.temporary
            else part_result(folder, file.path, inside=entry.is_directory, end=ends.get(file.path))
        )
        if found is None:
            continue
        files.append(file)
        valid += found.state == "valid"
        flaw = part_flaw(file.path, found)
        if found.state == "invalid" and file.mtime >= since:
            damaged.append(flaw)
        elif found.state == "invalid":
            unproven.append(flaw._replace(reason=FROM_EARLIER_JOB))
        elif is_unproven(found):
            unproven.append(flaw)
    return entry._replace(
        files=tuple(files), valid=valid, checked=len(files), damaged=tuple(damaged), unproven=tuple(unproven)
    )
