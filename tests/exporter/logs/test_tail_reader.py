"""Growing logs: whatever happens to the file, each record comes once and whole."""

import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.logs import tail_reader as tail_module
from exporter.logs.tail_reader import CHUNK_BYTES, COPY_MARK_BYTES, DELETED_S, MARK_BYTES, LogTail
from tests.support.exporter import open_files
from tests.support.strategies import PLACES, cut

LOG_TEXT = st.lists(st.sampled_from([b"a", b"\xc3", b" ", b"\n", b"\r", b"\r\n", b"Processed 1/9 items\n"])).map(
    b"".join
)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as out:
        out.write(data)


def look(tail: LogTail) -> list[bytes]:
    return list(tail.read())


def pieces(tail: LogTail, most_bytes: int = 64 * CHUNK_BYTES) -> list[tuple[bytes, int]]:
    """Text and offset of the pieces of one look at one generation."""
    return [(bytes(buffer[:end]), offset) for buffer, end, offset in tail.read_chunks(most_bytes)]


def restart(tail: LogTail) -> LogTail:
    """The tail of a reader that is started anew."""
    state = json.loads(json.dumps(tail.state()))
    tail.close()
    return LogTail.restore(tail.path, state)


def numbered(first: int, last: int) -> bytes:
    return b"".join(b"record %d of this log\n" % number for number in range(first, last + 1))


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
    assert b"".join(found) + tail.pop_unfinished_record() == text
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
    assert tail.pop_unfinished_record() == b"last words"
    assert tail.pop_unfinished_record() == b""
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
    assert b"".join(found) + tail.pop_unfinished_record() == b"".join(before + after for before, after, _ in pieces)
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


def stale(path: Path, text: bytes = b"of another job\n") -> LogTail:
    """A tail that has passed over an old file."""
    path.write_bytes(text)
    os.utime(path, (1000, 1000))
    tail = LogTail(str(path))
    tail.skip_older(2000)
    return tail


def test_logs_of_another_job_are_not_kept_open(tmp_path: Path) -> None:
    tails = [stale(tmp_path / f"{number}.log") for number in range(50)]
    for _ in range(2):
        assert open_files(str(tmp_path)) == []
        assert [look(tail) for tail in tails] == [[]] * 50
    assert {(tail.size, tail.mtime, tail.lag_bytes, tail.problem) for tail in tails} == {(15, 1000.0, 0, None)}
    append(tmp_path / "7.log", b"of this one\n")
    assert [number for number, tail in enumerate(tails) if look(tail) == [b"of this one\n"]] == [7]
    assert open_files(str(tmp_path)) == [str(tmp_path / "7.log")]


def test_a_log_that_was_passed_over_is_not_kept_open_by_a_reader_started_anew(path: Path) -> None:
    tail = restart(stale(path))
    assert (look(tail), open_files(str(path))) == ([], [])
    append(path, b"new\n")
    assert look(tail) == [b"new\n"]


def test_a_fresh_log_that_was_passed_over_is_closed_once_it_has_settled(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(path, b"one\n")
    tail = LogTail(str(path))
    tail.start_at_end()
    assert (look(tail), open_files(str(path))) == ([], [str(path)])
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    assert (look(tail), open_files(str(path))) == ([], [])


@pytest.mark.parametrize("text", [b"new\n", b"of a third job\n", b"of another job, which is longer\n"])
def test_a_log_that_was_passed_over_and_is_begun_anew_is_read_from_its_top(path: Path, text: bytes) -> None:
    tail = stale(path, b"of this job..\n\n")
    path.write_bytes(text)
    assert (look(tail), tail.problem, tail.generation) == ([text], None, 1)


def test_a_log_that_was_passed_over_is_followed_when_it_is_renamed_or_deleted(path: Path) -> None:
    tail = stale(path)
    path.rename(path.with_suffix(".1"))
    assert look(tail) == []
    append(path.with_suffix(".1"), b"last\n")
    append(path, b"new\n")
    assert look(tail) == [b"last\n", b"new\n"]
    other = stale(path.with_name("other.log"))
    (path.with_name("other.log")).unlink()
    assert (look(other), other.problem) == ([], None)
    append(path.with_name("other.log"), b"new\n")
    assert (look(other), other.problem) == ([b"new\n"], None)


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
        patch.setattr(os, "preadv", stale)
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


def test_pieces_say_where_in_the_file_they_begin(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\ntwo\nthr")
    assert pieces(tail) == [(b"one\ntwo\n", 0)]
    append(path, b"ee\nfour\n")
    assert pieces(tail) == [(b"three\nfour\n", 8)]
    assert tail.reread(8, 5) == b"three"
    assert tail.reread(14, 100) == b"four\n"


def test_offsets_count_anew_in_each_generation(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"old\nlast")
    pieces(tail)
    path.rename(path.with_suffix(".1"))
    append(path, b"new\n")
    assert (pieces(tail), tail.generation, tail.has_more) == ([(b"last", 4)], 0, True)
    assert tail.reread(0, 100) == b"old\nlast", "still of the generation that the look was at"
    assert (pieces(tail), tail.generation, tail.has_more) == ([(b"new\n", 0)], 1, False)
    assert tail.reread(0, 100) == b"new\n"


def test_nothing_is_read_again_from_a_file_that_has_shrunk(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\ntwo\n")
    pieces(tail)
    path.write_bytes(b"new\n")
    assert tail.reread(0, 4) == b""


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    chunk=st.integers(2, 60),
    end=st.sampled_from([b"\n", b"\r", b"\r\n"]),
    most=st.integers(1, 100),
)
def test_whatever_the_chunks_records_are_whole_unless_longer_than_one(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunk: int, end: bytes, most: int
) -> None:
    records = [b"%d" % (number % 10) * size + end for number, size in enumerate(sizes)]
    path = tmp_path_factory.getbasetemp() / "chunks.log"
    path.write_bytes(b"".join(records))
    tail, found = LogTail(str(path)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_module, "CHUNK_BYTES", chunk)
        patch.setattr(tail_module, "_spare", [])
        while step := pieces(tail, most) or tail.lag_bytes:
            found += step if isinstance(step, list) else []
    tail.close()
    text, places = b"".join(records), []
    for piece, offset in found:
        assert text[offset : offset + len(piece)] == piece
        assert len(piece) <= chunk + 1
        places.append(offset)
    assert b"".join(piece for piece, _ in found) == text
    place = 0
    for record in records:
        if len(record) < chunk:
            assert not any(place < other < place + len(record) for other in places), "cut within a record"
        place += len(record)


def test_a_return_and_its_newline_stay_together_when_both_are_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "CHUNK_BYTES", 8)
    monkeypatch.setattr(tail_module, "_spare", [])
    append(path, b"1234567\r\nabcdefg\r\n")
    assert pieces(LogTail(str(path))) == [(b"1234567\r\n", 0), (b"abcdefg\r\n", 9)]
    assert look(LogTail(str(path)))[0] == b"1234567\r\n"


def test_a_newline_after_a_return_that_was_passed_on_makes_no_second_record(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\r")
    assert look(tail) == [b"one\r"]
    append(path, b"\ntwo\r\n")
    text = b"".join(look(tail))
    assert text == b"\ntwo\r\n"
    assert [record for record in text.replace(b"\r", b"\n").split(b"\n") if record] == [b"two"]


def test_bytes_that_are_no_text_are_passed_on_as_they_are(path: Path) -> None:
    text = b"\xff\xfe\0 in\0side\n\0\0\n\xe2\x82\n"
    append(path, text)
    assert b"".join(look(LogTail(str(path)))) == text


def test_a_file_rotated_twice_between_two_looks_is_read_in_order(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"a1\n")
    look(tail)
    append(path, b"a2")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"b1\nb2")
    path.with_name("worker.log.1").rename(path.with_name("worker.log.2"))
    path.rename(path.with_name("worker.log.1"))
    append(path, b"c1\n")
    assert look(tail) == [b"a2", b"b1\n", b"b2", b"c1\n"]
    assert tail.generation == 2


@pytest.mark.parametrize(
    "names",
    [
        ("worker.log.2026-11-20", "worker.log.2026-11-21"),
        ("worker.log-20261120", "worker.log-20261121"),
        ("worker.2026-11-20_10-00-00_123456.log", "worker.2026-11-21_10-00-00_123456.log"),
        ("worker-20261120.log", "worker-20261121.log"),
        ("worker.log.7", "worker.log.8"),
    ],
)
def test_rotated_names_are_understood(path: Path, names: tuple[str, str]) -> None:
    for old in (names[0].replace("20", "18"), "worker.log.3", "worker.log.9"):
        append(path.with_name(old), b"long ago\n")
        os.utime(path.with_name(old), (1, 1))
    tail = LogTail(str(path))
    append(path, b"a\n")
    look(tail)
    for text, name in zip((b"b\n", b"c\n"), names, strict=True):
        path.rename(path.with_name(name))
        append(path, text)
    assert look(tail) == [b"b\n", b"c\n"]


def test_the_log_of_another_rank_is_no_rotated_one(path: Path) -> None:
    path = path.with_name("worker_1.log")
    tail = LogTail(str(path))
    append(path, b"a\n")
    look(tail)
    path.rename(path.with_name("worker_1.log.1"))
    append(path.with_name("worker_10.log"), b"of rank 10\n")
    append(path.with_name("worker_1.log.err"), b"errors\n")
    append(path, b"b\n")
    assert look(tail) == [b"b\n"]


def test_a_writer_that_keeps_the_old_file_is_followed_until_the_new_one_is_written_to(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\n")
    look(tail)
    path.rename(path.with_suffix(".1"))
    path.touch()
    assert look(tail) == []
    append(path.with_suffix(".1"), b"two\nthr")
    assert look(tail) == [b"two\n"]
    append(path, b"new\n")
    assert look(tail) == [b"thr", b"new\n"]
    tail.close()
    assert open_files(str(path.parent)) == []


def test_a_truncated_log_that_has_outgrown_what_was_read_is_read_from_its_top(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, numbered(1, 30))
    look(tail)
    path.write_bytes(numbered(31, 90))
    assert b"".join(look(tail)) == numbered(31, 90)
    assert tail.generation == 1


def test_a_truncated_log_of_the_same_size_is_read_from_its_top(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, numbered(10, 19))
    look(tail)
    path.write_bytes(numbered(20, 29))
    assert b"".join(look(tail)) == numbered(20, 29)


def test_a_log_that_has_not_been_written_to_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, b"one\n")
    os.utime(path, (1, 1))
    tail = LogTail(str(path))
    look(tail)
    for name in ("preadv", "pread", "open"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("read"))
    assert look(tail) == []


@pytest.mark.parametrize("passed_over", [False, True])
def test_a_log_without_anything_new_costs_one_look_at_its_path(
    path: Path, monkeypatch: pytest.MonkeyPatch, passed_over: bool
) -> None:
    append(path, b"one\n")
    os.utime(path, (1, 1))
    tail = LogTail(str(path))
    if passed_over:
        tail.start_at_end()
    look(tail), look(tail)
    asked, ask = list[str](), os.stat

    def stat_of(name: bytes) -> os.stat_result:
        asked.append(os.fsdecode(name))
        return ask(name)

    monkeypatch.setattr(os, "stat", stat_of)
    monkeypatch.setattr(os, "fstat", lambda *_: pytest.fail("asked"))
    assert (look(tail), asked) == ([], [str(path)])
    monkeypatch.undo()
    append(path, b"two\n")
    assert look(tail) == [b"two\n"]


CHANGES = ("write", "rewrite", "rename", "replace", "delete", "touch", "close", "look")


@given(changes=st.lists(st.sampled_from(CHANGES), max_size=12))
def test_however_many_looks_find_nothing_the_next_change_is_seen(
    changes: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("logs") / "app.log"
    tail, written, read = LogTail(str(path)), list[bytes](), list[bytes]()

    def idle() -> None:
        for _ in range(3):
            while found := look(tail):
                read.extend(b"".join(found).splitlines(keepends=True))

    for number, change in enumerate(changes):
        line = b"%05d of what is written\n" % number
        if change == "rename" and path.exists():
            path.rename(path.with_name(f"app.log.{1000 - number}"))
        elif change == "replace":
            other = path.with_name("other")
            other.write_bytes(line)
            os.utime(other, (1, 1))
            other.replace(path)
            written.append(line)
        elif change == "rewrite":
            path.write_bytes(line)
            written.append(line)
        elif change == "write":
            append(path, line)
            written.append(line)
        elif change == "delete":
            path.unlink(missing_ok=True)
        elif change == "touch" and path.exists():
            os.utime(path, (1, 1))
        elif change == "close":
            tail.close()
        idle()
    assert read == written
    assert tail.problem is None


def test_a_problem_is_over_when_the_file_is_there_again_as_it_was(path: Path) -> None:
    log = path.with_name("where.log")
    append(log, b"one\n")
    os.utime(log, (1, 1))
    path.symlink_to(log)
    tail = LogTail(str(path))
    look(tail), look(tail)
    path.unlink()
    path.mkdir()
    assert [(look(tail), tail.problem) for _ in range(2)] == [([], "is a directory")] * 2
    path.rmdir()
    path.symlink_to(log)
    assert [(look(tail), tail.problem) for _ in range(2)] == [([], None)] * 2


def test_a_hole_that_truncation_leaves_is_passed_over(path: Path) -> None:
    with path.open("wb", buffering=0) as writer:  # not for appending: it keeps its place
        writer.write(numbered(1, 1000))
        tail = LogTail(str(path))
        look(tail)
        for wide in (0, 5 << 30):
            os.truncate(path, 0)
            writer.seek(wide, os.SEEK_CUR)
            writer.write(numbered(1001, 1100))
            assert b"".join(look(tail)) == numbered(1001, 1100)
            assert tail.lag_bytes == 0
    assert tail.bytes_read < 10 * CHUNK_BYTES, "the hole is not read through"
    os.truncate(path, 0)
    append(path, b"\0" * 100)
    assert look(tail) == []
    append(path, b"\0\0new\n")
    assert look(restart(tail)) == look(tail) == [b"new\n"]


def test_a_deleted_log_is_read_to_its_end(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\n")
    look(tail)
    with path.open("ab", buffering=0) as writer:
        path.unlink()
        writer.write(b"two\nthr")
        assert look(tail) == [b"two\n"]
        append(path, b"new\n")
        assert look(tail) == [b"thr", b"new\n"]


def test_a_deleted_log_is_closed_after_a_while_so_that_its_blocks_are_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tail = LogTail(str(path))
    append(path, b"one\n")
    look(tail)
    with path.open("ab", buffering=0) as writer:
        path.unlink()
        writer.write(b"two\n")
        assert look(tail) == [b"two\n"]
        now += DELETED_S - 1
        writer.write(b"three\nlast wo")
        assert look(tail) == [b"three\n"], "still written to"
    now += DELETED_S - 1
    assert look(tail) == []
    assert open_files(str(path)) == [f"{path} (deleted)"]
    now += 1
    assert (look(tail), tail.generation) == ([b"last wo"], 1)
    assert (open_files(str(path)), tail.lag_bytes, tail.problem) == ([], 0, None)
    assert look(tail) == []
    append(path, b"new\n")
    assert pieces(tail) == [(b"new\n", 0)]
    assert tail.bytes_read == len(b"one\ntwo\nthree\nlast wonew\n")


@pytest.mark.parametrize("moved", [False, True])
def test_a_log_that_is_not_known_to_be_deleted_is_kept_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    append(path, b"one\n")
    tail = LogTail(str(path))
    look(tail)
    path.rename(path.with_suffix(".1"))
    if not moved:
        path.with_suffix(".1").unlink()
        path.touch()  # whoever made it has written nothing yet
    for _ in range(3):
        now += DELETED_S
        assert look(tail) == []
    append(path, b"two\n")
    assert look(tail) == [b"two\n"]


@pytest.mark.parametrize("closed", [False, True])
def test_a_log_that_was_deleted_and_made_again_is_read_from_its_top(path: Path, closed: bool) -> None:
    """Its inode may be the same when nobody had it open."""
    tail = LogTail(str(path))
    append(path, numbered(1, 20))
    look(tail)
    if closed:
        tail.close()
    path.unlink()
    append(path, numbered(101, 140))
    assert b"".join(look(tail)) == numbered(101, 140)


def test_a_log_replaced_by_an_older_one_is_read_from_its_top(path: Path) -> None:
    other = path.with_name("backup")
    append(other, numbered(1, 50))
    os.utime(other, (1, 1))
    tail = LogTail(str(path))
    append(path, numbered(51, 60))
    look(tail)
    other.rename(path)
    assert b"".join(look(tail)) == numbered(1, 50)


def test_a_log_replaced_by_a_longer_copy_of_itself_is_read_on(path: Path) -> None:
    """As rsync and editors do it."""
    tail = LogTail(str(path))
    append(path, numbered(1, 20) + b"unfin")
    look(tail)
    append(path.with_name("copy"), numbered(1, 20) + b"unfinished\n" + numbered(21, 22))
    path.with_name("copy").rename(path)
    assert b"".join(look(tail)) == b"unfinished\n" + numbered(21, 22)
    assert tail.generation == 0


def test_a_short_text_that_agrees_is_no_copy(path: Path) -> None:
    text = b"x" * (COPY_MARK_BYTES - 2) + b"\n"
    append(path, text)
    tail = LogTail(str(path))
    look(tail)
    append(path.with_name("other"), text)
    path.with_name("other").rename(path)
    assert look(tail) == [text]


@pytest.mark.parametrize("name", ["preadv", "fstat"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_handle_that_fails_is_reported_and_the_reading_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    append(path, numbered(1, 10) + b"unfin")
    tail = LogTail(str(path))
    found = b"".join(look(tail))
    append(path, b"ished\n")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    if name == "fstat":
        path.rename(path.with_suffix(".1"))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        for _ in range(2):
            assert look(tail) == []
            assert tail.problem == os.strerror(number)
    assert b"".join([found, *look(tail)]) == numbered(1, 10) + b"unfinished\n"
    assert (tail.problem, tail.generation) == (None, 0)
    assert len(open_files(str(path.parent))) == 1


def test_a_stale_file_that_has_been_replaced_is_left_for_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(path, numbered(1, 10))
    tail = LogTail(str(path))
    look(tail)

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    append(path, b"lost\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        look(tail)
    path.unlink()
    append(path.with_name("new"), numbered(50, 80))
    path.with_name("new").rename(path)
    assert b"".join(look(tail)) == numbered(50, 80)
    assert tail.generation == 1


def test_a_path_that_cannot_be_reached_for_a_while_costs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, b"one\n")
    tail = LogTail(str(path))
    look(tail)
    append(path, b"two\n")
    real = os.stat

    def refuse(where: str, **options: bool) -> os.stat_result:
        if str(where) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(where, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        assert look(tail) == [b"two\n"], "through the descriptor"
        assert tail.problem == "Permission denied"
    append(path, b"three\n")
    assert look(tail) == [b"three\n"]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "is a FIFO"),
        (Path.mkdir, "is a directory"),
        (make_socket, "is a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (lambda path: path.symlink_to(path), os.strerror(errno.ELOOP)),
    ],
)
def test_what_is_no_file_is_never_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], problem: str
) -> None:
    make(path)
    tail = LogTail(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: pytest.fail("opened"))
        assert look(tail) == []
        tail.skip_older(1e12)
        tail.start_at_end()
    assert tail.problem == problem
    path.rmdir() if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()
    append(path, b"now a file\n")
    assert [*look(tail), tail.problem] == [b"now a file\n", None]


def test_a_log_that_may_not_be_read_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, b"secret\n")
    tail = LogTail(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied")))
        assert (look(tail), tail.problem) == ([], "Permission denied")
    assert LogTail(str(path.with_name("absent"))).problem is None


def test_a_look_at_much_ends_when_its_time_is_over(path: Path) -> None:
    with path.open("wb") as out:
        out.write(numbered(1, 10))
        out.truncate(100 << 30)  # sparse: as much as a huge log
    tail = LogTail(str(path))
    found = [bytes(buffer[:end]) for buffer, end, _ in tail.read_chunks(1 << 40, lambda: True)]
    assert found == [numbered(1, 10)]
    assert tail.bytes_read == CHUNK_BYTES
    assert tail.lag_bytes == (100 << 30) - CHUNK_BYTES


def test_looks_at_two_logs_may_be_interleaved(path: Path) -> None:
    other = path.with_name("other.log")
    append(path, numbered(1, 100_000))
    append(other, numbered(200_001, 300_000))
    both = list(zip(LogTail(str(path)).read(), LogTail(str(other)).read(), strict=True))
    assert b"".join(text for text, _ in both) == numbered(1, 100_000)
    assert b"".join(text for _, text in both) == numbered(200_001, 300_000)


def test_a_look_that_is_broken_off_goes_on_after_the_piece_it_gave(path: Path) -> None:
    append(path, numbered(1, 200_000))
    tail = LogTail(str(path))
    buffer, end, _ = next(tail.read_chunks())
    first = bytes(buffer[:end])
    assert b"".join([first, *look(tail)]) == numbered(1, 200_000)


def test_joining_at_the_end_begins_with_the_next_record(path: Path) -> None:
    append(path, b"one\ntw")
    tail = LogTail(str(path))
    tail.start_at_end()
    assert look(tail) == []
    append(path, b"o")
    assert look(tail) == []
    tail = restart(tail)
    append(path, b"\nthree\n")
    assert pieces(tail) == [(b"three\n", 8)]


@pytest.mark.parametrize(("most", "found"), [(0, b""), (3, b""), (4, b"ccc\n"), (5, b"ccc\n"), (8, b"bbb\nccc\n")])
def test_joining_near_the_end_begins_with_a_whole_record(path: Path, most: int, found: bytes) -> None:
    append(path, b"aaa\nbbb\nccc\n")
    tail = LogTail(str(path))
    tail.start_near_end(most)
    assert b"".join(look(tail)) == found
    append(path, b"ddd\n")
    assert look(tail) == [b"ddd\n"]


def test_joining_a_small_or_absent_log_begins_at_its_top(path: Path) -> None:
    tail = LogTail(str(path))
    tail.start_at_end()
    append(path, b"one\ntwo\n")
    assert look(tail) == [b"one\ntwo\n"]
    tail = LogTail(str(path))
    tail.start_near_end(1000)
    assert look(tail) == [b"one\ntwo\n"]


def test_a_reader_started_anew_goes_on_where_the_last_one_was(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\ntw")
    assert look(tail) == [b"one\n"]
    tail = restart(tail)
    append(path, b"o\n")
    assert look(tail) == [b"two\n"]
    assert (tail.bytes_read, tail.generation, tail.problem) == (8, 0, None)


def test_a_log_rotated_away_while_nobody_read_is_read_to_its_end(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\n")
    look(tail)
    state = tail.state()
    tail.close()
    append(path, b"two\nthr")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"b\n")
    path.with_name("worker.log.1").rename(path.with_name("worker.log.2"))
    path.rename(path.with_name("worker.log.1"))
    append(path, b"c\n")
    assert look(LogTail.restore(str(path), state)) == [b"two\n", b"thr", b"b\n", b"c\n"]


def test_a_log_that_is_gone_when_the_reader_starts_anew_is_said_to_be(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, numbered(1, 10))
    look(tail)
    state = tail.state()
    tail.close()
    path.write_bytes(numbered(101, 190))
    tail = LogTail.restore(str(path), state)
    assert b"".join(look(tail)) == numbered(101, 190)
    assert tail.generation == 1
    tail = LogTail.restore(str(path), state)
    path.unlink()
    assert look(tail) == []
    assert (tail.lag_bytes, tail.generation) == (0, 1)
    assert tail.problem is not None


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -1},
        {"offset": 9},
        {"read": "x"},
        {"mark": "zz"},
        {"mark": "00" * (MARK_BYTES + 1)},
        {"mark": None},
        {"inode": []},
        {"read": 1 << 40},
        {"bytes_read": {}},
    ],
)
def test_a_state_that_makes_no_sense_begins_at_the_top(path: Path, change: dict[str, object]) -> None:
    append(path, b"one\ntwo\n")
    tail = LogTail(str(path))
    look(tail)
    state = tail.state() | change
    tail.close()
    assert look(LogTail.restore(str(path), state)) == look(LogTail.restore(str(path), {})) == [b"one\ntwo\n"]


def test_a_new_log_that_begins_like_the_one_rotated_away_is_read_from_its_top(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, numbered(1, 20))
    look(tail)
    path.rename(path.with_name("worker.log.1"))
    append(path, numbered(1, 22))
    assert b"".join(look(tail)) == numbered(1, 22)


def test_a_rotated_log_is_read_in_small_looks_with_its_records_whole(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"a\n")
    look(tail)
    append(path, b"one\ntwo\nthree")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"new\n")
    found = []
    for left in (14, 11, 8, 5, 4):
        found += [text for text, _ in pieces(tail, 3)]
        assert tail.lag_bytes == left
    assert found == [b"one\n", b"two\n", b"three"]


def test_a_new_file_rotated_away_under_any_name_is_read_if_it_was_seen(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"a\n")
    look(tail)
    path.rename(path.with_name("first"))
    path.touch()
    look(tail)
    append(path, b"b\n")
    path.rename(path.with_name("second"))
    assert look(tail) == [b"b\n"]
    append(path, b"c\n")
    assert look(tail) == [b"c\n"]


def test_a_log_just_written_to_is_looked_at_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written to twice within the resolution of its mtime, it shows the same mtime."""
    append(path, numbered(10, 19))
    found = os.stat(path)
    tail = LogTail(str(path))
    look(tail)
    path.write_bytes(numbered(20, 29))
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda place, **more: found if str(place) == str(path) else real(place, **more))
    assert b"".join(look(tail)) == numbered(20, 29)


def test_another_file_that_now_has_the_inode_is_not_read(path: Path) -> None:
    append(path, numbered(1, 10))
    tail = LogTail(str(path))
    look(tail)
    state = tail.state()
    tail.close()
    foreign = path.with_name("foreign.txt")
    append(foreign, b"of no concern\n" * 100)
    path.unlink()
    append(path, b"new\n")
    tail = LogTail.restore(str(path), state | {"inode": foreign.stat().st_ino})
    assert look(tail) == [b"new\n"]
    assert tail.problem is not None


def test_a_log_truncated_and_then_rotated_while_nobody_read_is_read_from_its_top(path: Path) -> None:
    append(path, numbered(1, 10))
    tail = LogTail(str(path))
    look(tail)
    state = tail.state()
    tail.close()
    path.write_bytes(numbered(101, 120))
    path.rename(path.with_name("worker.log.1"))
    append(path, b"new\n")
    assert b"".join(look(LogTail.restore(str(path), state))) == numbered(101, 120) + b"new\n"


def test_rotated_files_of_one_moment_are_each_read_once(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"a\n")
    look(tail)
    path.rename(path.with_name("worker.log.2"))
    append(path, b"b\n")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"c\n")
    for name in ("worker.log.1", "worker.log.2"):
        os.utime(path.with_name(name), (1, 1))
    assert look(tail) == [b"b\n", b"c\n"]


def test_a_log_rewritten_to_the_same_size_and_then_rotated_is_read(path: Path) -> None:
    tail = LogTail(str(path))
    append(path, b"one\n")
    look(tail)
    path.write_bytes(b"two\n")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"three\n")
    assert look(tail) == [b"two\n", b"three\n"]
