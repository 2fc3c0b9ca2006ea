"""Whether a file is valid, checked without loading it: by the lengths, checksums and ends of its format.

The first bytes decide the format; the name is a hint and the last resort. Nothing is unpickled, and at most
``source.MOST_BYTES`` are read. An undecided file is "unknown".
"""

import re
import struct
import zlib
from typing import NamedTuple, Protocol

from exporter.files.formats import (
    arrow,
    csv_text,
    gzip_file,
    hdf5,
    json_lines,
    json_text,
    numpy_file,
    parquet,
    safetensors,
    tar_file,
    tfrecord,
    torch_file,
    zip_file,
    zstd_file,
)
from exporter.files.formats.source import (
    FIRST_BYTES,
    CheckUndecided,
    FileDamaged,
    FileSource,
    ValidFile,
    printable,
)


class FileCheck(NamedTuple):
    """Check result of a file."""

    state: str  # one of valid, invalid, empty, unfinished (only its last line is half-written), unknown
    format: str | None
    reason: str | None = None  # for every state but valid, or what part of a valid file was not read
    records: int | None = None  # rows or items, if a header, a footer or a small text gives them


class FileFormat(Protocol):
    """Interface of a format module."""

    @property
    def NAME(self) -> str:  # noqa: N802 -- a constant of the module
        """Name in a check result."""

    @property
    def EXTENSIONS(self) -> tuple[str, ...]:  # noqa: N802
        """Extensions of its files, in lower case."""

    def claims(self, source: FileSource) -> bool:
        """Whether the file begins like this format. Cheap."""

    def inspect(self, source: FileSource) -> ValidFile:
        """Validate the file; raises FileDamaged or CheckUndecided."""


BINARY_FORMATS: tuple[FileFormat, ...] = (
    # some of these share a ZIP archive, so zip comes last
    *(gzip_file, zstd_file, hdf5, parquet, numpy_file, torch_file, zip_file),
    *(tar_file, tfrecord, arrow, safetensors),  # without a magic number, the most structured beginning first
)
TEXT_FORMATS: tuple[FileFormat, ...] = (json_text, json_lines, csv_text)
JSON_FORMATS: tuple[FileFormat, ...] = (json_text, json_lines)  # a file of one kind may be named like the other
AMBIGUOUS_EXTENSIONS = (".bin", ".ckpt", ".dat", ".model")  # extensions that say nothing about the format
SHARED_TEXT_EXTENSIONS = (".pth", ".arrows")  # extensions of text files too: Python's path lists, readline's keys
# extensions also used without a magic number: raw items, members of a file family, parts of an archive
RAW_EXTENSIONS = (".npy", *hdf5.EXTENSIONS, *zip_file.EXTENSIONS)
# magic numbers of those formats
MAGIC_NUMBERS = {numpy_file.NAME: numpy_file.MAGIC, hdf5.NAME: hdf5.SIGNATURE, zip_file.NAME: zip_file.LOCAL_MARK}
NEAR = 3  # near a magic number: one byte in this many differs, or this many first bytes match
UNCHECKED_MAGICS = (
    *((b"\x80" + bytes((protocol,)), "a pickle") for protocol in range(2, 6)),
    *((b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"\x04\x22\x4d\x18", "LZ4"), (b"GGUF", "GGUF"), (b"CDF", "NetCDF")),
    *((b"SQLite format 3\0", "SQLite"), (b"MATLAB 5.0", "MATLAB"), (b"\x7fELF", "a program"), (b"%PDF", "PDF")),
    *((b"\x89PNG", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"RIFF", "RIFF"), (b"OggS", "Ogg"), (b"fLaC", "FLAC")),
)  # magic numbers of files that are not checked, whatever their name
SHARD = re.compile(r"-\d+-of-\d+$")  # follows the extension in the name of a shard
LONGEST_REASON = 300
HOSTILE_ERRORS = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError),
    *(ValueError, struct.error, zlib.error),
)  # errors that arbitrary bytes may cause


def check_file(source: FileSource) -> FileCheck:
    """Check whether the file is valid. Does not raise: an unreadable file is unknown."""
    if not source.size:
        return FileCheck("empty", None, "is empty")
    try:
        return _check(source)
    except OSError as error:
        return FileCheck("unknown", None, error.strerror or "cannot be read")


def _check(source: FileSource) -> FileCheck:
    name = SHARD.sub("", source.name.lower())
    for known in BINARY_FORMATS:
        if _claims(known, source):
            result = _check_format(known, source)
            if result.state != "invalid" or name.endswith(known.EXTENSIONS) or not _may_match_by_chance(known, source):
                return result
    for known in TEXT_FORMATS:
        if name.endswith(known.EXTENSIONS):
            return _check_text(known, source)
    if beginning := _unchecked_kind(source, name):
        return FileCheck("unknown", None, f"begins like {beginning}, which is not checked")
    for known in BINARY_FORMATS:
        if name.endswith(known.EXTENSIONS) and not name.endswith(AMBIGUOUS_EXTENSIONS):
            extension = max((hint for hint in known.EXTENSIONS if name.endswith(hint)), key=len)
            reason = f"is named {extension}, but does not begin like one"
            if extension in RAW_EXTENSIONS and not _is_near(source.head(FIRST_BYTES), MAGIC_NUMBERS[known.NAME]):
                return FileCheck("unknown", None, reason)
            return FileCheck("invalid", known.NAME, reason)
    for known in JSON_FORMATS:
        if _claims(known, source) and _has_values(result := _check_format(known, source)):
            return result
    return FileCheck("unknown", None, "has an unknown format")


def _claims(file_format: FileFormat, source: FileSource) -> bool:
    try:
        return file_format.claims(source)
    except (FileDamaged, CheckUndecided, *HOSTILE_ERRORS):
        return False


def _check_format(file_format: FileFormat, source: FileSource) -> FileCheck:
    try:
        found = file_format.inspect(source)
    except FileDamaged as damage:
        return FileCheck("invalid", file_format.NAME, _reason_text(str(damage)))
    except CheckUndecided as doubt:
        return FileCheck("unknown", file_format.NAME, _reason_text(str(doubt)))
    except HOSTILE_ERRORS as error:
        return FileCheck("unknown", file_format.NAME, f"could not be parsed ({type(error).__name__})")
    reason = None if found.reason is None else _reason_text(found.reason)
    return FileCheck("unfinished" if found.unfinished else "valid", found.format, reason, found.records)


def _is_near(top: bytes, beginning: bytes) -> bool:
    """Whether a file without this magic number was meant to have it: few bytes differ, or it is short or all NUL."""
    if not top.strip(b"\0"):
        return True
    differ = sum(one != other for one, other in zip(top, beginning, strict=False))
    if len(top) < len(beginning):
        return not differ
    return differ <= len(beginning) // NEAR or top.startswith(beginning[:NEAR])


def _check_text(named: FileFormat, source: FileSource) -> FileCheck:
    """Check as the format of its name, or as the other kind of JSON if it is a valid one.

    If overlong lines leave the first check undecided, reading both ends of the other kind does not decide it either.
    """
    result = _check_format(named, source)
    if result.state != "valid" and named in JSON_FORMATS:
        for known in JSON_FORMATS:
            if known is not named and _has_values(other := _check_format(known, source)):
                return result if result.state == "unknown" and other.reason is not None else other
    return result


def _has_values(verdict: FileCheck) -> bool:
    """Whether it has at least one complete value, which makes this format likely."""
    return verdict.state in ("valid", "unfinished") and (verdict.format != json_lines.NAME or verdict.records != 0)


def _may_match_by_chance(file_format: FileFormat, source: FileSource) -> bool:
    """Whether other files may begin like this by chance: text, or anything if there is no magic number."""
    return file_format is safetensors or _is_plain_text(source)


def _is_plain_text(source: FileSource) -> bool:
    """Whether the file begins like text without special characters."""
    return bool(re.fullmatch(rb"[\t\n\r -~\x80-\xff]*[\n -~]", source.head(FIRST_BYTES)))


def _unchecked_kind(source: FileSource, name: str) -> str | None:
    top = source.head(FIRST_BYTES)
    if name.endswith(SHARED_TEXT_EXTENSIONS) and _is_plain_text(source):
        return "a text"
    if name.endswith(tfrecord.EXTENSIONS) and top[:1] == b"x" and len(top) > 1 and not int.from_bytes(top[:2]) % 31:
        return "zlib"
    return next((name for magic, name in UNCHECKED_MAGICS if top.startswith(magic)), None)


def _reason_text(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."
