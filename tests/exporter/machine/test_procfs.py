"""Processes in ``/proc``: texts of stat files, and trees of real children."""

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.contract.process_identity import read_start_ticks
from exporter.contract.status import ProcessDetails
from exporter.machine import process_tree
from exporter.machine.process_tree import (
    MOST_LINKS,
    MOST_PATHS,
    MOST_PROCESSES,
    ProcessTree,
    ProcessTreeSample,
)
from exporter.machine.procfs import (
    CLOCK_TICKS,
    MOST_ENVIRONMENT_BYTES,
    PAGE_SIZE,
    STATES,
    ProcessStat,
    parse_process_io,
    parse_process_stat,
    read_children,
    read_environment,
    read_self_rss_bytes,
    read_zombie_status,
)
from tests.exporter.conftest import Start
from tests.support.exporter import open_files, read_line, send_line, until

REST = b"1 25883 25883 0 -1 4194560 4675 58248 0 1 130 20 50 15 20 0 3 0 310563 5124096 911 18446744073709551615 0 0"
IO_TEXT = b"rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 344064\nwrite_bytes: 966656\ncancelled_write_bytes: 7\n"
COMMANDS = st.binary(min_size=0, max_size=15).filter(lambda name: b"\0" not in name)


def stat_text(command: bytes, state: bytes = b"S", parent: int = 1) -> bytes:
    return b"25883 (" + command + b") " + state + b" %d" % parent + REST[1:] + b"\n"


def show_process(
    proc: Path, pid: int, parent: int = 1, *, children: str | None = None, io: bytes | None = None
) -> Path:
    """Make the files of one process in a directory like ``/proc``."""
    folder = proc / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_bytes(stat_text(b"sh", parent=parent))
    if io is not None:
        (folder / "io").write_bytes(io)
    if children is not None:
        (folder / "task" / str(pid) / "children").write_text(children, encoding="ascii")
    return folder


@given(COMMANDS)
@example(b"a) b (")
@example(b") R 1 2 3")
@example(b"a\nb")
@example(b"")
def test_any_command_name_leaves_the_other_fields_intact(command: bytes) -> None:
    assert parse_process_stat(stat_text(command)) == ProcessStat("sleeping", 1, 150, 65, 3, 310563, 911)


@pytest.mark.parametrize(("letter", "state"), [*STATES.items(), ("?", "running")])
def test_every_state_letter_of_the_kernel_has_a_name(letter: str, state: str) -> None:
    assert parse_process_stat(stat_text(b"python", letter.encode())).state == state


def test_io_counts_bytes_that_reached_storage() -> None:
    assert parse_process_io(IO_TEXT) == (344064, 966656)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Run with the rights of another user than the owner of the workers."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextlib.contextmanager
def spare_descriptors(count: int) -> Iterator[None]:
    """Let this process open at most this number of additional files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]
    for fd in free:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def read(tree: ProcessTree) -> ProcessTreeSample:
    """A sample of an existing worker."""
    sample = tree.read()
    assert sample is not None
    return sample


def test_a_sample_of_a_single_process_agrees_with_psutil(start: Start) -> None:
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


def test_a_worker_that_renames_itself_is_still_recognized(start: Start) -> None:
    program = "open('/proc/self/comm', 'w').write('a) b (')\nprint('renamed', flush=True)\ninput()"
    process = start(sys.executable, "-I", "-c", program)
    tree = ProcessTree(process.pid)
    read_line(process)
    assert Path(f"/proc/{process.pid}/comm").read_text("utf-8") == "a) b (\n"
    until(lambda: read(tree).state == "sleeping", "its wait")
    assert ProcessTree(process.pid, tree.start_ticks).start_ticks == tree.start_ticks


def test_a_stopped_worker_is_stopped_until_it_continues(start: Start) -> None:
    process = start("sleep", "60")
    tree = ProcessTree(process.pid)
    process.send_signal(signal.SIGSTOP)
    until(lambda: read(tree).state == "stopped", "its stop")
    process.send_signal(signal.SIGCONT)
    until(lambda: read(tree).state == "sleeping", "its return")


def test_an_uninterruptible_worker_is_in_disk_sleep(start: Start, tmp_path: Path) -> None:
    """The parent of a vfork waits like this until its child has executed a program. This child first opens a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = (
        "import os, sys\n"
        "print('up', flush=True)\n"
        "opening = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)\n"
        "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[opening])\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program, str(pipe))
    tree = ProcessTree(process.pid)
    until(lambda: (read(tree).state, read(tree).children) == ("disk_sleep", 1), "its wait")
    os.close(os.open(pipe, os.O_WRONLY))
    until(lambda: read(tree).state == "sleeping", "its return")


def test_a_worker_whose_first_thread_has_ended_is_alive(start: Start) -> None:
    number = {"x86_64": 60, "aarch64": 93}.get(platform.machine())
    if number is None:
        pytest.skip("exit(2) has another number here")
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        f"ctypes.CDLL(None).syscall({number}, 0)\n"
    )
    process = start(sys.executable, "-I", "-c", program)
    tree = ProcessTree(process.pid)
    until(lambda: Path(f"/proc/{process.pid}/stat").read_bytes().split()[2] == b"Z", "the end of its first thread")
    # the second thread may not be asleep yet
    until(lambda: read(tree).state == "sleeping", "the sleep of its second thread")
    assert read(tree).rss_bytes > 1 << 20
    assert read_zombie_status(process.pid, tree.start_ticks) is None
    process.kill()
    until(lambda: read(tree).state == "zombie", "its end")
    assert read_zombie_status(process.pid, tree.start_ticks) == signal.SIGKILL


def test_grandchildren_count(start: Start) -> None:
    process = start("sh", "-c", "sleep 60 & sh -c 'sleep 60 & echo up; wait' & wait")
    read_line(process)
    tree = ProcessTree(process.pid)
    sample = read(tree)
    assert (sample.children, sample.threads) == (3, 4)
    assert sample.rss_bytes > psutil.Process(process.pid).memory_info().rss


def test_children_of_any_thread_are_found(start: Start) -> None:
    program = (
        "import subprocess, sys, threading\n"
        "def run_child():\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    print('up', flush=True)\n"
        "    child.wait()\n"
        "sys.stdin.readline()\n"
        "threading.Thread(target=run_child, daemon=True).start()\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program)
    tree = ProcessTree(process.pid)
    assert read(tree).children == 0
    send_line(process)
    read_line(process)
    until(lambda: read(tree).children == 1, "the child of its thread")
    assert read(tree).threads == 3


def test_the_next_read_includes_a_new_child(start: Start) -> None:
    process = start("sh", "-c", "sleep 60 & read line; sleep 60 & echo; wait")
    tree = ProcessTree(process.pid)
    until(lambda: read(tree).children == 1, "its first child")
    if tree._reads % ProcessTree.FULL_READ_EVERY == 0:
        read(tree)  # the next read would be a full one
    send_line(process)
    read_line(process)
    assert read(tree).children == 2


def test_an_orphan_stays_watched_until_its_end(start: Start) -> None:
    process = start("sh", "-c", "sh -c 'sleep 60 & echo up; wait' & wait; read line")
    read_line(process)
    tree = ProcessTree(process.pid)
    assert read(tree).children == 2
    (middle,) = read_children(process.pid)
    (orphan,) = read_children(middle)
    os.kill(middle, signal.SIGKILL)
    until(lambda: read(tree).children == 1, "the end of the middle process")
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
)  # starts a Python program and reaps it after a line of input


def reap(process: "subprocess.Popen[str]") -> None:
    """Let the parent reap its child, and wait for it."""
    send_line(process)
    assert read_line(process) == "reaped\n"


def test_cpu_seconds_of_an_ended_child_are_kept(start: Start) -> None:
    burn = (
        "import sys, time\n"
        "while time.process_time() < 0.1: pass\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )  # fmt: skip
    process = start(sys.executable, "-I", "-c", PARENT_OF_ONE, burn)
    tree = ProcessTree(process.pid)
    read_line(process)
    before = read(tree)
    assert before.cpu_s >= 0.05
    assert before.children == 1
    reap(process)
    after = read(tree)
    assert after.children == 0
    assert after.cpu_s >= before.cpu_s
    assert read(tree).cpu_s >= after.cpu_s


def test_io_bytes_of_a_reaped_child_count_once(start: Start, tmp_path: Path) -> None:
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
    tree = ProcessTree(process.pid)
    read_line(process)
    before = read(tree).io_write_bytes
    if not before:
        pytest.skip("the file system of the tests counts no bytes")
    assert before >= size
    reap(process)
    after = read(tree).io_write_bytes
    assert after is not None
    assert before <= after < 2 * size


def test_io_bytes_never_fall_while_a_child_is_being_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent is read and then reaps its child, before the child is read. A fall would be a counter reset."""
    show_process(tmp_path, 7, children="8 ", io=IO_TEXT)
    show_process(tmp_path, 8, parent=7, children="", io=IO_TEXT)
    tree = ProcessTree(7, proc=str(tmp_path))
    before = read(tree)
    assert (before.children, before.io_read_bytes, before.io_write_bytes) == (1, 2 * 344064, 2 * 966656)
    child, pread = os.stat(tmp_path / "8" / "stat").st_ino, os.pread

    def without_child(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == child:
            raise ProcessLookupError(3, "No such process")
        return pread(fd, size, offset)

    show_process(tmp_path, 7, children="")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", without_child)
        after = read(tree)
    tree.close()
    assert after.children == 0
    assert (after.io_read_bytes or 0) >= 2 * 344064
    assert (after.io_write_bytes or 0) >= 2 * 966656


def test_io_bytes_agree_with_psutil(start: Start, tmp_path: Path) -> None:
    process = start(
        "sh", "-c", f"dd if=/dev/zero of={tmp_path / 'f'} bs=64k count=16 conv=fsync status=none; echo; read line"
    )
    read_line(process)
    sample, counters = read(ProcessTree(process.pid)), psutil.Process(process.pid).io_counters()
    assert (sample.io_read_bytes, sample.io_write_bytes) == (counters.read_bytes, counters.write_bytes)


def test_a_reaped_worker_has_no_sample(start: Start) -> None:
    process = start("sleep", "60")
    tree = ProcessTree(process.pid)
    process.kill()
    process.wait()
    assert tree.read() is None
    assert tree.read() is None


def test_an_ended_worker_is_a_zombie_until_it_is_reaped(start: Start) -> None:
    process = start("true")
    tree = ProcessTree(process.pid)
    until(lambda: read(tree).state == "zombie", "the end of true")


def test_a_process_with_other_start_ticks_is_refused(start: Start) -> None:
    process = start("sleep", "60")
    ticks = ProcessTree(process.pid).start_ticks
    directory = f"/proc/{process.pid}/"
    before = len(open_files(directory))
    ProcessTree(process.pid, ticks).close()
    with pytest.raises(ProcessLookupError, match=f"^pid {process.pid} now belongs to another process$"):
        ProcessTree(process.pid, ticks - 1)
    assert len(open_files(directory)) == before


def test_a_missing_process_is_refused(start: Start) -> None:
    process = start("true")
    process.wait()
    with pytest.raises(ProcessLookupError, match=f"^process {process.pid} does not exist$"):
        ProcessTree(process.pid)
    assert read_children(process.pid) == []
    assert read_children(process.pid, every_thread=False) == []


def test_a_process_that_ends_between_open_and_read_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "7" / "stat").mkdir(
        parents=True
    )  # can be opened but not read, like the stat of a process that has just ended
    with pytest.raises(ProcessLookupError):
        ProcessTree(7, proc=str(tmp_path))
    assert open_files(str(tmp_path)) == []


def test_a_process_with_unreadable_io_has_all_other_values(tmp_path: Path) -> None:
    show_process(tmp_path, 7, children="8 9 ")
    show_process(tmp_path, 8, parent=7)
    tree = ProcessTree(7, 310563, proc=str(tmp_path))
    cpu_s, rss = 2 * (150 + 65) / CLOCK_TICKS, 2 * 911 * PAGE_SIZE
    assert tree.read() == ProcessTreeSample("sleeping", cpu_s, rss, 6, 1, None, None), (
        "process 9 has ended, which is not an error"
    )
    tree.close()


def test_closing_releases_all_descriptors(start: Start) -> None:
    process = start("sh", "-c", "sleep 60 & echo; wait")
    read_line(process)
    (child,) = read_children(process.pid)
    tree = ProcessTree(process.pid)
    assert read(tree).children == 1
    assert open_files(f"/proc/{process.pid}/")
    assert open_files(f"/proc/{child}/")
    tree.close()
    assert open_files(f"/proc/{process.pid}/") == open_files(f"/proc/{child}/") == []


def test_own_memory_agrees_with_psutil() -> None:
    assert read_self_rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


CLONE3 = 435  # on all architectures
BURN = "import time\nwhile time.process_time() < 0.1: pass\n"


def test_cpu_time_of_children_between_two_reads_counts(start: Start) -> None:
    program = (
        "import subprocess, sys\n"
        "sys.stdin.readline()\n"
        "for _ in range(4): subprocess.run([sys.executable, '-I', '-c', sys.argv[1]], check=True)\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program, BURN)
    tree = ProcessTree(process.pid)
    before = read(tree).cpu_s
    send_line(process)
    read_line(process)
    after = read(tree)
    assert after.children == 0
    assert after.cpu_s - before >= 0.36


def test_cpu_time_is_counted_once_whenever_it_is_read(start: Start) -> None:
    program = (
        "import subprocess, sys, time\n"
        "for _ in range(20): subprocess.run([sys.executable, '-I', '-S', '-c', 'sum(range(300_000))'], check=True)\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program)
    assert process.stdout is not None
    tree, cpu_times = ProcessTree(process.pid), [0.0]
    os.set_blocking(process.stdout.fileno(), False)
    while not read_line(process):
        cpu_times.append(read(tree).cpu_s)
    cpu_times += [read(tree).cpu_s for _ in range(3)]
    assert cpu_times == sorted(cpu_times)
    times = psutil.Process(process.pid).cpu_times()
    assert cpu_times[-1] == pytest.approx(
        times.user + times.system + times.children_user + times.children_system, abs=0.04
    )


def test_cpu_time_of_children_is_kept_when_they_are_never_reaped(start: Start) -> None:
    program = (
        "import os, signal, subprocess, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-I', '-c', sys.argv[1] + 'input()'], stdin=subprocess.PIPE)\n"
        "sys.stdin.readline()\n"
        "child.stdin.close()\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program, BURN)
    tree = ProcessTree(process.pid)
    until(lambda: read(tree).cpu_s >= 0.08, "its child's work")
    before = read(tree).cpu_s
    send_line(process)
    until(lambda: read(tree).children == 0, "its child's end")
    assert [read(tree).cpu_s >= before for _ in range(7)] == [True] * 7


MANY = (
    "import ctypes, os, signal, sys\n"
    "libc, parent = ctypes.CDLL(None), os.getpid()\n"
    "for _ in range(int(sys.argv[1])):\n"
    "    if os.fork() == 0:\n"
    "        libc.prctl(1, 9, 0, 0, 0)\n"
    "        if os.getppid() != parent: os._exit(0)\n"
    "        while True: signal.pause()\n"
    "print('up', flush=True)\n"
    "sys.stdin.readline()\n"
)  # starts many children that end with their parent


def test_two_thousand_descendants_are_all_counted(start: Start) -> None:
    process = start(sys.executable, "-I", "-c", MANY, "2000")
    read_line(process)
    tree = ProcessTree(process.pid)
    assert [read(tree).children for _ in range(6)] == [2000] * 6
    assert len(tree.pids) == 2001
    assert read(tree).threads == 2001
    details = tree.read_details()
    assert details.open_files is not None
    assert details.open_files <= 5 * MOST_PROCESSES
    tree.close()


def test_all_descendants_are_counted_with_a_single_spare_descriptor(start: Start) -> None:
    process = start(sys.executable, "-I", "-c", MANY, "20")
    read_line(process)
    directory = f"/proc/{process.pid}/"
    with spare_descriptors(2):
        tree = ProcessTree(process.pid)
        samples = [read(tree) for _ in range(6)]
        details, survivors = tree.read_details(), tree.survivors()
    assert [(sample.children, sample.threads) for sample in samples] == [(20, 21)] * 6
    assert all(sample.io_read_bytes is not None for sample in samples)
    assert len(survivors) == 20
    assert details.pss_bytes is not None
    assert open_files(directory) == [f"{directory}stat"]
    tree.close()


def test_the_worker_is_read_without_a_spare_descriptor(start: Start) -> None:
    process = start(sys.executable, "-I", "-c", MANY, "20")
    read_line(process)
    with spare_descriptors(1):
        tree = ProcessTree(process.pid)
        sample, details, survivors = read(tree), tree.read_details(), tree.survivors()
    assert (sample.children, sample.threads, survivors) == (0, 1, ())
    assert sample.rss_bytes > 1 << 20
    assert details.open_files is None
    until(lambda: read(tree).children == 20, "its children, now that there are descriptors")
    with spare_descriptors(0):
        held = read(tree)
        process.kill()
        process.wait()
        assert tree.read() is None
    assert held.children == 20
    tree.close()


def test_a_lack_of_descriptors_is_not_mistaken_for_the_end_of_a_worker(start: Start) -> None:
    process = start("sleep", "60")
    with spare_descriptors(0), pytest.raises(OSError, match="Too many open files") as raised:
        ProcessTree(process.pid)
    assert raised.value.errno == errno.EMFILE
    assert not isinstance(raised.value, ProcessLookupError)


def start_with_pid(pid: int) -> psutil.Process:
    """Start a process with the pid of an ended one (clone3 with set_tid): no other process can come first."""
    wanted = (ctypes.c_int * 1)(pid)
    # flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup
    values = (ctypes.c_uint64 * 11)(*[0] * 4, signal.SIGCHLD, *[0] * 3, ctypes.addressof(wanted), 1)
    libc = ctypes.PyDLL(None, use_errno=True)  # with the lock of the interpreter, which a child could not get back
    started = libc.syscall(CLONE3, values, ctypes.sizeof(values))
    if started == 0:
        os.execvp("sleep", ["sleep", "60"])  # noqa: S606
    if started < 0 and ctypes.get_errno() == errno.EPERM:
        pytest.skip("this user cannot choose pids here")
    assert started == pid, os.strerror(ctypes.get_errno())
    return psutil.Process(pid)


@pytest.mark.parametrize("descriptors", [None, 3], ids=["kept", "not kept"])
def test_a_recycled_pid_is_not_mistaken_for_the_worker(start: Start, descriptors: int | None) -> None:
    parent = start("sh", "-c", "sleep 60 & echo $!; wait; read line")
    child = int(read_line(parent))
    with spare_descriptors(descriptors) if descriptors else contextlib.nullcontext():
        tree, own = ProcessTree(parent.pid), ProcessTree(child)
        before = read(tree)
    assert before.children == 1
    time.sleep(2 / CLOCK_TICKS)
    os.kill(child, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{child}").exists(), "the reaping of the child")
    other = start_with_pid(child)
    try:
        assert own.read() is None
        assert (read(tree).children, tree.survivors()) == (0, ())
        with pytest.raises(ProcessLookupError, match=f"^pid {child} now belongs to another process$"):
            ProcessTree(child, own.start_ticks)
        assert read_start_ticks(child) != own.start_ticks
        assert own.read_details() == ProcessDetails()
    finally:
        other.kill()
        other.wait()


def test_descendants_that_outlive_the_worker_are_survivors(start: Start) -> None:
    program = "sh -c 'sleep 60 & echo $!; wait' & setsid sleep 60 & wait"
    process = start("sh", "-c", program)
    grandchild = int(read_line(process))
    tree = ProcessTree(process.pid)
    until(lambda: read(tree).children == 3, "its descendants")
    watched = tree.pids - {process.pid}
    process.kill()
    process.wait()
    assert tree.read() is None
    assert set(tree.survivors()) == watched
    assert grandchild in watched
    for pid in watched:
        os.kill(pid, signal.SIGKILL)
    until(lambda: tree.survivors() == (), "their ends")
    tree.close()
    assert tree.survivors() == ()
    assert tree.read() is None


def test_a_survivor_is_followed_without_a_fall_of_what_was_counted(start: Start) -> None:
    """The worker has two children, and one of them has a child and continues."""
    code = (
        "import os, sys, time\n"
        "while time.process_time() < 0.3: pass\n"
        "os.fork() or time.sleep(600)\n"
        "followed = os.fork()\n"
        "if not followed:\n"
        "    os.fork()\n"
        "    time.sleep(600)\n"
        "print(followed, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = start(sys.executable, "-I", "-c", code)
    followed = int(read_line(process))
    tree = ProcessTree(process.pid)
    sample = until(lambda: (found := tree.read()) and found.children == 3 and found, "all processes")
    everyone = tree.pids
    try:
        process.kill()
        process.wait()
        assert tree.read() is None
        assert tree.follow(followed)
        assert (tree.pid, tree.start_ticks) == (followed, read_start_ticks(followed))
        later = read(tree)
        assert (later.children, later.threads) == (1, 2)
        assert sample.cpu_s >= 0.2
        assert later.cpu_s >= sample.cpu_s
        assert 0 < later.rss_bytes < sample.rss_bytes
        assert len(tree.pids) == 2
        assert not tree.follow(process.pid), "it has ended"
    finally:
        for pid in everyone - {process.pid}:
            os.kill(pid, signal.SIGKILL)
        tree.close()
    assert not any(open_files(f"/proc/{pid}/") for pid in everyone)


def test_a_zombie_is_not_a_survivor(start: Start) -> None:
    process = start(sys.executable, "-I", "-c", "import os, sys\nif os.fork(): sys.stdin.readline()")
    tree = ProcessTree(process.pid)
    until(lambda: read(tree).children == 1, "its child")
    until(lambda: tree.survivors() == (), "the end of its child")
    assert read(tree).children == 1, "it has not been reaped"


def test_details_include_the_worker_and_its_child(start: Start, tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "held = [open(sys.argv[1], 'a'), open(sys.argv[1], 'a'), open(sys.argv[1] + '2', 'a')]\n"
        "child = subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL)\n"
        "print('up', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program, str(tmp_path / "a file"))
    read_line(process)
    tree, other = ProcessTree(process.pid), psutil.Process(process.pid)
    until(lambda: read(tree).state == "sleeping", "the end of its work")
    (child,) = other.children()
    until(lambda: child.name() == "sleep" and child.status() == "sleeping", "its child")
    details = tree.read_details()
    assert details.pss_bytes == pytest.approx(other.memory_full_info().pss + child.memory_full_info().pss, rel=0.3)
    assert details.open_files == len(os.listdir(f"/proc/{process.pid}/fd")) + 3
    assert details.voluntary_switches is not None
    assert details.voluntary_switches == other.num_ctx_switches().voluntary + child.num_ctx_switches().voluntary
    assert details.paths == (str(tmp_path / "a file"), str(tmp_path / "a file2"))
    assert details.devices == ()
    child.kill()
    until(lambda: read(tree).children == 0 or child.status() == "zombie", "the end of its child")
    after = tree.read_details()
    assert after.voluntary_switches is not None
    assert after.voluntary_switches >= details.voluntary_switches


def test_details_are_bounded(start: Start, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "held = [open(f'{sys.argv[1]}/{at}', 'w') for at in range(300)]\n"
        "print('up', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = start(sys.executable, "-I", "-c", program, str(tmp_path))
    read_line(process)
    tree = ProcessTree(process.pid)
    with mock.patch.object(os, "readlink", side_effect=os.readlink) as readlink:
        details = tree.read_details()
    assert details.open_files == 303
    assert len(details.paths) == MOST_LINKS // 2 - 3 < MOST_PATHS
    assert readlink.call_count <= MOST_LINKS


def test_details_list_devices_of_any_process_and_no_sockets(tmp_path: Path) -> None:
    links = {
        7: ["/dev/null", "/dev/nvidiactl", "socket:[5]", "/data/out 1.jsonl", "/data/gone (deleted)", "/memfd:x"],
        8: ["/dev/nvidia1", "/dev/nvidiactl", "/data/other"],
    }
    for pid, targets in links.items():
        folder = show_process(tmp_path, pid, parent=1 if pid == 7 else 7)
        (folder / "fd").mkdir()
        for at, target in enumerate(targets):
            (folder / "fd" / str(at)).symlink_to(target)
    tree = ProcessTree(7, proc=str(tmp_path))
    assert read(tree).children == 1
    details = tree.read_details()
    assert details.devices == ("/dev/nvidia1", "/dev/nvidiactl")
    assert details.paths == ("/data/out 1.jsonl",)
    assert (details.pss_bytes, details.voluntary_switches) == (None, None)
    tree.close()


def test_values_that_another_user_cannot_read_are_none(start: Start) -> None:
    process, ended = start("sleep", "60"), start("true")
    until(lambda: psutil.Process(ended.pid).status() == "zombie", "the end of true")
    ticks = read_start_ticks(ended.pid)
    with another_user():
        tree = ProcessTree(process.pid)
        sample, details = read(tree), tree.read_details()
        environment, status = read_environment(process.pid, ["PATH"]), read_zombie_status(ended.pid, ticks)
    assert sample.threads == 1
    assert (sample.io_read_bytes, sample.io_write_bytes) == (None, None)
    assert (details.pss_bytes, details.open_files, details.paths, details.devices) == (None, None, (), ())
    assert details.voluntary_switches is not None
    assert environment is None
    assert status is None, "the kernel shows 0, which would be a success"
    assert read_zombie_status(ended.pid, ticks) == 0


def test_an_expensive_memory_read_is_followed_by_a_pause(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process, clock, sizes = start("sleep", "60"), [1000.0], iter([5, 6, 7])

    def walk(folder: str) -> int:
        clock[0] += 0.02
        return next(sizes)

    monkeypatch.setattr(process_tree, "_read_pss_bytes", walk)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    tree = ProcessTree(process.pid)
    results = []
    for _ in range(4):
        results.append(tree.read_details().pss_bytes)
        clock[0] += 15
    assert results == [5, 5, 5, 6]


def test_a_sum_that_took_too_long_is_tried_again_once_the_memory_has_halved(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, clock, walks = start("sleep", "60"), [1000.0], list[float]()

    def walk(folder: str) -> int:
        walks.append(clock[0])
        clock[0] += 0.5 if len(walks) == 1 else 0.1
        return 5

    tree = ProcessTree(process.pid)
    until(lambda: read(tree).rss_bytes, "its memory")  # it has none for a moment at its start
    monkeypatch.setattr(process_tree, "_read_pss_bytes", walk)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    for _ in range(5):
        assert tree.read_details().pss_bytes is None
        clock[0] += 1e5
    assert len(walks) == 1
    tree._costly_rss_pages *= 2
    assert tree.read_details().pss_bytes == 5
    clock[0] += 1e5
    tree.read_details()
    assert len(walks) == 3
    tree.close()


@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$", "kill -15 $$"])
def test_a_zombie_has_its_exit_status(start: Start, end: str) -> None:
    process = start("sh", "-c", f"read line; {end}")
    ticks = read_start_ticks(process.pid)
    assert read_zombie_status(process.pid, ticks) is None
    send_line(process)
    until(lambda: psutil.Process(process.pid).status() == "zombie", "its end")
    status = read_zombie_status(process.pid, ticks)
    assert status is not None
    assert read_zombie_status(process.pid, (ticks or 0) - 1) is None, "a different start time means another process"
    assert os.waitstatus_to_exitcode(status) == process.wait()
    assert read_zombie_status(process.pid, ticks) is None


def test_only_the_requested_variables_are_returned(tmp_path: Path) -> None:
    values = {"RANK": "7", "EMPTY": "", "TOKEN": "secret", "Ü": "a=b\nc", "RANK2": "8"}
    process = subprocess.Popen(["sleep", "60"], env=values)
    try:
        wanted = ("RANK", "EMPTY", "Ü", "ABSENT")
        until(lambda: read_environment(process.pid, wanted) is not None, "its program")
        assert read_environment(process.pid, wanted) == {"RANK": "7", "EMPTY": "", "Ü": "a=b\nc"}
        assert read_environment(process.pid, ()) == {}
    finally:
        process.kill()
        process.wait()
    assert read_environment(process.pid, wanted) is None


def test_an_endless_environment_is_cut_between_two_variables(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    filler = b"X=" + b"x" * (MOST_ENVIRONMENT_BYTES - 12) + b"\0"
    (tmp_path / "7" / "environ").write_bytes(b"")
    assert read_environment(7, ("A",), str(tmp_path)) is None, "its program is still starting"
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0" + filler + b"RANK=7890\0B=2\0" * 100_000)
    assert read_environment(7, ("A", "RANK", "B"), str(tmp_path)) == {"A": "1"}


def test_a_recycled_pid_may_become_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files then have other inodes. A later thread started it, so no list of children shows it."""
    show_process(tmp_path, 7)
    show_process(tmp_path, 8)
    monkeypatch.setattr(ProcessTree, "SHARED_S", 0)
    tree = ProcessTree(7, proc=str(tmp_path))
    assert read(tree).children == 0
    (tmp_path / "8").rename(tmp_path / "old")
    show_process(tmp_path, 8, parent=7)
    assert max(read(tree).children for _ in range(ProcessTree.FULL_READ_EVERY)) == 1
    tree.close()


def test_an_orphan_of_an_earlier_process_with_the_pid_is_not_a_child(tmp_path: Path) -> None:
    """It was a child of an earlier process 7 and has belonged to init since."""
    show_process(tmp_path, 7)
    show_process(tmp_path, 8, parent=7)
    first = ProcessTree(7, proc=str(tmp_path))
    assert read(first).children == 1
    first.close()
    show_process(tmp_path, 8)
    second = ProcessTree(7, proc=str(tmp_path))
    assert read(second).children == 0
    second.close()


@dataclass
class Fake:
    """One process of a fake machine."""

    parent: int
    cpu: int = 0
    reaped: int = 0
    written: int = 0
    faults: int = 0
    zombie: bool = False


class FakeMachine:
    """Processes that start, work, end and are reaped, in a directory like ``/proc`` with the accounting of the kernel.

    As in ``/proc``, files of an ended process vanish, and reads through open descriptors fail.
    """

    WORKER = 100

    def __init__(self, folder: Path, *, waits: bool) -> None:
        self.folder, self.waits = folder, waits
        self.processes = {self.WORKER: Fake(1)}
        self.cpu = self.written = 0
        self._next = self.WORKER + 1
        self._show(self.WORKER)

    def _show(self, pid: int) -> None:
        fake, home = self.processes[pid], self.folder / str(pid)
        (home / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        state = "Z" if fake.zombie else "S"
        text = f"{pid} (a) b () {state} {fake.parent} 0 0 0 -1 0 {fake.faults} 0 0 0 {fake.cpu} 0 {fake.reaped} 0 20 0 "
        (home / "stat").write_text(f"{text}1 0 {pid} 4096 3 0\n", encoding="ascii")
        (home / "io").write_text(f"a: 1\nb: 2\nc: 3\nd: 4\nread_bytes: 0\nwrite_bytes: {fake.written}\nx: 0\n")
        children = [child for child, other in self.processes.items() if other.parent == pid]
        (home / "task" / str(pid) / "children").write_text(" ".join(map(str, children)), encoding="ascii")

    def act(self, action: str, at: int, amount: int) -> None:
        """Let one of the running processes do something."""
        living = [pid for pid, fake in self.processes.items() if not fake.zombie]
        pid = living[at % len(living)]
        fake = self.processes[pid]
        if action == "fork":
            self.processes[self._next] = Fake(pid)
            self._show(self._next)
            self._next += 1
        elif action == "compute":
            fake.cpu += amount
            self.cpu += amount
        elif action == "write":  # takes hardly any CPU time
            fake.written += amount
            self.written += amount
        elif pid != self.WORKER and (action == "abandon" or not self._children(pid)):
            self._end(pid)
            return
        fake.faults += action != "write"
        self._show(pid)

    def _children(self, pid: int) -> list[int]:
        return [child for child, other in self.processes.items() if other.parent == pid]

    def _end(self, pid: int) -> None:
        fake = self.processes[pid]
        fake.zombie = True
        for child in self._children(pid):
            self.processes[child].parent = 1
            if self.processes[child].zombie:
                self._reap(child)  # init reaps it
            else:
                self._show(child)
        self._show(pid)
        if fake.parent == 1 or not self.waits:
            self._reap(pid)

    def reap_all(self) -> None:
        """Let every parent reap its ended children."""
        for pid in [pid for pid, fake in self.processes.items() if fake.zombie]:
            fake = self.processes[pid]
            parent = self.processes[fake.parent]
            parent.reaped += fake.cpu + fake.reaped
            parent.written += fake.written
            parent.faults += 1
            self._show(fake.parent)
            self._reap(pid)

    def _reap(self, pid: int) -> None:
        home = self.folder / str(pid)
        for name in ("stat", "io", f"task/{pid}/children"):
            (home / name).unlink()
        (home / "task" / str(pid)).rmdir()
        (home / "task").rmdir()
        home.rmdir()
        parent = self.processes.pop(pid).parent
        if parent in self.processes:
            self._show(parent)


ACTIONS = st.tuples(
    st.integers(0, 8),
    st.sampled_from(["fork", "fork", "compute", "compute", "write", "end", "wait", "abandon"]),
    st.integers(0, 5),
    st.integers(1, 100),
)


@given(st.lists(ACTIONS, max_size=40), st.booleans())
# a parent reaps its child after its own read and before the read of the child
@example([(0, "fork", 0, 1), (2, "compute", 0, 1), (3, "compute", 1, 1), (2, "end", 1, 1), (3, "wait", 0, 1)], True)
# between two reads a child is reaped, and then its parent
@example(
    [
        *[(0, "fork", 0, 1), (0, "fork", 1, 1), (0, "compute", 2, 50), (0, "compute", 1, 30)],
        *[(12, "end", 2, 1), (0, "wait", 0, 1), (0, "end", 1, 1), (0, "wait", 0, 1)],
    ],
    True,
)
def test_totals_never_fall_or_exceed_the_truth_whatever_happens_during_a_read(
    actions: list[tuple[int, str, int, int]], waits: bool
) -> None:
    """Processes act between any two file reads of one sample. In the end all is counted unless one was abandoned."""
    exact = waits and all(action != "abandon" for _, action, _, _ in actions)
    pread, pending = os.pread, list(actions)
    with tempfile.TemporaryDirectory() as folder:
        machine = FakeMachine(Path(folder), waits=waits)
        countdown = pending[0][0] if pending else 0

        def pread_after_actions(fd: int, size: int, offset: int) -> bytes:
            nonlocal countdown
            while pending and countdown == 0:
                _, action, at, amount = pending.pop(0)
                machine.reap_all() if action == "wait" else machine.act(action, at, amount)
                countdown = pending[0][0] if pending else 0
            countdown -= 1
            if os.fstat(fd).st_nlink == 0:
                raise ProcessLookupError(errno.ESRCH, "No such process")
            return pread(fd, size, offset)

        tree = ProcessTree(machine.WORKER, proc=folder)
        last = (0, 0)
        with mock.patch.object(os, "pread", pread_after_actions), mock.patch.object(ProcessTree, "SHARED_S", 0):
            for _ in range(200):
                sample = read(tree)
                assert sample.io_write_bytes is not None
                now = (round(sample.cpu_s * CLOCK_TICKS), sample.io_write_bytes)
                assert last[0] <= now[0] <= machine.cpu
                assert last[1] <= now[1] <= machine.written
                last = now
                if not pending:
                    break
            for _ in range(2 * ProcessTree.FULL_READ_EVERY):
                sample = read(tree)
        tree.close()
        assert sample.rss_bytes == 3 * PAGE_SIZE * (1 + sample.children)
        if exact:
            assert round(sample.cpu_s * CLOCK_TICKS) == machine.cpu
            assert sample.io_write_bytes == machine.written
            assert sample.children == len(machine.processes) - 1
