"""The log tail: each record is read once and whole, whatever happens to the file."""

import errno
import math
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.logs import tail_reader
from exporter.logs.tail_reader import CHUNK_BYTES, COPY_MARK_BYTES, DELETED_S, MARK_BYTES, LogTail, TailPosition
from tests.support.exporter import open_files, saved_and_read
from tests.support.strategies import PLACES, cut

LOG_TEXT = st.lists(st.sampled_from([b"a", b"\xc3", b" ", b"\n", b"\r", b"\r\n", b"Processed 1/9 items\n"])).map(
    b"".join
)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as out:
        out.write(data)


def read(tail: LogTail, most_bytes: int = 64 * CHUNK_BYTES) -> list[bytes]:
    """The new pieces, over all generations."""
    found, until = [], tail.bytes_read + most_bytes
    while True:
        found += [text for text, _ in read_chunks(tail, until - tail.bytes_read)]
        if not tail.has_more:
            return found


def read_chunks(tail: LogTail, most_bytes: int = 64 * CHUNK_BYTES) -> list[tuple[bytes, int]]:
    """Text and offset of each chunk of one read, within one generation."""
    return [(bytes(buffer[:end]), offset) for buffer, end, offset in tail.read_chunks(most_bytes)]


def restart(tail: LogTail) -> LogTail:
    """The tail as a restarted reader restores it."""
    tail.close()
    return LogTail.restore(tail.path, saved_and_read(TailPosition, tail.position()))


def tail_after(path: Path, text: bytes) -> LogTail:
    """A tail that has read this text, appended to the log."""
    append(path, text)
    tail = LogTail(str(path))
    read(tail)
    return tail


def numbered(first: int, last: int) -> bytes:
    return b"".join(b"record %d of this log\n" % number for number in range(first, last + 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


@pytest.fixture
def tail(path: Path) -> LogTail:
    return LogTail(str(path))


@given(text=LOG_TEXT, places=PLACES)
@example(text=b"a\r\nb", places=[2])
@example(text=b"", places=[0])
def test_joined_records_equal_the_written_text_for_any_split_of_the_writes(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, places: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.log"
    path.write_bytes(b"")
    tail, found = LogTail(str(path)), []
    for chunk_text in cut(text, places):
        append(path, chunk_text)
        found += read(tail)
    tail.close()
    assert all(chunk.endswith((b"\n", b"\r")) for chunk in found)
    assert b"".join(found) + tail.pop_unfinished_record() == text
    assert tail.bytes_read == len(text)
    assert tail.lag_bytes == 0


def test_a_partial_line_is_held_back_until_it_is_complete(path: Path, tail: LogTail) -> None:
    append(path, b"one\ntw")
    assert read(tail) == [b"one\n"]
    assert read(tail) == []
    append(path, b"o\nthr")
    assert read(tail) == [b"two\n"]


def test_a_carriage_return_ends_a_record(path: Path, tail: LogTail) -> None:
    append(path, b"10%\r20%\r30")
    assert read(tail) == [b"10%\r20%\r"]
    append(path, b"%\r")
    assert read(tail) == [b"30%\r"]


def test_an_unfinished_last_record_is_returned_once(path: Path) -> None:
    tail = tail_after(path, b"one\nlast words")
    assert tail.pop_unfinished_record() == b"last words"
    assert tail.pop_unfinished_record() == b""
    append(path, b" and more\n")
    assert read(tail) == [b" and more\n"]


def test_the_newest_state_of_a_bar_stays_unfinished(path: Path, tail: LogTail) -> None:
    append(path, b"one\r 50%|#  | 5/10 [00:05]")
    assert read(tail) == [b"one\r"]
    assert tail.read_bar_state() == tail.read_bar_state() == b" 50%|#  | 5/10 [00:05]"
    append(path, b"\r 60%|## | 6")
    assert read(tail) == [b" 50%|#  | 5/10 [00:05]\r"]
    assert tail.read_bar_state() == b""  # it may be cut within a number


def test_a_log_that_appears_later_is_read_from_its_top(path: Path, tail: LogTail) -> None:
    assert read(tail) == []
    append(path, b"first\n")
    assert read(tail) == [b"first\n"]


def test_after_a_rotation_reading_continues_in_the_new_file(path: Path) -> None:
    tail = tail_after(path, b"old\npart")
    path.rename(path.with_suffix(".1"))
    assert read(tail) == [], "nothing at the path: the old file is still the one"
    append(path, b"new\n")
    assert read(tail) == [b"part", b"new\n"]
    assert tail.bytes_read == len(b"old\npart") + len(b"new\n")


def test_lines_written_just_before_a_rotation_are_not_lost(path: Path) -> None:
    tail = tail_after(path, b"one\n")
    append(path, b"two\n")
    path.rename(path.with_suffix(".1"))
    append(path, b"three\n")
    assert read(tail) == [b"two\n", b"three\n"]


@given(steps=st.lists(st.tuples(LOG_TEXT, LOG_TEXT, st.booleans()), max_size=6))
def test_rotations_neither_lose_nor_repeat_records(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bytes, bytes, bool]]
) -> None:
    """At most one rotation between two reads, with lines before and after it."""
    path = tmp_path_factory.mktemp("rotated") / "worker.log"
    path.write_bytes(b"")
    tail = LogTail(str(path))
    found = read(tail)
    for number, (before, after, rotate) in enumerate(steps):
        append(path, before)
        if number % 2:
            found += read(tail)
        if rotate:
            path.rename(path.with_suffix(f".{number}"))
        append(path, after)
        found += read(tail)
    assert b"".join(found) + tail.pop_unfinished_record() == b"".join(before + after for before, after, _ in steps)
    tail.close()


def test_lines_written_to_a_renamed_file_are_read(path: Path) -> None:
    tail = tail_after(path, b"one\n")
    path.rename(path.with_suffix(".1"))
    append(path.with_suffix(".1"), b"two\n")
    assert read(tail) == [b"two\n"]


def test_a_truncated_log_is_read_from_its_top(path: Path) -> None:
    tail = tail_after(path, b"a long first line\npart")
    path.write_bytes(b"new\n")
    assert read(tail) == [b"new\n"]
    assert tail.lag_bytes == 0


def test_a_log_recreated_after_deletion_is_read(path: Path) -> None:
    tail = tail_after(path, b"one\n")
    path.unlink()
    assert read(tail) == []
    append(path, b"two\n")
    assert read(tail) == [b"two\n"]


def test_a_link_that_changes_its_target_is_followed(path: Path, tail: LogTail) -> None:
    first, second = path.with_name("1.log"), path.with_name("2.log")
    append(first, b"one\n")
    append(second, b"two\n")
    path.symlink_to(first)
    assert read(tail) == [b"one\n"]
    path.unlink()
    path.symlink_to(second)
    assert read(tail) == [b"two\n"]


def test_content_older_than_a_given_time_can_be_skipped(path: Path, tail: LogTail) -> None:
    append(path, b"of another job\n")
    tail.skip_older(path.stat().st_mtime + 1)
    assert read(tail) == []
    append(path, b"of this one\n")
    assert read(tail) == [b"of this one\n"]


def test_content_newer_than_a_given_time_is_not_skipped(path: Path) -> None:
    for moment in (path.parent.stat().st_mtime - 1, None):
        path.write_bytes(b"of this job\n")
        tail = LogTail(str(path))
        tail.skip_older(moment)
        assert read(tail) == [b"of this job\n"]


def stale(path: Path, text: bytes = b"of another job\n") -> LogTail:
    """A tail that skipped the content of an old file."""
    path.write_bytes(text)
    os.utime(path, (1000, 1000))
    tail = LogTail(str(path))
    tail.skip_older(2000)
    return tail


def test_logs_of_another_job_are_not_kept_open(tmp_path: Path) -> None:
    tails = [stale(tmp_path / f"{number}.log") for number in range(50)]
    for _ in range(2):
        assert open_files(str(tmp_path)) == []
        assert [read(tail) for tail in tails] == [[]] * 50
    assert {(tail.size, tail.mtime, tail.lag_bytes, tail.problem) for tail in tails} == {(15, 1000.0, 0, None)}
    append(tmp_path / "7.log", b"of this one\n")
    assert [number for number, tail in enumerate(tails) if read(tail) == [b"of this one\n"]] == [7]
    assert open_files(str(tmp_path)) == [str(tmp_path / "7.log")]


def test_a_skipped_log_stays_closed_after_a_restart_of_the_reader(path: Path) -> None:
    tail = restart(stale(path))
    assert (read(tail), open_files(str(path))) == ([], [])
    append(path, b"new\n")
    assert read(tail) == [b"new\n"]


def test_a_skipped_recent_log_is_closed_once_it_has_settled(
    path: Path, tail: LogTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(path, b"one\n")
    tail.skip_older(math.inf)
    assert (read(tail), open_files(str(path))) == ([], [str(path)])
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    assert (read(tail), open_files(str(path))) == ([], [])


@pytest.mark.parametrize("text", [b"new\n", b"of a third job\n", b"of another job, which is longer\n"])
def test_a_skipped_log_that_is_rewritten_is_read_from_its_top(path: Path, text: bytes) -> None:
    tail = stale(path, b"of this job..\n\n")
    path.write_bytes(text)
    assert (read(tail), tail.problem, tail.generation) == ([text], None, 1)


def test_a_skipped_log_is_followed_when_it_is_renamed_or_deleted(path: Path) -> None:
    tail = stale(path)
    path.rename(path.with_suffix(".1"))
    assert read(tail) == []
    append(path.with_suffix(".1"), b"last\n")
    append(path, b"new\n")
    assert read(tail) == [b"last\n", b"new\n"]
    other = stale(path.with_name("other.log"))
    (path.with_name("other.log")).unlink()
    assert (read(other), other.problem) == ([], None)
    append(path.with_name("other.log"), b"new\n")
    assert (read(other), other.problem) == ([b"new\n"], None)


def test_skipping_old_content_of_an_absent_log_skips_nothing(path: Path, tail: LogTail) -> None:
    tail.skip_older(1e12)
    append(path, b"one\n")
    assert read(tail) == [b"one\n"]


def test_a_large_read_is_split_into_chunks_of_whole_records(path: Path) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(300_000))
    assert len(lines) > 3 * CHUNK_BYTES
    append(path, lines)
    chunks = read(LogTail(str(path)))
    assert b"".join(chunks) == lines
    assert all(chunk.endswith(b"\n") for chunk in chunks)
    assert max(map(len, chunks)) <= CHUNK_BYTES + 20


def test_a_huge_record_is_split_into_chunks_of_bounded_size(path: Path) -> None:
    text = b"x" * (5 * CHUNK_BYTES + 17) + b"\nend\n"
    append(path, text)
    chunks = read(LogTail(str(path)))
    assert b"".join(chunks) == text
    assert max(map(len, chunks)) <= 2 * CHUNK_BYTES
    assert chunks[-1].endswith(b"\nend\n")


def test_a_read_respects_its_byte_limit_and_reports_the_lag(path: Path, tail: LogTail) -> None:
    lines = b"0123456789\n" * 1000
    append(path, lines)
    first = read(tail, 2000)
    assert 1900 < len(b"".join(first)) <= 2000
    assert tail.lag_bytes == len(lines) - 2000
    assert b"".join(first + read(tail)) == lines
    assert tail.lag_bytes == 0


def test_closing_loses_nothing(path: Path) -> None:
    tail = tail_after(path, b"one\ntw")
    tail.close()
    append(path, b"o\n")
    assert read(tail) == [b"two\n"]


def test_chunks_have_their_offset_in_the_file(path: Path, tail: LogTail) -> None:
    append(path, b"one\ntwo\nthr")
    assert read_chunks(tail) == [(b"one\ntwo\n", 0)]
    append(path, b"ee\nfour\n")
    assert read_chunks(tail) == [(b"three\nfour\n", 8)]
    assert tail.reread(8, 5) == b"three"
    assert tail.reread(14, 100) == b"four\n"


def test_offsets_restart_with_each_generation(path: Path) -> None:
    tail = tail_after(path, b"old\nlast")
    path.rename(path.with_suffix(".1"))
    append(path, b"new\n")
    assert (read_chunks(tail), tail.generation, tail.has_more) == ([(b"last", 4)], 0, True)
    assert tail.reread(0, 100) == b"old\nlast", "still of the generation that the look was at"
    assert (read_chunks(tail), tail.generation, tail.has_more) == ([(b"new\n", 0)], 1, False)
    assert tail.reread(0, 100) == b"new\n"


def test_a_file_that_has_shrunk_cannot_be_reread(path: Path) -> None:
    tail = tail_after(path, b"one\ntwo\n")
    path.write_bytes(b"new\n")
    assert tail.reread(0, 4) == b""


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    chunk=st.integers(2, 60),
    end=st.sampled_from([b"\n", b"\r", b"\r\n"]),
    most=st.integers(1, 100),
)
def test_a_record_is_only_split_if_it_is_longer_than_a_chunk(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunk: int, end: bytes, most: int
) -> None:
    records = [b"%d" % (number % 10) * size + end for number, size in enumerate(sizes)]
    path = tmp_path_factory.getbasetemp() / "chunks.log"
    path.write_bytes(b"".join(records))
    tail, found = LogTail(str(path)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_reader, "CHUNK_BYTES", chunk)
        patch.setattr(tail_reader, "_spare", [])
        while step := read_chunks(tail, most) or tail.lag_bytes:
            found += step if isinstance(step, list) else []
    tail.close()
    text, places = b"".join(records), []
    for chunk_text, offset in found:
        assert text[offset : offset + len(chunk_text)] == chunk_text
        assert len(chunk_text) <= chunk + 1
        places.append(offset)
    assert b"".join(chunk_text for chunk_text, _ in found) == text
    place = 0
    for record in records:
        if len(record) < chunk:
            assert not any(place < other < place + len(record) for other in places), "cut within a record"
        place += len(record)


def test_a_carriage_return_and_its_newline_stay_in_one_chunk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_reader, "CHUNK_BYTES", 8)
    monkeypatch.setattr(tail_reader, "_spare", [])
    append(path, b"1234567\r\nabcdefg\r\n")
    assert read_chunks(LogTail(str(path))) == [(b"1234567\r\n", 0), (b"abcdefg\r\n", 9)]
    assert read(LogTail(str(path)))[0] == b"1234567\r\n"


def test_a_newline_read_after_its_carriage_return_makes_no_second_record(path: Path, tail: LogTail) -> None:
    append(path, b"one\r")
    assert read(tail) == [b"one\r"]
    append(path, b"\ntwo\r\n")
    text = b"".join(read(tail))
    assert text == b"\ntwo\r\n"
    assert [record for record in text.replace(b"\r", b"\n").split(b"\n") if record] == [b"two"]


def test_bytes_that_are_not_utf8_are_returned_unchanged(path: Path) -> None:
    text = b"\xff\xfe\0 in\0side\n\0\0\n\xe2\x82\n"
    append(path, text)
    assert b"".join(read(LogTail(str(path)))) == text


def test_a_rotated_log_and_the_next_one_are_read_with_one_buffer(
    path: Path, tail: LogTail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_reader, "_spare", [])
    append(path, b"one\n")
    assert read(tail) == [b"one\n"]
    path.rename(path.with_name("log.1"))
    append(path, b"two\n")
    assert read(tail) == [b"two\n"]
    assert len(tail_reader._spare) == 1


def test_a_log_rotated_twice_between_two_reads_is_read_in_order(path: Path) -> None:
    tail = tail_after(path, b"a1\n")
    append(path, b"a2")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"b1\nb2")
    path.with_name("worker.log.1").rename(path.with_name("worker.log.2"))
    path.rename(path.with_name("worker.log.1"))
    append(path, b"c1\n")
    assert read(tail) == [b"a2", b"b1\n", b"b2", b"c1\n"]
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
def test_names_of_rotated_logs_are_recognized(path: Path, names: tuple[str, str]) -> None:
    for old in (names[0].replace("20", "18"), "worker.log.3", "worker.log.9"):
        append(path.with_name(old), b"long ago\n")
        os.utime(path.with_name(old), (1, 1))
    tail = tail_after(path, b"a\n")
    for text, name in zip((b"b\n", b"c\n"), names, strict=True):
        path.rename(path.with_name(name))
        append(path, text)
    assert read(tail) == [b"b\n", b"c\n"]


def test_the_log_of_another_rank_is_not_taken_for_a_rotated_one(path: Path) -> None:
    path = path.with_name("worker_1.log")
    tail = tail_after(path, b"a\n")
    path.rename(path.with_name("worker_1.log.1"))
    append(path.with_name("worker_10.log"), b"of rank 10\n")
    append(path.with_name("worker_1.log.err"), b"errors\n")
    append(path, b"b\n")
    assert read(tail) == [b"b\n"]


def test_the_old_file_is_followed_until_the_new_one_has_content(path: Path) -> None:
    tail = tail_after(path, b"one\n")
    path.rename(path.with_suffix(".1"))
    path.touch()
    assert read(tail) == []
    append(path.with_suffix(".1"), b"two\nthr")
    assert read(tail) == [b"two\n"]
    append(path, b"new\n")
    assert read(tail) == [b"thr", b"new\n"]
    tail.close()
    assert open_files(str(path.parent)) == []


def test_a_truncated_log_that_grew_past_the_old_offset_is_read_from_its_top(path: Path) -> None:
    tail = tail_after(path, numbered(1, 30))
    path.write_bytes(numbered(31, 90))
    assert b"".join(read(tail)) == numbered(31, 90)
    assert tail.generation == 1


def test_a_truncated_log_of_the_same_size_is_read_from_its_top(path: Path) -> None:
    tail = tail_after(path, numbered(10, 19))
    path.write_bytes(numbered(20, 29))
    assert b"".join(read(tail)) == numbered(20, 29)


def test_an_unchanged_log_is_not_read(path: Path, tail: LogTail, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, b"one\n")
    os.utime(path, (1, 1))
    read(tail)
    for name in ("preadv", "pread", "open"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("read"))
    assert read(tail) == []


@pytest.mark.parametrize("skipped", [False, True])
def test_an_idle_log_costs_one_stat_of_its_path(
    path: Path, tail: LogTail, monkeypatch: pytest.MonkeyPatch, skipped: bool
) -> None:
    append(path, b"one\n")
    os.utime(path, (1, 1))
    if skipped:
        tail.skip_older(1e12)
    read(tail), read(tail)
    paths, real_stat = list[str](), os.stat

    def stat_of(name: bytes) -> os.stat_result:
        paths.append(os.fsdecode(name))
        return real_stat(name)

    monkeypatch.setattr(os, "stat", stat_of)
    monkeypatch.setattr(os, "fstat", lambda *_: pytest.fail("asked"))
    assert (read(tail), paths) == ([], [str(path)])
    monkeypatch.undo()
    append(path, b"two\n")
    assert read(tail) == [b"two\n"]


CHANGES = (
    *("write", "write by another name", "rewrite", "outgrow", "truncate", "rename", "replace", "copy", "swap"),
    *("move the directory", "delete", "touch", "chmod", "close", "read"),
)


def change(path: Path, kind: str, line: bytes) -> bytes:
    """Change the log; return the text that was added to it."""
    other, text, number = path.with_name("other"), line, int(line)
    old_time = (2000 + number,) * 2  # in the order of the changes, like the times of rotated logs
    if kind == "write":
        append(path, line)
    elif kind == "write by another name":
        path.touch()
        os.link(path, other)
        append(other, line)
        os.utime(other, old_time)
        other.unlink()
    elif kind == "rewrite":
        path.write_bytes(line)
    elif kind == "outgrow":
        text = 20 * line
        path.write_bytes(text)
    elif kind == "replace":
        other.write_bytes(line)
        os.utime(other, old_time)
        other.replace(path)
    elif kind == "copy":
        other.write_bytes((path.read_bytes() if path.exists() else b"") + line)
        other.replace(path)
    elif kind == "move the directory":
        path.parent.rename(path.parent.with_name(f"{path.parent.name}-{number}"))
        path.parent.mkdir()
        append(path, line)
    else:
        text = b""
        if kind == "truncate":
            path.write_bytes(b"")
        elif kind == "delete":
            path.unlink(missing_ok=True)
        elif kind == "rename" and path.exists():
            os.utime(path, old_time)
            path.rename(path.with_name(f"app.log.{1000 - number}"))
        elif kind == "swap" and path.exists():
            path.rename(other)
            append(path, line)
            other.replace(path)
        elif kind == "touch" and path.exists():
            os.utime(path, old_time)
        elif kind == "chmod" and path.exists():
            path.chmod(0o600)
    return text


@given(kinds=st.lists(st.sampled_from((*CHANGES, "touch", "touch")), max_size=12), skipped=st.booleans())
@example(kinds=["write", "touch", "rewrite", "touch", "replace", "touch"], skipped=False)
@example(kinds=["write", "touch", "write by another name", "swap", "touch", "copy"], skipped=False)
@example(kinds=["touch", "rename", "rewrite", "touch", "outgrow", "touch", "move the directory"], skipped=True)
def test_every_change_is_seen_after_any_number_of_idle_reads(
    kinds: list[str], skipped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("logs") / "app.log"
    written, records = b"", b""
    tail = stale(path, b"of another job%60s\n" % b"") if skipped else LogTail(str(path))
    for number, kind in enumerate(kinds):
        written += change(path, kind, b"%070d\n" % number)
        if kind == "close":
            tail.close()
        for _ in range(3):
            while found := b"".join(read(tail)):
                records += found
            assert records == written
    assert (tail.problem, tail.lag_bytes) == (None, 0)


def test_a_problem_ends_when_the_same_file_is_back(path: Path, tail: LogTail) -> None:
    log = path.with_name("where.log")
    append(log, b"one\n")
    os.utime(log, (1, 1))
    path.symlink_to(log)
    read(tail), read(tail)
    path.unlink()
    path.mkdir()
    assert [(read(tail), tail.problem) for _ in range(2)] == [([], "is a directory")] * 2
    path.rmdir()
    path.symlink_to(log)
    assert [(read(tail), tail.problem) for _ in range(2)] == [([], None)] * 2


def test_a_hole_left_by_truncation_is_skipped(path: Path) -> None:
    with path.open("wb", buffering=0) as writer:  # without O_APPEND: it keeps its offset
        writer.write(numbered(1, 1000))
        tail = LogTail(str(path))
        read(tail)
        for wide in (0, 5 << 30):
            os.truncate(path, 0)
            writer.seek(wide, os.SEEK_CUR)
            writer.write(numbered(1001, 1100))
            assert b"".join(read(tail)) == numbered(1001, 1100)
            assert tail.lag_bytes == 0
    assert tail.bytes_read < 10 * CHUNK_BYTES, "the hole is not read through"
    os.truncate(path, 0)
    append(path, b"\0" * 100)
    assert read(tail) == []
    append(path, b"\0\0new\n")
    assert read(restart(tail)) == read(tail) == [b"new\n"]


def test_a_deleted_log_is_read_to_its_end(path: Path) -> None:
    tail = tail_after(path, b"one\n")
    with path.open("ab", buffering=0) as writer:
        path.unlink()
        writer.write(b"two\nthr")
        assert read(tail) == [b"two\n"]
        append(path, b"new\n")
        assert read(tail) == [b"thr", b"new\n"]


def test_a_deleted_log_is_closed_after_a_while_to_free_its_blocks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tail = tail_after(path, b"one\n")
    with path.open("ab", buffering=0) as writer:
        path.unlink()
        writer.write(b"two\n")
        assert read(tail) == [b"two\n"]
        now += DELETED_S - 1
        writer.write(b"three\nlast wo")
        assert read(tail) == [b"three\n"], "still written to"
    now += DELETED_S - 1
    assert read(tail) == []
    assert open_files(str(path)) == [f"{path} (deleted)"]
    now += 1
    assert (read(tail), tail.generation) == ([b"last wo"], 1)
    assert (open_files(str(path)), tail.lag_bytes, tail.problem) == ([], 0, None)
    assert read(tail) == []
    append(path, b"new\n")
    assert read_chunks(tail) == [(b"new\n", 0)]
    assert tail.bytes_read == len(b"one\ntwo\nthree\nlast wonew\n")


@pytest.mark.parametrize("moved", [False, True])
def test_a_log_that_may_not_be_deleted_is_kept_open(path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tail = tail_after(path, b"one\n")
    path.rename(path.with_suffix(".1"))
    if not moved:
        path.with_suffix(".1").unlink()
        path.touch()  # its writer has written nothing yet
    for _ in range(3):
        now += DELETED_S
        assert read(tail) == []
    append(path, b"two\n")
    assert read(tail) == [b"two\n"]


@pytest.mark.parametrize("closed", [False, True])
def test_a_log_deleted_and_recreated_is_read_from_its_top(path: Path, closed: bool) -> None:
    """The new file may have the same inode if nothing held the old one open."""
    tail = tail_after(path, numbered(1, 20))
    if closed:
        tail.close()
    path.unlink()
    append(path, numbered(101, 140))
    assert b"".join(read(tail)) == numbered(101, 140)


def test_a_log_replaced_by_an_older_one_is_read_from_its_top(path: Path) -> None:
    other = path.with_name("backup")
    append(other, numbered(1, 50))
    os.utime(other, (1, 1))
    tail = tail_after(path, numbered(51, 60))
    other.rename(path)
    assert b"".join(read(tail)) == numbered(1, 50)


def test_a_log_replaced_by_a_longer_copy_is_read_from_the_old_offset(path: Path) -> None:
    """Rsync and editors write such copies."""
    tail = tail_after(path, numbered(1, 20) + b"unfin")
    append(path.with_name("copy"), numbered(1, 20) + b"unfinished\n" + numbered(21, 22))
    path.with_name("copy").rename(path)
    assert b"".join(read(tail)) == b"unfinished\n" + numbered(21, 22)
    assert tail.generation == 0


def test_a_copy_that_was_empty_at_first_is_read_once_when_it_is_rotated(path: Path) -> None:
    tail = tail_after(path, numbered(1, 20))
    path.unlink()
    path.touch()
    assert read(tail) == []
    append(path, numbered(1, 22))
    assert b"".join(read(tail)) == numbered(21, 22)
    path.rename(path.with_name(f"{path.name}.1"))
    append(path, numbered(23, 24))
    assert b"".join(read(tail)) == numbered(23, 24)


def test_a_short_equal_text_is_not_taken_for_a_copy(path: Path) -> None:
    text = b"x" * (COPY_MARK_BYTES - 2) + b"\n"
    tail = tail_after(path, text)
    append(path.with_name("other"), text)
    path.with_name("other").rename(path)
    assert read(tail) == [text]


@pytest.mark.parametrize("name", ["preadv", "fstat"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_failing_handle_is_reported_and_reading_continues(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    append(path, numbered(1, 10) + b"unfin")
    tail = LogTail(str(path))
    found = b"".join(read(tail))
    append(path, b"ished\n")

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    if name == "fstat":
        path.rename(path.with_suffix(".1"))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        for _ in range(2):
            assert read(tail) == []
            assert tail.problem == os.strerror(number)
    assert b"".join([found, *read(tail)]) == numbered(1, 10) + b"unfinished\n"
    assert (tail.problem, tail.generation) == (None, 0)
    assert len(open_files(str(path.parent))) == 1


def test_a_stale_file_is_abandoned_once_it_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = tail_after(path, numbered(1, 10))

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    append(path, b"lost\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", stale)
        read(tail)
    path.unlink()
    append(path.with_name("new"), numbered(50, 80))
    path.with_name("new").rename(path)
    assert b"".join(read(tail)) == numbered(50, 80)
    assert tail.generation == 1


def test_reading_continues_while_the_path_is_unreachable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = tail_after(path, b"one\n")
    append(path, b"two\n")
    real = os.stat

    def refuse(where: str, **options: bool) -> os.stat_result:
        if str(where) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(where, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        assert read(tail) == [b"two\n"], "through the descriptor"
        assert tail.problem == "Permission denied"
    append(path, b"three\n")
    assert read(tail) == [b"three\n"]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


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
def test_only_regular_files_are_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], problem: str
) -> None:
    make(path)
    tail = LogTail(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: pytest.fail("opened"))
        assert read(tail) == []
        tail.skip_older(1e12)
    assert tail.problem == problem
    path.rmdir() if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()
    append(path, b"now a file\n")
    assert [*read(tail), tail.problem] == [b"now a file\n", None]


def test_an_unreadable_log_is_reported_as_a_problem(path: Path, tail: LogTail, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, b"secret\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied")))
        assert (read(tail), tail.problem) == ([], "Permission denied")
    assert (read(tail), tail.problem) == ([b"secret\n"], None)


def test_a_long_read_stops_when_asked_to(path: Path, tail: LogTail) -> None:
    with path.open("wb") as out:
        out.write(numbered(1, 10))
        out.truncate(100 << 30)  # sparse, as large as a huge log
    found = [bytes(buffer[:end]) for buffer, end, _ in tail.read_chunks(1 << 40, lambda: True)]
    assert found == [numbered(1, 10)]
    assert tail.bytes_read == CHUNK_BYTES
    assert tail.lag_bytes == (100 << 30) - CHUNK_BYTES


def test_reads_of_two_logs_can_be_interleaved(path: Path) -> None:
    other = path.with_name("other.log")
    append(path, numbered(1, 100_000))
    append(other, numbered(200_001, 300_000))
    chunks = zip(LogTail(str(path)).read_chunks(), LogTail(str(other)).read_chunks(), strict=True)
    both = [(bytes(one.buffer[: one.end]), bytes(two.buffer[: two.end])) for one, two in chunks]
    assert b"".join(text for text, _ in both) == numbered(1, 100_000)
    assert b"".join(text for _, text in both) == numbered(200_001, 300_000)


def test_an_interrupted_read_resumes_after_the_last_returned_chunk(path: Path, tail: LogTail) -> None:
    append(path, numbered(1, 200_000))
    buffer, end, _ = next(tail.read_chunks())
    first = bytes(buffer[:end])
    assert b"".join([first, *read(tail)]) == numbered(1, 200_000)


def test_a_restarted_reader_resumes_at_the_saved_offset(path: Path, tail: LogTail) -> None:
    append(path, b"one\ntw")
    assert read(tail) == [b"one\n"]
    tail = restart(tail)
    append(path, b"o\n")
    assert read(tail) == [b"two\n"]
    assert (tail.bytes_read, tail.generation, tail.problem) == (8, 0, None)


def test_a_log_rotated_between_two_readers_is_read_to_its_end(path: Path) -> None:
    tail = tail_after(path, b"one\n")
    position = tail.position()
    tail.close()
    append(path, b"two\nthr")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"b\n")
    path.with_name("worker.log.1").rename(path.with_name("worker.log.2"))
    path.rename(path.with_name("worker.log.1"))
    append(path, b"c\n")
    assert read(LogTail.restore(str(path), position)) == [b"two\n", b"thr", b"b\n", b"c\n"]


def test_a_log_that_is_gone_at_a_restart_of_the_reader_is_reported(path: Path) -> None:
    tail = tail_after(path, numbered(1, 10))
    position = tail.position()
    tail.close()
    path.write_bytes(numbered(101, 190))
    tail = LogTail.restore(str(path), position)
    assert b"".join(read(tail)) == numbered(101, 190)
    assert tail.generation == 1
    tail = LogTail.restore(str(path), position)
    path.unlink()
    assert read(tail) == []
    assert (tail.lag_bytes, tail.generation) == (0, 1)
    assert tail.problem is not None


@pytest.mark.parametrize(
    "change",
    [{"offset": -1}, {"offset": 9}, {"mark": "zz"}, {"mark": "00" * (MARK_BYTES + 1)}, {"read": 1 << 40}],
)
def test_an_impossible_position_is_refused(path: Path, change: dict[str, Any]) -> None:
    tail = tail_after(path, b"one\ntwo\n")
    with pytest.raises(ValueError, match=r"position|hex"):
        LogTail.restore(str(path), tail.position()._replace(**change))


def test_a_new_log_that_begins_like_the_rotated_one_is_read_from_its_top(path: Path) -> None:
    tail = tail_after(path, numbered(1, 20))
    path.rename(path.with_name("worker.log.1"))
    append(path, numbered(1, 22))
    assert b"".join(read(tail)) == numbered(1, 22)


def test_small_reads_of_a_rotated_log_return_whole_records(path: Path) -> None:
    tail = tail_after(path, b"a\n")
    append(path, b"one\ntwo\nthree")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"new\n")
    found = []
    for left in (14, 11, 8, 5, 4):
        found += [text for text, _ in read_chunks(tail, 3)]
        assert tail.lag_bytes == left
    assert found == [b"one\n", b"two\n", b"three"]


def test_a_file_seen_before_its_rotation_is_read_under_any_name(path: Path) -> None:
    tail = tail_after(path, b"a\n")
    path.rename(path.with_name("first"))
    path.touch()
    read(tail)
    append(path, b"b\n")
    path.rename(path.with_name("second"))
    assert read(tail) == [b"b\n"]
    append(path, b"c\n")
    assert read(tail) == [b"c\n"]


def test_a_log_with_a_recent_mtime_is_checked_again(path: Path, tail: LogTail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes within the resolution of the mtime leave the same mtime."""
    append(path, numbered(10, 19))
    found = os.stat(path)
    read(tail)
    path.write_bytes(numbered(20, 29))
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda place, **more: found if str(place) == str(path) else real(place, **more))
    assert b"".join(read(tail)) == numbered(20, 29)


def test_another_file_that_reuses_the_inode_is_not_read(path: Path) -> None:
    tail = tail_after(path, numbered(1, 10))
    position = tail.position()
    tail.close()
    foreign = path.with_name("foreign.txt")
    append(foreign, b"of no concern\n" * 100)
    path.unlink()
    append(path, b"new\n")
    tail = LogTail.restore(str(path), position._replace(inode=foreign.stat().st_ino))
    assert read(tail) == [b"new\n"]
    assert tail.problem is not None


def test_a_log_truncated_and_rotated_between_two_readers_is_read_from_its_top(path: Path) -> None:
    tail = tail_after(path, numbered(1, 10))
    position = tail.position()
    tail.close()
    path.write_bytes(numbered(101, 120))
    path.rename(path.with_name("worker.log.1"))
    append(path, b"new\n")
    assert b"".join(read(LogTail.restore(str(path), position))) == numbered(101, 120) + b"new\n"


def test_rotated_files_with_equal_mtimes_are_each_read_once(path: Path) -> None:
    tail = tail_after(path, b"a\n")
    path.rename(path.with_name("worker.log.2"))
    append(path, b"b\n")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"c\n")
    for name in ("worker.log.1", "worker.log.2"):
        os.utime(path.with_name(name), (1, 1))
    assert read(tail) == [b"b\n", b"c\n"]


def test_a_log_rewritten_to_the_same_size_and_then_rotated_is_read(path: Path) -> None:
    tail = tail_after(path, b"one\n")
    path.write_bytes(b"two\n")
    path.rename(path.with_name("worker.log.1"))
    append(path, b"three\n")
    assert read(tail) == [b"two\n", b"three\n"]
