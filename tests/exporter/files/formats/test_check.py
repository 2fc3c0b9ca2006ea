"""The detection of formats, and that any file gives a result."""

import ast
import gzip
import os
import resource
import struct
import sys
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files import formats
from exporter.files.formats import (
    AMBIGUOUS_EXTENSIONS,
    BINARY_FORMATS,
    RAW_EXTENSIONS,
    TEXT_FORMATS,
    FileCheck,
    check_file,
)
from exporter.files.formats.source import FileDamaged, FileSource, ValidFile, open_source
from tests.exporter.files.formats import test_arrow as arrow
from tests.exporter.files.formats import test_gzip_file as gzip_file
from tests.exporter.files.formats import test_parquet as parquet
from tests.exporter.files.formats import test_tar_file as tar_file
from tests.exporter.files.formats import test_tfrecord as tfrecord
from tests.exporter.files.formats import test_zip_file as zip_file
from tests.exporter.files.formats import test_zstd_file as zstd_file
from tests.exporter.files.formats.sample_files import FOLDER
from tests.exporter.files.formats.support import check_bytes, source
from tests.exporter.files.formats.test_tfrecord import record

EXTENSIONS = [extension for known in (*BINARY_FORMATS, *TEXT_FORMATS) for extension in known.EXTENSIONS]
BEGINNINGS = [
    *(b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x89HDF\r\n\x1a\n", b"PAR1", b"PARE", b"\x93NUMPY", b"PK\x03\x04"),
    *(b"PK\x05\x06", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"FEA1"),
    *(struct.pack("<Q", 60) + b"{", b"{", b'[{"', b"a,b\n", record(b"data"), b"\x50\x2a\x4d\x18", b"\x80\x04", b""),
]
FILLERS = [
    *(b"\0", b"\xff", b"[", b'"', b"{", b",", b"\n", b"[],", b'"a":{},', b"\\", b'"\n', b'",\n', b"'\n,"),
    *(b"\x02\0\0a", gzip.compress(b""), record(b""), b"PK\1\2", b"\x50\x2a\x4d\x18\0\0\0\0"),
]
WHOLE = [
    *((path.read_bytes(), path.name) for path in sorted(FOLDER.glob("*.*")) if path.suffix != ".md"),
    *((arrow.older(arrow.STREAM), "older.arrow"), (parquet.parquet(parquet.encoded(parquet.WHOLE)[1]), "a.parquet")),
    *((tar_file.WHOLE, "a.nemo"), (tfrecord.REAL, "a.tfrecord"), (gzip_file.SMALL, "a.gz"), (zstd_file.ALL, "a.zst")),
    *((data, f"{name}.zip") for name, data in zip_file.WHOLE.items()),
]


def test_an_empty_file_is_empty_whatever_its_name() -> None:
    for name in ("file", *(f"a{extension}" for extension in EXTENSIONS)):
        assert check_bytes(b"", name) == FileCheck("empty", None, "is empty")


def test_the_first_bytes_decide_not_the_name() -> None:
    packed = gzip.compress(b"text")
    for name in ("file", "a.json", "a.pt", "a.csv", "a.gz", "a.bin", "A.GZ"):
        assert check_bytes(packed, name) == FileCheck("valid", "gzip")


@pytest.mark.parametrize("extension", [hint for known in BINARY_FORMATS for hint in known.EXTENSIONS])
@pytest.mark.parametrize("pattern", ["a{}", "A{}-00001-of-00002", "a b{}"])
def test_a_file_named_like_a_binary_format_must_have_that_format(extension: str, pattern: str) -> None:
    found = check_bytes(b"no such file\0\1\2" * 9, pattern.format(extension))
    if extension in AMBIGUOUS_EXTENSIONS:
        assert found == FileCheck("unknown", None, "has an unknown format")
    elif extension in RAW_EXTENSIONS:
        assert found == FileCheck("unknown", None, f"is named {extension}, but does not begin like one")
    else:
        assert found.state == "invalid"
        assert found.reason == f"is named {extension}, but does not begin like one"
        assert found.format in {known.NAME for known in BINARY_FORMATS}


@pytest.mark.parametrize(
    ("data", "name", "state"),
    [
        (struct.pack("<50f", *range(1, 51)), "output_emb.npy", "unknown"),
        (b"\x93NUMPX" + bytes(100), "a.npy", "invalid"),
        (b"\x93NuMPx" + bytes(100), "a.npy", "invalid"),
        (b"\x93NU", "a.npy", "invalid"),
        (b"\x93NU" + bytes(100), "a.npy", "invalid"),
        (bytes(5000), "a.npy", "invalid"),
        (bytes(5000) + b"1", "a.npy", "invalid"),
        (b"a" + bytes(5000), "a.npy", "unknown"),
        (b"member of a family" * 9, "run-r.h5", "unknown"),
        (b"\x89HDG\r\n\x1a\n" + b"a" * 99, "a.h5", "invalid"),
        (bytes(5000), "a.hdf5", "invalid"),
        (b"the last part of an archive", "a.zip", "unknown"),
        (b"PK\x03\x05" + b"a" * 99, "a.zip", "invalid"),
        (zlib.compress(record(b"data")), "a.tfrecord", "unknown"),
        (b"words", "a.npz", "invalid"),
        (b"words", "a.parquet", "invalid"),
    ],
    ids=range(16),
)
def test_a_file_without_its_magic_number_is_invalid_only_on_further_evidence(
    data: bytes, name: str, state: str
) -> None:
    assert check_bytes(data, name).state == state


def test_overlong_lines_are_not_taken_for_one_value() -> None:
    data = (b'{"text": "' + b"a" * 100_000 + b'"}\n') * 15
    assert (check_bytes(data, "a.jsonl").state, check_bytes(data, "a.jsonl").format) == ("unknown", "jsonl")
    assert check_bytes(b"[\n  1,\n  2\n]\n", "a.jsonl").format == "json"


def test_the_case_of_an_extension_does_not_matter() -> None:
    assert check_bytes(b"words", "A.SAFETENSORS").state == "invalid"
    assert check_bytes(b"[1]", "A.JSON").state == "valid"
    assert check_bytes(b"a\n1\n", "A.CSV").state == "valid"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a": [1]}', ("valid", "json")),
        (b"[1, 2]", ("valid", "json")),
        (b'{"a": 1}\n{"a": 2}\n', ("valid", "jsonl")),
        (b'{"a": 1}\n{"a"', ("unfinished", "jsonl")),
        (b'{"a"', ("unknown", None)),
        (b"[INFO] ready\n[INFO] done\n", ("unknown", None)),
        (b"[1] words\n", ("unknown", None)),
        (b"{%s}" % (b" " * 2_000_000), ("valid", "json")),
        (b"words\n", ("unknown", None)),
        (b"\n", ("unknown", None)),
        (bytes(5000), ("unknown", None)),
        (b"\x7fELF" + bytes(50), ("unknown", None)),
    ],
    ids=range(12),
)
def test_only_a_complete_file_has_a_format_without_an_extension(data: bytes, expected: tuple[str, str | None]) -> None:
    for name in ("file", "a.log", "a.txt", "a.bin"):
        found = check_bytes(data, name)
        assert (found.state, found.format) == expected


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"\x80\x04\x95" + bytes(9), "a pickle"), (b"GGUF\3", "GGUF")],
)
def test_another_known_format_is_not_invalid(data: bytes, text: str) -> None:
    for name in ("a.pt", "a.npy", "file"):
        assert check_bytes(data, name) == FileCheck("unknown", None, f"begins like {text}, which is not checked")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"import sys; sys.path.append('/opt')\n", "a.pth"),
        (b'"\\e[A": history-search-backward\n', "inputrc.arrows"),
        (b"PARENT_DIRECTORY\n----------------\n", "a.rst"),
        (b"PAR1 is the first word\n", "a.txt"),
        (b"ARROW1 is the first word\n", "notes"),
        (b"\x1a\x01\x1c\0\0\0\0\0{\x01words", "terminfo"),
    ],
    ids=range(6),
)
def test_a_file_that_only_happens_to_begin_like_a_format_is_not_invalid(data: bytes, name: str) -> None:
    assert check_bytes(data, name).state == "unknown"


def test_a_damaged_file_with_a_matching_extension_is_invalid() -> None:
    assert check_bytes(b"PAR1 is the first word\n", "a.parquet").state == "invalid"
    assert check_bytes(b"\x1a\x01\x1c\0\0\0\0\0{\x01words", "a.safetensors").state == "invalid"
    assert check_bytes(b"import sys\n", "a.pt").state == "invalid"
    assert check_bytes(b"words\0", "a.pth").state == "invalid"


def test_tfrecords_are_distinguished_from_safetensors() -> None:
    """The checksum of a TFRecord may happen to begin with a brace, like a safetensors header."""
    found = next(data for length in range(2, 5000) if (data := record(b"x" * length))[8:9] == b"{")
    assert check_bytes(found) == FileCheck("valid", "tfrecord", None, 1)


def test_a_file_that_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    with source(b"data", "a.json") as opened:
        monkeypatch.setattr(os, "pread", failing)
        assert check_file(opened) == FileCheck("unknown", None, "Input/output error")


@pytest.mark.parametrize(
    "error", [ValueError(), KeyError(), struct.error(), RecursionError(), MemoryError(), OverflowError(), TypeError()]
)
def test_an_exception_in_a_format_gives_unknown(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def failing(_: FileSource) -> ValidFile:
        raise error

    monkeypatch.setattr(formats.gzip_file, "inspect", failing)
    found = check_bytes(gzip.compress(b""), "a.gz")
    assert found == FileCheck("unknown", "gzip", f"could not be parsed ({type(error).__name__})")
    monkeypatch.setattr(formats.gzip_file, "claims", failing)
    assert check_bytes(b"words", "file").state == "unknown"


def test_a_reason_is_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: FileSource) -> ValidFile:
        raise FileDamaged("a\nb\x1b[0m" + "c" * 9000)

    monkeypatch.setattr(formats.gzip_file, "inspect", failing)
    reason = check_bytes(gzip.compress(b"")).reason
    assert reason is not None
    assert reason.startswith("a\\nb\\x1b[0mccc")
    assert len(reason) == formats.LONGEST_REASON


def test_a_file_in_a_folder_is_checked(tmp_path: Path, hard_name: str) -> None:
    (tmp_path / f"{hard_name}.json").write_bytes(b"[1, 2, 3]")
    with open_source(tmp_path, f"{hard_name}.json") as opened:
        assert check_file(opened) == FileCheck("valid", "json", None, 3)


@given(
    beginning=st.sampled_from(BEGINNINGS),
    rest=st.binary(max_size=200),
    end=st.sampled_from([b"", b"PAR1", b"ARROW1", b"PK\x05\x06" + bytes(18), b"]", b"}", b"\n"]),
    extension=st.sampled_from(["", *EXTENSIONS]),
)
def test_any_bytes_with_any_name_give_a_result(beginning: bytes, rest: bytes, end: bytes, extension: str) -> None:
    check_bytes(beginning + rest + end, f"a{extension}")


@pytest.mark.parametrize(("data", "name"), WHOLE, ids=[name for _, name in WHOLE])
@given(place=st.integers(0, 6000), junk=st.binary(min_size=1, max_size=80))
def test_no_change_of_a_valid_file_raises_an_error(data: bytes, name: str, place: int, junk: bytes) -> None:
    at = place % len(data)
    check_bytes(data[:at] + junk + data[at + len(junk) :], name)
    check_bytes(data[:at] + junk + data[at:], name)
    check_bytes(data[:at] + junk, name)


@pytest.mark.parametrize("beginning", BEGINNINGS, ids=range(len(BEGINNINGS)))
@pytest.mark.parametrize("size", [120_000, 1 << 20, 3_000_000])
def test_a_check_takes_bounded_time_and_memory(beginning: bytes, size: int) -> None:
    """A check takes 0.1 s. An algorithm that is worse than linear would take minutes."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for filler in FILLERS:
        data = (beginning + filler * (size // len(filler)))[:size]
        for extension in (".json", ".csv", ".pt"):
            check_bytes(data, f"a{extension}")
    assert time.process_time() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_no_module_loads_or_runs_the_checked_file() -> None:
    """No unpickling, no evaluation, and nothing but the standard library."""
    never = {"pickle", "marshal", "shelve", "dill", "numpy", "torch", "h5py", "pyarrow", "safetensors", "zstandard"}
    calls = {"eval", "exec", "compile", "__import__", "load", "loads_all"}
    for path in Path(formats.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.partition(".")[0] for alias in node.names}
                module = getattr(node, "module", None) or ""
                top = {module.partition(".")[0]} if module else names
                assert not top & never, path
                assert top <= sys.stdlib_module_names | {"exporter"}, path
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in calls, path


def test_every_format_module_is_in_the_list() -> None:
    modules = {path.stem for path in Path(formats.__file__).parent.glob("*.py")}
    listed = {known.__name__.rpartition(".")[2] for known in (*BINARY_FORMATS, *TEXT_FORMATS)}  # type: ignore[attr-defined]
    texts = {stem: (Path(formats.__file__).parent / f"{stem}.py").read_text("utf-8") for stem in modules}
    assert listed == {stem for stem, text in texts.items() if "\nNAME = " in text}
