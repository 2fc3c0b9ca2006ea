"""Rows of many files in little memory."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.files.outputs import file_table
from exporter.files.outputs.file_table import FileRow, FileTable, folded_inode

FILES = 200_000
MOST_BYTES_PER_FILE = 55  # 35 for the row; the rest is for all files together

KEYS = st.integers(-20, 20).map(lambda number: number * (1 << 58))
ROWS = st.builds(
    FileRow,
    st.floats(-1e9, 1e11),
    st.sampled_from([0, 7, (1 << 32) - 1, 1 << 32, 1 << 62]),
    st.integers(0, (1 << 32) - 1),
    st.sampled_from([-3, -1, 0, 32_767, 32_768, 1 << 40]),
    st.sampled_from([-1, 0, 5, 65_534, 65_535, 1 << 50]),
    st.integers(0, 0x7F),
)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "remove", "see", "mark"]), KEYS, ROWS), max_size=200)


@given(STEPS)
def test_a_table_behaves_like_a_dictionary(steps: list[tuple[str, int, FileRow]]) -> None:
    expected: dict[int, FileRow] = {}
    seen: set[int] = set()
    with mock.patch.object(file_table, "MOST_ROWS", 4):
        table = FileTable()
        for kind, key, row in steps:
            if kind == "put":
                table.put(key, row)
                expected[key] = row
                seen.add(key)
            elif kind == "remove" and key in expected:
                table.remove(key)
                del expected[key]
            elif kind == "see":
                assert table.see(key) == (expected[key].inode if key in expected else None)
                seen.add(key)
            elif kind == "mark":
                table.start_marking()
                seen.clear()
                for other in list(expected)[::2]:
                    table.see(other)
                    seen.add(other)
                assert set(table.unseen()) == expected.keys() - seen
            assert len(table) == len(expected)
    assert dict(table.rows()) == expected
    assert {key: table.get(key) for key in expected} == expected
    assert table.get(12345) is None
    table.clear()
    assert (len(table), list(table.rows())) == (0, [])


def test_an_inode_of_64_bits_is_folded() -> None:
    assert folded_inode(7) == 7
    assert folded_inode((1 << 40) + 7) == (1 << 8) + 7


@pytest.fixture
def many_files() -> Iterator[Path]:
    """A folder with many names, in memory where possible: links to a few files."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm if os.access(shm, os.W_OK) else None))
    try:
        for number in range(FILES):
            path = f"{folder}/output_worker_0_{number:07d}.jsonl"
            if number % 10_000 == 0:
                source = path
                Path(source).write_text("{}\n")
            else:
                os.link(source, path)
        yield folder
    finally:
        shutil.rmtree(folder)


_FRESH = """
import os, sys, tempfile
from exporter.files.outputs.outputs_reader import FileOwnership, OutputWatch
def resident():
    with open("/proc/self/statm") as source:
        return int(source.read().split()[1]) * os.sysconf("SC_PAGESIZE")
owner = FileOwnership(lambda name: 0, frozenset({0}), frozenset(), owns_unranked=True)
OutputWatch(tempfile.gettempdir(), "none", owner).poll(0.0)
before, watch, now = resident(), OutputWatch(sys.argv[1], "*", owner), 0.0
while not (reading := watch.poll(now)).complete:
    now += 30
reading = watch.poll(now + 30)
print(reading.owners[0].files, reading.owners[0].bytes, resident() - before)
"""


def test_a_watch_needs_little_memory_for_each_file(many_files: Path) -> None:
    command = [sys.executable, "-c", _FRESH, str(many_files)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, cwd=Path(file_table.__file__).parents[3]
    )
    files, size, grown = map(int, done.stdout.split())
    assert (files, size) == (FILES, 3 * FILES)
    assert grown / FILES <= MOST_BYTES_PER_FILE
