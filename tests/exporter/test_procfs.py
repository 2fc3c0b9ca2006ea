"""Processes: stat texts, and trees of real children."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.readers.procfs import (
    CLOCK_TICKS,
    PAGE_SIZE,
    STATES,
    ProcessStat,
    ProcessTree,
    TreeSample,
    parse_io,
    parse_stat,
    read_children,
    read_self_rss_bytes,
)
from tests.exporter.conftest import Start
from tests.exporter.support import open_files, until

REST = b"1 25883 25883 0 -1 4194560 4675 58248 0 1 130 20 50 15 20 0 3 0 310563 5124096 911 18446744073709551615 0 0"
IO_TEXT = b"rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 344064\nwrite_bytes: 966656\ncancelled_write_bytes: 7\n"
COMMANDS = st.binary(min_size=0, max_size=15).filter(lambda name: b"\0" not in name)


def stat_text(command: bytes, state: bytes = b"S") -> bytes:
    return b"25883 (" + command + b") " + state + b" " + REST + b"\n"


@given(COMMANDS)
@example(b"a) b (")
@example(b") R 1 2 3")
@example(b"a\nb")
@example(b"")
def test_any_command_name_leaves_the_other_facts_alone(command: bytes) -> None:
    assert parse_stat(stat_text(command)) == ProcessStat("sleeping", 1, 150 / CLOCK_TICKS, 911 * PAGE_SIZE, 3, 310563)


@pytest.mark.parametrize(("letter", "state"), [*STATES.items(), ("?", "running")])
def test_every_letter_of_the_kernel_has_a_state(letter: str, state: str) -> None:
    assert parse_stat(stat_text(b"python", letter.encode())).state == state


def test_io_is_what_reached_storage() -> None:
    assert parse_io(IO_TEXT) == (344064, 966656)


def read(tree: ProcessTree) -> TreeSample:
    """One look at a worker that is there."""
    sample = tree.read()
    assert sample is not None
    return sample


def test_a_single_process_is_as_psutil_sees_it(start: Start) -> None:
    process = start("sleep", "60")
    tree, other = ProcessTree(process.pid), psutil.Process(process.pid)
    until(lambda: other.name() == "sleep" and read(tree).state == "sleeping", "sleep to sleep")
    sample = read(tree)
    assert (sample.threads, sample.children) == (1, 0)
    assert sample.rss_bytes == pytest.approx(other.memory_info().rss, rel=0.3)
    assert sample.cpu_s < 1
    assert tree.start_ticks / CLOCK_TICKS == pytest.approx(other.create_time() - psutil.boot_time(), abs=1.1)


def test_a_program_with_a_hard_name_can_be_watched(start: Start, tmp_path: Path) -> None:
    sleep = Path("/bin/sleep").resolve()
    link = tmp_path / "a) b ("
    link.symlink_to(sleep)
    process = start(str(link), "60")
    tree = ProcessTree(process.pid)
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text("utf-8") == "a) b (\n", "its name")
    assert read(tree).threads == 1


def test_grandchildren_count(start: Start) -> None:
    process = start("sh", "-c", "sleep 60 & sh -c 'sleep 60 & echo up; wait' & wait")
    assert process.stdout is not None
    process.stdout.readline()
    tree = ProcessTree(process.pid)
    sample = read(tree)
    assert (sample.children, sample.threads) == (3, 4)
    assert sample.rss_bytes > psutil.Process(process.pid).memory_info().rss


def test_children_of_any_thread_are_found_after_a_few_looks(start: Start) -> None:
    program = (
        "import subprocess, sys, threading\n"
        "def born():\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    print('up', flush=True)\n"
        "    child.wait()\n"
        "sys.stdin.readline()\n"
        "threading.Thread(target=born, daemon=True).start()\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program)
    assert process.stdin is not None
    assert process.stdout is not None
    tree = ProcessTree(process.pid)
    assert read(tree).children == 0
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()
    looks = [read(tree).children for _ in range(ProcessTree.WHOLE_TREE_EVERY)]
    assert looks[-1] == 1
    assert read(tree).threads == 3


def test_an_orphan_stays_watched_until_its_end(start: Start) -> None:
    process = start("sh", "-c", "sh -c 'sleep 60 & echo up; wait' & wait; read line")
    assert process.stdout is not None
    process.stdout.readline()
    tree = ProcessTree(process.pid)
    assert read(tree).children == 2
    (middle,) = read_children(process.pid)
    (orphan,) = read_children(middle)
    os.kill(middle, signal.SIGKILL)
    until(lambda: read(tree).children == 1, "the end of the one between")
    assert read_children(process.pid) == []
    os.kill(orphan, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{orphan}").exists() or psutil.Process(orphan).status() == "zombie", "its end")


PARENT_OF_ONE = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-I', '-c', sys.argv[1], *sys.argv[2:]], stdin=subprocess.PIPE)\n"
    "sys.stdin.readline()\n"
    "child.communicate(b'')\n"
    "print('reaped', flush=True)\n"
    "sys.stdin.readline()\n"
)
"""Starts a program of Python, and on a first line reaps it."""


def reap(process: "subprocess.Popen[str]") -> None:
    """Have the child reaped, and wait for that."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "reaped\n"


def test_cpu_seconds_stay_when_a_child_has_ended(start: Start) -> None:
    burn = (
        "import sys, time\n"
        "while time.process_time() < 0.1: pass\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )  # fmt: skip
    process = start(sys.executable, "-I", "-c", PARENT_OF_ONE, burn)
    assert process.stdout is not None
    tree = ProcessTree(process.pid)
    process.stdout.readline()
    before = read(tree)
    assert before.cpu_s >= 0.05
    assert before.children == 1
    reap(process)
    after = read(tree)
    assert after.children == 0
    assert after.cpu_s >= before.cpu_s
    assert read(tree).cpu_s >= after.cpu_s


def test_bytes_of_a_reaped_child_count_once(start: Start, tmp_path: Path) -> None:
    size = 8 << 20
    write = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        f"os.write(fd, b'x' * {size})\n"
        "os.fsync(fd)\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = start(sys.executable, "-I", "-c", PARENT_OF_ONE, write, str(tmp_path / "file"))
    assert process.stdout is not None
    tree = ProcessTree(process.pid)
    process.stdout.readline()
    before = read(tree).io_write_bytes
    if not before:
        pytest.skip("the file system of the tests counts no bytes")
    assert before >= size
    reap(process)
    after = read(tree).io_write_bytes
    assert after is not None
    assert before <= after < 2 * size


def test_bytes_never_fall_while_a_child_is_being_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent is looked at, then reaps its child, then the child is looked for. A fall would be a counter reset."""
    for pid, parent, children in ((7, 1, "8 "), (8, 7, "")):
        (tmp_path / str(pid) / "task" / str(pid)).mkdir(parents=True)
        text = stat_text(b"sh").replace(b" 1 25883 ", f" {parent} 25883 ".encode(), 1)
        (tmp_path / str(pid) / "stat").write_bytes(text)
        (tmp_path / str(pid) / "io").write_bytes(IO_TEXT)
        (tmp_path / str(pid) / "task" / str(pid) / "children").write_text(children, encoding="ascii")
    tree = ProcessTree(7, proc=str(tmp_path))
    before = read(tree)
    assert (before.children, before.io_read_bytes, before.io_write_bytes) == (1, 2 * 344064, 2 * 966656)
    child, pread = os.stat(tmp_path / "8" / "stat").st_ino, os.pread

    def without_child(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == child:
            raise ProcessLookupError(3, "No such process")
        return pread(fd, size, offset)

    (tmp_path / "7" / "task" / "7" / "children").write_text("", encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", without_child)
        after = read(tree)
    tree.close()
    assert after.children == 0
    assert (after.io_read_bytes or 0) >= 2 * 344064
    assert (after.io_write_bytes or 0) >= 2 * 966656


def test_bytes_are_as_psutil_sees_them(start: Start, tmp_path: Path) -> None:
    process = start(
        "sh", "-c", f"dd if=/dev/zero of={tmp_path / 'f'} bs=64k count=16 conv=fsync status=none; echo; cat"
    )
    assert process.stdout is not None
    process.stdout.readline()
    sample, counters = read(ProcessTree(process.pid)), psutil.Process(process.pid).io_counters()
    assert (sample.io_read_bytes, sample.io_write_bytes) == (counters.read_bytes, counters.write_bytes)


def test_a_worker_that_has_ended_and_was_reaped_gives_none(start: Start) -> None:
    process = start("sleep", "60")
    tree = ProcessTree(process.pid)
    process.kill()
    process.wait()
    assert tree.read() is None
    assert tree.read() is None


def test_a_worker_that_was_not_reaped_is_a_zombie(start: Start) -> None:
    process = start("true")
    tree = ProcessTree(process.pid)
    until(lambda: read(tree).state == "zombie", "the end of true")


def test_a_process_with_other_start_ticks_is_refused(start: Start) -> None:
    process = start("sleep", "60")
    ticks = ProcessTree(process.pid).start_ticks
    place = f"/proc/{process.pid}/"
    before = len(open_files(place))
    ProcessTree(process.pid, ticks).close()
    with pytest.raises(ProcessLookupError, match=f"^process {process.pid} is another one now$"):
        ProcessTree(process.pid, ticks - 1)
    assert len(open_files(place)) == before


def test_a_process_that_is_not_there_is_refused(start: Start) -> None:
    process = start("true")
    process.wait()
    with pytest.raises(ProcessLookupError, match=f"^process {process.pid} is not there$"):
        ProcessTree(process.pid)
    assert read_children(process.pid) == []
    assert read_children(process.pid, every_thread=False) == []


def test_a_process_that_ends_between_open_and_read_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "7" / "stat").mkdir(parents=True)  # opens and cannot be read, as the stat of one that has just ended
    with pytest.raises(ProcessLookupError):
        ProcessTree(7, proc=str(tmp_path))
    assert open_files(str(tmp_path)) == []


def test_a_process_whose_io_is_denied_has_all_but_io(tmp_path: Path) -> None:
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    (tmp_path / "7" / "stat").write_bytes(stat_text(b"python"))
    (tmp_path / "7" / "task" / "7" / "children").write_text("8 9 ", encoding="ascii")
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "stat").write_bytes(stat_text(b"sh"))
    tree = ProcessTree(7, 310563, proc=str(tmp_path))
    cpu_s, rss = 2 * 150 / CLOCK_TICKS, 2 * 911 * PAGE_SIZE
    assert tree.read() == TreeSample("sleeping", cpu_s, rss, 6, 1, None, None), "9 is gone, which is no error"
    tree.close()


def test_closing_gives_all_descriptors_back(start: Start) -> None:
    process = start("sh", "-c", "sleep 60 & echo; wait")
    assert process.stdout is not None
    process.stdout.readline()
    (child,) = read_children(process.pid)
    tree = ProcessTree(process.pid)
    assert read(tree).children == 1
    assert open_files(f"/proc/{process.pid}/")
    assert open_files(f"/proc/{child}/")
    tree.close()
    assert open_files(f"/proc/{process.pid}/") == open_files(f"/proc/{child}/") == []


def test_own_memory_is_as_psutil_sees_it() -> None:
    assert read_self_rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
