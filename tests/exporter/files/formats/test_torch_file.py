"""Torch checkpoints: checked by archive or storages, without unpickling anything."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.files.formats import FileCheck
from exporter.files.formats.pickles import PICKLE_ERRORS, walk_pickle
from tests.exporter.files.formats.sample_files import sample
from tests.exporter.files.formats.support import check_bytes, flipped, states, truncated

STATE, LEGACY, NOTHING, SCRIPT = map(sample, ("state.pt", "state-legacy.pt", "nothing-legacy.pt", "script.pt"))
ZIPS = {"state.pt": STATE, "script.pt": SCRIPT}
LEGACIES = {"state-legacy.pt": LEGACY, "nothing-legacy.pt": NOTHING}
MAGIC_PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def rewritten(data: bytes, change: Callable[[str, bytes], bytes | None]) -> bytes:
    """An archive with changed members; None drops a member."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = change(info.filename, old.read(info))
            if content is not None:
                new.writestr(info.filename, content)
    return out.getvalue()


def without(data: bytes, *endings: str) -> bytes:
    return rewritten(data, lambda name, content: None if name.endswith(endings) else content)


class Stored:
    """An object that a pickle stores outside of itself."""

    def __init__(self, *identity: object) -> None:
        self.identity = identity


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return obj.identity if isinstance(obj, Stored) else None


def legacy(obj: object, keys: list[object], *storages: bytes, protocol: int = 2) -> bytes:
    """A file in the older format, with this object and its storages."""
    out = io.BytesIO()
    for number in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
        pickle.dump(number, out, protocol)
    Pickler(out, protocol).dump(obj)
    pickle.dump(keys, out, protocol)
    return out.getvalue() + b"".join(storages)


@pytest.mark.parametrize("name", ZIPS)
def test_complete_archives_are_valid_and_truncated_ones_are_not(name: str) -> None:
    assert check_bytes(ZIPS[name]) == check_bytes(ZIPS[name], name) == FileCheck("valid", "torch")
    assert states(truncated(ZIPS[name], 2000), name) == {"invalid"}
    assert states(flipped(ZIPS[name], 20), name) <= {"invalid", "unknown", "valid"}
    assert states(flipped(ZIPS[name], 4), name) == {"invalid"}


@pytest.mark.parametrize("name", LEGACIES)
def test_the_older_format_is_valid_and_truncated_files_are_not(name: str) -> None:
    assert check_bytes(LEGACIES[name]) == check_bytes(LEGACIES[name], name) == FileCheck("valid", "torch-legacy")
    cuts = [LEGACIES[name][:end] for end in range(20, len(LEGACIES[name]))]
    assert states(iter(cuts), name) == {"invalid"}
    assert states(truncated(LEGACIES[name][:20]), name) == {"invalid", "unknown"}  # may still be another pickle
    wrong = [text for text in flipped(LEGACIES[name], 13) if text[1] == 2]  # another protocol may be as good
    assert states(iter(wrong), name) == {"invalid", "unknown"}
    assert states(flipped(LEGACIES[name], 10_000), name) <= {"invalid", "unknown", "valid"}


def test_a_failed_save_is_detected_in_an_intact_archive() -> None:
    failed = sample("failed.pt")
    assert zipfile.ZipFile(io.BytesIO(failed)).testzip() is None
    reason = "has no data.pkl: torch.save failed before it wrote one"
    assert check_bytes(failed, "step 5.pt") == check_bytes(failed) == FileCheck("invalid", "torch", reason)
    reason = "has no storage '10': torch.save failed before it wrote it"
    assert check_bytes(without(STATE, "data/10")) == FileCheck("invalid", "torch", reason)
    reason = "its storage '1' has 47 bytes, but its object has 6 items of DoubleStorage"
    short = rewritten(STATE, lambda name, content: content[:-1] if name.endswith("data/1") else content)
    assert check_bytes(short) == FileCheck("invalid", "torch", reason)
    reason = "has no version member, which torch.save writes last"
    assert check_bytes(without(STATE, "version", "serialization_id")) == FileCheck("invalid", "torch", reason)
    garbled = rewritten(STATE, lambda name, content: content[:-9] if name.endswith("data.pkl") else content)
    assert check_bytes(garbled) == FileCheck("invalid", "torch", "has a data.pkl that is not a pickle")


def test_an_archive_that_is_no_checkpoint_is_a_plain_archive() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive_file:
        archive_file.writestr("notes.txt", "text")
    reason = "is an archive that torch.save did not write"
    assert check_bytes(out.getvalue(), "a.pt") == FileCheck("valid", "zip", reason)
    for mark in (".data/extern_modules", "archive_format"):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive_file:
            archive_file.writestr("m/version", "3")
            archive_file.writestr(f"m/{mark}", "")
        assert check_bytes(out.getvalue(), "a.pt") == FileCheck("valid", "zip", reason)


def test_parts_of_a_distributed_checkpoint_are_undecided() -> None:
    for data in (STATE, STATE * 2):
        assert check_bytes(data, "__0_0.distcp").state == "unknown"
    assert check_bytes(STATE[:-1], "__0_0.distcp").state == "invalid"


def test_a_long_object_is_not_checked() -> None:
    long = rewritten(STATE, lambda name, content: content.ljust(1 << 20) if name.endswith("data.pkl") else content)
    assert check_bytes(long) == FileCheck("valid", "torch", "its required storages were not checked")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_all_storages_of_the_older_format_are_checked(protocol: int) -> None:
    kinds = {"DoubleStorage": 8, "HalfStorage": 2, "ComplexDoubleStorage": 16, "QInt8Storage": 1}
    keys: list[object] = [str(number) for number in range(1200)]
    objects = []
    data = []
    for number, key in enumerate(keys):
        kind, size = list(kinds.items())[number % len(kinds)]
        obj = Stored("storage", f"torch {kind}", key, "cpu", number % 5, None)
        objects += [obj, obj]
        data.append(struct.pack("<q", number % 5) + bytes(size * (number % 5)))
    whole = legacy(objects, keys, *data, protocol=protocol)
    assert check_bytes(whole) == FileCheck("valid", "torch-legacy")
    assert check_bytes(whole + whole) == FileCheck("valid", "torch-legacy")
    assert states(truncated(whole, 10), "a.pt") == {"invalid"}
    assert check_bytes(whole + b"more").reason == "continues for 4 bytes after its last storage"


FLOATS = Stored("storage", "torch FloatStorage", "7", "cpu", 3, None)
DATA = struct.pack("<q", 3) + bytes(12)


@pytest.mark.parametrize(
    ("data", "state", "reason"),
    [
        (legacy(FLOATS, ["7"], DATA), "valid", None),
        (legacy([FLOATS, Stored("module", "a", "b", "c")], ["7"], DATA), "valid", None),
        (legacy(Stored("storage", "torch FloatStorage", "7", "cpu", 3, ("7", 0, 3)), ["7"], DATA), "valid", None),
        (legacy(FLOATS, ["7"], DATA[:-1]), "invalid", "ends 1 bytes before the end of a storage"),
        (legacy(FLOATS, ["7"], DATA[:7]), "invalid", "ends before its last storage"),
        (legacy(FLOATS, ["8"], DATA), "invalid", "lists a storage that its object does not have"),
        (legacy(FLOATS, [7], DATA), "invalid", "has no list of its storages"),
        (
            legacy(FLOATS, ["7"], struct.pack("<q", 4) + bytes(16)),
            "invalid",
            "has a storage of 4 items, but its object has one of 3",
        ),
        (
            legacy(Stored("storage", "torch NewStorage", "7", "cpu", 3, None), ["7"], DATA),
            "unknown",
            "has a NewStorage, whose item size is unknown",
        ),
        (legacy(Stored("storage", "x", "7"), ["7"], DATA), "invalid", "has an object whose storages are unknown"),
        (legacy(Stored("storage", "x FloatStorage", "7", "cpu", -1, None), ["7"], DATA), "invalid", None),
        (legacy("x" * 600_000, []), "unknown", "has a pickled object of more than 512 KiB"),
        (legacy("x" * 100_000, []), "valid", None),
        (
            MAGIC_PICKLE + pickle.dumps(1000) * 4,
            "invalid",
            "does not begin with the magic number and version of torch.save",
        ),
        (MAGIC_PICKLE + b"\x80\x02\xff.", "invalid", "has other data where a pickle should be"),
    ],
)
def test_other_files_of_the_older_format_give_the_expected_state(data: bytes, state: str, reason: str | None) -> None:
    found = check_bytes(data, "a.pt")
    assert found.state == state
    if reason is not None:
        assert found.reason == reason


class Evil:
    """An object whose pickle creates a file when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_no_function_named_in_a_pickle_is_called(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "loaded"
    evil = pickle.dumps(Evil(mark), protocol)
    assert check_bytes(legacy(Evil(mark), [], protocol=protocol)) == FileCheck("valid", "torch-legacy")
    check_bytes(rewritten(STATE, lambda name, content: evil if name.endswith("data.pkl") else content))
    assert not mark.exists()
    pickle.loads(evil)  # noqa: S301 -- a control: loading does create the file
    assert mark.exists()


def test_a_walk_reads_texts_numbers_tuples_and_lists() -> None:
    circle: list[object] = []
    circle.append((circle, "in it"))
    value = ["text", 5, -(2**70), ("a", ("b",), (), (1, 2, 3, 4)), [["x"] * 1500], "text", "é\ud800"]
    for protocol in range(6):
        assert walk_pickle(io.BytesIO(pickle.dumps(value, protocol))).value == value
        walk_pickle(
            io.BytesIO(
                pickle.dumps([circle, {1: 2}, {3}, frozenset("ab"), b"a", bytearray(2), 1.5, slice(1)], protocol)
            )
        )


def test_a_walk_names_classes_and_refuses_a_stack_underflow() -> None:
    for protocol in range(2, 6):
        assert walk_pickle(io.BytesIO(pickle.dumps(Evil, protocol))).value == f"{Evil.__module__} Evil"
    assert walk_pickle(io.BytesIO(b"K\x05K\x072\x87.")).value == (5, 7, 7)
    with pytest.raises(ValueError, match="takes more items than the stack has"):
        walk_pickle(io.BytesIO(b"K\x05\x86."))


@given(
    data=st.binary(max_size=100)
    | st.lists(st.sampled_from(b"(])}t\x85\x86\x87.0123aesbulQRco\x81\x94h\x00N")).map(bytes)
)
@example(data=b"(" * 1000 + b"t" * 1000 + b".")
@example(data=b")" + b"\x85" * 20_000 + b".")
@example(data=b"N" + b"2\x86" * 20_000 + b".")
@example(data=b"]q\x00" + b"h\x00a" * 20_000 + b".")
@example(data=b"0.")
@example(data=b"(0.")
@example(data=b"\x8e" + b"\xff" * 8)
def test_a_walk_of_any_bytes_ends(data: bytes) -> None:
    stream = io.BytesIO(data)
    try:
        walk_pickle(stream)
    except PICKLE_ERRORS:
        pass
    check_bytes(legacy(None, []) + data, "a.pt")
    check_bytes(MAGIC_PICKLE + data, "a.pt")
