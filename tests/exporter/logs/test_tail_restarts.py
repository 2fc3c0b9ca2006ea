"""A log that is written, rotated, truncated and deleted while its reader restarts again and again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.logs import tail_reader
from exporter.logs.tail_reader import LogTail

WRITES = st.tuples(st.just("write"), st.integers(1, 90), st.sampled_from([b"\n", b"\r", b"\r\n", b""]))
READS = st.tuples(st.just("read"), st.sampled_from([1, 7, 100, 1 << 20]))
OTHERS = st.tuples(st.sampled_from(["rotate", "date", "empty", "truncate", "outgrow", "delete", "restart", "close"]))
STEPS = st.lists(WRITES | READS | OTHERS, max_size=25)


@pytest.fixture(autouse=True)
def _clear_spare_buffers() -> Iterator[None]:
    tail_reader._spare.clear()
    yield
    tail_reader._spare.clear()


class Log:
    """A log writer with rotation, and a reader."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "worker.log"
        self.path.touch()
        self.tail = LogTail(str(self.path))
        self.written = b""
        self.found = b""
        self.records = 0
        self.dates = 0
        self.read(1)  # content rotated away before the first read belongs to another job

    def write(self, size: int, end: bytes) -> None:
        """Write a unique record, or an unfinished one if `end` is empty."""
        self.records += 1
        text = f"<{self.records} ".encode().ljust(size, b".") + end
        with self.path.open("ab") as out:
            out.write(text)
        self.written += text

    def read(self, most_bytes: int) -> None:
        for buffer, end, _ in self.tail.read_chunks(most_bytes):
            self.found += bytes(buffer[:end])

    def read_all(self) -> None:
        self.read(1 << 20)
        while self.tail.has_more or self.tail.lag_bytes:
            self.read(1 << 20)

    def rotate(self) -> None:
        """``worker.log`` -> ``worker.log.1`` -> ``worker.log.2``; the next record creates the new file."""
        for number in range(len(list(self.path.parent.glob("worker.log.*"))), 0, -1):
            self.path.with_name(f"worker.log.{number}").rename(self.path.with_name(f"worker.log.{number + 1}"))
        self.path.rename(self.path.with_name("worker.log.1"))
        self.write(3, b"\n")

    def empty(self) -> None:
        """Rotate, and create an empty new file."""
        self.rotate_without_record()
        self.path.touch()

    def rotate_without_record(self) -> None:
        text, self.written, self.records = self.written, b"", self.records
        self.rotate()
        self.path.unlink()
        self.written = text

    def date(self) -> None:
        self.dates += 1
        self.path.rename(self.path.with_name(f"worker.log-202601{self.dates:02d}"))
        self.write(3, b"\n")

    def truncate(self) -> None:
        """Truncate to zero after all was read."""
        self.write(5, b"\n")
        self.read_all()
        self.path.write_bytes(b"")

    def outgrow(self) -> None:
        """Truncate, and write more than before at once."""
        size = self.path.stat().st_size
        self.truncate()
        self.write(size + 20, b"\n")

    def delete(self) -> None:
        self.write(5, b"\n")
        self.read_all()
        self.path.unlink()
        self.write(6, b"\n")
        self.read(1)  # no name links a deleted file to its successor

    def restart(self) -> None:
        position = self.tail.position()
        self.tail.close()
        self.tail = LogTail.restore(str(self.path), position)

    def close(self) -> None:
        self.tail.close()


@given(steps=STEPS, chunk=st.sampled_from([150, 1000, 1 << 20]))
def test_each_record_is_read_once_whatever_happens_to_log_and_reader(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]], chunk: int
) -> None:
    if {step[0] for step in steps} >= {"date", "rotate"} or {step[0] for step in steps} >= {"date", "empty"}:
        steps = [step for step in steps if step[0] != "date"]  # a log has one rotation scheme
    log = Log(tmp_path_factory.mktemp("log"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_reader, "CHUNK_BYTES", chunk)
        tail_reader._spare.clear()
        for name, *arguments in steps:
            getattr(log, name)(*arguments)
        log.read_all()
        log.found += log.tail.pop_unfinished_record()
        log.tail.close()
        tail_reader._spare.clear()
    assert log.found == log.written
