"""Growing logs: whatever happens to the file, each record comes once and whole."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.readers.tail import CHUNK_BYTES, LogTail
from tests.exporter.support import open_files
from tests.strategies import PLACES, cut

LOG_TEXT = st.lists(st.sampled_from([b"a", b"\xc3", b" ", b"\n", b"\r", b"\r\n", b"Processed 1/9 items\n"])).map(
    b"".join
)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as out:
        out.write(data)


def look(tail: LogTail) -> list[bytes]:
    return list(tail.read())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


@given(text=LOG_TEXT, places=PLACES)
@example(text=b"a\r\nb", places=[2])
@example(text=b"", places=[0])
def test_however_the_writes_are_cut_the_records_join_to_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, places: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.log"
    path.write_bytes(b"")
    tail, found = LogTail(str(path)), []
    for piece in cut(text, places):
        append(path, piece)
        found += look(tail)
    tail.close()
    assert all(chunk.endswith((b"\n", b"\r")) for chunk in found)
    assert b"".join(found) + tail.rest() == text
    assert tail.bytes_read == len(text)
    assert tail.lag_bytes == 0


def test_a_partial_line_waits_for_its_end(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\ntw")
    assert look(tail) == [b"one\n"]
    assert look(tail) == []
    append(path, b"o\nthr")
    assert look(tail) == [b"two\n"]


def test_a_progress_bar_is_read_at_each_return(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"10%\r20%\r30")
    assert look(tail) == [b"10%\r20%\r"]
    append(path, b"%\r")
    assert look(tail) == [b"30%\r"]


def test_the_rest_without_a_newline_is_given_once(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\nlast words")
    look(tail)
    assert tail.rest() == b"last words"
    assert tail.rest() == b""
    append(path, b" and more\n")
    assert look(tail) == [b" and more\n"]


def test_a_file_that_does_not_exist_yet_is_read_from_its_top_once_it_does(path: Path) -> None:
    tail = LogTail(str(path))
    assert look(tail) == []
    append(path, b"first\n")
    assert look(tail) == [b"first\n"]


def test_a_rotated_log_goes_on_in_the_new_file(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"old\npart")
    look(tail)
    path.rename(path.with_suffix(".1"))
    assert look(tail) == [], "nothing at the path: the old file is still the one"
    append(path, b"new\n")
    assert look(tail) == [b"part", b"new\n"]
    assert tail.bytes_read == len(b"old\npart") + len(b"new\n")


def test_lines_written_just_before_a_rotation_are_not_lost(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\n")
    look(tail)
    append(path, b"two\n")
    path.rename(path.with_suffix(".1"))
    append(path, b"three\n")
    assert look(tail) == [b"two\n", b"three\n"]


@given(pieces=st.lists(st.tuples(LOG_TEXT, LOG_TEXT, st.booleans()), max_size=6))
def test_rotations_lose_nothing_and_repeat_nothing(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[bytes, bytes, bool]]
) -> None:
    """At most one rotation between two looks, with lines before and after it."""
    path = tmp_path_factory.mktemp("rotated") / "worker.log"
    path.write_bytes(b"")
    tail = LogTail(str(path))
    found = look(tail)
    for number, (before, after, rotate) in enumerate(pieces):
        append(path, before)
        if number % 2:
            found += look(tail)
        if rotate:
            path.rename(path.with_suffix(f".{number}"))
        append(path, after)
        found += look(tail)
    assert b"".join(found) + tail.rest() == b"".join(before + after for before, after, _ in pieces)
    tail.close()


def test_lines_written_after_the_file_was_moved_away_are_read(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\n")
    look(tail)
    path.rename(path.with_suffix(".1"))
    append(path.with_suffix(".1"), b"two\n")
    assert look(tail) == [b"two\n"]


def test_a_truncated_log_is_read_from_its_top(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"a long first line\npart")
    look(tail)
    path.write_bytes(b"new\n")
    assert look(tail) == [b"new\n"]
    assert tail.lag_bytes == 0


def test_a_deleted_log_comes_back(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\n")
    look(tail)
    path.unlink()
    assert look(tail) == []
    append(path, b"two\n")
    assert look(tail) == [b"two\n"]


def test_a_link_that_leads_elsewhere_is_followed(path: Path) -> None:
    first, second = path.with_name("1.log"), path.with_name("2.log")
    append(first, b"one\n")
    append(second, b"two\n")
    path.symlink_to(first)
    tail = LogTail(str(path))
    assert look(tail) == [b"one\n"]
    path.unlink()
    path.symlink_to(second)
    assert look(tail) == [b"two\n"]


def test_what_was_there_before_a_moment_can_be_passed_over(path: Path) -> None:
    append(path, b"of another job\n")
    tail = LogTail(str(path))
    tail.skip_older(path.stat().st_mtime + 1)
    assert look(tail) == []
    append(path, b"of this one\n")
    assert look(tail) == [b"of this one\n"]


def test_what_was_written_since_a_moment_is_not_passed_over(path: Path) -> None:
    for moment in (path.parent.stat().st_mtime - 1, None):
        path.write_bytes(b"of this job\n")
        tail = LogTail(str(path))
        tail.skip_older(moment)
        assert look(tail) == [b"of this job\n"]


def test_nothing_is_passed_over_where_nothing_is(path: Path) -> None:
    tail = LogTail(str(path))
    tail.skip_older(1e12)
    append(path, b"one\n")
    assert look(tail) == [b"one\n"]


def test_a_fifo_never_blocks_the_look(path: Path) -> None:
    os.mkfifo(path)
    tail = LogTail(str(path))
    looking = threading.Thread(target=look, args=(tail,), daemon=True)
    looking.start()
    looking.join(20)
    assert not looking.is_alive()
    assert look(tail) == []
    path.unlink()
    append(path, b"now a file\n")
    assert look(tail) == [b"now a file\n"]


def test_a_directory_gives_nothing_and_leaves_no_descriptor(path: Path) -> None:
    path.mkdir()
    tail = LogTail(str(path))
    assert [look(tail) for _ in range(3)] == [[], [], []]
    assert open_files(str(path)) == []


def test_a_log_that_cannot_be_opened_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, b"secret\n")
    tail = LogTail(str(path))

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert look(tail) == []
    assert look(tail) == [b"secret\n"]


def test_a_log_that_cannot_be_read_any_longer_is_opened_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, b"one\n")
    tail = LogTail(str(path))

    def stale(*_: object) -> bytes:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", stale)
        assert look(tail) == []
    assert look(tail) == [b"one\n"]


def test_much_at_once_comes_in_chunks_of_whole_records(path: Path) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(300_000))
    assert len(lines) > 3 * CHUNK_BYTES
    append(path, lines)
    chunks = look(LogTail(str(path)))
    assert b"".join(chunks) == lines
    assert all(chunk.endswith(b"\n") for chunk in chunks)
    assert max(map(len, chunks)) <= CHUNK_BYTES + 20


def test_a_huge_record_is_passed_on_in_pieces_of_bounded_size(path: Path) -> None:
    text = b"x" * (5 * CHUNK_BYTES + 17) + b"\nend\n"
    append(path, text)
    chunks = look(LogTail(str(path)))
    assert b"".join(chunks) == text
    assert max(map(len, chunks)) <= 2 * CHUNK_BYTES
    assert chunks[-1].endswith(b"\nend\n")


def test_a_look_takes_no_more_than_asked_for_and_says_what_is_left(path: Path) -> None:
    lines = b"0123456789\n" * 1000
    append(path, lines)
    tail = LogTail(str(path))
    first = list(tail.read(most_bytes=2000))
    assert 1900 < len(b"".join(first)) <= 2000
    assert tail.lag_bytes == len(lines) - 2000
    assert b"".join(first + look(tail)) == lines
    assert tail.lag_bytes == 0


def test_closing_loses_nothing(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\ntw")
    look(tail)
    tail.close()
    append(path, b"o\n")
    assert look(tail) == [b"two\n"]
